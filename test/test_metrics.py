# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Every metric against a hand-computed case, a brute force or the official definition."""

import doctest
import math

import numpy as np
import pytest
from scipy.stats import chi2

from lepard_ros.evaluation import bootstrap, methods, metrics
from lepard_ros.geometry import flow as flows
from lepard_ros.geometry import overlap
from lepard_ros.geometry.flow import blend_flow
from lepard_ros.geometry.overlap import overlap_ratio
from pair_files import motion


@pytest.mark.parametrize("module", [metrics, bootstrap, overlap, methods, flows])
def test_examples_in_the_docstrings(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.failed == 0
    assert result.attempted > 0


@pytest.mark.parametrize("degrees", [0.0, 1e-5, 0.5, 90.0, 179.9, 180.0])
def test_rotation_error_is_the_angle(degrees: float) -> None:
    axis = np.array([1.0, 2.0, -2.0]) / 3
    base = motion([0.3, -1.0, 0.4], [1, 2, 3])
    turned = motion(list(np.radians(degrees) * axis), [0, 0, 0]) @ base
    assert metrics.rotation_error(turned, base) == pytest.approx(degrees, abs=1e-7)


def test_a_refused_pair_is_never_a_success() -> None:
    truth, points = np.eye(4), np.zeros((3, 3))
    assert math.isinf(metrics.rotation_error(None, truth))
    assert math.isinf(metrics.translation_error(None, truth))
    assert math.isinf(metrics.information_rmse(None, truth, np.eye(6)))
    assert math.isinf(metrics.point_rmse(None, truth, points))


def information_of(points: np.ndarray) -> np.ndarray:
    """The matrix whose form in [t, q_xyz] is the squared distance: the sum of G'G, G = [I | -2 [p]x]."""
    total = np.zeros((6, 6))
    for x, y, z in points:
        rows = np.array([[1, 0, 0, 0, 2 * z, -2 * y], [0, 1, 0, -2 * z, 0, 2 * x], [0, 0, 1, 2 * y, -2 * x, 0]])
        total += rows.T @ rows
    return total


def test_information_error_is_the_rmse_over_true_matches_to_second_order() -> None:
    points = np.random.default_rng(0).normal(size=(400, 3))
    truth = motion([0.4, 0.2, -0.3], [0.5, -1, 2])
    estimate = truth @ motion([0.01, -0.02, 0.015], [0.02, 0.01, -0.03])
    official = metrics.information_rmse(estimate, truth, information_of(points))
    assert official == pytest.approx(metrics.point_rmse(estimate, truth, points), rel=0.02)


def test_information_error_does_not_depend_on_the_sign_of_the_quaternion() -> None:
    for angle in (np.pi - 0.1, np.pi + 0.1):
        estimate = motion([0, 0, angle], [0, 0, 0])
        assert metrics.information_rmse(estimate, np.eye(4), np.eye(6)) == pytest.approx(np.sin((np.pi - 0.1) / 2))


def test_recall_over_nothing_is_unknown() -> None:
    assert math.isnan(metrics.recall([], []).pairs)
    assert math.isnan(metrics.feature_matching_recall([]))


def test_overlap_against_brute_force() -> None:
    random = np.random.default_rng(1)
    source, target = random.uniform(size=(80, 3)), random.uniform(size=(60, 3))
    transform = motion([0.1, 0.2, 0.3], [0.1, 0, 0])
    moved = metrics.transform_points(transform, source)
    gaps = np.linalg.norm(moved[:, None] - target[None], axis=2).min(axis=1)
    assert overlap_ratio(source, target, transform, 0.15) == np.mean(gaps < 0.15)
    assert overlap_ratio(source, np.zeros((0, 3)), transform, 0.15) == 0
    assert overlap_ratio(np.zeros((0, 3)), target, transform, 0.15) == 0


def test_blended_flow_against_brute_force() -> None:
    random = np.random.default_rng(2)
    points, anchors = random.uniform(size=(40, 3)) * 0.3, random.uniform(size=(30, 3)) * 0.3
    flow = random.normal(size=(30, 3))
    for point, value in zip(points, blend_flow(points, anchors, flow), strict=True):
        gap = np.linalg.norm(anchors - point, axis=1)
        nearest = np.argsort(gap)[:3]
        near = [i for i in nearest if gap[i] <= 0.1]
        weights = 1 / gap[near] if near else np.ones(3)  # the authors' plain mean where all are far
        np.testing.assert_allclose(value, np.average(flow[near or nearest], axis=0, weights=weights), atol=1e-8)


def test_flow_at_an_anchor_is_the_anchor_s() -> None:
    anchors = np.array([[0.0, 0, 0], [0.05, 0, 0], [0, 0.05, 0]])
    flow = np.array([[1.0, 0, 0], [0, 1, 0], [0, 0, 1]])
    np.testing.assert_allclose(blend_flow(anchors, anchors, flow), flow, atol=1e-6)


def test_matching_recall_of_a_deformation() -> None:
    random = np.random.default_rng(3)
    points = random.uniform(size=(200, 3)) * 0.3
    truth = points + np.array([0.2, 0.1, 0.0]) + 0.1 * np.sin(points)
    assert metrics.nonrigid_matching_recall(points, truth, points[::2], truth[::2]) == pytest.approx(1.0)
    assert metrics.nonrigid_matching_recall(points, truth, points[:0], truth[:0]) == 0
    wrong = metrics.nonrigid_matching_recall(points, truth, points, truth + np.array([0.05, 0, 0]))
    assert wrong == 0
    assert math.isnan(metrics.nonrigid_matching_recall(points[:0], truth[:0], points, truth))


def test_too_few_matches_have_no_inlier_ratio() -> None:
    points = np.zeros((2, 3))
    assert metrics.inlier_ratio(points, points, 0.1) == 0
    assert metrics.inlier_ratio(np.zeros((3, 3)), np.zeros((3, 3)), 0.1) == 1


def test_flow_errors_count_absolute_or_relative() -> None:
    source = np.zeros((4, 3))
    truth = np.array([[1.0, 0, 0], [2.0, 0, 0], [0.1, 0, 0], [1.0, 0, 0]])
    off = np.array([[0.04, 0, 0], [0.09, 0, 0], [0.07, 0, 0], [0.5, 0, 0]])
    errors = metrics.flow_errors(source, truth + off, truth)
    assert errors.epe == pytest.approx(0.175)
    assert (errors.acc5, errors.acc10) == (0.5, 0.75)
    assert math.isnan(metrics.flow_errors(source[:0], source[:0], source[:0]).epe)


def test_calibration_of_an_honest_confidence() -> None:
    random = np.random.default_rng(4)
    confidence = random.uniform(size=20_000)
    honest = metrics.confidence_calibration(confidence, random.uniform(size=20_000) < confidence)
    assert honest.error < 0.02
    boasting = metrics.confidence_calibration(confidence, random.uniform(size=20_000) < confidence**3)
    assert boasting.error > 0.2
    assert math.isnan(metrics.confidence_calibration(np.zeros(0), np.zeros(0, dtype=bool)).error)


def test_consistency_of_an_honest_covariance() -> None:
    random = np.random.default_rng(5)
    factor = random.normal(size=(6, 6)) * 0.1
    covariance = factor @ factor.T
    errors = random.multivariate_normal(np.zeros(6), covariance, size=4000)
    tiled = np.tile(covariance, (4000, 1, 1))
    ratio, inside = metrics.covariance_consistency(errors, tiled)
    assert ratio == pytest.approx(1, abs=0.05)
    assert inside == pytest.approx(0.95, abs=0.02)
    assert metrics.covariance_consistency(errors, tiled / 4)[0] == pytest.approx(4 * ratio)
    assert chi2.ppf(0.95, 6) > 6


def test_motion_difference_is_in_the_target_s_frame() -> None:
    truth = motion([0.5, 0.1, -0.7], [1, 2, 3])
    error = motion([0.02, -0.01, 0.03], [0, 0, 0])
    estimate = error @ truth
    difference = metrics.motion_difference(estimate, truth)
    np.testing.assert_allclose(difference[3:], [0.02, -0.01, 0.03], atol=1e-12)


def test_bootstrap_interval_covers_as_often_as_it_says() -> None:
    random = np.random.default_rng(6)
    covered = 0
    for trial in range(200):
        _, low, high = bootstrap.mean_interval(random.uniform(size=100) < 0.7, seed=trial, resamples=400)
        covered += low <= 0.7 <= high
    assert 178 <= covered <= 199


def test_paired_difference_is_tighter_than_two_intervals() -> None:
    random = np.random.default_rng(7)
    base = random.normal(size=100)
    better = base + 0.1 + 0.01 * random.normal(size=100)
    difference = bootstrap.paired_difference(better, base)
    assert difference.low > 0.09
    first, second = bootstrap.mean_interval(better), bootstrap.mean_interval(base)
    assert first.low < second.high
    with pytest.raises(ValueError, match="equally long"):
        bootstrap.paired_difference([1.0], [1.0, 2.0])
    assert math.isnan(bootstrap.mean_interval([]).mean)
