# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Memory that is written again and again."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lepard_ros.network.precision import autocast_is_on, is_traced


def at_once(like: Tensor, few: int) -> int:
    """How many rows to work on at a time: few where they shall stay in a processor's cache, many on a GPU.

    A GPU waits for each of many small operations: with pieces that suit a cache it is launch-bound.
    """
    return few if like.device.type == "cpu" else 256 * few


def in_pieces(rows: Tensor, most: int) -> Sequence[Tensor]:
    """The rows in pieces of at most so many; in one for an exported graph, which must not depend on their number."""
    return [rows] if is_traced() else rows.split(most)


class Workspace:
    """Tables that each piece of a long computation writes anew: memory that is in the cache already is far cheaper.

    There are none where gradients are recorded, which need every piece's own, nor where autocast chooses the types, nor
    in an exported graph.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Tensor] = {}

    def release(self) -> None:
        """Give the memory back."""
        self.tables.clear()

    def table(self, name: str, like: Tensor, *shape: int) -> Tensor | None:
        """A table of this shape, with anything in it, for a parameter `out`; None: the operation is to make its own."""
        if torch.is_grad_enabled() or is_traced() or autocast_is_on(like):
            return None
        size, table = math.prod(shape), self.tables.get(name)
        if table is None or table.numel() < size or (table.dtype, table.device) != (like.dtype, like.device):
            table = self.tables[name] = like.new_empty(size)
        return table[:size].view(shape)
