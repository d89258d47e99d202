# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Kabsch against scipy, and the algebra of rigid motions."""

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.rigid_motion import exponential, invert, kabsch, kabsch_many, move, rotation_angle
from registration_scene import random_motion


@pytest.mark.parametrize("seed", range(5))
def test_kabsch_is_the_best_rotation_of_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source, target, weights = rng.normal(size=(20, 3)), rng.normal(size=(20, 3)), rng.uniform(0.1, 1.0, 20)
    transform = kabsch(*(torch.as_tensor(values) for values in (source, target, weights))).numpy()
    centre_source, centre_target = np.average(source, 0, weights), np.average(target, 0, weights)
    expected, _ = Rotation.align_vectors(target - centre_target, source - centre_source, weights)
    np.testing.assert_allclose(transform[:3, :3], expected.as_matrix(), atol=1e-9)
    np.testing.assert_allclose(move(transform, centre_source[None])[0], centre_target, atol=1e-12)


def test_many_weightings_of_one_set_agree_with_one_at_a_time() -> None:
    rng = np.random.default_rng(3)
    source, target = (torch.as_tensor(rng.normal(size=(30, 3)) + 5.0) for _ in range(2))
    weights = torch.as_tensor(rng.uniform(0.0, 1.0, (7, 30)))
    many = kabsch_many(source, target, weights)
    each = torch.stack([kabsch(source, target, row) for row in weights])
    torch.testing.assert_close(many, each, atol=1e-9, rtol=0.0)


@pytest.mark.parametrize("shape", ["point", "line", "plane", "mirror"])
def test_poor_sets_still_give_a_proper_rotation(shape: str) -> None:
    source = np.random.default_rng(0).normal(size=(12, 3))
    source[:, {"point": 0, "line": 1, "plane": 2, "mirror": 3}[shape] :] = 0.0
    target = move(random_motion(2), source)
    if shape == "mirror":
        target = target * [1.0, 1.0, -1.0]
    transform = kabsch(torch.as_tensor(source), torch.as_tensor(target), torch.ones(12)).numpy()
    assert np.linalg.det(transform[:3, :3]) == pytest.approx(1.0)
    if shape != "mirror":
        np.testing.assert_allclose(move(transform, source), target, atol=1e-9)


def test_no_weight_at_all_is_finite() -> None:
    transform = kabsch_many(torch.randn(5, 3), torch.randn(5, 3), torch.zeros(2, 5))
    assert torch.isfinite(transform).all()


def test_exponential_inverse_and_angle() -> None:
    twist = np.random.default_rng(1).normal(size=(6, 6))
    twist[0, 3:] = 0.0
    twist[1, 3:] *= 1e-9
    motion = exponential(twist)
    np.testing.assert_allclose(motion[:, :3, :3], Rotation.from_rotvec(twist[:, 3:]).as_matrix(), atol=1e-14)
    np.testing.assert_allclose(invert(motion) @ motion, np.tile(np.eye(4), (6, 1, 1)), atol=1e-14)
    angles = np.linalg.norm(Rotation.from_matrix(motion[:, :3, :3]).as_rotvec(), axis=1)
    np.testing.assert_allclose(rotation_angle(motion[:, :3, :3]), angles, rtol=1e-6)
