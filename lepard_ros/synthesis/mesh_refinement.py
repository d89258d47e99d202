# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Finer, rounder meshes from low-poly ones, and meshes from signed distance fields."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_matrix, csr_matrix

from lepard_ros.geometry.arrays import FloatArray, IntArray
from lepard_ros.synthesis.skinning import SkinnedMesh

# Taubin smoothing: the second, negative step compensates for the shrinkage of the first.
SMOOTHING_STEPS = (0.5, -0.53)


def refine(mesh: SkinnedMesh, rounds: int, smoothing: int) -> SkinnedMesh:
    """Weld the mesh, split every triangle in four `rounds` times, smoothing `smoothing` times after each split.

    Skin weights are interpolated like coordinates, so the finer mesh follows the same skeleton.
    """
    values, triangles = weld(np.concatenate([mesh.vertices, mesh.weights], axis=1), mesh.triangles)
    for _ in range(rounds):
        values, triangles = subdivide(values, triangles)
        values = smooth(values, triangles, smoothing)
    weights = np.maximum(values[:, 3:], 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return replace(mesh, vertices=values[:, :3], triangles=triangles, weights=weights)


def weld(values: FloatArray, triangles: IntArray, digits: int = 4) -> tuple[FloatArray, IntArray]:
    """Merge vertices at one position (the first three columns of `values` (V, C)); the other columns are averaged.

    Exporters split a vertex where normals or materials differ. `digits`: decimal places, relative to the mesh size.
    """
    size = np.ptp(values[:, :3], axis=0).max()
    keys = np.round(values[:, :3] / size * 10**digits).astype(np.int64)
    _, group = np.unique(keys, axis=0, return_inverse=True)
    group = group.reshape(-1)
    averaging = csr_matrix((np.ones(len(group)), (group, np.arange(len(group)))))
    averaged = (averaging @ values) / averaging.sum(axis=1).A
    joined = group[triangles]
    first, second, third = joined.T
    return averaged, joined[(first != second) & (second != third) & (third != first)]


def subdivide(values: FloatArray, triangles: IntArray) -> tuple[FloatArray, IntArray]:
    """Split every triangle in four at the midpoints of its edges; `values` (V, C) are averaged there."""
    corners = np.sort(triangles[:, [[0, 1], [1, 2], [2, 0]]], axis=2).reshape(-1, 2).astype(np.int64)
    keys, edge_of = np.unique(corners[:, 0] * len(values) + corners[:, 1], return_inverse=True)
    edges = np.stack(np.divmod(keys, len(values)), axis=1)
    middle = len(values) + edge_of.reshape(-1, 3)
    (a, b, c), (ab, bc, ca) = triangles.T, middle.T
    quarters = [(a, ab, ca), (ab, b, bc), (ca, bc, c), (ab, bc, ca)]
    finer = np.concatenate([np.stack(quarter, axis=1) for quarter in quarters])
    return np.concatenate([values, values[edges].mean(axis=1)]), finer


def smooth(values: FloatArray, triangles: IntArray, iterations: int) -> FloatArray:
    """Taubin smoothing of all columns of `values` (V, C); vertices on an open border do not move."""
    count = len(values)
    ends = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    directed = coo_matrix((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), (count, count)).tocsr()
    links = ((directed + directed.T) > 0).astype(float)
    degree = links.sum(axis=1).A
    # An inner edge occurs once in each direction; a border edge in only one.
    border = np.abs(directed - directed.T).sum(axis=1).A > 0
    free = np.where(border | (degree == 0), 0.0, 1.0)
    for _ in range(iterations):
        for step in SMOOTHING_STEPS:
            values = values + step * free * (links @ values / np.maximum(degree, 1) - values)
    return values


def surface_of_field(field: FloatArray, origin: FloatArray, spacing: float) -> tuple[FloatArray, NDArray[np.int64]]:
    """The zero surface of a sampled signed distance (X, Y, Z), negative inside, by surface nets.

    Every cell that the surface crosses gets one vertex, the mean of the crossings of its edges; every crossed grid edge
    joins the four cells around it. Returns vertices (V, 3) and triangles (T, 3) that face outwards.
    """
    totals = np.zeros((*(np.array(field.shape) - 1), 3))
    counts = np.zeros(np.array(field.shape) - 1)
    crossings = [_edge_crossings(field, axis) for axis in range(3)]
    for axis, (cells, share, _) in enumerate(crossings):
        places = cells.astype(float)
        places[:, axis] += share
        for shift in _cells_around(axis):
            around = tuple((cells - shift).T)
            np.add.at(totals, around, places)
            np.add.at(counts, around, 1)
    crossed = counts > 0
    number = np.full(counts.shape, -1)
    number[crossed] = np.arange(crossed.sum())
    vertices = origin + spacing * totals[crossed] / counts[crossed][:, None]
    quads = np.concatenate(
        [_edge_quads(number, axis, ends, outwards) for axis, (ends, _, outwards) in enumerate(crossings)]
    )
    return vertices, np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


def _edge_crossings(field: FloatArray, axis: int) -> tuple[IntArray, FloatArray, NDArray[np.bool_]]:
    """Grid edges along `axis` that the surface crosses: lower ends (E, 3), positions (E,), whether up is outside."""
    low = np.moveaxis(np.moveaxis(field, axis, 0)[:-1], 0, axis)
    high = np.moveaxis(np.moveaxis(field, axis, 0)[1:], 0, axis)
    ends = np.argwhere((low < 0) != (high < 0))
    inside = np.all(
        [(ends[:, other] > 0) & (ends[:, other] < field.shape[other] - 1) for other in range(3) if other != axis],
        axis=0,
    )
    ends = ends[inside]
    below, above = low[tuple(ends.T)], high[tuple(ends.T)]
    return ends, below / (below - above), below < 0


def _cells_around(axis: int) -> IntArray:
    """Offsets (4, 3) from an edge's lower end to the four cells around it, in order of rotation about `axis`."""
    shifts = np.zeros((4, 3), int)
    shifts[:, (axis + 1) % 3] = (0, 1, 1, 0)
    shifts[:, (axis + 2) % 3] = (0, 0, 1, 1)
    return shifts


def _edge_quads(number: IntArray, axis: int, ends: IntArray, outwards: NDArray[np.bool_]) -> IntArray:
    """The vertices (E, 4) of the four cells around each crossed edge, ordered so that the quad faces outwards."""
    quads = np.stack([number[tuple((ends - shift).T)] for shift in _cells_around(axis)], axis=1)
    return np.where(outwards[:, None], quads, quads[:, ::-1])
