# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo`: a synthesised depth camera, a bag of what it saw, the real node, and what came of it on one page."""

import argparse
import importlib
import sys
import time
from pathlib import Path

from lepard_ros.demo.processes import prepare_folder, prepare_surroundings
from lepard_ros.demo.story import write_bag
from lepard_ros.errors import InputError

HELP = """Show the node at work, without a sensor.

rigid: a depth camera is carried once around a synthesised room. Its lens is covered for a moment, and when it sees
again it is somewhere else in the room. The node says where the camera is.
deformable: a depth camera looks at a synthesised creature that turns round in a furnished room. Its lens
is covered for a moment. The node says how the creature has bent since it was first seen.

The recording is written as a rosbag2, played over DDS by one process into the node in another, and what the node
publishes is compared with the truth. Pictures and a page go to the output folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard demo`."""
    parser.add_argument(
        "--mode", choices=("rigid", "deformable"), default="rigid", help="what the node tracks (default rigid)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo_output"), help="folder to write (default demo_output)"
    )
    parser.add_argument("--frames", type=int, help="clouds of the recording (default: rigid 60, deformable 100)")
    parser.add_argument("--seed", type=int, help="which room, or which creature (default: one that shows much)")
    parser.add_argument("--weights", help="weights: a shipped name or a file (default: the mode)")
    parser.add_argument(
        "--fallback", choices=("none", "fpfh"), default="none", help="the rigid node's fallback (default none)"
    )
    parser.add_argument(
        "--pace",
        choices=("real", "wait"),
        help="play in real time, or wait for each answer (default: rigid real, deformable wait)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demonstration; 0 if the node did what it is to show, 1 if not."""
    # What the modes do differently is in a module each, under the same names.
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
        print(f"Not what this is to show: {complaint} The node's log is {output / 'node.log'}.", file=sys.stderr)
    return 1 if complaints else 0
