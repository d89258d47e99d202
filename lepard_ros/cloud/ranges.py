# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Which points of a sensor are used, by their distance to it."""

import numpy as np
from numpy.typing import NDArray

# Metres. Nearer a depth camera sees nothing, farther it guesses; the node and the replay both begin with these.
NEAREST = 0.2
FARTHEST = 6.0


def crop_range(points: NDArray[np.float32], nearest: float, farthest: float) -> NDArray[np.float32]:
    """Leave out points by their distance to the sensor: NaN in an organised cloud, removed from a list."""
    x, y, z = np.moveaxis(points, -1, 0)
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is too far away, what is NaN is not there
        squared = x * x + y * y + z * z
    kept = (squared >= nearest**2) & (squared <= farthest**2)  # false for NaN
    if points.ndim == 2:
        return points[kept]
    cropped = points.copy()
    cropped[~kept] = np.nan
    return cropped
