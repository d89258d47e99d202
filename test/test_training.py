# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Losses against their definitions; training that stops and goes on bit for bit, alone and in two processes."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lepard_ros.commands import train as command
from lepard_ros.errors import InputError
from lepard_ros.network.config import MATCH_LEVEL, SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard, LepardOutput, Repositioning, pad_clouds
from lepard_ros.network.procrustes import RigidFit
from lepard_ros.network.weights import load
from lepard_ros.synthesis.meshes import MeshLibrary
from lepard_ros.synthesis.shards import make_room, room_path, save_room
from lepard_ros.training.losses import (
    descriptor_loss,
    focal_loss,
    focal_loss_sinkhorn,
    rejection_loss,
    unmatched_loss,
    warping_loss,
)
from lepard_ros.training.objective import ObjectiveSettings, SharedEncodings, given_motions, objective, warp_coarse
from lepard_ros.training.samples import HOLE_RADIUS, WAVE_LENGTH, RoomStream, Sample, bend, cut_holes, training_files
from lepard_ros.training.training import Trainer, TrainingSettings, _without_denormals, rate_at
from lepard_ros.training.truth import mutual_matches

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 24, "fine_dim": 8, "grid": 0.1})


@pytest.fixture(scope="session")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generated rooms to train on, from procedural furniture only."""
    folder = tmp_path_factory.mktemp("rooms")
    library = MeshLibrary()
    for seed in (100, 101):
        save_room(room_path(folder, seed), make_room(seed, library))
    return folder


def trainer_of(seed: int = 0, **settings: object) -> Trainer:
    torch.manual_seed(seed)
    return Trainer(Lepard(TINY), TrainingSettings(warmup=2, **settings))  # type: ignore[arg-type]


def test_focal_loss_by_hand() -> None:
    confidence = torch.tensor([[[0.5, 0.1], [0.2, 0.9]]])
    matches = torch.tensor([[0, 0, 0], [0, 1, 1]])
    expected = -0.25 * (0.5**2 * np.log(0.5) + 0.1**2 * np.log(0.9)) / 2
    assert float(focal_loss(confidence, matches)) == pytest.approx(expected, rel=1e-5)
    negative = -0.25 * (0.1**2 * np.log(0.9) + 0.2**2 * np.log(0.8)) / 2
    assert float(focal_loss_sinkhorn(confidence, matches)) == pytest.approx(expected + negative, rel=1e-5)
    assert float(focal_loss(confidence, matches[:0])) == 0.0


def test_rejection_loss_by_hand() -> None:
    confidence = torch.tensor([[[0.5, 0.1], [0.2, 0.9]]])
    first = Repositioning(confidence, fit=None, applied=torch.ones(1))  # type: ignore[arg-type]
    output = LepardOutput(confidence / 2, fitted=None, repositionings=[first])  # type: ignore[arg-type]
    expected = -0.25 * sum(np.log([1 - 0.1, 1 - 0.05, 1 - 0.9, 1 - 0.45])) / 2
    assert float(rejection_loss(output, torch.tensor([[0, 1], [1, 1]]))) == pytest.approx(expected, rel=1e-5)
    assert float(rejection_loss(output, torch.zeros(0, 2, dtype=torch.long))) == 0.0


def test_warping_loss_by_hand() -> None:
    source = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]])
    fit = RigidFit(torch.eye(3)[None], torch.tensor([[[0.1], [0], [0.2]]]), torch.ones(1))
    # Only the first point has a true match: |0.1| + |0.2|.
    assert float(warping_loss(fit, source, source, torch.tensor([[0, 0, 3]]))) == pytest.approx(0.3)


def test_mutual_matches_by_hand() -> None:
    warped = torch.tensor([[0.0, 0, 0], [0.05, 0, 0], [5, 0, 0]])
    target = torch.tensor([[0.01, 0, 0], [1, 0, 0]])
    assert mutual_matches(warped, target, 0.1).tolist() == [[0, 0]]


def test_settings_of_a_preset_can_be_changed() -> None:
    changed = command.changed(SMALL_RIGID, ["matching=sinkhorn", 'layers=["self","cross"]', "entangled=true"])
    assert (changed.matching, changed.layers, changed.entangled) == ("sinkhorn", ("self", "cross"), True)
    for wrong, word in (("matching", "value"), ("colour=red", "colour"), ("matching=guess", "matching")):
        with pytest.raises(InputError, match=word):
            command.changed(SMALL_RIGID, [wrong])


def test_weights_to_begin_with_keep_their_mode_unless_a_preset_is_asked_for() -> None:
    parser = ArgumentParser()
    command.add_arguments(parser)

    def start(*options: str) -> tuple[Lepard, str]:
        return command.starting_network(parser.parse_args(["--data", "x", *options]))

    (network, mode), shipped = start("--init", "deformable"), load("deformable")[0]
    assert mode == "deformable" and network.config == shipped.config
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), shipped.parameters(), strict=True))
    wider = ["--set", "bottleneck=2", "--set", "decoder=smooth", "--set", "context=2", "--set", "dustbin=true"]
    network, mode = start("--init", "rigid", "--preset", "small_deformable", *wider)
    assert mode == "deformable" and network.config.grid == shipped.config.grid
    assert start()[1] == "rigid"
    with pytest.raises(InputError, match="other sizes"):
        start("--init", "rigid", "--set", "fine_dim=48")


def test_descriptor_loss_by_hand() -> None:
    """The second point is too near to the partner to count as wrong; the third one does."""
    scores = torch.tensor([[1.0, 9.0, 0.5]])
    places = torch.tensor([[0.0, 0, 0], [0.1, 0, 0], [2, 0, 0]])
    expected = -np.log(np.exp(1) / (np.exp(1) + np.exp(0.5)))
    assert float(descriptor_loss(scores, torch.tensor([0]), places, 0.15)) == pytest.approx(expected, rel=1e-5)


def test_losses_with_a_dustbin_by_hand() -> None:
    """Matching nothing is one more wrong partner of a matched point, and the right one of an unmatched point."""
    scores, places, nothing = torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 0, 0], [2, 0, 0]]), torch.tensor(0.7)
    total = np.exp([1.0, 0.5, 0.7]).sum()
    matched = descriptor_loss(scores, torch.tensor([0]), places, 0.15, nothing=nothing)
    assert float(matched) == pytest.approx(-np.log(np.exp(1.0) / total), rel=1e-5)
    assert float(unmatched_loss(scores, nothing)) == pytest.approx(-np.log(np.exp(0.7) / total), rel=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "exponential"])
def test_schedules_start_full_and_never_rise_after_the_warm_up(schedule: str) -> None:
    settings = TrainingSettings(steps=100, warmup=10, schedule=schedule)
    rates = [rate_at(step, settings) for step in range(10, 101)]
    assert rates[0] <= 1
    assert (np.diff(rates) <= 1e-9).all()
    if schedule != "constant":
        assert rates[-1] == pytest.approx(settings.final_rate, rel=1e-3)


def test_pairs_are_true(rooms: Path) -> None:
    """The motion of every drawn pair lays overlapping surfaces on each other."""
    stream = RoomStream([rooms], Lepard(TINY), lanes=2, clouds=3)
    for pair in stream.batch(0):
        source, target = pair.source.pyramid.points[0], pair.target.pyramid.points[0]
        moved = source @ pair.motion[:3, :3].T + pair.motion[:3, 3]
        assert (torch.cdist(moved, target).amin(1) < 0.1).float().mean() > 0.05


def test_streams_are_a_function_of_the_step(rooms: Path) -> None:
    network = Lepard(TINY)
    one, two = (RoomStream([rooms], network, seed=3, lanes=2, clouds=3) for _ in range(2))
    for step in range(4):
        one.batch(step)
    late, direct = one.batch(5), two.batch(5)
    for a, b in zip(late, direct, strict=True):
        torch.testing.assert_close(a.source.pyramid.points[0], b.source.pyramid.points[0], rtol=0, atol=0)
        torch.testing.assert_close(a.motion, b.motion, rtol=0, atol=0)


def test_training_reduces_the_loss(rooms: Path) -> None:
    trainer = trainer_of(rate=3e-3)
    pairs = RoomStream([rooms], trainer.network, lanes=2, clouds=3).batch(0)
    losses = [trainer.step(pairs)["loss"] for _ in range(25)]
    assert np.mean(losses[-3:]) < 0.8 * losses[0]


@pytest.mark.parametrize("frozen", [[], ["pair_bias"]])
def test_shared_encodings_give_the_gradients_of_single_pairs(rooms: Path, frozen: list[str]) -> None:
    torch.manual_seed(0)
    network = Lepard(TINY)
    command.freeze(network, frozen)  # biases that are not trained are computed once per cloud
    trainer = Trainer(network, TrainingSettings(warmup=2))
    pairs = RoomStream([rooms], trainer.network, lanes=1, clouds=4).batch(0)
    assert len(pairs) > len({id(s) for p in pairs for s in (p.source, p.target)}) / 2  # clouds are used several times
    trainer._backward(pairs)
    shared = [p.grad.clone() for p in trainer.parameters]
    trainer.optimiser.zero_grad(set_to_none=False)
    for pair in pairs:
        (objective(trainer.network, [pair], ObjectiveSettings(), seed=0).loss / len(pairs)).backward()
    for one, parameter in zip(shared, trainer.parameters, strict=True):
        torch.testing.assert_close(one, parameter.grad, atol=1e-4, rtol=1e-3)


def test_the_mirrored_weight_counts_confident_matches_of_the_mirror_image(rooms: Path) -> None:
    torch.manual_seed(0)
    network, mirror = Lepard(replace(TINY, chirality=True)), torch.diag(torch.tensor([-1.0, 1.0, 1.0]))
    pair = RoomStream([rooms], network, lanes=1, clouds=2).batch(0)[0]
    encoded = [SharedEncodings(network, [pair], [pair.source]).of(pair)]
    without, counted = (
        objective(network, [pair], ObjectiveSettings(mirrored_weight=weight), encoded=encoded) for weight in (0.0, 2.0)
    )
    pyramid = pair.source.pyramid
    points, normals = ([x @ mirror for x in level] for level in (pyramid.points, pyramid.normals))
    image = replace(pyramid, points=points, normals=normals)
    clouds = [
        pad_clouds([network.encode(p)[0]], [p.points[MATCH_LEVEL]], [p.normals[MATCH_LEVEL]])
        for p in (image, pair.target.pyramid)
    ]
    expected = 2.0 * float(rejection_loss(network.match(*clouds), without.matches[:, 1:]).detach())
    assert expected > 1e-4
    assert counted.parts["coarse"] - without.parts["coarse"] == pytest.approx(expected, rel=1e-2)


def test_a_mirrored_sample_is_the_sample_of_the_mirrored_cloud(rooms: Path) -> None:
    network, mirror = Lepard(TINY), torch.diag(torch.tensor([-1.0, 1.0, 1.0]))
    pyramid = RoomStream([rooms], network, lanes=1, clouds=2).batch(0)[0].source.pyramid
    sample = Sample(pyramid, network.backbone.relations(pyramid), None)
    points, normals = ([x @ mirror for x in level] for level in (pyramid.points, pyramid.normals))
    real = network.encode(replace(pyramid, points=points, normals=normals))[0]
    torch.testing.assert_close(network.encode(pyramid, sample.mirrored().relations)[0], real, atol=1e-3, rtol=1e-2)
    assert (network.encode(pyramid)[0] - real).abs().max() > 0.01


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resumed_training_is_identical(rooms: Path, tmp_path: Path, optimiser: str) -> None:
    through = trainer_of(optimiser=optimiser)
    stream = RoomStream([rooms], through.network, lanes=1, clouds=3)
    for step in range(4):
        through.step(stream.batch(step))
    first = trainer_of(optimiser=optimiser)
    for step in range(2):
        first.step(RoomStream([rooms], first.network, lanes=1, clouds=3).batch(step))
    first.save(tmp_path / "checkpoint.pt")
    second = trainer_of(seed=99, optimiser=optimiser)
    second.load(tmp_path / "checkpoint.pt")
    for step in range(2, 4):
        second.step(RoomStream([rooms], second.network, lanes=1, clouds=3).batch(step))
    for one, two in ((through.network.state_dict(), second.network.state_dict()), (through.averaged, second.averaged)):
        for name, value in one.items():
            torch.testing.assert_close(value, two[name], rtol=0, atol=0)


def test_command_trains_resumes_and_writes_weights(rooms: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(command.PRESETS, "small_rigid", TINY)
    parser = ArgumentParser()
    command.add_arguments(parser)
    for steps in ("2", "3"):
        options = ["--data", str(rooms), "--out", str(tmp_path), "--steps", steps, "--pairs", "1", "--report", "1"]
        assert command.run(parser.parse_args(options)) == 0
    network, card = load(tmp_path / "weights.safetensors")
    assert card.training["steps"] == 3
    assert network.config == TINY
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert len((tmp_path / "log.csv").read_text().splitlines()) >= 4


def test_frozen_weights_do_not_change(rooms: Path) -> None:
    torch.manual_seed(0)
    network = Lepard(TINY)
    command.freeze(network, ["pair_bias", "backbone.first"])
    before = {name: weight.detach().clone() for name, weight in network.named_parameters()}
    trainer = Trainer(network, TrainingSettings(warmup=1))
    trainer.step(RoomStream([rooms], network, lanes=1, clouds=2).batch(0))
    same = {name for name, weight in network.named_parameters() if torch.equal(weight, before[name])}
    assert same == {name for name in before if name.startswith(("pair_bias", "backbone.first"))}
    with pytest.raises(InputError, match="backbone, fine_matching"):
        command.freeze(network, ["backbones"])


def test_missing_data_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="synthesise"):
        training_files([tmp_path])


def test_checkpoints_of_other_sizes_are_refused(tmp_path: Path) -> None:
    trainer_of().save(tmp_path / "checkpoint.pt")
    other = Trainer(Lepard(LepardConfig.from_dict({**TINY.to_dict(), "feature_dim": 48})), TrainingSettings())
    with pytest.raises(InputError, match="other sizes"):
        other.load(tmp_path / "checkpoint.pt")


TWO_PROCESSES = """
import json, sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from test_training import TINY
from lepard_ros.training.objective import ObjectiveSettings, SharedEncodings, given_motions, objective, warp_coarse
from lepard_ros.training.samples import RoomStream
from lepard_ros.training.training import average_gradients, start_processes
from lepard_ros.network.lepard import Lepard, LepardOutput, Repositioning, pad_clouds
rank, world = start_processes("cpu")
torch.manual_seed(0)
network = Lepard(TINY)
pairs = RoomStream([Path(sys.argv[1])], network, lanes=2, clouds=3).batch(0)[:2]
objective(network, [pairs[rank]], ObjectiveSettings(), seed=0).loss.backward()
parameters = list(network.parameters())
average_gradients(parameters)
if rank == 0:
    norm = float(torch.cat([p.grad.flatten() for p in parameters]).norm())
    Path(sys.argv[2]).write_text(json.dumps([world, norm]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_give_the_mean_gradient(rooms: Path, tmp_path: Path) -> None:
    script, result = tmp_path / "two.py", tmp_path / "result.json"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    arguments = [*launch, str(rooms), str(result), str(Path(__file__).parent)]
    done = subprocess.run(arguments, env=dict(os.environ), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    world, norm = json.loads(result.read_text())
    torch.manual_seed(0)
    network = Lepard(TINY)
    pairs = RoomStream([rooms], network, lanes=2, clouds=3).batch(0)[:2]
    for pair in pairs:
        (objective(network, [pair], ObjectiveSettings(), seed=0).loss / 2).backward()
    expected = float(torch.cat([p.grad.flatten() for p in network.parameters()]).norm())
    assert world == 2
    assert norm == pytest.approx(expected, rel=1e-4)


def test_given_motions_are_nearly_true_and_not_given_to_all(rooms: Path) -> None:
    network = Lepard(TINY)
    pairs = RoomStream([rooms], network, lanes=1, clouds=3).batch(0)
    given = [given_motions(network, [pairs[0]], 0.5, seed) for seed in range(40)]
    assert 8 < sum(fit is not None for fit in given) < 32
    assert all(given_motions(network, [pairs[0]], 0.0, seed) is None for seed in range(5))
    source, moved = pairs[0].source.pyramid.points[2], warp_coarse(pairs[0])
    errors = []
    for fit in (fit for fit in given if fit is not None):
        errors.append(float((source @ fit.rotation[0].T + fit.translation[0, :, 0] - moved).norm(dim=1).mean()))
    assert 0.05 * TINY.coarse_grid < np.median(errors) < 1.5 * TINY.coarse_grid


def test_bends_are_small_and_smooth_and_holes_are_balls() -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(-2, 2, (3000, 3))
    offsets = bend(points, np.random.default_rng(1), 0.02)
    near = bend(points + np.array([1e-3, 0, 0]), np.random.default_rng(1), 0.02)
    assert 1e-4 < np.abs(offsets).max() < 0.1
    # A wave of amplitude a and length l changes by at most 2 pi a / l per metre.
    assert np.abs(near - offsets).max() < 1e-3 * 2 * np.pi / WAVE_LENGTH[0] * 0.1
    assert np.abs(bend(points, rng, 0.0)).max() == 0.0
    left = cut_holes(points, np.random.default_rng(2), 6)
    lost = np.array(sorted(set(map(tuple, points)) - set(map(tuple, left))))
    assert 0 < len(lost) < 100
    assert max(np.linalg.norm(lost - p, axis=1).min() for p in lost) < 2 * HOLE_RADIUS[1]
    assert len(cut_holes(points, rng, 0)) == len(points)


def test_denormals_are_zero_only_within_a_backward_pass() -> None:
    """Search trees of scipy crash for some clouds while they are."""
    tiny = torch.full((64,), 1e-40)
    with _without_denormals():
        pass
    assert (tiny * 1.0).sum() > 0
