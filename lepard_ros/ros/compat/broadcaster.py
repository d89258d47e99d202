# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Publishes transforms on /tf."""

import importlib.util
from typing import Any

from geometry_msgs.msg import TransformStamped
from numpy.typing import ArrayLike
from rclpy.node import Node
from rclpy.qos import QoSProfile
from tf2_msgs.msg import TFMessage

from lepard_ros.ros.compat.transforms import stamped_transform


def has_tf2_ros() -> bool:
    """Whether the real tf2_ros is installed."""
    return importlib.util.find_spec("tf2_ros") is not None


class TransformBroadcaster:
    """Publishes poses of frames on /tf."""

    def __init__(self, node: Node) -> None:
        self._broadcaster = _tf2_broadcaster(node) if has_tf2_ros() else _OwnBroadcaster(node)

    def send(self, parent: str, child: str, stamp_ns: int, matrix: ArrayLike) -> None:
        """Publish the pose of `child` in `parent` at a time: `matrix` (4, 4) maps child points to the parent."""
        self._broadcaster.sendTransform(stamped_transform(parent, child, stamp_ns, matrix))


def _tf2_broadcaster(node: Node) -> Any:
    import tf2_ros

    return tf2_ros.TransformBroadcaster(node)


class _OwnBroadcaster:
    def __init__(self, node: Node) -> None:
        self._publisher = node.create_publisher(TFMessage, "/tf", QoSProfile(depth=100))

    def sendTransform(self, transform: TransformStamped) -> None:  # The name tf2_ros gives it.
        self._publisher.publish(TFMessage(transforms=[transform]))
