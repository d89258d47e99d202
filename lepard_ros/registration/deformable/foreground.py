# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Foreground segmentation: large planes are background, the part with the largest apparent size is the object."""

from dataclasses import dataclass

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.geometry.arrays import BoolArray, FloatArray, IntArray
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.registration.rigid.icp import IcpSettings, align, sample
from lepard_ros.registration.types import Surface

SPACING = 0.04  # metres: cell size for finding planes and parts
PLANE_TRIES, PLANE_VOTERS = 64, 4000
PLANE_COSINE = 0.9  # between a point's normal and the plane's
PLANE_WIDTH = 0.03  # metres: maximum distance from a plane, the noise of a depth camera at 3 m
MIN_PART = 0.03  # square metres: minimum area of the object, about a hand
MAX_PLANES = 6
ICP_POINTS, ICP_ITERATIONS = 2000, 10
MIN_BACKGROUND = 300  # minimum number of cells for estimating the camera motion
ICP_DAMPING = 0.01  # high: a wall and a floor do not constrain a slide along both; the camera then counts as static


@dataclass(frozen=True)
class ForegroundSettings:
    """Settings of the segmentation. Lengths in metres; the defaults suit an object at 1 to 3 m in a room.

    min_plane_area: square metres of a background plane (wall, floor, table top); smaller planes may be the object.
    gap: maximum gap between parts of the object. box: (2, 3) minimum and maximum corner of a region of interest in the
    sensor's frame, or None; points outside are background.
    """

    min_plane_area: float = 1.0
    gap: float = 0.1
    box: tuple[tuple[float, float, float], tuple[float, float, float]] | None = None


@dataclass(frozen=True)
class Scene:
    """A segmented cloud. body: (N,) mask of the object's points. background: the rest, downsampled."""

    body: BoolArray
    background: Surface


NO_BACKGROUND = Surface(np.zeros((0, 3)), np.zeros((0, 3)), SPACING)


def find_foreground(
    points: FloatArray, settings: ForegroundSettings | None = None, last: FloatArray | None = None
) -> BoolArray:
    """Mask (N,) of the object in finite points (N, 3), in the sensor's frame: see `split_scene`."""
    return split_scene(points, settings, last).body


def split_scene(
    points: FloatArray, settings: ForegroundSettings | None = None, last: FloatArray | None = None
) -> Scene:
    """Separate the object from the background in finite points (N, 3), in the sensor's frame.

    last: (K, 3) the object in the last cloud; parts next to it belong to it. Without it, the object is the part that
    covers most of the view. A cloud without a large plane has no background.
    """
    settings = settings or ForegroundSettings()
    inside = _in_box(points, settings)
    if inside.sum() < 3:
        return Scene(inside, NO_BACKGROUND)
    groups = group_by_cell(points[inside], SPACING)
    cells = groups.mean(points[inside])
    normals = surface_normals(cells, neighbours=10)
    planes = _on_planes(cells, normals, settings)
    if not planes.any():
        return Scene(inside, NO_BACKGROUND)
    body = ~planes
    body[body] = _body_parts(cells[body], settings, last)
    out = np.zeros(len(points), dtype=bool)
    out[inside] = body[groups.cell]
    return Scene(out, Surface(cells[~body], normals[~body], SPACING))


def camera_motion(before: Surface, after: Surface) -> FloatArray:
    """Motion (4, 4) of the static background from one cloud to the next, by point-to-plane ICP.

    Identity if there is too little background.
    """
    if min(len(before.points), len(after.points)) < MIN_BACKGROUND:
        return np.eye(4)
    start = np.eye(4)[None]
    motion, settled = align(sample(before, ICP_POINTS), after, start, ICP_ITERATIONS, IcpSettings(damping=ICP_DAMPING))
    return motion[0] if settled[0] else np.eye(4)


def _in_box(points: FloatArray, settings: ForegroundSettings) -> BoolArray:
    if settings.box is None:
        return np.ones(len(points), dtype=bool)
    low, high = np.asarray(settings.box)
    return np.asarray(((points >= low) & (points <= high)).all(axis=1))


def _on_planes(cells: FloatArray, normals: FloatArray, settings: ForegroundSettings) -> BoolArray:
    """Mask (C,) of the cells on large connected planes, found one after the other."""
    found = np.zeros(len(cells), dtype=bool)
    rng = np.random.default_rng(0)
    for _ in range(MAX_PLANES):
        left = np.flatnonzero(~found)
        if len(left) * SPACING**2 < settings.min_plane_area:
            break
        on_plane = left[_largest_plane(cells[left], normals[left], settings, rng)]
        size, label = _parts(cells[on_plane], settings.gap)
        wide = size[label] * SPACING**2 >= 0.3 * settings.min_plane_area  # exclude object parts that lie in the plane
        if wide.sum() * SPACING**2 < settings.min_plane_area:
            break
        found[on_plane[wide]] = True
    return found


def _largest_plane(
    cells: FloatArray, normals: FloatArray, settings: ForegroundSettings, rng: np.random.Generator
) -> BoolArray:
    """Mask (C,) of the cells on the dominant plane: RANSAC over cells with their normals, refined once."""
    voters = rng.permutation(len(cells))[:PLANE_VOTERS]
    tried = voters[:PLANE_TRIES]
    normal, offset = normals[tried], np.einsum("ni,ni->n", normals[tried], cells[tried])
    near = np.abs(cells[voters] @ normal.T - offset) < PLANE_WIDTH
    best = int((near & (np.abs(normals[voters] @ normal.T) > PLANE_COSINE)).sum(axis=0).argmax())
    plane = _lying_on(cells, normals, normal[best], offset[best], PLANE_WIDTH)
    centre = cells[plane].mean(axis=0)
    fitted = np.linalg.svd(cells[plane] - centre, full_matrices=False)[2][2]
    return _lying_on(cells, normals, fitted, float(fitted @ centre), PLANE_WIDTH)


def _lying_on(cells: FloatArray, normals: FloatArray, normal: FloatArray, offset: float, width: float) -> BoolArray:
    return np.asarray((np.abs(cells @ normal - offset) < width) & (np.abs(normals @ normal) > 0.7))


def _body_parts(cells: FloatArray, settings: ForegroundSettings, last: FloatArray | None) -> BoolArray:
    """Mask (C,) of the cells that belong to the object, among those not on planes."""
    size, label = _parts(cells, settings.gap)
    large = size * SPACING**2 >= MIN_PART
    if not large.any():
        return np.ones(len(cells), dtype=bool)
    if last is not None and len(last):
        near = cKDTree(last).query(cells, distance_upper_bound=2 * settings.gap)[0] < np.inf
        touched = np.bincount(label, near, len(size)) > 0.3 * size
        if (touched & large).any():
            return touched[label]
    distance = np.bincount(label, np.linalg.norm(cells, axis=1), len(size)) / size
    return np.asarray(label == np.argmax(np.where(large, size / np.square(distance), 0.0)))


def _parts(cells: FloatArray, gap: float) -> tuple[IntArray, IntArray]:
    """The sizes (P,) of the connected parts of cells (C, 3), and the part of each (C,).

    Neighbours are searched between the means of larger cells, because within the gap each cell has dozens.
    """
    groups = group_by_cell(cells, gap / 2)
    centres = groups.mean(cells)
    pairs = cKDTree(centres).query_pairs(gap, output_type="ndarray")
    links = sparse.coo_matrix((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(len(centres),) * 2)
    label = connected_components(links, directed=False)[1][groups.cell]
    return np.bincount(label), label
