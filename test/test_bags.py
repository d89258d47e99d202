# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Bags: what is written is read back, and what is damaged or missing is named in one sentence."""

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from box_room import CAMERA, render, sweep
from lepard_ros import cli
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.data.bag_reader import open_bag
from lepard_ros.data.bag_writer import CAMERA_FRAME, IMAGE_TOPIC, INFO_TOPIC, POINTS_TOPIC, BagWriter
from lepard_ros.data.recordings import DepthFrame, Recording, open_recording, select_frames, shrink_camera
from lepard_ros.data.trajectories import Trajectory, rows_from_poses, write_tum
from lepard_ros.errors import InputError
from lepard_ros.synthesis.room_recording import make_bag, open_source

rosbag2 = pytest.importorskip("rosbags.rosbag2")
STAMPS = [1_700_000_000_123_456_789 + 100_000_000 * i for i in range(4)]


def write_room(path: Path, **options: object) -> list[np.ndarray]:
    """A bag with four views of the room; their depth images."""
    depths = [render(pose, i) for i, pose in enumerate(sweep(4))]
    with closing(BagWriter(path, CAMERA, **options)) as bag:
        for stamp, depth, pose in zip(STAMPS, depths, sweep(4), strict=True):
            bag.write(stamp, depth, pose)
    return depths


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
@pytest.mark.parametrize("depth", [False, True])
def test_a_bag_gives_back_what_was_written(tmp_path: Path, storage: str, depth: bool) -> None:
    depths = write_room(tmp_path / "bag", storage=storage, depth=depth)
    with open_bag(tmp_path / "bag") as bag:
        topic = bag.cloud_topic()
        frames = list(bag.frames(topic))
        truth = bag.truth(frames[0].frame_id)
    assert topic == (IMAGE_TOPIC if depth else POINTS_TOPIC)
    assert [frame.stamp_ns for frame in frames] == STAMPS
    assert {frame.frame_id for frame in frames} == {CAMERA_FRAME}
    for frame, written in zip(frames, depths, strict=True):
        tolerance = 0.002 if depth else 1e-6  # an image holds millimetres
        assert np.allclose(frame.points, depth_to_points(written, CAMERA), atol=tolerance, equal_nan=True)
    assert truth is not None and np.allclose(truth.poses, sweep(4), atol=1e-6)


def test_the_truth_may_go_to_tf(tmp_path: Path) -> None:
    depths = write_room(tmp_path / "bag", tf=True)
    with open_bag(tmp_path / "bag") as bag:
        topics = bag.topics()
        truth = bag.truth(CAMERA_FRAME, "TF")
    assert {name: count for name, (_, count) in topics.items()} == dict.fromkeys(
        (POINTS_TOPIC, INFO_TOPIC, "/tf"), len(depths)
    )
    assert truth is not None and np.allclose(truth.poses, sweep(4), atol=1e-6)


def test_type_hashes_are_those_of_ros(tmp_path: Path) -> None:
    sensor_msgs = pytest.importorskip("sensor_msgs")
    share = [p / "share/sensor_msgs/msg/PointCloud2.json" for p in Path(sensor_msgs.__file__).parents]
    described = next((p for p in share if p.is_file()), None)
    if described is None:
        pytest.skip("this ROS does not ship type descriptions")
    write_room(tmp_path / "bag")
    hashes = {entry["type_name"]: entry["hash_string"] for entry in json.loads(described.read_text())["type_hashes"]}
    assert hashes["sensor_msgs/msg/PointCloud2"] in (tmp_path / "bag" / "metadata.yaml").read_text()


def test_an_existing_bag_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="exists"):
        BagWriter(tmp_path, CAMERA)


def test_a_missing_topic_is_answered_with_those_that_are_there(tmp_path: Path) -> None:
    write_room(tmp_path / "bag")
    with open_bag(tmp_path / "bag") as bag, pytest.raises(InputError, match=f"/lidar.*{POINTS_TOPIC}"):
        bag.cloud_topic("/lidar")
    with open_bag(tmp_path / "bag") as bag, pytest.raises(InputError, match="no poses on /odom"):
        bag.truth(CAMERA_FRAME, "/odom")


def test_an_empty_bag_is_refused(tmp_path: Path) -> None:
    BagWriter(tmp_path / "bag", CAMERA).close()
    with pytest.raises(InputError), open_bag(tmp_path / "bag") as bag:
        bag.cloud_topic()


def test_a_damaged_bag_is_answered_with_its_files(tmp_path: Path, capsys: Any) -> None:
    """From the command line: one sentence that says what was found, and code 2."""
    write_room(tmp_path / "bag")
    data = tmp_path / "bag" / "bag.mcap"
    data.write_bytes(data.read_bytes()[:5000])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("nothing")
    (tmp_path / "words.mcap").write_text("no bag")
    BagWriter(tmp_path / "silent", CAMERA).close()
    for name, sentence in {
        "bag": r"bag\.mcap \(5,000 bytes\), metadata\.yaml",
        "folder": r"no metadata\.yaml; it holds notes\.txt \(7 bytes\)",
        "words.mcap": r"Found: words\.mcap \(6 bytes\)",
        "silent": "it holds no topic at all",
        "absent": "does not exist",
    }.items():
        output = str(tmp_path / "out")
        assert cli.main(["evaluate", "bag", str(tmp_path / name), "--weights", "fpfh", "--output", output]) == 2
        error = capsys.readouterr().err
        assert re.search(sentence, error), error
        assert error.startswith("lepard: ") and error.count("\n") == 1
        assert not (tmp_path / "out").exists()


def test_a_missing_bag_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"), open_bag(tmp_path / "bag"):
        pass


@pytest.mark.parametrize("storage", ["mcap", "sqlite3"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.6, 0.95, 0.999])
def test_a_truncated_bag_is_refused_after_its_last_whole_frame(tmp_path: Path, storage: str, share: float) -> None:
    write_room(tmp_path / "bag", storage=storage)
    data = next(path for path in (tmp_path / "bag").iterdir() if path.suffix in (".mcap", ".db3"))
    whole = data.read_bytes()
    data.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(InputError), open_bag(tmp_path / "bag") as bag:
        list(bag.frames(bag.cloud_topic()))


@pytest.mark.parametrize("content", [b"", b"not yaml: [", b"{}"])
def test_a_bag_without_its_index_file_is_refused(tmp_path: Path, content: bytes) -> None:
    write_room(tmp_path / "bag")
    (tmp_path / "bag" / "metadata.yaml").write_bytes(content)
    with pytest.raises(InputError, match="not a complete bag"), open_bag(tmp_path / "bag"):
        pass


def write_transforms(path: Path, mount: np.ndarray) -> None:
    """A bag whose truth is in TF: world -> base moves, base -> camera is static; clouds in the camera's frame."""
    from rosbags.typesys import Stores, get_typestore

    store = get_typestore(Stores.ROS2_JAZZY)
    types = store.types

    def link(stamp: int, parent: str, child: str, pose: np.ndarray) -> object:
        row = [float(value) for value in rows_from_poses(pose[None])[0]]
        header = types["std_msgs/msg/Header"](types["builtin_interfaces/msg/Time"](*divmod(stamp, 10**9)), parent)
        vector, turn = types["geometry_msgs/msg/Vector3"](*row[:3]), types["geometry_msgs/msg/Quaternion"](*row[3:])
        body = types["geometry_msgs/msg/Transform"](vector, turn)
        return types["geometry_msgs/msg/TransformStamped"](header, child, body)

    with rosbag2.Writer(path, version=9) as bag:
        moving = bag.add_connection("/tf", "tf2_msgs/msg/TFMessage", typestore=store)
        static = bag.add_connection("/tf_static", "tf2_msgs/msg/TFMessage", typestore=store)
        message = types["tf2_msgs/msg/TFMessage"]
        fixed = message([link(0, "base", CAMERA_FRAME, mount)])
        bag.write(static, STAMPS[0], store.serialize_cdr(fixed, "tf2_msgs/msg/TFMessage"))
        for stamp, pose in zip(STAMPS, sweep(4), strict=True):
            links = message([link(stamp, "world", "base", pose)])
            bag.write(moving, stamp, store.serialize_cdr(links, "tf2_msgs/msg/TFMessage"))


class NoPoses(BagWriter):
    """Writes what a motion capture writes that has lost its markers."""

    broken: tuple[int, ...] = ()
    value = 0.0
    _count = 0

    def _pose(self, stamp_ns: int, pose: NDArray[np.float64]) -> Any:
        message = super()._pose(stamp_ns, pose)
        if self._count in self.broken:
            orientation = self._new("geometry_msgs/msg/Quaternion", *[self.value] * 4)
            body = self._new("geometry_msgs/msg/Pose", message.pose.position, orientation)
            message = self._new("geometry_msgs/msg/PoseStamped", message.header, body)
        self._count += 1
        return message


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_poses_that_are_none_are_left_out_of_the_truth(tmp_path: Path, value: float) -> None:
    for name, broken, known in (("some", (1, 2), 2), ("all", (0, 1, 2, 3), 0)):
        with closing(NoPoses(tmp_path / name, CAMERA)) as writer:
            writer.broken, writer.value = broken, value
            for i in range(4):
                writer.write(10**9 + i * 10**8, np.ones((CAMERA.height, CAMERA.width), np.float32), np.eye(4))
        with open_bag(tmp_path / name) as bag:
            if known:
                truth = bag.truth(CAMERA_FRAME)
                assert truth is not None and len(truth) == known
            else:
                with pytest.raises(InputError, match="no valid pose"):
                    bag.truth(CAMERA_FRAME)


def test_truth_from_tf_runs_through_static_links(tmp_path: Path) -> None:
    mount = sweep(9)[7]
    write_transforms(tmp_path / "bag", mount)
    with open_bag(tmp_path / "bag") as bag:
        truth = bag.truth(CAMERA_FRAME)
        assert bag.truth("elsewhere") is None
    assert truth is not None and np.allclose(truth.poses, [pose @ mount for pose in sweep(4)], atol=1e-6)


def write_tum_folder(folder: Path, count: int = 6) -> None:
    (folder / "depth").mkdir(parents=True)
    camera = f"fx {CAMERA.fx} fy {CAMERA.fy} cx {CAMERA.cx} cy {CAMERA.cy} width 160 height 120 depth_scale 5000\n"
    (folder / "camera.txt").write_text(camera)
    stamps = 1305031453.374112 + np.arange(count) * 0.1
    write_tum(folder / "poses.txt", Trajectory(stamps, np.array(sweep(count))))
    for stamp, pose in zip(stamps, sweep(count), strict=True):
        raw = (render(pose, None) * 5000).round().astype(np.uint16)
        Image.fromarray(raw).save(folder / "depth" / f"{stamp:.6f}.png")


def test_a_tum_folder_becomes_a_bag(tmp_path: Path) -> None:
    write_tum_folder(tmp_path / "tum")
    assert make_bag(str(tmp_path / "tum"), tmp_path / "bag", stride=2) == 6
    with open_bag(tmp_path / "bag") as bag:
        frames = list(bag.frames(bag.cloud_topic()))
        truth = bag.truth(CAMERA_FRAME)
    assert frames[0].points.shape == (60, 80, 3) and frames[0].stamp_ns == 1305031453374112000
    full = depth_to_points(render(sweep(6)[0], None), CAMERA)
    assert np.allclose(frames[0].points, full[::2, ::2], atol=0.002, equal_nan=True)
    assert truth is not None and len(truth) == 6


def test_a_seven_scenes_folder_becomes_a_bag(tmp_path: Path) -> None:
    folder = tmp_path / "seq-01"
    folder.mkdir()
    depth = np.full((480, 640), 1500, np.uint16)
    depth[0, 0] = 65535
    Image.fromarray(depth).save(folder / "frame-000000.depth.png")
    np.savetxt(folder / "frame-000000.pose.txt", sweep(2)[1])
    frame = next(iter(open_recording(folder).frames()))
    assert frame.depth[0, 0] == 0 and frame.depth[1, 1] == np.float32(1.5)
    assert frame.pose is not None and np.allclose(frame.pose, sweep(2)[1])


def write_official_tum(folder: Path, count: int = 3) -> None:
    """As TUM publishes a sequence: lists of both kinds of images, a truth of 100 poses a second, no camera file."""
    (folder / "depth").mkdir(parents=True)
    (folder / "rgb").mkdir()
    stamps = 1305031453.374112 + np.arange(count) * 0.1
    listed = "".join(f"{stamp:.6f} depth/{stamp:.6f}.png\n" for stamp in stamps)
    (folder / "depth.txt").write_text(f"# depth maps\n# file: 'x.bag'\n# timestamp filename\n{listed}")
    (folder / "rgb.txt").write_text(f"# color images\n# file: 'x.bag'\n# timestamp filename\n{listed}")
    truth = 1305031453.0 + np.arange(100) * 0.01
    poses = np.tile(np.eye(4), (len(truth), 1, 1))
    poses[:, 0, 3] = truth - truth[0]
    write_tum(folder / "groundtruth.txt", Trajectory(truth, poses))
    for stamp in stamps:
        Image.fromarray(np.full((480, 640), 7500, np.uint16)).save(folder / "depth" / f"{stamp:.6f}.png")


@pytest.mark.parametrize(
    ("name", "fx", "origin"),
    [
        ("rgbd_dataset_freiburg1_desk", 517.3, "freiburg1"),
        ("rgbd_dataset_freiburg2_xyz", 520.9, "freiburg2"),
        ("rgbd_dataset_freiburg3_walking", 535.4, "freiburg3"),
        ("my_kinect", 525.0, "default"),
    ],
)
def test_tum_s_own_folders_have_their_published_camera(tmp_path: Path, name: str, fx: float, origin: str) -> None:
    write_official_tum(tmp_path / name)
    recording = open_recording(tmp_path / name)
    assert isinstance(recording, Recording)
    assert recording.camera.fx == fx and (recording.camera.width, recording.camera.height) == (640, 480)
    assert origin in str(recording.calibration)
    frames = list(recording.frames())
    assert frames[0].depth[100, 100] == np.float32(1.5)
    assert [frame.pose[0, 3] for frame in frames if frame.pose is not None] == pytest.approx([0.37, 0.47, 0.57])


@pytest.mark.parametrize("layout", ["tum", "seven scenes"])
def test_a_camera_file_goes_before_what_is_known_of_a_folder(tmp_path: Path, layout: str, capsys: Any) -> None:
    folder = tmp_path / "rgbd_dataset_freiburg1_desk"
    if layout == "tum":
        write_official_tum(folder)
    else:
        folder.mkdir()
        Image.fromarray(np.full((480, 640), 7500, np.uint16)).save(folder / "frame-000000.depth.png")
    line = "fx 500 fy 501 cx 320 cy 240 width 640 height 480 depth_scale 2500\n"
    (tmp_path / "mine.txt").write_text(line)
    assert cli.main(["bag", "make", str(folder), str(tmp_path / "bag"), "--camera", str(tmp_path / "mine.txt")]) == 0
    assert "camera: fx 500 fy 501 cx 320 cy 240, 2500 units a metre, from" in capsys.readouterr().out
    with open_bag(tmp_path / "bag") as bag:
        points = next(bag.frames(bag.cloud_topic())).points
    assert points[240, 320] == pytest.approx([0, 0, 3]) and points[0, 0, 0] == pytest.approx(-320 / 500 * 3)
    assert cli.main(["bag", "make", str(folder), str(tmp_path / "b"), "--camera", str(tmp_path / "absent.txt")]) == 2
    (folder / "camera.txt").write_text(line.replace("500 ", "490 "))
    assert open_recording(folder).camera.fx == 490


def test_a_lost_pose_of_seven_scenes_is_none(tmp_path: Path) -> None:
    Image.fromarray(np.full((480, 640), 1500, np.uint16)).save(tmp_path / "frame-000000.depth.png")
    np.savetxt(tmp_path / "frame-000000.pose.txt", np.full((4, 4), np.nan))
    assert next(iter(open_recording(tmp_path).frames())).pose is None


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (np.zeros((480, 640), np.uint8), "16-bit channel; it holds uint8 480 x 640"),
        (np.zeros((480, 640, 3), np.uint8), "480 x 640 x 3"),
        (np.zeros((240, 320), np.uint16), "has 320 x 240 pixels, but the camera .* 640 x 480"),
    ],
)
def test_images_that_are_no_depth_of_the_camera_are_refused(tmp_path: Path, image: Any, sentence: str) -> None:
    write_official_tum(tmp_path / "tum", 1)
    Image.fromarray(image).save(next((tmp_path / "tum" / "depth").iterdir()))
    with pytest.raises(InputError, match=sentence):
        list(open_recording(tmp_path / "tum").frames())


@pytest.mark.parametrize("source", ["nowhere", "synthetic:x", "empty"])
def test_what_is_no_recording_is_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError):
        open_source(source if ":" in source else str(tmp_path / source))


def test_a_broken_camera_file_is_named(tmp_path: Path) -> None:
    write_tum_folder(tmp_path / "tum", 1)
    (tmp_path / "tum" / "camera.txt").write_text("fx 500\n")
    with pytest.raises(InputError, match=r"camera\.txt"):
        open_recording(tmp_path / "tum")


def test_frames_are_chosen_by_number_and_time() -> None:
    frames = [DepthFrame(i * 10**8, np.zeros((1, 1), np.float32), None) for i in range(40)]
    assert [f.stamp_ns // 10**8 for f in select_frames(frames, every=10)] == [0, 10, 20, 30]
    kept = [f.stamp_ns // 10**8 for f in select_frames(frames, gap=(1.0, 2.0))]
    assert kept == [*range(10), *range(30, 40)]
    assert len(list(select_frames(frames, first=7))) == 7


def test_a_thinned_image_has_a_camera_that_sees_the_same_rays() -> None:
    rays = shrink_camera(CAMERA, 3).rays()
    assert np.allclose(rays, CAMERA.rays()[::3, ::3])
