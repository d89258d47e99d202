# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Lepard finds the place: around the last pose first, then by searching the map; one look is never enough to jump."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import turned_poses
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.rigid.fallback import register_fpfh
from lepard_ros.registration.types import NO_MATCHES, Registration
from lepard_ros.tracking.follower import Follower
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, view_distances
from lepard_ros.tracking.places import most_similar
from lepard_ros.tracking.prior import align_from_guesses, determined, followed
from lepard_ros.tracking.sightings import Sighting, largest_group, preferred, same_place
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# Turns that are tried when nothing else leads anywhere: nodding and looking aside, in degrees.
WIDE_TURNS = turned_poses(nods=(-15.0, 0.0, 15.0), turns=(-36.0, -24.0, -12.0, 0.0, 12.0, 24.0, 36.0))
# Searched with one cloud (the next one goes on), and matched at once. A keyframe takes 0.1 to 0.2 CPU-s, most of it for
# the motion and not for the matches, and tracking waits meanwhile.
SEARCH_KEYFRAMES, SEARCH_BATCH = 16, 8
NEAREST_FIRST = 4  # keyframes around the last pose that are searched before the most similar ones


class _Pending(NamedTuple):
    """A place seen once while lost, that waits for a second look."""

    stamp: float
    pose: FloatArray
    view: View


class Relocaliser:
    """Finds the sensor where its motion does not lead to it."""

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
        """The sensor is found: the next search starts from the beginning."""
        self._pending: list[_Pending] = []
        self._searched = 0  # how far a search over several clouds has come

    def look_around(self, view: View, stamp: float, guesses: Sequence[FloatArray]) -> list[Sighting]:
        """Match the keyframes that should see most of the cloud if the sensor moved on as before."""
        if not guesses:
            return []
        frames = self._follower.candidates(view, guesses[0], self.settings.candidates)
        rule = followed(self._rigid) if self._follower.recent(stamp) else self._rigid
        sightings = self._sight(view, frames, guesses, rule)
        if any(sighting.registration.ok for sighting in sightings):
            return sightings
        return [self._look_wider(view, sighting, guesses[-1]) for sighting in sightings]

    def search(self, view: View, tried: list[Sighting]) -> list[Sighting]:
        """Match keyframes batch by batch until two agree; a large map is searched over several clouds.

        What is searched is counted and not timed, so that a slow machine finds the same places as a fast one.
        """
        frames = self._search_order(view)
        limit = min(len(frames), self._searched + SEARCH_KEYFRAMES)
        sightings = [sighting for sighting in tried if sighting.registration.ok]
        while self._searched < limit and len(largest_group(sightings)) < 2:
            batch = frames[self._searched : min(self._searched + SEARCH_BATCH, limit)]
            sightings += self._sight(view, batch, [], self._rigid)
            self._searched += len(batch)
        self._searched %= len(frames)
        return sightings or tried

    def confirm(self, view: View, sightings: list[Sighting], stamp: float) -> Sighting | None:
        """A place found by a search, once two keyframes or two clouds agree on it: one look may be a mistake."""
        group = largest_group(sightings)
        if not group:
            return None
        best, pose = group[0], group[0].pose
        frames = {sighting.keyframe.id for sighting in group}
        if pose is None or len(frames) > 1 or any(self._second_look(view, pose, stamp, p) for p in self._pending):
            return best
        self._pending = [*self._pending[-2:], _Pending(stamp, pose, view)]
        return None

    def why(self, sightings: list[Sighting]) -> str:
        """Why no sighting is believed."""
        if any(sighting.registration.ok for sighting in sightings):
            return "a place was found, and waits for a second look"
        best = max(sightings, key=lambda s: s.registration.overlap, default=None)
        count = len(self._map.keyframes)
        searched = f"searched {min(SEARCH_KEYFRAMES, count)} of {count} keyframes"
        return f"{best.registration.status.value} ({searched})" if best else searched

    def _sight(
        self, view: View, frames: Sequence[Keyframe], guesses: Sequence[FloatArray], rule: RigidSettings
    ) -> list[Sighting]:
        """What each keyframe says: the network's motions in one batch, and those from the guesses beside them."""
        clouds = [frame.view.encode(self._matcher) for frame in frames]
        matched = self._matcher.register_many(view.encode(self._matcher), clouds)
        matched = [determined(view.surface, frame.surface, m) for frame, m in zip(frames, matched, strict=True)]
        for place, frame in enumerate(frames if guesses else []):
            matched[place] = self._try_guesses(view, frame, matched[place], guesses, rule)
            if matched[place].ok:
                break  # the keyframe that promised most; the others need not be tried
        if self.settings.fallback == "fpfh" and not any(motion.ok for motion in matched):
            matched = [self._fall_back(view, *pair) for pair in zip(frames, matched, strict=True)]
        return [Sighting(frame, motion) for frame, motion in zip(frames, matched, strict=True)]

    def _look_wider(self, view: View, refused: Sighting, last: FloatArray) -> Sighting:
        """The same keyframe once more, in case the sensor was turned sharply: guesses all around the last pose."""
        motion = self._try_guesses(view, refused.keyframe, refused.registration, list(last @ WIDE_TURNS), self._rigid)
        return Sighting(refused.keyframe, motion)

    def _try_guesses(
        self, view: View, frame: Keyframe, matched: Registration, guesses: Sequence[FloatArray], rule: RigidSettings
    ) -> Registration:
        motions = invert(frame.pose) @ np.array(guesses)
        expected = align_from_guesses(view.surface, frame.surface, motions, matched.matches, rule)
        return preferred(expected, matched)

    def _fall_back(self, view: View, frame: Keyframe, refused: Registration) -> Registration:
        """Classical features, where all of the network's motions were refused."""
        found = register_fpfh(view.surface, frame.surface, self._rigid)
        second = determined(view.surface, frame.surface, found)
        return second if second.ok else refused

    def _search_order(self, view: View) -> list[Keyframe]:
        """All keyframes: a few around the last known view, then by how much they look like the cloud.

        Without descriptors by their distance from the last view; the newest first where there is none.
        """
        frames = list(self._map.keyframes)[::-1]
        start = self._follower.last_seen()
        if start is not None:
            poses = np.array([frame.pose for frame in frames])
            order = np.argsort(view_distances(poses, start), kind="stable")
            frames = [frames[index] for index in order]
        view.encode(self._matcher)
        alike = most_similar(view.descriptor, [frame.view.descriptor for frame in frames], len(frames))
        if not alike:
            return frames
        first = frames[: NEAREST_FIRST if start is not None else 0]
        return first + [frames[index] for index in alike if index >= len(first)]

    def _second_look(self, view: View, pose: FloatArray, stamp: float, pending: _Pending) -> bool:
        """Whether two clouds, each placed by the map alone, also lie on each other as the map says."""
        if not self._follower.reachable(pending.stamp, pending.pose, stamp, pose):
            return False
        guess = invert(pending.pose) @ pose
        direct = align_from_guesses(view.surface, pending.view.surface, guess[None], NO_MATCHES, self._rigid)
        return direct.transform is not None and same_place(direct.transform, guess)
