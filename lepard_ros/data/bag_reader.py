# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Read a rosbag2 without ROS: clouds or depth images in order, and the ground truth poses if any."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.cloud.depth_image import camera_from_info, decode_depth
from lepard_ros.cloud.pointcloud2 import decode_points
from lepard_ros.data.bag_writer import TRUTH_TOPIC, import_rosbags
from lepard_ros.data.trajectories import Trajectory, interpolate, poses_from_rows, read_tum
from lepard_ros.errors import InputError

CLOUD = "sensor_msgs/msg/PointCloud2"
IMAGE = "sensor_msgs/msg/Image"
INFO = "sensor_msgs/msg/CameraInfo"
TF = "tf2_msgs/msg/TFMessage"
POSE = "geometry_msgs/msg/PoseStamped"
ODOMETRY = "nav_msgs/msg/Odometry"
MIN_QUATERNION = 1e-3  # a quaternion with a smaller norm is invalid
_TRUTH_TYPES = (
    POSE,
    "geometry_msgs/msg/PoseWithCovarianceStamped",
    "geometry_msgs/msg/TransformStamped",
    ODOMETRY,
)


class BagFrame(NamedTuple):
    """One cloud. stamp_ns: of its header. frame_id: of its header. points: (N, 3), or (H, W, 3) with NaN, metres.

    recorded_ns: when it was recorded, by the clock of the recorder.
    """

    stamp_ns: int
    frame_id: str
    points: NDArray[np.float32]
    recorded_ns: int


class Bag:
    """An open bag; see `open_bag`."""

    def __init__(self, path: Path, reader: Any) -> None:
        """Wrap an open rosbags reader."""
        self.path = path
        self._reader = reader

    def topics(self) -> dict[str, tuple[str, int]]:
        """Type and number of messages by topic."""
        return {name: (info.msgtype or "?", info.msgcount) for name, info in self._reader.topics.items()}

    def describe(self) -> str:
        """One line per topic."""
        rows = [f"{name}  {kind}  {count} messages" for name, (kind, count) in self.topics().items()]
        return "\n".join(rows) or "(no topics)"

    def cloud_topic(self, wanted: str | None = None) -> str:
        """The topic with clouds or depth images: the wanted one, or the only one there is."""
        topics = self.topics()
        if wanted is not None:
            if wanted not in topics or topics[wanted][0] not in (CLOUD, IMAGE):
                raise InputError(f"{self.path} has no clouds or depth images on {wanted}; it holds {self.listed()}.")
            return self._filled(wanted)
        for kind in (CLOUD, IMAGE):
            names = [name for name in topics if topics[name][0] == kind and (kind == CLOUD or "depth" in name)]
            if len(names) > 1:
                raise InputError(f"{self.path} has several topics with clouds ({', '.join(names)}); name one.")
            if names:
                return self._filled(names[0])
        raise InputError(f"{self.path} has neither clouds nor depth images; it holds {self.listed()}.")

    def frame_count(self, topic: str) -> int:
        """Number of messages on the topic."""
        return self.topics()[topic][1]

    def frames(self, topic: str) -> Iterator[BagFrame]:
        """Every cloud of the topic in the order of recording."""
        is_cloud = self.topics()[topic][0] == CLOUD
        with _damage_named(self.path):
            yield from self._cloud_frames(topic) if is_cloud else self._depth_frames(topic)

    def truth_topic(self, wanted: str | None = None) -> str | None:
        """The topic with the true poses: the wanted one, else /ground_truth; None leaves it to TF or to a file."""
        topics = self.topics()
        if wanted is None and TRUTH_TOPIC in topics:
            wanted = TRUTH_TOPIC
        if wanted is None or wanted.upper() == "TF" or (wanted not in topics and Path(wanted).is_file()):
            return None
        if topics.get(wanted, ("",))[0] not in (*_TRUTH_TYPES, TF):
            raise InputError(f"{self.path} has no poses on {wanted}, nor is that a file; it holds {self.listed()}.")
        return wanted if topics[wanted][0] != TF else None

    def truth(self, frame_id: str, wanted: str | None = None) -> Trajectory | None:
        """The true path of the sensor: from the wanted topic, from TF or from a file in TUM format.

        By default from /ground_truth, else from TF, else None.
        """
        with _damage_named(self.path):
            return self._truth(frame_id, wanted)

    def _truth(self, frame_id: str, wanted: str | None) -> Trajectory | None:
        topic = self.truth_topic(wanted)
        if topic is not None:
            return self._pose_topic(topic)
        if wanted is not None and wanted not in self.topics() and wanted.upper() != "TF":
            return read_tum(Path(wanted))
        path = self._tf_chain(frame_id)
        if path is None and wanted is not None:
            raise InputError(f"{self.path} has no moving transform above {frame_id!r}; it holds {self.listed()}.")
        return path

    def _filled(self, topic: str) -> str:
        if not self.topics()[topic][1]:
            raise InputError(f"{self.path} is empty on {topic}; it holds {self.listed()}.")
        return topic

    def listed(self) -> str:
        """All topics in one line, for an error message."""
        return ", ".join(f"{n} ({k}, {c})" for n, (k, c) in self.topics().items()) or "no topic at all"

    def _messages(self, *topics: str) -> Iterator[tuple[Any, int]]:
        """Decoded messages with their time of recording in nanoseconds."""
        connections = [c for c in self._reader.connections if c.topic in topics]
        if not connections:  # the reader takes none for all
            return
        for connection, recorded, raw in self._reader.messages(connections=connections):
            yield self._reader.deserialize(raw, connection.msgtype), recorded

    def is_ros1(self) -> bool:
        """Whether it is a bag of ROS 1, whose messages are serialised in another way."""
        return not self._reader.is2

    def offered_qos(self, topic: str) -> list[Any]:
        """The quality of service of each publisher of a topic, as rosbags has it; of a rosbag2 only."""
        return [qos for c in self._reader.connections if c.topic == topic for qos in c.ext.offered_qos_profiles]

    def raw_messages(self, chosen: Callable[[str, str], bool]) -> Iterator[tuple[Any, int, bytes]]:
        """Messages as they were recorded: connection, time in nanoseconds, bytes. chosen: by topic and type."""
        connections = [c for c in self._reader.connections if chosen(c.topic, c.msgtype)]
        if connections:  # the reader takes none for all
            with _damage_named(self.path):
                yield from self._reader.messages(connections=connections)

    def _cloud_frames(self, topic: str) -> Iterator[BagFrame]:
        for message, recorded in self._messages(topic):
            yield BagFrame(_stamp(message, recorded), message.header.frame_id, decode_points(message), recorded)

    def _depth_frames(self, topic: str) -> Iterator[BagFrame]:
        camera = self._camera(topic)
        for message, recorded in self._messages(topic):
            depth = decode_depth(message)
            if depth.shape != (camera.height, camera.width):
                raise InputError(f"An image on {topic} is not of the size that its camera info says.")
            yield BagFrame(
                _stamp(message, recorded),
                message.header.frame_id,
                depth_to_points(depth, camera),
                recorded,
            )

    def _camera(self, topic: str) -> Camera:
        """The camera that belongs to an image topic: the camera_info beside it."""
        info = topic.rsplit("/", 1)[0] + "/camera_info"
        if self.topics().get(info, ("", 0))[0] != INFO:
            raise InputError(f"{self.path} has no {info} for the images on {topic}; it holds {self.listed()}.")
        first = next(self._messages(info), None)
        if first is None:
            raise InputError(f"{self.path} is empty on {info}, so that {topic} cannot become clouds.")
        return camera_from_info(first[0])

    def _pose_topic(self, topic: str) -> Trajectory:
        rows = [_pose_row(message, recorded) for message, recorded in self._messages(topic)]
        trajectory = _trajectory(rows)
        if not len(trajectory):
            raise InputError(f"{self.path} has no valid pose on {topic} ({len(rows)} messages); name another topic.")
        return trajectory

    def _tf_chain(self, frame_id: str) -> Trajectory | None:
        """The path of `frame_id` in the root of its tree: one moving link of TF, any number of static ones."""
        names = [name for name, (kind, _) in self.topics().items() if kind == TF]
        links: dict[str, list[tuple[str, list[float]]]] = {}
        for message, recorded in self._messages(*names):
            for link in message.transforms:
                row = _transform_row(link, recorded)
                links.setdefault(_bare(link.child_frame_id), []).append((_bare(link.header.frame_id), row))
        chain: list[Trajectory] = []
        child = _bare(frame_id)
        while child in links and len(chain) < 64:
            chain.append(_trajectory([row for _, row in links[child]]))
            if not len(chain[-1]):
                return None
            child = links[child][0][0]
        return _compose(chain)


@contextmanager
def open_bag(path: Path) -> Iterator[Bag]:
    """Open a bag: a rosbag2 directory, one .mcap or .db3 file of it, or a ROS 1 .bag."""
    if not path.exists():
        raise InputError(f"{path} does not exist; give a rosbag2 directory, an .mcap, a .db3 or a .bag file.")
    if path.is_dir() and not (path / "metadata.yaml").is_file():
        raise InputError(f"{path} is not a rosbag2: it has no metadata.yaml; it holds {files_found(path)}.")
    rosbags = import_rosbags()
    store = rosbags.typesys.get_typestore(rosbags.typesys.Stores.ROS2_JAZZY)
    with _damage_named(path):
        reader = rosbags.highlevel.AnyReader([path], default_typestore=store)
        reader.open()
    try:
        yield Bag(path, reader)
    finally:
        reader.close()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Convert any exception of a storage reader on a damaged file to InputError.

    The parsers do not validate their input, and a bag contains its own type definitions.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = str(error).rstrip(". ") or type(error).__name__
        raise InputError(
            f"{path} is not a complete bag: {reason}. Found: {files_found(path)}. Record it again."
        ) from error


def files_found(path: Path, limit: int = 6) -> str:
    """The files of a bag (a directory, or one file) with their sizes, for an error message."""
    files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
    named = [f"{file.name} ({file.stat().st_size:,} bytes)" for file in files[:limit]]
    return ", ".join(named + ([f"{len(files) - limit} more"] if len(files) > limit else [])) or "no file"


def _stamp(message: Any, recorded: int) -> int:
    """Nanoseconds of the header, or of the recording where a driver left the header empty."""
    stamp = message.header.stamp
    return int(stamp.sec) * 10**9 + int(stamp.nanosec) or recorded


def _bare(frame_id: str) -> str:
    """A frame's name without the leading slash of ROS 1."""
    return frame_id.lstrip("/")


def _transform_row(link: Any, recorded: int) -> list[float]:
    t, q = link.transform.translation, link.transform.rotation
    return [_stamp(link, recorded) * 1e-9, t.x, t.y, t.z, q.x, q.y, q.z, q.w]


def _pose_row(message: Any, recorded: int) -> list[float]:
    if hasattr(message, "transform"):
        return _transform_row(message, recorded)
    pose = message.pose.pose if hasattr(message.pose, "pose") else message.pose
    p, q = pose.position, pose.orientation
    return [_stamp(message, recorded) * 1e-9, p.x, p.y, p.z, q.x, q.y, q.z, q.w]


def _trajectory(rows: list[list[float]]) -> Trajectory:
    """Rows of time and pose, in order of time, without invalid poses: motion capture that lost its markers publishes
    zeros or NaN."""
    array = np.array(rows, dtype=np.float64).reshape(-1, 8)
    array = array[np.isfinite(array).all(axis=1) & (np.abs(array[:, 4:]).max(axis=1, initial=0.0) > MIN_QUATERNION)]
    array = array[np.argsort(array[:, 0], kind="stable")]
    return Trajectory(array[:, 0], poses_from_rows(array[:, 1:]))


def _compose(chain: list[Trajectory]) -> Trajectory | None:
    """The sensor in the root frame, at the times of the link that moves most; None without a moving link."""
    if not chain or max(map(len, chain)) < 2:
        return None
    stamps, poses = [], []
    for stamp in max(chain, key=len).stamps:
        links = [link.poses[0] if len(link) == 1 else interpolate(link, stamp) for link in chain]
        known = [link for link in links if link is not None]
        if len(known) == len(links):
            stamps.append(stamp)
            poses.append(functools.reduce(np.matmul, reversed(known)))  # the root's link first
    return Trajectory(np.array(stamps), np.array(poses).reshape(-1, 4, 4))
