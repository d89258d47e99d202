# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard bag make SRC OUT` turns a recording of a depth camera into a rosbag2; `lepard bag info BAG` lists one."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from lepard_ros.cloud.depth import Camera
from lepard_ros.errors import InputError
from lepard_ros.evaluation.bag_reader import open_bag
from lepard_ros.evaluation.bag_writer import BagWriter
from lepard_ros.evaluation.recordings import CAMERA_HELP, DepthFrame, Recording, open_recording

HELP = "make a rosbag2 from depth images, or list what a bag holds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard bag`."""
    actions = parser.add_subparsers(dest="action", required=True)
    make = actions.add_parser(
        "make",
        help="write a rosbag2 from a TUM or 7-Scenes folder, or from a synthetic room",
    )
    make.add_argument(
        "source",
        help="TUM folder (depth/*.png, groundtruth.txt or poses.txt); 7-Scenes folder; synthetic:SEED",
    )
    make.add_argument("--camera", type=Path, metavar="FILE", help=CAMERA_HELP)
    make.add_argument("output", type=Path, help="the new bag (a directory)")
    make.add_argument(
        "--depth",
        action="store_true",
        help="write depth images instead of clouds",
    )
    make.add_argument("--tf", action="store_true", help="write the truth to /tf (not to be played into the node)")
    make.add_argument(
        "--stride",
        type=int,
        default=1,
        help="keep every n-th pixel of a row and a column (default 1)",
    )
    make.add_argument("--every", type=int, default=1, help="keep every n-th image (default 1)")
    make.add_argument(
        "--gap",
        type=float,
        nargs=2,
        metavar=("START", "SECONDS"),
        help="leave out the images of this time (a kidnap)",
    )
    make.add_argument(
        "--frames",
        type=int,
        help="keep the first n images (synthetic: how many to make, default 60)",
    )
    make.add_argument(
        "--rate",
        type=float,
        default=10.0,
        help="images a second of a synthetic room (default 10)",
    )
    make.add_argument(
        "--storage",
        choices=("mcap", "sqlite3"),
        default="mcap",
        help="file format (default mcap)",
    )
    info = actions.add_parser("info", help="list the topics of a bag")
    info.add_argument("bag", type=Path, help="the bag (a directory, .mcap, .db3 or .bag)")


def run(args: argparse.Namespace) -> int:
    """Make or list a bag."""
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


def make_bag(
    source: str,
    output: Path,
    *,
    depth: bool = False,
    tf: bool = False,
    stride: int = 1,
    every: int = 1,
    gap: tuple[float, float] | None = None,
    frames: int | None = None,
    rate: float = 10.0,
    storage: str = "mcap",
    progress: bool = False,
    camera_file: Path | None = None,
) -> int:
    """Write the recording that `source` names (see `open_recording`) as a rosbag2; the number of frames written.

    stride: keep every n-th pixel. every: keep every n-th image. gap: (start, length) in seconds from the first image,
    left out as if the sensor had been carried away. frames: the first n only. progress: whether to show it, and which
    camera was taken.
    """
    recording = open_recording(source, frames=frames or 60, rate=rate, camera_file=camera_file)
    if progress and isinstance(recording, Recording):
        print(f"camera: {recording.calibration}")
    chosen = select_frames(recording.frames(), every=every, gap=gap, first=frames)
    count = 0
    writer = BagWriter(output, shrink_camera(recording.camera, stride), depth=depth, tf=tf, storage=storage)
    with closing(writer) as bag:
        for frame in tqdm(chosen, total=len(recording), desc="bag", unit="frame", disable=not progress):
            bag.write(frame.stamp_ns, frame.depth[::stride, ::stride], frame.pose)
            count += 1
    if not count:
        raise InputError("No frame is left to write: the gap covers the whole recording.")
    return count


def select_frames(
    frames: Iterable[DepthFrame],
    *,
    every: int = 1,
    gap: tuple[float, float] | None = None,
    first: int | None = None,
) -> Iterator[DepthFrame]:
    """Every n-th of the first frames, without those in the gap (start, length in seconds from the first frame)."""
    start_ns: int | None = None
    for index, frame in enumerate(frames):
        if first is not None and index >= first:
            return
        start_ns = frame.stamp_ns if start_ns is None else start_ns
        seconds = (frame.stamp_ns - start_ns) * 1e-9
        if index % every == 0 and not (gap and gap[0] <= seconds < gap[0] + gap[1]):
            yield frame


def shrink_camera(camera: Camera, stride: int) -> Camera:
    """The camera of an image of which every n-th pixel was kept, beginning with the first."""
    size = -(-camera.width // stride), -(-camera.height // stride)
    return Camera(
        *size,
        camera.fx / stride,
        camera.fy / stride,
        camera.cx / stride,
        camera.cy / stride,
    )
