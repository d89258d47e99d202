# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Write a recording of a depth camera as a rosbag2 for `ros2 bag play`.

The ground truth goes to the topic /ground_truth (geometry_msgs/PoseStamped: the camera in the frame "world"), and to
/tf only on request: a true transform there gives the camera's frame a second parent, in conflict with the node.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.cloud.pointcloud2 import encode_points
from lepard_ros.data.trajectories import rows_from_poses
from lepard_ros.errors import InputError

CAMERA_FRAME = "camera_depth_optical_frame"
WORLD_FRAME = "world"
POINTS_TOPIC = "/camera/depth/points"
IMAGE_TOPIC = "/camera/depth/image_rect_raw"
INFO_TOPIC = "/camera/depth/camera_info"
TRUTH_TOPIC = "/ground_truth"
TF_TOPIC = "/tf"
_TYPES = {
    POINTS_TOPIC: "sensor_msgs/msg/PointCloud2",
    IMAGE_TOPIC: "sensor_msgs/msg/Image",
    INFO_TOPIC: "sensor_msgs/msg/CameraInfo",
    TRUTH_TOPIC: "geometry_msgs/msg/PoseStamped",
    TF_TOPIC: "tf2_msgs/msg/TFMessage",
}


def import_rosbags() -> Any:
    """The rosbags package; raises InputError if it is missing."""
    try:
        import rosbags.highlevel
        import rosbags.rosbag2
        import rosbags.typesys
    except ImportError as error:
        raise InputError("Bags need the package rosbags: pip install rosbags.") from error
    return rosbags


class BagWriter:
    """Writes organised clouds (or depth images) with camera info and their true poses.

    Close it, or the bag has no index: `with contextlib.closing(BagWriter(...)) as bag`.
    """

    def __init__(
        self,
        path: Path,
        camera: Camera,
        *,
        depth: bool = False,
        tf: bool = False,
        storage: str = "mcap",
    ) -> None:
        """Open a new bag. depth: write images instead of clouds. tf: the truth to /tf instead of its own topic.

        storage: mcap or sqlite3, the file format.
        """
        if path.exists():
            raise InputError(f"{path} exists already; name a new bag or remove it first.")
        rosbags = import_rosbags()
        plugin = rosbags.rosbag2.StoragePlugin[storage.upper()]
        self._store = rosbags.typesys.get_typestore(rosbags.typesys.Stores.ROS2_JAZZY)
        self._writer = rosbags.rosbag2.Writer(path, version=9, storage_plugin=plugin)
        self._camera, self._depth, self._tf = camera, depth, tf
        self._connections: dict[str, Any] = {}
        self._writer.open()

    def close(self) -> None:
        """Write the index and close the files."""
        self._writer.close()

    def write(
        self,
        stamp_ns: int,
        depth: NDArray[np.float32],
        pose: NDArray[np.float64] | None = None,
    ) -> None:
        """Write one image. depth: (H, W) metres, 0 or NaN where nothing was seen. pose: (4, 4) camera to world."""
        if pose is not None and self._tf:
            self._put(TF_TOPIC, stamp_ns, self._transform(stamp_ns, pose))
        elif pose is not None:
            self._put(TRUTH_TOPIC, stamp_ns, self._pose(stamp_ns, pose))
        self._put(INFO_TOPIC, stamp_ns, self._info(stamp_ns))
        if self._depth:
            self._put(IMAGE_TOPIC, stamp_ns, self._image(stamp_ns, depth))
        else:
            self._put(
                POINTS_TOPIC,
                stamp_ns,
                self._cloud(stamp_ns, depth_to_points(depth, self._camera)),
            )

    def _put(self, topic: str, stamp_ns: int, message: Any) -> None:
        kind = _TYPES[topic]
        if topic not in self._connections:
            qos = [reliable_qos()]
            added = self._writer.add_connection(topic, kind, typestore=self._store, offered_qos_profiles=qos)
            self._connections[topic] = added
        self._writer.write(self._connections[topic], stamp_ns, self._store.serialize_cdr(message, kind))

    def _new(self, name: str, *values: Any) -> Any:
        return self._store.types[name](*values)

    def _header(self, stamp_ns: int, frame: str) -> Any:
        stamp = self._new("builtin_interfaces/msg/Time", *divmod(stamp_ns, 10**9))
        return self._new("std_msgs/msg/Header", stamp, frame)

    def _cloud(self, stamp_ns: int, points: NDArray[np.float32]) -> Any:
        c = encode_points(points)
        fields = [self._new("sensor_msgs/msg/PointField", f.name, f.offset, f.datatype, f.count) for f in c.fields]
        data = np.frombuffer(c.data, np.uint8)
        header = self._header(stamp_ns, CAMERA_FRAME)
        members = (
            header,
            c.height,
            c.width,
            fields,
            c.is_bigendian,
            c.point_step,
            c.row_step,
            data,
            c.is_dense,
        )
        return self._new("sensor_msgs/msg/PointCloud2", *members)

    def _image(self, stamp_ns: int, depth: NDArray[np.float32]) -> Any:
        """16UC1 in millimetres, as REP-118 and the drivers have it."""
        millimetres = np.nan_to_num(depth * 1000, nan=0.0, posinf=0.0, neginf=0.0).round().clip(0, 65535).astype("<u2")
        height, width = millimetres.shape
        data = np.frombuffer(millimetres.tobytes(), np.uint8)
        header = self._header(stamp_ns, CAMERA_FRAME)
        return self._new("sensor_msgs/msg/Image", header, height, width, "16UC1", 0, 2 * width, data)

    def _info(self, stamp_ns: int) -> Any:
        c = self._camera
        k = np.array([c.fx, 0, c.cx, 0, c.fy, c.cy, 0, 0, 1.0])
        p = np.array([c.fx, 0, c.cx, 0, 0, c.fy, c.cy, 0, 0, 0, 1.0, 0])
        roi = self._new("sensor_msgs/msg/RegionOfInterest", 0, 0, 0, 0, False)
        header = self._header(stamp_ns, CAMERA_FRAME)
        members = (
            header,
            c.height,
            c.width,
            "plumb_bob",
            np.zeros(5),
            k,
            np.eye(3).ravel(),
            p,
            0,
            0,
            roi,
        )
        return self._new("sensor_msgs/msg/CameraInfo", *members)

    def _pose(self, stamp_ns: int, pose: NDArray[np.float64]) -> Any:
        row = [float(value) for value in rows_from_poses(pose[None])[0]]
        position = self._new("geometry_msgs/msg/Point", *row[:3])
        orientation = self._new("geometry_msgs/msg/Quaternion", *row[3:])
        body = self._new("geometry_msgs/msg/Pose", position, orientation)
        return self._new("geometry_msgs/msg/PoseStamped", self._header(stamp_ns, WORLD_FRAME), body)

    def _transform(self, stamp_ns: int, pose: NDArray[np.float64]) -> Any:
        row = [float(value) for value in rows_from_poses(pose[None])[0]]
        shift = self._new("geometry_msgs/msg/Vector3", *row[:3])
        body = self._new("geometry_msgs/msg/Transform", shift, self._new("geometry_msgs/msg/Quaternion", *row[3:]))
        header = self._header(stamp_ns, WORLD_FRAME)
        link = self._new("geometry_msgs/msg/TransformStamped", header, CAMERA_FRAME, body)
        return self._new("tf2_msgs/msg/TFMessage", [link])


def reliable_qos(latched: bool = False) -> Any:
    """The quality of service that a topic of a bag is played with. latched: late subscribers get the last message."""
    from rosbags import interfaces as i

    durability = i.QosDurability.TRANSIENT_LOCAL if latched else i.QosDurability.VOLATILE
    forever = i.QosTime(2147483647, 4294967295)
    kinds = i.QosReliability.RELIABLE, durability, forever, forever
    return i.Qos(i.QosHistory.KEEP_LAST, 1 if latched else 10, *kinds, i.QosLiveliness.AUTOMATIC, forever, False)
