# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Authors' weights through the public API: raw points in, the authors' matches and motions out."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from box_room import CAMERA, look, render
from conftest import shared_data
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.encoded_cloud import EncodedCloud, bounded_pyramid
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.network.config import PAPER_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card, load_official
from lepard_ros.registration.rigid.estimate import register_matches
from lepard_ros.registration.types import Matches, Status

TINY = LepardConfig.from_dict({**PAPER_RIGID.to_dict(), "grid": 0.05, "width": 16, "feature_dim": 48})


@pytest.fixture(scope="module")
def recorded() -> tuple[dict[str, np.ndarray], Matcher]:
    folder = shared_data().parent / "parity"
    with np.load(folder / "parity_a.npz") as data:
        arrays = dict(data)
    sizes: dict[str, Any] = json.loads((folder / "parity_a.json").read_text())
    sizes["max_condition_number"] = sizes["max_condition_number"]["reposition"]
    network = load_official(folder / "parity_a_official_checkpoint.pth", **sizes, confidence_threshold=0.0005)
    return arrays, Matcher(network, Card("authors", network.config, sha256="0"), "cpu")


def matched(points: np.ndarray, found: np.ndarray) -> np.ndarray:
    """The index of each found point (M, 3) among the points (n, 3), which it must equal."""
    distance = np.linalg.norm(found[:, None] - points[None], axis=2)
    assert distance.min(axis=1).max() < 1e-4
    return distance.argmin(axis=1)


@pytest.mark.parametrize("device", ["cpu", "onnx"])
def test_raw_points_give_the_recorded_matches_all_of_them(
    recorded: tuple[dict[str, np.ndarray], Matcher], device: str
) -> None:
    arrays, matcher = recorded
    if device == "onnx":
        pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")
        matcher = Matcher(matcher.network, matcher.card, device)
    matches = matcher.match(arrays["source_points"], arrays["target_points"])
    rows = matched(arrays["source_coarse"], matches.source)
    columns = matched(arrays["target_coarse"], matches.target)
    theirs = {tuple(match[1:]) for match in arrays["reposition/matches_0.0005_all"].tolist()}
    assert len(theirs) == 330
    confidence = arrays["reposition/confidence"]
    differing = set(zip(rows.tolist(), columns.tolist(), strict=True)) ^ theirs
    assert all(abs(confidence[match] - 0.0005) < 1e-6 for match in differing), "more than rounding at the threshold"
    np.testing.assert_allclose(matches.confidence, confidence[rows, columns], atol=1e-4)


def test_true_matches_register_with_authors_weights(recorded: tuple[dict[str, np.ndarray], Matcher]) -> None:
    arrays, matcher = recorded
    source, target = (matcher.encode(arrays[f"{side}_points"]) for side in ("source", "target"))
    rows, columns = arrays["gt_matches"]
    true = Matches(arrays["source_coarse"][rows], arrays["target_coarse"][columns], np.ones(len(rows)))
    result = register_matches(true, source.surface, target.surface)
    assert result.status is Status.OK
    gap = np.asarray(result.transform)[:3, 3] - arrays["trans"][:, 0]
    assert np.linalg.norm(gap) < 0.1


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    torch.manual_seed(0)
    return Matcher(Lepard(TINY), Card("tiny", TINY, sha256="0"), "cpu")


def views() -> tuple[np.ndarray, np.ndarray]:
    first, second = (depth_to_points(render(look(x, -0.6, yaw)), CAMERA) for x, yaw in ((-0.5, -10.0), (-0.2, 0.0)))
    return first.reshape(-1, 3), second.reshape(-1, 3)


def test_a_network_without_normals_has_surfaces_with_normals(matcher: Matcher) -> None:
    surface = matcher.encode(views()[0]).surface
    np.testing.assert_allclose(np.linalg.norm(surface.normals, axis=1), 1, atol=1e-4)


def test_a_pair_of_a_joint_network_is_encoded_together(matcher: Matcher) -> None:
    """The same source has other features beside another target, and a cached cloud gives what raw points give."""
    first, second = views()
    source, target = matcher.encode(first), matcher.encode(second)
    raw, cached = matcher.match(first, second), matcher.match(source, target)
    np.testing.assert_array_equal(raw.confidence, cached.confidence)
    saved = [EncodedCloud.from_arrays(cloud.to_arrays()) for cloud in (source, target)]
    np.testing.assert_allclose(matcher.match(*saved).confidence, raw.confidence, atol=1e-6)
    many = matcher.match_many(source, [target, source, np.zeros((0, 3))])
    np.testing.assert_array_equal(many[0].confidence, raw.confidence)
    assert len(many[2].source) == 0


def test_points_on_a_grid_are_not_gridded_again() -> None:
    """A grid of another origin: gridded again, 4 % of the published clouds' points vanish; turned, a third."""
    points = bounded_pyramid(torch.from_numpy(views()[0]).float(), torch.zeros(3), TINY).points[0] + 0.004
    kept = bounded_pyramid(points, torch.zeros(3), TINY).points[0]
    assert torch.equal(kept, points)
    angle = torch.tensor(0.7)
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0], [angle.sin(), angle.cos(), 0], [0, 0, 1]])
    told = Matcher(Lepard(TINY), Card("tiny", TINY, sha256="0"), "cpu", MatcherSettings(gridded=True))
    assert len(told.encode(points @ turn.T).surface.points) == len(points)
