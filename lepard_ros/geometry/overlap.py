# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Overlap of two clouds."""

import numpy as np
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import move


def overlap_ratio(source: FloatArray, target: FloatArray, transform: FloatArray, distance: float) -> float:
    """The share of the moved source (N, 3) that has a target point (M, 3) within `distance` metres.

    >>> line = np.arange(4.0)[:, None] * [1.0, 0, 0]
    >>> overlap_ratio(line, line[:1], np.eye(4), 0.1)
    0.25
    """
    return float(np.mean(overlap_mask(source, target, transform, distance))) if len(source) else 0.0


def overlap_mask(source: FloatArray, target: FloatArray, transform: FloatArray, distance: float) -> BoolArray:
    """Which source points (N,) have a target point within `distance` metres after the motion.

    >>> overlap_mask(np.array([[0.0, 0, 0], [1, 0, 0]]), np.zeros((1, 3)), np.eye(4), 0.1).tolist()
    [True, False]
    """
    if len(source) == 0 or len(target) == 0:
        return np.zeros(len(source), dtype=bool)
    nearest, _ = cKDTree(target).query(move(transform, source), distance_upper_bound=distance)
    return np.isfinite(nearest)
