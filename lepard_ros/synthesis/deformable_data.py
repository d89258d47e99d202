# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Data sets of deformable pairs in the 4DMatch format: one pair per seed, or pairs from given animations."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lepard_ros.data.fourdmatch import DeformablePair, save_pair
from lepard_ros.data.workers import Result, Workers, map_in_processes
from lepard_ros.errors import InputError
from lepard_ros.synthesis.anime import read_anime, render_pairs, split_of
from lepard_ros.synthesis.deformable_pairs import make_pair
from lepard_ros.synthesis.gltf import AnimatedModel, read_models
from lepard_ros.synthesis.motions import HELD_OUT_MODELS, KINDS, random_motion

VALIDATION_SEEDS = 100
ATTEMPTS = 5


def synthesise_pairs(out: Path, models: Sequence[AnimatedModel], seeds: range, processes: Workers) -> tuple[int, int]:
    """Write the missing pairs of `seeds`; returns how many were written and how many existed.

    The same seed and models always give the same pair. A few seeds give none because no attempt reaches the overlap.
    """
    pending = [seed for seed in seeds if not pair_path(out, seed, models).exists()]
    write = partial(write_pair, out, models=models)
    written = sum(path is not None for path in _progress(map_in_processes(write, pending, processes), len(pending)))
    return written, len(seeds) - len(pending)


def render_animations(folder: Path, out: Path, count: int, processes: Workers) -> tuple[int, int]:
    """Write `count` pairs of every .anime file below a folder to OUT/{train,val,4DMatch,4DLoMatch}/<animation>/.

    Returns how many pairs were written, of how many animations.
    """
    paths = sorted(folder.rglob("*.anime"))
    if not paths:
        raise InputError(f"{folder} holds no .anime files: give --anime the folder of DeformingThings4D.")
    render = partial(_render_animation, out, count)
    return sum(_progress(map_in_processes(render, paths, processes), len(paths))), len(paths)


def _render_animation(out: Path, count: int, path: Path) -> int:
    """Write the pairs of one animation; returns how many."""
    animation = read_anime(path)
    written = 0
    for name, pair in render_pairs(animation, count):
        save_pair(out / split_of(animation.name, pair) / animation.name / name, pair)
        written += 1
    return written


def load_models(folder: Path | None) -> Sequence[AnimatedModel]:
    """The models of a folder, with a line on stderr for each skipped one; empty without a folder."""
    if folder is None:
        return ()
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give --models a folder of .glb files, or leave it out.")
    models, skipped = read_models(folder)
    for reason in skipped:
        print(f"skipped: {reason}", file=sys.stderr)
    return models


def choose_thing(seed: int, models: Sequence[AnimatedModel]) -> tuple[str, AnimatedModel | None]:
    """The object of a seed: a kind of KINDS, and the model if that is "model". Held-out models: validation only."""
    rng = np.random.default_rng([seed, 1])
    usable = [model for model in models if (model.name in HELD_OUT_MODELS) == (seed < VALIDATION_SEEDS) and model.clips]
    chances = {kind: chance for kind, chance in KINDS.items() if kind != "model" or usable}
    shares = np.array(list(chances.values())) / sum(chances.values())
    kind = str(rng.choice(list(chances), p=shares))
    return kind, usable[rng.integers(len(usable))] if kind == "model" else None


def synthesise_pair(seed: int, models: Sequence[AnimatedModel] = ()) -> DeformablePair | None:
    """The pair of a seed, or None if no attempt gave one (rare)."""
    kind, model = choose_thing(seed, models)
    for attempt in range(ATTEMPTS):
        rng = np.random.default_rng([seed, 2, attempt])
        pair = make_pair(random_motion(kind, rng, model), rng, overlap=0.12 + 0.86 * rng.random() ** 0.75)
        if pair is not None:
            return pair
    return None


def pair_path(out: Path, seed: int, models: Sequence[AnimatedModel] = ()) -> Path:
    """File of a seed's pair."""
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


def _progress(results: Iterator[Result], total: int) -> Iterable[Result]:
    """Iterate over the results with a progress bar."""
    return tqdm(results, total=total, unit="pair", file=sys.stderr)
