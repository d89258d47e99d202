# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The public API of the core: encode clouds once, match them, register or warp one onto another."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lepard_ros.cloud.grid import grid_subsample, occupied_cells
from lepard_ros.cloud.pyramid import Pyramid, build_pyramid
from lepard_ros.errors import InputError
from lepard_ros.network.allocator import keep_freed_memory
from lepard_ros.network.fine import best_partners, coarse_prior, owner_of_fine
from lepard_ros.network.lepard import Lepard, pad_clouds
from lepard_ros.network.matching import select_matches
from lepard_ros.network.weights import Card, load
from lepard_ros.registration.rigid import RigidSettings, register_matches
from lepard_ros.registration.types import Matches, Registration, Status, Surface

if TYPE_CHECKING:
    from lepard_ros.registration.nonrigid import WarpSettings
    from lepard_ros.registration.warp import Warp

PointsLike = NDArray[np.floating] | Tensor
# A cloud on the network's grid has at most this many points; of a larger one, those nearest to the sensor are kept.
MAX_POINTS = 40_000
# And this many coarse points: attention compares all with all. A furnished room of 60 square metres has about 2,000.
MAX_COARSE = 2_500
LARGE_DIM = 256  # features of more channels, as the paper's, mean tables of tens of megabytes
# Raw rigid clouds are compared on a grid on which the smaller one has about this many points, at most so much finer
# than the network's own: it was trained on rooms, and reads a desk as a small room.
GOOD_POINTS, FINEST = 6_000, 0.5
# The origin is taken for the sensor's place unless the whole cloud is further away than this, in metres.
MAX_RANGE = 30.0
# Clouds whose centre is further from the origin than this (metres) are moved to it: float32 would round their points.
FAR = 500.0


@dataclass(frozen=True)
class EncodedCloud:
    """A cloud that the network has seen, ready to be matched again and again.

    surface: the cloud on its grid, with normals, in the cloud's frame less `offset` (3,) metres, which is zero but for
    clouds far from their origin. Tensors: coarse points, in metres times `scale`, and normals (n, 3), features (n, d);
    fine features (N, c) and the coarse point of each fine one, owners (N,), both None without fine matching.
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

    def __len__(self) -> int:
        """How many coarse points there are."""
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
        """As plain arrays, to be stored in a map."""
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
        """From what `to_arrays` gave."""
        try:
            surface = Surface(
                arrays["surface_points"], arrays["surface_normals"], float(arrays["spacing"]), arrays["viewpoint"]
            )
            tensors = {
                name: torch.from_numpy(np.array(arrays[name])).to(device) if name in arrays else None
                for name in ("fine_features", "owners")
            }
            needed = {
                name: torch.from_numpy(np.array(arrays[name])).to(device) for name in ("points", "normals", "features")
            }
            weights_id = bytes(arrays["weights_id"]).decode()
            known = {"weights_id": weights_id, "scale": float(arrays["scale"])}
            return cls(surface, arrays["offset"], **needed, **tensors, **known)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"these arrays are not an encoded cloud ({error}): encode the cloud again.") from error


@dataclass(frozen=True)
class MatcherSettings:
    """Choices at run time.

    fine_points: so many points of the source look for their partner among all points of the target (all that there are,
    if fewer). fine_matches: most matches kept. guided: whether the transformer's coarse matches guide them (None: where
    scenes deform; of rigid scenes the descriptors alone register more pairs, docs/training.md). grid: metres, on which
    clouds are encoded (None: the network's own, or for raw rigid clouds one that suits their size). rigid: how a motion
    is found from the matches.
    """

    fine_points: int = 1500
    fine_matches: int = 1000
    guided: bool | None = None
    grid: float | None = None
    rigid: RigidSettings = field(default_factory=RigidSettings)


class Matcher:
    """Matches point clouds with a Lepard network. Not to be shared between threads."""

    def __init__(
        self, network: Lepard, card: Card, device: str = "auto", settings: MatcherSettings | None = None
    ) -> None:
        """network and card as `network.weights.load` gives them; device: auto, cpu, cuda or cuda:i."""
        self.device = choose_device(device)
        if self.device.type == "cpu":
            keep_freed_memory(large=network.config.feature_dim > LARGE_DIM)
        self.network = network.to(self.device).eval()
        self.card, self.config = card, network.config
        self.settings = settings or MatcherSettings()
        guided = card.mode == "deformable" if self.settings.guided is None else self.settings.guided
        # Without fine features the coarse matches are all there is.
        self.guided = guided or not self.config.fine_dim

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str] = "rigid", device: str = "auto", settings: MatcherSettings | None = None
    ) -> "Matcher":
        """A matcher with shipped weights ("rigid", "deformable") or those of a .safetensors file."""
        network, card = load(name)
        return cls(network, card, device, settings)

    @property
    def weights_id(self) -> str:
        """The SHA-256 of the weights: clouds encoded with others, or for other use, cannot be compared."""
        use = "" if self.guided else ":descriptors"
        return self.card.sha256 + use + (f":{self.settings.grid:g}" if self.settings.grid else "")

    def warm_up(self) -> None:
        """Run once on a small made-up cloud, so that the first real one is not slower than the others."""
        side = torch.linspace(0, 20 * self.config.grid, 40)
        x, y = torch.meshgrid(side, side, indexing="ij")
        points = torch.stack([x, y, 1 + 0.2 * (9 * x).sin()], dim=-1).reshape(-1, 3)
        cloud = self.encode(points)
        self.match(cloud, cloud)

    @torch.no_grad()
    def encode(
        self, points: PointsLike, viewpoint: PointsLike | None = None, grid: float | None = None
    ) -> EncodedCloud:
        """Describe a cloud once.

        points: (N, 3) metres; rows that are not finite are left out. viewpoint: (3,), where the sensor stood in the
        cloud's frame (the origin, unless the whole cloud is far from it). grid: metres, if not the settings' own.
        A cloud with fewer than 3 points gives an encoded cloud of length 0, which matches nothing.
        """
        started = time.perf_counter()
        points = checked_points(points)
        grid = grid or self.settings.grid or self.config.grid
        scale = self.config.grid / grid  # the network knows one grid only: a finer one is a larger cloud
        offset = far_offset(points)
        place = choose_viewpoint(points, viewpoint) - offset
        if len(points) < 3:
            return self._empty(offset, place, grid)
        local = torch.from_numpy((points - offset if offset.any() else points).astype(np.float32)).to(self.device)
        eye = torch.from_numpy(place.astype(np.float32)).to(self.device)
        pyramid = self._bounded_pyramid(local * scale if scale != 1 else local, eye * scale)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            features, fine = self.network.encode(pyramid)
            if self.guided:
                coarse = pad_clouds([features], pyramid.points[2:3], pyramid.normals[2:3])
                features = self.network.prepare(coarse).features[0]
        owners = None if fine is None else owner_of_fine(pyramid)
        normals = pyramid.normals or [torch.zeros_like(level) for level in pyramid.points]
        finest, outward = (values.cpu().numpy().astype(np.float64) for values in (pyramid.points[0], normals[0]))
        tensors = pyramid.points[2], normals[2], features.float(), None if fine is None else fine.float(), owners
        seconds = time.perf_counter() - started
        surface = Surface(finest / scale, outward, grid, place)
        return EncodedCloud(surface, offset, *tensors, self.weights_id, seconds, scale)

    def suitable_grid(self, clouds: Sequence[PointsLike]) -> float:
        """The grid in metres on which raw clouds should be compared."""
        own = self.settings.grid or self.config.grid
        if self.guided or self.settings.grid:
            return own
        finite = (torch.from_numpy(checked_points(cloud)).to(self.device) for cloud in clouds)
        count = min(occupied_cells(points, own) for points in finite)
        return own * float(np.clip(np.sqrt(count / GOOD_POINTS), FINEST, 1.0))

    def _bounded_pyramid(self, points: Tensor, eye: Tensor) -> Pyramid:
        """The pyramid of a cloud (N, 3), of its part nearest to the sensor if the whole would be too large."""
        grid = nearest_points(grid_subsample(points, self.config.grid)[0], eye, MAX_POINTS)
        while True:
            coarse = grid_subsample(grid_subsample(grid, 2 * self.config.grid)[0], 4 * self.config.grid)[0]
            if len(coarse) <= MAX_COARSE:
                return build_pyramid(grid, self.config.pyramid, eye, gridded=True)
            grid = nearest_points(grid, eye, int(0.9 * len(grid) * MAX_COARSE / len(coarse)))

    def match(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """The points of the source that the network sees in the target, most confident first."""
        return self.match_many(source, [target])[0]

    @torch.no_grad()
    def match_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Matches]:
        """Match one cloud against several in one batch."""
        cloud, *others = self._encoded([source, *targets])
        usable = [other for other in others if len(cloud) and len(other)]
        if not usable:
            return [no_matches() for _ in others]
        found = iter(self._confidences(cloud, usable))  # one for each usable pair, in order
        usable_ids = {id(other) for other in usable}
        return [
            self._matches(cloud, other, next(found)) if id(other) in usable_ids else no_matches() for other in others
        ]

    def _confidences(self, cloud: EncodedCloud, others: list[EncodedCloud]) -> Sequence[Tensor | None]:
        """The transformer's confidences (n, m) of one cloud against each of several, in one batch; or None."""
        if not self.guided:
            return [None] * len(others)
        prepared = self.network.can_prepare()
        single = pad_clouds([cloud.features], [cloud.points], [cloud.normals], prepared)
        features, points, normals = (
            [getattr(other, name) for other in others] for name in ("features", "points", "normals")
        )
        padded = pad_clouds(features, points, normals, prepared)
        with torch.autocast(self.device.type, enabled=self.device.type == "cuda"):
            confidence = self.network.match(single, padded).confidence.float()
        return [table[: len(cloud), : len(other)] for table, other in zip(confidence, others, strict=True)]

    def register(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Registration:
        """The rigid motion that takes the source to the target; rejected (transform None) unless it can be trusted."""
        return self.register_many(source, [target])[0]

    def register_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Registration]:
        """Register one cloud to each of several."""
        fresh = [not isinstance(cloud, EncodedCloud) for cloud in (source, *targets)]
        cloud, *others = self._encoded([source, *targets])
        encoding = sum(c.seconds for c, new in zip((cloud, *others), fresh, strict=True) if new)
        started = time.perf_counter()
        many = self.match_many(cloud, others)
        seconds = {"encode": encoding, "match": time.perf_counter() - started}
        return [self._register(cloud, other, matches, seconds) for other, matches in zip(others, many, strict=True)]

    def warp(self, source: PointsLike, target: PointsLike, settings: "WarpSettings | None" = None) -> "Warp":
        """The non-rigid warp of the source's surface onto the target; clouds (N, 3), or organised (H, W, 3)."""
        from lepard_ros.registration.nonrigid import warp_from_matches

        flat = [
            checked_points(np.asarray(cloud).reshape(-1, 3) if np.ndim(cloud) == 3 else cloud)
            for cloud in (source, target)
        ]
        matches = self.match(*flat)
        return warp_from_matches(np.asarray(source), np.asarray(target), matches, settings)

    def _register(
        self, source: EncodedCloud, target: EncodedCloud, matches: Matches, seconds: dict[str, float]
    ) -> Registration:
        """Estimate in the clouds' local frames, then put their offsets back."""
        if not len(source) or not len(target):
            return Registration(None, Status.TOO_FEW_POINTS, matches, np.zeros(0, dtype=bool), seconds=seconds)
        local = Matches(matches.source - source.offset, matches.target - target.offset, matches.confidence)
        result = register_matches(local, source.surface, target.surface, self.settings.rigid)
        transform = result.transform
        if transform is not None and (source.offset.any() or target.offset.any()):
            transform = transform.copy()
            transform[:3, 3] += target.offset - transform[:3, :3] @ source.offset
        values = {**result.__dict__, "transform": transform, "matches": matches, "seconds": seconds | result.seconds}
        return Registration(**values)

    def _encoded(self, clouds: Sequence[PointsLike | EncodedCloud]) -> list[EncodedCloud]:
        """All clouds encoded, on the grid of those that are already; refused where those differ."""
        ready = [cloud for cloud in clouds if isinstance(cloud, EncodedCloud)]
        raw = [cloud for cloud in clouds if not isinstance(cloud, EncodedCloud)]
        if any(cloud.weights_id != self.weights_id for cloud in ready):
            raise InputError("this cloud was encoded with other weights: encode it again with this matcher.")
        grids = sorted({cloud.surface.spacing for cloud in ready})
        if len(grids) > 1:
            raise InputError(f"clouds on grids of {grids[0]:g} m and {grids[-1]:g} m cannot be compared: use one grid.")
        grid = grids[0] if grids else self.suitable_grid(raw)
        return [cloud if isinstance(cloud, EncodedCloud) else self.encode(cloud, grid=grid) for cloud in clouds]

    def _empty(self, offset: NDArray[np.float64], viewpoint: NDArray[np.float64], grid: float) -> EncodedCloud:
        none = torch.zeros(0, 3, device=self.device)
        surface = Surface(np.zeros((0, 3)), np.zeros((0, 3)), grid, viewpoint)
        features = torch.zeros(0, self.config.feature_dim, device=self.device)
        return EncodedCloud(surface, offset, none, none, features, None, None, self.weights_id)

    def _matches(self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor | None) -> Matches:
        """Matches of one pair, most confident first; confidence: (n, m) of its coarse points, if they are used."""
        if self.config.fine_dim:
            x, y, scores = self._fine_matches(source, target, confidence)
        else:
            assert confidence is not None
            index = select_matches(confidence[None], self.config.confidence_threshold, self.config.mutual)[:, 1:]
            scores = confidence[index[:, 0], index[:, 1]]
            x, y = source.points[index[:, 0]], target.points[index[:, 1]]
        order = scores.argsort(descending=True, stable=True)[: self.settings.fine_matches]
        a, b, confidences = (value[order].cpu().numpy().astype(np.float64) for value in (x, y, scores))
        return Matches(a + source.offset, b + target.offset, confidences)

    def _fine_matches(
        self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Fine points that choose each other in the whole clouds: points (M, 3), (M, 3) and confidences (M,)."""
        assert source.owners is not None and target.owners is not None and self.network.fine_matching is not None
        assert source.fine_features is not None and target.fine_features is not None
        count, matching = len(source.fine_features), self.network.fine_matching
        rows = torch.arange(0, count, max(1, count // self.settings.fine_points), device=self.device)
        x, y = source.fine_features[rows] * matching.scale, target.fine_features.T.contiguous()
        if confidence is None:
            column, scores = best_partners(x, y)
        else:
            prior = coarse_prior(confidence, matching.guidance)
            column, scores = best_partners(x, y, prior, source.owners[rows], target.owners)
        sure = (scores > self.config.confidence_threshold).nonzero()[:, 0]
        return self._surface(source)[rows[sure]], self._surface(target)[column[sure]], scores[sure]

    def _surface(self, cloud: EncodedCloud) -> Tensor:
        """The fine points (N, 3) on the matcher's device."""
        return torch.from_numpy(cloud.surface.points).to(self.device, torch.float32)


def choose_device(name: str) -> torch.device:
    """The device of a name: auto takes CUDA where it is."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"device {name!r} is not known: use auto, cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"device {name!r} is not supported: use auto, cpu, cuda or cuda:0.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"device {name!r} was asked for, but this machine has {torch.cuda.device_count()} CUDA devices: use cpu."
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
    """What to subtract so that float32 keeps millimetres: zero for clouds near their origin."""
    if len(points) == 0:
        return np.zeros(3)
    centre = np.median(points[:: max(1, len(points) // 10_000)], axis=0).astype(np.float64)
    return np.round(centre) if np.abs(centre).max() > FAR else np.zeros(3)


def choose_viewpoint(points: NDArray[np.floating], viewpoint: PointsLike | None) -> NDArray[np.float64]:
    """Where normals look: the given place, else the origin, else (a cloud far from it) the middle of the cloud."""
    if viewpoint is not None:
        place = np.asarray(viewpoint, dtype=np.float64).reshape(-1)
        if place.shape != (3,) or not np.isfinite(place).all():
            raise InputError("the viewpoint must be three finite numbers in metres.")
        return place
    sample = points[:: max(1, len(points) // 1000)]  # enough to tell a sensor's cloud from one far away
    if len(points) and np.abs(sample).max(axis=1).min() > MAX_RANGE:
        return points.mean(axis=0, dtype=np.float64)
    return np.zeros(3)


def nearest_points(points: Tensor, place: Tensor, limit: int) -> Tensor:
    """At most `limit` of the points (N, 3), those nearest to a place, in their order."""
    if len(points) <= limit:
        return points
    keep = (points - place).norm(dim=1).topk(limit, largest=False).indices
    return points[keep.sort().values]


def no_matches() -> Matches:
    """No matches at all."""
    return Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))
