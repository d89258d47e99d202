# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The demonstration: its figures against made-up words of a node, and once for real."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from browser import assert_sound
from lepard_ros.cloud.depth import Camera
from lepard_ros.demo.pictures import pixels
from lepard_ros.demo.rigid import measure, table_rows, write_report
from lepard_ros.demo.story import FrameNote, MatchNote, NodeRun, Recorded, RigidRun, Story, make_story, write_bag
from lepard_ros.ros.conversion import stamp_to_ns

CAMERA = Camera(32, 24, 30.0, 30.0, 15.5, 11.5)


def made_up_story() -> Story:
    """20 frames on a circle, 4 with a covered lens, 6 at the other side."""
    angles = np.concatenate([np.linspace(0, 6.2, 20), np.zeros(4), np.linspace(3, 3.5, 6)])
    poses = np.tile(np.eye(4), (30, 1, 1))
    poses[:, 0, 3], poses[:, 1, 3] = np.cos(angles), np.sin(angles)
    covered = np.zeros(30, bool)
    covered[20:24] = True
    depths = np.full((30, 24, 32), 2.0, np.float32)
    stamps = [10**12 + index * 200_000_000 for index in range(30)]
    return Story(CAMERA, stamps, depths, poses, covered, np.arange(30) >= 24)


def made_up_run(offset: float = 0.0, lost: tuple[int, ...] = (24, 25)) -> RigidRun:
    """A node that publishes the truth, moved by `offset` metres in its last frame, and nothing while it is lost."""
    story, recorded = made_up_story(), Recorded()
    start = np.linalg.inv(story.poses[0])
    for index, stamp in enumerate(story.stamps_ns):
        silent = story.covered[index] or index in lost
        state = "LOST" if silent else "RELOCALISED" if index == 26 else "OK"
        recorded.frames.append(FrameNote(stamp, state, "", "lepard", 20, 15, 3, False, False, {"encode": 0.1}, 0))
        if not silent:
            pose = start @ story.poses[index]
            pose[0, 3] += offset * (index == 29)
            recorded.tf.setdefault(("map", "camera"), {})[stamp] = pose
    points = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32) * 0.2 + np.array([0, 0, 2], np.float32)
    recorded.matches.append(MatchNote(story.stamps_ns[5], story.stamps_ns[0], points, points, np.arange(20) < 15))
    recorded.map_points = np.random.default_rng(1).normal(size=(500, 3)).astype(np.float32)
    return RigidRun(story, recorded, "camera", NodeRun(10.0, 3.0, 0), "rigid")


def test_the_figures_of_a_perfect_node() -> None:
    figures = measure(made_up_run())
    assert (figures.tracked, figures.seen) == (24, 26)
    assert figures.silent_when_covered == 4
    assert figures.frames_until_found == 3
    assert figures.false_poses == 0
    assert figures.error is not None
    assert figures.error.ate_rmse < 1e-6


def test_a_false_pose_is_counted() -> None:
    assert measure(made_up_run(offset=2.0)).false_poses == 1


def test_a_node_that_says_nothing_still_gives_a_page(tmp_path: Path) -> None:
    run = made_up_run(lost=tuple(range(30)))
    words = write_report(run, measure(run), tmp_path, 1.0)
    assert "not found again" in words
    assert (tmp_path / "report.html").is_file()


def test_the_page_stands_alone_and_names_every_picture(tmp_path: Path) -> None:
    run = made_up_run()
    words = write_report(run, measure(run), tmp_path, 12.0)
    page = (tmp_path / "report.html").read_text()
    for name in ("storyboard", "path", "error", "matches"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert str(tmp_path / f"{name}.png") in words
    assert page.count("data:image/png;base64,") == 4
    assert_sound(tmp_path / "report.html", tmp_path, images=4, rows=5)
    assert "://" not in page
    assert "24 of 26 clouds" in page


def test_the_table_holds_the_effort() -> None:
    run = made_up_run()
    rows = dict(table_rows(run, measure(run)))
    assert rows["clouds answered / dropped"] == "30 / 0"
    assert "0.10 s of processor time" in rows["node, each cloud"]
    assert rows["sensor's rate / poses"] == "5.0 / 4.6 a second"


def test_points_project_to_their_pixels() -> None:
    rays = CAMERA.rays().reshape(-1, 3) * 2.0
    rows, columns = np.divmod(np.arange(24 * 32), 32)
    np.testing.assert_allclose(pixels(rays, CAMERA), np.stack([columns, rows], axis=1), atol=1e-4)


def test_the_story_covers_the_lens_and_shows_no_image_twice() -> None:
    story = make_story(seed=3, frames=20)
    seen = story.depths[~story.covered]
    assert len({depth.tobytes() for depth in seen}) == len(seen)
    assert np.diff(story.stamps_ns).min() > 0
    assert (story.depths[story.covered] < 0.3).all()
    jump = np.linalg.norm(story.poses[story.moved][0, :3, 3] - story.poses[~story.moved][-1, :3, 3])
    assert jump > 0.3, "after the covered lens the camera must be somewhere else"


@pytest.mark.slow
def test_the_demonstration_for_real(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The shipped rigid weights through the node: tracked, silent with a covered lens, found again, no false pose."""
    pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
    from lepard_ros.cli import main

    code = main(["demo", "--output", str(tmp_path), "--frames", "20", "--pace", "wait"])
    words, complaints = capfd.readouterr()
    assert code == 0, complaints[-2000:] + (tmp_path / "node.log").read_text()
    assert re.search(r"clouds answered / dropped +36 / 0", words)
    assert "4 of 4 clouds" in words
    assert (tmp_path / "report.html").is_file()


def test_a_first_cloud_that_gets_lost_is_sent_again(tmp_path: Path) -> None:
    """A subscription that DDS connects late misses the first cloud; the sensor must not wait for its status."""
    pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
    from lepard_ros.msg import TrackingStatus
    from sensor_msgs.msg import PointCloud2

    from lepard_ros.demo.processes import player_process
    from node_harness import Probe

    story = made_up_story()
    stamps = story.stamps_ns[:3]
    write_bag(replace(story, stamps_ns=stamps, depths=story.depths[:3], poses=story.poses[:3]), tmp_path / "bag")
    arrived: list[int] = []
    with Probe() as probe:
        answers = probe.node.create_publisher(TrackingStatus, "/lepard/status", 10)

        def on_cloud(cloud: PointCloud2) -> None:
            arrived.append(stamp_to_ns(cloud.header.stamp))
            if len(arrived) > 1:
                answers.publish(TrackingStatus(header=cloud.header))

        probe.node.create_subscription(PointCloud2, "/points", on_cloud, 10)
        sensor = player_process(tmp_path / "bag")
        probe.until(lambda: sensor.poll() is not None, 40.0)
    assert sensor.returncode == 0
    assert arrived == [stamps[0], *stamps]
