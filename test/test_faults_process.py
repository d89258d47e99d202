# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Faults around the real process: signals, wrong parameters and weights, QoS that does not fit, names taken twice."""

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus

from lepard_ros.ros.conversion import stamp_to_ns
from node_harness import STEP_NS, NodeProcess, Probe, cloud_at, patience, untrained_weights

pytestmark = pytest.mark.slow
EXIT_SECONDS = 2.0  # on an idle machine


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_a_signal_while_matching_ends_the_node_cleanly(number: signal.Signals) -> None:
    with NodeProcess() as node, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        probe.track(cloud_at(0), start)
        probe.send(cloud_at(1), start + STEP_NS)
        probe.spin(0.05)
        code, seconds = node.stop(number)
        assert code == 0, node.log()
        assert seconds < EXIT_SECONDS * patience()
        assert "Traceback" not in node.log()


@pytest.fixture
def own_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A domain of its own: nodes that earlier tests ran in this process may still be in the graph of theirs."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(101 - int(os.environ["ROS_DOMAIN_ID"]) % 100))


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.usefixtures("own_domain")
def test_a_clean_exit_leaves_no_ghost(busy: bool) -> None:
    with Probe() as probe:
        before = shared_memory()
        with NodeProcess() as node:
            probe.connect()
            if busy:
                heavy = np.random.default_rng(0).uniform(-4, 4, (35_000, 3)).astype(np.float32)
                probe.send(heavy, time.time_ns())
                probe.spin(0.3)
            mine = mapped_segments(node.pid) - before
            assert mine
            assert node.stop()[0] == 0
            gone = time.monotonic()
            probe.until(lambda: "lepard" not in probe.node.get_node_names(), 15, "for the node to leave the graph")
            assert time.monotonic() - gone < 5 * patience(), "plain rclpy leaves at once, a ghost stays for 20 s"
            assert not mine & shared_memory(), "left in shared memory"


def shared_memory() -> set[str]:
    """Segments of Fast DDS that hold data; ports are shared by all processes."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.glob("fastdds_*") if "port" not in path.name} if folder.is_dir() else set()


def mapped_segments(pid: int) -> set[str]:
    """Those that a process has mapped."""
    names = {Path(line.split()[-1]).name for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line}
    return names & shared_memory()


def test_a_signal_that_an_import_swallowed_ends_the_process_when_it_comes_again() -> None:
    """A compiled module turns the exception of a signal into an ImportError of its own."""
    code = (
        "import os, signal, time; from lepard_ros.ros.stop_signal import StopSignal; StopSignal()\n"
        "try: os.kill(os.getpid(), signal.SIGINT); time.sleep(10)\n"
        "except SystemExit: pass\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); time.sleep(10)\n"
        "except SystemExit: pass\n"
        "print('still here')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_signals_that_interrupt_each_other_still_end_the_process() -> None:
    """Before, a signal inside of the first one's handler waited for a lock for ever."""
    code = (
        "import signal, threading; from lepard_ros.ros.stop_signal import StopSignal\n"
        "threading.Condition.notify_all = lambda self: signal.raise_signal(signal.SIGTERM)\n"
        "StopSignal(); signal.raise_signal(signal.SIGINT)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=20).returncode == 0


def test_a_second_signal_changes_nothing() -> None:
    with NodeProcess() as node, Probe() as probe:
        probe.connect()
        os.kill(node.pid, signal.SIGINT)  # a launched node gets Ctrl-C from the terminal and from launch
        code, _ = node.stop(signal.SIGINT)
        assert code == 0, node.log()


def wait_until_caught(pid: int, number: signal.Signals) -> None:
    """Until a process has a handler for a signal."""
    deadline = time.monotonic() + 20 * patience()
    while time.monotonic() < deadline:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if int(status["SigCgt"], 16) >> (number - 1) & 1:
            return
        time.sleep(0.02)
    raise AssertionError(f"the process catches no {number.name}")


def test_a_signal_while_the_model_loads_ends_the_node_cleanly() -> None:
    with NodeProcess() as node:
        wait_until_caught(node.pid, signal.SIGTERM)  # before Python's first lines a signal ends any process
        code, _ = node.stop(signal.SIGTERM)
        assert code == 0, node.log()


@pytest.mark.usefixtures("own_domain")
def test_a_node_stopped_while_it_configures_leaves_no_ghost() -> None:
    with Probe() as probe, NodeProcess("-r", "__node:=early") as node:
        probe.until(lambda: "early" in probe.node.get_node_names(), 30, "for the node to join the graph")
        assert node.stop()[0] == 0, node.log()
        probe.until(lambda: "early" not in probe.node.get_node_names(), 8, "for the node to leave the graph")


def test_kill_and_restart_rejoins_with_the_saved_map(tmp_path: Path) -> None:
    start = time.time_ns()
    with Probe() as probe:
        with NodeProcess(map_directory=str(tmp_path), keyframe_distance=0.1) as node:
            probe.connect()
            for step in range(5):
                status = probe.track(cloud_at(step), start + step * STEP_NS)
            assert status.keyframes > 1
            assert probe.call("save").success
            assert node.stop(signal.SIGKILL)[0] == -signal.SIGKILL
        assert [path.name for path in tmp_path.iterdir()] == ["map"], "nothing half-written may lie beside the map"
        probe.heard["tf"].clear()
        probe.heard["diagnostics"].clear()  # only the new node can speak from now on
        with NodeProcess(map_file=str(tmp_path / "map"), fallback="fpfh") as _:
            probe.until(lambda: _sees_the_publisher(probe), 60, "for the restarted node")
            states = []
            for step in range(5, 9):
                status = probe.track(cloud_at(4), start + step * STEP_NS, seconds=60)
                states.append(status.state)
                assert status.keyframes >= 2
            assert TrackingStatus.RELOCALISED in states
            assert set(probe.transforms()) == {("map", "camera")}


def _sees_the_publisher(probe: Probe) -> bool:
    """Whether a node that is active has found the probe; the killed one's subscription still counts for a while."""
    entry = probe.diagnosis(": input")
    values = {pair.key: pair.value for pair in entry.values} if entry else {}
    return values.get("publishers") == "1" and "Inactive" not in entry.message


@pytest.mark.parametrize(
    ("parameters", "word"),
    [
        ({"max_rnage": 1.0}, "did you mean 'max_range'"),
        ({"max_range": -1.0}, "between 0.1 and 1000"),
        ({"max_range": "far"}, "must be a number"),
        ({"mode": "rigdi"}, "did you mean 'rigid'"),
        ({"weights": "nowhere.safetensors"}, "no weights"),
        ({"map_file": "/nonexistent/map"}, "map"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_start_ends_with_one_sentence_and_code_2(parameters: dict[str, object], word: str) -> None:
    with NodeProcess(**parameters) as node:
        assert node.wait(60) == 2, node.log()
        assert word in node.log()
        assert "Traceback" not in node.log()


def copied_weights(folder: Path) -> Path:
    for suffix in (".safetensors", ".json"):
        shutil.copy(untrained_weights().with_suffix(suffix), folder / f"copy{suffix}")
    return folder / "copy.safetensors"


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    weights = copied_weights(tmp_path)
    weights.write_bytes(weights.read_bytes()[:-100])
    with NodeProcess(weights=str(weights)) as node:
        assert node.wait(60) == 2
        assert "damaged" in node.log()


def test_weights_replaced_while_running_do_no_harm(tmp_path: Path) -> None:
    weights = copied_weights(tmp_path)
    with NodeProcess(weights=str(weights)) as node, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        assert probe.track(cloud_at(0), start).state == TrackingStatus.OK
        weights.write_bytes(b"something else")
        assert probe.track(cloud_at(1), start + STEP_NS).state == TrackingStatus.OK
        assert node.alive()


def test_a_quality_of_service_that_does_not_fit_is_said() -> None:
    with NodeProcess(qos="reliable", silence=0.5) as node, Probe(reliable=False) as probe:

        def said() -> bool:
            entry = probe.diagnosis(": input")
            return entry is not None and "Incompatible QoS of a publisher" in entry.message

        probe.until(said, 60)
        assert "best_available" in probe.diagnosis(": input").message
        assert "No clouds from a publisher" in node.log()


@pytest.mark.usefixtures("own_domain")
def test_two_nodes_of_one_name_are_reported() -> None:
    with NodeProcess() as _, NodeProcess() as _, Probe() as probe:

        def said() -> bool:
            entry = probe.diagnosis(": tracking")
            return entry is not None and " nodes have this name" in entry.message

        probe.until(said, 90)
        assert "2 nodes have this name" in probe.diagnosis(": tracking").message


def test_without_open3d_the_node_tracks_relocalises_and_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A robot without Open3D: only loops and cloud files need it, and the log says so."""
    (tmp_path / "open3d.py").write_text("raise ModuleNotFoundError('not on this robot', name='open3d')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ['PYTHONPATH']}")
    with NodeProcess(weights="rigid", keyframe_distance=0.1, map_directory=str(tmp_path)) as node, Probe() as probe:
        probe.connect()
        assert "Loop closure is off: Open3D is missing" in node.log()
        stamp = time.time_ns()
        for step in range(5):
            stamp += STEP_NS
            assert probe.track(cloud_at(2 * step), stamp).state == TrackingStatus.OK
        for _ in range(4):  # longer than the motion so far is a guess
            stamp += 6 * STEP_NS
            assert probe.track(np.full((4, 5, 3), np.nan, np.float32), stamp).state == TrackingStatus.LOST
        states = []
        for _ in range(3):
            stamp += STEP_NS
            states.append(probe.track(cloud_at(2), stamp).state)
        assert TrackingStatus.RELOCALISED in states and states[-1] in (TrackingStatus.RELOCALISED, TrackingStatus.OK)
        probe.until(lambda: stamp_to_ns(probe.heard["odometry"][-1].header.stamp) == stamp)
        probe.until(lambda: stamp_to_ns(probe.transforms()["map", "camera"][-1].header.stamp) == stamp)
        assert probe.call("save").success
        assert node.alive()


@pytest.mark.skipif(find_spec("open3d") is None, reason="Open3D is not installed here")
def test_everything_heavy_is_loaded_before_the_first_cloud() -> None:
    """Open3D was imported in the first pose-graph optimisation: 2.3 s in which clouds were dropped."""
    with NodeProcess() as node, Probe() as probe:
        probe.connect()
        loaded = Path(f"/proc/{node.pid}/maps").read_text()
        assert [name for name in ("torch", "open3d", "small_gicp") if name not in loaded] == []
