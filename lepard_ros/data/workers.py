# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Parallel work in child processes that end with their parent, or on a Dask cluster."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeVar

from lepard_ros.errors import InputError

Item = TypeVar("Item")
Result = TypeVar("Result")
# How many processes of this machine, or the address of a Dask scheduler.
Workers = int | str
CONNECT_SECONDS = 20
_worker: dict[str, Callable[[Any], Any]] = {}  # what this worker process was started for


def map_in_processes(function: Callable[[Item], Result], items: Sequence[Item], processes: Workers) -> Iterator[Result]:
    """The function's results in any order, from several processes, or from this one if there is only one."""
    if isinstance(processes, str):
        yield from _map_on_cluster(function, items, processes)
        return
    if processes <= 1:
        yield from map(function, items)
        return
    # The function is sent to each process once: it may carry meshes, which take longer to send than an item to make.
    with multiprocessing.get_context("spawn").Pool(processes, _start_worker, (function,)) as pool:
        yield from pool.imap_unordered(_call_function, items)


def _map_on_cluster(function: Callable[[Item], Result], items: Sequence[Item], address: str) -> Iterator[Result]:
    """The same on a cluster; unfinished work of a dead worker goes to another one."""
    distributed: Any = import_module("distributed")
    with connect(address) as client:
        # Held by the cluster, not sent with every item: it may carry meshes. If its worker dies, it is made again.
        sent = client.submit(_hold, function, pure=False)
        futures = [client.submit(_apply, sent, item, pure=False) for item in items]
        for future in distributed.as_completed(futures):
            yield future.result()


def connect(address: str) -> Any:
    """A client of the Dask scheduler at an address; raises InputError if it does not respond."""
    distributed: Any = import_module("distributed")
    try:
        return distributed.Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise InputError(
            f"no Dask scheduler answers at {address} ({error}): start one with `dask scheduler`."
        ) from error


def _hold(value: Any) -> Any:
    return value


def _apply(function: Callable[[Any], Any], item: Any) -> Any:
    return function(item)


def end_with_parent() -> None:
    """End this worker process when its parent is killed; otherwise it would wait forever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent,), daemon=True).start()


def _end_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


def _start_worker(function: Callable[[Any], Any]) -> None:
    end_with_parent()
    _worker["function"] = function


def _call_function(item: Any) -> Any:
    return _worker["function"](item)
