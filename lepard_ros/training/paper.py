# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's training: its recipe, its augmentation, and the published pairs, once per epoch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from lepard_ros.cloud.pyramid import build_pyramid
from lepard_ros.data.fourdmatch import load_pair, training_files, validation_files
from lepard_ros.data.readers import OfficialScenes
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.geometry.flow import blend_flow
from lepard_ros.network.config import MATCH_LEVEL, LepardConfig
from lepard_ros.training.samples import Pair, Sample

MAX_POINTS = 30_000  # of a cloud; larger ones are randomly sampled
NOISE = {"rigid": 0.0025, "deformable": 0.001}  # metres, uniform to either side
# Defaults of `lepard train` for a paper preset.
RECIPE: dict[str, Any] = {
    "optimiser": "sgd", "rate": 0.015, "schedule": "epochs", "epoch_rate": 0.95, "epochs": 20, "pairs": 8, "clip": 0.0,
    "average": 0.0, "warmup": 0, "half": False, "validation_pairs": 0, "workers": 8,
}  # fmt: skip
WARPING_WEIGHT = {"rigid": 0.0, "deformable": 0.1}
WARPING_GATE = 0.01  # minimum share of true matches found before the warping loss is used
# Names of the published tables of pairs, without `.pkl`.
TRAINING_TABLES, VALIDATION_TABLES = ("train_info", "3DMatch_train"), ("val_info", "3DMatch_valid")


class RawPair(NamedTuple):
    """Two clouds (N, 3), (M, 3) on the network's grid: rotation @ (source + flow) + translation lies on the target."""

    source: FloatArray
    target: FloatArray
    rotation: FloatArray
    translation: FloatArray
    flow: FloatArray
    overlap: float


class PairTable(Protocol):
    """The pairs of a published split."""

    def __len__(self) -> int:
        """Number of pairs."""

    def load(self, number: int) -> RawPair:
        """One pair."""


class ScenePairs:
    """Pairs of 3DMatch: a table `train_info.pkl` and one `.pth` file per fragment."""

    def __init__(self, folder: Path, table: str) -> None:
        self.scenes = OfficialScenes(folder, table)
        self.pairs = self.scenes.pairs(None, 0)

    def __len__(self) -> int:
        return len(self.pairs)

    def load(self, number: int) -> RawPair:
        """Read both fragments."""
        pair = self.pairs[number]
        assert pair.truth is not None
        source, target = (self.scenes.cloud(key).astype(np.float64) for key in (pair.source, pair.target))
        return RawPair(source, target, pair.truth[:3, :3], pair.truth[:3, 3], np.zeros_like(source), pair.overlap)


class SequencePairs:
    """Pairs of 4DMatch: one `.npz` file each."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def load(self, number: int) -> RawPair:
        """Read the file."""
        pair = load_pair(self.files[number])
        source, target, flow = (array.astype(np.float64) for array in (pair.source, pair.target, pair.flow))
        return RawPair(source, target, pair.rotation, pair.translation, flow, pair.overlap)


def training_set(folders: Sequence[Path], mode: str) -> PairTable:
    """The published training pairs below a folder."""
    return _split(folders, mode, TRAINING_TABLES, "training")


def validation_set(folders: Sequence[Path], mode: str) -> PairTable:
    """The published validation pairs below a folder."""
    return _split(folders, mode, VALIDATION_TABLES, "validation")


def _split(folders: Sequence[Path], mode: str, tables: tuple[str, ...], split: str) -> PairTable:
    if mode == "deformable":
        choose = training_files if split == "training" else validation_files
        files = [path for folder in folders for path in choose(folder)]
        if files:
            return SequencePairs(files)
        raise InputError(f"no {split} pairs of 4DMatch in {folders[0]}: it should hold split/train and split/val.")
    for name in tables:
        if any(folders[0].glob(f"**/{name}.pkl")):
            return ScenePairs(folders[0], name)
    raise InputError(f"{folders[0]} has no {tables[0]}.pkl, so it is no 3DMatch folder with {split} pairs.")


# --- one pair --------------------------------------------------------------------------------------------------------


def augmented(pair: RawPair, noise: float, rng: Generator) -> RawPair:
    """As in the paper: random rotation of source or target, uniform noise (metres), at most 30,000 points."""
    turn = Rotation.from_euler("zyx", rng.uniform(0, 2 * np.pi, 3)).as_matrix()
    if rng.random() > 0.5:
        source, flow = pair.source @ turn.T, pair.flow @ turn.T
        pair = pair._replace(source=source, flow=flow, rotation=pair.rotation @ turn.T)
    else:
        rotation, translation = turn @ pair.rotation, turn @ pair.translation
        pair = pair._replace(target=pair.target @ turn.T, rotation=rotation, translation=translation)
    kept = [_kept(len(cloud), rng) for cloud in (pair.source, pair.target)]
    source, target, flow = pair.source[kept[0]], pair.target[kept[1]], pair.flow[kept[0]]
    shaken = source + rng.uniform(-noise, noise, source.shape)
    # Noise does not change the true target position of a point.
    flow = flow - (shaken - source)
    return pair._replace(source=shaken, target=target + rng.uniform(-noise, noise, target.shape), flow=flow)


def _kept(count: int, rng: Generator) -> Any:
    return slice(None) if count <= MAX_POINTS else np.sort(rng.permutation(count)[:MAX_POINTS])


def prepared(pair: RawPair, config: LepardConfig) -> Pair:
    """A pair prepared for the network. The clouds are already on its grid and are not gridded again."""
    source, target = (_sample(points, config) for points in (pair.source, pair.target))
    coarse = source.pyramid.points[MATCH_LEVEL]
    flow = blend_flow(coarse.double().numpy(), pair.source, pair.flow) if pair.flow.any() else None
    motion = np.eye(4)
    motion[:3, :3], motion[:3, 3] = pair.rotation, pair.translation
    return Pair(source, target, _float(motion), None if flow is None else _float(flow))


def _sample(points: FloatArray, config: LepardConfig) -> Sample:
    """The pyramid alone: a network that normalises over both clouds makes its operators for the stacked pair."""
    return Sample(build_pyramid(_float(points), config.pyramid, gridded=True), ([], []), None)


def _float(values: FloatArray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


# --- many pairs ------------------------------------------------------------------------------------------------------


class PaperStream(torch.utils.data.Dataset[list[Pair]]):
    """The training pairs in epochs, each pair once an epoch; a batch is a pure function of its step."""

    def __init__(
        self, table: PairTable, config: LepardConfig, mode: str, *, seed: int = 0, rank: int = 0, world: int = 1,
        lanes: int = 8,
    ) -> None:  # fmt: skip
        self.table, self.config, self.noise = table, config, NOISE[mode]
        self.seed, self.rank, self.world, self.lanes = seed, rank, world, lanes

    @property
    def epoch_steps(self) -> int:
        """Steps of an epoch, over all processes."""
        return -(-len(self.table) // (self.lanes * self.world))

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step."""
        first = (step % self.epoch_steps * self.world + self.rank) * self.lanes
        order = np.random.default_rng([self.seed, step // self.epoch_steps]).permutation(len(self.table))
        numbers = order[np.arange(first, first + self.lanes) % len(order)]
        rngs = [np.random.default_rng([self.seed, self.rank, lane, step]) for lane in range(self.lanes)]
        raw = (augmented(self.table.load(int(n)), self.noise, rng) for n, rng in zip(numbers, rngs, strict=True))
        return [prepared(pair, self.config) for pair in raw]

    __getitem__ = batch

    def batches(self, start: int, end: int, workers: int) -> Iterator[list[Pair]]:
        """The batches of the steps from `start` to `end`, prepared by worker processes."""
        loader = torch.utils.data.DataLoader(
            self, batch_size=None, sampler=range(start, end), num_workers=workers, collate_fn=list
        )
        yield from loader

    def refresh(self) -> None:
        """Nothing is added to a published set."""


def validation_pairs(table: PairTable, config: LepardConfig, count: int) -> Iterator[tuple[Pair, float]]:
    """Validation pairs without augmentation, with their overlap: all (count 0), or an evenly spaced sample."""
    step = max(1, len(table) // count) if count else 1
    for number in range(0, len(table), step)[: count or None]:
        pair = table.load(number)
        yield prepared(pair, config), pair.overlap
