# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo`: plays a synthetic recording into the real node and writes a report."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from lepard_ros.demo.processes import prepare_folder, prepare_surroundings
from lepard_ros.demo.story import write_bag
from lepard_ros.errors import InputError

HELP = """Show the node at work, without a sensor.

rigid: a depth camera moves once around a synthetic room. Its lens is covered for a moment, and the camera is somewhere
else when it sees again. The node tracks the camera's pose.
deformable: a depth camera observes a synthetic creature that turns around in a furnished room. Its lens is covered for
a moment. The node tracks the deformation of the creature since it was first seen.

The recording is written as a rosbag2. One process plays it over DDS into the node in another process, and the node's
output is compared with the ground truth. Pictures and a report go to the output folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard demo`."""
    parser.add_argument(
        "--mode", choices=("rigid", "deformable"), default="rigid", help="what the node tracks (default rigid)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write (default demo_output)"
    )
    parser.add_argument("--frames", type=int, help="clouds of the recording (default: rigid 60, deformable 100)")
    parser.add_argument(
        "--seed", type=int, help="seed of the room or creature (default: one that works well as a demonstration)"
    )
    parser.add_argument("--weights", help="weights: a shipped name or a file (default: the mode)")
    parser.add_argument(
        "--fallback", choices=("none", "fpfh"), default="none", help="the rigid node's fallback (default none)"
    )
    parser.add_argument(
        "--pace",
        choices=("real", "wait"),
        help="play in real time, or wait for each result (default: rigid real, deformable wait)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 if the node meets its targets, 1 if not."""
    # Each mode has its own module with the same names.
    mode = importlib.import_module(f"lepard_ros.demo.{args.mode}")
    frames = mode.FRAMES if args.frames is None else args.frames
    if frames < mode.MIN_FRAMES:
        raise InputError(f"The recording needs at least {mode.MIN_FRAMES} frames.")
    started = time.monotonic()
    output = prepare_folder(args.output)
    print(f"{mode.OPENING}, {frames} depth images ...", flush=True)
    recording = mode.record(mode.SEED if args.seed is None else args.seed, frames)
    write_bag(recording, output / "bag")
    prepare_surroundings()
    played = mode.play_into_node(
        recording, output, args.weights or args.mode, args.fallback, (args.pace or mode.PACE) == "real"
    )
    figures = mode.measure(played)
    print(mode.write_report(played, figures, output, time.monotonic() - started))
    complaints = mode.what_went_wrong(played, figures)
    for complaint in complaints:
        print(f"The demo missed a target: {complaint} The node's log is {output / 'node.log'}.", file=sys.stderr)
    return 1 if complaints else 0
