# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Several bags, one task each: on this machine or on a cluster, with a log that lets an interrupted run resume."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from lepard_ros.errors import InputError
from lepard_ros.evaluation.runner import Record, append_log, read_log, run_parallel

HEADER = ["bag", "frames", "with a pose %", "ATE m", "RPE m in 1 s", "false", "keyframes", "CPU-s a frame"]
# Arguments of `lepard evaluate bag` on which a result depends.
OPTIONS = ("topic", "truth", "weights", "grid", "every", "min_range", "max_range", "map", "localise", "fallback")


def tasks_of(args: Namespace) -> list[Namespace]:
    """The arguments of each bag: results in a folder with its name, absolute paths."""
    names = [path.stem for path in args.bag]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"two of the bags are named {twice}: their results would be written to one folder.")
    shared = {name: _absolute(value) for name, value in vars(args).items() if name != "bag"}
    folder = args.output.resolve()
    own = ({"bag": path.resolve(), "output": folder / path.stem, "quiet": True} for path in args.bag)
    return [Namespace(**{**shared, **values}) for values in own]


def _absolute(value: object) -> object:
    """An absolute path, so that a process in another folder finds it."""
    if isinstance(value, Path):
        return value.resolve()
    return str(Path(value).resolve()) if isinstance(value, str) and value and Path(value).is_file() else value


def run_bags(
    work: Callable[[Namespace], Record],
    tasks: Sequence[Namespace],
    jobs: int = 1,
    log: Path | None = None,
    cluster: str | None = None,
) -> list[Record]:
    """The record of each task in order; those in the log are kept. work: tracks one bag, in whatever process."""
    done = {(record["bag"], record["options"]): record for record in read_log(log) if "options" in record}
    todo = [(work, task) for task in tasks if _key(task) not in done]
    for record in run_parallel(_track, todo, jobs, _nothing, (), cluster):
        done[record["bag"], record["options"]] = record
        append_log(log, record)
    return [done[_key(task)] for task in tasks]


def _key(task: Namespace) -> tuple[str, str]:
    return str(task.bag), " ".join(f"{name}={getattr(task, name)}" for name in OPTIONS)


def _track(item: tuple[Callable[[Namespace], Record], Namespace]) -> Record:
    work, task = item
    return {**work(task), "bag": _key(task)[0], "options": _key(task)[1]}


def _nothing() -> None:
    """Workers need no preparation: each bag starts a new tracker."""


def bag_rows(records: Sequence[Record]) -> list[list[str]]:
    """A table of bags, the first row is the header; a dash where a bag has no truth."""
    rows = [HEADER]
    for r in records:
        errors = ["-" if r[name] is None else f"{r[name]:.3f}" for name in ("ate", "rpe")]
        false = "-" if r["false"] is None else str(r["false"])
        shares = [str(r["frames"]), f"{100 * r['tracked']:.1f}"]
        rows.append([Path(r["bag"]).stem, *shares, *errors, false, str(r["keyframes"]), f"{r['cpu_seconds']:.3f}"])
    return rows
