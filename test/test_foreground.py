# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The body is told from the room, and the camera's own motion is read off the room."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.rigid_motion import move
from lepard_ros.registration.deformable.foreground import (
    NO_BACKGROUND,
    ForegroundSettings,
    camera_motion,
    find_foreground,
    split_scene,
)
from test_graph import plane


def room(spacing: float = 0.02) -> np.ndarray:
    """A wall 3 m ahead and one to the left, a floor 1.2 m below the camera, a cupboard before the wall to the right."""
    wall = plane(4.0, 2.4, spacing) + np.array([-2.0, -1.2, 2.0])
    left = plane(2.0, 2.4, spacing)[:, [2, 1, 0]] + np.array([-3.0, -1.2, 1.0])
    floor = plane(4.0, 2.2, spacing)[:, [0, 2, 1]] + np.array([-2.0, 0.2, 0.8])
    cupboard = plane(0.4, 0.9, spacing) + np.array([1.2, 0.2, 1.6])
    return np.concatenate([wall, left, floor, cupboard])


def body() -> np.ndarray:
    """An egg, half a metre wide and a metre high, 1.8 m ahead: the side that the camera sees."""
    u, v = np.meshgrid(np.linspace(0, np.pi, 60), np.linspace(0.05, np.pi - 0.05, 80))
    egg = np.stack([0.25 * np.cos(u) * np.sin(v), 0.5 * np.cos(v), -0.2 * np.sin(u) * np.sin(v)], axis=-1)
    return egg.reshape(-1, 3) + np.array([0.0, 0.1, 1.8])


def test_a_body_before_a_wall_is_found_and_the_room_left_out() -> None:
    cloud = np.concatenate([room(), body()])
    found = find_foreground(cloud)
    is_body = np.arange(len(cloud)) >= len(room())
    assert found[is_body].mean() > 0.95
    assert found[~is_body].mean() < 0.002


@pytest.mark.parametrize("distance", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.004])
def test_the_defaults_serve_from_one_to_three_metres(distance: float, noise: float) -> None:
    farther = np.array([0.0, 0.0, distance - 1.8])
    cloud = np.concatenate([room(), body()]) + farther
    cloud = cloud + np.random.default_rng(0).normal(0, noise * max(1.0, distance) ** 2 / 4, cloud.shape)
    found = find_foreground(cloud)
    is_body = np.arange(len(cloud)) >= len(room())
    assert found[is_body].mean() > 0.95 and found[~is_body].mean() < 0.005


def test_the_body_stays_the_body_when_something_larger_comes_near() -> None:
    near = plane(0.7, 0.9, 0.02) + np.array(
        [-1.1, -0.4, -0.1]
    )  # fills more of the view than the body, and is no wall yet
    cloud = np.concatenate([room(), near, body()])
    is_body = np.arange(len(cloud)) >= len(cloud) - len(body())
    assert find_foreground(cloud)[is_body].mean() < 0.05
    assert find_foreground(cloud, last=body() + np.array(0.05))[is_body].mean() > 0.95


def test_a_cloud_without_a_room_is_all_body() -> None:
    sheet, parts = plane(0.5, 0.3), np.concatenate([body(), body() + np.array([0.9, 0.0, 0.0])])
    assert find_foreground(sheet).all() and find_foreground(parts).all()
    assert not find_foreground(np.zeros((0, 3))).any()


def test_a_region_of_interest_is_kept_to() -> None:
    cloud = np.concatenate([room(), body()])
    found = find_foreground(cloud, ForegroundSettings(box=((-0.1, -0.5, 1.0), (0.6, 0.8, 2.5))))
    assert found.any() and cloud[found, 0].min() >= -0.1


def test_the_camera_s_own_motion_is_read_off_the_room() -> None:
    motion = np.eye(4)
    motion[:3, :3], motion[:3, 3] = Rotation.from_rotvec([0.005, 0.012, -0.003]).as_matrix(), [0.01, -0.01, 0.02]
    seen = move(motion, room())
    before, after = (split_scene(cloud).background for cloud in (room(), seen))
    np.testing.assert_allclose(camera_motion(before, after), motion, atol=0.005)
    np.testing.assert_array_equal(camera_motion(NO_BACKGROUND, after), np.eye(4))
