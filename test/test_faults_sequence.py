# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Clouds whose stamp or frame does not continue the last one, over DDS: the map outlives them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus

from node_harness import STEP_NS, NodeProcess, Probe, cloud_at

pytestmark = pytest.mark.slow
SECOND = 10**9


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("maps")


@pytest.fixture(scope="module")
def node(maps: Path) -> Iterator[NodeProcess]:
    with NodeProcess(map_directory=str(maps), keyframe_distance=0.1, change_after=3) as process:
        yield process


def walk(probe: Probe) -> tuple[int, TrackingStatus]:
    """A new map of a few keyframes; the stamp for the next cloud and the last status."""
    assert probe.call("reset").success
    start = time.time_ns()
    for step in range(4):
        status = probe.track(cloud_at(2 * step), start + step * STEP_NS)
    assert status.keyframes >= 2
    return start + 4 * STEP_NS, status


@pytest.mark.parametrize(
    ("offset", "frame", "word"),
    [
        (0, "other_camera", "frame changed"),
        (None, "camera", "jumped back"),
        (-16 * SECOND // 10 - STEP_NS, "camera", "jumped back by 1.6 s"),
        (9 * SECOND, "camera", "jumped ahead"),
    ],
    ids=["frame", "1970", "1.6 s back", "9 s ahead"],
)
def test_one_strange_cloud_is_refused_and_tracking_goes_on(
    probe: Probe, offset: int | None, frame: str, word: str
) -> None:
    stamp, before = walk(probe)
    strange = SECOND if offset is None else stamp + offset
    refused = probe.track(cloud_at(30), strange, frame)
    assert (refused.state, refused.reason) == (TrackingStatus.REFUSED, TrackingStatus.REASON_BAD_INPUT)
    assert word in refused.reason_text
    assert refused.keyframes == before.keyframes
    assert refused.frames_rejected == before.frames_rejected + 1
    after = probe.track(cloud_at(8), stamp + STEP_NS)
    assert after.state == TrackingStatus.OK
    assert after.keyframes >= before.keyframes


@pytest.mark.parametrize(("offset", "frame"), [(-60 * SECOND, "camera"), (0, "other_camera")], ids=["time", "frame"])
def test_a_lasting_change_is_searched_in_the_map_that_is_kept(probe: Probe, offset: int, frame: str) -> None:
    stamp, before = walk(probe)
    states = []
    for step in range(5):
        status = probe.track(cloud_at(7), stamp + offset + step * STEP_NS, frame)
        states.append(status.state)
        assert status.keyframes >= before.keyframes
    assert states[:2] == [TrackingStatus.REFUSED] * 2
    found = states.index(TrackingStatus.RELOCALISED)
    assert set(states[2:found]) <= {TrackingStatus.LOST}


@pytest.mark.parametrize("gap", [2.5, 5.0])
def test_a_slow_sensor_is_followed(probe: Probe, gap: float) -> None:
    """gap: seconds between two clouds, really waited: stamps that run ahead of the clock would be a jump."""
    assert probe.call("reset").success
    states = []
    for step in range(4):
        sent = time.monotonic()
        states.append(probe.track(cloud_at(step), time.time_ns()).state)
        probe.spin(max(0.0, sent + gap - time.monotonic()) if step < 3 else 0.0)
    assert states[-2:] == [TrackingStatus.OK] * 2, f"{states}: a slow sensor must not start a new map each time"


def test_a_restart_drops_the_map_only_if_asked_and_sets_it_aside(probe: Probe, node: NodeProcess, maps: Path) -> None:
    stamp, _ = walk(probe)
    assert probe.set_parameter("reset_on_time_jump", True).successful
    for step in range(3):
        status = probe.track(cloud_at(20), stamp - 60 * SECOND + step * STEP_NS)
    assert (status.state, status.keyframes, status.new_keyframe) == (TrackingStatus.OK, 1, True)
    assert (maps / "map_unsaved" / "map.json").is_file()
    assert "backup" in node.log()
    assert probe.set_parameter("reset_on_time_jump", False).successful


def test_reset_sets_an_unsaved_map_aside_and_says_where(probe: Probe, maps: Path) -> None:
    walk(probe)
    assert "map_unsaved" in probe.call("reset").message
    walk(probe)
    assert probe.call("save").success
    assert "backup" not in probe.call("reset").message
