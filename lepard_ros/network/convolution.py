# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Kernel point convolution, in two coordinate systems.

`xyz` is the published one: kernel points in space, each neighbour weighted by its distance to each kernel point.
`invariant` places the kernel functions in coordinates that do not change when the cloud is turned: how far a
neighbour is, how high it stands over the tangent plane, and how its normal leans. It needs no rotated training data.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lepard_ros.network.precision import full_precision
from lepard_ros.network.workspace import Workspace

# Nodes of the invariant kernel functions: elevation sin, and cosine between the normals. Radius has two halves.
ELEVATION_NODES = (-0.7, 0.0, 0.7)
LEAN_NODES = (0.0, 0.7, 1.0)
INVARIANT_KERNELS = 2 * len(ELEVATION_NODES) * len(LEAN_NODES)
# Points convolved at a time with xyz kernels (up to twice as many): what is made for them stays in the cache.
CHUNK = 256


@dataclass
class Relation:
    """Who convolves whom: query points, support points and neighbour indices (N, K), M for a missing one.

    radius: metres. workspace: for the tables of one convolution after the other. bag: the invariant operator, offsets:
    where the neighbours are; both made on first use and shared by all layers of a level.
    """

    queries: Tensor
    supports: Tensor
    neighbours: Tensor
    radius: float
    query_normals: Tensor | None = None
    support_normals: Tensor | None = None
    workspace: Workspace = field(default_factory=Workspace, repr=False)
    bag: "KernelBag | None" = field(default=None, repr=False)
    offsets: Tensor | None = field(default=None, repr=False)

    def invariant_bag(self) -> "KernelBag":
        """The sparse operator of the invariant kernel functions."""
        if self.bag is None:
            self.bag = KernelBag.of(self)
        return self.bag

    def neighbour_offsets(self) -> Tensor:
        """From each query to its neighbours: (N, K, 5) with x, y, z, squared distance, 1; missing ones are far away."""
        if self.offsets is None:
            far = torch.cat([self.supports, self.supports.new_full((1, 3), 1e6)])
            offsets = take_rows(far, self.neighbours) - self.queries[:, None]
            squares = offsets.square().sum(-1, keepdim=True)
            self.offsets = torch.cat([offsets, squares, torch.ones_like(squares)], dim=-1)
        return self.offsets


@dataclass
class KernelBag:
    """Which (support, kernel function) products a query sums, with which weights.

    columns: (N, K * 4) index of support * kernels + kernel; weights: (N, K * 4). The transposed lists serve the
    backward pass: for each column in turn, the queries and weights that used it.
    """

    columns: Tensor
    weights: Tensor
    supports: int
    transposed: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, relation: Relation) -> "KernelBag":
        """Bilinear weights of every neighbour on the nodes, divided by the number of neighbours."""
        assert relation.query_normals is not None and relation.support_normals is not None
        supports = len(relation.supports)
        present = relation.neighbours < supports
        index = relation.neighbours.clamp_max(supports - 1)
        # Axis by axis: whole tables (N, K) of numbers are three times as fast as many small vectors.
        normal = relation.query_normals.T[..., None]
        offset = _gather_axes(relation.supports, index) - relation.queries.T[..., None]
        distance = offset.square().sum(0).sqrt_()
        elevation = (offset * normal).sum(0) / distance.clamp_min(1e-3 * relation.radius)
        lean = (_gather_axes(relation.support_normals, index) * normal).sum(0)
        upper_e, share_e = _between_nodes(elevation, ELEVATION_NODES)
        upper_l, share_l = _between_nodes(lean, LEAN_NODES)
        leans = len(LEAN_NODES)
        far = distance > 0.5 * relation.radius
        first = index.int() * INVARIANT_KERNELS + far * (len(ELEVATION_NODES) * leans) + upper_e * leans + upper_l
        columns = torch.stack([first, first + 1, first + leans, first + leans + 1], dim=-1)
        scale = present / present.sum(1, keepdim=True).clamp_min(1)
        high_e = share_e * scale
        low_e = scale - high_e
        high_high, low_high = high_e * share_l, low_e * share_l
        weights = torch.stack([low_e - low_high, low_high, high_e - high_high, high_high], dim=-1)
        return cls(columns.flatten(1), weights.flatten(1), supports)

    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, offsets, weights) grouped by column, for the backward pass; made once."""
        if self.transposed is None:
            used = (self.weights > 0).flatten().nonzero()[:, 0]
            flat = self.columns.flatten()[used].int()
            order = used[torch.argsort(flat)]
            counts = torch.bincount(flat, minlength=self.supports * INVARIANT_KERNELS)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
            queries = torch.div(order, self.columns.shape[1], rounding_mode="floor")
            self.transposed = queries.int(), offsets.int(), self.weights.flatten()[order]
        return self.transposed


def _gather_axes(values: Tensor, index: Tensor) -> Tensor:
    """The rows (M, 3) of `values` at the indices (N, K), axis by axis: (3, N, K)."""
    return values.T.contiguous().index_select(1, index.flatten()).view(3, *index.shape)


def _between_nodes(values: Tensor, nodes: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Whether each value lies between the upper two nodes, and the share of the upper node of its two."""
    low, middle, high = nodes
    upper = values > middle
    share = torch.where(upper, (values - middle) / (high - middle), (values - low) / (middle - low))
    return upper, share.clamp_(0, 1)


class _BagProduct(torch.autograd.Function):
    """Sum of weighted rows; the backward pass is the same operation with the transposed lists."""

    @staticmethod
    def forward(ctx, rows: Tensor, bag: KernelBag) -> Tensor:
        ctx.bag = bag
        return F.embedding_bag(bag.columns, rows, per_sample_weights=bag.weights.to(rows.dtype), mode="sum")

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        queries, offsets, weights = ctx.bag.transpose()
        gradient = gradient.contiguous()
        return F.embedding_bag(queries, gradient, offsets, per_sample_weights=weights.to(gradient), mode="sum"), None


def take_rows(values: Tensor, index: Tensor, workspace: Workspace | None = None) -> Tensor:
    """values[index] for rows (M, C) and indices (...): several times faster than indexing."""
    width = values.shape[1]
    out = workspace.table("taken", values, index.numel(), width) if workspace else None
    return torch.index_select(values, 0, index.flatten(), out=out).view(*index.shape, width)


def with_zero_row(values: Tensor) -> Tensor:
    """(M, C) -> (M + 1, C): what the index M of a missing neighbour takes."""
    return torch.cat([values, values.new_zeros(1, values.shape[1])])


class KernelPointConvolution(nn.Module):
    """Convolution over neighbours with one weight matrix per kernel point (or invariant kernel function)."""

    def __init__(self, inputs: int, outputs: int, kernels: int, kernel: str, extent: float) -> None:
        """extent: metres within which a kernel point of `xyz` has influence."""
        super().__init__()
        self.kernel, self.extent = kernel, extent
        self.weights = nn.Parameter(torch.empty(kernels, inputs, outputs))
        nn.init.kaiming_uniform_(self.weights.view(kernels * inputs, outputs).T, a=5**0.5)
        if kernel == "xyz":
            self.kernel_points: Tensor
            self.register_buffer("kernel_points", scatter_kernel_points(kernels, 0.66 * extent))

    def forward(self, features: Tensor, relation: Relation) -> Tensor:
        """features: (M, inputs) of the supports. Returns (N, outputs) at the queries."""
        if self.kernel == "invariant":
            return self._invariant(features, relation)
        filled = with_zero_row(features)
        counted = (filled.detach().sum(1) > 0).to(features.dtype)
        count = max(1, len(relation.neighbours) // CHUNK)
        pieces = zip(relation.neighbour_offsets().chunk(count), relation.neighbours.chunk(count), strict=True)
        return torch.cat([self._xyz(filled, counted, offsets, index, relation.workspace) for offsets, index in pieces])

    def _invariant(self, features: Tensor, relation: Relation) -> Tensor:
        kernels, inputs, outputs = self.weights.shape
        bag = relation.invariant_bag()
        out = relation.workspace.table("rows", features, len(features), kernels * outputs)
        rows = torch.mm(features, self.weights.permute(1, 0, 2).reshape(inputs, kernels * outputs), out=out)
        return _BagProduct.apply(rows.view(-1, outputs), bag)

    def _xyz(self, features: Tensor, counted: Tensor, offsets: Tensor, index: Tensor, workspace: Workspace) -> Tensor:
        """One piece: offsets (n, K, 5) of the neighbours (n, K); counted: (M + 1,), 1 where a support counts."""
        influence = self._influence(offsets.flatten(0, 1), workspace).view(*index.shape, -1).transpose(1, 2)
        summed = _weighted_sums(influence, take_rows(features, index, workspace), workspace).flatten(1)
        count = counted.index_select(0, index.flatten()).view(index.shape).sum(1).clamp_min(1)
        return summed @ self.weights.flatten(0, 1) / count[:, None]

    def _influence(self, offsets: Tensor, workspace: Workspace) -> Tensor:
        """How much each kernel point feels neighbours at these offsets (M, 5): (M, kernels), 1 - distance / extent."""
        points = self.kernel_points.T
        # |o - p|^2 = -2 o p + |o|^2 + |p|^2, in one product.
        factors = torch.cat([-2 * points, torch.ones_like(points[:1]), points.square().sum(0, keepdim=True)])
        out = workspace.table("influence", offsets, len(offsets), points.shape[1])
        with full_precision(offsets):
            squares = torch.mm(offsets, factors / self.extent**2, out=out)
        # The lower limit keeps the root's gradient finite at a kernel point; the loss has none in the positions.
        distances = squares.clamp_(1e-12, 1).sqrt_()
        return torch.sub(1, distances, out=out)


def _weighted_sums(influence: Tensor, features: Tensor, workspace: Workspace) -> Tensor:
    """Sums over neighbours: (n, kernels, K) with (n, K, C) -> (n, kernels, C)."""
    if features.shape[-1] == 1:  # a product with a single column is slow
        return (influence * features.transpose(1, 2)).sum(-1, keepdim=True)
    out = workspace.table("summed", features, *influence.shape[:2], features.shape[2])
    return torch.matmul(influence, features, out=out)


def scatter_kernel_points(count: int, radius: float) -> Tensor:
    """An even spread of `count` points in a ball, the first at its centre: (count, 3) metres."""
    steps = torch.arange(count - 1, dtype=torch.float32) + 0.5
    height = 1 - 2 * steps / (count - 1)
    turn = steps * (torch.pi * (1 + 5**0.5))
    ring = (1 - height**2).sqrt()
    sphere = torch.stack([ring * turn.cos(), ring * turn.sin(), height], dim=1)
    return torch.cat([torch.zeros(1, 3), sphere]) * radius
