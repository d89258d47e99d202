# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard map`: two sessions in one room become one map; maps that share nothing are refused."""

from pathlib import Path

import numpy as np
import pytest

from box_room import CAMERA, look, render
from lepard_ros import cli
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.files import read_cloud
from lepard_ros.evaluation.replay import load_matcher
from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import TrackerSettings

FIRST = [look(-0.5 + 0.1 * i, -0.6, -20 + 8 * i) for i in range(4)]
SECOND = [look(-0.3 + 0.1 * i, -0.5, -10 + 8 * i) for i in range(4)]
BEHIND = [look(0.1 * i, 0.5, 170 + 8 * i) for i in range(2)]


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("maps")
    for name, poses in (("first", FIRST), ("second", SECOND), ("behind", BEHIND)):
        tracker = RigidTracker(load_matcher("fpfh"), TrackerSettings(keyframe_degrees=7.0))
        for i, pose in enumerate(poses):
            assert tracker.process(depth_to_points(render(pose, i), CAMERA), 0.1 * i).pose is not None
        tracker.save(folder / name)
    return folder


def test_two_sessions_become_one_map(maps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(maps / "first"), str(maps / "second"), "-o", str(maps / "both"), "--weights", "fpfh"]
    assert cli.main(["map", "merge", *arguments]) == 0
    assert "joined by" in capsys.readouterr().out
    first, both = (RigidTracker.load(maps / name, load_matcher("fpfh")) for name in ("first", "both"))
    added = list(both.keyframes)[len(first.keyframes)]
    distance, turn = motion_between(added.pose, invert(FIRST[0]) @ SECOND[0])
    assert distance < 0.05 and turn < 2.0


def test_maps_that_share_nothing_are_refused(maps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(maps / "first"), str(maps / "behind"), "-o", str(maps / "none"), "--weights", "fpfh"]
    assert cli.main(["map", "merge", *arguments]) == 2
    assert "share no place" in capsys.readouterr().err and not (maps / "none").exists()


def test_a_map_is_described_exported_and_drawn(maps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main(["map", "info", str(maps / "first"), "--weights", "fpfh"]) == 0
    words = capsys.readouterr().out
    assert "keyframes" in words and "extent" in words
    for name in ("cloud.ply", "cloud.pcd"):
        assert cli.main(["map", "export", str(maps / "first"), str(maps / name), "--weights", "fpfh"]) == 0
        assert len(np.asarray(read_cloud(maps / name))) > 1000
    assert cli.main(["map", "render", str(maps / "first"), str(maps / "map.png"), "--weights", "fpfh"]) == 0
    assert (maps / "map.png").stat().st_size > 5000
