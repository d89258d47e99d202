# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The rigid tracker: returns a pose for every cloud, or the reason why there is none.

It has two workers. This one tracks each cloud against the local map; the other (`background`) runs the network for
keyframes, loop closures and relocalisation.
"""

from collections.abc import Callable
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
from lepard_ros.tracking.background import Background, never
from lepard_ros.tracking.follower import FOLLOW_SECONDS, Follower
from lepard_ros.tracking.keyframe_map import Correction, KeyframeMap, alignment_spacing
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer, expected_overlap
from lepard_ros.tracking.loops import LoopCloser, LoopResult
from lepard_ros.tracking.pose_candidates import PoseCandidate, largest_group
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.relocaliser import Relocaliser
from lepard_ros.tracking.state import Event, next_state
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState, Twist
from lepard_ros.tracking.views import View, live_points, make_view

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# Minimum delay of background results in seconds by the stamps, per cloud of `background_clouds` (15 give 1.4 s). Beside
# a fast sensor, whose tracking holds the interpreter lock most of the time, a job of 0.1 CPU-s takes 0.2 to 1.1 s.
BACKGROUND_PERIOD = 0.093
KEYFRAME_MIN_OVERLAP = 0.12  # minimum overlap with the map for a new keyframe
# The network checks every new keyframe, and a tracked cloud if it has checked none for CHECK_SECONDS by the stamps: a
# known map has no new keyframes. A cloud with less overlap with its keyframe is not checked, for the network may err.
CHECK_SECONDS, CHECK_MIN_OVERLAP = 5.0, 0.4
TOO_FEW_POINTS = Registration(None, Status.TOO_FEW_POINTS, NO_MATCHES, np.zeros(0, dtype=bool))


class RigidTracker:
    """Tracks the pose of a sensor from its clouds."""

    def __init__(self, matcher: "Matcher", settings: TrackerSettings | None = None) -> None:
        """Create a tracker without a map. The matcher's settings also apply to alignment and acceptance."""
        self.matcher = matcher
        self.settings = settings or TrackerSettings()
        self.origin: FloatArray = np.eye(4)  # T_map_sensor of the cloud that starts a map
        # Whether the next cloud has arrived, so that tracking must not wait for late results of the background worker.
        self.hurried: Callable[[], bool] = never
        delay, threaded = self.settings.background_clouds, self.settings.threaded
        seconds = BACKGROUND_PERIOD * delay
        self._background = Background(threaded, delay, lambda: self.hurried(), seconds)
        self.reset()

    def process(self, points: FloatArray, stamp: float, odometry: FloatArray | None = None) -> Track:
        """Estimate the pose of the sensor for one cloud.

        points: (N, 3) metres in the sensor frame, or organised (H, W, 3) with NaN. stamp: seconds.
        odometry: (4, 4), the sensor in a frame that drifts but does not jump; used for the prediction.
        """
        clock = StageClock()
        self._background.next_cloud(stamp)
        self._follower.add_stamp(stamp)
        view, problem = self._preprocess(points)
        clock.stop("see")
        if view is None:
            return replace(self._without_pose(stamp, problem, [], clock), registration=TOO_FEW_POINTS)
        if not len(self.keyframes):
            return self._begin(view, stamp, clock)
        guesses = self._follower.predict(stamp, odometry)
        accepted = None if self._pose_disputed else self._follower.follow(view, stamp, guesses, odometry)
        clock.stop("track")
        event, candidates = Event.FOLLOWED, [accepted] if accepted else []
        if accepted is None:
            accepted, event, candidates = self._relocalise(view, stamp, guesses)
            clock.stop("search")
        if accepted is None and self._is_provisional():
            return self._restart_map(view, stamp, clock)
        if accepted is None:
            return self._without_pose(stamp, self._relocaliser.failure_reason(candidates), candidates, clock)
        return self._with_pose(view, stamp, accepted, event, odometry, clock)

    def reset(self) -> None:
        """Clear the map and discard background jobs; the next cloud starts a new map."""
        rigid = self.matcher.settings.rigid
        self._background.drop()
        self._map = KeyframeMap(self.settings)
        self._follower = Follower(self._map, self.settings, rigid)
        self._relocaliser = Relocaliser(self.matcher, self._map, self._follower, self.settings, rigid)
        self._loop_closer = LoopCloser(self.matcher, self.settings, rigid)
        self._state = next_state(TrackingState.INITIALISING, Event.RESET)
        self._started_here = False  # this tracker started the map; it was not loaded
        self._pose_disputed = False  # the network contradicts the tracked pose: relocalise with the next cloud
        self._checked = float("-inf")  # stamp of the last cloud that the network was asked to check
        self._optimising = False
        self._needs_optimisation = False  # loops were added since the last optimisation started
        self._loop_closed = False  # a loop was closed and not reported yet

    def apply(self, settings: TrackerSettings) -> None:
        """Change settings while tracking; the map keeps its limits and grid, the background worker its delay."""
        self.settings = self._map.settings = self._follower.settings = settings
        self._relocaliser.settings = self._loop_closer.settings = settings

    def relocalise(self, hint: FloatArray | None = None) -> None:
        """Keep the map but drop the pose: search the map with the next clouds.

        hint: (4, 4) T_map_sensor, approximate pose where the search starts.
        """
        self._state = next_state(self._state, Event.MISSED)
        self._relocaliser.forget()
        self._follower.invalidate_pose(hint)

    @property
    def may_begin(self) -> bool:
        """Whether the next cloud may start a map, at `origin`."""
        return len(self.keyframes) == 0 or self._is_provisional()

    @property
    def keyframes(self) -> KeyframeBuffer:
        """The keyframes of the map."""
        return self._map.keyframes

    def map_points(self, spacing: float) -> FloatArray:
        """The map as one cloud (N, 3), downsampled to `spacing` metres."""
        return self._map.points(spacing)

    def path(self, max_poses: int | None = None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Stamps (K,) and poses (K, 4, 4) of the accepted clouds, with all loop corrections so far.

        max_poses: return at most this many, evenly spaced.
        """
        return self._map.path.poses(self.keyframes, max_poses)

    def edges(self) -> list[Edge]:
        """The edges of the pose graph."""
        return list(self._map.graph.edges)

    def join(self, edges: list[Edge]) -> None:
        """Add edges to the pose graph and optimise the map immediately."""
        self._map.add_edges(edges)
        self._map.correct(self._map.correction()())
        self._follower.local_map.forget_surface()

    def finish(self) -> None:
        """Wait for the background worker and apply its results."""
        self._background.finish()

    def save(self, directory: Path) -> None:
        """Save the map to a directory, atomically."""
        from lepard_ros.tracking.maps import save_map

        self.finish()
        save_map(self._map, directory, self.matcher.weights_id)

    @classmethod
    def load(cls, directory: Path, matcher: "Matcher", settings: TrackerSettings | None = None) -> "RigidTracker":
        """Create a tracker with a saved map, or with a plain cloud file (PLY, PCD, ...) as its map."""
        from lepard_ros.tracking.maps import fill_map

        tracker = cls(matcher, settings)
        fill_map(tracker._map, Path(directory), matcher)
        return tracker

    def _preprocess(self, points: FloatArray) -> tuple[View | None, str]:
        """The cloud prepared for alignment; or None and the reason, such as a sensor that sees nothing."""
        points = np.asarray(points)
        if points.ndim not in (2, 3) or points.shape[-1] != 3:
            raise InputError(f"A cloud must have shape (N, 3) or (H, W, 3), but has {points.shape}.")
        points = live_points(points)
        if len(points) < MIN_POINTS:
            return None, f"the cloud has only {len(points)} points"
        self._choose_grid(points)
        view = make_view(points, self._map.spacing, self._map.grid)
        if len(view.surface.points) < MIN_POINTS:
            return None, f"the cloud covers only {len(view.surface.points)} cells of the grid"
        return view, ""

    def _choose_grid(self, points: FloatArray) -> None:
        """Choose the grids of the map, for encoding and for alignment, from the first cloud or from a loaded map."""
        if self._map.grid is not None:
            return
        loaded = next(iter(self.keyframes), None)
        if loaded is not None and loaded.view.cloud is not None:
            self._map.grid, self._map.spacing = loaded.view.cloud.surface.spacing, loaded.surface.spacing
            return
        self._map.grid = self.matcher.tracking_grid(points)
        self._map.spacing = alignment_spacing(points, self._map.grid / self.matcher.network_grid)

    def _begin(self, view: View, stamp: float, clock: StageClock) -> Track:
        """Start a map with this cloud."""
        if not self.settings.mapping:
            return self._without_pose(stamp, "there is no map to localise in and mapping is off", [], clock)
        frame = self._map.begin(view, stamp, self.origin)
        self._map.path.add(stamp, frame.id, np.eye(4))
        self._checked = stamp
        self._background.submit(lambda: view.encode(self.matcher), lambda _: frame.update_nbytes())
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

    def _is_provisional(self) -> bool:
        """Whether the map is a single cloud that no other was registered to, so that it can be replaced."""
        return self._started_here and self.settings.mapping and len(self.keyframes) == 1 and len(self._map.path) == 1

    def _restart_map(self, view: View, stamp: float, clock: StageClock) -> Track:
        """Restart the map without a pose: the next cloud must register to this one first."""
        pace = self._follower.pace  # without it, a slow sensor would restart the map with every cloud
        self.reset()
        self._follower.pace = pace
        self._begin(view, stamp, clock)
        self._state = next_state(self._state, Event.RESET)
        reason = "the first cloud was not recognised again; the map restarts here"
        return Track(stamp, self._state, reason, new_keyframe=True, seconds=clock.seconds)

    def _relocalise(
        self, view: View, stamp: float, guesses: list[FloatArray]
    ) -> tuple[PoseCandidate | None, Event, list[PoseCandidate]]:
        """Relocalise with the network: around the predicted pose, then in the whole map. Tracking waits for it."""
        candidates = self._background.run(lambda: self._relocaliser.look_around(view, stamp, guesses), first=True)
        near = [s for s in candidates if self._follower.credible(s, stamp)]
        group = largest_group(near + self._follower.uncertain)
        if group and not self._pose_disputed:
            return group[0], Event.FOLLOWED, candidates
        doubted, self._pose_disputed = self._pose_disputed, False
        candidates = self._background.run(
            lambda: self._relocaliser.search(view, stamp, candidates, doubted), first=True
        )
        found = self._background.run(lambda: self._relocaliser.confirm(view, candidates, stamp), first=True)
        if found is None and group:
            return group[0], Event.FOLLOWED, candidates  # disputed, but no other pose was found
        self._state = next_state(self._state, Event.MISSED)  # even if found at once, so that a jump is reported
        return found, Event.FOUND, candidates

    def _with_pose(
        self,
        view: View,
        stamp: float,
        accepted: PoseCandidate,
        event: Event,
        odometry: FloatArray | None,
        clock: StageClock,
    ) -> Track:
        """Apply an accepted pose: update state and trajectory, and add a keyframe if needed."""
        frame, motion = accepted.keyframe, accepted.registration
        if motion.transform is None or motion.covariance is None:
            raise ValueError("the registration was not accepted")
        covariance = compose_covariance(frame.pose, frame.covariance, motion.transform, motion.covariance)
        self._state = next_state(self._state, event)
        twist = self._twist(stamp, accepted)
        self._relocaliser.forget()
        self._follower.accept(view, accepted, stamp, odometry)
        self._map.path.add(stamp, frame.id, motion.transform)
        track = Track(
            stamp=stamp,
            state=self._state,
            reason=_describe(accepted),
            pose=accepted.pose,
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
        is_keyframe = self._state is TrackingState.OK and self._needs_keyframe(view, accepted)
        if is_keyframe:
            return self._add_keyframe(track, view, accepted, clock)
        self._check_now_and_then(track, view, accepted)
        return track

    def _twist(self, stamp: float, accepted: PoseCandidate) -> Twist | None:
        """The velocity since the last pose, if it is recent and the pose did not jump."""
        latest = self._map.path.latest(self.keyframes, 1)
        if not latest or not 0 < stamp - latest[0][0] <= FOLLOW_SECONDS or self._state is not TrackingState.OK:
            return None
        pose, covariance = accepted.pose, accepted.registration.covariance
        if pose is None or covariance is None:
            return None
        seconds = stamp - latest[0][0]
        # Both poses were measured relative to a nearby keyframe, with about the same uncertainty.
        turned = np.kron(np.eye(2), accepted.registration.transform[:3, :3].T)  # type: ignore[index]
        return Twist(velocity_between(latest[0][1], pose, seconds), turned @ (2 * covariance) @ turned.T / seconds**2)

    def _needs_keyframe(self, view: View, accepted: PoseCandidate) -> bool:
        """Whether a cloud shows enough new surface for a keyframe, and its pose is reliable enough."""
        settings, motion = self.settings, accepted.registration
        if not settings.mapping or motion.transform is None or motion.overlap < KEYFRAME_MIN_OVERLAP:
            return False
        distance, turn = motion_between(np.eye(4), motion.transform)
        moved = distance > settings.keyframe_distance or turn > settings.keyframe_degrees
        pose = accepted.keyframe.pose @ motion.transform
        # Not `motion.overlap`: noise at long range lowers it.
        differs = moved or expected_overlap(view.surface, pose, accepted.keyframe) < settings.keyframe_overlap
        return differs and not self._map.has_view(pose, accepted.keyframe)

    def _add_keyframe(self, track: Track, view: View, accepted: PoseCandidate, clock: StageClock) -> Track:
        """Make the cloud a keyframe; the background worker finds its edges."""
        covariance = np.zeros((6, 6)) if track.covariance is None else track.covariance
        frame = self._map.insert(view, track.stamp, accepted.keyframe, accepted.registration, covariance)
        self._map.path.anchor_last(frame)
        self._follower.prefer(frame)
        self._submit_loop_search(frame, accepted.keyframe)
        clock.stop("map")
        return replace(track, new_keyframe=True)

    def _check_now_and_then(self, track: Track, view: View, accepted: PoseCandidate) -> None:
        """Let the network check the pose of this cloud, if it has checked none for some time."""
        recent = 0 <= track.stamp - self._checked < CHECK_SECONDS
        if recent or self._state is not TrackingState.OK or accepted.registration.overlap < CHECK_MIN_OVERLAP:
            return
        assert track.pose is not None
        self._checked = track.stamp
        cloud, reference = Keyframe(-1, track.stamp, track.pose, view), replace(accepted.keyframe)
        self._background.submit(lambda: self._loop_closer.is_disputed(cloud, reference), self._dispute)

    def _dispute(self, disputed: bool) -> None:
        self._pose_disputed |= disputed

    def _submit_loop_search(self, frame: Keyframe, reference: Keyframe) -> None:
        self._checked = frame.stamp
        frame_then, reference_then, snapshot = replace(frame), replace(reference), self.keyframes.copy()
        self._background.submit(
            lambda: self._loop_closer.find_loops(frame_then, reference_then, snapshot),
            lambda result: self._apply_loops(result, frame),
        )

    def _apply_loops(self, result: LoopResult, frame: Keyframe) -> None:
        """Apply the background worker's result for a keyframe."""
        frame.update_nbytes()
        self._dispute(result.disputed)
        edges = self._map.add_edges(self._map.confirmed(result.edges))
        self._needs_optimisation |= any(self._map.contradicts(edge) for edge in edges)
        self._loop_closed |= bool(edges) and not self._needs_optimisation
        self._optimise()

    def _optimise(self) -> None:
        """Start a background optimisation if new loops need one and none is running."""
        if self._needs_optimisation and not self._optimising:
            self._optimising, self._needs_optimisation = True, False
            self._background.submit(self._map.correction(), self._correct)

    def _correct(self, correction: Correction) -> None:
        self._map.correct(correction)
        self._follower.local_map.forget_surface()
        self._loop_closed, self._optimising = True, False
        self._optimise()

    def _without_pose(self, stamp: float, reason: str, candidates: list[PoseCandidate], clock: StageClock) -> Track:
        """Report that there is no pose, with the best refused registration."""
        self._state = next_state(self._state, Event.MISSED)
        best = max(candidates, key=lambda s: s.registration.overlap, default=None)
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


def _describe(accepted: PoseCandidate) -> str:
    """How a pose was found, and which part of it was only predicted."""
    frame, motion = accepted.keyframe, accepted.registration
    predicted = f"; one direction is unconstrained, predicted to {motion.predicted:.2f} m" if motion.predicted else ""
    return f"registered to keyframe {frame.id} ({motion.method}){predicted}"
