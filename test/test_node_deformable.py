# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The real node process in deformable mode, over real DDS: a sheet that rolls up before the sensor."""

import time
from typing import Any

import numpy as np
import pytest
from scipy.spatial import cKDTree

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import DeformationGraph as DeformationGraphMessage
from lepard_ros.msg import TrackingStatus
from sensor_msgs.msg import PointCloud2

from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.ros.conversion import stamp_to_ns
from lepard_ros.ros.warp_message import warp_from_message
from node_harness import LATCHED, STEP_NS, NodeProcess, Probe

pytestmark = pytest.mark.slow


def rolling_sheet(step: float) -> np.ndarray:
    """A sheet of 50 x 40 cm, 80 cm before the sensor, bent more with every step: (50, 60, 3) metres."""
    x, y = np.meshgrid(np.linspace(0, 0.5, 60), np.linspace(-0.2, 0.2, 50))
    curvature = 0.15 * step + 1e-6
    angle = (x - 0.25) * curvature
    return np.stack([np.sin(angle) / curvature, y, 0.8 + (1 - np.cos(angle)) / curvature], axis=-1).astype(np.float32)


def test_a_rolling_sheet_is_warped_and_the_warp_can_be_applied_by_others() -> None:
    heard: dict[str, list[Any]] = {"warp": [], "warped_points": [], "model": []}
    with NodeProcess(mode="deformable", min_range=0.1, max_range=2.0) as node, Probe() as probe:
        probe.node.create_subscription(DeformationGraphMessage, "/lepard/warp", heard["warp"].append, 10)
        probe.node.create_subscription(PointCloud2, "/lepard/warped_points", heard["warped_points"].append, 10)
        probe.node.create_subscription(PointCloud2, "/lepard/model", heard["model"].append, LATCHED)
        probe.connect()
        start = time.time_ns()
        for step in range(4):
            status = probe.track(rolling_sheet(step), start + step * STEP_NS, seconds=60)
            assert status.mode == "deformable"
            assert status.state == TrackingStatus.OK, status.reason_text
        probe.until(lambda: len(heard["warp"]) == len(heard["warped_points"]) == 4 and heard["model"], 30)
        assert not [pair for pair in probe.transforms() if pair[0] == "map"], "nothing rigid may be published"
        message = heard["warp"][-1]
        assert stamp_to_ns(message.header.stamp) == start
        assert stamp_to_ns(message.target_header.stamp) == start + 3 * STEP_NS
        moved = warp_from_message(message)(rolling_sheet(0).reshape(-1, 3))
        # How well an untrained network warps is luck; that a receiver gets the node's own result is not.
        published = decode_points(heard["warped_points"][-1]).reshape(-1, 3)
        distance, _ = cKDTree(published[np.isfinite(published).all(axis=1)]).query(
            moved[np.isfinite(moved).all(axis=1)]
        )
        assert np.median(distance) < 0.02
        assert len(decode_points(heard["model"][-1])) > 500
        assert probe.call("reset").success
        assert probe.track(rolling_sheet(0), start + 9 * STEP_NS, seconds=60).new_keyframe
        assert node.alive()
