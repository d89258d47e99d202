# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable evaluation and ablations: a bending sheet whose truth is known, real baselines, a small network."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lepard_ros import cli
from lepard_ros.errors import InputError
from lepard_ros.evaluation import ablation
from lepard_ros.evaluation.deformable import (
    DeformableResult,
    deformable_tables,
    evaluate_deformable,
    make_deformable,
    matches_of_warp,
    true_places,
)
from lepard_ros.evaluation.methods import LepardMethod, make_method
from lepard_ros.evaluation.readers import RigidPair
from lepard_ros.learning.fourdmatch import DeformablePair, load_pair
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, save
from lepard_ros.registration.types import Matches

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 48, "confidence_threshold": 0.0})


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return save(Lepard(TINY), Card("tiny", TINY), tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sheet of 1 m with bumps, 1 m before the camera, that bends by 2 cm; the target sees three quarters of it."""
    side = np.linspace(-0.5, 0.5, 41)
    x, y = (axis.ravel() for axis in np.meshgrid(side, side))
    source = np.stack([x, y, 1 + 0.08 * np.sin(7 * x) * np.cos(5 * y)], axis=1)
    flow = np.stack([0 * x, 0 * x, 0.02 * np.sin(3 * x)], axis=1)
    seen = np.flatnonzero(x < 0.25)
    index = np.stack([seen, np.arange(len(seen))], axis=1)
    data = tmp_path / "data" / "sheet"
    data.mkdir(parents=True)
    shift = np.array([0.01, 0.0, 0.0])
    np.savez(data / "a_b.npz", s_pc=source, t_pc=(source + flow + shift)[seen], s2t_flow=flow, rot=np.eye(3),
             trans=shift[:, None], correspondences=index, metric_index=np.arange(0, len(x), 7))  # fmt: skip
    return tmp_path / "data"


@pytest.fixture
def pair(folder: Path) -> DeformablePair:
    return load_pair(folder / "sheet" / "a_b.npz")


class Knowing:
    """Matches some points to where they truly are, and a share of them to nonsense."""

    def __init__(self, pair: DeformablePair, wrong: int) -> None:
        chosen = np.unique(pair.matches[:, 0])[::5]
        self.source, self.target = pair.source[chosen].astype(float), pair.warped[chosen].astype(float)
        self.target[:wrong] += 1.0
        self.warp = lambda points: true_places(pair, points)

    def align(self, source: np.ndarray, target: np.ndarray) -> DeformableResult:
        matches = Matches(self.source, self.target, np.ones(len(self.source)))
        return DeformableResult(matches, self.warp, True, 0.1, 0.1, "OK")


def test_the_truth_scores_full_marks_and_wrong_matches_cost(pair: DeformablePair) -> None:
    best = evaluate_deformable(Knowing(pair, 0), pair)
    assert best["inlier_ratio"] == 1
    assert best["nfmr"] > 0.95  # a few points at the edge have no match within 10 cm
    assert best["nfmr"] > best["nfmr_metric"] > 0.6  # a quarter of the metric points was never seen
    assert best["epe"] < 1e-6
    assert best["acc5"] == best["acc10"] == 1
    count = best["matches"]
    worse = evaluate_deformable(Knowing(pair, count // 2), pair)
    assert worse["inlier_ratio"] == pytest.approx(1 - (count // 2) / count)
    assert worse["nfmr"] < 0.7


def test_baselines_follow_a_bend_that_is_seen_whole(pair: DeformablePair) -> None:
    pytest.importorskip("pycpd", reason="the package pycpd is not installed")
    flow = np.stack([0 * pair.source[:, 0], 0 * pair.source[:, 0], 0.04 + 0.06 * np.sin(3 * pair.source[:, 0])], axis=1)
    everything = np.tile(np.arange(len(flow))[:, None], (1, 2))
    whole = replace(pair, target=pair.source + flow, flow=flow, translation=np.zeros(3), matches=everything)
    for name in ("n-icp", "cpd"):
        record = evaluate_deformable(make_deformable(name), whole)
        assert record["accepted"]
        assert record["epe"] < 0.015  # of 0.047 to go
        assert record["inlier_ratio"] > 0.95


def test_a_warp_is_read_as_matches_where_it_lands(pair: DeformablePair) -> None:
    matches = matches_of_warp(lambda points: true_places(pair, points), pair.source, pair.target)
    assert len(matches.source) > 300
    assert matches.source[:, 0].max() < 0.32  # what the target did not see has nowhere to land
    nowhere = matches_of_warp(lambda points: points + 9.0, pair.source, pair.target)
    assert len(nowhere.source) == 0


def test_the_command_prints_and_resumes(folder: Path, weights: Path, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out.json"
    methods = ["--methods", f"lepard:{weights}", "n-icp"]
    arguments = ["evaluate", "4dmatch", str(folder), *methods, "--thresholds", "0.0", "0.2", "--json", str(output)]
    assert cli.main([*arguments, "--jobs", "1", "--quiet", "--report", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr().out
    assert "overlap >= 45 %" in printed
    assert "c>0.2" in printed
    result = json.loads(output.read_text())
    assert len(result["records"]) == 5  # two thresholds, raw and filtered, and the baseline
    assert len(output.with_suffix(".jsonl").read_text().splitlines()) == 5
    assert "data:image/png" in (tmp_path / "report" / "index.html").read_text()
    assert cli.main([*arguments, "--jobs", "1", "--quiet"]) == 0
    assert len(output.with_suffix(".jsonl").read_text().splitlines()) == 5


def test_a_warp_is_fitted_only_when_asked_for(pair: DeformablePair, weights: Path) -> None:
    assert make_deformable(f"lepard:{weights}").align(pair.source, pair.target).status == "matched"
    fitted = make_deformable(f"lepard:{weights}", register=True).align(pair.source, pair.target)
    assert fitted.status != "matched"
    assert fitted.accepted == (fitted.warp is not None)


def test_tables_split_at_45_per_cent() -> None:
    base = {"method": "cpd", "matches": 3, "inlier_ratio": 0.5, "nfmr_metric": 0.2, "accepted": True, "seconds": 1.0}
    records = [{**base, "cpu_seconds": 1.0, "nfmr": n, "overlap": o} for n, o in ((0.8, 0.9), (0.2, 0.3), (None, 0.1))]
    parts = deformable_tables(records)
    assert [summary["cpd"]["pairs"] for summary in parts.values()] == [1, 2, 3]
    assert parts["overlap < 45 % (as 4DLoMatch)"]["cpd"]["nfmr"].mean == pytest.approx(0.1)
    assert parts["all pairs"]["cpd"]["epe"] is None


def test_bad_deformable_data_ends_with_code_2(tmp_path: Path, capsys) -> None:
    assert cli.main(["evaluate", "4dmatch", str(tmp_path), "--methods", "cpd"]) == 2
    np.savez(tmp_path / "pair.npz", s_pc=np.zeros((1, 3)))
    assert cli.main(["evaluate", "4dmatch", str(tmp_path), "--methods", "cpd", "--jobs", "1", "--quiet"]) == 2
    assert "t_pc" in capsys.readouterr().err
    assert cli.main(["evaluate", "4dmatch", str(tmp_path), "--methods", "magic"]) == 2


# --- ablations -------------------------------------------------------------------------------------------------------


def test_variants_change_the_network_s_settings(weights: Path) -> None:
    method = make_method(f"lepard:{weights}")
    assert isinstance(method, LepardMethod)
    ablation.apply_settings(method.matcher, ablation.VARIANTS["no repositioning"].settings)
    assert method.matcher.network.config.max_condition_number == 0
    assert method.matcher.config is method.matcher.network.config


def test_a_forced_motion_repositions_the_source(weights: Path) -> None:
    matcher = Matcher.from_pretrained(weights, settings=MatcherSettings(guided=True))
    random = np.random.default_rng(0)
    first, second = (matcher.encode(random.uniform(0, 2, size=(4000, 3)) * [1, 1, 0.2]) for _ in range(2))
    own = matcher.match(first, second)
    motion = np.eye(4)
    motion[:3, 3] = [0.5, -0.5, 0.2]
    with ablation.ForcedRepositioning(matcher, motion):
        forced = matcher.match(first, second)
    again = matcher.match(first, second)
    assert not np.array_equal(own.confidence, forced.confidence)
    np.testing.assert_array_equal(own.confidence, again.confidence)


def test_repositioners() -> None:
    pair = RigidPair("a", "b", "s", np.diag([1.0, 1, 1, 1]), 0.5)
    turn = ablation._random_rotation(pair)[:3, :3]
    np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-12)
    np.testing.assert_array_equal(turn, ablation._random_rotation(pair)[:3, :3])
    np.testing.assert_array_equal(ablation._truth(pair), np.eye(4))
    with pytest.raises(InputError, match="oracle"):
        ablation._truth(RigidPair("a", "b", "s", None, 0.0))


def test_variants_are_chosen_by_their_first_words() -> None:
    assert ablation.choose_variants(["threshold"]) == [f"threshold {c}" for c in ("0.01", "0.05", "0.1", "0.2")]
    assert ablation.choose_variants(None) == list(ablation.VARIANTS)
    with pytest.raises(InputError, match="weights of its own"):
        ablation.choose_variants(["sinkhorn"])
    with pytest.raises(InputError, match="unknown"):
        ablation.choose_variants(["magic"])


def test_the_ablation_command_prints_a_row_each(weights: Path, tmp_path: Path, capsys) -> None:
    random = np.random.default_rng(0)
    clouds = {str(i): (random.uniform(0, 1.5, size=(3000, 3)) * [1, 1, 0.1] / 0.00025).astype(np.int16) for i in (0, 1)}
    np.savez(tmp_path / "hall.npz", **clouds)
    np.savez(tmp_path / "gt_3DMatch.npz", src=["hall/1"], tgt=["hall/0"], rot=[np.eye(3)], trans=[np.zeros((3, 1))],
             overlap=[0.5], gt_cov=[np.eye(6)])  # fmt: skip
    arguments = ["evaluate", "ablation", str(tmp_path), "--methods", f"lepard:{weights}", "--quiet"]
    assert cli.main([*arguments, "--variants", "guided", "oracle", "random"]) == 0
    printed = capsys.readouterr().out
    for name in ("| guided by the transformer ", "| oracle ", "| random rotation "):
        assert name in printed
    assert cli.main(["evaluate", "ablation", str(tmp_path), "--methods", "icp"]) == 2


def test_deformable_variants_are_measured_by_their_matches_and_resumed(weights: Path, folder: Path, capsys) -> None:
    results = folder.parent / "ablation.json"
    arguments = ["evaluate", "ablation", str(folder), "--set", "4dmatch", "--methods", f"lepard:{weights}", "--quiet"]
    arguments += ["--json", str(results), "--jobs", "1", "--report", str(folder.parent / "report"), "--variants"]
    assert cli.main([*arguments, "guided", "oracle"]) == 0
    printed = capsys.readouterr().out
    assert "| oracle " in printed and "NFMR" in printed
    assert "lepard train --preset small_deformable" in printed
    assert "NFMR" in (folder.parent / "report" / "index.html").read_text()
    assert cli.main([*arguments, "guided", "oracle", "no repositioning"]) == 0
    log = results.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in log] == ["guided by the transformer", "oracle", "no repositioning"]
    assert set(json.loads(results.read_text())["records"]) == {json.loads(line)["variant"] for line in log}


def test_every_variant_that_needs_a_training_has_one_that_can_be_built() -> None:
    """What the table tells to type is understood by `lepard train`, and gives a network."""
    import argparse
    import shlex

    from lepard_ros.learning import command as training

    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    for set_name in ("3DMatch", "4dmatch"):
        lines = ablation.other_trainings(set_name)[1:]
        assert len(lines) == len(ablation.OTHER_WEIGHTS)
        for line in lines:
            args = parser.parse_args(shlex.split(line.partition("lepard train ")[2]))
            training.starting_network(args)
