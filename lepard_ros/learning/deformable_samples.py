# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Training samples from deformable pairs in the 4DMatch format, as a pure function of the step."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from lepard_ros.cloud.grid import grid_subsample
from lepard_ros.errors import InputError
from lepard_ros.learning.fourdmatch import DeformablePair, list_pairs, load_pair
from lepard_ros.learning.samples import Pair, make_sample
from lepard_ros.network.lepard import Lepard

JITTER = 0.001  # metres, as published
VIEWPOINT = 0.2  # metres by which the sensor's place may be wrong


def make_pair(pair: DeformablePair, network: Lepard, rng: np.random.Generator | None = None) -> Pair:
    """A pair ready for the network; with a generator, each cloud is turned at random and jittered."""
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
    flows = flow_by_level(_float(clouds[0]), _float(flow), network.config.grid, levels=3)
    return Pair(samples[0], samples[1], _float(motion), flow=flows[2], fine_flow=flows[0])


def flow_by_level(points: Tensor, flow: Tensor, grid: float, levels: int) -> list[Tensor]:
    """The flow (N, 3) averaged on the same grids as the pyramid's points."""
    flows = []
    for level in range(levels):
        points, flow = grid_subsample(points, grid * 2**level, flow)
        flows.append(flow)
    return flows


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


class DeformableStream:
    """An endless stream of batches from folders of deformable pairs (those below `val` are left out)."""

    def __init__(self, folders: list[Path], network: Lepard, *, seed: int = 0, rank: int = 0, lanes: int = 2) -> None:
        self.folders, self.network, self.seed, self.rank, self.lanes = folders, network, seed, rank, lanes
        self.refresh()

    def refresh(self) -> None:
        """Look again which pairs there are (generation may still be running)."""
        self.files = training_pairs(self.folders)

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        return [self._pair(lane, step) for lane in range(self.lanes)]

    def _pair(self, lane: int, step: int) -> Pair:
        rng = np.random.default_rng([self.seed, self.rank, lane, step])
        return make_pair(load_pair(self.files[int(rng.integers(len(self.files)))]), self.network, rng)


def _is_validation(path: Path) -> bool:
    return "val" in path.parts


def training_pairs(folders: list[Path]) -> list[Path]:
    """The pairs that may be trained on."""
    files = [path for folder in folders for path in list_pairs(folder) if not _is_validation(path)]
    if not files:
        raise InputError(
            "no deformable pairs found: make some with `lepard synthesise deformable OUT` and give --data OUT."
        )
    return files


def validation_pairs(folders: list[Path], network: Lepard, count: int) -> Iterator[tuple[Pair, float]]:
    """A fixed list of pairs of the `val` folders, with their overlap."""
    files = [path for folder in folders for path in list_pairs(folder) if _is_validation(path)]
    for path in files[:: max(1, len(files) // max(1, count))][:count]:
        pair = load_pair(path)
        yield make_pair(pair, network), len(np.unique(pair.matches[:, 0])) / max(1, len(pair.source))
