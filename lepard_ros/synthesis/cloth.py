# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Objects without a skeleton: cloth sheets and soft bodies that wave, bend, twist and taper."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.creatures import BodyPlan, mesh_flesh, smooth_noise, unit_normals

SHEET_CELLS = 90


class Deformation(NamedTuple):
    """The deformation of an object at one moment. Linear interpolation between two gives a motion.

    amplitudes, phases: (W,) metres and radians of waves along z. curvature: 1 / metres, of a bend about an axis in the
    xy plane at right angles to `heading` radians. twist: radians per metre along y. taper: per metre, too.
    """

    amplitudes: FloatArray
    phases: FloatArray
    curvature: float
    heading: float
    twist: float
    taper: float


def blend_deformations(first: Deformation, second: Deformation, amount: float) -> Deformation:
    """The deformation between two: `first` at 0, `second` at 1."""
    mixed = [
        (1 - amount) * np.asarray(start) + amount * np.asarray(end) for start, end in zip(first, second, strict=True)
    ]
    return Deformation(mixed[0], mixed[1], *(float(value) for value in mixed[2:]))


def deform(points: FloatArray, waves: FloatArray, state: Deformation) -> FloatArray:
    """Points (N, 3) at rest, deformed; `waves` (3, W) are wave vectors in radians per metre."""
    moved = points.copy()
    moved[:, :2] *= (1 + state.taper * points[:, 1])[:, None]
    moved[:, 2] += (np.sin(points @ waves + state.phases) * state.amplitudes).sum(axis=1)
    return _twist(_bend(moved, state.curvature, state.heading), state.twist)


def _bend(points: FloatArray, curvature: float, heading: float) -> FloatArray:
    """Roll the xy plane around a cylinder of radius 1 / curvature; lengths along the plane are preserved."""
    along, across = np.array([np.cos(heading), np.sin(heading), 0]), np.array([-np.sin(heading), np.cos(heading), 0])
    distance, side, height = points @ along, points @ across, points[:, 2]
    safe = curvature if abs(curvature) > 1e-6 else 1e-6
    angle = distance * safe
    rolled, risen = (1 / safe - height) * np.sin(angle), 1 / safe - (1 / safe - height) * np.cos(angle)
    return rolled[:, None] * along + side[:, None] * across + risen[:, None] * np.array([0.0, 0.0, 1.0])


def _twist(points: FloatArray, rate: float) -> FloatArray:
    """Rotate every cross-section about y by an angle proportional to y."""
    x, y, z = points.T
    cosine, sine = np.cos(rate * y), np.sin(rate * y)
    return np.stack([cosine * x + sine * z, y, cosine * z - sine * x], axis=1)


def random_deformation(rng: Generator, waves: int, effort: float, floppiness: float) -> Deformation:
    """A random deformation. floppiness: amplitude of the largest waves in metres. effort: 0 to 1, scales everything."""
    return Deformation(
        effort * rng.uniform(-1, 1, waves) * floppiness / np.arange(1, waves + 1),
        rng.uniform(-1.5, 1.5, waves),
        effort * rng.uniform(-2.2, 2.2),
        rng.uniform(-np.pi / 2, np.pi / 2),
        effort * rng.uniform(-1.2, 1.2),
        effort * rng.uniform(-0.25, 0.25),
    )


def sheet(rng: Generator) -> tuple[FloatArray, NDArray[np.int64]]:
    """A flat piece of cloth with slight relief: towel, round cloth, shirt, trousers or cross. Metres."""
    width, height = rng.uniform(0.6, 1.2), rng.uniform(0.7, 1.3)
    rows, columns = np.meshgrid(np.linspace(-1, 1, SHEET_CELLS), np.linspace(-1, 1, SHEET_CELLS), indexing="ij")
    number = np.arange(rows.size).reshape(rows.shape)
    a, b, c, d = number[:-1, :-1], number[:-1, 1:], number[1:, 1:], number[1:, :-1]
    inside = _silhouette(rng, columns, rows)
    whole = inside[:-1, :-1] & inside[:-1, 1:] & inside[1:, 1:] & inside[1:, :-1]
    triangles = np.concatenate(
        [np.stack([a[whole], b[whole], c[whole]], 1), np.stack([a[whole], c[whole], d[whole]], 1)]
    )
    points = np.stack([columns.ravel() * width / 2, rows.ravel() * height / 2, np.zeros(rows.size)], axis=1)
    points[:, 2:] = rng.uniform(0.005, 0.03) * smooth_noise(points, rng, wavelength=rng.uniform(0.2, 0.5))
    used, joined = np.unique(triangles, return_inverse=True)
    return points[used], joined.reshape(-1, 3)


def _silhouette(rng: Generator, x: FloatArray, y: FloatArray) -> NDArray[np.bool_]:
    """Mask of the points in the square [-1, 1] that belong to the cloth."""
    cut, neck = rng.uniform(0.4, 0.65), rng.uniform(0.1, 0.3)
    shapes = [
        np.ones(x.shape, bool),
        x**2 + y**2 <= 1,
        (np.abs(x) < cut)
        | ((y > 1 - 2 * neck - 0.2 * cut) & (y < 1.2 - 0.4 * np.abs(x))) & (np.hypot(x, y - 1) > neck),
        (y > cut) | (np.abs(x) > 0.12 + 0.1 * (cut - y)),
        (np.abs(x) < cut) | (np.abs(y) < cut * 0.8),
    ]
    return shapes[rng.choice(len(shapes), p=[0.35, 0.1, 0.25, 0.15, 0.15])]


def soft_object(rng: Generator) -> tuple[FloatArray, NDArray[np.int64]]:
    """A lumpy solid of a few round cones, or a cushion. Metres."""
    plan = BodyPlan(blend=rng.uniform(0.03, 0.12))
    bone = plan.add_bone(-1, (0, 0, 0))
    start = rng.uniform(-0.3, 0.3, 3)
    for _ in range(int(rng.integers(2, 7))):
        end = start + rng.normal(size=3) * [0.35, 0.45, 0.2]
        plan.add_part(bone, start, end, rng.uniform(0.06, 0.2), rng.uniform(0.05, 0.2))
        start = end if rng.random() < 0.6 else start
    vertices, triangles = mesh_flesh(plan)
    vertices = vertices - vertices.mean(axis=0)
    lumps = rng.uniform(0.01, 0.03) * smooth_noise(vertices, rng, wavelength=rng.uniform(0.2, 0.4))
    return vertices + lumps * unit_normals(vertices, triangles), triangles
