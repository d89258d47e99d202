# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Bad clouds to the real node over DDS: each is refused with a reason that is counted, and the next one is tracked."""

import time
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from diagnostic_msgs.msg import DiagnosticStatus
from lepard_ros.msg import TrackingStatus
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import PointCloud2

from lepard_ros.ros.conversion import cloud_message
from node_harness import STEP_NS, NodeProcess, Probe, cloud_at

pytestmark = pytest.mark.slow
_stamps = count(time.time_ns(), STEP_NS)


@pytest.fixture(scope="module")
def node() -> Iterator[NodeProcess]:
    with NodeProcess(silence=1.0) as process:
        yield process


def refused(probe: Probe, message: PointCloud2) -> TrackingStatus:
    """Send a message that must be refused; what the node said."""
    before = len(probe.heard["status"])
    probe.clouds.publish(message)
    status = probe.until_heard("status", before + 1)[-1]
    assert status.reason == TrackingStatus.REASON_BAD_INPUT
    assert status.reason_text.endswith(".")
    return status


def good(stamp: int | None = None) -> PointCloud2:
    return cloud_message(cloud_at(0), next(_stamps) if stamp is None else stamp, "camera")


def broken(name: str) -> PointCloud2:
    message = good()
    if name == "no z":
        message.fields = message.fields[:2]
    elif name == "data too short":
        message.data = message.data[:1000]
    elif name == "row step":
        message.row_step = 3
    elif name == "huge":
        message.width, message.height, message.row_step = 2**32 - 1, 2**32 - 1, 2**32 - 1
    elif name == "datatype":
        message.fields[0].datatype = 77
    elif name == "empty frame":
        message.header.frame_id = ""
    elif name == "stamp zero":
        message.header.stamp.sec = message.header.stamp.nanosec = 0
    elif name == "a day ahead":
        message.header.stamp.sec += 86_400
    return message


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("no z", "no field 'z'"),
        ("data too short", "bytes but 1000 came"),
        ("row step", "row_step is 3"),
        ("huge", "row_step"),
        ("datatype", "unknown datatype 77"),
        ("empty frame", "empty frame_id"),
        ("stamp zero", "stamp 0"),
        ("a day ahead", "ahead of this node's clock"),
    ],
)
def test_a_bad_cloud_is_refused_and_counted_and_the_next_is_tracked(probe: Probe, name: str, word: str) -> None:
    rejected = probe.heard["status"][-1].frames_rejected if probe.heard["status"] else 0
    status = refused(probe, broken(name))
    assert word in status.reason_text
    assert status.frames_rejected == rejected + 1
    assert probe.track(cloud_at(0), next(_stamps)).state == TrackingStatus.OK


def test_the_same_cloud_twice_is_left_out_without_a_reset(probe: Probe) -> None:
    stamp = next(_stamps)
    assert probe.track(cloud_at(0), stamp).state == TrackingStatus.OK
    keyframes = probe.heard["status"][-1].keyframes
    assert "before the last" in refused(probe, good(stamp)).reason_text
    assert "before the last" in refused(probe, good(stamp - STEP_NS // 2)).reason_text
    assert probe.track(cloud_at(0), next(_stamps)).keyframes == keyframes


def test_clouds_of_nothing_are_lost_not_an_error(probe: Probe) -> None:
    for points in (np.zeros((0, 3)), np.full((4, 5, 3), np.nan), np.ones((1, 3)), np.full((100, 3), 1e30)):
        status = probe.track(points.astype(np.float32), next(_stamps))
        assert status.state == TrackingStatus.LOST
        assert status.reason == TrackingStatus.REASON_TOO_FEW_POINTS
    status = probe.track(cloud_at(0), next(_stamps))
    assert status.state in (TrackingStatus.OK, TrackingStatus.RELOCALISED)


def test_refusals_are_in_the_diagnostics(probe: Probe) -> None:
    refused(probe, broken("no z"))
    probe.heard["diagnostics"].clear()
    entry = probe.until(lambda: probe.diagnosis(": input"))
    values = {pair.key: pair.value for pair in entry.values}
    assert int(values["rejected: bad input"]) >= 1
    assert "no field 'z'" in values["last rejection"]


def test_a_sensor_at_ten_times_the_rate_only_costs_drops(probe: Probe, node: NodeProcess) -> None:
    probe.track(cloud_at(0), next(_stamps))
    before = probe.heard["status"][-1]
    clouds = [cloud_message(cloud_at(0), next(_stamps), "camera") for _ in range(60)]
    for message in clouds:
        probe.clouds.publish(message)
        probe.spin(0.01)
    last = clouds[-1].header.stamp
    probe.until(lambda: probe.heard["status"][-1].header.stamp == last, 30, "for the newest cloud")
    after = probe.heard["status"][-1]
    received = after.frames_received - before.frames_received
    processed = after.frames_processed - before.frames_processed
    dropped = after.frames_dropped - before.frames_dropped
    assert received == processed + dropped
    assert dropped > 0
    assert node.alive()


def until_silence_is_named(probe: Probe, seconds: float) -> DiagnosticStatus:
    """Wait until the diagnostics say that a publisher is matched and nothing came; that entry."""
    probe.heard["diagnostics"].clear()

    def silent() -> bool:
        entry = probe.diagnosis(": input")
        return entry is not None and "A publisher is connected, but no message" in entry.message

    probe.until(silent, seconds, "for the diagnostics to name the silence")
    return probe.diagnosis(": input")


def test_a_silent_sensor_is_reported_with_the_remedy(probe: Probe) -> None:
    assert "fastdds.xml" in until_silence_is_named(probe, 20).message


def test_clouds_that_the_transport_drops_are_reported_within_seconds(probe: Probe) -> None:
    """A driver with best effort and Fast DDS's default shared memory: 12 MB hardly pass, and nobody gets an error."""
    received = probe.track(cloud_at(0), next(_stamps)).frames_received
    best_effort = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
    driver = probe.node.create_publisher(PointCloud2, "points", best_effort)
    probe.until(lambda: driver.get_subscription_count() > 0, what="for the driver to be matched")
    large = np.resize(cloud_at(0).reshape(-1, 3), (1_000_000, 3))
    for _ in range(3):
        driver.publish(cloud_message(large, next(_stamps), "camera"))
        probe.spin(0.5)
    counted = {pair.key: pair.value for pair in until_silence_is_named(probe, 12).values}
    probe.node.destroy_publisher(driver)
    if int(counted["received"]) == received + 3:
        pytest.skip("12 MB pass on this machine: there was nothing to report")
