# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`make fuzz`: random input, guided by coverage (atheris), to everything that reads messages and files from outside.

python test/fuzz/fuzz.py --seconds 600
A reader may only accept its input or raise InputError. Any other exception is a failure: the input that caused it is
kept in runs/fuzz/<target>, and belongs into a test once it is understood.
"""

import argparse
import atexit
import contextlib
import functools
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lepard_ros.errors import InputError

if TYPE_CHECKING:
    from lepard_ros.tracking.rigid import RigidTracker

FOLDER = Path("runs/fuzz")
LONGEST = 4096
CLOUD_SUFFIXES = (".ply", ".pcd", ".npy", ".npz", ".xyz")


def main(argv: list[str] | None = None) -> int:
    """Fuzz every target in a process of its own, or one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together (default 60)")
    parser.add_argument("--target", choices=sorted(TARGETS), help="only this one, in this process")
    args = parser.parse_args(argv)
    if args.target:
        fuzz_one(args.target, args.seconds)
        return 0
    share = max(1, args.seconds // len(TARGETS))
    failed = [name for name in TARGETS if not run_target(name, share)]
    print(f"{len(TARGETS) - len(failed)} of {len(TARGETS)} targets without a failure, {share} s each.", flush=True)
    return 1 if failed else 0


def run_target(name: str, seconds: int) -> bool:
    """Fuzz a target in a child process; whether nothing was found."""
    command = [sys.executable, __file__, "--target", name, "--seconds", str(seconds)]
    # A failed target prints its input, whose bytes need not be text.
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    words = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    runs = next((line for line in reversed(words) if line.startswith("Done")), words[-1] if words else "no output")
    print(f"{name:<14}{'ok' if done.returncode == 0 else 'FAILED'}  {runs}", flush=True)
    if done.returncode:
        print("\n".join(words[-30:]), flush=True)
    return done.returncode == 0


def fuzz_one(name: str, seconds: int) -> None:
    """Run libFuzzer on one target in this process; it ends the process."""
    try:
        import atheris
    except ImportError as error:
        raise InputError("Fuzzing needs the package atheris: pip install atheris.") from error
    folder = FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["lepard_ros"]):
        seeds = TARGETS[name].seeds()
        _import_all(TARGETS[name], seeds[0])
    for number, seed in enumerate(seeds):
        (folder / f"seed_{number}").write_bytes(seed)

    def one_input(data: bytes) -> None:
        try:
            TARGETS[name].read(data)
        except InputError:
            return

    longest = max(LONGEST, *map(len, seeds))
    limits = [f"-max_total_time={seconds}", f"-max_len={longest}", "-timeout=20"]
    options = [*limits, f"-artifact_prefix={folder}/found_"]
    atheris.Setup([sys.argv[0], *options, str(folder)], one_input)
    atheris.Fuzz()


def _import_all(target: "Target", seed: bytes) -> None:
    """Read one input, so that everything the reader imports is instrumented."""
    with contextlib.suppress(InputError):
        target.read(seed)


class Target(NamedTuple):
    """A reader to be fuzzed: how it reads bytes, and valid inputs to start from."""

    read: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]


# ---- messages: the first bytes are the numbers of the message, the rest its data ----


def _numbers(data: bytes, count: int) -> tuple[list[int], bytes]:
    """`count` unsigned 32-bit numbers from the front, and what is left."""
    head = data[: 4 * count].ljust(4 * count, b"\0")
    return np.frombuffer(head, "<u4").tolist(), data[4 * count :]


def read_cloud_message(data: bytes) -> object:
    """Bytes as a PointCloud2 with three fields."""
    from lepard_ros.cloud.pointcloud2 import Field, decode_points

    (height, width, point_step, row_step, big, *fields), rest = _numbers(data, 14)
    named = [Field(name, *fields[3 * i : 3 * i + 3]) for i, name in enumerate("xyz")]
    return decode_points(
        SimpleNamespace(
            height=height,
            width=width,
            point_step=point_step,
            row_step=row_step,
            is_bigendian=bool(big & 1),
            fields=named,
            data=rest,
        )
    )


def read_depth_message(data: bytes) -> object:
    """Bytes as a depth image."""
    from lepard_ros.cloud.depth_image import decode_depth

    (height, width, step, big, kind), rest = _numbers(data, 5)
    encoding = ("16UC1", "32FC1", "mono16", "rgb8")[kind % 4]
    image = SimpleNamespace(height=height, width=width, step=step, is_bigendian=big & 1, encoding=encoding, data=rest)
    return decode_depth(image)


def _cloud_seeds() -> list[bytes]:
    head = np.array([2, 3, 12, 36, 0, 0, 7, 1, 4, 7, 1, 8, 7, 1], "<u4").tobytes()
    return [head + np.arange(18, dtype="<f4").tobytes()]


def _depth_seeds() -> list[bytes]:
    return [np.array([2, 3, 6, 0, 0], "<u4").tobytes() + np.arange(6, dtype="<u2").tobytes()]


# ---- files ----


def _with_file(data: bytes, suffix: str, read: Callable[[Path], object]) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"input{suffix}"
        path.write_bytes(data)
        return read(path)


def read_cloud_bytes(data: bytes) -> object:
    """The first byte chooses the format of a cloud file, the rest is the file."""
    from lepard_ros.cloud.files import read_cloud

    suffix = CLOUD_SUFFIXES[data[0] % len(CLOUD_SUFFIXES)] if data else CLOUD_SUFFIXES[0]
    return _with_file(data[1:], suffix, read_cloud)


def _cloud_file_seeds() -> list[bytes]:
    from lepard_ros.cloud.files import write_cloud

    seeds = []
    with tempfile.TemporaryDirectory() as folder:
        for number, suffix in enumerate(CLOUD_SUFFIXES):
            path = Path(folder) / f"seed{suffix}"
            write_cloud(path, np.arange(12.0).reshape(4, 3))
            seeds.append(bytes([number]) + path.read_bytes())
    return seeds


def _read_bag(path: Path) -> list[Any]:
    """The clouds of a bag and their truth."""
    from lepard_ros.data.bag_reader import open_bag

    with open_bag(path) as bag:
        frames = list(bag.frames(bag.cloud_topic()))
        return [*frames, bag.truth(frames[0].frame_id if frames else "")]


def read_mcap_bytes(data: bytes) -> object:
    """A single mcap file as a bag."""
    return _with_file(data, ".mcap", _read_bag)


def read_sqlite_bytes(data: bytes) -> object:
    """A single sqlite3 file as a bag, with the metadata that a recorder writes beside it."""
    with tempfile.TemporaryDirectory() as folder:
        bag = Path(shutil.copytree(_written_bag("sqlite3"), Path(folder) / "bag"))
        next(bag.glob("*.db3")).write_bytes(data)
        return _read_bag(bag)


@functools.cache
def _written_bag(storage: str) -> Path:
    """A bag of one small cloud."""
    from lepard_ros.cloud.depth import Camera
    from lepard_ros.data.bag_writer import BagWriter

    bag = _lasting_folder() / "bag"
    writer = BagWriter(bag, Camera(4, 3, 4.0, 4.0, 1.5, 1.0), storage=storage)
    writer.write(1_000_000_000, np.ones((3, 4), np.float32), np.eye(4))
    writer.close()
    return bag


def _lasting_folder() -> Path:
    """A folder that is removed when the process ends."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _bag_seeds(storage: str, suffix: str) -> list[bytes]:
    return [path.read_bytes() for path in _written_bag(storage).glob(f"*{suffix}")]


def read_weight_bytes(data: bytes) -> object:
    """A weights file with a card that vouches for it, so that the bytes reach the parser."""
    from lepard_ros.network.weights import load

    def read(path: Path) -> object:
        card = {"format": 1, "name": "fuzz", "config": {}, "sha256": hashlib.sha256(data).hexdigest()}
        path.with_suffix(".json").write_text(json.dumps(card))
        return load(path)

    return _with_file(data, ".safetensors", read)


def _weight_seeds() -> list[bytes]:
    import torch
    from safetensors.torch import save

    return [save({"weight": torch.zeros(2, 3)})]


def read_card_bytes(data: bytes) -> object:
    """A weights card."""
    from lepard_ros.network.weights import Card

    return Card.from_json(data.decode(errors="replace"), "card.json")


def _card_seeds() -> list[bytes]:
    from lepard_ros.network.config import SMALL_RIGID
    from lepard_ros.network.weights import Card

    return [Card("seed", SMALL_RIGID).to_json().encode()]


@functools.cache
def _tracker() -> "tuple[RigidTracker, Path]":
    """A tracker with a map of one small cloud, and a folder with its saved map."""
    from lepard_ros.matcher import Matcher
    from lepard_ros.tracking.rigid import RigidTracker

    tracker = RigidTracker(Matcher.from_pretrained("rigid", device="cpu"))
    side = np.linspace(0.0, 0.6, 13)
    x, y = np.meshgrid(side, side)
    tracker.process(np.stack([x, y, 1.0 + 0.1 * np.sin(9 * x)], axis=-1).reshape(-1, 3), 0.0)
    saved = _lasting_folder() / "map"
    tracker.save(saved)
    return tracker, saved


def read_map_bytes(data: bytes) -> object:
    """A saved map: by the first byte its manifest, or its keyframe with a manifest that vouches for it."""
    from lepard_ros.tracking.maps import MANIFEST
    from lepard_ros.tracking.rigid import RigidTracker

    tracker, saved = _tracker()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(saved, Path(folder) / "map"))
        if data[:1] < b"\x80":
            (copy / MANIFEST).write_bytes(data[1:])
        else:
            manifest = json.loads((copy / MANIFEST).read_bytes())
            (copy / manifest["keyframes"][0]["file"]).write_bytes(data[1:])
            manifest["keyframes"][0]["sha256"] = hashlib.sha256(data[1:]).hexdigest()
            (copy / MANIFEST).write_text(json.dumps(manifest))
        return RigidTracker.load(copy, tracker.matcher)


def _map_seeds() -> list[bytes]:
    from lepard_ros.tracking.maps import MANIFEST

    saved = _tracker()[1]
    return [b"\x00" + (saved / MANIFEST).read_bytes(), *(b"\xff" + path.read_bytes() for path in saved.glob("*.npz"))]


TARGETS = {
    "cloud_message": Target(read_cloud_message, _cloud_seeds),
    "depth_message": Target(read_depth_message, _depth_seeds),
    "cloud_file": Target(read_cloud_bytes, _cloud_file_seeds),
    "bag": Target(read_mcap_bytes, lambda: _bag_seeds("mcap", ".mcap")),
    "bag_sqlite": Target(read_sqlite_bytes, lambda: _bag_seeds("sqlite3", ".db3")),
    "map": Target(read_map_bytes, _map_seeds),
    "card": Target(read_card_bytes, _card_seeds),
    "weights": Target(read_weight_bytes, _weight_seeds),
}

if __name__ == "__main__":
    sys.exit(main())
