# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard replay` from the bag to the files, and the error of a trajectory against closed forms."""

import csv
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from box_room import CAMERA, look, render, sweep
from browser import assert_sound
from lepard_ros import cli
from lepard_ros.data.bag_writer import BagWriter
from lepard_ros.data.trajectories import Trajectory, compare, interpolate, read_tum, write_tum
from lepard_ros.errors import InputError

pytest.importorskip("rosbags")
pytest.importorskip("evo")
COUNT = 7


@pytest.fixture(scope="module")
def bag(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "room"
    with closing(BagWriter(path, CAMERA)) as writer:
        for i, pose in enumerate(sweep(COUNT, -15, 25)):
            writer.write(10**9 + i * 10**8, render(pose, i), pose)
    return path


@pytest.fixture(scope="module")
def output(bag: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    arguments = ["replay", str(bag), "--weights", "fpfh", "--output", str(folder), "--report", str(folder / "page")]
    assert cli.main(arguments) == 0
    return folder


def test_the_trajectory_is_near_the_truth(output: Path) -> None:
    estimate, truth = read_tum(output / "trajectory.tum"), read_tum(output / "truth.tum")
    assert len(estimate) == COUNT
    assert compare(estimate, truth).ate_rmse < 0.03


def test_every_frame_has_a_line_of_status(output: Path) -> None:
    with (output / "status.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == COUNT and {row["state"] for row in rows} == {"OK"}
    assert float(rows[1]["overlap"]) > 0.4 and int(rows[1]["inliers"]) <= int(rows[1]["matches"])
    assert rows[1]["stamp"] == "1.100000000"


def test_pictures_map_and_summary_are_there(output: Path) -> None:
    for name in ("path.png", "frames.png", "map.png", "pair_0.png", "map.ply"):
        assert (output / name).stat().st_size > 1000, name
    text = (output / "summary.txt").read_text()
    assert "ATE RMSE" in text and "100.0 % with a pose" in text and "false poses   0" in text


def test_the_page_of_a_replay_stands_alone(output: Path, tmp_path: Path) -> None:
    page = (output / "page" / "index.html").read_text()
    assert page.count("<img") >= 4 and 'src="data:image/png;base64,' in page and 'src="/' not in page
    for words in ("ATE RMSE", "100.0 % with a pose", "<td>track</td>", "Error, agreement and state"):
        assert words in page
    assert_sound(output / "page" / "index.html", tmp_path, images=4, rows=5)


@pytest.mark.parametrize("kind", ["file", "tf"])
def test_the_truth_may_be_a_file_or_tf(bag: Path, output: Path, tmp_path: Path, kind: str, capsys) -> None:
    """A bag without TF says so; a file in TUM format is read instead of the bag's topic."""
    shifted = read_tum(output / "truth.tum")
    shifted.poses[:, 0, 3] *= 1.5
    write_tum(tmp_path / "shifted.tum", shifted)
    truth = str(tmp_path / "shifted.tum") if kind == "file" else "TF"
    arguments = ["evaluate", "bag", str(bag), "--weights", "fpfh", "--no-pictures", "--output", str(tmp_path / "out")]
    assert cli.main([*arguments, "--truth", truth]) == (0 if kind == "file" else 2)
    if kind == "file":
        written = read_tum(tmp_path / "out" / "truth.tum")
        assert np.allclose(written.poses, shifted.poses, atol=1e-6)
    else:
        assert "no moving transform above 'camera_depth_optical_frame'" in capsys.readouterr().err


def test_a_replay_repeats_itself_exactly(bag: Path, output: Path, tmp_path: Path) -> None:
    arguments = ["replay", str(bag), "--weights", "fpfh", "--no-pictures", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert (tmp_path / "trajectory.tum").read_text() == (output / "trajectory.tum").read_text()
    assert not (tmp_path / "path.png").exists()


def test_bad_calls_end_with_a_sentence_and_code_two(
    bag: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", "/nonexistent/bag"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert cli.main(["replay", str(bag), "--truth", "/nope", "--weights", "fpfh"]) == 2
    words = capsys.readouterr()
    assert "no poses on /nope" in words.err and "frame/s" not in words.err  # before the work, not after it
    (tmp_path / "file").touch()
    assert cli.main(["replay", str(bag), "--weights", "fpfh", "--output", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert cli.main(["replay", str(bag), "--min-range", "9", "--weights", "fpfh"]) == 2
    assert "must be less than --max-range" in capsys.readouterr().err
    assert cli.main(["replay", str(bag), "--every", "0", "--weights", "fpfh"]) == 2
    assert cli.main(["replay", str(bag), "--topic", "/nope", "--weights", "fpfh"]) == 2
    assert "/camera/depth/points" in capsys.readouterr().err


def test_doubled_and_overtaken_frames_are_left_out_as_the_node_does(tmp_path: Path) -> None:
    from lepard_ros.data.bag_reader import open_bag
    from lepard_ros.evaluation.replay import load_matcher, replay_bag, summary
    from lepard_ros.tracking.rigid import RigidTracker

    with closing(BagWriter(tmp_path / "bag", CAMERA)) as writer:
        for i in (0, 1, 1, 3, 2):
            writer.write(10**9 + i * 10**8, render(sweep(COUNT, -15, 25)[i], i))
    tracker = RigidTracker(load_matcher("fpfh"))
    with open_bag(tmp_path / "bag") as bag:
        replay = replay_bag(bag, tracker, bag.cloud_topic())
    assert len(replay.tracks) + replay.left_out == 5 and len(tracker.path()[0]) == len(replay.tracks)
    assert replay.left_out == 1 and "rejected      1" in summary(replay, tracker)


def test_bag_info_lists_topics(bag: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bag", "info", str(bag)]) == 0
    assert f"sensor_msgs/msg/PointCloud2  {COUNT} messages" in capsys.readouterr().out


def noisy(poses: np.ndarray, sigma: float, seed: int = 0) -> np.ndarray:
    moved = poses.copy()
    moved[:, :3, 3] += np.random.default_rng(seed).normal(0, sigma, (len(poses), 3))
    return moved


def test_error_is_zero_for_the_same_path_in_another_frame() -> None:
    stamps, poses = np.arange(30) * 0.1, np.array(sweep(30))
    shifted = look(3.0, -2.0, 77.0) @ poses
    error = compare(Trajectory(stamps, shifted), Trajectory(stamps, poses))
    assert error.ate_rmse < 1e-9 and error.rpe_translation < 1e-9
    assert np.allclose(error.alignment @ shifted, poses)


def test_error_of_noise_is_the_noise() -> None:
    stamps, poses = np.arange(400) * 0.1, np.array(sweep(400))
    error = compare(Trajectory(stamps, noisy(poses, 0.02)), Trajectory(stamps, poses))
    assert abs(error.ate_rmse - 0.02 * np.sqrt(3)) < 0.002
    assert abs(error.rpe_translation - 0.02 * np.sqrt(6)) < 0.003


def test_a_pose_that_is_turned_away_is_false_though_its_position_is_right() -> None:
    stamps, poses = np.arange(30) * 0.1, np.array(sweep(30))
    wrong = poses.copy()
    wrong[12] = wrong[12] @ look(0.0, 0.0, 20.0, 0.0)
    error = compare(Trajectory(stamps, look(3.0, -2.0, 77.0) @ wrong), Trajectory(stamps, poses))
    assert error.errors.max() < 1e-9 and list(np.flatnonzero(error.false())) == [12]
    assert 18 < error.turns[12] < 20 and error.turns[:12].max() < 1.5


def test_a_straight_path_does_not_make_rotations_false() -> None:
    stamps, poses = np.arange(20) * 0.1, np.tile(np.eye(4), (20, 1, 1))
    poses[:, 0, 3] = np.arange(20) * 0.1
    error = compare(Trajectory(stamps, noisy(poses, 0.005)), Trajectory(stamps, poses))
    assert error.turns.max() < 1e-4 and not error.false().any()


def test_only_common_times_are_compared_and_none_is_refused() -> None:
    stamps, poses = np.arange(20) * 0.1, np.array(sweep(20))
    error = compare(Trajectory(stamps[::3] + 0.004, poses[::3]), Trajectory(stamps, poses))
    assert len(error.stamps) == 7
    with pytest.raises(InputError):
        compare(Trajectory(stamps + 1000, poses), Trajectory(stamps, poses))


def test_tum_files_round_trip_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.tum"
    stamps, poses = 1305031453.374112 + np.arange(5) * 0.1, np.array(sweep(5))
    write_tum(path, Trajectory(stamps, poses))
    again = read_tum(path)
    assert np.allclose(again.stamps, stamps, atol=1e-6) and np.allclose(again.poses, poses, atol=1e-6)
    for text in ("1 2 3\n", "", "a b c d e f g h\n", "0 0 0 0 0 0 0 0\n", "0 nan 0 0 0 0 0 1\n"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"a\.tum"):
            read_tum(path)


def test_poses_between_stamps_are_interpolated_but_not_over_gaps() -> None:
    a, b = look(0, 0, 0, 0), look(1, 0, 40, 0)
    path = Trajectory(np.array([0.0, 0.4]), np.array([a, b]))
    middle = interpolate(path, 0.2)
    assert middle is not None and np.allclose(middle, look(0.5, 0, 20, 0), atol=1e-9)
    assert interpolate(path, 0.2, longest_gap=0.1) is None
    assert interpolate(path, 0.5) is None
    exact = interpolate(path, 0.4)
    assert exact is not None and np.allclose(exact, b)
