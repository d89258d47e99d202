# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Number of threads of a program, and their wait policy. Call it before importing torch and numpy."""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import NamedTuple

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# The matrix products of the networks have a few thousand rows; with more threads each has too little work. Not measured
# beyond two cores.
MAX_THREADS = 8
QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<microseconds> <period>" of a container, or "max <period>"


class Threads(NamedTuple):
    """A number of threads, and why it is that one."""

    number: int
    why: str


def wait_without_spinning() -> None:
    """Let waiting OpenMP threads sleep, unless the user sets another policy.

    Spinning saves microseconds on an idle machine. On a busy one, spinning threads take the time of the thread that
    they wait for: a replay took 0.71 CPU-s a frame instead of 0.13 (2 cores, load 8, 2026-11-17).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def use_one_blas_thread(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let numpy and scipy run in one thread per process, also in child processes, unless the user sets a number.

    A node runs several threads and processes of its own. With OpenBLAS's default, as many threads as cores in each of
    them, a match in the matching process took 1.3 s for 0.4 s of work (2 cores, 2026-11-18): its small products waited
    for a core that tracking used.
    """
    if "OMP_NUM_THREADS" not in environment:
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")


def choose_threads(environment: MutableMapping[str, str] = os.environ) -> Threads:
    """Use as many threads as there are idle cores, also in child processes; OMP_NUM_THREADS overrides this."""
    given = environment.get("OMP_NUM_THREADS", "")
    if given:
        return Threads(int(given) if given.isdigit() else 1, "as OMP_NUM_THREADS says")
    threads = idle_threads(available_cores(), os.getloadavg()[0])
    for variable in VARIABLES:
        environment.setdefault(variable, str(threads.number))
    return threads


def idle_threads(cores: int, load: float) -> Threads:
    """The useful number of threads for a number of cores and a load: more than the idle cores would compete."""
    number = max(1, min(round(cores - load), MAX_THREADS))
    return Threads(number, f"of {cores} cores, with a load of {load:.1f}; OMP_NUM_THREADS sets another number")


def available_cores(quota: Path = QUOTA) -> int:
    """The cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = quota.read_text().split() if quota.is_file() else []
    if len(words) == 2 and words[0].isdigit():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores
