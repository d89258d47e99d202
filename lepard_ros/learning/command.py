# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard train`: train or fine-tune a network."""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from lepard_ros.errors import InputError
from lepard_ros.learning import deformable_samples, samples
from lepard_ros.learning.deformable_samples import DeformableStream
from lepard_ros.learning.objective import ObjectiveSettings
from lepard_ros.learning.samples import RoomStream
from lepard_ros.learning.scans import OfficialStream, is_official_3dmatch, is_scan_folder, prepare_scans
from lepard_ros.learning.training import Log, Progress, Trainer, TrainingSettings, start_processes, validate
from lepard_ros.network.config import PRESETS, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, load, save

HELP = "train a network, or fine-tune the shipped one on your own scans"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add = parser.add_argument
    add(
        "--data",
        type=Path,
        action="append",
        required=True,
        help="folder of rooms, of scans with poses.txt, or 3DMatch; repeatable",
    )
    add(
        "--out",
        type=Path,
        default=Path("runs/train"),
        help="checkpoint, log, curves and weights go here (default %(default)s)",
    )
    add(
        "--preset",
        choices=sorted(PRESETS),
        help="sizes and mode of the network (default those of --init, else small_rigid)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting of the preset's network, as matching=sinkhorn; repeatable; `lepard info` lists them",
    )
    add("--init", help='start from these weights ("rigid", "deformable" or a .safetensors file) instead of at random')
    add("--steps", type=int, default=100_000, help="train up to this step (default %(default)s)")
    add("--optimiser", choices=("adamw", "sgd"), default="adamw", help="default %(default)s; sgd is the published one")
    add("--rate", type=float, default=1e-3, help="learning rate (default %(default)s)")
    add(
        "--schedule",
        choices=("constant", "cosine", "linear", "exponential"),
        default="constant",
        help="default %(default)s",
    )
    add("--schedule-start", type=int, default=0, help="step at which the decay begins")
    add("--pairs", type=int, default=2, help="pairs a step and process (default %(default)s)")
    add(
        "--warping-weight",
        type=float,
        default=0.0,
        help="weight of the warping loss (the paper: 0 rigid, 0.1 deformable)",
    )
    add(
        "--coarse-weight",
        type=float,
        default=1.0,
        help="weight of the matching loss; 0 trains the descriptors alone, in half the time (default %(default)s)",
    )
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    add("--report", type=int, default=50, help="steps between lines of the log")
    add("--validate", type=int, default=1000, help="steps between validations")
    add("--validation-pairs", type=int, default=120)
    add("--save", type=int, default=200, help="steps between checkpoints")


def run(args: argparse.Namespace) -> int:
    """Train until --steps; resumes from OUT/checkpoint.pt when it is there."""
    rank, world = start_processes(args.device)
    torch.manual_seed(args.seed)
    network, args.mode = starting_network(args)
    trainer = Trainer(network, settings_of(args), args.device)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    stream = make_stream(args, trainer.network, rank)
    log, progress = Log(args.out / "log.csv"), Progress()
    while trainer.step_number < args.steps:
        progress.add(trainer.step(stream.batch(trainer.step_number)))
        step = trainer.step_number
        if rank == 0 and step % args.report == 0:
            report(log, step, progress.take(), world * args.pairs)
        if rank == 0 and step % args.save == 0:
            trainer.save(checkpoint)
        if step % args.save == 0:
            stream.refresh()
        if rank == 0 and step % args.validate == 0:
            check(trainer, args, log)
    if rank == 0:
        trainer.save(checkpoint)
        check(trainer, args, log)
    return 0


def settings_of(args: argparse.Namespace) -> TrainingSettings:
    """The training settings of the command line."""
    objective = ObjectiveSettings(warping_weight=args.warping_weight, coarse_weight=args.coarse_weight)
    settings = TrainingSettings(
        steps=args.steps, optimiser=args.optimiser, rate=args.rate, schedule=args.schedule,
        schedule_start=args.schedule_start, seed=args.seed, objective=objective,
    )  # fmt: skip
    return replace(settings, weight_decay=1e-6) if args.optimiser == "sgd" else settings


def starting_network(args: argparse.Namespace) -> tuple[Lepard, str]:
    """The network to begin with, and whether it is for rigid or deformable scenes.

    Weights of --init keep their own sizes and mode unless a preset is asked for.
    """
    initial, card = load(args.init) if args.init else (None, None)
    if card is not None and args.preset is None:
        config, mode = card.config, card.mode
    else:
        preset = args.preset or "small_rigid"
        config, mode = PRESETS[preset], "deformable" if "deformable" in preset else "rigid"
    config = changed(config, args.set)
    return (Lepard(config) if initial is None else adopt(initial, config)), mode


def changed(config: LepardConfig, changes: list[str]) -> LepardConfig:
    """The settings with changes of the form name=value, where a value is JSON or a plain word."""
    values = config.to_dict()
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals:
            raise InputError(f"--set {change!r} has no value: write --set name=value.")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return LepardConfig.from_dict(values)


def adopt(network: Lepard, config: LepardConfig) -> Lepard:
    """Weights for another grid: everything in the network is measured in cells, so that they carry over."""
    adopted = Lepard(config)
    try:
        adopted.load_state_dict(network.state_dict())
    except RuntimeError:
        raise InputError(
            "the weights of --init have other sizes than --preset or --set ask for: leave those out."
        ) from None
    return adopted


def make_stream(args: argparse.Namespace, network: Lepard, rank: int) -> RoomStream | DeformableStream | OfficialStream:
    """The training pairs of this process."""
    for folder in args.data:
        if not folder.is_dir():
            raise InputError(f"there is no data folder {str(folder)!r}: make one with `lepard synthesise rooms`.")
    if args.mode == "deformable":
        return DeformableStream(args.data, network, seed=args.seed, rank=rank, lanes=args.pairs)
    if is_official_3dmatch(args.data[0]):
        return OfficialStream(args.data[0], network, seed=args.seed, rank=rank, lanes=args.pairs)
    folders = [prepare_scans(folder, args.out) if is_scan_folder(folder) else folder for folder in args.data]
    return RoomStream(folders, network, seed=args.seed, rank=rank, lanes=args.pairs)


def report(log: Log, step: int, row: dict[str, float], pairs: int) -> None:
    """One line for the person who watches, one row for the curves."""
    log.write({"step": step, **row})
    rate = pairs / row["seconds_per_step"]
    terms = "  ".join(
        f"{name} {row[name]:.3f}" for name in ("loss", "coarse", "descriptor", "guided", "hit") if name in row
    )
    sys.stdout.write(f"step {step}  {terms}  {rate:.2f} pairs/s\n")
    sys.stdout.flush()


def check(trainer: Trainer, args: argparse.Namespace, log: Log) -> None:
    """Validate the averaged weights, write them with their card, and draw the curves."""
    network = trainer.averaged_network()
    validation = deformable_samples if args.mode == "deformable" else samples
    pairs = validation.validation_pairs(args.data, network, args.validation_pairs)
    table = validate(network, list(pairs), trainer.settings.objective)
    log.write({"step": trainer.step_number, **table})
    sys.stdout.write("  ".join(f"{key} {value:.3f}" for key, value in table.items()) + "\n")
    sys.stdout.flush()
    training = {"steps": trainer.step_number, "data": [folder.name for folder in args.data]}
    card = Card(name=args.out.name, config=network.config, mode=args.mode, training=training, scores=table)
    save(network, card, args.out / "weights", half=True)
    log.draw(args.out / "curves.png")
