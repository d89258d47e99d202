# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The rigid motion that a matrix of confidences suggests."""

from typing import NamedTuple

import torch
from torch import Tensor

# Values of a table of confidences whose largest is looked at first when the most confident ones are sought.
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
    k = int(counts.max())
    weights, x, y = top_matches(confidence, source, target, k)
    used = torch.arange(k, device=counts.device)[None] < counts[:, None]
    return weighted_procrustes(x, y, weights * used, epsilon=1e-4)


def top_matches(confidence: Tensor, source: Tensor, target: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k most confident matches of each pair: weights (B, k), source (B, k, 3), target (B, k, 3) points."""
    flat = confidence.flatten(1)
    with torch.no_grad():
        index = torch.stack([largest(table, min(k, flat.shape[1])) for table in flat])
    weights = flat.gather(1, index)
    row, column = torch.div(index, confidence.shape[2], rounding_mode="floor"), index % confidence.shape[2]
    x = source.gather(1, row[..., None].expand(-1, -1, 3))
    y = target.gather(1, column[..., None].expand(-1, -1, 3))
    return weights, x, y


def largest(values: Tensor, k: int) -> Tensor:
    """Indices (k,) of the k largest of the values (n,), largest first.

    Without sorting them all: k of the blocks have a maximum of at least the k-th largest maximum, so that nothing below
    that can be among the k largest values.
    """
    whole = len(values) // BLOCK * BLOCK
    if whole // BLOCK < 2 * k:
        return values.topk(k).indices
    bound = values[:whole].view(-1, BLOCK).amax(1).topk(k).values[-1]
    candidates = (values >= bound).nonzero()[:, 0]
    return candidates[values[candidates].topk(k).indices]


def weighted_procrustes(x: Tensor, y: Tensor, weights: Tensor, epsilon: float = 1e-12) -> RigidFit:
    """The motion that takes x (B, k, 3) to y (B, k, 3) with weights (B, k), in double precision.

    epsilon: added to the sum of the weights; the reference's 1e-4 shifts the means a little, and its weights expect it.
    """
    w = (weights / (weights.abs().sum(1, keepdim=True) + epsilon)).double()[..., None]
    x, y = x.double(), y.double()
    mean_x, mean_y = (w * x).sum(1, keepdim=True), (w * y).sum(1, keepdim=True)
    covariance = (w * (y - mean_y)).transpose(1, 2) @ (x - mean_x)
    u, s, vt = torch.linalg.svd(covariance)
    sign = torch.ones_like(s)
    sign[:, 2] = torch.linalg.det(u) * torch.linalg.det(vt)
    rotation = u * sign[:, None] @ vt
    translation = mean_y.transpose(1, 2) - rotation @ mean_x.transpose(1, 2)
    return RigidFit(rotation.to(weights), translation.to(weights), (s[:, 0] / s[:, 2]).to(weights))


def robust_procrustes(
    confidence: Tensor, source: Tensor, target: Tensor, counts: Tensor, scale: float, k: int = 160
) -> RigidFit:
    """Procrustes of the matches that agree with each other: rigid motion keeps distances.

    Arguments as for `soft_procrustes`; scale: metres within which matches agree. Which matches agree is decided
    without gradient; the final fit has one through their confidences.
    """
    weights, x, y = top_matches(confidence, source, target, min(k, int(counts.max())))
    weights = weights * (torch.arange(weights.shape[1], device=counts.device)[None] < counts[:, None])
    with torch.no_grad():
        fit = weighted_procrustes(x, y, _consensus(x, y, weights, scale))
        for width in (2.0, 1.0):
            residual = (x @ fit.rotation.transpose(1, 2) + fit.translation.transpose(1, 2) - y).norm(dim=-1)
            agreeing = (1 - (residual / (width * scale)) ** 2).clamp_min(0)
            fit = weighted_procrustes(x, y, weights * agreeing)
    return weighted_procrustes(x, y, weights * agreeing)


def _consensus(x: Tensor, y: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Each match's share (B, k) in the leading eigenvector of the matrix of which matches keep their distance."""
    gap = (torch.cdist(x, x) - torch.cdist(y, y)).abs()
    agree = (1 - (gap / scale) ** 2).clamp_min(0) * (weights[:, :, None] * weights[:, None]).clamp_min(0).sqrt()
    agree = agree @ agree * agree  # second order: matches that agree with the same others
    vector = weights
    for _ in range(8):
        vector = (agree @ vector[..., None])[..., 0]
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-20)
    return vector
