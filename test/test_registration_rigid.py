# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The whole way from matches to a judged motion."""

import time
from dataclasses import replace

import numpy as np
import pytest

from conftest import shared_data
from lepard_ros.errors import InputError
from lepard_ros.geometry.rigid_motion import move, rotation_angle
from lepard_ros.registration.rigid.estimate import (
    RigidSettings,
    Verified,
    agreement,
    candidate_motions,
    register_matches,
    rivalry,
)
from lepard_ros.registration.rigid.fallback import register_fpfh
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, StageClock, Status, Surface
from registration_scene import SPACING, two_views


def view_matches(
    source: Surface, target: Surface, motion: np.ndarray, count: int, ratio: float, seed: int = 0
) -> Matches:
    """Matches of surface points; `ratio` of them true to a few centimetres, the others anywhere on the target."""
    rng = np.random.default_rng([seed, 23])
    distance, nearest = target.tree.query(move(motion, source.points))
    seen = np.flatnonzero(distance < 0.06)
    true = rng.choice(seen, max(int(count * ratio), 1), replace=len(seen) < count)
    false = rng.integers(0, len(source.points), count - len(true))
    index = np.concatenate([true, false])
    partner = np.concatenate([nearest[true], rng.integers(0, len(target.points), len(false))])
    noise = rng.normal(size=(count, 3)) * 0.02
    return Matches(source.points[index], target.points[partner] + noise, rng.uniform(0.2, 1.0, count))


def error(found: Registration, motion: np.ndarray) -> tuple[float, float]:
    """Degrees and metres."""
    assert found.transform is not None, found.status
    turned = rotation_angle(found.transform[:3, :3] @ motion[:3, :3].T)
    return float(np.degrees(turned)), float(np.linalg.norm(found.transform[:3, 3] - motion[:3, 3]))


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_a_few_true_matches_suffice(ratio: float, seed: int) -> None:
    source, target, motion = two_views(seed)
    matches = view_matches(source, target, motion, 800, ratio, seed)
    found = register_matches(matches, source, target)
    degrees, metres = error(found, motion)
    assert found.ok
    assert degrees < 0.5
    assert metres < 0.02
    assert found.inliers.sum() >= 0.9 * 800 * ratio
    assert found.rmse < 0.02
    assert found.overlap > 0.2
    assert found.covariance is not None
    assert found.covariance.shape == (6, 6)
    assert set(found.seconds) == {"hypotheses", "verification", "refinement"}


def test_the_same_input_gives_the_same_result() -> None:
    source, target, motion = two_views(1)
    matches = view_matches(source, target, motion, 600, 0.1)
    first, second = (register_matches(matches, source, target) for _ in range(2))
    np.testing.assert_array_equal(first.transform, second.transform)
    np.testing.assert_array_equal(first.covariance, second.covariance)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_matches(count: int) -> None:
    source, target, motion = two_views(0)
    points = source.points[:count]
    found = register_matches(Matches(points, move(motion, points), np.ones(count)), source, target)
    assert found.status is Status.TOO_FEW_MATCHES
    assert found.transform is None
    assert found.inliers.shape == (count,)


def test_too_few_points() -> None:
    source, target, motion = two_views(0)
    tiny = Surface(source.points[:10], source.normals[:10], SPACING)
    found = register_matches(view_matches(source, target, motion, 50, 1.0), tiny, target)
    assert found.status is Status.TOO_FEW_POINTS


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_matches_on_a_point_or_a_line_leave_the_motion_open(spread: float) -> None:
    source, target, motion = two_views(0)
    line = np.array([0.0, 0.0, 2.0]) + np.linspace(-1.0, 1.0, 60)[:, None] * [spread, 0.0, 0.0]
    found = register_matches(Matches(line, move(motion, line), np.ones(60)), source, target)
    assert found.status is Status.DEGENERATE
    assert found.transform is None


def test_a_single_plane_is_refused_rather_than_slid() -> None:
    rng = np.random.default_rng(0)
    across, along = np.meshgrid(np.arange(-1.5, 1.5, 0.05), np.arange(-1.0, 1.0, 0.05))
    points = np.stack([across.ravel(), along.ravel(), np.full(across.size, 2.0)], axis=1)
    points += rng.normal(size=points.shape) * 0.004
    normals = np.array([0.0, 0.0, -1.0]) + rng.normal(size=points.shape) * 0.05
    wall = Surface(points, normals / np.linalg.norm(normals, axis=1, keepdims=True), SPACING)
    chosen = rng.permutation(len(points))[:200]
    matches = Matches(points[chosen], points[chosen] + [0.3, 0.0, 0.0], np.ones(200))
    assert register_matches(matches, wall, wall).status is Status.DEGENERATE


def test_random_matches_are_refused() -> None:
    source, target, motion = two_views(3)
    for seed in range(5):
        found = register_matches(view_matches(source, target, motion, 500, 0.0, seed), source, target)
        assert not found.ok and found.transform is None, f"seed {seed}: {found.status}"


@pytest.mark.parametrize("seed", range(6))
def test_unrelated_rooms_are_refused(seed: int) -> None:
    source, target = two_views(seed)[0], two_views(seed + 50)[1]
    found = register_fpfh(source, target)
    assert not found.ok
    assert found.transform is None
    assert found.covariance is None
    assert found.method == "fpfh"


@pytest.mark.parametrize(
    "matches",
    [
        Matches(np.zeros((4, 2)), np.zeros((4, 3)), np.ones(4)),
        Matches(np.zeros((4, 3)), np.zeros((5, 3)), np.ones(4)),
        Matches(np.zeros((4, 3)), np.zeros((4, 3)), np.ones(3)),
        Matches(np.full((4, 3), np.nan), np.zeros((4, 3)), np.ones(4)),
    ],
)
def test_malformed_matches_are_an_input_error(matches: Matches) -> None:
    source, target, _ = two_views(0)
    with pytest.raises(InputError):
        register_matches(matches, source, target)


def test_the_fallback_finds_the_motion_without_a_network() -> None:
    source, target, motion = two_views(0)
    found = register_fpfh(source, target)
    assert found.method == "fpfh"
    degrees, metres = error(found, motion)
    assert degrees < 0.5
    assert metres < 0.02


def test_a_viewpoint_elsewhere_moves_with_the_cloud() -> None:
    source, target, motion = two_views(2)
    shift = np.array([3.0, -1.0, 2.0])
    moved = replace(source, points=source.points + shift, viewpoint=source.viewpoint + shift)
    matches = view_matches(source, target, motion, 400, 0.3)
    found = register_matches(matches._replace(source=matches.source + shift), moved, target)
    assert found.transform is not None
    np.testing.assert_allclose(move(found.transform, moved.points), move(motion, source.points), atol=0.03)


def test_real_fragments() -> None:
    folder = shared_data("3dmatch")
    pytest.importorskip("open3d")
    from registration_scene import real_surface

    truth = np.load(folder / "gt_3DMatch.npz")
    index = 0
    source, target = (real_surface(folder, str(truth[side][index])) for side in ("src", "tgt"))
    motion = np.eye(4)
    motion[:3, :3], motion[:3, 3] = truth["rot"][index], truth["trans"][index].ravel()
    degrees, metres = error(register_fpfh(source, target), motion)
    assert degrees < 3.0
    assert metres < 0.1


def test_a_stage_that_is_entered_twice_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the matches of the solver, which may be fitted twice."""
    ticks = iter([0.0, 1.0, 1.5, 3.5])
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    clock = StageClock()
    for stage in ("matches", "surface", "matches"):
        clock.stop(stage)
    assert clock.seconds == {"matches": 3.0, "surface": 0.5}


def test_agreement_ranks_pairs_by_their_true_matches() -> None:
    source, target, motion = two_views(0)
    scores = [
        agreement(view_matches(source, target, motion, 400, ratio), SPACING, RigidSettings()) for ratio in (0, 0.2, 0.6)
    ]
    assert scores[0] < 0.5 * scores[1] < 0.5 * scores[2]
    assert agreement(NO_MATCHES, SPACING, RigidSettings()) == 0.0


def test_the_odds_of_a_rival_count_against_a_motion() -> None:
    """With odds of 4 for the best motion and 2 for another one: 4 / (1 + 2). The same motion again is no rival."""
    source = two_views(0)[0]
    near, far = np.eye(4), np.eye(4)
    near[0, 3], far[0, 3] = 0.02, 1.0
    odds = np.log([4.0, 3.0, 2.0])
    verified = Verified(np.stack([np.eye(4), near, far]), odds)
    assert odds[0] - rivalry(verified, np.eye(4), source, SPACING) == pytest.approx(np.log(4 / 3))
    alone = Verified(verified.motions[:2], odds[:2])
    assert rivalry(alone, np.eye(4), source, SPACING) == 0.0


def test_a_scene_that_is_there_twice_is_ambiguous_for_a_lone_pair() -> None:
    source, target, motion = two_views(0)
    shift = np.array([0.0, 0.0, 8.0])
    points, normals = np.concatenate([target.points, target.points + shift]), np.tile(target.normals, (2, 1))
    twice = Surface(points, normals, SPACING, np.full(3, np.nan))
    matches = view_matches(source, target, motion, 600, 0.4)
    there = Matches(matches.source, matches.target + shift, matches.confidence)
    both = Matches(*(np.concatenate(columns) for columns in zip(matches, there, strict=True)))
    lenient = RigidSettings()
    assert register_matches(both, source, twice, lenient).ok
    found = register_matches(both, source, twice, lenient.alone(0.4))
    assert found.status is Status.AMBIGUOUS and found.transform is None and found.guess is not None
    assert register_matches(matches, source, target, lenient.alone(0.4)).ok


@pytest.mark.parametrize("count", range(5))
def test_hardly_any_matches_give_no_candidates(count: int) -> None:
    """A small cloud has none on a coarser grid; that raised an IndexError."""
    source, target, motion = two_views(0)
    points = source.points[:count]
    found = candidate_motions(Matches(points, move(motion, points), np.ones(count)), source, target, RigidSettings())
    assert found.motions.shape == (0, 4, 4) and found.trust.shape == (count,)
    assert found.reason is Status.TOO_FEW_MATCHES


def test_half_of_the_consistent_matches_are_right_where_a_tenth_of_all_are() -> None:
    source, target, motion = two_views(0)
    matches = view_matches(source, target, motion, 600, 0.1)
    result = register_matches(matches, source, target)
    right = np.linalg.norm(move(motion, matches.source) - matches.target, axis=1) < 2 * SPACING
    kept = result.consistent
    right_kept = np.linalg.norm(move(motion, kept.source) - kept.target, axis=1) < 2 * SPACING
    assert right.mean() < 0.2 and right_kept.mean() > 0.5
    assert right_kept.sum() > 0.7 * right.sum()
    assert len(register_matches(NO_MATCHES, source, target).consistent.confidence) == 0
