# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Point-to-plane alignment against finite differences and known motions."""

import numpy as np
import pytest

from lepard_ros.geometry.rigid_motion import exponential, move, rotation_angle
from lepard_ros.registration.rigid.icp import Contact, IcpSettings, align, normal_equations, sample, touch, tukey
from lepard_ros.registration.types import Surface
from registration_scene import SPACING, box_room, look, two_views, view


def random_contact(seed: int, count: int = 40) -> Contact:
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(1, count, 3))
    normal /= np.linalg.norm(normal, axis=2, keepdims=True)
    moved, residual = rng.normal(size=(1, count, 3)) + 4.0, rng.normal(size=(1, count)) * 0.05
    return Contact(moved, normal, np.abs(residual), residual, np.ones((1, count), bool), np.zeros((1, count), int))


def test_normal_equations_against_finite_differences() -> None:
    contact, weight = random_contact(0), np.random.default_rng(1).uniform(0.2, 1.0, (1, 40))
    hessian, gradient, centre = normal_equations(contact, weight)

    def residuals(twist: np.ndarray) -> np.ndarray:
        turned = move(exponential(twist), contact.moved[0] - centre[0]) + centre[0]
        return contact.residual[0] + ((turned - contact.moved[0]) * contact.normal[0]).sum(1)

    steps = 1e-6 * np.eye(6)
    jacobian = np.stack([(residuals(step) - residuals(-step)) / 2e-6 for step in steps], axis=1)
    np.testing.assert_allclose(hessian[0], jacobian.T * weight[0] @ jacobian, atol=1e-6)
    np.testing.assert_allclose(gradient[0], jacobian.T * weight[0] @ residuals(np.zeros(6)), atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_alignment_recovers_a_disturbed_motion(seed: int) -> None:
    source, target, motion = two_views(seed)
    disturbance = exponential(np.random.default_rng(seed).normal(size=(4, 6)) * 0.025)
    refined, settled = align(source, target, disturbance @ motion, 20, IcpSettings())
    assert settled.all()
    assert np.degrees(rotation_angle(refined[:, :3, :3] @ motion[:3, :3].T)).max() < 0.3
    assert np.linalg.norm(refined[:, :3, 3] - motion[:3, 3], axis=1).max() < 0.015


def test_what_is_undetermined_stays_put() -> None:
    grid = np.stack(np.meshgrid(np.arange(0, 2, 0.05), np.arange(0, 2, 0.05), [0.0]), axis=-1).reshape(-1, 3)
    plane = Surface(grid, np.tile([0.0, 0.0, 1.0], (len(grid), 1)), SPACING, np.array([1.0, 1.0, 2.0]))
    start = exponential(np.array([[0.02, -0.01, 0.03, 0.0, 0.0, 0.01]]))
    refined, _ = align(plane, plane, start, 15, IcpSettings())
    centre = move(refined, np.array([[1.0, 1.0, 0.0]]))[0, 0] - move(start, np.array([[1.0, 1.0, 0.0]]))[0, 0]
    np.testing.assert_allclose(centre, [0.0, 0.0, -0.03], atol=2e-3)


def test_touch_against_brute_force() -> None:
    source, target, motion = two_views(0)
    few = sample(source, 200)
    contact = touch(few, target, motion[None], 0.1)
    moved = move(motion, few.points)
    distance = np.linalg.norm(moved[:, None] - target.points, axis=2)
    np.testing.assert_allclose(np.where(distance.min(1) < 0.1, distance.min(1), np.inf), contact.distance[0])
    nearest = distance.argmin(1)
    facing = ((few.normals @ motion[:3, :3].T) * target.normals[nearest]).sum(1) > 0.5
    np.testing.assert_array_equal(contact.touching[0], (distance.min(1) < 0.1) & facing)


def test_sample_is_even_and_repeatable() -> None:
    surface = view(box_room(1), look(np.array([0.5, 0.5, 1.5]), np.array([4.0, 3.0, 0.5])))
    first, second = sample(surface, 300), sample(surface, 300)
    np.testing.assert_array_equal(first.points, second.points)
    assert len(first.points) == len(first.normals) == 300
    assert sample(surface, 10**6) is surface
    np.testing.assert_allclose(first.points.mean(0), surface.points.mean(0), atol=0.2)


def test_tukey_weights() -> None:
    np.testing.assert_allclose(tukey(np.array([0.0, 0.5, -0.5, 1.0, 2.0]), 1.0), [1.0, 0.5625, 0.5625, 0.0, 0.0])


def test_a_contact_cut_short_is_one_with_a_shorter_reach() -> None:
    source, target, motion = two_views(0)
    far, near = (touch(source, target, motion[None], cells * SPACING) for cells in (3.0, 1.0))
    cut = far.within(1.0 * SPACING)
    assert 0 < near.touching.sum() < far.touching.sum()
    np.testing.assert_array_equal(cut.touching, near.touching)
    np.testing.assert_array_equal(cut.distance, near.distance)
