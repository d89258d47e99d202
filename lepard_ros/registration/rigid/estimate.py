# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Rigid motion from matches: hypotheses, verification, refinement, acceptance."""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import move, rotation_angle
from lepard_ros.registration.rigid.acceptance import (
    MIN_INLIERS,
    AcceptanceSettings,
    Evidence,
    agreeing_matches,
    contact_between,
    distinct_sample,
    gather_evidence,
    judge,
    quality,
)
from lepard_ros.registration.rigid.consistency import (
    SEPARATION,
    SEPARATION_DEGREES,
    ConsistencySettings,
    Hypotheses,
    MatchNormals,
    find_hypotheses,
)
from lepard_ros.registration.rigid.covariance import PATCH, alignment_covariance
from lepard_ros.registration.rigid.device_icp import equations_for
from lepard_ros.registration.rigid.icp import Contact, IcpSettings, align, tukey
from lepard_ros.registration.types import Matches, Registration, StageClock, Status, Surface

MIN_POINTS = 60  # minimum number of points of a surface
VERIFY_POINTS, VERIFY_ITERATIONS = 800, 5  # for each hypothesis
# The best hypotheses are refined; distinct points suffice, and find their place from further away than planes do.
REFINED, REFINE_POINTS, REFINE_ITERATIONS = 2, 1500, 30
REFINE_REACH = 5.0  # maximum correspondence distance at the start of the refinement, in cells
RANKED_MATCHES, RANKED_SEEDS = 300, 24  # for `agreement`


class Candidates(NamedTuple):
    """Distinct motions (H, 4, 4), best first; why there are none, if so; and the trust (M,) of the matches."""

    motions: FloatArray
    reason: Status
    trust: FloatArray


@dataclass(frozen=True)
class RigidSettings:
    """Settings of `register_matches`.

    refine_points: points on which a refined motion is judged. refine_iterations: maximum ICP steps for refining the
    best hypotheses. patch: correlation length of residuals in metres, see `alignment_covariance`. device: for
    hypotheses and ICP steps. rivals: whether the likeliest other motion counts against the best one, see `rivalry`.
    """

    consistency: ConsistencySettings = field(default_factory=ConsistencySettings)
    icp: IcpSettings = field(default_factory=IcpSettings)
    acceptance: AcceptanceSettings = field(default_factory=AcceptanceSettings)
    refine_points: int = 4000
    refine_iterations: int = REFINE_ITERATIONS
    patch: float = PATCH
    device: str = "cpu"
    rivals: bool = False

    def patient(self, factor: int) -> "RigidSettings":
        """The same settings with `factor` times the iterations for refining a motion."""
        return replace(self, refine_iterations=factor * self.refine_iterations)

    def alone(self, odds: float) -> "RigidSettings":
        """The same settings for a pair that nothing else confirms: `odds` more log-odds needed, and no likely rival."""
        rule = replace(self.acceptance, min_quality=self.acceptance.min_quality + odds)
        return replace(self, acceptance=rule, rivals=True)

    def widened(self, factor: float) -> "RigidSettings":
        """The same settings for matches that are less accurate by a factor."""
        few = self.consistency
        lengths = {name: factor * getattr(few, name) for name in ("length_tolerance", "inlier_radius")}
        rule = replace(self.acceptance, match_radius=factor * self.acceptance.match_radius)
        return replace(self, consistency=replace(few, **lengths), acceptance=rule)


def register_matches(
    matches: Matches,
    source: Surface,
    target: Surface,
    settings: RigidSettings | None = None,
    method: str = "lepard",
    further: FloatArray | None = None,
) -> Registration:
    """Align the source to the target, or report why that failed.

    Hypotheses from the matches (and `further` motions (H, 4, 4)) are verified on the surfaces; the best one is refined
    and tested for acceptance.
    """
    settings = settings or RigidSettings()
    matches = checked_matches(matches)
    clock = StageClock()
    early = _hopeless(matches, source, target)
    if early is not None:
        return _refused(early, matches, clock, method)
    found = candidate_motions(matches, source, target, settings)
    clock.stop("hypotheses")
    motions = found.motions if further is None else np.concatenate([found.motions, further])
    if len(motions) == 0:
        return _refused(found.reason, matches, clock, method, found.trust)
    result = register_candidates(matches, source, target, motions, settings, clock)
    return replace(result, method=method, trust=found.trust)


def candidate_motions(matches: Matches, source: Surface, target: Surface, settings: RigidSettings) -> Candidates:
    """The motions supported by matches between two surfaces."""
    if len(matches.confidence) < MIN_INLIERS:
        return Candidates(np.zeros((0, 4, 4)), Status.TOO_FEW_MATCHES, np.zeros(len(matches.confidence)))
    return _usable(_hypotheses(matches, source, target, settings), matches, target.spacing)


def agreement(matches: Matches, spacing: float, settings: RigidSettings) -> float:
    """The weight of the matches that agree on one motion, from a few of the most confident: to rank many pairs cheaply.

    spacing: metres, of the grid.
    """
    matches = checked_matches(matches)
    if len(matches.confidence) < MIN_INLIERS:
        return 0.0
    x, y, confidence = (torch.as_tensor(values[:RANKED_MATCHES], device=settings.device) for values in matches)
    few = replace(settings.consistency, seeds=RANKED_SEEDS, hypotheses=1)
    with torch.no_grad():
        return float(find_hypotheses(x, y, confidence, spacing, few).scores[0])


def register_candidates(
    matches: Matches,
    source: Surface,
    target: Surface,
    candidates: FloatArray,
    settings: RigidSettings,
    clock: StageClock | None = None,
) -> Registration:
    """Verify motions (H, 4, 4) on the surfaces, refine the best one and test it for acceptance."""
    clock = clock or StageClock()
    verified = _verify(matches, source, target, candidates, settings)
    clock.stop("verification")
    result = _refine(matches, source, target, verified, settings)
    clock.stop("refinement")
    return replace(result, seconds=clock.seconds)


def checked_matches(matches: Matches) -> Matches:
    """Matches as float64 arrays, most confident first; InputError if they are malformed."""
    source, target, confidence = (np.asarray(values, dtype=np.float64) for values in matches)
    if (
        source.ndim != 2
        or source.shape[1:] != (3,)
        or source.shape != target.shape
        or confidence.shape != source.shape[:1]
    ):
        raise InputError(
            f"Matches must be source (M, 3), target (M, 3) and confidence (M,), "
            f"but have shapes {source.shape}, {target.shape} and {confidence.shape}."
        )
    if not (np.isfinite(source).all() and np.isfinite(target).all() and np.isfinite(confidence).all()):
        raise InputError("Matches hold values that are not finite; drop NaN and infinite points before matching.")
    order = np.argsort(-confidence, kind="stable")
    return Matches(source[order], target[order], confidence[order])


def _hopeless(matches: Matches, source: Surface, target: Surface) -> Status | None:
    """The reason why no motion can be estimated at all, or None."""
    if min(len(source.points), len(target.points)) < MIN_POINTS:
        return Status.TOO_FEW_POINTS
    if len(matches.confidence) < MIN_INLIERS:
        return Status.TOO_FEW_MATCHES
    return None


def _refused(
    status: Status, matches: Matches, clock: StageClock, method: str, trust: FloatArray | None = None
) -> Registration:
    none = np.zeros(len(matches.confidence), dtype=bool)
    return Registration(None, status, matches, none, seconds=clock.seconds, method=method, trust=trust)


def _hypotheses(matches: Matches, source: Surface, target: Surface, settings: RigidSettings) -> Hypotheses:
    ends = ((matches.source, source), (matches.target, target))
    first, second = (torch.as_tensor(normals_at(*end), device=settings.device) for end in ends)
    known = bool(np.isfinite(source.viewpoint).all() and np.isfinite(target.viewpoint).all())
    x, y, confidence = (torch.as_tensor(values, device=settings.device) for values in matches)
    normals = MatchNormals(first, second, known)
    with torch.no_grad():
        return find_hypotheses(x, y, confidence, target.spacing, settings.consistency, normals)


def normals_at(points: FloatArray, surface: Surface) -> FloatArray:
    """The normals (N, 3) of a surface at the points (N, 3) of it."""
    return surface.normals[surface.tree.query(points)[1]]


def _usable(hypotheses: Hypotheses, matches: Matches, spacing: float) -> Candidates:
    """The hypotheses with enough inliers that are not collinear."""
    inliers = hypotheses.inliers.cpu().numpy()
    enough = inliers.sum(1) >= MIN_INLIERS
    spread = np.array([_breadth(matches.source[row]) for row in inliers]) > spacing
    reason = Status.DEGENERATE if enough.any() else Status.TOO_FEW_INLIERS
    motions = hypotheses.transforms.cpu().numpy()[enough & spread]
    return Candidates(motions, reason, hypotheses.trust.double().cpu().numpy())


def _breadth(points: FloatArray) -> float:
    """Standard deviation in metres across the line that fits the points (n, 3) best."""
    if len(points) < 3:
        return 0.0
    return float(np.sqrt(max(np.linalg.eigvalsh(np.cov(points.T))[1], 0.0)))


class Verified(NamedTuple):
    """Motions (H, 4, 4) after a few ICP steps on the surfaces, best first, and their log-odds (H,)."""

    motions: FloatArray
    quality: FloatArray


def _verify(
    matches: Matches, source: Surface, target: Surface, candidates: FloatArray, settings: RigidSettings
) -> Verified:
    """Align candidates (H, 4, 4) for a few steps and judge them."""
    few = distinct_sample(source, VERIFY_POINTS)
    aligned, _ = align(few, target, candidates, VERIFY_ITERATIONS, settings.icp, equations_for(settings.device))
    evidence = gather_evidence(matches, source, target, aligned, settings.acceptance, VERIFY_POINTS)
    found = quality(evidence)
    order = np.argsort(-found, kind="stable")
    return Verified(aligned[order], found[order])


def rivalry(verified: Verified, transform: FloatArray, source: Surface, spacing: float) -> float:
    """The log-odds that the likeliest motion that differs from `transform` (4, 4) takes from it.

    Only one motion can be correct. With odds a for this one, b for the other, and 1 for neither, they are a / (1 + b).
    spacing: metres, of the target.
    """
    centre = source.points.mean(0)[None]
    apart = np.linalg.norm(move(verified.motions, centre)[:, 0] - move(transform, centre), axis=1)
    turned = np.degrees(rotation_angle(verified.motions[:, :3, :3].swapaxes(1, 2) @ transform[:3, :3]))
    rival = (apart > SEPARATION * spacing) | (turned > SEPARATION_DEGREES)
    return float(np.logaddexp(0.0, verified.quality[rival].max())) if rival.any() else 0.0


def _refine(
    matches: Matches, source: Surface, target: Surface, verified: Verified, settings: RigidSettings
) -> Registration:
    """Refine the best motions to convergence and test the best one of them for acceptance."""
    icp = replace(settings.icp, first_reach=max(REFINE_REACH, settings.icp.first_reach))
    many, make = distinct_sample(source, REFINE_POINTS), equations_for(settings.device)
    motions, settled = align(many, target, verified.motions[:REFINED], settings.refine_iterations, icp, make)
    rule, points = settings.acceptance, settings.refine_points
    contact = contact_between(source, target, motions, points)
    evidence = gather_evidence(matches, source, target, motions, rule, points, contact)
    best = [int(quality(evidence).argmax())]
    contact, evidence = (
        Contact._make(values[best] for values in contact),
        Evidence._make(values[best] for values in evidence),
    )
    rival = rivalry(verified, motions[best[0]], source, target.spacing) if settings.rivals else 0.0
    return verdict(matches, target.spacing, motions[best], contact, evidence, bool(settled[best[0]]), settings, rival)


def verdict(
    matches: Matches,
    spacing: float,
    transform: FloatArray,
    contact: Contact,
    evidence: Evidence,
    settled: bool,
    settings: RigidSettings,
    rival: float = 0.0,
) -> Registration:
    """Test an aligned motion (1, 4, 4) for acceptance, whether it came from matches or from a guess.

    spacing: of the target, in metres. contact, evidence: for this motion. settled: whether the alignment converged.
    matches: used only to report the inliers. rival: log-odds that another motion takes from this one.
    """
    status, odds = judge(evidence, settings.acceptance), float(quality(evidence)[0]) - rival
    if status is Status.OK and odds < settings.acceptance.min_quality:
        status = Status.AMBIGUOUS
    if status is Status.OK and not settled:
        status = Status.NOT_CONVERGED
    reach = settings.icp.last_reach * spacing
    contact = contact.within(reach)
    lying = contact.lying(spacing)
    accepted = status is Status.OK
    weight = tukey(contact.residual, settings.icp.kernel * reach) * contact.touching
    return Registration(
        transform=transform[0] if accepted else None,
        status=status,
        matches=matches,
        inliers=agreeing_matches(matches, transform, settings.acceptance.match_radius * spacing)[0],
        rmse=float(np.sqrt(np.mean(contact.residual[lying] ** 2))) if lying.any() else float("nan"),
        overlap=float(lying.mean()),
        quality=odds,
        guess=None if accepted else transform[0],
        covariance=alignment_covariance(contact, weight, transform[0], spacing, settings.patch) if accepted else None,
    )
