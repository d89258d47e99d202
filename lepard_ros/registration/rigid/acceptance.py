# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Acceptance of an alignment: evidence from surfaces and matches, and one rule that weights it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts, octahedral_cells
from lepard_ros.registration.rigid.icp import Contact, normal_equations, sample, touch
from lepard_ros.registration.surface_memo import kept_for_surface
from lepard_ros.registration.types import Matches, Status, Surface

MIN_INLIERS = 5  # three matches determine a motion, the others confirm it
REACH = 3.0  # maximum correspondence distance, in cells
# Margin in front of a surface, and radius around the sensor, that do not count as free space, in cells.
FREE_SPACE_MARGIN, FREE_SPACE_NEAREST = 2.0, 6.0


@dataclass(frozen=True)
class AcceptanceSettings:
    """Thresholds for acceptance.

    min_quality: minimum log-odds; higher refuses more. min_overlap: minimum share of the smaller cloud that lies on the
    other. min_determinacy: see `Evidence`. match_radius: maximum residual of an inlier match, in cells.
    """

    min_quality: float = 0.0
    min_overlap: float = 0.04
    min_determinacy: float = 0.06
    match_radius: float = 3.0


class Evidence(NamedTuple):
    """The evidence for each of H motions; every field is (H,).

    inliers: number of inlier matches. overlap: share of the smaller cloud that lies on the other. detail: amount of
    distinct surface in the overlap, see `distinctness`. fit: share of the distinct surface near the other cloud that
    lies on it with agreeing normals. residual: mean distance from the surface, in spacings. conflict: share of points
    in free space, NaN if neither viewpoint is known. determinacy: how well the contact constrains the least constrained
    motion, in [0, 1]; 0 for a plane. unlikeness: how much less similar touching points are than the most similar ones,
    see `unlikeness`; NaN without descriptors.
    """

    inliers: FloatArray
    overlap: FloatArray
    detail: FloatArray
    fit: FloatArray
    residual: FloatArray
    conflict: FloatArray
    determinacy: FloatArray
    unlikeness: FloatArray


def gather_evidence(
    matches: Matches,
    source: Surface,
    target: Surface,
    transforms: FloatArray,
    settings: AcceptanceSettings,
    max_points: int,
    contact: Contact | None = None,
) -> Evidence:
    """Evidence for motions (H, 4, 4), from at most `max_points` points of each cloud.

    contact: what `contact_between` gives for them, if it is known already.
    """
    few_source, few_target = sample(source, max_points), sample(target, max_points)
    reach = REACH * target.spacing
    forward = contact or contact_between(source, target, transforms, max_points)
    backward = touch(few_target, source, invert(transforms), reach)
    source_lies, target_lies = forward.lying(target.spacing), backward.lying(target.spacing)
    source_worth, target_worth = distinctness(few_source), distinctness(few_target)
    lying = source_lies @ source_worth + target_lies @ target_worth
    lying_points = source_lies.sum(1) + target_lies.sum(1)
    near = np.isfinite(forward.distance) @ source_worth + np.isfinite(backward.distance) @ target_worth
    return Evidence(
        inliers=agreeing_matches(matches, transforms, settings.match_radius * target.spacing).sum(1).astype(float),
        overlap=np.maximum(source_lies.mean(1), target_lies.mean(1)),
        detail=(source_lies @ source_worth) * np.sqrt(len(source.points) / len(few_source.points)),
        fit=lying / np.maximum(near, 1e-9),
        residual=mean_residual(forward, source_lies) / target.spacing,
        conflict=free_space_conflict((source, target), (backward.moved, forward.moved), lying_points, settings),
        determinacy=determinacy(forward, source_lies),
        unlikeness=unlikeness(few_source, target, forward, source_lies),
    )


def contact_between(source: Surface, target: Surface, transforms: FloatArray, max_points: int) -> Contact:
    """Where at most `max_points` points of the source meet the target after each of the motions (H, 4, 4)."""
    return touch(sample(source, max_points), target, transforms, REACH * target.spacing)


def free_space_conflict(
    views: tuple[Surface, Surface],
    others: tuple[FloatArray, FloatArray],
    lying: FloatArray,
    settings: AcceptanceSettings,
) -> FloatArray:
    """`Evidence.conflict`, (H,). others: the points (H, n, 3) of the other cloud in the frame of each view.

    lying: (H,) points of both clouds that lie on the other one.
    """
    if all(np.isnan(view.viewpoint).any() for view in views):
        return np.full(len(lying), np.nan)
    margin, nearest = (cells * views[1].spacing for cells in (FREE_SPACE_MARGIN, FREE_SPACE_NEAREST))
    free_space = FreeSpaceSettings(margin=margin, nearest=nearest)
    blocked = sum(conflicts(points, view, free_space).sum(1) for view, points in zip(views, others, strict=True))
    return np.asarray(blocked / np.maximum(blocked + lying, 1))


PLANE_CELLS = 5.0  # cells within which parallel surfaces are one plane


@kept_for_surface
def distinctness(surface: Surface) -> FloatArray:
    """Weight of each point as evidence, (N,): a wall fits any wall, a chair only a chair.

    Points are grouped by plane (direction of the normal, and offset to PLANE_CELLS); a plane of n points gets the
    weight sqrt(n).
    """
    offset = np.einsum("ni,ni->n", surface.points - surface.points.mean(0), surface.normals)
    layer = np.clip(np.round(offset / (PLANE_CELLS * surface.spacing)), -400, 400).astype(np.int64)
    planes = octahedral_cells(surface.normals, 8) * 1000 + layer
    _, plane, count = np.unique(planes, return_inverse=True, return_counts=True)
    return 1.0 / np.sqrt(count[plane])


@kept_for_surface
def distinct_sample(surface: Surface, max_points: int) -> Surface:
    """At most `max_points` points, drawn in proportion to their `distinctness`; deterministic.

    For alignment: the noise of the normals of a large floor holds a cloud where it is, against a few real edges.
    """
    count = len(surface.points)
    if count <= max_points:
        return surface
    worth = distinctness(surface)
    kept = np.sort(np.random.default_rng(0).choice(count, max_points, replace=False, p=worth / worth.sum()))
    return surface.part(kept)


def agreeing_matches(matches: Matches, transforms: FloatArray, radius: float) -> NDArray[np.bool_]:
    """Which matches agree with which motions (H, 4, 4), within `radius` metres. Returns (H, M)."""
    apart = move(transforms, np.asarray(matches.source)) - np.asarray(matches.target)
    return np.einsum("hmi,hmi->hm", apart, apart) < radius**2


def mean_residual(contact: Contact, lying: NDArray[np.bool_]) -> FloatArray:
    """Mean distance in metres of the overlapping points from the surface; (H,)."""
    return (np.abs(contact.residual) * lying).sum(1) / np.maximum(lying.sum(1), 1)


def determinacy(contact: Contact, lying: NDArray[np.bool_]) -> FloatArray:
    """How well the contact constrains the motion, (H,) in [0, 1].

    The square root of the smallest eigenvalue of the mean Hessian, with lengths divided by the radius of the contact to
    make rotation and translation comparable: the mean sine by which normals constrain the least constrained motion.
    """
    hessian, _, centre = normal_equations(contact, lying.astype(float))
    count = np.maximum(lying.sum(1), 1)
    squared = ((contact.moved - centre[:, None]) ** 2).sum(2)
    radius = np.sqrt((squared * lying).sum(1) / count)
    scale = np.ones((len(radius), 6))
    scale[:, 3:] = 1.0 / np.maximum(radius, 1e-6)[:, None]
    normalised = hessian * scale[:, :, None] * scale[:, None, :] / count[:, None, None]
    return np.sqrt(np.clip(np.linalg.eigvalsh(normalised)[:, 0], 0.0, None))


DESCRIBED_POINTS = 1000  # maximum number of points whose descriptors are compared


def unlikeness(source: Surface, target: Surface, contact: Contact, lying: NDArray[np.bool_]) -> FloatArray:
    """How much less similar touching points are than the most similar points of the other cloud, (H,).

    0 if they are the most similar ones, 1 if they have nothing in common; over the distinct surface in the overlap.
    Matches are a selection of points; this asks all of them.
    """
    if source.descriptors is None or target.descriptors is None:
        return np.full(len(lying), np.nan)
    few = slice(None, None, max(1, -(-len(source.points) // DESCRIBED_POINTS)))
    similarity = source.descriptors[few] @ target.descriptors.T
    nearest, weight = contact.nearest[:, few], lying[:, few] * distinctness(source)[few]
    best = (similarity.max(1) + similarity.max(0)[nearest]) / 2
    missed = best - np.take_along_axis(similarity, nearest.T, axis=1).T
    possible = (weight * best).sum(1)
    return np.where(possible > 0, (weight * missed).sum(1) / np.maximum(possible, 1e-9), 1.0)


FEATURES = ("inliers", "detail", "fit", "residual", "conflict", "determinacy", "unlikeness")
MAX_INLIERS = 100  # more do not count: matches can be consistently wrong


class Rule(NamedTuple):
    """Log-odds that a motion is correct = bias + sum of coefficients * (feature - centre); both (F,).

    blind_bias: the bias without known viewpoints, because free space cannot contradict a motion then.
    """

    centre: FloatArray
    coefficients: FloatArray
    bias: float
    blind_bias: float


# For surfaces without descriptors: FPFH matches, and clouds that are tracked. A logistic regression on FPFH matches of
# synthetic rooms (seeds 0 to 19): 195 pairs of clouds, and the same ones cropped to balls of 0.5 to 2 m, the size of a
# camera's view of a desk; half of them are pairs of different rooms. The bias comes from the network's matches: with it
# 71 of 74 correct motions passed, and one of 87 pairs of different rooms. It was chosen between -1.7 and -2.5 after a
# look at 101 pairs of 3DLoMatch; blind_bias was set on a single pair.
PLAIN = Rule(
    centre=np.array([3.898, 4.319, 0.588, 0.148, -3.59, -2.061, 0.0]),
    coefficients=np.array([1.243, 1.79, 7.5, -2.077, -0.968, 1.454, 0.0]),
    bias=-2.0,
    blind_bias=-2.8,
)
# For surfaces with descriptors. A logistic regression on the network's matches (`bench/registration.py fit`): 460 pairs
# with less than 35 % overlap, of 150 synthetic rooms that no weights saw and of real Kinect scans, and 298 pairs of
# different rooms; whole clouds and cut ones, scales of 0.1 to 10, both tries of a pair. On 528
# whole pairs from the same files a correct motion is accepted in 352 and a wrong one in 7 (PLAIN: 340 and 8). The fit
# prints a bias of -1.7, with which 2 % of the wrong motions pass. It was raised on these 528 pairs, after a look at
# 3DLoMatch had shown that -1.7 refuses too many correct motions there: that set is not independent of it.
DESCRIBED = Rule(
    centre=np.array([4.287, 4.556, 0.603, 0.189, -3.872, -2.008, 0.345]),
    coefficients=np.array([0.932, 1.422, 1.887, -6.694, -0.818, 0.557, -7.61]),
    bias=-1.0,
    blind_bias=-1.5,  # stricter than fitted (-0.7): the fit knew the sides of the surfaces
)


def features(evidence: Evidence) -> FloatArray:
    """Features (H, F) of the rule, in the order of FEATURES: counts, conflict and determinacy as logarithms."""
    logged = evidence._replace(
        inliers=np.log1p(np.minimum(evidence.inliers, MAX_INLIERS)),
        detail=np.log1p(evidence.detail),
        conflict=np.log(0.005 + evidence.conflict),
        determinacy=np.log(np.maximum(evidence.determinacy, 1e-3)),
    )
    return np.stack([getattr(logged, name) for name in FEATURES], axis=1)


def contributions(evidence: Evidence) -> FloatArray:
    """Contribution of each feature to the log-odds, (H, F); 0 if unknown."""
    values, described = features(evidence), np.isfinite(evidence.unlikeness)[:, None]
    plain, full = (rule.coefficients * (values - rule.centre) for rule in (PLAIN, DESCRIBED))
    return np.nan_to_num(np.where(described, full, plain))


def quality(evidence: Evidence) -> FloatArray:
    """Log-odds that each motion is correct, (H,)."""
    described, blind = np.isfinite(evidence.unlikeness), np.isnan(evidence.conflict)
    plain, full = (np.where(blind, rule.blind_bias, rule.bias) for rule in (PLAIN, DESCRIBED))
    return np.asarray(np.where(described, full, plain) + contributions(evidence).sum(1))


REASONS = {
    "inliers": Status.TOO_FEW_INLIERS,
    "detail": Status.LOW_OVERLAP,
    "fit": Status.HIGH_RESIDUAL,
    "residual": Status.HIGH_RESIDUAL,
    "conflict": Status.FREE_SPACE,
    "determinacy": Status.DEGENERATE,
    "unlikeness": Status.TOO_FEW_INLIERS,
}


def judge(evidence: Evidence, settings: AcceptanceSettings) -> Status:
    """The status of one motion (H = 1): OK, or the strongest evidence against it."""
    if evidence.overlap[0] < settings.min_overlap:
        return Status.LOW_OVERLAP
    if evidence.determinacy[0] < settings.min_determinacy:
        return Status.DEGENERATE
    if evidence.inliers[0] < MIN_INLIERS:
        return Status.TOO_FEW_INLIERS
    if quality(evidence)[0] >= settings.min_quality:
        return Status.OK
    return REASONS[FEATURES[int(np.argmin(contributions(evidence)[0]))]]
