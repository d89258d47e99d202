"""The paper's ablations: one network, one choice changed at a time.

A variant changes what the same weights are asked to do, where that makes sense; where it needs other weights (another
position code, Sinkhorn, more blocks, a warping loss), the table names the training that would give them.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.evaluation.methods import LEPARD, LepardMethod
from lepard_ros.evaluation.pairs import evaluate_pair
from lepard_ros.evaluation.readers import RigidPair, open_set
from lepard_ros.evaluation.runner import Record, with_progress
from lepard_ros.evaluation.tables import CRITERIA, format_table, rigid_rows, summarise
from lepard_ros.network.procrustes import RigidFit

if TYPE_CHECKING:
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
OTHER_WEIGHTS = {
    "entangled": "--set entangled=true --set position_use=always",
    "absolute code": "--set position_code=sinusoidal",
    "sinkhorn": "--set matching=sinkhorn",
    "blocks": '--set layers=["self","cross","positioning","self","cross"]',
    "warping-loss weight": "--warping-weight 0.1",
}


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


def run_variant(name: str, weights: str, folder: Path, set_name: str, pairs: list[RigidPair]) -> list[Record]:
    """The records of one variant on the pairs."""
    from lepard_ros.matcher import Matcher, MatcherSettings

    variant = VARIANTS[name]
    choices = MatcherSettings(guided=variant.guided)
    method = LepardMethod(Matcher.from_pretrained(weights.removeprefix(LEPARD), settings=choices))
    apply_settings(method.matcher, variant.settings)
    source = open_set(folder, set_name)
    records = []
    for pair in pairs:
        if variant.repositioner is None:
            records.append(evaluate_pair(name, method, source, pair))
            continue
        with ForcedRepositioning(method.matcher, variant.repositioner(pair)):
            records.append(evaluate_pair(name, method, source, pair))
    return records


def run_command(args: argparse.Namespace) -> int:
    """`lepard evaluate ablation`."""
    from lepard_ros.evaluation.command import stamp, write_json

    names = choose_variants(args.variants)
    weights = args.methods[0]
    if len(args.methods) != 1 or not weights.startswith(LEPARD):
        raise InputError("an ablation takes one method, lepard:<weights>.")
    torch.set_num_threads(1)
    pairs = open_set(args.data, args.set_name).pairs(args.count, args.seed)
    rows = ({"name": name, "records": run_variant(name, weights, args.data, args.set_name, pairs)} for name in names)
    results = {row["name"]: row["records"] for row in with_progress(rows, len(names), not args.quiet)}
    summaries = {name: summarise(records) for name, records in results.items()}
    print(f"{args.set_name}: {len(pairs)} pairs, seed {args.seed}, {weights}; recall: {CRITERIA[args.set_name]}.\n")
    print(format_table(rigid_rows(args.set_name, summaries)))
    print("\nThese variants need weights of their own (`lepard train --set ...`, then --methods lepard:<file>):")
    print("\n".join(f"  {name}: {how}" for name, how in OTHER_WEIGHTS.items()))
    write_json(args.json, {**stamp(args), "set": args.set_name, "summaries": summaries, "records": results})
    return 0


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
