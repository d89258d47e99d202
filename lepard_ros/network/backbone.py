# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""KPFCN: the convolutional backbone, with features for the coarse points and optionally for the fine ones."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lepard_ros.cloud.pyramid import Pyramid
from lepard_ros.errors import InputError
from lepard_ros.network.attention import AttentionLayer, Handedness, PairBias
from lepard_ros.network.config import MATCH_LEVEL, LepardConfig
from lepard_ros.network.convolution import CHUNK, make_convolution
from lepard_ros.network.precision import at_least_float, is_traced
from lepard_ros.network.relation import Relation, with_zero_row
from lepard_ros.network.workspace import at_once, gather_rows, in_pieces, scratch_memory

SLOPE, EPSILON = 0.1, 1e-5
POOLED_NUMBERS = 2**20  # gathered at a time, so that they stay in the CPU cache
# Within each level, and from each level to the next.
Relations = tuple[list[Relation], list[Relation]]


class Normalisation(nn.Module):
    """Instance norm without parameters over the points, of all stacked clouds together or of each alone."""

    def __init__(self, joint: bool) -> None:
        super().__init__()
        self.joint = joint

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x: (N, C); lengths: points of each stacked cloud."""
        if self.joint:
            return _standardise_exactly(x)
        return torch.cat([_standardise(part) for part in x.split(lengths)]) if len(lengths) > 1 else _standardise(x)


def _standardise(x: Tensor) -> Tensor:
    """Zero mean and unit variance of each channel over the points (N, C)."""
    if len(x) < 2:
        return torch.zeros_like(x)
    if is_traced():  # ONNX has no batch norm that takes its statistics from the batch
        return _standardise_exactly(x)
    return F.batch_norm(x, None, None, training=True, eps=EPSILON)


def _standardise_exactly(x: Tensor) -> Tensor:
    """The same, slower than the batch norm kernel but accurate enough to reproduce the authors' numbers.

    x, the output of a linear layer or a convolution, may be overwritten.
    """
    x = at_least_float(x)
    mean = x.mean(0)
    parts = in_pieces(x, at_once(x, CHUNK))  # fits the cache
    squares = torch.stack([(part - mean).square().sum(0) for part in parts])
    scale = torch.rsqrt(squares.sum(0) / x.shape[0] + EPSILON)
    # Without gradients the result overwrites x: allocating new memory costs more than the sum.
    needed = torch.is_grad_enabled() or is_traced()
    return torch.addcmul(-mean * scale, x, scale, out=None if needed else x)


class Unary(nn.Module):
    """A linear layer on each point, with normalisation and (by default) activation."""

    def __init__(self, inputs: int, outputs: int, norm: Normalisation, activate: bool = True) -> None:
        super().__init__()
        self.mlp = nn.Linear(inputs, outputs, bias=False)
        self.norm, self.activate = norm, activate

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """x: (N, inputs) -> (N, outputs)."""
        x = self.norm(self.mlp(x), lengths)
        return F.leaky_relu_(x, SLOPE) if self.activate else x


class Rise(nn.Module):
    """The decoder's step to a finer level: a `Unary` on cat[features of the nearest coarser point, own features]."""

    def __init__(self, inputs: int, outputs: int, norm: Normalisation) -> None:
        super().__init__()
        self.mlp = nn.Linear(inputs, outputs, bias=False)
        self.norm = norm

    def forward(self, coarse: Tensor, lift: Callable[[Tensor], Tensor], own: Tensor, lengths: list[int]) -> Tensor:
        """coarse: (M, a); lift: maps (M, c) to the finer points (N, c); own: (N, b) -> (N, outputs).

        The product comes before the lift, because there are several times as many finer points.
        """
        from_coarse, from_own = self.mlp.weight.T.split([coarse.shape[1], own.shape[1]])
        x = lift(coarse @ from_coarse)
        x = x.addmm_(own.to(x.dtype), from_own.to(x.dtype))  # the types differ under autocast
        return F.leaky_relu_(self.norm(x, lengths), SLOPE)


class SimpleBlock(nn.Module):
    """Convolution, norm, activation."""

    def __init__(self, inputs: int, outputs: int, config: LepardConfig, level: int, norm: Normalisation) -> None:
        super().__init__()
        self.KPConv = make_convolution(inputs, outputs, config, level)
        self.norm = norm

    def forward(self, x: Tensor, relation: Relation, lengths: list[int]) -> Tensor:
        """x: (M, inputs) -> (N, outputs)."""
        return F.leaky_relu_(self.norm(self.KPConv(x, relation), lengths), SLOPE)


class ResidualBlock(nn.Module):
    """Bottleneck: narrow, convolve, widen, add the shortcut. Strided where the queries are the next level's points."""

    def __init__(self, inputs: int, outputs: int, config: LepardConfig, level: int, norm: Normalisation) -> None:
        super().__init__()
        middle = outputs // config.bottleneck
        self.unary1 = Unary(inputs, middle, norm)
        self.convolution = SimpleBlock(middle, middle, config, level, norm)
        self.unary2 = Unary(middle, outputs, norm, activate=False)
        self.unary_shortcut = Unary(inputs, outputs, norm, activate=False) if inputs != outputs else None

    def forward(self, x: Tensor, relation: Relation, before: list[int], after: list[int]) -> Tensor:
        """x: (M, inputs) -> (N, outputs); before, after: lengths of the stacked clouds at supports and queries."""
        y = self.unary1(x, before)
        y = self.unary2(self.convolution(y, relation, after), after)
        shortcut = x if before == after else max_pool(x, relation.neighbours)
        if self.unary_shortcut is not None:
            shortcut = self.unary_shortcut(shortcut, after)
        return F.leaky_relu_(y.add_(shortcut), SLOPE)


def max_pool(x: Tensor, neighbours: Tensor) -> Tensor:
    """Maximum feature over the neighbours; a missing neighbour counts as zero, as in the reference."""
    filled = with_zero_row(x)
    parts = in_pieces(neighbours, max(1, at_once(x, POOLED_NUMBERS) // int(x.shape[1] * neighbours.shape[1])))
    return torch.cat([gather_rows(filled, part).amax(1) for part in parts])


def upsample(x: Tensor, nearest: Tensor) -> Tensor:
    """Each finer point takes the features of its nearest coarser point; zeros if there is none."""
    return with_zero_row(x).index_select(0, nearest)


def interpolate(x: Tensor, index: Tensor, finer: Tensor, coarser: Tensor) -> Tensor:
    """Features (M, C) of coarser points at finer ones, (N, C): weighted by the inverse squared distance.

    index: (N, K) of coarser points, M for a missing one. finer: (N, 3); coarser: (M, 3). The features then change
    smoothly over the surface and hardly depend on the placement of the coarser grid.
    """
    with torch.no_grad():
        count = coarser.shape[0]
        present = index < count
        apart = gather_rows(coarser, index.clamp_max(count - 1)) - finer[:, None]
        nearness = present / apart.square().sum(-1).clamp_min(1e-12)
        share = nearness / nearness.sum(1, keepdim=True).clamp_min(1e-12)
    if is_traced():  # ONNX has no sums of bags
        return (share[:, None] @ gather_rows(with_zero_row(x), index))[:, 0]
    return F.embedding_bag(index, with_zero_row(x), per_sample_weights=share.to(x.dtype), mode="sum")


class Context(nn.Module):
    """What the coarse points of a cloud tell each other before the decoder goes on to its fine points.

    Convolutions see a metre or two; a point of a plain wall is told apart by what stands further away. The bias of
    distances and angles keeps the features invariant to rotation. It starts as zero.
    """

    def __init__(self, config: LepardConfig) -> None:
        super().__init__()
        dim, heads = config.feature_dim, config.heads
        self.layers = nn.ModuleList(AttentionLayer(dim, heads) for _ in range(config.context))
        self.bias = PairBias(config.context, heads, config.coarse_grid, config.chiral_context)
        self.out = nn.Linear(dim, config.width * 2**MATCH_LEVEL, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, coarse: Tensor, points: Tensor, normals: Tensor, lengths: list[int]) -> Tensor:
        """coarse: (n, d) of stacked clouds; points, normals: (n, 3). Returns (n, width of the decoder there)."""
        if len(lengths) > 1:
            clouds = zip(*(values.split(lengths) for values in (coarse, points, normals)), strict=True)
            return torch.cat([self(*cloud, [len(cloud[0])]) for cloud in clouds])
        x = coarse[None]
        for layer, bias in zip(self.layers, self.bias(points[None], normals[None]), strict=True):
            x = layer(x, x, None, None, bias)
        return self.out(x[0])


class Backbone(nn.Module):
    """Encoder over the levels of the pyramid; decoder to the matched level, and to level 0 for fine features."""

    def __init__(self, config: LepardConfig) -> None:
        super().__init__()
        self.config = config
        norm = Normalisation(config.normalisation == "joint")
        width, levels = config.width, len(config.neighbour_limits)
        inputs = 2 if config.kernel == "invariant" else 1
        self.first = SimpleBlock(inputs, width // 2, config, 0, norm)
        self.stages = nn.ModuleList()
        channels = width // 2
        for level in range(levels):
            out = width * 2**level
            blocks = [ResidualBlock(channels, out, config, level, norm)]
            if level > 0:
                blocks.append(ResidualBlock(out, out, config, level, norm))
            if level + 1 < levels:
                blocks.append(ResidualBlock(out, out, config, level, norm))
            self.stages.append(nn.ModuleList(blocks))
            channels = out
        self.decoder = nn.ModuleDict()
        self.decoder_blocks = nn.ModuleDict()
        last = MATCH_LEVEL if not config.fine_dim else 0
        for level in range(levels - 2, last - 1, -1):
            out = width * 2**level
            self.decoder[str(level)] = Rise(channels + out, out, norm)
            if config.decoder == "smooth":
                self.decoder_blocks[str(level)] = ResidualBlock(out, out, config, level, norm)
            channels = out
        self.coarse_out = nn.Linear(width * 2**MATCH_LEVEL, config.feature_dim)
        self.handed = Handedness(config.feature_dim, config.coarse_grid) if config.handed else None
        self.context = Context(config) if config.context and config.fine_dim else None
        self.fine_out = nn.Linear(width, config.fine_dim) if config.fine_dim else None

    def forward(self, pyramid: Pyramid, relations: Relations | None = None) -> tuple[Tensor, Tensor | None]:
        """Coarse features (N_2, d), and fine features (N_0, fine_dim) or None.

        relations: from an earlier call for the same pyramid, to avoid rebuilding the convolution operators.
        """
        with scratch_memory():
            return self._forward(pyramid, *(relations or self.relations(pyramid)))

    def _forward(self, pyramid: Pyramid, same: list[Relation], down: list[Relation]) -> tuple[Tensor, Tensor | None]:
        """Down through the levels, two or three blocks each, and up again."""
        lengths = pyramid.lengths
        x = self.first(self.input_features(pyramid), same[0], lengths[0])
        skips = []
        for level, stage in enumerate(self.stages):
            blocks = list(stage.children())
            strided = len(blocks) - 1 if level < len(down) else len(blocks)
            for block in blocks[:strided]:
                x = block(x, same[level], lengths[level], lengths[level])
            skips.append(x)
            if level < len(down):
                x = blocks[strided](x, down[level], lengths[level], lengths[level + 1])
        return self.decode(x, skips, pyramid, same)

    def decode(
        self, x: Tensor, skips: list[Tensor], pyramid: Pyramid, same: list[Relation]
    ) -> tuple[Tensor, Tensor | None]:
        """From the coarsest level to the matched one, then to the fine one."""
        coarse = None
        for name, step in self.decoder.items():
            level, lengths = int(name), pyramid.lengths[int(name)]
            x = step(x, self.lift(pyramid, level), skips[level], lengths)
            if name in self.decoder_blocks:
                x = self.decoder_blocks[name](x, same[level], lengths, lengths)
            if level == MATCH_LEVEL:
                coarse = self.coarse_features(x, pyramid.points[level], pyramid.normals, lengths)
                if self.context is not None:
                    x = x + self.context(coarse, pyramid.points[level], pyramid.normals[level], lengths)
        assert coarse is not None
        return coarse, self.fine_out(x) if self.fine_out is not None else None

    def coarse_features(self, x: Tensor, points: Tensor, normals: list[Tensor], lengths: list[int]) -> Tensor:
        """Coarse features (n, d) of the matched level; points: (n, 3). normals: of every level, if there are any."""
        coarse = self.coarse_out(x)
        if self.handed is None:
            return coarse
        whole = coarse, points, normals[MATCH_LEVEL]
        if len(lengths) == 1:  # also because ONNX would fix the length
            return coarse + self.handed(*whole)
        clouds = zip(*(values.split(lengths) for values in whole), strict=True)
        return torch.cat([cloud[0] + self.handed(*cloud) for cloud in clouds])

    def lift(self, pyramid: Pyramid, level: int) -> Callable[[Tensor], Tensor]:
        """The function that maps features of the next coarser level to the points of this one."""
        if self.config.decoder == "nearest":
            return lambda x: upsample(x, pyramid.upsamples[level])
        index, ends = pyramid.between[level], pyramid.points[level : level + 2]
        return lambda x: interpolate(x, index, *ends)

    def input_features(self, pyramid: Pyramid) -> Tensor:
        """Input features (N_0, 1 or 2): a constant 1; with normals also the surface variation."""
        ones = torch.ones_like(pyramid.points[0][:, :1])
        if self.config.kernel == "xyz":
            return ones
        if pyramid.variation is None:
            raise InputError("this network needs a pyramid with normals: build it with the network's `config.pyramid`.")
        return torch.cat([ones, 10 * pyramid.variation[:, None]], dim=1)

    def relations(self, pyramid: Pyramid) -> Relations:
        """The neighbourhoods of the convolutions within each level, and from each level to the next."""

        def relation(queries: int, supports: int, neighbours: Tensor) -> Relation:
            radius = self.config.grid * self.config.conv_radius * 2**supports
            points, normals = pyramid.points, pyramid.normals
            own, others = (normals[queries], normals[supports]) if normals else (None, None)
            ends = points[queries], points[supports]
            return Relation(*ends, neighbours, radius, own, others, self.config.chirality)

        same = [relation(level, level, index) for level, index in enumerate(pyramid.neighbours)]
        down = [relation(level + 1, level, index) for level, index in enumerate(pyramid.pools)]
        return same, down
