# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Point-to-plane alignment of surfaces, several starting motions at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import exponential, move, turn
from lepard_ros.registration.surface_memo import kept_for_surface
from lepard_ros.registration.types import Surface

MIN_FACING = 0.5  # cosine between normals that agree


@dataclass(frozen=True)
class IcpSettings:
    """Lengths in multiples of the target's spacing.

    first_reach, last_reach: maximum correspondence distance at the start and at the end.
    kernel: cut-off of the robust kernel, as a share of the reach. damping: of the normal equations.
    """

    first_reach: float = 3.0
    last_reach: float = 1.5
    kernel: float = 0.75
    damping: float = 1e-3


class Contact(NamedTuple):
    """Correspondences of moved source points with the target.

    moved: (H, n, 3). normal: (H, n, 3) of the nearest target point. distance: (H, n) metres to it, infinite out of
    reach. residual: (H, n) metres along its normal. touching: (H, n), within reach and with normals that agree.
    nearest: (H, n) index of that target point, 0 out of reach.
    """

    moved: FloatArray
    normal: FloatArray
    distance: FloatArray
    residual: FloatArray
    touching: NDArray[np.bool_]
    nearest: NDArray[np.integer]

    def lying(self, spacing: float) -> NDArray[np.bool_]:
        """(H, n): the points that lie on the target's surface, given its grid spacing in metres."""
        return self.touching & (self.distance < 1.5 * spacing) & (np.abs(self.residual) < 0.6 * spacing)

    def within(self, reach: float) -> "Contact":
        """What `touch` gives with a shorter reach, in metres."""
        near = self.distance < reach
        return self._replace(distance=np.where(near, self.distance, np.inf), touching=self.touching & near)


@kept_for_surface
def sample(surface: Surface, max_points: int) -> Surface:
    """At most `max_points` evenly spaced points of a surface; deterministic."""
    count = len(surface.points)
    if count <= max_points:
        return surface
    kept = np.sort(np.random.default_rng(0).permutation(count)[:max_points])
    return surface.part(kept)


def touch(source: Surface, target: Surface, transforms: FloatArray, reach: float) -> Contact:
    """The nearest target points within `reach` metres whose normals agree. transforms: (H, 4, 4).

    If a viewpoint is unknown, the sign of the normals is ignored.
    """
    moved = move(transforms, source.points)
    distance, index = target.tree.query(moved, distance_upper_bound=reach)
    near = np.isfinite(distance)
    index = np.where(near, index, 0)
    normal = target.normals[index]
    facing = np.einsum("hni,hni->hn", turn(transforms, source.normals), normal)
    if np.isnan(source.viewpoint).any() or np.isnan(target.viewpoint).any():
        facing = np.abs(facing)
    residual = np.einsum("hni,hni->hn", moved - target.points[index], normal)
    return Contact(moved, normal, distance, residual, near & (facing > MIN_FACING), index)


def tukey(residual: FloatArray, limit: float) -> FloatArray:
    """Tukey weights: one at zero, falling smoothly to zero at `limit`."""
    return np.clip(1.0 - (residual / limit) ** 2, 0.0, None) ** 2


def normal_equations(contact: Contact, weight: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Hessian (H, 6, 6), gradient (H, 6) and centre (H, 3) of the point-to-plane error.

    The unknown is [translation, rotation vector], a step in the target's frame that rotates about `centre`, the mean
    of the touching points: about a distant origin, translation and rotation would be nearly indistinguishable.
    """
    total = np.maximum(weight.sum(1), 1e-12)
    centre = np.einsum("hn,hni->hi", weight, contact.moved) / total[:, None]
    lever = np.cross(contact.moved - centre[:, None], contact.normal)
    jacobian = np.concatenate([contact.normal, lever], axis=2)
    weighted = np.swapaxes(jacobian * weight[..., None], 1, 2)
    return weighted @ jacobian, (weighted @ contact.residual[..., None])[..., 0], centre


class Equations(NamedTuple):
    """One step's normal equations for H motions, as `normal_equations` gives them.

    hessian: (H, 6, 6). gradient: (H, 6). centre: (H, 3). total: (H,) weight. corners: (H, 2, 3) of the box
    around the moved points.
    """

    hessian: FloatArray
    gradient: FloatArray
    centre: FloatArray
    total: FloatArray
    corners: FloatArray


def equations(
    source: Surface, target: Surface, transforms: FloatArray, reach: float, settings: IcpSettings
) -> Equations:
    """The step's equations of motions (H, 4, 4), from the points that touch within `reach` metres."""
    contact = touch(source, target, transforms, reach)
    weight = tukey(contact.residual, settings.kernel * reach) * contact.touching
    corners = np.stack([contact.moved.min(axis=1), contact.moved.max(axis=1)], axis=1)
    return Equations(*normal_equations(contact, weight), weight.sum(1), corners)


def step(given: Equations, damping: float) -> FloatArray:
    """The Gauss-Newton steps (H, 4, 4) in the target's frame; damped, so that unconstrained directions do not move."""
    scale = np.maximum(given.total, 1.0)[:, None, None]
    twist = -np.linalg.solve(given.hessian + damping * scale * np.eye(6), given.gradient[..., None])[..., 0]
    motion = exponential(twist)
    motion[:, :3, 3] += given.centre - np.einsum("hij,hj->hi", motion[:, :3, :3], given.centre)
    return motion


def align(
    source: Surface,
    target: Surface,
    transforms: FloatArray,
    iterations: int,
    settings: IcpSettings,
    make: Callable[[Surface, Surface, FloatArray, float, IcpSettings], Equations] = equations,
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Refine motions (H, 4, 4) for at most `iterations` steps while the reach shrinks.

    make: builds the equations of a step; `device_icp.equations_on` does so on a GPU.
    Returns the refined motions and (H,) bool: whether the last step was below a twentieth of the spacing.
    """
    transforms = np.asarray(transforms, dtype=np.float64)
    settled = np.zeros(len(transforms), dtype=bool)
    reaches = np.geomspace(settings.first_reach, settings.last_reach, max(iterations // 2, 1)) * target.spacing
    for iteration in range(iterations):
        reach = reaches[min(iteration, len(reaches) - 1)]
        given = make(source, target, transforms, float(reach), settings)
        motion = step(given, settings.damping)
        transforms = motion @ transforms
        settled = _largest_shift(motion, given.corners) < 0.05 * target.spacing
        if settled.all() and iteration >= len(reaches):
            break
    return transforms, settled


def _largest_shift(motion: FloatArray, corners: FloatArray) -> FloatArray:
    """Maximum motion of the corners of the points' bounding box. (H, 4, 4), (H, 2, 3) -> (H,) metres."""
    return np.linalg.norm(move(motion, corners) - corners, axis=2).max(axis=1)
