"""The sizes and choices that make one Lepard network; they are saved with its weights."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from lepard_ros.cloud.pyramid import PyramidShape
from lepard_ros.errors import InputError


@dataclass(frozen=True)
class LepardConfig:
    """Everything that the forward pass depends on besides the tensors.

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
    width: int = 256  # first_feats_dim
    normalisation: str = (
        "joint"  # "joint": over all stacked clouds; "cloud": each cloud alone, so that it can be cached
    )
    feature_dim: int = 528
    heads: int = 4
    layers: tuple[str, ...] = ("self", "cross", "positioning", "self", "cross")
    pair_bias: bool = False  # self attention also sees distances and angles between the points
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
    confidence_threshold: float = 0.05
    mutual: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        choices = {
            "kernel": ("xyz", "invariant"),
            "normalisation": ("joint", "cloud"),
            "position_code": ("rotary", "sinusoidal"),
            "position_use": ("always", "aligned"),
            "matching": ("dual_softmax", "sinkhorn"),
            "procrustes": ("soft", "robust"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}.")
        if self.feature_dim % (6 * self.heads):
            raise InputError(f"feature_dim {self.feature_dim} must be a multiple of 6 x heads = {6 * self.heads}.")

    @property
    def pyramid(self) -> PyramidShape:
        """The pyramid that the network wants."""
        needs_normals = self.kernel == "invariant" or self.pair_bias
        return PyramidShape(self.grid, self.conv_radius, self.neighbour_limits, needs_normals)

    @property
    def coarse_grid(self) -> float:
        """Spacing in metres of the points that are matched."""
        return self.grid * 4

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "LepardConfig":
        """From JSON values; an unknown name is refused."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise InputError(
                f"unknown network setting {unknown[0]!r}: the weights are of a newer version, update lepard_ros."
            )
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**plain)


PAPER_RIGID = LepardConfig()
PAPER_DEFORMABLE = LepardConfig(
    grid=0.01, neighbour_limits=(22, 27, 29, 30), voxel_size=0.04, max_condition_number=40.0,
    confidence_threshold=0.1, mutual=True,
)  # fmt: skip
SMALL_RIGID = LepardConfig(
    grid=0.05, neighbour_limits=(20, 20, 20, 20), kernel="invariant", kernel_points=18, width=48, normalisation="cloud",
    feature_dim=96, layers=("self", "cross", "self", "cross", "positioning", "self", "cross"), pair_bias=True,
    voxel_size=0.2, vol_origin=(0.0, 0.0, 0.0), position_use="aligned", procrustes="robust", max_condition_number=1e3,
    fine_dim=32, confidence_threshold=0.0005,
)  # fmt: skip
# The same sizes, so that training can start from the rigid weights; everything else is measured in cells of the grid.
SMALL_DEFORMABLE = replace(SMALL_RIGID, grid=0.0125, voxel_size=0.05, confidence_threshold=0.02, mutual=True)
PRESETS = {
    "paper_rigid": PAPER_RIGID,
    "paper_deformable": PAPER_DEFORMABLE,
    "small_rigid": SMALL_RIGID,
    "small_deformable": SMALL_DEFORMABLE,
}
