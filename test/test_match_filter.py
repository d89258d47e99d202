# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The match filter on planted outliers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from lepard_ros.registration.deformable.match_filter import FilterSettings, filter_matches, match_trust
from lepard_ros.registration.types import Matches
from test_graph import plane
from test_nonrigid import bend


def bent_matches(noise: float = 0.005, seed: int = 0) -> Matches:
    """True matches, 4 cm apart, of a sheet that is rolled up, turned and moved; and measured with noise."""
    rng = np.random.default_rng(seed)
    source = plane(0.8, 0.6, 0.04)
    target = bend(source, radius=0.3) @ Rotation.from_rotvec([1.0, 2.0, -0.5]).as_matrix().T + 0.7
    return Matches(source, target + rng.normal(0, noise, target.shape), np.ones(len(source)))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_random_outliers_go_and_true_matches_stay(share: float) -> None:
    matches, rng = bent_matches(), np.random.default_rng(1)
    wrong = rng.random(len(matches.source)) < share
    matches.target[wrong] = matches.target[rng.permutation(len(wrong))[: wrong.sum()]]
    wrong = np.linalg.norm(matches.target - bent_matches(0.0).target, axis=1) > 0.06
    kept = filter_matches(matches)
    assert kept[~wrong].mean() > 0.9
    assert kept[wrong].mean() < 0.1


def test_a_patch_that_moved_together_to_the_wrong_place_mostly_goes() -> None:
    matches = bent_matches()
    patch = np.linalg.norm(matches.source - matches.source[100], axis=1) < 0.07
    matches.target[patch] += [0.3, 0.1, 0.0]
    kept = filter_matches(matches)
    assert kept[patch].mean() < 0.35
    assert kept[~patch].mean() > 0.9


def test_limbs_that_move_differently_are_both_kept() -> None:
    first, second = bent_matches(), bent_matches(seed=3)
    both = Matches(
        np.concatenate([first.source, second.source + np.array([2.0, 0.0, 0.0])]),
        np.concatenate([first.target, second.target[:, [1, 2, 0]]]),
        np.ones(2 * len(first.source)),
    )
    assert filter_matches(both).mean() > 0.95


def test_few_matches_cannot_be_judged_and_are_kept() -> None:
    matches = bent_matches()
    few = Matches(*(part[:5] for part in matches))
    assert filter_matches(few).all()
    assert filter_matches(Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))).shape == (0,)


def test_judgement_does_not_depend_on_where_the_clouds_are() -> None:
    matches, rng = bent_matches(), np.random.default_rng(2)
    wrong = rng.permutation(len(matches.source))[:60]
    matches.target[wrong] += rng.normal(0, 0.3, (60, 3))
    matches.source[:] += rng.normal(0, 0.003, matches.source.shape)  # no two neighbours equally far, or order decides
    turn = Rotation.from_rotvec([0.4, -0.2, 2.0]).as_matrix()
    moved = Matches(matches.source @ turn.T + 3.0, matches.target @ turn.T - 5.0, matches.confidence)
    np.testing.assert_allclose(match_trust(moved, FilterSettings()), match_trust(matches, FilterSettings()), atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 60), st.integers(0, 10_000), st.sampled_from([0.0, 0.01, 1.0]))
def test_any_matches_give_a_flag_each(count: int, seed: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    source, target = rng.normal(0, size, (2, count, 3))
    trust = match_trust(Matches(source, target, rng.uniform(0, 1, count)), FilterSettings()) if count else np.zeros(0)
    assert trust.shape == (count,) and ((trust >= 0) & (trust <= 1)).all()
