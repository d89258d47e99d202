# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard synthesise`: make training data from nothing but meshes, or from no files at all."""

import argparse
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from tqdm import tqdm

from lepard_ros.errors import InputError
from lepard_ros.evaluation.runner import end_with_parent
from lepard_ros.learning.meshes import MeshLibrary, load_library
from lepard_ros.learning.shards import make_room, room_path, save_room

HELP = "make synthetic training data: rooms for the rigid network, creatures for the deformable one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Subcommands `rooms` and `deformable`."""
    kinds = parser.add_subparsers(dest="data", required=True, metavar="{rooms,real,deformable}")
    rooms = kinds.add_parser(
        "rooms",
        help="furnished rooms seen by a depth camera",
        description="Furnished rooms seen by a depth camera, one file per room. A room depends on its seed and the "
        "meshes only; rooms that are there already are skipped, so a stopped run can be continued. Seeds 0 to 99 "
        "are kept for validation by `lepard train`.",
    )
    rooms.add_argument("out", type=Path, metavar="OUT", help="folder for the rooms")
    rooms.add_argument(
        "--meshes", type=Path, metavar="DIR", help="folder of .npz meshes; without it furniture is procedural"
    )
    rooms.add_argument("--count", type=int, default=1000, metavar="N", help="how many rooms (default 1000)")
    rooms.add_argument("--first-seed", type=int, default=0, metavar="K", help="seed of the first room (default 0)")
    rooms.add_argument("--processes", type=int, default=1, metavar="P", help="how many to make at once (default 1)")
    real = kinds.add_parser(
        "real",
        help="recordings and clouds of a real sensor, in the form of rooms",
        description="Recordings and clouds of a real sensor, in the form of rooms. Each folder in DATA is a data set: "
        "camera.txt, depth/*.png and poses.txt (TUM layout; poses are refined, doubtful frames left out), the same "
        "without poses, or *.npz clouds with an array `xyz`; views without poses give pairs of virtual views.",
    )
    real.add_argument("data_folder", type=Path, metavar="DATA", help="folder of data sets")
    real.add_argument("out", type=Path, metavar="OUT", help="folder for the rooms")
    from lepard_ros.learning import creatures_command

    creatures = kinds.add_parser("deformable", help=creatures_command.HELP, description=creatures_command.HELP)
    creatures_command.add_arguments(creatures)


def run(args: argparse.Namespace) -> int:
    """Make what was asked for."""
    if args.data == "deformable":
        from lepard_ros.learning import creatures_command

        return creatures_command.run(args)
    if args.data == "real":
        print(f"{write_real_shards(args.data_folder, args.out)} rooms written to {args.out}")
        return 0
    if args.count < 1 or args.processes < 1 or args.first_seed < 0:
        raise InputError("--count and --processes must be at least 1 and --first-seed at least 0.")
    synthesise_rooms(args.out, args.meshes, range(args.first_seed, args.first_seed + args.count), args.processes)
    return 0


def synthesise_rooms(out: Path, meshes: Path | None, seeds: range, processes: int = 1) -> None:
    """Make the rooms of `seeds` that are not in `out` yet."""
    library = load_library(meshes)
    out.mkdir(parents=True, exist_ok=True)
    missing = [seed for seed in seeds if not room_path(out, seed).exists()]
    make = partial(_make_file, out)
    if processes == 1:
        _set_library(library)
        for seed in tqdm(missing, desc="rooms", unit="room"):
            make(seed)
        return
    with ProcessPoolExecutor(processes, initializer=_start_process, initargs=(library,)) as pool:
        for _ in tqdm(pool.map(make, missing, chunksize=4), total=len(missing), desc="rooms", unit="room"):
            pass


def write_real_shards(data: Path, out: Path) -> int:
    """Write the shards of real data sets; says how many. Numbers start at 100: all of them are for training."""
    from lepard_ros.learning.real_shards import real_shards

    out.mkdir(parents=True, exist_ok=True)
    written = 0
    for shard in tqdm(real_shards(data), desc="real rooms", unit="room"):
        if len(shard.pairs):
            save_room(room_path(out, 100 + written), shard)
            written += 1
    return written


_library = MeshLibrary()


def _start_process(library: MeshLibrary) -> None:
    end_with_parent()
    _set_library(library)


def _set_library(library: MeshLibrary) -> None:
    """Give a worker its meshes once, not with every room."""
    global _library
    _library = library


def _make_file(out: Path, seed: int) -> None:
    save_room(room_path(out, seed), make_room(seed, _library))
