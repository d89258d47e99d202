# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The real node process in deformable mode, over real DDS: the shipped weights follow a creature."""

import functools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.spatial import cKDTree

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import DeformationGraph as DeformationGraphMessage
from lepard_ros.msg import TrackingStatus
from sensor_msgs.msg import PointCloud2

from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.demo.processes import family
from lepard_ros.ros.conversion import stamp_to_ns
from lepard_ros.ros.warp_message import warp_from_message
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from node_harness import LATCHED, STEP_NS, NodeProcess, Probe, patience

pytestmark = pytest.mark.slow


@functools.cache
def film() -> CreatureSequence:
    """A biped that moves its limbs before the camera, with the truth."""
    return creature_sequence(0, 16, width=240)


def error(message: DeformationGraphMessage, frame: int) -> float:
    """Median metres between where a warp puts what the first cloud saw, and where that is."""
    seen = np.isfinite(film().cloud(0)).all(axis=-1) & np.isfinite(film().first_now[frame]).all(axis=-1)
    moved, covered = warp_from_message(message).apply(film().cloud(0)[seen].astype(np.float64))
    return float(np.median(np.linalg.norm(moved - film().first_now[frame][seen], axis=1)[covered]))


def test_a_creature_is_followed_and_the_warp_can_be_applied_by_others() -> None:
    heard: dict[str, list[Any]] = {"warp": [], "warped_points": [], "model": []}
    with NodeProcess(mode="deformable") as node, Probe() as probe:
        probe.node.create_subscription(DeformationGraphMessage, "/lepard/warp", heard["warp"].append, 10)
        probe.node.create_subscription(PointCloud2, "/lepard/warped_points", heard["warped_points"].append, 10)
        probe.node.create_subscription(PointCloud2, "/lepard/model", heard["model"].append, LATCHED)
        probe.connect()
        start = time.time_ns()
        for step in range(4):
            status = probe.track(film().cloud(step), start + step * STEP_NS, seconds=60)
            assert status.mode == "deformable"
            assert status.state == TrackingStatus.OK, status.reason_text
        probe.until(lambda: len(heard["warp"]) == len(heard["warped_points"]) == 4 and heard["model"], 30)
        assert not [pair for pair in probe.transforms() if pair[0] == "map"], "nothing rigid may be published"
        message = heard["warp"][-1]
        assert stamp_to_ns(message.header.stamp) == start
        assert stamp_to_ns(message.target_header.stamp) == start + 3 * STEP_NS
        seen = np.isfinite(film().cloud(0)).all(axis=-1)
        rest, truth = film().cloud(0)[seen], film().first_now[3][seen]
        moved, covered = warp_from_message(message).apply(rest.astype(np.float64))
        after, before = (np.median(np.linalg.norm(points - truth, axis=1)[covered]) for points in (moved, rest))
        assert covered.mean() > 0.9
        assert before > 0.03, "the creature must move, or this shows nothing"
        # The first clouds are followed before the second worker's matches come in: 2.6 of 10 cm seen, 0.6 with them.
        assert after < 0.035 and after < 0.35 * before
        published = decode_points(heard["warped_points"][-1]).reshape(-1, 3)
        distance, _ = cKDTree(published[np.isfinite(published).all(axis=1)]).query(moved[covered])
        assert np.median(distance) < 0.02
        assert [field.name for field in heard["warped_points"][-1].fields] == ["x", "y", "z", "support"]
        assert len(decode_points(heard["model"][-1])) > 500
        step = wait_for_support(probe, heard["warped_points"], start)
        assert probe.call("reset").success
        assert probe.track(film().cloud(0), start + (step + 5) * STEP_NS, seconds=60).new_keyframe
        assert node.alive()


def wait_for_support(probe: Probe, heard: list[PointCloud2], start: int) -> int:
    """Show the body as it is until matches support most of its points: at first nothing does. Returns the last step."""
    for step in range(4, 34):
        probe.track(film().cloud(3), start + step * STEP_NS, seconds=60)
        support = np.frombuffer(bytes(heard[-1].data), dtype="<f4").reshape(-1, 4)[:, 3]
        assert ((support >= 0) & (support <= 1.0001)).all()
        if np.median(support) > 0.3:
            return step
        time.sleep(0.1)
    raise AssertionError("no cloud's points were supported by matches")


def test_clouds_at_the_sensor_s_rate_are_followed_or_dropped_and_the_matching_process_ends_with_the_node() -> None:
    """In real time, whatever the machine: each cloud is answered or counted, and what is published is right."""
    warps: list[DeformationGraphMessage] = []
    with NodeProcess(mode="deformable") as node, Probe() as probe:
        probe.node.create_subscription(DeformationGraphMessage, "/lepard/warp", warps.append, 50)
        probe.connect()
        start = time.time_ns()
        probe.track(film().cloud(0), start, seconds=60)
        helpers = [pid for pid in family(node.pid) if pid != node.pid]
        assert len(helpers) == 1
        for frame in range(1, 16):
            probe.spin(STEP_NS * 1e-9)
            probe.send(film().cloud(frame), start + frame * STEP_NS)
        last = start + 15 * STEP_NS
        probe.until(lambda: stamp_to_ns(probe.heard["status"][-1].header.stamp) == last, 60)
        said = probe.heard["status"]
        assert len(said) + said[-1].frames_dropped == said[-1].frames_received > 10
        known = [one for one in said if one.state in (TrackingStatus.OK, TrackingStatus.RELOCALISED)]
        probe.until(lambda: len(warps) == len(known), 10)
        frames = [(stamp_to_ns(one.target_header.stamp) - start) // STEP_NS for one in warps]
        assert len(frames) >= 3 and frames[0] == 0
        assert max(error(one, frame) for one, frame in zip(warps, frames, strict=True)) < 0.05
        code, seconds = node.stop()
        assert code == 0 and seconds < 5 * patience()
        deadline = time.monotonic() + 5
        while _runs(helpers[0]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(helpers[0])


def _runs(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
