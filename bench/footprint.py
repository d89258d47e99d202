# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Wall time, CPU time and memory of a command with all its processes.

    python bench/footprint.py lepard evaluate 3dmatch DATA/3dmatch --count 100 --methods lepard:rigid

Memory is the largest sum of the proportional set sizes (PSS: shared pages are divided among their users), sampled five
times a second. Linux only.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path


def descendants(root: int) -> list[int]:
    """A process and all that it started, by their ids."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may hold spaces; the parent is the second word after it.
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            parents[int(entry.name)] = int(words[1])
    family = [root]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family


def proportional_megabytes(pid: int) -> float:
    """The PSS of a process, 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def main() -> int:
    """Run the command and say what it took; its exit code."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    load, started = os.getloadavg()[0], time.perf_counter()
    most, processes = 0.0, 0
    with subprocess.Popen(sys.argv[1:]) as command:
        while command.poll() is None:
            family = descendants(command.pid)
            total = sum(map(proportional_megabytes, family))
            most, processes = max((most, processes), (total, len(family)))
            time.sleep(0.2)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    wall, cpu = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
    print(
        f"\nwall {wall:.1f} s, CPU {cpu:.1f} s, memory {most:.0f} MB in {processes} processes; load before {load:.1f}"
    )
    return command.returncode


if __name__ == "__main__":
    sys.exit(main())
