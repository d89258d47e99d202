# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Work through a list in several processes, with every result one line of JSON, so that a run can be resumed."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, TypeVar

from lepard_ros.errors import InputError

Record = dict[str, Any]
Item = TypeVar("Item")

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def read_log(log: Path | None) -> list[Record]:
    """The lines of a log. A last line cut off by an interrupted run is dropped: its work is done again."""
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


def append_log(log: Path | None, record: Record) -> None:
    """Add a line to the log, after removing one that was cut off."""
    if log is None:
        return
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and not log.read_bytes().endswith(b"\n"):
            whole = log.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
            log.write_text("".join(whole), encoding="utf-8")
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise InputError(f"{log} cannot be written ({error.strerror}): give another --json file.") from error


def run_parallel(
    work: Callable[[Item], Record],
    items: Sequence[Item],
    jobs: int,
    start: Callable[..., None],
    start_arguments: tuple[Any, ...],
) -> Iterator[Record]:
    """The records of `items` in their order, from this process or from several; `start` prepares each process.

    One thread per process: items run side by side, and a time per item means the same for every method.
    """
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))  # inherited by the processes below
    if jobs <= 1 or len(items) < 2:
        _start(start, start_arguments)
        yield from map(work, items)
        return
    # Spawned, not forked: threads of torch and Open3D do not survive a fork.
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(start, start_arguments)) as pool:
        yield from pool.map(work, items)


def end_with_parent() -> None:
    """Let this process of a pool end when the one that started it is killed; it would work on, then wait for ever."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    start(*arguments)


def with_progress(records: Iterable[Record], total: int, shown: bool) -> Iterable[Record]:
    """The records with a bar that estimates the time left, when there is any work."""
    if not shown or total == 0:
        return records
    from tqdm import tqdm

    return tqdm(records, total=total, unit="pair", desc="evaluating", dynamic_ncols=True)
