# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Least-squares rigid motions (Kabsch), and the algebra of rigid motions."""

import numpy as np
import torch
from torch import Tensor

from lepard_ros.geometry.arrays import FloatArray


def kabsch(source: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Best motions in the weighted least-squares sense, a batch at once.

    source, target: (..., n, 3). weights: (..., n), not negative. Returns (..., 4, 4) float64, source to target,
    on the device of the input. Rank-deficient sets give one of the equally good proper rotations.
    """
    source, target, weights = source.double(), target.double(), weights.double()
    share = (weights / weights.sum(-1, keepdim=True).clamp_min(1e-12)).unsqueeze(-1)
    centre_source = (share * source).sum(-2, keepdim=True)
    centre_target = (share * target).sum(-2, keepdim=True)
    moment = (share * (source - centre_source)).transpose(-1, -2) @ (target - centre_target)
    rotation = nearest_rotation(moment.transpose(-1, -2))
    translation = centre_target.transpose(-1, -2) - rotation @ centre_source.transpose(-1, -2)
    return _homogeneous(rotation, translation)


def kabsch_many(source: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Best motions of one set of points under many weightings: all moments by one matrix product.

    source, target: (n, 3). weights: (h, n), not negative. Returns (h, 4, 4) float64, source to target.
    """
    source, target = source.double(), target.double()
    origin_source, origin_target = source.mean(0), target.mean(0)  # moments about far origins would cancel badly
    source, target = source - origin_source, target - origin_target
    products = (source.unsqueeze(2) * target.unsqueeze(1)).flatten(1)
    ones = torch.ones_like(source[:, :1])
    sums = weights.double() @ torch.cat([products, source, target, ones], dim=1)
    sums = sums / sums[:, -1:].clamp_min(1e-12)
    centre_source, centre_target = sums[:, 9:12, None], sums[:, 12:15, None]
    moment = sums[:, :9].view(-1, 3, 3) - centre_source @ centre_target.transpose(1, 2)
    rotation = nearest_rotation(moment.transpose(1, 2))
    translation = centre_target + origin_target[:, None] - rotation @ (centre_source + origin_source[:, None])
    return _homogeneous(rotation, translation)


def nearest_rotation(matrix: Tensor) -> Tensor:
    """The proper rotation R that maximises trace(R^T matrix). matrix: (..., 3, 3)."""
    left, _, right = torch.linalg.svd(matrix)
    sign = torch.ones(matrix.shape[:-1], dtype=matrix.dtype, device=matrix.device)
    sign[..., 2] = torch.sign(torch.det(left @ right))  # never a mirror image
    return (left * sign.unsqueeze(-2)) @ right


def _homogeneous(rotation: Tensor, translation: Tensor) -> Tensor:
    transform = torch.zeros((*rotation.shape[:-2], 4, 4), dtype=rotation.dtype, device=rotation.device)
    transform[..., :3, :3] = rotation
    transform[..., :3, 3:] = translation
    transform[..., 3, 3] = 1.0
    return transform


def move(transform: FloatArray, points: FloatArray) -> FloatArray:
    """Points under motions. transform: (..., 4, 4), points: (n, 3) or (..., n, 3). Returns (..., n, 3)."""
    return points @ np.swapaxes(transform[..., :3, :3], -1, -2) + transform[..., None, :3, 3]


def turn(transform: FloatArray, directions: FloatArray) -> FloatArray:
    """Directions under the rotation of motions. transform: (..., 4, 4), directions: (n, 3). Returns (..., n, 3)."""
    return directions @ np.swapaxes(transform[..., :3, :3], -1, -2)


def invert(transform: FloatArray) -> FloatArray:
    """Inverse motions. transform: (..., 4, 4)."""
    inverse = np.zeros_like(transform)
    inverse[..., :3, :3] = np.swapaxes(transform[..., :3, :3], -1, -2)
    inverse[..., :3, 3] = -np.einsum("...ij,...j->...i", inverse[..., :3, :3], transform[..., :3, 3])
    inverse[..., 3, 3] = 1.0
    return inverse


def exponential(twist: FloatArray) -> FloatArray:
    """Motions (..., 4, 4) from twists (..., 6), [translation, rotation vector]: first turn, then shift."""
    transform = np.zeros((*twist.shape[:-1], 4, 4))
    transform[..., :3, :3] = rotation_from_vector(twist[..., 3:])
    transform[..., :3, 3] = twist[..., :3]
    transform[..., 3, 3] = 1.0
    return transform


def rotation_from_vector(vectors: FloatArray) -> FloatArray:
    """Rotations (..., 3, 3) by |v| radians about v (..., 3), by Rodrigues' formula; exact near zero too."""
    angle = np.linalg.norm(vectors, axis=-1)[..., None, None]
    cross = cross_matrix(vectors)
    half = np.sinc(angle / (2.0 * np.pi))  # numpy's sinc(x) is sin(pi x) / (pi x): safe at zero
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * half**2 * (cross @ cross)


def cross_matrix(vectors: FloatArray) -> FloatArray:
    """The matrices (..., 3, 3) of the cross product with vectors (..., 3)."""
    out = np.zeros((*vectors.shape, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        out[..., k, j] = vectors[..., i]
        out[..., j, k] = -vectors[..., i]
    return out


def rotation_angle(rotation: FloatArray) -> FloatArray:
    """Angle of rotations in radians, exact near zero too. rotation: (..., 3, 3)."""
    skew = rotation - np.swapaxes(rotation, -1, -2)
    sine = np.linalg.norm(skew, axis=(-2, -1)) / np.sqrt(2.0)
    return np.arctan2(sine, np.trace(rotation, axis1=-2, axis2=-1) - 1.0)
