# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The rigid motion that fits a matrix of confidences."""

from typing import NamedTuple

import torch
from torch import Tensor

from lepard_ros.network.precision import is_traced

# Values per block: the search for the most confident matches compares block maxima first.
BLOCK = 64


class RigidFit(NamedTuple):
    """rotation (B, 3, 3), translation (B, 3, 1), source to target; condition (B,), inf where it is undefined."""

    rotation: Tensor
    translation: Tensor
    condition: Tensor


def soft_procrustes(confidence: Tensor, source: Tensor, target: Tensor, counts: Tensor) -> RigidFit:
    """Weighted Procrustes of the most confident matches.

    confidence: (B, n, m); source: (B, n, 3); target: (B, m, 3); counts: (B,) matches used of each pair,
    max(n, m) of its real points.
    """
    weights, x, y = top_matches(confidence, source, target, counts)
    return weighted_procrustes(x, y, weights, epsilon=1e-4)


def top_matches(
    confidence: Tensor, source: Tensor, target: Tensor, counts: Tensor, max_matches: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The most confident matches of each pair: weights (B, k), source (B, k, 3), target (B, k, 3) points.

    counts: (B,) matches wanted of each pair; the weights of further ones are 0. max_matches: bound of k.
    """
    flat = confidence.flatten(1)
    with torch.no_grad():
        index = _most_confident(flat, counts.max() if max_matches is None else counts.max().clamp_max(max_matches))
    used = torch.arange(index.shape[1], device=counts.device)[None] < counts[:, None]
    weights = flat.gather(1, index) * used
    row, column = torch.div(index, confidence.shape[2], rounding_mode="floor"), index % confidence.shape[2]
    x = source.gather(1, row[..., None].expand(-1, -1, 3))
    y = target.gather(1, column[..., None].expand(-1, -1, 3))
    return weights, x, y


def _most_confident(flat: Tensor, k: Tensor) -> Tensor:
    """Indices (B, k) of the k largest values of each row (B, n); k: a whole number."""
    if is_traced():  # k is a size that an exported graph does not know yet
        return flat.topk(k, dim=1).indices  # type: ignore[arg-type]
    return torch.stack([largest(row, min(int(k), flat.shape[1])) for row in flat])


def largest(values: Tensor, k: int) -> Tensor:
    """Indices (k,) of the k largest of the values (n,), largest first.

    Avoids a full sort: k blocks have a maximum of at least the k-th largest block maximum, so no value below that can
    be among the k largest.
    """
    whole = len(values) // BLOCK * BLOCK
    if whole // BLOCK < 2 * k:
        return values.topk(k).indices
    bound = values[:whole].view(-1, BLOCK).amax(1).topk(k).values[-1]
    candidates = (values >= bound).nonzero()[:, 0]
    return candidates[values[candidates].topk(k).indices]


def weighted_procrustes(x: Tensor, y: Tensor, weights: Tensor, epsilon: float = 1e-12) -> RigidFit:
    """The motion that takes x (B, k, 3) to y (B, k, 3) with weights (B, k), in double precision.

    epsilon: added to the sum of the weights; the reference uses 1e-4, which shifts the means; its weights expect it.
    """
    w = (weights / (weights.abs().sum(1, keepdim=True) + epsilon)).double()[..., None]
    x, y = x.double(), y.double()
    mean_x, mean_y = (w * x).sum(1, keepdim=True), (w * y).sum(1, keepdim=True)
    covariance = (w * (y - mean_y)).transpose(1, 2) @ (x - mean_x)
    rotation, condition = (rotation_by_products if is_traced() else nearest_rotation)(covariance)
    translation = mean_y.transpose(1, 2) - rotation @ mean_x.transpose(1, 2)
    return RigidFit(rotation.to(weights), translation.to(weights), condition.to(weights))


def nearest_rotation(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation nearest to each matrix (B, 3, 3), and the condition (B,): its largest over its least
    singular value. A gradient that is not finite, as where two singular values are equal, becomes zero.
    """
    if matrix.requires_grad:
        matrix.register_hook(_finite)
    u, s, vt = torch.linalg.svd(matrix)
    sign = torch.ones_like(s)
    sign[:, 2] = torch.linalg.det(u) * torch.linalg.det(vt)
    return u * sign[:, None] @ vt, s[:, 0] / s[:, 2]


def _finite(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None else torch.where(gradient.isfinite(), gradient, 0.0)


def rotation_by_products(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The same without a singular value decomposition, which ONNX does not have.

    The rotation's quaternion q is the leading eigenvector of a 4 x 4 matrix that is linear in the given one (Horn), and
    the rotation is linear in q q'. The smallest singular value follows from the determinant and the two others.
    """
    flat = matrix.flatten(1)
    horn = (flat @ flat.new_tensor(HORN)).view(-1, 4, 4)
    eye = torch.eye(4, dtype=matrix.dtype, device=matrix.device)
    shift = (3 * flat.square().sum(1)).sqrt()  # at least the sum of the singular values: no eigenvalue is negative
    squared = _leading(horn + shift[:, None, None] * eye, squarings=24)
    rotation = (squared.flatten(1) @ flat.new_tensor(HORN).T).view(-1, 3, 3)
    gram = matrix.transpose(1, 2) @ matrix
    minors = torch.stack([_cross(gram[:, k - 2], gram[:, k - 1]) for k in range(3)], 1)
    largest, two = ((m * _leading(m, squarings=14)).sum((1, 2)).clamp_min(0) for m in (gram, minors))
    determinant = (matrix[:, 0] * _cross(matrix[:, 1], matrix[:, 2])).sum(1)
    return rotation, (largest * two).sqrt() / determinant.abs()


def _leading(matrix: Tensor, squarings: int) -> Tensor:
    """q q' (B, n, n) of the leading unit eigenvector q of symmetric matrices without negative eigenvalues."""
    for _ in range(squarings):
        matrix = matrix / matrix.abs().sum((1, 2), keepdim=True).clamp_min(1e-30)
        matrix = matrix @ matrix
    trace = (matrix * torch.eye(matrix.shape[1], dtype=matrix.dtype, device=matrix.device)).sum((1, 2), keepdim=True)
    return matrix / trace.clamp_min(1e-30)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    """a x b of vectors (B, 3)."""
    (ax, ay, az), (bx, by, bz) = a.unbind(1), b.unbind(1)
    return torch.stack([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx], 1)


def _horn() -> list[list[float]]:
    """For each entry of a matrix (3, 3) its part (16,) in the 4 x 4 matrix N with q' N q = trace(R(q)' matrix)."""
    parts = []
    for i in range(3):
        for j in range(3):
            n = [[0.0] * 4 for _ in range(4)]
            if i == j:
                for k in range(4):
                    n[k][k] = 1.0 if k in (0, i + 1) else -1.0
            else:
                k = 3 - i - j
                n[i + 1][j + 1] = n[j + 1][i + 1] = 1.0
                n[0][k + 1] = n[k + 1][0] = 1.0 if (i - j) % 3 == 1 else -1.0
            parts.append([value for row in n for value in row])
    return parts


HORN = _horn()


def robust_procrustes(
    confidence: Tensor, source: Tensor, target: Tensor, counts: Tensor, scale: float, k: int = 160
) -> RigidFit:
    """Procrustes on mutually consistent matches: a rigid motion preserves distances.

    Arguments as for `soft_procrustes`; scale: tolerance in metres. The selection has no gradient; the final fit has one
    through the confidences.
    """
    weights, x, y = top_matches(confidence, source, target, counts, k)
    with torch.no_grad():
        fit = weighted_procrustes(x, y, _consensus(x, y, weights, scale))
        fit = weighted_procrustes(x, y, weights * _agreeing(fit, x, y, 2 * scale))
        agreeing = _agreeing(fit, x, y, scale)
    return weighted_procrustes(x, y, weights * agreeing)


def _agreeing(fit: RigidFit, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Agreement of each match (B, k) with a motion: 1 at residual 0, 0 from `radius` metres on."""
    residual = (x @ fit.rotation.transpose(1, 2) + fit.translation.transpose(1, 2) - y).norm(dim=-1)
    return (1 - (residual / radius) ** 2).clamp_min(0)


def _consensus(x: Tensor, y: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Component (B, k) of each match in the leading eigenvector of the distance-consistency matrix."""
    gap = (torch.cdist(x, x) - torch.cdist(y, y)).abs()
    agree = (1 - (gap / scale) ** 2).clamp_min(0) * (weights[:, :, None] * weights[:, None]).clamp_min(0).sqrt()
    agree = agree @ agree * agree  # second order: matches that agree with the same others
    vector = weights
    for _ in range(8):
        vector = (agree @ vector[..., None])[..., 0]
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-20)
    return vector
