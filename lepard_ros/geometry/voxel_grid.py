# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The voxel grid: grouping of points by cell, and barycentres of the occupied cells.

Tensors are averaged on the grid of the network, whose origin is the cloud's lowest cell (`grid_subsample`). Arrays are
grouped on a grid that is fixed in the cloud's frame (`group_by_cell`), so that two clouds have the same cells.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lepard_ros.geometry.arrays import FloatArray, IntArray

# A grid of at most this many cells is summed in a dense table (fast); a larger one by sorting the cell numbers.
DENSE_CELLS = 4_000_000
# Integers up to this are exact in float32: cell indices use it, which is twice as fast.
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
    if count <= DENSE_CELLS and not cells.is_cuda:
        population = torch.bincount(cells, minlength=count)
        index = population.nonzero()[:, 0]
        sums = [torch.bincount(cells, weights=column.double(), minlength=count)[index] for column in columns]
        return population[index].double(), torch.stack(sums)
    # Sorted, and summed one point after the other: a GPU that adds in a random order rounds differently every time.
    numbers, order = cells.sort(stable=True)
    population = torch.unique_consecutive(numbers, return_counts=True)[1]
    begins = population.cumsum(0) - population
    rows = columns.T.double().contiguous()
    return population.double(), torch.nn.functional.embedding_bag(order, rows, begins, mode="sum").T


class CellGroups(NamedTuple):
    """The points (N, 3) of a cloud by the M cells they occupy; cells are ordered by x, then y, then z.

    cell: (N,) the cell of each point. first: (M,) the first point of each cell. counts: (M,) points of each cell.
    """

    cell: IntArray
    first: IntArray
    counts: IntArray

    def mean(self, values: FloatArray) -> FloatArray:
        """The mean over each cell (M, C) of values (N, C)."""
        sums = [np.bincount(self.cell, column, len(self.counts)) for column in values.T]
        return np.stack(sums, axis=1) / self.counts[:, None]


def cell_indices(points: FloatArray, size: float) -> IntArray:
    """The cells (..., 3) of points (..., 3) on a grid of this size (metres), whose cell 0 begins at the origin."""
    return np.floor(points * (1.0 / size)).astype(np.int64)


def group_by_cell(points: FloatArray, size: float) -> CellGroups:
    """The finite points (N, 3) by the cells of this size (metres) that they occupy.

    >>> group_by_cell(np.array([[0.9, 0, 0], [-0.1, 0, 0], [0.2, 0, 0]]), 1.0).cell.tolist()
    [1, 0, 1]
    """
    cells = cell_indices(points, size)
    cells -= cells.min(axis=0) if len(cells) else 0
    width, height, depth = (int(side) + 1 for side in cells.max(axis=0, initial=0))
    if width * height * depth < 2**63:
        keys = (cells[:, 0] * height + cells[:, 1]) * depth + cells[:, 2]  # one number sorts faster than three
    else:
        keys = np.unique(cells, axis=0, return_inverse=True)[1].reshape(-1)
    _, first, cell, count = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    return CellGroups(cell.reshape(-1), first, count)


def cell_means(points: FloatArray, size: float) -> FloatArray:
    """One point, the mean, for each occupied cell: (N, 3) -> (M, 3) float64."""
    return group_by_cell(points, size).mean(points)
