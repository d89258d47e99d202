# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The non-rigid solver against finite differences, closed forms and known warps; and what it says when it cannot."""

import numpy as np
import pytest
from scipy import sparse
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from conftest import shared_data
from lepard_ros.cloud.normals import surface_normals
from lepard_ros.errors import InputError
from lepard_ros.geometry.rigid_motion import rotation_from_vector
from lepard_ros.registration.deformable.block_cholesky import BlockCholesky, NotPositiveDefinite
from lepard_ros.registration.deformable.block_pcg import BlockConjugateGradients
from lepard_ros.registration.deformable.fit import NonrigidSettings, local_motions, moving_together
from lepard_ros.registration.deformable.graph import DeformationGraph, GraphSettings, build_graph
from lepard_ros.registration.deformable.match_filter import FilterSettings
from lepard_ros.registration.deformable.nonrigid import (
    NICP,
    SurfaceFollower,
    WarpSettings,
    solve_nonrigid,
    warp_from_matches,
)
from lepard_ros.registration.deformable.normal_equations import DataTerm, Motion, NormalEquations
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Status, Surface
from test_graph import plane, two_limbs

EXACT = NonrigidSettings(stiffness=1e-9, tolerance=1e-14, iterations=30, surface_weight=0.0)

ACCEPT_ALL = NonrigidSettings(min_quality=float("-inf"))  # the solver is tested here, not the verdict
FINE = WarpSettings(graph=GraphSettings(coverage=0.02), solver=ACCEPT_ALL)


def bend(points: np.ndarray, radius: float = 0.25) -> np.ndarray:
    """Roll a plane at z = 1 onto a cylinder about the y axis, without stretching it."""
    angle = (points[:, 0] - 0.2) / radius
    return np.stack([0.2 + radius * np.sin(angle), points[:, 1], points[:, 2] + radius * (1 - np.cos(angle))], axis=1)


def rigid() -> tuple[np.ndarray, np.ndarray]:
    return Rotation.from_rotvec([0.5, -1.4, 0.3]).as_matrix(), np.array([0.3, -0.2, 1.5])


def surface(points: np.ndarray) -> Surface:
    return Surface(points, surface_normals(points), 0.01)


def matches_of(source: np.ndarray, target: np.ndarray, count: int = 200, seed: int = 0) -> Matches:
    chosen = np.random.default_rng(seed).permutation(len(source))[:count]
    return Matches(source[chosen], target[chosen], np.ones(len(chosen)))


def random_motion(graph: DeformationGraph, seed: int) -> Motion:
    rng = np.random.default_rng(seed)
    return Motion(rotation_from_vector(rng.normal(0, 0.7, graph.nodes.shape)), rng.normal(0, 0.1, graph.nodes.shape))


def small_problem() -> tuple[DeformationGraph, NormalEquations, np.ndarray, np.ndarray]:
    points = plane(0.16, 0.12)
    graph, rng = build_graph(points), np.random.default_rng(1)
    chosen = points[rng.permutation(len(points))[:40]]
    equations = NormalEquations(graph, DataTerm(chosen, graph.skin(chosen)), arap_weight=0.7)
    return graph, equations, chosen + rng.normal(0, 0.05, chosen.shape), rng.uniform(0.1, 1.0, len(chosen))


def residuals(equations: NormalEquations, motion: Motion, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
    data = np.sqrt(weights)[:, None] * (equations.warped(motion) - targets)
    return np.concatenate([data, np.sqrt(0.7) * equations.edge_residuals(motion)]).ravel()


# --- the equations ----------------------------------------------------------------------------------------------------


def test_the_jacobian_is_the_finite_difference_of_the_residuals() -> None:
    graph, equations, targets, weights = small_problem()
    motion = random_motion(graph, 2)
    jacobian = equations.jacobian(motion, weights).toarray()
    for column in np.random.default_rng(3).integers(0, 6 * len(graph.nodes), 30):
        step = np.zeros(6 * len(graph.nodes))
        step[column] = 1e-6
        ahead = residuals(equations, motion.step(step.reshape(-1, 6)), targets, weights)
        behind = residuals(equations, motion.step(-step.reshape(-1, 6)), targets, weights)
        np.testing.assert_allclose(jacobian[:, column], (ahead - behind) / 2e-6, atol=1e-8)


def test_blocks_and_gradient_are_those_of_the_jacobian() -> None:
    graph, equations, targets, weights = small_problem()
    motion, n = random_motion(graph, 4), len(graph.nodes)
    jacobian = equations.jacobian(motion, weights)
    blocks = equations.blocks(motion, equations.moments(weights))
    dense = np.zeros((n, 6, n, 6))
    dense[equations.first, :, equations.second, :] = blocks
    dense[equations.second, :, equations.first, :] = blocks.transpose(0, 2, 1)
    np.testing.assert_allclose(dense.reshape(6 * n, 6 * n), (jacobian.T @ jacobian).toarray(), atol=1e-12)
    expected = jacobian.T @ residuals(equations, motion, targets, weights)
    np.testing.assert_allclose(equations.gradient(motion, targets, weights).ravel(), expected, atol=1e-12)


def test_arap_is_zero_for_any_rigid_motion_and_only_for_those() -> None:
    graph, equations, *_ = small_problem()
    turn, shift = rigid()
    motion = Motion(np.tile(turn, (len(graph.nodes), 1, 1)), graph.nodes @ turn.T + shift - graph.nodes)
    np.testing.assert_allclose(equations.edge_residuals(motion), 0.0, atol=1e-12)
    assert np.abs(equations.edge_residuals(random_motion(graph, 5))).max() > 0.01


def random_blocks(n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, sparse.csr_matrix]:
    """Positions, pattern and blocks of a positive definite matrix, and the matrix itself."""
    rng = np.random.default_rng(seed)
    positions = rng.uniform(0, 1, (n, 3)) * [1.0, 0.6, 0.05]
    near = np.argsort(np.linalg.norm(positions[:, None] - positions, axis=-1), axis=1)[:, 1:6]
    pairs = np.stack([np.repeat(np.arange(n), near.shape[1]), near.ravel()], axis=1)
    pairs = np.unique(np.concatenate([np.sort(pairs, axis=1), np.stack([np.arange(n)] * 2, axis=1)]), axis=0)
    blocks = rng.normal(0, 0.3, (len(pairs), 6, 6))
    own = pairs[:, 0] == pairs[:, 1]
    blocks[own] = 30 * np.eye(6) + blocks[own] + blocks[own].transpose(0, 2, 1)
    dense = np.zeros((n, 6, n, 6))
    dense[pairs[:, 0], :, pairs[:, 1], :] = blocks
    dense[pairs[:, 1], :, pairs[:, 0], :] = blocks.transpose(0, 2, 1)
    return positions, pairs[:, 0], pairs[:, 1], blocks, sparse.csr_matrix(dense.reshape(6 * n, 6 * n))


@pytest.mark.parametrize("n", [1, 2, 7, 60, 200])
def test_both_linear_solvers_solve(n: int) -> None:
    positions, first, second, blocks, matrix = random_blocks(n, seed=n)
    right = np.random.default_rng(0).normal(size=(n, 6))
    for solver in (BlockCholesky(positions, first, second), BlockConjugateGradients(n, first, second, tolerance=1e-12)):
        for scale in (1.0, 2.0):  # a second matrix of the same pattern
            solver.factorise(scale * blocks)
            np.testing.assert_allclose(scale * (matrix @ solver.solve(right).ravel()), right.ravel(), atol=1e-8)


def test_an_indefinite_matrix_is_refused() -> None:
    positions, first, second, blocks, _ = random_blocks(30, seed=0)
    with pytest.raises(NotPositiveDefinite):
        BlockCholesky(positions, first, second).factorise(-blocks)


# --- known warps ------------------------------------------------------------------------------------------------------


def test_a_known_smooth_warp_is_recovered_from_exact_matches() -> None:
    points = plane(0.4, 0.2)
    graph = build_graph(points)
    angle = (graph.nodes[:, 0] - 0.2) / 0.25
    turn = Rotation.from_rotvec(angle[:, None] * [0.0, -1.0, 0.0]).as_matrix()
    truth = Warp.from_motion(graph, turn, bend(graph.nodes) - graph.nodes + 0.1)
    target = truth(points)
    warp = solve_nonrigid(graph, surface(points), surface(target), Matches(points, target, np.ones(len(points))), EXACT)
    assert warp.ok
    np.testing.assert_allclose(warp(points), target, atol=1e-6)


def test_a_rigid_motion_is_recovered_exactly_even_with_stiff_edges_and_few_matches() -> None:
    points, (turn, shift) = plane(0.4, 0.2), rigid()
    target = points @ turn.T + shift
    warp = warp_from_matches(points, target, matches_of(points, target, 12), WarpSettings(solver=ACCEPT_ALL))
    assert warp.ok
    np.testing.assert_allclose(warp(points), target, atol=1e-6)


def test_a_bent_and_moved_sheet_is_laid_on_its_target() -> None:
    points, (turn, shift) = plane(0.4, 0.2), rigid()
    target = bend(points) @ turn.T + shift
    warp = warp_from_matches(points, target, matches_of(points, target, 150), FINE)
    # Measured with four draws of matches: 0.96 to 0.99, 0.77 to 0.86, 2.0 to 2.4 mm, 0.87 to 0.89.
    assert warp.ok and warp.overlap > 0.98 and warp.match_inliers.mean() > 0.75
    assert np.linalg.norm(warp(points) - target, axis=1).mean() < 0.0023
    assert warp.support.min() > 0.85


def test_outliers_do_not_bend_the_surface() -> None:
    points, (turn, shift) = plane(0.4, 0.2), rigid()
    target = bend(points) @ turn.T + shift
    matches = matches_of(points, target, 150)
    wrong = np.arange(0, 150, 3)
    matches.target[wrong] = target[np.random.default_rng(5).integers(0, len(target), len(wrong))]
    warp = warp_from_matches(points, target, matches, FINE)
    assert warp.ok and warp.match_inliers[wrong].mean() < 0.1
    assert np.linalg.norm(warp(points) - target, axis=1).mean() < 0.0025


def test_nearest_surface_alone_finds_a_small_bend() -> None:
    points = plane(0.4, 0.2)
    target = bend(points, radius=1.0) + np.array([0.0, 0.0, 0.01])
    warp = solve_nonrigid(build_graph(points), surface(points), surface(target), None, NICP)
    assert warp.ok
    distance = np.linalg.norm(warp(points) - target, axis=1)
    assert distance.mean() < np.linalg.norm(points - target, axis=1).mean() / 12


def flat_trunk(turn: float) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 3) and normals all around an upright elliptic cylinder of 50 by 24 cm, turned by degrees."""
    angle, height = np.meshgrid(np.linspace(0, 2 * np.pi, 120, endpoint=False), np.arange(0, 0.5, 0.01))
    points = np.stack([0.25 * np.cos(angle), height, 0.12 * np.sin(angle)], axis=-1).reshape(-1, 3)
    normals = np.stack([0.12 * np.cos(angle), np.zeros_like(angle), 0.25 * np.sin(angle)], axis=-1).reshape(-1, 3)
    turned = rotation_from_vector(np.array([0.0, np.radians(turn), 0.0]))
    unit = normals / np.linalg.norm(normals, axis=1, keepdims=True)
    return points @ turned.T + [0.0, -0.25, 1.5], unit @ turned.T


def test_a_turn_of_the_whole_body_is_followed_along_its_surface() -> None:
    """Each node for itself went to the nearest surface: the turn was lost, and points lay 10 cm off."""
    points, normals = flat_trunk(0.0)
    follower = SurfaceFollower(
        build_graph(points), Surface(points, normals, 0.01), NonrigidSettings(surface_reach=0.06, iterations=6)
    )
    warp = Warp.rest(follower.graph, Status.OK)
    for turn in (12.0, 24.0, 36.0):
        now, outward = flat_trunk(turn)
        seen = (outward * now).sum(axis=1) < 0
        target = Surface(now[seen], outward[seen], 0.01)
        warp = follower.solve(target, follower.place(target, [warp]))
    assert np.median(np.linalg.norm(warp(points) - now, axis=1)) < 0.01


def test_a_body_is_placed_where_it_jumped_to_and_with_the_better_of_two_predictions() -> None:
    """It was searched within 8 cm of one prediction; a body that jumped or stopped was lost."""
    points, normals = flat_trunk(0.0)
    follower = SurfaceFollower(build_graph(points), Surface(points, normals, 0.01), NonrigidSettings())
    rest = Warp.rest(follower.graph, Status.OK)
    seen = (normals * points).sum(axis=1) < 0
    jumped = Surface(points[seen] + [0.15, 0.1, 0.2], normals[seen], 0.01)
    moved = follower.place(jumped, [rest])(points) - points
    np.testing.assert_allclose(moved.mean(axis=0), [0.15, 0.1, 0.2], atol=0.01)
    turned = np.eye(4)
    turned[:3, :3] = rotation_from_vector(np.array([0.0, np.radians(50.0), 0.0]))
    turned[:3, 3] = points.mean(axis=0) - turned[:3, :3] @ points.mean(axis=0)
    placed = follower.place(Surface(points[seen], normals[seen], 0.01), [rest.moved_by(turned), rest])
    assert np.linalg.norm(placed(points) - points, axis=1).max() < 0.01


def test_the_far_side_of_a_thin_limb_is_no_evidence_against_a_fit() -> None:
    """Its normals point away from the sensor, 2 cm behind the near side: a third of the overlap seemed inside out."""
    near, far = plane(0.3, 0.3), plane(0.3, 0.3) + np.array([0.0, 0.0, 0.01])
    toward = np.tile([0.0, 0.0, -1.0], (len(near), 1))
    limb = Surface(np.concatenate([near, far]), np.concatenate([toward, -toward]), 0.01)
    follower = SurfaceFollower(build_graph(limb.points), limb, NonrigidSettings())
    evidence = follower.solve(Surface(near, toward, 0.01), Warp.rest(follower.graph, Status.OK)).evidence
    assert evidence is not None
    assert evidence.aligned < 0.5 and evidence.seen_aligned > 0.95


def test_limbs_that_do_not_touch_do_not_drag_each_other() -> None:
    points, second = two_limbs(gap=0.02)
    target = points + np.where(second[:, None], [0.0, 0.0, 0.15], 0.0)
    warp = warp_from_matches(points, target, matches_of(points, target, 300))
    assert warp.ok
    assert np.linalg.norm(warp(points) - target, axis=1).max() < 0.002
    assert warp.cut_edges == 0


def test_surfaces_that_touch_and_part_are_cut_and_said_so() -> None:
    points, second = two_limbs(gap=0.02)
    bridge = points[second & (points[:, 0] < 0.02)]
    bridge = np.concatenate([bridge - [0, 0, 0.005 * k] for k in range(1, 4)])
    cloud = np.concatenate([points, bridge])
    target = points + np.where(second[:, None], [0.0, 0.0, 0.2], 0.0)
    warp = warp_from_matches(cloud, target, matches_of(points, target, 400))
    assert warp.ok and warp.cut_edges > 0
    assert np.median(np.linalg.norm(warp(points) - target, axis=1)) < 0.005


def test_a_patch_that_lay_on_a_larger_surface_goes_where_its_own_matches_lead() -> None:
    """Its matches are few beside those around them, and would be outliers of the sheet's motion."""
    sheet = plane(0.6, 0.4)
    on_patch = (np.abs(sheet[:, :2] - [0.3, 0.2]) < 0.05).all(axis=1)
    away = sheet + np.where(on_patch[:, None], [0.0, 0.1, 0.6], 0.0)
    settings = WarpSettings(graph=GraphSettings(coverage=0.014), filter=FilterSettings(min_trust=0))
    warp = warp_from_matches(sheet, away, matches_of(sheet, away, 500), settings)
    moved, warped = warp.apply(sheet)
    error = np.linalg.norm(moved - away, axis=1)
    assert warp.status is Status.OK and warped.all() and warp.cut_edges > 0
    assert error.mean() < 0.015 and np.median(error[on_patch]) < 0.005


def test_matches_move_together_only_as_one_piece() -> None:
    rng, piece = np.random.default_rng(0), plane(0.1, 0.1, 0.02)
    turn, shift = rigid()
    together = Matches(piece, piece @ turn.T + shift, np.ones(len(piece)))
    scattered = Matches(piece, rng.uniform(0, 1, piece.shape), np.ones(len(piece)))
    assert moving_together(together, 0.05).all() and not moving_together(scattered, 0.05).any()
    assert not moving_together(Matches(*(part[:3] for part in together)), 0.05).any()


def test_a_start_is_followed_and_time_that_runs_out_is_said() -> None:
    points, (turn, shift) = plane(0.4, 0.2), rigid()
    target = bend(points) @ turn.T + shift
    matches = matches_of(points, target, 150)
    graph = build_graph(points)
    first = solve_nonrigid(graph, surface(points), surface(target), matches)
    again = solve_nonrigid(graph, surface(points), surface(target), matches, start=first)
    assert again.ok and again.iterations <= first.iterations
    late = solve_nonrigid(graph, surface(points), surface(target), matches, NonrigidSettings(max_seconds=0.0))
    assert late.status is Status.OUT_OF_TIME
    np.testing.assert_array_equal(late(points), points)


def test_local_motions_of_a_rigid_motion_are_that_motion() -> None:
    points, (turn, shift) = plane(0.4, 0.2), rigid()
    motion = local_motions(points[::50], matches_of(points, points @ turn.T + shift, 80))
    np.testing.assert_allclose(motion.rotation, np.tile(turn, (len(points[::50]), 1, 1)), atol=1e-9)
    np.testing.assert_allclose(points[::50] + motion.translation, points[::50] @ turn.T + shift, atol=1e-9)


# --- what cannot be solved --------------------------------------------------------------------------------------------


def degenerate_cases() -> dict[str, Matches]:
    points, rng = plane(0.4, 0.2), np.random.default_rng(0)
    line = points[np.abs(points[:, 1] - 0.1) < 1e-6]
    some = points[rng.permutation(len(points))[:80]]
    return {
        "none": Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0)),
        "one": Matches(points[:1], points[:1] + 0.1, np.ones(1)),
        "line": Matches(line, line + 0.1, np.ones(len(line))),
        "contradicting": Matches(some, rng.uniform(-1, 1, some.shape), np.ones(len(some))),
        "same place": Matches(np.tile(points[:1], (20, 1)), some[:20], np.ones(20)),
        "off the surface": Matches(some + 5.0, some, np.ones(len(some))),
    }


@pytest.mark.parametrize("name", sorted(degenerate_cases()))
def test_degenerate_matches_end_with_a_status_and_the_unwarped_cloud(name: str) -> None:
    points = plane(0.4, 0.2)
    warp = warp_from_matches(points, points + 0.1, degenerate_cases()[name])
    assert warp.status is not Status.OK
    np.testing.assert_array_equal(warp(points), points)


def test_a_cloud_too_small_for_a_graph_ends_with_a_status() -> None:
    points = plane(0.02, 0.02)
    warp = warp_from_matches(points, points, Matches(points, points, np.ones(len(points))))
    assert warp.status is Status.TOO_FEW_POINTS


@pytest.mark.parametrize("wrong", [np.full((9, 3), np.nan), np.zeros((8, 3)), np.zeros((9, 2))])
def test_broken_matches_are_an_input_error(wrong: np.ndarray) -> None:
    points = plane(0.4, 0.2)
    with pytest.raises(InputError):
        solve_nonrigid(build_graph(points), surface(points), surface(points), Matches(points[:9], wrong, np.ones(9)))


def test_parts_too_small_to_warp_are_reported_and_stay_where_they_are() -> None:
    body, scrap = plane(0.4, 0.3), plane(0.03, 0.03) + np.array([1.0, 0.0, 0.0])
    shift = np.array([0.05, 0.02, 0.1])
    source = np.concatenate([body, scrap])
    warp = warp_from_matches(source, source + shift, matches_of(body, body + shift, 100), WarpSettings())
    assert warp.ok
    moved, warped = warp.apply(source)
    np.testing.assert_array_equal(warped, np.arange(len(source)) < len(body))
    np.testing.assert_array_equal(moved[~warped], scrap)
    np.testing.assert_allclose(moved[warped], body + shift, atol=1e-3)
    left_out = warp.graph.nodes[:, 0] > 0.9
    np.testing.assert_array_equal(warp.to_arrays()["optimised"], ~left_out)


# --- real shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", ["victoria/victoria0_victoria10", "centaur/centaur5_centaur1"])
def test_true_matches_of_a_bending_body_warp_it_within_a_centimetre(pair: str) -> None:
    data = np.load(shared_data("tosca_pairs", f"{pair}.npz"))
    source, target, index = data["s_pc"].astype(float), data["t_pc"].astype(float), data["correspondences"]
    truth = (source + data["s2t_flow"]) @ data["rot"].T + data["trans"].reshape(3)
    matches = matches_of(source[index[:, 0]], target[index[:, 1]], 600)
    warp = warp_from_matches(source, target, matches, WarpSettings())
    seen = np.unique(index[:, 0])
    assert warp.ok
    assert np.linalg.norm(warp(source[seen]) - truth[seen], axis=1).mean() < 0.01


def test_the_authors_matches_lay_the_moose_on_its_target() -> None:
    data = np.load(shared_data("deform_examples", "moose", "landmark", "moose_match_pred.npz"))
    index = data["match"]
    matches = Matches(data["src_pcd"][0][index[:, 1]], data["tgt_pcd"][0][index[:, 2]], np.ones(len(index)))
    source, target = data["s_pcd_raw"].astype(float), data["t_pcd_raw"].astype(float)
    coarse = WarpSettings(graph=GraphSettings(coverage=0.04))  # the moose is two metres long
    warp = warp_from_matches(source, target, matches, coarse)
    assert warp.ok
    assert np.median(cKDTree(target).query(warp(source))[0]) < 0.01
