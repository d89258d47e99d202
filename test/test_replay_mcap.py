# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard replay --mcap`: the input and what the node would publish, read back with rosbags."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
pytest.importorskip("rosbags")
pytest.importorskip("evo")

from lepard_ros.msg import Correspondences, DeformationGraph, TrackingStatus

from box_room import CAMERA, render, sweep
from lepard_ros import cli
from lepard_ros.cloud.depth import Camera
from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.data.bag_reader import open_bag
from lepard_ros.data.bag_writer import BagWriter
from lepard_ros.data.trajectories import poses_from_rows, read_tum
from node_harness import untrained_weights

COUNT = 6
INPUT = {"/camera/depth/points", "/camera/depth/camera_info", "/ground_truth"}


def read(path: Path) -> dict[str, list[Any]]:
    """Decoded messages of a bag by topic, in order, by a reader that knows nothing of ROS or of this package."""
    from rosbags.highlevel import AnyReader

    found: dict[str, list[Any]] = {}
    with AnyReader([path]) as reader:
        times = []
        for connection, recorded, raw in reader.messages():
            times.append(recorded)
            found.setdefault(connection.topic, []).append(reader.deserialize(raw, connection.msgtype))
    assert times == sorted(times)
    return found


def raw(path: Path) -> Iterator[tuple[str, int, bytes]]:
    with open_bag(path) as bag:
        yield from ((c.topic, when, bytes(data)) for c, when, data in bag.raw_messages(lambda topic, _: topic in INPUT))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bag that was recorded 5 s after its stamps, with a transform that would give the camera a second parent."""
    path = tmp_path_factory.mktemp("mcap") / "room"
    with closing(BagWriter(path, CAMERA, tf=False)) as writer:
        for i, pose in enumerate(sweep(COUNT, -15, 25)):
            # The last cloud comes later: it is matched with keyframes instead of aligned from the predicted motion.
            stamp = 10**9 + (i + 6 * (i == COUNT - 1)) * 10**8
            writer.write(stamp, render(pose, i), pose)
            writer._put("/tf", stamp, writer._transform(stamp, pose))
    return path


@pytest.fixture(scope="module")
def result(room: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    arguments = ["replay", str(room), "--weights", "fpfh", "--no-pictures", "--output", str(folder / "out")]
    assert cli.main([*arguments, "--truth", "/ground_truth", "--mcap", str(folder / "bag")]) == 0
    return folder


def test_the_poses_of_the_bag_are_those_of_the_replay(result: Path) -> None:
    trajectory, found = read_tum(result / "out" / "trajectory.tum"), read(result / "bag")
    assert len(trajectory) == COUNT == len(found["/lepard/odometry"]) == len(found["/lepard/pose"]) == len(found["/tf"])
    for index in range(COUNT):
        odometry, (transform,) = found["/lepard/odometry"][index], found["/tf"][index].transforms
        stamp = odometry.header.stamp
        assert stamp.sec + stamp.nanosec * 1e-9 == pytest.approx(trajectory.stamps[index], abs=1e-9)
        assert (transform.header.frame_id, transform.child_frame_id) == ("map", "camera_depth_optical_frame")
        for place, turn in (
            (odometry.pose.pose.position, odometry.pose.pose.orientation),
            (transform.transform.translation, transform.transform.rotation),
        ):
            row = np.array([[place.x, place.y, place.z, turn.x, turn.y, turn.z, turn.w]])
            assert np.allclose(poses_from_rows(row)[0], trajectory.poses[index], atol=1e-6)


def test_matches_status_path_and_map_are_there(result: Path) -> None:
    found = read(result / "bag")
    assert [one.state for one in found["/lepard/status"]] == [TrackingStatus.OK] * COUNT
    assert found["/lepard/status"][-1].frames_processed == COUNT
    last = found["/lepard/correspondences"][-1]
    assert len(last.source) == len(last.target) == 3 * len(last.inlier) > 0
    assert found["/lepard/markers"][-1].markers
    assert len(decode_points(found["/lepard/map"][-1])) > 500
    assert len(found["/lepard/path"][0].poses) >= 1


def test_the_input_is_copied_byte_by_byte_without_its_transforms(room: Path, result: Path) -> None:
    assert list(raw(room)) == list(raw(result / "bag"))
    assert all(one.transforms[0].header.frame_id == "map" for one in read(result / "bag")["/tf"])


def test_the_types_are_those_of_ros_and_the_map_is_latched(result: Path) -> None:
    """A player refuses a type whose hash is not the installed one's."""
    from rosbags.highlevel import AnyReader
    from rosbags.interfaces import QosDurability

    with AnyReader([result / "bag"]) as reader:
        by_topic = {one.topic: one for one in reader.connections}
    for topic, kind in (("status", TrackingStatus), ("correspondences", Correspondences)):
        assert by_topic[f"/lepard/{topic}"].digest == type_hash(kind)
    qos = {topic: one.ext.offered_qos_profiles[0].durability for topic, one in by_topic.items()}
    latched = {topic for topic, durability in qos.items() if durability is QosDurability.TRANSIENT_LOCAL}
    assert latched == {"/lepard/map", "/lepard/path"}


def type_hash(kind: Any) -> str:
    """RIHS01 of a built message, as rosidl wrote it beside the definition."""
    import json

    import lepard_ros.msg as built

    places = [parent / "share/lepard_ros/msg" for parent in Path(built.__file__).parents]
    share = next(place for place in places if place.is_dir()) / f"{kind.__name__}.json"
    hashes = {one["type_name"]: one["hash_string"] for one in json.loads(share.read_text())["type_hashes"]}
    return str(hashes[f"lepard_ros/msg/{kind.__name__}"])


def test_a_bag_that_exists_is_not_overwritten(room: Path, result: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.stat().st_size for path in (result / "bag").iterdir())
    arguments = ["replay", str(room), "--weights", "fpfh", "--no-pictures", "--output", str(result / "again")]
    assert cli.main([*arguments, "--mcap", str(result / "bag")]) == 2
    assert "exists already" in capsys.readouterr().err
    assert before == sorted(path.stat().st_size for path in (result / "bag").iterdir())


SHEET = Camera(60, 50, 75.0, 75.0, 29.5, 24.5)


def bent_sheet(step: int) -> np.ndarray:
    """Depth (50, 60) of a sheet 80 cm before the camera that bends more with every step; nothing behind it."""
    x = SHEET.rays()[..., 0] * 0.8
    return np.where(np.abs(x) < 0.25, 0.8 + 0.15 * step * x**2, 0.0).astype(np.float32)


def test_a_deformation_is_a_topic_too(tmp_path: Path) -> None:
    with closing(BagWriter(tmp_path / "sheet", SHEET, depth=True)) as writer:
        for step in range(3):
            writer.write(10**9 + step * 10**8, bent_sheet(step))
    arguments = ["replay", str(tmp_path / "sheet"), "--mode", "deformable", "--weights", str(untrained_weights())]
    arguments += ["--output", str(tmp_path / "out"), "--max-range", "2", "--mcap", str(tmp_path / "bag")]
    assert cli.main(arguments) == 0
    found = read(tmp_path / "bag")
    warps = found["/lepard/warp"]
    assert len(warps) == len(found["/lepard/warped_points"]) == len(found["/camera/depth/image_rect_raw"]) == 3
    assert [one.status for one in warps] == [DeformationGraph.OK] * 3
    assert warps[-1].target_header.stamp.nanosec == 200_000_000
    assert len(warps[-1].nodes) == len(warps[-1].translations) > 0
    assert np.any(np.array(warps[-1].translations) != 0)
    assert len(decode_points(found["/lepard/model"][0])) > 100
    assert "/tf" not in found
    assert len((tmp_path / "out" / "status.csv").read_text().splitlines()) == 4
    assert (tmp_path / "out" / "model.ply").stat().st_size > 1000


def test_what_belongs_to_rigid_mode_is_refused_in_the_other(room: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["replay", str(room), "--mode", "deformable", "--output", str(tmp_path), "--save-map", "x"]
    assert cli.main(arguments) == 2
    assert "--save-map is for rigid mode" in capsys.readouterr().err
