# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""From two sets of features to a matrix of confidences, and from that to matches."""

import torch
from torch import Tensor, nn

from lepard_ros.network.config import LepardConfig
from lepard_ros.network.position import PositionCode
from lepard_ros.network.precision import at_least_float


class Matching(nn.Module):
    """Position-aware matching by dual softmax or by Sinkhorn. Both clouds share one projection."""

    def __init__(self, config: LepardConfig) -> None:
        super().__init__()
        self.config = config
        self.src_proj = nn.Linear(config.feature_dim, config.feature_dim, bias=False)
        if config.matching == "sinkhorn":
            self.bin_score = nn.Parameter(torch.tensor(1.0))

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        x_code: PositionCode | None,
        y_code: PositionCode | None,
        x_mask: Tensor,
        y_mask: Tensor,
    ) -> Tensor:
        """x: (B, n, d), y: (B, m, d), masks (B, n), (B, m) of the real points. Returns confidences (B, n, m)."""
        x, y = self.src_proj(x), self.src_proj(y)
        x = x if x_code is None else x_code.apply(x)
        y = y if y_code is None else y_code.apply(y)
        transport = self.config.matching == "sinkhorn"
        scale = 1 / (x.shape[-1] * (1 if transport else self.config.temperature))
        scores = (x * scale) @ y.transpose(1, 2)
        if transport:
            return sinkhorn(scores, self.bin_score, self.config.sinkhorn_iterations, x_mask, y_mask)
        return dual_softmax(scores, x_mask, y_mask)


def dual_softmax(scores: Tensor, x_mask: Tensor, y_mask: Tensor) -> Tensor:
    """Softmax over the rows times softmax over the columns, (B, n, m); padded entries get 0."""
    scores = at_least_float(scores)
    valid = x_mask[:, :, None] & y_mask[:, None]
    if not bool(valid.all()):
        scores = scores.masked_fill(~valid, -1e9)
        return scores.softmax(1) * scores.softmax(2) * valid
    return scores.softmax(1) * scores.softmax(2)


def sinkhorn(scores: Tensor, bin_score: Tensor, iterations: int, x_mask: Tensor, y_mask: Tensor) -> Tensor:
    """Optimal transport with an extra row and column for points without a match, in log space: (B, n, m)."""
    scores = at_least_float(scores)
    n, m = x_mask.sum(1).to(scores), y_mask.sum(1).to(scores)
    valid = x_mask[:, :, None] & y_mask[:, None]
    rows, columns = scores.shape[1:]
    couplings = scores.masked_fill(~valid, -1e9)
    couplings = torch.cat([couplings, bin_score.expand(len(scores), rows, 1)], dim=2)
    couplings = torch.cat([couplings, bin_score.expand(len(scores), 1, columns + 1)], dim=1)
    norm = -(n + m).log()[:, None]
    log_mu = torch.cat([norm.expand(-1, rows).masked_fill(~x_mask, -1e9), m.log()[:, None] + norm], dim=1)
    log_nu = torch.cat([norm.expand(-1, columns).masked_fill(~y_mask, -1e9), n.log()[:, None] + norm], dim=1)
    u, v = torch.zeros_like(log_mu), torch.zeros_like(log_nu)
    for _ in range(iterations):
        u = log_mu - torch.logsumexp(couplings + v[:, None], dim=2)
        v = log_nu - torch.logsumexp(couplings + u[:, :, None], dim=1)
    plan = (couplings + u[:, :, None] + v[:, None] - norm[:, :, None]).exp()
    return plan[:, :rows, :columns] * valid


def select_matches(confidence: Tensor, threshold: float, mutual: bool) -> Tensor:
    """Indices (K, 3) of batch, source, target where the confidence exceeds the threshold (and is mutually the best)."""
    chosen = confidence > threshold
    if mutual:
        best = (confidence == confidence.amax(2, keepdim=True)) & (confidence == confidence.amax(1, keepdim=True))
        chosen &= best
    return chosen.nonzero()
