# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the network is run for: where autocast must not shorten the numbers, and where a graph is written."""

import torch
from torch import Tensor


def full_precision(like: Tensor) -> torch.autocast:
    """A block without autocast: positions to the millimetre, sums over thousands of points, tiny probabilities."""
    return torch.autocast(like.device.type, enabled=False)


def autocast_is_on(like: Tensor) -> bool:
    """Whether autocast chooses the types of operations on such a tensor."""
    try:
        return torch.is_autocast_enabled(like.device.type)
    except TypeError:  # before torch 2.4
        return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


def is_traced() -> bool:
    """Whether the network is being written as an ONNX graph: sizes are then not known, and some operations missing."""
    return bool(torch._C._get_tracing_state())


def at_least_float(x: Tensor) -> Tensor:
    """x in single precision, if it came out of autocast with less."""
    return x.float() if x.dtype.itemsize < 4 else x
