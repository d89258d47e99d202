# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A map from above: its points by height, and where its keyframes stand."""

from pathlib import Path

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray

MAX_DRAWN = 200_000  # points


def draw_map(points: FloatArray, poses: FloatArray, path: Path) -> None:
    """Draw points (N, 3) and keyframes (K, 4, 4), seen along the direction in which the keyframes spread least."""
    from matplotlib.figure import Figure

    points = points[:: max(1, len(points) // MAX_DRAWN)]
    places = poses[:, :3, 3]
    up = int(np.ptp(places, axis=0).argmin()) if len(places) > 1 else 2
    across = [axis for axis in range(3) if axis != up]
    figure = Figure(figsize=(8, 8), dpi=120)
    axes = figure.add_subplot()
    axes.scatter(points[:, across[0]], points[:, across[1]], c=points[:, up], s=0.2, cmap="viridis", linewidths=0)
    axes.plot(*places[:, across].T, ".", color="crimson", markersize=3, label=f"{len(places)} keyframes")
    axes.set_aspect("equal")
    axes.set_xlabel(f"{'xyz'[across[0]]} [m]")
    axes.set_ylabel(f"{'xyz'[across[1]]} [m]")
    axes.legend(loc="upper right")
    try:
        figure.savefig(path, bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be written ({error}); name a .png file in a folder that exists.") from error
