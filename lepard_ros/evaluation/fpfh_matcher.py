# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""FPFH features instead of the network's: the tracker's classical baseline, also used by quick tests."""

from dataclasses import dataclass, field

import numpy as np
import torch

from lepard_ros.cloud.neighbours import radius_neighbours
from lepard_ros.cloud.normals import estimate_normals
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.matcher import MatcherSettings
from lepard_ros.registration.rigid.fallback import match_fpfh, register_fpfh
from lepard_ros.registration.types import Matches, Registration, Surface

WEIGHTS_ID = ""  # there are no weights, and no features to store in a map


@dataclass(frozen=True)
class FpfhCloud:
    """A cloud prepared for FPFH."""

    surface: Surface
    weights_id: str = WEIGHTS_ID

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return int(self.surface.points.nbytes + self.surface.normals.nbytes)

    def to_arrays(self) -> dict[str, FloatArray]:
        """Nothing to store: the features are quickly recomputed from the surface."""
        return {}


@dataclass(frozen=True)
class FpfhMatcher:
    """The tracker's view of a matcher, with FPFH features. spacing: metres of the grid. settings: only `rigid`."""

    spacing: float = 0.05
    weights_id: str = WEIGHTS_ID
    settings: MatcherSettings = field(default_factory=MatcherSettings)

    @property
    def network_grid(self) -> float:
        """The grid in metres that features are made for."""
        return self.spacing

    def tracking_grid(self, points: FloatArray) -> float:
        """The grid in metres for a map that starts with this cloud: always the same."""
        return self.spacing

    def encode(self, points: FloatArray, viewpoint: FloatArray | None = None, grid: float | None = None) -> FpfhCloud:
        """Grid and normals. points: (N, 3) or (H, W, 3) metres; grid: metres, None for the matcher's own."""
        spacing = grid or self.spacing
        flat = np.asarray(points, dtype=np.float32).reshape(-1, 3)
        flat = flat[np.isfinite(flat).all(1)]
        if len(flat) < 10:
            raise InputError(f"The cloud has only {len(flat)} points, too few for matching.")
        viewpoint = np.zeros(3) if viewpoint is None else np.asarray(viewpoint, dtype=np.float64)
        (cells,) = grid_subsample(torch.from_numpy(flat), spacing)
        neighbours = radius_neighbours(cells, cells, 3 * spacing, 24)
        normals, _ = estimate_normals(cells, neighbours, torch.from_numpy(viewpoint).float())
        return FpfhCloud(Surface(cells.numpy(), normals.numpy(), spacing, viewpoint))

    def match_many(self, source: FpfhCloud, targets: list[FpfhCloud]) -> list[Matches]:
        """Matches with each target."""
        return [match_fpfh(source.surface, target.surface) for target in targets]

    def register_best(self, source: FpfhCloud, targets: list[FpfhCloud], count: int) -> dict[int, Registration]:
        """Motions to all targets, by their index: FPFH has no cheap ranking, and `count` is not used."""
        return dict(enumerate(self.register_many(source, targets)))

    def register_many(self, source: FpfhCloud, targets: list[FpfhCloud]) -> list[Registration]:
        """Motions to each target."""
        return [register_fpfh(source.surface, target.surface, self.settings.rigid) for target in targets]
