# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Motions from matches: planted inliers are found, always the same way."""

import numpy as np
import pytest
import torch

from lepard_ros.geometry.rigid_motion import move
from lepard_ros.registration.rigid.consistency import (
    ConsistencySettings,
    MatchNormals,
    find_hypotheses,
    height_table,
    match_residuals,
    match_trust,
    normals_agree,
    pair_agreement,
    pair_distances,
)
from registration_scene import planted_matches, random_motion

SETTINGS = ConsistencySettings()
SPACING = 0.05


def tensors(motion: np.ndarray, count: int, ratio: float, seed: int) -> list[torch.Tensor]:
    return [torch.as_tensor(values) for values in planted_matches(motion, count, ratio, seed)]


@pytest.mark.parametrize("ratio", [0.03, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_planted_inliers_are_found(ratio: float, seed: int) -> None:
    motion = random_motion(seed)
    source, target, confidence = tensors(motion, 1000, ratio, seed)
    found = find_hypotheses(source, target, confidence, SPACING, SETTINGS)
    error = np.linalg.norm(move(found.transforms[0].numpy(), source.numpy()) - move(motion, source.numpy()), axis=1)
    assert error.max() < 0.12
    assert found.inliers[0].sum() >= 0.8 * ratio * 1000


def test_two_motions_are_both_kept_and_distinct() -> None:
    motions = [random_motion(1), random_motion(2)]
    parts = [tensors(motion, 300, 0.3, seed) for seed, motion in enumerate(motions)]
    source, target, confidence = (torch.cat(pair) for pair in zip(*parts, strict=True))
    found = find_hypotheses(source, target, confidence, SPACING, SETTINGS).transforms[:2].numpy()
    nearest = [min(np.abs(found - motion).max(axis=(1, 2))) for motion in motions]
    assert max(nearest) < 0.1


def test_the_same_matches_give_the_same_motions() -> None:
    inputs = tensors(random_motion(5), 800, 0.05, 5)
    first, second = (find_hypotheses(*inputs, SPACING, SETTINGS) for _ in range(2))
    assert torch.equal(first.transforms, second.transforms)
    assert torch.equal(first.scores, second.scores)
    assert len(first.transforms) <= SETTINGS.hypotheses
    assert (first.scores.diff() <= 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_matches_do_not_fail(count: int) -> None:
    found = find_hypotheses(*tensors(random_motion(0), count, 1.0, 0), SPACING, SETTINGS)
    assert torch.isfinite(found.transforms).all()
    assert found.inliers.shape[1] == count


def test_more_matches_than_the_limit_count_as_inliers_too() -> None:
    source, target, confidence = tensors(random_motion(0), 500, 0.4, 0)
    found = find_hypotheses(source, target, confidence, SPACING, ConsistencySettings(max_matches=100))
    assert found.inliers[0].sum() > 150


def test_trust_is_the_leading_eigenvector() -> None:
    """Two groups that agree within themselves: the larger one is trusted, a match that agrees with nobody is not."""
    agreement = torch.block_diag(torch.ones(6, 6), torch.ones(3, 3), torch.zeros(1, 1)).fill_diagonal_(0.0)
    trust = match_trust(agreement, torch.ones(10))
    leading = torch.linalg.eigh(agreement).eigenvectors[:, -1].abs()
    torch.testing.assert_close(trust, leading / leading.max(), atol=0.02, rtol=0.0)
    assert (trust[:6] > 0.9).all() and (trust[6:] < 0.02).all()


def test_agreement_against_brute_force() -> None:
    source, target = (torch.as_tensor(np.random.default_rng(i).uniform(-3, 3, (40, 3))).float() for i in range(2))
    torch.testing.assert_close(pair_distances(source), torch.cdist(source, source), atol=2e-3, rtol=0.0)
    difference = (torch.cdist(source, source) - torch.cdist(target, target)).abs()
    agreement = pair_agreement(source, target, 0.3)
    clear = (difference - 0.3).abs() > 0.005
    clear.fill_diagonal_(False)
    assert torch.equal(agreement[clear].bool(), (difference < 0.3)[clear])
    assert not agreement.diagonal().any()


def test_residuals_against_brute_force() -> None:
    source, target, _ = tensors(random_motion(0), 50, 0.5, 0)
    motions = torch.as_tensor(np.stack([random_motion(k) for k in range(3)]))
    residuals = match_residuals(motions, source.float(), target.float())
    expected = np.linalg.norm(move(motions.numpy(), source.numpy()) - target.numpy(), axis=2)
    np.testing.assert_allclose(residuals.numpy(), expected, atol=1e-5)


def unit_normals(count: int, seed: int) -> np.ndarray:
    normals = np.random.default_rng(seed).normal(size=(count, 3))
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)


def test_the_height_over_a_tangent_plane_is_that_of_each_pair() -> None:
    points, normals = torch.randn(7, 3), torch.from_numpy(unit_normals(7, 0)).float()
    expected = torch.stack([(points - points[i]) @ normals[i] for i in range(7)])
    torch.testing.assert_close(height_table(points, normals), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("signed", [True, False])
def test_true_matches_agree_in_their_normals_and_false_ones_seldom(signed: bool) -> None:
    """Fifty true matches keep all angles under a motion; of random normals few pairs do."""
    motion, normals = random_motion(3), unit_normals(100, 1)
    source, target, _ = tensors(motion, 100, 1.0, 3)
    turned = normals @ motion[:3, :3].T
    turned[50:] = unit_normals(50, 2)
    if not signed:
        turned[::2] *= -1
    ends = (torch.from_numpy(normals), torch.from_numpy(turned))
    table = normals_agree(source / SPACING, target / SPACING, MatchNormals(*ends, signed))
    assert table[:50, :50].float().mean() > 0.99
    assert table[50:, 50:].float().mean() < 0.3


def test_normals_find_a_motion_that_distances_alone_miss() -> None:
    """One match of 125 is true: too few among 1,000 for distances, enough with normals."""
    found = {False: 0, True: 0}
    for seed in range(8):
        motion, count = random_motion(seed), 1000
        source, target, confidence = tensors(motion, count, 0.008, seed)
        right = torch.as_tensor(np.linalg.norm(move(motion, source.numpy()) - target.numpy(), axis=1) < 2 * SPACING)
        normals = unit_normals(count, seed)
        turned = np.where(right.numpy()[:, None], normals @ motion[:3, :3].T, unit_normals(count, seed + 100))
        ends = MatchNormals(torch.from_numpy(normals), torch.from_numpy(turned))
        for known in found:
            motions = find_hypotheses(source, target, confidence, SPACING, SETTINGS, ends if known else None).transforms
            found[known] += bool(np.abs(motions.numpy() - motion).max(axis=(1, 2)).min() < 0.2)
    assert found[True] >= 7
    assert found[False] < found[True]
