"""`lepard demo`: a synthesised depth camera in a room, a bag of it, the real node, and what came of it on one page."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tqdm import tqdm

from lepard_ros.errors import InputError
from lepard_ros.evaluation.bag_writer import CAMERA_FRAME
from lepard_ros.evaluation.demo_report import measure, write_report
from lepard_ros.evaluation.demo_story import DemoRun, Story, make_story, write_bag

if TYPE_CHECKING:
    from lepard_ros.evaluation.demo_recorder import Recorder

HELP = """Show the node at work, without a sensor.

A depth camera is carried once around a synthesised room. Its lens is covered for a moment, and when it sees again it is
somewhere else in the room. The recording is written as a rosbag2, played over DDS by one process into the node in
another, and what the node publishes is compared with the truth. Pictures and a page go to the output folder."""

SEED = 3
LEAST_TRACKED = 0.8  # share of the clouds that show something; less is no demonstration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard demo`."""
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write (default demo_output)"
    )
    parser.add_argument("--frames", type=int, default=60, help="clouds of the walk around the room (default 60)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"which room (default {SEED})")
    parser.add_argument("--weights", default="rigid", help="weights: a shipped name or a file (default rigid)")
    parser.add_argument(
        "--fallback", choices=("none", "fpfh"), default="none", help="the node's fallback (default none)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 if the node followed the camera, 1 if not."""
    if args.frames < 20:
        raise InputError("The walk needs at least 20 frames.")
    started = time.monotonic()
    output = prepare_folder(args.output)
    print(f"Rendering a room and {args.frames} views of it ...", flush=True)
    story = make_story(args.seed, args.frames)
    bag = output / "bag"
    write_bag(story, bag)
    run_ = play_into_node(story, bag, args.weights, args.fallback, output / "node.log")
    figures = measure(run_)
    print(write_report(run_, figures, output, time.monotonic() - started))
    if figures.tracked < LEAST_TRACKED * figures.seen or figures.false_poses or run_.exit_code:
        print(f"The node did not do what this is to show; its log is {output / 'node.log'}.", file=sys.stderr)
        return 1
    return 0


def prepare_folder(output: Path) -> Path:
    """An output folder without an older bag in it."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(output / "bag", ignore_errors=True)
    return output


def play_into_node(story: Story, bag: Path, weights: str, fallback: str, log: Path) -> DemoRun:
    """Start the node and the player, each in its process, and record what the node publishes."""
    prepare_surroundings()
    from lepard_ros.evaluation.demo_recorder import Recorder

    recorder = Recorder()
    print("Starting the node ...", flush=True)
    with log.open("w") as file:
        node = node_process({"weights": weights, "fallback": fallback}, file)
        try:
            wait_for_node(recorder, node, log)
            used = cpu_seconds(node.pid)
            seconds = play(recorder, bag, len(story.stamps_ns))
            used = cpu_seconds(node.pid) - used
        finally:
            node.terminate()
            code = node.wait(60)
            recorder.close()
    return DemoRun(story, recorder.recorded, CAMERA_FRAME, seconds, used, code, weights)


def prepare_surroundings() -> None:
    """A ROS domain of our own, and shared memory that holds a cloud, for this process and its children.

    From here on SIGTERM ends this process by an exception, so that it takes its children with it.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    from lepard_ros.ros.parameters import share_directory

    # Not the user's domain: a robot may be in it, and would hear the demonstration's transforms.
    os.environ["ROS_DOMAIN_ID"] = str(1 + os.getpid() % 100)
    os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
    os.environ["FASTDDS_DEFAULT_PROFILES_FILE"] = str(share_directory() / "config" / "fastdds.xml")


def node_process(parameters: dict[str, str], log: TextIO) -> "subprocess.Popen[bytes]":
    """The node in its own process."""
    parameters = {"map_period": "1.0", "min_range": "0.3", **parameters}
    given = [part for name, value in parameters.items() for part in ("-p", f"{name}:={value}")]
    command = [sys.executable, "-m", "lepard_ros.ros.main", "--ros-args", *given]
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def player_process(bag: Path, loop_seconds: float = 0.0) -> "subprocess.Popen[bytes]":
    """The sensor in its own process; loop_seconds: play the bag again and again for so long, at the sensor's rate."""
    command = [sys.executable, "-m", "lepard_ros.evaluation.demo_player", str(bag)]
    return subprocess.Popen([*command, "--loop", str(loop_seconds)] if loop_seconds else command)


def wait_for_node(recorder: "Recorder", node: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until the node is there; its own words if it ended instead."""
    deadline = time.monotonic() + 120
    while not recorder.hears_node():
        if node.poll() is not None:
            words = log.read_text().strip().splitlines()
            raise InputError(words[-1] if words else f"The node ended with code {node.returncode} and said nothing.")
        if time.monotonic() > deadline:
            raise InputError(f"The node did not come up within two minutes; see {log}.")
        time.sleep(0.1)


def play(recorder: "Recorder", bag: Path, count: int) -> float:
    """Play the bag from a second process and listen; the seconds it took."""
    started = time.monotonic()
    player = player_process(bag)
    with tqdm(total=count, desc="clouds through the node", unit="cloud") as bar:

        def going_on() -> bool:
            bar.update(len(recorder.recorded.frames) - bar.n)
            return player.poll() is None

        try:
            recorder.listen_while(going_on)
        finally:
            player.terminate()
            player.wait(20)
        bar.update(len(recorder.recorded.frames) - bar.n)
    if player.returncode:
        raise InputError("The player of the demonstration failed; its message stands above.")
    return time.monotonic() - started


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used, all its threads together; 0 where /proc does not exist."""
    path = Path(f"/proc/{pid}/stat")
    if not path.is_file():
        return 0.0
    fields = path.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
