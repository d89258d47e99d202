# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Radius neighbours, nearest first, up to a fixed number: with a k-d tree on the CPU, with cells on a GPU."""

import torch
from scipy.spatial import cKDTree
from torch import Tensor

# Candidates (query, support) that are processed at once on a GPU.
SLICE = 4_000_000
# Maximum number of cells along an axis, so that a cell index fits into 64 bits.
MAX_SIDE = 2**20


class Supports:
    """Points (M, 3) for several neighbour searches: on the CPU their tree is built once."""

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
            return neighbours_by_cells(queries, self.points, radius, limit)
        _, index = self.tree.query(queries.detach().numpy(), k=limit, distance_upper_bound=radius)
        return torch.from_numpy(index).to(torch.int64).reshape(len(queries), limit)


def radius_neighbours(queries: Tensor, supports: Tensor, radius: float, limit: int) -> Tensor:
    """`Supports.around` for a single query."""
    return Supports(supports).around(queries, radius, limit)


def neighbours_by_cells(queries: Tensor, supports: Tensor, radius: float, limit: int) -> Tensor:
    """The same with sorted cells as wide as the radius: each query searches the 27 cells around it.

    Deterministic on every device: equally near supports are ordered by index.
    """
    if not len(supports) or not len(queries):
        return torch.full((len(queries), limit), len(supports), dtype=torch.int64, device=queries.device)
    first, counts, order = _runs_of_cells(queries.double(), supports.double(), radius)
    max_count = max(1, int(counts.sum(1).max()))
    rows = max(1, SLICE // max_count)
    parts = zip(queries.split(rows), first.split(rows), counts.split(rows), strict=True)
    found = (_nearest(part, supports, _candidates(a, b, order), radius, limit) for part, a, b in parts)
    return torch.cat(list(found))


def _runs_of_cells(queries: Tensor, supports: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """The runs of sorted supports around each query.

    Returns start indices (N, 9), lengths (N, 9), and the sorted supports (M,).

    Cells are numbered along z first, so that three vertically adjacent cells are one run: nine runs in total.
    """
    lowest = supports.amin(0)
    # Slightly wider than the radius, so that rounding cannot put a neighbour two cells away.
    size = max(1.001 * radius, float((supports.amax(0) - lowest).max()) / (MAX_SIDE - 2))
    own = ((supports - lowest) / size).floor().long()
    width, height, depth = (int(side) + 1 for side in own.amax(0).tolist())
    numbers, order = ((own[:, 0] * height + own[:, 1]) * depth + own[:, 2]).sort(stable=True)
    cells = ((queries - lowest) / size).floor().clamp(-2, MAX_SIDE).long()
    steps = torch.tensor([-1, 0, 1], device=queries.device)
    x, y = cells[:, :1, None] + steps[:, None], cells[:, 1:2, None] + steps
    x, y = (axis.expand(-1, 3, 3).flatten(1) for axis in (x, y))
    low, high = (cells[:, 2:] - 1).clamp_min(0), (cells[:, 2:] + 1).clamp_max(depth - 1)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height) & (low <= high)
    column = (x * height + y) * depth
    first = torch.searchsorted(numbers, (column + low).contiguous())
    last = torch.searchsorted(numbers, (column + high).contiguous(), right=True)
    return first, (last - first) * inside, order


def _candidates(first: Tensor, counts: Tensor, order: Tensor) -> Tensor:
    """The supports of the runs (n, 9) of each query, (n, C) by their index; M where there are no more."""
    ends = counts.cumsum(1)
    place = torch.arange(int(ends[:, -1].max()), device=first.device).expand(len(first), -1).contiguous()
    run = torch.searchsorted(ends, place, right=True)
    known = run < counts.shape[1]
    run = run.clamp_max(counts.shape[1] - 1)
    sorted_place = (first - ends + counts).gather(1, run) + place
    found = order[sorted_place.where(known, 0)].where(known, len(order))
    return found.sort(dim=1).values


def _nearest(queries: Tensor, supports: Tensor, candidates: Tensor, radius: float, limit: int) -> Tensor:
    """The nearest of the candidates (n, C) within the radius, (n, limit); M for a missing one."""
    far = torch.cat([supports, torch.full_like(supports[:1], torch.inf)]).double()
    squares = (far[candidates] - queries[:, None].double()).square().sum(-1)
    nearest, place = squares.sort(dim=1, stable=True)
    nearest, place = nearest[:, :limit], place[:, :limit]
    found = candidates.gather(1, place).masked_fill(nearest >= radius**2, len(supports))
    return torch.nn.functional.pad(found, (0, limit - found.shape[1]), value=len(supports))
