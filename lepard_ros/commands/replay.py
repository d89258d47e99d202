# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard replay BAG`: tracks a recorded bag and writes the results."""

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from lepard_ros.cloud.ranges import FARTHEST, NEAREST
from lepard_ros.data.bag_reader import Bag, BagFrame, open_bag
from lepard_ros.data.extended_bag import ExtendedBag
from lepard_ros.errors import InputError
from lepard_ros.evaluation.deformable_replay import replay_deformable
from lepard_ros.evaluation.replay import figures, load_matcher, replay_bag, summary, tracked_frames
from lepard_ros.report.replay import prepare_output, replay_report, write_results
from lepard_ros.tracking.deformable import DeformableTracker
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import TrackerSettings

HELP = """track a recorded bag, every frame in order

Reads clouds (or depth images with camera info) from a rosbag2 (mcap, sqlite3) or a ROS 1 bag, tracks the sensor and
writes to the output folder: trajectory.tum (as published), corrected.tum (after loop closures), status.csv, map.ply,
pictures, and with ground truth in the bag (a pose topic, odometry or TF) the errors ATE and RPE. With --mode deformable
it tracks a deforming object instead, and writes status.csv and model.ply. --mcap OUT writes a bag with the input and
all topics that the node would publish, for RViz and Foxglove."""

TRUTH_HELP = "true poses: a topic, TF, or a file in TUM format (default: /ground_truth if it is there, else TF)"

RIGID_ONLY = ("truth", "map", "save_map", "localise", "report")


def add_arguments(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the arguments of `lepard replay`. several: whether more than one bag may be given."""
    kinds: dict[str, Any] = {"nargs": "+"} if several else {}
    parser.add_argument("bag", type=Path, help="rosbag2 directory, .mcap, .db3 or ROS 1 .bag", **kinds)
    parser.add_argument("--output", type=Path, default=Path("replay_output"), help="folder (default replay_output)")
    parser.add_argument("--topic", help="topic of the clouds or depth images (default: the only one in the bag)")
    parser.add_argument("--truth", metavar="TOPIC|TF|FILE", help=TRUTH_HELP)
    parser.add_argument("--mode", choices=("rigid", "deformable"), default="rigid", help="what is tracked")
    parser.add_argument("--weights", help="a name, a .safetensors file, or fpfh for no network (default: the mode's)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or onnx (default auto)")
    parser.add_argument("--grid", type=float, help="metres between matched points (default: that of the weights)")
    parser.add_argument("--every", type=int, default=1, help="use every n-th frame (default 1)")
    parser.add_argument("--min-range", type=float, default=NEAREST, help=f"metres, as the node's (default {NEAREST})")
    parser.add_argument("--max-range", type=float, default=FARTHEST, help=f"metres, as the node's (default {FARTHEST})")
    parser.add_argument("--map", type=Path, help="start in this saved map or cloud file")
    parser.add_argument("--save-map", type=Path, help="save the map to this directory")
    parser.add_argument("--localise", action="store_true", help="do not add to the map")
    parser.add_argument(
        "--fallback",
        choices=("none", "fpfh"),
        default="none",
        help="method to try when all of Lepard's motions are refused",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--no-pictures", action="store_true", help="write no pictures")
    parser.add_argument("--mcap", type=Path, metavar="OUT", help="write a bag with the input and the node's topics")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a self-contained page DIR/index.html")


def run(args: argparse.Namespace) -> int:
    """Replay a bag and write the results."""
    print(track_bag(args)["summary"])
    print(f"Written to {args.output}{f' and {args.mcap}' if args.mcap else ''}")
    return 0


def track_bag(args: argparse.Namespace) -> dict[str, Any]:
    """Track the bag of the arguments and write the files; a summary, and the figures of rigid mode.

    Picklable in and out, so that several bags can be tracked by several processes or machines.
    """
    if args.every < 1:
        raise InputError(f"--every is {args.every}; it must be 1 or more.")
    if not 0 <= args.min_range < args.max_range:
        raise InputError(f"--min-range {args.min_range} must be less than --max-range {args.max_range}.")
    with open_bag(args.bag) as bag:
        topic = bag.cloud_topic(args.topic)
        bag.truth_topic(args.truth)  # before the weights are loaded
        prepare_output(args.output)
        track = _track_rigid if args.mode == "rigid" else _track_deformable
        return track(args, bag, topic)


def _track_rigid(args: argparse.Namespace, bag: Bag, topic: str) -> dict[str, Any]:
    """Track the sensor."""
    settings = TrackerSettings(mapping=not args.localise, fallback=args.fallback)
    matcher = load_matcher(args.weights or "rigid", args.device, args.grid)
    tracker = RigidTracker.load(args.map, matcher, settings) if args.map else RigidTracker(matcher, settings)
    options = {"truth_topic": args.truth, "every": args.every, "ranges": (args.min_range, args.max_range)}
    with _recording(args, tracker) as listener:
        replay = replay_bag(bag, tracker, topic, **options, progress=not args.quiet, listener=listener)
    write_results(replay, tracker, args.output, pictures=not args.no_pictures)
    if args.save_map:
        tracker.save(args.save_map)
    page = f"\nreport: {replay_report(args.report, args.bag.name, replay, tracker)}" if args.report else ""
    return {"summary": summary(replay, tracker) + page, **figures(replay, tracker)}


def _track_deformable(args: argparse.Namespace, bag: Bag, topic: str) -> dict[str, Any]:
    """Track a deforming object."""
    given = [name for name in RIGID_ONLY if getattr(args, name)]
    if given or args.weights == "fpfh":
        raise InputError(f"--{(given or ['weights fpfh'])[0].replace('_', '-')} is for rigid mode; remove it.")
    matcher = load_matcher(args.weights or "deformable", args.device, args.grid)
    tracker = DeformableTracker(matcher, DeformableSettings(max_range=args.max_range))
    frames = tracked_frames(bag, topic, args.every, (args.min_range, args.max_range), progress=not args.quiet)
    with _recording(args, tracker) as listener:
        return {"summary": replay_deformable(frames, tracker, args.output, listener)}


@contextmanager
def _recording(args: argparse.Namespace, tracker: RigidTracker | DeformableTracker) -> Iterator[Any]:
    """A listener that writes the input and the node's topics to a bag; None without --mcap."""
    if args.mcap is None:
        yield None
        return
    from lepard_ros.ros.scribe import NAMESPACE, Scribe, definitions

    scribe = Scribe(tracker)
    with open_bag(args.bag) as source, closing(ExtendedBag(args.mcap, source, definitions(), NAMESPACE)) as extended:

        def write(frame: BagFrame, track: Any) -> None:
            for message in scribe.write(track, frame.points, frame.stamp_ns, frame.frame_id):
                extended.put(*message, frame.recorded_ns)

        yield write
