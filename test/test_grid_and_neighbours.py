# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The voxel grid, neighbours, normals and pyramid against brute force."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lepard_ros.cloud import neighbours as neighbours_module
from lepard_ros.cloud.neighbours import neighbours_by_cells, radius_neighbours
from lepard_ros.cloud.normals import estimate_normals, smallest_eigenvector
from lepard_ros.cloud.pyramid import PyramidShape, build_pyramid, stack_pyramids
from lepard_ros.geometry import voxel_grid as grid_module
from lepard_ros.geometry.voxel_grid import cell_means, grid_subsample, group_by_cell, occupied_cells

SHAPE = PyramidShape(grid=0.1, radius=2.5, limits=(12, 12, 12, 12), normals=True)


def cloud(seed: int, count: int, scale: float = 1.0) -> torch.Tensor:
    return torch.rand(count, 3, generator=torch.Generator().manual_seed(seed)) * scale


def brute_grid(points: np.ndarray, size: float) -> np.ndarray:
    lowest = np.floor(points.min(0) / np.float32(size)) * np.float32(size)
    cells: dict[tuple[int, ...], list[np.ndarray]] = {}
    for point in points:
        cells.setdefault(tuple(np.floor((point - lowest) / np.float32(size)).astype(int)), []).append(point)
    return np.array(sorted(np.mean(group, axis=0, dtype=np.float64).tolist() for group in cells.values()))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 200), st.sampled_from([0.07, 0.2, 1.5]), st.booleans())
def test_grid_is_the_barycentre_of_every_cell(seed: int, count: int, size: float, sparse: bool) -> None:
    points = cloud(seed, count) - 0.5
    dense_cells, grid_module.DENSE_CELLS = grid_module.DENSE_CELLS, 0 if sparse else grid_module.DENSE_CELLS
    try:
        ours = grid_subsample(points, size)[0].numpy()
        occupied = occupied_cells(points, size)
    finally:
        grid_module.DENSE_CELLS = dense_cells
    expected = brute_grid(points.numpy(), size)
    assert occupied == len(expected)
    np.testing.assert_allclose(np.array(sorted(ours.tolist())), expected, atol=1e-6)


def test_grid_does_not_depend_on_the_order_of_points() -> None:
    points = cloud(0, 5000)
    shuffled = points[torch.randperm(5000, generator=torch.Generator().manual_seed(1))]
    torch.testing.assert_close(grid_subsample(points, 0.1)[0], grid_subsample(shuffled, 0.1)[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("reach", [1.0, 1e12], ids=["room", "absurd"])
def test_points_are_grouped_by_their_cells(reach: float) -> None:
    points = np.concatenate([cloud(3, 300).numpy().astype(np.float64) - 0.5, [[reach, -reach, reach]] * 2])
    groups = group_by_cell(points, 0.2)
    cells = [tuple(cell) for cell in np.floor(points / 0.2).tolist()]
    assert len(groups.counts) == len(set(cells)) and groups.counts.sum() == len(points)
    for number, first in enumerate(groups.first):
        members = np.flatnonzero(groups.cell == number)
        assert first == members[0] and {cells[m] for m in members} == {cells[first]}
        np.testing.assert_allclose(groups.mean(points)[number], points[members].mean(axis=0), atol=1e-12, rtol=1e-12)
    assert len(group_by_cell(np.zeros((0, 3)), 0.1).counts) == len(cell_means(np.zeros((0, 3)), 0.1)) == 0


def test_cells_of_a_wide_cloud_are_told_apart() -> None:
    """More cells than a float32 can number: neighbours that share none must not meet."""
    points = cloud(2, 200, scale=100.0)
    points = torch.cat([points, points + torch.tensor([0.2, 0, 0])])
    expected = brute_grid(points.numpy(), 0.05)
    assert occupied_cells(points, 0.05) == len(expected)
    np.testing.assert_allclose(np.array(sorted(grid_subsample(points, 0.05)[0].tolist())), expected, atol=1e-5)


def test_a_cloud_in_half_precision_has_the_same_cells() -> None:
    half = (cloud(3, 4000) * torch.tensor([6.0, 5.0, 3.0])).half()
    assert occupied_cells(half, 0.05) == occupied_cells(half.float(), 0.05)


def test_grid_averages_values_along() -> None:
    points = torch.tensor([[0.0, 0, 0], [0.01, 0, 0], [1, 0, 0]])
    _, values = grid_subsample(points, 0.1, torch.tensor([[1.0], [3], [5]]))
    assert values.flatten().tolist() == [2.0, 5.0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 60), st.integers(1, 12))
def test_neighbours_equal_brute_force(seed: int, queries: int, supports: int, limit: int) -> None:
    a, b, radius = cloud(seed, queries), cloud(seed + 1, supports), 0.3
    found = radius_neighbours(a, b, radius, limit)
    torch.testing.assert_close(found, neighbours_by_cells(a, b, radius, limit))
    distance = torch.cdist(a, b)
    for row, index in enumerate(found):
        inside = [j for j in distance[row].argsort().tolist() if distance[row, j] < radius][:limit]
        assert index.tolist() == inside + [supports] * (limit - len(inside))


def test_equally_near_neighbours_come_in_their_own_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a lattice nearly everything is a tie; in slices of a few queries, and with a point a thousand km away."""
    monkeypatch.setattr(neighbours_module, "SLICE", 500)
    axis = torch.arange(5) * 0.25
    lattice = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), -1).reshape(-1, 3)
    supports = torch.cat([lattice[torch.randperm(125, generator=torch.Generator().manual_seed(0))], lattice[:1] + 1e6])
    queries = torch.cat([lattice + 0.125, lattice, lattice - 3.0, lattice[:1] + 1e6])
    found = neighbours_by_cells(queries, supports, 0.3, 10)
    distance = torch.cdist(queries.double(), supports.double(), compute_mode="donot_use_mm_for_euclid_dist")
    for row, index in enumerate(found.tolist()):
        near = [j for j in np.lexsort([np.arange(126), distance[row].numpy()]) if distance[row, j] < 0.3][:10]
        assert index == near + [126] * (10 - len(near))
    assert neighbours_by_cells(queries[:0], supports, 0.3, 4).shape == (0, 4)
    assert neighbours_by_cells(queries[:2], supports[:0], 0.3, 4).tolist() == [[0] * 4] * 2


class Watched(TorchDispatchMode):
    """Remembers which operations ran, and the size of the largest table that one of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.names = 0, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        self.largest = max([self.largest, *(t.numel() for t in tree_leaves(result) if isinstance(t, torch.Tensor))])
        return result


def test_neighbours_by_cells_need_no_table_of_all_pairs() -> None:
    count = 6000
    points = cloud(0, count) * torch.tensor([10.0, 10.0, 0.1])
    with Watched() as watched:
        found = neighbours_by_cells(points, points, 0.25, 20)
    torch.testing.assert_close(found, radius_neighbours(points, points, 0.25, 20))
    assert watched.largest < 0.05 * count**2


def test_sorted_sums_of_a_grid_are_those_of_the_dense_one_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(0, 20_000)
    expected = grid_subsample(points, 0.05)[0]
    monkeypatch.setattr(grid_module, "DENSE_CELLS", 0)
    with Watched() as watched:
        found = grid_subsample(points, 0.05)[0]
    assert torch.equal(found, expected)
    assert not watched.names & {"bincount", "index_add_", "index_add", "scatter_add_", "scatter_add"}, "order on a GPU"


def test_normals_of_a_plane_look_at_the_viewpoint() -> None:
    x, y = torch.meshgrid(torch.linspace(0, 1, 20), torch.linspace(0, 1, 20), indexing="ij")
    points = torch.stack([x, y, 0.3 * x], -1).reshape(-1, 3)
    neighbours = radius_neighbours(points, points, 0.2, 12)
    normals, variation = estimate_normals(points, neighbours, torch.tensor([0.0, 0.0, 5.0]))
    expected = torch.nn.functional.normalize(torch.tensor([-0.3, 0.0, 1.0]), dim=0)
    torch.testing.assert_close(normals, expected.expand_as(normals), atol=1e-3, rtol=0)
    assert variation.max() < 1e-5


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 1000),
    st.tuples(*[st.sampled_from([0.0, 1e-9, 1e-4, 0.3, 1.0])] * 3),
    st.sampled_from([1e-8, 1.0, 1e4]),
)
def test_the_smallest_eigenvector_is_that_of_eigh(seed: int, lengths: tuple[float, float, float], scale: float) -> None:
    """Planes, lines, balls, single points: where the direction is not unique, the value along it must still be."""
    values = torch.tensor(sorted(lengths), dtype=torch.float64) * scale
    axes = torch.linalg.qr(torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(seed)).double())[0]
    matrices = axes * values @ axes.transpose(1, 2)
    moments = matrices.flatten(1)[:, [0, 1, 2, 4, 5, 8]].T
    smallest, direction, trace = smallest_eigenvector(moments)
    tolerance = 1e-7 * scale
    torch.testing.assert_close(smallest, values[0].expand(5), atol=tolerance, rtol=0)
    torch.testing.assert_close(trace, values.sum().expand(5), atol=tolerance, rtol=1e-12)
    torch.testing.assert_close(direction.norm(dim=1), torch.ones(5, dtype=torch.float64))
    along = torch.einsum("bi,bij,bj->b", direction, matrices, direction)
    torch.testing.assert_close(along, values[0].expand(5), atol=tolerance, rtol=0)


def test_stacked_pyramids_keep_every_neighbour() -> None:
    parts = [build_pyramid(cloud(k, 400 + 100 * k, 2.0), SHAPE) for k in range(3)]
    stacked = stack_pyramids(parts)
    for level in range(4):
        start = 0
        for part in parts:
            size = len(part.points[level])
            rows = stacked.neighbours[level][start : start + size]
            local = torch.where(rows == len(stacked.points[level]), size, rows - start)
            torch.testing.assert_close(local, part.neighbours[level])
            start += size
    assert stacked.lengths[0] == [len(part.points[0]) for part in parts]


@pytest.mark.parametrize("count", [3, 4, 10])
def test_a_pyramid_of_a_few_points_can_be_built(count: int) -> None:
    pyramid = build_pyramid(cloud(0, count), SHAPE)
    assert len(pyramid.points) == 4
    assert all(torch.isfinite(normals).all() for normals in pyramid.normals)


def test_a_least_point_that_rounds_below_the_grids_origin_is_kept() -> None:
    """floor(p / size) * size can come out above p in float32; such a point once got cell -1."""
    size = 0.0125
    values = torch.linspace(-2, 2, 200_001)
    least = values[(torch.floor(values / size) * size) > values]
    assert len(least) > 0
    for value in least[:20]:
        points = torch.stack([value.expand(3), value.expand(3) + 1])
        assert len(grid_subsample(points, size)[0]) == 2
