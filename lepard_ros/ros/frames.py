# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""TF output according to REP 105.

The node publishes `map` -> the cloud's frame, `map` -> base_frame, or `map` -> odom_frame if the robot has other
odometry. It never gives a frame a second parent. With a base frame, a new map starts at the base's pose, z up.
"""

import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.serialization import deserialize_message
from tf2_msgs.msg import TFMessage

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.ros.compat import TransformBuffer
from lepard_ros.ros.compat.transforms import stamp_nanoseconds
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.gravity import OPTICAL_UP, GravityWatch, level_pose
from lepard_ros.ros.parameters import NodeSettings

# Reading all of a robot's /tf in Python takes a third of a core. It is therefore read only for LISTEN seconds of every
# CYCLE, and during the whole first CYCLE: enough to detect the parents of frames.
LISTEN, CYCLE = 4, 20  # DDS discovery takes up to 3 s
# A dynamic transform that was not repeated for this long has no publisher any more.
FORGET_SECONDS = 2.5 * CYCLE
# Stamps of transforms that this node sent; others for the same frames come from another node.
SENT_KEPT = 400


class MissingTransformError(InputError):
    """A required transform did not arrive in time, or must not be published."""


class Anchor(NamedTuple):
    """The frames of one cloud.

    child: the child frame of `map`. body: the frame whose pose the odometry reports, the robot's base or the cloud's
    own frame. sensor_from_child, sensor_from_body: (4, 4), from these frames to the cloud's frame.
    """

    child: str
    sensor_from_child: FloatArray
    body: str
    sensor_from_body: FloatArray


class ParentWatch:
    """Watches TF for the parents of frames, and for other publishers of this node's transform.

    Only messages that contain a frame of interest are deserialised.
    """

    def __init__(self, node: Node) -> None:
        """Start listening."""
        self._node = node
        self._static: dict[str, str] = {}
        self._moving: dict[str, tuple[str, float]] = {}
        self._names: dict[str, bytes] = {}  # frames of interest, and their bytes in a message
        self._sent: deque[tuple[str, str, int]] = deque(maxlen=SENT_KEPT)
        self._rival_heard = -FORGET_SECONDS
        latched = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._static_subscription = node.create_subscription(TFMessage, "/tf_static", self._hear_static, latched)
        self._subscription: Any = None
        self._seconds = 0
        self._timer = node.create_timer(1.0, self._tick, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self._listen(True)

    def _tick(self) -> None:
        """Called once a second: start or stop listening according to the cycle."""
        self._seconds += 1
        self._listen(self._seconds < CYCLE or self._seconds % CYCLE < LISTEN)

    def _listen(self, wanted: bool) -> None:
        if wanted and self._subscription is None:
            self._subscription = self._node.create_subscription(TFMessage, "/tf", self._hear_moving, 100, raw=True)
        elif not wanted and self._subscription is not None:
            self._node.destroy_subscription(self._subscription)
            self._subscription = None

    def note_sent(self, parent: str, child: str, stamp_ns: int) -> None:
        """Record one of our own transforms before it is sent."""
        self._sent.append((parent, child, stamp_ns))
        self._look_for(child)

    def has_rival(self) -> bool:
        """Whether another node publishes the same transform."""
        return time.monotonic() - self._rival_heard < FORGET_SECONDS

    def parent_of(self, frame: str) -> str | None:
        """The frame's parent in the last transform received, or None."""
        self._look_for(frame)
        parent, heard = self._moving.get(frame, (None, 0.0))
        if parent is not None and time.monotonic() - heard < FORGET_SECONDS:
            return parent
        return self._static.get(frame)

    def root_of(self, frame: str) -> str:
        """The root of the tree that contains `frame`; terminates for cycles too."""
        seen = {frame}
        while (parent := self.parent_of(frame)) and parent not in seen:
            seen.add(parent)
            frame = parent
        return frame

    def close(self) -> None:
        """Stop listening."""
        self._node.destroy_timer(self._timer)
        self._node.destroy_subscription(self._static_subscription)
        self._listen(False)

    def _look_for(self, frame: str) -> None:
        self._names.setdefault(frame, frame.encode() + b"\0")  # CDR strings end with a zero byte

    def _hear_moving(self, data: bytes) -> None:
        if not any(name in data for name in list(self._names.values())):
            return
        now = time.monotonic()
        for one in deserialize_message(data, TFMessage).transforms:
            parent, child = one.header.frame_id, one.child_frame_id
            if child in self._names:
                self._moving[child] = (parent, now)
                self._look_for(parent)
            sent_by_us = (parent, child, stamp_nanoseconds(one.header.stamp)) in self._sent
            if not sent_by_us and any((parent, child) == mine[:2] for mine in list(self._sent)):
                self._rival_heard = now

    def _hear_static(self, message: TFMessage) -> None:
        self._static.update({one.child_frame_id: one.header.frame_id for one in message.transforms})


class FramePlan:
    """Chooses the frame to publish for a cloud, and finds its pose relative to the sensor."""

    def __init__(
        self,
        settings: NodeSettings,
        buffer: TransformBuffer | None,
        watch: ParentWatch | None,
        gravity: GravityWatch | None = None,
    ) -> None:
        """buffer: needed when base_frame or odom_frame is set. watch: when TF is published. gravity: with an IMU."""
        self.settings, self._buffer, self._watch, self._gravity = settings, buffer, watch, gravity

    def to_sensor(self, frame: Frame) -> Frame:
        """The cloud in the sensor's frame, if a driver or filter published it in another one.

        Ranges, normals and free space refer to the sensor's position. Raises MissingTransformError.
        """
        sensor = self.settings.sensor_frame
        if sensor in ("", frame.frame_id):
            return frame
        transform = self._wait_for(sensor, frame.frame_id, frame.stamp_ns).astype(np.float32)
        points = frame.points @ transform[:3, :3].T + transform[:3, 3]
        return frame._replace(points=points, frame_id=sensor)

    def anchor(self, sensor_frame: str, stamp_ns: int) -> Anchor:
        """The frames of a cloud; waits up to `tf_timeout`. Raises MissingTransformError."""
        if sensor_frame == self.settings.map_frame:
            raise MissingTransformError(
                f"The cloud's frame '{sensor_frame}' is also map_frame; choose another map_frame."
            )
        body = self.settings.base_frame or sensor_frame
        from_body = self._wait_for(sensor_frame, body, stamp_ns)
        child = self.settings.odom_frame or body
        from_child = from_body if child == body else self._wait_for(sensor_frame, child, stamp_ns)
        if self.settings.publish_tf:
            self._refuse_second_parent(child)
        return Anchor(child, from_child, body, from_body)

    def origin(self, anchor: Anchor, sensor_frame: str, stamp_ns: int) -> FloatArray:
        """T_map_sensor (4, 4) of a cloud that starts a map: the map origin is at base_frame, else at odom_frame.

        Without either, `upright` defines the orientation of the map. Raises MissingTransformError.
        """
        if self.settings.base_frame:
            return invert(anchor.sensor_from_body)
        if self.settings.odom_frame:
            return invert(anchor.sensor_from_child)
        if self.settings.upright == "optical":
            return level_pose(OPTICAL_UP)
        return level_pose(self._measured_up(sensor_frame, stamp_ns)) if self.settings.upright == "imu" else np.eye(4)

    def note_sent(self, parent: str, child: str, stamp_ns: int) -> None:
        """Record a transform before it is sent, to distinguish it from those of other nodes."""
        if self._watch is not None:
            self._watch.note_sent(parent, child, stamp_ns)

    def problem(self) -> str:
        """A warning about other publishers of the same transform; empty if there are none."""
        if self._watch is None or not self._watch.has_rival():
            return ""
        return "Another node publishes the same transform on /tf, so it jumps; stop it, or set publish_tf to false."

    def forget_motion(self) -> None:
        """Clear the transform buffer after time jumped back."""
        if self._buffer is not None:
            self._buffer.clear()

    def close(self) -> None:
        """Stop listening to TF."""
        for listener in (self._watch, self._buffer, self._gravity):
            if listener is not None:
                listener.close()

    def _measured_up(self, sensor_frame: str, stamp_ns: int) -> FloatArray:
        """The upward direction (3,) in the sensor's frame, from the IMU."""
        gravity = self._gravity
        if gravity is None or gravity.up is None:
            raise MissingTransformError(
                "upright is 'imu', but the topic imu is silent, so no map is started; remap it to the IMU's topic."
            )
        return self._wait_for(sensor_frame, gravity.frame_id, stamp_ns)[:3, :3] @ gravity.up

    def _wait_for(self, sensor_frame: str, child: str, stamp_ns: int) -> FloatArray:
        if child == sensor_frame:
            return np.eye(4)
        timeout = self.settings.tf_timeout
        transform = self._buffer.lookup(sensor_frame, child, stamp_ns, timeout) if self._buffer else None
        if transform is None:
            why = self._buffer.why if self._buffer else ""
            raise MissingTransformError(
                f"No transform from '{child}' to '{sensor_frame}' arrived within {timeout} s; the cloud is dropped: "
                f"{why} Publish it, or correct base_frame, odom_frame or sensor_frame."
            )
        return transform

    def _refuse_second_parent(self, child: str) -> None:
        parent = self._watch.parent_of(child) if self._watch is not None else None
        if self._watch is not None and parent not in (None, self.settings.map_frame):
            raise MissingTransformError(
                f"Frame '{child}' already has the parent '{parent}', and a second one would break TF; "
                f"set base_frame to the root of its tree, '{self._watch.root_of(child)}', or publish_tf to false."
            )


def make_plan(node: Node, settings: NodeSettings) -> FramePlan:
    """Listen to TF as far as the settings need it; not at all in deformable mode, which publishes no TF."""
    if settings.mode != "rigid":
        return FramePlan(settings, TransformBuffer(node) if settings.sensor_frame else None, None)
    imu = settings.upright == "imu" and not (settings.base_frame or settings.odom_frame)
    buffer = (
        TransformBuffer(node) if settings.base_frame or settings.odom_frame or settings.sensor_frame or imu else None
    )
    return FramePlan(settings, buffer, ParentWatch(node), GravityWatch(node) if imu else None)
