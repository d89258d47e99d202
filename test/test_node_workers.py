# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node's two workers over real DDS, with the shipped weights: tracking goes on while the network works.

What becomes of results for a map that was reset is told in test_tracking_workers.py: the node saves a map before a
reset, and so waits for them.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus
from lifecycle_msgs.msg import Transition

from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.ros.conversion import matrix_from_pose, stamp_to_ns
from node_harness import STEP_NS, NodeProcess, Probe, cloud_at, patience, pose_at

pytestmark = pytest.mark.slow

DELAY = 15  # clouds until the second worker's results come in: TrackerSettings.background_clouds
LOOP = 9  # keyframes after which an old one counts as seen again: TrackerSettings.loop_gap and one
EARLIER_NS = 10_000_000_000  # clouds come faster here than their stamps say, and none may lie in the future
OUTPUTS = ("status", "tf", "odometry", "pose", "map")


def follow(probe: Probe, steps: Sequence[float]) -> list[TrackingStatus]:
    """Send the clouds of some steps, each after the status of the one before."""
    start = time.time_ns() - EARLIER_NS
    return [probe.track(cloud_at(step), start + number * STEP_NS) for number, step in enumerate(steps)]


def errors(probe: Probe, steps: Sequence[float]) -> list[float]:
    """Metres by which the newest odometry is off, for so many steps, in a map that began at step 0."""
    heard = probe.until_heard("odometry", len(steps))[-len(steps) :]
    poses = [matrix_from_pose(message.pose.pose) for message in heard]
    truth = [invert(pose_at(0)) @ pose_at(step) for step in steps]
    return [motion_between(*pair)[0] for pair in zip(poses, truth, strict=True)]


def forget(probe: Probe) -> None:
    """A new map, and nothing heard yet."""
    assert probe.call("reset").success
    for messages in probe.heard.values():
        messages.clear()


def second_worker_ticks(pid: int) -> int:
    """Ticks of the processor that the node's less urgent thread has used, see `tracking/background.py`."""
    stats = [file.read_text().rsplit(")", 1)[1].split() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    own = min(int(fields[16]) for fields in stats)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats if int(fields[16]) > own)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that makes a keyframe of every cloud of a new view, so that its second worker falls behind."""
    with NodeProcess(map_directory=str(tmp_path_factory.mktemp("maps")), keyframe_distance=0.04) as process:
        yield process


def test_a_loop_is_closed_while_tracking_goes_on(probe: Probe, node: NodeProcess) -> None:
    forget(probe)
    there_and_back = [*range(LOOP + 1), *range(LOOP, LOOP - DELAY, -1)]
    statuses = follow(probe, there_and_back)
    keyframes = [number for number, status in enumerate(statuses) if status.new_keyframe]
    assert keyframes[: LOOP + 1] == list(range(LOOP + 1))
    assert [number for number, status in enumerate(statuses) if status.loop_closed][:1] == [LOOP + DELAY]
    assert all(status.state == TrackingStatus.OK for status in statuses)
    assert not any("search" in status.stage_names for status in statuses), "tracking did not wait for the network"
    assert max(errors(probe, there_and_back)) < 0.05
    assert second_worker_ticks(node.pid) > 0


def test_the_sensor_is_found_again_while_clouds_keep_coming(probe: Probe) -> None:
    forget(probe)
    before = follow(probe, range(LOOP))[-1]
    start = stamp_to_ns(before.header.stamp) + STEP_NS
    assert probe.track(covered_lens(), start).state == TrackingStatus.LOST
    for messages in probe.heard.values():
        messages.clear()
    steps = [2 + 0.3 * number for number in range(20)]
    for number, step in enumerate(steps, start=1):  # ten a second, whether the node is done with the last one or not
        probe.send(cloud_at(step), start + number * STEP_NS)
        probe.spin(STEP_NS * 1e-9)
    last = start + len(steps) * STEP_NS
    probe.until(lambda: probe.heard["status"] and stamp_to_ns(probe.heard["status"][-1].header.stamp) == last)
    statuses = probe.heard["status"]
    states = [status.state for status in statuses]
    found = states.index(TrackingStatus.RELOCALISED)
    assert set(states[:found]) <= {TrackingStatus.LOST}, "no pose before the place is found"
    assert set(states[found + 1 :]) == {TrackingStatus.OK}
    last_status = statuses[-1]  # clouds may be lost on the way; what came is answered, or counted as dropped
    assert last_status.frames_received == last_status.frames_processed + last_status.frames_dropped
    seen = [round((stamp_to_ns(status.header.stamp) - start) / STEP_NS) - 1 for status in statuses[found:]]
    assert max(errors(probe, [steps[number] for number in seen])) < 0.05
    assert len(probe.heard["odometry"]) == len(seen), "nothing is published while the sensor is lost"


def covered_lens() -> NDArray[np.float32]:
    """A hand before the sensor: a plane half a metre away, organised (40, 40, 3)."""
    plane = np.full((40, 40, 3), 0.5, np.float32)
    plane[..., :2] = np.stack(np.meshgrid(np.linspace(-0.3, 0.3, 40), np.linspace(-0.3, 0.3, 40)), axis=-1)
    return plane


def test_deactivation_in_the_middle_of_background_work(probe: Probe, node: NodeProcess) -> None:
    forget(probe)
    assert follow(probe, range(8))[-1].keyframes == 8
    began = time.monotonic()
    assert probe.change_state(Transition.TRANSITION_DEACTIVATE)
    assert time.monotonic() - began < 5.0 * patience()
    used = second_worker_ticks(node.pid)
    for topic in OUTPUTS:
        probe.heard[topic].clear()
    probe.until(lambda: second_worker_ticks(node.pid) > used, what="for the second worker, which had work left")
    assert probe.change_state(Transition.TRANSITION_ACTIVATE)
    probe.connect()
    assert not any(probe.heard[topic] for topic in OUTPUTS)
    (status,) = follow(probe, [8])
    assert status.state in (TrackingStatus.OK, TrackingStatus.RELOCALISED) and status.keyframes >= 8
    assert max(errors(probe, [8])) < 0.05
