# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable data: skinning against hand-computed cases, meshes against closed forms, pairs against their own truth."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from lepard_ros.cli import main
from lepard_ros.data.creature_scene import load_scene, save_scene, scene_files
from lepard_ros.data.fourdmatch import OVERLAP_RADIUS, DeformablePair, list_pairs, load_pair
from lepard_ros.errors import InputError
from lepard_ros.network.config import SMALL_DEFORMABLE
from lepard_ros.network.lepard import Lepard
from lepard_ros.synthesis.body_plans import PLANS
from lepard_ros.synthesis.cloth import Deformation, deform, sheet, soft_object
from lepard_ros.synthesis.creature_scenes import make_scene
from lepard_ros.synthesis.creature_sequences import creature_sequence
from lepard_ros.synthesis.creatures import BodyPlan, build_body, part_distance, random_pose, skin_weights
from lepard_ros.synthesis.deformable_data import choose_thing, load_models, synthesise_pair
from lepard_ros.synthesis.deformable_pairs import GRID, RayScene, look_at, thin_out
from lepard_ros.synthesis.gltf import AnimatedModel
from lepard_ros.synthesis.mesh_refinement import refine, smooth, subdivide, surface_of_field, weld
from lepard_ros.synthesis.motions import HELD_OUT_MODELS, KINDS, random_motion
from lepard_ros.synthesis.skinning import (
    Pose,
    SkinnedMesh,
    blend_dual_quaternions,
    blend_linear,
    blend_poses,
    world_transforms,
)
from lepard_ros.training.deformable_samples import CreatureStream

PROCEDURAL = [kind for kind in KINDS if kind != "model"]


def quarter_turn_about_z() -> np.ndarray:
    motion = np.eye(4)
    motion[:3, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    return motion


# --- skinning ---------------------------------------------------------------------------------------------------------


def test_linear_blend_of_a_hand_computed_case() -> None:
    """A point at (1, 0, 0), half on a still bone, half on one that turns it to (0, 1, 0), goes half way."""
    motion = np.stack([np.eye(4), quarter_turn_about_z()])
    weights = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    moved = blend_linear(np.tile([1.0, 0.0, 0.0], (3, 1)), weights, motion)
    np.testing.assert_allclose(moved, np.array([[1, 0, 0], [0.5, 0.5, 0], [0, 1, 0]]), atol=1e-12)


def test_dual_quaternions_of_a_hand_computed_case() -> None:
    """The same case on the arc: half of a quarter turn, at the same distance from the axis."""
    motion = np.stack([np.eye(4), quarter_turn_about_z()])
    motion[1, :3, 3] = [0, 0, 2]
    weights = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    moved = blend_dual_quaternions(np.tile([1.0, 0.0, 0.0], (3, 1)), weights, motion)
    np.testing.assert_allclose(moved, np.array([[1, 0, 0], [np.sqrt(0.5), np.sqrt(0.5), 1], [0, 1, 2]]), atol=1e-12)


def test_both_blends_are_exact_for_one_rigid_motion() -> None:
    rng = np.random.default_rng(0)
    motion = np.eye(4)
    motion[:3, :3], motion[:3, 3] = Rotation.random(random_state=rng).as_matrix(), rng.normal(size=3)
    points, weights = rng.normal(size=(50, 3)), rng.dirichlet(np.ones(4), 50)
    expected = points @ motion[:3, :3].T + motion[:3, 3]
    for blend in (blend_linear, blend_dual_quaternions):
        np.testing.assert_allclose(blend(points, weights, np.tile(motion, (4, 1, 1))), expected, atol=1e-9)


def test_an_arm_of_two_joints() -> None:
    """Shoulder and elbow each turned by a quarter: the hand comes back above the shoulder."""
    pose = Pose.rest(np.array([[0.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]]))
    turn = Rotation.from_euler("z", 90, degrees=True).as_quat()
    pose = pose._replace(rotation=np.array([turn, turn, [0, 0, 0, 1]]))
    joints = world_transforms(np.array([-1, 0, 1]), pose)[:, :3, 3]
    np.testing.assert_allclose(joints, [[0, 0, 0], [0, 1, 0], [-1, 1, 0]], atol=1e-12)


def test_blended_poses_begin_and_end_right_and_take_the_short_way() -> None:
    first, second = Pose.rest(np.zeros((1, 3))), Pose.rest(np.ones((1, 3)))
    second = second._replace(rotation=-Rotation.from_euler("x", [80], degrees=True).as_quat())
    half = blend_poses(first, second, 0.5)
    assert Rotation.from_quat(half.rotation).magnitude()[0] == pytest.approx(np.radians(40), abs=1e-6)
    np.testing.assert_allclose(half.translation, [[0.5, 0.5, 0.5]])
    assert Rotation.from_quat(blend_poses(first, second, 1.0).rotation).magnitude()[0] == pytest.approx(np.radians(80))


# --- meshes -----------------------------------------------------------------------------------------------------------


def volume(vertices: np.ndarray, triangles: np.ndarray) -> float:
    a, b, c = (vertices[triangles[:, corner]] for corner in range(3))
    return float(np.einsum("ij,ij->", a, np.cross(b, c)) / 6)


def is_closed(triangles: np.ndarray) -> bool:
    """Every edge is walked exactly once each way."""
    edges = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    walked = {tuple(edge) for edge in edges.tolist()}
    return len(walked) == len(edges) and all((end, start) in walked for start, end in walked)


def test_surface_of_a_sphere() -> None:
    grid = np.stack(np.meshgrid(*[np.arange(41) * 0.05 - 1] * 3, indexing="ij"), axis=-1)
    vertices, triangles = surface_of_field(np.linalg.norm(grid, axis=-1) - 0.7, np.full(3, -1.0), 0.05)
    assert np.abs(np.linalg.norm(vertices, axis=1) - 0.7).max() < 0.003
    assert volume(vertices, triangles) == pytest.approx(4 / 3 * np.pi * 0.7**3, rel=0.01)  # positive: it looks outwards
    assert is_closed(triangles)


def test_refinement_keeps_shape_and_weights() -> None:
    corners = np.array([[x, y, z] for x in (0, 1) for y in (0, 1) for z in (0, 1)], float)
    quads = np.array([[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]])
    triangles = np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])
    split = corners[triangles.ravel()]  # every triangle with its own corners, as exporters write them
    welded, joined = weld(split, np.arange(36).reshape(-1, 3))
    assert len(welded) == 8 and is_closed(joined)
    finer, faces = subdivide(welded, joined)
    assert len(faces) == 48 and is_closed(faces)
    assert volume(finer, faces) == pytest.approx(volume(welded, joined))
    assert abs(volume(smooth(finer, faces, 2), faces)) == pytest.approx(abs(volume(finer, faces)), rel=0.35)
    weights = np.stack([split[:, 0], 1 - split[:, 0]], axis=1)  # the bone's share grows along x
    mesh = SkinnedMesh(
        split, np.arange(36).reshape(-1, 3), np.array([-1, 0]), np.arange(2), np.tile(np.eye(4), (2, 1, 1)), weights
    )
    fine = refine(mesh, rounds=2, smoothing=0)
    np.testing.assert_allclose(fine.weights[:, 0], fine.vertices[:, 0], atol=1e-12)


def test_distance_to_a_round_cone() -> None:
    plan = BodyPlan()
    plan.add_part(0, (0, 0, 0), (0, 2, 0), 0.5, 0.3)
    points = np.array([[0.9, 0, 0], [0.9, 1, 0], [0, 3, 0], [0, 1, 0]], float)
    np.testing.assert_allclose(part_distance(plan.parts[0], points), [0.4, 0.5, 0.7, -0.4], atol=1e-12)


def test_unrelated_bones_do_not_share_skin() -> None:
    """Two fingers side by side: a point between them follows one of them and their parent, never both."""
    plan = BodyPlan(blend=0.5)
    palm = plan.add_bone(-1, (0, 0, 0))
    plan.add_part(palm, (0, -1, 0), (0, 0, 0), 0.2, 0.2)
    for x in (-0.1, 0.1):
        finger = plan.add_bone(palm, (x, 0, 0))
        plan.add_part(finger, (x, 0, 0), (x, 1, 0), 0.1, 0.1)
    weights = skin_weights(plan, np.array([[-0.01, 0.6, 0.0], [0.01, 0.6, 0.0]]))
    assert weights[0, 1] > 0 and weights[0, 2] == 0
    assert weights[1, 2] > 0 and weights[1, 1] == 0
    np.testing.assert_allclose(weights.sum(axis=1), 1)


@pytest.mark.parametrize("name", sorted(PLANS))
def test_bodies_are_closed_and_keep_their_volume_when_they_move(name: str) -> None:
    rng = np.random.default_rng(3)
    plan = PLANS[name](rng)
    body = build_body(plan, rng, lumps=0.0)
    assert np.isfinite(body.vertices).all() and 800 < len(body.vertices) < 60_000
    np.testing.assert_allclose(body.weights.sum(axis=1), 1)
    np.testing.assert_allclose(body.posed(plan.rest), body.vertices, atol=1e-9)
    rest = volume(body.vertices, body.triangles)
    assert rest > 0
    assert volume(body.posed(random_pose(plan, rng, 0.6)), body.triangles) == pytest.approx(rest, rel=0.25)


def test_bending_a_sheet_keeps_lengths() -> None:
    line = np.stack([np.linspace(-0.5, 0.5, 2001), np.zeros(2001), np.zeros(2001)], axis=1)
    bent = deform(line, np.zeros((3, 1)), Deformation(np.zeros(1), np.zeros(1), 2.0, 0.0, 0.0, 0.0))
    assert np.linalg.norm(np.diff(bent, axis=0), axis=1).sum() == pytest.approx(1.0, abs=1e-6)
    # A metre bent to curvature 2 is an arc of two radians of a circle of radius 1/2: the chord is sin(1).
    assert np.linalg.norm(bent[-1] - bent[0]) == pytest.approx(np.sin(1), abs=1e-6)


@pytest.mark.parametrize("make", [sheet, soft_object])
def test_boneless_things_are_sound_meshes(make: Callable) -> None:
    for seed in range(4):
        vertices, triangles = make(np.random.default_rng(seed))
        assert triangles.min() == 0 and triangles.max() == len(vertices) - 1
        assert np.isfinite(vertices).all() and 0.2 < np.ptp(vertices, axis=0).max() < 4


# --- seeing -----------------------------------------------------------------------------------------------------------


def test_cameras_look_at_their_centre_with_up_up() -> None:
    pose = look_at(np.array([3.0, 1.0, 2.0]), np.array([0.0, 1.0, 0.0]), 0.0)
    np.testing.assert_allclose(pose[:3, :3] @ pose[:3, :3].T, np.eye(3), atol=1e-12)
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1)
    np.testing.assert_allclose((np.linalg.inv(pose) @ [0, 1, 0, 1])[:2], 0, atol=1e-12)
    assert pose[1, 1] < -0.99  # the image's down is the world's down


def test_what_stands_behind_something_is_not_seen() -> None:
    wall = np.array([[-1, -1, 0], [1, -1, 0], [0, 1, 0]], float)
    scene = RayScene(np.concatenate([wall, wall + np.array([0, 0, 1.0])]), np.arange(6).reshape(2, 3))
    points = np.array([[0, 0, 0], [0, 0, 1]], float)
    assert scene.sees(np.array([0, 0, 5.0]), points).tolist() == [False, True]
    assert scene.sees(np.array([0, 0, -5.0]), points).tolist() == [True, False]


def test_thinning_against_brute_force() -> None:
    rng = np.random.default_rng(1)
    points, flow = rng.uniform(-0.03, 0.03, (300, 3)), rng.normal(size=(300, 3))
    centres, flows = thin_out(points, flow)
    cells: dict[tuple[int, ...], list[int]] = {}
    for index, cell in enumerate(np.floor(points / GRID).astype(int)):
        cells.setdefault(tuple(cell), []).append(index)
    assert len(centres) == len(cells)
    for centre, moved, members in zip(centres, flows, (cells[key] for key in sorted(cells)), strict=True):
        np.testing.assert_allclose(centre, points[members].mean(axis=0), atol=1e-12)
        closest = members[np.argmin(np.linalg.norm(points[members] - centre, axis=1))]
        np.testing.assert_array_equal(moved, flow[closest])


# --- pairs ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> list[DeformablePair]:
    made = [synthesise_pair(seed) for seed in range(12)]
    return [pair for pair in made if pair is not None]


def test_pairs_satisfy_their_own_truth(pairs: list[DeformablePair]) -> None:
    """R (s + flow) + t lies on the target: for all matches within the radius, for most far nearer."""
    assert len(pairs) == 12
    for pair in pairs:
        distance, _ = cKDTree(pair.target).query(pair.warped)
        matched = np.zeros(len(pair.source), bool)
        matched[pair.matches[:, 0]] = True
        assert distance[matched].max() <= OVERLAP_RADIUS + 1e-6 and (distance[~matched] > OVERLAP_RADIUS - 1e-6).all()
        assert np.median(distance[matched]) < 0.009
        ends = pair.warped[pair.matches[:, 0]] - pair.target[pair.matches[:, 1]]
        np.testing.assert_allclose(np.linalg.norm(ends, axis=1), distance[matched], atol=1e-5)


def test_pairs_lie_on_the_grid_before_the_camera_and_overlap_in_range(pairs: list[DeformablePair]) -> None:
    for pair in pairs:
        assert 0.12 <= pair.overlap <= 0.98
        np.testing.assert_allclose(pair.rotation @ pair.rotation.T, np.eye(3), atol=1e-9)
        for cloud in (pair.source, pair.target):
            assert 400 < len(cloud) <= 12_000 and cloud.dtype == np.float32
            assert (cloud[:, 2] > 0.2).all() and np.abs(cloud).max() < 6
            cells = np.unique(np.floor(cloud.astype(float) / GRID + 1e-4).astype(int), axis=0)
            assert len(cells) > 0.98 * len(cloud)
        assert len(np.unique(pair.metric_index)) == len(pair.metric_index) and pair.metric_index.max() < len(
            pair.source
        )
    overlaps = [pair.overlap for pair in pairs]
    assert min(overlaps) < 0.5 < max(overlaps)


def test_things_really_deform(pairs: list[DeformablePair]) -> None:
    """No rigid motion explains the flow of most pairs."""
    residuals = []
    for pair in pairs:
        before, after = pair.source - pair.source.mean(axis=0), pair.source + pair.flow
        after = after - after.mean(axis=0)
        rotation, _ = Rotation.align_vectors(after, before)
        residuals.append(np.linalg.norm(rotation.apply(before) - after, axis=1).mean())
    assert np.median(residuals) > 0.03


def test_one_seed_gives_one_pair_and_another_seed_another(pairs: list[DeformablePair]) -> None:
    again, other = synthesise_pair(4), synthesise_pair(400)
    assert again is not None and other is not None
    np.testing.assert_array_equal(again.source, pairs[4].source)
    np.testing.assert_array_equal(again.matches, pairs[4].matches)
    assert other.source.shape != again.source.shape


@pytest.mark.parametrize("kind", PROCEDURAL)
def test_every_kind_moves(kind: str) -> None:
    motion = random_motion(kind, np.random.default_rng(11))
    before, after = motion.at(0.0), motion.at(1.0)
    assert 0.4 < np.linalg.norm(np.ptp(before, axis=0)) < 3.0
    assert 0.01 < np.linalg.norm(after - before, axis=1).max() < 4.0
    # Half way lies between: no jump.
    assert np.linalg.norm(motion.at(0.5) - motion.at(0.52), axis=1).max() < 0.2


def test_held_out_models_are_for_validation_only() -> None:
    rng = np.random.default_rng(0)
    plan = PLANS["snake"](rng)
    clip = argparse.Namespace(name="still", duration=1.0, channels=())
    body = build_body(plan, rng)
    models = [AnimatedModel(name, body, plan.rest, (clip,)) for name in (*HELD_OUT_MODELS, "Wolf")]  # type: ignore[arg-type]
    drawn = {True: set(), False: set()}  # type: dict[bool, set[str]]
    for seed in range(300):
        _, model = choose_thing(seed, models)
        if model is not None:
            drawn[seed < 100].add(model.name)
    assert drawn[True] == set(HELD_OUT_MODELS) and drawn[False] == {"Wolf"}


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_writes_resumes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "set"
    assert main(["synthesise", "deformable", str(out), "--count", "3", "--first-seed", "98"]) == 0
    paths = list_pairs(out)
    assert [len(list_pairs(out / split)) for split in ("val", "train")] == [2, 1]
    stamps = {path: path.stat().st_mtime_ns for path in paths}
    paths[0].unlink()
    assert main(["synthesise", "deformable", str(out), "--count", "3", "--first-seed", "98"]) == 0
    assert "1 pairs written" in capsys.readouterr().out
    assert list_pairs(out) == paths and all(path.stat().st_mtime_ns == stamps[path] for path in paths[1:])
    assert load_pair(paths[0]).overlap > 0.1
    assert main(["synthesise", "deformable", str(out), "--count", "0"]) == 2
    assert main(["synthesise", "deformable", str(out), "--models", str(tmp_path / "none")]) == 2
    assert main(["synthesise", "deformable", str(out), "--anime", str(tmp_path)]) == 2


def test_a_folder_without_models_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no usable"):
        load_models(tmp_path)


# --- films ------------------------------------------------------------------------------------------------------------


def test_films_know_where_every_point_was_and_is() -> None:
    film = creature_sequence(5, 6, kind="biped", width=160, noisy=False)
    assert film.depths.shape == (6, 120, 160) and film.stamps[1] == pytest.approx(0.1)
    first = film.cloud(0)
    seen = np.isfinite(first[..., 0])
    assert seen.sum() > 500
    np.testing.assert_allclose(film.at_first[0][seen], first[seen], atol=0.002)
    np.testing.assert_allclose(film.first_now[0][seen], first[seen], atol=0.002)
    for frame in range(6):
        cloud = film.cloud(frame)
        now = film.first_now[frame][seen]
        assert np.isfinite(now).all()
        # What frame 0 saw is mostly still in sight, and lies on the frame's cloud.
        distance, _ = cKDTree(cloud[np.isfinite(cloud[..., 0])]).query(now)
        assert np.median(distance) < 0.012
        # There and back: a point of this frame was, at frame 0, near a point of frame 0 that is now near it.
        here = np.isfinite(cloud[..., 0])
        distance, index = cKDTree(first[seen]).query(film.at_first[frame][here])
        near = distance < 0.01
        back = np.linalg.norm(now[index[near]] - cloud[here][near], axis=1)
        assert near.sum() > 300 and np.median(back) < 0.015


def test_films_move_smoothly_and_repeat() -> None:
    film, again = (creature_sequence(2, 30, kind="quadruped", width=120) for _ in range(2))
    np.testing.assert_array_equal(film.depths, again.depths)
    steps = np.diff(film.first_now, axis=0)
    length = np.linalg.norm(steps, axis=-1)
    assert 0.002 < np.nanmean(length) < 0.06 and np.nanmax(length) < 0.25


def test_clouds_of_a_scene_lie_on_each_other_where_their_truth_says(tmp_path: Path) -> None:
    scene = make_scene("biped", None, np.random.default_rng(4))
    assert scene is not None
    save_scene(tmp_path / "scene_000100.npz", scene)
    scene = load_scene(scene_files([tmp_path])[0])
    network = Lepard(replace(SMALL_DEFORMABLE, width=16, feature_dim=24))
    for pair in CreatureStream([tmp_path], network, lanes=1, clouds=3).batch(0):
        warped = (pair.source.pyramid.points[0] + pair.fine_flow) @ pair.motion[:3, :3].T + pair.motion[:3, 3]
        near = torch.cdist(warped, pair.target.pyramid.points[0]).amin(1) < network.config.grid
        assert near.float().mean() > 0.05
    source, target = scene.pairs[np.argmax(scene.overlap)]
    flow = scene.flows(source)[:, 3 * scene.moment[target] :][:, :3]
    exact = (scene.cloud(source) + flow) @ scene.pose[source, :3, :3].T
    seen = (exact + scene.pose[source, :3, 3] - scene.pose[target, :3, 3]) @ scene.pose[target, :3, :3]
    distance, _ = cKDTree(scene.cloud(target)).query(seen)
    assert np.mean(distance < 0.02) == pytest.approx(scene.overlap.max(), abs=0.1)


def test_a_file_that_is_no_scene_is_refused(tmp_path: Path) -> None:
    (tmp_path / "scene_000001.npz").write_bytes(b"PK not a scene")
    with pytest.raises(InputError, match="make it again"):
        load_scene(tmp_path / "scene_000001.npz")
