# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A long walk: three rounds through the corridor of a synthesised building, and the search for a place in its map.

    python bench/walk.py [--clouds 2100] [--views 100] [--folder FOLDER] [--weights rigid] [--save MAP | --map MAP]

Clouds of 160 x 120 points, ten a second; the second round looks backwards and the third to other sides than the first,
so that the map grows. Nothing is read from outside. Printed are drift as published and after loop closure, the loops
found, memory as the map grows, and for random views of the corridor, each with up to LOOKS clouds: how many are found,
false poses, and the time of a query.
--folder keeps the rendered images for another run, --save the map; --map searches such a map instead of walking.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.data.trajectories import FALSE_POSE, FALSE_TURN, Trajectory, compare
from lepard_ros.demo.processes import resident_megabytes
from lepard_ros.evaluation.replay import load_matcher
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between
from lepard_ros.synthesis.building_floor import floor_meshes, random_views, rounds
from lepard_ros.synthesis.room_sequences import steady_sensor
from lepard_ros.synthesis.sensor import Scene, look, observe
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import TrackerSettings

SEED = 5
WIDTH = 160
RATE = 10.0
ROUNDS = 3
LOOKS = 3  # clouds of a query, each a small step from the one before: one look is never enough to jump
STEP = 0.03  # metres between them
SENSOR = steady_sensor(WIDTH)
# A keyframe at every step, so that the map gets large.
SETTINGS = TrackerSettings(keyframe_distance=0.1, keyframe_degrees=10.0, max_keyframes=5000, max_megabytes=4000.0)


class Video(NamedTuple):
    """Depth images (F, H, W), millimetres, and their poses (F, 4, 4)."""

    depths: NDArray[np.uint16]
    poses: FloatArray

    def clouds(self) -> Iterator[NDArray[np.float32]]:
        """Organised clouds in metres."""
        for depth in self.depths:
            yield depth_to_points(depth.astype(np.float32) * 1e-3, SENSOR.camera)


def rendered(name: str, poses: FloatArray, folder: Path | None) -> Video:
    """What the sensor sees from these poses; read from the folder if it was rendered before."""
    file = None if folder is None else folder / f"{name}_{len(poses)}.npz"
    if file is not None and file.is_file():
        with np.load(file) as stored:
            return Video(stored["depths"], stored["poses"])
    meshes = floor_meshes(np.random.default_rng(SEED))
    scene, rng = Scene(meshes), np.random.default_rng(SEED + 1)
    seen = [
        observe(rng, SENSOR, look(scene, SENSOR.camera, pose), np.zeros(len(meshes))) for pose in tqdm(poses, desc=name)
    ]
    video = Video((np.stack(seen) * 1e3).astype(np.uint16), poses)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(file, depths=video.depths, poses=video.poses)
    return video


def walk(tracker: RigidTracker, video: Video) -> None:
    """Track the walk and print what came of it."""
    published: list[tuple[float, FloatArray]] = []
    cpu = time.process_time()
    for number, points in enumerate(tqdm(video.clouds(), total=len(video.depths), desc="walk")):
        track = tracker.process(points, number / RATE)
        published += [(number / RATE, track.pose)] if track.pose is not None else []
        if number % 500 == 499:
            print(memory(tracker, number + 1), flush=True)
    tracker.finish()
    cpu = time.process_time() - cpu
    truth = Trajectory(np.arange(len(video.poses)) / RATE, video.poses)
    before = compare(Trajectory(np.array([s for s, _ in published]), np.array([p for _, p in published])), truth)
    after = compare(Trajectory(*tracker.path()), truth)
    metres = float(np.linalg.norm(np.diff(video.poses[:, :3, 3], axis=0), axis=1).sum())
    print(f"walk        {metres:.0f} m, {len(published)}/{len(video.depths)} clouds with a pose, {cpu:.0f} CPU-s")
    print(f"drift       as published: ATE {before.ate_rmse:.3f} m, worst {before.errors.max():.2f} m")
    print(f"            after loop closure: ATE {after.ate_rmse:.3f} m, worst {after.errors.max():.2f} m")
    print(f"false       {int(before.false().sum())} of the published poses")
    print(f"loops       {loops(tracker, len(video.depths))}")
    print(memory(tracker, len(video.depths)))


def loops(tracker: RigidTracker, clouds: int) -> str:
    """How many motions tie keyframes of different rounds."""
    stamps = {frame.id: frame.stamp for frame in tracker.keyframes}
    ages = [abs(stamps[edge.source] - stamps[edge.target]) for edge in tracker.edges()]
    rounds_apart = np.round(np.array(ages) * RATE / (clouds / ROUNDS)).astype(int)
    return ", ".join(f"{(rounds_apart == n).sum()} motions over {n} round(s)" for n in range(1, ROUNDS))


def memory(tracker: RigidTracker, clouds: int) -> str:
    """Megabytes of the process and of a keyframe."""
    count, megabytes = len(tracker.keyframes), tracker.keyframes.nbytes / 1e6
    share = f"{count} keyframes of {megabytes / max(count, 1):.2f} MB"
    return f"memory      after {clouds} clouds {resident_megabytes(os.getpid()):.0f} MB, {share}"


def query(tracker: RigidTracker, video: Video, origin: FloatArray) -> None:
    """Search for random views in the map and print how that went. origin: (4, 4), the map in the world."""
    tracker.apply(replace(SETTINGS, mapping=False))
    clouds = list(video.clouds())
    found, false, seconds, cpu = 0, 0, [], []
    for start in tqdm(range(0, len(clouds), LOOKS), desc="queries"):
        tracker.relocalise()
        for number in range(start, start + LOOKS):
            began, used = time.monotonic(), time.process_time()
            track = tracker.process(clouds[number], 1e5 + 100 * start + number / RATE)
            seconds.append(time.monotonic() - began)
            cpu.append(time.process_time() - used)
            if track.pose is not None:
                error, turn = motion_between(origin @ track.pose, video.poses[number])
                wrong = error > FALSE_POSE or turn > FALSE_TURN
                found, false = found + (not wrong), false + wrong
                break
    views = len(clouds) // LOOKS
    print(f"relocalised {found}/{views} views in {len(tracker.keyframes)} keyframes, {false} false poses")
    print(
        f"a query     median {np.median(seconds):.2f} s, 95 % {np.percentile(seconds, 95):.2f} s;"
        f" median {np.median(cpu):.2f} CPU-s a cloud"
    )


def looks(views: FloatArray) -> FloatArray:
    """LOOKS poses for each view, a small step to the side each: (LOOKS * V, 4, 4)."""
    poses = np.repeat(views, LOOKS, axis=0)
    poses[:, :3, 3] += poses[:, :3, 0] * STEP * (np.arange(len(poses)) % LOOKS)[:, None]
    return poses


def main() -> None:
    """Walk, then search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clouds", type=int, default=2100, help="of the walk (default 2100)")
    parser.add_argument("--views", type=int, default=100, help="to search for (default 100)")
    parser.add_argument("--folder", type=Path, help="where the rendered images are kept")
    parser.add_argument("--weights", default="rigid", help="a shipped name or a file (default rigid)")
    parser.add_argument("--save", type=Path, help="where the map of the walk is kept")
    parser.add_argument("--map", type=Path, help="a map of an earlier walk, to search in")
    args = parser.parse_args()
    matcher, poses = load_matcher(args.weights), rounds(args.clouds, ROUNDS)
    tracker = RigidTracker.load(args.map, matcher, SETTINGS) if args.map else RigidTracker(matcher, SETTINGS)
    if not args.map:
        walk(tracker, rendered("walk", poses, args.folder))
    if args.save:
        tracker.save(args.save)
    views = random_views(np.random.default_rng(SEED + 2), args.views)
    query(tracker, rendered("views", looks(views), args.folder), poses[0])


if __name__ == "__main__":
    main()
