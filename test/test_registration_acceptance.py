# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The evidence for an alignment: free space, determinacy, and that the rule tells right from wrong."""

from dataclasses import replace

import numpy as np
import pytest

from lepard_ros.geometry.rigid_motion import exponential, move
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts, depth_map, octahedral_cells
from lepard_ros.registration.rigid.acceptance import AcceptanceSettings, contributions, gather_evidence, judge, quality
from lepard_ros.registration.types import Matches, Status, Surface
from registration_scene import SPACING, two_views

SETTINGS = AcceptanceSettings()


def wall(distance: float) -> Surface:
    across, along = np.meshgrid(np.arange(-1.5, 1.5, 0.05), np.arange(-1.0, 1.0, 0.05))
    points = np.stack([across.ravel(), along.ravel(), np.full(across.size, distance)], axis=1)
    return Surface(points, np.tile([0.0, 0.0, -1.0], (len(points), 1)), SPACING)


def true_matches(source: Surface, motion: np.ndarray, count: int = 100) -> Matches:
    points = source.points[:: max(len(source.points) // count, 1)]
    return Matches(points, move(motion, points), np.ones(len(points)))


def test_cells_cover_the_sphere_evenly() -> None:
    directions = np.random.default_rng(0).normal(size=(200_000, 3))
    counts = np.bincount(octahedral_cells(directions, 16), minlength=256)
    assert counts.min() > 0.3 * counts.mean()
    assert counts.max() < 2.0 * counts.mean()
    np.testing.assert_array_equal(octahedral_cells(directions, 16), octahedral_cells(directions * 7.0, 16))


def test_neighbouring_directions_share_a_cell_or_touch() -> None:
    rng = np.random.default_rng(1)
    first = rng.normal(size=(5000, 3))
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    first = first[first[:, 2] > 0.0]  # beyond the equator the map is folded, and cells meet at its border
    second = first + rng.normal(size=first.shape) * 1e-3
    rows = [np.stack(np.divmod(octahedral_cells(values, 64), 64)) for values in (first, second)]
    close = np.abs(rows[0] - rows[1]).max(axis=0) <= 1
    assert close[first[:, 2] > 0.05].all()


@pytest.mark.parametrize(("depth", "expected"), [(0.1, False), (1.0, True), (1.7, True), (1.95, False), (3.0, False)])
def test_only_what_stands_in_front_conflicts(depth: float, expected: bool) -> None:
    points = np.array([[0.0, 0.0, 1.0], [0.2, 0.1, 1.0], [-0.2, -0.15, 1.0]]) * depth
    assert (conflicts(points, wall(2.0), FreeSpaceSettings()) == expected).all()


def test_directions_that_were_not_seen_say_nothing() -> None:
    behind = np.array([[0.0, 0.0, -1.0], [2.0, 0.0, 0.1], [0.0, -1.0, 0.1]])
    assert not conflicts(behind, wall(2.0), FreeSpaceSettings()).any()
    assert np.isnan(depth_map(wall(2.0), 64)).mean() > 0.5


def test_free_space_follows_the_viewpoint() -> None:
    aside = wall(2.0)
    aside = Surface(aside.points, aside.normals, SPACING, viewpoint=np.array([0.0, 0.0, 1.5]))
    assert not conflicts(np.array([[0.0, 0.0, 1.0]]), aside, FreeSpaceSettings()).any()


def test_a_plane_is_undetermined_and_a_room_is_not() -> None:
    plane = wall(2.0)
    identity = np.eye(4)[None]
    evidence = gather_evidence(true_matches(plane, identity[0]), plane, plane, identity, SETTINGS, 4000)
    assert evidence.determinacy[0] < 1e-6
    assert judge(evidence, SETTINGS) is Status.DEGENERATE
    source, target, motion = two_views(0)
    evidence = gather_evidence(true_matches(source, motion), source, target, motion[None], SETTINGS, 4000)
    assert evidence.determinacy[0] > 0.1
    assert judge(evidence, SETTINGS) is Status.OK


@pytest.mark.parametrize("seed", range(4))
def test_the_true_motion_has_the_best_quality(seed: int) -> None:
    source, target, motion = two_views(seed)
    wrong = exponential(np.random.default_rng(seed).normal(size=(30, 6)) * 0.6) @ motion
    motions = np.concatenate([motion[None], wrong])
    evidence = gather_evidence(true_matches(source, motion), source, target, motions, SETTINGS, 800)
    assert quality(evidence).argmax() == 0
    assert evidence.fit[0] > 0.7
    assert evidence.conflict[0] < 0.1


def test_every_refusal_names_a_reason() -> None:
    source, target, motion = two_views(1)
    far = exponential(np.array([9.0, 0.0, 0.0, 0.0, 0.0, 0.0])) @ motion
    beside = exponential(np.array([0.0, 0.0, 0.0, 0.0, 0.5, 0.0])) @ motion
    for transform in (far, beside):
        evidence = gather_evidence(true_matches(source, motion), source, target, transform[None], SETTINGS, 800)
        assert judge(evidence, SETTINGS) is not Status.OK
    evidence = gather_evidence(true_matches(source, motion), source, target, far[None], SETTINGS, 800)
    assert judge(evidence, SETTINGS) is Status.LOW_OVERLAP


def described(source: Surface, target: Surface, motion: np.ndarray) -> tuple[Surface, Surface]:
    """Both surfaces with descriptors: those of the source random, those of the target from the nearest source point."""
    words = np.random.default_rng(0).normal(size=(len(source.points), 32)).astype(np.float32)
    nearest = Surface(move(motion, source.points), source.normals, SPACING).tree.query(target.points)[1]
    return replace(source, descriptors=words), replace(target, descriptors=words[nearest])


def test_descriptors_of_touching_points_tell_right_from_wrong() -> None:
    source, target, motion = two_views(2)
    beside = exponential(np.array([0.3, 0.0, 0.3, 0.0, 0.3, 0.0])) @ motion
    motions, matches = np.stack([motion, beside]), true_matches(source, motion)
    plain = gather_evidence(matches, source, target, motions, SETTINGS, 800)
    evidence = gather_evidence(matches, *described(source, target, motion), motions, SETTINGS, 800)
    assert evidence.unlikeness[0] < 0.3
    assert evidence.unlikeness[1] > 0.9
    assert np.isnan(plain.unlikeness).all()
    last = contributions(evidence)[:, -1]
    assert last[0] > 0 > last[1]
    assert (contributions(plain)[:, -1] == 0).all()


def test_unlikeness_does_not_depend_on_the_length_of_descriptors_and_needs_contact() -> None:
    source, target, motion = two_views(2)
    first, second = described(source, target, motion)
    scaled = replace(first, descriptors=7 * first.descriptors), replace(second, descriptors=7 * second.descriptors)
    far = exponential(np.array([9.0, 0.0, 0.0, 0.0, 0.0, 0.0])) @ motion
    motions, matches = np.stack([motion, far]), true_matches(source, motion)
    once, again = (gather_evidence(matches, *pair, motions, SETTINGS, 4000) for pair in ((first, second), scaled))
    np.testing.assert_allclose(once.unlikeness, again.unlikeness, rtol=1e-5)
    assert once.unlikeness[1] == 1.0
