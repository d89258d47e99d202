# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Self and cross attention, with the position code disentangled from the features."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lepard_ros.network.position import PositionCode, SinusoidalCode
from lepard_ros.network.precision import full_precision


class AttentionLayer(nn.Module):
    """x attends to y: x + MLP(cat[x, message])."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.merge = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(2 * dim, 2 * dim, bias=False), nn.ReLU(), nn.Linear(2 * dim, dim, bias=False)
        )
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(
        self, x: Tensor, y: Tensor, x_code: PositionCode | None, y_code: PositionCode | None, bias: Tensor | None
    ) -> Tensor:
        """x: (B, n, d); y: (B, m, d); codes of the same points, or None; bias: added to the scores, (B, h, n, m)."""
        q, k, v = project(self.q_proj, x, x_code), project(self.k_proj, y, y_code), self.v_proj(y)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        message = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        message = self.norm1(self.merge(message.transpose(1, 2).flatten(2)))
        return x + self.norm2(self._mlp(x, message))

    def _mlp(self, x: Tensor, message: Tensor) -> Tensor:
        """MLP(cat[x, message]) without the copy: the first product is the sum of two halves."""
        first, _, last = self.mlp
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        own, other = first.weight.T.chunk(2)
        hidden = x.flatten(0, 1) @ own
        hidden = hidden.addmm_(message.flatten(0, 1).to(hidden.dtype), other.to(hidden.dtype))  # differ under autocast
        return last(F.relu_(hidden)).view_as(x)


def project(linear: nn.Linear, x: Tensor, code: PositionCode | None) -> Tensor:
    """Project and apply the code: a sinusoidal one is added before the projection, a rotary one rotates the result."""
    if code is None:
        return linear(x)
    if isinstance(code, SinusoidalCode):
        return linear(code.apply(x))
    return code.apply(linear(x))


class PairBias(nn.Module):
    """Attention bias between two points of one cloud, from their distance and the angles of their normals.

    One small network gives the bias of all self attention layers; it is rotation-invariant.
    """

    REACHES = (1.5, 3.0, 6.0, 12.0, 24.0)  # in spacings

    def __init__(self, layers: int, heads: int, scale: float, chirality: bool = False, hidden: int = 16) -> None:
        """scale: metres, the spacing of the points. chirality: include the twist between the points."""
        super().__init__()
        self.layers, self.heads, self.scale, self.chirality = layers, heads, scale, chirality
        inputs = len(self.REACHES) + 4 + chirality
        self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, layers * heads))

    def forward(self, points: Tensor, normals: Tensor, layers: slice | None = None) -> list[Tensor]:
        """points, normals: (B, n, 3); layers: which are wanted (None: all). For each its bias, (B, heads, n, n)."""
        with full_precision(points):
            features = self._geometry(points, normals)
        first, _, last = self.mlp
        assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
        hidden = F.relu(_channels_first(first.weight, first.bias, features.flatten(2)), inplace=True)
        start, stop, _ = (layers or slice(None)).indices(self.layers)
        rows = slice(start * self.heads, stop * self.heads)
        bias = _channels_first(last.weight[rows], last.bias[rows], hidden)
        return list(bias.unflatten(2, features.shape[2:]).split(self.heads, dim=1))

    def _geometry(self, points: Tensor, normals: Tensor) -> Tensor:
        """Distances and angles of all pairs, (B, C, n, n).

        Channels first: the last product then writes the heads one after the other, as attention reads them.
        """
        distance = torch.cdist(points, points)
        away = 1 / distance.clamp_min(1e-3 * self.scale)
        heights = normals @ points.transpose(1, 2)  # height of every point above every other tangent plane
        own = heights.diagonal(dim1=1, dim2=2)[..., None]
        leaving, arriving = (heights - own) * away, (own - heights).transpose(1, 2) * away
        near = [torch.exp(distance / (-self.scale * reach)) for reach in self.REACHES]
        angles = [leaving, arriving, normals @ normals.transpose(1, 2), leaving * arriving]
        if self.chirality:
            angles.append(_twists(points, normals) * away)
        return torch.stack([*near, *angles], dim=1)


class Handedness(nn.Module):
    """What distinguishes a left hand from a right one: on which side of a point the parts of the cloud lie.

    Every head attends to a part of the cloud (such as the head of a body) and gives the direction towards it. The
    signed volume of the normal and two directions does not change with a rotation, and changes its sign in a mirror.
    The twist between two points does so too, but averages to zero around a point. It starts as zero.
    """

    HEADS, WIDTH = 8, 16
    SPREAD = 3.0  # factor on the volumes, so that they vary as much as the features
    GAIN = 8.0  # factor on the result: an optimiser moves all weights by the same step, and these start as zero
    pairs: Tensor

    def __init__(self, dim: int, scale: float) -> None:
        """scale: metres, the spacing of the points; shorter directions count less."""
        super().__init__()
        self.scale = scale
        self.q_proj, self.k_proj = (nn.Linear(dim, self.HEADS * self.WIDTH, bias=False) for _ in range(2))
        for project in (self.q_proj, self.k_proj):
            nn.init.normal_(project.weight, std=0.18)  # heads that attend to different parts from the start
        pairs = torch.combinations(torch.arange(self.HEADS), 2)
        self.register_buffer("pairs", pairs.T.contiguous(), persistent=False)
        last = nn.Linear(2 * dim, dim, bias=False)
        nn.init.zeros_(last.weight)
        self.mlp = nn.Sequential(nn.Linear(dim + len(pairs), 2 * dim, bias=False), nn.ReLU(), last)

    def forward(self, x: Tensor, points: Tensor, normals: Tensor) -> Tensor:
        """x: (n, d); points, normals: (n, 3). Returns what is added to the features, (n, d)."""
        x = F.layer_norm(x, (self.q_proj.in_features,))
        volumes = self.SPREAD * self.volumes(x, points, normals)
        return self.GAIN * self.mlp(torch.cat([x, volumes.to(x.dtype)], dim=1))

    def volumes(self, x: Tensor, points: Tensor, normals: Tensor) -> Tensor:
        """Signed volumes of the normal and the directions of each pair of heads, (n, pairs), in [-1, 1]."""
        q, k = (
            linear(x).unflatten(-1, (self.HEADS, -1)).transpose(0, 1)[None] for linear in (self.q_proj, self.k_proj)
        )
        local = points - points.mean(0)
        places = F.pad(local, (0, self.WIDTH - 3)).expand(
            1, self.HEADS, -1, -1
        )  # as wide as the queries: a fast kernel
        attended = F.scaled_dot_product_attention(q, k, places.to(q.dtype).contiguous())[0, :, :, :3]
        with full_precision(points):
            away = attended.to(points) - local
            directions = away * torch.rsqrt(away.square().sum(2, keepdim=True) + self.scale**2)
            first, second = directions[self.pairs[0]], directions[self.pairs[1]]
            return (torch.linalg.cross(first, second) * normals).sum(2).T


def _twists(points: Tensor, normals: Tensor) -> Tensor:
    """n_i . ((p_j - p_i) x n_j) of all pairs, (B, n, n): mirroring changes the sign. points, normals: (B, n, 3)."""
    # Relative to the mean, where the two partly cancelling terms are small.
    moments = torch.linalg.cross(points - points.mean(1, keepdim=True), normals)
    half = normals @ moments.transpose(1, 2)
    return half + half.transpose(1, 2)


def _channels_first(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    """A linear layer on (B, C, N). Not `baddbmm`, which first copies the bias to all N points."""
    return (weight @ x).add_(bias[:, None])


def key_mask(mask: Tensor, dtype: torch.dtype) -> Tensor | None:
    """(B, m) of valid keys -> (B, 1, 1, m) to add to the scores, or None where all are valid."""
    if bool(mask.all()):
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, float("-inf"))[:, None, None]
