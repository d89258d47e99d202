# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the second worker does for a new keyframe: features, edges to its neighbours, loops, and a check of its pose.

It works on a snapshot of the map, so tracking goes on meanwhile; the same snapshot always gives the same answer.
"""

from typing import TYPE_CHECKING, NamedTuple

from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.types import NO_MATCHES, Registration
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer
from lepard_ros.tracking.places import most_similar
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.prior import align_from_guesses, determined
from lepard_ros.tracking.track import TrackerSettings

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

LOOP_CANDIDATES = 3  # old keyframes that a new one is matched with
MIN_SHARED = 0.25  # predicted overlap from which two keyframes are worth an edge
# How far a loop may contradict the map so far: the drift that a tracker can have gathered.
LOOP_DRIFT = 0.3  # metres, at any distance
LOOP_DRIFT_PER_STEP = 0.03  # metres for every keyframe in between
LOOP_DRIFT_DEGREES = 20.0
# The network contradicts a tracked pose only by more than its own motions of views with little overlap are wrong.
DISPUTED = 0.3  # metres
DISPUTED_DEGREES = 15.0
SIMILAR_PLACES = 2  # old keyframes that are tried because they look alike, wherever the map puts them


class Study(NamedTuple):
    """edges: measured motions from the new keyframe to others. disputed: the network contradicts the tracked pose."""

    edges: list[Edge]
    disputed: bool


class Student:
    """Studies new keyframes."""

    def __init__(self, matcher: "Matcher", settings: TrackerSettings, rigid: RigidSettings) -> None:
        """How motions are aligned and judged is the tracker's business too: the same settings."""
        self._matcher, self.settings, self._rigid = matcher, settings, rigid

    def study(self, frame: Keyframe, known: Keyframe, keyframes: KeyframeBuffer) -> Study:
        """Encode a new keyframe and tie it to the others. known: the keyframe that it was tracked from."""
        frame.view.encode(self._matcher)
        disputed = self._disputed(frame, known)
        if not self.settings.loop_closures or disputed:
            return Study([], disputed)
        near = self._near(frame, known, keyframes)
        measured = [self._aligned(frame, other) for other in near]
        # The map may have drifted too far for a guess to lead anywhere: then the network has to find the loop.
        unsure = [other for other, found in zip(near, measured, strict=True) if not found.ok]
        unsure += [other for other in self._similar(frame, keyframes) if other not in near and other.id != known.id]
        found = [*zip(near, measured, strict=True), *zip(unsure, self._matched(frame, unsure), strict=True)]
        return Study([self._edge(frame, *pair) for pair in found if self._credible(frame, *pair)], False)

    def _disputed(self, frame: Keyframe, known: Keyframe) -> bool:
        """Whether the network is sure that the new keyframe is elsewhere than where it was tracked to."""
        (motion,) = self._matched(frame, [known])
        if motion.transform is None:
            return False
        distance, turn = motion_between(known.pose @ motion.transform, frame.pose)
        return distance > DISPUTED or turn > DISPUTED_DEGREES

    def _near(self, frame: Keyframe, known: Keyframe, keyframes: KeyframeBuffer) -> list[Keyframe]:
        """Old keyframes that should see the same surface, most of it first."""
        rated = keyframes.by_overlap(frame.surface, frame.pose, slack=0.1)
        old = [other for share, other in rated if share > MIN_SHARED and self._is_old(frame, other)]
        return [other for other in old if other.id != known.id][:LOOP_CANDIDATES]

    def _similar(self, frame: Keyframe, keyframes: KeyframeBuffer) -> list[Keyframe]:
        """Old keyframes that look most alike, and that drift could have brought here."""
        old = [other for other in keyframes if self._is_old(frame, other) and self._within_drift(frame, other)]
        best = most_similar(frame.view.descriptor, [other.view.descriptor for other in old], SIMILAR_PLACES)
        return [old[index] for index in best]

    def _within_drift(self, frame: Keyframe, other: Keyframe) -> bool:
        """Whether two keyframes could see the same, given how far the map may have drifted between them."""
        distance, _ = motion_between(frame.pose, other.pose)
        return distance < self._drift(frame, other) + 1.0

    def _drift(self, frame: Keyframe, other: Keyframe) -> float:
        return LOOP_DRIFT + LOOP_DRIFT_PER_STEP * (frame.id - other.id)

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
        return align_from_guesses(frame.surface, other.surface, guess[None], NO_MATCHES, self._rigid)

    def _edge(self, frame: Keyframe, other: Keyframe, motion: Registration) -> Edge:
        if motion.transform is None or motion.covariance is None:
            raise ValueError("an edge needs an accepted registration")
        return Edge(frame.id, other.id, motion.transform, motion.covariance, loop=True)

    def _credible(self, frame: Keyframe, other: Keyframe, motion: Registration) -> bool:
        """Whether a motion was accepted and contradicts the map by no more than drift can explain."""
        if motion.transform is None:
            return False
        distance, turn = motion_between(frame.pose, other.pose @ motion.transform)
        return distance < self._drift(frame, other) and turn < LOOP_DRIFT_DEGREES
