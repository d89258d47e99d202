# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""More than one machine: a real Dask scheduler with two real workers, one of which is killed midway."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from box_room import CAMERA, render, sweep
from lepard_ros import cli
from lepard_ros.data import workers as workers_module
from lepard_ros.data.bag_writer import BagWriter
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


def write_bags(folder: Path) -> list[Path]:
    """Three bags of a few clouds, each with its own way through a room."""
    paths = [folder / f"walk_{number}" for number in range(3)]
    for number, path in enumerate(paths):
        with closing(BagWriter(path, CAMERA)) as writer:
            for i, pose in enumerate(sweep(7, -15 + 4 * number, 25)[:4]):
                writer.write(10**9 + i * 10**8, render(pose, i), pose)
    return paths


@pytest.mark.slow
def test_bags_on_a_cluster_are_tracked_once_each_though_a_worker_dies(
    cluster: tuple[str, list[subprocess.Popen]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rosbags")
    address, workers = cluster
    bags, table = write_bags(tmp_path), tmp_path / "table.json"
    given = ["evaluate", "bag", *map(str, bags), "--weights", "fpfh", "--no-pictures", "--json", str(table)]
    arguments = [*given, "--output", str(tmp_path / "out"), "--cluster", address]
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(arguments)))
    thread.start()
    wait_for_lines(table.with_suffix(".jsonl"), 1)
    workers[0].send_signal(signal.SIGKILL)
    assert len(read_log(table.with_suffix(".jsonl"))) < len(bags), "the worker was killed too late to matter"
    thread.join(timeout=120)
    assert codes == [0]
    tracked = sorted(Path(record["bag"]).name for record in read_log(table.with_suffix(".jsonl")))
    assert tracked == [bag.name for bag in bags]
    assert bags[0].name in capsys.readouterr().out
    records = json.loads(table.read_text())["records"]
    assert [(record["tracked"], record["false"]) for record in records] == [(1.0, 0)] * 3
    assert all((tmp_path / "out" / bag.name / "trajectory.tum").exists() for bag in bags)


def test_several_bags_are_told_apart_by_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = [str(tmp_path / "a" / "walk"), str(tmp_path / "b" / "walk")]
    assert cli.main(["evaluate", "bag", *same, "--weights", "fpfh"]) == 2
    assert "two of the bags are named walk" in capsys.readouterr().err
    assert cli.main(["evaluate", "bag", same[0], str(tmp_path / "other"), "--save-map", str(tmp_path)]) == 2
    assert "--save-map is for one bag" in capsys.readouterr().err


def test_a_scheduler_that_does_not_answer_is_named(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(workers_module, "CONNECT_SECONDS", 0.5)
    data, address = write_corner_pairs(tmp_path / "data"), f"tcp://127.0.0.1:{free_port()}"
    arguments = ["evaluate", "3dmatch", str(data), "--methods", "icp", "--quiet", "--cluster", address]
    assert cli.main(arguments) == 2
    assert f"no Dask scheduler answers at {address}" in capsys.readouterr().err
