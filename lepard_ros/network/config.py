# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The configuration of a Lepard network, saved with its weights."""

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lepard_ros.cloud.pyramid import PyramidShape
from lepard_ros.errors import InputError

# Valid ranges, so that a damaged card is rejected before a network is built from it.
RANGES: dict[str, tuple[float, float]] = {
    "grid": (1e-4, 1e3), "conv_radius": (0.1, 100), "kernel_extent": (0.1, 100), "kernel_points": (1, 128),
    "width": (4, 1024), "feature_dim": (6, 2112), "heads": (1, 64), "voxel_size": (1e-6, 1e3),
    "temperature": (1e-6, 1e3), "sinkhorn_iterations": (0, 1000), "max_condition_number": (0, float("inf")),
    "fine_dim": (0, 512), "confidence_threshold": (0, 1), "bottleneck": (1, 16), "context": (0, 8),
}  # fmt: skip
CHOICES = {
    "kernel": ("xyz", "invariant"),
    "normalisation": ("joint", "cloud"),
    "position_code": ("rotary", "sinusoidal"),
    "position_use": ("always", "aligned"),
    "matching": ("dual_softmax", "sinkhorn"),
    "procrustes": ("soft", "robust"),
    "decoder": ("nearest", "smooth"),
}
LAYERS = ("self", "cross", "positioning")
# The level of the pyramid whose points are matched; level 0 holds the fine points.
MATCH_LEVEL = 2


@dataclass(frozen=True)
class LepardConfig:
    """All settings of the forward pass.

    The defaults are the paper's network for 3DMatch. `small_rigid` and `small_deformable` are ours.
    """

    grid: float = 0.025  # metres, level 0
    conv_radius: float = 2.5  # cells
    kernel_extent: float = 2.0  # cells
    neighbour_limits: tuple[int, ...] = (38, 36, 36, 38)
    kernel: str = (
        "xyz"  # "xyz": kernel points in space; "invariant": in radius, height over the normal, angle of normals
    )
    kernel_points: int = 15
    chirality: bool = False  # invariant kernels and pair bias include the twist, which distinguishes left from right
    width: int = 256  # first_feats_dim
    bottleneck: int = 4  # ratio of the width of a residual block to that of its convolution
    decoder: str = "nearest"  # "nearest": the published one; "smooth": interpolated, and convolved at every level
    context: int = 0  # self attention layers of the decoder, through which fine features see the whole cloud
    chiral_context: bool = False  # these layers see the twist between points, which distinguishes left from right
    handed: bool = False  # coarse features include on which side of a point the rest of the cloud lies
    normalisation: str = (
        "joint"  # "joint": over all stacked clouds; "cloud": each cloud alone, so that it can be cached
    )
    feature_dim: int = 528
    heads: int = 4
    layers: tuple[str, ...] = ("self", "cross", "positioning", "self", "cross")
    pair_bias: bool = False  # self attention uses distances and angles between the points
    voxel_size: float = 0.08  # metres, unit of the position code
    vol_origin: tuple[float, float, float] = (-3.6, -2.4, 1.14)
    position_code: str = "rotary"  # "rotary" | "sinusoidal"
    position_use: str = (
        "always"  # "always" | "aligned": only in cross attention and matching, once the clouds are aligned
    )
    entangled: bool = False
    matching: str = "dual_softmax"  # "dual_softmax" | "sinkhorn"
    temperature: float = 0.1
    sinkhorn_iterations: int = 3
    procrustes: str = "soft"  # "soft": the paper's; "robust": matches that agree with each other weigh more
    max_condition_number: float = 30.0
    fine_dim: int = 0  # width of the fine features at level 0 (0: none)
    dustbin: bool = False  # fine points may match nothing: a learned score competes with those of their partners
    confidence_threshold: float = 0.05
    mutual: bool = False

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            whole = LepardConfig.__annotations__[name] is int
            if (
                isinstance(value, bool)
                or not isinstance(value, int if whole else (int, float))
                or not low <= value <= high
            ):
                kind = "a whole number" if whole else "a number"
                raise InputError(f"{name} is {value!r}: it must be {kind} from {low:g} to {high:g}.")
        self._check_lists()
        if self.feature_dim % (6 * self.heads):
            raise InputError(f"feature_dim {self.feature_dim} must be a multiple of 6 x heads = {6 * self.heads}.")

    def _check_lists(self) -> None:
        limits, layers, origin = self.neighbour_limits, self.layers, self.vol_origin
        if not (isinstance(limits, tuple) and 3 <= len(limits) <= 6 and all(k in range(1, 1025) for k in limits)):
            raise InputError(f"neighbour_limits is {limits!r}: it must hold 3 to 6 integers from 1 to 1024.")
        if not (isinstance(layers, tuple) and 1 <= len(layers) <= 64 and all(kind in LAYERS for kind in layers)):
            raise InputError(f"layers is {layers!r}: it must hold 1 to 64 of {', '.join(LAYERS)}.")
        if not (isinstance(origin, tuple) and len(origin) == 3 and all(_is_finite(value) for value in origin)):
            raise InputError(f"vol_origin is {origin!r}: it must be three finite numbers in metres.")

    @property
    def pyramid(self) -> PyramidShape:
        """The pyramid settings of this network."""
        needs_normals = self.kernel == "invariant" or self.pair_bias
        smooth = self.decoder == "smooth"
        return PyramidShape(self.grid, self.conv_radius, self.neighbour_limits, needs_normals, smooth)

    @property
    def coarse_grid(self) -> float:
        """Spacing in metres of the points that are matched."""
        return self.grid * 2**MATCH_LEVEL

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LepardConfig":
        """From JSON values; raises InputError for an unknown name."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(
                f"unknown network setting {unknown[0]!r}: the weights are of a newer version, update lepard_ros."
            )
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


PAPER_RIGID = LepardConfig()
PAPER_DEFORMABLE = LepardConfig(
    grid=0.01, neighbour_limits=(22, 27, 29, 30), voxel_size=0.04, max_condition_number=40.0,
    confidence_threshold=0.1, mutual=True,
)  # fmt: skip
SMALL_RIGID = LepardConfig(
    grid=0.05, neighbour_limits=(20, 20, 20, 20), kernel="invariant", kernel_points=18, chirality=True, width=48,
    normalisation="cloud", feature_dim=96, layers=("self", "cross", "self", "cross", "positioning", "self", "cross"),
    pair_bias=True, voxel_size=0.2, vol_origin=(0.0, 0.0, 0.0), position_use="aligned", procrustes="robust",
    max_condition_number=1e3, fine_dim=32, confidence_threshold=0.0005,
)  # fmt: skip
# The same sizes, so that training can start from the rigid weights; all other lengths are in grid cells.
# Not mutual: a warp needs many matches, and its filter weights them by their neighbours (docs/benchmarks.md, "Warps").
SMALL_DEFORMABLE = replace(SMALL_RIGID, grid=0.0125, voxel_size=0.05, confidence_threshold=0.02)
PRESETS = {
    "paper_rigid": PAPER_RIGID,
    "paper_deformable": PAPER_DEFORMABLE,
    "small_rigid": SMALL_RIGID,
    "small_deformable": SMALL_DEFORMABLE,
}
