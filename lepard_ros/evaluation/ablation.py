# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's ablations: one network, one choice changed at a time, on rigid or on deformable pairs.

A variant changes settings of the same weights where that makes sense. If it needs other weights (another position code,
Sinkhorn, more blocks, a warping loss), the table gives the training command for them.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from lepard_ros.data.fourdmatch import DeformablePair, evaluation_files, load_pair
from lepard_ros.data.readers import RigidPair, open_set
from lepard_ros.errors import InputError
from lepard_ros.evaluation.methods import LEPARD, LepardMethod
from lepard_ros.evaluation.metrics import transform_points
from lepard_ros.evaluation.pairs import evaluate_pair
from lepard_ros.evaluation.runner import Record, append_log, read_log, run_parallel, with_progress
from lepard_ros.evaluation.tables import CRITERIA, rigid_rows, summarise
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import kabsch
from lepard_ros.network.relation import CHIRAL_KERNELS

if TYPE_CHECKING:
    from lepard_ros.evaluation.deformable import DeformableResult
    from lepard_ros.matcher import Matcher
    from lepard_ros.network.config import LepardConfig
    from lepard_ros.network.lepard import Lepard, LepardOutput

# Maps coarse source points (n, 3) to the positions (n, 3) that the position code uses.
Placement = Callable[[FloatArray], FloatArray]


@dataclass(frozen=True)
class Variant:
    """One row of the ablation: changed settings, or a given placement of the source instead of the network's own fit.

    placed: "unmoved", "random", "rigid" (the true motion, or the best rigid fit of a deformation), "deformed" (the true
    position of every point), or "" for the network's own repositioning. guided: whether the transformer is used; all
    variants of the paper concern it. chiral: whether the network sees what distinguishes left from right. blocks:
    after how many blocks of the transformer the confidences are taken, 0 for all; it is trained to match after each.
    """

    settings: dict[str, object]
    placed: str = ""
    guided: bool = True
    chiral: bool = True
    blocks: int = 0


VARIANTS: dict[str, Variant] = {
    "descriptors alone": Variant({}, guided=False),
    "guided by the transformer": Variant({}),
    "no chirality": Variant({}, chiral=False),
    "first block alone": Variant({}, blocks=1),
    "two blocks": Variant({}, blocks=2),
    "no position code": Variant({"max_condition_number": 0.0}),  # of networks that use it only once aligned
    "no repositioning": Variant({}, "unmoved"),
    "random rotation": Variant({}, "random"),
    "oracle rigid fitting": Variant({}, "rigid"),
    "oracle deformation": Variant({}, "deformed"),
    "soft procrustes": Variant({"procrustes": "soft"}),
    "robust procrustes": Variant({"procrustes": "robust"}),
    "mutual": Variant({"mutual": True}),
    "not mutual": Variant({"mutual": False}),
    "threshold 0.01": Variant({"confidence_threshold": 0.01}),
    "threshold 0.05": Variant({"confidence_threshold": 0.05}),
    "threshold 0.1": Variant({"confidence_threshold": 0.1}),
    "threshold 0.2": Variant({"confidence_threshold": 0.2}),
}
# Arguments of `lepard train` for the variants that need their own weights.
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
DEFINITIONS = 2  # increased when the meaning of a variant changes, so that older records are recomputed


def apply_settings(matcher: "Matcher", settings: dict[str, object]) -> None:
    """Change settings of a loaded matcher; its tensors stay as they are."""
    config: LepardConfig = replace(matcher.config, **settings)  # type: ignore[arg-type]
    matcher.config = matcher.network.config = config


class ForcedRepositioning:
    """Context in which the network uses a given placement of the source instead of its own estimate."""

    def __init__(self, matcher: "Matcher", placement: Placement) -> None:
        self.network, self.placement = matcher.network, placement

    def __enter__(self) -> None:
        def reposition(points: Tensor, *_: object) -> tuple[Tensor, Tensor]:
            moved = np.stack([self.placement(cloud) for cloud in points.double().cpu().numpy()])
            everywhere = torch.ones(len(points), dtype=torch.bool, device=points.device)
            return torch.from_numpy(moved).to(points), everywhere

        object.__setattr__(self.network, "_reposition", reposition)

    def __exit__(self, *_: object) -> None:
        object.__delattr__(self.network, "_reposition")


def make_matcher(name: str, weights: str) -> "Matcher":
    """The matcher of a variant. `repositioned` handles a variant that moves the source."""
    from lepard_ros.matcher import Matcher, MatcherSettings

    variant = VARIANTS[name]
    settings = MatcherSettings(guided=variant.guided)
    matcher = Matcher.from_pretrained(weights.removeprefix(LEPARD), settings=settings)
    apply_settings(matcher, variant.settings)
    if not variant.chiral:
        forget_chirality(matcher.network)
    if variant.blocks:
        stop_after(variant.blocks, matcher.network)
    return matcher


def stop_after(blocks: int, network: "Lepard") -> None:
    """Use the confidences after some blocks (after all if there are fewer): what the layers behind them are worth."""
    whole = network.match

    def match(*clouds: Any) -> "LepardOutput":
        output = whole(*clouds)
        tables = [r.confidence for r in output.repositionings] + [output.confidence]
        return replace(output, confidence=tables[min(blocks, len(tables)) - 1])

    object.__setattr__(network, "match", match)


def forget_chirality(network: "Lepard") -> None:
    """Set all weights of twists and volumes to zero: a cloud and its mirror image then get the same features."""
    for name, values in network.state_dict().items():
        if network.config.chirality and name.endswith("KPConv.weights"):
            values[-CHIRAL_KERNELS:] = 0
        in_context = name.startswith("backbone.context")
        chiral = network.config.chiral_context if in_context else network.config.chirality
        if chiral and name.endswith("bias.mlp.0.weight"):
            values[:, -1] = 0
        if name == "backbone.handed.mlp.0.weight":
            values[:, network.config.feature_dim :] = 0


def random_rotation(name: str, points: FloatArray) -> FloatArray:
    """The points (n, 3) rotated about their centroid by a random rotation, seeded by a name."""
    from scipy.spatial.transform import Rotation

    centre = points.mean(axis=0)
    return Rotation.random(random_state=np.random.default_rng(list(name.encode()))).apply(points - centre) + centre


def repositioned(
    name: str, matcher: "Matcher", pair: RigidPair, deformed: Placement | None = None
) -> AbstractContextManager[None]:
    """The context with the variant's placement for a pair; a null context if the network finds its own."""
    placed, truth = VARIANTS[name].placed, pair.truth
    if placed == "rigid" and truth is None:
        raise InputError("the oracle needs pairs with a known motion: choose another set than unrelated.")
    if placed == "deformed" and deformed is None:
        raise InputError("the oracle deformation needs deformable pairs: give --set 4dmatch.")
    places: dict[str, Placement | None] = {
        "unmoved": lambda points: points,
        "random": partial(random_rotation, pair.name),
        "rigid": None if truth is None else partial(transform_points, truth),
        "deformed": deformed,
    }
    placement = places.get(placed)
    return nullcontext() if placement is None else ForcedRepositioning(matcher, placement)


# --- pairs to measure on ---------------------------------------------------------------------------------------------


class Bench(Protocol):
    """Pairs on which variants are measured, and the table of it. Must survive pickling to worker processes."""

    criterion: str

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The pairs, drawn with a seed."""

    def evaluate(self, name: str, matcher: "Matcher", pair: RigidPair) -> Record:
        """The record of a variant on a pair."""

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """Summary of the records of one variant."""

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
        from lepard_ros.evaluation.deformable import matches_alone

        wall, cpu = time.perf_counter(), time.process_time()
        matches = self.matcher.match(source, target)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return matches_alone(matches, seconds, cpu_seconds)


def _finite(value: Any) -> Any:
    """JSON has no infinity: None stands for it."""
    return None if isinstance(value, float) and not np.isfinite(value) else value


class DeformableBench:
    """Deformable pairs in 4DMatch's format: matches alone, without a warp."""

    criterion = "NFMR as the authors, IR at 0.04 m"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The files as pairs; the rigid motion that fits the deformation best is the truth of the rigid oracle."""
        from lepard_ros.evaluation.deformable import drawn

        files = drawn(evaluation_files(self.folder), count, seed)
        pairs = []
        for path in files:
            pair, name = load_pair(path), str(path.relative_to(self.folder))
            pairs.append(RigidPair(name, name, path.parent.name, best_rigid_fit(pair), pair.overlap))
        return pairs

    def evaluate(self, name: str, matcher: "Matcher", pair: RigidPair) -> Record:
        """Match the pair."""
        from lepard_ros.evaluation.deformable import evaluate_deformable

        bodies = load_pair(self.folder / pair.source)
        with repositioned(name, matcher, pair, bodies.places):
            record = evaluate_deformable(_MatchesAlone(matcher), bodies)
        return {key: _finite(value) for key, value in record.items()}

    def summarise(self, records: Sequence[Record]) -> dict[str, Any]:
        """NFMR, inlier ratio, times."""
        from lepard_ros.evaluation.deformable import summarise_deformable

        return summarise_deformable(records)

    def rows(self, summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
        """As `lepard evaluate 4dmatch`."""
        from lepard_ros.evaluation.deformable import deformable_rows

        return deformable_rows(summaries)


def best_rigid_fit(pair: DeformablePair) -> FloatArray:
    """The motion (4, 4) that takes the source nearest to where its points truly went."""
    source, warped = torch.from_numpy(pair.source), torch.from_numpy(pair.warped)
    return kabsch(source, warped, torch.ones(len(source))).numpy()


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
    return {
        **record,
        "variant": job.variant,
        "pair": job.pair.name,
        "identity": f"{DEFINITIONS} {_Worker.matcher.weights_id}",
    }


def run_variants(
    names: Sequence[str],
    weights: str,
    bench: Bench,
    pairs: Sequence[RigidPair],
    jobs: int = 1,
    log: Path | None = None,
    progress: bool = True,
    cluster: str | None = None,
) -> dict[str, list[Record]]:
    """The records of every variant on every pair; those already in the `log` are kept, new ones appended to it."""
    identities = {name: f"{DEFINITIONS} {make_matcher(name, weights).weights_id}" for name in names}
    done = {(r["variant"], r["pair"], r["identity"]): r for r in read_log(log) if "variant" in r}
    todo = [
        _Job(name, weights, pair) for name in names for pair in pairs if (name, pair.name, identities[name]) not in done
    ]
    results = run_parallel(_work, todo, jobs, _start_worker, (bench,), cluster)
    for record in with_progress(results, len(todo), progress):
        done[(record["variant"], record["pair"], record["identity"])] = record
        append_log(log, record)
    return {name: [done[(name, pair.name, identities[name])] for pair in pairs] for name in names}


def other_trainings(set_name: str) -> list[str]:
    """An introduction, then the training command for each variant that needs its own weights."""
    mode, other, data = ("rigid", "deformable", "rooms/")
    if set_name == DEFORMABLE_SET:
        mode, other, data = ("deformable", "rigid", "creatures/")
    lines = ["These variants need their own weights (then: --methods lepard:runs/ablation/weights.safetensors):"]
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


def choose_variants(wanted: list[str] | None, set_name: str = DEFORMABLE_SET) -> list[str]:
    """The variants whose name starts with one of the given words; by default all that suit the set."""
    if wanted is None:
        return [name for name, v in VARIANTS.items() if set_name == DEFORMABLE_SET or v.placed != "deformed"]
    chosen = [name for name in VARIANTS if any(name.startswith(word) for word in wanted)]
    if not chosen:
        needs = [name for name in OTHER_WEIGHTS if any(name.startswith(word) for word in wanted)]
        reason = "needs its own weights" if needs else f"is unknown: choose from {', '.join(VARIANTS)}"
        raise InputError(f"the variant {', '.join(wanted)} {reason}.")
    return chosen
