# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Training samples from deformable pairs in the 4DMatch format, as a pure function of the step."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from lepard_ros.data.creature_scene import CreatureScene, load_scene, scene_files
from lepard_ros.data.fourdmatch import DeformablePair, load_pair, training_files, validation_files
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.network.config import MATCH_LEVEL
from lepard_ros.network.lepard import Lepard
from lepard_ros.training.samples import Pair, Sample, connected_pairs, make_sample

JITTER = 0.001  # metres, as published
VIEWPOINT = 0.2  # metres: error of the viewpoint


def make_pair(pair: DeformablePair, network: Lepard, rng: Generator | None = None) -> Pair:
    """A pair prepared for the network; with a generator, each cloud is randomly rotated and jittered."""
    turns = [np.eye(3) if rng is None else Rotation.random(random_state=rng).as_matrix() for _ in range(2)]
    viewpoints = [np.zeros(3) if rng is None else rng.normal(0, VIEWPOINT, 3) for _ in range(2)]
    clouds = [cloud @ turn.T for cloud, turn in zip((pair.source, pair.target), turns, strict=True)]
    if rng is not None:
        clouds = [cloud + rng.uniform(-JITTER, JITTER, cloud.shape) for cloud in clouds]
    flow = pair.flow @ turns[0].T
    motion = np.eye(4)
    motion[:3, :3] = turns[1] @ pair.rotation @ turns[0].T
    motion[:3, 3] = turns[1] @ np.asarray(pair.translation).reshape(3)
    samples = [make_sample(_float(c), _float(v), network) for c, v in zip(clouds, viewpoints, strict=True)]
    flows = flow_by_level(_float(clouds[0]), _float(flow), network.config.grid, levels=MATCH_LEVEL + 1)
    return Pair(samples[0], samples[1], _float(motion), flow=flows[MATCH_LEVEL], fine_flow=flows[0])


def flow_by_level(points: Tensor, flow: Tensor, grid: float, levels: int) -> list[Tensor]:
    """The flow (N, 3) averaged on the same grids as the pyramid's points."""
    flows = []
    for level in range(levels):
        points, flow = grid_subsample(points, grid * 2**level, flow)
        flows.append(flow)
    return flows


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


class CreatureVisit:
    """Some clouds of one scene, each prepared once: rotated, jittered, with its flow to every pose."""

    def __init__(self, scene: CreatureScene, network: Lepard, rng: Generator) -> None:
        self.scene, self.network, self.rng = scene, network, rng
        self._ready: dict[int, tuple[Sample, FloatArray, list[Tensor]]] = {}

    def pair(self, source: int, target: int) -> Pair:
        """The pair of two clouds, by their indices in the scene."""
        (first, first_pose, flows), (second, second_pose, _) = self._cloud(source), self._cloud(target)
        motion = invert(second_pose) @ first_pose
        columns = slice(3 * self.scene.moment[target], 3 * self.scene.moment[target] + 3)
        coarse, fine = flows[MATCH_LEVEL][:, columns], flows[0][:, columns]
        return Pair(first, second, _float(motion), flow=coarse, fine_flow=fine)

    def _cloud(self, index: int) -> tuple[Sample, FloatArray, list[Tensor]]:
        """The sample of a cloud, its pose (4, 4) in the world, and its flows (N_l, 3 M) by level."""
        if index not in self._ready:
            turn = Rotation.random(random_state=self.rng).as_matrix()
            points = self.scene.cloud(index) @ turn.T
            points = _float(points + self.rng.uniform(-JITTER, JITTER, points.shape))
            flow = self.scene.flows(index).reshape(len(points), -1, 3) @ turn.T
            sample = make_sample(points, _float(self.rng.normal(0, VIEWPOINT, 3)), self.network)
            columns = _float(flow.reshape(len(points), -1))
            flows = flow_by_level(points, columns, self.network.config.grid, MATCH_LEVEL + 1)
            pose = self.scene.pose[index].copy()
            pose[:3, :3] = pose[:3, :3] @ turn.T
            self._ready[index] = sample, pose, flows
        return self._ready[index]


class CreatureStream:
    """An endless stream of batches from folders of scenes: all pairs among some clouds of `lanes` scenes per step."""

    def __init__(
        self, folders: list[Path], network: Lepard, *, seed: int = 0, rank: int = 0, lanes: int = 2, clouds: int = 4
    ) -> None:
        self.folders, self.network, self.seed, self.rank = folders, network, seed, rank
        self.lanes, self.clouds = lanes, clouds
        self.refresh()

    def refresh(self) -> None:
        """List the scenes again (generation may still be running)."""
        self.files = scene_files(self.folders)

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [pair for lane in range(self.lanes) for pair in self._visit(lane, step)]

    def _visit(self, lane: int, step: int) -> list[Pair]:
        rng = np.random.default_rng([self.seed, self.rank, lane, step])
        scene = load_scene(self.files[int(rng.integers(len(self.files)))])
        chosen = connected_pairs(scene.pairs, rng.permutation(len(scene.pairs)), self.clouds)
        # Keep one of a pair and its reverse: both train the network on the same task.
        once = {frozenset(scene.pairs[number].tolist()): number for number in chosen}
        visit = CreatureVisit(scene, self.network, rng)
        return [visit.pair(*scene.pairs[number].tolist()) for number in sorted(once.values())]


class DeformableStream:
    """An endless stream of batches from folders of deformable pairs (without validation and test pairs)."""

    def __init__(self, folders: list[Path], network: Lepard, *, seed: int = 0, rank: int = 0, lanes: int = 2) -> None:
        self.folders, self.network, self.seed, self.rank, self.lanes = folders, network, seed, rank, lanes
        self.refresh()

    def refresh(self) -> None:
        """List the pairs again (generation may still be running)."""
        self.files = training_pairs(self.folders)

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [self._pair(lane, step) for lane in range(self.lanes)]

    def _pair(self, lane: int, step: int) -> Pair:
        rng = np.random.default_rng([self.seed, self.rank, lane, step])
        return make_pair(load_pair(self.files[int(rng.integers(len(self.files)))]), self.network, rng)


def training_pairs(folders: list[Path]) -> list[Path]:
    """The pairs that may be trained on."""
    files = [path for folder in folders for path in training_files(folder)]
    if not files:
        raise InputError(
            "no deformable pairs to train on (validation and test pairs do not count): make some with "
            "`lepard synthesise deformable OUT` and give --data OUT."
        )
    return files


def validation_pairs(folders: list[Path], network: Lepard, count: int) -> Iterator[tuple[Pair, float]]:
    """A fixed list of pairs of the `val` folders, with their overlap."""
    files = [path for folder in folders for path in validation_files(folder)]
    for path in files[:: max(1, len(files) // max(1, count))][:count]:
        pair = load_pair(path)
        yield make_pair(pair, network), len(pair.seen) / max(1, len(pair.source))
