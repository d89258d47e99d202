"""Voxel grid: one barycentre for every occupied cell."""

import torch
from torch import Tensor

# A grid of at most this many cells is summed in a dense table (fast); a larger one by sorting the cell numbers.
DENSE_CELLS = 4_000_000


def grid_subsample(points: Tensor, size: float, *values: Tensor) -> tuple[Tensor, ...]:
    """Average the points that share a cell.

    points: (N, 3) metres; size: edge of a cell in metres; values: (N, C) each, averaged along.
    The grid's origin is floor(min / size) * size, as in the reference implementation.
    Returns (M, 3) barycentres ordered by cell, then each value averaged, (M, C).
    """
    cells, count = _cell_numbers(points, size)
    columns = torch.cat([points, *values], dim=1) if values else points
    occupancy, sums = _sum_by_cell(cells, count, columns)
    means = (sums / occupancy[:, None]).to(points.dtype)
    return tuple(means.split([3, *(value.shape[1] for value in values)], dim=1))


def _cell_numbers(points: Tensor, size: float) -> tuple[Tensor, int]:
    """The number of every point's cell, (N,) int64, and how many cells the bounding box has."""
    lowest = torch.floor(points.amin(0) / size) * size
    # The product may round to just above the least point.
    cells = torch.floor((points - lowest) / size).clamp_min_(0).to(torch.int64)
    extent = cells.amax(0) + 1
    numbers = (cells[:, 2] * extent[1] + cells[:, 1]) * extent[0] + cells[:, 0]
    width, height, depth = (int(side) for side in extent.tolist())
    return numbers, width * height * depth


def _sum_by_cell(cells: Tensor, count: int, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Points in each occupied cell (M,), and the sums of `columns` (N, C) over it, (M, C), in double."""
    if count <= DENSE_CELLS:
        population = torch.bincount(cells, minlength=count)
        index = population.nonzero()[:, 0]
        columns_sums = [torch.bincount(cells, weights=column, minlength=count)[index] for column in columns.double().T]
        return population[index].double(), torch.stack(columns_sums, dim=1)
    _, inverse, population = torch.unique(cells, return_inverse=True, return_counts=True)
    sums = torch.zeros(len(population), columns.shape[1], dtype=torch.float64, device=columns.device)
    return population.double(), sums.index_add_(0, inverse, columns.double())
