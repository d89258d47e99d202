# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Voxel grid: one barycentre for every occupied cell."""

import torch
from torch import Tensor

# A grid of at most this many cells is summed in a dense table (fast); a larger one by sorting the cell numbers.
DENSE_CELLS = 4_000_000
# Up to here every whole number is a float32: cells are numbered in that, which is twice as fast.
EXACT_CELLS = 2**24


def grid_subsample(points: Tensor, size: float, *values: Tensor) -> tuple[Tensor, ...]:
    """Average the points that share a cell.

    points: (N, 3) metres; size: edge of a cell in metres; values: (N, C) each, averaged along.
    The grid's origin is floor(min / size) * size, as in the reference implementation.
    Returns (M, 3) barycentres ordered by cell, then each value averaged, (M, C).
    """
    # Column by column: long runs in memory are twice as fast as rows of three.
    columns = torch.stack((torch.cat([points, *values], dim=1) if values else points).unbind(1))
    cells, count = _cell_numbers(columns[:3], size)
    occupancy, sums = _sum_by_cell(cells, count, columns)
    means = (sums / occupancy).to(points.dtype).T.contiguous()
    return tuple(means.split([3, *(value.shape[1] for value in values)], dim=1)) if values else (means,)


def occupied_cells(points: Tensor, size: float) -> int:
    """How many cells of this size (metres) the points (N, 3) occupy."""
    if not len(points):
        return 0
    cells, count = _cell_numbers(torch.stack(points.unbind(1)), size)
    if count > DENSE_CELLS:
        return len(torch.unique(cells))
    occupied = torch.zeros(count, dtype=torch.bool, device=points.device)
    return int(occupied.index_fill_(0, cells, True).sum())


def _cell_numbers(axes: Tensor, size: float) -> tuple[Tensor, int]:
    """The number of every point's cell, (N,) int64, and how many cells the bounding box has. axes: (3, N)."""
    axes = axes.float() if axes.dtype.itemsize < 4 else axes
    lowest = torch.floor(axes.amin(1, keepdim=True) / size) * size
    # The product may round to just above the least point.
    cells = axes.sub(lowest).div_(size).floor_().clamp_min_(0)
    width, height, depth = (int(side) + 1 for side in cells.amax(1).tolist())
    count = width * height * depth
    if count > EXACT_CELLS:
        cells = cells.to(torch.int64)
    return cells[2].mul_(height).add_(cells[1]).mul_(width).add_(cells[0]).to(torch.int64), count


def _sum_by_cell(cells: Tensor, count: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Points in each occupied cell (M,), and the sums of `columns` (C, N) over it, (C, M), in double."""
    if count <= DENSE_CELLS:
        population = torch.bincount(cells, minlength=count)
        index = population.nonzero()[:, 0]
        sums = [torch.bincount(cells, weights=column.double(), minlength=count)[index] for column in columns]
        return population[index].double(), torch.stack(sums)
    _, inverse, population = torch.unique(cells, return_inverse=True, return_counts=True)
    sparse = torch.zeros(len(columns), len(population), dtype=torch.float64, device=columns.device)
    return population.double(), sparse.index_add_(1, inverse, columns.double())
