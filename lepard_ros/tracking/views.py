# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A view: what one cloud is to a tracker, a fine surface to be aligned and, once they are needed, features to match."""

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
    """A cloud of finite points (N, 3) seen from its origin, on a grid of `spacing` metres.

    grid: metres, on which it will be encoded (None: the matcher's own).
    """
    return View(live_shape_of(points, spacing), points, grid=grid)


def live_points(points: FloatArray) -> FloatArray:
    """The finite points of a cloud (N, 3) or (H, W, 3), thinned where they are many: (n, 3)."""
    flat = thinned(points, LIVE_POINTS).reshape(-1, 3)
    finite = np.isfinite(flat[:, 0]) & np.isfinite(flat[:, 1]) & np.isfinite(flat[:, 2])
    return flat if finite.all() else flat[finite]
