# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard train`: train or fine-tune a network."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from lepard_ros.data.creature_scene import scene_files
from lepard_ros.errors import InputError
from lepard_ros.network.config import PRESETS, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, grown, load, save, with_further_blocks
from lepard_ros.training import deformable_samples, paper, samples
from lepard_ros.training.deformable_samples import CreatureStream, DeformableStream
from lepard_ros.training.objective import ObjectiveSettings
from lepard_ros.training.paper import RECIPE, WARPING_GATE, WARPING_WEIGHT, PaperStream, training_set
from lepard_ros.training.samples import Pair, RoomStream
from lepard_ros.training.scans import OfficialStream, is_official_3dmatch, is_scan_folder, prepare_scans
from lepard_ros.training.training import (
    Log,
    Progress,
    Trainer,
    TrainingSettings,
    own_device,
    start_processes,
    validate,
)

HELP = "train a network, or fine-tune the shipped one on your own scans"
AnyStream = RoomStream | CreatureStream | DeformableStream | OfficialStream | PaperStream
SCHEDULES = ("constant", "cosine", "linear", "exponential", "epochs")
# Defaults, unless the command line or a paper preset sets a value.
OURS = {
    "steps": 100_000, "optimiser": "adamw", "rate": 1e-3, "schedule": "constant", "epoch_rate": 0.95, "clip": 1.0,
    "pairs": 2, "warping_weight": 0.0, "validate": 1000, "validation_pairs": 120, "average": 0.999, "warmup": 200,
    "half": True, "workers": 0,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    _add_network_and_rate(parser)
    _add_objective(parser)
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    add("--report", type=int, default=50, help="steps between lines of the log")
    add("--validate", type=int, help="steps between validations (default 1000; a paper preset: an epoch)")
    add("--validation-pairs", type=int, help="pairs per validation, 0 for all (default 120; with a paper preset all)")
    add("--save", type=int, default=200, help="steps between checkpoints")


def _add_network_and_rate(parser: argparse.ArgumentParser) -> None:
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
    add("--steps", type=int, help="train up to this step (default 100,000; a paper preset: 20 epochs)")
    add("--epochs", type=int, help="the same in epochs of a published set")
    add("--optimiser", choices=("adamw", "muon", "sgd"), help="default adamw; with a paper preset sgd, as published")
    add("--rate", type=float, help="learning rate (default 0.001; with a paper preset 0.015)")
    add("--schedule", choices=SCHEDULES, help="default constant; with a paper preset epochs: x 0.95 after every epoch")
    add("--schedule-start", type=int, default=0, help="step at which the decay begins")
    add("--final-rate", type=float, default=0.02, help="share of the rate at the end of a decay (default %(default)s)")
    add("--epoch-rate", type=float, help="factor on the rate after every epoch of `--schedule epochs` (default 0.95)")
    add("--clip", type=float, help="maximum norm of the gradient, 0 for no limit (default 1; with a paper preset 0)")


def _add_objective(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--pairs", type=int, help="rooms or pairs per step and process (default 2; with a paper preset 8)")
    add("--workers", type=int, help="processes that prepare the pairs of a paper preset (default 8)")
    add(
        "--clouds", type=int, default=4, help="clouds of each room; all pairs among them are used (default %(default)s)"
    )
    add(
        "--coarse-every",
        type=int,
        default=1,
        help="run the transformer, the most expensive part, on every n-th pair (default %(default)s)",
    )
    add(
        "--mirrored-share",
        type=float,
        default=0.0,
        help="share of sources whose mirror image provides negatives for the descriptors (default 0)",
    )
    add(
        "--mirrored-weight",
        type=float,
        default=0.0,
        help="weight of a loss that keeps the transformer from matching those mirror images as the source (default 0)",
    )
    add(
        "--given-share",
        type=float,
        default=0.0,
        help="share of rigid pairs repositioned by their perturbed true motion, like a good hypothesis (default 0)",
    )
    add(
        "--warping-weight",
        type=float,
        help="weight of the warping loss (default 0; with paper_deformable 0.1)",
    )
    add(
        "--coarse-weight",
        type=float,
        default=1.0,
        help="weight of the matching loss; 0 trains only the descriptors, in half the time (default %(default)s)",
    )
    add(
        "--freeze",
        action="append",
        default=[],
        metavar="NAME",
        help="do not train the weights whose names begin with this, as pair_bias or backbone; repeatable",
    )


def run(args: argparse.Namespace) -> int:
    """Train until --steps; resumes from OUT/checkpoint.pt if it exists."""
    rank, world = start_processes(args.device)
    args.device = own_device(args.device)
    torch.manual_seed(args.seed)
    network, args.mode = starting_network(args)
    freeze(network, args.freeze)
    fill_recipe(args)
    stream = make_stream(args, network, rank, world)
    settings = settings_of(args, stream)
    trainer = Trainer(network, settings, args.device)
    checkpoint = args.out / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    log, progress, every = Log(args.out / "log.csv"), Progress(), args.validate or settings.epoch_steps
    for pairs in batches(stream, trainer.step_number, settings.steps, args.workers):
        progress.add(trainer.step(pairs))
        step = trainer.step_number
        if rank == 0 and step % args.report == 0:
            report(log, step, progress.take(), world)
        if rank == 0 and step % args.save == 0:
            trainer.save(checkpoint)
        if step % args.save == 0:
            stream.refresh()
        if rank == 0 and step % every == 0:
            check(trainer, args, log)
    if rank == 0:
        trainer.save(checkpoint)
        if trainer.step_number % every:
            check(trainer, args, log)
    return 0


def fill_recipe(args: argparse.Namespace) -> None:
    """Fill in defaults: the paper's recipe for a paper preset, ours otherwise."""
    published = args.mode == "deformable" or is_official_3dmatch(args.data[0])
    args.paper = published and (args.preset or "").startswith("paper_")
    recipe = {**RECIPE, "warping_weight": WARPING_WEIGHT[args.mode]} if args.paper else OURS
    for name, value in recipe.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)


def batches(stream: AnyStream, start: int, end: int, workers: int) -> Iterator[list[Pair]]:
    """The batches of the steps from `start` to `end`."""
    if isinstance(stream, PaperStream):
        yield from stream.batches(start, end, workers)
        return
    for step in range(start, end):
        yield stream.batch(step)


def settings_of(args: argparse.Namespace, stream: AnyStream) -> TrainingSettings:
    """The training settings of the command line."""
    epoch = stream.epoch_steps if isinstance(stream, PaperStream) else args.validate or 1000
    steps = args.steps or (args.epochs or 100) * epoch
    objective = ObjectiveSettings(
        warping_weight=args.warping_weight, coarse_weight=args.coarse_weight,
        coarse_every=args.coarse_every, mirrored_share=args.mirrored_share, mirrored_weight=args.mirrored_weight,
        given_share=args.given_share,
        warping_gate=WARPING_GATE if args.paper else 0.0,
    )  # fmt: skip
    settings = TrainingSettings(
        steps=steps, optimiser=args.optimiser, rate=args.rate, schedule=args.schedule, clip=args.clip,
        schedule_start=args.schedule_start, final_rate=args.final_rate, epoch_rate=args.epoch_rate, epoch_steps=epoch,
        warmup=args.warmup, average=args.average, together=args.paper, half=args.half, seed=args.seed,
        objective=objective,
    )  # fmt: skip
    return replace(settings, weight_decay=1e-6) if args.optimiser == "sgd" else settings


def starting_network(args: argparse.Namespace) -> tuple[Lepard, str]:
    """The initial network, and whether it is for rigid or deformable scenes.

    Weights of --init keep their own sizes and mode unless a preset is given.
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
    """Transfer weights to another grid, or to a network that is larger, has chirality or further blocks."""
    adopted = Lepard(config)
    weights = with_further_blocks(network.state_dict(), network.config.layers, config.layers, config.heads)
    try:
        adopted.load_state_dict(grown(weights, adopted.state_dict()))
    except RuntimeError:
        raise InputError(
            "the weights of --init have other sizes than --preset or --set request: remove those options."
        ) from None
    return adopted


def freeze(network: Lepard, beginnings: list[str]) -> None:
    """Exclude the weights whose names begin with one of these from training."""
    for beginning in beginnings:
        frozen = [weight for name, weight in network.named_parameters() if name.startswith(beginning)]
        if not frozen:
            parts = sorted({name.split(".")[0] for name, _ in network.named_parameters()})
            raise InputError(f"--freeze {beginning!r} names no weights of this network; its parts: {', '.join(parts)}.")
        for weight in frozen:
            weight.requires_grad_(False)


def make_stream(args: argparse.Namespace, network: Lepard, rank: int, world: int) -> AnyStream:
    """The training pairs of this process."""
    for folder in args.data:
        if not folder.is_dir():
            raise InputError(f"there is no data folder {str(folder)!r}: make one with `lepard synthesise rooms`.")
    if args.paper:
        table = training_set(args.data, args.mode)
        own = {"seed": args.seed, "rank": rank, "world": world, "lanes": args.pairs}
        return PaperStream(table, network.config, args.mode, **own)
    if args.mode == "deformable" and scene_files(args.data):
        return CreatureStream(args.data, network, seed=args.seed, rank=rank, lanes=args.pairs, clouds=args.clouds)
    if args.mode == "deformable":
        return DeformableStream(args.data, network, seed=args.seed, rank=rank, lanes=args.pairs)
    if is_official_3dmatch(args.data[0]):
        return OfficialStream(args.data[0], network, seed=args.seed, rank=rank, lanes=args.pairs)
    folders = [prepare_scans(folder, args.out) if is_scan_folder(folder) else folder for folder in args.data]
    return RoomStream(folders, network, seed=args.seed, rank=rank, lanes=args.pairs, clouds=args.clouds)


def report(log: Log, step: int, row: dict[str, float], processes: int) -> None:
    """One line on the terminal, one row for the curves."""
    log.write({"step": step, **row})
    rate = processes * row["pairs"] / row["seconds_per_step"]
    terms = "  ".join(
        f"{name} {row[name]:.3f}" for name in ("loss", "coarse", "descriptor", "guided", "hit") if name in row
    )
    sys.stdout.write(f"step {step}  {terms}  {rate:.2f} pairs/s\n")
    sys.stdout.flush()


def check(trainer: Trainer, args: argparse.Namespace, log: Log) -> None:
    """Validate the averaged weights, write them with their card, and draw the curves."""
    network = trainer.averaged_network().to(args.device)
    table = validate(network, held_out_pairs(args, network), trainer.settings.objective)
    best = min((float(row["val_loss"]) for row in log.rows() if row.get("val_loss")), default=float("inf"))
    log.write({"step": trainer.step_number, **table})
    sys.stdout.write("  ".join(f"{key} {value:.3f}" for key, value in table.items()) + "\n")
    sys.stdout.flush()
    training = {"steps": trainer.step_number, "data": [folder.name for folder in args.data]}
    card = Card(name=args.out.name, config=network.config, mode=args.mode, training=training, scores=table)
    save(network, card, args.out / "weights", half=True)
    if table["val_loss"] < best:
        save(network, card, args.out / "best", half=not args.paper)
    log.draw(args.out / "curves.png")


def held_out_pairs(args: argparse.Namespace, network: Lepard) -> Iterator[tuple[Pair, float]]:
    """Pairs that are not trained on, with their overlap."""
    official = args.mode == "rigid" and is_official_3dmatch(args.data[0])
    if args.paper or official:
        return paper.validation_pairs(paper.validation_set(args.data, args.mode), network.config, args.validation_pairs)
    validation = deformable_samples if args.mode == "deformable" else samples
    return validation.validation_pairs(args.data, network, args.validation_pairs)
