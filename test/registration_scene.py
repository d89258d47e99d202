# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Box rooms seen by a small depth camera: surfaces with known poses for the registration tests."""

from pathlib import Path

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import exponential, invert, move
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.registration.types import Surface

SPACING = 0.05


def box_room(seed: int, boxes: int = 14) -> FloatArray:
    """A room of 5 x 4 x 2.6 metres and its furniture: (1 + boxes, 2, 3) lower and upper corners, the room first."""
    rng = np.random.default_rng([seed, 7])
    size = np.array([5.0, 4.0, 2.6]) * rng.uniform(0.8, 1.2, 3)
    low = rng.uniform(0.0, 0.9, (boxes, 3)) * size * [1.0, 1.0, 0.5]
    high = low + rng.uniform(0.15, 1.1, (boxes, 3))
    return np.concatenate([[[np.zeros(3), size]], np.stack([low, np.minimum(high, size)], axis=1)])


def look(position: FloatArray, towards: FloatArray) -> FloatArray:
    """The pose (4, 4) of a camera (z forward, y down) in the room."""
    forward = (towards - position) / np.linalg.norm(towards - position)
    right = np.cross(forward, [0.0, 0.0, 1.0])
    right /= np.linalg.norm(right)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([right, np.cross(forward, right), forward], axis=1)
    pose[:3, 3] = position
    return pose


def cast(room: FloatArray, origin: FloatArray, rays: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Distances (n,) along rays (n, 3) to the first box, and the normals (n, 3) there, by the slab test."""
    with np.errstate(divide="ignore", invalid="ignore"):
        slabs = (room[:, None] - origin) / rays[None, :, None]
    entry, leave = slabs.min(2), slabs.max(2)
    enters, leaves = entry.max(2), leave.min(2)
    hit = (enters < leaves) & (enters > 0.0)
    hit[0] = False  # the room is seen from inside: where the ray leaves it
    depth = np.where(hit, enters, np.inf)
    depth[0] = leaves[0]
    nearest = depth.argmin(0)
    column = np.arange(len(rays))
    axis = np.where(nearest == 0, leave[0].argmin(1), entry[nearest, column].argmax(1))
    normals = np.zeros_like(rays)
    normals[column, axis] = -np.sign(rays[column, axis])
    return depth[nearest, column], normals


def view(room: FloatArray, pose: FloatArray, seed: int = 0, noise: float = 0.004, reach: float = 6.0) -> Surface:
    """What a camera at `pose` sees, in its own frame, on the grid."""
    rng = np.random.default_rng([seed, 11])
    u, v = np.meshgrid(np.linspace(-0.65, 0.65, 144), np.linspace(-0.5, 0.5, 108))
    rays = np.stack([u.ravel(), v.ravel(), np.ones(u.size)], axis=1)
    depth, normals = cast(room, pose[:3, 3], rays @ pose[:3, :3].T)
    points = rays * (depth + rng.normal(size=depth.shape) * noise)[:, None]
    kept = (depth > 0.3) & (depth < reach)
    points, normals = points[kept], (normals @ pose[:3, :3])[kept]
    normals += rng.normal(size=normals.shape) * 0.05
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    first = group_by_cell(points, SPACING).first
    return Surface(points[first], normals[first], SPACING)


def two_views(seed: int) -> tuple[Surface, Surface, FloatArray]:
    """Two overlapping views of one room, and the motion (4, 4) from the first to the second."""
    rng = np.random.default_rng([seed, 13])
    room = box_room(seed)
    size = room[0, 1]
    eye = np.array([0.12, 0.12, 0.65]) * size + rng.uniform(0.0, 0.2, 3)
    aim = size * [0.7, 0.7, 0.3]
    poses = [look(eye + shift, aim + turn) for shift, turn in ((0.0, 0.0), ([0.6, -0.1, 0.1], [-0.9, 0.6, 0.0]))]
    first, second = (view(room, pose, seed * 2 + index) for index, pose in enumerate(poses))
    return first, second, invert(poses[1]) @ poses[0]


def planted_matches(
    motion: FloatArray, count: int, ratio: float, seed: int, noise: float = 0.03
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Random matches (count, 3) twice, of which `ratio` follow the motion; and confidences that say nothing."""
    rng = np.random.default_rng([seed, 17])
    low, high = np.array([-2.0, -1.5, 0.0]), np.array([2.0, 1.5, 3.0])
    source = rng.uniform(low, high, (count, 3))
    target = move(motion, rng.uniform(low, high, (count, 3)))
    true = rng.permutation(count)[: round(count * ratio)]
    target[true] = move(motion, source[true]) + rng.normal(size=(len(true), 3)) * noise
    return source, target, np.sort(rng.uniform(0.1, 1.0, count))[::-1].copy()


def random_motion(seed: int, size: float = 1.0) -> FloatArray:
    """A random motion (4, 4) of about `size` metres and radians."""
    return exponential(np.random.default_rng([seed, 19]).normal(size=6) * size)


def real_surface(folder: Path, name: str) -> Surface:
    """A fragment "scene/number" of the 3DMatch folder, on the grid."""
    import open3d

    scene, number = name.rsplit("/", 1)
    points = np.load(folder / f"{scene}.npz")[number] * 0.00025
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(points)).voxel_down_sample(SPACING)
    cloud.estimate_normals(open3d.geometry.KDTreeSearchParamKNN(20))
    cloud.orient_normals_towards_camera_location(np.zeros(3))
    return Surface(np.asarray(cloud.points), np.asarray(cloud.normals), SPACING)
