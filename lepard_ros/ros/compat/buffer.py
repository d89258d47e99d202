# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Listens to /tf and /tf_static and answers where a frame was."""

import threading
import time
from typing import Any, Protocol

from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.time import Time
from tf2_msgs.msg import TFMessage

from lepard_ros.errors import InputError
from lepard_ros.ros.compat.broadcaster import has_tf2_ros
from lepard_ros.ros.compat.quaternions import Matrix
from lepard_ros.ros.compat.transforms import matrix_from_transform, stamp_nanoseconds
from lepard_ros.ros.compat.tree import TransformTree, TransformUnavailable


class TransformBuffer:
    """The transforms received over the last seconds.

    `lookup` may wait, so call it from another thread than the one that spins the node.
    """

    def __init__(self, node: Node, cache_seconds: float = 10.0) -> None:
        backend = _Tf2Backend if has_tf2_ros() else _OwnBackend
        self._backend: _Backend = backend(node, cache_seconds)
        self.why = ""  # Why the last lookup found nothing.

    def lookup(self, target_frame: str, source_frame: str, stamp_ns: int, timeout: float) -> Matrix | None:
        """The (4, 4) matrix that maps points of the source frame to the target frame at a time, or None.

        stamp_ns: nanoseconds; 0 means the latest time at which it is known. timeout: seconds to wait for it, 0 for not
        at all. Afterwards `why` says in a sentence why there is none.
        """
        try:
            matrix = self._backend.lookup(target_frame, source_frame, stamp_ns, timeout)
        except TransformUnavailable as error:
            self.why = str(error)
            return None
        self.why = ""
        return matrix

    def clear(self) -> None:
        """Forget all moving frames, for when time jumped back."""
        self._backend.clear()

    def close(self) -> None:
        """Stop listening."""
        self._backend.close()


class _Backend(Protocol):
    def lookup(self, target: str, source: str, stamp_ns: int, timeout: float) -> Matrix: ...
    def clear(self) -> None: ...
    def close(self) -> None: ...


class _OwnBackend:
    """A TransformTree behind a lock, fed by two subscriptions."""

    def __init__(self, node: Node, cache_seconds: float) -> None:
        self._node = node
        self._tree = TransformTree(cache_seconds)
        self._changed = threading.Condition()
        latched = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscriptions = [
            node.create_subscription(TFMessage, "/tf", lambda message: self._receive(message, False), 100),
            node.create_subscription(TFMessage, "/tf_static", lambda message: self._receive(message, True), latched),
        ]

    def _receive(self, message: TFMessage, static: bool) -> None:
        with self._changed:
            for stamped in message.transforms:
                try:
                    matrix = matrix_from_transform(stamped.transform)
                    stamp_ns = stamp_nanoseconds(stamped.header.stamp)
                    self._tree.set(stamped.header.frame_id, stamped.child_frame_id, stamp_ns, matrix, static)
                except (InputError, TransformUnavailable) as error:
                    self._node.get_logger().warning(f"TF: {error}", throttle_duration_sec=5.0)
            self._changed.notify_all()

    def lookup(self, target: str, source: str, stamp_ns: int, timeout: float) -> Matrix:
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                try:
                    return self._tree.lookup(target, source, stamp_ns)
                except TransformUnavailable:
                    remaining = deadline - time.monotonic()
                    if remaining <= 0 or not self._changed.wait(remaining):
                        return self._tree.lookup(target, source, stamp_ns)

    def clear(self) -> None:
        with self._changed:
            self._tree.clear()

    def close(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []


class _Tf2Backend:
    """The real tf2_ros, with its errors turned into ours."""

    def __init__(self, node: Node, cache_seconds: float) -> None:
        import tf2_ros

        self._errors: Any = tf2_ros.TransformException
        self._buffer: Any = tf2_ros.Buffer(cache_time=Duration(seconds=cache_seconds), node=node)
        self._listener: Any = tf2_ros.TransformListener(self._buffer, node)

    def lookup(self, target: str, source: str, stamp_ns: int, timeout: float) -> Matrix:
        if target == source:
            return TransformTree().lookup(target, source)
        try:
            time_ = Time(nanoseconds=stamp_ns)
            found = self._buffer.lookup_transform(target, source, time_, Duration(seconds=timeout))
        except self._errors as error:
            raise TransformUnavailable(str(error)) from error
        return matrix_from_transform(found.transform)

    def clear(self) -> None:
        self._buffer.clear()

    def close(self) -> None:
        self._listener.unregister()
