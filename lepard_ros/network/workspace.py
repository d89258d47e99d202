# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Work in pieces that stay in the cache, in memory that is written again and again: the seam between what the network
computes and how a processor likes to compute it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lepard_ros.network.precision import autocast_is_on, is_traced


def at_once(like: Tensor, few: int) -> int:
    """How many rows to work on at a time: few where they shall stay in a processor's cache, many on a GPU.

    A GPU waits for each of many small operations: with pieces that suit a cache it is launch-bound.
    """
    return few if like.device.type == "cpu" else 256 * few


def in_pieces(rows: Tensor, max_rows: int) -> Sequence[Tensor]:
    """The rows in pieces of at most so many; in one for an exported graph, which must not depend on their number."""
    return [rows] if is_traced() else rows.split(max_rows)


# The tables of the innermost `scratch_memory` of this thread, by what they are for. Trackers encode in several threads.
_tables: ContextVar[dict[str, Tensor] | None] = ContextVar("scratch tables", default=None)


@contextmanager
def scratch_memory() -> Iterator[None]:
    """Within it `product` and `gather_rows` write to memory that is used again: far cheaper, since it is in the cache.

    A result is then good until the next call of the same name. The memory is given back at the end.
    """
    before = _tables.set({})
    try:
        yield
    finally:
        _tables.reset(before)


def scratch_table(name: str, like: Tensor, *shape: int) -> Tensor | None:
    """A table of this shape, with anything in it, for a parameter `out`; None: the operation is to make its own.

    There is none outside of `scratch_memory`, where gradients are recorded, which need every piece's own, where
    autocast chooses the types, or in an exported graph.
    """
    tables = _tables.get()
    if tables is None or torch.is_grad_enabled() or is_traced() or autocast_is_on(like):
        return None
    size, table = math.prod(shape), tables.get(name)
    if table is None or table.numel() < size or (table.dtype, table.device) != (like.dtype, like.device):
        table = tables[name] = like.new_empty(size)
    return table[:size].view(shape)


def product(name: str, first: Tensor, second: Tensor) -> Tensor:
    """The matrix product of (..., n, k) and (..., k, m), in scratch memory where that is allowed."""
    return torch.matmul(first, second, out=scratch_table(name, first, *first.shape[:-1], second.shape[-1]))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index] for rows (M, C) and indices (...): several times faster than indexing; in scratch memory."""
    width = values.shape[1]
    out = scratch_table("gathered", values, index.numel(), width)
    return torch.index_select(values, 0, index.flatten(), out=out).view(*index.shape, width)
