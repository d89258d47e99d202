"""Run methods over the pairs of a set: in parallel, resumable, every result one line of JSON."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.evaluation import metrics
from lepard_ros.evaluation.methods import LEPARD, LepardMethod, Method, MethodResult, check_method_names, make_method
from lepard_ros.evaluation.readers import PairSource, RigidPair, open_set

FloatArray = NDArray[np.floating]
Record = dict[str, Any]

INLIER_DISTANCE = 0.1  # metres: a right match, as in the paper
RMSE_DISTANCE = 0.05  # metres: a source point has a true partner in the target
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Task:
    """What to evaluate: a set in a folder, methods by name, how many pairs, drawn with which seed."""

    folder: Path
    set_name: str
    methods: list[str]
    count: int | None = None
    seed: int = 0
    jobs: int = 1


def run_pairs(task: Task, log: Path | None = None, progress: bool = True) -> tuple[list[RigidPair], list[Record]]:
    """Evaluate every method on every pair. Results already in the `log` are kept, new ones appended to it.

    Returns the pairs, and the records of these pairs and methods, ordered by method and pair.
    """
    check_method_names(task.methods)
    identities = {name: _identity(name) for name in task.methods}
    source = open_set(task.folder, task.set_name)
    pairs = _recorded_pairs(task, log) or _draw_and_record(task, source, log)
    done = {_key(record): record for record in _read_log(log) if "method" in record}
    todo = [
        (name, pair)
        for name in task.methods
        for pair in pairs
        if (name, identities[name], pair.source, pair.target) not in done
    ]
    for record in _shown(_results(task, source, todo), len(todo), progress):
        record["identity"] = identities[record["method"]]
        done[_key(record)] = record
        _append(log, record)
    return pairs, [done[(name, identities[name], pair.source, pair.target)] for name in task.methods for pair in pairs]


def evaluate_pair(name: str, method: Method, source: PairSource, pair: RigidPair) -> Record:
    """Register one pair and measure the result."""
    first, second = source.cloud(pair.source), source.cloud(pair.target)
    result = method.register(first, second)
    record: Record = {
        "method": name,
        "source": pair.source,
        "target": pair.target,
        "scene": pair.scene,
        "overlap": pair.overlap,
        "accepted": result.accepted,
        "status": result.status,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "stages": result.stages,
        "transform": None if result.transform is None else np.asarray(result.transform, dtype=float).tolist(),
        "matches": None if result.matches is None else len(result.matches.source),
    }
    if pair.truth is not None:
        record |= _errors(result, pair, first, second)
    return {key: _finite(value) for key, value in record.items()}


def _errors(result: MethodResult, pair: RigidPair, source: FloatArray, target: FloatArray) -> Record:
    """The errors of a result against the truth."""
    assert pair.truth is not None
    common = source[metrics.overlap_mask(source, target, pair.truth, RMSE_DISTANCE)]
    errors: Record = {
        "rre": metrics.rotation_error(result.transform, pair.truth),
        "rte": metrics.translation_error(result.transform, pair.truth),
        "rmse": metrics.point_rmse(result.transform, pair.truth, common),
    }
    if pair.information is not None:
        errors["information_rmse"] = metrics.information_rmse(result.transform, pair.truth, pair.information)
    if result.matches is not None:
        moved = metrics.transform_points(pair.truth, result.matches.source)
        errors["inlier_ratio"] = metrics.inlier_ratio(moved, result.matches.target, INLIER_DISTANCE)
        right = np.linalg.norm(moved - result.matches.target, axis=1) < INLIER_DISTANCE
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
    """What stands behind a name: weights may change under the same one."""
    if not name.startswith(LEPARD):
        return ""
    method = make_method(name)
    assert isinstance(method, LepardMethod)
    return method.matcher.weights_id


# --- the log ---------------------------------------------------------------------------------------------------------


def _key(record: Record) -> tuple[str, str, str, str]:
    return record["method"], record["identity"], record["source"], record["target"]


def _read_log(log: Path | None) -> list[Record]:
    """The lines of the log. A last line cut off by an interrupted run is dropped: its pair runs again."""
    if log is None or not log.exists():
        return []
    lines = log.read_text(encoding="utf-8").split("\n")
    records = []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines) - 1:
                break
            raise InputError(f"line {number + 1} of {log} is not JSON; move the file away to start anew.") from error
    return records


def _append(log: Path | None, record: Record) -> None:
    if log is None:
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    cut_off = log.exists() and log.stat().st_size > 0 and not log.read_bytes().endswith(b"\n")
    if cut_off:
        log.write_text("".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _draw_and_record(task: Task, source: PairSource, log: Path | None) -> list[RigidPair]:
    """Draw the pairs and write them down, so that a later run takes the very same."""
    pairs = source.pairs(task.count, task.seed)
    if not pairs:
        raise InputError(f"{task.folder} gives no pair of the set {task.set_name}.")
    header = {"set": task.set_name, "count": task.count, "seed": task.seed, "pairs": [_pair_json(p) for p in pairs]}
    _append(log, header)
    return pairs


def _recorded_pairs(task: Task, log: Path | None) -> list[RigidPair]:
    """The pairs that an earlier run with the same set, count and seed wrote down."""
    headers = [record for record in _read_log(log) if "pairs" in record]
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
    methods: dict[str, Method]


def _start_worker(source: PairSource) -> None:
    _Worker.source, _Worker.methods = source, {}


def _work(job: tuple[str, RigidPair]) -> Record:
    name, pair = job
    if name not in _Worker.methods:
        _use_one_thread()
        _Worker.methods[name] = make_method(name)
    return evaluate_pair(name, _Worker.methods[name], _Worker.source, pair)


def _use_one_thread() -> None:
    """One thread per process: pairs run side by side, and times per pair mean the same for every method."""
    import torch

    torch.set_num_threads(1)


def _results(task: Task, source: PairSource, todo: list[tuple[str, RigidPair]]) -> Iterator[Record]:
    """Records in the order of `todo`, from this process or from several."""
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # inherited by the processes below
    if task.jobs <= 1 or len(todo) < 2:
        _start_worker(source)
        yield from map(_work, todo)
        return
    # Spawned, not forked: threads of torch and Open3D do not survive a fork.
    context = get_context("spawn")
    with ProcessPoolExecutor(task.jobs, context, initializer=_start_worker, initargs=(source,)) as pool:
        yield from pool.map(_work, todo)


def _shown(records: Iterable[Record], total: int, progress: bool) -> Iterable[Record]:
    """The records with a progress bar, when there is any work."""
    if not progress or total == 0:
        return records
    from tqdm import tqdm

    return tqdm(records, total=total, unit="pair", desc="registering", dynamic_ncols=True)
