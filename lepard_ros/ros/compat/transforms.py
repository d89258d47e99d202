# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""geometry_msgs/Transform <-> (4, 4) matrix."""

import numpy as np
from builtin_interfaces.msg import Time
from geometry_msgs.msg import Quaternion, Transform, TransformStamped, Vector3
from numpy.typing import ArrayLike

from lepard_ros.ros.compat.quaternions import Matrix, matrix_from_quaternion, quaternion_from_matrix


def matrix_from_transform(transform: Transform) -> Matrix:
    """The (4, 4) matrix of a message; translation in metres."""
    rotation, translation = transform.rotation, transform.translation
    matrix = matrix_from_quaternion([rotation.x, rotation.y, rotation.z, rotation.w])
    matrix[:3, 3] = translation.x, translation.y, translation.z
    return matrix


def transform_from_matrix(matrix: ArrayLike) -> Transform:
    """The message of a (4, 4) matrix; translation in metres."""
    values = np.asarray(matrix, dtype=np.float64)
    x, y, z = values[:3, 3].tolist()
    qx, qy, qz, qw = quaternion_from_matrix(values).tolist()
    return Transform(translation=Vector3(x=x, y=y, z=z), rotation=Quaternion(x=qx, y=qy, z=qz, w=qw))


def stamped_transform(parent: str, child: str, stamp_ns: int, matrix: ArrayLike) -> TransformStamped:
    """The pose of `child` in `parent` at a time in nanoseconds: `matrix` (4, 4) maps child points to the parent."""
    message = TransformStamped(child_frame_id=child, transform=transform_from_matrix(matrix))
    message.header.frame_id = parent
    message.header.stamp = Time(sec=stamp_ns // 10**9, nanosec=stamp_ns % 10**9)
    return message


def stamp_nanoseconds(stamp: Time) -> int:
    """A message's stamp as exact nanoseconds."""
    return int(stamp.sec) * 10**9 + int(stamp.nanosec)
