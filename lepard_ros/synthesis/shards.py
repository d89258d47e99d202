# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A training shard: the clouds, true poses and pairs of one room, generated from a seed and stored in one file."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from tqdm import tqdm

from lepard_ros.data.workers import Workers, map_in_processes
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.synthesis.fragments import Fragment, Shot, companion, preview, random_shots, spread, take
from lepard_ros.synthesis.meshes import MeshLibrary, load_library
from lepard_ros.synthesis.rooms import compose_room
from lepard_ros.synthesis.sensor import DepthSensor, Scene, random_sensor

UNIT = 0.00025  # metres per stored integer
REACH = 8.0  # metres: points beyond this distance from the camera are not stored
OVERLAP_RADIUS = 0.05  # metres
BANDS = np.array([0.1, 0.3, 0.6, 0.95])  # limits of the overlap bands, for the smaller of the two overlaps
PAIRS_PER_BAND = np.array([12, 12, 11])
OVERLAP_SAMPLE = 2500  # sample points for measuring overlap: accurate to one per cent
MIN_SPREAD = 0.01  # of the normals in the overlap: below, the motion is unconstrained
MIN_DETAIL = 0.16  # share of a thumbnail that is not smooth: below, a view is mostly bare wall
PREVIEW_CELL = 0.25  # metres
CANDIDATES = 110


@dataclass(frozen=True)
class Shard:
    """The clouds of one room.

    points: (sum N, 3) int16, times UNIT metres, each cloud in the frame of its first camera. offset: (C + 1,) int64.
    pose: (C, 4, 4) cloud to room. kind: (C,) uint8, 0 a single frame, 1 fused. pairs: (P, 2) int32 source and target.
    overlap: (P, 2) float32, the share of source points within 5 cm of the target under the true poses, and the reverse.
    """

    points: NDArray[np.int16]
    offset: NDArray[np.int64]
    pose: NDArray[np.float64]
    kind: NDArray[np.uint8]
    pairs: NDArray[np.int32]
    overlap: NDArray[np.float32]

    def cloud(self, index: int) -> NDArray[np.float32]:
        """The points (N, 3) of one cloud in metres, in its own frame."""
        return self.points[self.offset[index] : self.offset[index + 1]].astype(np.float32) * np.float32(UNIT)

    def transform(self, source: int, target: int) -> NDArray[np.float64]:
        """The true motion (4, 4) from a source cloud's frame to a target cloud's."""
        return np.linalg.solve(self.pose[target], self.pose[source])


def make_room(seed: int, library: MeshLibrary) -> Shard:
    """The shard of a seed: the same seed and meshes give the same bytes."""
    rng = np.random.default_rng([seed, 1])
    while True:
        room = compose_room(rng, library)
        scene = Scene(room.meshes)
        sensor = random_sensor(rng)
        shots = choose_shots(rng, *_good_shots(rng, random_shots(rng, room, scene, CANDIDATES), scene, sensor))
        shots += [companion(rng, shot) for shot in shots[: rng.integers(4, 7)]]
        in_volume = rng.random() < 0.75
        fragments = [take(rng, room, scene, sensor, shot, in_volume) for shot in shots]
        shard = pack([fragment for fragment in fragments if len(fragment.points) > 1500], rng)
        if len(shard.pairs) >= 12:  # a room too small or too empty for pairs is sampled again
            return shard


def _good_shots(rng: Generator, shots: list[Shot], scene: Scene, sensor: DepthSensor) -> tuple[list[Shot], FloatArray]:
    """The shots with enough detail, and their approximate pairwise overlap (S, S), the smaller of both directions."""
    if not shots:
        return [], np.zeros((0, 0))
    thumbnails = preview(scene, sensor, shots)
    kept = []
    for index in range(len(shots)):
        seen = thumbnails.seen[index]
        bare = spread(thumbnails.normals[index][seen]) < 0.03 or thumbnails.detail[index] < MIN_DETAIL
        if seen.mean() > 0.45 and (not bare or rng.random() < 0.08):
            kept.append(index)
    return [shots[i] for i in kept], rough_overlap(thumbnails.points[kept], thumbnails.seen[kept])


def rough_overlap(points: FloatArray, seen: NDArray[np.bool_]) -> FloatArray:
    """Share (S, S) of common cells of two thumbnails (S, P, 3), relative to the one with more cells."""
    row, _ = np.nonzero(seen)
    groups = group_by_cell(points[seen], PREVIEW_CELL)
    table = np.zeros((len(points), len(groups.counts)), np.float32)
    table[row, groups.cell] = 1
    count = table.sum(axis=1)
    return table @ table.T / np.maximum(np.maximum(count[:, None], count), 1)


def choose_shots(rng: Generator, shots: list[Shot], overlap: FloatArray) -> list[Shot]:
    """Eight to eleven shots, chosen greedily to fill the overlap bands evenly."""
    if not shots:
        return []
    band = np.digitize(overlap, BANDS) - 1  # -1 below, 3 above
    chosen = [int(rng.integers(len(shots)))]
    have = np.zeros(len(PAIRS_PER_BAND))
    for _ in range(min(len(shots), int(rng.integers(8, 12))) - 1):
        wanted = np.clip(1.2 * PAIRS_PER_BAND - have, 0.5, None)
        value = np.array([np.append(wanted, [0, 0])[band[i, chosen]].sum() for i in range(len(shots))])
        value *= rng.uniform(0.7, 1.0, len(shots))
        value[chosen] = -1
        best = int(value.argmax())
        have += [(band[best, chosen] == k).sum() for k in range(len(have))]
        chosen.append(best)
    return [shots[i] for i in chosen]


def pack(fragments: list[Fragment], rng: Generator) -> Shard:
    """Measure overlaps, choose pairs evenly over the bands and store everything in a shard."""
    clouds = [np.rint(fragment.points / UNIT) for fragment in fragments]
    near = [(np.abs(cloud) <= REACH / UNIT).all(axis=1) for cloud in clouds]
    stored = [cloud[keep].astype(np.int16) for cloud, keep in zip(clouds, near, strict=True)]
    pairs, overlap = _choose_pairs(fragments, rng)
    return Shard(
        points=np.concatenate([*stored, np.zeros((0, 3), np.int16)]),
        offset=np.cumsum([0, *(len(cloud) for cloud in stored)]).astype(np.int64),
        pose=np.array([fragment.pose for fragment in fragments], np.float64).reshape(-1, 4, 4),
        kind=np.array([fragment.kind for fragment in fragments], np.uint8),
        pairs=pairs,
        overlap=overlap,
    )


def _choose_pairs(fragments: list[Fragment], rng: Generator) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Pairs (P, 2) with overlaps (P, 2), a fixed number per band; pairs with an unconstrained motion are skipped."""
    rooms = [fragment.in_room() for fragment in fragments]
    samples = [rng.permutation(len(cloud))[:OVERLAP_SAMPLE] for cloud in rooms]
    trees = [cKDTree(cloud, balanced_tree=False, compact_nodes=False) for cloud in rooms]
    found: list[list[tuple[int, int, float, float]]] = [[] for _ in PAIRS_PER_BAND]
    order = [(i, j) for i in range(len(rooms)) for j in range(i)]
    for i, j in rng.permutation(np.array(order).reshape(-1, 2)):
        source, target = (i, j) if rng.random() < 0.5 else (j, i)
        forth = on_surface(rooms[source][samples[source]], trees[target])
        if not BANDS[0] <= forth.mean():
            continue
        back = on_surface(rooms[target][samples[target]], trees[source])
        band = int(np.digitize(min(forth.mean(), back.mean()), BANDS)) - 1
        if not 0 <= band < len(found) or len(found[band]) >= PAIRS_PER_BAND[band]:
            continue
        if spread(fragments[source].normals[samples[source]][forth]) > MIN_SPREAD:
            found[band].append((source, target, forth.mean(), back.mean()))
    rows = np.array([row for band_rows in found for row in band_rows], np.float64).reshape(-1, 4)
    return rows[:, :2].astype(np.int32), rows[:, 2:].astype(np.float32)


def on_surface(points: FloatArray, tree: cKDTree) -> NDArray[np.bool_]:
    """Mask of the points (N, 3) within the overlap radius of a cloud."""
    distance, _ = tree.query(points, distance_upper_bound=OVERLAP_RADIUS)
    return np.isfinite(distance)


FIELDS = ("points", "offset", "pose", "kind", "pairs", "overlap")


def room_path(directory: Path, seed: int) -> Path:
    """File of a seed's room."""
    return Path(directory) / f"room_{seed:06d}.npz"


def save_room(path: Path, shard: Shard) -> None:
    """Write a shard atomically."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        np.savez(file, **{name: getattr(shard, name) for name in FIELDS})
    unfinished.replace(path)


def load_room(path: Path | str) -> Shard:
    """Read a shard."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            shard = Shard(**{name: arrays[name] for name in FIELDS})
        _check(shard)
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:  # what a damaged zip may raise
        raise InputError(f"{path} is not a room made by `lepard synthesise rooms` ({error}); make it again.") from error
    return shard


def _check(shard: Shard) -> None:
    """Raise ValueError if the arrays are inconsistent."""
    clouds = len(shard.pose)
    whole = shard.offset.shape == (clouds + 1,) and shard.offset[-1] == len(shard.points)
    if not whole or shard.kind.shape != (clouds,) or shard.overlap.shape != shard.pairs.shape:
        raise ValueError("its arrays differ in length")
    if len(shard.pairs) and not 0 <= shard.pairs.min() <= shard.pairs.max() < clouds:
        raise ValueError("a pair names a cloud that is not there")


def synthesise_rooms(out: Path, meshes: Path | None, seeds: range, processes: Workers = 1) -> None:
    """Generate the missing rooms of `seeds` in `out`, with the meshes of a folder if given."""
    out.mkdir(parents=True, exist_ok=True)
    missing = [seed for seed in seeds if not room_path(out, seed).exists()]
    make = partial(_write_room, out, load_library(meshes))
    for _ in tqdm(map_in_processes(make, missing, processes), total=len(missing), desc="rooms", unit="room"):
        pass


def _write_room(out: Path, library: MeshLibrary, seed: int) -> None:
    save_room(room_path(out, seed), make_room(seed, library))
