# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, schedule, averaging of weights, checkpoints that resume bit for bit."""

import csv
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lepard_ros.errors import InputError
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import write_atomically
from lepard_ros.training.muon import Muon
from lepard_ros.training.objective import MatchQuality, ObjectiveSettings, SharedEncodings, match_quality, objective
from lepard_ros.training.samples import Pair, move_pairs


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the training. Rates are per step; `steps` is the end of the schedule."""

    steps: int = 100_000
    optimiser: str = "adamw"  # "adamw" | "muon" | "sgd" (as published: 0.015, momentum 0.93, decay 1e-6)
    rate: float = 1e-3
    weight_decay: float = 1e-4
    schedule: str = "constant"  # "constant" | "cosine" | "exponential" | "linear" | "epochs", after a warm-up
    warmup: int = 200
    schedule_start: int = 0  # the step at which the decay begins
    final_rate: float = 0.02  # of the rate, at the end of cosine, linear and exponential
    epoch_rate: float = 0.95  # by which "epochs" multiplies the rate after every epoch
    epoch_steps: int = 1000
    clip: float = 1.0  # of the gradient's norm; 0: none
    average: float = 0.999  # decay of the moving average of the weights, which is shipped; 0: no averaging
    together: bool = False  # joint normalisation over all pairs of a batch, as published
    half: bool = True  # half precision on a GPU
    seed: int = 0
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)


def rate_at(step: int, settings: TrainingSettings) -> float:
    """The learning rate at a step, as a share of the full one."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    span = max(1, settings.steps - settings.schedule_start)
    progress = min(1.0, max(0.0, (step - settings.schedule_start) / span))
    low = settings.final_rate
    if settings.schedule == "epochs":
        return settings.epoch_rate ** (step // settings.epoch_steps)
    if settings.schedule == "cosine":
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
    if settings.schedule == "linear":
        return low + (1 - low) * (1 - progress)
    return low**progress if settings.schedule == "exponential" else 1.0


@contextmanager
def _without_denormals() -> Iterator[None]:
    """Count numbers below 1e-38 as zero: the softmax over all fine points has such gradients, and a matrix product with
    them takes ten times as long. Only for a backward pass, because search trees of scipy may crash in this mode.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def make_optimiser(parameters: list[nn.Parameter], settings: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW, Muon, or SGD as published."""
    if settings.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=settings.rate, momentum=0.93, weight_decay=settings.weight_decay)
    if settings.optimiser == "adamw":
        return torch.optim.AdamW(parameters, lr=settings.rate, weight_decay=settings.weight_decay)
    if settings.optimiser == "muon":
        return Muon(parameters, lr=settings.rate, weight_decay=settings.weight_decay)
    raise InputError(f"optimiser {settings.optimiser!r} is not known: choose adamw, muon or sgd.")


class Trainer:
    """Network, optimiser and averaged weights; one `step` at a time."""

    def __init__(self, network: Lepard, settings: TrainingSettings, device: str = "cpu") -> None:
        self.network, self.settings = network.to(device).train(), settings
        self.device = torch.device(device)
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        self.optimiser = make_optimiser(self.parameters, settings)
        self.scaler = torch.amp.GradScaler(enabled=self.device.type == "cuda" and settings.half)
        self.averaged = {name: value.detach().clone() for name, value in network.state_dict().items()}
        self.step_number = 0

    def step(self, pairs: list[Pair]) -> dict[str, float]:
        """One optimiser step on a batch; under torchrun, gradients are averaged over the processes."""
        settings = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = settings.rate * rate_at(self.step_number, settings)
        self.optimiser.zero_grad(set_to_none=False)
        rows = self._backward(move_pairs(pairs, self.device))
        self.scaler.unscale_(self.optimiser)
        average_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, settings.clip or math.inf)
        if torch.isfinite(norm):
            self.scaler.step(self.optimiser)
        self.scaler.update()
        self._average()
        self.step_number += 1
        means = {name: _mean([row[name] for row in rows if name in row]) for name in {n for row in rows for n in row}}
        return {**means, "gradient": float(norm), "pairs": len(pairs)}

    def _backward(self, pairs: list[Pair]) -> list[dict[str, float]]:
        """Add the gradients of a batch, pair by pair: on a CPU batching has no benefit, and padding costs time."""
        settings, rows = self.settings.objective, []
        if self.settings.together:
            with self._autocast():
                result = objective(self.network, pairs, settings, seed=self.step_number)
            self.scaler.scale(result.loss).backward()
            return [{"loss": float(result.loss.detach()), **result.parts}]
        shared = self._share(pairs) if self.network.config.normalisation != "joint" else None
        for place, pair in enumerate(pairs):
            # A cheaper step: the transformer sees only some of the pairs, in rotation.
            left_out = (place + self.step_number) % settings.coarse_every != 0
            mine = settings._replace(coarse_weight=0.0) if left_out else settings
            with self._autocast():
                encoded = None if shared is None else [shared.of(pair)]
                result = objective(self.network, [pair], mine, seed=self.step_number, encoded=encoded)
            with _without_denormals():
                self.scaler.scale(result.loss / len(pairs)).backward()
            rows.append({"loss": float(result.loss.detach()), **result.parts})
        if shared is not None:
            shared.backward()
        return rows

    def _share(self, pairs: list[Pair]) -> SharedEncodings:
        """All clouds of a batch, encoded once, and some mirrored."""
        share = self.settings.objective.mirrored_share
        sources = list({id(pair.source): pair.source for pair in pairs}.values())
        draws = np.random.default_rng([self.settings.seed, self.step_number]).random(len(sources))
        mirrored = [source for source, draw in zip(sources, draws, strict=True) if draw < share]
        with self._autocast():
            return SharedEncodings(self.network, pairs, mirrored)

    def _autocast(self) -> torch.autocast:
        """Half precision on a GPU."""
        enabled = self.device.type == "cuda" and self.settings.half
        return torch.autocast(self.device.type, dtype=torch.float16, enabled=enabled)

    @torch.no_grad()
    def _average(self) -> None:
        # Early averages must forget the random initialisation quickly.
        keep = min(self.settings.average, (1 + self.step_number) / (10 + self.step_number))
        for name, value in self.network.state_dict().items():
            if value.is_floating_point():
                self.averaged[name].lerp_(value, 1 - keep)

    def averaged_network(self) -> Lepard:
        """A network with the averaged weights."""
        network = Lepard(self.network.config)
        network.load_state_dict({name: value.cpu() for name, value in self.averaged.items()})
        return network.eval()

    def state(self) -> dict[str, Any]:
        """Everything that a later run needs to resume exactly; the data follow from the step and the seed."""
        return {
            "step": self.step_number,
            "network": self.network.state_dict(),
            "averaged": self.averaged,
            "optimiser": self.optimiser.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": torch.get_rng_state(),
            "settings": {**asdict(self.settings), "objective": self.settings.objective._asdict()},
            "config": self.network.config.to_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self.network.load_state_dict(state["network"])
        self.averaged = {name: value.to(self.device) for name, value in state["averaged"].items()}
        self.optimiser.load_state_dict(state["optimiser"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["random"].cpu())
        self.step_number = int(state["step"])

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        import io

        buffer = io.BytesIO()
        torch.save(self.state(), buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, buffer.getvalue())

    def load(self, path: Path) -> None:
        """Resume from a checkpoint."""
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
        except Exception as error:
            raise InputError(
                f"{path.name} cannot be read as a checkpoint ({type(error).__name__}): start from --init."
            ) from error
        if _sizes(state["config"]) != _sizes(self.network.config.to_dict()):
            raise InputError(
                f"{path.name} belongs to a network of other sizes: choose another --out or the same --preset."
            )
        self.load_state(state)


def _sizes(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that a checkpoint must share with its network: all except the runtime options."""
    return {key: value for key, value in config.items() if key not in ("confidence_threshold", "mutual")}


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average gradients over all processes, in one message."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = part.view_as(parameter).clone()


def own_device(device: str) -> str:
    """The device of this process: under torchrun every process of a machine has a GPU of its own."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


def start_processes(device: str) -> tuple[int, int]:
    """Join the processes that torchrun started: (rank, number of processes)."""
    if "RANK" not in os.environ:
        return 0, 1
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


@torch.no_grad()
def validate(network: Lepard, pairs: Iterable[tuple[Pair, float]], settings: ObjectiveSettings) -> dict[str, float]:
    """Mean loss and inlier ratio over pairs, and the share of rigid fits within 15 degrees and 0.3 m, by overlap.

    hit: share of fine points with a correct match by descriptor alone.
    """
    network.eval()
    device = next(network.parameters()).device
    settings = settings._replace(coarse_weight=settings.coarse_weight or 1.0, given_share=0.0)
    rows: list[tuple[float, float, MatchQuality, float]] = []
    radius = network.config.coarse_grid
    for pair, overlap in pairs:
        (pair,) = move_pairs([pair], device)
        result = objective(network, [pair], settings)
        quality = match_quality(network, pair, result, 0, radius)
        rows.append((overlap, float(result.loss), quality, result.parts.get("hit", float("nan"))))
    table = {"val_loss": _mean([r[1] for r in rows]), "val_ir": _mean([r[2].inlier_ratio for r in rows])}
    for name, low, high in (("low", 0.0, 0.3), ("mid", 0.3, 0.6), ("high", 0.6, 1.01)):
        inside = [r for r in rows if low <= r[0] < high]
        chosen, hits = [r[2] for r in inside], [r[3] for r in inside if math.isfinite(r[3])]
        limits = 15.0, 0.3 * network.config.coarse_grid / 0.2
        good = [float(q.rotation_error < limits[0] and q.translation_error < limits[1]) for q in chosen]
        table |= {f"ir_{name}": _mean([q.inlier_ratio for q in chosen]), f"fit_{name}": _mean(good)}
        table[f"hit_{name}"] = _mean(hits)
    return table


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


class Log:
    """A CSV file with one row per report, and the curves drawn from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, row: dict[str, float]) -> None:
        """Append a row; a new column starts a new header line set."""
        rows = self.rows()
        names = list(dict.fromkeys([*(rows[0] if rows else {}), *row]))
        if rows and set(names) == set(rows[0]):
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, names).writerow(row)
            return
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows([*rows, row])

    def rows(self) -> list[dict[str, Any]]:
        """All rows, as text."""
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def draw(self, path: Path) -> None:
        """Loss and recall over the steps as a PNG."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        rows = self.rows()
        figure, axes = plt.subplots(1, 3, figsize=(15, 4), layout="constrained")
        bands = ("low", "mid", "high")
        found = [f"{name}_{band}" for name in ("ir", "hit") for band in bands]
        groups = (("loss", "val_loss"), found, [f"fit_{band}" for band in bands])
        for axis, names, title in zip(axes, groups, ("loss", "inlier ratio", "rigid fit within limits"), strict=True):
            for name in names:
                points = [(int(float(r["step"])), float(r[name])) for r in rows if r.get(name)]
                if points:
                    axis.plot(*zip(*points, strict=True), label=name)
            axis.set(title=title, xlabel="step")
            axis.legend()
            axis.grid(alpha=0.3)
        figure.savefig(path, dpi=110)
        plt.close(figure)


class Progress:
    """Seconds per step and means of what `step` returned, since the last report."""

    def __init__(self) -> None:
        self.started, self.sums, self.count = time.monotonic(), dict[str, float](), 0

    def add(self, values: dict[str, float]) -> None:
        """Count one step."""
        self.count += 1
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    def take(self) -> dict[str, float]:
        """The means; clears them."""
        row = {key: value / max(1, self.count) for key, value in self.sums.items()}
        row["seconds_per_step"] = (time.monotonic() - self.started) / max(1, self.count)
        self.__init__()  # type: ignore[misc]
        return row
