# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard map`: inspects, exports, draws and merges saved maps."""

import argparse
from pathlib import Path

from lepard_ros.errors import InputError
from lepard_ros.evaluation.replay import load_matcher
from lepard_ros.tracking.rigid import RigidTracker

HELP = """inspect, export, merge or draw saved maps

  lepard map info MAP                   keyframes, memory, extent
  lepard map export MAP cloud.ply       the points (PLY, PCD, ...)
  lepard map merge A B -o C             B aligned to A by Lepard, joined by the pose graph
  lepard map render MAP picture.png     top view"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard map`."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--weights", default="rigid", help="rigid, a .safetensors file, or fpfh for no network")
    common.add_argument("--device", default="auto", help="auto, cpu, cuda or onnx (default auto)")
    actions = parser.add_subparsers(dest="action", required=True)
    info = actions.add_parser("info", parents=[common], help="keyframes, memory, extent")
    export = actions.add_parser("export", parents=[common], help="write the points as a cloud file")
    merged = actions.add_parser("merge", parents=[common], help="make one map of two")
    render = actions.add_parser("render", parents=[common], help="draw the map from above")
    for one in (info, export, render):
        one.add_argument("map", type=Path, help="directory of a saved map")
    for one in (export, render):
        one.add_argument("file", type=Path, help="to write")
        one.add_argument("--spacing", type=float, default=0.02, help="metres between points (default 0.02)")
    merged.add_argument("first", type=Path, help="map whose frame is kept")
    merged.add_argument("second", type=Path, help="map that is added")
    merged.add_argument("-o", "--output", type=Path, required=True, help="directory of the new map")


def run(args: argparse.Namespace) -> int:
    """Do what the action says."""
    matcher = load_matcher(args.weights, args.device)
    if args.action == "merge":
        from lepard_ros.tracking.merge import merge

        first, second = (RigidTracker.load(path, matcher) for path in (args.first, args.second))
        links = merge(first, second)
        first.save(args.output)
        print(f"{len(first.keyframes)} keyframes, joined by {links} links, written to {args.output}")
        return 0
    tracker = RigidTracker.load(args.map, matcher)
    if args.action == "info":
        print(describe(tracker))
    else:
        write(tracker, args)
    return 0


def describe(tracker: RigidTracker) -> str:
    """A few lines about a map."""
    frames, points = tracker.keyframes, tracker.map_points(0.05)
    size = points.max(axis=0) - points.min(axis=0)
    kilobytes = frames.nbytes / max(len(frames), 1) / 1e3
    loops = sum(edge.loop for edge in tracker.edges())
    return "\n".join(
        [
            f"keyframes  {len(frames)}, {frames.nbytes / 1e6:.1f} MB ({kilobytes:.0f} kB each)",
            f"edges      {len(tracker.edges())}, of which {loops} close loops",
            f"extent     {size[0]:.1f} x {size[1]:.1f} x {size[2]:.1f} m",
        ]
    )


def write(tracker: RigidTracker, args: argparse.Namespace) -> None:
    """Write the points as a cloud, or a picture of them."""
    if not args.spacing > 0:
        raise InputError(f"--spacing is {args.spacing}; it must be more than 0.")
    points = tracker.map_points(args.spacing)
    if args.action == "export":
        from lepard_ros.cloud.files import write_cloud

        write_cloud(args.file, points)
    else:
        from lepard_ros.report.map_picture import draw_map

        draw_map(points, tracker.keyframes.poses(), args.file)
    print(f"{len(points)} points written to {args.file}")
