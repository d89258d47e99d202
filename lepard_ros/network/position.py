# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Position codes: they make dot products of features depend on the positions of the points."""

import torch
from torch import Tensor

from lepard_ros.network.precision import at_least_float, is_traced


class PositionCode:
    """Codes of a batch of points, to be applied to features of the same points."""

    def apply(self, x: Tensor) -> Tensor:
        """Apply the code to features (..., n, d)."""
        raise TypeError("use a rotary or a sinusoidal code")


class RotaryCode(PositionCode):
    """Rotates each pair of channels by an angle proportional to x, y or z: dot products depend on differences."""

    def __init__(self, positions: Tensor, dim: int) -> None:
        """positions: (..., n, 3) in units of the code; dim: d."""
        self.angles = _angles(positions, dim).flatten(-2)
        if not is_traced():  # ONNX has no complex numbers
            self.turns = torch.polar(torch.ones_like(self.angles), self.angles)

    def apply(self, x: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, d), of the same length."""
        pairs = at_least_float(x).unflatten(-1, (-1, 2)).contiguous()  # torch has no complex type in half precision
        if is_traced():
            (first, second), cosine, sine = pairs.unbind(-1), self.angles.cos(), self.angles.sin()
            return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)
        return torch.view_as_real(torch.view_as_complex(pairs) * self.turns).flatten(-2)


class SinusoidalCode(PositionCode):
    """The absolute code of the Transformer, added to the features."""

    def __init__(self, positions: Tensor, dim: int) -> None:
        angles = _angles(positions, dim)
        self.code = torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2)

    def apply(self, x: Tensor) -> Tensor:
        """(..., n, d) -> (..., n, d)."""
        return x + self.code


def _angles(positions: Tensor, dim: int) -> Tensor:
    """(..., n, 3, d / 6): each coordinate times each frequency, without gradient."""
    steps = torch.arange(dim // 6, device=positions.device, dtype=torch.float32)
    frequencies = torch.pow(10000.0, -2 * steps / (dim // 3))
    return positions.detach()[..., None] * frequencies.to(positions.dtype)


def position_code(kind: str, positions: Tensor, dim: int) -> PositionCode:
    """The code of `positions` (..., n, 3) for features of width `dim`; kind: rotary or sinusoidal."""
    return RotaryCode(positions, dim) if kind == "rotary" else SinusoidalCode(positions, dim)
