# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Run methods over the pairs of a set: in parallel, resumable, every result one line of JSON."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.data.readers import DepthSequence, PairSource, RigidPair, open_set
from lepard_ros.errors import InputError
from lepard_ros.evaluation import metrics
from lepard_ros.evaluation.disturbance import DisturbedMethod
from lepard_ros.evaluation.methods import LEPARD, LepardMethod, Method, MethodResult, check_method_names, make_method
from lepard_ros.evaluation.runner import Record, append_log, read_log, run_parallel, with_progress
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.overlap import overlap_mask
from lepard_ros.registration.types import MIN_TRUST

PUBLISHED_GRID = 0.025  # metres, of the fragments of 3DMatch
INLIER_DISTANCE = 0.1  # metres: maximum error of a correct match, as in the paper
SUREST = 250  # most confident matches whose inlier ratio is reported as well; others report 250 to 5,000
MIN_POINTS = 10  # per cloud
RMSE_DISTANCE = 0.05  # metres: a source point has a true partner in the target


@dataclass(frozen=True)
class Task:
    """What to evaluate: a set in a folder, methods by name, number of pairs, seed of the sample.

    camera_file: for a depth sequence, overrides the calibration of its folder. cluster: address of a Dask scheduler.
    """

    folder: Path
    set_name: str
    methods: list[str]
    count: int | None = None
    seed: int = 0
    jobs: int = 1
    camera_file: Path | None = None
    cluster: str | None = None

    @property
    def published_grid(self) -> float | None:
        """Metres, of the grid on which the set's clouds are published, or None for raw ones."""
        return None if self.set_name == "tum" else PUBLISHED_GRID

    def open(self) -> PairSource:
        """The pairs and their clouds."""
        return open_set(self.folder, self.set_name, self.camera_file)


def run_pairs(task: Task, log: Path | None = None, progress: bool = True) -> tuple[list[RigidPair], list[Record]]:
    """Evaluate every method on every pair. Results already in the `log` are kept, new ones appended to it.

    Returns the pairs, and the records of these pairs and methods, ordered by method and pair.
    """
    check_method_names(task.methods)
    source = task.open()
    identities = {name: _identity(name) + _camera_identity(source) for name in task.methods}
    pairs = _recorded_pairs(task, log) or _draw_and_record(task, source, log)
    done = {_key(record): record for record in read_log(log) if "method" in record}
    # Pair by pair, so that an interrupted run has every method on the same pairs.
    todo = [
        (name, pair)
        for pair in pairs
        for name in task.methods
        if (name, identities[name], pair.source, pair.target) not in done
    ]
    results = run_parallel(_work, todo, task.jobs, _start_worker, (source, task.published_grid), task.cluster)
    for record in with_progress(results, len(todo), progress):
        record["identity"] = identities[record["method"]]
        done[_key(record)] = record
        append_log(log, record)
    return pairs, [done[(name, identities[name], pair.source, pair.target)] for name in task.methods for pair in pairs]


def evaluate_pair(name: str, method: Method, source: PairSource, pair: RigidPair) -> Record:
    """Register one pair and measure the result."""
    first, second = _whole_cloud(source, pair.source), _whole_cloud(source, pair.target)
    result = method.register(first, second)
    record: Record = {
        "method": name,
        "source": pair.source,
        "target": pair.target,
        "scene": pair.scene,
        "overlap": pair.overlap,
        "accepted": result.accepted,
        "status": result.status,
        "quality": result.quality,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "stages": result.stages,
        "transform": None if result.transform is None else np.asarray(result.transform, dtype=float).tolist(),
        "matches": None if result.matches is None else len(result.matches.source),
    }
    if pair.truth is not None:
        record |= _errors(result, pair, first, second)
    return {key: _finite(value) for key, value in record.items()}


def _whole_cloud(source: PairSource, key: str) -> FloatArray:
    """A cloud (N, 3) with enough points: not every method can handle an empty one."""
    points = source.cloud(key)
    if len(points) < MIN_POINTS:
        raise InputError(f"the cloud {key} has {len(points)} points, but a pair needs {MIN_POINTS} of each.")
    return points


def _errors(result: MethodResult, pair: RigidPair, source: FloatArray, target: FloatArray) -> Record:
    """The errors of a result against the truth."""
    assert pair.truth is not None
    common = source[overlap_mask(source, target, pair.truth, RMSE_DISTANCE)]
    errors: Record = {
        "rre": metrics.rotation_error(result.transform, pair.truth),
        "rte": metrics.translation_error(result.transform, pair.truth),
        "rmse": metrics.point_rmse(result.transform, pair.truth, common),
    }
    if pair.information is not None:
        errors["information_rmse"] = metrics.information_rmse(result.transform, pair.truth, pair.information)
    if result.matches is not None:
        moved, target = metrics.transform_points(pair.truth, result.matches.source), result.matches.target
        errors["inlier_ratio"] = metrics.inlier_ratio(moved, target, INLIER_DISTANCE)
        errors["inlier_ratio_surest"] = metrics.inlier_ratio(moved[:SUREST], target[:SUREST], INLIER_DISTANCE)
        if result.trust is not None:
            kept = result.trust >= MIN_TRUST
            errors["inlier_ratio_consistent"] = metrics.inlier_ratio(moved[kept], target[kept], INLIER_DISTANCE)
        right = np.linalg.norm(moved - target, axis=1) < INLIER_DISTANCE
        errors["confidence_bins"] = _confidence_bins(result.matches.confidence, right)
    if result.covariance is not None and result.transform is not None:
        difference = metrics.motion_difference(result.transform, pair.truth)
        errors["nees"] = 6 * metrics.covariance_consistency(difference[None], np.asarray(result.covariance)[None])[0]
    return errors


def _confidence_bins(confidence: FloatArray, right: NDArray[np.bool_]) -> list[list[float]]:
    """Ten bins of [number, sum of confidences, number right], which add up over pairs."""
    place = np.clip((np.asarray(confidence) * 10).astype(int), 0, 9)
    columns = [np.bincount(place, weights=w, minlength=10) for w in (np.ones(len(place)), confidence, right)]
    return np.round(np.stack(columns, axis=1), 4).tolist()


def _finite(value: Any) -> Any:
    """JSON has no infinity: None stands for it."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _identity(name: str) -> str:
    """Identity of a method, including its weights, which may change under the same name."""
    if not name.startswith(LEPARD):
        return ""
    method = make_method(name)
    assert isinstance(method, (LepardMethod, DisturbedMethod))
    return method.matcher.weights_id


def _camera_identity(source: PairSource) -> str:
    """Identity of the calibration: a given camera file yields other clouds from the same images."""
    if not isinstance(source, DepthSequence) or source.camera_file is None:
        return ""
    return f" camera {tuple(source.recording.calibration[:2])}"


# --- the log ---------------------------------------------------------------------------------------------------------


def _key(record: Record) -> tuple[str, str, str, str]:
    return record["method"], record["identity"], record["source"], record["target"]


def _draw_and_record(task: Task, source: PairSource, log: Path | None) -> list[RigidPair]:
    """Sample the pairs and log them, so that a later run uses the same ones."""
    pairs = source.pairs(task.count, task.seed)
    if not pairs:
        raise InputError(f"{task.folder} contains no pair of the set {task.set_name}.")
    header = {"set": task.set_name, "count": task.count, "seed": task.seed, "pairs": [_pair_json(p) for p in pairs]}
    append_log(log, header)
    return pairs


def _recorded_pairs(task: Task, log: Path | None) -> list[RigidPair]:
    """The pairs logged by an earlier run with the same set, count and seed."""
    headers = [record for record in read_log(log) if "pairs" in record]
    if any(header["set"] != task.set_name for header in headers):
        raise InputError(f"{log} holds results of the set {headers[0]['set']}: give another --json file.")
    same = [h for h in headers if (h["count"], h["seed"]) == (task.count, task.seed)]
    return [_pair_of_json(pair) for pair in same[-1]["pairs"]] if same else []


def _pair_json(pair: RigidPair) -> Record:
    arrays = {name: getattr(pair, name) for name in ("truth", "information")}
    lists = {name: None if array is None else array.tolist() for name, array in arrays.items()}
    return {"source": pair.source, "target": pair.target, "scene": pair.scene, "overlap": pair.overlap, **lists}


def _pair_of_json(values: Record) -> RigidPair:
    arrays = {name: None if values[name] is None else np.array(values[name]) for name in ("truth", "information")}
    return RigidPair(values["source"], values["target"], values["scene"], arrays["truth"], values["overlap"],
                     arrays["information"])  # fmt: skip


# --- processes -------------------------------------------------------------------------------------------------------


class _Worker:
    """What a process keeps between pairs: the clouds' source and the methods it has made."""

    source: PairSource
    published_grid: float | None
    methods: dict[str, Method]


def _start_worker(source: PairSource, published_grid: float | None) -> None:
    _Worker.source, _Worker.published_grid, _Worker.methods = source, published_grid, {}


def _work(job: tuple[str, RigidPair]) -> Record:
    name, pair = job
    if name not in _Worker.methods:
        _Worker.methods[name] = make_method(name, _Worker.published_grid)
    return evaluate_pair(name, _Worker.methods[name], _Worker.source, pair)
