# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What ROS 2 from Python wheels lacks: transforms and quaternions.

tf2_ros is used where it can be imported; the results without it are the same.
"""

from lepard_ros.ros.compat.broadcaster import TransformBroadcaster
from lepard_ros.ros.compat.buffer import TransformBuffer
from lepard_ros.ros.compat.quaternions import matrix_from_quaternion, quaternion_from_matrix
from lepard_ros.ros.compat.transforms import matrix_from_transform, transform_from_matrix
from lepard_ros.ros.compat.tree import TransformTree, TransformUnavailable

__all__ = [
    "TransformBroadcaster",
    "TransformBuffer",
    "TransformTree",
    "TransformUnavailable",
    "matrix_from_quaternion",
    "matrix_from_transform",
    "quaternion_from_matrix",
    "transform_from_matrix",
]
