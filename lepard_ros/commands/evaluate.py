# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard evaluate`: compares methods on data with ground truth, as tables, JSON and a report."""

import argparse
import datetime
import importlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from lepard_ros import __version__
from lepard_ros.data.fourdmatch import TEST_PARTS, evaluation_files
from lepard_ros.data.readers import RIGID_SETS, DepthSequence
from lepard_ros.data.recordings import CAMERA_HELP
from lepard_ros.errors import InputError
from lepard_ros.evaluation.methods import ESTIMATORS, LEPARD, method_names, with_estimators
from lepard_ros.evaluation.pairs import Task, run_pairs
from lepard_ros.evaluation.tables import CRITERIA, comparison_lines, format_table, rigid_rows, summarise_all

HELP = """Compare methods on data with ground truth.

examples:
  lepard evaluate 3dlomatch DATA --json runs/3dlomatch.json      # all pairs: ours, fpfh+ransac, kiss-matcher
  lepard evaluate 3dmatch DATA --methods lepard:rigid --estimator ours ransac --count 150
  lepard evaluate pairs DATA --set unrelated --count 100
  lepard evaluate tum rgbd_dataset_freiburg1_desk --count 150 --report report/
  lepard evaluate 4dmatch DATA --methods lepard:deformable n-icp cpd
  lepard evaluate ablation DATA --set 3DMatch --count 50 --variants threshold oracle
  lepard evaluate ablation DATA --set 4dmatch
  lepard evaluate bag room_bag street_bag --json runs/bags.json --cluster tcp://HOST:8786
  lepard evaluate gate

An interrupted run resumes if it gets the same --json file."""

RIGID_COMMANDS = {"3dmatch": "3DMatch", "3dlomatch": "3DLoMatch", "tum": "tum", "pairs": None}
BAG_MODULE = "lepard_ros.commands.replay"
MAX_JOBS = 4  # a process takes about 1 GB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard evaluate`."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, set_name in RIGID_COMMANDS.items():
        text = f"rigid pairs of {set_name}" if set_name else "rigid pairs of a set named by --set"
        _add_rigid(kinds.add_parser(kind, help=text, description=text), set_name)
    text = "deformable pairs in 4DMatch's format (npz files below DATA)"
    _add_deformable(kinds.add_parser("4dmatch", help=text, description=text))
    text = "variants of the network on rigid or deformable pairs, as in the paper's ablations"
    _add_ablation(kinds.add_parser("ablation", help=text, description=text))
    text = "a few synthetic rooms: fails if the shipped weights are worse than recorded"
    gate = kinds.add_parser("gate", help=text, description=text)
    gate.add_argument("--weights", default="rigid", help="shipped weights by name, or a file (default rigid)")
    if importlib.util.find_spec(BAG_MODULE) is not None:
        text = "track bags and compare with their true trajectories (as `lepard replay`)"
        _add_bags(kinds.add_parser("bag", help=text, description=text))


def _add_rigid(parser: argparse.ArgumentParser, set_name: str | None) -> None:
    _add_common(parser, ["lepard:rigid", "fpfh+ransac", "kiss-matcher"], method_names())
    parser.add_argument("--estimator", nargs="+", choices=ESTIMATORS, default=["ours"],
                        help="estimators for Lepard's matches, one row each: ours, or the paper's RANSAC")  # fmt: skip
    if set_name is None:
        parser.add_argument("--set", dest="set_name", choices=RIGID_SETS, default="3DMatch", help="which pairs")
    else:
        parser.set_defaults(set_name=set_name)
    if set_name in ("tum", None):
        parser.add_argument("--camera", type=Path, metavar="FILE", help=CAMERA_HELP)


def _add_deformable(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, ["lepard:deformable", "n-icp", "cpd"], "lepard:deformable, lepard:<weights>, n-icp, cpd")
    parser.add_argument("--part", choices=TEST_PARTS, help="only this part of a published set (default both)")
    parser.add_argument("--thresholds", nargs="+", type=float, default=[None], metavar="C",
                        help="minimum confidences of a match, one row each (default: that of the weights)")  # fmt: skip
    parser.add_argument("--register", action="store_true", help="also fit a warp to the matches: EPE, Acc5, Acc10")


def _add_ablation(parser: argparse.ArgumentParser) -> None:
    _add_common(parser, None, "lepard:rigid, lepard:deformable, lepard:<weights> (default: what suits the set)")
    sets = (*RIGID_SETS, "4dmatch")
    parser.add_argument("--set", dest="set_name", choices=sets, default="3DMatch", help="which pairs (default 3DMatch)")
    parser.add_argument("--variants", nargs="+", default=None, metavar="V", help="only these variants (default all)")


def _add_common(parser: argparse.ArgumentParser, methods: list[str] | None, names: str) -> None:
    parser.add_argument("data", type=Path, help="folder of the data set (official layout or compact)")
    parser.add_argument("--methods", nargs="+", default=methods, metavar="M", help=f"any of: {names}")
    parser.add_argument("--count", type=_positive, help="sample this many pairs; default all (unrelated: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default 0)")
    parser.add_argument("--jobs", type=_positive, default=min(MAX_JOBS, os.cpu_count() or 1), help="processes")
    parser.add_argument(
        "--cluster", metavar="ADDRESS", help="run on the workers of this Dask scheduler: docs/cluster.md"
    )
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write results here; F.jsonl next to it lets a run resume"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a self-contained page DIR/index.html")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_bags(parser: argparse.ArgumentParser) -> None:
    importlib.import_module(BAG_MODULE).add_arguments(parser, several=True)
    parser.add_argument("--jobs", type=_positive, default=1, help="processes, one bag each (default 1)")
    parser.add_argument("--cluster", metavar="ADDRESS", help="one bag a task on this Dask scheduler: docs/cluster.md")
    parser.add_argument("--json", type=Path, metavar="F", help="write the table here; F.jsonl lets a run resume")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run(args: argparse.Namespace) -> int:
    """Run one kind of evaluation."""
    runners = {"gate": _run_gate, "bag": _run_bags, "4dmatch": _run_deformable, "ablation": _run_ablation}
    return runners.get(args.kind, _run_rigid)(args)


def _run_rigid(args: argparse.Namespace) -> int:
    camera_file = getattr(args, "camera", None)
    args.methods = with_estimators(args.methods, args.estimator)
    task = Task(args.data, args.set_name, args.methods, args.count, args.seed, args.jobs, camera_file, args.cluster)
    if isinstance(source := task.open(), DepthSequence):
        print(f"camera: {source.recording.calibration}")
    log = log_path(args.json)
    pairs, records = run_pairs(task, log, progress=not args.quiet)
    summaries = summarise_all(task.set_name, records)
    print(f"{task.set_name}: {len(pairs)} pairs, seed {task.seed}; recall: {CRITERIA[task.set_name]}.\n")
    print(format_table(rigid_rows(task.set_name, summaries)))
    print("".join(f"\n{line}" for line in comparison_lines(summaries)))
    result = {**stamp(args), "set": task.set_name, "seed": task.seed, "summaries": summaries, "records": records}
    write_json(args.json, result)
    if args.report:
        from lepard_ros.report.evaluation import rigid_report

        print(f"report: {rigid_report(args.report, task, pairs, records)}")
    return 0


def _run_deformable(args: argparse.Namespace) -> int:
    """`lepard evaluate 4dmatch`."""
    from lepard_ros.evaluation import deformable

    files = deformable.drawn(evaluation_files(args.data, args.part), args.count, args.seed)
    for name in args.methods:
        deformable.make_deformable(name)
    log = log_path(args.json)
    records = deformable.run_deformable(
        files, args.methods, args.thresholds, args.register, args.jobs, log, not args.quiet, args.cluster
    )
    tables = deformable.deformable_tables(records)
    for title, summaries in tables.items():
        print(f"\n{title}\n\n{format_table(deformable.deformable_rows(summaries))}\n")
        print(f"{deformable.definition_line(summaries)}\n{deformable.mirror_line(summaries)}")
    write_json(args.json, {**stamp(args), "seed": args.seed, "tables": tables, "records": records})
    if args.report:
        from lepard_ros.report.evaluation import deformable_report

        print(f"report: {deformable_report(args.report, files, args.methods, records)}")
    return 0


def _run_ablation(args: argparse.Namespace) -> int:
    """`lepard evaluate ablation`."""
    from lepard_ros.evaluation import ablation

    names = ablation.choose_variants(args.variants, args.set_name)
    if args.methods is None:
        args.methods = ["lepard:deformable" if args.set_name == ablation.DEFORMABLE_SET else "lepard:rigid"]
    weights = args.methods[0]
    if len(args.methods) != 1 or not weights.startswith(LEPARD):
        raise InputError("an ablation takes one method, lepard:<weights>.")
    bench = ablation.open_bench(args.data, args.set_name)
    pairs = bench.pairs(args.count, args.seed)
    results = ablation.run_variants(
        names, weights, bench, pairs, args.jobs, log_path(args.json), not args.quiet, args.cluster
    )
    summaries = {name: bench.summarise(records) for name, records in results.items()}
    heading = f"{args.set_name}: {len(pairs)} pairs, seed {args.seed}, {weights}; {bench.criterion}."
    rows, others = bench.rows(summaries), ablation.other_trainings(args.set_name)
    print(f"{heading}\n\n{format_table(rows)}\n\n{others[0]}")
    print("\n".join(f"  {line}" for line in others[1:]))
    write_json(args.json, {**stamp(args), "set": args.set_name, "summaries": summaries, "records": results})
    if args.report:
        from lepard_ros.report.evaluation import ablation_report

        print(f"report: {ablation_report(args.report, heading, rows, others, results)}")
    return 0


def _run_bags(args: argparse.Namespace) -> int:
    """`lepard evaluate bag`: one bag as `lepard replay` does, or a table of several."""
    from lepard_ros.commands import replay
    from lepard_ros.evaluation import bags

    if len(args.bag) == 1 and args.cluster is None and args.json is None:
        return replay.run(argparse.Namespace(**{**vars(args), "bag": args.bag[0]}))
    given = [name for name in ("save_map", "mcap", "report") if getattr(args, name)]
    if given or args.mode != "rigid":
        raise InputError(f"--{(given or ['mode'])[0].replace('_', '-')} is for one bag; track it with `lepard replay`.")
    tasks = bags.tasks_of(args)
    records = bags.run_bags(replay.track_bag, tasks, args.jobs, log_path(args.json), args.cluster)
    print(format_table(bags.bag_rows(records)))
    write_json(args.json, {"version": __version__, "records": records})
    return 0


def _run_gate(args: argparse.Namespace) -> int:
    """`lepard evaluate gate`: print the score; exit code 1 if it is worse than recorded."""
    from lepard_ros.evaluation import gate
    from lepard_ros.matcher import Matcher

    score = gate.run_gate(Matcher.from_pretrained(args.weights), gate.gate_rooms())
    print(score)
    recorded = gate.RECORDED.get(args.weights)
    if recorded is None:
        print(f"no score is recorded for {args.weights}: put this one into RECORDED in {gate.__name__}.")
        return 0
    failures = score.failures(recorded)
    print("\n".join(failures) or "not worse than recorded.")
    return 1 if failures else 0


def log_path(json_file: Path | None) -> Path | None:
    """The log that belongs to a JSON file."""
    return None if json_file is None else json_file.with_suffix(".jsonl")


def stamp(args: argparse.Namespace) -> dict[str, Any]:
    """The settings needed to repeat the run."""
    return {
        "version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "data": args.data.name,
        "methods": args.methods,
        "jobs": args.jobs,
    }


def write_json(path: Path | None, result: dict[str, Any]) -> None:
    """Write the results; raises InputError if the file cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): give another --json file.") from error
