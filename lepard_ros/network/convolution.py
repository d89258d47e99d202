# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Kernel point convolution, in two coordinate systems, one class each.

`KernelPointConvolution` is the published one: kernel points in space, each neighbour weighted by its distance to each.
`InvariantConvolution` places the kernel functions in rotation-invariant coordinates: distance of a neighbour, height
above the tangent plane, angle between the normals, and (with chirality) the twist of the surface between the points.
It needs no rotation augmentation.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lepard_ros.network.config import LepardConfig
from lepard_ros.network.precision import full_precision, is_traced
from lepard_ros.network.relation import CHIRAL_KERNELS, KernelBag, Relation, with_zero_row
from lepard_ros.network.workspace import at_once, gather_rows, product

# Points convolved at a time with kernel points in space (up to twice as many), so that tables stay in the cache.
CHUNK = 256
SPREAD = 0.66  # distance of the kernel points from the centre, as a share of the radius, as published
KERNEL_NOISE = 0.01  # of that radius


def make_convolution(
    inputs: int, outputs: int, config: LepardConfig, level: int
) -> "KernelPointConvolution | InvariantConvolution":
    """The convolution for a network's settings at a level of the pyramid."""
    if config.kernel == "invariant":
        return InvariantConvolution(inputs, outputs, config.kernel_points + CHIRAL_KERNELS * config.chirality)
    cell = config.grid * 2**level
    reach = SPREAD * config.conv_radius * cell
    return KernelPointConvolution(inputs, outputs, config.kernel_points, config.kernel_extent * cell, reach)


def _kernel_weights(kernels: int, inputs: int, outputs: int) -> nn.Parameter:
    """One weight matrix for each kernel, (kernels, inputs, outputs)."""
    weights = nn.Parameter(torch.empty(kernels, inputs, outputs))
    nn.init.kaiming_uniform_(weights.view(kernels * inputs, outputs).T, a=5**0.5)
    return weights


class _BagProduct(torch.autograd.Function):
    """Sum of weighted rows; the backward pass is the same operation with the transposed lists."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bag: KernelBag) -> Tensor:
        ctx.bag = bag
        return F.embedding_bag(bag.columns, rows, per_sample_weights=bag.weights.to(rows.dtype), mode="sum")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        queries, offsets, weights = ctx.bag.transpose()
        gradient = gradient.contiguous()
        return F.embedding_bag(queries, gradient, offsets, per_sample_weights=weights.to(gradient), mode="sum"), None


class InvariantConvolution(nn.Module):
    """Convolution over neighbours with one weight matrix per invariant kernel function."""

    def __init__(self, inputs: int, outputs: int, kernels: int) -> None:
        super().__init__()
        self.weights = _kernel_weights(kernels, inputs, outputs)

    def forward(self, features: Tensor, relation: Relation) -> Tensor:
        """features: (M, inputs) of the supports. Returns (N, outputs) at the queries."""
        kernels, inputs, outputs = self.weights.shape
        if is_traced():  # ONNX has no sums of bags
            index, influence = relation.invariant_influence()
            return (influence @ gather_rows(features, index)).flatten(1) @ self.weights.flatten(0, 1)
        bag = relation.invariant_bag()
        rows = product("rows", features, self.weights.permute(1, 0, 2).reshape(inputs, kernels * outputs))
        return _BagProduct.apply(rows.view(-1, outputs), bag)  # type: ignore[no-untyped-call]


class KernelPointConvolution(nn.Module):
    """Convolution over neighbours with one weight matrix per kernel point."""

    def __init__(self, inputs: int, outputs: int, kernels: int, extent: float, reach: float) -> None:
        """extent: metres within which a kernel point has influence. reach: metres from the centre to the others."""
        super().__init__()
        self.extent = extent
        self.weights = _kernel_weights(kernels, inputs, outputs)
        self.kernel_points: Tensor
        self.register_buffer("kernel_points", scatter_kernel_points(kernels, reach))

    def forward(self, features: Tensor, relation: Relation) -> Tensor:
        """features: (M, inputs) of the supports. Returns (N, outputs) at the queries."""
        filled = with_zero_row(features)
        counted = (filled.detach().sum(1) > 0).to(features.dtype)
        count = 1 if is_traced() else max(1, len(relation.neighbours) // at_once(features, CHUNK))
        pieces = zip(relation.neighbour_offsets().chunk(count), relation.neighbours.chunk(count), strict=True)
        return torch.cat([self._piece(filled, counted, *piece) for piece in pieces])

    def _piece(self, features: Tensor, counted: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
        """One piece: offsets (n, K, 5) of the neighbours (n, K); counted: (M + 1,), 1 where a support counts."""
        influence = self._influence(offsets.flatten(0, 1)).view(*index.shape, -1).transpose(1, 2)
        summed = _weighted_sums(influence, gather_rows(features, index)).flatten(1)
        count = counted.index_select(0, index.flatten()).view(index.shape).sum(1).clamp_min(1)
        return summed @ self.weights.flatten(0, 1) / count[:, None]

    def _influence(self, offsets: Tensor) -> Tensor:
        """Influence (M, kernels) of each kernel point on neighbours at these offsets (M, 5): 1 - distance / extent."""
        points = self.kernel_points.T
        # |o - p|^2 = -2 o p + |o|^2 + |p|^2, in one product.
        factors = torch.cat([-2 * points, torch.ones_like(points[:1]), points.square().sum(0, keepdim=True)])
        with full_precision(offsets):
            squares = product("influence", offsets, factors / self.extent**2)
        # The lower limit keeps the gradient of the root finite at a kernel point.
        return squares.clamp_(1e-12, 1).sqrt_().neg_().add_(1)


def _weighted_sums(influence: Tensor, features: Tensor) -> Tensor:
    """Sums over neighbours: (n, kernels, K) with (n, K, C) -> (n, kernels, C)."""
    if features.shape[-1] == 1:  # a product with a single column is slow
        return (influence * features.transpose(1, 2)).sum(-1, keepdim=True)
    return product("summed", influence, features)


def scatter_kernel_points(count: int, radius: float) -> Tensor:
    """`count` evenly distributed points in a ball, the first at its centre: (count, 3) metres.

    As published, each has a little noise and all are rotated randomly about z, so that layers have different gaps.
    """
    steps = torch.arange(count - 1, dtype=torch.float32) + 0.5
    height = 1 - 2 * steps / (count - 1)
    turn = steps * (torch.pi * (1 + 5**0.5))
    ring = (1 - height**2).sqrt()
    sphere = torch.stack([ring * turn.cos(), ring * turn.sin(), height], dim=1)
    points = torch.cat([torch.zeros(1, 3), sphere])
    points = points + KERNEL_NOISE * torch.randn(count, 3) / SPREAD
    angle = 2 * torch.pi * torch.rand(())
    cosine, sine = angle.cos(), angle.sin()
    x, y, z = points.unbind(1)
    return torch.stack([cosine * x + sine * y, cosine * y - sine * x, z], dim=1) * radius
