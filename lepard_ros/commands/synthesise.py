# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard synthesise`: makes training data from meshes, or without any files."""

import argparse
from pathlib import Path
from typing import Any

from lepard_ros.errors import InputError
from lepard_ros.synthesis.creature_scenes import synthesise_scenes
from lepard_ros.synthesis.deformable_data import VALIDATION_SEEDS, load_models, render_animations, synthesise_pairs
from lepard_ros.synthesis.real_shards import write_real_shards
from lepard_ros.synthesis.shards import synthesise_rooms

HELP = "make synthetic training data: rooms for the rigid network, creatures for the deformable one"
CREATURES_HELP = "scenes of a deforming object, several clouds each: the training data of the deformable network"
DEFORMABLE_HELP = "deformable pairs: creatures, people, hands, cloth, soft objects (4DMatch format)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands `rooms`, `real`, `creatures` and `deformable`."""
    kinds = parser.add_subparsers(dest="data", required=True, metavar="{rooms,real,creatures,deformable}")
    _add_rooms(kinds)
    _add_real(kinds)
    _add_creatures(kinds)
    _add_deformable(kinds)
    for name in ("rooms", "creatures", "deformable"):
        text = "make them on the workers of this Dask scheduler: docs/cluster.md"
        kinds.choices[name].add_argument("--cluster", metavar="ADDRESS", help=text)


def _add_rooms(kinds: Any) -> None:
    rooms = kinds.add_parser(
        "rooms",
        help="furnished rooms seen by a depth camera",
        description="Furnished rooms seen by a depth camera, one file per room. A room depends only on its seed and "
        "the meshes. Existing rooms are skipped, so that a stopped run can be resumed. `lepard train` keeps seeds 0 "
        "to 99 for validation.",
    )
    rooms.add_argument("out", type=Path, metavar="OUT", help="folder for the rooms")
    rooms.add_argument(
        "--meshes", type=Path, metavar="DIR", help="folder of .npz meshes; without it furniture is procedural"
    )
    rooms.add_argument("--count", type=int, default=1000, metavar="N", help="number of rooms (default 1000)")
    rooms.add_argument("--first-seed", type=int, default=0, metavar="K", help="seed of the first room (default 0)")
    rooms.add_argument("--processes", type=int, default=1, metavar="P", help="number of parallel processes (default 1)")


def _add_real(kinds: Any) -> None:
    real = kinds.add_parser(
        "real",
        help="recordings and clouds of a real sensor, in the format of rooms",
        description="Recordings and clouds of a real sensor, in the format of rooms. Each folder in DATA is a data "
        "set: camera.txt, depth/*.png and poses.txt (TUM layout; poses are refined, uncertain frames are dropped), the "
        "same without poses, or *.npz clouds with an array `xyz`; views without poses give pairs of virtual views.",
    )
    real.add_argument("data_folder", type=Path, metavar="DATA", help="folder of data sets")
    real.add_argument("out", type=Path, metavar="OUT", help="folder for the rooms")


def _add_creatures(kinds: Any) -> None:
    parser = kinds.add_parser("creatures", help=CREATURES_HELP, description=CREATURES_HELP)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the scenes: OUT/scene_<seed>.npz")
    parser.add_argument("--models", metavar="DIR", type=Path, help="folder of skinned glTF models to use as well")
    parser.add_argument("--count", type=int, default=1000, help="number of scenes (default %(default)s)")
    parser.add_argument(
        "--first-seed", type=int, default=VALIDATION_SEEDS, help="of the first scene (default %(default)s)"
    )
    parser.add_argument("--processes", type=int, default=1, help="worker processes (default %(default)s)")


def _add_deformable(kinds: Any) -> None:
    parser = kinds.add_parser("deformable", help=DEFORMABLE_HELP, description=DEFORMABLE_HELP)
    parser.add_argument(
        "out", metavar="OUT", type=Path, help="folder for the pairs: OUT/{train,val}/<kind>/pair_<seed>.npz"
    )
    parser.add_argument("--models", metavar="DIR", type=Path, help="folder of skinned glTF models to use as well")
    parser.add_argument(
        "--anime",
        metavar="DIR",
        type=Path,
        help="render DeformingThings4D animations (.anime) instead, as 4DMatch does",
    )
    parser.add_argument(
        "--count", type=int, default=1000, help="number of pairs; with --anime, of each animation (default 1000)"
    )
    parser.add_argument("--first-seed", type=int, default=0, help=f"seeds below {VALIDATION_SEEDS} go to OUT/val")
    parser.add_argument("--processes", type=int, default=1, help="worker processes (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Make the requested data."""
    if args.data == "real":
        print(f"{write_real_shards(args.data_folder, args.out)} rooms written to {args.out}")
        return 0
    if args.count < 1 or args.processes < 1 or args.first_seed < 0:
        raise InputError("--count and --processes must be at least 1 and --first-seed at least 0.")
    seeds = range(args.first_seed, args.first_seed + args.count)
    if args.data == "rooms":
        synthesise_rooms(args.out, args.meshes, seeds, args.cluster or args.processes)
    elif args.data == "creatures":
        written = synthesise_scenes(args.out, load_models(args.models), seeds, args.cluster or args.processes)
        print(f"{written} scenes written to {args.out}")
    elif args.anime is not None:
        written, animations = render_animations(args.anime, args.out, args.count, args.cluster or args.processes)
        print(f"{written} pairs of {animations} animations written to {args.out}")
    else:
        written, present = synthesise_pairs(args.out, load_models(args.models), seeds, args.cluster or args.processes)
        print(f"{written} pairs written to {args.out}, {present} existed already")
        if written + present < len(seeds):
            print(f"{len(seeds) - written - present} seeds gave no pair with an overlap in range")
    return 0
