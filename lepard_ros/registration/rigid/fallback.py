# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A classical second opinion: FPFH features into the same hypotheses, verification and acceptance."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.registration.rigid.estimate import RigidSettings, register_matches
from lepard_ros.registration.rigid.icp import sample
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Surface


@dataclass(frozen=True)
class FpfhSettings:
    """radius: of a feature, in spacings. neighbours: most points in it. points: most per cloud. matches: most kept."""

    radius: float = 5.0
    neighbours: int = 100
    points: int = 5000
    matches: int = 1500


def register_fpfh(source: Surface, target: Surface, rigid: RigidSettings | None = None) -> Registration:
    """Align by FPFH features instead of the network's, under the same rule; `method` of the result is "fpfh"."""
    matches = match_fpfh(source, target, FpfhSettings())
    return register_matches(matches, source, target, rigid, method="fpfh")


def match_fpfh(source: Surface, target: Surface, settings: FpfhSettings) -> Matches:
    """Points that are each other's nearest in feature space first, then the other nearest ones."""
    source, target = sample(source, settings.points), sample(target, settings.points)
    if min(len(source.points), len(target.points)) == 0:
        return NO_MATCHES
    nearest, mutual, distance = _nearest_features(fpfh(source, settings), fpfh(target, settings))
    similarity = (-distance / distance.mean().clamp_min(1e-9)).exp()
    confidence = torch.where(mutual, 0.5 + 0.5 * similarity, 0.1 * similarity)
    kept = torch.topk(confidence, min(settings.matches, len(confidence))).indices
    partners = nearest[kept].numpy()
    return Matches(source.points[kept.numpy()], target.points[partners], confidence[kept].numpy())


def fpfh(surface: Surface, settings: FpfhSettings) -> Tensor:
    """Fast point feature histograms, (N, 33) float32."""
    open3d = import_open3d()
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(np.asarray(surface.points, dtype=np.float64)))
    cloud.normals = open3d.utility.Vector3dVector(np.asarray(surface.normals, dtype=np.float64))
    within = open3d.geometry.KDTreeSearchParamHybrid(settings.radius * surface.spacing, settings.neighbours)
    histogram = open3d.pipelines.registration.compute_fpfh_feature(cloud, within).data
    return torch.from_numpy(histogram.T.astype(np.float32))


def _nearest_features(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each source feature: its nearest target (N,), whether they chose each other (N,), the distance (N,)."""
    squared = torch.addmm((target**2).sum(1), source, target.T, alpha=-2.0).add_((source**2).sum(1, keepdim=True))
    nearest = squared.min(dim=1)
    mutual = nearest.values <= squared.amin(dim=0)[nearest.indices]  # amin is ten times faster than min with indices
    return nearest.indices, mutual, nearest.values.clamp_min(0.0).sqrt()
