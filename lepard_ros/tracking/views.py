# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A view: one cloud as the tracker uses it, with a fine surface for alignment and, on demand, features for matching."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.cloud.ranges import LIVE_POINTS, thinned
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Surface
from lepard_ros.tracking.compiled import Shape, live_shape_of
from lepard_ros.tracking.places import describe

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher


@dataclass
class View:
    """A cloud's surface, and its features once it is encoded.

    shape: the surface, with small_gicp data while the cloud is live. points: (N, 3) raw points in metres, until they
    are encoded; a view has either `points` or `cloud`. descriptor: (D,) global descriptor, see `places`. grid: metres,
    for encoding (None: the matcher's own).
    """

    shape: Shape
    points: FloatArray | None = None
    cloud: "EncodedCloud | None" = None
    descriptor: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    grid: float | None = None

    @property
    def surface(self) -> Surface:
        """The surface in the sensor frame."""
        return self.shape.surface

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays: list[Any] = [self.surface.points, self.surface.normals]
        arrays += [array for array in (self.points,) if array is not None]
        return sum(array.nbytes for array in (*arrays, self.descriptor)) + (
            self.cloud.nbytes if self.cloud is not None else 0
        )

    def encode(self, matcher: "Matcher") -> "EncodedCloud":
        """The features; the first call computes them and drops the raw points."""
        if self.cloud is None:
            if self.points is None:
                raise ValueError("a view without points and features cannot be matched")
            self.cloud = matcher.encode(self.points, grid=self.grid)
            self.descriptor, self.points = describe(self.cloud), None
        return self.cloud

    def drop_live_data(self) -> None:
        """Free the data that only a live cloud needs."""
        self.shape = Shape(self.surface)


def make_view(points: FloatArray, spacing: float, grid: float | None = None) -> View:
    """Make a view from finite points (N, 3) in the sensor frame, on a grid of `spacing` metres.

    grid: metres, for encoding (None: the matcher's own).
    """
    return View(live_shape_of(points, spacing), points, grid=grid)


def live_points(points: FloatArray) -> FloatArray:
    """The finite points (n, 3) of a cloud (N, 3) or (H, W, 3), downsampled if there are many."""
    flat = thinned(points, LIVE_POINTS).reshape(-1, 3)
    finite = np.isfinite(flat[:, 0]) & np.isfinite(flat[:, 1]) & np.isfinite(flat[:, 2])
    return flat if finite.all() else flat[finite]
