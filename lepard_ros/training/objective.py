# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The loss of a batch of pairs, and the quality of its matches."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.spatial.transform import Rotation
from torch import Tensor

from lepard_ros.cloud.neighbours import radius_neighbours
from lepard_ros.cloud.pyramid import stack_pyramids
from lepard_ros.network.config import MATCH_LEVEL
from lepard_ros.network.fine import FineMatching, coarse_prior
from lepard_ros.network.lepard import CoarseCloud, Lepard, LepardOutput, pad_clouds
from lepard_ros.network.procrustes import RigidFit
from lepard_ros.training.losses import descriptor_loss, rejection_loss, total_loss, unmatched_loss
from lepard_ros.training.samples import Pair, Sample
from lepard_ros.training.truth import mutual_matches

GIVEN_TURN = 0.05  # radians: rotation error of a given motion, per axis


class ObjectiveSettings(NamedTuple):
    """Weights of the losses, and the radius of a true coarse match in coarse cells.

    coarse_weight 0 skips the transformer (half of the time) and trains only the descriptors.
    """

    warping_weight: float = 0.0
    match_radius: float = 0.6
    coarse_weight: float = 1.0
    descriptor_weight: float = 2.0
    guided_weight: float = 0.3
    unmatched_weight: float = 1.0  # of fine points without a partner (needs a dustbin)
    fine_points: int = 256
    coarse_every: int = 1  # the transformer, the most expensive part, runs on every n-th pair of a step
    warping_gate: float = 0.0  # minimum share of true matches found before the warping loss is used
    mirrored_share: float = 0.0  # share of sources whose mirror image provides decoys (needs chirality)
    mirrored_weight: float = 0.0  # weight of the transformer's confidence in true matches of the mirror image
    given_share: float = 0.0  # share of rigid pairs that are repositioned by their slightly perturbed true motion


class Objective(NamedTuple):
    """loss: scalar; parts: its terms as floats; output and true matches (K, 3), for evaluating the predicted ones.

    output: None if only descriptors are trained.
    """

    loss: Tensor
    parts: dict[str, float]
    output: LepardOutput | None
    matches: Tensor


class Encoded(NamedTuple):
    """Coarse features (n, d) and fine ones (N, c) of a cloud, and those of its mirror image, or None.

    biases: the attention biases of the cloud, if they are not trained.
    """

    coarse: Tensor
    fine: Tensor | None
    mirrored: "Encoded | None" = None
    biases: Sequence[Tensor] | None = None


def encode_pairs(network: Lepard, pairs: list[Pair]) -> list[tuple[Encoded, Encoded]]:
    """Encode both clouds of each pair; all together if the network normalises over the stacked clouds."""
    samples = [sample for pair in pairs for sample in (pair.source, pair.target)]
    if network.config.normalisation != "joint":
        encoded = [Encoded(*network.encode(sample.pyramid, sample.relations)) for sample in samples]
    else:
        stacked = stack_pyramids([sample.pyramid for sample in samples])
        coarse, fine = network.encode(stacked)
        fines = [None] * len(samples) if fine is None else fine.split(stacked.lengths[0])
        both = zip(coarse.split(stacked.lengths[MATCH_LEVEL]), fines, strict=True)
        encoded = [Encoded(*features) for features in both]
    return list(zip(encoded[::2], encoded[1::2], strict=True))


class SharedEncodings:
    """Encodes every cloud once, however many pairs it is in: encoding is most of the work of a pair.

    The losses use detached copies, one pair after the other; `backward` then propagates their accumulated gradients
    through the backbone, once per cloud.
    """

    def __init__(self, network: Lepard, pairs: list[Pair], mirrored: list[Sample]) -> None:
        """mirrored: the sources whose mirror image is encoded as well, once for all their pairs."""
        self.made: list[Tensor] = []
        self.copies: list[Tensor] = []
        samples = {id(sample): sample for pair in pairs for sample in (pair.source, pair.target)}
        self.encoded = {key: self._encode(network, sample) for key, sample in samples.items()}
        for source in mirrored:
            image = self._encode(network, source.mirrored())
            self.encoded[id(source)] = self.encoded[id(source)]._replace(mirrored=image)

    def _encode(self, network: Lepard, sample: Sample) -> Encoded:
        coarse, fine = network.encode(sample.pyramid, sample.relations)
        fine_leaf = None if fine is None else self._leaf(fine)
        return Encoded(self._leaf(coarse), fine_leaf, biases=untrained_biases(network, sample))

    def _leaf(self, made: Tensor) -> Tensor:
        self.made.append(made)
        self.copies.append(made.detach().requires_grad_())
        return self.copies[-1]

    def of(self, pair: Pair) -> tuple[Encoded, Encoded]:
        """The features of a pair's clouds."""
        return self.encoded[id(pair.source)], self.encoded[id(pair.target)]

    def backward(self) -> None:
        """Propagate the gradients of the copies to the network's weights."""
        used = [(made, copy.grad) for made, copy in zip(self.made, self.copies, strict=True) if copy.grad is not None]
        torch.autograd.backward([made for made, _ in used], [gradient for _, gradient in used])


def untrained_biases(network: Lepard, sample: Sample) -> Sequence[Tensor] | None:
    """The attention biases of a cloud if training does not change them: then all of its pairs can use them."""
    bias, pyramid = network.pair_bias, sample.pyramid
    if bias is None or any(weight.requires_grad for weight in bias.parameters()):
        return None
    return bias(pyramid.points[MATCH_LEVEL][None], pyramid.normals[MATCH_LEVEL][None])


def objective(
    network: Lepard,
    pairs: list[Pair],
    settings: ObjectiveSettings,
    seed: int = 0,
    encoded: list[tuple[Encoded, Encoded]] | None = None,
) -> Objective:
    """Encode (unless already done), match, and compare with the ground truth. seed: for sampling fine points."""
    encoded = encoded or encode_pairs(network, pairs)
    radius = settings.match_radius * network.config.coarse_grid
    truths = [mutual_matches(warp_coarse(pair), pair.target.pyramid.points[MATCH_LEVEL], radius) for pair in pairs]
    matches = torch.cat([torch.nn.functional.pad(t, (1, 0), value=b) for b, t in enumerate(truths)])
    terms: dict[str, tuple[float, Tensor]] = {}
    output = None
    if settings.coarse_weight or network.fine_matching is None:
        output, coarse = _coarse_loss(network, pairs, encoded, matches, settings, seed)
        terms["coarse"] = settings.coarse_weight, coarse
    if network.fine_matching is not None:
        fine, hit = _mean_fine_losses(network, pairs, encoded, output, settings, seed)
        terms |= {name: (getattr(settings, f"{name}_weight"), value) for name, value in fine.items()}
    zero = encoded[0][0].coarse.sum() * 0  # a pair without any true match still needs a loss with a gradient
    loss = torch.stack([zero, *(weight * value for weight, value in terms.values())]).sum()
    parts = {name: float(value.detach()) for name, (_, value) in terms.items()}
    if network.fine_matching is not None and hit is not None:
        parts["hit"] = hit
    return Objective(loss, parts, output, matches)


def _coarse_loss(
    network: Lepard,
    pairs: list[Pair],
    encoded: list[tuple[Encoded, Encoded]],
    matches: Tensor,
    settings: ObjectiveSettings,
    seed: int,
) -> tuple[LepardOutput, Tensor]:
    """The transformer's output for the pairs, and its loss over all blocks."""
    source = _batch([pair.source for pair in pairs], [e[0] for e in encoded])
    target = _batch([pair.target for pair in pairs], [e[1] for e in encoded])
    output = network.match(source, target, given_motions(network, pairs, settings.given_share, seed))
    warped = torch.zeros_like(source.points)
    for b, pair in enumerate(pairs):
        warped[b, : len(pair.source.pyramid.points[MATCH_LEVEL])] = warp_coarse(pair)
    sinkhorn = network.config.matching == "sinkhorn"
    weight, gate = settings.warping_weight, settings.warping_gate
    loss = total_loss(output, matches, source.points, warped, weight, sinkhorn, gate)
    if settings.mirrored_weight:
        loss = loss + settings.mirrored_weight * _mirrored_loss(network, pairs, encoded, matches)
    return output, loss


def _mirrored_loss(
    network: Lepard, pairs: list[Pair], encoded: list[tuple[Encoded, Encoded]], matches: Tensor
) -> Tensor:
    """How confidently the transformer matches mirror images of the sources like the sources; mean over the pairs."""
    losses = []
    for b, (pair, (source, target)) in enumerate(zip(pairs, encoded, strict=True)):
        if source.mirrored is None:
            continue
        images = replace(pair.source, pyramid=pair.source.pyramid.mirrored())
        output = network.match(_batch([images], [source.mirrored]), _batch([pair.target], [target]))
        losses.append(rejection_loss(output, matches[matches[:, 0] == b][:, 1:]))
    return torch.stack(losses).sum() / len(pairs) if losses else matches.new_zeros((), dtype=torch.float32)


def given_motions(network: Lepard, pairs: list[Pair], share: float, seed: int) -> RigidFit | None:
    """The true motions of a batch, perturbed by up to one coarse cell and some degrees like a good hypothesis; or None.

    At low overlap the network's own fit is mostly wrong; without this, the later layers would learn to ignore it.
    """
    draw = np.random.default_rng([seed, len(pairs[0].source.pyramid.points[0])])
    if draw.random() >= share or any(pair.flow is not None for pair in pairs):
        return None
    motions = torch.stack([pair.motion for pair in pairs])
    turns = Rotation.from_rotvec(draw.normal(0, GIVEN_TURN, (len(pairs), 3))).as_matrix()
    centre = torch.stack([warp_coarse(pair).mean(0) for pair in pairs])[:, :, None]
    turn = torch.from_numpy(turns).to(motions)
    offset = torch.from_numpy(draw.normal(0, network.config.coarse_grid / 3, (len(pairs), 3, 1))).to(motions)
    translation = turn @ (motions[:, :3, 3:] - centre) + centre + offset
    return RigidFit(turn @ motions[:, :3, :3], translation, motions.new_ones(len(pairs)))


def _mean_fine_losses(
    network: Lepard,
    pairs: list[Pair],
    encoded: list[tuple[Encoded, Encoded]],
    output: LepardOutput | None,
    settings: ObjectiveSettings,
    seed: int,
) -> tuple[dict[str, Tensor], float | None]:
    """The losses of the fine points, and the share with a correct match; empty if no pair overlaps."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for b, (pair, (source, target)) in enumerate(zip(pairs, encoded, strict=True)):
        confidence = None if output is None else output.confidence[b].detach()
        found.append(_fine_losses(network, pair, source, target, confidence, settings.fine_points, generator))
    present = [losses for losses in found if losses is not None]
    if not present:
        return {}, None
    means = {name: torch.stack([losses[name] for losses in present]).mean() for name in present[0]}
    return means, float(means.pop("hit"))


def warp_coarse(pair: Pair) -> Tensor:
    """The coarse source points at their true positions in the target's frame, (n, 3)."""
    return _warp(pair.source.pyramid.points[MATCH_LEVEL], pair.flow, pair.motion)


def _warp(points: Tensor, flow: Tensor | None, motion: Tensor) -> Tensor:
    moved = points if flow is None else points + flow
    return moved @ motion[:3, :3].T + motion[:3, 3]


def _batch(samples: list[Sample], encoded: list[Encoded]) -> CoarseCloud:
    pyramids = [sample.pyramid for sample in samples]
    normals = [p.normals[MATCH_LEVEL] for p in pyramids] if pyramids[0].normals else []
    cloud = pad_clouds([e.coarse for e in encoded], [p.points[MATCH_LEVEL] for p in pyramids], normals)
    return replace(cloud, biases=encoded[0].biases) if len(encoded) == 1 else cloud


def _fine_losses(
    network: Lepard,
    pair: Pair,
    encoded_source: Encoded,
    encoded_target: Encoded,
    confidence: Tensor | None,
    count: int,
    generator: torch.Generator,
) -> dict[str, Tensor] | None:
    """Losses of a sample of fine points with a true match; None if there are hardly any.

    descriptor: both directions. guided: with the coarse confidences (n, m), if given. hit: share of correct matches.
    """
    source, target, matching = pair.source, pair.target, network.fine_matching
    x, y = encoded_source.fine, encoded_target.fine
    assert x is not None and y is not None and matching is not None
    assert source.owners is not None and target.owners is not None
    warped = _warp(source.pyramid.points[0], pair.fine_flow, pair.motion)
    places = target.pyramid.points[0]
    chosen = torch.randperm(len(warped), generator=generator)[: 4 * count].to(warped.device)
    nearest = radius_neighbours(warped[chosen], places, network.config.grid, 1)[:, 0].to(chosen.device)
    alone = chosen[nearest == len(places)][:count]
    kept = (nearest < len(places)).nonzero()[:count, 0]
    if len(kept) < 16:
        return None
    chosen, nearest = chosen[kept], nearest[kept]
    radius = 3 * network.config.grid
    scores = x[chosen] @ y.T * matching.scale
    forth = descriptor_loss(scores, nearest, places, radius, nothing=matching.nothing)
    # A point must also prefer its true match to the mirrored source points.
    image = encoded_source.mirrored
    decoys = None if image is None or image.fine is None else y[nearest] @ image.fine.T * matching.scale
    back = descriptor_loss(y[nearest] @ x.T * matching.scale, chosen, warped, radius, decoys, matching.nothing)
    hit = ((places[scores.detach().argmax(1)] - warped[chosen]).norm(dim=1) < radius).float().mean()
    losses = {"descriptor": (forth + back) / 2, "hit": hit}
    if matching.nothing is not None:
        losses["unmatched"] = _unmatched(x, warped, alone, y, places, radius, matching)
    if confidence is not None:
        # The guided loss trains the weight of the guidance, and descriptors for the remaining ambiguity.
        confidence = confidence[: len(source.pyramid.points[MATCH_LEVEL]), : len(target.pyramid.points[MATCH_LEVEL])]
        prior = coarse_prior(confidence, matching.guidance)[source.owners[chosen]][:, target.owners]
        losses["guided"] = descriptor_loss(scores + prior, nearest, places, radius)
    return losses


def _unmatched(
    x: Tensor, warped: Tensor, alone: Tensor, y: Tensor, places: Tensor, radius: float, matching: FineMatching
) -> Tensor:
    """Loss of the source points `alone` that have no target point within `radius` metres."""
    partner = radius_neighbours(warped[alone], places, radius, 1)[:, 0].to(alone.device)
    alone = alone[partner == len(places)]
    if not len(alone):
        return x.new_zeros(())
    assert matching.nothing is not None
    return unmatched_loss(x[alone] @ y.T * matching.scale, matching.nothing)


class MatchQuality(NamedTuple):
    """inlier_ratio of the predicted matches, recall of the true ones, error of the rigid fit in degrees and metres."""

    inlier_ratio: float
    recall: float
    rotation_error: float
    translation_error: float


@torch.no_grad()
def match_quality(network: Lepard, pair: Pair, result: Objective, item: int, radius: float) -> MatchQuality:
    """Quality of the coarse matches of pair `item` of a batch; radius: maximum error in metres of a correct match."""
    assert result.output is not None
    warped, target = warp_coarse(pair), pair.target.pyramid.points[MATCH_LEVEL]
    confidence = result.output.confidence[item, : len(warped), : len(target)]
    best, index = confidence.max(1)
    # As many as there are true matches, or a quarter of the points: the input of a robust estimator.
    chosen = best.topk(min(len(best), max(16, len(best) // 4))).indices
    right = (warped[chosen] - target[index[chosen]]).norm(dim=1) < radius
    truth = result.matches[result.matches[:, 0] == item]
    hit = (warped[truth[:, 1]] - target[index[truth[:, 1]]]).norm(dim=1) < radius
    fit = result.output.fit
    turn = fit.rotation[item].T @ pair.motion[:3, :3]
    angle = torch.rad2deg(torch.acos(((turn.trace() - 1) / 2).clamp(-1, 1)))
    offset = (fit.translation[item][:, 0] - pair.motion[:3, 3]).norm()
    return MatchQuality(
        float(right.float().mean()), float(hit.float().mean()) if len(truth) else 0.0, float(angle), float(offset)
    )
