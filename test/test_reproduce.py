# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper from end to end, tiny: published layouts, training in one command, the paper's table beside ours."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation

from lepard_ros import cli
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.network.config import PAPER_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.training import paper
from lepard_ros.training.objective import encode_pairs
from lepard_ros.training.training import Trainer, TrainingSettings, rate_at
from pair_files import corner, motion

TINY = LepardConfig.from_dict({**PAPER_RIGID.to_dict(), "width": 8, "feature_dim": 24, "grid": 0.1, "voxel_size": 0.3})
FIGURES = {
    "3dmatch": ("98.30", "93.90", "ours, ransac + icp"),
    "4dlomatch": ("66.9", "| ours", "NFMR over metric_index"),
}
SIZES = ["--set", "width=8", "--set", "feature_dim=24", "--set", "grid=0.1", "--set", "voxel_size=0.3"]


def gridded(points: np.ndarray) -> np.ndarray:
    return grid_subsample(torch.from_numpy(points), 0.1)[0].numpy()


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3DMatch as published: tables of training pairs without gt_cov, of test pairs with it, `.pth` fragments."""
    folder = tmp_path_factory.mktemp("indoor")
    for table, count in (("train_info", 3), ("val_info", 2), ("3DMatch", 2), ("3DLoMatch", 2)):
        rows: dict[str, list] = {key: [] for key in ("src", "tgt", "rot", "trans", "overlap")}
        for number in range(count):
            truth = motion([0, 0, 0.3 * number], [0.1, 0.0, 0.05])
            target = gridded(corner(number) - np.array([1.0, 1, -1]))
            source = (target - truth[:3, 3]) @ truth[:3, :3]
            names = [f"{table}/scene_{number}/cloud_bin_{i}.pth" for i in (0, 1)]
            for name, cloud in zip(names, (source, target), strict=True):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                torch.save(cloud, folder / name)
            values = (*names, truth[:3, :3], truth[:3, 3:], 0.6)
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
        if "Match" in table:
            rows["gt_cov"] = [100 * np.eye(6)] * count
        (folder / f"{table}.pkl").write_bytes(pickle.dumps(rows))
    return folder


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4DMatch as published: split/{train,val,4DMatch,4DLoMatch}/<sequence>/*.npz; only test files have metric_index."""
    folder = tmp_path_factory.mktemp("4dmatch")
    for part in ("train", "val", "4DMatch", "4DLoMatch"):
        for number in range(2):
            source = gridded(corner(number) - np.array([1.0, 1, -1])).astype(np.float32)
            flow = (0.05 * np.sin(source[:, ::-1])).astype(np.float32)
            turn = Rotation.from_rotvec([0, 0.2, 0]).as_matrix()
            index = np.arange(0, len(source), 2)
            target = ((source + flow) @ turn.T + [0.1, 0, 0])[index].astype(np.float32)
            matches = np.stack([index, np.arange(len(index))], axis=1)
            arrays = {"s_pc": source, "t_pc": target, "s2t_flow": flow, "rot": turn, "correspondences": matches}
            arrays["trans"] = np.array([[0.1], [0], [0]])
            if "Match" in part:
                arrays |= {"metric_index": index[::3], "s_overlap_rate": np.float32(0.5)}
            (folder / "split" / part / "bear").mkdir(parents=True, exist_ok=True)
            np.savez(folder / "split" / part / "bear" / f"cam1_{number}_cam2_{number}.npz", **arrays)
    return folder


def train(preset: str, data: Path, out: Path, *more: str) -> int:
    arguments = ["train", "--preset", preset, "--data", str(data), "--out", str(out), *SIZES, "--pairs", "2"]
    return cli.main([*arguments, "--epochs", "2", "--workers", "0", "--report", "1", *more])


@pytest.mark.parametrize(("table", "preset"), [("3dmatch", "paper_rigid"), ("4dlomatch", "paper_deformable")])
def test_training_and_table_in_one_command_each(
    table: str, preset: str, scenes: Path, sequences: Path, tmp_path: Path, capsys
) -> None:
    data = scenes if preset == "paper_rigid" else sequences
    assert train(preset, data, tmp_path / "run") == 0
    best = tmp_path / "run" / "best.safetensors"
    card = json.loads(best.with_suffix(".json").read_text())
    assert card["scores"]["val_loss"] > 0  # the published validation pairs were read
    rows = (tmp_path / "run" / "log.csv").read_text().splitlines()
    assert sum(row.count(".") > 3 for row in rows) >= 2
    out = tmp_path / "tables"
    arguments = ["reproduce", table, str(data), "--weights", str(best), "--out", str(out), "--jobs", "1", "--quiet"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    for figure in FIGURES[table]:
        assert figure in printed
    assert json.loads((out / f"{table}.json").read_text())["records"]


def test_the_recipe_is_the_paper_s(scenes: Path) -> None:
    from argparse import ArgumentParser

    from lepard_ros.commands import train as command

    parser = ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["--preset", "paper_rigid", "--data", str(scenes), *SIZES])
    network, args.mode = command.starting_network(args)
    command.fill_recipe(args)
    stream = command.make_stream(args, network, 0, 1)
    settings = command.settings_of(args, stream)
    assert (settings.optimiser, settings.rate, settings.weight_decay) == ("sgd", 0.015, 1e-6)
    assert (settings.clip, settings.average, settings.warmup, settings.together, settings.half) == (
        0,
        0,
        0,
        True,
        False,
    )
    assert args.pairs == 8
    assert settings.objective.warping_weight == 0
    assert settings.steps == 20 * settings.epoch_steps
    rates = [rate_at(epoch * settings.epoch_steps, settings) for epoch in range(3)]
    np.testing.assert_allclose(rates, [1, 0.95, 0.95**2])


def test_every_pair_is_seen_once_an_epoch(scenes: Path) -> None:
    table = paper.training_set([scenes], "rigid")
    streams = [paper.PaperStream(table, TINY, "rigid", rank=rank, world=3, lanes=1) for rank in range(3)]
    assert streams[0].epoch_steps == 1
    sizes = [len(stream.batch(0)[0].target.pyramid.points[0]) for stream in streams]
    assert sorted(sizes) == sorted(len(table.load(number).target) for number in range(3))


def test_augmentation_keeps_the_truth_and_every_point(sequences: Path) -> None:
    """Turned points are not gridded again, and noise does not move where a point truly goes."""
    raw = paper.training_set([sequences], "deformable").load(0)
    places = (raw.source + raw.flow) @ raw.rotation.T + raw.translation
    for seed in range(4):
        turned = paper.augmented(raw, 0.001, np.random.default_rng(seed))
        assert len(turned.source) == len(raw.source)
        moved = (turned.source + turned.flow) @ turned.rotation.T + turned.translation
        gaps = np.linalg.norm(moved[::2][:, None] - turned.target[None], axis=2).min(axis=1)
        assert gaps.max() < 0.003
        assert np.linalg.norm(np.diff(moved, axis=0), axis=1).sum() == pytest.approx(
            np.linalg.norm(np.diff(places, axis=0), axis=1).sum()
        )
    assert len(paper.prepared(raw, TINY).source.pyramid.points[0]) == len(raw.source)


def test_a_batch_is_normalised_together(scenes: Path) -> None:
    torch.manual_seed(0)
    network = Lepard(TINY)
    pairs = paper.PaperStream(paper.training_set([scenes], "rigid"), TINY, "rigid", lanes=2).batch(0)
    together = encode_pairs(network, pairs)[0][0].coarse
    alone = encode_pairs(network, pairs[:1])[0][0].coarse
    assert (together - alone).abs().max() > 1e-3 * alone.abs().max()


def test_without_clipping_a_step_is_plain_sgd(scenes: Path) -> None:
    torch.manual_seed(0)
    settings = TrainingSettings(
        optimiser="sgd", rate=0.015, weight_decay=0.0, clip=0.0, average=0.0, warmup=0, together=True
    )
    trainer = Trainer(Lepard(TINY), settings)
    before = {name: value.clone() for name, value in trainer.network.named_parameters()}
    trainer.step(paper.PaperStream(paper.training_set([scenes], "rigid"), TINY, "rigid", lanes=2).batch(0))
    for name, parameter in trainer.network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter, before[name] - 0.015 * parameter.grad)
    torch.testing.assert_close(trainer.averaged["matching.src_proj.weight"], trainer.network.matching.src_proj.weight)


def test_kernel_points_lie_where_they_were_published() -> None:
    """At 0.66 of the convolution's radius of 2.5 cells, not of the influence of 2 cells."""
    points = Lepard(TINY).backbone.first.KPConv.kernel_points / TINY.grid
    assert points[0].norm() < 0.15
    torch.testing.assert_close(points[1:].norm(dim=1), torch.full((14,), 1.65), atol=0.15, rtol=0)


def test_a_folder_without_published_pairs_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "train_info.pkl").write_bytes(pickle.dumps({"src": []}))
    assert train("paper_rigid", tmp_path, tmp_path / "run") == 2
    assert "it lacks tgt" in capsys.readouterr().err


def test_every_row_of_the_documentation_names_a_test_that_exists() -> None:
    root = Path(__file__).resolve().parent
    page = (root.parent / "docs" / "reproduce.md").read_text()
    table = page[page.index("| | published | test |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 15
    for row in table:
        named = re.findall(r"`(test_\w+\.py)`", row.split("|")[-2])
        assert named, f"no test is named in: {row}"
        assert all((root / name).exists() for name in named), row
