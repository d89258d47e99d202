# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The real node process in rigid mode, over real DDS: what it publishes, its services, parameters and lifecycle."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus
from lifecycle_msgs.msg import Transition
from rclpy.node import Node

from conftest import REPOSITORY
from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.ros.compat import matrix_from_quaternion
from lepard_ros.ros.conversion import stamp_to_ns
from node_harness import (
    CAMERA,
    SENSOR_FRAME,
    STEP_NS,
    NodeProcess,
    Probe,
    box_room,
    cloud_at,
    look,
    pose_at,
)

_session = count()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("maps")
    with NodeProcess(map_directory=str(folder), map_period=0.1, keyframe_distance=0.1) as process:
        yield process


@pytest.fixture(scope="module")
def connection(node: NodeProcess) -> Iterator[Probe]:
    with Probe() as probe:
        probe.connect()
        yield probe


@pytest.fixture
def probe(connection: Probe) -> Probe:
    """The connection after a reset, with nothing heard yet."""
    assert connection.call("reset").success
    for messages in connection.heard.values():
        messages.clear()
    return connection


@pytest.fixture
def start() -> int:
    """A stamp for the first cloud, later than those of other tests."""
    return time.time_ns() + next(_session)


def matrix_of(pose: object) -> np.ndarray:
    matrix = matrix_from_quaternion([getattr(pose.orientation, axis) for axis in "xyzw"])  # type: ignore[attr-defined]
    matrix[:3, 3] = [getattr(pose.position, axis) for axis in "xyz"]  # type: ignore[attr-defined]
    return matrix


def test_the_node_says_at_its_start_what_runs(node: NodeProcess, connection: Probe) -> None:
    log = node.log()
    assert re.search(r"lepard_ros \d+\.\d+\.\d+, rigid mode, weights rigid, device \w+, threads: \d+", log), log
    assert "Input: /points (sensor_data)" in log
    assert "Frames: map -> the frame of the clouds" in log


def test_the_documented_security_policy_allows_all_that_the_node_does(connection: Probe) -> None:
    policy = re.search(r"<policy.*</policy>", (REPOSITORY / "docs" / "security.md").read_text(), re.DOTALL)
    assert policy is not None
    (profile,) = ElementTree.fromstring(policy[0]).iter("profile")
    for path, query in _endpoints_of_the_node(connection.node).items():
        names = {str(one.text).replace("~", "/lepard") for one in profile.findall(path)}
        allowed = {name if name.startswith("/") else f"/{name}" for name in names}
        # DDS discovers them one by one, and forgets those of a killed node of the same name only after 20 s.
        connection.until(lambda query=query, allowed=allowed: query() and query() <= allowed, 40.0, path)


def _endpoints_of_the_node(ask: Node) -> dict[str, Callable[[], set[str]]]:
    """Names of its topics and services, by their path in a policy.

    Asked by topic, not by node: by node, DDS answers for the first participant that has a node of this name, and that
    may be one that has just ended and has no endpoints any more.
    """

    def topics(endpoints: Callable[[str], list[Any]]) -> set[str]:
        names = [name for name, _ in ask.get_topic_names_and_types()]
        return {name for name in names if any(end.node_name == "lepard" for end in endpoints(name))}

    return {
        "topics[@publish]/topic": lambda: topics(ask.get_publishers_info_by_topic),
        "topics[@subscribe]/topic": lambda: topics(ask.get_subscriptions_info_by_topic),
        "services/service": lambda: {
            name for name, _ in ask.get_service_names_and_types() if name.startswith("/lepard/")
        },
    }


def test_clouds_become_tf_odometry_matches_and_a_map(probe: Probe, start: int) -> None:
    for step in range(6):
        status = probe.track(cloud_at(step), start + step * STEP_NS)
        assert status.state == TrackingStatus.OK
    probe.until(lambda: len(probe.heard["odometry"]) == 6 and len(probe.heard["markers"]) == 5)
    _check_tf_and_odometry(probe, start)
    _check_correspondences(probe, start)
    _check_map(probe)
    assert status.frames_processed - status.frames_rejected >= 6
    assert status.mode == "rigid"
    assert set(status.stage_names) >= {"see", "track"}
    assert status.keyframes >= 2


def _check_tf_and_odometry(probe: Probe, start: int) -> None:
    transforms = probe.transforms()
    assert set(transforms) == {("map", SENSOR_FRAME)}
    assert [stamp_to_ns(one.header.stamp) for one in transforms["map", SENSOR_FRAME]] == [
        start + step * STEP_NS for step in range(6)
    ]
    for step, odometry in enumerate(probe.heard["odometry"]):
        truth = np.linalg.inv(pose_at(0)) @ pose_at(step)
        pose = matrix_of(odometry.pose.pose)
        assert np.linalg.norm(pose[:3, 3] - truth[:3, 3]) < 0.03
        covariance = odometry.pose.covariance.reshape(6, 6)
        assert np.linalg.eigvalsh(covariance).min() > 0, "the first pose has one, too"
        assert odometry.child_frame_id == SENSOR_FRAME
        translation = transforms["map", SENSOR_FRAME][step].transform.translation
        assert (translation.x, translation.y, translation.z) == tuple(pose[:3, 3])


def _check_correspondences(probe: Probe, start: int) -> None:
    messages = probe.heard["correspondences"]
    assert len(messages) == 5  # the first cloud has nothing to be matched with
    for message in messages:
        count_ = len(message.confidence)
        assert len(message.source) == len(message.target) == 3 * count_
        assert len(message.inlier) == count_
        assert message.accepted
        assert message.header.frame_id == SENSOR_FRAME
        assert (stamp_to_ns(message.target_header.stamp) - start) % STEP_NS == 0


def _check_map(probe: Probe) -> None:
    points = probe.until(lambda: probe.heard["map"])[-1]
    assert points.header.frame_id == "map"
    assert len(decode_points(points)) > 200
    assert len(probe.heard["path"][-1].poses) >= 1
    for message in probe.heard["markers"]:
        assert [marker.ns for marker in message.markers] == ["inliers", "outliers"]


def test_the_node_gives_the_poses_that_the_replay_of_a_bag_gives(probe: Probe, start: int, tmp_path: Path) -> None:
    from lepard_ros.data.bag_reader import open_bag
    from lepard_ros.data.bag_writer import BagWriter
    from lepard_ros.evaluation.replay import replay_bag
    from lepard_ros.matcher import Matcher
    from lepard_ros.tracking.rigid import RigidTracker
    from lepard_ros.tracking.track import TrackerSettings

    with closing(BagWriter(tmp_path / "bag", CAMERA)) as writer:
        for step in range(6):
            depth = look(box_room(), pose_at(step))
            depth[:4] = 9.0  # beyond the range: left out by both
            writer.write(start + step * STEP_NS, depth)
    tracker = RigidTracker(Matcher.from_pretrained("rigid", device="cpu"), TrackerSettings(keyframe_distance=0.1))
    with open_bag(tmp_path / "bag") as bag:
        frames = list(bag.frames(bag.cloud_topic()))
        tracks = replay_bag(bag, tracker, bag.cloud_topic()).tracks
    for step, (frame, track) in enumerate(zip(frames, tracks, strict=True)):
        probe.track(frame.points, frame.stamp_ns)
        pose = matrix_of(probe.until_heard("odometry", step + 1)[-1].pose.pose)
        assert track.pose is not None
        np.testing.assert_allclose(pose, track.pose, atol=1e-6)


def test_diagnostics_tell_counts_and_state(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    probe.heard["diagnostics"].clear()
    tracking = probe.until(lambda: probe.diagnosis(": tracking"))
    values = {pair.key: pair.value for pair in tracking.values}
    assert values["state"] == "OK"
    assert values["mode"] == "rigid"
    assert float(values["latency median [ms]"]) > 0
    received = {pair.key: pair.value for pair in probe.diagnosis(": input").values}["received"]
    assert int(received) >= 1


def test_a_wall_that_fills_the_view_is_lost_and_nothing_is_published(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    probe.track(cloud_at(1), start + STEP_NS)  # a map that nothing else registered to would be given up instead
    probe.heard["tf"].clear()
    wall = np.full((40, 40, 3), 2.0, np.float32)
    wall[..., :2] = np.stack(np.meshgrid(np.linspace(-1, 1, 40), np.linspace(-1, 1, 40)), axis=-1)
    status = probe.track(wall, start + 2 * STEP_NS)
    assert status.state == TrackingStatus.LOST
    assert status.reason != TrackingStatus.REASON_NONE
    assert status.reason_text
    probe.spin(0.3)
    assert not probe.transforms()
    assert probe.track(cloud_at(0.5), start + 3 * STEP_NS).state in (TrackingStatus.OK, TrackingStatus.RELOCALISED)


def test_reset_forgets_the_map(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    assert not probe.track(cloud_at(1), start + STEP_NS).new_keyframe
    assert probe.call("reset").success
    assert probe.track(cloud_at(2), start + 2 * STEP_NS).new_keyframe


def test_parameters_change_or_are_refused_with_a_sentence(probe: Probe) -> None:
    assert probe.set_parameter("max_range", 5.5).successful
    for name, value, word in [
        ("max_range", -1.0, "between"),
        ("max_range", "far", "must be a number"),
        ("min_range", 50.0, "no point is left"),
        ("mode", "deformable", "restart"),
        ("max_rnage", 2.0, "did you mean 'max_range'"),
        ("map_name", "../x", "plain name"),
    ]:
        answer = probe.set_parameter(name, value)
        assert not answer.successful
        assert word in answer.reason
    assert probe.set_parameter("max_range", 6.0).successful


def test_a_changed_range_is_used(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    assert probe.set_parameter("max_range", 0.5).successful  # nothing in the room is that near
    assert probe.track(cloud_at(1), start + STEP_NS).state == TrackingStatus.LOST
    assert probe.set_parameter("max_range", 6.0).successful


def test_save_writes_below_the_chosen_directory(probe: Probe, start: int) -> None:
    assert "no keyframe" in probe.call("save").message
    probe.track(cloud_at(0), start)
    answer = probe.call("save")
    assert answer.success, answer.message
    assert "1 keyframes written" in answer.message


def test_deactivate_is_silence_and_activate_goes_on_in_the_same_map(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    assert probe.change_state(Transition.TRANSITION_DEACTIVATE)
    probe.heard["status"].clear()
    probe.send(cloud_at(1), start + STEP_NS)
    probe.spin(1.0)
    assert not probe.heard["status"]
    assert probe.change_state(Transition.TRANSITION_ACTIVATE)
    probe.connect()
    status = probe.track(cloud_at(1), start + 2 * STEP_NS)
    assert status.state in (TrackingStatus.OK, TrackingStatus.RELOCALISED)
    assert not status.new_keyframe
    assert status.frames_received == 1


def test_deactivation_discards_the_cloud_being_processed(probe: Probe, start: int) -> None:
    probe.track(cloud_at(0), start)
    # Takes seconds; a larger cloud would not fit in the memory that Fast DDS shares by default.
    heavy = np.random.default_rng(0).uniform(-4, 4, (35_000, 3)).astype(np.float32)
    probe.send(heavy, start + STEP_NS)
    probe.spin(0.1)
    assert probe.change_state(Transition.TRANSITION_DEACTIVATE)
    for topic in ("status", "tf", "odometry"):
        probe.heard[topic].clear()
    probe.spin(4.0)
    assert not probe.heard["status"] + probe.heard["tf"] + probe.heard["odometry"]
    assert probe.change_state(Transition.TRANSITION_ACTIVATE)
    probe.connect()


def test_cleanup_and_configure_work_again(probe: Probe, start: int) -> None:
    for transition in ("DEACTIVATE", "CLEANUP", "CONFIGURE", "ACTIVATE"):
        assert probe.change_state(getattr(Transition, f"TRANSITION_{transition}"))
    probe.connect()
    assert probe.track(cloud_at(0), start).new_keyframe


def test_the_status_says_how_late_it_is(probe: Probe) -> None:
    stamp = time.time_ns()
    status = probe.track(cloud_at(0), stamp)
    assert 0 < status.latency < (time.time_ns() - stamp) * 1e-9
    assert math.isnan(status.residual)  # nothing to lie on yet
