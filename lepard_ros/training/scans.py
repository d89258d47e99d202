# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Training on a user's own scans: a folder of clouds with poses, or 3DMatch in its published layout."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.files import read_cloud
from lepard_ros.cloud.normals import surface_normals
from lepard_ros.data.readers import OfficialScenes, RigidPair
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import Generator
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.network.lepard import Lepard
from lepard_ros.synthesis.fragments import Fragment
from lepard_ros.synthesis.shards import Shard, pack, save_room
from lepard_ros.training.samples import Augmentation, Pair, augmented_cloud

GRID = 0.025  # metres, of the stored clouds
WINDOW = 14  # scans of one shard; neighbours in the list are neighbours in space
POSES = "poses.txt"


def is_scan_folder(folder: Path) -> bool:
    """Whether a folder holds clouds with poses."""
    return (folder / POSES).is_file()


def read_poses(path: Path) -> list[tuple[str, np.ndarray]]:
    """Names of cloud files and their poses (4, 4), cloud to world, from lines `file tx ty tz qx qy qz qw`."""
    poses = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            values = np.array([float(word) for word in words[1:]])
            turn = Rotation.from_quat(values[3:]).as_matrix()
        except ValueError:
            values = np.full(1, np.nan)
        if values.shape != (7,) or not np.isfinite(values).all():
            raise InputError(
                f"{path.name}, line {number}: write `file tx ty tz qx qy qz qw`, metres and a unit quaternion."
            )
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = turn, values[:3]
        poses.append((words[0], pose))
    return poses


def scan_shards(folder: Path) -> Iterator[Shard]:
    """The scans of a folder as shards of neighbouring clouds, with pairs chosen by their overlap."""
    poses = read_poses(folder / POSES)
    if len(poses) < 2:
        raise InputError(f"{POSES} in {folder.name} lists {len(poses)} clouds: at least two are needed.")
    for number, start in enumerate(range(0, max(1, len(poses) - WINDOW // 2), WINDOW // 2)):
        fragments = []
        for name, pose in poses[start : start + WINDOW]:
            points = grid_subsample(torch.from_numpy(read_cloud(folder / name)).double(), GRID)[0].numpy()
            fragments.append(Fragment(points, surface_normals(points, 12), pose, kind=0))
        shard = pack(fragments, np.random.default_rng(number))
        if len(shard.pairs):
            yield shard


def prepare_scans(folder: Path, out: Path) -> Path:
    """Write the shards of a folder of scans below `out`, once, and return where."""
    place = out / f"scans_{folder.resolve().name}"
    if not any(place.glob("*.npz")):
        place.mkdir(parents=True, exist_ok=True)
        count = 0
        for count, shard in enumerate(scan_shards(folder), start=1):
            save_room(place / f"scan_{count:05d}.npz", shard)
        if not count:
            raise InputError(
                f"no two clouds in {folder.name} overlap by 10 %: check the poses (cloud to world, metres)."
            )
    return place


def is_official_3dmatch(folder: Path) -> bool:
    """Whether a folder has the published table of training pairs, `3DMatch_train.pkl` or `train_info.pkl`."""
    return _official_table(folder) is not None


def _official_table(folder: Path) -> str | None:
    for name in ("train_info", "3DMatch_train"):
        if any(folder.glob(f"**/{name}.pkl")):
            return name
    return None


class OfficialStream:
    """Batches from the published 3DMatch training pairs, as a pure function of the step."""

    def __init__(self, folder: Path, network: Lepard, *, seed: int = 0, rank: int = 0, lanes: int = 2) -> None:
        name = _official_table(folder)
        if name is None:
            raise InputError(f"{folder.name} has no table of 3DMatch training pairs (train_info.pkl).")
        self.scenes = OfficialScenes(folder, name)
        self.table: list[RigidPair] = self.scenes.pairs(None, 0)
        self.network, self.seed, self.rank, self.lanes = network, seed, rank, lanes

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [self._pair(np.random.default_rng([self.seed, self.rank, lane, step])) for lane in range(self.lanes)]

    def refresh(self) -> None:
        """Nothing is added to a published set."""

    def _pair(self, rng: Generator) -> Pair:
        pair = self.table[int(rng.integers(len(self.table)))]
        assert pair.truth is not None
        poses, clouds = [pair.truth, np.eye(4)], [self.scenes.cloud(key) for key in (pair.source, pair.target)]
        (source, source_pose), (target, target_pose) = (
            augmented_cloud(cloud, pose, Augmentation(), self.network, rng)
            for cloud, pose in zip(clouds, poses, strict=True)
        )
        motion = np.linalg.inv(target_pose) @ source_pose
        return Pair(source, target, torch.from_numpy(motion.astype(np.float32)))
