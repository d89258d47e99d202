# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Where the sensor's pose goes in the TF tree, as REP-105 has it.

`map` -> the cloud's frame; or `map` -> base_frame; or `map` -> odom_frame where another odometry moves the robot below.
No frame ever gets a second parent from this node.
"""

import time
from typing import NamedTuple

import numpy as np
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from tf2_msgs.msg import TFMessage

from lepard_ros.errors import InputError
from lepard_ros.registration.types import FloatArray
from lepard_ros.ros.compat import TransformBuffer
from lepard_ros.ros.parameters import NodeSettings

# A moving transform that was not repeated for this long has no publisher any more.
FORGET_SECONDS = 10.0


class MissingTransformError(InputError):
    """A transform that a cloud needs did not come in time, or may not be published."""


class Anchor(NamedTuple):
    """The frame that `map` is the parent of, and how points of it lie in the sensor's frame, (4, 4)."""

    child: str
    sensor_from_child: FloatArray


class ParentWatch:
    """Listens on TF for who the parents of the frames are."""

    def __init__(self, node: Node) -> None:
        """Begin to listen."""
        self._node = node
        self._static: dict[str, str] = {}
        self._moving: dict[str, tuple[str, float]] = {}
        latched = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscriptions = [
            node.create_subscription(TFMessage, "/tf", self._hear_moving, 100),
            node.create_subscription(TFMessage, "/tf_static", self._hear_static, latched),
        ]

    def parent_of(self, frame: str) -> str | None:
        """The frame's parent as last heard, or None."""
        parent, heard = self._moving.get(frame, (None, 0.0))
        if parent is not None and time.monotonic() - heard < FORGET_SECONDS:
            return parent
        return self._static.get(frame)

    def root_of(self, frame: str) -> str:
        """The top of the tree that `frame` hangs in; ends in a loop too."""
        seen = {frame}
        while (parent := self.parent_of(frame)) and parent not in seen:
            seen.add(parent)
            frame = parent
        return frame

    def close(self) -> None:
        """Stop listening."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)

    def _hear_moving(self, message: TFMessage) -> None:
        now = time.monotonic()
        self._moving.update({one.child_frame_id: (one.header.frame_id, now) for one in message.transforms})

    def _hear_static(self, message: TFMessage) -> None:
        self._static.update({one.child_frame_id: one.header.frame_id for one in message.transforms})


class FramePlan:
    """Chooses the frame to publish for a cloud, and finds its place relative to the sensor."""

    def __init__(self, settings: NodeSettings, buffer: TransformBuffer | None, watch: ParentWatch) -> None:
        """buffer: needed when base_frame or odom_frame is set."""
        self.settings, self._buffer, self._watch = settings, buffer, watch

    def anchor(self, sensor_frame: str, stamp_ns: int) -> Anchor:
        """The frame to publish for a cloud; waits up to `tf_timeout`. Raises MissingTransformError."""
        child = self.settings.odom_frame or self.settings.base_frame or sensor_frame
        if sensor_frame == self.settings.map_frame:
            raise MissingTransformError(
                f"The cloud is already in the frame '{sensor_frame}', which is map_frame; choose another map_frame."
            )
        transform = np.eye(4) if child == sensor_frame else self._wait_for(sensor_frame, child, stamp_ns)
        if self.settings.publish_tf:
            self._refuse_second_parent(child)
        return Anchor(child, transform)

    def forget_motion(self) -> None:
        """Drop the transforms of a time that is over, after time jumped back."""
        if self._buffer is not None:
            self._buffer.clear()

    def close(self) -> None:
        """Stop listening to TF."""
        self._watch.close()
        if self._buffer is not None:
            self._buffer.close()

    def _wait_for(self, sensor_frame: str, child: str, stamp_ns: int) -> FloatArray:
        timeout = self.settings.tf_timeout
        transform = self._buffer.lookup(sensor_frame, child, stamp_ns, timeout) if self._buffer else None
        if transform is None:
            why = self._buffer.why if self._buffer else ""
            raise MissingTransformError(
                f"No transform from '{child}' to '{sensor_frame}' came within {timeout} s, so the cloud is left out: "
                f"{why} Publish it, or correct base_frame or odom_frame."
            )
        return transform

    def _refuse_second_parent(self, child: str) -> None:
        parent = self._watch.parent_of(child)
        if parent not in (None, self.settings.map_frame):
            raise MissingTransformError(
                f"Frame '{child}' already has the parent '{parent}', and a second one would break TF; "
                f"set base_frame to the root of its tree, '{self._watch.root_of(child)}', or publish_tf to false."
            )


def make_plan(node: Node, settings: NodeSettings) -> FramePlan:
    """Listen to as much of TF as the settings need."""
    buffer = TransformBuffer(node) if settings.base_frame or settings.odom_frame else None
    return FramePlan(settings, buffer, ParentWatch(node))
