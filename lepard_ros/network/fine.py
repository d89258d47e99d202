# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Matching of fine points over whole clouds, by descriptors and optionally guided by coarse matches."""

import torch
from torch import Tensor, nn

from lepard_ros.cloud.pyramid import Pyramid
from lepard_ros.network.config import MATCH_LEVEL
from lepard_ros.network.workspace import at_once, product, scratch_memory

# Minimum confidence of a pair of coarse points: fine matches must remain possible where the coarse ones are wrong.
FLOOR = 1e-5


def owner_of_fine(pyramid: Pyramid) -> Tensor:
    """The coarse point that each fine point belongs to, by way of the levels between: (N_0,), N_2 for none."""
    owner = pyramid.upsamples[0]
    for level in range(1, MATCH_LEVEL):
        above = torch.nn.functional.pad(pyramid.upsamples[level], (0, 1), value=len(pyramid.points[level + 1]))
        owner = above[owner]
    return owner


def coarse_prior(confidence: Tensor, guidance: Tensor) -> Tensor:
    """Prior from coarse confidences (n, m) for the scores of fine points, (n + 1, m + 1).

    The last row and column are for fine points without a coarse one.
    """
    return guidance * torch.nn.functional.pad(confidence, (0, 1, 0, 1)).clamp(min=FLOOR).log()


class FineMatching(nn.Module):
    """The scale of descriptor products, the weight of the coarse prior, and the score of matching nothing, if any."""

    def __init__(self, dim: int, dustbin: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0 / dim**0.5))
        self.guidance = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.tensor(FIRST_NOTHING)) if dustbin else None


# The score of matching nothing before training. The best scores of descriptors trained without it have a median of 8 to
# 11, and their matches are best ordered with 16 to 18.
FIRST_NOTHING = 16.0
# Rows of the score table that are computed at once: few, so that they stay in the cache.
CHUNK = 128
# Columns per block: the block maximum is found first, because `max` with an index takes 15 times as long.
BLOCK = 64


@scratch_memory()
def best_partners(
    x: Tensor,
    y: Tensor,
    prior: Tensor | None = None,
    rows: Tensor | None = None,
    columns: Tensor | None = None,
    nothing: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best match of each point (a,), its confidence (a,), and whether it is mutual (a,).

    x: (a, c), scaled, and y: (c, b) features. prior: (n + 1, m + 1) from `coarse_prior`; rows: (a,) and columns: (b,)
    are the coarse points of the fine ones. nothing: score of a point without any partner, which lowers all confidences.
    A match that is not mutual loses confidence by the difference to the better one.
    """
    partners, bests, totals = [], [], []
    count = y.shape[1]
    highest = x.new_full((count,), -torch.inf)
    # Pad to whole blocks of columns by repeating the last one; the first occurrence always wins.
    padding = y[:, -1:].expand(-1, -count % BLOCK)
    y = torch.cat([y, padding], dim=1)
    if columns is not None:
        columns = torch.cat([columns, columns[-1:].expand(-count % BLOCK)])
    size = at_once(x, CHUNK)
    for start in range(0, len(x), size):
        part = x[start : start + size]
        scores = product("scores", part, y)
        if prior is not None and rows is not None and columns is not None:
            scores += prior[rows[start : start + size]].index_select(1, columns)
        best, partner = _largest(scores)
        scores = scores[:, :count]
        highest = torch.maximum(highest, scores.amax(0))
        totals.append(scores.sub_(best[:, None]).exp_().sum(1))
        bests.append(best)
        partners.append(partner)
    partner, best = torch.cat(partners), torch.cat(bests)
    total = torch.cat(totals)
    if nothing is not None:
        total = total + (nothing - best).exp()
    return partner, (best - highest[partner]).exp() / total, best == highest[partner]


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row and its first index, (a,) each; scores: (a, b) with b a multiple of BLOCK."""
    blocks = scores.view(len(scores), -1, BLOCK)
    best, block = blocks.amax(2).max(1)
    within = blocks[torch.arange(len(scores), device=scores.device), block].argmax(1)
    return best, block * BLOCK + within
