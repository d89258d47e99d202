# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Follow a depth sensor through a rigid scene: every cloud gets a pose, or the plain word that it has none.

Two workers: this one gives each cloud its pose from the motion so far; the other (`background`) runs the network for
keyframes, loops and the search for a lost sensor.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import compose_covariance, motion_between, velocity_between
from lepard_ros.registration.rigid.estimate import MIN_POINTS
from lepard_ros.registration.types import NO_MATCHES, Registration, StageClock, Status
from lepard_ros.tracking.background import Background
from lepard_ros.tracking.follower import FOLLOW_SECONDS, Follower
from lepard_ros.tracking.keyframe_map import SURFACE_SPACING, Correction, KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer, expected_overlap
from lepard_ros.tracking.loops import Student, Study
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.relocaliser import Relocaliser
from lepard_ros.tracking.sightings import Sighting, largest_group
from lepard_ros.tracking.state import Event, next_state
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState, Twist
from lepard_ros.tracking.views import View, live_points, see

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

KEYFRAME_MIN_OVERLAP = 0.12  # of a cloud that must lie on the map before it may extend it
TOO_FEW_POINTS = Registration(None, Status.TOO_FEW_POINTS, NO_MATCHES, np.zeros(0, dtype=bool))


class RigidTracker:
    """A sensor's pose over time, from its clouds alone."""

    def __init__(self, matcher: "Matcher", settings: TrackerSettings | None = None) -> None:
        """A tracker without a map. Motions are aligned and judged as the matcher's settings say."""
        self.matcher = matcher
        self.settings = settings or TrackerSettings()
        self.origin: FloatArray = np.eye(4)  # T_map_sensor of the cloud that starts a map
        self._background = Background(self.settings.threaded, self.settings.background_clouds)
        self.reset()

    def process(self, points: FloatArray, stamp: float, odometry: FloatArray | None = None) -> Track:
        """Where the sensor was when it saw a cloud.

        points: (N, 3) metres in the sensor's frame, or organised (H, W, 3) with NaN. stamp: seconds.
        odometry: (4, 4), the sensor in a frame that drifts but does not jump, to predict its motion from.
        """
        clock = StageClock()
        self._background.next_cloud()
        self._follower.note_stamp(stamp)
        view, problem = self._see(points)
        clock.stop("see")
        if view is None:
            return replace(self._unknown(stamp, problem, [], clock), registration=TOO_FEW_POINTS)
        if not len(self.keyframes):
            return self._begin(view, stamp, clock)
        guesses = self._follower.predict(stamp, odometry)
        believed = None if self._doubtful else self._follower.follow(view, stamp, guesses, odometry)
        clock.stop("track")
        event, sightings = Event.FOLLOWED, [believed] if believed else []
        if believed is None:
            believed, event, sightings = self._relocalise(view, stamp, guesses)
            clock.stop("search")
        if believed is None and self._unproven():
            return self._begin_again(view, stamp, clock)
        if believed is None:
            return self._unknown(stamp, self._relocaliser.why(sightings), sightings, clock)
        return self._known(view, stamp, believed, event, odometry, clock)

    def reset(self) -> None:
        """Forget everything, work under way included; the next cloud starts a new map."""
        rigid = self.matcher.settings.rigid
        self._background.drop()
        self._map = KeyframeMap(self.settings)
        self._follower = Follower(self._map, self.settings, rigid)
        self._relocaliser = Relocaliser(self.matcher, self._map, self._follower, self.settings, rigid)
        self._student = Student(self.matcher, self.settings, rigid)
        self._state = next_state(TrackingState.INITIALISING, Event.RESET)
        self._started_here = False  # the map was begun by this tracker, not loaded
        self._doubtful = False  # the network contradicts the motion: the next cloud is searched for
        self._optimising = self._stale = False  # an optimisation is under way; loops came since it began
        self._loop_closed = False  # a loop was closed and no track has told of it yet

    def apply(self, settings: TrackerSettings) -> None:
        """Change settings while tracking; the map keeps its bounds and its grid, the second worker its delay."""
        self.settings = self._map.settings = self._follower.settings = settings
        self._relocaliser.settings = self._student.settings = settings

    def relocalise(self, hint: FloatArray | None = None) -> None:
        """Keep the map but give up the pose: the next clouds are searched for in the map.

        hint: (4, 4) T_map_sensor, about where the sensor is; the search starts there.
        """
        self._state = next_state(self._state, Event.MISSED)
        self._relocaliser.forget()
        self._follower.give_up(hint)

    @property
    def may_begin(self) -> bool:
        """Whether the next cloud may start a map, at `origin`."""
        return len(self.keyframes) == 0 or self._unproven()

    @property
    def keyframes(self) -> KeyframeBuffer:
        """The keyframes of the map."""
        return self._map.keyframes

    def map_points(self, spacing: float) -> FloatArray:
        """The map on a grid of `spacing` metres: (N, 3)."""
        return self._map.points(spacing)

    def path(self, max_poses: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Stamps (K,) and poses (K, 4, 4) of the accepted clouds, as corrected by loops so far.

        max_poses: only so many of them, evenly chosen.
        """
        return self._map.path.poses(self.keyframes, max_poses)

    def edges(self) -> list[Edge]:
        """The measured motions between keyframes."""
        return list(self._map.graph.edges)

    def join(self, edges: list[Edge]) -> None:
        """Add measured motions between keyframes and optimise the map at once."""
        self._map.add_edges(edges)
        self._map.correct(self._map.correction()())
        self._follower.local_map.forget_surface()

    def finish(self) -> None:
        """Wait for the second worker and take in all that it found."""
        self._background.finish()

    def save(self, directory: Path) -> None:
        """Write the map as one directory, all or nothing."""
        from lepard_ros.tracking.maps import save_map

        self.finish()
        save_map(self._map, directory, self.matcher.weights_id)

    @classmethod
    def load(cls, directory: Path, matcher: "Matcher", settings: TrackerSettings | None = None) -> "RigidTracker":
        """A tracker that starts in a saved map, or in a plain cloud file (PLY, PCD, ...)."""
        from lepard_ros.tracking.maps import fill_map

        tracker = cls(matcher, settings)
        fill_map(tracker._map, Path(directory), matcher)
        return tracker

    def _see(self, points: FloatArray) -> tuple[View | None, str]:
        """The cloud ready for alignment; or None and why not, since a sensor may well see nothing."""
        points = np.asarray(points)
        if points.ndim not in (2, 3) or points.shape[-1] != 3:
            raise InputError(f"A cloud must have shape (N, 3) or (H, W, 3), but has {points.shape}.")
        points = live_points(points)
        if len(points) < MIN_POINTS:
            return None, f"the cloud has only {len(points)} points"
        self._choose_grid(points)
        view = see(points, self._map.spacing, self._map.grid)
        if len(view.surface.points) < MIN_POINTS:
            return None, f"the cloud covers only {len(view.surface.points)} cells of the grid"
        return view, ""

    def _choose_grid(self, points: FloatArray) -> None:
        """Let the first cloud decide on which grid the map is encoded; a loaded map has decided already.

        Surfaces are aligned on a wider grid where the network's is wider than its own.
        """
        if self._map.grid is not None:
            return
        loaded = next((frame.view.cloud for frame in self.keyframes), None)
        grid = self.matcher.tracking_grid(points) if loaded is None else loaded.surface.spacing
        self._map.grid = grid
        self._map.spacing = SURFACE_SPACING * max(grid / self.matcher.network_grid, 1.0)

    def _begin(self, view: View, stamp: float, clock: StageClock) -> Track:
        """The first cloud of a new map."""
        if not self.settings.mapping:
            return self._unknown(stamp, "there is no map to localise in and mapping is off", [], clock)
        frame = self._map.begin(view, stamp, self.origin)
        self._map.path.add(stamp, frame.id, np.eye(4))
        self._background.submit(lambda: view.encode(self.matcher), lambda _: frame.weigh())
        self._follower.begin(frame)
        self._state, self._started_here = next_state(self._state, Event.STARTED), True
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
        """Restart the map, without a pose: the next cloud must register to this one first."""
        pace = self._follower.pace  # without it, a slow sensor would start a map with every cloud
        self.reset()
        self._follower.pace = pace
        self._begin(view, stamp, clock)
        self._state = next_state(self._state, Event.RESET)
        reason = "the first cloud was not recognised again; the map restarts here"
        return Track(stamp, self._state, reason, new_keyframe=True, seconds=clock.seconds)

    def _relocalise(
        self, view: View, stamp: float, guesses: list[FloatArray]
    ) -> tuple[Sighting | None, Event, list[Sighting]]:
        """Let the network find the cloud: where the motion led, then in the whole map. Tracking waits for it."""
        self._background.finish()  # so that every keyframe can be matched
        sightings = self._background.run(lambda: self._relocaliser.look_around(view, stamp, guesses))
        near = [s for s in sightings if self._follower.reachable_from_last(s, stamp)]
        group = largest_group(near or self._follower.unsure)
        if group and not self._doubtful:
            return group[0], Event.FOLLOWED, sightings
        self._doubtful = False
        sightings = self._background.run(lambda: self._relocaliser.search(view, sightings))
        found = self._background.run(lambda: self._relocaliser.confirm(view, sightings, stamp))
        if found is None and group:
            return group[0], Event.FOLLOWED, sightings  # in doubt, but no other place contradicts the motion
        self._state = next_state(self._state, Event.MISSED)  # even if found at once: users shall know of a jump
        return found, Event.FOUND, sightings

    def _known(
        self,
        view: View,
        stamp: float,
        believed: Sighting,
        event: Event,
        odometry: FloatArray | None,
        clock: StageClock,
    ) -> Track:
        """Take a sighting for true: the state, the path, and perhaps a new keyframe."""
        frame, motion = believed.keyframe, believed.registration
        if motion.transform is None or motion.covariance is None:
            raise ValueError("only an accepted registration can be believed")
        covariance = compose_covariance(frame.pose, frame.covariance, motion.transform, motion.covariance)
        self._state = next_state(self._state, event)
        twist = self._twist(stamp, believed)
        self._relocaliser.forget()
        self._follower.accept(view, believed, stamp, odometry)
        self._map.path.add(stamp, frame.id, motion.transform)
        track = Track(
            stamp=stamp,
            state=self._state,
            reason=_how(believed),
            pose=believed.pose,
            covariance=covariance,
            registration=motion,
            keyframe_id=frame.id,
            keyframe_stamp=frame.stamp,
            keyframe_pose=frame.pose,
            loop_closed=self._loop_closed,
            twist=twist,
            seconds=clock.seconds,
        )
        self._loop_closed = False
        grows = self._state is TrackingState.OK and self._worth_keeping(view, believed)
        return self._grow(track, view, believed, clock) if grows else track

    def _twist(self, stamp: float, believed: Sighting) -> Twist | None:
        """The velocity since the last pose, if that is young and no jump lies between."""
        latest = self._map.path.latest(self.keyframes, 1)
        if not latest or not 0 < stamp - latest[0][0] <= FOLLOW_SECONDS or self._state is not TrackingState.OK:
            return None
        pose, covariance = believed.pose, believed.registration.covariance
        if pose is None or covariance is None:
            return None
        seconds = stamp - latest[0][0]
        # Both poses were measured to about the same keyframe with about the same uncertainty.
        turned = np.kron(np.eye(2), believed.registration.transform[:3, :3].T)  # type: ignore[index]
        return Twist(velocity_between(latest[0][1], pose, seconds), turned @ (2 * covariance) @ turned.T / seconds**2)

    def _worth_keeping(self, view: View, believed: Sighting) -> bool:
        """Whether a cloud shows enough that the map does not have yet, and is well enough placed to build on."""
        settings, motion = self.settings, believed.registration
        if not settings.mapping or motion.transform is None or motion.overlap < KEYFRAME_MIN_OVERLAP:
            return False
        distance, turn = motion_between(np.eye(4), motion.transform)
        moved = distance > settings.keyframe_distance or turn > settings.keyframe_degrees
        pose = believed.keyframe.pose @ motion.transform
        # Not `motion.overlap`: of a far and noisy surface little lies exactly on what was seen before.
        differs = moved or expected_overlap(view.surface, pose, believed.keyframe) < settings.keyframe_overlap
        return differs and not self._map.has_view(pose, believed.keyframe)

    def _grow(self, track: Track, view: View, believed: Sighting, clock: StageClock) -> Track:
        """Make the cloud a keyframe; the second worker ties it to the map."""
        covariance = np.zeros((6, 6)) if track.covariance is None else track.covariance
        frame = self._map.insert(view, track.stamp, believed.keyframe, believed.registration, covariance)
        self._map.path.anchor_last(frame)
        self._follower.stay_with(frame)
        self._submit_study(frame, believed.keyframe)
        clock.stop("map")
        return replace(track, new_keyframe=True)

    def _submit_study(self, frame: Keyframe, known: Keyframe) -> None:
        frame_then, known_then, snapshot = replace(frame), replace(known), self.keyframes.copy()
        self._background.submit(
            lambda: self._student.study(frame_then, known_then, snapshot), lambda study: self._take_in(study, frame)
        )

    def _take_in(self, study: Study, frame: Keyframe) -> None:
        """What the second worker found out about a keyframe."""
        frame.weigh()
        self._doubtful |= study.disputed
        edges = self._map.add_edges(self._map.borne_out(study.edges))
        self._stale |= any(self._map.contradicts(edge) for edge in edges)
        self._loop_closed |= bool(edges) and not self._stale
        self._optimise()

    def _optimise(self) -> None:
        """Let the second worker optimise the map if edges came and it does not do so already."""
        if self._stale and not self._optimising:
            self._optimising, self._stale = True, False
            self._background.submit(self._map.correction(), self._correct)

    def _correct(self, correction: Correction) -> None:
        self._map.correct(correction)
        self._follower.local_map.forget_surface()
        self._loop_closed, self._optimising = True, False
        self._optimise()

    def _unknown(self, stamp: float, reason: str, sightings: list[Sighting], clock: StageClock) -> Track:
        """No pose; the best refused registration comes along, for those who want to see why."""
        self._state = next_state(self._state, Event.MISSED)
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


def _how(believed: Sighting) -> str:
    """How a pose was found, and what of it was not."""
    frame, motion = believed.keyframe, believed.registration
    open_part = f"; one direction is open and only predicted, to {motion.predicted:.2f} m" if motion.predicted else ""
    return f"registered to keyframe {frame.id} ({motion.method}){open_part}"
