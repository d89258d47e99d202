# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Process a list of items in several processes or on a cluster; each result is one line of JSON, so runs can resume."""

import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from lepard_ros.data.workers import connect, end_with_parent
from lepard_ros.errors import InputError
from lepard_ros.network.threads import VARIABLES

Record = dict[str, Any]
Item = TypeVar("Item")
Result = TypeVar("Result")


def read_log(log: Path | None) -> list[Record]:
    """The lines of a log. An incomplete last line of an interrupted run is dropped and recomputed."""
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
            raise InputError(f"line {number + 1} of {log} is not JSON; move the file away to start over.") from error
    return records


def append_log(log: Path | None, record: Record) -> None:
    """Add a line to the log, after removing one that was cut off."""
    if log is None:
        return
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and not _ends_whole(log):
            whole = log.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]
            log.write_text("".join(whole), encoding="utf-8")
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise InputError(f"{log} cannot be written ({error.strerror}): give another --json file.") from error


def _ends_whole(log: Path) -> bool:
    """Whether the last line of a log is complete."""
    with log.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def run_parallel(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    jobs: int,
    start: Callable[..., None],
    start_arguments: tuple[Any, ...],
    cluster: str | None = None,
) -> Iterator[Result]:
    """The results of `items` as they are finished, from this process, from several, or from a Dask cluster.

    start: prepares each process, with small arguments. cluster: address of a Dask scheduler; a task of a dead worker
    goes to another one, and every item is yielded once. One thread per process: items run in parallel, and times per
    item are comparable between methods.
    """
    os.environ.update(dict.fromkeys(VARIABLES, "1"))  # inherited by the processes below
    if cluster is None and (jobs <= 1 or len(items) < 2):
        _start(start, start_arguments)
        yield from map(work, items)
        return
    with _executor(jobs, start, start_arguments, cluster) as pool:
        wrapped = work if cluster is None else partial(_on_worker, uuid4().hex, start, start_arguments, work)
        futures: list[Future[Result]] = [pool.submit(wrapped, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise InputError("a worker process was killed (out of memory?): run again with fewer --jobs.") from error
        finally:
            for future in futures:  # do not wait for the rest of an interrupted run
                future.cancel()


@contextmanager
def _executor(
    jobs: int, start: Callable[..., None], arguments: tuple[Any, ...], cluster: str | None
) -> Iterator[Executor]:
    """Local processes, or the workers of a cluster: both have the interface of concurrent.futures."""
    if cluster is None:
        # Spawned, not forked: threads of torch and Open3D do not survive a fork.
        context = get_context("spawn")
        with ProcessPoolExecutor(jobs, context, initializer=_start, initargs=(start, arguments)) as pool:
            yield pool
        return
    with connect(cluster) as client:
        yield client.get_executor(pure=False)


class _Prepared:
    """The run that a cluster worker is prepared for. Its threads take turns, because a matcher is not thread-safe."""

    run = ""
    lock = threading.Lock()


def _on_worker(
    run: str, start: Callable[..., None], arguments: tuple[Any, ...], work: Callable[[Item], Result], item: Item
) -> Result:
    """One item on a worker of a cluster, which is prepared on the first item of a run."""
    with _Prepared.lock:
        if _Prepared.run != run:
            _single_threaded()
            start(*arguments)
            _Prepared.run = run
        return work(item)


def _start(start: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    end_with_parent()
    _single_threaded()
    start(*arguments)


def _single_threaded() -> None:
    import torch

    torch.set_num_threads(1)


def with_progress(records: Iterable[Record], total: int, shown: bool) -> Iterable[Record]:
    """Iterate over the records with a progress bar, if there is any work."""
    if not shown or total == 0:
        return records
    from tqdm import tqdm

    return tqdm(records, total=total, unit="pair", desc="evaluating", dynamic_ncols=True)
