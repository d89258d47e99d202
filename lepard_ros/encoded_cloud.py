# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Encoded clouds: input checks, choice of grid and viewpoint, encoding, storage."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lepard_ros.cloud.normals import UNKNOWN, estimate_normals, likely_viewpoint, orient
from lepard_ros.cloud.pyramid import Pyramid, build_pyramid, stack_pyramids, turned_over
from lepard_ros.errors import InputError
from lepard_ros.geometry.voxel_grid import grid_subsample, occupied_cells
from lepard_ros.network.config import MATCH_LEVEL, LepardConfig
from lepard_ros.network.fine import owner_of_fine
from lepard_ros.network.lepard import Lepard, pad_clouds
from lepard_ros.registration.types import Surface

PointsLike = NDArray[np.floating] | Tensor
# Maximum number of points of a cloud on the network's grid; a larger cloud keeps those nearest to the sensor.
MAX_POINTS = 40_000
# Maximum number of coarse points: attention is quadratic. A furnished room of 60 square metres has about 2,000.
MAX_COARSE = 2_500
# Raw rigid clouds are compared on a grid on which the smaller one has about GOOD_POINTS cells: the network was trained
# on rooms with a 5 cm grid, and treats a desk or a street as a room at another scale. Its own grid is kept if it gives
# between that and MANY_POINTS. Cells hold at least POINTS_PER_CELL points on average; finer cells would be raw points.
GOOD_POINTS, MANY_POINTS, POINTS_PER_CELL = 4_500, 20_000, 1.8
# Points of which gridding would keep more than this share are already on a grid.
ON_GRID = 0.8
# The origin is taken for the sensor's place unless the whole cloud is further away than this, in metres.
MAX_RANGE = 30.0
# Clouds whose centre is further from the origin than this (metres) are moved to it: float32 would round their points.
FAR = 500.0
# The device name for which onnxruntime runs the network.
ONNX = "onnx"


@dataclass(frozen=True)
class EncodedCloud:
    """An encoded cloud: its surface and features. Encode once, match often.

    surface: the cloud on its grid, with normals, in the cloud's frame minus `offset` (3,) metres, which is zero except
    for clouds far from their origin. Tensors: coarse points, in metres times `scale`, and normals (n, 3), features
    (n, d); fine features (N, c) and the coarse point of each fine one, owners (N,), both None without fine matching.
    pyramid: kept for networks that normalise over both clouds of a pair, whose features (n, 0) depend on the other one.
    reverse: the same cloud with flipped normals, if its viewpoint is unknown: matching then decides which side was
    observed. It is not stored.
    """

    surface: Surface
    offset: NDArray[np.float64]
    points: Tensor
    normals: Tensor
    features: Tensor
    fine_features: Tensor | None
    owners: Tensor | None
    weights_id: str
    seconds: float = 0.0
    scale: float = 1.0
    pyramid: Pyramid | None = None
    reverse: "EncodedCloud | None" = None

    def __len__(self) -> int:
        """Number of coarse points."""
        return len(self.points)

    @property
    def coarse_points(self) -> NDArray[np.float64]:
        """The matched points, (n, 3) metres in the cloud's frame."""
        return self.points.cpu().numpy().astype(np.float64) / self.scale + self.offset

    @property
    def nbytes(self) -> int:
        """Bytes held by arrays and tensors."""
        tensors = [
            t for t in (self.points, self.normals, self.features, self.fine_features, self.owners) if t is not None
        ]
        surface = self.surface.points.nbytes + self.surface.normals.nbytes
        return sum(t.element_size() * t.nelement() for t in tensors) + surface

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """As plain arrays, for storage in a map."""
        tensors = {"points": self.points, "normals": self.normals, "features": self.features}
        optional = {"fine_features": self.fine_features, "owners": self.owners}
        tensors |= {name: value for name, value in optional.items() if value is not None}
        arrays: dict[str, NDArray[Any]] = {name: value.cpu().numpy() for name, value in tensors.items()}
        surface = self.surface
        arrays |= {
            "surface_points": surface.points,
            "surface_normals": surface.normals,
            "viewpoint": surface.viewpoint,
        }
        arrays |= {"offset": self.offset, "spacing": np.array(surface.spacing), "scale": np.array(self.scale)}
        return arrays | {"weights_id": np.frombuffer(self.weights_id.encode(), dtype=np.uint8)}

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]], device: str | torch.device = "cpu") -> "EncodedCloud":
        """From the arrays of `to_arrays`."""
        try:
            tensors = {
                name: torch.from_numpy(np.array(arrays[name])).to(device) if name in arrays else None
                for name in ("fine_features", "owners")
            }
            needed = {
                name: torch.from_numpy(np.array(arrays[name])).to(device) for name in ("points", "normals", "features")
            }
            places = arrays["surface_points"], arrays["surface_normals"], float(arrays["spacing"]), arrays["viewpoint"]
            surface = Surface(*places, as_descriptors(tensors["fine_features"]))
            weights_id = bytes(arrays["weights_id"]).decode()
            known = {"weights_id": weights_id, "scale": float(arrays["scale"])}
            return cls(surface, arrays["offset"], **needed, **tensors, **known)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"these arrays are not an encoded cloud ({error}): encode the cloud again.") from error


@torch.no_grad()
def encode_cloud(
    network: Lepard,
    points: PointsLike,
    viewpoint: PointsLike | str | None,
    grid: float,
    weights_id: str,
    device: torch.device,
    prepared: bool,
    gridded: bool | None = None,
) -> EncodedCloud:
    """Encode a cloud (N, 3) on a grid in metres; rows that are not finite are ignored.

    viewpoint: (3,), None or UNKNOWN, see `choose_viewpoint`. prepared: also run the transformer's first self attention.
    gridded: the points are already on the grid (None: if gridding would merge less than a fifth).
    A cloud with fewer than 3 points gives an encoded cloud of length 0, which matches nothing.
    """
    started = time.perf_counter()
    points = checked_points(points)
    scale = network.config.grid / grid  # the network has one grid: a finer one is a larger cloud
    offset = far_offset(points)
    place = choose_viewpoint(points, viewpoint) - offset
    if len(points) < 3:
        return empty_cloud(network.config, offset, place, grid, weights_id, device)
    local = torch.from_numpy((points - offset if offset.any() else points).astype(np.float32)).to(device)
    known = bool(np.isfinite(place).all())
    eye = torch.from_numpy(place.astype(np.float32)).to(device) * scale if known else None
    pyramid = bounded_pyramid(local * scale if scale != 1 else local, eye, network.config, gridded)
    frame = CloudFrame(offset, place, grid, scale, weights_id)
    cloud = describe(network, pyramid, frame, prepared)
    other = None if known or not pyramid.normals else describe(network, turned_over(pyramid), frame, prepared)
    return replace(cloud, seconds=time.perf_counter() - started, reverse=other)


class CloudFrame(NamedTuple):
    """Offset and viewpoint, see `EncodedCloud`. viewpoint: (3,) metres in the local frame, NaN if unknown."""

    offset: NDArray[np.float64]
    viewpoint: NDArray[np.float64]
    grid: float
    scale: float
    weights_id: str


def describe(network: Lepard, pyramid: Pyramid, frame: CloudFrame, prepared: bool) -> EncodedCloud:
    """The network's features of a pyramid; empty if it normalises over both clouds of a pair."""
    surface = Surface(
        as_array(pyramid.points[0]) / frame.scale,
        as_array(outward_normals(pyramid, frame)),
        frame.grid,
        frame.viewpoint,
    )
    middle = pyramid.points[MATCH_LEVEL]
    coarse = middle, pyramid.normals[MATCH_LEVEL] if pyramid.normals else torch.zeros_like(middle)
    if network.config.normalisation == "joint":
        waiting = middle[:, :0]
        return EncodedCloud(
            surface, frame.offset, *coarse, waiting, None, None, frame.weights_id, 0.0, frame.scale, pyramid
        )
    with mixed_precision(network, middle.device):
        features, fine = network.encode(pyramid)
        if prepared:
            padded = pad_clouds([features], [coarse[0]], [coarse[1]] if pyramid.normals else [])
            features = network.prepare(padded).features[0]
    fine, owners = (None, None) if fine is None else (fine.float(), owner_of_fine(pyramid))
    surface = replace(surface, descriptors=as_descriptors(fine))
    cloud = EncodedCloud(surface, frame.offset, *coarse, features.float(), fine, owners, frame.weights_id)
    return replace(cloud, scale=frame.scale)


def outward_normals(pyramid: Pyramid, frame: CloudFrame) -> Tensor:
    """The normals (N, 3) of the finest level: alignment needs them, whether or not the network does."""
    if pyramid.normals:
        return pyramid.normals[0]
    points = pyramid.points[0]
    eye = torch.from_numpy(np.nan_to_num(frame.viewpoint) * frame.scale).to(points)
    normals = estimate_normals(points, pyramid.neighbours[0], eye)[0]
    known = np.isfinite(frame.viewpoint).all()
    return normals if known else orient(normals, points, likely_viewpoint(points, normals))


@torch.no_grad()
def encode_together(network: Lepard, source: EncodedCloud, target: EncodedCloud) -> tuple[EncodedCloud, EncodedCloud]:
    """Both clouds of a pair with features, for networks that normalise over both, as with the authors' weights."""
    device = source.points.device
    pyramids = [_kept_pyramid(network, cloud) for cloud in (source, target)]
    stacked = stack_pyramids(pyramids)
    with mixed_precision(network, device):
        features, fine = network.encode(stacked)
    coarse = features.float().split(stacked.lengths[MATCH_LEVEL])
    fines = [None, None] if fine is None else [*fine.float().split(stacked.lengths[0])]
    owners = [None if fine is None else owner_of_fine(pyramid) for pyramid in pyramids]
    first, second = (
        replace(cloud, features=coarse[i], fine_features=fines[i], owners=owners[i])
        for i, cloud in enumerate((source, target))
    )
    return first, second


def _kept_pyramid(network: Lepard, cloud: EncodedCloud) -> Pyramid:
    """The pyramid of a cloud; rebuilt for a cloud from a saved map."""
    if cloud.pyramid is not None:
        return cloud.pyramid
    places = cloud.surface.points, cloud.surface.viewpoint
    points, eye = (torch.from_numpy(values * cloud.scale).to(cloud.points) for values in places)
    return build_pyramid(points, network.config.pyramid, eye, gridded=True)


def mixed_precision(network: Lepard, device: torch.device) -> torch.autocast:
    """Half precision on a GPU, except for weights that must reproduce the authors' numbers."""
    return torch.autocast(device.type, enabled=device.type == "cuda" and network.config.normalisation != "joint")


def as_array(values: Tensor) -> NDArray[np.float64]:
    """A tensor as float64 numbers in main memory."""
    return values.cpu().numpy().astype(np.float64)


def as_descriptors(fine: Tensor | None) -> NDArray[np.float32] | None:
    """The fine features as `Surface.descriptors`; on a CPU both share their memory."""
    return None if fine is None else fine.cpu().numpy()


def empty_cloud(
    config: LepardConfig,
    offset: NDArray[np.float64],
    viewpoint: NDArray[np.float64],
    grid: float,
    weights_id: str,
    device: torch.device,
) -> EncodedCloud:
    """The encoded cloud of fewer than 3 points."""
    none = torch.zeros(0, 3, device=device)
    surface = Surface(np.zeros((0, 3)), np.zeros((0, 3)), grid, viewpoint)
    features = torch.zeros(0, config.feature_dim, device=device)
    return EncodedCloud(surface, offset, none, none, features, None, None, weights_id)


def bounded_pyramid(points: Tensor, eye: Tensor | None, config: LepardConfig, gridded: bool | None = None) -> Pyramid:
    """The pyramid of a cloud (N, 3); a cloud that is too large keeps the part nearest to the sensor (or its centre).

    eye: (3,) position of the sensor, None if unknown. gridded: the points are already on the grid; None: decided by how
    many of them would be merged.
    """
    middle = points.mean(0) if eye is None else eye
    grid = points if gridded else grid_subsample(points, config.grid)[0]
    if gridded is None and len(grid) > ON_GRID * len(points):
        grid = points  # a grid with another origin; gridding again would blur it
    grid = nearest_points(grid, middle, MAX_POINTS)
    while True:
        coarse = grid_subsample(grid_subsample(grid, 2 * config.grid)[0], 4 * config.grid)[0]
        if len(coarse) <= MAX_COARSE:
            return build_pyramid(grid, config.pyramid, UNKNOWN if eye is None else eye, gridded=True)
        grid = nearest_points(grid, middle, int(0.9 * len(grid) * MAX_COARSE / len(coarse)))


def suitable_grid(clouds: Sequence[PointsLike], own: float, device: torch.device) -> float:
    """The grid in metres for comparing raw clouds (N, 3), given the network's own."""
    finite = [torch.from_numpy(checked_points(cloud)).to(device) for cloud in clouds]
    finite = [points for points in finite if len(points) >= 3]
    if not finite:
        return own
    counts = [occupied_cells(points, own) for points in finite]
    smaller = finite[int(np.argmin(counts))]
    dense = all(len(points) >= POINTS_PER_CELL * count for points, count in zip(finite, counts, strict=True))
    if dense and GOOD_POINTS <= min(counts) <= MANY_POINTS:
        return own
    grid = grid_with_cells(smaller, own, min(GOOD_POINTS, len(smaller) / POINTS_PER_CELL))
    sparse = [points for points in finite if len(points) < POINTS_PER_CELL * occupied_cells(points, grid)]
    return max([grid, *(grid_with_cells(points, grid, len(points) / POINTS_PER_CELL) for points in sparse)])


def grid_with_cells(points: Tensor, start: float, wanted: float) -> float:
    """The grid in metres on which points (N, 3) occupy about `wanted` cells, searched from `start`.

    The number of cells of a surface grows with the square of the resolution, so a few steps are enough. Every step is
    bounded, because a grid finer than the points always has as many cells as points.
    """
    grid = start
    for _ in range(20):
        ratio = occupied_cells(points, grid) / wanted
        if 0.97 < ratio < 1.03:
            break
        grid *= float(np.clip(np.sqrt(ratio), 0.25, 4.0))
    return grid


def choose_device(name: str) -> torch.device:
    """The device of a name: auto uses CUDA if available; with onnx, torch uses the CPU."""
    if name == ONNX:
        return torch.device("cpu")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not known: use auto, cpu, cuda, cuda:0 or onnx.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: use auto, cpu, cuda, cuda:0 or onnx.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} is not available: this machine has {torch.cuda.device_count()} CUDA devices; use cpu."
        )
    return device


def checked_points(points: PointsLike) -> NDArray[np.floating]:
    """The finite rows of a cloud (N, 3) as an array; anything else raises."""
    if isinstance(points, Tensor):
        points = points.detach().cpu().numpy()
    if not isinstance(points, np.ndarray):
        raise TypeError(
            f"a cloud must be a numpy array or a torch tensor of shape (N, 3), not {type(points).__name__}."
        )
    if points.ndim != 2 or points.shape[1] != 3:
        raise InputError(f"a cloud must have shape (N, 3), not {points.shape}.")
    if not np.issubdtype(points.dtype, np.floating):
        raise TypeError(f"a cloud must hold floating point metres, not {points.dtype}: convert it with .astype(float).")
    finite = np.isfinite(points)
    return points if finite.all() else points[finite.all(axis=1)]


def far_offset(points: NDArray[np.floating]) -> NDArray[np.float64]:
    """The offset to subtract so that float32 keeps millimetres: zero for clouds near their origin."""
    if len(points) == 0:
        return np.zeros(3)
    centre = np.median(points[:: max(1, len(points) // 10_000)], axis=0).astype(np.float64)
    return np.round(centre) if np.abs(centre).max() > FAR else np.zeros(3)


def choose_viewpoint(points: NDArray[np.floating], viewpoint: PointsLike | str | None) -> NDArray[np.float64]:
    """The viewpoint (3,): as given, or the origin for None; NaN if it is unknown.

    It is unknown if UNKNOWN is given, or if None is given and the whole cloud is far from the origin.
    """
    if isinstance(viewpoint, str):
        if viewpoint != UNKNOWN:
            raise InputError(f"the viewpoint must be three finite numbers in metres or {UNKNOWN!r}, not {viewpoint!r}.")
        return np.full(3, np.nan)
    if viewpoint is not None:
        place = np.asarray(viewpoint, dtype=np.float64).reshape(-1)
        if place.shape != (3,) or not np.isfinite(place).all():
            raise InputError(f"the viewpoint must be three finite numbers in metres or {UNKNOWN!r}.")
        return place
    sample = points[:: max(1, len(points) // 1000)]  # enough to detect a cloud far from the origin
    far = len(points) and np.abs(sample).max(axis=1).min() > MAX_RANGE
    return np.full(3, np.nan) if far else np.zeros(3)


def nearest_points(points: Tensor, place: Tensor, limit: int) -> Tensor:
    """At most `limit` of the points (N, 3), those nearest to a position, in their order."""
    if len(points) <= limit:
        return points
    keep = (points - place).norm(dim=1).topk(limit, largest=False).indices
    return points[keep.sort().values]
