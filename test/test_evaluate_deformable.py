# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable evaluation and ablations: a bending sheet whose truth is known, real baselines, a small network."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lepard_ros import cli
from lepard_ros.cloud.pyramid import build_pyramid
from lepard_ros.data.fourdmatch import DeformablePair, benchmark_of, load_pair
from lepard_ros.data.readers import RigidPair
from lepard_ros.encoded_cloud import EncodedCloud
from lepard_ros.errors import InputError
from lepard_ros.evaluation import ablation
from lepard_ros.evaluation.deformable import (
    DeformableResult,
    deformable_tables,
    evaluate_deformable,
    make_deformable,
    matches_of_warp,
    summarise_deformable,
    takes_filter,
)
from lepard_ros.evaluation.methods import LepardMethod, make_method
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, load, save
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
        self.warp = pair.places

    def align(self, source: np.ndarray, target: np.ndarray) -> DeformableResult:
        matches = Matches(self.source, self.target, np.ones(len(self.source)))
        return DeformableResult(matches, self.warp, True, 0.1, 0.1, "OK")


def test_the_truth_scores_full_marks_and_wrong_matches_cost(pair: DeformablePair) -> None:
    best = evaluate_deformable(Knowing(pair, 0), pair)
    assert best["inlier_ratio"] == 1
    assert best["nfmr_set"] == "metric_index"
    assert best["nfmr_seen"] > 0.95
    assert best["nfmr_seen"] >= best["nfmr"] > 0.6  # a quarter of the metric points was never seen
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
    matches = matches_of_warp(pair.places, pair.source, pair.target)
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
    assert "\n4DMatch\n" in printed
    assert "NFMR over metric_index" in printed
    assert "c>0.2" in printed
    result = json.loads(output.read_text())
    assert len(result["records"]) == 5  # two thresholds, raw and filtered, and the baseline
    assert len(output.with_suffix(".jsonl").read_text().splitlines()) == 5
    assert "data:image/png" in (tmp_path / "report" / "index.html").read_text()
    assert cli.main([*arguments, "--jobs", "1", "--quiet"]) == 0
    assert len(output.with_suffix(".jsonl").read_text().splitlines()) == 5


def test_the_mirror_control_shows_the_mirrored_source_and_puts_matches_back(
    weights: Path, pair: DeformablePair
) -> None:
    plain, control = make_deformable(f"lepard:{weights}"), make_deformable(f"lepard:{weights}+mirrored")
    reflected = pair.source * np.array([-1.0, 1.0, 1.0])
    expected = plain.align(reflected, pair.target).matches
    found = control.align(pair.source, pair.target).matches
    np.testing.assert_allclose(found.source * np.array([-1.0, 1.0, 1.0]), expected.source)
    np.testing.assert_allclose(found.target, expected.target)
    # The sheet is no mirror image of itself, so that the control is another question than the pair.
    assert not np.array_equal(found.source, plain.align(pair.source, pair.target).matches.source)
    assert [takes_filter(name) for name in ("lepard:a", "lepard:a+mirrored", "cpd")] == [True, False, False]


def test_a_warp_is_fitted_only_when_asked_for(pair: DeformablePair, weights: Path) -> None:
    assert make_deformable(f"lepard:{weights}").align(pair.source, pair.target).status == "matched"
    fitted = make_deformable(f"lepard:{weights}", register=True).align(pair.source, pair.target)
    assert fitted.status != "matched"
    assert fitted.accepted == (fitted.warp is not None)


def test_the_set_is_the_folder_s_name_or_the_file_s_own_overlap(pair: DeformablePair) -> None:
    """The share of matches within 1.5 cm and the published rate within 3.75 cm put pairs on different sides of 45 %."""
    assert benchmark_of(Path("sheet/a_b.npz"), pair) == "4DMatch"  # three quarters of the points have a match
    assert benchmark_of(Path("sheet/a_b.npz"), replace(pair, overlap_rate=0.44)) == "4DLoMatch"
    assert benchmark_of(Path("split/4DLoMatch/sheet/a_b.npz"), pair) == "4DLoMatch"


def test_a_refused_warp_counts_as_unmoved_over_all_pairs(pair: DeformablePair) -> None:
    refusing = Knowing(pair, 0)
    refusing.warp = None  # type: ignore[assignment]
    record = evaluate_deformable(refusing, pair)
    gap = np.linalg.norm(pair.warped[pair.seen] - pair.source[pair.seen], axis=1).mean()
    assert "epe" not in record
    assert record["epe_all"] == pytest.approx(gap)
    summary = summarise_deformable([evaluate_deformable(Knowing(pair, 0), pair), record])
    assert summary["epe"] < 1e-6
    assert summary["epe_all"] == pytest.approx(gap / 2, rel=1e-4)


def test_a_point_beside_the_source_moves_with_the_turn_of_the_camera(pair: DeformablePair) -> None:
    """The inlier ratio of coarse points needs their true place: the offset to the source turns with it."""
    turn = np.array([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]])
    turned = replace(pair, rotation=turn, flow=np.zeros_like(pair.flow))
    beside = pair.source[:5].astype(float) + np.array([0.0, 0.01, 0.0])
    np.testing.assert_allclose(turned.places(beside), beside @ turn.T + pair.translation, atol=1e-6)


def test_tables_split_into_the_sets() -> None:
    base = {"method": "cpd", "matches": 3, "inlier_ratio": 0.5, "nfmr_seen": 0.2, "accepted": True, "seconds": 1.0}
    found = ((0.8, "4DMatch"), (0.2, "4DLoMatch"), (None, "4DLoMatch"))
    parts = deformable_tables([{**base, "cpu_seconds": 1.0, "nfmr": n, "part": part} for n, part in found])
    assert [summary["cpd"]["pairs"] for summary in parts.values()] == [1, 2, 3]
    assert parts["4DLoMatch"]["cpd"]["nfmr"].mean == pytest.approx(0.1)
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
    ablation.apply_settings(method.matcher, ablation.VARIANTS["no position code"].settings)
    assert method.matcher.network.config.max_condition_number == 0
    assert method.matcher.config is method.matcher.network.config


def two_clouds(matcher: Matcher) -> list[EncodedCloud]:
    random = np.random.default_rng(0)
    return [matcher.encode(random.uniform(0, 2, size=(4000, 3)) * [1, 1, 0.2]) for _ in range(2)]


def test_a_placement_takes_the_place_of_the_network_s_own(weights: Path) -> None:
    matcher = Matcher.from_pretrained(weights, settings=MatcherSettings(guided=True))
    first, second = two_clouds(matcher)
    own = matcher.match(first, second)
    with ablation.ForcedRepositioning(matcher, lambda points: points + np.array([0.5, -0.5, 0.2])):
        forced = matcher.match(first, second)
    again = matcher.match(first, second)
    assert not np.array_equal(own.confidence, forced.confidence)
    np.testing.assert_array_equal(own.confidence, again.confidence)


def test_no_repositioning_keeps_the_position_code(weights: Path) -> None:
    """It means codes of the clouds where they lie, not the absence of codes."""
    pair = RigidPair("a", "b", "s", None, 0.0)
    found = {}
    for name in ("no repositioning", "no position code"):
        matcher = ablation.make_matcher(name, str(weights))
        with ablation.repositioned(name, matcher, pair):
            found[name] = matcher.match(*two_clouds(matcher))
    assert not np.array_equal(*(matches.confidence for matches in found.values()))


def test_the_first_block_alone_does_not_know_the_repositioning(weights: Path) -> None:
    matcher = ablation.make_matcher("first block alone", str(weights))
    first, second = two_clouds(matcher)
    own = matcher.match(first, second)
    with ablation.ForcedRepositioning(matcher, lambda points: points + np.array([0.5, -0.5, 0.2])):
        forced = matcher.match(first, second)
    np.testing.assert_array_equal(own.confidence, forced.confidence)
    whole = ablation.make_matcher("guided by the transformer", str(weights)).match(first, second)
    assert not np.array_equal(own.confidence, whole.confidence)
    two = ablation.make_matcher("two blocks", str(weights)).match(first, second)
    np.testing.assert_array_equal(two.confidence, whole.confidence)  # this network has no more


def test_without_chirality_a_mirrored_cloud_looks_the_same() -> None:
    network, _ = load("rigid")
    chiral = Lepard(replace(network.config, chiral_context=True, handed=True))
    random = np.random.default_rng(0)
    points = torch.from_numpy(random.uniform(0, 2, (3000, 3)) * [1, 1, 0.2]).float()
    pyramid = build_pyramid(points, chiral.config.pyramid)
    with torch.no_grad():
        torch.nn.init.normal_(chiral.backbone.context.out.weight)  # type: ignore[union-attr]
        torch.nn.init.normal_(chiral.backbone.handed.mlp[2].weight, std=0.02)  # type: ignore[union-attr]
        pair = [chiral.encode(cloud) for cloud in (pyramid, pyramid.mirrored())]
        ablation.forget_chirality(chiral)
        blind = [chiral.encode(cloud) for cloud in (pyramid, pyramid.mirrored())]
        bias = chiral.pair_bias
        assert bias is not None
        tables = [bias(cloud.points[2][None], cloud.normals[2][None])[0] for cloud in (pyramid, pyramid.mirrored())]
    for level in range(2):
        assert (pair[0][level] - pair[1][level]).abs().max() > 0.01
        torch.testing.assert_close(blind[0][level], blind[1][level], atol=1e-3, rtol=1e-2)
    torch.testing.assert_close(*tables, atol=1e-3, rtol=1e-2)


def test_the_random_rotation_is_about_the_centroid() -> None:
    points = np.random.default_rng(0).normal(loc=[5.0, 0, 0], size=(40, 3))
    turned = ablation.random_rotation("a->b", points)
    np.testing.assert_allclose(turned.mean(axis=0), points.mean(axis=0), atol=1e-9)
    np.testing.assert_array_equal(turned, ablation.random_rotation("a->b", points))
    assert np.abs(turned - points).max() > 0.5


def test_the_rigid_oracle_is_the_best_fit_of_the_deformation(pair: DeformablePair) -> None:
    """Not the motion of the camera alone, which leaves out what the body did."""
    moved = replace(pair, flow=np.tile(np.float32([0.0, 0.3, 0.0]), (len(pair.flow), 1)))
    np.testing.assert_allclose(ablation.best_rigid_fit(moved)[:3, 3], np.add(pair.translation, [0, 0.3, 0]), atol=1e-6)


def test_the_oracles_need_a_truth(weights: Path) -> None:
    matcher, unrelated = Matcher.from_pretrained(weights), RigidPair("a", "b", "s", None, 0.0)
    with pytest.raises(InputError, match="oracle"):
        ablation.repositioned("oracle rigid fitting", matcher, unrelated)
    with pytest.raises(InputError, match="4dmatch"):
        ablation.repositioned("oracle deformation", matcher, unrelated)
    assert "oracle deformation" not in ablation.choose_variants(None, "3DMatch")


def test_variants_are_chosen_by_their_first_words() -> None:
    assert ablation.choose_variants(["threshold"]) == [f"threshold {c}" for c in ("0.01", "0.05", "0.1", "0.2")]
    assert ablation.choose_variants(None) == list(ablation.VARIANTS)
    with pytest.raises(InputError, match="its own weights"):
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
    assert cli.main([*arguments, "--variants", "guided", "oracle rigid", "random"]) == 0
    printed = capsys.readouterr().out
    for name in ("| guided by the transformer ", "| oracle rigid fitting ", "| random rotation "):
        assert name in printed
    assert cli.main(["evaluate", "ablation", str(tmp_path), "--methods", "icp"]) == 2


def test_deformable_variants_are_measured_by_their_matches_and_resumed(weights: Path, folder: Path, capsys) -> None:
    results = folder.parent / "ablation.json"
    arguments = ["evaluate", "ablation", str(folder), "--set", "4dmatch", "--methods", f"lepard:{weights}", "--quiet"]
    arguments += ["--json", str(results), "--jobs", "1", "--report", str(folder.parent / "report"), "--variants"]
    assert cli.main([*arguments, "guided", "oracle"]) == 0
    printed = capsys.readouterr().out
    assert "| oracle deformation " in printed and "NFMR" in printed
    assert "lepard train --preset small_deformable" in printed
    assert "NFMR" in (folder.parent / "report" / "index.html").read_text()
    assert cli.main([*arguments, "guided", "oracle", "no repositioning"]) == 0
    log = results.with_suffix(".jsonl").read_text().splitlines()
    assert [json.loads(line)["variant"] for line in log] == [
        "guided by the transformer", "oracle rigid fitting", "oracle deformation", "no repositioning"
    ]  # fmt: skip
    assert set(json.loads(results.read_text())["records"]) == {json.loads(line)["variant"] for line in log}


def test_every_variant_that_needs_a_training_has_one_that_can_be_built() -> None:
    """What the table tells to type is understood by `lepard train`, and gives a network."""
    import argparse
    import shlex

    from lepard_ros.commands import train as training

    parser = argparse.ArgumentParser()
    training.add_arguments(parser)
    for set_name in ("3DMatch", "4dmatch"):
        lines = ablation.other_trainings(set_name)[1:]
        assert len(lines) == len(ablation.OTHER_WEIGHTS)
        for line in lines:
            args = parser.parse_args(shlex.split(line.partition("lepard train ")[2]))
            training.starting_network(args)
