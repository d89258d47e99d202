# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Time of every stage of a pair, as in the paper's table: CPU seconds of one thread, means over pairs.

    python bench/stages.py rigid DATA/3dmatch --pairs 20
    python bench/stages.py deformable DATA/tosca_pairs --pairs 10

Rigid pairs are registered twice: as the matcher is shipped (descriptors alone), and with the transformer taking part.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lepard_ros import encoded_cloud
from lepard_ros import matcher as core
from lepard_ros.data.fourdmatch import evaluation_files, load_pair
from lepard_ros.data.readers import open_set
from lepard_ros.evaluation.tables import format_table
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.registration.deformable import nonrigid

Clouds = tuple[np.ndarray, np.ndarray]
PREPARATION, BACKBONE, TRANSFORMER, FINE = "grid, normals, neighbours", "backbone", "transformer", "fine matching"
ESTIMATE, WARP = "hypotheses, ICP, acceptance", "filter, graph, warp"
ORDER = (PREPARATION, BACKBONE, TRANSFORMER, FINE, ESTIMATE, WARP, "rest", "all")


class Stages:
    """CPU seconds by stage, gathered by functions that are wrapped where they are called."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Let every call of `owner.name` count for a stage."""
        called: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.process_time()
            try:
                return called(*args, **options)
            finally:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + time.process_time() - started

        object.__setattr__(owner, name, timed) if isinstance(owner, torch.nn.Module) else setattr(owner, name, timed)


def watch(matcher: Matcher) -> Stages:
    """The stages of this matcher from now on."""
    stages = Stages()
    stages.wrap(encoded_cloud, "bounded_pyramid", PREPARATION)
    stages.wrap(matcher.network, "encode", BACKBONE)
    stages.wrap(matcher.network, "prepare", TRANSFORMER)
    stages.wrap(matcher.network, "match", TRANSFORMER)
    stages.wrap(matcher, "_matches", FINE)
    return stages


def measure(pairs: Sequence[Clouds], work: Callable[..., Any], stages: Stages) -> dict[str, float]:
    """Mean CPU seconds of a pair by stage, after one pair to warm up; what no stage counted is the rest."""
    work(*pairs[0])
    stages.seconds.clear()
    started = time.process_time()
    for pair in pairs:
        work(*pair)
    total = time.process_time() - started
    known = dict(stages.seconds)
    whole = {**known, "rest": total - sum(known.values()), "all": total}
    return {stage: seconds / len(pairs) for stage, seconds in whole.items()}


def rigid(folder: Path, count: int) -> dict[str, dict[str, float]]:
    """Registrations of 3DMatch pairs from raw points."""
    source = open_set(folder, "3DMatch")
    pairs = [(source.cloud(pair.source), source.cloud(pair.target)) for pair in source.pairs(count, 0)]
    estimate, results = core.register_matches, {}
    for name, guided in (("rigid", False), ("rigid, transformer", True)):
        matcher = Matcher.from_pretrained("rigid", settings=MatcherSettings(guided=guided))
        stages = watch(matcher)
        core.register_matches = estimate
        stages.wrap(core, "register_matches", ESTIMATE)
        results[name] = measure(pairs, matcher.register, stages)
    core.register_matches = estimate
    return results


def deformable(folder: Path, count: int) -> dict[str, dict[str, float]]:
    """Warps of deformable pairs from raw points."""
    files = evaluation_files(folder)
    chosen = [load_pair(files[i]) for i in np.linspace(0, len(files) - 1, count).astype(int)]
    matcher = Matcher.from_pretrained("deformable")
    stages = watch(matcher)
    stages.wrap(nonrigid, "warp_from_matches", WARP)
    return {"deformable": measure([(pair.source, pair.target) for pair in chosen], matcher.warp, stages)}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("rigid", "deformable"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = (rigid if args.kind == "rigid" else deformable)(args.data, args.pairs)
    names = [stage for stage in ORDER if any(stage in row for row in results.values())]
    rows = [[name, *(f"{row.get(stage, 0.0):.3f}" for stage in names)] for name, row in results.items()]
    print(f"CPU-s a pair, means over {args.pairs} pairs\n")
    print(format_table([["weights", *names], *rows]))


if __name__ == "__main__":
    main()
