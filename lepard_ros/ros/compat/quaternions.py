# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Quaternions in the order of ROS messages, (x, y, z, w): by tf_transformations where it is installed."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.transform import Rotation

from lepard_ros.errors import InputError
from lepard_ros.ros.compat.libraries import ros_library

Matrix = NDArray[np.float64]


def matrix_from_quaternion(quaternion: ArrayLike) -> Matrix:
    """The (4, 4) rotation of a quaternion (x, y, z, w), which need not have unit length.

    >>> matrix_from_quaternion([0, 0, 1, 0])[:3, :3].diagonal().tolist()
    [-1.0, -1.0, 1.0]
    """
    values = np.asarray(quaternion, dtype=np.float64)
    if values.shape != (4,) or not np.isfinite(values).all() or not values.any():
        raise InputError(
            f"{values.tolist()} is not a rotation: give a quaternion (x, y, z, w) that is finite, not zero."
        )
    if (library := ros_library("tf_transformations")) is not None:
        return np.asarray(library.quaternion_matrix(values / np.linalg.norm(values)), dtype=np.float64)
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.from_quat(values).as_matrix()
    return matrix


def quaternion_from_matrix(matrix: ArrayLike) -> NDArray[np.float64]:
    """The unit quaternion (x, y, z, w), w >= 0, of the rotation in a (3, 3) or (4, 4) matrix.

    >>> quaternion_from_matrix(np.eye(4)).tolist()
    [0.0, 0.0, 0.0, 1.0]
    """
    rotation = np.asarray(matrix, dtype=np.float64)[:3, :3]
    quaternion: NDArray[np.float64]
    if (library := ros_library("tf_transformations")) is not None:
        pose = np.eye(4)
        pose[:3, :3] = rotation
        quaternion = np.asarray(library.quaternion_from_matrix(pose), dtype=np.float64)
    else:
        quaternion = Rotation.from_matrix(rotation).as_quat()
    return -quaternion if quaternion[3] < 0 else quaternion
