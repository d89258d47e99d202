# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Training samples from rooms: rotated and jittered clouds with their pyramids, in pairs with ground truth.

The stream is a pure function of (seed, rank, step), so that training can stop anywhere and resume bit for bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from lepard_ros.cloud.pyramid import Pyramid, build_pyramid
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import Generator
from lepard_ros.network.backbone import Relations
from lepard_ros.network.fine import owner_of_fine
from lepard_ros.network.lepard import Lepard
from lepard_ros.synthesis.shards import Shard, load_room


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of each cloud: uniform jitter and viewpoint error, in metres."""

    jitter: float = 0.004
    viewpoint: float = 0.3
    lost_viewpoint: float = 0.25  # share of clouds with four times the viewpoint error
    crop: float = 0.1  # share of clouds of which a random half space is cut off
    max_points: int = 22_000  # a larger cloud is cut to a ball: real fragments are about this large
    scale: tuple[float, float] = (0.6, 1.2)  # range of the scale of a room; larger scales cost points
    bend: float = 0.02  # metres: amplitude of a smooth bend, as in fused fragments of a real camera
    holes: int = 6  # maximum number of balls cut out of a cloud, like missing dark or shiny surfaces


PLAIN = Augmentation(jitter=0, viewpoint=0, lost_viewpoint=0, crop=0, scale=(1.0, 1.0), bend=0, holes=0)


@dataclass
class Sample:
    """A cloud prepared for the network: pyramid, convolution operators, and the coarse point of each fine one (N,)."""

    pyramid: Pyramid
    relations: Relations
    owners: Tensor | None

    def to(self, device: torch.device) -> "Sample":
        """The sample on another device; its operators are rebuilt there."""
        relations = tuple([relation.to(device) for relation in level] for level in self.relations)
        owners = None if self.owners is None else self.owners.to(device)
        return Sample(self.pyramid.to(device), (relations[0], relations[1]), owners)

    def mirrored(self) -> "Sample":
        """The mirror image of the cloud, with the operators of invariant convolutions."""
        same, down = ([replace(r, bag=r.invariant_bag().mirrored()) for r in level] for level in self.relations)
        return replace(self, pyramid=self.pyramid.mirrored(), relations=(same, down))


@dataclass
class Pair:
    """Two samples and the motion from source to target, (4, 4) float32.

    flow: (n, 3), and fine_flow: (N, 3), are added to the coarse and to the fine source points before it.
    """

    source: Sample
    target: Sample
    motion: Tensor
    flow: Tensor | None = None
    fine_flow: Tensor | None = None


def move_pairs(pairs: list[Pair], device: torch.device) -> list[Pair]:
    """The pairs on another device; a cloud that several of them share is moved once, and stays shared."""
    if device.type == "cpu":
        return pairs
    samples = {id(sample): sample.to(device) for pair in pairs for sample in (pair.source, pair.target)}
    return [
        Pair(
            samples[id(pair.source)],
            samples[id(pair.target)],
            pair.motion.to(device),
            None if pair.flow is None else pair.flow.to(device),
            None if pair.fine_flow is None else pair.fine_flow.to(device),
        )
        for pair in pairs
    ]


def make_sample(points: Tensor, viewpoint: Tensor, network: Lepard) -> Sample:
    """Pyramid and operators of a cloud (N, 3) metres for a network."""
    config = network.config
    pyramid = build_pyramid(points, config.pyramid, viewpoint)
    relations = network.backbone.relations(pyramid)
    if config.kernel == "invariant":
        for relation in (*relations[0], *relations[1]):
            relation.invariant_bag().transpose()
    if not config.fine_dim:
        return Sample(pyramid, relations, None)
    return Sample(pyramid, relations, owner_of_fine(pyramid))


@dataclass
class RoomVisit:
    """The clouds of one room as sampled for one visit, prepared on first use."""

    shard: Shard
    pairs: np.ndarray
    entropy: tuple[int, ...]
    augmentation: Augmentation
    network: Lepard

    def __post_init__(self) -> None:
        self._ready: dict[int, tuple[Sample, np.ndarray]] = {}

    def cloud(self, index: int) -> tuple[Sample, np.ndarray]:
        """The sample of cloud `index` and its pose in the room after augmentation, (4, 4)."""
        if index not in self._ready:
            self._ready[index] = self._augment(index)
        return self._ready[index]

    def _augment(self, index: int) -> tuple[Sample, np.ndarray]:
        # Each cloud has its own generator: the order of requests must not matter.
        rng = np.random.default_rng([*self.entropy, index])
        # All clouds of a visit share one scale, as if the room and the sensor's path were larger.
        low, high = self.augmentation.scale
        scale = float(np.exp(np.random.default_rng(self.entropy).uniform(np.log(low), np.log(high))))
        pose = self.shard.pose[index].copy()
        pose[:3, 3] *= scale
        return augmented_cloud(self.shard.cloud(index) * scale, pose, self.augmentation, self.network, rng)

    def pair(self, number: int) -> Pair:
        """Pair `number` of the room, source and target swapped at random."""
        source, target = self.pairs[number]
        if (number + self.entropy[-1]) % 2:
            source, target = target, source
        (source_sample, source_pose), (target_sample, target_pose) = self.cloud(int(source)), self.cloud(int(target))
        motion = np.linalg.inv(target_pose) @ source_pose
        return Pair(source_sample, target_sample, torch.from_numpy(motion.astype(np.float32)))


def augmented_cloud(
    points: np.ndarray, pose: np.ndarray, augmentation: Augmentation, network: Lepard, rng: Generator
) -> tuple[Sample, np.ndarray]:
    """A cloud (N, 3), cropped, rotated and jittered, and its new pose (4, 4)."""
    points = crop_ball(points, augmentation.max_points, rng)
    if rng.random() < augmentation.crop:
        points = crop_half(points, rng)
    points = cut_holes(points + bend(points, rng, augmentation.bend), rng, augmentation.holes)
    turn = Rotation.random(random_state=rng).as_matrix()
    points = points @ turn.T + rng.uniform(-1, 1, points.shape) * augmentation.jitter
    doubt = augmentation.viewpoint * (4 if rng.random() < augmentation.lost_viewpoint else 1)
    viewpoint = rng.normal(0, doubt, 3)
    pose = np.array(pose, dtype=np.float64)
    pose[:3, :3] = pose[:3, :3] @ turn.T
    cloud, eye = (torch.from_numpy(values.astype(np.float32)) for values in (points, viewpoint))
    return make_sample(cloud, eye, network), pose


WAVES, WAVE_LENGTH, HOLE_RADIUS = 4, (0.8, 4.0), (0.05, 0.25)  # metres


def bend(points: np.ndarray, rng: Generator, amplitude: float) -> np.ndarray:
    """Smooth random offsets (N, 3) for points (N, 3): a few plane waves, up to about `amplitude` metres in total."""
    length = rng.uniform(*WAVE_LENGTH, WAVES)
    direction = rng.normal(size=(3, WAVES))
    direction /= np.linalg.norm(direction, axis=0)
    phase = points @ (direction * 2 * np.pi / length) + rng.uniform(0, 2 * np.pi, WAVES)
    return np.sin(phase) @ (rng.normal(size=(WAVES, 3)) * amplitude * rng.random() / WAVES**0.5)


def cut_holes(points: np.ndarray, rng: Generator, max_holes: int) -> np.ndarray:
    """The points (N, 3) outside of up to `max_holes` random balls around some of them."""
    count = int(rng.integers(0, max_holes + 1))
    centres = points[rng.integers(0, len(points), count)]
    radius = rng.uniform(*HOLE_RADIUS, count)
    apart = np.linalg.norm(points[:, None] - centres, axis=2)
    return points[(apart > radius).all(axis=1)]


def crop_half(points: np.ndarray, rng: Generator) -> np.ndarray:
    """Cut off up to half of a cloud (N, 3) by a random plane."""
    height = points @ rng.normal(size=3)
    kept = height > np.quantile(height, rng.uniform(0.1, 0.5))
    return points[kept]


def crop_ball(points: np.ndarray, count: int, rng: Generator) -> np.ndarray:
    """The `count` points (N, 3) nearest to a random one of them."""
    if len(points) <= count:
        return points
    distance = np.linalg.norm(points - points[rng.integers(len(points))], axis=1)
    return points[np.argpartition(distance, count)[:count]]


class RoomStream:
    """An endless stream of batches from folders of room shards.

    Each step visits `lanes` rooms and takes all pairs among some `clouds` of each, since a cloud is encoded once.
    """

    def __init__(
        self, folders: list[Path], network: Lepard, *, seed: int = 0, rank: int = 0, lanes: int = 2, clouds: int = 4,
        augmentation: Augmentation | None = None, min_overlap: float = 0.1,
    ) -> None:  # fmt: skip
        self.folders, self.network, self.seed, self.rank = folders, network, seed, rank
        self.lanes, self.clouds = lanes, clouds
        self.augmentation = augmentation or Augmentation()
        self.min_overlap = min_overlap
        self.files = training_files(folders)

    def batch(self, step: int) -> list[Pair]:
        """The pairs of a step, of several rooms."""
        visits = [self._visit(lane, step) for lane in range(self.lanes)]
        return [visit.pair(number) for visit in visits for number in range(len(visit.pairs))]

    def _visit(self, lane: int, step: int) -> RoomVisit:
        entropy = (self.seed, self.rank, lane, step)
        rng = np.random.default_rng(entropy)
        shard = load_room(self.files[int(rng.integers(len(self.files)))])
        usable = np.flatnonzero(shard.overlap.min(1) >= self.min_overlap)
        if len(usable) == 0:
            usable = np.arange(len(shard.pairs))
        chosen = connected_pairs(shard.pairs, rng.permutation(usable), self.clouds)
        return RoomVisit(shard, shard.pairs[chosen], entropy, self.augmentation, self.network)

    def refresh(self) -> None:
        """List the rooms again (generation may still be running)."""
        self.files = training_files(self.folders)


def connected_pairs(pairs: np.ndarray, order: np.ndarray, clouds: int) -> np.ndarray:
    """The pairs among a number of connected clouds. pairs: (P, 2) clouds; order: usable pairs, preferred ones first."""
    members = set(pairs[order[0]].tolist())
    for _ in range(clouds - len(members)):
        touching = [end for p in order for end in pairs[p] if len(members & set(pairs[p].tolist())) == 1]
        new = next((int(end) for end in touching if int(end) not in members), None)
        if new is None:
            break
        members.add(new)
    return np.array([p for p in order if set(pairs[p].tolist()) <= members])


VALIDATION_SEEDS = 100


def room_files(folders: list[Path]) -> list[Path]:
    """All room shards in folders, by name."""
    return sorted(path for folder in folders for path in Path(folder).glob("*.npz"))


def training_files(folders: list[Path]) -> list[Path]:
    """The shards that may be trained on: rooms 0 to 99 are kept for validation."""
    files = [path for path in room_files(folders) if not _is_validation(path)]
    if not files:
        raise InputError("no training rooms found: make some with `lepard synthesise rooms OUT` and give --data OUT.")
    return files


def _is_validation(path: Path) -> bool:
    digits = path.stem.rsplit("_", 1)[-1]
    return path.stem.startswith("room_") and digits.isdigit() and int(digits) < VALIDATION_SEEDS


def validation_pairs(folders: list[Path], network: Lepard, count: int) -> Iterator[tuple[Pair, float]]:
    """A fixed list of pairs from the validation rooms with their overlap, evenly spread over rooms and overlaps."""
    files = [path for path in room_files(folders) if _is_validation(path)][:count]
    for place in range(count if files else 0):
        # Pairs of a room are ordered by overlap: walk through that order while walking through the rooms.
        path, turn = files[place % len(files)], (place * 0.618034) % 1.0
        shard = load_room(path)
        number = int(turn * len(shard.pairs))
        visit = RoomVisit(shard, shard.pairs, (0,), PLAIN, network)
        yield visit.pair(number), float(shard.overlap[number].min())
