# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A depth camera's image turned into an organised cloud."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Camera:
    """A pinhole camera: size in pixels, focal lengths and centre in pixels. z looks forward, x right, y down."""

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float

    def rays(self) -> NDArray[np.float32]:
        """The direction of every pixel, with z = 1: (H, W, 3)."""
        u, v = np.meshgrid(np.arange(self.width), np.arange(self.height))
        x, y = (u - self.cx) / self.fx, (v - self.cy) / self.fy
        return np.stack([x, y, np.ones_like(x)], axis=-1).astype(np.float32)


def depth_to_points(depth: NDArray[np.floating], camera: Camera) -> NDArray[np.float32]:
    """The organised cloud of a depth image.

    depth: (H, W) metres along z, with 0 or a non-finite value where nothing was seen.
    Returns (H, W, 3) metres in the camera's frame, NaN where nothing was seen.
    """
    seen = np.isfinite(depth) & (depth > 0)
    points = camera.rays() * np.where(seen, depth, np.nan).astype(np.float32)[..., None]
    return points.astype(np.float32)
