# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Handling of out-of-memory errors: retry once with a coarser cloud, then reject it."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.modes import Mode, Result


def process_within_memory(mode: Mode, frame: Frame, wanted: set[str], logger: Any) -> Result:
    """Run `mode.process`; if memory runs out, retry on the mode's coarse grid. Raises InputError if that fails too."""
    try:
        return mode.process(frame, wanted)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        if mode.coarse_grid is None:
            raise InputError("Not enough memory for a cloud; lower max_range or use another device.") from error
    logger.warning(f"Not enough memory for a cloud; retrying on a grid of {mode.coarse_grid:g} m.")
    try:
        return mode.process(frame._replace(points=coarsen(frame.points, mode.coarse_grid)), wanted)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "Not enough memory for a cloud, even on a coarse grid; lower max_range or use another device."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether the host or the device ran out of memory. Compared by name, since torch has moved its class."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def coarsen(points: NDArray[np.float32], grid: float) -> NDArray[np.float32]:
    """One point for each occupied cell of a grid: (N, 3) or (H, W, 3) -> (M, 3)."""
    flat = points.reshape(-1, 3)
    flat = flat[np.isfinite(flat).all(axis=1)]
    return flat[np.sort(group_by_cell(flat, grid).first)]
