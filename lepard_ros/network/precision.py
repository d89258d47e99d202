# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Execution context of the network: exclusion from autocast, and ONNX tracing."""

import torch
from torch import Tensor


def full_precision(like: Tensor) -> torch.autocast:
    """A block without autocast, for precise positions, long sums and small probabilities."""
    return torch.autocast(like.device.type, enabled=False)


def autocast_is_on(like: Tensor) -> bool:
    """Whether autocast is active for the device of a tensor."""
    try:
        return torch.is_autocast_enabled(like.device.type)
    except TypeError:  # before torch 2.4
        return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


def is_traced() -> bool:
    """Whether the network is being traced for ONNX: sizes are then unknown, and some operations are unavailable."""
    return bool(torch._C._get_tracing_state())


def at_least_float(x: Tensor) -> Tensor:
    """x in single precision, if autocast has reduced it."""
    return x.float() if x.dtype.itemsize < 4 else x
