# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""From matches to a few distinct motions, by second-order spatial consistency.

Two matches are compatible if they preserve the distance between their points and, if normals are known, the angles
between the normals and with the connecting line. Two correct matches are compatible, and so are many other matches
with both; two wrong matches that are compatible by chance share few others. Ranking by shared compatible matches
(second order) finds a few correct matches in a hundred. There is no random sampling: the result is deterministic. The
device is that of the tensors.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lepard_ros.geometry.rigid_motion import kabsch, kabsch_many

FRIENDS = 24  # compatible matches from which the motion of a seed is computed
REFINED, REFINEMENTS = 48, 3  # distinct seeds that are refined on all matches, and how often
# Maximum change of the cosine between two normals, and of the height of one point above the tangent plane of the other,
# in cells and as a share of their distance. Chosen on 200 pairs of validation rooms and real training scans.
MAX_LEAN_CHANGE, MAX_HEIGHT_CHANGE, MAX_RISE_CHANGE = 0.3, 1.5, 0.15
DOUBT = 0.2  # factor on the compatibility if the normals differ: on noisy surfaces they do for some correct matches
TRUST_ROUNDS = 10  # power iterations
SEPARATION, SEPARATION_DEGREES = 5.0, 12.0  # motions nearer than both (cells at the centre, degrees) are one motion


@dataclass(frozen=True)
class ConsistencySettings:
    """Settings of the hypothesis search. Lengths in grid cells, so that every scale is treated alike.

    length_tolerance: maximum change of the distance between two correct matches. inlier_radius: maximum residual of an
    inlier. seeds: matches that start a motion. hypotheses: maximum number of returned motions. max_matches: number of
    most confident matches among which seeds are searched.
    """

    length_tolerance: float = 2.0
    inlier_radius: float = 2.0
    seeds: int = 160
    hypotheses: int = 8
    max_matches: int = 1500


class MatchNormals(NamedTuple):
    """Unit normals (M, 3) at both ends of each match; signed: whether their signs are known."""

    source: Tensor
    target: Tensor
    signed: bool = True


class Hypotheses(NamedTuple):
    """Distinct motions, best first. transforms: (H, 4, 4) float64. scores: (H,) confidence-weighted inliers.

    inliers: (H, M) bool, the matches that agree with each. trust: (M,) in [0, 1], see `match_trust`.
    """

    transforms: Tensor
    scores: Tensor
    inliers: Tensor
    trust: Tensor


def find_hypotheses(
    source: Tensor,
    target: Tensor,
    confidence: Tensor,
    spacing: float,
    settings: ConsistencySettings,
    normals: MatchNormals | None = None,
) -> Hypotheses:
    """Distinct motions on which many matches agree.

    source, target: (M, 3) metres; confidence: (M,) in [0, 1]; spacing: cell size in metres. Internally lengths are in
    cells; the returned motions are in metres. normals: of the surfaces at the matched points, if known.
    """
    source, target = (source / spacing).float(), (target / spacing).float()
    weights = match_weights(confidence)
    strongest = slice(settings.max_matches)  # matches come most confident first
    agreement = pair_agreement(source[strongest], target[strongest], settings.length_tolerance)
    if normals is not None:
        agreement *= DOUBT + (1 - DOUBT) * normals_agree(source[strongest], target[strongest], normals)
    trust = match_trust(agreement, weights[strongest])
    transforms = seed_motions(source[strongest], target[strongest], weights[strongest], agreement, settings.seeds)
    transforms = refine_motions(transforms, source, target, weights, settings)
    residuals = match_residuals(transforms, source, target)
    scores = inlier_scores(residuals, weights, settings.inlier_radius)
    chosen = distinct_motions(transforms, scores, source, settings.hypotheses)
    found = transforms[chosen].clone()
    found[:, :3, 3] *= spacing
    trust = torch.nn.functional.pad(trust, (0, len(source) - len(trust)))  # the weakest matches were not compared
    return Hypotheses(found, scores[chosen], residuals[chosen] < settings.inlier_radius, trust)


def match_weights(confidence: Tensor) -> Tensor:
    """Confidences as weights with mean one; square root, because networks are overconfident."""
    weights = confidence.float().clamp(1e-4, 1.0).sqrt()
    return weights / weights.mean().clamp_min(1e-9)


def match_trust(agreement: Tensor, weights: Tensor) -> Tensor:
    """Trust of each match, (M,) in [0, 1]: how well it agrees with the matches that agree best with each other.

    agreement: (M, M) in [0, 1]. The leading eigenvector, relative to its largest entry: a correct match agrees with the
    other correct ones, a wrong one with few, whichever motion is correct.
    """
    trust = weights
    for _ in range(TRUST_ROUNDS):
        trust = agreement @ trust
        trust = trust / trust.norm().clamp_min(1e-9)
    return trust / trust.max().clamp_min(1e-9)


def seed_motions(source: Tensor, target: Tensor, weights: Tensor, agreement: Tensor, count: int) -> Tensor:
    """One motion (S, 4, 4) for each of `count` seed matches, from the matches with the most shared support.

    agreement: (M, M), 1 where two matches are compatible.
    """
    degree = agreement @ weights
    seeds = torch.topk(degree * weights, min(count, len(degree))).indices
    shared = (agreement[seeds] * weights) @ agreement * agreement[seeds]
    shared[torch.arange(len(seeds), device=seeds.device), seeds] = float("inf")  # always include the seed itself
    friends = torch.topk(shared, min(FRIENDS, shared.shape[1]), dim=1).indices
    trust = friend_trust(agreement, weights, friends)
    return kabsch(source[friends], target[friends], trust)


def pair_agreement(source: Tensor, target: Tensor, tolerance: float) -> Tensor:
    """Whether pairs of matches preserve their distance. Returns (M, M) of 0 and 1, zero on the diagonal."""
    difference = (pair_distances(source) - pair_distances(target)).abs_()
    return (difference < tolerance).float().fill_diagonal_(0.0)


def normals_agree(source: Tensor, target: Tensor, normals: MatchNormals) -> Tensor:
    """Whether pairs of matches (M, 3), in cells, preserve the angles of their normals: (M, M) bool.

    A wrong match that preserves a distance by chance seldom preserves these three angles as well.
    """
    first, second = (side[: len(source)].to(source) for side in normals[:2])
    tables = [lean_table(first), lean_table(second), height_table(source, first), height_table(target, second)]
    if not normals.signed:
        tables = [table.abs_() for table in tables]
    lean, height = (tables[0] - tables[1]).abs_(), (tables[2] - tables[3]).abs_()
    level = height < MAX_HEIGHT_CHANGE + MAX_RISE_CHANGE * pair_distances(source)
    return (lean < MAX_LEAN_CHANGE) & level & level.T


def lean_table(normals: Tensor) -> Tensor:
    """The cosines between all normals: (M, 3) -> (M, M)."""
    return normals @ normals.T


def height_table(points: Tensor, normals: Tensor) -> Tensor:
    """Height of each point (column) above the tangent plane of each other (row): (M, 3), (M, 3) -> (M, M)."""
    height = normals @ (points - points.mean(0)).T
    return height - height.diagonal()[:, None]


def pair_distances(points: Tensor) -> Tensor:
    """Distances between all points, (M, 3) -> (M, M), by one matrix product; accurate to 1 mm over 10 m."""
    points = points - points.mean(0)
    squared = (points**2).sum(1)
    gram = torch.addmm(squared[:, None] + squared, points, points.T, alpha=-2.0)
    return gram.clamp_min_(0.0).sqrt_()


def friend_trust(agreement: Tensor, weights: Tensor, friends: Tensor) -> Tensor:
    """Weight of each match in its seed's group: the leading eigenvector by a few power iterations. (S, F)."""
    local = agreement[friends[:, :, None], friends[:, None, :]] + torch.eye(friends.shape[1], device=friends.device)
    trust = weights[friends]
    for _ in range(8):
        trust = (local @ trust.unsqueeze(-1)).squeeze(-1)
        trust = trust / trust.norm(dim=1, keepdim=True).clamp_min(1e-9)
    return trust**2  # squared, to reduce the influence of weakly connected matches


def refine_motions(
    transforms: Tensor, source: Tensor, target: Tensor, weights: Tensor, settings: ConsistencySettings
) -> Tensor:
    """The best distinct seeds, each re-estimated from all of its inliers. Returns (R, 4, 4)."""
    scores = inlier_scores(match_residuals(transforms, source, target), weights, settings.inlier_radius * 1.5)
    transforms = transforms[distinct_motions(transforms, scores, source, REFINED)]
    for step in range(REFINEMENTS):
        radius = settings.inlier_radius * (1.5 if step == 0 else 1.0)
        pull = inlier_pull(match_residuals(transforms, source, target), radius) * weights
        transforms = kabsch_many(source, target, pull)
    return transforms


def match_residuals(transforms: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Distances of moved source points to their targets. (H, 4, 4), (M, 3), (M, 3) -> (H, M)."""
    apart = transforms[:, :3, :3].float() @ source.T + transforms[:, :3, 3:].float() - target.T
    return apart.square_().sum(1).sqrt_()


def inlier_pull(residuals: Tensor, radius: float) -> Tensor:
    """Smooth inlier membership: one at no residual, zero at the radius and beyond."""
    return (1.0 - (residuals / radius) ** 2).clamp_min(0.0)


def inlier_scores(residuals: Tensor, weights: Tensor, radius: float) -> Tensor:
    """Confidence-weighted number of inlier matches per motion. (H, M), (M,) -> (H,)."""
    return inlier_pull(residuals, radius) @ weights


def distinct_motions(transforms: Tensor, scores: Tensor, source: Tensor, max_count: int) -> Tensor:
    """Indices of at most `max_count` motions that differ from each other, best first."""
    centre = source.double().mean(0)
    places = transforms[:, :3, :3] @ centre + transforms[:, :3, 3]
    cosine = math.cos(math.radians(SEPARATION_DEGREES))
    relative = torch.einsum("aij,bij->ab", transforms[:, :3, :3], transforms[:, :3, :3])
    alike = (torch.cdist(places, places) < SEPARATION) & ((relative - 1.0) / 2.0 > cosine)
    alike_rows = alike.cpu().tolist()
    chosen: list[int] = []
    for index in torch.argsort(scores, descending=True, stable=True).tolist():
        if not any(alike_rows[index][other] for other in chosen):
            chosen.append(index)
        if len(chosen) == max_count:
            break
    return torch.tensor(chosen, device=transforms.device)
