# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Publishes transforms on /tf and /tf_static."""

import importlib.util
from typing import Any

from geometry_msgs.msg import TransformStamped
from numpy.typing import ArrayLike
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from tf2_msgs.msg import TFMessage

from lepard_ros.ros.compat.transforms import stamped_transform


def has_tf2_ros() -> bool:
    """Whether the real tf2_ros is installed."""
    return importlib.util.find_spec("tf2_ros") is not None


class TransformBroadcaster:
    """Sends poses of frames: moving ones on /tf, fixed ones latched on /tf_static."""

    def __init__(self, node: Node) -> None:
        self._moving, self._static = _tf2_broadcasters(node) if has_tf2_ros() else _own_broadcasters(node)

    def send(self, parent: str, child: str, stamp_ns: int, matrix: ArrayLike) -> None:
        """Publish the pose of `child` in `parent` at a time: `matrix` (4, 4) maps child points to the parent."""
        self._moving.sendTransform(stamped_transform(parent, child, stamp_ns, matrix))

    def send_static(self, parent: str, child: str, matrix: ArrayLike, stamp_ns: int = 0) -> None:
        """Publish a pose that never changes; those who subscribe later receive it too."""
        self._static.sendTransform(stamped_transform(parent, child, stamp_ns, matrix))


def _tf2_broadcasters(node: Node) -> tuple[Any, Any]:
    import tf2_ros

    return tf2_ros.TransformBroadcaster(node), tf2_ros.StaticTransformBroadcaster(node)


def _own_broadcasters(node: Node) -> tuple[Any, Any]:
    return _OwnBroadcaster(node), _OwnStaticBroadcaster(node)


class _OwnBroadcaster:
    def __init__(self, node: Node) -> None:
        self._publisher = node.create_publisher(TFMessage, "/tf", QoSProfile(depth=100))

    def sendTransform(self, transform: TransformStamped) -> None:  # The name tf2_ros gives it.
        self._publisher.publish(TFMessage(transforms=[transform]))


class _OwnStaticBroadcaster:
    """Publishes all its frames each time, since a late subscriber receives the last message only."""

    def __init__(self, node: Node) -> None:
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._publisher = node.create_publisher(TFMessage, "/tf_static", latched)
        self._transforms: dict[str, TransformStamped] = {}

    def sendTransform(self, transform: TransformStamped) -> None:
        self._transforms[transform.child_frame_id] = transform
        self._publisher.publish(TFMessage(transforms=list(self._transforms.values())))
