"""`lepard synthesise deformable`: a data set of deformable pairs in the 4DMatch format."""

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.learning.deformable_pairs import make_pair
from lepard_ros.learning.fourdmatch import DeformablePair, save_pair
from lepard_ros.learning.gltf import AnimatedModel, read_models
from lepard_ros.learning.motions import HELD_OUT_MODELS, KINDS, random_motion

HELP = "Synthesise deformable pairs: creatures, people, hands, cloth, soft things (4DMatch format)."
VALIDATION_SEEDS = 100
ATTEMPTS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder for the pairs: OUT/{train,val}/<kind>/pair_<seed>.npz")
    parser.add_argument("--models", metavar="DIR", type=Path, help="folder of skinned glTF models to use as well")
    parser.add_argument("--count", type=int, default=1000, help="how many pairs (default %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0, help=f"seeds below {VALIDATION_SEEDS} go to OUT/val")
    parser.add_argument("--processes", type=int, default=1, help="worker processes (default %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Write the pairs that are not there yet; the same seed and models always give the same pair."""
    models = load_models(args.models)
    pending = [seed for seed in range(args.first_seed, args.first_seed + args.count) if not _done(args.out, seed, models)]
    write = partial(write_pair, args.out, models=models)
    failed = 0
    for path in _progress(_map(write, pending, args.processes), len(pending)):
        failed += path is None
    print(f"{len(pending) - failed} pairs written to {args.out}, {args.count - len(pending)} were there, {failed} gave no pair")
    return 0


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
        pair = make_pair(random_motion(kind, rng, model), rng, overlap=rng.uniform(0.12, 0.98))
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


def _map(function, seeds: list[int], processes: int):  # type: ignore[no-untyped-def]
    if processes <= 1:
        yield from map(function, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(function, seeds)


def _progress(results, total: int):  # type: ignore[no-untyped-def]
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise InputError("the progress bar needs tqdm: pip install tqdm.") from error
    return tqdm(results, total=total, unit="pair", file=sys.stderr)
