"""Fine matching: inside a pair of matched coarse points, which fine point is which."""

import torch
from torch import Tensor, nn

from lepard_ros.cloud.pyramid import Pyramid


def owner_of_fine(pyramid: Pyramid) -> Tensor:
    """The coarse point that each fine point belongs to, by way of the level between: (N_0,)."""
    middle = torch.nn.functional.pad(pyramid.upsamples[1], (0, 1), value=len(pyramid.points[2]))
    return middle[pyramid.upsamples[0]]


def group_points(nearest: Tensor, coarse: int, size: int) -> Tensor:
    """Give every fine point to its nearest coarse point, at most `size` to each.

    nearest: (N,) the coarse point of every fine point (`coarse` if it has none); coarse: how many there are.
    Returns (coarse, size) indices into the fine points, N for an empty place.
    """
    count = len(nearest)
    order = torch.argsort(nearest, stable=True)
    owner = nearest[order]
    population = torch.bincount(owner, minlength=coarse + 1)
    start = population.cumsum(0) - population
    place = torch.arange(count, device=nearest.device) - start[owner]
    keep = (place < size) & (owner < coarse)
    index = torch.full((coarse, size), count, dtype=torch.int64, device=nearest.device)
    index[owner[keep], place[keep]] = order[keep]
    return index


class FineMatching(nn.Module):
    """Dual softmax inside pairs of patches, with a place for points that have no partner there."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0 / dim**0.5))
        self.unmatched = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor, x_valid: Tensor, y_valid: Tensor) -> Tensor:
        """x: (P, a, c), y: (P, b, c) fine features; valid: (P, a), (P, b).

        Returns log confidences (P, a + 1, b + 1): of each pair, and in the last row and column of having no partner.
        """
        scores = x @ y.transpose(1, 2) * self.scale
        pairs, a, b = scores.shape
        table = self.unmatched.expand(pairs, a + 1, b + 1).clone()
        table[:, :a, :b] = scores.masked_fill(~(x_valid[:, :, None] & y_valid[:, None]), -1e4)
        rows, columns = table.log_softmax(2), table.log_softmax(1)
        # A match must be wanted from both sides; having no partner is decided by each side alone.
        joint = (rows + columns).clone()
        joint[:, :a, b] = rows[:, :a, b]
        joint[:, a, :b] = columns[:, a, :b]
        return joint
