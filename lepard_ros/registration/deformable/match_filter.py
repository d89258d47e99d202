# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Outlier filter for matches between two shapes of a deforming surface: inliers move with their neighbours.

A small neighbourhood is nearly rigid. Neighbours, in the source or in the target, must therefore keep their distance,
and a match must agree with the rigid motion of its neighbours. Each match is weighted by the neighbours that are
trusted themselves, over a few rounds, so that a correct match among wrong ones survives.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import BoolArray, FloatArray, IntArray
from lepard_ros.geometry.rigid_motion import kabsch
from lepard_ros.registration.types import Matches

Normals = tuple[FloatArray, FloatArray]  # of matched points: (M, 3) in the source, (M, 3) in the target

MIN_MATCHES = 8  # with fewer matches, all are kept
NEIGHBOURS = 48  # nearest matches in the source, and as many in the target, used to weight one
ROUNDS = 10
STRETCH = 0.15  # maximum relative change of the distance between neighbours
LANDING = 2.5  # maximum residual of a match under its neighbours' rigid motion, in tolerances
MIN_FACING = 0.0  # minimum cosine between the rotated normal and the target's; below, the surface is inside out


@dataclass(frozen=True)
class FilterSettings:
    """Settings of the filter. Lengths in metres.

    radius: neighbourhood of a match. tolerance: maximum change of a distance between neighbours, in addition to STRETCH
    times the distance. min_trust: in [0, 1], minimum trust of a kept match.
    """

    radius: float = 0.4
    tolerance: float = 0.02
    min_trust: float = 0.7


def filter_matches(
    matches: Matches, settings: FilterSettings | None = None, normals: "Normals | None" = None
) -> BoolArray:
    """(M,) bool: the matches to keep."""
    return weigh_matches(matches, settings, normals).confidence > 0


def weigh_matches(
    matches: Matches, settings: FilterSettings | None = None, normals: "Normals | None" = None
) -> Matches:
    """Replace confidences by trust, with 0 for rejected matches; if there are too few matches, nothing changes.

    For a fit, trust is a better weight than the network's confidence: it tells whether the surrounding surface moves
    consistently.
    """
    settings = settings or FilterSettings()
    if len(matches.confidence) < MIN_MATCHES:
        return matches
    trust = match_trust(matches, settings, normals)
    return matches._replace(confidence=np.where(trust >= settings.min_trust, trust, 0.0))


def chosen(matches: Matches, kept: BoolArray) -> Matches:
    """The matches that are kept."""
    return Matches(matches.source[kept], matches.target[kept], matches.confidence[kept])


def match_trust(matches: Matches, settings: FilterSettings, normals: Normals | None = None) -> FloatArray:
    """Trust of each match, (M,) in [0, 1]: how well it agrees with its trusted neighbours.

    normals: of the matched points in source and target, (M, 3) each, towards the sensor. With normals, a match whose
    neighbourhood turns inside out gets no trust: this detects mirrored limbs.
    """
    source, target, confidence = (np.asarray(part, dtype=np.float64) for part in matches)
    judges, present = _judges(source, target, settings)
    agreement = _agreement(source, target, judges, settings) * present
    weight = present * np.sqrt(np.clip(confidence, 1e-4, 1.0))[judges]
    trust = np.ones(len(confidence))
    for _ in range(ROUNDS):
        voice = weight * np.square(trust)[judges]
        # Prior of two neighbours: a match without neighbours is neither trusted nor rejected outright.
        doubt = 0.5 * weight.max(axis=1)
        trust = ((voice * agreement).sum(axis=1) + doubt) / (voice.sum(axis=1) + 2 * doubt + 1e-12)
    motion = _neighbourhood_motion(source, target, judges, weight * np.square(trust)[judges] * agreement)
    trust = trust * _landing(source, target, motion, settings)
    return trust if normals is None else trust * _right_way_round(motion, normals)


def _judges(source: FloatArray, target: FloatArray, settings: FilterSettings) -> tuple[IntArray, BoolArray]:
    """Nearest matches (M, 2k) of each in the source and in the target, and a mask of the valid ones."""
    count = min(NEIGHBOURS + 1, len(source))
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
    allowed = settings.tolerance + STRETCH * np.minimum(before, after)
    return np.clip(1.5 - np.abs(before - after) / allowed, 0.0, 1.0)


class _Neighbourhood(NamedTuple):
    """The rigid motion (M, 4, 4) of each match's neighbours, and whether enough of them agree to define it (M,)."""

    motion: FloatArray
    known: BoolArray


def _neighbourhood_motion(
    source: FloatArray, target: FloatArray, judges: IntArray, weight: FloatArray
) -> _Neighbourhood:
    parts = (torch.from_numpy(part) for part in (source[judges], target[judges], weight))
    known = (weight > 0.05).sum(axis=1) >= 4  # any three points define a rigid motion, so they confirm nothing
    return _Neighbourhood(kabsch(*parts).numpy(), known)


def _landing(source: FloatArray, target: FloatArray, around: _Neighbourhood, settings: FilterSettings) -> FloatArray:
    """Agreement (M,) in [0, 1] of each match with the rigid motion of its neighbours."""
    landed = np.einsum("mij,mj->mi", around.motion[:, :3, :3], source) + around.motion[:, :3, 3]
    miss = np.linalg.norm(landed - target, axis=1) / (LANDING * settings.tolerance)
    return np.where(around.known, np.clip(2.0 - miss, 0.0, 1.0), 1.0)


def _right_way_round(around: _Neighbourhood, normals: Normals) -> FloatArray:
    """(M,) 0 where the neighbours' motion turns the source's normal away from the target's, else 1."""
    turned = np.einsum("mij,mj->mi", around.motion[:, :3, :3], normals[0])
    facing = np.einsum("mi,mi->m", turned, normals[1])
    return np.where(around.known, facing > MIN_FACING, 1.0)
