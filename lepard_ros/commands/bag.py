# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard bag make SRC OUT` converts a depth recording to a rosbag2, `info` lists a bag, `play` plays one."""

import argparse
from pathlib import Path

from lepard_ros.data.bag_reader import open_bag
from lepard_ros.data.recordings import CAMERA_HELP
from lepard_ros.errors import InputError
from lepard_ros.synthesis.room_recording import make_bag

HELP = "make a rosbag2 from depth images, list the contents of a bag, or play it over DDS"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard bag`."""
    actions = parser.add_subparsers(dest="action", required=True)
    help_make = "write a rosbag2 from a TUM or 7-Scenes folder, or from a synthetic room"
    _add_make(actions.add_parser("make", help=help_make))
    _add_play(actions.add_parser("play", help="publish the messages of a bag, as `ros2 bag play` does"))
    info = actions.add_parser("info", help="list the topics of a bag")
    info.add_argument("bag", type=Path, help="the bag (a directory, .mcap, .db3 or .bag)")


def _add_make(make: argparse.ArgumentParser) -> None:
    make.add_argument(
        "source", help="TUM folder (depth/*.png, groundtruth.txt or poses.txt); 7-Scenes folder; synthetic:SEED"
    )
    make.add_argument("--camera", type=Path, metavar="FILE", help=CAMERA_HELP)
    make.add_argument("output", type=Path, help="the new bag (a directory)")
    make.add_argument("--depth", action="store_true", help="write depth images instead of clouds")
    make.add_argument("--tf", action="store_true", help="write the ground truth to /tf (do not play it into the node)")
    make.add_argument("--stride", type=int, default=1, help="keep every n-th pixel of a row and a column (default 1)")
    make.add_argument("--every", type=int, default=1, help="keep every n-th image (default 1)")
    make.add_argument(
        "--gap",
        type=float,
        nargs=2,
        metavar=("START", "SECONDS"),
        help="omit the images of this interval (kidnapped sensor)",
    )
    make.add_argument(
        "--frames", type=int, help="keep only the first n images (synthetic: number of images, default 60)"
    )
    make.add_argument("--rate", type=float, default=10.0, help="images per second of a synthetic room (default 10)")
    make.add_argument("--storage", choices=("mcap", "sqlite3"), default="mcap", help="file format (default mcap)")


def _add_play(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bag", type=Path, help="the bag (a directory, .mcap or .db3)")
    parser.add_argument("--rate", type=float, default=1.0, help="playback speed, 1 for real time (default 1)")
    parser.add_argument("--clock", action="store_true", help="publish the time of the recording on /clock, at 40 Hz")
    parser.add_argument("--topics", nargs="+", default=[], metavar="TOPIC", help="play only these")
    parser.add_argument("--wait-for", default="", metavar="NODE", help="start when this node has subscribed")


def _play(args: argparse.Namespace) -> int:
    if not 0 < args.rate < float("inf"):
        raise InputError("--rate must be more than 0.")
    from lepard_ros.ros.bag_player import play_bag

    played = play_bag(args.bag, args.topics, args.rate, args.clock, args.wait_for, args.ros_arguments)
    print(f"{args.bag}: {played.messages} messages played, maximum delay {played.late:.2f} s.")
    return 0


def run(args: argparse.Namespace) -> int:
    """Make, list or play a bag."""
    if args.action == "play":
        return _play(args)
    if args.action == "info":
        with open_bag(args.bag) as bag:
            print(bag.describe())
        return 0
    if min(args.stride, args.every) < 1 or (args.frames is not None and args.frames < 1):
        raise InputError("--stride, --every and --frames must be 1 or more.")
    gap = (args.gap[0], args.gap[1]) if args.gap else None
    count = make_bag(
        args.source,
        args.output,
        depth=args.depth,
        tf=args.tf,
        stride=args.stride,
        every=args.every,
        gap=gap,
        frames=args.frames,
        rate=args.rate,
        storage=args.storage,
        progress=True,
        camera_file=args.camera,
    )
    print(f"{args.output}: {count} frames. Replay them with: lepard replay {args.output}")
    return 0
