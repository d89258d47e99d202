# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Inputs and results of registration: matches, surfaces, status, result."""

import enum
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import FloatArray


class Status(enum.Enum):
    """Outcome of a registration or a warp. Only OK means success."""

    OK = "ok"
    TOO_FEW_POINTS = "too few points in a cloud"
    TOO_FEW_MATCHES = "too few matches"
    TOO_FEW_INLIERS = "too few matches agree on one motion"
    DEGENERATE = "the geometry does not constrain the motion"
    LOW_OVERLAP = "the aligned clouds overlap too little"
    HIGH_RESIDUAL = "the residual of the aligned clouds is too high"
    FREE_SPACE = "the aligned cloud lies in observed free space"
    AMBIGUOUS = "another motion is nearly as likely"
    INSIDE_OUT = "the warped surface lies on the target inside out, like a mirrored limb"
    SCRAMBLED = "the parts of the warped surface rotate against each other too much"
    NOT_CONVERGED = "the optimisation did not converge"
    OUT_OF_TIME = "the time budget ran out"


class Matches(NamedTuple):
    """Corresponding points with confidences, most confident first.

    source: (M, 3) metres, in the source's frame. target: (M, 3) metres, in the target's frame.
    confidence: (M,) in [0, 1].
    """

    source: FloatArray
    target: FloatArray
    confidence: FloatArray


# Minimum trust of a consistent match. On 70 pairs each of validation rooms and real training scans below 35 % overlap:
# inlier ratio 16.6 -> 42.1 % and 30.8 -> 39.2 %, pairs with more than 5 % inliers 75.7 -> 75.7 % and 72.9 -> 77.1 %.
MIN_TRUST = 0.1
NO_MATCHES = Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))


@dataclass(frozen=True, eq=False)  # compared and hashed by identity, so that derived data can be cached
class Surface:
    """A cloud prepared for alignment: an even grid of points with unit normals.

    points: (N, 3) metres. normals: (N, 3), facing the viewpoint. spacing: grid size in metres.
    viewpoint: (3,) position of the sensor in the cloud's frame; NaN if unknown.
    descriptors: (N, c) of the network, or None.
    """

    points: FloatArray
    normals: FloatArray
    spacing: float
    viewpoint: FloatArray = field(default_factory=lambda: np.zeros(3))
    descriptors: NDArray[np.float32] | None = None

    def part(self, kept: NDArray[np.integer]) -> "Surface":
        """The points with these indices."""
        descriptors = None if self.descriptors is None else self.descriptors[kept]
        return Surface(self.points[kept], self.normals[kept], self.spacing, self.viewpoint, descriptors)

    @cached_property
    def tree(self) -> cKDTree:
        """The k-d tree of `points`, built on first use."""
        return cKDTree(self.points)


@dataclass(frozen=True)
class Registration:
    """A rigid alignment of a source cloud to a target cloud.

    transform: (4, 4), source to target, or None unless status is OK.
    inliers: (M,) bool, the matches that agree with the motion (with the best refused one if rejected).
    rmse: metres, residual of the overlapping surface. overlap: share of the source on the target.
    covariance: (6, 6) of the motion [translation, rotation vector] in the target's frame, or None.
    seconds: wall time by stage. method: which estimator found it ("lepard" or a fallback's name).
    predicted: metres, standard deviation of unconstrained directions that were predicted; 0 if all were measured.
    quality: log-odds of the acceptance rule, less those of a likely rival if it counts; NaN if no motion was tested.
    guess: (4, 4), the most likely motion of a refused pair, or None. For evaluation and diagnosis only.
    trust: (M,) in [0, 1], how well each match agrees with the others in distances and normals, whatever the motion is;
    None if that was not computed.
    """

    transform: FloatArray | None
    status: Status
    matches: Matches
    inliers: NDArray[np.bool_]
    rmse: float = float("nan")
    overlap: float = 0.0
    covariance: FloatArray | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    method: str = "lepard"
    predicted: float = 0.0
    quality: float = float("nan")
    guess: FloatArray | None = None
    trust: FloatArray | None = None

    @property
    def consistent(self) -> Matches:
        """The trusted matches, of an accepted or a refused pair; no matches if trust was not computed."""
        if self.trust is None:
            return NO_MATCHES
        kept = self.trust >= MIN_TRUST
        return Matches(*(column[kept] for column in self.matches))

    @property
    def ok(self) -> bool:
        """Whether the alignment was accepted."""
        return self.status is Status.OK


class StageClock:
    """Wall seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, stage: str) -> None:
        """Add the time since the last stop to a stage."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
