# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A small furnished room for tests of tracking, rendered exactly by intersecting rays with boxes."""

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera

CAMERA = Camera(160, 120, 130.0, 130.0, 79.5, 59.5)
# Lowest and highest corner of each box: x to the right, y down, z forward; the floor is at y = 1.2.
BOXES = np.array(
    [
        [[-3.0, -1.3, -3.0], [3.0, -1.2, 4.0]],
        [[-3.0, 1.2, -3.0], [3.0, 1.3, 4.0]],
        [[-3.1, -1.3, -3.0], [-3.0, 1.3, 4.0]],
        [[3.0, -1.3, -3.0], [3.1, 1.3, 4.0]],
        [[-3.0, -1.3, 4.0], [3.0, 1.3, 4.1]],
        [[-3.0, -1.3, -3.1], [3.0, 1.3, -3.0]],
        [[-2.6, 0.3, 2.4], [-1.2, 1.2, 3.3]],
        [[-2.2, -0.1, 2.7], [-1.8, 0.3, 3.0]],
        [[0.4, 0.5, 2.0], [1.6, 0.6, 2.9]],
        [[0.5, 0.6, 2.1], [0.6, 1.2, 2.2]],
        [[1.4, 0.6, 2.7], [1.5, 1.2, 2.8]],
        [[0.7, 0.1, 2.4], [1.0, 0.5, 2.6]],
        [[1.2, 0.25, 2.2], [1.45, 0.5, 2.35]],
        [[2.2, -1.2, 1.0], [3.0, 1.2, 1.6]],
        [[-0.6, -0.9, 3.7], [0.3, -0.3, 4.0]],
        [[-3.0, 0.2, -0.4], [-2.2, 1.2, 0.9]],
        [[-2.9, -0.2, 0.1], [-2.5, 0.2, 0.4]],
        [[1.0, 0.4, -1.8], [2.2, 1.2, -0.9]],
        [[-1.5, 0.7, -2.6], [-0.4, 1.2, -1.6]],
        [[0.1, -0.4, -3.0], [0.9, 0.2, -2.8]],
    ]
)


def render(pose: NDArray[np.float64], seed: int | None = 0, boxes: NDArray[np.float64] = BOXES) -> NDArray[np.float32]:
    """The depth image (H, W) in metres from a pose (4, 4) camera to room; noise of a Kinect unless seed is None."""
    rays = CAMERA.rays().reshape(-1, 3).astype(np.float64) @ pose[:3, :3].T
    origin = pose[:3, 3]
    nearest = np.full(len(rays), np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        for low, high in boxes:
            first, second = (low - origin) / rays, (high - origin) / rays
            enter = np.minimum(first, second).max(axis=1)
            leave = np.maximum(first, second).min(axis=1)
            hit = (enter < leave) & (enter > 0.05)
            nearest = np.where(hit & (enter < nearest), enter, nearest)
    depth = np.where(nearest < 5.0, nearest, 0.0)
    if seed is not None:
        depth += np.random.default_rng(seed).normal(0, 0.0015, depth.shape) * depth**2
    return depth.reshape(CAMERA.height, CAMERA.width).astype(np.float32)


def look(x: float, z: float, yaw: float, pitch: float = 8.0, y: float = 0.0) -> NDArray[np.float64]:
    """The pose (4, 4) of a camera at a place that looks `yaw` degrees to the right and `pitch` degrees down."""
    a, b = np.radians(yaw), np.radians(-pitch)
    turn = np.array([[np.cos(a), 0, np.sin(a)], [0, 1, 0], [-np.sin(a), 0, np.cos(a)]])
    nod = np.array([[1, 0, 0], [0, np.cos(b), -np.sin(b)], [0, np.sin(b), np.cos(b)]])
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = turn @ nod, (x, y, z)
    return pose


def sweep(count: int, start: float = -25.0, end: float = 45.0) -> list[NDArray[np.float64]]:
    """Poses of a camera that walks to the right while it turns."""
    steps = np.linspace(0.0, 1.0, count)
    return [
        look(-0.5 + 1.0 * s, -0.6 + 0.4 * np.sin(3 * s), start + (end - start) * s, 8 + 4 * np.sin(5 * s))
        for s in steps
    ]
