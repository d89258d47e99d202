# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard convert`, `lepard export` and `lepard info`: weights on disk."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lepard_ros.errors import InputError
from lepard_ros.network.config import PRESETS
from lepard_ros.network.weights import Card, find_weights, load, load_official, save, write_atomically

HELP = (
    "Weights on disk. `lepard convert` converts an authors' checkpoint (.pth) to safetensors with a card; "
    "`lepard export` writes the network as ONNX graphs for onnxruntime, TensorRT or OpenVINO; "
    "`lepard info` describes a weights file and measures its speed on this machine."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand that the parser is for."""
    arguments = {"convert": _convert_arguments, "export": _export_arguments, "info": _info_arguments}
    arguments[parser.get_default("command")](parser)


def run(args: argparse.Namespace) -> int:
    """Run the subcommand."""
    return {"convert": run_convert, "export": run_export, "info": run_info}[args.command](args)


def _convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="the authors' .pth file; only plain tensors are read from it")
    parser.add_argument("out", type=Path, help="the .safetensors file to write; its card goes next to it")
    parser.add_argument("--preset", choices=("paper_rigid", "paper_deformable"), default="paper_rigid")
    parser.add_argument(
        "--sizes", type=Path, help="JSON file of sizes that differ from the preset (as recorded cases have)"
    )
    parser.add_argument("--half", action="store_true", help="store in half precision")


def run_convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint."""
    path = convert_checkpoint(args.checkpoint, args.out, args.preset, args.sizes, args.half)
    sys.stdout.write(f"wrote {path} and {path.with_suffix('.json')}\n")
    return 0


def convert_checkpoint(checkpoint: Path, out: Path, preset: str, sizes: Path | None, half: bool = False) -> Path:
    """Write an authors' checkpoint as safetensors with a card; sizes: JSON file of what differs from the preset."""
    network = load_official(checkpoint, **{**PRESETS[preset].to_dict(), **_read_sizes(sizes)})
    mode = "deformable" if preset == "paper_deformable" else "rigid"
    card = Card(out.stem, network.config, mode, licence="MIT (the authors')", training={"origin": checkpoint.name})
    return save(network, card, out, half=half)


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


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--onnx", type=Path, required=True, metavar="OUT", help="folder for the graphs and the weights")
    parser.add_argument("--weights", default="rigid", help="rigid, deformable or a .safetensors file (default rigid)")


def run_export(args: argparse.Namespace) -> int:
    """Write the graphs next to the weights, so that `device: onnx` finds both by the path of the weights."""
    from lepard_ros.network.onnx_graphs import export_graphs

    weights = find_weights(args.weights)
    network, card = load(weights)
    try:
        args.onnx.mkdir(parents=True, exist_ok=True)
        for suffix in (".safetensors", ".json"):
            write_atomically(args.onnx / f"weights{suffix}", weights.with_suffix(suffix).read_bytes())
        files = export_graphs(network, card.sha256, args.onnx)
    except OSError as error:
        raise InputError(f"{args.onnx} cannot be written ({error.strerror}): give another folder.") from error
    for file in files:
        sys.stdout.write(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)\n")
    sys.stdout.write(f"use them with device onnx and weights {args.onnx / 'weights.safetensors'}\n")
    return 0


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
        from lepard_ros.evaluation.stage_times import stage_times

        for name, seconds in stage_times(network).items():
            sys.stdout.write(f"{name:>10}  {1e3 * seconds:8.1f} ms CPU\n")
    return 0
