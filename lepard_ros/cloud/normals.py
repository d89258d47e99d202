# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Surface normals from neighbours, facing the viewpoint of the sensor."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial import cKDTree
from torch import Tensor

UNKNOWN = "unknown"  # an unknown viewpoint
# Search grid for it: number of positions along each axis of the bounding box, widened by a share of its longest side.
PLACES, WIDENED = 7, 0.25
VIEW_POINTS = 1200  # points of a cloud that are sampled
VIEW_CELLS = 10  # directions are rounded to tenths: cells of about six degrees
BEHIND = 1.15  # a point this many times further away than the nearest one of its cell is hidden
# A direction is read off the closed form where the two smaller eigenvalues differ by at least this share of the trace.
CLEAR = 1e-6


def surface_normals(points: NDArray[np.floating], neighbours: int = 16) -> NDArray[np.floating]:
    """Unit normals (N, 3) of a cloud (N, 3) that was seen from the origin, from a number of neighbours."""
    if len(points) < 3:
        return np.tile([0.0, 0.0, -1.0], (len(points), 1))
    index = cKDTree(points).query(points, min(neighbours, len(points)))[1]
    origin = torch.zeros(3, dtype=torch.float64)
    return estimate_normals(torch.from_numpy(points), torch.from_numpy(index), origin)[0].numpy()


def estimate_normals(points: Tensor, neighbours: Tensor, viewpoint: Tensor) -> tuple[Tensor, Tensor]:
    """Normals by principal component analysis, and the surface variation.

    points: (N, 3); neighbours: (N, K) with N for a missing one; viewpoint: (3,).
    Returns normals (N, 3) of length 1 on the viewpoint's side, and the surface variation (N,) in [0, 1/3]:
    the smallest eigenvalue's share.
    """
    smallest, vectors, trace = smallest_eigenvector(_neighbour_covariance(points, neighbours))
    variation = smallest.clamp_min(0) / trace.clamp_min(1e-12)
    return orient(vectors.to(points.dtype), points, viewpoint), variation.to(points.dtype)


def orient(normals: Tensor, points: Tensor, viewpoint: Tensor) -> Tensor:
    """Flip normals (N, 3) so that they face the viewpoint (3,)."""
    away = ((viewpoint - points) * normals).sum(1, keepdim=True) < 0
    return torch.where(away, -normals, normals)


def likely_viewpoint(points: Tensor, normals: Tensor) -> Tensor:
    """A place (3,) from which a cloud (N, 3) may have been seen, given its normals (N, 3) of either sign.

    Of many candidates, the one that sees the most points unoccluded and the most surfaces face on. Normals facing it
    are consistent with each other; the side of a thin sheet remains ambiguous.
    """
    stride = max(1, len(points) // VIEW_POINTS)
    points, normals = points[::stride], normals[::stride]
    places = places_around(points)
    rays = points[None] - places[:, None]
    depth = rays.norm(dim=2)
    rays = rays / depth.clamp_min(1e-9)[..., None]
    side = 2 * VIEW_CELLS + 1
    x, y, z = ((rays * VIEW_CELLS).round().long() + VIEW_CELLS).unbind(2)
    cell = (x * side + y) * side + z
    nearest = depth.new_full((len(places), side**3), float("inf")).scatter_reduce(1, cell, depth, "amin")
    unhidden = (depth <= BEHIND * nearest.gather(1, cell)).float().mean(1)
    return places[(unhidden + (rays * normals).sum(2).abs().mean(1)).argmax()]


def places_around(points: Tensor) -> Tensor:
    """Places (PLACES^3, 3) on an even grid in and around the bounding box of points (N, 3)."""
    low, high = points.amin(0), points.amax(0)
    margin = WIDENED * (high - low).max()
    steps = torch.linspace(0, 1, PLACES, device=points.device, dtype=points.dtype)
    grid = torch.cartesian_prod(steps, steps, steps)
    return low - margin + grid * (high - low + 2 * margin)


def smallest_eigenvector(moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The smallest eigenvalue (N,), its direction (N, 3) of length 1, and the trace (N,) of symmetric matrices.

    moments: (6, N): xx, xy, xz, yy, yz, zz. By the trigonometric solution of the cubic, in double, which takes a
    third of the time of `eigh` on a batch of small matrices; `eigh` handles the few ambiguous directions.
    """
    xx, xy, xz, yy, yz, zz = moments.double()
    trace = xx + yy + zz
    mean = trace / 3
    a, b, c = xx - mean, yy - mean, zz - mean
    spread = ((a * a + b * b + c * c + 2 * (xy * xy + xz * xz + yz * yz)) / 6).sqrt()
    determinant = a * (b * c - yz * yz) - xy * (xy * c - yz * xz) + xz * (xy * yz - b * xz)
    angle = torch.acos((determinant / (2 * spread**3).clamp_min(1e-300)).clamp(-1, 1)) / 3
    smallest = mean + 2 * spread * torch.cos(angle + 2 * math.pi / 3)
    # Two rows of (matrix - eigenvalue) span the plane orthogonal to the direction: use the largest cross product.
    a, b, c = xx - smallest, yy - smallest, zz - smallest
    first = torch.stack([xy * yz - xz * b, xz * xy - a * yz, a * b - xy * xy])
    second = torch.stack([xy * c - xz * yz, xz * xz - a * c, a * yz - xy * xz])
    third = torch.stack([b * c - yz * yz, yz * xz - xy * c, xy * yz - b * xz])
    squares = torch.stack([product.square().sum(0) for product in (first, second, third)])
    best = torch.where(squares[0] >= squares[1], first, second)
    best = torch.where(squares[2] > squares[:2].amax(0), third, best)
    length = best.square().sum(0).sqrt()
    vectors = (best / length.clamp_min(1e-300)).T.contiguous()
    unclear = (length <= CLEAR * trace.square()).nonzero()[:, 0]
    if len(unclear):
        full = moments.double()[[0, 1, 2, 1, 3, 4, 2, 4, 5]][:, unclear].T.reshape(-1, 3, 3)
        vectors[unclear] = torch.linalg.eigh(full)[1][:, :, 0]
    return smallest, vectors, trace


def _neighbour_covariance(points: Tensor, neighbours: Tensor) -> Tensor:
    """Covariance (6, N) xx, xy, xz, yy, yz, zz of every point's neighbours; missing ones are ignored."""
    present = neighbours < len(points)
    index = neighbours.clamp_max(len(points) - 1).flatten()
    share = present / present.sum(1, keepdim=True).clamp_min(1)
    axes = [axis.index_select(0, index).view_as(neighbours) - axis[:, None] for axis in points.T.contiguous()]
    weighted = [axis * share for axis in axes]
    means = [axis.sum(1) for axis in weighted]
    pairs = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))
    return torch.stack([(weighted[i] * axes[j]).sum(1) - means[i] * means[j] for i, j in pairs])
