# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Poses along a chain, their uncertainty, and the pose graph."""

import numpy as np
import pytest
from scipy.optimize import least_squares
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.poses import (
    compose_covariance,
    extrapolate,
    invert_covariance_frame,
    motion_between,
    orthonormal,
)
from lepard_ros.geometry.rigid_motion import exponential, invert
from lepard_ros.tracking.pose_graph import Edge, PoseGraph

TIGHT = np.diag([1e-4] * 3 + [1e-5] * 3)


def random_pose(rng: np.random.Generator, reach: float = 2.0) -> np.ndarray:
    pose = np.eye(4)
    pose[:3, :3] = Rotation.random(random_state=int(rng.integers(1 << 30))).as_matrix()
    pose[:3, 3] = rng.uniform(-reach, reach, 3)
    return pose


def perturbed(pose: np.ndarray, errors: np.ndarray) -> np.ndarray:
    """The pose with its translation shifted and its rotation turned about the fixed axes, for errors (n, 6)."""
    moved = np.tile(pose, (len(errors), 1, 1))
    moved[:, :3, :3] = Rotation.from_rotvec(errors[:, 3:]).as_matrix() @ pose[:3, :3]
    moved[:, :3, 3] += errors[:, :3]
    return moved


def sampled_covariance(poses: np.ndarray, mean: np.ndarray) -> np.ndarray:
    turns = Rotation.from_matrix(poses[:, :3, :3] @ mean[:3, :3].T).as_rotvec()
    return np.cov(np.hstack([poses[:, :3, 3] - mean[:3, 3], turns]).T)


def random_covariance(rng: np.random.Generator) -> np.ndarray:
    root = rng.normal(size=(6, 6)) * 0.004
    return root @ root.T


@pytest.mark.parametrize("seed", range(3))
def test_covariance_of_a_chain_agrees_with_sampling(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first, second = random_pose(rng), random_pose(rng)
    cov_first, cov_second = random_covariance(rng), random_covariance(rng)
    draws = 40_000
    a = perturbed(first, rng.multivariate_normal(np.zeros(6), cov_first, draws))
    b = perturbed(second, rng.multivariate_normal(np.zeros(6), cov_second, draws))
    expected = sampled_covariance(a @ b, first @ second)
    got = compose_covariance(first, cov_first, second, cov_second)
    assert np.abs(got - expected).max() < 0.04 * np.abs(expected).max()


def test_covariance_of_an_inverse_agrees_with_sampling() -> None:
    rng = np.random.default_rng(5)
    step, covariance = random_pose(rng), random_covariance(rng)
    draws = perturbed(step, rng.multivariate_normal(np.zeros(6), covariance, 40_000))
    expected = sampled_covariance(invert(draws), invert(step))
    got = invert_covariance_frame(step, covariance)
    assert np.abs(got - expected).max() < 0.04 * np.abs(expected).max()


def test_extrapolation_continues_a_steady_motion() -> None:
    step = exponential(np.array([0.1, -0.05, 0.2, 0.1, 0.2, -0.1]))
    start = random_pose(np.random.default_rng(1))
    poses = [start, start @ step, start @ step @ step]
    assert np.allclose(extrapolate(poses[0], poses[1], 1.0), poses[2], atol=1e-9)
    assert np.allclose(extrapolate(poses[0], poses[1], 0.0), poses[1], atol=1e-9)


def test_orthonormal_repairs_a_rotation_without_moving_it() -> None:
    pose = random_pose(np.random.default_rng(2))
    worn = pose.copy()
    worn[:3, :3] *= 1.0 + 1e-5
    assert np.allclose(orthonormal(worn), pose, atol=1e-6)
    assert np.allclose(orthonormal(worn)[:3, :3] @ orthonormal(worn)[:3, :3].T, np.eye(3), atol=1e-12)


def circle(count: int) -> list[np.ndarray]:
    poses = []
    for angle in np.linspace(0, 2 * np.pi, count, endpoint=False):
        pose = np.eye(4)
        pose[:3, :3] = Rotation.from_euler("y", angle).as_matrix()
        pose[:3, 3] = 2 * np.sin(angle), 0, 2 * np.cos(angle)
        poses.append(pose)
    return poses


def drifted_circle(rng: np.random.Generator) -> tuple[list[np.ndarray], PoseGraph, dict[int, np.ndarray]]:
    """True poses, a chain of noisy motions between neighbours, and the poses that the chain alone gives."""
    truth = circle(16)
    graph, poses = PoseGraph(), {0: truth[0]}
    for i in range(1, len(truth)):
        noise = exponential(np.append(rng.normal(0, 0.015, 3), rng.normal(0.004, 0.006, 3)))
        step = invert(truth[i - 1]) @ truth[i] @ noise
        graph.add(Edge(i, i - 1, step, TIGHT))
        poses[i] = poses[i - 1] @ step
    return truth, graph, poses


def worst(truth: list[np.ndarray], poses: dict[int, np.ndarray]) -> float:
    return max(motion_between(truth[i], pose)[0] for i, pose in poses.items())


def test_a_loop_takes_the_drift_back() -> None:
    truth, graph, poses = drifted_circle(np.random.default_rng(3))
    before = worst(truth, poses)
    graph.add(Edge(15, 0, invert(truth[0]) @ truth[15], TIGHT, loop=True))
    after = graph.optimised(poses)
    assert np.allclose(after[0], truth[0], atol=1e-9)
    assert worst(truth, after) < 0.6 * before
    assert motion_between(truth[15], after[15])[0] < 0.25 * motion_between(truth[15], poses[15])[0]


def test_exact_edges_bring_wrong_poses_to_the_truth() -> None:
    truth = circle(8)
    graph = PoseGraph([Edge(i, i - 1, invert(truth[i - 1]) @ truth[i], TIGHT) for i in range(1, 8)])
    graph.add(Edge(7, 0, invert(truth[0]) @ truth[7], TIGHT))
    rng = np.random.default_rng(4)
    start = {i: pose @ exponential(rng.normal(0, 0.1, 6)) if i else pose for i, pose in enumerate(truth)}
    assert worst(truth, graph.optimised(start)) < 1e-3


def mahalanobis(graph: PoseGraph, poses: dict[int, np.ndarray]) -> np.ndarray:
    """The whitened residuals of all edges, [translation, rotation vector] in each target's frame."""
    residuals = []
    for edge in graph.edges:
        relative = invert(poses[edge.target]) @ poses[edge.source]
        turn = Rotation.from_matrix(relative[:3, :3] @ edge.transform[:3, :3].T).as_rotvec()
        error = np.append(relative[:3, 3] - edge.transform[:3, 3], turn)
        residuals.append(np.linalg.solve(np.linalg.cholesky(edge.covariance), error))
    return np.concatenate(residuals)


@pytest.mark.parametrize("seed", range(3))
def test_edges_count_by_their_whole_covariance(seed: int) -> None:
    """Directions and correlations matter: the optimum is that of weighted least squares solved independently."""
    rng = np.random.default_rng(seed)
    truth = {i: random_pose(rng) for i in range(4)}
    graph = PoseGraph()
    for source, target in ((1, 0), (2, 1), (3, 2), (3, 0), (2, 0)):
        covariance = random_covariance(rng) + 1e-6 * np.eye(6)
        noisy = perturbed(invert(truth[target]) @ truth[source], rng.multivariate_normal(np.zeros(6), covariance)[None])
        graph.add(Edge(source, target, noisy[0], covariance))

    def moved(twists: np.ndarray) -> dict[int, np.ndarray]:
        steps = exponential(twists.reshape(3, 6))
        return {0: truth[0]} | {i: truth[i] @ steps[i - 1] for i in (1, 2, 3)}

    best = moved(least_squares(lambda x: mahalanobis(graph, moved(x)), np.zeros(18)).x)
    got = graph.optimised(truth)
    for i in (1, 2, 3):
        assert motion_between(best[i], got[i])[0] < 0.1 * motion_between(best[i], truth[i])[0] + 1e-4


def test_a_false_loop_is_outvoted() -> None:
    truth, graph, poses = drifted_circle(np.random.default_rng(6))
    for other in (0, 1):
        graph.add(Edge(15, other, invert(truth[other]) @ truth[15], TIGHT, loop=True))
    wrong = invert(truth[3]) @ truth[12]
    wrong[:3, 3] += [1.5, 0.0, -1.0]
    graph.add(Edge(12, 3, wrong, TIGHT, loop=True))
    assert worst(truth, graph.optimised(poses)) < 0.15


def test_removing_a_keyframe_keeps_the_graph_in_one_piece() -> None:
    _, graph, poses = drifted_circle(np.random.default_rng(7))
    graph.remove_node(5)
    del poses[5]
    assert all(5 not in (edge.source, edge.target) for edge in graph.edges)
    bridge = next(edge for edge in graph.edges if {edge.source, edge.target} == {4, 6})
    ends = poses[bridge.target] @ bridge.transform, poses[bridge.source]
    assert np.allclose(*ends, atol=1e-9)
    assert np.trace(bridge.covariance) > np.trace(TIGHT)
    assert set(graph.covariances(poses)) == set(poses)


def test_covariance_grows_along_a_chain_and_shrinks_by_a_loop() -> None:
    truth, graph, poses = drifted_circle(np.random.default_rng(8))
    chain = graph.covariances(poses)
    sizes = [np.trace(chain[i][:3, :3]) for i in range(16)]
    assert sizes[0] == 0 and all(np.diff(sizes) > 0)
    graph.add(Edge(15, 0, invert(truth[0]) @ truth[15], TIGHT, loop=True))
    assert np.trace(graph.covariances(poses)[15]) < 0.2 * np.trace(chain[15])


def test_keyframes_are_linked_by_as_many_edges_as_lie_between_them() -> None:
    graph = PoseGraph([Edge(k, k + 1, np.eye(4), TIGHT) for k in range(4)])
    assert graph.around(0, 2) == {0, 1, 2}
    assert 0 in graph.around(4, 4) and 9 not in graph.around(0, 9)
