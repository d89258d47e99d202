"""Ground truth of a pair: which coarse points correspond, and which fine points inside them."""

from typing import NamedTuple

import torch
from torch import Tensor


def mutual_matches(warped: Tensor, target: Tensor, radius: float) -> Tensor:
    """Mutual nearest neighbours within a radius. warped: (n, 3), target: (m, 3). Returns (K, 2) indices."""
    distance = torch.cdist(warped, target, compute_mode="donot_use_mm_for_euclid_dist")
    nearest, index = distance.min(1)
    back = distance.argmin(0)
    rows = torch.arange(len(warped), device=warped.device)
    keep = (back[index] == rows) & (nearest < radius)
    return torch.stack([rows[keep], index[keep]], dim=1)


class FineTruth(NamedTuple):
    """True pairs (P, a, b) inside patches, and the points (P, a), (P, b) that have no partner there."""

    matched: Tensor
    lonely_source: Tensor
    lonely_target: Tensor


def fine_truth(warped: Tensor, target: Tensor, warped_valid: Tensor, target_valid: Tensor, grid: float) -> FineTruth:
    """Truth inside patches. warped: (P, a, 3), target: (P, b, 3) points; valid: (P, a), (P, b).

    A pair is true when each is the other's nearest and they are closer than a cell; a point is lonely when nothing is
    within one and a half cells. What lies between is left undecided.
    """
    valid = warped_valid[:, :, None] & target_valid[:, None]
    distance = torch.cdist(warped, target, compute_mode="donot_use_mm_for_euclid_dist").masked_fill(~valid, 1e6)
    best_source, best_target = distance.amin(2), distance.amin(1)
    mutual = (distance == best_source[:, :, None]) & (distance == best_target[:, None])
    matched = mutual & (distance < grid)
    return FineTruth(matched, warped_valid & (best_source > 1.5 * grid), target_valid & (best_target > 1.5 * grid))
