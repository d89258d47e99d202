"""Radius neighbours, nearest first, at most a fixed number of them."""

import torch
from scipy.spatial import cKDTree
from torch import Tensor

# Queries are compared with all support points in slices of this many distances where no tree can be used (GPU).
SLICE = 16_000_000


def radius_neighbours(queries: Tensor, supports: Tensor, radius: float, limit: int) -> Tensor:
    """The nearest supports within a radius of every query.

    queries: (N, 3), supports: (M, 3) metres. Returns (N, limit) int64, sorted by distance;
    a missing neighbour is M, one past the end.
    """
    if queries.is_cuda:
        return _neighbours_brute(queries, supports, radius, limit)
    tree = cKDTree(supports.detach().numpy(), balanced_tree=False, compact_nodes=False)
    _, index = tree.query(queries.detach().numpy(), k=limit, distance_upper_bound=radius)
    return torch.from_numpy(index).to(torch.int64).reshape(len(queries), limit)


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
