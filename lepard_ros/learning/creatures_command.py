# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard synthesise deformable`: a data set of deformable pairs in the 4DMatch format."""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.evaluation.runner import end_with_parent
from lepard_ros.learning.anime import read_anime, render_pairs, split_of
from lepard_ros.learning.deformable_pairs import make_pair
from lepard_ros.learning.fourdmatch import DeformablePair, save_pair
from lepard_ros.learning.gltf import AnimatedModel, read_models
from lepard_ros.learning.motions import HELD_OUT_MODELS, KINDS, random_motion

Item = TypeVar("Item")
Result = TypeVar("Result")
HELP = "Synthesise deformable pairs: creatures, people, hands, cloth, soft things (4DMatch format)."
VALIDATION_SEEDS = 100
ATTEMPTS = 5
_worker: dict[str, Callable[[Any], Any]] = {}  # what this worker process was started for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
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
    parser.add_argument("--count", type=int, default=1000, help="how many pairs, with --anime of each animation (1000)")
    parser.add_argument("--first-seed", type=int, default=0, help=f"seeds below {VALIDATION_SEEDS} go to OUT/val")
    parser.add_argument("--processes", type=int, default=1, help="worker processes (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the pairs that are not there yet; the same seed and models always give the same pair."""
    if args.count < 1 or args.first_seed < 0 or args.processes < 1:
        raise InputError("--count and --processes must be at least 1 and --first-seed at least 0.")
    if args.anime is not None:
        return render_animations(args.anime, args.out, args.count, args.processes)
    models = load_models(args.models)
    pending = [
        seed for seed in range(args.first_seed, args.first_seed + args.count) if not _done(args.out, seed, models)
    ]
    write = partial(write_pair, args.out, models=models)
    failed = 0
    for path in _progress(_map(write, pending, args.processes), len(pending)):
        failed += path is None
    print(f"{len(pending) - failed} pairs written to {args.out}, {args.count - len(pending)} were there before")
    if failed:
        print(f"{failed} seeds gave no pair with an overlap in range")
    return 0


def render_animations(folder: Path, out: Path, count: int, processes: int) -> int:
    """Write `count` pairs of every .anime file below a folder to OUT/{train,val,4DMatch,4DLoMatch}/<animation>/."""
    paths = sorted(folder.rglob("*.anime"))
    if not paths:
        raise InputError(f"{folder} holds no .anime files: give --anime the folder of DeformingThings4D.")
    written = sum(_progress(_map(partial(_render_animation, out, count), paths, processes), len(paths)))
    print(f"{written} pairs of {len(paths)} animations written to {out}")
    return 0


def _render_animation(out: Path, count: int, path: Path) -> int:
    """Write the pairs of one animation; returns how many."""
    animation = read_anime(path)
    written = 0
    for name, pair in render_pairs(animation, count):
        save_pair(out / split_of(animation.name, pair) / animation.name / name, pair)
        written += 1
    return written


def load_models(folder: Path | None) -> Sequence[AnimatedModel]:
    """The models of a folder, with a line on stderr for each that was skipped; none without a folder."""
    if folder is None:
        return ()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give --models a folder of .glb files, or leave it out.")
    models, skipped = read_models(folder)
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    return models


def choose_thing(seed: int, models: Sequence[AnimatedModel]) -> tuple[str, AnimatedModel | None]:
    """What a seed shows: a kind of KINDS, and the model if that is "model". Held-out models only for validation."""
    rng = np.random.default_rng([seed, 1])
    usable = [model for model in models if (model.name in HELD_OUT_MODELS) == (seed < VALIDATION_SEEDS) and model.clips]
    chances = {kind: chance for kind, chance in KINDS.items() if kind != "model" or usable}
    shares = np.array(list(chances.values())) / sum(chances.values())
    kind = str(rng.choice(list(chances), p=shares))
    return kind, usable[rng.integers(len(usable))] if kind == "model" else None


def synthesise_pair(seed: int, models: Sequence[AnimatedModel] = ()) -> DeformablePair | None:
    """The pair of a seed, or None in the rare case that no try gave one."""
    kind, model = choose_thing(seed, models)
    for attempt in range(ATTEMPTS):
        rng = np.random.default_rng([seed, 2, attempt])
        pair = make_pair(random_motion(kind, rng, model), rng, overlap=0.12 + 0.86 * rng.random() ** 0.75)
        if pair is not None:
            return pair
    return None


def pair_path(out: Path, seed: int, models: Sequence[AnimatedModel] = ()) -> Path:
    """Where the pair of a seed goes."""
    kind, model = choose_thing(seed, models)
    split = "val" if seed < VALIDATION_SEEDS else "train"
    return out / split / (model.name if model else kind) / f"pair_{seed:06d}.npz"


def write_pair(out: Path, seed: int, models: Sequence[AnimatedModel] = ()) -> Path | None:
    """Synthesise and save the pair of a seed; returns its path."""
    pair = synthesise_pair(seed, models)
    if pair is None:
        return None
    path = pair_path(out, seed, models)
    save_pair(path, pair)
    return path


def _done(out: Path, seed: int, models: Sequence[AnimatedModel]) -> bool:
    return pair_path(out, seed, models).exists()


def _map(function: Callable[[Item], Result], items: list[Item], processes: int) -> Iterator[Result]:
    """The function's results in any order, made by some processes."""
    if processes <= 1:
        yield from map(function, items)
        return
    # The function is sent to each process once: it carries the models, which took longer to send than a pair to make.
    with multiprocessing.get_context("spawn").Pool(processes, _set_function, (function,)) as pool:
        yield from pool.imap_unordered(_call_function, items)


def _set_function(function: Callable[[Any], Any]) -> None:
    end_with_parent()
    _worker["function"] = function


def _call_function(item: Any) -> Any:
    return _worker["function"](item)


def _progress(results: Iterator[Result], total: int) -> Iterable[Result]:
    """The results behind a progress bar."""
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise InputError("the progress bar needs tqdm: pip install tqdm.") from error
    return tqdm(results, total=total, unit="pair", file=sys.stderr)
