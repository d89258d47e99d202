# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Surfaces and alignment with small_gicp, a compiled library; only this module imports it.

Without small_gicp, our own grid, normals and point-to-plane ICP do the same, more slowly.
"""

import importlib
import logging
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from lepard_ros.cloud.neighbours import radius_neighbours
from lepard_ros.cloud.normals import estimate_normals
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.registration.rigid.icp import IcpSettings, align, sample
from lepard_ros.registration.types import Surface

# Also of the normals of a live cloud: with 6 they are so noisy that the cloud slides along a bare corridor unnoticed.
GICP_NEIGHBOURS = 10
NEIGHBOURS, NEIGHBOUR_REACH = 16, 2.5  # for our own normals: count, and search radius in spacings
# Maximum correspondence distances of the two ICP passes, in spacings: the first covers the usual prediction error.
REACHES = (8.0, 2.7)
# A wider pass before these recovers from sharp turns but doubles the trajectory error (TUM fr1_desk: 0.046 m with
# REACHES alone, 0.092 m with the wide pass first). It is used only for clouds that are refused otherwise.
WIDE_REACH = 16.0
# Grid size, in spacings, on which a live cloud is aligned to the finer local map. In three synthetic rooms, without the
# network, ATE was 0.050, 0.033 and 0.034 m over 36 clouds each; using all points took a third longer.
FEW = 1.6
# Most of the time goes into the neighbourhoods of the cells; 12,000 raise ATE on TUM fr1_desk from 0.042 to 0.050 m.
TARGET_CELLS = 16_000
COARSE = 4.0  # grid size of the wide pass, in spacings: few points keep the wide search cheap
ITERATIONS = 15
ALMOST_ALL = 0.9  # share of inliers with which a motion is taken without a look at other guesses
OWN_POINTS = 1200  # points of a cloud that our own ICP uses


class Shape(NamedTuple):
    """A surface, and the same data as small_gicp objects.

    cloud, tree: points with covariances and a k-d tree (target). few, coarse: two downsampled clouds (source).
    """

    surface: Surface
    cloud: Any = None
    tree: Any = None
    few: Any = None
    coarse: Any = None


@lru_cache(maxsize=1)
def small_gicp() -> ModuleType | None:
    """The library, or None with a warning in the log if it is not installed."""
    try:
        return importlib.import_module("small_gicp")
    except ImportError:
        logging.getLogger(__name__).warning(
            "small_gicp is not installed; tracking uses the built-in ICP, which is slower. Run: pip install small_gicp"
        )
        return None


def target_shape_of(points: FloatArray, spacing: float) -> Shape:
    """Downsample points (N, 3) on a grid of `spacing` metres, coarser if they are many, as a target of alignments."""
    library = small_gicp()
    if library is None:
        return Shape(_own_surface(points, spacing))
    cloud = library.voxelgrid_sampling(np.asarray(points, dtype=np.float64), spacing)
    if cloud.size() > TARGET_CELLS:
        cloud = library.voxelgrid_sampling(cloud, spacing * (cloud.size() / TARGET_CELLS) ** 0.5)
    tree = library.KdTree(cloud)
    # One thread: with several, the order of summation and so the result would change from run to run.
    library.estimate_normals_covariances(cloud, tree, GICP_NEIGHBOURS, 1)
    return Shape(_surface(cloud.points(), cloud.normals(), spacing), cloud, tree)


def live_shape_of(points: FloatArray, spacing: float) -> Shape:
    """Downsample points (N, 3) on a grid of `spacing` metres, with normals that face the origin, as a source."""
    library = small_gicp()
    if library is None:
        return Shape(_own_surface(points, spacing))
    cloud = library.voxelgrid_sampling(np.asarray(points, dtype=np.float64), spacing)
    library.estimate_normals(cloud, library.KdTree(cloud), GICP_NEIGHBOURS, 1)
    few, coarse = (library.voxelgrid_sampling(cloud, size * spacing) for size in (FEW, COARSE))
    library.estimate_covariances(few, library.KdTree(few), GICP_NEIGHBOURS, 1)
    return Shape(_surface(cloud.points(), cloud.normals(), spacing), few=few, coarse=coarse)


def _surface(points: FloatArray, normals: FloatArray, spacing: float) -> Surface:
    """A surface of homogeneous points and normals (N, 4), the normals turned towards the origin."""
    grid, normals = points[:, :3], normals[:, :3]
    away = np.einsum("ni,ni->n", grid, normals) > 0
    normals = np.where(away[:, None], -normals, normals)
    return Surface(grid.astype(np.float32), normals.astype(np.float32), spacing)


def align_shapes(source: Shape, target: Shape, guesses: Sequence[FloatArray], wide: bool = False) -> FloatArray:
    """Align the source to the target from each guess; return the motion (4, 4) that converged with the most inliers.

    If almost all points are inliers after one guess, the others are not tried.
    wide: start with a pass that has a larger correspondence distance.
    """
    library = small_gicp()
    if library is None or source.few is None or target.cloud is None:
        return _own_alignment(source.surface, target.surface, np.array(guesses))
    results: list[Any] = []
    for guess in guesses:
        results.append(_gicp(library, source, target, guess, wide))
        if results[-1].num_inliers >= ALMOST_ALL * source.few.size():
            break
    best = max(results, key=lambda result: (bool(result.converged), int(result.num_inliers)))
    return np.array(best.T_target_source)


def _gicp(library: ModuleType, source: Shape, target: Shape, guess: FloatArray, wide: bool) -> Any:
    spacing = target.surface.spacing
    if wide:
        reach = WIDE_REACH * spacing
        far = library.align(target.cloud, source.coarse, target.tree, guess, "PLANE_ICP", reach, 1, ITERATIONS)
        guess = far.T_target_source
    for reach in (step * spacing for step in REACHES):
        result = library.align(target.cloud, source.few, target.tree, guess, "GICP", reach, 1, ITERATIONS)
        guess = result.T_target_source
    return result


def _own_surface(points: FloatArray, spacing: float) -> Surface:
    (grid,) = grid_subsample(torch.from_numpy(np.ascontiguousarray(points, dtype=np.float32)), spacing)
    neighbours = radius_neighbours(grid, grid, NEIGHBOUR_REACH * spacing, NEIGHBOURS)
    normals, _ = estimate_normals(grid, neighbours, torch.zeros(3))
    return Surface(grid.numpy(), normals.numpy(), spacing)


def _own_alignment(source: Surface, target: Surface, guesses: FloatArray) -> FloatArray:
    few = sample(source, OWN_POINTS)
    far = IcpSettings(first_reach=WIDE_REACH, last_reach=REACHES[-1])
    motions, _ = align(few, target, guesses, ITERATIONS, far)
    distance, _ = target.tree.query(
        np.einsum("hij,nj->hni", motions[:, :3, :3], few.points) + motions[:, None, :3, 3],
        distance_upper_bound=1.5 * target.spacing,
    )
    best = int(np.isfinite(distance).mean(axis=1).argmax())
    return align(few, target, motions[[best]], ITERATIONS, IcpSettings())[0][0]
