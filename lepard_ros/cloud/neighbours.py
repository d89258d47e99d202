# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Radius neighbours, nearest first, at most a fixed number of them."""

import torch
from scipy.spatial import cKDTree
from torch import Tensor

# Queries are compared with all support points in slices of this many distances where no tree can be used (GPU).
SLICE = 16_000_000


class Supports:
    """Points (M, 3) in which neighbours are sought, several times: on the CPU their tree is built once."""

    def __init__(self, points: Tensor) -> None:
        self.points = points
        self.tree = None
        if not points.is_cuda:
            self.tree = cKDTree(points.detach().numpy(), balanced_tree=False, compact_nodes=False)

    def around(self, queries: Tensor, radius: float, limit: int) -> Tensor:
        """The nearest supports within a radius (metres) of every query (N, 3).

        Returns (N, limit) int64, sorted by distance; a missing neighbour is M, one past the end.
        """
        if self.tree is None:
            return _neighbours_brute(queries, self.points, radius, limit)
        _, index = self.tree.query(queries.detach().numpy(), k=limit, distance_upper_bound=radius)
        return torch.from_numpy(index).to(torch.int64).reshape(len(queries), limit)


def radius_neighbours(queries: Tensor, supports: Tensor, radius: float, limit: int) -> Tensor:
    """`Supports.around` for a single question."""
    return Supports(supports).around(queries, radius, limit)


def _neighbours_brute(queries: Tensor, supports: Tensor, radius: float, limit: int) -> Tensor:
    """The same by comparing all distances, slice by slice, on whatever device the points are."""
    found = min(limit, len(supports))
    rows = []
    for part in queries.split(max(1, SLICE // max(1, len(supports)))):
        distance, index = torch.cdist(part, supports, compute_mode="donot_use_mm_for_euclid_dist").topk(
            found, dim=1, largest=False
        )
        rows.append(index.masked_fill(distance >= radius, len(supports)))
    index = torch.cat(rows) if rows else queries.new_zeros((0, found), dtype=torch.int64)
    return torch.nn.functional.pad(index, (0, limit - found), value=len(supports))
