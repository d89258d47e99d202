# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The rigid tracker on a rendered room, with classical features in the network's place."""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from box_room import CAMERA, look, render, sweep
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.files import write_cloud
from lepard_ros.errors import InputError
from lepard_ros.evaluation.fpfh_matcher import FpfhMatcher
from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.registration.rigid.acceptance import contact_between
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.types import NO_MATCHES, Registration, Status, Surface
from lepard_ros.tracking.pose_candidates import PoseCandidate
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.prior import align_from_guesses, more_likely
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState

MATCHER = FpfhMatcher(0.06)
SHORT = 10


def cloud_at(pose: np.ndarray, seed: int = 0) -> np.ndarray:
    return depth_to_points(render(pose, seed), CAMERA)


def errors(tracks: list[Track], poses: list[np.ndarray], origin: np.ndarray) -> np.ndarray:
    """Metres and degrees between tracks with a pose and the truth; the map's origin is the pose `origin`."""
    pairs = [(track.pose, invert(origin) @ pose) for track, pose in zip(tracks, poses, strict=True)]
    return np.array([motion_between(*pair) for pair in pairs if pair[0] is not None])


@cache
def walked() -> tuple[RigidTracker, list[Track]]:
    """A tracker that has seen a short walk; tests that change a tracker make their own."""
    tracker = RigidTracker(MATCHER, TrackerSettings(keyframe_degrees=12.0))
    return tracker, [tracker.process(cloud_at(pose, i), 0.1 * i) for i, pose in enumerate(sweep(SHORT))]


@cache
def saved_map() -> Path:
    """The walk's map, saved."""
    import tempfile

    directory = Path(tempfile.mkdtemp()) / "map"
    walked()[0].save(directory)
    return directory


def test_a_walk_is_tracked_to_the_centimetre() -> None:
    tracker, tracks = walked()
    assert [track.state for track in tracks] == [TrackingState.OK] * SHORT
    measured = errors(tracks, sweep(SHORT), sweep(SHORT)[0])
    assert measured[:, 0].max() < 0.03 and measured[:, 1].max() < 1.0
    assert 3 <= len(tracker.keyframes) <= SHORT
    assert sum(track.new_keyframe for track in tracks) == len(tracker.keyframes)


def test_a_view_that_the_map_has_is_not_kept_again_unless_it_closes_a_loop() -> None:
    """A cloud registered to a keyframe far away, at a pose from which another keyframe already looks."""
    built = walked()[0]
    frames = list(built.keyframes)
    far, here = frames[0], frames[-1]
    motion = invert(far.pose) @ here.pose
    registration = replace(walked()[1][-1].registration, transform=motion, overlap=0.3)
    links = built._map.graph.edges
    assert motion_between(np.eye(4), motion)[1] > built.settings.keyframe_degrees
    try:
        built._map.graph.edges = [Edge(here.id, far.id, motion, np.eye(6))]
        assert not built._needs_keyframe(here.view, PoseCandidate(far, registration))
        built._map.graph.edges = []
        assert built._needs_keyframe(here.view, PoseCandidate(far, registration))
    finally:
        built._map.graph.edges = links


def test_a_track_explains_itself() -> None:
    _, tracks = walked()
    assert tracks[0].reason == "the map starts here" and tracks[0].registration is None
    last = tracks[-1]
    assert last.registration is not None and last.registration.transform is not None
    assert last.keyframe_pose is not None and last.pose is not None
    assert last.registration.method == "motion" and last.reason.endswith("(motion)")
    assert np.linalg.eigvalsh(last.covariance).min() > 0
    assert set(last.seconds) >= {"see", "track"}


def test_covariance_grows_away_from_the_origin() -> None:
    _, tracks = walked()
    assert not tracks[0].covariance.any()
    assert np.trace(tracks[-1].covariance) > np.trace(tracks[1].covariance) > 0


def test_path_and_map_lie_on_the_room() -> None:
    tracker, tracks = walked()
    stamps, poses = tracker.path()
    assert np.allclose(stamps, [track.stamp for track in tracks])
    assert (
        errors([Track(0.0, TrackingState.OK, "", pose=p) for p in poses], sweep(SHORT), sweep(SHORT)[0])[:, 0].max()
        < 0.03
    )
    points = tracker.map_points(0.05)
    truth = np.concatenate([move(invert(sweep(SHORT)[0]) @ p, cloud_at(p, None).reshape(-1, 3)) for p in sweep(SHORT)])
    from scipy.spatial import cKDTree

    distance, _ = cKDTree(truth[np.isfinite(truth).all(1)]).query(points)
    assert np.median(distance) < 0.02 and len(points) > 2000


def test_the_same_clouds_give_the_same_poses_flat_or_organised() -> None:
    _, tracks = walked()
    tracker = RigidTracker(MATCHER, TrackerSettings(keyframe_degrees=12.0))
    for i, pose in enumerate(sweep(SHORT)[:4]):
        flat = cloud_at(pose, i).reshape(-1, 3)
        again = tracker.process(flat, 0.1 * i)
        assert np.array_equal(again.pose, tracks[i].pose)


def test_blind_frames_have_no_pose_and_the_track_comes_back() -> None:
    tracker = RigidTracker(MATCHER)
    poses = sweep(SHORT)
    tracker.process(cloud_at(poses[0]), 0.0)
    blind = tracker.process(np.full((120, 160, 3), np.nan, np.float32), 0.1)
    assert blind.state is TrackingState.LOST and blind.pose is None and "0 points" in blind.reason
    back = tracker.process(cloud_at(poses[1], 1), 0.2)
    assert back.state is TrackingState.RELOCALISED
    assert errors([back], [poses[1]], poses[0])[0, 0] < 0.03
    assert tracker.process(cloud_at(poses[2], 2), 0.3).state is TrackingState.OK


def test_a_bare_wall_is_not_taken_for_a_place() -> None:
    tracker = RigidTracker(MATCHER)
    for i, pose in enumerate(sweep(SHORT)[:2]):
        tracker.process(cloud_at(pose, i), 0.05 * i)
    side = np.linspace(-1, 1, 80)
    wall = np.stack(np.broadcast_arrays(side[None], side[:, None], np.float64(1.5)), axis=-1)
    track = tracker.process(wall, 0.1)
    assert track.state is TrackingState.LOST and track.pose is None and track.covariance is None
    assert track.registration is None or track.registration.transform is None


def test_a_map_of_one_cloud_that_is_never_seen_again_is_given_up() -> None:
    tracker = RigidTracker(MATCHER)
    tracker.process(cloud_at(look(0, -0.5, 0)), 0.0)
    behind = [look(0.02 * i, 1.0, 180.0 + i) for i in range(2)]
    elsewhere = tracker.process(cloud_at(behind[0], 1), 5.0)
    assert elsewhere.state is TrackingState.INITIALISING and elsewhere.pose is None and "restarts" in elsewhere.reason
    found = tracker.process(cloud_at(behind[1], 2), 5.1)
    assert found.state is TrackingState.OK
    assert errors([found], [behind[1]], behind[0])[0, 0] < 0.03


def test_a_cloud_of_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(InputError, match="shape"):
        RigidTracker(MATCHER).process(np.zeros((5, 4)), 0.0)


def test_an_empty_first_cloud_does_not_start_a_map() -> None:
    tracker = RigidTracker(MATCHER)
    track = tracker.process(np.zeros((0, 3)), 0.0)
    assert track.state is TrackingState.INITIALISING and track.pose is None and len(tracker.keyframes) == 0


def test_reset_forgets_everything() -> None:
    tracker = RigidTracker(MATCHER)
    tracker.process(cloud_at(sweep(SHORT)[0]), 0.0)
    tracker.reset()
    assert len(tracker.keyframes) == 0 and len(tracker.path()[0]) == 0
    again = tracker.process(cloud_at(sweep(SHORT)[5]), 5.0)
    assert np.array_equal(again.pose, np.eye(4)) and again.keyframe_id == 0


@pytest.mark.parametrize(("name", "value"), [("fallback", "magic"), ("candidates", 0), ("max_speed", -1.0)])
def test_senseless_settings_are_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        TrackerSettings(**{name: value})


def test_a_kidnapped_sensor_is_found_in_a_saved_map_within_three_clouds() -> None:
    tracker = RigidTracker.load(saved_map(), MATCHER, TrackerSettings(mapping=False))
    keyframes = len(tracker.keyframes)
    places = [sweep(SHORT)[6] @ look(0.02 * i, 0.0, i, 0.0) for i in range(4)]
    tracks = [tracker.process(cloud_at(pose, 50 + i), 100 + 0.1 * i) for i, pose in enumerate(places)]
    found = [track.state for track in tracks].index(TrackingState.RELOCALISED)
    assert found < 3
    assert all(track.pose is None for track in tracks[:found])
    assert tracks[-1].state is TrackingState.OK
    assert errors(tracks, places, sweep(SHORT)[0])[:, 0].max() < 0.05
    assert len(tracker.keyframes) == keyframes


def test_a_saved_map_comes_back_as_it_was() -> None:
    tracker, _ = walked()
    loaded = RigidTracker.load(saved_map(), MATCHER)
    assert np.allclose(loaded.keyframes.poses(), tracker.keyframes.poses())
    assert [frame.id for frame in loaded.keyframes] == [frame.id for frame in tracker.keyframes]
    first, second = next(iter(loaded.keyframes)).surface, next(iter(tracker.keyframes)).surface
    assert abs(len(first.points) - len(second.points)) < 0.02 * len(second.points)  # gridded once more


def test_saving_replaces_a_map_and_nothing_else(tmp_path: Path) -> None:
    tracker, _ = walked()
    tracker.save(tmp_path / "map")
    (tmp_path / "map" / "stale").write_text("x")
    tracker.save(tmp_path / "map")
    assert not (tmp_path / "map" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["map"]
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="is not a map"):
        tracker.save(tmp_path / "other")


def damage_bytes(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("byte", "checksum"), ("missing", "not a complete map"), ("json", "not a complete map"), ("outside", "outside"),
     ("empty", "missing"), ("version", "version")],
)  # fmt: skip
def test_a_damaged_map_is_refused(tmp_path: Path, what: str, sentence: str) -> None:
    directory = tmp_path / "map"
    shutil.copytree(saved_map(), directory)
    keyframe = next(directory.glob("keyframe_*.npz"))
    manifest = json.loads((directory / "map.json").read_text())
    if what == "byte":
        damage_bytes(keyframe)
    elif what == "missing":
        keyframe.unlink()
    elif what == "json":
        (directory / "map.json").write_text((directory / "map.json").read_text()[:200])
    else:
        changes = {"outside": ("file", "../evil.npz"), "empty": None, "version": None}
        if what == "outside":
            manifest["keyframes"][0].update([changes["outside"]])
        manifest |= {"empty": {"keyframes": []}, "version": {"version": 99}}.get(what, {})
        (directory / "map.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=sentence):
        RigidTracker.load(directory, MATCHER)


def test_a_map_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no map"):
        RigidTracker.load(tmp_path / "nothing", MATCHER)


def test_a_plain_cloud_is_a_map_too(tmp_path: Path) -> None:
    views = [look(x, -0.5, yaw) for x in (-0.8, 0.8) for yaw in (-40, 0, 40)]
    points = [move(pose, cloud_at(pose, None).reshape(-1, 3)) for pose in views]
    room = np.concatenate([p[np.isfinite(p).all(1)] for p in points])
    write_cloud(tmp_path / "room.ply", room)
    tracker = RigidTracker.load(tmp_path / "room.ply", MATCHER, TrackerSettings(mapping=False))
    places = [look(0.1 + 0.02 * i, -0.4, 5.0 + i) for i in range(4)]
    tracks = [tracker.process(cloud_at(pose, i), 0.1 * i) for i, pose in enumerate(places)]
    assert tracks[-1].pose is not None
    assert errors(tracks, places, np.eye(4))[:, 0].max() < 0.08


@pytest.mark.parametrize("shift", [0.0, 0.05, 0.12])
def test_a_guess_is_pulled_to_the_truth(shift: float) -> None:
    first, second = look(0, -0.5, 0), look(0.1, -0.45, 6)
    source, target = (MATCHER.encode(cloud_at(pose, 3)).surface for pose in (second, first))
    truth = invert(first) @ second
    guess = truth.copy()
    guess[:3, 3] += [shift, -shift / 2, shift]
    found = align_from_guesses(source, target, guess[None], NO_MATCHES, RigidSettings())
    assert found.ok and found.method == "motion" and found.transform is not None
    distance, turn = motion_between(truth, found.transform)
    assert distance < 0.02 and turn < 0.5


def cabinet(seed: int) -> Surface:
    """A cabinet in the middle of a floor, as a noisy sensor sees it; from above, so that four faces are visible."""
    rng, spacing = np.random.default_rng(seed), 0.03
    span = np.arange(-2.0, 2.0, spacing)
    floor = np.stack([*(axis.ravel() for axis in np.meshgrid(span, span)), np.zeros(len(span) ** 2)], axis=1)
    floor = floor[(np.abs(floor[:, 0]) > 0.4) | (np.abs(floor[:, 1]) > 0.25)]
    faces = [(floor, np.array([0.0, 0, 1]))]
    for axis, reach, side in ((0, 0.4, 0.25), (1, 0.25, 0.4)):
        across, up = (grid.ravel() for grid in np.meshgrid(np.arange(-side, side, spacing), np.arange(0, 0.7, spacing)))
        for sign in (-1.0, 1.0):
            points, normal = np.zeros((len(up), 3)), np.zeros(3)
            points[:, axis], points[:, 1 - axis], points[:, 2], normal[axis] = sign * reach, across, up, sign
            faces.append((points, normal))
    points = np.concatenate([face for face, _ in faces])
    normals = np.concatenate([np.tile(normal, (len(face), 1)) for face, normal in faces])
    points, normals = points + rng.normal(0, 0.004, points.shape), normals + rng.normal(0, 0.12, normals.shape)
    normals /= np.linalg.norm(normals, axis=1, keepdims=True)
    return Surface(points, normals, spacing, np.array([0.0, 0.0, 3.0]))


def turned(degrees: float) -> np.ndarray:
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("z", degrees, degrees=True).as_matrix()
    return pose


def accepted(source: Surface, target: Surface, motion: np.ndarray) -> Registration:
    """An accepted motion, with the overlap that it has."""
    overlap = float(contact_between(source, target, motion[None], 4000).lying(target.spacing).mean())
    return Registration(motion, Status.OK, NO_MATCHES, np.zeros(0, dtype=bool), overlap=overlap)


def test_a_floor_that_overlaps_does_not_decide_between_two_motions() -> None:
    source, target = cabinet(0), cabinet(1)
    expected, matched = (accepted(source, target, turned(degrees)) for degrees in (6.0, 0.0))
    assert expected.overlap > matched.overlap - 0.1
    assert more_likely(source, target, expected, matched, RigidSettings()) is matched
    assert more_likely(source, target, matched, expected, RigidSettings()) is matched, "whichever of them is predicted"


def test_the_noise_of_a_floor_does_not_hold_an_alignment_back() -> None:
    found = align_from_guesses(cabinet(0), cabinet(1), turned(12.0)[None], NO_MATCHES, RigidSettings())
    assert found.transform is not None and motion_between(np.eye(4), found.transform)[1] < 0.5


def test_a_guess_far_off_is_refused() -> None:
    first, second = look(0, -0.5, 0), look(0.1, -0.45, 6)
    source, target = (MATCHER.encode(cloud_at(pose, 3)).surface for pose in (second, first))
    guess = look(1.5, 0.3, 70) @ invert(first) @ second
    found = align_from_guesses(source, target, guess[None], NO_MATCHES, RigidSettings())
    assert found.status is not Status.OK and found.transform is None and found.covariance is None
