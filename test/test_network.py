# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The network proves itself: identities of the code, gradients, padding, permutations, invariances."""

import os
import platform
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from torch.autograd import gradcheck

from lepard_ros.cloud.pyramid import Pyramid, build_pyramid, stack_pyramids
from lepard_ros.demo.processes import resident_megabytes
from lepard_ros.errors import InputError
from lepard_ros.network.allocator import keep_freed_memory, release_freed_memory
from lepard_ros.network.attention import AttentionLayer, Handedness, PairBias
from lepard_ros.network.backbone import Normalisation, interpolate, upsample
from lepard_ros.network.config import PRESETS, SMALL_RIGID, LepardConfig
from lepard_ros.network.convolution import InvariantConvolution, KernelPointConvolution
from lepard_ros.network.fine import best_partners, coarse_prior
from lepard_ros.network.lepard import Lepard, pad_clouds, split_pairs
from lepard_ros.network.matching import dual_softmax, select_matches, sinkhorn
from lepard_ros.network.position import RotaryCode
from lepard_ros.network.procrustes import RigidFit, largest, robust_procrustes, soft_procrustes, weighted_procrustes
from lepard_ros.network.relation import Relation
from lepard_ros.network.weights import grown, with_further_blocks
from lepard_ros.network.workspace import scratch_table

TINY_PAPER = LepardConfig(
    grid=0.1, width=16, feature_dim=48, neighbour_limits=(12, 12, 12, 12), max_condition_number=1e9
)
TINY_OURS = LepardConfig.from_dict(
    {**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 48, "grid": 0.1, "fine_dim": 16}
)
TINY_SMOOTH = replace(TINY_OURS, decoder="smooth", bottleneck=2)


def random(*shape: int, seed: int = 0, double: bool = False) -> torch.Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values if double else values.float()


def wavy_cloud(seed: int, count: int = 1500) -> torch.Tensor:
    """A bumpy sheet of 2 x 2 m, a metre before the sensor."""
    generator = torch.Generator().manual_seed(seed)
    xy = torch.rand(count, 2, generator=generator) * 2
    z = 1 + 0.2 * torch.sin(4 * xy[:, :1] + seed) + 0.2 * torch.cos(5 * xy[:, 1:])
    return torch.cat([xy, z], dim=1)


def network_of(config: LepardConfig) -> Lepard:
    torch.manual_seed(0)
    return Lepard(config).eval()


def pyramids(config: LepardConfig, *seeds: int, count: int = 1500) -> list[Pyramid]:
    return [build_pyramid(wavy_cloud(seed, count), config.pyramid) for seed in seeds]


def test_rotary_code_shows_only_relative_positions() -> None:
    """The paper's equation 1."""
    x, y, p, q = random(5, 48), random(5, 48, seed=1), random(5, 3, seed=2), random(5, 3, seed=3)
    left = (RotaryCode(p, 48).apply(x) * RotaryCode(q, 48).apply(y)).sum(-1)
    right = (x * RotaryCode(q - p, 48).apply(y)).sum(-1)
    torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def test_rotary_code_is_orthogonal() -> None:
    x, p = random(7, 96), random(7, 3, seed=1) * 10
    torch.testing.assert_close(RotaryCode(p, 96).apply(x).norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("seed", range(5))
def test_procrustes_equals_scipy(seed: int) -> None:
    x, weights = random(1, 30, 3, seed=seed, double=True), random(1, 30, seed=seed + 50, double=True).abs()
    turn = torch.from_numpy(Rotation.random(random_state=seed).as_matrix())
    y = x @ turn.T + torch.tensor([0.3, -2, 1.0]) + 0.05 * random(1, 30, 3, seed=seed + 9, double=True)
    fit = weighted_procrustes(x, y, weights)
    w = weights[0].numpy() / weights.sum().item()
    a, b = (v[0].numpy() - (w[:, None] * v[0].numpy()).sum(0) for v in (x, y))
    expected, _ = Rotation.align_vectors(b, a, weights=w)
    np.testing.assert_allclose(fit.rotation[0].numpy(), expected.as_matrix(), atol=1e-7)
    assert torch.linalg.det(fit.rotation[0]) > 0


def test_procrustes_of_collinear_points_has_an_infinite_condition() -> None:
    line = torch.linspace(0, 1, 20)[None, :, None] * torch.tensor([1.0, 2, 3])
    assert weighted_procrustes(line, line, torch.ones(1, 20)).condition > 1e4


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_the_gradient_of_an_undetermined_fit_is_finite(weight: float) -> None:
    corners = torch.cat([torch.eye(3), -torch.eye(3)])[None]  # all singular values are equal
    weights = torch.full((1, 6), weight, requires_grad=True)
    weighted_procrustes(corners, corners, weights).rotation.square().sum().backward()
    assert weights.grad is not None and weights.grad.isfinite().all()


@pytest.mark.parametrize(("count", "k"), [(64, 3), (5000, 1), (5000, 20), (5000, 60), (5037, 12), (7, 7)])
def test_the_largest_values_are_found_without_sorting_all(count: int, k: int) -> None:
    values = random(count)
    values[-3:] += 9  # beyond the last whole block
    assert largest(values, k).tolist() == values.topk(k).indices.tolist()


def test_robust_procrustes_ignores_wrong_matches() -> None:
    points, turn = random(1, 60, 3), torch.from_numpy(Rotation.random(random_state=1).as_matrix()).float()
    target = points @ turn.T + 1.0
    confidence = torch.diag_embed(torch.full((1, 60), 0.5))
    wrong = torch.randperm(60, generator=torch.Generator().manual_seed(2))
    confidence[0, torch.arange(0, 60, 2), wrong[::2]] = 0.6  # as many confident wrong ones
    counts = torch.tensor([60])
    robust = robust_procrustes(confidence, points, target, counts, scale=0.2)
    soft = soft_procrustes(confidence, points, target, counts)
    torch.testing.assert_close(robust.rotation[0], turn, atol=1e-3, rtol=0)
    assert (soft.rotation[0] - turn).abs().max() > 0.05


@pytest.mark.parametrize(("kernel", "kernels"), [("xyz", 15), ("invariant", 18), ("invariant", 20)])
def test_gradients_of_the_convolution(kernel: str, kernels: int) -> None:
    points, normals = (
        random(20, 3, double=True),
        torch.nn.functional.normalize(random(20, 3, seed=1, double=True), dim=1),
    )
    index = torch.randint(0, 21, (20, 6), generator=torch.Generator().manual_seed(2))
    layer = (
        KernelPointConvolution(3, 2, 15, 2.0, 1.5) if kernel == "xyz" else InvariantConvolution(3, 2, kernels)
    ).double()
    relation = Relation(points, points, index, 2.5, normals, normals, chirality=kernels == 20)
    features = random(20, 3, seed=3, double=True).abs().requires_grad_()
    assert gradcheck(
        lambda f, w: _with_weights(layer, w, f, relation), (features, layer.weights.detach().requires_grad_())
    )


def _with_weights(layer: torch.nn.Module, weights: torch.Tensor, features: torch.Tensor, relation: Relation):
    return torch.func.functional_call(layer, {"weights": weights}, (features, relation))


def test_the_invariant_operator_of_a_constant_is_its_histogram() -> None:
    pyramid = pyramids(TINY_OURS, 0)[0]
    relation = network_of(TINY_OURS).backbone.relations(pyramid)[0][0]
    ones, bag = torch.ones(len(pyramid.points[0]), 1), relation.invariant_bag()
    layer = InvariantConvolution(1, 4, bag.kernels)
    histogram = torch.zeros(len(ones), bag.kernels).scatter_add_(1, bag.columns.long() % bag.kernels, bag.weights)
    torch.testing.assert_close(layer(ones, relation), histogram @ layer.weights[:, 0])


def test_transposed_lists_are_the_same_by_counting_and_by_sorting() -> None:
    relation = network_of(TINY_OURS).backbone.relations(pyramids(TINY_OURS, 0)[0])[0][0]
    bag, gradient = relation.invariant_bag(), random(len(relation.queries), 6)
    sums = [
        torch.nn.functional.embedding_bag(queries, gradient, offsets, per_sample_weights=weights, mode="sum")
        for queries, offsets, weights in (bag._count_columns(), bag._sort_columns())
    ]
    dense = torch.zeros(bag.supports * bag.kernels, 6).index_add_(
        0,
        bag.columns.flatten().long(),
        bag.weights.flatten()[:, None] * gradient.repeat_interleave(bag.columns.shape[1], 0),
    )
    torch.testing.assert_close(sums[0], dense, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sums[1], dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("config", [TINY_PAPER, TINY_OURS, TINY_SMOOTH], ids=["paper", "ours", "smooth"])
def test_memory_that_is_used_again_changes_no_result(config: LepardConfig) -> None:
    network, (first, second) = network_of(config), pyramids(config, 0, 1)
    recorded = network.encode(first)[0].detach()
    with torch.no_grad():
        relations = network.backbone.relations(first)
        features = network.backbone(first, relations)[0]
        network.backbone(first, relations)  # in the same memory, and another cloud in what was given back
        network.encode(second)
        assert scratch_table("rows", features, 2) is None  # outside of the forward pass there is no such memory
    torch.testing.assert_close(features, recorded, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("matching", ["dual_softmax", "sinkhorn"])
@pytest.mark.parametrize("config", [TINY_PAPER, TINY_OURS, TINY_SMOOTH], ids=["paper", "ours", "smooth"])
def test_mixed_precision_gives_nearly_the_same(config: LepardConfig, matching: str) -> None:
    """What runs on CUDA under autocast: the same lines, with the same short floats, on the processor."""
    config = replace(config, matching=matching)
    network, stacked = network_of(config), stack_pyramids(pyramids(config, 0, 1))
    with torch.no_grad():
        exact = network(stacked)
        with torch.autocast("cpu", dtype=torch.float16):
            mixed = network(stacked)
            features, fine = network.encode(stacked)
    assert features.dtype == torch.float16 and (fine is None or fine.dtype == torch.float16)
    assert mixed.confidence.dtype == mixed.fit.rotation.dtype == torch.float32
    likeness = torch.nn.functional.cosine_similarity(mixed.confidence.flatten(), exact.confidence.flatten(), dim=0)
    assert likeness > 0.98


def test_the_joint_norm_is_that_of_all_points_together() -> None:
    x = random(700, 24) * random(1, 24, seed=1) + 3.0
    expected = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(Normalisation(joint=True)(x.clone(), [300, 400]), expected, atol=1e-5, rtol=1e-4)


def test_gradients_of_attention_and_pair_bias() -> None:
    torch.manual_seed(0)
    layer, bias = AttentionLayer(24, 4).double(), PairBias(1, 4, 0.2).double()
    x, y = random(1, 3, 24, double=True).requires_grad_(), random(1, 4, 24, seed=1, double=True).requires_grad_()
    codes = RotaryCode(random(1, 3, 3, double=True), 24), RotaryCode(random(1, 4, 3, seed=1, double=True), 24)
    assert gradcheck(lambda a, b: layer(a, b, *codes, None), (x, y))
    normals = torch.nn.functional.normalize(random(1, 3, 3, seed=5, double=True), dim=-1)
    pair = bias(random(1, 3, 3, seed=4, double=True), normals)[0]
    assert gradcheck(lambda a: layer(a, a, None, None, pair.detach()), (x,))


def test_gradients_of_matching_and_procrustes() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)
    scores = random(1, 4, 5, double=True).requires_grad_()
    # dual_softmax works in float32 on purpose: compare it with its definition instead of finite differences.
    expected = torch.autograd.grad((scores.softmax(1) * scores.softmax(2)).square().sum(), scores)[0]
    actual = torch.autograd.grad(dual_softmax(scores, *mask).square().sum(), scores)[0]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
    bin_score = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda s, b: sinkhorn(s, b, 3, *mask), (scores, bin_score))
    x, y = random(1, 6, 3, double=True), random(1, 6, 3, seed=1, double=True)
    weights = random(1, 6, seed=2, double=True).abs().requires_grad_()
    assert gradcheck(lambda w: weighted_procrustes(x, y, w)[:2], (weights,))


def test_sinkhorn_gives_every_point_its_share() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 5, dtype=torch.bool)
    plan = sinkhorn(random(1, 4, 5), torch.tensor(1.0), 100, *mask)
    assert (plan.sum(1) <= 1 + 1e-4).all()
    assert (plan.sum(2) <= 1 + 1e-4).all()


@pytest.mark.parametrize("config", [TINY_PAPER, TINY_OURS, TINY_SMOOTH], ids=["paper", "ours", "smooth"])
def test_every_parameter_gets_a_gradient(config: LepardConfig) -> None:
    network = network_of(config).train()
    stacked = stack_pyramids(pyramids(config, 0, 1))
    coarse, fine = network.encode(stacked)
    output = network.match(*split_pairs(coarse, stacked))
    loss = output.confidence.square().sum() + sum(r.confidence.square().sum() for r in output.repositionings)
    if fine is not None and network.fine_matching is not None:
        prior = coarse_prior(output.confidence[0].detach(), network.fine_matching.guidance)
        loss = loss + (fine[:8] @ fine[8:16].T * network.fine_matching.scale).square().sum() + prior.sum()
    loss.backward()
    missing = [name for name, p in network.named_parameters() if p.grad is None or not torch.isfinite(p.grad).all()]
    assert missing == []


@pytest.mark.parametrize("config", [TINY_OURS, TINY_PAPER], ids=["ours", "paper"])
@pytest.mark.parametrize("matching", ["dual_softmax", "sinkhorn"])
def test_a_padded_batch_equals_pairs_alone(config: LepardConfig, matching: str) -> None:
    network = network_of(LepardConfig.from_dict({**config.to_dict(), "matching": matching, "normalisation": "cloud"}))
    parts = [pyramids(config, 0, count=700)[0], *pyramids(config, 1, 2), pyramids(config, 3, count=400)[0]]
    with torch.no_grad():
        stacked = stack_pyramids(parts)
        together = network.match(*split_pairs(network.encode(stacked)[0], stacked))
        for number in (0, 1):
            pair = stack_pyramids(parts[2 * number : 2 * number + 2])
            alone = network.match(*split_pairs(network.encode(pair)[0], pair))
            n, m = alone.confidence.shape[1:]
            torch.testing.assert_close(together.confidence[number, :n, :m], alone.confidence[0], atol=2e-5, rtol=1e-3)
            assert together.confidence[number, n:].sum() == 0
            torch.testing.assert_close(together.fit.rotation[number], alone.fit.rotation[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("config", [TINY_PAPER, TINY_OURS, TINY_SMOOTH], ids=["paper", "ours", "smooth"])
def test_several_motions_of_a_pair_equal_each_alone(config: LepardConfig) -> None:
    network = network_of(config)
    stacked = stack_pyramids(pyramids(config, 0, 1))
    pair = split_pairs(network.encode(stacked)[0], stacked)
    turns = torch.from_numpy(Rotation.from_rotvec([[0, 0, 0.2], [0, 1.0, 0], [2.0, 0, 0]]).as_matrix()).float()
    given = RigidFit(turns, random(3, 3, 1), torch.ones(3))
    together = network.match(*pair, given).confidence
    alone = [network.match(*pair, RigidFit(*(part[k : k + 1] for part in given))).confidence[0] for k in range(3)]
    torch.testing.assert_close(together, torch.stack(alone))
    assert not torch.allclose(together[0], together[1])


def test_matches_do_without_a_final_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    network, pair = network_of(TINY_OURS), pyramids(TINY_OURS, 0, 1)
    stacked = stack_pyramids(pair)
    clouds = split_pairs(network.encode(stacked)[0], stacked)
    fits: list[RigidFit] = []
    fit = network.rigid_fit
    monkeypatch.setattr(network, "rigid_fit", lambda *args, **kinds: fits.append(fit(*args, **kinds)) or fits[-1])
    output = network.match(*clouds)
    assert len(fits) == TINY_OURS.layers.count("positioning")
    assert output.fit is output.fit
    assert len(fits) == TINY_OURS.layers.count("positioning") + 1


def test_order_of_points_does_not_matter() -> None:
    network, points = network_of(TINY_OURS), wavy_cloud(0)
    shuffled = points[torch.randperm(len(points), generator=torch.Generator().manual_seed(0))]
    features = [network.encode(build_pyramid(p, TINY_OURS.pyramid))[0] for p in (points, shuffled)]
    torch.testing.assert_close(features[0], features[1], atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("config", [TINY_PAPER, TINY_OURS, TINY_SMOOTH], ids=["paper", "ours", "smooth"])
def test_backbone_does_not_see_translations(config: LepardConfig) -> None:
    network, points = network_of(config), wavy_cloud(0)
    shift = torch.tensor([1.6, -3.2, 0.8])  # whole cells of every level
    here = build_pyramid(points, config.pyramid)
    there = build_pyramid(points + shift, config.pyramid, viewpoint=shift)
    torch.testing.assert_close(network.encode(here)[0], network.encode(there)[0], atol=5e-3, rtol=1e-2)


def moved_pyramid(pyramid: Pyramid, matrix: torch.Tensor) -> Pyramid:
    """The same grid points under a rotation or a mirror (3, 3), with their neighbours."""
    points, normals = ([x @ matrix.T for x in level] for level in (pyramid.points, pyramid.normals))
    return replace(pyramid, points=points, normals=normals)


@pytest.mark.parametrize("chirality", [False, True])
def test_only_chirality_sees_a_mirror(chirality: bool) -> None:
    """A mirrored cloud keeps all distances and angles; only the sign of its twists changes."""
    config = replace(TINY_OURS, chirality=chirality)
    network, pyramid = network_of(config), pyramids(config, 0)[0]
    mirrored = moved_pyramid(pyramid, torch.diag(torch.tensor([-1.0, 1.0, 1.0])))
    turned = moved_pyramid(pyramid, torch.from_numpy(Rotation.random(random_state=3).as_matrix()).float())
    with torch.no_grad():
        clouds = [network.encode(p)[0] for p in (pyramid, mirrored, turned)]
        biases = [network.pair_bias(p.points[2][None], p.normals[2][None])[0] for p in (pyramid, mirrored, turned)]
    for original, other, same in (clouds, biases):
        torch.testing.assert_close(original, same, atol=2e-3, rtol=1e-2)
        assert ((original - other).abs().max() > 0.05) == chirality


def test_weights_without_chirality_begin_as_the_same_function_with_it() -> None:
    before, after = network_of(replace(TINY_OURS, chirality=False)), network_of(TINY_OURS)
    after.load_state_dict(grown(before.state_dict(), after.state_dict()))
    stacked = stack_pyramids(pyramids(TINY_OURS, 0, 1))
    with torch.no_grad():
        torch.testing.assert_close(after(stacked).confidence, before(stacked).confidence, atol=1e-5, rtol=1e-4)


def turned_pyramid(pyramid: Pyramid) -> Pyramid:
    """The same cloud in another frame: points and normals turned, neighbours as they were."""
    turn = torch.linalg.qr(random(3, 3, seed=5))[0]
    turn = turn * torch.linalg.det(turn).sign()
    turned = {name: [values @ turn.T for values in getattr(pyramid, name)] for name in ("points", "normals")}
    return replace(pyramid, **turned)


def grown_twin(config: LepardConfig, **larger: Any) -> Lepard:
    """A network of these sizes with larger ones, after a check that it begins as the same function."""
    before, after = network_of(config), network_of(replace(config, **larger))
    after.load_state_dict(grown(before.state_dict(), after.state_dict()))
    (pyramid,) = pyramids(config, 0)
    with torch.no_grad():
        for old, new in zip(before.encode(pyramid), after.encode(pyramid), strict=True):
            torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-4)
    return after


def test_wider_bottlenecks_begin_as_the_same_function() -> None:
    grown_twin(TINY_OURS, bottleneck=2)


def test_context_begins_as_the_same_function_and_is_invariant_to_rotation() -> None:
    after, clouds = grown_twin(TINY_SMOOTH, context=2), pyramids(TINY_SMOOTH, 0, 1)
    with torch.no_grad():
        silent = after.encode(clouds[0])[1]
        assert after.backbone.context is not None
        torch.nn.init.normal_(after.backbone.context.out.weight, std=0.1)
        alone = [after.encode(cloud)[1] for cloud in clouds]
        assert alone[0] is not None and alone[1] is not None
        assert silent is not None and (alone[0] - silent).abs().max() > 0.01  # it has something to say
        together = after.encode(stack_pyramids(clouds))[1]
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-3)
        turned = turned_pyramid(clouds[0])
        torch.testing.assert_close(after.encode(turned)[1], alone[0], atol=1e-3, rtol=1e-2)


def test_a_chiral_context_begins_as_the_same_function_and_sees_a_mirror() -> None:
    plain = replace(TINY_SMOOTH, context=2, chirality=False)
    before, after = network_of(plain), network_of(replace(plain, chiral_context=True))
    for network in (before, after):
        assert network.backbone.context is not None
        torch.nn.init.normal_(network.backbone.context.out.weight, std=0.3)
    after.load_state_dict(grown(before.state_dict(), after.state_dict()))
    (pyramid,) = pyramids(plain, 0)
    with torch.no_grad():
        old, new = (network.encode(pyramid)[1] for network in (before, after))
        assert old is not None and new is not None
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-4)
        torch.nn.init.normal_(after.backbone.context.bias.mlp[0].weight, std=3.0)  # type: ignore[union-attr]
        here, mirrored, turned = (
            after.encode(p)[1] for p in (pyramid, pyramid.mirrored(), turned_pyramid(pyramid.mirrored()))
        )
        blind = [before.encode(p)[1] for p in (pyramid, pyramid.mirrored())]
    assert here is not None and mirrored is not None and blind[0] is not None and blind[1] is not None
    assert (here - mirrored).abs().max() > 0.02
    torch.testing.assert_close(turned, mirrored, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(blind[0], blind[1], atol=2e-3, rtol=1e-2)


def test_handedness_begins_as_the_same_function_sees_a_mirror_and_not_a_rotation() -> None:
    plain = replace(TINY_SMOOTH, context=2, chirality=False)
    after, clouds = grown_twin(plain, handed=True), pyramids(plain, 0, 1)
    with torch.no_grad():
        assert after.backbone.handed is not None
        torch.nn.init.normal_(after.backbone.handed.mlp[2].weight, std=0.3)
        here, mirrored, turned = (
            after.encode(p)[0] for p in (clouds[0], clouds[0].mirrored(), turned_pyramid(clouds[0].mirrored()))
        )
        together, apart = after.encode(stack_pyramids(clouds))[0], after.encode(clouds[1])[0]
    assert (here - mirrored).abs().max() > 0.02
    torch.testing.assert_close(turned, mirrored, atol=2e-3, rtol=1e-2)
    torch.testing.assert_close(together, torch.cat([here, apart]), atol=1e-4, rtol=1e-3)


def test_signed_volumes_change_their_sign_in_a_mirror() -> None:
    module, rng = Handedness(24, 0.1), np.random.default_rng(0)
    x, points, normals = (torch.from_numpy(rng.normal(size=(50, size))).float() for size in (24, 3, 3))
    mirror = torch.tensor([-1.0, 1.0, 1.0])
    with torch.no_grad():
        volumes = module.volumes(x, points, normals)
        flipped = module.volumes(x, points * mirror, normals * mirror)
    assert volumes.shape == (50, 28) and volumes.abs().max() > 0.1
    torch.testing.assert_close(flipped, -volumes, atol=1e-5, rtol=1e-4)


def test_a_further_block_starts_as_a_copy_of_the_last_one() -> None:
    """What was the final matching is the new positioning layer: its confidences are those of the old network."""
    block = ("positioning", "self", "cross")
    layers = (*TINY_OURS.layers, *block)
    before, after = network_of(TINY_OURS), network_of(replace(TINY_OURS, layers=layers))
    weights = with_further_blocks(before.state_dict(), TINY_OURS.layers, layers, TINY_OURS.heads)
    after.load_state_dict(grown(weights, after.state_dict()))
    stacked = stack_pyramids(pyramids(TINY_OURS, 0, 1))
    with torch.no_grad():
        old, new = before(stacked), after(stacked)
    assert len(new.repositionings) == len(old.repositionings) + 1
    torch.testing.assert_close(new.repositionings[-1].confidence, old.confidence, atol=1e-5, rtol=1e-4)
    twice = after.state_dict()
    for number in (5, 6):
        for name in ("q_proj.weight", "mlp.2.weight"):
            assert torch.equal(twice[f"layers.{number}.{name}"], twice[f"layers.{number + 3}.{name}"])
    assert torch.equal(twice["pair_bias.mlp.2.bias"][-4:], twice["pair_bias.mlp.2.bias"][-8:-4])


@pytest.mark.parametrize("further", [("self",), ("positioning", "cross", "self")])
def test_other_further_layers_are_rejected(further: tuple[str, ...]) -> None:
    layers = (*TINY_OURS.layers, *further)
    before, after = network_of(TINY_OURS), network_of(replace(TINY_OURS, layers=layers))
    weights = with_further_blocks(before.state_dict(), TINY_OURS.layers, layers, TINY_OURS.heads)
    with pytest.raises(RuntimeError, match="Missing key"):
        after.load_state_dict(grown(weights, after.state_dict()))


def test_a_smaller_network_is_not_grown() -> None:
    before, after = network_of(replace(TINY_OURS, bottleneck=2)), network_of(TINY_OURS)
    with pytest.raises(RuntimeError, match="size mismatch"):
        after.load_state_dict(grown(before.state_dict(), after.state_dict()))


def test_interpolation_keeps_a_constant_and_meets_the_coarse_points() -> None:
    """Weights add up to one, a missing neighbour has none, and at a coarse point its own features come back."""
    coarser = random(6, 3)
    finer = torch.cat([coarser + 1e-7, random(4, 3, seed=1)])
    index = torch.cdist(finer, coarser).topk(3, largest=False).indices
    index[-1, 1:] = 6
    features = random(6, 5, seed=2)
    torch.testing.assert_close(interpolate(torch.ones(6, 2), index, finer, coarser), torch.ones(10, 2))
    found = interpolate(features, index, finer, coarser)
    torch.testing.assert_close(found[:6], features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[-1:], upsample(features, index[-1:, 0]))


def test_smooth_features_change_less_over_a_cell_border() -> None:
    """What a fine point gets from above: nearest cells jump, interpolated ones do not."""
    x = torch.linspace(0, 3, 200)[:, None]
    finer, coarser = (torch.cat([line, torch.zeros(len(line), 2)], 1) for line in (x, torch.arange(4.0)[:, None]))
    index = torch.cdist(finer, coarser).topk(3, largest=False).indices
    heights = torch.tensor([[0.0], [1.0], [0.0], [1.0]])
    smooth = interpolate(heights, index, finer, coarser).diff(dim=0).abs().max()
    assert smooth < 0.3 * upsample(heights, index[:, 0]).diff(dim=0).abs().max()


@pytest.mark.parametrize("config", [TINY_OURS, TINY_SMOOTH])
def test_stacked_clouds_are_encoded_as_each_alone(config: LepardConfig) -> None:
    network, alone = network_of(config), pyramids(config, 0, 1, count=900)
    stacked = stack_pyramids(alone)
    with torch.no_grad():
        together, single = network.encode(stacked), [network.encode(p) for p in alone]
    for part in (0, 1):
        expected = torch.cat([features[part] for features in single])
        torch.testing.assert_close(together[part], expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("config", [TINY_OURS, TINY_SMOOTH])
def test_invariant_backbone_does_not_see_rotations(config: LepardConfig) -> None:
    """On the same grid points, turned: the grid itself turns with them."""
    network, pyramid = network_of(config), pyramids(config, 0)[0]
    turn = torch.from_numpy(Rotation.random(random_state=3).as_matrix()).float()
    turned = Pyramid(**{**pyramid.__dict__, "points": [p @ turn.T for p in pyramid.points],
                        "normals": [n @ turn.T for n in pyramid.normals]})  # fmt: skip
    torch.testing.assert_close(network.encode(pyramid)[0], network.encode(turned)[0], atol=1e-3, rtol=1e-2)


def test_paper_sizes_have_the_published_number_of_parameters() -> None:
    """35,395,199 used by the reference's forward pass, kernel points among them."""
    with torch.device("meta"):
        network = Lepard(PRESETS["paper_rigid"])
    counted = sum(v.numel() for v in network.state_dict().values())
    assert counted == 35_395_199


def test_refused_repositioning_leaves_the_positions() -> None:
    config = LepardConfig.from_dict({**TINY_PAPER.to_dict(), "max_condition_number": 0.0})
    network, stacked = network_of(config), stack_pyramids(pyramids(config, 0, 1))
    clouds = split_pairs(network.encode(stacked)[0], stacked)
    output = network.match(*clouds)
    assert not output.repositionings[0].applied.any()
    oracle = network.match(*clouds, truth=RigidFit(torch.eye(3)[None], torch.zeros(1, 3, 1), torch.ones(1)))
    torch.testing.assert_close(oracle.confidence, output.confidence)


def test_select_matches() -> None:
    confidence = torch.tensor([[[0.6, 0.2], [0.5, 0.1]]])
    assert select_matches(confidence, 0.15, mutual=False).tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert select_matches(confidence, 0.15, mutual=True).tolist() == [[0, 0, 0]]


def test_best_partners_are_those_of_the_whole_table() -> None:
    """In pieces or at once, guided or not: the row's softmax, less what the column has better."""
    # 90 columns are not a whole number of blocks; the last one, which fills them up, is made the best of some rows.
    x, y, rows, columns = random(150, 8), random(8, 90), torch.arange(150) % 11, torch.arange(90) % 8
    y[:, -1] *= 3
    prior = coarse_prior(random(10, 7).sigmoid(), torch.tensor(0.7))
    for table, guide in ((x @ y, ()), (x @ y + prior[rows][:, columns], (prior, rows, columns))):
        partner, confidence, mutual = best_partners(x, y, *guide)
        assert partner.tolist() == table.argmax(1).tolist()
        best = table.amax(1)
        torch.testing.assert_close(confidence, table.softmax(1).amax(1) * (best - table.amax(0)[partner]).exp())
        assert mutual.tolist() == (table.argmax(0)[partner] == torch.arange(150)).tolist()
        assert 0 < mutual.sum() < 150


def test_a_dustbin_is_another_column_of_the_softmax() -> None:
    x, y, nothing = random(150, 8), random(8, 90), torch.tensor(1.5)
    partner, confidence, _ = best_partners(x, y, nothing=nothing)
    table = x @ y
    share = torch.cat([table, nothing.expand(150, 1)], dim=1).softmax(1)[:, :90].amax(1)
    assert partner.tolist() == table.argmax(1).tolist()
    torch.testing.assert_close(confidence, share * (table.amax(1) - table.amax(0)[partner]).exp())


def test_a_network_grown_by_a_dustbin_has_the_same_features() -> None:
    after = grown_twin(TINY_OURS, dustbin=True)
    assert after.fine_matching is not None and after.fine_matching.nothing is not None
    assert "fine_matching.nothing" not in network_of(TINY_OURS).state_dict()


def test_points_without_a_coarse_point_are_not_guided() -> None:
    prior = coarse_prior(torch.ones(2, 3), torch.tensor(1.0))
    assert prior.shape == (3, 4)
    assert (prior[:2, :3] == 0).all()
    assert (prior[2] < -5).all()
    assert (prior[:, 3] < -5).all()


@pytest.mark.parametrize(
    ("change", "word"),
    [({"kernel": "square"}, "kernel"), ({"feature_dim": 50}, "multiple"), ({"colour": 1}, "colour")],
)
def test_impossible_settings_are_refused(change: dict, word: str) -> None:
    with pytest.raises(InputError, match=word):
        LepardConfig.from_dict({**SMALL_RIGID.to_dict(), **change})


def test_clouds_without_normals_are_padded_too() -> None:
    cloud = pad_clouds([random(2, 4), random(3, 4)], [random(2, 3), random(3, 3)], [])
    assert cloud.normals is None
    assert cloud.mask.tolist() == [[True, True, False], [True, True, True]]


def test_the_bias_of_some_layers_is_part_of_that_of_all() -> None:
    bias = PairBias(layers=3, heads=2, scale=0.2)
    points, normals = random(1, 9, 3), torch.nn.functional.normalize(random(1, 9, 3), dim=-1)
    torch.testing.assert_close(bias(points, normals, slice(1, None)), bias(points, normals)[1:])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_glibc_agrees_to_keep_freed_memory() -> None:
    assert keep_freed_memory()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_freed_memory_between_blocks_in_use_goes_back_to_the_system() -> None:
    keep_freed_memory()
    blocks = [bytearray(b"x") * 2**20 for _ in range(200)]
    del blocks[::2]
    before = resident_megabytes(os.getpid())
    release_freed_memory()
    assert before - resident_megabytes(os.getpid()) > 60
    assert all(block[::4096] == b"x" * 256 for block in blocks)


def test_a_pyramid_without_normals_is_refused_by_a_network_that_reads_them() -> None:
    network = network_of(SMALL_RIGID)
    (pyramid,) = pyramids(SMALL_RIGID, 0)
    with pytest.raises(InputError, match="normals"):
        network.backbone.input_features(replace(pyramid, variation=None))
