# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The estimator of the paper's tables: plain RANSAC over the matches, which never refuses; ICP is optional."""

import numpy as np
import torch
from torch import Tensor

from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import kabsch
from lepard_ros.registration.types import Matches

ITERATIONS = 50_000
SAMPLE = 3  # matches of a hypothesis
RADIUS = 0.05  # metres within which a match agrees with a motion
AT_ONCE = 2_000  # hypotheses


@torch.no_grad()
def ransac(
    matches: Matches, iterations: int | None = None, radius: float = RADIUS, seed: int = 0, device: str = "cpu"
) -> FloatArray:
    """The motion (4, 4) of three matches that most matches agree with, within `radius` metres.

    Hypotheses are ranked by their number of agreeing matches, then by how well these fit. Fewer than three matches give
    the identity: the paper counts every pair. Not refined: the published errors are those of the hypothesis itself.
    """
    if len(matches.confidence) < SAMPLE:
        return np.eye(4)
    source, target = (torch.as_tensor(values, dtype=torch.float64, device=device) for values in matches[:2])
    generator = torch.Generator().manual_seed(seed)
    best, motion = torch.tensor(-1.0), torch.eye(4, dtype=torch.float64)
    iterations = ITERATIONS if iterations is None else iterations
    for start in range(0, iterations, AT_ONCE):
        count = min(AT_ONCE, iterations - start)
        triples = _triples(len(source), count, generator).to(source.device)
        motions = kabsch(source[triples], target[triples], torch.ones(count, SAMPLE, device=source.device))
        scores = _agreement(motions, source, target, radius)
        score, place = (value.cpu() for value in scores.max(0))
        if score > best:
            best, motion = score, motions[place].cpu()
    return motion.numpy()


def _triples(matches: int, count: int, generator: torch.Generator) -> Tensor:
    """(count, 3) indices of different matches."""
    first = torch.randint(matches, (count,), generator=generator)
    second = (first + torch.randint(1, matches, (count,), generator=generator)) % matches
    third = torch.randint(matches - 2, (count,), generator=generator)
    for taken in torch.stack([first, second]).sort(0).values:  # skip the two that are taken, the lower one first
        third = third + (third >= taken)
    return torch.stack([first, second, third], dim=1)


def _agreement(motions: Tensor, source: Tensor, target: Tensor, radius: float) -> Tensor:
    """How many matches (M, 3) -> (M, 3) agree with each motion (H, 4, 4), plus a share below 1 for how well: (H,)."""
    moved = (source.float() @ motions[:, :3, :3].float().transpose(1, 2)) + motions[:, None, :3, 3].float()
    squares = (moved - target.float()).square().sum(-1)
    inside = squares < radius**2
    fit = (1 - squares / radius**2).clamp_min_(0).sum(1) / len(source)
    return inside.sum(1) + 0.999 * fit


def refine_icp(transform: FloatArray, source: FloatArray, target: FloatArray, reach: float = RADIUS) -> FloatArray:
    """The motion (4, 4) after point-to-point ICP of source (N, 3) on target (M, 3), as in the paper."""
    o3d = import_open3d()
    clouds = [o3d.geometry.PointCloud(o3d.utility.Vector3dVector(np.asarray(p, np.float64))) for p in (source, target)]
    reg = o3d.pipelines.registration
    result = reg.registration_icp(*clouds, reach, transform, reg.TransformationEstimationPointToPoint(False))
    return np.asarray(result.transformation)
