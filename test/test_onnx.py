# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The network as ONNX graphs: onnxruntime gives torch's numbers, for clouds of other sizes than the traced ones."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from box_room import CAMERA, look, render
from lepard_ros import cli
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.errors import InputError
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.network import onnx_graphs
from lepard_ros.network.config import PAPER_RIGID, SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import CoarseCloud, Lepard, pad_clouds
from lepard_ros.network.onnx_graphs import OnnxLepard, example_cloud, example_pyramid
from lepard_ros.network.procrustes import nearest_rotation, rotation_by_products
from lepard_ros.registration.types import Matches

for package in ("onnx", "onnxruntime"):
    pytest.importorskip(package, reason=f"the package {package} is not installed")

SIZES: dict[str, Any] = {"width": 16, "feature_dim": 48, "neighbour_limits": (12, 12, 12, 12)}
PAPER, OURS = (
    replace(PAPER_RIGID, **SIZES, max_condition_number=1e9),
    replace(SMALL_RIGID, **SIZES, fine_dim=16, decoder="smooth", context=1, handed=True),
)
MATCHERS = {
    "sinkhorn": replace(PAPER, matching="sinkhorn", position_code="sinusoidal"),
    "entangled": replace(PAPER, entangled=True),
    "ours": OURS,
}
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@lru_cache(maxsize=4)
def both(config: LepardConfig) -> tuple[Lepard, OnnxLepard]:
    torch.manual_seed(0)
    network = Lepard(config).eval()
    if network.backbone.context is not None:  # it starts as zero
        torch.nn.init.normal_(network.backbone.context.out.weight, std=0.1)
    if network.backbone.handed is not None:
        torch.nn.init.normal_(network.backbone.handed.mlp[2].weight, std=0.02)
    return network, OnnxLepard(network, "tiny").eval()


@torch.no_grad()
def test_features_are_those_of_torch_at_any_size() -> None:
    """With normals and all of our options; the recorded case of test_matcher_paper.py is the paper's."""
    network, by_onnx = both(OURS)
    for side in (30, 60):
        pyramid = example_pyramid(network, side)
        for found, expected in zip(by_onnx.encode(pyramid), network.encode(pyramid), strict=True):
            assert found is not None and expected is not None
            assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", MATCHERS)
@torch.no_grad()
def test_confidences_are_those_of_torch_at_any_size(name: str) -> None:
    network, by_onnx = both(MATCHERS[name])
    for sides in ((50, 37), (20, 60)):
        clouds = [example_cloud(network, side) for side in sides]
        expected = network.match(*clouds)
        assert expected.repositionings or network.config.entangled
        torch.testing.assert_close(by_onnx.match(*clouds).confidence, expected.confidence, **CLOSE)


@torch.no_grad()
def test_a_padded_batch_is_matched_pair_by_pair() -> None:
    network, by_onnx = both(OURS)
    source, *others = (example_cloud(network, side) for side in (40, 30, 50))
    targets = padded(others)
    expected, found = network.match(source, targets), by_onnx.match(source, targets)
    torch.testing.assert_close(found.confidence, expected.confidence, **CLOSE)
    torch.testing.assert_close(found.fit.rotation, expected.fit.rotation, atol=1e-2, rtol=0)
    given = by_onnx.match(source, targets, expected.fit)  # a motion that is given is torch's business
    torch.testing.assert_close(given.confidence, network.match(source, targets, expected.fit).confidence)


def padded(clouds: list[CoarseCloud]) -> CoarseCloud:
    features, points, normals = ([getattr(c, name)[0] for c in clouds] for name in ("features", "points", "normals"))
    return pad_clouds(features, points, normals)


def test_the_rotation_without_a_decomposition_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(200, 3, 3, generator=generator, dtype=torch.float64)
    matrices[:50, :, 2] = matrices[:50, :, 0] + 1e-3 * matrices[:50, :, 2]  # nearly flat
    matrices[50] = torch.diag(torch.tensor([3.0, 3.0, 1.0]))  # two equal singular values
    assert (torch.linalg.det(matrices) < 0).sum() > 50, "mirror images are among them"
    (expected, condition), (found, other) = nearest_rotation(matrices), rotation_by_products(matrices)
    torch.testing.assert_close(other, condition, atol=0, rtol=1e-4)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
    collinear = torch.zeros(2, 3, 3, dtype=torch.float64)
    collinear[0, 0, 0] = 1.0
    assert not (rotation_by_products(collinear)[1] < 1e9).any(), "as little to be trusted as with a decomposition"


# --- shipped weights, through the matcher ----------------------------------------------------------------------------


def clouds() -> list[np.ndarray]:
    poses = (look(-0.5, -0.6, -10.0), look(-0.2, -0.6, 0.0))
    points = [depth_to_points(render(pose), CAMERA).reshape(-1, 3) for pose in poses]
    return [cloud[np.isfinite(cloud).all(axis=1)] for cloud in points]


def partners(matches: Matches) -> dict[tuple[float, ...], tuple[tuple[float, ...], float]]:
    rows = zip(matches.source.tolist(), matches.target.tolist(), matches.confidence.tolist(), strict=True)
    return {tuple(source): (tuple(target), confidence) for source, target, confidence in rows}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `lepard export` wrote for the rigid weights."""
    folder = tmp_path_factory.mktemp("exported")
    assert cli.main(["export", "--onnx", str(folder), "--weights", "rigid"]) == 0
    return folder


@pytest.mark.parametrize("guided", [False, True])
def test_exported_graphs_give_the_same_matches(exported: Path, guided: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graphs, "graph_bytes", None)  # nothing is exported a second time
    settings = MatcherSettings(guided=guided, grid=0.08)
    by_torch = Matcher.from_pretrained("rigid", "cpu", settings)
    by_onnx = Matcher.from_pretrained(exported / "weights.safetensors", "onnx", settings)
    assert (by_torch.runs_on, by_onnx.runs_on) == ("cpu", "onnx")
    assert by_torch.weights_id == by_onnx.weights_id  # so that maps can be shared
    expected, found = (partners(matcher.match(*clouds())) for matcher in (by_torch, by_onnx))
    assert len(expected) > 100
    same = [point for point in expected.keys() & found.keys() if expected[point][0] == found[point][0]]
    # A point whose two best partners are equally good, or whose match is at the threshold, may fall on either side.
    assert len(same) >= 0.99 * len(expected | found)
    np.testing.assert_allclose([found[p][1] for p in same], [expected[p][1] for p in same], atol=1e-4)


def test_graphs_of_other_weights_are_refused(exported: Path) -> None:
    matcher = Matcher.from_pretrained(exported / "weights.safetensors", "onnx")
    assert isinstance(matcher.network, OnnxLepard)
    matcher.network.identity = "that of others"
    with pytest.raises(InputError, match="exported from other weights"):
        matcher.warm_up()


def test_without_onnxruntime_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(onnx_graphs, "import_module", missing)
    with pytest.raises(InputError, match=r"pip install 'lepard_ros\[onnx\]'"):
        Matcher.from_pretrained("rigid", "onnx")
