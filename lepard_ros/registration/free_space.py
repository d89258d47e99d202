# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Free space: the volume between a sensor and the surface it observed.

The free space of a cloud is a coarse depth map around its viewpoint, over all directions (an octahedron unfolded to a
square, so that there are no poles). A fused fragment was observed from several viewpoints but has one, so a conflict
is evidence, not proof.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import minimum_filter

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.surface_memo import kept_for_surface
from lepard_ros.registration.types import Surface


@dataclass(frozen=True)
class FreeSpaceSettings:
    """When a point counts as lying in free space.

    cells: side of the map (64 cells: about 3 degrees each). margin, relative_margin: minimum distance in front of the
    observed surface, in metres and as a share of the depth. nearest: radius in metres around the viewpoint that is
    ignored, because sensors are blind there.
    """

    cells: int = 64
    margin: float = 0.10
    relative_margin: float = 0.03
    nearest: float = 0.3


def octahedral_cells(directions: FloatArray, cells: int) -> NDArray[np.int64]:
    """Map cells of directions of any length. (..., 3) -> (...,) in [0, cells^2); the z axis is at the centre."""
    flat = directions / np.maximum(np.abs(directions).sum(-1, keepdims=True), 1e-12)
    folded = (1.0 - np.abs(flat[..., [1, 0]])) * np.where(flat[..., :2] >= 0.0, 1.0, -1.0)
    square = np.where(flat[..., 2:] >= 0.0, flat[..., :2], folded)
    column, row = np.moveaxis(np.clip(((square + 1.0) * (0.5 * cells)).astype(np.int64), 0, cells - 1), -1, 0)
    return row * cells + column


@kept_for_surface
def depth_map(surface: Surface, cells: int) -> FloatArray:
    """Minimum depth observed in and around each cell, in metres; NaN without an observation. Returns (cells^2,)."""
    rays = surface.points - surface.viewpoint
    nearest = np.full(cells * cells, np.inf)
    np.minimum.at(nearest, octahedral_cells(rays, cells), np.linalg.norm(rays, axis=1))
    around = minimum_filter(nearest.reshape(cells, cells), size=3).ravel()  # tolerate an edge in the next cell
    return np.where(np.isfinite(nearest), around, np.nan)


def conflicts(points: FloatArray, seen: Surface, settings: FreeSpaceSettings) -> NDArray[np.bool_]:
    """Mask of the points, in the frame of `seen`, that lie in its free space. (..., 3) -> (...,).

    All False if the viewpoint of that sensor is unknown.
    """
    if not np.isfinite(seen.viewpoint).all():
        return np.zeros(points.shape[:-1], dtype=bool)
    rays = points - seen.viewpoint
    depth = np.linalg.norm(rays, axis=-1)
    surface_depth = depth_map(seen, settings.cells)[octahedral_cells(rays, settings.cells)]
    limit = surface_depth * (1.0 - settings.relative_margin) - settings.margin
    return (depth > settings.nearest) & (depth < limit)  # NaN compares as False: unobserved directions do not count
