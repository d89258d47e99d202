# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Which matches between two shapes of a bending surface to believe: those that move with their neighbours.

Nothing is rigid as a whole, but a small neighbourhood is, nearly. So neighbours, in the source or in the target, must
keep their distance, and a match must land where the rigid motion of its neighbours takes it. Each match is judged by
the neighbours that are believed themselves, over a few rounds, so that a true match among false ones survives.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.registration.graph import BoolArray
from lepard_ros.registration.kabsch import kabsch
from lepard_ros.registration.types import FloatArray, Matches

IntArray = NDArray[np.integer]


@dataclass(frozen=True)
class FilterSettings:
    """How strictly matches are judged. Lengths in metres.

    neighbours: nearest matches in the source, and as many in the target, that judge one. radius: none farther than
    this. tolerance: by how much a distance between neighbours may change; stretch: and by this share of it besides.
    landing: how far from its neighbours' rigid motion a match may land. least_trust: in [0, 1], to be kept.
    rounds: of judging. With fewer matches than `fewest` nothing can be judged, and all are kept.
    """

    neighbours: int = 48
    radius: float = 0.4
    tolerance: float = 0.02
    stretch: float = 0.15
    landing: float = 0.04
    least_trust: float = 0.6
    rounds: int = 10
    fewest: int = 8


def filter_matches(matches: Matches, settings: FilterSettings | None = None) -> BoolArray:
    """(M,) bool: the matches to keep."""
    settings = settings or FilterSettings()
    if len(matches.confidence) < settings.fewest:
        return np.ones(len(matches.confidence), dtype=bool)
    return match_trust(matches, settings) >= settings.least_trust


def match_trust(matches: Matches, settings: FilterSettings) -> FloatArray:
    """(M,) in [0, 1]: how far the believed neighbours of each match agree with it."""
    source, target, confidence = (np.asarray(part, dtype=np.float64) for part in matches)
    judges, present = _judges(source, target, settings)
    agreement = _agreement(source, target, judges, settings) * present
    weight = present * np.sqrt(np.clip(confidence, 1e-4, 1.0))[judges]
    trust = np.ones(len(confidence))
    for _ in range(settings.rounds):
        voice = weight * np.square(trust)[judges]
        # Two neighbours' worth of doubt: a match that nobody can judge is neither believed nor refused outright.
        doubt = 0.5 * weight.max(axis=1)
        trust = ((voice * agreement).sum(axis=1) + doubt) / (voice.sum(axis=1) + 2 * doubt + 1e-12)
    return trust * _landing(source, target, judges, weight * np.square(trust)[judges] * agreement, settings)


def _judges(source: FloatArray, target: FloatArray, settings: FilterSettings) -> tuple[IntArray, BoolArray]:
    """(M, 2k) the nearest matches of each in the source and in the target, and whether such a one is there."""
    count = min(settings.neighbours + 1, len(source))
    found, present = [], []
    for points in (source, target):
        distance, index = cKDTree(points).query(points, count, distance_upper_bound=settings.radius)
        other = np.isfinite(distance) & (index != np.arange(len(points))[:, None])
        found.append(np.where(other, index, 0))
        present.append(other)
    return np.concatenate(found, axis=1), np.concatenate(present, axis=1)


def _agreement(source: FloatArray, target: FloatArray, judges: IntArray, settings: FilterSettings) -> FloatArray:
    """(M, 2k) in [0, 1]: 1 where the distance to a neighbour is kept, 0 where it changes by more than the tolerance."""
    before = np.linalg.norm(source[judges] - source[:, None], axis=-1)
    after = np.linalg.norm(target[judges] - target[:, None], axis=-1)
    allowed = settings.tolerance + settings.stretch * np.minimum(before, after)
    return np.clip(1.5 - np.abs(before - after) / allowed, 0.0, 1.0)


def _landing(
    source: FloatArray, target: FloatArray, judges: IntArray, weight: FloatArray, settings: FilterSettings
) -> FloatArray:
    """(M,) in [0, 1]: 1 where a match lands where the rigid motion of its neighbours takes it."""
    parts = (torch.from_numpy(part) for part in (source[judges], target[judges], weight))
    motion = kabsch(*parts).numpy()
    landed = np.einsum("mij,mj->mi", motion[:, :3, :3], source) + motion[:, :3, 3]
    miss = np.linalg.norm(landed - target, axis=1) / settings.landing
    judged = (weight > 0.05).sum(axis=1) >= 4  # three points leave no rigid motion in doubt, whatever they are
    return np.where(judged, np.clip(2.0 - miss, 0.0, 1.0), 1.0)
