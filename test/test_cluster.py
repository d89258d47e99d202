# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""More than one machine: a real Dask scheduler with two real workers, one of which is killed midway."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lepard_ros import cli
from lepard_ros.data import workers as workers_module
from lepard_ros.data.workers import map_in_processes
from lepard_ros.evaluation.pairs import Task, run_pairs
from lepard_ros.evaluation.runner import read_log
from pair_files import write_corner_pairs

pytest.importorskip("distributed", reason="the package distributed is not installed")
METHODS = ["fpfh+ransac", "icp", "fpfh+fgr"]


def dask(*arguments: str) -> subprocess.Popen:
    """A command of docs/cluster.md: `dask scheduler` or `dask worker`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "dask", *arguments], env=dict(os.environ), **quiet)  # type: ignore[call-overload]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """The address of a scheduler, and the processes of its two workers."""
    address = f"tcp://127.0.0.1:{(port := free_port())}"
    own = ["--host", "127.0.0.1", "--no-dashboard"]
    scheduler = dask("scheduler", *own, "--port", str(port))
    here = ["--nthreads", "1", "--no-nanny", "--local-directory", str(tmp_path)]
    workers = [dask("worker", address, "--host", "127.0.0.1", "--no-dashboard", *here) for _ in range(2)]
    yield address, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


def wait_for_lines(log: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while (not log.exists() or len(log.read_text().splitlines()) < count) and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_killed_worker_loses_nothing_and_nothing_counts_twice(
    cluster: tuple[str, list[subprocess.Popen]], tmp_path: Path
) -> None:
    address, workers = cluster
    data, log = write_corner_pairs(tmp_path / "data"), tmp_path / "log.jsonl"
    from distributed import Client

    with Client(address) as client:
        client.wait_for_workers(2, timeout=60)
    task = Task(data, "3DMatch", METHODS, cluster=address)
    thread = threading.Thread(target=run_pairs, args=(task, log, False))
    thread.start()
    wait_for_lines(log, 4)  # the pairs and three results
    workers[0].send_signal(signal.SIGKILL)
    assert len(log.read_text().splitlines()) < len(METHODS) * 6, "the worker was killed too late to matter"
    thread.join(timeout=240)
    assert sorted(map_in_processes(abs, range(-9, 0), address)) == list(range(1, 10))  # as `lepard synthesise` does
    assert not thread.is_alive()
    found = [(record["method"], record["source"]) for record in read_log(log) if "method" in record]
    wanted = [(method, f"{scene}/{i}") for method in METHODS for scene in ("kitchen", "hotel") for i in (1, 2, 3)]
    assert sorted(found) == sorted(wanted)
    alone = run_pairs(Task(data, "3DMatch", METHODS), progress=False)[1]
    assert [r["accepted"] for r in run_pairs(task, log, False)[1]] == [r["accepted"] for r in alone]


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(workers_module, "CONNECT_SECONDS", 0.5)
    data, address = write_corner_pairs(tmp_path / "data"), f"tcp://127.0.0.1:{free_port()}"
    arguments = ["evaluate", "3dmatch", str(data), "--methods", "icp", "--quiet", "--cluster", address]
    assert cli.main(arguments) == 2
    assert f"no Dask scheduler answers at {address}" in capsys.readouterr().err
