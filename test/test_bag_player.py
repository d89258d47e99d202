# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard bag play`: a bag over real DDS, message by message as it was recorded, and into the real node."""

import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
from geometry_msgs.msg import PoseStamped
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy, qos_profile_sensor_data
from rclpy.serialization import deserialize_message
from rosbags import interfaces, rosbag2
from rosbags.typesys import Stores, get_types_from_msg, get_typestore
from rosgraph_msgs.msg import Clock

from lepard_ros import cli
from lepard_ros.data.bag_reader import open_bag
from lepard_ros.data.bag_writer import POINTS_TOPIC, BagWriter, reliable_qos
from lepard_ros.ros.bag_player import Pace, message_class, played_qos
from lepard_ros.ros.conversion import stamp_to_ns
from node_harness import CAMERA, NodeProcess, Probe, box_room, look, pose_at
from test_bags import write_transforms

FIRST_NS = 1_700_000_000_250_000_000
STEP_NS = 200_000_000
BEST_EFFORT = reliable_qos()._replace(reliability=interfaces.QosReliability.BEST_EFFORT)


def write_poses(path: Path, count: int = 6) -> None:
    """A bag: best-effort poses, one latched pose, and a message of a type that no installation has."""
    store = get_typestore(Stores.ROS2_JAZZY)
    store.register(get_types_from_msg("float64 value", "robot_of_mine/msg/Odd"))
    types = store.types
    with rosbag2.Writer(path, version=9, storage_plugin=rosbag2.StoragePlugin.MCAP) as bag:

        def connection(topic: str, kind: str, qos: Any) -> Any:
            return bag.add_connection(topic, kind, typestore=store, offered_qos_profiles=[qos])

        kind = "geometry_msgs/msg/PoseStamped"
        live, latched = connection("/live", kind, BEST_EFFORT), connection("/latched", kind, reliable_qos(latched=True))
        odd = connection("/odd", "robot_of_mine/msg/Odd", reliable_qos())
        bag.write(odd, FIRST_NS, store.serialize_cdr(types["robot_of_mine/msg/Odd"](1.0), "robot_of_mine/msg/Odd"))
        for i in range(count):
            recorded_ns = FIRST_NS + i * STEP_NS
            stamp = types["builtin_interfaces/msg/Time"](*divmod(recorded_ns - 40_000_000, 10**9))
            point, turn = types["geometry_msgs/msg/Point"](i, 0, 0), types["geometry_msgs/msg/Quaternion"](0, 0, 0, 1)
            header = types["std_msgs/msg/Header"](stamp, "camera")
            data = store.serialize_cdr(types[kind](header, types["geometry_msgs/msg/Pose"](point, turn)), kind)
            bag.write(live, recorded_ns, data)
            if i == 0:
                bag.write(latched, recorded_ns, data)


def player(bag: Path, *arguments: str) -> "subprocess.Popen[str]":
    """`lepard bag play` in a process of its own."""
    command = [sys.executable, "-m", "lepard_ros.cli", "bag", "play", str(bag), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_messages_come_as_they_were_recorded(tmp_path: Path) -> None:
    """Bytes, order, pace, quality of service and clock; a type that is not installed is named and left out."""
    write_poses(tmp_path / "bag")
    live: list[tuple[float, bytes]] = []
    clock: list[int] = []
    latched: list[PoseStamped] = []
    with Probe() as probe:
        probe.node.create_subscription(
            PoseStamped, "/live", lambda data: live.append((time.monotonic(), data)), qos_profile_sensor_data, raw=True
        )
        probe.node.create_subscription(
            Clock, "/clock", lambda message: clock.append(stamp_to_ns(message.clock)), qos_profile_sensor_data
        )
        process = player(tmp_path / "bag", "--clock", "--rate", "0.5", "--wait-for", "/probe")
        probe.until(lambda: live, 30.0, "for the first message")
        offered = {
            topic: probe.node.get_publishers_info_by_topic(topic)[0].qos_profile for topic in ("/live", "/latched")
        }
        late = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        probe.node.create_subscription(PoseStamped, "/latched", latched.append, late)
        probe.until(lambda: process.poll() is not None, 30.0, "for the end")
        words = process.communicate()[0]
    assert process.returncode == 0, words
    assert "/odd is not played: robot_of_mine/msg/Odd is not installed" in words
    assert "7 messages played" in words
    with open_bag(tmp_path / "bag") as bag:
        recorded = [bytes(data) for _, _, data in bag.raw_messages(lambda topic, _: topic == "/live")]
    assert [data for _, data in live] == recorded
    assert stamp_to_ns(deserialize_message(live[0][1], PoseStamped).header.stamp) == FIRST_NS - 40_000_000
    assert live[-1][0] - live[0][0] == pytest.approx(5 * 0.2 / 0.5, abs=0.5), "half the speed of the recording"
    assert offered["/live"].reliability == ReliabilityPolicy.BEST_EFFORT
    assert offered["/latched"].durability == DurabilityPolicy.TRANSIENT_LOCAL
    assert len(latched) == 1, "one who comes later hears the latched pose, too"
    assert clock == sorted(clock) and clock[-1] == FIRST_NS + 5 * STEP_NS and len(clock) > 20


@pytest.mark.slow
def test_the_real_node_tracks_what_is_played(tmp_path: Path) -> None:
    """In real time, stamped by the bag's clock: as replay.launch.py starts both where ros2bag is not installed."""
    steps = range(12)
    with closing(BagWriter(tmp_path / "bag", CAMERA)) as bag:
        for i in steps:
            bag.write(FIRST_NS + i * STEP_NS, look(box_room(), pose_at(2 * i)), pose_at(2 * i))
    remap = f"points:={POINTS_TOPIC}"
    with NodeProcess("-r", remap, use_sim_time=True) as node, Probe() as probe:
        probe.until(lambda: probe.node.count_publishers("/lepard/status"), 60.0, "for the node's status")
        process = player(tmp_path / "bag", "--clock", "--rate", "0.3", "--wait-for", "lepard")
        last_ns = FIRST_NS + steps[-1] * STEP_NS
        probe.until(lambda: last_ns in stamps(probe, "status") & stamps(probe, "odometry"), 60.0, "for the last cloud")
        words = process.communicate(timeout=30)[0]
        assert process.returncode == 0, words
        assert node.alive()
    *_, status = statuses = probe.heard["status"]
    assert {one.state for one in statuses} == {status.OK}
    assert stamps(probe, "status") <= {FIRST_NS + i * STEP_NS for i in steps}
    assert status.frames_received == len(steps), "every cloud arrived, the first one, too"
    assert status.frames_processed + status.frames_dropped == len(steps), "a busy machine may drop some"
    assert 0 <= status.latency < 5, "by the clock of the bag"
    last = probe.heard["odometry"][-1].pose.pose.position
    expected = (np.linalg.inv(pose_at(0)) @ pose_at(2 * steps[-1]))[:3, 3]
    assert np.linalg.norm(np.array([last.x, last.y, last.z]) - expected) < 0.05


def stamps(probe: Probe, topic: str) -> set[int]:
    """The clouds that a topic spoke of."""
    return {stamp_to_ns(one.header.stamp) for one in probe.heard[topic]}


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_it_ends_cleanly_when_told(tmp_path: Path, stop: signal.Signals) -> None:
    write_poses(tmp_path / "bag", 200)
    with Probe() as probe:
        process = player(tmp_path / "bag")
        probe.until(lambda: probe.node.count_publishers("/live"), 30.0, "for the player")
        process.send_signal(stop)
        words = process.communicate(timeout=20)[0]
        probe.until(lambda: not probe.node.count_publishers("/live"), 5.0, "for the player to leave the graph")
    assert process.returncode == 0, words
    assert "messages played" in words


def test_only_the_topics_that_are_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_transforms(tmp_path / "bag", np.eye(4))
    process = player(tmp_path / "bag", "--topics", "/tf_static", "--rate", "10")
    words = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "1 messages played" in words and "/tf," not in words
    assert cli.main(["bag", "play", str(tmp_path / "bag"), "--topics", "/odometry"]) == 2
    assert "has no topic /odometry; it holds /tf (tf2_msgs" in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_that_is_none_is_refused(tmp_path: Path, rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bag", "play", str(tmp_path), f"--rate={rate}"]) == 2
    assert "--rate" in capsys.readouterr().err


def test_a_topic_is_reliable_and_latched_if_all_its_publishers_were() -> None:
    reliable, latched = reliable_qos(), reliable_qos(latched=True)
    assert played_qos([reliable, BEST_EFFORT]).reliability == ReliabilityPolicy.BEST_EFFORT
    assert played_qos([latched, reliable]).durability == DurabilityPolicy.VOLATILE
    assert played_qos([latched, latched]).durability == DurabilityPolicy.TRANSIENT_LOCAL
    unknown = reliable._replace(history=interfaces.QosHistory.UNKNOWN, depth=0)
    assert played_qos([unknown]).depth == played_qos([]).depth == 10
    assert played_qos([]).reliability == ReliabilityPolicy.RELIABLE


def test_a_bag_makes_nobody_import_what_is_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The types are named by the bag, which may come from anywhere."""
    (tmp_path / "evil_tool.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert message_class("evil_tool/msg/Bomb") is None
    assert message_class("../msg/Bomb") is None
    assert message_class("sensor_msgs/msg/NoSuchThing") is None
    assert message_class("geometry_msgs/msg/PoseStamped") is PoseStamped
    assert message_class("lepard_ros/msg/TrackingStatus").__name__ == "TrackingStatus"


def test_the_pace_is_that_of_the_recording() -> None:
    pace = Pace(rate=2.0)
    assert pace.seconds_until(10**9) == pytest.approx(0.0, abs=0.01)
    assert pace.seconds_until(3 * 10**9) == pytest.approx(1.0, abs=0.01)
    pace.restart(3 * 10**9)
    assert pace.seconds_until(10**9) == pytest.approx(-1.0, abs=0.01)
