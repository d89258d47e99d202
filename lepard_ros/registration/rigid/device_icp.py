# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The expensive half of an ICP step on a GPU: nearest points and sums over them. numpy does the rest."""

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from lepard_ros.cloud.neighbours import radius_neighbours
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.rigid.icp import MIN_FACING, Equations, IcpSettings, equations
from lepard_ros.registration.types import Surface


def equations_for(device: str) -> Callable[[Surface, Surface, FloatArray, float, IcpSettings], Equations]:
    """The function that builds the ICP equations on a device: with k-d trees on the CPU."""
    return equations if torch.device(device).type == "cpu" else partial(equations_on, device)


@lru_cache(maxsize=64)
def on_device(surface: Surface, device: str) -> tuple[Tensor, Tensor]:
    """The points and normals (N, 3) of a surface on a device: a keyframe is uploaded once."""
    return torch.as_tensor(surface.points, device=device), torch.as_tensor(surface.normals, device=device)


def equations_on(
    device: str, source: Surface, target: Surface, transforms: FloatArray, reach: float, settings: IcpSettings
) -> Equations:
    """`icp.equations` for motions (H, 4, 4), computed on a device."""
    (own, own_normals), (points, normals) = on_device(source, device), on_device(target, device)
    motions = torch.as_tensor(transforms, device=device)
    turns = motions[:, :3, :3].transpose(1, 2)
    moved = own @ turns + motions[:, None, :3, 3]
    index = radius_neighbours(moved.flatten(0, 1), points, reach, 1)[:, 0].view(moved.shape[:2])
    near, index = index < len(points), index.clamp_max(len(points) - 1)
    normal = normals[index]
    facing = ((own_normals @ turns) * normal).sum(-1)
    if np.isnan(source.viewpoint).any() or np.isnan(target.viewpoint).any():
        facing = facing.abs()
    residual = ((moved - points[index]) * normal).sum(-1)
    pull = (1 - (residual / (settings.kernel * reach)) ** 2).clamp_min(0) ** 2
    return _summed(moved, normal, residual, pull * (near & (facing > MIN_FACING)))


def _summed(moved: Tensor, normal: Tensor, residual: Tensor, weight: Tensor) -> Equations:
    """The normal equations of points (H, n, 3), normals (H, n, 3), residuals (H, n) and weights (H, n)."""
    total = weight.sum(1)
    centre = (weight[..., None] * moved).sum(1) / total.clamp_min(1e-12)[:, None]
    lever = torch.linalg.cross(moved - centre[:, None], normal)
    jacobian = torch.cat([normal, lever], dim=2)
    weighted = (jacobian * weight[..., None]).transpose(1, 2)
    hessian, gradient = weighted @ jacobian, (weighted @ residual[..., None])[..., 0]
    corners = torch.stack([moved.amin(1), moved.amax(1)], 1)
    return Equations(*(values.cpu().numpy() for values in (hessian, gradient, centre, total, corners)))
