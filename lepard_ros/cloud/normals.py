"""Surface normals from neighbours, turned towards where the sensor stood."""

import torch
from torch import Tensor


def estimate_normals(points: Tensor, neighbours: Tensor, viewpoint: Tensor) -> tuple[Tensor, Tensor]:
    """Normals by principal components, and how far the surface is from a plane.

    points: (N, 3); neighbours: (N, K) with N for a missing one; viewpoint: (3,).
    Returns normals (N, 3) of length 1 on the viewpoint's side, and the surface variation (N,) in [0, 1/3]:
    the smallest eigenvalue's share.
    """
    covariance = _neighbour_covariance(points, neighbours)
    values, vectors = torch.linalg.eigh(covariance)
    variation = values[:, 0].clamp_min(0) / values.sum(1).clamp_min(1e-12)
    return orient(vectors[:, :, 0], points, viewpoint), variation


def orient(normals: Tensor, points: Tensor, viewpoint: Tensor) -> Tensor:
    """Turn normals (N, 3) so that they point to the side of the viewpoint (3,)."""
    away = ((viewpoint - points) * normals).sum(1, keepdim=True) < 0
    return torch.where(away, -normals, normals)


def _neighbour_covariance(points: Tensor, neighbours: Tensor) -> Tensor:
    """(N, 3, 3) covariance of every point's neighbours; a missing neighbour counts for nothing."""
    present = (neighbours < len(points)).to(points.dtype)[..., None]
    offsets = (points[neighbours.clamp_max(len(points) - 1)] - points[:, None]) * present
    count = present.sum(1).clamp_min(1)
    mean = offsets.sum(1) / count
    second = offsets.transpose(1, 2) @ offsets / count[..., None]
    return second - mean[:, :, None] * mean[:, None, :]
