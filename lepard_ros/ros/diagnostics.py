# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node's health, once a second on /diagnostics."""

import collections
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue

from lepard_ros.ros.conversion import stamp_from_ns

LATENCIES_KEPT = 300
_LEVELS = {"ok": DiagnosticStatus.OK, "warn": DiagnosticStatus.WARN, "error": DiagnosticStatus.ERROR}


@dataclass
class Health:
    """Counters of the running node. Written by the worker and the executor, read once a second."""

    received: int = 0
    processed: int = 0
    dropped: int = 0
    rejected: collections.Counter[str] = field(default_factory=collections.Counter)
    qos_mismatches: int = 0
    qos_problem: str = ""
    publishers: int = 0
    same_name: int = 0
    tf_problem: str = ""
    last_received: float | None = None
    active_since: float | None = None
    state: str = "inactive"
    state_reason: str = ""
    configure_problem: str = ""
    last_rejection: str = ""
    rejected_in_a_row: int = 0
    latencies: collections.deque[float] = field(default_factory=lambda: collections.deque(maxlen=LATENCIES_KEPT))
    stages: dict[str, float] = field(default_factory=dict)

    def silent_seconds(self) -> float:
        """Seconds since the last cloud, or since the node was activated."""
        since = self.last_received or self.active_since
        return time.monotonic() - since if since is not None else 0.0


def diagnostics_message(
    node_name: str, health: Health, facts: dict[str, str], silence: float, now_ns: int
) -> DiagnosticArray:
    """Two entries: the input and the tracking."""
    input_level, input_text = judge_input(health, silence)
    level, text = judge_tracking(health)
    entries = [
        _entry(f"{node_name}: input", input_level, input_text, _input_values(health)),
        _entry(f"{node_name}: tracking", level, text, {**_tracking_values(health), **facts}),
    ]
    array = DiagnosticArray(status=entries)
    array.header.stamp = stamp_from_ns(now_ns)
    return array


def judge_input(health: Health, silence: float) -> tuple[str, str]:
    """Level and message about the input."""
    if health.active_since is None:
        return "ok", "Inactive: no input is expected."
    if health.qos_mismatches and health.publishers and health.silent_seconds() > silence:
        return "error", f"Incompatible QoS of a publisher: {health.qos_problem}"
    if health.silent_seconds() <= silence:
        return ("warn", health.last_rejection) if health.rejected_in_a_row else ("ok", "Clouds arrive.")
    if health.publishers == 0:
        return "warn", "The input topic has no publisher; start the sensor, or remap the topic."
    return "warn", (
        f"A publisher is connected, but no message has arrived for {health.silent_seconds():.0f} s: the sensor is "
        "silent, or its messages are too large for the default shared memory. Start the sensor's driver with "
        "FASTDDS_DEFAULT_PROFILES_FILE set to config/fastdds.xml of lepard_ros."
    )


def judge_tracking(health: Health) -> tuple[str, str]:
    """Level and message about tracking."""
    if health.configure_problem:
        return "error", health.configure_problem
    if health.same_name > 1:
        return "error", f"{health.same_name} nodes have this name; give each its own with __node:=, or TF will jump."
    if health.active_since is None:
        return "ok", "Inactive."
    if health.tf_problem:
        return "error", health.tf_problem
    if health.state in ("OK", "RELOCALISED"):
        return ("warn", health.state_reason) if health.state_reason else ("ok", "The pose is known.")
    if health.state == "INITIALISING":
        return "ok", "Waiting for the first usable cloud."
    return "warn", f"Lost: {health.state_reason}"


def resident_megabytes() -> float:
    """The resident memory of this process; 0 without /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 / 1e6 if statm.is_file() else 0.0


def _input_values(health: Health) -> dict[str, str]:
    counts = {"received": health.received, "processed": health.processed, "dropped": health.dropped}
    counts |= {"rejected": sum(health.rejected.values()), "publishers": health.publishers}
    counts |= {"qos mismatches": health.qos_mismatches, **{f"rejected: {k}": n for k, n in health.rejected.items()}}
    return {name: str(count) for name, count in counts.items()} | {"last rejection": health.last_rejection}


def _tracking_values(health: Health) -> dict[str, str]:
    values = {"state": health.state, "memory [MB]": f"{resident_megabytes():.0f}"}
    if health.latencies:
        median, high = np.percentile(np.array(health.latencies), [50, 95])
        values |= {"latency median [ms]": f"{median * 1e3:.0f}", "latency 95 % [ms]": f"{high * 1e3:.0f}"}
    return values | {f"{stage} [ms]": f"{seconds * 1e3:.1f}" for stage, seconds in health.stages.items()}


def _entry(name: str, level: str, text: str, values: dict[str, str]) -> DiagnosticStatus:
    pairs = [KeyValue(key=key, value=value) for key, value in values.items()]
    return DiagnosticStatus(level=_LEVELS[level], name=name, message=text, hardware_id="lepard_ros", values=pairs)
