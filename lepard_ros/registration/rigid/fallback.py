# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Classical fallback: FPFH features, then the same hypotheses, verification and acceptance."""

import numpy as np
import torch
from torch import Tensor

from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.registration.rigid.estimate import RigidSettings, register_matches
from lepard_ros.registration.rigid.icp import sample
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Surface

RADIUS, MAX_NEIGHBOURS = 5.0, 100  # of a feature: radius in spacings, and maximum number of points
MAX_POINTS = 5000  # of a cloud
MAX_MATCHES = 1500


def register_fpfh(source: Surface, target: Surface, rigid: RigidSettings | None = None) -> Registration:
    """Align with FPFH features instead of the network's, with the same acceptance rule; `method` is "fpfh"."""
    matches = match_fpfh(source, target)
    return register_matches(matches, source, target, rigid, method="fpfh")


def match_fpfh(source: Surface, target: Surface) -> Matches:
    """Matches by nearest features: mutual ones first, then the others."""
    source, target = sample(source, MAX_POINTS), sample(target, MAX_POINTS)
    if min(len(source.points), len(target.points)) == 0:
        return NO_MATCHES
    nearest, mutual, distance = _nearest_features(fpfh(source), fpfh(target))
    similarity = (-distance / distance.mean().clamp_min(1e-9)).exp()
    confidence = torch.where(mutual, 0.5 + 0.5 * similarity, 0.1 * similarity)
    kept = torch.topk(confidence, min(MAX_MATCHES, len(confidence))).indices
    partners = nearest[kept].numpy()
    return Matches(source.points[kept.numpy()], target.points[partners], confidence[kept].numpy())


def fpfh(surface: Surface) -> Tensor:
    """Fast point feature histograms, (N, 33) float32."""
    open3d = import_open3d()
    cloud = open3d.geometry.PointCloud(open3d.utility.Vector3dVector(np.asarray(surface.points, dtype=np.float64)))
    cloud.normals = open3d.utility.Vector3dVector(np.asarray(surface.normals, dtype=np.float64))
    within = open3d.geometry.KDTreeSearchParamHybrid(RADIUS * surface.spacing, MAX_NEIGHBOURS)
    histogram = open3d.pipelines.registration.compute_fpfh_feature(cloud, within).data
    return torch.from_numpy(histogram.T.astype(np.float32))


def _nearest_features(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each source feature: nearest target (N,), whether the match is mutual (N,), the distance (N,)."""
    squared = torch.addmm((target**2).sum(1), source, target.T, alpha=-2.0).add_((source**2).sum(1, keepdim=True))
    nearest = squared.min(dim=1)
    mutual = nearest.values <= squared.amin(dim=0)[nearest.indices]  # amin is ten times faster than min with indices
    return nearest.indices, mutual, nearest.values.clamp_min(0.0).sqrt()
