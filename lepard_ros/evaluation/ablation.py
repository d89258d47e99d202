# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's ablations: one network, one choice changed at a time, on rigid or on deformable pairs.

A variant changes what the same weights are asked to do, where that makes sense; where it needs other weights (another
position code, Sinkhorn, more blocks, a warping loss), the table names the training that would give them.
"""

import argparse
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.evaluation.methods import LEPARD, LepardMethod
from lepard_ros.evaluation.pairs import evaluate_pair
from lepard_ros.evaluation.readers import RigidPair, deformable_files, open_set
from lepard_ros.evaluation.runner import Record, append_log, read_log, run_parallel, with_progress
from lepard_ros.evaluation.tables import CRITERIA, format_table, rigid_rows, summarise
from lepard_ros.network.procrustes import RigidFit

if TYPE_CHECKING:
    from lepard_ros.evaluation.deformable import DeformableResult
    from lepard_ros.matcher import Matcher
    from lepard_ros.network.config import LepardConfig
    from lepard_ros.network.lepard import CoarseCloud, LepardOutput

FloatArray = NDArray[np.floating]
# From a pair to the motion (4, 4) that repositions the source instead of the network's own.
Repositioner = Callable[[RigidPair], FloatArray]


@dataclass(frozen=True)
class Variant:
    """One row of the ablation: settings that differ, or a motion that replaces the network's repositioning.

    guided: whether the transformer takes part; the paper's variants are all about it.
    """

    settings: dict[str, object]
    repositioner: Repositioner | None = None
    guided: bool = True


def _truth(pair: RigidPair) -> FloatArray:
    """The oracle: the true motion."""
    if pair.truth is None:
        raise InputError("the oracle needs pairs with a known motion: choose another set than unrelated.")
    return pair.truth


def _random_rotation(pair: RigidPair) -> FloatArray:
    """A rotation drawn from the pair's name, about the origin."""
    from scipy.spatial.transform import Rotation

    transform = np.eye(4)
    entropy = list(pair.name.encode())
    transform[:3, :3] = Rotation.random(random_state=np.random.default_rng(entropy)).as_matrix()
    return transform


VARIANTS: dict[str, Variant] = {
    "descriptors alone": Variant({}, guided=False),
    "guided by the transformer": Variant({}),
    "no repositioning": Variant({"max_condition_number": 0.0}),
    "random rotation": Variant({}, _random_rotation),
    "oracle": Variant({}, _truth),
    "soft procrustes": Variant({"procrustes": "soft"}),
    "robust procrustes": Variant({"procrustes": "robust"}),
    "threshold 0.01": Variant({"confidence_threshold": 0.01}),
    "threshold 0.05": Variant({"confidence_threshold": 0.05}),
    "threshold 0.1": Variant({"confidence_threshold": 0.1}),
    "threshold 0.2": Variant({"confidence_threshold": 0.2}),
}
# What `lepard train` has to be told for the variants that need weights of their own.
OTHER_WEIGHTS = {
    "entangled": ["--set", "entangled=true", "--set", "position_use=always"],
    "absolute code": ["--set", "position_code=sinusoidal"],
    "sinkhorn": ["--set", "matching=sinkhorn"],
    "blocks": ["--set", 'layers=["self","cross","positioning","self","cross"]'],
    "warping-loss weight": [],
}
# The shipped rigid weights were trained without the warping loss, the deformable ones with it: the variant swaps them.
WARPING_WEIGHTS = {"rigid": "0", "deformable": "0.1"}
DEFORMABLE_SET = "4dmatch"


def apply_settings(matcher: "Matcher", settings: dict[str, object]) -> None:
    """Change settings of a loaded matcher; its tensors stay as they are."""
    config: LepardConfig = replace(matcher.config, **settings)  # type: ignore[arg-type]
    matcher.config = matcher.network.config = config


class ForcedRepositioning:
    """While entered, the network repositions the source by a given motion instead of its own estimate."""

    def __init__(self, matcher: "Matcher", motion: FloatArray) -> None:
        self.network, self.motion = matcher.network, torch.from_numpy(np.array(motion))

    def __enter__(self) -> None:
        own = type(self.network).match

        def match(source: "CoarseCloud", target: "CoarseCloud") -> "LepardOutput":
            batch = len(source.points)
            turn = self.motion[:3, :3].expand(batch, 3, 3)
            shift = self.motion[:3, 3:].expand(batch, 3, 1)
            return own(self.network, source, target, RigidFit(turn, shift, torch.ones(batch)))

        object.__setattr__(self.network, "match", match)

    def __exit__(self, *_: object) -> None:
        object.__delattr__(self.network, "match")


def make_matcher(name: str, weights: str) -> "Matcher":
    """The matcher of a variant; its forced motion, if it has one, is another's business (`repositioned`)."""
    from lepard_ros.matcher import Matcher, MatcherSettings

    variant = VARIANTS[name]
    settings = MatcherSettings(guided=variant.guided)
    matcher = Matcher.from_pretrained(weights.removeprefix(LEPARD), settings=settings)
    apply_settings(matcher, variant.settings)
    return matcher


def repositioned(name: str, matcher: "Matcher", pair: RigidPair) -> AbstractContextManager[None]:
    """The variant's forced motion of a pair, to be entered; nothing where the network finds its own."""
    force = VARIANTS[name].repositioner
    return nullcontext() if force is None else ForcedRepositioning(matcher, force(pair))


# --- pairs to measure on ---------------------------------------------------------------------------------------------


class Bench(Protocol):
    """Pairs on which variants are measured, and the table of it. Must survive pickling to worker processes."""

    criterion: str

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The pairs, drawn with a seed."""

    def evaluate(self, name: str, matcher: "Matcher", pair: RigidPair) -> Record:
        """The record of a variant on a pair."""

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """The records of one variant summed up."""

    def rows(self, summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
        """The table's rows, the first is the header."""


class RigidBench:
    """Rigid pairs of a set (3DMatch, 3DLoMatch, tum, unrelated): registration recall."""

    def __init__(self, folder: Path, set_name: str) -> None:
        self.source, self.set_name = open_set(folder, set_name), set_name
        self.criterion = f"recall: {CRITERIA[set_name]}"

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The pairs of the set."""
        return self.source.pairs(count, seed)

    def evaluate(self, name: str, matcher: "Matcher", pair: RigidPair) -> Record:
        """Register the pair."""
        with repositioned(name, matcher, pair):
            return evaluate_pair(name, LepardMethod(matcher), self.source, pair)

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Recall, errors, times."""
        return summarise(records)

    def rows(self, summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
        """As `lepard evaluate pairs`."""
        return rigid_rows(self.set_name, summaries)


class _MatchesAlone:
    """The matches of a matcher as a deformable method that warps nothing."""

    def __init__(self, matcher: "Matcher") -> None:
        self.matcher = matcher

    def align(self, source: FloatArray, target: FloatArray) -> "DeformableResult":
        """Match source (N, 3) with target (M, 3), metres."""
        from lepard_ros.evaluation.deformable import DeformableResult

        wall, cpu = time.perf_counter(), time.process_time()
        matches = self.matcher.match(source, target)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return DeformableResult(matches, None, len(matches.source) > 0, seconds, cpu_seconds, "matched")


def _finite(value: Any) -> Any:
    """JSON has no infinity: None stands for it."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


class DeformableBench:
    """Deformable pairs in 4DMatch's format: matches alone, without a warp."""

    criterion = "NFMR over the true matches, IR at 0.04 m"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The files as pairs; the motion of the camera alone is the truth that an oracle repositions by."""
        from lepard_ros.learning.fourdmatch import load_pair

        files = deformable_files(self.folder)
        if count is not None and count < len(files):
            drawn = np.random.default_rng(seed).choice(len(files), size=count, replace=False)
            files = [files[i] for i in np.sort(drawn)]
        pairs = []
        for path in files:
            pair, name = load_pair(path), str(path.relative_to(self.folder))
            pairs.append(RigidPair(name, name, path.parent.name, pair.transform, pair.overlap))
        return pairs

    def evaluate(self, name: str, matcher: "Matcher", pair: RigidPair) -> Record:
        """Match the pair."""
        from lepard_ros.evaluation.deformable import evaluate_deformable
        from lepard_ros.learning.fourdmatch import load_pair

        with repositioned(name, matcher, pair):
            record = evaluate_deformable(_MatchesAlone(matcher), load_pair(self.folder / pair.source))
        return {key: _finite(value) for key, value in record.items()}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """NFMR, inlier ratio, times."""
        from lepard_ros.evaluation.deformable import summarise_deformable

        return summarise_deformable(records)

    def rows(self, summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
        """As `lepard evaluate 4dmatch`."""
        from lepard_ros.evaluation.deformable import deformable_rows

        return deformable_rows(summaries)


def open_bench(folder: Path, set_name: str) -> Bench:
    """The pairs of a set by its name."""
    return DeformableBench(folder) if set_name == DEFORMABLE_SET else RigidBench(folder, set_name)


# --- many variants ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    variant: str
    weights: str
    pair: RigidPair


class _Worker:
    """What a process keeps between pairs: the bench, and the matcher of the variant it is at."""

    bench: Bench
    name: str
    matcher: "Matcher"


def _start_worker(bench: Bench) -> None:
    _Worker.bench, _Worker.name = bench, ""


def _work(job: _Job) -> Record:
    if _Worker.name != job.variant:
        _Worker.name, _Worker.matcher = job.variant, make_matcher(job.variant, job.weights)
    record = _Worker.bench.evaluate(job.variant, _Worker.matcher, job.pair)
    return {**record, "variant": job.variant, "pair": job.pair.name, "identity": _Worker.matcher.weights_id}


def run_variants(
    names: Sequence[str],
    weights: str,
    bench: Bench,
    pairs: Sequence[RigidPair],
    jobs: int = 1,
    log: Path | None = None,
    progress: bool = True,
) -> dict[str, list[Record]]:
    """The records of every variant on every pair; those already in the `log` are kept, new ones appended to it."""
    identities = {name: make_matcher(name, weights).weights_id for name in names}
    done = {(r["variant"], r["pair"], r["identity"]): r for r in read_log(log) if "variant" in r}
    todo = [
        _Job(name, weights, pair) for name in names for pair in pairs if (name, pair.name, identities[name]) not in done
    ]
    for record in with_progress(run_parallel(_work, todo, jobs, _start_worker, (bench,)), len(todo), progress):
        done[(record["variant"], record["pair"], record["identity"])] = record
        append_log(log, record)
    return {name: [done[(name, pair.name, identities[name])] for pair in pairs] for name in names}


def run_command(args: argparse.Namespace) -> int:
    """`lepard evaluate ablation`."""
    from lepard_ros.evaluation.command import log_path, stamp, write_json

    names = choose_variants(args.variants)
    if args.methods is None:
        args.methods = ["lepard:deformable" if args.set_name == DEFORMABLE_SET else "lepard:rigid"]
    weights = args.methods[0]
    if len(args.methods) != 1 or not weights.startswith(LEPARD):
        raise InputError("an ablation takes one method, lepard:<weights>.")
    bench = open_bench(args.data, args.set_name)
    pairs = bench.pairs(args.count, args.seed)
    results = run_variants(names, weights, bench, pairs, args.jobs, log_path(args.json), not args.quiet)
    summaries = {name: bench.summarise(records) for name, records in results.items()}
    heading = f"{args.set_name}: {len(pairs)} pairs, seed {args.seed}, {weights}; {bench.criterion}."
    rows, others = bench.rows(summaries), other_trainings(args.set_name)
    print(f"{heading}\n\n{format_table(rows)}\n\n{others[0]}")
    print("\n".join(f"  {line}" for line in others[1:]))
    write_json(args.json, {**stamp(args), "set": args.set_name, "summaries": summaries, "records": results})
    if args.report:
        from lepard_ros.evaluation.report import ablation_report

        print(f"report: {ablation_report(args.report, heading, rows, others, results)}")
    return 0


def other_trainings(set_name: str) -> list[str]:
    """A sentence, then for each variant that needs weights of its own the training that would give them."""
    mode, other, data = ("rigid", "deformable", "rooms/")
    if set_name == DEFORMABLE_SET:
        mode, other, data = ("deformable", "rigid", "creatures/")
    lines = ["These variants need weights of their own (then: --methods lepard:runs/ablation/weights.safetensors):"]
    for name, how in OTHER_WEIGHTS.items():
        warping = WARPING_WEIGHTS[other if name == "warping-loss weight" else mode]
        words = [
            "--preset",
            f"small_{mode}",
            "--data",
            data,
            "--out",
            "runs/ablation",
            *how,
            "--warping-weight",
            warping,
        ]
        lines.append(f"{name}: lepard train {shlex.join(words)}")
    return lines


def choose_variants(wanted: list[str] | None) -> list[str]:
    """The variants whose name begins with one of the wanted words; all without any."""
    if wanted is None:
        return list(VARIANTS)
    chosen = [name for name in VARIANTS if any(name.startswith(word) for word in wanted)]
    if not chosen:
        needs = [name for name in OTHER_WEIGHTS if any(name.startswith(word) for word in wanted)]
        reason = "needs weights of its own" if needs else f"is unknown: choose from {', '.join(VARIANTS)}"
        raise InputError(f"the variant {', '.join(wanted)} {reason}.")
    return chosen
