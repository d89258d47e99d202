# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The Muon optimiser against its definition."""

import pytest
import torch
from torch import nn

from lepard_ros.training.muon import ADAMW_RMS, Muon, is_matrix, orthogonal


@pytest.mark.parametrize("shape", [(12, 40), (40, 12), (16, 16)])
def test_an_orthogonal_matrix_keeps_the_singular_vectors(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = orthogonal(matrix)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    inner = u.T @ made @ v.T  # diagonal where the singular vectors are kept
    assert (inner - inner.diagonal().diag()).abs().max() < 1e-3
    assert inner.diagonal().min() > 0.6 and inner.diagonal().max() < 1.3


def test_a_step_has_the_size_of_adamw_whatever_the_gradient() -> None:
    weights = nn.Parameter(torch.zeros(5, 32, 64))  # the kernels of a convolution: one map from 160 to 64
    optimiser = Muon([weights], lr=0.01, weight_decay=0.0)
    weights.grad = 1e-4 * torch.randn(weights.shape, generator=torch.Generator().manual_seed(2))
    optimiser.step()
    assert weights.detach().square().mean().sqrt() == pytest.approx(0.01 * ADAMW_RMS, rel=0.2)
    assert float((weights.detach() * weights.grad).sum()) < 0


def test_vectors_and_scalars_are_left_to_adamw() -> None:
    network = nn.Linear(16, 16)
    assert is_matrix(network.weight) and not is_matrix(network.bias)
    optimiser = Muon(network.parameters(), lr=0.01, weight_decay=0.0)
    before = network.bias.detach().clone()
    network(torch.ones(2, 16)).sum().backward()
    optimiser.step()
    assert torch.allclose(network.bias, before - 0.01, atol=1e-6)  # AdamW's first step has the size of its rate
    optimiser.zero_grad()
    assert network.bias.grad is None and network.weight.grad is None
