# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Lepard: learned matching of partial point clouds (Li and Harada, CVPR 2022), as in Figure 2 of the paper.

Backbone -> [Transformer -> Matching -> Procrustes -> Repositioning] x blocks -> confidences. The paper's variants are
settings of `LepardConfig`: entangled, sinusoidal code, Sinkhorn, no repositioning (max_condition_number = 0), number of
blocks (layers). The oracle transforms are passed to `match` as `truth`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from lepard_ros.cloud.pyramid import Pyramid
from lepard_ros.network.attention import AttentionLayer, PairBias, key_mask
from lepard_ros.network.backbone import Backbone, Relations
from lepard_ros.network.config import MATCH_LEVEL, LepardConfig
from lepard_ros.network.fine import FineMatching
from lepard_ros.network.matching import Matching
from lepard_ros.network.position import PositionCode, position_code
from lepard_ros.network.precision import full_precision
from lepard_ros.network.procrustes import RigidFit, robust_procrustes, soft_procrustes


@dataclass
class CoarseCloud:
    """The coarse points of a batch of clouds, padded to the same number.

    features: (B, n, d); points: (B, n, 3); normals: (B, n, 3) or None; mask: (B, n), true for real points.
    prepared: whether the first self attention is already in the features (see `Lepard.prepare`). biases: the pair bias
    of each self attention layer, (B, h, n, n), if known already.
    """

    features: Tensor
    points: Tensor
    normals: Tensor | None
    mask: Tensor
    prepared: bool = False
    biases: Sequence[Tensor] | None = None

    def repeated(self, count: int) -> "CoarseCloud":
        """A batch of one as a batch of `count`, without copying."""
        normals = None if self.normals is None else self.normals.expand(count, -1, -1)
        expanded = self.features.expand(count, -1, -1), self.points.expand(count, -1, -1)
        return CoarseCloud(*expanded, normals, self.mask.expand(count, -1), self.prepared)


@dataclass
class Repositioning:
    """One positioning layer: its confidences (B, n, m), its rigid fit, and the pairs to which it was applied (B,)."""

    confidence: Tensor
    fit: RigidFit
    applied: Tensor


@dataclass
class LepardOutput:
    """The final confidences (B, n, m), the function that fits a motion to them, and each positioning layer's result."""

    confidence: Tensor
    fitted: Callable[[Tensor], RigidFit]
    repositionings: list[Repositioning] = field(default_factory=list)

    @cached_property
    def fit(self) -> RigidFit:
        """The rigid motion that fits the confidences; computed on demand."""
        with full_precision(self.confidence):
            return self.fitted(self.confidence)


class Lepard(nn.Module):
    """The network. `encode` describes clouds one by one; `match` compares them pair by pair."""

    def __init__(self, config: LepardConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        modules: dict[str, type] = {"self": AttentionLayer, "cross": AttentionLayer, "positioning": Matching}
        self.layers = nn.ModuleList(
            Matching(config) if modules[kind] is Matching else AttentionLayer(config.feature_dim, config.heads)
            for kind in config.layers
        )
        self.matching = Matching(config)
        self_layers = config.layers.count("self")
        self.pair_bias = (
            PairBias(self_layers, config.heads, config.coarse_grid, config.chirality) if config.pair_bias else None
        )
        self.fine_matching = FineMatching(config.fine_dim, config.dustbin) if config.fine_dim else None
        if config.kernel == "xyz":  # initialisation of the published network
            for parameter in self.layers.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def encode(self, pyramid: Pyramid, relations: Relations | None = None) -> tuple[Tensor, Tensor | None]:
        """Coarse features (N_2, d) and fine features (N_0, fine_dim) or None of stacked clouds."""
        return self.backbone(pyramid, relations)

    def match(self, source: CoarseCloud, target: CoarseCloud, truth: RigidFit | None = None) -> LepardOutput:
        """Compare a batch of source clouds with a batch of target clouds.

        One source may be compared with several targets. truth: reposition with these motions instead of the
        estimated ones (the paper's oracle); several motions of one pair are tried as a batch.
        """
        biases_x, biases_y = self._biases(source), self._biases(target)
        source = source.repeated(len(target.features)) if len(source.features) == 1 else source
        x, y = source.features, target.features
        codes = self._codes(source.points, target.points)
        x, y, codes = self._entangle(x, y, codes)
        mask_x, mask_y = key_mask(source.mask, x.dtype), key_mask(target.mask, y.dtype)
        repositionings: list[Repositioning] = []
        for number, (kind, layer) in enumerate(zip(self.config.layers, self.layers, strict=True)):
            cross_x, cross_y = codes.cross
            if number == 0 and source.prepared and target.prepared:
                continue
            if kind == "self":
                x = layer(x, x, codes.source, codes.source, _add(mask_x, biases_x.pop(0)))
                y = layer(y, y, codes.target, codes.target, _add(mask_y, biases_y.pop(0)))
            elif kind == "cross":
                x = layer(x, y, cross_x, cross_y, mask_y)
                y = layer(y, x, cross_y, cross_x, mask_x)
            elif not self.config.entangled:
                confidence = layer(x, y, cross_x, cross_y, source.mask, target.mask)
                with full_precision(x):
                    fit = self.rigid_fit(confidence, source, target)
                if truth is not None and len(truth.rotation) > len(x):
                    # Several motions of one pair: the layers before are shared by all of them.
                    source, target = source.repeated(len(truth.rotation)), target.repeated(len(truth.rotation))
                    x, y = (features.expand(len(truth.rotation), -1, -1) for features in (x, y))
                with full_precision(x):
                    moved, applied = self._reposition(source.points, fit if truth is None else truth, truth is not None)
                codes = self._codes(moved, target.points, applied)
                repositionings.append(Repositioning(confidence, fit, applied))
        confidence = self.matching(x, y, *codes.cross, source.mask, target.mask)
        fitted = partial(self.rigid_fit, source=source, target=target)
        return LepardOutput(confidence, fitted, repositionings)

    def can_prepare(self) -> bool:
        """Whether the first layer depends on neither the other cloud nor a position, so that it can be precomputed."""
        return self.config.layers[0] == "self" and self.config.position_use == "aligned" and not self.config.entangled

    def prepare(self, cloud: CoarseCloud) -> CoarseCloud:
        """Precompute the first self attention for all later matches of a cloud, if possible."""
        if cloud.prepared or not self.can_prepare():
            return cloud
        bias = _add(key_mask(cloud.mask, cloud.features.dtype), self._biases(cloud, slice(1))[0])
        features = self.layers[0](cloud.features, cloud.features, None, None, bias)
        return CoarseCloud(features, cloud.points, cloud.normals, cloud.mask, prepared=True)

    def rigid_fit(self, confidence: Tensor, source: CoarseCloud, target: CoarseCloud) -> RigidFit:
        """The rigid motion that fits the confidences (B, n, m)."""
        counts = torch.maximum(source.mask.sum(1), target.mask.sum(1))
        if self.config.procrustes == "robust":
            scale = 1.5 * self.config.coarse_grid
            return robust_procrustes(confidence, source.points, target.points, counts, scale)
        return soft_procrustes(confidence, source.points, target.points, counts)

    def _reposition(self, points: Tensor, fit: RigidFit, trusted: bool) -> tuple[Tensor, Tensor]:
        """Source points moved by the fit if its condition number allows: (B, n, 3), and where it does: (B,)."""
        applied = torch.ones_like(fit.condition, dtype=torch.bool)
        if not trusted:
            applied = fit.condition < self.config.max_condition_number
        moved = points @ fit.rotation.transpose(1, 2).to(points) + fit.translation.transpose(1, 2).to(points)
        return torch.where(applied[:, None, None], moved, points).detach(), applied

    def _codes(self, source: Tensor, target: Tensor, applied: Tensor | None = None) -> "_Codes":
        """The position codes of both clouds. With `aligned`: none before repositioning, zero where it was refused."""
        dim, kind = self.config.feature_dim, self.config.position_code
        origin = source.new_tensor(self.config.vol_origin)
        source, target = ((points - origin) / self.config.voxel_size for points in (source, target))
        if self.config.position_use == "always":
            return _Codes(position_code(kind, source, dim), position_code(kind, target, dim))
        if applied is None:
            return _Codes(None, None)
        keep = applied[:, None, None].to(source)
        return _Codes(None, None, (position_code(kind, source * keep, dim), position_code(kind, target * keep, dim)))

    def _entangle(self, x: Tensor, y: Tensor, codes: "_Codes") -> tuple[Tensor, Tensor, "_Codes"]:
        """The entangled variant adds the code to the features once and has none afterwards."""
        if not self.config.entangled:
            return x, y, codes
        assert codes.source is not None and codes.target is not None
        return codes.source.apply(x), codes.target.apply(y), _Codes(None, None)

    def _biases(self, cloud: CoarseCloud, layers: slice | None = None) -> list[Tensor | None]:
        """The pair bias of given self attention layers, or of all remaining ones."""
        if self.pair_bias is None:
            return [None] * self.config.layers.count("self")
        if cloud.biases is not None:
            return list(cloud.biases)
        assert cloud.normals is not None
        return list(self.pair_bias(cloud.points, cloud.normals, layers or slice(int(cloud.prepared), None)))

    def forward(self, pyramid: Pyramid, truth: RigidFit | None = None) -> LepardOutput:
        """Encode and match stacked clouds: source, target, source, target, ..."""
        features, _ = self.encode(pyramid)
        source, target = split_pairs(features, pyramid)
        return self.match(source, target, truth)

    def forward_recorded(self, pyramid: dict[str, Any], truth: RigidFit | None = None) -> dict[str, Tensor]:
        """Run on a recorded pyramid (arrays `pyramid_points_0`, ...): features, confidence, R, t of its one pair."""
        recorded = recorded_pyramid(pyramid, next(self.parameters()).device)
        with torch.no_grad():
            features, _ = self.encode(recorded)
            output = self.match(*split_pairs(features, recorded), truth)
        result = {"features": features, "confidence": output.confidence[0]}
        return result | {"R": output.fit.rotation[0], "t": output.fit.translation[0]}


@dataclass
class _Codes:
    """Codes of source and target in self attention, and (if they differ) in cross attention and matching."""

    source: PositionCode | None
    target: PositionCode | None
    aligned: tuple[PositionCode, PositionCode] | None = None

    @property
    def cross(self) -> tuple[PositionCode | None, PositionCode | None]:
        return self.aligned or (self.source, self.target)


def _add(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    return mask + bias


def pad_clouds(
    features: Sequence[Tensor], points: Sequence[Tensor], normals: Sequence[Tensor], prepared: bool = False
) -> CoarseCloud:
    """Clouds of different sizes as one batch: lists of (n_b, d), (n_b, 3), (n_b, 3) or an empty list."""
    lengths = torch.tensor([len(f) for f in features], device=features[0].device)
    mask = torch.arange(int(lengths.max()), device=lengths.device)[None] < lengths[:, None]
    padded = [pad_sequence(list(part), batch_first=True) if part else None for part in (features, points, normals)]
    assert padded[0] is not None and padded[1] is not None
    return CoarseCloud(padded[0], padded[1], padded[2], mask, prepared)


def split_pairs(features: Tensor, pyramid: Pyramid) -> tuple[CoarseCloud, CoarseCloud]:
    """Sources and targets of stacked pairs: features (N_2, d) in the order source, target, source, target, ..."""
    lengths = pyramid.lengths[MATCH_LEVEL]
    x, points = features.split(lengths), pyramid.points[MATCH_LEVEL].split(lengths)
    normals = pyramid.normals[MATCH_LEVEL].split(lengths) if pyramid.normals else ()
    source, target = (pad_clouds(x[side::2], points[side::2], normals[side::2]) for side in (0, 1))
    return source, target


def recorded_pyramid(arrays: dict[str, Any], device: torch.device) -> Pyramid:
    """A pyramid from arrays named as in the recorded parity cases."""
    levels = sum(name.startswith("pyramid_points_") for name in arrays)

    def tensors(name: str, count: int) -> list[Tensor]:
        return [torch.from_numpy(np.asarray(arrays[f"pyramid_{name}_{k}"])).to(device) for k in range(count)]

    return Pyramid(
        points=tensors("points", levels),
        normals=[],
        variation=None,
        neighbours=[index.long() for index in tensors("neighbors", levels)],
        pools=[index.long() for index in tensors("pools", levels - 1)],
        upsamples=[index[:, 0].long() for index in tensors("upsamples", levels - 1)],
        lengths=[lengths.tolist() for lengths in tensors("lengths", levels)],
    )
