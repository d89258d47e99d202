# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The shipped rigid weights on clouds of any scale and without a known viewpoint, nothing set by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lepard_ros import Matcher, cli
from lepard_ros.cloud.files import write_cloud
from lepard_ros.cloud.normals import UNKNOWN
from lepard_ros.encoded_cloud import GOOD_POINTS, EncodedCloud, suitable_grid
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import exponential, invert, move
from lepard_ros.matcher import COARSE_CELLS, MatcherSettings, better, coarser_grid
from lepard_ros.registration.rigid.acceptance import AcceptanceSettings, gather_evidence, quality
from lepard_ros.registration.types import NO_MATCHES, Registration, Status, Surface
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import TrackerSettings
from lidar_street import between, pose_at, scan, street

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    return Matcher.from_pretrained("rigid", device="cpu")


def desk(seed: int = 0, count: int = 60_000) -> FloatArray:
    """A floor, a wall and boxes of all sizes and attitudes on a table, (N, 3): 4 m across, seen from the origin."""
    rng = np.random.default_rng(seed)
    faces = [
        plate(rng, count // 6, [4.0, 4.0, 0.0], [0, 0, -1.2]),
        plate(rng, count // 6, [4.0, 0.0, 3.0], [0, 2.0, 0]),
    ]
    for _ in range(24):
        size, place = rng.uniform(0.15, 0.7, 3), rng.uniform([-1.5, -0.5, -1.0], [1.5, 1.8, 0.6])
        turn = exponential(np.concatenate([place, rng.normal(size=3) * 0.6]))
        for axis in range(3):
            extent = np.where(np.arange(3) == axis, 0.0, size)
            for side in (-0.5, 0.5):
                offset = np.where(np.arange(3) == axis, side * size, 0.0)
                faces.append(move(turn, plate(rng, count // 200, extent.tolist(), offset.tolist())))
    return np.concatenate(faces)


def plate(rng: np.random.Generator, count: int, size: list[float], centre: list[float]) -> FloatArray:
    return rng.uniform(-0.5, 0.5, (count, 3)) * size + centre


def seen_from(points: FloatArray, eye: FloatArray) -> FloatArray:
    """The points (N, 3) that nothing hides from a place, by a map of depths of one degree."""
    rays = points - eye
    depth = np.linalg.norm(rays, axis=1)
    azimuth, height = np.arctan2(rays[:, 1], rays[:, 0]), np.arcsin(rays[:, 2] / depth)
    cell = np.round(np.degrees(azimuth)).astype(int) * 1000 + np.round(np.degrees(height)).astype(int)
    _, index = np.unique(cell, return_inverse=True)
    nearest = np.full(index.max() + 1, np.inf)
    np.minimum.at(nearest, index, depth)
    return points[depth < 1.06 * nearest[index]]


@pytest.fixture(scope="module")
def views() -> tuple[FloatArray, FloatArray, FloatArray]:
    """Two views of one desk, each in the frame of its sensor, and the motion (4, 4) from the first to the second."""
    scene, eyes = desk(), [np.array([-1.2, -3.0, 0.8]), np.array([1.0, -2.8, 0.5])]
    poses = [exponential(np.array([*eyes[0], 0.1, 0.2, -0.4])), exponential(np.array([*eyes[1], -0.2, 0.1, 0.5]))]
    first, second = (move(invert(pose), seen_from(scene, eye)) for pose, eye in zip(poses, eyes, strict=True))
    return first, second, invert(poses[1]) @ poses[0]


def assert_near(found: FloatArray | None, truth: FloatArray, scale: float = 1.0) -> None:
    assert found is not None
    assert np.linalg.norm(found[:3, 3] - truth[:3, 3]) < 0.1 * scale
    assert np.abs(found[:3, :3] - truth[:3, :3]).max() < 0.05


@pytest.mark.parametrize("scale", [0.05, 0.3, 1.0, 10.0, 40.0])
def test_any_scale_registers_with_nothing_set(matcher: Matcher, views: tuple[FloatArray, ...], scale: float) -> None:
    source, target, truth = views
    scaled = truth.copy()
    scaled[:3, 3] *= scale
    result = matcher.register(source * scale, target * scale)
    assert_near(result.transform, scaled, scale)
    assert result.covariance is not None
    assert np.sqrt(np.diag(result.covariance)[:3]).max() < 0.1 * scale


def test_the_grid_grows_with_the_clouds(views: tuple[FloatArray, ...]) -> None:
    source, target, _ = views
    grids = [suitable_grid([scale * source, scale * target], 0.05, CPU) / scale for scale in (0.01, 0.1, 10.0, 100.0)]
    np.testing.assert_allclose(grids, grids[0], rtol=0.1)


def test_cells_hold_more_than_one_point_where_points_are_few() -> None:
    few = desk(count=3000)
    grid = suitable_grid([few, desk()], 0.05, CPU)
    cells = len(np.unique(np.floor(few / grid), axis=0))
    assert cells < len(few) / 1.5 < GOOD_POINTS


@pytest.mark.parametrize("both", [False, True])
def test_an_unknown_viewpoint_does_not_hinder(matcher: Matcher, views: tuple[FloatArray, ...], both: bool) -> None:
    source, target, truth = views
    away = exponential(np.array([0.8, -0.9, 0.7, 1.2, -0.4, 0.8]))
    places = [UNKNOWN, UNKNOWN if both else None]
    clouds = matcher.encode_all([move(away, source), target], places)
    assert clouds[0].reverse is not None and (clouds[1].reverse is not None) == both
    assert_near(matcher.register(*clouds).transform, truth @ invert(away))


def test_an_unknown_viewpoint_is_kept_in_a_stored_cloud(matcher: Matcher) -> None:
    cloud = matcher.encode(desk(count=8000), UNKNOWN)
    again = EncodedCloud.from_arrays(cloud.to_arrays())
    assert np.isnan(again.surface.viewpoint).all() and again.reverse is None


def test_free_space_says_nothing_where_no_viewpoint_is_known(matcher: Matcher) -> None:
    clouds = [matcher.encode(desk(count=8000), place) for place in (UNKNOWN, None)]
    rule = AcceptanceSettings()
    for known, cloud in enumerate(clouds):
        evidence = gather_evidence(NO_MATCHES, cloud.surface, cloud.surface, np.eye(4)[None], rule, 500)
        assert np.isnan(evidence.conflict[0]) == (not known)
        assert np.isfinite(quality(evidence)).all()


def test_a_viewpoint_that_is_no_place_is_refused(matcher: Matcher) -> None:
    with pytest.raises(InputError, match="unknown"):
        matcher.encode(desk(count=8000), "somewhere")


def test_effort_is_spent_on_refused_pairs_only(matcher: Matcher, views: tuple[FloatArray, ...]) -> None:
    source, target, _ = views
    assert "further tries" not in matcher.register(source, target).seconds
    other = desk(seed=9)[::2] * [1.0, -1.0, 1.0]
    refused = [matcher.register(source, other, effort=effort) for effort in (0, 1, 2)]
    assert all(result.status is not Status.OK for result in refused)
    assert ["further tries" in result.seconds for result in refused] == [False, True, True]


def tried(quality: float, status: Status = Status.HIGH_RESIDUAL) -> Registration:
    return Registration(None, status, NO_MATCHES, np.zeros(0, dtype=bool), quality=quality)


def test_of_several_tries_the_accepted_or_the_likeliest_one_counts() -> None:
    """The guess of an earlier try must not get lost because a later one is refused, too."""
    first, likelier, none = tried(-3.0), tried(-1.0), tried(float("nan"))
    assert better(better(first, likelier), tried(-2.0)) is likelier
    assert better(first, none) is first and better(none, first) is first
    accepted = tried(0.8, Status.OK)
    assert better(tried(0.9), accepted) is accepted  # a further try needs more, the refused one lacked something else


@pytest.mark.parametrize("far", [0.0, 2000.0], ids=["near the origin", "far from it"])
def test_a_coarser_grid_gives_the_same_motion(matcher: Matcher, views: tuple[FloatArray, ...], far: float) -> None:
    source, target, truth = views
    clouds = matcher.encode_all([source + far, target + far], [np.full(3, far)] * 2)
    found = matcher.try_coarser(*clouds)
    apart = np.eye(4)
    apart[:3, 3] = far
    assert found.transform is not None
    assert_near(invert(apart) @ found.transform @ apart, truth)
    moved = move(found.transform, found.matches.source[found.inliers])
    assert np.median(np.linalg.norm(moved - found.matches.target[found.inliers], axis=1)) < 0.1
    assert len(found.matches.confidence) > matcher.settings.fine_matches  # of both grids


def test_the_second_grid_of_a_pair_is_always_coarser() -> None:
    for cells, factor in ((200, 1.4), (COARSE_CELLS, 1.4), (4 * COARSE_CELLS, 2.0)):
        surfaces = [Surface(np.zeros((n, 3)), np.zeros((n, 3)), 0.05, np.zeros(3)) for n in (cells, 9000)]
        assert coarser_grid(*surfaces) == pytest.approx(0.05 * factor)


def test_a_turned_grid_gives_the_same_motion(matcher: Matcher, views: tuple[FloatArray, ...]) -> None:
    source, target, truth = views
    found = matcher._try_turned(source, target, matcher.suitable_grid([source, target]))
    assert_near(found.transform, truth)
    moved = move(truth, found.matches.source[found.inliers])
    assert np.median(np.linalg.norm(moved - found.matches.target[found.inliers], axis=1)) < 0.1


def test_the_transformer_suggests_motions_of_its_own(views: tuple[FloatArray, ...]) -> None:
    source, target, truth = views
    matcher = Matcher.from_pretrained("rigid", device="cpu", settings=MatcherSettings(repositionings=4))
    clouds = matcher.encode_all([source, target])
    motions = matcher.repositioned_motions(*clouds, matcher.match(*clouds))
    assert motions is not None and 1 <= len(motions) <= 8
    assert np.linalg.norm(motions[:, :3, 3] - truth[:3, 3], axis=1).min() < 0.2


def test_lidar_scans_register_with_nothing_set(matcher: Matcher) -> None:
    here, there = pose_at(0, 0.5, 0), pose_at(12, -1, 60)
    first, second = (scan(street(), pose, seed) for seed, pose in enumerate((here, there)))
    result = matcher.register(first, second)
    assert 0.2 < matcher.suitable_grid([first, second]) < 1.0
    assert_near(result.transform, between(here, there), scale=2.0)
    stranger = scan(street(5), here)
    assert not matcher.register(first, stranger).ok


def test_a_small_object_is_found_on_its_scanned_model(tmp_path: Path) -> None:
    model, away = 0.08 * desk(2), exponential(np.array([0.3, 0.1, 0.6, 0.5, 1.0, -0.3]))  # 32 cm across
    part = move(invert(away), seen_from(model, np.array([-0.05, -0.3, 0.1])))
    write_cloud(tmp_path / "part.ply", part)
    write_cloud(tmp_path / "model.ply", model)
    files = [str(tmp_path / name) for name in ("part.ply", "model.ply", "result.json")]
    assert cli.main(["match", *files[:2], "--viewpoint", "unknown", "--json", files[2]]) == 0
    found = np.array(json.loads(Path(files[2]).read_text())["transform"])
    assert_near(found, away, scale=0.1)


@pytest.mark.parametrize("words", [["here"], ["1,2"], ["1,2,nan"], ["origin", "origin", "origin"]])
def test_match_refuses_a_viewpoint_that_is_no_place(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["match", "a.ply", "b.ply", "--viewpoint", *words]) == 2
    assert "--viewpoint" in capsys.readouterr().err


def test_a_tracker_follows_a_lidar_with_the_preset(matcher: Matcher) -> None:
    preset = yaml.safe_load((Path(__file__).parent.parent / "config" / "lidar.yaml").read_text())
    values = preset["/**"]["ros__parameters"]
    names = ("keyframe_distance", "keyframe_degrees", "max_speed", "candidates")
    tracker = RigidTracker(matcher, TrackerSettings(**{name: values[name] for name in names}))
    boxes, poses = street(1), [pose_at(3.0 * k, 0.1 * k, 4.0 * k) for k in range(5)]
    tracks = [tracker.process(scan(boxes, pose, k), 0.3 * k) for k, pose in enumerate(poses)]
    grids = {frame.view.cloud.surface.spacing for frame in tracker.keyframes if frame.view.cloud is not None}
    assert len(tracker.keyframes) >= 2 and len(grids) == 1 and 0.2 < grids.pop() < 1.0
    for track, pose in zip(tracks, poses, strict=True):
        assert_near(track.pose, invert(poses[0]) @ pose, scale=2.0)


def test_a_map_keeps_the_networks_grid_in_a_room(matcher: Matcher, views: tuple[FloatArray, ...]) -> None:
    assert matcher.tracking_grid(views[0]) == matcher.config.grid
    near = views[0][np.linalg.norm(views[0] - views[0].mean(0), axis=1) < 0.5]  # the same place through a keyhole
    assert matcher.tracking_grid(near) == matcher.config.grid
    assert matcher.tracking_grid(0.05 * views[0]) < 0.01
