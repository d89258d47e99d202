# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Ground truth of a pair: which points correspond."""

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
