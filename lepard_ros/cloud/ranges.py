# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Selection of a sensor's points: by range, and downsampled to a useful number."""

import numpy as np
from numpy.typing import NDArray

# Metres. A depth camera is blind below and unreliable beyond; defaults of the node and the replay.
NEAREST = 0.2
FARTHEST = 6.0
# More points than this add time and no accuracy: of 640 x 480 every second row and column is kept.
LIVE_POINTS = 70_000
PROBE = 4  # of an organised cloud one pixel in PROBE x PROBE tells how many are finite


def crop_range(points: NDArray[np.float32], nearest: float, farthest: float) -> NDArray[np.float32]:
    """Crop points by their distance to the sensor: NaN in an organised cloud, removed otherwise."""
    x, y, z = np.moveaxis(points, -1, 0)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is too far away, what is NaN is not there
        squared = x * x + y * y + z * z
    kept = (squared >= nearest**2) & (squared <= farthest**2)  # false for NaN
    if points.ndim == 2:
        return points[kept]
    cropped = points.copy()
    cropped[~kept] = np.nan
    return cropped


def thinned(points: NDArray[np.float32], max_points: int) -> NDArray[np.float32]:
    """Every n-th row and column of an organised cloud (H, W, 3), or every n-th point (N, 3): about `max_points` remain.

    A view, not a copy. Points that are not finite do not count: a small object in a wide image keeps all its points.
    """
    axes = points.ndim - 1
    probes = points[(slice(None, None, PROBE),) * axes]
    with np.errstate(over="ignore", invalid="ignore"):
        share = float(np.isfinite(probes.sum(axis=-1)).mean()) if probes.size else 0.0
    step = max(1, round((share * points.size / 3 / max_points) ** (1 / axes)))
    return points[(slice(None, None, step),) * axes]
