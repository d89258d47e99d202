# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What to do when the device has no memory left for a cloud: try once with a coarser one, then refuse it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.modes import Mode, Result

COARSE_GRID = 0.08  # metres; about a tenth of the points that the network's own grid of 2.5 cm keeps


def process_within_memory(mode: Mode, frame: Frame, wanted: set[str], logger: Any) -> Result:
    """`mode.process`, a second time on a coarser grid if the memory does not suffice. Raises InputError after that."""
    try:
        return mode.process(frame, wanted)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    logger.warning("Not enough memory for a cloud; it is tried once more on a coarser grid.")
    try:
        return mode.process(frame._replace(points=coarsen(frame.points, COARSE_GRID)), wanted)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "Not enough memory for a cloud, even on a coarse grid; lower max_range or use another device."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. By name, since torch moved its class between versions."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def coarsen(points: NDArray[np.float32], grid: float) -> NDArray[np.float32]:
    """One point for each occupied cell of a grid: (N, 3) or (H, W, 3) -> (M, 3)."""
    flat = points.reshape(-1, 3)
    flat = flat[np.isfinite(flat).all(axis=1)]
    _, first = np.unique(np.floor(flat / grid).astype(np.int64), axis=0, return_index=True)
    return flat[np.sort(first)]
