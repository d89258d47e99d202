# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Registration measured: speed, recall and false accepts beside other methods, the acceptance rule, the covariance.

    export PYTHONPATH=. OMP_NUM_THREADS=1
    python bench/registration.py speed
    python bench/registration.py compare SHARED/data --pairs 60
    # prints the constants of acceptance.py, 10 CPU-minutes
    python bench/registration.py fit runs/rooms --related runs/real --max-overlap 0.35 --rooms 90 --pairs 2
    python bench/registration.py covariance runs/rooms --rooms 10

Times are CPU seconds of one thread. A registration is right within 15 degrees and 0.3 m.
"""

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.cloud.normals import estimate_normals
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import exponential, move, rotation_angle
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.matcher import Matcher
from lepard_ros.registration.rigid.acceptance import FEATURES, features, gather_evidence
from lepard_ros.registration.rigid.consistency import ConsistencySettings, find_hypotheses
from lepard_ros.registration.rigid.fallback import register_fpfh
from lepard_ros.registration.rigid.icp import IcpSettings, align, sample
from lepard_ros.registration.types import Surface

SETS = ("3DMatch", "3DLoMatch", "TUM", "unrelated")
SPACING = 0.05
UNIT = 0.00025


class Pair(NamedTuple):
    """Two surfaces and the motion between them, or None if they do not show one place."""

    source: Surface
    target: Surface
    truth: FloatArray | None


def surface_of(points: NDArray[np.floating]) -> Surface:
    """A cloud (N, 3) in the frame of its camera, on the grid and with normals."""
    (grid,) = grid_subsample(torch.as_tensor(np.ascontiguousarray(points), dtype=torch.float32), SPACING)
    _, index = cKDTree(grid.numpy()).query(grid.numpy(), k=20, distance_upper_bound=3.0 * SPACING)
    normals, _ = estimate_normals(grid, torch.as_tensor(index), torch.zeros(3))
    return Surface(grid.double().numpy(), normals.double().numpy(), SPACING)


def motion_error(found: FloatArray, truth: FloatArray) -> tuple[float, float]:
    """Degrees and metres between two motions (4, 4)."""
    turned = np.degrees(rotation_angle(found[:3, :3] @ truth[:3, :3].T))
    return float(turned), float(np.linalg.norm(found[:3, 3] - truth[:3, 3]))


def is_right(found: FloatArray, truth: FloatArray | None, degrees: float = 15.0, metres: float = 0.3) -> bool:
    """Whether a motion (4, 4) is near the truth; nothing is right between unrelated places."""
    if truth is None:
        return False
    turned, shifted = motion_error(found, truth)
    return turned < degrees and shifted < metres


# Data


@lru_cache(maxsize=512)
def fragment(folder: Path, name: str) -> Surface:
    """A 3DMatch fragment "scene/number"."""
    scene, number = name.rsplit("/", 1)
    with np.load(folder / f"{scene}.npz") as scans:
        return surface_of(scans[number] * UNIT)


def threedmatch_pairs(data: Path, benchmark: str, count: int) -> Iterator[Pair]:
    """A fixed sample of the pairs of "3DMatch" or "3DLoMatch"."""
    folder = data / "3dmatch"
    truth = np.load(folder / f"gt_{benchmark}.npz")
    for index in np.random.default_rng(1).permutation(len(truth["src"]))[:count]:
        motion = np.eye(4)
        motion[:3, :3], motion[:3, 3] = truth["rot"][index], truth["trans"][index].ravel()
        yield Pair(fragment(folder, str(truth["src"][index])), fragment(folder, str(truth["tgt"][index])), motion)


def unrelated_pairs(data: Path, count: int) -> Iterator[Pair]:
    """3DMatch fragments of different buildings; the two hotel scenes show rooms of one hotel, furnished alike."""
    folder = data / "3dmatch"
    truth = np.load(folder / "gt_3DMatch.npz")
    names = np.unique(truth["src"]).tolist()
    rng = np.random.default_rng(2)
    while count > 0:
        source, target = rng.choice(names, 2)
        if source.rsplit("-", 1)[0] != target.rsplit("-", 1)[0]:
            count -= 1
            yield Pair(fragment(folder, str(source)), fragment(folder, str(target)), None)


def tum_pairs(data: Path, count: int) -> Iterator[Pair]:
    """Pairs of single depth images of TUM fr1_desk."""
    import matplotlib.image

    folder = data / "tum_fr1_desk"
    words = (folder / "camera.txt").read_text().splitlines()[0].split()
    numbers = {key: float(value) for key, value in zip(words[::2], words[1::2], strict=True)}
    camera = Camera(
        int(numbers["width"]), int(numbers["height"]), numbers["fx"], numbers["fy"], numbers["cx"], numbers["cy"]
    )
    poses = {
        line.split()[0]: tum_pose(line) for line in (folder / "poses.txt").read_text().splitlines() if line[0] != "#"
    }

    @lru_cache(maxsize=200)
    def load(stamp: str) -> Surface:
        image = matplotlib.image.imread(folder / "depth" / f"{stamp}.png")
        depth = np.round(image * 65535.0) / numbers["depth_scale"]
        points = depth_to_points(depth, camera).reshape(-1, 3)
        return surface_of(points[np.isfinite(points).all(1) & (points[:, 2] < 4.0) & (points[:, 2] > 0.3)])

    lines = [line.split() for line in (folder / "pairs.txt").read_text().splitlines() if line[0] != "#"]
    for target, source, _ in lines[:count]:
        yield Pair(load(source), load(target), np.linalg.solve(poses[target], poses[source]))


def tum_pose(line: str) -> FloatArray:
    """The pose (4, 4) of a line "stamp tx ty tz qx qy qz qw"."""
    values = np.array(line.split()[1:], dtype=float)
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = Rotation.from_quat(values[3:]).as_matrix(), values[:3]
    return pose


class RawPair(NamedTuple):
    """Two clouds (N, 3) in the frames of their sensors and the motion between them, None for different places."""

    source: FloatArray
    target: FloatArray
    truth: FloatArray | None


def raw_pairs(files: list[Path], per_room: int, max_overlap: float = 1.0, unrelated: bool = True) -> Iterator[RawPair]:
    """Of each room `per_room` pairs, and (unrelated) as many clouds against those of the room before."""
    strangers: list[FloatArray] = []
    for path in files:
        rng = np.random.default_rng(int(path.stem.split("_")[-1]))
        with np.load(path) as shard:
            points, offset, pose, pairs = (shard[name] for name in ("points", "offset", "pose", "pairs"))
            pairs = pairs[shard["overlap"].min(1) < max_overlap]
        clouds = [points[start:end] * UNIT for start, end in itertools.pairwise(offset)]
        for first, second in rng.permutation(pairs)[:per_room].tolist():
            yield RawPair(clouds[first], clouds[second], np.linalg.solve(pose[second], pose[first]))
        chosen = rng.permutation(len(clouds)).tolist()
        for index, stranger in zip(chosen[:per_room], strangers if unrelated else [], strict=False):
            yield RawPair(clouds[index], stranger, None)
        strangers = [clouds[index] for index in chosen]


# Methods


def by_us(source: Surface, target: Surface) -> FloatArray | None:
    """FPFH features, our hypotheses, verification and acceptance."""
    return register_fpfh(source, target).transform


def by_ransac(source: Surface, target: Surface) -> FloatArray | None:
    """Open3D: FPFH, RANSAC with 100,000 draws, point-to-plane ICP; never refuses."""
    import open3d

    registration: Any = open3d.pipelines.registration
    clouds, fpfh = [], []
    for surface in (source, target):
        cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(surface.points))
        cloud.normals = open3d.utility.Vector3dVector(surface.normals)
        within = open3d.geometry.KDTreeSearchParamHybrid(5.0 * SPACING, 100)
        clouds.append(cloud)
        fpfh.append(registration.compute_fpfh_feature(cloud, within))
    open3d.utility.random.seed(0)
    checks = [
        registration.CorrespondenceCheckerBasedOnEdgeLength(0.9),
        registration.CorrespondenceCheckerBasedOnDistance(1.5 * SPACING),
    ]
    point, plane = (
        registration.TransformationEstimationPointToPoint(False),
        registration.TransformationEstimationPointToPlane(),
    )
    draws = registration.RANSACConvergenceCriteria(100_000, 0.999)
    coarse = registration.registration_ransac_based_on_feature_matching(
        *clouds, *fpfh, True, 1.5 * SPACING, point, 3, checks, draws
    )
    return registration.registration_icp(*clouds, 1.5 * SPACING, coarse.transformation, plane).transformation


def by_kiss(source: Surface, target: Surface) -> FloatArray | None:
    """KISS-Matcher with its own defaults; refuses when its solution is not valid."""
    import kiss_matcher

    matcher = kiss_matcher.KISSMatcher(kiss_matcher.KISSMatcherConfig(SPACING))
    solution = matcher.estimate(source.points.astype(np.float32), target.points.astype(np.float32))
    if not solution.valid:
        return None
    transform = np.eye(4)
    transform[:3, :3], transform[:3, 3] = solution.rotation, solution.translation
    return transform


METHODS: dict[str, Callable[[Surface, Surface], FloatArray | None]] = {
    "fpfh + ours": by_us,
    "fpfh + ransac": by_ransac,
    "kiss-matcher": by_kiss,
}


def compare(args: argparse.Namespace) -> None:
    """Print recall, false results and CPU seconds of every method on every data set."""
    sets = {name: threedmatch_pairs(args.folder, name, args.pairs) for name in ("3DMatch", "3DLoMatch")}
    sets["TUM"] = tum_pairs(args.folder, args.pairs)
    sets["unrelated"] = unrelated_pairs(args.folder, args.pairs)
    print(f"{'data':10} {'method':14} {'pairs':>5} {'right':>7} {'wrong':>7} {'refused':>7} {'CPU s':>6}")
    for name in args.sets:
        pairs = list(sets[name])
        for method in args.methods:
            print(f"{name:10} {method:14} {tally(METHODS[method], pairs)}", flush=True)


def tally(method: Callable[[Surface, Surface], FloatArray | None], pairs: list[Pair]) -> str:
    """Number of pairs, shares of right, wrong and refused ones, CPU seconds a pair."""
    right, wrong = 0, 0
    start = time.process_time()
    for pair in pairs:
        found = method(pair.source, pair.target)
        right += found is not None and is_right(found, pair.truth)
        wrong += found is not None and not is_right(found, pair.truth)
    seconds, count = (time.process_time() - start) / len(pairs), len(pairs)
    shares = [f"{100.0 * part / count:6.1f}%" for part in (right, wrong, count - right - wrong)]
    return f"{count:5} {' '.join(shares)} {seconds:6.2f}"


# The acceptance rule


def varied(pair: RawPair, number: int, rng: np.random.Generator) -> tuple[RawPair, float]:
    """The pair at another scale, every second one cut to balls of 0.5 to 2 m first; and the scale, 0.1 to 10."""
    source, target, truth = pair
    if number % 2:
        radius = rng.uniform(0.6, 1.3)
        first, second = (cloud[rng.integers(len(cloud))] for cloud in (source, target))
        if truth is not None:
            near = cKDTree(target).query(move(truth, source), distance_upper_bound=0.06)[0]
            first = source[rng.choice(np.flatnonzero(np.isfinite(near)))]
            second = move(truth, first[None])[0] + rng.normal(size=3) * 0.3 * radius
        source = source[np.linalg.norm(source - first, axis=1) < radius]
        target = target[np.linalg.norm(target - second, axis=1) < radius * rng.uniform(0.8, 1.6)]
    scale = float(np.exp(rng.uniform(-np.log(10.0), np.log(10.0))))
    motion = None if truth is None else truth.copy()
    if motion is not None:
        motion[:3, 3] *= scale
    return RawPair(source * scale, target * scale, motion), scale


def judged_motions(matcher: Matcher, pair: RawPair) -> Iterator[tuple[FloatArray, FloatArray]]:
    """The motion (4, 4) that each try of the matcher would judge, and its features (F,)."""
    clouds = matcher.encode_all([pair.source, pair.target])
    rule = replace(matcher.rigid.acceptance, min_quality=-np.inf, min_overlap=0.0, min_determinacy=0.0)
    rigid = replace(matcher.settings.rigid, acceptance=rule)
    lenient = Matcher(matcher.network, matcher.card, settings=replace(matcher.settings, rigid=rigid))
    for found in (lenient.register(*clouds, effort=0), lenient.try_coarser(*clouds)):
        if found.transform is None:
            continue
        surfaces = clouds[0].surface, clouds[1].surface
        evidence = gather_evidence(found.matches, *surfaces, found.transform[None], rule, rigid.refine_points)
        yield found.transform, features(evidence)[0]


def fit(args: argparse.Namespace) -> None:
    """Fit the log-odds of acceptance.py to the network's matches of room files, and print its constants.

    Whole clouds and cut ones, at scales from 0.1 to 10, of one room and of different rooms; every try of a pair counts,
    the further one too. The bias lets `--false-accepts` of the wrong motions pass.
    """
    started = time.process_time()
    rng, matcher = np.random.default_rng(5), Matcher.from_pretrained(args.weights)
    rows, right, numbers, related = [], [], [], []
    rooms = raw_pairs(room_files(args.folders, args), args.pairs, args.max_overlap)
    real = raw_pairs(room_files(args.related, args), args.pairs, args.max_overlap, unrelated=False)
    for number, whole in enumerate(itertools.chain(rooms, real)):
        pair, scale = varied(whole, number, rng)
        related.append(pair.truth is not None)
        for motion, values in judged_motions(matcher, pair):
            rows.append(values)
            right.append(is_right(motion, pair.truth, metres=0.3 * scale))
            numbers.append(number)
    print_rule(np.array(rows), np.array(right), np.array(numbers), np.array(related), args.false_accepts)
    print(f"# {time.process_time() - started:.0f} CPU-s")


def print_rule(
    values: FloatArray,
    right: NDArray[np.bool_],
    numbers: NDArray[np.integer],
    related: NDArray[np.bool_],
    false_accepts: float,
) -> None:
    """Print the constants that fit motions with features (N, F), right or not (N,), of pairs by number (N,).

    related: (P,), whether a pair shows one place.
    """
    centre, coefficients = values.mean(0), logistic_regression(values, right)
    parts = (values - centre) * coefficients
    blind = np.delete(parts, FEATURES.index("conflict"), axis=1).sum(1)
    print(f"# {related.sum()} pairs of one room, {(~related).sum()} of different rooms; a right motion is judged in")
    print(f"# {len(np.unique(numbers[right]))} of them")
    for name, constants in (("centre", centre), ("coefficients", coefficients)):
        print(f"{name}=np.array({constants.round(3).tolist()}),")
    for name, scores in (("bias", parts.sum(1)), ("blind_bias", blind)):
        bias = -np.quantile(scores[~right], 1.0 - false_accepts)
        accepted, wrong = (len(np.unique(numbers[(scores > -bias) & kind])) for kind in (right, ~right))
        print(f"{name}={bias:.3f},  # accepts a right motion in {accepted} pairs, a wrong one in {wrong}")


def logistic_regression(values: FloatArray, labels: NDArray[np.bool_], ridge: float = 10.0) -> FloatArray:
    """Coefficients (F,) of log-odds linear in values (N, F), by Newton steps; the ridge is on standardised values."""
    scale = values.std(0) + 1e-9
    design = np.column_stack([(values - values.mean(0)) / scale, np.ones(len(values))])
    penalty = np.diag([ridge] * values.shape[1] + [1e-6])
    solution = np.zeros(design.shape[1])
    for _ in range(50):
        chance = 1.0 / (1.0 + np.exp(-np.clip(design @ solution, -30.0, 30.0)))
        curvature = (design.T * (chance * (1.0 - chance))) @ design + penalty
        solution -= np.linalg.solve(curvature, design.T @ (chance - labels) + penalty @ solution)
    return solution[:-1] / scale


def room_files(places: list[Path], args: argparse.Namespace) -> list[Path]:
    """The room files of each folder from `--first-seed` on, at most `--rooms` of each."""
    folders = [sorted(folder.glob("room_*.npz")) for folder in places]
    seeds = [[path for path in files if int(path.stem[5:]) >= args.first_seed] for files in folders]
    return [path for files in seeds for path in files[: args.rooms]]


# The covariance


def covariance(args: argparse.Namespace) -> None:
    """Print the mean normalised error (error^T covariance^-1 error) / 6 of true motions: one is perfect."""
    normalised = []
    for pair in raw_pairs(room_files(args.folders, args), args.pairs):
        if pair.truth is None:
            continue
        found = register_fpfh(surface_of(pair.source), surface_of(pair.target))
        if found.transform is None or found.covariance is None or not is_right(found.transform, pair.truth):
            continue
        turned = Rotation.from_matrix(pair.truth[:3, :3] @ found.transform[:3, :3].T).as_rotvec()
        error = np.concatenate([pair.truth[:3, 3] - found.transform[:3, 3], turned])
        normalised.append(error @ np.linalg.solve(found.covariance, error) / 6.0)
    spread = np.percentile(normalised, [10, 50, 90]).round(2)
    print(f"{len(normalised)} pairs: mean NEES / 6 = {np.mean(normalised):.2f}, 10/50/90 % = {spread}")


# Speed


def speed(_: argparse.Namespace) -> None:
    """Print CPU milliseconds of the hypotheses for several numbers of matches, and of ICP."""
    for count in (250, 500, 1000, 1500):
        rng = np.random.default_rng(count)
        source, target = (rng.uniform(-2.0, 2.0, (count, 3)) for _ in range(2))
        true = count // 20
        target[:true] = move(exponential(rng.normal(size=6)), source[:true]) + rng.normal(size=(true, 3)) * 0.03
        first, second = torch.as_tensor(source), torch.as_tensor(target)
        confidence = torch.as_tensor(rng.uniform(0.1, 1.0, count))
        work = partial(find_hypotheses, first, second, confidence, SPACING, ConsistencySettings())
        milliseconds = 1e3 * cpu_seconds(work)
        print(f"hypotheses of {count:5} matches, 5 % true: {milliseconds:6.1f} ms")
    icp_speed()


def icp_speed() -> None:
    """Print CPU milliseconds of ten steps of our ICP and of Open3D's, on a rolling surface of 4,900 points."""
    import open3d

    surface = rolling_surface()
    start = exponential(np.array([0.02, -0.01, 0.02, 0.01, 0.01, -0.01]))
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(surface.points))
    cloud.normals = open3d.utility.Vector3dVector(surface.normals)
    registration = open3d.pipelines.registration
    plane = registration.TransformationEstimationPointToPlane(registration.TukeyLoss(SPACING))
    ten = registration.ICPConvergenceCriteria(0.0, 0.0, 10)
    works: dict[str, Callable[[], object]] = {
        "ours": lambda: align(surface, surface, start[None], 10, IcpSettings()),
        "ours, 8 motions of 800 points": lambda: align(
            sample(surface, 800), surface, np.tile(start, (8, 1, 1)), 10, IcpSettings()
        ),
        "Open3D": lambda: registration.registration_icp(cloud, cloud, 2.0 * SPACING, start, plane, ten),
    }
    for name, work in works.items():
        print(f"ten ICP steps, {name}: {1e3 * cpu_seconds(work):.1f} ms")


def rolling_surface() -> Surface:
    """Waves of 70 x 70 points, seen from above."""
    x, y = (values.ravel() for values in np.meshgrid(np.arange(70) * SPACING, np.arange(70) * SPACING))
    points = np.stack([x, y, 0.3 * np.sin(2.0 * x) + 0.3 * np.sin(3.0 * y)], axis=1)
    normals = np.stack([-0.6 * np.cos(2.0 * x), -0.9 * np.cos(3.0 * y), np.ones_like(x)], axis=1)
    return Surface(points, normals / np.linalg.norm(normals, axis=1, keepdims=True), SPACING, np.array([1.5, 1.5, 4.0]))


def cpu_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """The best CPU time of a piece of work, after one warm-up; the best, since other processes disturb the rest."""
    work()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    """Read the command line and run one benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for run in (speed, compare, fit, covariance):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        if run is not speed:
            command.add_argument("--pairs", type=int, default=60 if run is compare else 4, help="pairs per set or room")
        if run is compare:
            command.add_argument("folder", type=Path)
            command.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
            command.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
        if run in (fit, covariance):
            command.add_argument("folders", type=Path, nargs="+", help="folders of room files")
            command.add_argument("--rooms", type=int, default=30, help="rooms of each folder")
            command.add_argument("--first-seed", type=int, default=0)
        if run is fit:
            command.add_argument("--weights", default="rigid", help="name or file of the weights")
            command.add_argument("--false-accepts", type=float, default=0.02, help="share of wrong motions accepted")
            command.add_argument("--related", type=Path, nargs="*", default=[], help="files that show the same places")
            command.add_argument("--max-overlap", type=float, default=1.0, help="maximum overlap of a pair")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.run(args)


if __name__ == "__main__":
    main()
