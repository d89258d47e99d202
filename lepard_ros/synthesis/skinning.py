# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Skeletons, poses and skinned meshes.

A pose gives every joint a transform in its parent's frame; chained along the skeleton, these give the joint transforms
in the world. A mesh follows its joints by linear blending (any transforms) or by dual quaternions (rigid transforms;
strongly bent joints keep their thickness).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import FloatArray, IntArray


class Pose(NamedTuple):
    """Every joint's transform in its parent's frame: scale first, then rotation, then translation.

    translation: (J, 3). rotation: (J, 4), unit quaternions x, y, z, w. scale: (J, 3).
    """

    translation: FloatArray
    rotation: FloatArray
    scale: FloatArray

    @classmethod
    def rest(cls, translation: FloatArray) -> "Pose":
        """A pose without rotations, from the joints' offsets to their parents (J, 3)."""
        count = len(translation)
        return cls(np.asarray(translation, float), np.tile([0.0, 0.0, 0.0, 1.0], (count, 1)), np.ones((count, 3)))


@dataclass(frozen=True)
class SkinnedMesh:
    """A mesh attached to a skeleton.

    vertices: (V, 3) in the bind pose. triangles: (T, 3). parents: (J,), parents before children, -1 for a root.
    bones: (B,), which joint moves each column of `weights`. inverse_bind: (B, 4, 4), bind frame to the joint's frame.
    weights: (V, B), rows sum to one. rigid: the joint transforms have no scale, so dual quaternions apply.
    """

    vertices: FloatArray
    triangles: IntArray
    parents: IntArray
    bones: IntArray
    inverse_bind: FloatArray
    weights: FloatArray
    rigid: bool = False

    def posed(self, pose: Pose) -> FloatArray:
        """The vertices in a pose: (V, 3)."""
        motion = world_transforms(self.parents, pose)[self.bones] @ self.inverse_bind
        blend = blend_dual_quaternions if self.rigid else blend_linear
        return blend(self.vertices, self.weights, motion)


def local_transforms(pose: Pose) -> FloatArray:
    """Each joint's (4, 4) transform in its parent's frame: (J, 4, 4)."""
    transforms = np.tile(np.eye(4), (len(pose.translation), 1, 1))
    transforms[:, :3, :3] = Rotation.from_quat(pose.rotation).as_matrix() * pose.scale[:, None, :]
    transforms[:, :3, 3] = pose.translation
    return transforms


def world_transforms(parents: IntArray, pose: Pose) -> FloatArray:
    """Each joint's (4, 4) transform in the world: (J, 4, 4)."""
    transforms = local_transforms(pose)
    for joint, parent in enumerate(parents):
        if parent >= 0:
            transforms[joint] = transforms[parent] @ transforms[joint]
    return transforms


def blend_linear(vertices: FloatArray, weights: FloatArray, motion: FloatArray) -> FloatArray:
    """Move vertices (V, 3) by the weighted (V, B) mean of the bone transforms (B, 4, 4): (V, 3)."""
    matrices = (weights @ motion[:, :3, :].reshape(len(motion), 12)).reshape(-1, 3, 4)
    return np.einsum("vij,vj->vi", matrices[:, :, :3], vertices) + matrices[:, :, 3]


def blend_dual_quaternions(vertices: FloatArray, weights: FloatArray, motion: FloatArray) -> FloatArray:
    """Move vertices (V, 3) by the weighted (V, B) dual quaternions of rigid transforms (B, 4, 4): (V, 3)."""
    real = Rotation.from_matrix(motion[:, :3, :3]).as_quat()
    # q and -q are the same rotation: use the sign of each vertex's dominant bone.
    heaviest = real[weights.argmax(axis=1)]
    signed = weights * np.where(heaviest @ real.T < 0, -1.0, 1.0)
    dual = 0.5 * quaternion_product(np.pad(motion[:, :3, 3], ((0, 0), (0, 1))), real)
    blended_real, blended_dual = signed @ real, signed @ dual
    norm = np.linalg.norm(blended_real, axis=1, keepdims=True)
    blended_real, blended_dual = blended_real / norm, blended_dual / norm
    conjugate = blended_real * np.array([-1.0, -1.0, -1.0, 1.0])
    translation = 2.0 * quaternion_product(blended_dual, conjugate)[:, :3]
    return Rotation.from_quat(blended_real).apply(vertices) + translation


def quaternion_product(left: FloatArray, right: FloatArray) -> FloatArray:
    """The Hamilton product of quaternions x, y, z, w: (N, 4)."""
    vector = left[:, 3:] * right[:, :3] + right[:, 3:] * left[:, :3] + np.cross(left[:, :3], right[:, :3])
    scalar = left[:, 3] * right[:, 3] - np.sum(left[:, :3] * right[:, :3], axis=1)
    return np.concatenate([vector, scalar[:, None]], axis=1)


def blend_quaternions(first: FloatArray, second: FloatArray, amount: FloatArray | float) -> FloatArray:
    """Normalised interpolation between two rotations along the shorter arc, `amount` from 0 to 1: (N, 4)."""
    same_side = np.where(np.sum(first * second, axis=-1, keepdims=True) < 0, -second, second)
    mixed = (1 - amount) * first + amount * same_side
    return mixed / np.linalg.norm(mixed, axis=-1, keepdims=True)


def blend_poses(first: Pose, second: Pose, amount: float) -> Pose:
    """The pose between two: `first` at 0, `second` at 1."""
    return Pose(
        (1 - amount) * first.translation + amount * second.translation,
        blend_quaternions(first.rotation, second.rotation, amount),
        (1 - amount) * first.scale + amount * second.scale,
    )


def turn_joints(pose: Pose, rotations: Rotation) -> Pose:
    """The pose with an additional rotation of every joint, in the joint's own frame."""
    return pose._replace(rotation=(Rotation.from_quat(pose.rotation) * rotations).as_quat())
