# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node's two workers over real DDS: clouds keep coming while the network works beside tracking."""

import time
from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus
from lifecycle_msgs.msg import Transition

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.ros.conversion import stamp_to_ns
from lepard_ros.synthesis.room_sequences import room_sequence
from node_harness import SENSOR_FRAME, NodeProcess, Probe, patience

PERIOD_NS = 200_000_000
LOOP_CLOUDS = 20  # after the walk has come back to its start: more than the second worker's delay
POSED = (TrackingStatus.OK, TrackingStatus.RELOCALISED)
_session = count(1)


@pytest.fixture(scope="module")
def walk() -> list[np.ndarray]:
    """Clouds of a walk around a room that comes back to its start, and goes on for a while."""
    video = room_sequence(seed=3, frames=60, rate=5.0, width=160)
    clouds = [depth_to_points(depth, video.camera) for depth in video.depths]
    return [*clouds, *clouds[1 : LOOP_CLOUDS + 1]]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(map_directory=str(tmp_path_factory.mktemp("maps"))) as process:
        yield process
        assert "Tracking a cloud failed" not in process.log()


@pytest.fixture
def probe(node: NodeProcess) -> Iterator[Probe]:
    """A new listener, and a node without a map."""
    with Probe() as probe:
        probe.connect()
        assert probe.call("reset").success
        probe.heard["status"].clear()
        yield probe


@pytest.fixture
def start() -> int:
    """A stamp for the first cloud, later than those of other tests."""
    return time.time_ns() + next(_session) * 100 * 10**9


def stream(probe: Probe, clouds: Sequence[np.ndarray], start: int) -> list[TrackingStatus]:
    """Send clouds at a sensor's pace, without waiting for answers; the statuses up to the last cloud's."""
    before = len(probe.heard["status"])
    last = start + (len(clouds) - 1) * PERIOD_NS
    for number, points in enumerate(clouds):
        probe.send(points, start + number * PERIOD_NS)
        probe.spin(PERIOD_NS * 1e-9 * patience())  # a busy machine gets a slower sensor
    probe.until(lambda: stamp_to_ns(probe.heard["status"][-1].header.stamp) == last, 60.0, "for the last cloud")
    return probe.heard["status"][before:]


@pytest.mark.slow
def test_a_loop_is_closed_while_tracking_goes_on(probe: Probe, walk: list[np.ndarray], start: int) -> None:
    statuses = stream(probe, walk, start)
    assert sum(status.new_keyframe for status in statuses) > 10, "the second worker had something to do"
    assert any(status.loop_closed for status in statuses)
    assert sum(status.state == TrackingStatus.OK for status in statuses) >= 0.9 * len(statuses)
    assert len(statuses) >= 0.9 * len(walk), "tracking does not wait for the second worker"
    posed = [stamp_to_ns(status.header.stamp) for status in statuses if status.state in POSED]
    probe.until(lambda: len(probe.transforms()["map", SENSOR_FRAME]) >= len(posed))
    sent = {stamp_to_ns(one.header.stamp) for one in probe.transforms()["map", SENSOR_FRAME]}
    assert set(posed) <= sent, "every pose is on TF"


@pytest.mark.slow
def test_the_place_is_found_again_while_clouds_keep_coming(probe: Probe, walk: list[np.ndarray], start: int) -> None:
    stream(probe, walk[:20], start)
    statuses = stream(probe, walk[4:16], start + 60 * 10**9)  # nobody knows what happened in this minute
    states = [status.state for status in statuses]
    assert TrackingStatus.RELOCALISED in states, [status.reason_text for status in statuses]
    assert TrackingStatus.OK not in states[: states.index(TrackingStatus.RELOCALISED)], "no jump without a word"
    assert states[-1] == TrackingStatus.OK
    last = statuses[-1]
    assert last.frames_received == last.frames_processed + last.frames_dropped, "every cloud is accounted for"


@pytest.mark.slow
def test_deactivation_in_the_middle_of_background_work(probe: Probe, walk: list[np.ndarray], start: int) -> None:
    stream(probe, walk[:3], start)
    for number in range(3, 9):  # each shows something new, so that the second worker is busy
        probe.send(walk[4 * number], start + 4 * number * PERIOD_NS)
        probe.spin(0.05)
    asked = time.monotonic()
    assert probe.change_state(Transition.TRANSITION_DEACTIVATE)
    assert time.monotonic() - asked < 5.0 * patience()
    heard = len(probe.heard["tf"])
    probe.spin(1.0)
    assert len(probe.heard["tf"]) == heard, "an inactive node says nothing, whatever its second worker finds"
    assert probe.change_state(Transition.TRANSITION_ACTIVATE)
    probe.connect()
    status = probe.track(walk[2], start + 90 * 10**9)
    assert status.keyframes >= 1


@pytest.mark.slow
def test_what_the_second_worker_finds_for_a_map_that_is_gone_is_dropped(
    probe: Probe, walk: list[np.ndarray], start: int
) -> None:
    stream(probe, walk[:12], start)
    assert probe.call("reset").success
    statuses = stream(probe, walk[30:50], start + 60 * 10**9)  # longer than the second worker's delay
    assert statuses[0].keyframe_id == 0 and statuses[0].keyframes == 1, "the map is a new one"
    assert statuses[-1].state == TrackingStatus.OK
    assert statuses[-1].keyframes == sum(status.new_keyframe for status in statuses)
