# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Background processing of a new keyframe: features, a check of its pose, edges to its neighbours, and loop closures.

It works on a snapshot of the map while tracking continues; the same snapshot always gives the same result.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.acceptance import agreeing_matches
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer
from lepard_ros.tracking.places import most_similar
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.prior import determined
from lepard_ros.tracking.remote_matcher import align_keyframes
from lepard_ros.tracking.track import TrackerSettings

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

LOOP_CANDIDATES = 3  # old keyframes that a new one is aligned with
# Beyond this length of path (metres, with rotation converted) a keyframe belongs to an earlier visit: farther than a
# depth camera sees. Only earlier visits correct drift, so they get their own share of the candidates.
REVISIT_DISTANCE = 6.0
REVISIT_CANDIDATES = 2
MIN_SHARED = 0.25  # minimum predicted overlap for an edge between two keyframes
# Maximum difference between a loop and the map: the drift that tracking can have accumulated.
LOOP_DRIFT = 0.3  # metres, at any distance
LOOP_DRIFT_SHARE = 0.1  # plus this share of the path in between
LOOP_DRIFT_DEGREES = 20.0
# The network disputes a tracked pose beyond these limits; below them its own error at low overlap may be the cause.
DISPUTED, DISPUTED_CELLS = 0.3, 6.0  # metres, or cells of the alignment grid if that is more (LiDAR)
DISPUTED_DEGREES = 15.0
# A tracked motion is not disputed if this share of the matches agrees with it, within AGREEMENT spacings.
MAJORITY, AGREEMENT = 0.5, 5.0
SIMILAR_PLACES = 2  # old keyframes that are tried by appearance, wherever the map puts them


class LoopResult(NamedTuple):
    """edges: relative motions from the new keyframe to others. disputed: the network contradicts the tracked pose."""

    edges: list[Edge]
    disputed: bool


class LoopCloser:
    """Checks new keyframes and finds loop closures."""

    def __init__(self, matcher: "Matcher", settings: TrackerSettings, rigid: RigidSettings) -> None:
        """rigid: the tracker's settings for aligning and accepting motions."""
        self._matcher, self.settings, self._rigid = matcher, settings, rigid

    def find_loops(self, frame: Keyframe, reference: Keyframe, keyframes: KeyframeBuffer) -> LoopResult:
        """Encode a new keyframe and find edges to the others. reference: the keyframe that it was tracked from."""
        frame.view.encode(self._matcher)
        disputed = self.is_disputed(frame, reference)
        if not self.settings.loop_closures or disputed:
            return LoopResult([], disputed)
        walked = keyframes.distances_walked()
        old = [other for other in keyframes if self._is_old(frame, other) and other.id != reference.id]
        earlier = [other for other in old if walked[other.id] > REVISIT_DISTANCE]
        recent = [other for other in old if walked[other.id] <= REVISIT_DISTANCE]
        near = self._near(frame, earlier, keyframes)[:REVISIT_CANDIDATES]
        near = [*near, *self._near(frame, recent, keyframes)][:LOOP_CANDIDATES]
        measured = [self._aligned(frame, other) for other in near]
        # The map may have drifted too far for ICP from the current poses; then the network has to find the loop.
        unresolved = [other for other, found in zip(near, measured, strict=True) if not found.ok]
        unresolved += [other for other in self._similar(frame, earlier, walked) if other not in near]
        found = [*zip(near, measured, strict=True), *zip(unresolved, self._matched(frame, unresolved), strict=True)]
        credible = [pair for pair in found if self._credible(frame, *pair, _drift(walked[pair[0].id]))]
        return LoopResult([self._edge(frame, *pair) for pair in credible], False)

    def is_disputed(self, frame: Keyframe, reference: Keyframe) -> bool:
        """Whether the network confidently places a cloud elsewhere than tracking did.

        frame: a new keyframe, or a tracked cloud that does not become one. reference: what it was tracked from.
        """
        (matches,) = self._matcher.match_many(frame.view.encode(self._matcher), [reference.view.encode(self._matcher)])
        tracked, radius = invert(reference.pose) @ frame.pose, AGREEMENT * reference.surface.spacing
        if np.sum(agreeing_matches(matches, tracked[None], radius)) > MAJORITY * max(len(matches.confidence), 1):
            return False  # no other motion can have as many inliers: the costly estimate is not needed
        (motion,) = self._matched(frame, [reference])
        if motion.transform is None:
            return False
        distance, turn = motion_between(reference.pose @ motion.transform, frame.pose)
        return distance > max(DISPUTED, DISPUTED_CELLS * reference.surface.spacing) or turn > DISPUTED_DEGREES

    def _near(self, frame: Keyframe, among: list[Keyframe], keyframes: KeyframeBuffer) -> list[Keyframe]:
        """Those of the keyframes with sufficient predicted overlap, largest first."""
        rated = keyframes.by_overlap(frame.surface, frame.pose, slack=0.1, among=among)
        return [other for share, other in rated if share > MIN_SHARED]

    def _similar(self, frame: Keyframe, among: list[Keyframe], walked: dict[int, float]) -> list[Keyframe]:
        """Those of the keyframes with the most similar descriptors, within the possible drift."""

        def may_show_the_same(other: Keyframe) -> bool:
            return motion_between(frame.pose, other.pose)[0] < _drift(walked[other.id]) + 1.0

        possible = [other for other in among if may_show_the_same(other)]
        best = most_similar(frame.view.descriptor, [other.view.descriptor for other in possible], SIMILAR_PLACES)
        return [possible[index] for index in best]

    def _matched(self, frame: Keyframe, others: list[Keyframe]) -> list[Registration]:
        if not others:
            return []
        clouds = [other.view.encode(self._matcher) for other in others]
        found = self._matcher.register_many(frame.view.encode(self._matcher), clouds)
        return [determined(frame.surface, other.surface, m) for other, m in zip(others, found, strict=True)]

    def _is_old(self, frame: Keyframe, other: Keyframe) -> bool:
        return frame.id - other.id > self.settings.loop_gap

    def _aligned(self, frame: Keyframe, other: Keyframe) -> Registration:
        guess = invert(other.pose) @ frame.pose
        return align_keyframes(self._matcher, frame.surface, other.surface, guess[None], self._rigid)

    def _edge(self, frame: Keyframe, other: Keyframe, motion: Registration) -> Edge:
        if motion.transform is None or motion.covariance is None:
            raise ValueError("an edge needs an accepted registration")
        return Edge(frame.id, other.id, motion.transform, motion.covariance, loop=True)

    def _credible(self, frame: Keyframe, other: Keyframe, motion: Registration, drift: float) -> bool:
        """Whether a motion was accepted and differs from the map by no more than the possible drift (metres)."""
        if motion.transform is None:
            return False
        distance, turn = motion_between(frame.pose, other.pose @ motion.transform)
        return distance < drift and turn < LOOP_DRIFT_DEGREES


def _drift(walked: float) -> float:
    """The possible drift in metres between two keyframes with a path of `walked` metres in between."""
    return LOOP_DRIFT + LOOP_DRIFT_SHARE * walked
