# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Conversion of a depth image to an organised cloud."""

import functools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

UNDISTORT_STEPS = 20


@dataclass(frozen=True)
class Camera:
    """A camera: size in pixels, focal lengths and centre in pixels. z looks forward, x right, y down.

    lens: distortion as OpenCV orders it, k1, k2, p1, p2, k3, k4, k5, k6; empty for a pinhole camera.
    """

    width: int
    height: int
    fx: float
    fy: float
    cx: float
    cy: float
    lens: tuple[float, ...] = field(default=(), kw_only=True)

    def rays(self) -> NDArray[np.float32]:
        """The direction of every pixel, with z = 1: (H, W, 3)."""
        return _rays(self)


@functools.lru_cache(maxsize=4)
def _rays(camera: Camera) -> NDArray[np.float32]:
    """Computed once for each camera: undistorting takes longer than everything else about a depth image."""
    u, v = np.meshgrid(np.arange(camera.width), np.arange(camera.height))
    x, y = (u - camera.cx) / camera.fx, (v - camera.cy) / camera.fy
    if camera.lens:
        x, y = _undistorted(x, y, camera.lens)
    rays = np.stack([x, y, np.ones_like(x)], axis=-1).astype(np.float32)
    rays.flags.writeable = False
    return rays


def _undistorted(
    x: NDArray[np.floating], y: NDArray[np.floating], lens: tuple[float, ...]
) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
    """Undistorted pixel positions: inverse of the lens model by fixed-point iteration, as in OpenCV."""
    k1, k2, p1, p2, k3, k4, k5, k6 = (*lens, *[0.0] * (8 - len(lens)))
    xu, yu = x.copy(), y.copy()
    for _ in range(UNDISTORT_STEPS):
        r2 = xu**2 + yu**2
        radial = (1 + r2 * (k4 + r2 * (k5 + r2 * k6))) / (1 + r2 * (k1 + r2 * (k2 + r2 * k3)))
        shift_x = 2 * p1 * xu * yu + p2 * (r2 + 2 * xu**2)
        shift_y = p1 * (r2 + 2 * yu**2) + 2 * p2 * xu * yu
        xu, yu = (x - shift_x) * radial, (y - shift_y) * radial
    return xu, yu


def depth_to_points(depth: NDArray[np.floating], camera: Camera) -> NDArray[np.float32]:
    """The organised cloud of a depth image.

    depth: (H, W) metres along z, with 0 or a non-finite value for missing pixels.
    Returns (H, W, 3) metres in the camera's frame, NaN for missing pixels.
    """
    seen = np.isfinite(depth) & (depth > 0)
    points = camera.rays() * np.where(seen, depth, np.nan).astype(np.float32)[..., None]
    return points.astype(np.float32)
