# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard reproduce`: the paper's tables from the published data and weights."""

import argparse
import os
from pathlib import Path

from lepard_ros.commands.evaluate import log_path, stamp, write_json
from lepard_ros.commands.weights import convert_checkpoint
from lepard_ros.data.fourdmatch import evaluation_files
from lepard_ros.evaluation import deformable
from lepard_ros.evaluation.methods import LEPARD
from lepard_ros.evaluation.pairs import Task, run_pairs
from lepard_ros.evaluation.published import deformable_comparison, rigid_comparison
from lepard_ros.evaluation.tables import format_table, summarise_all

HELP = """Reproduce the paper's tables from the published data, with the paper's figures next to ours.

examples:
  lepard reproduce 3dmatch   DATA --weights pretrained/3dmatch/model_best_loss.pth
  lepard reproduce 4dlomatch DATA --weights runs/paper_deformable/best.safetensors

An interrupted run resumes where it stopped. docs/reproduce.md explains where to get data and weights."""

RIGID = {"3dmatch": "3DMatch", "3dlomatch": "3DLoMatch"}
DEFORMABLE = {"4dmatch": "4DMatch", "4dlomatch": "4DLoMatch"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard reproduce`."""
    add = parser.add_argument
    add("table", choices=(*RIGID, *DEFORMABLE), help="which of the paper's sets")
    add("data", type=Path, help="folder of the published set (docs/reproduce.md)")
    add("--weights", type=Path, required=True, help="the authors' checkpoint (.pth), or .safetensors of `lepard train`")
    add("--sizes", type=Path, help="JSON file of sizes that differ from the paper's, for a .pth file")
    add("--out", type=Path, default=Path("runs/reproduce"), help="results and converted weights (default %(default)s)")
    add("--count", type=int, help="sample this many pairs (default all)")
    add("--seed", type=int, default=0, help="seed of the sample (default 0)")
    add("--jobs", type=int, default=min(4, os.cpu_count() or 1), help="processes; use 1 with a GPU")
    add("--cluster", metavar="ADDRESS", help="run on the workers of this Dask scheduler: docs/cluster.md")
    add("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    """Evaluate as the paper does and print both."""
    weights = published_weights(args)
    args.json = args.out / f"{args.table}.json"
    return _rigid(args, weights) if args.table in RIGID else _deformable(args, weights)


def published_weights(args: argparse.Namespace) -> Path:
    """The weights as .safetensors; a checkpoint of the authors is converted first."""
    if args.weights.suffix == ".safetensors":
        return Path(args.weights)
    preset = "paper_rigid" if args.table in RIGID else "paper_deformable"
    return convert_checkpoint(args.weights, args.out / f"{args.weights.stem}_{preset}.safetensors", preset, args.sizes)


def _rigid(args: argparse.Namespace, weights: Path) -> int:
    """Matches with the authors' threshold, RANSAC, and RANSAC with ICP."""
    set_name = RIGID[args.table]
    args.methods = [f"{LEPARD}{weights}+{estimator}" for estimator in ("ransac", "ransac+icp")]
    task = Task(args.data, set_name, args.methods, args.count, args.seed, args.jobs, cluster=args.cluster)
    _, records = run_pairs(task, log_path(args.json), progress=not args.quiet)
    summaries = summarise_all(set_name, records)
    names = {f"ours, {name.partition('+')[2].replace('+', ' + ')}": s for name, s in summaries.items()}
    print(f"{set_name}\n\n{format_table(rigid_comparison(set_name, names))}")
    write_json(args.json, {**stamp(args), "set": set_name, "summaries": summaries, "records": records})
    return 0


def _deformable(args: argparse.Namespace, weights: Path) -> int:
    """Mutual matches with the authors' threshold."""
    part = DEFORMABLE[args.table]
    args.methods = [f"{LEPARD}{weights}"]
    files = deformable.drawn(evaluation_files(args.data, part), args.count, args.seed)
    log, shown = log_path(args.json), not args.quiet
    records = deformable.run_deformable(
        files, args.methods, [None], jobs=args.jobs, log=log, progress=shown, cluster=args.cluster
    )
    own = [record for record in records if record["part"] == part and not record["method"].endswith("+filter")]
    summaries = {"ours": deformable.summarise_deformable(own)}
    print(
        f"{part}\n\n{format_table(deformable_comparison(part, summaries))}\n\n{deformable.definition_line(summaries)}"
    )
    write_json(args.json, {**stamp(args), "set": part, "summaries": summaries, "records": records})
    return 0
