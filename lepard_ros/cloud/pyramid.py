# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The pyramid of a cloud: increasingly coarse grids with their neighbour lists."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from lepard_ros.cloud.neighbours import Supports
from lepard_ros.cloud.normals import UNKNOWN, estimate_normals, likely_viewpoint, orient
from lepard_ros.geometry.voxel_grid import grid_subsample

BETWEEN = 3  # coarser points between which features are interpolated


@dataclass(frozen=True)
class PyramidShape:
    """Settings of a pyramid, stored with the weights.

    grid: cell of level 0 in metres, doubling with each level. radius: of a convolution, in cells.
    limits: neighbours kept at each level. normals: estimate normals. smooth: also store several coarser points for each
    finer one, for an interpolating decoder.
    """

    grid: float
    radius: float
    limits: tuple[int, ...]
    normals: bool = False
    smooth: bool = False

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.limits)


@dataclass(frozen=True)
class Pyramid:
    """One cloud, or several stacked one behind the other.

    points[l]: (N_l, 3); normals[l]: (N_l, 3) or an empty list; variation: (N_0,) how uneven the surface is.
    neighbours[l]: (N_l, K_l) indices into level l; pools[l]: (N_{l+1}, K_l) into level l;
    upsamples[l]: (N_l,) the nearest point of level l+1. A missing neighbour of level l is N_l.
    lengths[l]: points of each stacked cloud. between[l]: (N_l, BETWEEN) nearest points of level l+1, or an empty list.
    """

    points: list[Tensor]
    normals: list[Tensor]
    variation: Tensor | None
    neighbours: list[Tensor]
    pools: list[Tensor]
    upsamples: list[Tensor]
    lengths: list[list[int]]
    between: list[Tensor] = field(default_factory=list)

    def to(self, device: torch.device | str) -> "Pyramid":
        """The same pyramid on another device."""
        return replace(self, **{f.name: _to(getattr(self, f.name), device) for f in fields(self)})

    def mirrored(self) -> "Pyramid":
        """The mirror image in the plane x = 0: the same neighbours, other points and normals."""
        points, normals = (
            [values * values.new_tensor([-1.0, 1.0, 1.0]) for values in levels]
            for levels in (self.points, self.normals)
        )
        return replace(self, points=points, normals=normals)


def _to(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [item.to(device, non_blocking=True) for item in value]
    return value


def build_pyramid(
    points: Tensor, shape: PyramidShape, viewpoint: Tensor | str | None = None, *, gridded: bool = False
) -> Pyramid:
    """The pyramid of one cloud.

    points: (N, 3) metres; with `gridded`, they already lie on the grid of level 0.
    viewpoint: (3,), position of the sensor (the origin if None), which normals face; if UNKNOWN, a position from which
    the cloud may have been seen.
    """
    levels = [points if gridded else grid_subsample(points, shape.grid)[0]]
    for level in range(1, shape.levels):
        levels.append(grid_subsample(levels[-1], shape.grid * 2**level)[0])
    neighbours, pools, between = [], [], []
    supports = [Supports(level) for level in levels]
    for level, (here, limit) in enumerate(zip(levels, shape.limits, strict=True)):
        radius = shape.grid * shape.radius * 2**level
        neighbours.append(supports[level].around(here, radius, limit))
        if level + 1 < shape.levels:
            pools.append(supports[level].around(levels[level + 1], radius, limit))
            between.append(supports[level + 1].around(here, 2 * radius, BETWEEN if shape.smooth else 1))
    normals, variation = _normals_by_level(levels, neighbours, pools, viewpoint) if shape.normals else ([], None)
    upsamples = [index[:, 0] for index in between]
    lengths = [[len(level)] for level in levels]
    return Pyramid(levels, normals, variation, neighbours, pools, upsamples, lengths, between if shape.smooth else [])


def _normals_by_level(
    levels: list[Tensor], neighbours: list[Tensor], pools: list[Tensor], viewpoint: Tensor | str | None
) -> tuple[list[Tensor], Tensor]:
    """Normals estimated at level 0 and averaged upwards: they describe the surface, not the sparse coarse grid."""
    place = viewpoint.to(levels[0]) if isinstance(viewpoint, Tensor) else levels[0].new_zeros(3)
    finest, variation = estimate_normals(levels[0], neighbours[0], place)
    if isinstance(viewpoint, str):
        assert viewpoint == UNKNOWN, viewpoint
        finest = orient(finest, levels[0], likely_viewpoint(levels[0], finest))
    normals = [finest]
    for pool in pools:
        padded = torch.nn.functional.pad(normals[-1], (0, 0, 0, 1))
        # Only the nearest few: a mean over the whole radius would round off corners, which matching relies on.
        mean = padded[pool[:, :8]].sum(1) + padded[pool[:, 0]] * 1e-3
        normals.append(torch.nn.functional.normalize(mean, dim=1))
    return normals, variation


def turned_over(pyramid: Pyramid) -> Pyramid:
    """The same cloud seen from behind: all normals flipped."""
    return replace(pyramid, normals=[-normals for normals in pyramid.normals])


def stack_pyramids(pyramids: Sequence[Pyramid]) -> Pyramid:
    """Stack pyramids; indices are shifted, and missing neighbours stay missing."""
    if len(pyramids) == 1:
        return pyramids[0]
    count = len(pyramids[0].points)
    sizes = [[len(p.points[level]) for p in pyramids] for level in range(count)]

    def joined(name: str, into: int) -> list[Tensor]:
        lists = [getattr(p, name) for p in pyramids]
        return [_stack_indices([item[k] for item in lists], sizes[k + into]) for k in range(len(lists[0]))]

    return Pyramid(
        points=[torch.cat([p.points[k] for p in pyramids]) for k in range(count)],
        normals=[torch.cat([p.normals[k] for p in pyramids]) for k in range(len(pyramids[0].normals))],
        variation=_stack_optional([p.variation for p in pyramids]),
        neighbours=joined("neighbours", 0),
        pools=joined("pools", 0),
        upsamples=joined("upsamples", 1),
        lengths=[[length for p in pyramids for length in p.lengths[k]] for k in range(count)],
        between=joined("between", 1),
    )


def _stack_optional(values: list[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    return torch.cat(present) if present else None


def _stack_indices(indices: list[Tensor], sizes: list[int]) -> Tensor:
    total, start, moved = sum(sizes), 0, []
    for index, size in zip(indices, sizes, strict=True):
        index = index.long()
        moved.append(torch.where(index >= size, total, index + start))
        start += size
    return torch.cat(moved)
