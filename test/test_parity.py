# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The authors' numbers for the authors' weights, from recorded cases."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lepard_ros.cloud.pyramid import build_pyramid, stack_pyramids
from lepard_ros.network.lepard import Lepard, recorded_pyramid, split_pairs
from lepard_ros.network.matching import select_matches
from lepard_ros.network.procrustes import RigidFit
from lepard_ros.network.weights import load_official
from lepard_ros.training.losses import focal_loss, total_loss
from lepard_ros.training.truth import mutual_matches

VARIANTS: dict[str, dict[str, Any]] = {
    "reposition": {},
    "reposition_off": {},
    "sinkhorn": {"matching": "sinkhorn"},
    "sinusoidal": {"position_code": "sinusoidal"},
    "entangled": {"entangled": True},
    "oracle": {},
}


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> tuple[dict[str, np.ndarray], dict[str, Any], Path]:
    from conftest import shared_data

    folder = shared_data().parent / "parity"
    with np.load(folder / "parity_a.npz") as data:
        arrays = dict(data)
    return arrays, json.loads((folder / "parity_a.json").read_text()), folder / "parity_a_official_checkpoint.pth"


def network_of(recorded: tuple, variant: str) -> tuple[Lepard, RigidFit | None]:
    arrays, sizes, checkpoint = recorded
    limit = sizes["max_condition_number"].get(variant, 1e9)
    network = load_official(checkpoint, **{**sizes, "max_condition_number": limit, **VARIANTS[variant]})
    if variant != "oracle":
        return network, None
    return network, RigidFit(
        torch.from_numpy(arrays["rot"])[None], torch.from_numpy(arrays["trans"])[None], torch.ones(1)
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_equal_the_reference(recorded: tuple, variant: str) -> None:
    arrays = recorded[0]
    network, truth = network_of(recorded, variant)
    result = network.forward_recorded(arrays, truth)
    scale = np.abs(arrays["backbone_features"]).max()
    assert np.abs(result["features"].numpy() - arrays["backbone_features"]).max() < 1e-3 * scale
    np.testing.assert_allclose(result["confidence"].numpy(), arrays[f"{variant}/confidence"], atol=1e-4)
    np.testing.assert_allclose(result["R"].numpy(), arrays[f"{variant}/R"], atol=1e-3)
    np.testing.assert_allclose(result["t"].numpy(), arrays[f"{variant}/t"], atol=1e-3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_match_lists_equal_the_reference(recorded: tuple, variant: str) -> None:
    """Up to entries whose confidence is within rounding of the threshold or of another maximum."""
    arrays = recorded[0]
    network, truth = network_of(recorded, variant)
    confidence = network.forward_recorded(arrays, truth)["confidence"][None]
    for name, mutual in (("all", False), ("mutual", True)):
        ours = {tuple(row) for row in select_matches(confidence, 0.0005, mutual).tolist()}
        theirs = {tuple(row) for row in arrays[f"{variant}/matches_0.0005_{name}"].tolist()}
        reference = torch.from_numpy(arrays[f"{variant}/confidence"])
        unclear = [m for m in ours ^ theirs if abs(float(reference[m[1], m[2]]) - 0.0005) > 1e-5]
        assert len(unclear) == 0, f"{name}: {unclear[:5]}"


@pytest.mark.parametrize("variant", ["reposition", "reposition_off", "sinkhorn", "sinusoidal"])
def test_positioning_layers_equal_the_reference(recorded: tuple, variant: str) -> None:
    arrays = recorded[0]
    network, truth = network_of(recorded, variant)
    pyramid = recorded_pyramid(arrays, torch.device("cpu"))
    with torch.no_grad():
        layer = network(pyramid, truth).repositionings[0]
    prefix = f"{variant}/reposition1_"
    np.testing.assert_allclose(layer.confidence[0].numpy(), arrays[prefix + "confidence"], atol=1e-4)
    np.testing.assert_allclose(layer.fit.rotation[0].numpy(), arrays[prefix + "R"], atol=1e-3)
    np.testing.assert_allclose(layer.fit.translation[0].numpy(), arrays[prefix + "t"], atol=1e-3)
    np.testing.assert_allclose(layer.fit.condition[0].numpy(), arrays[prefix + "condition"], rtol=1e-3)
    assert bool(layer.applied[0]) == bool(arrays[prefix + "applied"])


def test_losses_equal_the_reference(recorded: tuple) -> None:
    arrays, sizes, _ = recorded
    network, _ = network_of(recorded, "reposition")
    pyramid = recorded_pyramid(arrays, torch.device("cpu"))
    with torch.no_grad():
        output = network(pyramid)
    source = torch.from_numpy(arrays["source_coarse"])
    warped = source @ torch.from_numpy(arrays["rot"]).T + torch.from_numpy(arrays["trans"]).T
    matches = mutual_matches(warped, torch.from_numpy(arrays["target_coarse"]), sizes["gt_match_radius"])
    assert {tuple(m) for m in matches.tolist()} == {tuple(m) for m in arrays["gt_matches"].T.tolist()}
    matches = torch.nn.functional.pad(matches, (1, 0))
    np.testing.assert_allclose(focal_loss(output.confidence, matches), arrays["loss_focal_final"], rtol=1e-4)
    total = total_loss(output, matches, source[None], warped[None], warping_weight=0.0)
    np.testing.assert_allclose(total, arrays["loss_total_motion0.1"], rtol=1e-4)


def test_our_own_pyramid_gives_the_same_points_and_confidences(recorded: tuple) -> None:
    arrays = recorded[0]
    network, _ = network_of(recorded, "reposition")
    shape = network.config.pyramid
    parts = [
        build_pyramid(torch.from_numpy(arrays[f"{side}_points"]), shape, gridded=True) for side in ("source", "target")
    ]
    stacked = stack_pyramids(parts)
    for part, side in zip(parts, ("source", "target"), strict=True):
        ours = part.points[2].numpy()
        theirs = arrays[f"{side}_coarse"]
        distance = np.linalg.norm(ours[:, None] - theirs[None], axis=-1)
        assert ours.shape == theirs.shape
        assert distance.min(0).max() < 1e-5
        assert distance.min(1).max() < 1e-5
    with torch.no_grad():
        features, _ = network.encode(stacked)
        confidence = network.match(*split_pairs(features, stacked)).confidence[0]
    difference = np.sort(confidence.numpy().ravel()) - np.sort(arrays["reposition/confidence"].ravel())
    assert np.abs(difference).max() < 1e-3
