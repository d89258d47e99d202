# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A street of boxes, and what a spinning LiDAR of 64 lines sees of it up to 80 m."""

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import invert

LINES, COLUMNS, RANGE = 64, 900, 80.0
LOWEST, HIGHEST = -24.8, 2.0  # degrees
HEIGHT, NOISE = 1.8, 0.02  # metres: of the sensor above the road, of a range


def street(seed: int = 0, length: float = 160.0) -> FloatArray:
    """Boxes as (N, 2, 3) lowest and highest corners: houses with gaps and bays, cars, poles, trees along the x axis."""
    rng = np.random.default_rng(seed)
    boxes = []
    for side in (-1.0, 1.0):
        x = -length / 2
        while x < length / 2:
            width, gap, front = rng.uniform(6, 18), rng.choice([0.0, rng.uniform(2, 8)]), rng.uniform(9, 14)
            boxes.append(_box(x + width / 2, side * (front + 5), width, 10.0, rng.uniform(5, 14)))
            for _ in range(rng.integers(1, 4)):  # bays, porches and steps
                bay = rng.uniform(1, 3), rng.uniform(0.6, 2.0), rng.uniform(1, 5)
                boxes.append(_box(x + rng.uniform(1, width - 1), side * front, *bay))
            x += width + gap
        for place in rng.uniform(-length / 2, length / 2, 14):
            car = _box(place, side * rng.uniform(4.5, 5.5), 4.2, 1.8, 0.9)
            boxes += [car, _box(place + 0.3, car[:, 1].mean(), 2.2, 1.6, 1.5)]
        for place in rng.uniform(-length / 2, length / 2, 16):
            boxes.append(_box(place, side * 7.0, 0.3, 0.3, rng.uniform(3, 7)))
            if rng.random() < 0.5:  # a tree
                crown = _box(place, side * 7.0, *rng.uniform(1.5, 3.5, 2), 5.5)
                crown[0, 2] = rng.uniform(2.2, 3.0)
                boxes.append(crown)
    return np.array(boxes)


def _box(x: float, y: float, length: float, width: float, height: float) -> FloatArray:
    return np.array([[x - length / 2, y - width / 2, 0.0], [x + length / 2, y + width / 2, height]])


def scan(boxes: FloatArray, pose: FloatArray, seed: int = 0) -> FloatArray:
    """The points (N, 3) in the sensor's frame that a LiDAR at a pose (4, 4) in the street sees."""
    up = np.radians(np.linspace(LOWEST, HIGHEST, LINES))
    around = np.linspace(-np.pi, np.pi, COLUMNS, endpoint=False)
    up, around = (values.ravel() for values in np.meshgrid(up, around, indexing="ij"))
    rays = np.stack([np.cos(up) * np.cos(around), np.cos(up) * np.sin(around), np.sin(up)], axis=1)
    turned, start = rays @ pose[:3, :3].T, pose[:3, 3]
    depth = np.where(turned[:, 2] < 0, -start[2] / np.minimum(turned[:, 2], -1e-9), np.inf)  # the road
    for low, high in boxes:
        with np.errstate(divide="ignore", invalid="ignore"):
            first, second = (low - start) / turned, (high - start) / turned
        enter, leave = np.minimum(first, second).max(1), np.maximum(first, second).min(1)
        depth = np.where((enter < leave) & (enter > 0) & (enter < depth), enter, depth)
    seen = depth < RANGE
    noisy = depth[seen] + np.random.default_rng(seed).normal(0, NOISE, seen.sum())
    return rays[seen] * noisy[:, None]


def pose_at(x: float, y: float, yaw: float) -> FloatArray:
    """A pose (4, 4) of the sensor on the road; yaw in degrees."""
    angle, pose = np.radians(yaw), np.eye(4)
    pose[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    pose[:3, 3] = x, y, HEIGHT
    return pose


def between(first: FloatArray, second: FloatArray) -> FloatArray:
    """The motion (4, 4) that takes points of the scan at the first pose to the scan at the second."""
    return invert(second[None])[0] @ first
