# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's losses, and the loss of the fine descriptors."""

import torch
from torch import Tensor

from lepard_ros.network.lepard import LepardOutput
from lepard_ros.network.matching import select_matches
from lepard_ros.network.procrustes import RigidFit

ALPHA, GAMMA = 0.25, 2.0
CLAMP = 1e-6


def focal_loss(confidence: Tensor, matches: Tensor) -> Tensor:
    """Focal matching loss on the true matches of a dual softmax.

    confidence: (B, n, m); matches: (K, 3) batch, source and target indices. The mean over all matches.
    """
    c = confidence[tuple(matches.T)].clamp(CLAMP, 1 - CLAMP)
    return (-ALPHA * (1 - c) ** GAMMA * c.log()).sum() / max(1, len(matches))


def focal_loss_sinkhorn(confidence: Tensor, matches: Tensor) -> Tensor:
    """The same for Sinkhorn, where the confidence of wrong pairs must also fall; separate means."""
    c = confidence.clamp(CLAMP, 1 - CLAMP)
    right = torch.zeros_like(c, dtype=torch.bool)
    right[tuple(matches.T)] = True
    positive = -ALPHA * (1 - c[right]) ** GAMMA * c[right].log()
    negative = -ALPHA * c[~right] ** GAMMA * (1 - c[~right]).log()
    return positive.sum() / max(1, len(positive)) + negative.sum() / max(1, len(negative))


def warping_loss(fit: RigidFit, source: Tensor, warped: Tensor, matches: Tensor) -> Tensor:
    """Error of the rigid fit at the overlapping source points.

    source, warped: (B, n, 3); matches: (K, 3). L1 over xyz, mean over the source points of true matches.
    """
    moved = source @ fit.rotation.transpose(1, 2) + fit.translation.transpose(1, 2)
    batch, index = torch.unique(matches[:, :2], dim=0).T
    return (moved - warped)[batch, index].abs().sum(-1).mean()


def total_loss(
    output: LepardOutput,
    matches: Tensor,
    source: Tensor,
    warped: Tensor,
    warping_weight: float,
    sinkhorn: bool = False,
    gate: float = 0.0,
) -> Tensor:
    """Matching (and warping) loss of every TMP block. source, warped: (B, n, 3); matches: (K, 3).

    gate: the warping loss of a block is used once the block finds more than this share of the true matches.
    """
    focal = focal_loss_sinkhorn if sinkhorn else focal_loss
    stages = [(r.confidence, r.fit) for r in output.repositionings] + [(output.confidence, output.fit)]
    loss = torch.stack([focal(confidence, matches) for confidence, _ in stages]).sum()
    if warping_weight > 0 and len(matches):
        open_gates = [fit for confidence, fit in stages if not gate or found_share(confidence, matches) > gate]
        for fit in open_gates:
            loss = loss + warping_weight * warping_loss(fit, source, warped, matches)
    return loss


def rejection_loss(output: LepardOutput, wrong: Tensor) -> Tensor:
    """Mean of -ALPHA log(1 - confidence) over wrong matches (K, 2) of a single pair, summed over the blocks."""
    stages = [r.confidence for r in output.repositionings] + [output.confidence]
    confident = torch.stack([confidence[0][tuple(wrong.T)] for confidence in stages])
    return -ALPHA * (1 - confident.clamp(max=1 - CLAMP)).log().sum() / max(1, len(wrong))


def found_share(confidence: Tensor, matches: Tensor, threshold: float = 0.2) -> float:
    """The share of the true matches (K, 3) that are mutually the best, and above a confidence: (B, n, m)."""
    found = torch.zeros_like(confidence, dtype=torch.bool)
    found[tuple(select_matches(confidence.detach(), threshold, mutual=True).T)] = True
    return float(found[tuple(matches.T)].float().mean())


def descriptor_loss(
    scores: Tensor,
    partner: Tensor,
    places: Tensor,
    radius: float,
    decoys: Tensor | None = None,
    nothing: Tensor | None = None,
) -> Tensor:
    """Contrastive loss of K fine points against all M points of the other cloud.

    scores: (K, M); partner: (K,) indices; places: (M, 3). Points within `radius` metres of the true partner count
    neither as positives nor as negatives. decoys: (K, D) scores with points that are always negatives. nothing: score
    of no partner, another negative.
    """
    near = torch.cdist(places[partner], places) < radius
    near[torch.arange(len(partner), device=partner.device), partner] = False
    scores = scores.masked_fill(near, float("-inf"))
    others = [] if decoys is None else [decoys]
    if nothing is not None:
        others.append(nothing.expand(len(scores), 1))
    return torch.nn.functional.cross_entropy(torch.cat([scores, *others], 1) if others else scores, partner)


def unmatched_loss(scores: Tensor, nothing: Tensor) -> Tensor:
    """Cross entropy of K points without a partner: their scores (K, M) must stay below that of no partner."""
    return torch.nn.functional.softplus(scores.logsumexp(1) - nothing).mean()
