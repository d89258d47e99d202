"""`lepard demo`: a synthesised depth camera, a bag of what it saw, the real node, and what came of it on one page."""

import argparse
import sys
import time
from pathlib import Path

from lepard_ros.errors import InputError
from lepard_ros.evaluation.bag_writer import CAMERA_FRAME
from lepard_ros.evaluation.demo_processes import prepare_folder, prepare_surroundings, run_node
from lepard_ros.evaluation.demo_report import measure, write_report
from lepard_ros.evaluation.demo_story import DemoRun, Story, make_story, write_bag

HELP = """Show the node at work, without a sensor.

rigid: a depth camera is carried once around a synthesised room. Its lens is covered for a moment, and when it sees
again it is somewhere else in the room. The node says where the camera is.
deformable: a depth camera looks at a synthesised creature that moves its limbs. Its lens is covered for a moment. The
node says how the creature has bent since it was first seen.

The recording is written as a rosbag2, played over DDS by one process into the node in another, and what the node
publishes is compared with the truth. Pictures and a page go to the output folder."""

SEED = 3
LEAST_FRAMES = 20
LEAST_TRACKED = 0.8  # share of the clouds that show something; less is no demonstration


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard demo`."""
    parser.add_argument(
        "--mode", choices=("rigid", "deformable"), default="rigid", help="what the node tracks (default rigid)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write (default demo_output)"
    )
    parser.add_argument("--frames", type=int, default=60, help="clouds of the recording (default 60)")
    parser.add_argument("--seed", type=int, help="which room, or which creature (default: one that shows much)")
    parser.add_argument("--weights", help="weights: a shipped name or a file (default: the mode)")
    parser.add_argument(
        "--fallback", choices=("none", "fpfh"), default="none", help="the rigid node's fallback (default none)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 if the node followed, 1 if not."""
    if args.mode == "rigid":
        return show_rigid(args)
    from lepard_ros.evaluation.demo_deformable import show_deformable

    return show_deformable(args)


def show_rigid(args: argparse.Namespace) -> int:
    """A camera in a room; 0 if the node followed it, 1 if not."""
    if args.frames < LEAST_FRAMES:
        raise InputError(f"The walk needs at least {LEAST_FRAMES} frames.")
    started = time.monotonic()
    output = prepare_folder(args.output)
    print(f"Rendering a room and {args.frames} views of it ...", flush=True)
    story = make_story(SEED if args.seed is None else args.seed, args.frames)
    write_bag(story, output / "bag")
    run_ = play_into_node(story, output, args.weights or "rigid", args.fallback)
    figures = measure(run_)
    print(write_report(run_, figures, output, time.monotonic() - started))
    if figures.tracked < LEAST_TRACKED * figures.seen or figures.false_poses or run_.node.exit_code:
        print(f"The node did not do what this is to show; its log is {output / 'node.log'}.", file=sys.stderr)
        return 1
    return 0


def play_into_node(story: Story, output: Path, weights: str, fallback: str) -> DemoRun:
    """Play the bag in `output` into the node, and record what it publishes."""
    prepare_surroundings()
    from lepard_ros.evaluation.demo_recorder import Recorder

    recorder = Recorder()
    parameters = {"weights": weights, "fallback": fallback}
    node = run_node(recorder, output / "bag", len(story.stamps_ns), parameters, output / "node.log")
    return DemoRun(story, recorder.recorded, CAMERA_FRAME, node, weights)
