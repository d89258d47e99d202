# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The covariance against Monte Carlo and against moved frames."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.registration.rigid import covariance as module
from lepard_ros.registration.rigid.covariance import alignment_covariance
from lepard_ros.registration.rigid.icp import Contact, IcpSettings, align, touch
from lepard_ros.registration.types import Surface
from registration_scene import box_room, look, random_motion, view

SPACING = module.PATCH  # at this spacing every point is an observation of its own


def room_surface() -> Surface:
    fine = view(box_room(2), look(np.array([0.4, 0.4, 1.6]), np.array([4.0, 3.0, 0.6])), noise=0.0)
    chosen = np.random.default_rng(0).permutation(len(fine.points))[:400]
    return Surface(fine.points[chosen], fine.normals[chosen], SPACING)


def whole_contact(source: Surface, target: Surface, transform: np.ndarray) -> Contact:
    return touch(source, target, transform[None], 1e-3 + 0.1)


def test_covariance_against_monte_carlo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLOOR_TRANSLATION", "FLOOR_ROTATION", "MIN_CURVATURE"):
        monkeypatch.setattr(module, name, 0.0)
    target, motion, noise = room_surface(), random_motion(3), 0.03
    rng = np.random.default_rng(4)
    errors, predicted = [], []
    for _ in range(150):
        noisy = target.points + target.normals * rng.normal(size=(len(target.points), 1)) * noise
        source = Surface(move(invert(motion), noisy), target.normals @ motion[:3, :3], SPACING)
        found, _ = align(source, target, motion[None], 6, IcpSettings(first_reach=1.0, last_reach=1.0, kernel=1e6))
        contact = touch(source, target, found, SPACING)
        predicted.append(alignment_covariance(contact, contact.touching.astype(float), found[0], SPACING))
        turned = Rotation.from_matrix(motion[:3, :3] @ found[0, :3, :3].T).as_rotvec()
        errors.append(np.concatenate([motion[:3, 3] - found[0, :3, 3], turned]))
    measured, mean = np.cov(np.array(errors).T), np.mean(predicted, axis=0)
    ratio = np.sqrt(np.diag(measured) / np.diag(mean))
    assert (ratio > 0.75).all(), ratio
    assert (ratio < 1.35).all(), ratio
    correlation = measured[0, 4] / np.sqrt(measured[0, 0] * measured[4, 4])
    expected = mean[0, 4] / np.sqrt(mean[0, 0] * mean[4, 4])
    assert correlation == pytest.approx(expected, abs=0.3)


def test_it_is_symmetric_positive_and_grows_along_what_is_loose() -> None:
    surface = room_surface()
    floor = surface.normals @ np.median(surface.normals[surface.normals[:, 1] < -0.7], axis=0) > 0.9
    plane = Surface(surface.points[floor], surface.normals[floor], SPACING)
    results = []
    for cloud in (surface, plane):
        contact = touch(cloud, cloud, np.eye(4)[None], 0.1)
        results.append(alignment_covariance(contact, contact.touching.astype(float), np.eye(4), SPACING))
    for covariance in results:
        np.testing.assert_allclose(covariance, covariance.T)
        assert np.linalg.eigvalsh(covariance).min() > 0.0
    largest = [np.linalg.eigvalsh(covariance[:3, :3]).max() for covariance in results]
    assert largest[1] > 20.0 * largest[0]
