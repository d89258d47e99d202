# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Evaluation of matches and warps on deformable pairs in 4DMatch's format, with two baselines."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from lepard_ros.data.fourdmatch import TEST_PARTS, DeformablePair, benchmark_of, load_pair
from lepard_ros.errors import InputError
from lepard_ros.evaluation import metrics
from lepard_ros.evaluation.bootstrap import mean_interval
from lepard_ros.evaluation.methods import LEPARD, use_published_grid
from lepard_ros.evaluation.runner import Record, append_log, read_log, run_parallel, with_progress
from lepard_ros.evaluation.symmetry import Mirror, count_mirrored, find_mirror
from lepard_ros.evaluation.tables import by_method, interval, number, percent
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.flow import blend_flow
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.registration.types import Matches

if TYPE_CHECKING:
    from lepard_ros.encoded_cloud import EncodedCloud

WarpFunction = Callable[[FloatArray], FloatArray]

PUBLISHED_GRID = 0.01  # metres, of the clouds of 4DMatch
NEAR = 0.04  # metres: maximum error of a correct match or a recalled point, as in the paper
DEFINITIONS = 2  # increased when the definition of a figure changes, so that older records are recomputed
METRIC_SET, SEEN_SET = "metric_index", "points seen in both"  # on which points NFMR is measured
SUBSAMPLE = 0.03  # metres: spacing at which a dense warp is read as matches
CPD_POINTS = 1000  # per cloud: the cost grows with the cube
BASELINES = ("n-icp", "cpd")
MIRRORED = ("mirrored", "mirrored_by_chance")  # numbers of matches in a record, shares in a summary
FILTERED = "+filter"  # suffix of a method whose matches pass the consistency filter
MIRROR_SOURCE = "+mirrored"  # suffix of a control: the method gets the mirror image of the source


@dataclass(frozen=True)
class DeformableResult:
    """Result of a method on a pair. warp: moves source points (N, 3) to the target's frame, or None.

    seconds, cpu_seconds: from raw points to matches and warp. accepted: whether the method accepts the warp. warped:
    whether a warp was requested.
    """

    matches: Matches
    warp: WarpFunction | None
    accepted: bool
    seconds: float
    cpu_seconds: float
    status: str = ""
    warped: bool = True


class DeformableMethod(Protocol):
    """A method that warps one cloud to another."""

    def align(self, source: FloatArray, target: FloatArray) -> DeformableResult:
        """Align source (N, 3) with target (M, 3), metres."""


class LepardDeformable:
    """The matcher's matches, with or without the consistency filter, and optionally the warp fitted to them."""

    def __init__(self, weights: str, threshold: float | None, filtered: bool, register: bool) -> None:
        from lepard_ros.matcher import Matcher

        self.matcher = Matcher.from_pretrained(weights)
        use_published_grid(self.matcher, PUBLISHED_GRID)
        self.filtered, self.register = filtered, register
        if threshold is not None:
            self.matcher.config = replace(self.matcher.config, confidence_threshold=threshold)

    def align(self, source: FloatArray, target: FloatArray) -> DeformableResult:
        """Match, filter, warp. The warp filters the matches of both directions, as the row of filtered ones does."""
        from lepard_ros.matcher import joined
        from lepard_ros.registration.deformable.nonrigid import warp_from_matches

        wall, cpu = time.perf_counter(), time.process_time()
        clouds = self.matcher.encode_all([source, target])
        matches = self.matcher.match(*clouds)
        both = joined(matches, self.matcher.match_back(source, target)) if self.register or self.filtered else matches
        warp = warp_from_matches(source, target, both) if self.register else None
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        if self.filtered:
            matches = consistent_matches(clouds[0], clouds[1], both)
        if warp is None:
            return matches_alone(matches, seconds, cpu_seconds)
        return DeformableResult(matches, warp if warp.ok else None, warp.ok, seconds, cpu_seconds, warp.status.name)


def consistent_matches(source: "EncodedCloud", target: "EncodedCloud", matches: Matches) -> Matches:
    """The matches that pass the consistency filter, with normals as in a warp."""
    from lepard_ros.matcher import local_matches
    from lepard_ros.registration.deformable.match_filter import chosen, filter_matches
    from lepard_ros.registration.deformable.nonrigid import matched_normals

    normals = matched_normals(local_matches(matches, source, target), source.surface, target.surface)
    return chosen(matches, filter_matches(matches, normals=normals))


class MirroredSource:
    """A control: the matches of a method for the mirrored source. One that distinguishes left from right finds few."""

    REFLECTION = np.array([-1.0, 1.0, 1.0])  # keeps the sensor at the origin

    def __init__(self, method: DeformableMethod) -> None:
        self.method = method

    def align(self, source: FloatArray, target: FloatArray) -> DeformableResult:
        """The matches of the mirrored source, mapped back to the source (N, 3)."""
        result = self.method.align(source * self.REFLECTION, target)
        matches = result.matches._replace(source=result.matches.source * self.REFLECTION)
        return matches_alone(matches, result.seconds, result.cpu_seconds)


def matches_alone(matches: Matches, seconds: float, cpu_seconds: float) -> DeformableResult:
    """Result of a method that only matches."""
    return DeformableResult(matches, None, len(matches.source) > 0, seconds, cpu_seconds, "matched", warped=False)


class NearestNeighbourIcp:
    """N-ICP: the same deformation graph, fitted by nearest points only, from the initial pose of the clouds."""

    def align(self, source: FloatArray, target: FloatArray) -> DeformableResult:
        """Fit the graph without matches."""
        from lepard_ros.registration.deformable.graph import build_graph
        from lepard_ros.registration.deformable.nonrigid import solve_nonrigid
        from lepard_ros.registration.deformable.surface_contact import thinned_surface

        wall, cpu = time.perf_counter(), time.process_time()
        graph = build_graph(source)
        first, second = (thinned_surface(cloud, graph.coverage / 3) for cloud in (source, target))
        warp = solve_nonrigid(graph, first, second)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        matches = matches_of_warp(warp, source, target)
        return DeformableResult(matches, warp, warp.ok, seconds, cpu_seconds, warp.status.name)


class CoherentPointDrift:
    """CPD (pycpd) on a random thousand points of each cloud, both scaled to unit variance."""

    def align(self, source: FloatArray, target: FloatArray) -> DeformableResult:
        """Register the source points to the target by coherent point drift."""
        try:
            from pycpd import DeformableRegistration
        except ModuleNotFoundError as error:
            raise InputError("the method cpd needs a package: pip install pycpd.") from error
        wall, cpu = time.perf_counter(), time.process_time()
        first, second = subsample(source, CPD_POINTS), subsample(target, CPD_POINTS)
        centre, scale = second.mean(axis=0), float(second.std())
        moving, fixed = ((points - centre) / scale for points in (first, second))
        drift = DeformableRegistration(X=fixed, Y=moving, alpha=2.0, beta=1.0, w=0.1, max_iterations=50)
        moved = drift.register()[0] * scale + centre
        warp = partial(_nearest_flow, anchors=first, flow=moved - first)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return DeformableResult(matches_of_warp(warp, source, target), warp, True, seconds, cpu_seconds, "ok")


def _nearest_flow(points: FloatArray, anchors: FloatArray, flow: FloatArray) -> FloatArray:
    """Move points by the blended flow of the anchors, at any distance."""
    return points + blend_flow(points, anchors, flow, radius=np.inf)


def subsample(points: FloatArray, count: int) -> FloatArray:
    """At most `count` of the points (N, 3), drawn with a fixed seed."""
    if len(points) <= count:
        return np.asarray(points, dtype=np.float64)
    return np.asarray(points, dtype=np.float64)[np.random.default_rng(0).choice(len(points), count, replace=False)]


def matches_of_warp(warp: WarpFunction, source: FloatArray, target: FloatArray) -> Matches:
    """Matches from a dense warp: evenly spaced source points that end within 4 cm of the target."""
    from scipy.spatial import cKDTree

    even = np.asarray(source, dtype=np.float64)[group_by_cell(np.asarray(source), SUBSAMPLE).first]
    landed = warp(even)
    near = cKDTree(target).query(landed)[0] < NEAR
    return Matches(even[near], landed[near], np.ones(int(near.sum())))


def make_deformable(name: str, threshold: float | None = None, register: bool = False) -> DeformableMethod:
    """The method of that name: "lepard:<weights>", the same with "+filter", n-icp, cpd; "+mirrored" behind any of them.

    threshold: confidence of Lepard's matches (None: the weights' own). register: whether it also fits a warp to them.
    """
    if name.endswith(MIRROR_SOURCE):
        return MirroredSource(make_deformable(name.removesuffix(MIRROR_SOURCE), threshold))
    if name.startswith(LEPARD):
        weights = name.removeprefix(LEPARD).removesuffix(FILTERED)
        return LepardDeformable(weights, threshold, name.endswith(FILTERED), register)
    if name == "n-icp":
        return NearestNeighbourIcp()
    if name == "cpd":
        return CoherentPointDrift()
    raise InputError(f"unknown method {name}: choose from lepard:deformable, lepard:<weights>, {', '.join(BASELINES)}.")


def takes_filter(name: str) -> bool:
    """Whether a method of that name gets a second row, of its filtered matches."""
    return name.startswith(LEPARD) and not name.endswith((FILTERED, MIRROR_SOURCE))


def evaluate_deformable(method: DeformableMethod, pair: DeformablePair, mirror: Mirror | None = None) -> Record:
    """Align one pair and measure matches and warp. mirror: the body's, if it has one, to count mirrored matches."""
    result = method.align(pair.source, pair.target)
    truth, seen = pair.warped, pair.seen
    metric = seen if pair.metric_index is None else pair.metric_index
    moved = pair.places(np.asarray(result.matches.source, dtype=np.float64))
    recall = partial(
        metrics.nonrigid_matching_recall,
        matched_source=result.matches.source,
        matched_target=result.matches.target,
        threshold=NEAR,
    )
    record: Record = {
        "overlap": pair.overlap,
        "matches": len(result.matches.source),
        "inlier_ratio": metrics.inlier_ratio(moved, result.matches.target, NEAR),
        "nfmr": recall(pair.source[metric], truth[metric]),
        "nfmr_set": SEEN_SET if pair.metric_index is None else METRIC_SET,
        "nfmr_seen": recall(pair.source[seen], truth[seen]),
        "accepted": result.accepted,
        "status": result.status,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
    }
    if mirror is not None:
        count = count_mirrored(mirror, moved, np.asarray(result.matches.target), pair.target)
        record |= {"mirrored": count.mirrored, "mirrored_by_chance": count.by_chance}
    points = pair.source[seen].astype(float)
    if result.warp is not None:
        record |= metrics.flow_errors(points, result.warp(points), truth[seen])._asdict()
    if result.warped:
        # Over all pairs, a refused warp counts as the identity; otherwise refusing would improve a row.
        landed = points if result.warp is None else result.warp(points)
        errors = metrics.flow_errors(points, landed, truth[seen])
        record |= {f"{name}_all": value for name, value in errors._asdict().items()}
    return record


@cache
def mirror_of(path: Path) -> Mirror | None:
    """The mirror map of a pair's body, in the target's frame; cached for all methods and thresholds."""
    pair = load_pair(path)
    return find_mirror(np.concatenate([pair.target, pair.warped]).astype(np.float64))


# --- many pairs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    method: str
    threshold: float | None
    register: bool
    path: Path

    @property
    def row(self) -> str:
        """The name of the table's row."""
        return self.method if self.threshold is None else f"{self.method} c>{self.threshold:g}"

    @property
    def pair(self) -> str:
        """The pair's name: its folder and its file."""
        return f"{self.path.parent.name}/{self.path.stem}"


_METHODS: dict[str, DeformableMethod] = {}


def _work(job: _Job) -> Record:
    if job.row not in _METHODS:
        _METHODS[job.row] = make_deformable(job.method, job.threshold, job.register)
    pair = load_pair(job.path)
    measured = evaluate_deformable(_METHODS[job.row], pair, mirror_of(job.path))
    names = {"method": job.row, "pair": job.pair, "part": benchmark_of(job.path, pair)}
    return {**names, **{key: _jsonable(value) for key, value in measured.items()}}


def _jsonable(value: Any) -> Any:
    return None if isinstance(value, float) and not np.isfinite(value) else value


def run_deformable(
    files: Sequence[Path],
    methods: Sequence[str],
    thresholds: Sequence[float | None],
    register: bool = False,
    jobs: int = 1,
    log: Path | None = None,
    progress: bool = True,
    cluster: str | None = None,
) -> list[Record]:
    """Evaluate every method (Lepard at every threshold, raw and filtered) on every file; resumed from the log."""
    every = [
        _Job(name, threshold, register, path)
        for method in methods
        for name in ((method, method + FILTERED) if takes_filter(method) else (method,))
        for threshold in (thresholds if method.startswith(LEPARD) else [None])
        for path in files
    ]
    identities = {job.row: _identity(job) for job in {job.row: job for job in every}.values()}
    done = {(r["method"], r["pair"], r["identity"]): r for r in read_log(log)}
    todo = [job for job in every if (job.row, job.pair, identities[job.row]) not in done]
    results = run_parallel(_work, todo, jobs, _METHODS.clear, (), cluster)
    for record in with_progress(results, len(todo), progress):
        record["identity"] = identities[record["method"]]
        done[(record["method"], record["pair"], record["identity"])] = record
        append_log(log, record)
    return [done[(job.row, job.pair, identities[job.row])] for job in every]


def drawn(files: Sequence[Path], count: int | None, seed: int) -> list[Path]:
    """A seeded sample of `count` files, in their order; all without a count."""
    if count is None or count >= len(files):
        return list(files)
    chosen_files = np.random.default_rng(seed).choice(len(files), size=count, replace=False)
    return [files[i] for i in np.sort(chosen_files)]


def _identity(job: _Job) -> str:
    """The weights behind a name, which may change."""
    method = make_deformable(job.method)
    identity = f"definitions {DEFINITIONS} "
    if not isinstance(method, LepardDeformable):
        return identity
    return identity + method.matcher.weights_id + (" with warps" if job.register else "")


# --- the table -------------------------------------------------------------------------------------------------------


def summarise_deformable(records: Sequence[Record]) -> dict[str, Any]:
    """One row's records: means, with intervals for NFMR and IR.

    epe, acc5, acc10: over the accepted warps. epe_all etc.: over all pairs, with a refused warp as the identity.
    """
    flow = [f"{name}{over}" for name in ("epe", "acc5", "acc10") for over in ("", "_all")]
    mean = {
        key: _mean([r[key] for r in records if r.get(key) is not None])
        for key in ("matches", "nfmr_seen", *flow, "accepted", "seconds", "cpu_seconds")
    }
    return {
        "pairs": len(records),
        "epe_median": _median([r["epe"] for r in records if r.get("epe") is not None]),
        "nfmr_sets": sorted({r.get("nfmr_set", SEEN_SET) for r in records}),
        "nfmr": mean_interval([r["nfmr"] or 0.0 for r in records]),
        "inlier_ratio": mean_interval([r["inlier_ratio"] for r in records]),
        **_mirrored(records),
        **mean,
    }


def _mirrored(records: Sequence[Record]) -> dict[str, Any]:
    """Number of pairs with a known mirror map, and the share of mirrored matches in them."""
    known = [r for r in records if r.get("mirrored") is not None]
    matches = sum(r["matches"] for r in known)
    shares = {key: sum(r[key] for r in known) / matches if matches else None for key in MIRRORED}
    return {"symmetric_pairs": len(known), **shares}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def deformable_tables(records: Sequence[Record]) -> dict[str, dict[str, dict[str, Any]]]:
    """The summaries of every method on the pairs of 4DMatch, of 4DLoMatch (below 45 % overlap), and on all."""
    parts = {part: [r for r in records if r["part"] == part] for part in TEST_PARTS}
    parts["all pairs"] = list(records)
    return {
        title: {name: summarise_deformable(own) for name, own in by_method(part).items()}
        for title, part in parts.items()
        if part
    }


def deformable_rows(summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
    """The table's rows, the first is the header."""
    header = ["method", "pairs", "matches", "NFMR % [95 %]", "IR % [95 %]", "mirrored (chance) %", "NFMR seen %",
              "EPE cm all", "Acc5 %", "Acc10 %", "accepted %", "EPE cm accepted", "median", "s/pair",
              "CPU s/pair"]  # fmt: skip
    return [header] + [
        [
            name,
            str(s["pairs"]),
            number(s["matches"], 0),
            interval(s["nfmr"]),
            interval(s["inlier_ratio"]),
            " ".join([percent(s["mirrored"]), f"({percent(s['mirrored_by_chance'])})"]),
            percent(s["nfmr_seen"]),
            _centimetres(s["epe_all"]),
            percent(s["acc5_all"]),
            percent(s["acc10_all"]),
            percent(s["accepted"]),
            _centimetres(s["epe"]),
            _centimetres(s["epe_median"]),
            number(s["seconds"], 2),
            number(s["cpu_seconds"], 2),
        ]
        for name, s in summaries.items()
    ]


def _centimetres(metres: float | None) -> str:
    return number(None if metres is None else 100 * metres)


def definition_line(summaries: dict[str, dict[str, Any]]) -> str:
    """The points used for NFMR, and the pairs used for the errors of the warps."""
    sets = sorted({name for s in summaries.values() for name in s["nfmr_sets"]})
    return (
        f"NFMR over {' or '.join(sets)}, as the authors; NFMR seen: over points seen in both. IR at {NEAR} m. "
        "EPE, Acc5, Acc10 over all pairs; a refused warp counts as no motion."
    )


def mirror_line(summaries: dict[str, dict[str, Any]]) -> str:
    """The number of pairs on which mirrored matches could be counted."""
    known, pairs = (max(s[key] for s in summaries.values()) for key in ("symmetric_pairs", "pairs"))
    rest = f"; the other {pairs - known} are not symmetric enough" if known < pairs else ""
    return f"mirrored: share of matches on the mirrored limb, counted on {known} of {pairs} pairs{rest}."
