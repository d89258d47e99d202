# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Synthetic rooms: the same seed gives the same bytes, the noise is as stated, overlaps and poses are true."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.normals import surface_normals
from lepard_ros.errors import InputError
from lepard_ros.registration.types import Surface
from lepard_ros.synthesis import furniture
from lepard_ros.synthesis.fragments import SINGLE, Fragment, Shot, camera_pose, spread, take
from lepard_ros.synthesis.meshes import MeshLibrary, box, load_library
from lepard_ros.synthesis.real_shards import lone_view_shard, refined_motion
from lepard_ros.synthesis.room_sequences import room_sequence
from lepard_ros.synthesis.rooms import FloorPlan, Room, compose_room
from lepard_ros.synthesis.sensor import (
    DepthSensor,
    Scene,
    distortion_field,
    look,
    observe,
    pinhole,
    random_sensor,
    smooth_noise,
)
from lepard_ros.synthesis.shards import (
    BANDS,
    FIELDS,
    OVERLAP_RADIUS,
    Shard,
    load_room,
    make_room,
    pack,
    room_path,
    rough_overlap,
    save_room,
    synthesise_rooms,
)

SEED = 3


@pytest.fixture(scope="module")
def shard() -> Shard:
    """One room without any mesh file."""
    return make_room(SEED, MeshLibrary())


def perfect(width: int = 64) -> DepthSensor:
    """A sensor with no fault but a fine quantisation."""
    camera = pinhole(width, np.radians(60))
    return DepthSensor(camera, 0.1, 20.0, 1e-6, 0.0, 0.0, np.zeros(6), grazing=0.0, edge=10.0)


def wall_scene(distance: float) -> Scene:
    """A wall across the camera's view at `distance` metres in front of the origin along z."""
    return Scene([box(100, 100, 1, (0, 0, distance))])


def test_same_seed_same_bytes(shard: Shard) -> None:
    again = make_room(SEED, MeshLibrary())
    for name in FIELDS:
        assert getattr(again, name).tobytes() == getattr(shard, name).tobytes()
    assert make_room(SEED + 1, MeshLibrary()).points.tobytes() != shard.points.tobytes()


def test_shard_is_as_documented(shard: Shard) -> None:
    clouds = np.diff(shard.offset)
    assert shard.points.dtype == np.int16
    assert shard.offset[-1] == len(shard.points)
    assert 8 <= len(clouds) <= 18
    assert clouds.min() > 1000
    assert 12 <= len(shard.pairs) <= 40
    assert set(np.unique(shard.kind)) == {0, 1}
    smaller = shard.overlap.min(axis=1)
    assert smaller.min() >= BANDS[0] - 0.02
    assert (smaller < 0.3).any()
    assert (smaller > 0.6).any()


def test_clouds_lie_on_their_grid(shard: Shard) -> None:
    points = shard.cloud(0).astype(np.float64)
    cells = np.floor((points - np.floor(points.min(axis=0) / 0.025) * 0.025) / 0.025 - 1e-3)
    assert len(np.unique(cells, axis=0)) > 0.93 * len(cells)  # rounding to 0.25 mm moves a few over the border


def brute_force_overlap(source: np.ndarray, target: np.ndarray) -> float:
    """The share of source points with a target point within the radius, by all distances."""
    near = [(((target - point) ** 2).sum(axis=1) < OVERLAP_RADIUS**2).any() for point in source]
    return float(np.mean(near))


def test_overlap_agrees_with_brute_force(shard: Shard) -> None:
    for pair in (0, len(shard.pairs) // 2, len(shard.pairs) - 1):
        source, target = shard.pairs[pair]
        motion = shard.transform(source, target)
        moved = shard.cloud(source) @ motion[:3, :3].T + motion[:3, 3]
        picked = np.random.default_rng(0).permutation(len(moved))[:300]
        assert brute_force_overlap(moved[picked], shard.cloud(target)) == pytest.approx(
            shard.overlap[pair, 0], abs=0.07
        )


def test_poses_lay_clouds_on_each_other(shard: Shard) -> None:
    """Where two clouds overlap, true poses leave only the sensor's noise: well below the grid's spacing."""
    from scipy.spatial import cKDTree

    for source, target in shard.pairs[-4:]:
        motion = shard.transform(source, target)
        moved, fixed = shard.cloud(source) @ motion[:3, :3].T + motion[:3, 3], shard.cloud(target)
        distance, index = cKDTree(fixed).query(moved, distance_upper_bound=OVERLAP_RADIUS)
        touching = np.isfinite(distance)
        normals = surface_normals(fixed)[index[touching]]
        off = np.abs(((moved[touching] - fixed[index[touching]]) * normals).sum(axis=1))
        assert np.median(off) < 0.012


def test_overlap_of_two_planes_is_exact() -> None:
    """Two squares of 2 m that share half: the overlap is one half, a row of the radius more."""
    x, y = np.meshgrid(np.arange(0, 2, 0.025), np.arange(0, 2, 0.025))
    corner = np.stack([x.ravel(), y.ravel(), np.where(x < 1.2, 1.0, 0.4 + 0.5 * x).ravel()], axis=1)
    normals = np.random.default_rng(0).normal(size=corner.shape)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    shift = np.eye(4)
    shift[1, 3] = 1.0
    cut = corner[:, 1] >= 1.0
    first = Fragment(corner, normals, np.eye(4), SINGLE)
    second = Fragment(
        np.concatenate([corner[cut], corner[cut] + [0, 1, 0]]) - [0, 1, 0],
        np.concatenate([normals[cut]] * 2),
        shift,
        SINGLE,
    )
    packed = pack([first, second], np.random.default_rng(1))
    assert len(packed.pairs) == 1
    np.testing.assert_allclose(packed.overlap[0], 0.5 + 0.05 / 2, atol=0.03)


def test_spread_of_normals() -> None:
    one_plane = np.tile([0.0, 0, 1], (50, 1))
    assert spread(one_plane) == pytest.approx(0)
    assert spread(np.tile(np.eye(3), (20, 1))) == pytest.approx(1 / 3)


def test_rough_overlap_of_known_cells() -> None:
    points = np.array(
        [[[0.1, 0.1, 0.1], [1.1, 0.1, 0.1]], [[1.1, 0.1, 0.1], [2.1, 0.1, 0.1]], [[9.0, 0, 0], [9.0, 0, 0]]]
    )
    overlap = rough_overlap(points, np.ones((3, 2), bool))
    np.testing.assert_allclose(overlap, np.array([[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]))


# ---------------------------------------------------------------- the sensor


def test_perfect_sensor_measures_the_wall() -> None:
    sensor = perfect()
    view = look(wall_scene(2.0), sensor.camera, np.eye(4))
    depth = observe(np.random.default_rng(0), sensor, view, np.zeros(1))
    seen = depth > 0
    assert seen.mean() > 0.99  # a few pixels are lost at random
    np.testing.assert_allclose(depth[seen], 2.0, atol=1e-4)
    points = depth_to_points(depth, sensor.camera)
    assert np.nanmax(np.abs(points[..., 2] - 2.0)) < 1e-4
    np.testing.assert_allclose(view.normals[..., 2], -1, atol=1e-6)  # towards the camera


def test_rays_agree_with_the_plane_equation() -> None:
    """A turned camera: every hit lies on the wall."""
    pose = camera_pose(np.array([0.3, -0.2, 1.0]), 0.4, -0.2, 0.1)
    scene = Scene([box(1, 100, 100, (3.5, 0, -50))])  # the plane x = 3
    view = look(scene, pinhole(48, np.radians(70)), pose)
    points = depth_to_points(view.depth, pinhole(48, np.radians(70))) @ pose[:3, :3].T + pose[:3, 3]
    np.testing.assert_allclose(points[np.isfinite(view.depth)][:, 0], 3.0, atol=1e-4)


def test_camera_pose_looks_where_it_says() -> None:
    pose = camera_pose(np.zeros(3), np.pi / 2, -0.3, 0.0)
    np.testing.assert_allclose(pose[:3, 2], [0, np.cos(0.3), -np.sin(0.3)], atol=1e-12)  # forward: along y and down
    np.testing.assert_allclose(pose[:3, 0], [1, 0, 0], atol=1e-12)  # right stays level
    assert np.linalg.det(pose[:3, :3]) == pytest.approx(1)


def test_noise_grows_with_range_squared() -> None:
    sensor = replace(perfect(160), step=0.003, noise=0.5)
    rng = np.random.default_rng(0)
    deviation = []
    for distance in (1.0, 2.0, 4.0):
        view = look(wall_scene(distance), sensor.camera, np.eye(4))
        depth = observe(rng, sensor, view, np.zeros(1))
        deviation.append(np.std(depth[depth > 0] - distance))
    # a step of 3 mm at 1 m: rounding adds step / sqrt(12) to the noise of half a step
    assert deviation[0] == pytest.approx(0.003 * np.hypot(0.5, 12**-0.5), rel=0.1)
    assert deviation[1] / deviation[0] == pytest.approx(4, rel=0.15)
    assert deviation[2] / deviation[1] == pytest.approx(4, rel=0.15)


def test_quantisation_step_at_one_metre() -> None:
    sensor = replace(perfect(160), step=0.003, noise=1.0)
    view = look(wall_scene(1.0), sensor.camera, np.eye(4))
    depth = observe(np.random.default_rng(0), sensor, view, np.zeros(1))
    levels = np.unique(depth[depth > 0])
    np.testing.assert_allclose(np.diff(levels[np.abs(levels - 1) < 0.006]), 0.003, rtol=0.05)


def test_smooth_noise_has_unit_variance_and_neighbours_in_common() -> None:
    noise = smooth_noise(np.random.default_rng(0), (300, 400))
    assert noise.std() == pytest.approx(1, abs=0.02)
    assert np.mean(noise[:, 1:] * noise[:, :-1]) == pytest.approx(4 / 6, abs=0.03)


def test_ripples_have_unit_variance_and_are_shared_by_patches() -> None:
    sensor = replace(perfect(160), step=0.003, ripple=1.0)
    view = look(wall_scene(2.0), sensor.camera, np.eye(4))
    off = (observe(np.random.default_rng(0), sensor, view, np.zeros(1)) - 2.0) / (0.003 * 2.0**2)
    off[np.abs(off) > 10] = 0  # lost pixels
    assert off.std() == pytest.approx(1, abs=0.2)
    assert np.mean(off[:, 1:] * off[:, :-1]) > 0.6


def test_edges_grazing_angles_and_dark_things_are_lost() -> None:
    sensor = replace(perfect(160), edge=0.03, grazing=0.3)
    rng = np.random.default_rng(0)
    step = Scene([box(100, 100, 1, (0, 0, 3.0)), box(1, 1, 0.1, (0, 0, 1.5))])
    view = look(step, sensor.camera, np.eye(4))
    lost = observe(rng, sensor, view, np.zeros(2)) == 0
    edge = np.abs(np.diff(view.depth, axis=1)) > 1
    assert lost[:, :-1][edge].mean() > 0.6
    assert lost.mean() < 0.1
    dark = observe(rng, sensor, view, np.array([0.0, 1.0])) == 0
    assert dark[view.mesh == 1].mean() > 0.4
    assert dark[view.mesh == 0].mean() < 0.1
    grazed = look(Scene([box(100, 100, 1, (0, 0, -1.5))]), sensor.camera, camera_pose(np.zeros(3), 0, 0, 0))
    gone = observe(rng, replace(sensor, edge=10), grazed, np.zeros(1)) == 0
    assert gone[np.isfinite(grazed.depth) & (grazed.cosine < 0.14)].all()


def test_distortion_is_one_or_two_percent_and_stays_with_the_sensor() -> None:
    sizes = [np.abs(distortion_field(random_sensor(np.random.default_rng(seed))) - 1).max() for seed in range(40)]
    assert 0.005 < np.median(sizes) < 0.02
    assert max(sizes) < 0.06


def test_fused_fragment_is_calmer_than_a_frame() -> None:
    """Nine frames of a wall fused on the grid are nearer to it than one."""
    room = Room([box(100, 100, 1, (0, 0, 3.0))], np.zeros(1), np.zeros(3), np.ones(3))
    scene, rng = Scene(room.meshes), np.random.default_rng(0)
    sensor = replace(perfect(160), step=0.003, noise=0.6)
    off = {}
    for frames in (1, 9):
        poses = np.tile(np.eye(4), (frames, 1, 1))
        poses[:, 0, 3] = np.linspace(0, 0.3, frames)
        fragment = take(rng, room, scene, sensor, Shot(poses))
        off[frames] = np.std(fragment.points[:, 2] - 3.0)
        assert fragment.kind == (frames > 1)
    assert off[9] < 0.8 * off[1]
    assert off[1] < 0.03


# ---------------------------------------------------------------- rooms and meshes


@pytest.mark.parametrize(
    "maker", dict.fromkeys(furniture.AGAINST_WALL + furniture.IN_THE_MIDDLE + furniture.ON_SURFACES)
)
def test_furniture_has_human_size_and_stands(maker: furniture.Maker) -> None:
    for seed in range(5):
        mesh = maker(np.random.default_rng(seed))
        assert mesh.faces.max() < len(mesh.vertices)
        assert np.isfinite(mesh.vertices).all()
        assert 0.02 < mesh.size.max() < 3.5
        assert mesh.vertices[:, 2].min() > -0.1


def test_floor_plan_refuses_a_taken_place() -> None:
    plan = FloorPlan(np.array([[0, 0], [4, 0], [4, 3], [0, 3.0]]))
    assert plan.try_place(np.array([1.0, 1.0]), np.array([2.0, 1.5]), 0.3)
    assert not plan.try_place(np.array([1.0, 1.0]), np.array([2.4, 1.5]), 0.0)
    assert not plan.try_place(np.array([1.0, 1.0]), np.array([3.8, 1.5]), 0.0)  # it would stand in the wall
    assert plan.try_place(np.array([0.5, 0.5]), np.array([0.5, 0.5]), 0.0)


def test_rooms_hold_the_meshes_of_a_folder(tmp_path: Path) -> None:
    cube = box(0.2, 0.2, 0.2)
    vertices, faces, ends, names = cube.vertices, cube.faces, np.array([[0, 8], [0, 12]]), np.array(["cube"])
    path = tmp_path / "objects.npz"
    np.savez(path, verts=vertices, faces=faces, vert_offset=ends[0], face_offset=ends[1], names=names)
    house = box(8, 8, 2.5)
    np.savez(
        tmp_path / "house.npz",
        v=np.concatenate([house.vertices, [[0, 0, 1e5]]]),
        f=np.concatenate([house.faces, [[0, 1, 8]]]),
    )
    library = load_library(tmp_path)
    assert len(library.clutter) == 1
    assert library.buildings[0].vertices[library.buildings[0].faces].max() < 100
    for seed in range(12):
        room = compose_room(np.random.default_rng(seed), library)
        assert len(room.hole_rate) == len(room.meshes)
        assert (room.low < room.high).all()


def test_mesh_folder_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="mesh file was found"):
        load_library(tmp_path)
    np.savez(tmp_path / "odd.npz", something=np.zeros(3))
    with pytest.raises(InputError, match="holds neither"):
        load_library(tmp_path)


# ---------------------------------------------------------------- files


def test_shard_survives_its_file(shard: Shard, tmp_path: Path) -> None:
    path = room_path(tmp_path, SEED)
    save_room(path, shard)
    read = load_room(path)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(read, name), getattr(shard, name))
    assert [file.name for file in tmp_path.iterdir()] == ["room_000003.npz"]


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 4000), flip=st.integers(0, 4000))
def test_broken_files_are_refused(shard: Shard, tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int) -> None:
    path = tmp_path_factory.mktemp("broken") / "room.npz"
    small = Shard(
        shard.points[:100], np.array([0, 100]), shard.pose[:1], shard.kind[:1], shard.pairs[:0], shard.overlap[:0]
    )
    save_room(path, small)
    data = bytearray(path.read_bytes())
    data[flip % len(data)] ^= 0xFF
    path.write_bytes(bytes(data[: len(data) - 1 - cut % (len(data) - 1)]))
    with pytest.raises(InputError, match="make it again"):
        load_room(path)


def test_arrays_that_do_not_belong_together_are_refused(shard: Shard, tmp_path: Path) -> None:
    path = tmp_path / "room.npz"
    save_room(path, replace(shard, pairs=shard.pairs + 100))
    with pytest.raises(InputError, match="a cloud that is not there"):
        load_room(path)
    save_room(path, replace(shard, kind=shard.kind[1:]))
    with pytest.raises(InputError, match="differ in length"):
        load_room(path)


def test_command_skips_what_is_there(tmp_path: Path, shard: Shard) -> None:
    save_room(room_path(tmp_path, 0), shard)
    before = room_path(tmp_path, 0).stat().st_mtime_ns
    synthesise_rooms(tmp_path, None, range(2))
    assert room_path(tmp_path, 0).stat().st_mtime_ns == before
    assert len(load_room(room_path(tmp_path, 1)).pairs) >= 12


# ---------------------------------------------------------------- sequences and real clouds


def test_sequence_is_a_loop_whose_clouds_agree() -> None:
    sequence = room_sequence(1, frames=12, rate=2.0, width=120)
    assert sequence.depths.shape == (12, 90, 120)
    assert sequence.depths.dtype == np.float32
    np.testing.assert_allclose(np.diff(sequence.stamps), 0.5)
    np.testing.assert_allclose(sequence.poses[0], sequence.poses[-1], atol=1e-9)
    np.testing.assert_allclose(
        sequence.poses[:, :3, :3] @ sequence.poses[:, :3, :3].transpose(0, 2, 1),
        np.eye(3) * np.ones((12, 1, 1)),
        atol=1e-9,
    )
    both = (sequence.depths[0] > 0) & (sequence.depths[-1] > 0)
    assert both.mean() > 0.5
    assert np.median(np.abs(sequence.depths[0] - sequence.depths[-1])[both]) < 0.03
    again = room_sequence(1, frames=12, rate=2.0, width=120)
    np.testing.assert_array_equal(again.depths, sequence.depths)


def test_sequence_refuses_nonsense() -> None:
    with pytest.raises(InputError, match="at least 2 frames"):
        room_sequence(0, frames=1, rate=10)


def test_lone_view_gives_exact_pairs(shard: Shard) -> None:
    largest = int(np.diff(shard.offset).argmax())
    views = lone_view_shard(shard.cloud(largest), np.random.default_rng(0))
    assert len(views.pairs) > 0
    for pair, (source, target) in enumerate(views.pairs[:3]):
        motion = views.transform(source, target)
        moved = views.cloud(source) @ motion[:3, :3].T + motion[:3, 3]
        picked = np.random.default_rng(0).permutation(len(moved))[:300]
        assert brute_force_overlap(moved[picked], views.cloud(target)) == pytest.approx(
            views.overlap[pair, 0], abs=0.07
        )


def test_recorded_poses_are_refined_or_refused(shard: Shard) -> None:
    best = int(shard.overlap.min(axis=1).argmax())
    source, target = (_as_surface(shard.cloud(index)) for index in shard.pairs[best])
    truth = shard.transform(*shard.pairs[best])
    wrong = camera_pose(np.array([0.03, -0.02, 0.02]), 0.02, 0.01, -0.02)
    level = camera_pose(np.zeros(3), 0, 0, 0)
    refined = refined_motion(source, target, truth @ np.linalg.inv(level) @ wrong)
    assert refined is not None
    assert np.linalg.norm(refined[:3, 3] - truth[:3, 3]) < 0.03
    far_off = truth.copy()
    far_off[:3, 3] += 3.0
    assert refined_motion(source, target, far_off) is None


def _as_surface(points: np.ndarray) -> Surface:
    return Surface(points, surface_normals(points), 0.025)
