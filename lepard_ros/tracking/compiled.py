# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Surfaces and alignment by small_gicp, a compiled library; the one place that imports it.

Where it is not installed, our own grid, normals and point-to-plane ICP do the same more slowly.
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

GICP_NEIGHBOURS = 10
NEIGHBOURS, NEIGHBOUR_REACH = 16, 2.5  # of our own normals; the reach in spacings
# How far a point looks for its partner, in spacings: first as wide as a prediction is usually wrong, then close.
REACHES = (8.0, 2.7)
# A wider first step finds a sensor that was turned sharply, but doubles the error of a path (TUM fr1_desk: 0.046 m with
# REACHES alone, 0.092 m with the wide step before): for clouds that are refused else.
WIDE_REACH = 16.0
# Spacings of the grid on which a live cloud is aligned to the finer local map. In three synthesised rooms, without the
# network, ATE was 0.050, 0.033 and 0.034 m over 36 clouds each; all points took a third longer (other lengths of walk).
FEW = 1.6
COARSE = 4.0  # spacings of the grid on which the wide step is made: few points, so that looking far is cheap
ITERATIONS = 15
OWN_POINTS = 1200  # our own ICP takes so many points of a cloud


class Shape(NamedTuple):
    """A surface, and small_gicp's own form of it: points with covariances and a search tree for a target; few points
    with covariances, and very few, for a source."""

    surface: Surface
    cloud: Any = None
    tree: Any = None
    few: Any = None
    coarse: Any = None


@lru_cache(maxsize=1)
def small_gicp() -> ModuleType | None:
    """The library, or None with a sentence in the log."""
    try:
        return importlib.import_module("small_gicp")
    except ImportError:
        logging.getLogger(__name__).warning(
            "small_gicp is not installed, so clouds are tracked by our own slower ICP; pip install small_gicp."
        )
        return None


def shape_of(points: FloatArray, spacing: float) -> Shape:
    """Points (N, 3) on an even grid of `spacing` metres, with normals towards the origin."""
    library = small_gicp()
    if library is None:
        return Shape(_own_surface(points, spacing))
    # One thread: with more, the library sums in another order and the result changes from run to run.
    cloud, tree = library.preprocess_points(np.asarray(points, dtype=np.float64), spacing, GICP_NEIGHBOURS, 1)
    grid, normals = cloud.points()[:, :3], cloud.normals()[:, :3]
    away = np.einsum("ni,ni->n", grid, normals) > 0
    normals = np.where(away[:, None], -normals, normals)
    return Shape(Surface(grid.astype(np.float32), normals.astype(np.float32), spacing), cloud, tree)


def live_shape_of(points: FloatArray, spacing: float) -> Shape:
    """The same of a cloud that will be aligned to others."""
    library, shape = small_gicp(), shape_of(points, spacing)
    if library is None:
        return shape
    few = library.voxelgrid_sampling(shape.cloud, FEW * spacing)
    library.estimate_covariances(few, library.KdTree(few), GICP_NEIGHBOURS, 1)
    return shape._replace(few=few, coarse=library.voxelgrid_sampling(shape.cloud, COARSE * spacing))


def align_shapes(source: Shape, target: Shape, guesses: Sequence[FloatArray], wide: bool = False) -> FloatArray:
    """The motion (4, 4) of the source to the target, from the guess that leads to the most touching points.

    wide: look further for partners in the first step.
    """
    library = small_gicp()
    if library is None or source.few is None or target.cloud is None:
        return _own_alignment(source.surface, target.surface, np.array(guesses))
    results = [_gicp(library, source, target, guess, wide) for guess in guesses]
    best = max(results, key=lambda result: int(result.num_inliers))
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
