# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Conversion between messages and arrays. No logic here."""

import array
from typing import Any, NamedTuple

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Pose, PoseStamped
from nav_msgs.msg import Odometry, Path
from numpy.typing import NDArray
from sensor_msgs.msg import CameraInfo, Image, PointCloud2, PointField
from std_msgs.msg import Header

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.depth_image import camera_from_info, decode_depth
from lepard_ros.cloud.pointcloud2 import decode_points, encode_points
from lepard_ros.cloud.ranges import thinned
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.msg import Correspondences
from lepard_ros.registration.types import Matches
from lepard_ros.ros.compat import matrix_from_quaternion, quaternion_from_matrix
from lepard_ros.ros.compat.libraries import ros_library

# Variance of velocities that are not estimated, (m/s)^2 and (rad/s)^2.
UNKNOWN_VARIANCE = 1e6


class Frame(NamedTuple):
    """One cloud of the sensor. points: (N, 3) or organised (H, W, 3) metres, NaN without a measurement."""

    points: NDArray[np.float32]
    stamp_ns: int
    frame_id: str


def frame_from_cloud(message: PointCloud2, max_points: int | None = None) -> Frame:
    """The cloud of a PointCloud2. max_points: larger organised clouds are downsampled."""
    return Frame(decode_points(message, max_points), stamp_to_ns(message.header.stamp), message.header.frame_id)


def frame_from_depth(message: Image, info: CameraInfo, rectified: bool = True, max_points: int | None = None) -> Frame:
    """The organised cloud of a depth image and its camera info. rectified: the image has no lens distortion.

    max_points: larger clouds are downsampled.
    """
    depth, camera = decode_depth(message), camera_from_info(info, rectified)
    if depth.shape != (camera.height, camera.width):
        raise InputError(
            f"The depth image is {depth.shape[1]} x {depth.shape[0]} but its camera info says "
            f"{camera.width} x {camera.height}; publish the camera info of the depth stream."
        )
    points = depth_to_points(depth, camera)
    points = points if max_points is None else thinned(points, max_points)
    return Frame(points, stamp_to_ns(message.header.stamp), message.header.frame_id)


def stamp_to_ns(stamp: Time) -> int:
    """A stamp message as integer nanoseconds."""
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def stamp_from_ns(nanoseconds: int) -> Time:
    """Integer nanoseconds as a stamp message."""
    return Time(sec=nanoseconds // 1_000_000_000, nanosec=nanoseconds % 1_000_000_000)


def header(stamp_ns: int, frame_id: str) -> Header:
    """A header from nanoseconds and a frame."""
    return Header(stamp=stamp_from_ns(stamp_ns), frame_id=frame_id)


def cloud_message(
    points: FloatArray, stamp_ns: int, frame_id: str, scalars: dict[str, FloatArray] | None = None
) -> PointCloud2:
    """A PointCloud2 of float32 x, y, z from (N, 3) or (H, W, 3) metres; uses sensor_msgs_py if installed.

    scalars: further float32 fields by name, one value per point.
    """
    library = ros_library("sensor_msgs_py.point_cloud2")
    if library is not None and np.ndim(points) == 2 and not scalars:
        message = library.create_cloud_xyz32(header(stamp_ns, frame_id), np.asarray(points, dtype=np.float32))
        message.is_dense = bool(np.isfinite(points).all())
        return message
    encoded = encode_points(points, scalars=scalars)
    message = PointCloud2(
        header=header(stamp_ns, frame_id),
        height=encoded.height,
        width=encoded.width,
        fields=[PointField(name=f.name, offset=f.offset, datatype=f.datatype, count=f.count) for f in encoded.fields],
        is_bigendian=encoded.is_bigendian,
        point_step=encoded.point_step,
        row_step=encoded.row_step,
        is_dense=encoded.is_dense,
    )
    message.data = array.array("B", encoded.data)  # rclpy is a thousand times slower on other buffers
    return message


def flat_floats(values: FloatArray) -> "array.array[float]":
    """An array as a float32[] field of a message, in row-major order."""
    return array.array("f", np.ascontiguousarray(values, dtype=np.float32).tobytes())


def correspondences_message(
    matches: Matches, inliers: NDArray[np.bool_], source: Header, target: Header, keyframe_id: int
) -> Correspondences:
    """Matches of the live cloud with a keyframe; the caller sets method and acceptance."""
    message = Correspondences(header=source, target_header=target, keyframe_id=keyframe_id)
    message.source = flat_floats(matches.source)
    message.target = flat_floats(matches.target)
    message.confidence = flat_floats(matches.confidence)
    message.inlier = array.array("B", np.asarray(inliers, dtype=np.uint8).tobytes())
    return message


def pose_message(transform: FloatArray) -> Pose:
    """A pose from a (4, 4) transform."""
    pose = Pose()
    pose.position.x, pose.position.y, pose.position.z = (float(value) for value in transform[:3, 3])
    x, y, z, w = (float(value) for value in quaternion_from_matrix(transform))
    pose.orientation.x, pose.orientation.y, pose.orientation.z, pose.orientation.w = x, y, z, w
    return pose


def matrix_from_pose(pose: Pose) -> FloatArray:
    """The (4, 4) transform of a pose; raises InputError for an invalid quaternion."""
    matrix = matrix_from_quaternion([pose.orientation.x, pose.orientation.y, pose.orientation.z, pose.orientation.w])
    matrix[:3, 3] = pose.position.x, pose.position.y, pose.position.z
    return matrix


def odometry_message(
    transform: FloatArray,
    covariance: FloatArray,
    stamp_ns: int,
    parent: str,
    child: str,
    twist: tuple[FloatArray, FloatArray] | None = None,
) -> Odometry:
    """The pose of `child` in `parent` with its (6, 6) covariance [x, y, z, rotation about x, y, z of the parent].

    twist: (6,) [linear, angular] in the child's frame and its (6, 6) covariance. An unknown twist gets variances so
    large that filters such as robot_localization ignore it.
    """
    message = Odometry(header=header(stamp_ns, parent), child_frame_id=child)
    message.pose.pose = pose_message(transform)
    message.pose.covariance = np.asarray(covariance, dtype=np.float64).reshape(36)
    velocity, spread = twist if twist is not None else (np.zeros(6), UNKNOWN_VARIANCE * np.eye(6))
    linear, angular = message.twist.twist.linear, message.twist.twist.angular
    linear.x, linear.y, linear.z, angular.x, angular.y, angular.z = (float(value) for value in velocity)
    message.twist.covariance = np.asarray(spread, dtype=np.float64).reshape(36)
    return message


def path_message(stamps_ns: list[int], poses: FloatArray, stamp_ns: int, frame_id: str) -> Path:
    """A path of (K, 4, 4) poses with their stamps."""
    message = Path(header=header(stamp_ns, frame_id))
    message.poses = [
        PoseStamped(header=header(when, frame_id), pose=pose_message(pose))
        for when, pose in zip(stamps_ns, poses, strict=True)
    ]
    return message


def deserialise(data: bytes, kind: Any) -> Any:
    """Deserialise the bytes of a raw subscription; raises InputError if they are not a message of this type."""
    from rclpy.serialization import deserialize_message

    try:
        return deserialize_message(data, kind)
    except (RuntimeError, ValueError, UnicodeDecodeError, MemoryError) as error:
        raise InputError(f"A message of {len(data)} bytes could not be read as {kind.__name__} ({error}).") from error
