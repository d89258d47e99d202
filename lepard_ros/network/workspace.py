# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Cache-friendly execution: work in chunks, and reuse scratch memory."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from lepard_ros.network.precision import autocast_is_on, is_traced


def at_once(like: Tensor, few: int) -> int:
    """Number of rows to process at a time: few, to stay in the cache of a CPU; many on a GPU.

    With chunks that suit a CPU cache, a GPU would be launch-bound.
    """
    return few if like.device.type == "cpu" else 256 * few


def in_pieces(rows: Tensor, max_rows: int) -> Sequence[Tensor]:
    """Split the rows into chunks; one chunk for an exported graph, which must not depend on their number."""
    return [rows] if is_traced() else rows.split(max_rows)


# Tables of the innermost `scratch_memory` of this thread, by purpose. Trackers encode in several threads.
_tables: ContextVar[dict[str, Tensor] | None] = ContextVar("scratch tables", default=None)


@contextmanager
def scratch_memory() -> Iterator[None]:
    """Within this context `product` and `gather_rows` reuse memory, which is much faster, since it is in the cache.

    A result is valid until the next call with the same name. The memory is freed at the end.
    """
    before = _tables.set({})
    try:
        yield
    finally:
        _tables.reset(before)


def scratch_table(name: str, like: Tensor, *shape: int) -> Tensor | None:
    """An uninitialised table of this shape for a parameter `out`; None if the operation must allocate its own.

    It is None outside `scratch_memory`, while gradients are recorded, under autocast, and in an exported graph.
    """
    tables = _tables.get()
    if tables is None or torch.is_grad_enabled() or is_traced() or autocast_is_on(like):
        return None
    size, table = math.prod(shape), tables.get(name)
    if table is None or table.numel() < size or (table.dtype, table.device) != (like.dtype, like.device):
        table = tables[name] = like.new_empty(size)
    return table[:size].view(shape)


def product(name: str, first: Tensor, second: Tensor) -> Tensor:
    """The matrix product of (..., n, k) and (..., k, m), in scratch memory if allowed."""
    return torch.matmul(first, second, out=scratch_table(name, first, *first.shape[:-1], second.shape[-1]))


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """values[index] for rows (M, C) and indices (...): several times faster than indexing; in scratch memory."""
    width = values.shape[1]
    out = scratch_table("gathered", values, index.numel(), width)
    return torch.index_select(values, 0, index.flatten(), out=out).view(*index.shape, width)
