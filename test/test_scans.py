# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A user's own scans: read, refused, and trained on."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.files import write_cloud
from lepard_ros.errors import InputError
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.synthesis.meshes import MeshLibrary
from lepard_ros.synthesis.shards import make_room
from lepard_ros.training.samples import RoomStream, load_room
from lepard_ros.training.scans import OfficialStream, is_scan_folder, prepare_scans, read_poses

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 24, "fine_dim": 8, "grid": 0.1})


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clouds of one generated room as a user would have them: PLY files and poses.txt."""
    folder = tmp_path_factory.mktemp("my_scans")
    room = make_room(102, MeshLibrary())
    lines = ["# file tx ty tz qx qy qz qw"]
    for index in range(6):
        write_cloud(folder / f"scan{index}.ply", room.cloud(index))
        pose = room.pose[index]
        values = [*pose[:3, 3], *Rotation.from_matrix(pose[:3, :3]).as_quat()]
        lines.append(f"scan{index}.ply " + " ".join(f"{value:.9f}" for value in values))
    (folder / "poses.txt").write_text("\n".join(lines))
    return folder


def test_scans_become_shards_once(scans: Path, tmp_path: Path) -> None:
    assert is_scan_folder(scans)
    place = prepare_scans(scans, tmp_path)
    shard = load_room(next(place.glob("*.npz")))
    assert len(shard.pose) == 6
    assert len(shard.pairs) > 0
    written = next(place.glob("*.npz")).stat().st_mtime_ns
    assert next(prepare_scans(scans, tmp_path).glob("*.npz")).stat().st_mtime_ns == written


def test_a_stream_reads_prepared_scans(scans: Path, tmp_path: Path) -> None:
    pair = RoomStream([prepare_scans(scans, tmp_path)], Lepard(TINY), lanes=1).batch(0)[0]
    moved = pair.source.pyramid.points[0] @ pair.motion[:3, :3].T + pair.motion[:3, 3]
    assert (torch.cdist(moved, pair.target.pyramid.points[0]).amin(1) < 0.1).float().mean() > 0.05


@pytest.mark.parametrize("line", ["scan0.ply 1 2 3", "scan0.ply 1 2 3 0 0 0 x", "scan0.ply 1 2 3 0 0 0 nan"])
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "poses.txt").write_text("# a comment\n" + line)
    with pytest.raises(InputError, match="line 2"):
        read_poses(tmp_path / "poses.txt")


def test_a_single_scan_is_too_few(scans: Path, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "poses.txt").write_text((scans / "poses.txt").read_text().splitlines()[1])
    with pytest.raises(InputError, match="at least two"):
        prepare_scans(folder, tmp_path)


def test_published_3dmatch_pairs_are_a_stream(tmp_path: Path) -> None:
    import pickle

    rng = np.random.default_rng(0)
    cloud = rng.uniform(-1, 1, (3000, 3)) * [1, 1, 0.05] + [0, 0, 2]
    turn = Rotation.from_euler("z", 20, degrees=True).as_matrix()
    (tmp_path / "train").mkdir()
    torch.save(torch.from_numpy(cloud), tmp_path / "train" / "a.pth")
    torch.save(torch.from_numpy(cloud @ turn.T), tmp_path / "train" / "b.pth")
    table = {"src": ["train/a.pth"], "tgt": ["train/b.pth"], "rot": [turn], "trans": [np.zeros((3, 1))],
             "overlap": [1.0]}  # the published lists of training pairs have no gt_cov # fmt: skip
    (tmp_path / "train_info.pkl").write_bytes(pickle.dumps(table))
    pair = OfficialStream(tmp_path, Lepard(TINY), lanes=1).batch(0)[0]
    moved = pair.source.pyramid.points[0] @ pair.motion[:3, :3].T + pair.motion[:3, 3]
    assert torch.cdist(moved, pair.target.pyramid.points[0]).amin(1).median() < 0.1
