# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Contact between a warped surface and the target: closest points for non-rigid ICP, on downsampled surfaces."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.voxel_grid import cell_means
from lepard_ros.registration.deformable.graph import finite_points
from lepard_ros.registration.types import Surface


@dataclass(frozen=True)
class Contact:
    """A sample of the source surface, points (C, 3) with unit normals (C, 3), and the target."""

    points: FloatArray
    normals: FloatArray
    target: Surface


class Touch(NamedTuple):
    """Correspondences of warped contact points (C, 3) with the target.

    warped: (C, 3). normals: (C, 3) rotated by the warp. distance: (C,) metres to the nearest target point, inf
    beyond the reach. partner, partner_normal: (C, 3) that point and its normal.
    """

    warped: FloatArray
    normals: FloatArray
    distance: FloatArray
    partner: FloatArray
    partner_normal: FloatArray

    @property
    def facing(self) -> FloatArray:
        """(C,) cosine between the normals: -1 where the surface lies on the target inside out."""
        return np.einsum("ni,ni->n", self.normals, self.partner_normal)

    @property
    def height(self) -> FloatArray:
        """(C,) metres from the partner's tangent plane, along its normal."""
        return np.einsum("ni,ni->n", self.partner - self.warped, self.partner_normal)


def thinned_surface(cloud: FloatArray, spacing: float) -> Surface:
    """The finite points of a cloud (..., 3), downsampled to `spacing` metres, with normals facing the sensor."""
    points = cell_means(finite_points(cloud), spacing)
    return Surface(points, surface_normals(points, neighbours=10), spacing)


def sample_contact(source: Surface, target: Surface, usable: BoolArray, count: int) -> Contact:
    """At most `count` of the usable (N,) points of the source, drawn with a fixed seed."""
    drawn = np.random.default_rng(0).permutation(np.flatnonzero(usable))[:count]
    drawn.sort()
    return Contact(source.points[drawn], source.normals[drawn], target)


def touch(contact: Contact, warped: FloatArray, rotation: FloatArray, reach: float) -> Touch:
    """Find the nearest target points of warped contact points (C, 3), whose normals rotate by rotation (C, 3, 3)."""
    distance, index = contact.target.tree.query(warped, distance_upper_bound=reach)
    index = np.where(np.isfinite(distance), index, 0)
    normals = np.einsum("nij,nj->ni", rotation, contact.normals)
    return Touch(warped, normals, distance, contact.target.points[index], contact.target.normals[index])


def closest_targets(touched: Touch, reach: float, degrees: float) -> tuple[FloatArray, FloatArray]:
    """Target position of each contact point (C, 3), and its weight (C,), 0 without a correspondence.

    The target is the nearest point on the tangent plane, so that points may slide along the surface.
    """
    near = np.isfinite(touched.distance) & (touched.facing >= np.cos(np.radians(degrees)))
    share = np.where(near, touched.distance, reach) / reach
    return touched.warped + touched.height[:, None] * touched.partner_normal, np.square(1 - np.square(share))
