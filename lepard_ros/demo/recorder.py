# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Records the node's messages during the demonstration, by topic."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import rclpy
from nav_msgs.msg import Odometry
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import PointCloud2
from tf2_msgs.msg import TFMessage

from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.demo.story import FrameNote, MatchNote, Recorded, RecordedWarps, WarpNote
from lepard_ros.msg import Correspondences, DeformationGraph, TrackingStatus
from lepard_ros.ros.compat import matrix_from_transform
from lepard_ros.ros.conversion import stamp_to_ns
from lepard_ros.ros.warp_message import warp_from_message

STATES = {getattr(TrackingStatus, name): name for name in ("INITIALISING", "OK", "LOST", "RELOCALISED", "REFUSED")}


class Recorder:
    """Listens to the node from its own context, so that nothing else in this process is disturbed."""

    def __init__(self) -> None:
        """Begin to listen."""
        self.recorded = Recorded()
        self._context = Context()
        rclpy.init(context=self._context)
        self._node = Node("demo_recorder", context=self._context)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._node.create_subscription(TFMessage, "/tf", self._on_tf, 100)
        self._node.create_subscription(TrackingStatus, "lepard/status", self._on_status, 100)
        self._node.create_subscription(Odometry, "lepard/odometry", self._on_odometry, 100)
        self._node.create_subscription(Correspondences, "lepard/correspondences", self._on_matches, 100)
        self._node.create_subscription(PointCloud2, "lepard/map", self._on_map, latched)

    def listen_while(self, going_on: Callable[[], bool]) -> None:
        """Take in messages as long as the condition holds, and what is under way for half a second more."""
        while going_on():
            self._executor.spin_once(timeout_sec=0.1)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            self._executor.spin_once(timeout_sec=0.05)

    def hears_node(self) -> bool:
        """Whether the node's status topic exists."""
        return self._node.count_publishers("lepard/status") > 0

    def close(self) -> None:
        """Stop listening."""
        self._executor.remove_node(self._node)
        self._node.destroy_node()
        self._executor.shutdown()
        rclpy.shutdown(context=self._context)

    def _on_tf(self, message: TFMessage) -> None:
        for one in message.transforms:
            link = self.recorded.tf.setdefault((one.header.frame_id, one.child_frame_id), {})
            link[stamp_to_ns(one.header.stamp)] = matrix_from_transform(one.transform)

    def _on_status(self, status: TrackingStatus) -> None:
        self.recorded.frames.append(
            FrameNote(
                stamp_ns=stamp_to_ns(status.header.stamp),
                state=STATES[status.state],
                reason=status.reason_text,
                method=status.method,
                matches=status.matches,
                inliers=status.inliers,
                keyframes=status.keyframes,
                new_keyframe=status.new_keyframe,
                loop_closed=status.loop_closed,
                seconds=dict(zip(status.stage_names, status.stage_seconds, strict=True)),
                dropped=status.frames_dropped,
                latency=status.latency,
            )
        )

    def _on_odometry(self, message: Any) -> None:
        self.recorded.odometry += 1

    def _on_matches(self, message: Correspondences) -> None:
        source, target = (np.array(side, np.float32).reshape(-1, 3) for side in (message.source, message.target))
        stamps = stamp_to_ns(message.header.stamp), stamp_to_ns(message.target_header.stamp)
        inlier = np.array(message.inlier, dtype=bool)
        self.recorded.matches.append(MatchNote(*stamps, source, target, inlier))

    def _on_map(self, message: PointCloud2) -> None:
        self.recorded.map_points = decode_points(message)


class WarpRecorder(Recorder):
    """Listens to a node in deformable mode."""

    def __init__(self) -> None:
        """Begin to listen, to warps and to the warped model, too."""
        super().__init__()
        self.warps = RecordedWarps()
        self._node.create_subscription(DeformationGraph, "lepard/warp", self._on_warp, 100)
        self._node.create_subscription(PointCloud2, "lepard/warped_points", self._on_warped_points, 100)

    def _on_warp(self, message: DeformationGraph) -> None:
        stamp, rest = stamp_to_ns(message.target_header.stamp), stamp_to_ns(message.header.stamp)
        self.warps.warps[stamp] = WarpNote(stamp, rest, warp_from_message(message))

    def _on_warped_points(self, message: PointCloud2) -> None:
        self.warps.warped[stamp_to_ns(message.header.stamp)] = decode_points(message).reshape(-1, 3)
