"""Runs the real node at sensor rate for a long time and watches memory, latency, drops and exceptions.

`make soak SECONDS=1800`. A small room is seen along a path that goes out and back again and again, over real DDS.
Exit code 1 if the node dies, logs an exception, loses frames without counting them, or grows.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "test")]

import conftest  # noqa: E402, F401  (a ROS domain of our own, one thread: set before rclpy is imported)
from node_harness import NodeProcess, Probe, cloud_at  # noqa: E402

PATH_STEPS = 120  # Out and back.
# What Python's and torch's allocators move by without a leak, above the share of the memory that is in use.
ALLOWED_GROWTH_MB = 25.0
ALLOWED_GROWTH_SHARE = 0.03


class Soak(NamedTuple):
    """What a run gave. memory: (T,) resident megabytes, once a second; latency: (N,) seconds, stamp to status."""

    sent: int
    statuses: list[Any]
    memory: NDArray[np.float64]
    latency: NDArray[np.float64]
    exceptions: int
    exit_code: int

    def growth(self) -> float:
        """Megabytes between the second and the last quarter of the run: the first is warming up."""
        quarter = max(1, len(self.memory) // 4)
        return float(np.median(self.memory[-quarter:]) - np.median(self.memory[quarter : 2 * quarter]))

    def faults(self) -> list[str]:
        """What must not happen, in words; empty if all is well."""
        allowed = ALLOWED_GROWTH_MB + ALLOWED_GROWTH_SHARE * float(np.median(self.memory))
        last = self.statuses[-1] if self.statuses else None
        found = []
        if last is None:
            found.append("no status was heard")
        elif last.frames_processed + last.frames_dropped < last.frames_received - 1:
            found.append("frames were lost without being counted")
        if self.exceptions:
            found.append(f"{self.exceptions} exceptions in the log")
        if self.exit_code:
            found.append(f"the node ended with code {self.exit_code}")
        if self.growth() > allowed:
            found.append(f"memory grew by {self.growth():.0f} MB, more than {allowed:.0f} MB")
        return found


def resident_megabytes(pid: int) -> float:
    """Memory that a process holds, from /proc."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def soak(seconds: float, rate: float, **parameters: Any) -> Soak:
    """Send clouds at a rate (Hz) for a time; parameters are the node's."""
    clouds = [cloud_at(step) for step in range(PATH_STEPS)]
    memory: list[float] = []
    with NodeProcess(**parameters) as node, Probe() as probe:
        probe.connect(seconds=180.0)
        start = time.monotonic()
        sent = 0
        while (elapsed := time.monotonic() - start) < seconds:
            probe.send(clouds[sent % PATH_STEPS], time.time_ns())
            sent += 1
            if elapsed >= len(memory):
                memory.append(resident_megabytes(node.pid))
            probe.spin(max(0.0, start + sent / rate - time.monotonic()))
            drop_bulk(probe)
        probe.spin(2.0)
        statuses = list(probe.heard["status"])
        exit_code, _ = node.stop()
        exceptions = node.log().count("Traceback")
    latency = np.array([status.latency for status in statuses])
    return Soak(sent, statuses, np.array(memory), latency, exceptions, exit_code)


def drop_bulk(probe: Probe) -> None:
    """Forget all that was heard but the statuses, or the watcher itself would grow."""
    for topic, messages in probe.heard.items():
        if topic != "status":
            messages.clear()


def report(result: Soak) -> str:
    """The figures as a table."""
    last = result.statuses[-1]
    p50, p95, p99 = np.percentile(result.latency, [50, 95, 99]) * 1e3
    rows = {
        "frames sent / processed / dropped": f"{result.sent} / {last.frames_processed} / {last.frames_dropped}",
        "latency p50 / p95 / p99": f"{p50:.0f} / {p95:.0f} / {p99:.0f} ms",
        "memory median, growth": f"{np.median(result.memory):.0f} MB, {result.growth():+.1f} MB",
        "exceptions, exit code": f"{result.exceptions}, {result.exit_code}",
    }
    return "\n".join(f"{name:<36}{value}" for name, value in rows.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="clouds a second (default: %(default)s)")
    parser.add_argument("--weights", default="", help="name or file; by default a small untrained network")
    args = parser.parse_args()
    result = soak(args.seconds, args.rate, **({"weights": args.weights} if args.weights else {}))
    faults = result.faults()
    if result.statuses:
        print(report(result))
    print("FAILED: " + "; ".join(faults) if faults else "passed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
