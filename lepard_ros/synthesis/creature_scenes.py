# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One deforming object in several poses, seen from several sides: each cloud is used in several training pairs."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from tqdm import tqdm

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.data.creature_scene import UNIT, CreatureScene, save_scene
from lepard_ros.data.fourdmatch import OVERLAP_RADIUS
from lepard_ros.data.workers import Workers, map_in_processes
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.deformable_data import choose_thing
from lepard_ros.synthesis.deformable_pairs import (
    MIN_POINTS,
    RayScene,
    at_hits,
    measure,
    random_close_sensor,
    random_view,
    thin_out,
)
from lepard_ros.synthesis.gltf import AnimatedModel
from lepard_ros.synthesis.motions import random_motion

MOMENTS, VIEWS = 3, 2  # key poses, and cameras at each
SPREAD = (0.5, 1.7)  # radians between the cameras of a scene, from small rotations to opposite sides
MIN_OVERLAP = 0.08
NOISE_CHANCE = 0.55
MAX_CLOUD = 12_000
ATTEMPTS = 6


def synthesise_scenes(out: Path, models: Sequence[AnimatedModel], seeds: range, processes: Workers) -> int:
    """Write the missing scenes of `seeds`; returns how many were written."""
    pending = [seed for seed in seeds if not scene_path(out, seed).exists()]
    write = partial(_write_scene, out, models)
    return sum(tqdm(map_in_processes(write, pending, processes), total=len(pending), desc="scenes", unit="scene"))


def scene_path(out: Path, seed: int) -> Path:
    """File of a seed's scene."""
    return out / f"scene_{seed:06d}.npz"


def _write_scene(out: Path, models: Sequence[AnimatedModel], seed: int) -> bool:
    kind, model = choose_thing(seed, models)
    for attempt in range(ATTEMPTS):
        scene = make_scene(kind, model, np.random.default_rng([seed, 3, attempt]))
        if scene is not None:
            save_scene(scene_path(out, seed), scene)
            return True
    return False


def make_scene(kind: str, model: AnimatedModel | None, rng: Generator) -> CreatureScene | None:
    """A random object of a kind in MOMENTS key poses, VIEWS clouds each; None if too little was visible."""
    motion = random_motion(kind, rng, model, keys=MOMENTS)
    shapes = [motion.at(time) for time in np.linspace(0, 1, MOMENTS)]
    sensor, noisy = random_close_sensor(rng), bool(rng.random() < NOISE_CHANCE)
    front, spread = rng.uniform(0, 2 * np.pi), rng.uniform(*SPREAD)
    clouds, poses, moments, places = [], [], [], []
    for moment, shape in enumerate(shapes):
        scene = RayScene(shape, motion.triangles)
        for azimuth in front + rng.normal(0, spread, VIEWS):
            box = np.stack([shape.min(axis=0), shape.max(axis=0)])
            pose = random_view(box, sensor.camera, rng, azimuth, np.radians(rng.uniform(-15, 45)))
            rendering = scene.look(sensor.camera, pose)
            seen = (depth := measure(rendering, sensor, noisy, rng)) > 0
            if seen.sum() < MIN_POINTS:
                return None
            surface = np.concatenate([at_hits(s, motion.triangles, rendering, seen) for s in shapes], axis=1)
            points, surface = thin_out(depth_to_points(depth, sensor.camera)[seen], surface)
            kept = np.sort(rng.permutation(len(points))[:MAX_CLOUD])
            clouds.append(points[kept])
            places.append(surface[kept].reshape(-1, MOMENTS, 3).transpose(1, 0, 2))
            poses.append(pose)
            moments.append(moment)
    return _pack(clouds, np.array(poses), np.array(moments), places)


def _pack(
    clouds: list[FloatArray], poses: FloatArray, moments: NDArray[np.int64], places: list[FloatArray]
) -> CreatureScene | None:
    """The scene with its overlapping pairs; None if there are too few, or if it exceeds the storage range."""
    pairs, overlap = _overlapping(clouds, poses, moments, places)
    stored = [np.rint(np.concatenate(group, axis=-2) / UNIT) for group in (clouds, places)]
    if len(pairs) < 3 or max(np.abs(values).max() for values in stored) > np.iinfo(np.int16).max:
        return None
    offset = np.cumsum([0, *(len(cloud) for cloud in clouds)]).astype(np.int64)
    return CreatureScene(stored[0].astype(np.int16), offset, poses, moments, stored[1].astype(np.int16), pairs, overlap)


def _overlapping(
    clouds: list[FloatArray], poses: FloatArray, moments: NDArray[np.int64], places: list[FloatArray]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ordered pairs (P, 2) whose source overlaps the target by at least MIN_OVERLAP, and their overlaps (P,)."""
    trees = [cKDTree(cloud @ pose[:3, :3].T + pose[:3, 3]) for cloud, pose in zip(clouds, poses, strict=True)]
    found = []
    for source in range(len(clouds)):
        for target in range(len(clouds)):
            distance, _ = trees[target].query(
                places[source][moments[target]][::4], distance_upper_bound=1.3 * OVERLAP_RADIUS
            )
            share = float(np.isfinite(distance).mean())
            if source != target and share > MIN_OVERLAP:
                found.append((source, target, share))
    table = np.array(found).reshape(-1, 3)
    return table[:, :2].astype(np.int64), table[:, 2].astype(np.float32)
