# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard convert` and `lepard info`: weights on disk."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from lepard_ros.errors import InputError
from lepard_ros.network.config import PRESETS
from lepard_ros.network.weights import Card, find_weights, load, load_official, save

HELP = (
    "Weights on disk. `lepard convert` turns an authors' checkpoint (.pth) into safetensors with a card; "
    "`lepard info` shows what a file of weights is, and how fast it runs here."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand that the parser is for."""
    (_convert_arguments if parser.get_default("command") == "convert" else _info_arguments)(parser)


def run(args: argparse.Namespace) -> int:
    """Convert or inform."""
    return run_convert(args) if args.command == "convert" else run_info(args)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="the authors' .pth file; only plain tensors are read from it")
    parser.add_argument("out", type=Path, help="the .safetensors file to write; its card goes beside it")
    parser.add_argument("--preset", choices=("paper_rigid", "paper_deformable"), default="paper_rigid")
    parser.add_argument(
        "--sizes", type=Path, help="JSON file of sizes that differ from the preset (as recorded cases have)"
    )
    parser.add_argument("--half", action="store_true", help="store in half precision")


def run_convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    sizes = {**PRESETS[args.preset].to_dict(), **_read_sizes(args.sizes)}
    network = load_official(args.checkpoint, **sizes)
    mode = "deformable" if args.preset == "paper_deformable" else "rigid"
    card = Card(
        args.out.stem, network.config, mode, licence="MIT (the authors')", training={"origin": args.checkpoint.name}
    )
    path = save(network, card, args.out, half=args.half)
    sys.stdout.write(f"wrote {path} and {path.with_suffix('.json')}\n")
    return 0


def _read_sizes(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"the sizes in {path.name} cannot be read as JSON ({error}).") from error
    if not isinstance(values, dict):
        raise InputError(f"{path.name} must hold a JSON object of sizes.")
    return values


def _info_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("weights", nargs="?", default="rigid", help="rigid, deformable or a .safetensors file")
    parser.add_argument("--no-timing", action="store_true", help="do not run the network")


def run_info(args: argparse.Namespace) -> int:
    """Print the card, the sizes and a table of time per stage."""
    path = find_weights(args.weights)
    network, card = load(args.weights)
    count = sum(p.numel() for p in network.parameters())
    sys.stdout.write(
        f"{path.name}: {card.mode}, {count:,} parameters, {path.stat().st_size / 1e6:.1f} MB\n{card.to_json()}"
    )
    if not args.no_timing:
        for name, seconds in stage_times(network).items():
            sys.stdout.write(f"{name:>10}  {1e3 * seconds:8.1f} ms CPU\n")
    return 0


def stage_times(network: Any, points: int = 307_200, repeats: int = 3) -> dict[str, float]:
    """Median CPU seconds of each stage for a made-up pair of depth-camera clouds of `points` points."""
    import numpy as np
    import torch

    from lepard_ros.cloud.grid import grid_subsample
    from lepard_ros.cloud.pyramid import build_pyramid, stack_pyramids
    from lepard_ros.network.lepard import split_pairs

    config = network.config
    rng = np.random.default_rng(0)
    x, y = rng.uniform(-1.5, 1.5, (2, points)).astype(np.float32)
    z = 2.5 + 0.3 * np.sin(3 * x) * np.cos(4 * y)
    raw = torch.from_numpy(np.stack([x, y, z], axis=1)) * (config.grid / 0.05)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Any) -> Any:
        started = time.process_time()
        value = work()
        times.setdefault(name, []).append(time.process_time() - started)
        return value

    for _ in range(repeats):
        with torch.no_grad():
            grid = timed("grid", lambda: grid_subsample(raw, config.grid)[0])
            pyramid = timed("pyramid", lambda grid=grid: build_pyramid(grid, config.pyramid, gridded=True))
            features = timed("encode", lambda pyramid=pyramid: network.encode(pyramid)[0])
            pair = split_pairs(torch.cat([features, features]), stack_pyramids([pyramid, pyramid]))
            timed("match", lambda pair=pair: network.match(*pair))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}
