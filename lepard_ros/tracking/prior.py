# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Alignment from initial guesses, verified by the same acceptance rule as motions from correspondences."""

from dataclasses import replace

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.rigid.acceptance import (
    FEATURES,
    MIN_INLIERS,
    PLAIN,
    Evidence,
    contact_between,
    distinct_sample,
    gather_evidence,
    quality,
)
from lepard_ros.registration.rigid.covariance import PATCH
from lepard_ros.registration.rigid.estimate import MIN_POINTS, VERIFY_POINTS, RigidSettings, verdict
from lepard_ros.registration.rigid.icp import Contact, IcpSettings, align, tukey
from lepard_ros.registration.rigid.slack import HELD, Resistance, Slack, resistance_of, slack_between
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Status, Surface

METHOD = "motion"
# Prior log-odds (about 50 to 1) that a tracked sensor is near its predicted pose: tracking needs less evidence than
# place recognition. For the same reason it accepts weakly constrained motions: unconstrained directions come from the
# prediction, and the covariance shows it.
FOLLOWED_ODDS = 4.0
FOLLOWED_DETERMINACY = 0.5
FOLLOWED_OVERLAP = 0.3  # in return, the views must overlap more
# Maximum error of an initial guess (metres at the points), larger than that of a match: the reach of the first steps.
GUESS_REACH = 0.25
COARSE_POINTS = 600
COARSE_ITERATIONS = 12
FINE_ITERATIONS = 20
REFINED = 3  # motions that are refined after the coarse pass: its order is that of 600 points
# A direction is weakly constrained below this mean sine of the normals; a motion fits better if this share more of the
# points lies on the surface. Chosen on three stretches of bench/walk.py: where alignment slid by 3 to 6 degrees in
# front of a wall, the sine was 0.02 to 0.03 and the prediction fitted 3 to 9 % more points; elsewhere below 0.5 %.
WEAKLY_HELD = 0.15
FITS_BETTER = 0.01
SLACK_POINTS = 1500  # sample points for finding unconstrained directions


def align_from_guesses(
    source: Surface,
    target: Surface,
    guesses: FloatArray,
    matches: Matches,
    settings: RigidSettings,
    aligned: FloatArray | None = None,
) -> Registration:
    """Align a source to a target from initial guesses (G, 4, 4) and verify the best result.

    matches: used only to report their inliers. aligned: (4, 4), a motion that only needs to be refined.
    """
    if min(len(source.points), len(target.points)) < MIN_POINTS:
        return _refused(Status.TOO_FEW_POINTS, matches)
    few = distinct_sample(source, COARSE_POINTS)
    motions, _ = align(few, target, guesses, COARSE_ITERATIONS, _coarse(target.spacing, settings))
    if len(motions) > REFINED:
        motions = motions[np.argsort(-_qualities(source, target, motions, settings), kind="stable")[:REFINED]]
    motions = motions if aligned is None else np.concatenate([motions, aligned[None]])
    many = distinct_sample(source, settings.refine_points)
    motions, settled = align(many, target, motions, FINE_ITERATIONS, settings.icp)
    best = int(_qualities(source, target, motions, settings).argmax()) if len(motions) > 1 else 0
    found = judge_guess(source, target, motions[[best]], bool(settled[best]), matches, settings)
    return determined(source, target, found)


def determined(source: Surface, target: Surface, motion: Registration) -> Registration:
    """The motion, refused as degenerate if a direction is unconstrained, as along a bare corridor."""
    if motion.transform is None or not slack_between(source, target, motion.transform, SLACK_POINTS):
        return motion
    return replace(motion, transform=None, covariance=None, status=Status.DEGENERATE)


def more_likely(
    source: Surface, target: Surface, expected: Registration, matched: Registration, settings: RigidSettings
) -> Registration:
    """The better of two motions to one target, from the prediction and from matches, by their log-odds.

    Both are rated on the same evidence, with the matches. Overlap alone would not do: a large floor overlaps with any
    rotation about its normal.
    """
    if expected.transform is None or matched.transform is None:
        accepted = [motion for motion in (expected, matched) if motion.ok]
        return accepted[0] if accepted else max(expected, matched, key=lambda motion: motion.overlap)
    motions = np.stack([expected.transform, matched.transform])
    evidence = gather_evidence(matched.matches, source, target, motions, settings.acceptance, settings.refine_points)
    return (expected, matched)[int(quality(evidence).argmax())]


def best_supported(
    source: Surface, target: Surface, motion: FloatArray, predicted: FloatArray, points: int
) -> tuple[FloatArray, Contact, Resistance]:
    """The aligned motion (4, 4), or with its weakly constrained directions from `predicted` if that fits better.

    Where the surfaces constrain a direction weakly, alignment can slide along it into a local minimum. Returned with
    the contact of `points` sample points and its resistance.
    """
    contact = contact_between(source, target, motion[None], points)
    resistance = resistance_of(contact, target.spacing)
    weak = resistance.below(WEAKLY_HELD)
    if not weak:
        return motion, contact, resistance
    other = weak.keep(motion, predicted)
    other_contact = contact_between(source, target, other[None], points)
    if _fit(other_contact, target.spacing) < _fit(contact, target.spacing) + FITS_BETTER:
        return motion, contact, resistance
    return other, other_contact, resistance_of(other_contact, target.spacing)


def _fit(contact: Contact, spacing: float) -> float:
    """The share of points on the other surface, weighted by their residuals."""
    return float((tukey(contact.residual, spacing) * contact.touching).mean())


def with_prediction(motion: Registration, slack: Slack, sigma: float) -> Registration:
    """The motion with the uncertainty of its predicted directions, `sigma` in metres, added to the covariance."""
    if motion.transform is None or motion.covariance is None:
        return motion
    return replace(motion, covariance=motion.covariance + slack.covariance(motion.transform, sigma), predicted=sigma)


def with_weak_directions(motion: Registration, resistance: Resistance, spacing: float, points: float) -> Registration:
    """The motion with a covariance that knows its weakly constrained directions.

    The Hessian does not: noise of the normals resembles constraints. spacing: metres. points: number of points that
    touch; neighbours share their error.
    """
    if motion.transform is None or motion.covariance is None:
        return motion
    independent = max(points * min((spacing / PATCH) ** 2, 1.0), 1.0)
    sigma = max(motion.rmse, 0.1 * spacing) / independent**0.5
    added = resistance.covariance(motion.transform, sigma, WEAKLY_HELD, HELD)
    return replace(motion, covariance=motion.covariance + added)


def judge_guess(
    source: Surface,
    target: Surface,
    motion: FloatArray,
    settled: bool,
    matches: Matches,
    settings: RigidSettings,
    max_conflict: float = 1.0,
    contact: Contact | None = None,
) -> Registration:
    """Verify a motion (1, 4, 4) that was aligned from a guess, without evidence from matches.

    max_conflict: maximum share of points in free space, however well the rest fits.
    contact: of `settings.refine_points` points, if it is known already.
    """
    contact = contact or contact_between(source, target, motion, settings.refine_points)
    evidence = _evidence(source, target, motion, settings, settings.refine_points, contact)
    found = verdict(matches, target.spacing, motion, contact, evidence, settled, settings)
    if found.ok and evidence.conflict[0] > max_conflict:
        found = replace(found, transform=None, covariance=None, status=Status.FREE_SPACE)
    return replace(found, method=METHOD)


def followed(settings: RigidSettings) -> RigidSettings:
    """Relaxed settings for guesses that continue a tracked motion."""
    rule = settings.acceptance
    quality_needed = rule.min_quality - FOLLOWED_ODDS
    determinacy_needed = rule.min_determinacy * FOLLOWED_DETERMINACY
    milder = replace(rule, min_quality=quality_needed, min_determinacy=determinacy_needed)
    return replace(settings, acceptance=replace(milder, min_overlap=FOLLOWED_OVERLAP))


def _coarse(spacing: float, settings: RigidSettings) -> IcpSettings:
    """Coarse ICP settings; the first reach covers the error of a guess."""
    widest = max(GUESS_REACH / spacing, settings.icp.first_reach)
    return replace(settings.icp, first_reach=widest, last_reach=settings.icp.first_reach)


def _evidence(
    source: Surface,
    target: Surface,
    motions: FloatArray,
    settings: RigidSettings,
    max_points: int,
    contact: Contact | None = None,
) -> Evidence:
    """Evidence from the surfaces alone; the evidence from matches and descriptors is set to neutral."""
    evidence = gather_evidence(NO_MATCHES, source, target, motions, settings.acceptance, max_points, contact)
    neutral = max(np.expm1(PLAIN.centre[FEATURES.index("inliers")]), MIN_INLIERS)
    unknown = np.full(len(motions), np.nan)
    return evidence._replace(inliers=np.full(len(motions), neutral), unlikeness=unknown)


def _qualities(source: Surface, target: Surface, motions: FloatArray, settings: RigidSettings) -> FloatArray:
    evidence = _evidence(source, target, motions, settings, VERIFY_POINTS)
    return quality(evidence)


def _refused(status: Status, matches: Matches) -> Registration:
    return Registration(None, status, matches, np.zeros(len(matches.confidence), dtype=bool), method=METHOD)
