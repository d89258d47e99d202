# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The processes of a demonstration: the node in one, the sensor in another, and this one that listens to both."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from lepard_ros.demo.story import NodeRun
from lepard_ros.errors import InputError

if TYPE_CHECKING:
    from lepard_ros.demo.recorder import Recorder


def prepare_folder(output: Path) -> Path:
    """An output folder without an older bag in it."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output / "bag", ignore_errors=True)
    return output


def prepare_surroundings() -> None:
    """A ROS domain of our own, and shared memory that holds a cloud, for this process and its children.

    From here on SIGTERM ends this process by an exception, so that it takes its children with it.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    from lepard_ros.ros.parameters import use_fastdds_profile

    # Not the user's domain: a robot in it would receive the demonstration's transforms.
    os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 60)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    use_fastdds_profile()


def run_node(
    recorder: "Recorder", bag: Path, clouds: int, parameters: dict[str, str], log: Path, real_time: bool = False
) -> NodeRun:
    """Start the node and the player of a bag, each in its own process, and listen until the bag is played.

    The recorder is closed at the end. log: the node's log file. real_time: the player does not wait for the node.
    """
    print("Starting the node ...", flush=True)
    with log.open("w") as file:
        node = node_process(parameters, file)
        try:
            wait_for_node(recorder, node, log)
            used, memory = cpu_seconds(node.pid), [resident_megabytes(node.pid)]
            seconds = play(recorder, bag, clouds, lambda: memory.append(resident_megabytes(node.pid)), real_time)
            used = cpu_seconds(node.pid) - used
        finally:
            node.terminate()
            code = node.wait(60)
            recorder.close()
    return NodeRun(seconds, used, code, memory)


def node_process(parameters: dict[str, str], log: TextIO) -> "subprocess.Popen[bytes]":
    """The node in its own process."""
    parameters = {"map_period": "1.0", "min_range": "0.3", **parameters}
    given = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    command = [sys.executable, "-m", "lepard_ros.ros.main", "--ros-args", *given]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def player_process(bag: Path, loop_seconds: float = 0.0, real_time: bool = False) -> "subprocess.Popen[bytes]":
    """The sensor in its own process; loop_seconds: play the bag again and again for so long, at the sensor's rate."""
    command = [sys.executable, "-m", "lepard_ros.demo.player", str(bag), *(["--real-time"] if real_time else [])]
    return subprocess.Popen([*command, "--loop", str(loop_seconds)] if loop_seconds else command)


def wait_for_node(recorder: "Recorder", node: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the node is there; its own words if it ended instead."""
    deadline = time.monotonic() + 120
    while not recorder.hears_node():
        if node.poll() is not None:
            words = log.read_text().strip().splitlines()
            raise InputError(words[-1] if words else f"The node ended with code {node.returncode} and an empty log.")
        if time.monotonic() > deadline:
            raise InputError(f"The node did not start within two minutes; see {log}.")
        time.sleep(0.1)


def play(
    recorder: "Recorder",
    bag: Path,
    count: int,
    on_answer: Callable[[], None] = lambda: None,
    real_time: bool = False,
) -> float:
    """Play the bag from a second process and listen; the seconds it took. on_answer: called after each status."""
    started = time.monotonic()
    player = player_process(bag, real_time=real_time)
    with tqdm(total=count, desc="clouds through the node", unit="cloud") as bar:

        def going_on() -> bool:
            for _ in range(len(recorder.recorded.frames) - bar.n):
                on_answer()
                bar.update(1)
            return player.poll() is None

        try:
            recorder.listen_while(going_on)
        finally:
            player.terminate()
            player.wait(20)
        going_on()
    if player.returncode:
        raise InputError("The player of the demonstration failed; its message is above.")
    return time.monotonic() - started


def family(pid: int) -> list[int]:
    """A process and those that it started, as far as they run; itself alone where /proc does not say."""
    members = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            started = [int(child) for child in children.read_text().split()]
        except OSError:  # the thread has ended
            continue
        members += [member for child in started for member in family(child)]
    return members


def cpu_seconds(pid: int) -> float:
    """Processor time that a process and its children have used, all threads; 0 where /proc does not exist."""
    return sum(_used(member) for member in family(pid))


def _used(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_megabytes(pid: int) -> float:
    """Memory of a process and its children; 0 where /proc does not exist or the process has ended."""
    return sum(_resident(member) for member in family(pid))


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0
