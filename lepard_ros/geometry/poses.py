# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Pose algebra: distances, velocities, uncertainty along a chain."""

from collections.abc import Sequence

import numpy as np
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import cross_matrix, invert, rotation_angle


def motion_between(first: FloatArray, second: FloatArray) -> tuple[float, float]:
    """Distance between two poses: metres and degrees."""
    turn = rotation_angle(first[:3, :3].T @ second[:3, :3])
    return float(np.linalg.norm(second[:3, 3] - first[:3, 3])), float(np.degrees(turn))


def extrapolate(earlier: FloatArray, later: FloatArray, share: float) -> FloatArray:
    """Extrapolate the motion from `earlier` to `later` by `share` times its duration."""
    step = invert(earlier) @ later
    ahead = np.eye(4)
    ahead[:3, :3] = Rotation.from_rotvec(Rotation.from_matrix(step[:3, :3]).as_rotvec() * share).as_matrix()
    ahead[:3, 3] = step[:3, 3] * share
    return later @ ahead


def velocity_between(earlier: FloatArray, later: FloatArray, seconds: float) -> FloatArray:
    """The constant velocity (6,) that leads from one pose to another: [m/s, rad/s] in the later pose's own frame."""
    step = invert(earlier) @ later
    vector = Rotation.from_matrix(step[:3, :3]).as_rotvec()
    return np.concatenate([step[:3, :3].T @ step[:3, 3], vector]) / seconds


def twist_transport(step: FloatArray) -> FloatArray:
    """(6, 6) that carries a twist [linear, angular] of one frame to that of another frame fixed to it.

    step: (4, 4), the other frame's pose in the first.
    """
    back = step[:3, :3].T
    carry = np.zeros((6, 6))
    carry[:3, :3] = carry[3:, 3:] = back
    carry[:3, 3:] = -back @ cross_matrix(step[:3, 3])
    return carry


def turned_poses(nods: Sequence[float], turns: Sequence[float]) -> FloatArray:
    """Poses (N, 4, 4) of a camera that nods (about x) and turns (about y) on the spot, by degrees."""
    angles = np.array([(nod, turn) for nod in nods for turn in turns])
    poses = np.tile(np.eye(4), (len(angles), 1, 1))
    poses[:, :3, :3] = Rotation.from_euler("xy", angles, degrees=True).as_matrix()
    return poses


def orthonormal(pose: FloatArray) -> FloatArray:
    """Poses (..., 4, 4) with their rotations made exact again after many products."""
    exact = np.array(pose, dtype=np.float64)
    left, _, right = np.linalg.svd(exact[..., :3, :3])  # the nearest rotation; scipy's Rotation takes ten times as long
    exact[..., :3, :3] = left @ right
    return exact


def compose_covariance(
    pose: FloatArray, covariance: FloatArray, step: FloatArray, step_covariance: FloatArray
) -> FloatArray:
    """The covariance of `pose @ step` for independent errors.

    pose, step: (4, 4). covariances: (6, 6) of [translation, rotation vector], each in its own fixed frame (the frame
    that the motion leads to). A rotation error of `pose` acts on the step as a lever arm.
    """
    rotation = pose[:3, :3]
    lever = np.eye(6)
    lever[:3, 3:] = -cross_matrix(rotation @ step[:3, 3])
    turn = np.kron(np.eye(2), rotation)
    return lever @ covariance @ lever.T + turn @ step_covariance @ turn.T


def invert_covariance_frame(step: FloatArray, covariance: FloatArray) -> FloatArray:
    """The covariance of the inverse of `step`. step: (4, 4); covariance: (6, 6) of [translation, rotation vector]."""
    back = step[:3, :3].T
    jacobian = np.zeros((6, 6))
    jacobian[:3, :3] = -back
    jacobian[:3, 3:] = -back @ cross_matrix(step[:3, 3])
    jacobian[3:, 3:] = -back
    return jacobian @ covariance @ jacobian.T
