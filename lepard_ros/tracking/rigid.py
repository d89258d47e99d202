# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Follow a depth sensor through a rigid scene: every cloud gets a pose, or the plain word that it has none."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.registration.fallback import register_fpfh
from lepard_ros.registration.kabsch import invert
from lepard_ros.registration.rigid import RigidSettings
from lepard_ros.registration.types import FloatArray, Registration, StageClock
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer, view_distances
from lepard_ros.tracking.poses import compose_covariance, extrapolate, motion_between, turned_poses
from lepard_ros.tracking.prior import NO_MATCHES, align_from_guesses, followed
from lepard_ros.tracking.sightings import Sighting, largest_group, preferred, same_place
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState
from lepard_ros.tracking.views import View, see

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# What a sensor may do between two clouds on top of its speed: the error of two poses.
SLACK = 0.2  # metres
SLACK_DEGREES = 15.0
# Turns that are tried when nothing else leads anywhere: nodding and looking aside, in degrees.
WIDE_TURNS = turned_poses(nods=(-15.0, 0.0, 15.0), turns=(-36.0, -24.0, -12.0, 0.0, 12.0, 24.0, 36.0))
FOLLOW_SECONDS = 0.5  # for so long after a pose the sensor counts as followed
STAY = 0.05  # how much more overlap another keyframe must promise before it is matched instead of the last one


class _Pending(NamedTuple):
    """A place seen once while lost, that waits for a second look."""

    stamp: float
    pose: FloatArray
    view: View


class RigidTracker:
    """A sensor's pose over time, from its clouds alone."""

    def __init__(
        self, matcher: "Matcher", settings: TrackerSettings | None = None, rigid: RigidSettings | None = None
    ) -> None:
        """A tracker without a map. rigid: how motions are aligned and judged."""
        self.matcher = matcher
        self.settings = settings or TrackerSettings()
        self._rigid = rigid or RigidSettings()
        self._followed = followed(self._rigid)
        self.reset()

    def process(self, points: FloatArray, stamp: float) -> Track:
        """Where the sensor was when it saw a cloud.

        points: (N, 3) metres in the sensor's frame, or organised (H, W, 3) with NaN. stamp: seconds.
        """
        clock = StageClock()
        view, problem = self._see(points)
        clock.stop("encode")
        if view is None:
            return self._unknown(stamp, problem, [], clock)
        if not len(self.keyframes):
            return self._begin(view, stamp, clock)
        sightings = self._look_around(view, stamp)
        clock.stop("track")
        believed = self._expected(sightings, stamp)
        if believed is None:
            sightings = self._search(view, sightings)
            believed = self._confirmed(view, sightings, stamp)
            clock.stop("search")
        if believed is None and self._unproven():
            return self._begin_again(view, stamp, clock)
        if believed is None:
            return self._unknown(stamp, self._why(sightings), sightings, clock)
        return self._known(view, stamp, believed, clock)

    def reset(self) -> None:
        """Forget everything; the next cloud starts a new map."""
        self._map = KeyframeMap(self.matcher, self.settings, self._rigid)
        self._state = TrackingState.INITIALISING
        self._pending: list[_Pending] = []
        self._last_keyframe: int | None = None
        self._started_here = False  # the map was begun by this tracker, not loaded
        self._searched = 0  # how far a search over several clouds has come

    @property
    def keyframes(self) -> KeyframeBuffer:
        """The keyframes of the map."""
        return self._map.keyframes

    def map_points(self, spacing: float) -> FloatArray:
        """The map on a grid of `spacing` metres: (N, 3)."""
        return self._map.points(spacing)

    def path(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Stamps (K,) and poses (K, 4, 4) of all accepted clouds, as corrected by loops so far."""
        return self._map.path.poses(self.keyframes)

    def save(self, directory: Path) -> None:
        """Write the map as one directory, all or nothing."""
        from lepard_ros.tracking.maps import save_map

        save_map(self._map, directory, self.matcher.weights_id)

    @classmethod
    def load(cls, directory: Path, matcher: "Matcher", settings: TrackerSettings | None = None) -> "RigidTracker":
        """A tracker that starts in a saved map, or in a plain cloud file (PLY, PCD, ...)."""
        from lepard_ros.tracking.maps import fill_map

        tracker = cls(matcher, settings)
        fill_map(tracker._map, Path(directory), matcher)
        return tracker

    def _see(self, points: FloatArray) -> tuple[View | None, str]:
        """The cloud ready for matching; or None and why not, since a sensor may well see nothing."""
        points = np.asarray(points)
        if points.ndim not in (2, 3) or points.shape[-1] != 3:
            raise InputError(f"A cloud must have shape (N, 3) or (H, W, 3), but has {points.shape}.")
        flat = points.reshape(-1, 3)
        flat = flat[np.isfinite(flat).all(axis=1)]
        if len(flat) < self._rigid.least_points:
            return None, f"the cloud has only {len(flat)} points"
        view = see(flat, self.matcher, self.settings.surface_spacing)
        if len(view.cloud.surface.points) < self._rigid.least_points:
            return None, f"the cloud covers only {len(view.cloud.surface.points)} cells of the grid"
        return view, ""

    def _begin(self, view: View, stamp: float, clock: StageClock) -> Track:
        """The first cloud of a new map."""
        if not self.settings.mapping:
            return self._unknown(stamp, "there is no map to localise in and mapping is off", [], clock)
        frame = self._map.begin(view, stamp)
        self._map.path.add(stamp, frame.id, np.eye(4))
        self._state, self._last_keyframe, self._started_here = TrackingState.OK, frame.id, True
        return Track(
            stamp=stamp,
            state=self._state,
            reason="the map starts here",
            pose=frame.pose,
            covariance=frame.covariance,
            keyframe_id=frame.id,
            keyframe_stamp=stamp,
            keyframe_pose=frame.pose,
            new_keyframe=True,
            seconds=clock.seconds,
        )

    def _unproven(self) -> bool:
        """Whether the map is one cloud that no other was ever registered to: no loss if it is given up."""
        return self._started_here and self.settings.mapping and len(self.keyframes) == 1 and len(self._map.path) == 1

    def _begin_again(self, view: View, stamp: float, clock: StageClock) -> Track:
        """Start the map anew. No pose comes of it: the next cloud has to be registered to this one first."""
        self.reset()
        self._begin(view, stamp, clock)
        self._state = TrackingState.INITIALISING
        reason = "the first cloud was not recognised again; the map starts anew here"
        return Track(stamp, self._state, reason, new_keyframe=True, seconds=clock.seconds)

    def _look_around(self, view: View, stamp: float) -> list[Sighting]:
        """Match the keyframes that should see most of the cloud if the sensor moved on as before."""
        guesses = self._guesses(stamp)
        if not guesses:
            return []
        rated = self.keyframes.by_overlap(view.surface, guesses[0])
        rated.sort(key=lambda pair: -pair[0] - (STAY if pair[1].id == self._last_keyframe else 0.0))
        frames = [frame for _, frame in rated[: self.settings.candidates]]
        frames = frames or [self.keyframes.nearest(guesses[0])]
        recent = abs(stamp - self._map.path.latest(self.keyframes, 1)[0][0]) <= FOLLOW_SECONDS
        sightings = self._sight(view, frames, guesses, recent)
        if any(sighting.registration.ok for sighting in sightings):
            return sightings
        return [self._look_wider(view, sighting, guesses[-1]) for sighting in sightings]

    def _look_wider(self, view: View, refused: Sighting, last: FloatArray) -> Sighting:
        """The same keyframe once more, in case the sensor was turned sharply: guesses all around the last pose."""
        motion = self._try_guesses(view, refused.keyframe, refused.registration, list(last @ WIDE_TURNS), self._rigid)
        return Sighting(refused.keyframe, motion)

    def _guesses(self, stamp: float) -> list[FloatArray]:
        """Poses that the motion so far suggests: gone on as before, or stood still. None after a while."""
        latest = self._map.path.latest(self.keyframes, 2)
        if not latest or abs(stamp - latest[0][0]) > self.settings.prior_seconds:
            return []
        if len(latest) == 1 or not 0 < latest[0][0] - latest[1][0] <= self.settings.prior_seconds:
            return [latest[0][1]]
        (last_stamp, last), (earlier_stamp, earlier) = latest
        share = min((stamp - last_stamp) / (last_stamp - earlier_stamp), 2.0)  # no sensor goes on for ever
        return [extrapolate(earlier, last, share), last]

    def _sight(
        self, view: View, frames: Sequence[Keyframe], guesses: Sequence[FloatArray], recent: bool = False
    ) -> list[Sighting]:
        """What each keyframe says: the network's motions in one batch, and those from the guesses beside them."""
        rule = self._followed if recent else self._rigid
        matched = self.matcher.register_many(view.cloud, [frame.cloud for frame in frames])
        for place, frame in enumerate(frames if guesses else []):
            matched[place] = self._try_guesses(view, frame, matched[place], guesses, rule)
            if matched[place].ok:
                break  # the keyframe that promised most; the others need not be tried
        if self.settings.fallback == "fpfh" and not any(motion.ok for motion in matched):
            matched = [self._fall_back(view, *pair) for pair in zip(frames, matched, strict=True)]
        return [Sighting(frame, motion) for frame, motion in zip(frames, matched, strict=True)]

    def _try_guesses(
        self, view: View, frame: Keyframe, matched: Registration, guesses: Sequence[FloatArray], rule: RigidSettings
    ) -> Registration:
        motions = invert(frame.pose) @ np.array(guesses)
        expected = align_from_guesses(view.surface, frame.surface, motions, matched.matches, rule)
        return preferred(expected, matched)

    def _fall_back(self, view: View, frame: Keyframe, refused: Registration) -> Registration:
        """Classical features, where all of the network's motions were refused."""
        second = register_fpfh(view.surface, frame.surface)
        return second if second.ok else refused

    def _expected(self, sightings: list[Sighting], stamp: float) -> Sighting | None:
        """The best sighting at a place that the sensor can have reached since its last pose."""
        latest = self._map.path.latest(self.keyframes, 1)
        if not latest:
            return None
        near = [s for s in sightings if s.pose is not None and self._reachable(*latest[0], stamp, s.pose)]
        group = largest_group(near)
        return group[0] if group else None

    def _reachable(self, since: float, start: FloatArray, stamp: float, pose: FloatArray) -> bool:
        """Whether the sensor can have come from one pose to another in the time between."""
        distance, turn = motion_between(start, pose)
        seconds = abs(stamp - since)
        near = distance <= SLACK + self.settings.max_speed * seconds
        return near and turn <= SLACK_DEGREES + self.settings.max_turn * seconds

    def _search(self, view: View, tried: list[Sighting]) -> list[Sighting]:
        """Match keyframes batch by batch until two agree; a large map is searched over several clouds.

        What is searched is counted and not timed, so that a slow machine finds the same places as a fast one.
        """
        if self._state is not TrackingState.INITIALISING:
            self._state = TrackingState.LOST  # even if it is found at once: users shall know that the pose may jump
        frames = self._search_order()
        limit = min(len(frames), self._searched + self.settings.search_keyframes)
        sightings = [sighting for sighting in tried if sighting.registration.ok]
        while self._searched < limit and len(largest_group(sightings)) < 2:
            batch = frames[self._searched : min(self._searched + self.settings.search_batch, limit)]
            sightings += self._sight(view, batch, [])
            self._searched += len(batch)
        self._searched %= len(frames)
        return sightings or tried

    def _search_order(self) -> list[Keyframe]:
        """All keyframes, those nearest to the last known view first; the newest first where there is none."""
        frames = list(self.keyframes)
        latest = self._map.path.latest(self.keyframes, 1)
        if not latest:
            return frames[::-1]
        order = np.argsort(view_distances(self.keyframes.poses(), latest[0][1]), kind="stable")
        return [frames[index] for index in order]

    def _confirmed(self, view: View, sightings: list[Sighting], stamp: float) -> Sighting | None:
        """A place found by a search, once two keyframes or two clouds agree on it: one look may be a mistake."""
        group = largest_group(sightings)
        if not group:
            return None
        best, pose = group[0], group[0].pose
        views = {sighting.keyframe.id for sighting in group}
        if pose is None or len(views) > 1 or any(self._second_look(view, pose, stamp, p) for p in self._pending):
            return best
        self._pending = [*self._pending[-2:], _Pending(stamp, pose, view)]
        return None

    def _second_look(self, view: View, pose: FloatArray, stamp: float, pending: _Pending) -> bool:
        """Whether two clouds, each placed by the map alone, also lie on each other as the map says."""
        if not self._reachable(pending.stamp, pending.pose, stamp, pose):
            return False
        guess = invert(pending.pose) @ pose
        direct = align_from_guesses(view.surface, pending.view.surface, guess[None], NO_MATCHES, self._rigid)
        return direct.transform is not None and same_place(direct.transform, guess)

    def _known(self, view: View, stamp: float, believed: Sighting, clock: StageClock) -> Track:
        """Take a sighting for true: the state, the path, and perhaps a new keyframe."""
        frame, motion = believed.keyframe, believed.registration
        if motion.transform is None or motion.covariance is None:
            raise ValueError("only an accepted registration can be believed")
        covariance = compose_covariance(frame.pose, frame.covariance, motion.transform, motion.covariance)
        recognised = self._state is TrackingState.INITIALISING and not self._started_here
        was_lost = self._state is TrackingState.LOST or recognised
        self._state = TrackingState.RELOCALISED if was_lost else TrackingState.OK
        self._last_keyframe, self._pending, self._searched = frame.id, [], 0
        self._map.path.add(stamp, frame.id, motion.transform)
        track = Track(
            stamp=stamp,
            state=self._state,
            reason=f"registered to keyframe {frame.id} ({motion.method})",
            pose=believed.pose,
            covariance=covariance,
            registration=motion,
            keyframe_id=frame.id,
            keyframe_stamp=frame.stamp,
            keyframe_pose=frame.pose,
            seconds=clock.seconds,
        )
        return self._grow(track, view, believed, clock) if self._worth_keeping(believed) and not was_lost else track

    def _worth_keeping(self, believed: Sighting) -> bool:
        """Whether a cloud shows enough that the map does not have yet, and is well enough placed to build on."""
        settings, motion = self.settings, believed.registration
        if not settings.mapping or motion.transform is None or motion.overlap < settings.keyframe_least_overlap:
            return False
        distance, turn = motion_between(np.eye(4), motion.transform)
        moved = distance > settings.keyframe_distance or turn > settings.keyframe_degrees
        differs = moved or motion.overlap < settings.keyframe_overlap
        return differs and not self._map.has_view(believed.keyframe.pose @ motion.transform, believed.keyframe)

    def _grow(self, track: Track, view: View, believed: Sighting, clock: StageClock) -> Track:
        """Make the cloud a keyframe; the map, and with it the pose, may be corrected by what it closes."""
        covariance = np.zeros((6, 6)) if track.covariance is None else track.covariance
        frame, closed = self._map.insert(view, track.stamp, believed.keyframe, believed.registration, covariance)
        self._map.path.anchor_last(frame)
        self._last_keyframe = frame.id
        clock.stop("map")
        return replace(
            track,
            pose=frame.pose,
            covariance=frame.covariance,
            keyframe_pose=believed.keyframe.pose,
            new_keyframe=True,
            loop_closed=closed,
        )

    def _unknown(self, stamp: float, reason: str, sightings: list[Sighting], clock: StageClock) -> Track:
        """No pose; the best refused registration comes along, for those who want to see why."""
        if len(self.keyframes) and self._state is not TrackingState.INITIALISING:
            self._state = TrackingState.LOST
        best = max(sightings, key=lambda s: s.registration.overlap, default=None)
        if best is None:
            return Track(stamp, self._state, reason, seconds=clock.seconds)
        return Track(
            stamp=stamp,
            state=self._state,
            reason=reason,
            registration=best.registration,
            keyframe_id=best.keyframe.id,
            keyframe_stamp=best.keyframe.stamp,
            keyframe_pose=best.keyframe.pose,
            seconds=clock.seconds,
        )

    def _why(self, sightings: list[Sighting]) -> str:
        """Why no sighting is believed."""
        if any(sighting.registration.ok for sighting in sightings):
            return "a place was found, and waits for a second look"
        best = max(sightings, key=lambda s: s.registration.overlap, default=None)
        searched = (
            f"searched {min(self.settings.search_keyframes, len(self.keyframes))} of {len(self.keyframes)} keyframes"
        )
        return f"{best.registration.status.value} ({searched})" if best else searched
