# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A view: what one cloud is to a tracker, features to be matched and a fine surface to be aligned."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lepard_ros.cloud.grid import grid_subsample
from lepard_ros.cloud.neighbours import radius_neighbours
from lepard_ros.cloud.normals import estimate_normals
from lepard_ros.registration.types import FloatArray, Surface

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher

NEIGHBOURS = 16
NEIGHBOUR_REACH = 2.5  # spacings


class View(NamedTuple):
    """A cloud's features, and its surface on a grid that may be finer than the network's."""

    cloud: "EncodedCloud"
    surface: Surface

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        own = 0 if self.surface is self.cloud.surface else self.surface.points.nbytes + self.surface.normals.nbytes
        return int(self.cloud.nbytes + own)


def see(points: FloatArray, matcher: "Matcher", spacing: float) -> View:
    """Encode a cloud (N, 3) seen from its origin. spacing: metres, of the surface unless the network's is finer."""
    cloud = matcher.encode(points)
    fine = spacing < 0.99 * cloud.surface.spacing
    return View(cloud, fine_surface(points, spacing) if fine else cloud.surface)


def fine_surface(points: FloatArray, spacing: float) -> Surface:
    """The points (N, 3) on an even grid with normals towards the origin, in float32 to be small."""
    (grid,) = grid_subsample(torch.from_numpy(np.ascontiguousarray(points, dtype=np.float32)), spacing)
    neighbours = radius_neighbours(grid, grid, NEIGHBOUR_REACH * spacing, NEIGHBOURS)
    normals, _ = estimate_normals(grid, neighbours, torch.zeros(3))
    return Surface(grid.numpy(), normals.numpy(), spacing)
