# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Neighbourhoods of a pyramid, and the operators that both kinds of convolution build from them once per cloud."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from lepard_ros.network.workspace import gather_rows

# Nodes of the invariant kernel functions: elevation sin, and cosine between the normals. Radius has two halves.
ELEVATION_NODES = (-0.7, 0.0, 0.7)
LEAN_NODES = (0.0, 0.7, 1.0)
INVARIANT_KERNELS = 2 * len(ELEVATION_NODES) * len(LEAN_NODES)
# One more kernel function for each half of the radius, weighted by the twist of the surface: the only ones that change
# under mirroring, and so the only ones that can distinguish a left hand from a right one.
CHIRAL_KERNELS = 2
CHIRAL_SCALE = 4.0  # twists are small: this brings them to the size of the other weights


@dataclass
class Relation:
    """Query points, support points and neighbour indices (N, K), M for a missing one.

    radius: metres. chirality: whether the invariant operator has the kernel functions of the twist.
    bag: the invariant operator, influence: the same for ONNX, offsets: where the neighbours are; made on first use and
    shared by all layers of a level.
    """

    queries: Tensor
    supports: Tensor
    neighbours: Tensor
    radius: float
    query_normals: Tensor | None = None
    support_normals: Tensor | None = None
    chirality: bool = False
    bag: "KernelBag | None" = field(default=None, repr=False)
    offsets: Tensor | None = field(default=None, repr=False)
    influence: tuple[Tensor, Tensor] | None = field(default=None, repr=False)

    def to(self, device: torch.device) -> "Relation":
        """The same relation on another device, where its operators are rebuilt."""
        moved: dict[str, Any] = {
            f.name: v.to(device) for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)
        }
        return replace(self, **{**moved, "bag": None, "offsets": None, "influence": None})

    def invariant_bag(self) -> "KernelBag":
        """The sparse operator of the invariant kernel functions."""
        if self.bag is None:
            self.bag = KernelBag.of(self)
        return self.bag

    def invariant_influence(self) -> tuple[Tensor, Tensor]:
        """Neighbours (N, K) and their weights on the kernel functions (N, kernels, K): that operator for ONNX."""
        if self.influence is None:
            seen = _Neighbourhood.of(self)
            self.influence = seen.support, seen.influence()
        return self.influence

    def neighbour_offsets(self) -> Tensor:
        """From each query to its neighbours: (N, K, 5) with x, y, z, squared distance, 1; missing ones are far away."""
        if self.offsets is None:
            far = torch.cat([self.supports, self.supports.new_full((1, 3), 1e6)])
            offsets = gather_rows(far, self.neighbours) - self.queries[:, None]
            squares = offsets.square().sum(-1, keepdim=True)
            self.offsets = torch.cat([offsets, squares, torch.ones_like(squares)], dim=-1)
        return self.offsets


@dataclass
class KernelBag:
    """Which (support, kernel function) products a query sums, with which weights.

    columns: (N, K * 4 or 5) index of support * kernels + kernel; weights: the same shape; kernels: how many functions
    there are. The transposed lists serve the backward pass: for each column in turn, the queries and weights that
    used it.
    """

    columns: Tensor
    weights: Tensor
    supports: int
    kernels: int = INVARIANT_KERNELS
    transposed: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, relation: Relation) -> "KernelBag":
        """Bilinear weights of every neighbour on the nodes, divided by the number of neighbours."""
        seen = _Neighbourhood.of(relation)
        kernels = INVARIANT_KERNELS + CHIRAL_KERNELS * relation.chirality
        first = seen.support.int() * kernels
        columns, weights = _bilinear(seen.elevation, seen.lean, seen.far, seen.share)
        columns = [first + column for column in columns]
        if seen.twist is not None:
            columns.append(first + INVARIANT_KERNELS + seen.far)
            weights.append(seen.twist * seen.share)
        supports = relation.supports.shape[0]
        return cls(torch.stack(columns, -1).flatten(1), torch.stack(weights, -1).flatten(1), supports, kernels)

    def mirrored(self) -> "KernelBag":
        """The operator of the mirrored cloud: only the twists change their sign."""
        if self.kernels == INVARIANT_KERNELS:
            return self
        weights = self.weights.unflatten(1, (-1, 5)) * self.weights.new_tensor([1.0, 1, 1, 1, -1])
        return KernelBag(self.columns, weights.flatten(1), self.supports, self.kernels)

    def transpose(self) -> tuple[Tensor, Tensor, Tensor]:
        """(queries, offsets, weights) grouped by column, for the backward pass; made once."""
        if self.transposed is None:
            on_cpu = self.columns.device.type == "cpu"
            self.transposed = self._count_columns() if on_cpu else self._sort_columns()
        return self.transposed

    def _count_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transposed lists on a CPU, without sorting: a third of the time of `_sort_columns`."""
        rows, width = self.columns.shape
        starts = np.arange(0, rows * width + 1, width, dtype=np.int32)
        entries = self.weights.detach().numpy().ravel(), self.columns.int().numpy().ravel(), starts
        transposed = csr_array(entries, shape=(rows, self.supports * self.kernels)).tocsc()
        lists = transposed.indices, transposed.indptr[:-1], transposed.data
        return torch.from_numpy(lists[0]), torch.from_numpy(lists[1]), torch.from_numpy(lists[2])

    def _sort_columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transposed lists on any device."""
        used = (self.weights != 0).flatten().nonzero()[:, 0]
        flat = self.columns.flatten()[used].int()
        order = used[torch.argsort(flat)]
        counts = torch.bincount(flat, minlength=self.supports * self.kernels)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
        queries = torch.div(order, self.columns.shape[1], rounding_mode="floor")
        return queries.int(), offsets.int(), self.weights.flatten()[order]


class _Neighbourhood(NamedTuple):
    """Coordinates of every neighbour for the invariant kernel functions, (N, K) each.

    support: its index, arbitrary if missing. share: one over the number of neighbours, 0 if missing.
    elevation: sine above the tangent plane. lean: cosine between the normals. far: beyond half of the radius.
    twist: scaled, None without chirality.
    """

    support: Tensor
    share: Tensor
    elevation: Tensor
    lean: Tensor
    far: Tensor
    twist: Tensor | None

    @classmethod
    def of(cls, relation: Relation) -> "_Neighbourhood":
        assert relation.query_normals is not None and relation.support_normals is not None
        supports = relation.supports.shape[0]
        present = relation.neighbours < supports
        index = relation.neighbours.clamp_max(supports - 1)
        # Axis by axis: tables (N, K) are three times as fast as many small vectors.
        normal = relation.query_normals.T[..., None]
        others = _gather_axes(relation.support_normals, index)
        offset = _gather_axes(relation.supports, index) - relation.queries.T[..., None]
        distance = offset.square().sum(0).sqrt_()
        away = 1 / distance.clamp_min(1e-3 * relation.radius)
        far = distance > 0.5 * relation.radius
        share = present / present.sum(1, keepdim=True).clamp_min(1)
        elevation, lean = (offset * normal).sum(0) * away, (others * normal).sum(0)
        twists = CHIRAL_SCALE * twist(normal, offset, others) * away if relation.chirality else None
        return cls(index, share, elevation, lean, far, twists)

    def influence(self) -> Tensor:
        """The weight of every neighbour on every kernel function, (N, kernels, K): the dense form of a `KernelBag`."""
        halves = torch.stack([~self.far, self.far], 1) * self.share[:, None]
        elevations, leans = _hats(self.elevation, ELEVATION_NODES), _hats(self.lean, LEAN_NODES)
        product = halves[:, :, None, None] * (elevations[:, :, None] * leans[:, None])[:, None]
        weights = product.flatten(1, 3)
        return weights if self.twist is None else torch.cat([weights, halves * self.twist[:, None]], 1)


def twist(normal: Tensor, offset: Tensor, other: Tensor) -> Tensor:
    """Twist of the surface between a point and a neighbour: normal . (offset x other normal), each (3, ...).

    It is rotation-invariant and changes its sign under mirroring.
    """
    (nx, ny, nz), (dx, dy, dz), (sx, sy, sz) = normal, offset, other
    return nx * (dy * sz - dz * sy) + ny * (dz * sx - dx * sz) + nz * (dx * sy - dy * sx)


def _bilinear(elevation: Tensor, lean: Tensor, far: Tensor, share: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Kernel functions between whose nodes each neighbour (N, K) lies, and its weights on them: four of each."""
    upper_e, share_e = _between_nodes(elevation, ELEVATION_NODES)
    upper_l, share_l = _between_nodes(lean, LEAN_NODES)
    leans = len(LEAN_NODES)
    first = far.int() * (len(ELEVATION_NODES) * leans) + upper_e * leans + upper_l
    high_e = share_e * share
    low_e = share - high_e
    high_high, low_high = high_e * share_l, low_e * share_l
    columns = [first, first + 1, first + leans, first + leans + 1]
    return columns, [low_e - low_high, low_high, high_e - high_high, high_high]


def _gather_axes(values: Tensor, index: Tensor) -> Tensor:
    """The rows (M, 3) of `values` at the indices (N, K), axis by axis: (3, N, K)."""
    return values.T.contiguous().index_select(1, index.flatten()).view(3, *index.shape)


def _between_nodes(values: Tensor, nodes: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """Whether each value lies between the upper two nodes, and the share of the upper node of its two."""
    low, middle, high = nodes
    upper = values > middle
    share = torch.where(upper, (values - middle) / (high - middle), (values - low) / (middle - low))
    return upper, share.clamp_(0, 1)


def _hats(values: Tensor, nodes: tuple[float, float, float]) -> Tensor:
    """The weights of values (N, K) on the three nodes, (N, 3, K)."""
    upper, share = _between_nodes(values, nodes)
    return torch.stack([(1 - share) * ~upper, torch.where(upper, 1 - share, share), share * upper], 1)


def with_zero_row(values: Tensor) -> Tensor:
    """(M, C) -> (M + 1, C): what the index M of a missing neighbour takes."""
    return torch.cat([values, values.new_zeros(1, values.shape[1])])
