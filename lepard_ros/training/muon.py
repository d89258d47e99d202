# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Muon: momentum with orthogonalised matrices, so that rare directions learn as fast as common ones.

After Jordan et al. (2024), with steps scaled to the RMS of AdamW (Liu et al., 2025), so that a learning rate
tuned for AdamW can be kept. AdamW trains vectors, scalars and thin matrices.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of Jordan et al.: singular values end between 0.7 and 1.2
ITERATIONS = 5
ADAMW_RMS = 0.2  # RMS of a step of AdamW, divided by its rate
MIN_SIDE = 8  # AdamW trains thinner matrices


def is_matrix(parameter: Tensor) -> bool:
    """Whether Muon trains a parameter: a linear map, or the kernels of a convolution (kernels, inputs, outputs)."""
    return parameter.ndim in (2, 3) and min(as_matrix(parameter).shape) >= MIN_SIDE


def as_matrix(values: Tensor) -> Tensor:
    """A parameter as one matrix, (inputs, outputs) or (outputs, inputs)."""
    return values if values.ndim == 2 else values.flatten(0, 1)


def orthogonal(matrix: Tensor) -> Tensor:
    """Approximation of the nearest orthogonal matrix to (a, b): its singular values become about one."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp_min(1e-12)
    first, second, third = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=second, alpha=third), x, beta=first)
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


class Muon(torch.optim.Optimizer):
    """Muon for matrices, AdamW for all other parameters, with the same rate and decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 1e-3, weight_decay: float = 1e-4) -> None:
        """lr: as for AdamW."""
        parameters = list(parameters)
        super().__init__([p for p in parameters if is_matrix(p)], {"lr": lr, "weight_decay": weight_decay})
        rest = [p for p in parameters if not is_matrix(p)]
        self.rest = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay) if rest else None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the current gradients."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group["lr"], group["weight_decay"])
        if self.rest is not None:
            self.rest.param_groups[0]["lr"] = self.param_groups[0]["lr"]
            self.rest.step()
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float) -> None:
        """Update one parameter: Nesterov momentum, orthogonalised."""
        momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = as_matrix(gradient.lerp(momentum, MOMENTUM))
        size = ADAMW_RMS * max(direction.shape) ** 0.5
        parameter.mul_(1 - rate * decay)
        parameter.add_(orthogonal(direction).reshape(parameter.shape), alpha=-rate * size)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both parts."""
        super().zero_grad(set_to_none)
        if self.rest is not None:
            self.rest.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """State of both parts."""
        return {"muon": super().state_dict(), "rest": None if self.rest is None else self.rest.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of both parts."""
        super().load_state_dict(state_dict["muon"])
        if self.rest is not None:
            self.rest.load_state_dict(state_dict["rest"])
