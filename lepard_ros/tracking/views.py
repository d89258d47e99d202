# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A view: what one cloud is to a tracker, a fine surface to be aligned and, once they are needed, features to match."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Surface
from lepard_ros.tracking.compiled import Shape, shape_of
from lepard_ros.tracking.places import describe

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher

# A live cloud is thinned to about so many points before it is put on a grid: of 640 x 480 every second row and column.
LIVE_POINTS = 70_000


@dataclass
class View:
    """A cloud's surface, and its features once the network has seen it.

    shape: the surface, in a form for the compiled library while the cloud is live. points: (N, 3) raw metres, until
    they are encoded; a view has either them or a cloud. descriptor: (D,) of the whole cloud, see `places`. grid:
    metres, on which it is encoded (None: the matcher's own).
    """

    shape: Shape
    points: FloatArray | None = None
    cloud: "EncodedCloud | None" = None
    descriptor: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    grid: float | None = None

    @property
    def surface(self) -> Surface:
        """The surface, in its sensor's frame."""
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
        """The features; computed the first time, when the raw points go."""
        if self.cloud is None:
            if self.points is None:
                raise ValueError("a view without points and features cannot be matched")
            self.cloud = matcher.encode(self.points, grid=self.grid)
            self.descriptor, self.points = describe(self.cloud), None
        return self.cloud

    def settle(self) -> None:
        """Free what only a live cloud needs."""
        self.shape = Shape(self.surface)


def see(points: FloatArray, spacing: float, grid: float | None = None) -> View:
    """A cloud (N, 3) or organised (H, W, 3) seen from its origin, on a grid of `spacing` metres.

    grid: metres, on which it will be encoded (None: the matcher's own).
    """
    return View(shape_of(finite_points(thinned(points)), spacing), finite_points(points), grid=grid)


def thinned(points: FloatArray) -> FloatArray:
    """Every n-th row and column of an organised cloud, or every n-th point, so that about LIVE_POINTS remain."""
    count = points.size // 3
    if points.ndim == 2:
        return points[:: max(1, round(count / LIVE_POINTS))]
    step = max(1, round((count / LIVE_POINTS) ** 0.5))
    return points[::step, ::step]


def finite_points(points: FloatArray) -> FloatArray:
    """The finite points of a cloud, (N, 3)."""
    flat = points.reshape(-1, 3)
    finite = np.isfinite(flat[:, 0]) & np.isfinite(flat[:, 1]) & np.isfinite(flat[:, 2])
    return flat if finite.all() else flat[finite]
