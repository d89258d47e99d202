# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Metrics of the literature as pure functions; each docstring states its definition, with an example.

Transforms are (4, 4) arrays that map source to target, points are (N, 3) metres. A method that refused a pair has
`None` for its transform: its errors are infinite, so that it can never count as a success.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.flow import blend_flow

RECALL_RMSE = 0.2  # metres: the registration recall of 3DMatch
MIN_MATCHES = 3  # with fewer, the authors count an inlier ratio of 0


def transform_points(transform: FloatArray, points: FloatArray) -> FloatArray:
    """Points (N, 3) moved by a (4, 4) transform.

    >>> transform_points(np.diag([2.0, 2.0, 2.0, 1.0]), np.ones((1, 3))).tolist()
    [[2.0, 2.0, 2.0]]
    """
    return points @ transform[:3, :3].T + transform[:3, 3]


# --- rigid motions -------------------------------------------------------------------------------------------------


def rotation_error(estimate: FloatArray | None, truth: FloatArray) -> float:
    """RRE: the angle in degrees between the two rotations.

    >>> quarter_turn = np.array([[0.0, -1, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    >>> rotation_error(quarter_turn, np.eye(4))
    90.0
    """
    if estimate is None:
        return float("inf")
    relative = estimate[:3, :3] @ truth[:3, :3].T
    skew = relative - relative.T
    sine = 0.5 * np.linalg.norm([skew[2, 1], skew[0, 2], skew[1, 0]])
    # atan2, since the arc cosine loses half of the digits near zero.
    return float(np.degrees(np.arctan2(sine, 0.5 * (np.trace(relative) - 1))))


def translation_error(estimate: FloatArray | None, truth: FloatArray) -> float:
    """RTE: the distance in metres between the two translations.

    >>> translation_error(np.eye(4), np.array([[1.0, 0, 0, 3], [0, 1, 0, 4], [0, 0, 1, 0], [0, 0, 0, 1]]))
    5.0
    """
    return float("inf") if estimate is None else float(np.linalg.norm(estimate[:3, 3] - truth[:3, 3]))


def information_rmse(estimate: FloatArray | None, truth: FloatArray, information: FloatArray) -> float:
    """The official 3DMatch error in metres: sqrt(e' I e / I[0, 0]), e = [t, q_xyz] of inv(truth) estimate.

    information (6, 6) is `gt_cov` of the benchmark, a stand-in for the RMSE over the true matches. The recorded
    matrices are written for a rotation vector while q_xyz is half of it, so a turn counts half: kept, it is official.

    >>> moved = np.eye(4); moved[0, 3] = 0.1
    >>> information_rmse(moved, np.eye(4), 5000 * np.eye(6))
    0.1
    """
    if estimate is None:
        return float("inf")
    from scipy.spatial.transform import Rotation

    difference = np.linalg.inv(truth) @ estimate
    quaternion = Rotation.from_matrix(difference[:3, :3]).as_quat()
    # q and -q are one rotation; the small-angle formula needs the one near identity.
    error = np.concatenate([difference[:3, 3], quaternion[:3] * (1 if quaternion[3] >= 0 else -1)])
    return float(np.sqrt(max(0.0, error @ information @ error) / information[0, 0]))


def point_rmse(estimate: FloatArray | None, truth: FloatArray, points: FloatArray) -> float:
    """The root mean square distance in metres between the two motions' images of the overlapping points (N, 3).

    >>> moved = np.eye(4); moved[1, 3] = 0.3
    >>> round(point_rmse(moved, np.eye(4), np.random.default_rng(0).normal(size=(9, 3))), 6)
    0.3
    """
    if estimate is None:
        return float("inf")
    if len(points) == 0:
        return float("nan")
    distance = np.linalg.norm(transform_points(estimate, points) - transform_points(truth, points), axis=1)
    return float(np.sqrt(np.mean(distance**2)))


class Recall(NamedTuple):
    """Recall as a share in [0, 1]: over all pairs, and as the mean of the scenes' recalls."""

    pairs: float
    scenes: float


def recall(successes: Sequence[bool], scenes: Sequence[str]) -> Recall:
    """Recall averaged over pairs and over scenes. The literature mixes the two: print both.

    >>> recall([True, True, True, False], ["kitchen", "kitchen", "kitchen", "hotel"])
    Recall(pairs=0.75, scenes=0.5)
    """
    if not len(successes):
        return Recall(float("nan"), float("nan"))
    success, scene = np.asarray(successes, dtype=float), np.asarray(scenes)
    by_scene = [success[scene == name].mean() for name in np.unique(scene)]
    return Recall(float(success.mean()), float(np.mean(by_scene)))


# --- matches ---------------------------------------------------------------------------------------------------------


def inlier_ratio(moved_source: FloatArray, target: FloatArray, threshold: float) -> float:
    """IR: the share of matches whose truly moved source (M, 3) lies within `threshold` metres of the target (M, 3).

    Fewer than three matches have the ratio 0, as in the authors' code.

    >>> inlier_ratio(np.zeros((4, 3)), np.array([[0.0, 0, 0.05], [0, 0, 0.5], [0, 0, 0], [0, 1, 0]]), 0.1)
    0.5
    """
    if len(moved_source) < MIN_MATCHES:
        return 0.0
    return float(np.mean(np.linalg.norm(moved_source - target, axis=1) < threshold))


def feature_matching_recall(ratios: Sequence[float], threshold: float = 0.05) -> float:
    """FMR: the share of pairs whose inlier ratio exceeds `threshold`.

    >>> feature_matching_recall([0.0, 0.05, 0.06, 0.9])
    0.5
    """
    return float(np.mean(np.asarray(ratios, dtype=float) > threshold)) if len(ratios) else float("nan")


# --- deformation -----------------------------------------------------------------------------------------------------


def nonrigid_matching_recall(
    points: FloatArray,
    truth: FloatArray,
    matched_source: FloatArray,
    matched_target: FloatArray,
    threshold: float = 0.04,
) -> float:
    """NFMR: the share of points (N, 3), truly at `truth` (N, 3), that the flow of the predicted matches recovers.

    The flow of the predicted matches (M, 3) -> (M, 3) is blended at each point as in `blend_flow`. Without matches
    nothing is recovered.

    >>> grid = np.arange(30.0).reshape(10, 3)
    >>> nonrigid_matching_recall(grid, grid * 2, grid[:4], grid[:4] * 2)
    0.4
    """
    if len(points) == 0:
        return float("nan")
    if len(matched_source) == 0:
        return 0.0
    flow = blend_flow(points, matched_source, matched_target - matched_source)
    return float(np.mean(np.linalg.norm(points + flow - truth, axis=1) < threshold))


class FlowErrors(NamedTuple):
    """EPE: mean end-point error in metres. acc5, acc10: shares of points within 5 cm or 5 % (10 cm or 10 %)."""

    epe: float
    acc5: float
    acc10: float


def flow_errors(source: FloatArray, warped: FloatArray, truth: FloatArray) -> FlowErrors:
    """Errors of a warp of `source` (N, 3) to `warped` (N, 3) against `truth` (N, 3).

    >>> flow_errors(np.zeros((2, 3)), np.array([[1.0, 0, 0], [0, 1, 0]]), np.array([[1.0, 0, 0], [0, 1.5, 0]]))
    FlowErrors(epe=0.25, acc5=0.5, acc10=0.5)
    """
    if len(source) == 0:
        return FlowErrors(float("nan"), float("nan"), float("nan"))
    error = np.linalg.norm(warped - truth, axis=1)
    relative = error / np.maximum(np.linalg.norm(truth - source, axis=1), 1e-12)
    shares = [float(np.mean((error < limit) | (relative < limit))) for limit in (0.05, 0.10)]
    return FlowErrors(float(error.mean()), *shares)


# --- reliability -----------------------------------------------------------------------------------------------------


def false_accept_rate(accepted: Sequence[bool], correct: Sequence[bool]) -> float:
    """The share of all pairs that were accepted although the motion is wrong.

    >>> false_accept_rate([True, True, False, True], [True, False, False, False])
    0.5
    """
    if not len(accepted):
        return float("nan")
    return float(np.mean(np.asarray(accepted, dtype=bool) & ~np.asarray(correct, dtype=bool)))


class Calibration(NamedTuple):
    """A reliability curve: per bin the mean confidence (B,), the share of correct ones (B,), their number (B,).

    error: the expected calibration error, the mean gap between the two weighted by the count.
    """

    confidence: FloatArray
    accuracy: FloatArray
    number: NDArray[np.integer]
    error: float


def confidence_calibration(confidence: FloatArray, correct: NDArray[np.bool_], bins: int = 10) -> Calibration:
    """How often a confidence (M,) in [0, 1] is right, in equal bins; empty bins are dropped.

    >>> confidence_calibration(np.array([0.9, 0.9, 0.1, 0.1]), np.array([True, True, False, True])).error
    0.25
    """
    place = np.clip((np.asarray(confidence) * bins).astype(int), 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    used = count > 0
    mean = np.bincount(place, weights=confidence, minlength=bins)[used] / count[used]
    right = np.bincount(place, weights=np.asarray(correct, dtype=float), minlength=bins)[used] / count[used]
    gap = float(np.average(np.abs(mean - right), weights=count[used])) if used.any() else float("nan")
    return Calibration(mean, right, count[used], round(gap, 12))


def motion_difference(estimate: FloatArray, truth: FloatArray) -> FloatArray:
    """The (6,) error [translation, rotation vector] of an estimate in the target's frame, as a covariance states it.

    >>> moved = np.eye(4); moved[2, 3] = 0.5
    >>> motion_difference(moved, np.eye(4)).tolist()
    [0.0, 0.0, 0.5, 0.0, 0.0, 0.0]
    """
    from scipy.spatial.transform import Rotation

    rotation = Rotation.from_matrix(estimate[:3, :3] @ truth[:3, :3].T).as_rotvec()
    return np.concatenate([estimate[:3, 3] - truth[:3, 3], rotation])


def covariance_consistency(errors: FloatArray, covariances: FloatArray) -> tuple[float, float]:
    """The mean normalised squared error divided by its expectation (1 if consistent), and the share within 95 %.

    errors: (N, 6). covariances: (N, 6, 6). Above 1 the covariances are too small (overconfident).

    >>> ratio, inside = covariance_consistency(np.ones((4, 6)), np.tile(np.eye(6), (4, 1, 1)))
    >>> ratio, inside
    (1.0, 1.0)
    """
    from scipy.stats import chi2

    if len(errors) == 0:
        return float("nan"), float("nan")
    solved = np.linalg.solve(covariances, errors[..., None])[..., 0]
    squared = np.einsum("ni,ni->n", errors, solved)
    return float(squared.mean() / 6), float(np.mean(squared < chi2.ppf(0.95, 6)))
