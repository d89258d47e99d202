# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Relocalisation with Lepard: around the last pose first, then in the whole map. A jump needs a second confirmation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import turned_poses
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.rigid.fallback import register_fpfh
from lepard_ros.registration.types import NO_MATCHES, Registration, Status
from lepard_ros.tracking.follower import Follower
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, distinct_views, view_distances
from lepard_ros.tracking.places import most_similar
from lepard_ros.tracking.pose_candidates import PoseCandidate, largest_group, same_place
from lepard_ros.tracking.prior import align_from_guesses, determined, followed, more_likely
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# Rotations (pitch and yaw, degrees) around the last pose that are tried when all other guesses fail.
WIDE_TURNS = turned_poses(nods=(-15.0, 0.0, 15.0), turns=(-36.0, -24.0, -12.0, 0.0, 12.0, 24.0, 36.0))
# Keyframes whose matches are compared per cloud (the next cloud continues), and those of them that are registered. A
# comparison takes about 0.015 CPU-s, a registration 0.15, and tracking waits meanwhile.
SEARCH_KEYFRAMES, SEARCH_REGISTERED = 16, 3
NEAREST_FIRST = 4  # keyframes around the last pose that are searched before the most similar ones
# Keyframes closer than this to one that is searched are left out (metres, with rotation converted): they show the same.
# In a map with a keyframe at every step the whole search would otherwise be spent on one place.
SEARCH_SPACING = 0.5
# A priori a cloud may be at any of up to MAX_PLACES places, so a pose found by a search needs more evidence, unless the
# sensor can have moved there since its last pose, at most MAX_SINCE_LAST seconds ago. In 16 views of the corridor of
# bench/walk.py wrong motions had log-odds of up to 2.8, the best right ones 3.7 to 7.5.
MAX_PLACES = 50
MAX_SINCE_LAST = 3.0
# A pose is ambiguous if another one was accepted with almost its overlap: the corners of a corridor look alike.
CLEARLY_WORSE = 0.1


class _Pending(NamedTuple):
    """A pose found once while lost, waiting for confirmation."""

    stamp: float
    pose: FloatArray
    view: View


class Relocaliser:
    """Finds the sensor when tracking has failed."""

    def __init__(
        self,
        matcher: "Matcher",
        keyframe_map: KeyframeMap,
        follower: Follower,
        settings: TrackerSettings,
        rigid: RigidSettings,
    ) -> None:
        """Search a map with a matcher."""
        self._matcher, self._map, self._follower = matcher, keyframe_map, follower
        self.settings, self._rigid = settings, rigid
        self.forget()

    def forget(self) -> None:
        """Reset the search, because the sensor was found."""
        self._pending: list[_Pending] = []
        self._search_index = 0  # progress of a search over several clouds

    def look_around(self, view: View, stamp: float, guesses: Sequence[FloatArray]) -> list[PoseCandidate]:
        """Match the keyframes with the largest predicted overlap at the predicted pose, and align from the guesses."""
        if not guesses:
            return []
        frames = self._follower.overlapping_keyframes(view, guesses[0], self.settings.candidates)
        rule = followed(self._rigid) if self._follower.recent(stamp) else self._rigid
        candidates = self._match_keyframes(view, frames, guesses, rule)
        if any(candidate.registration.ok for candidate in candidates):
            return candidates
        return [self._retry_wide(view, candidate, guesses[-1]) for candidate in candidates]

    def search(
        self, view: View, stamp: float, tried: list[PoseCandidate], doubted: bool = False
    ) -> list[PoseCandidate]:
        """Compare the matches of similar keyframes and register the best; a large map is searched over several clouds.

        doubted: the last pose may be wrong, so that the sensor may be anywhere.
        The limit is a count, not a time, so that the result does not depend on the speed of the machine.
        """
        frames = self._search_order(view, self._search_index + SEARCH_KEYFRAMES)
        if len(frames) <= self._search_index:
            self._search_index = 0  # all were searched
        frames = frames[self._search_index : self._search_index + SEARCH_KEYFRAMES]
        clouds = [frame.view.encode(self._matcher) for frame in frames]
        registered = self._matcher.register_best(view.encode(self._matcher), clouds, SEARCH_REGISTERED)
        found = self._verified(view, [frames[index] for index in registered], list(registered.values()))
        found = [candidate if self._likely(candidate, stamp, doubted) else _refused(candidate) for candidate in found]
        if not any(candidate.registration.ok for candidate in found):
            self._search_index += SEARCH_KEYFRAMES  # else the next cloud has to confirm it here
        return [candidate for candidate in tried if candidate.registration.ok] + found

    def _likely(self, candidate: PoseCandidate, stamp: float, doubted: bool = False) -> bool:
        """Whether the evidence for a pose outweighs its prior odds.

        Never where the sensor cannot be so soon after a pose that nobody doubts: the back of a cabinet may look like
        its front.
        """
        if self._follower.reachable_from_last(candidate, stamp, MAX_SINCE_LAST):
            return True
        if not doubted and self._follower.recent(stamp, MAX_SINCE_LAST):
            return False
        return candidate.registration.quality >= np.log(min(len(self._map.keyframes), MAX_PLACES))

    def confirm(self, view: View, candidates: list[PoseCandidate], stamp: float) -> PoseCandidate | None:
        """Return a pose once two keyframes or two clouds agree on it: a single match may be wrong.

        Never where another pose is almost as good.
        """
        group = largest_group(candidates)
        if not group or _ambiguous(group, candidates):
            return None
        best, pose = group[0], group[0].pose
        frames = {candidate.keyframe.id for candidate in group}
        if pose is None or len(frames) > 1 or any(self._confirms(view, pose, stamp, p) for p in self._pending):
            return best
        self._pending = [*self._pending[-2:], _Pending(stamp, pose, view)]
        return None

    def failure_reason(self, candidates: list[PoseCandidate]) -> str:
        """Why no candidate was accepted."""
        if any(candidate.registration.ok for candidate in candidates):
            return "a pose was found and awaits confirmation"
        best = max(candidates, key=lambda s: s.registration.overlap, default=None)
        count = len(self._map.keyframes)
        searched = f"searched {min(SEARCH_KEYFRAMES, count)} of {count} keyframes"
        return f"{best.registration.status.value} ({searched})" if best else searched

    def _match_keyframes(
        self, view: View, frames: Sequence[Keyframe], guesses: Sequence[FloatArray], rule: RigidSettings
    ) -> list[PoseCandidate]:
        """Match each keyframe in one batch, and refine from the guesses where there are any."""
        clouds = [frame.view.encode(self._matcher) for frame in frames]
        matched = self._matcher.register_many(view.encode(self._matcher), clouds)
        return self._verified(view, frames, matched, guesses, rule)

    def _verified(
        self,
        view: View,
        frames: Sequence[Keyframe],
        matched: list[Registration],
        guesses: Sequence[FloatArray] = (),
        rule: RigidSettings | None = None,
    ) -> list[PoseCandidate]:
        """Registrations by matches, without unconstrained ones, plus those from the guesses and the fallback."""
        matched = [determined(view.surface, frame.surface, m) for frame, m in zip(frames, matched, strict=True)]
        for place, frame in enumerate(frames if len(guesses) else []):
            matched[place] = self._try_guesses(view, frame, matched[place], guesses, rule or self._rigid)
            if matched[place].ok:
                break  # keyframes are sorted by predicted overlap: the others need not be tried
        if self.settings.fallback == "fpfh" and not any(motion.ok for motion in matched):
            matched = [self._fall_back(view, *pair) for pair in zip(frames, matched, strict=True)]
        return [PoseCandidate(frame, motion) for frame, motion in zip(frames, matched, strict=True)]

    def _retry_wide(self, view: View, refused: PoseCandidate, last: FloatArray) -> PoseCandidate:
        """Try the same keyframe again with guesses all around the last pose, in case the sensor turned sharply."""
        motion = self._try_guesses(view, refused.keyframe, refused.registration, list(last @ WIDE_TURNS), self._rigid)
        return PoseCandidate(refused.keyframe, motion)

    def _try_guesses(
        self, view: View, frame: Keyframe, matched: Registration, guesses: Sequence[FloatArray], rule: RigidSettings
    ) -> Registration:
        motions = invert(frame.pose) @ np.array(guesses)
        expected = align_from_guesses(view.surface, frame.surface, motions, matched.matches, rule, matched.transform)
        return more_likely(view.surface, frame.surface, expected, matched, rule)

    def _fall_back(self, view: View, frame: Keyframe, refused: Registration) -> Registration:
        """Try FPFH features after all of the network's motions were refused."""
        found = register_fpfh(view.surface, frame.surface, self._rigid)
        second = determined(view.surface, frame.surface, found)
        return second if second.ok else refused

    def _search_order(self, view: View, count: int) -> list[Keyframe]:
        """At most `count` keyframes of distinct views: around the last known pose first, then by descriptors.

        Without descriptors, by distance from the last pose; without a last pose, newest first.
        """
        frames = list(self._map.keyframes)[::-1]
        start = self._follower.search_start()
        if start is not None:
            poses = np.array([frame.pose for frame in frames])
            order = np.argsort(view_distances(poses, start), kind="stable")
            frames = [frames[index] for index in order]
        for shown in (view, *(frame.view for frame in frames)):
            shown.encode(self._matcher)  # a keyframe whose background job still waits has no descriptor yet
        alike = most_similar(view.descriptor, [frame.view.descriptor for frame in frames], len(frames))
        first = NEAREST_FIRST if start is not None else 0
        if alike:
            frames = frames[:first] + [frames[index] for index in alike if index >= first]
        return distinct_views(frames, SEARCH_SPACING, count)

    def _confirms(self, view: View, pose: FloatArray, stamp: float, pending: _Pending) -> bool:
        """Whether direct alignment of two clouds agrees with the poses that were found for them in the map."""
        if not self._follower.reachable(pending.stamp, pending.pose, stamp, pose):
            return False
        guess = invert(pending.pose) @ pose
        direct = align_from_guesses(view.surface, pending.view.surface, guess[None], NO_MATCHES, self._rigid)
        return direct.transform is not None and same_place(direct.transform, guess)


def _ambiguous(group: list[PoseCandidate], candidates: list[PoseCandidate]) -> bool:
    """Whether a candidate outside the group was accepted with almost the overlap of the best one in it."""
    others = [candidate for candidate in candidates if candidate.registration.ok and candidate not in group]
    return any(other.registration.overlap > group[0].registration.overlap - CLEARLY_WORSE for other in others)


def _refused(candidate: PoseCandidate) -> PoseCandidate:
    """The candidate without its pose."""
    refused = replace(candidate.registration, transform=None, covariance=None, status=Status.TOO_FEW_INLIERS)
    return PoseCandidate(candidate.keyframe, refused if candidate.registration.ok else candidate.registration)
