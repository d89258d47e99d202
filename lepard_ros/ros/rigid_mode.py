# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Rigid mode: the pose of a moving sensor, as TF, odometry, path and map."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from geometry_msgs.msg import PoseWithCovarianceStamped
from nav_msgs.msg import Odometry
from nav_msgs.msg import Path as PathMessage
from sensor_msgs.msg import PointCloud2
from visualization_msgs.msg import MarkerArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import compose_covariance, twist_transport
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.msg import Correspondences, TrackingStatus
from lepard_ros.registration.types import Registration
from lepard_ros.ros import conversion
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.frames import Anchor, FramePlan
from lepard_ros.ros.markers import match_markers
from lepard_ros.ros.modes import LATCHED, TF, Output, Placement, Result, Topic
from lepard_ros.ros.parameters import NodeSettings
from lepard_ros.ros.status import reason_code, status_message
from lepard_ros.tracking.background import never
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackerSettings, Twist

# Longer paths are downsampled: rclpy needs about 10 microseconds per pose.
MAX_PATH_POSES = 1000
SMALL_MAP = 100  # keyframes
MAP_PAUSE = 30.0  # minimum pause between two map messages, in multiples of the time to build one
# The first pose of a map is exact by definition, but filters read zero covariance as "unknown": metres and radians.
MIN_SIGMA = 1e-3
# Grid for the retry when memory runs out, in multiples of the network's own grid: a ninth of the points.
COARSER = 3.0


class RigidMode:
    """Feeds clouds to a RigidTracker and converts its results to messages."""

    topics: ClassVar[dict[str, Topic]] = {
        "correspondences": Topic(Correspondences),
        "odometry": Topic(Odometry),
        "pose": Topic(PoseWithCovarianceStamped),
        "markers": Topic(MarkerArray),
        "path": Topic(PathMessage, LATCHED),
        "map": Topic(PointCloud2, LATCHED),
    }

    def __init__(
        self,
        matcher: Any,
        settings: NodeSettings,
        plan: FramePlan,
        description: str = "",
        closes_loops: bool = True,
        tracker: RigidTracker | None = None,
        hurried: Callable[[], bool] = never,
    ) -> None:
        """Start with an empty map, or with that of `map_file`. closes_loops: False disables loop closure.

        tracker: an external one, fed by the caller. hurried: whether the next cloud has arrived.
        """
        self._hurried = hurried
        self._closes_loops = closes_loops
        self.description = description
        self._settings, self._plan, self._matcher = settings, plan, matcher
        self.coarse_grid: float | None = COARSER * (matcher.settings.grid or matcher.network_grid)
        self._tracker = tracker or self._make_tracker()
        self._keyframe_stamps: dict[int, int] = {}
        self._map_due_ns = 0
        self._map_changed = len(self._tracker.keyframes) > 0
        self._unsaved = False
        self._hint: FloatArray | None = None

    def keyframe_count(self) -> int:
        """Number of keyframes in the map."""
        return len(self._tracker.keyframes)

    def process(self, frame: Frame, wanted: set[str]) -> Result:
        """Look up the anchor in TF, track the cloud, and report the result."""
        anchor = self._plan.anchor(frame.frame_id, frame.stamp_ns)
        if self._tracker.may_begin:
            self._tracker.origin = self._plan.origin(anchor, frame.frame_id, frame.stamp_ns)
        self._take_hint(anchor)
        # The anchor's child is then odom_frame: its transform is the sensor pose according to the odometry.
        odometry = invert(anchor.sensor_from_child) if self._settings.prediction == "odom" else None
        track = self._tracker.process(frame.points, frame.stamp_ns * 1e-9, odometry)
        return self.report(track, frame, anchor, wanted)

    def report(self, track: Track, frame: Frame, anchor: Anchor, wanted: set[str]) -> Result:
        """The messages for a tracked cloud."""
        self._note_keyframe(track, frame)
        return Result(self._status(track, frame), self._outputs(track, frame, anchor, wanted))

    def apply(self, settings: NodeSettings) -> None:
        """Apply parameters that changed at runtime."""
        self._settings = self._plan.settings = settings
        self._tracker.apply(tracker_settings(settings, self._closes_loops))

    def reset(self) -> None:
        """Restart, with the map of `map_file` if there is one."""
        if self._settings.map_file:
            self._tracker = self._make_tracker()
        else:
            self._tracker.reset()
        self._keyframe_stamps.clear()
        self._map_due_ns, self._map_changed, self._unsaved = 0, True, False

    def _make_tracker(self) -> RigidTracker:
        """A new tracker, with the map of `map_file` if there is one."""
        settings = tracker_settings(self._settings, self._closes_loops)
        if self._settings.map_file:
            tracker = RigidTracker.load(Path(self._settings.map_file).expanduser(), self._matcher, settings)
        else:
            tracker = RigidTracker(self._matcher, settings)
        tracker.hurried = self._hurried
        return tracker

    def relocalise(self) -> None:
        """Keep the map and relocalise in it."""
        self._tracker.relocalise()

    def hint(self, pose: FloatArray) -> None:
        """Relocalise around an approximate pose (4, 4) of the body in the map."""
        self._hint = pose

    def _take_hint(self, anchor: Anchor) -> None:
        if self._hint is not None:
            self._tracker.relocalise(self._hint @ invert(anchor.sensor_from_body))
            self._hint = None

    def unsaved(self) -> bool:
        """Whether the map has grown since it was loaded or saved; a single cloud does not count."""
        return self._unsaved and len(self._tracker.keyframes) > 1

    def save(self, directory: Path) -> str:
        """Write the keyframes to `directory`."""
        if len(self._tracker.keyframes) == 0:
            raise InputError("There is no keyframe to save yet; send clouds first.")
        self._tracker.save(directory)
        self._unsaved = False
        return f"{len(self._tracker.keyframes)} keyframes written to {directory}"

    def close(self) -> None:
        """End the matching process; the background thread ends by itself."""
        self._matcher.close()

    def facts(self) -> dict[str, str]:
        """Values for the diagnostics."""
        keyframes = self._tracker.keyframes
        return {"keyframes": str(len(keyframes)), "keyframes [MB]": f"{keyframes.nbytes / 1e6:.1f}"}

    def _note_keyframe(self, track: Track, frame: Frame) -> None:
        """Keep the exact stamps of the keyframes, which the tracker holds only in seconds."""
        keyframes = self._tracker.keyframes
        if track.new_keyframe:
            self._keyframe_stamps[max(one.id for one in keyframes)] = frame.stamp_ns
            self._keyframe_stamps = {id_: ns for id_, ns in self._keyframe_stamps.items() if id_ in keyframes}
        self._map_changed |= track.new_keyframe or track.loop_closed
        self._unsaved |= track.new_keyframe

    def _outputs(self, track: Track, frame: Frame, anchor: Anchor, wanted: set[str]) -> Iterator[Output]:
        """The pose first: it is published before markers, path and map are built."""
        yield from self._pose_outputs(track, frame, anchor)
        yield from self._match_outputs(track, frame, wanted)
        yield from self._map_outputs(frame, wanted)

    def _pose_outputs(self, track: Track, frame: Frame, anchor: Anchor) -> list[Output]:
        """TF and odometry; nothing for a cloud whose pose was not accepted."""
        if track.pose is None:
            return []
        settings, step = self._settings, anchor.sensor_from_body
        outputs = []
        if settings.publish_tf:
            placed = track.pose @ anchor.sensor_from_child
            outputs.append(Output(TF, Placement(settings.map_frame, anchor.child, frame.stamp_ns, placed)))
        own = track.covariance if track.covariance is not None else np.zeros((6, 6))
        covariance = compose_covariance(track.pose, own, step, np.zeros((6, 6))) + MIN_SIGMA**2 * np.eye(6)
        pose = track.pose @ step
        twist = None if track.twist is None else _carried(track.twist, step)
        odometry = conversion.odometry_message(pose, covariance, frame.stamp_ns, settings.map_frame, anchor.body, twist)
        stamped = PoseWithCovarianceStamped(header=odometry.header, pose=odometry.pose)
        return [*outputs, Output("odometry", odometry), Output("pose", stamped)]

    def _match_outputs(self, track: Track, frame: Frame, wanted: set[str]) -> list[Output]:
        """The matches with the keyframe, as a message and as markers."""
        registration = track.registration
        if registration is None or track.keyframe_id is None:
            return []
        source = conversion.header(frame.stamp_ns, frame.frame_id)
        target = conversion.header(self._keyframe_ns(track), frame.frame_id)
        message = conversion.correspondences_message(
            registration.matches, registration.inliers, source, target, track.keyframe_id
        )
        message.accepted, message.method = track.pose is not None, registration.method
        outputs = [Output("correspondences", message)]
        if "markers" in wanted and track.keyframe_pose is not None:
            outputs.append(Output("markers", self._markers(registration, track.keyframe_pose, frame)))
        return outputs

    def _markers(self, registration: Registration, keyframe_pose: FloatArray, frame: Frame) -> MarkerArray:
        """Lines at the keyframe's pose in the map, from each point without the sensor's motion to its match.

        Correct matches are consistent and show the motion; wrong ones cross them.
        """
        starts = move(keyframe_pose, registration.matches.source)
        ends = move(keyframe_pose, registration.matches.target)
        settings = self._settings
        return match_markers(
            starts, ends, registration.inliers, frame.stamp_ns, settings.map_frame, settings.marker_lines
        )

    def _map_outputs(self, frame: Frame, wanted: set[str]) -> Iterator[Output]:
        """Path and map, when they changed, limited by `map_period` and by the time to build them.

        A small map is also built for late subscribers; a large one only while there are subscribers.
        """
        small = len(self._tracker.keyframes) <= SMALL_MAP
        if not self._map_changed or frame.stamp_ns < self._map_due_ns or not (small or wanted & {"path", "map"}):
            return
        started = time.monotonic()
        self._map_changed = False
        frame_id = self._settings.map_frame
        stamps, poses = self._tracker.path(MAX_PATH_POSES)
        nanoseconds = [round(stamp * 1e9) for stamp in stamps]
        yield Output("path", conversion.path_message(nanoseconds, poses, frame.stamp_ns, frame_id))
        points = self._tracker.map_points(self._settings.map_spacing)
        yield Output("map", conversion.cloud_message(points, frame.stamp_ns, frame_id))
        pause = max(self._settings.map_period, MAP_PAUSE * (time.monotonic() - started))
        self._map_due_ns = frame.stamp_ns + int(pause * 1e9)

    def _status(self, track: Track, frame: Frame) -> TrackingStatus:
        """The status of a tracked cloud."""
        message = status_message(frame.stamp_ns, frame.frame_id, track.state.name, "rigid", track.registration)
        message.reason = reason_code(track)
        message.reason_text = track.reason if message.reason else ""
        message.keyframes = len(self._tracker.keyframes)
        message.new_keyframe, message.loop_closed = track.new_keyframe, track.loop_closed
        if track.keyframe_id is not None:
            message.keyframe_id = track.keyframe_id
            message.keyframe_stamp = conversion.stamp_from_ns(self._keyframe_ns(track))
        message.stage_names = list(track.seconds)
        message.stage_seconds = [float(value) for value in track.seconds.values()]
        return message

    def _keyframe_ns(self, track: Track) -> int:
        """The stamp of the track's keyframe; keyframes of a saved map store only seconds."""
        exact = self._keyframe_stamps.get(track.keyframe_id if track.keyframe_id is not None else -1)
        return exact if exact is not None else round((track.keyframe_stamp or 0.0) * 1e9)


def tracker_settings(settings: NodeSettings, closes_loops: bool = True) -> TrackerSettings:
    """The tracker's settings: its fields that are parameters of the node, by the same names."""
    names = {one.name for one in dataclasses.fields(TrackerSettings)} & set(vars(settings))
    taken = TrackerSettings(**{name: getattr(settings, name) for name in names}, threaded=True)
    return dataclasses.replace(taken, loop_closures=taken.loop_closures and closes_loops)


def _carried(twist: Twist, step: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The sensor's velocity and covariance, transformed to the body, whose pose in the sensor's frame is `step`."""
    carry = twist_transport(step)
    return carry @ twist.velocity, carry @ twist.covariance @ carry.T
