# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The public API of the core: encode clouds once, match them, register or warp one onto another."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from lepard_ros.cloud.normals import UNKNOWN
from lepard_ros.encoded_cloud import (
    ONNX,
    EncodedCloud,
    PointsLike,
    checked_points,
    choose_device,
    encode_cloud,
    encode_together,
    mixed_precision,
    suitable_grid,
)
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, IntArray
from lepard_ros.geometry.rigid_motion import exponential
from lepard_ros.network.fine import best_partners, coarse_prior
from lepard_ros.network.lepard import Lepard, pad_clouds
from lepard_ros.network.matching import select_matches
from lepard_ros.network.onnx_graphs import OnnxLepard, run_by_onnx
from lepard_ros.network.procrustes import RigidFit
from lepard_ros.network.weights import Card, find_weights, load
from lepard_ros.registration.rigid.acceptance import MIN_INLIERS
from lepard_ros.registration.rigid.covariance import PATCH_CELLS
from lepard_ros.registration.rigid.estimate import RigidSettings, candidate_motions, register_matches
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Status

__all__ = ["EncodedCloud", "Matcher", "MatcherSettings", "PointsLike"]

Side = tuple[EncodedCloud, EncodedCloud, Matches]
SMALL_CELLS = 12  # a cloud of fewer cells across is a thing, not a place
HARDER = 2.0  # by how much points, matches, seeds and hypotheses grow in a further try
MAX_SIDES = 2  # of clouds without a viewpoint, that are tried once more
COARSE_TOLERANCE = 2.0  # tolerances of coarse matches, over those of fine ones
MAX_GUIDED = 3  # repositioned pairs whose fine matches are sought
SUREST = 50  # coarse matches by which repositioned pairs are compared
# A turn (3, 3) about no axis of the grid: the same points then fall into other cells.
TURN = exponential(np.array([[0.0, 0.0, 0.0, 0.5, 0.4, 0.3]]))[0, :3, :3]

if TYPE_CHECKING:
    from lepard_ros.registration.deformable.nonrigid import WarpSettings
    from lepard_ros.registration.deformable.warp import Warp


@dataclass(frozen=True)
class MatcherSettings:
    """Choices at run time.

    fine_points: so many points of the source look for their partner among all points of the target (all that there are,
    if fewer). fine_matches: most matches kept. guided: whether the transformer's coarse matches guide them (None: where
    scenes deform; of rigid scenes the descriptors alone register more pairs, docs/training.md). grid: metres, on which
    clouds are encoded (None: the network's own, or for raw rigid clouds one that suits their size). gridded: whether
    clouds lie on that grid already, as the benchmarks' files on the paper's (None: if hardly two of their points share
    a cell). rigid: how a motion is found from the matches.
    effort: further tries that `register` may spend on a pair that was refused; see `Matcher.register`.
    repositionings: in a further try, so many hypotheses reposition the source for the transformer, whose matches then
    suggest motions of their own (0: none).
    """

    fine_points: int = 1500
    fine_matches: int = 1000
    guided: bool | None = None
    grid: float | None = None
    gridded: bool | None = None
    rigid: RigidSettings = field(default_factory=RigidSettings)
    effort: int = 1
    repositionings: int = 0

    def with_more(self) -> "MatcherSettings":
        """The settings of a further try."""
        few, times = self.rigid.consistency, HARDER
        more = replace(few, seeds=round(few.seeds * times), hypotheses=round(few.hypotheses * times))
        points, matches = round(self.fine_points * times), round(self.fine_matches * times)
        rigid = replace(self.rigid, consistency=more)
        return replace(self, rigid=rigid, fine_points=points, fine_matches=matches, effort=0)


class Matcher:
    """Matches point clouds with a Lepard network. Not thread-safe."""

    def __init__(
        self, network: Lepard, card: Card, device: str = "auto", settings: MatcherSettings | None = None
    ) -> None:
        """network and card as `network.weights.load` gives them; device: auto, cpu, cuda, cuda:i or onnx."""
        self.device = choose_device(device)
        if device == ONNX:
            network = run_by_onnx(network, card.sha256)
        self.network = network.to(self.device).eval()
        self.card, self.config = card, network.config
        self.settings = settings or MatcherSettings()
        guided = card.mode == "deformable" if self.settings.guided is None else self.settings.guided
        # Without fine features the coarse matches are all there is: they lie on a grid four times as wide.
        self.guided = guided or not self.config.fine_dim
        rigid = self.settings.rigid if self.config.fine_dim else self.settings.rigid.widened(COARSE_TOLERANCE)
        self.rigid = replace(rigid, device=str(self.device))

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str] = "rigid", device: str = "auto", settings: MatcherSettings | None = None
    ) -> "Matcher":
        """A matcher with shipped weights ("rigid", "deformable") or those of a .safetensors file."""
        network, card = load(name)
        if device == ONNX:  # graphs that `lepard export` wrote lie beside the weights
            network = run_by_onnx(network, card.sha256, find_weights(name).parent)
        return cls(network, card, device, settings)

    @property
    def weights_id(self) -> str:
        """The SHA-256 of the weights: clouds encoded with others, or for other use, cannot be compared."""
        use = "" if self.guided else ":descriptors"
        return self.card.sha256 + use + (f":{self.settings.grid:g}" if self.settings.grid else "")

    @property
    def runs_on(self) -> str:
        """What computes the network: cpu, cuda:i or onnx."""
        return ONNX if isinstance(self.network, OnnxLepard) else str(self.device)

    def warm_up(self) -> None:
        """Run once on a small synthetic cloud, so that the first real one is not slower."""
        side = torch.linspace(0, 20 * self.config.grid, 40)
        x, y = torch.meshgrid(side, side, indexing="ij")
        points = torch.stack([x, y, 1 + 0.2 * (9 * x).sin()], dim=-1).reshape(-1, 3)
        cloud = self.encode(points)
        self.match(cloud, cloud)

    def encode(
        self, points: PointsLike, viewpoint: PointsLike | str | None = None, grid: float | None = None
    ) -> EncodedCloud:
        """Describe a cloud once.

        points: (N, 3) metres; rows that are not finite are left out. viewpoint: (3,), where the sensor stood in the
        cloud's frame (None: at its origin), or "unknown" for fused maps, models and clouds that were moved: it then
        takes twice as long. grid: metres, if not the settings' own.
        A cloud with fewer than 3 points gives an encoded cloud of length 0, which matches nothing.
        """
        grid = grid or self.settings.grid or self.config.grid
        gridded = self.settings.gridded
        return encode_cloud(self.network, points, viewpoint, grid, self.weights_id, self.device, self.guided, gridded)

    def encode_all(
        self, clouds: Sequence[PointsLike], viewpoints: Sequence[PointsLike | str | None] | None = None
    ) -> list[EncodedCloud]:
        """Encode clouds that are to be compared, on one grid that suits them all."""
        grid, places = self.suitable_grid(clouds), viewpoints or [None] * len(clouds)
        return [self.encode(cloud, place, grid) for cloud, place in zip(clouds, places, strict=True)]

    def suitable_grid(self, clouds: Sequence[PointsLike]) -> float:
        """The grid in metres on which raw clouds should be compared: of rigid scenes at any scale."""
        own = self.settings.grid or self.config.grid
        if self.card.mode == "deformable" or not self.config.fine_dim or self.settings.grid:
            return own
        return suitable_grid(clouds, own, self.device)

    @property
    def network_grid(self) -> float:
        """The grid in metres that the network was trained on."""
        return self.config.grid

    def tracking_grid(self, points: PointsLike) -> float:
        """The grid in metres for a map that starts with this cloud (N, 3): the network's own, unless it fits badly.

        A street needs a coarser one, a thing on a table a finer one. A room seen through a keyhole does not: the next
        view of it may be wide.
        """
        own, grid = self.settings.grid or self.config.grid, self.suitable_grid([points])
        finite = checked_points(points)
        small = len(finite) > 0 and np.linalg.norm(np.ptp(finite, axis=0)) < SMALL_CELLS * own
        return grid if grid > 2 * own or (small and grid < own / 2) else own

    def match(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """Correspondences from source to target, most confident first."""
        cloud, other = self._encoded([source, target])
        return self._sides(cloud, other)[0][2]

    def match_both_ways(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """The matches of `match`, and those that the target's points find in the source.

        The second half was sought independently of the first: where both name one motion it is more likely the true
        one. That is what the acceptance of warps rests on.
        """
        cloud, other = self._encoded([source, target])
        there, back = self.match(cloud, other), self.match(other, cloud)
        columns = zip(there, (back.target, back.source, back.confidence), strict=True)
        return Matches(*(np.concatenate(column) for column in columns))

    @torch.no_grad()
    def match_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Matches]:
        """Match one cloud against several in one batch."""
        cloud, *others = self._encoded([source, *targets])
        usable = [other for other in others if len(cloud) and len(other)]
        if not usable:
            return [NO_MATCHES for _ in others]
        if self.config.normalisation == "joint":
            return [self._match_together(cloud, other) if len(cloud) and len(other) else NO_MATCHES for other in others]
        tables = self._confidences(cloud, usable) if self.guided else [None] * len(usable)
        found = iter(tables)  # one for each usable pair, in order
        usable_ids = {id(other) for other in usable}
        return [self._matches(cloud, other, next(found)) if id(other) in usable_ids else NO_MATCHES for other in others]

    def _match_together(self, cloud: EncodedCloud, other: EncodedCloud) -> Matches:
        """Matches of a pair whose features depend on both clouds."""
        source, target = encode_together(self.network, cloud, other)
        return self._matches(source, target, self._confidences(source, [target])[0])

    def _confidences(self, cloud: EncodedCloud, others: list[EncodedCloud]) -> list[Tensor]:
        """The transformer's confidences (n, m) of one cloud against each of several, in one batch."""
        single = pad_clouds([cloud.features], [cloud.points], [cloud.normals], self._prepared)
        features, points, normals = (
            [getattr(other, name) for other in others] for name in ("features", "points", "normals")
        )
        padded = pad_clouds(features, points, normals, self._prepared)
        with mixed_precision(self.network, self.device):
            confidence = self.network.match(single, padded).confidence.float()
        return [table[: len(cloud), : len(other)] for table, other in zip(confidence, others, strict=True)]

    def register(
        self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud, effort: int | None = None
    ) -> Registration:
        """The rigid motion that takes the source to the target; rejected (transform None) unless it can be trusted.

        effort (None: the settings'): further tries if the motion is refused. The first looks for more matches and
        hypotheses; the second does so on a grid that is turned and without the origin as the sensor's place, which only
        raw clouds allow.
        """
        effort = self.settings.effort if effort is None else effort
        cloud, other = self._encoded([source, target])
        seconds = {"encode": sum(c.seconds for c, raw in ((cloud, source), (other, target)) if c is not raw)}
        started = time.perf_counter()
        sides = self._sides(cloud, other)
        seconds["match"] = time.perf_counter() - started
        result = self._register(*sides[0], seconds)
        if result.ok or effort < 1 or result.status is Status.TOO_FEW_POINTS:
            return result
        started = time.perf_counter()
        again = self._try_harder(sides)
        if not (again.ok or effort < 2 or isinstance(source, EncodedCloud) or isinstance(target, EncodedCloud)):
            again = self._try_turned(source, target, cloud.surface.spacing)
        result = again if again.ok else result
        return replace(result, seconds=seconds | {"further tries": time.perf_counter() - started})

    def _try_harder(self, sides: Sequence["Side"]) -> Registration:
        """The first motion that more matches and hypotheses find, on the sides with most matches."""
        matcher = Matcher(self.network, self.card, str(self.device), self.settings.with_more())
        for source, target, _ in sides[:MAX_SIDES]:
            more = matcher.match_many(source, [target])[0]
            candidates = matcher.repositioned_motions(source, target, more)
            result = matcher._register(source, target, more, {}, candidates)
            if result.ok:
                break
        return result

    def _try_turned(self, source: PointsLike, target: PointsLike, grid: float) -> Registration:
        """Once more with the source's points turned, which fall into other cells, and viewpoints taken for unknown."""
        turned = self.encode(checked_points(source) @ TURN.T, UNKNOWN, grid)
        result = self._try_harder(self._sides(turned, self.encode(target, UNKNOWN, grid)))
        if result.transform is None:
            return result
        back = np.eye(4)
        back[:3, :3] = TURN
        matches = result.matches._replace(source=result.matches.source @ TURN)
        return replace(result, transform=result.transform @ back, matches=matches)

    def register_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Registration]:
        """Register one cloud to each of several targets, one attempt each (the tracker uses it)."""
        fresh = [not isinstance(cloud, EncodedCloud) for cloud in (source, *targets)]
        cloud, *others = self._encoded([source, *targets])
        encoding = sum(c.seconds for c, new in zip((cloud, *others), fresh, strict=True) if new)
        started = time.perf_counter()
        many = self.match_many(cloud, others)
        seconds = {"encode": encoding, "match": time.perf_counter() - started}
        return [self._register(cloud, other, matches, seconds) for other, matches in zip(others, many, strict=True)]

    def warp(self, source: PointsLike, target: PointsLike, settings: "WarpSettings | None" = None) -> "Warp":
        """The non-rigid warp of the source's surface onto the target; clouds (N, 3), or organised (H, W, 3).

        Walls, floors and separate objects are left out (`settings.foreground`).
        """
        from lepard_ros.registration.deformable.nonrigid import WarpSettings, warp_from_matches, without_background

        settings = settings or WarpSettings()
        clouds = [np.asarray(cloud) for cloud in (source, target)]
        for cloud in clouds:
            checked_points(cloud.reshape(-1, 3) if cloud.ndim == 3 else cloud)
        bodies = [without_background(cloud, settings.foreground) for cloud in clouds]
        matches = self.match_both_ways(*(body.reshape(-1, 3) for body in bodies))
        return warp_from_matches(bodies[0], bodies[1], matches, settings)

    def _sides(self, source: EncodedCloud, target: EncodedCloud) -> list["Side"]:
        """The pair with its matches; where a viewpoint is not known, with either side of it, most matches first."""
        sources, targets = ([c] if c.reverse is None else [c, c.reverse] for c in (source, target))
        sides = [(first, second, self.match_many(first, [second])[0]) for second in targets for first in sources]
        return sorted(sides, key=lambda side: -side[2].confidence.sum())

    def _register(
        self,
        source: EncodedCloud,
        target: EncodedCloud,
        matches: Matches,
        seconds: dict[str, float],
        further: FloatArray | None = None,
    ) -> Registration:
        """Estimate in the clouds' local frames, then put their offsets back. further: other motions (H, 4, 4)."""
        if not len(source) or not len(target):
            return Registration(None, Status.TOO_FEW_POINTS, matches, np.zeros(0, dtype=bool), seconds=seconds)
        local = local_matches(matches, source, target)
        rigid = replace(self.rigid, patch=PATCH_CELLS * target.surface.spacing)
        result = register_matches(local, source.surface, target.surface, rigid, further=further)
        transform = result.transform
        if transform is not None and (source.offset.any() or target.offset.any()):
            transform = transform.copy()
            transform[:3, 3] += target.offset - transform[:3, :3] @ source.offset
        return replace(result, transform=transform, matches=matches, seconds=seconds | result.seconds)

    @torch.no_grad()
    def repositioned_motions(self, source: EncodedCloud, target: EncodedCloud, matches: Matches) -> FloatArray | None:
        """Motions (H, 4, 4), in the local frames, that the transformer finds once hypotheses repositioned the source.

        Hypotheses come from the descriptors' matches and from its own coarse ones, half of each; the latter
        are returned too. Of the repositioned pairs, the surest suggest motions. None where the settings ask for none.
        """
        count = self.settings.repositionings
        if not count or len(matches.confidence) < MIN_INLIERS or self.config.normalisation == "joint":
            return None
        surfaces, rule = (source.surface, target.surface), self.rigid
        coarse = self._coarse_matches(source, target, self._confidences(source, [target])[0], mutual=True)
        by_descriptors = candidate_motions(local_matches(matches, source, target), *surfaces, rule)[0]
        wide = rule.widened(COARSE_TOLERANCE)
        by_coarse = candidate_motions(local_matches(coarse, source, target), *surfaces, wide)[0]
        motions = np.concatenate([by_descriptors[: (count + 1) // 2], by_coarse[: count // 2]])
        if not len(motions):
            return None
        tables = sorted(self._repositioned(source, target, motions), key=surest, reverse=True)[:MAX_GUIDED]
        guided = [local_matches(self._matches(source, target, table), source, target) for table in tables]
        return np.concatenate([by_coarse, *(candidate_motions(m, *surfaces, rule)[0][:2] for m in guided)])

    def _repositioned(self, source: EncodedCloud, target: EncodedCloud, motions: FloatArray) -> list[Tensor]:
        """The transformer's confidences (n, m) after each of the motions (H, 4, 4) repositioned the source."""
        x, y = (pad_clouds([c.features], [c.points], [c.normals], self._prepared) for c in (source, target))
        with mixed_precision(self.network, self.device):
            output = self.network.match(x, y, rigid_fit(motions, source.scale, self.device))
        return list(output.confidence.float())

    @property
    def _prepared(self) -> bool:
        """Whether encoded clouds carry the first self attention already."""
        return self.guided and self.network.can_prepare()

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

    def _matches(self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor | None) -> Matches:
        """Matches of one pair, most confident first; confidence: (n, m) of its coarse points, if they are used."""
        if not self.config.fine_dim:
            assert confidence is not None
            return self._coarse_matches(source, target, confidence)
        return self._fine_matches(source, target, confidence)

    def _coarse_matches(
        self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor, mutual: bool | None = None
    ) -> Matches:
        """The coarse points whose confidence (n, m) suffices; mutual: None for the network's own choice."""
        mutual = self.config.mutual if mutual is None else mutual
        index = select_matches(confidence[None], self.config.confidence_threshold, mutual)[:, 1:]
        x, y = index.T
        rows, columns, scores = most_confident(x, y, confidence[x, y])
        return Matches(source.coarse_points[rows], target.coarse_points[columns], scores)

    def _fine_matches(self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor | None) -> Matches:
        """Fine points and the partners that they choose in the whole target; with `mutual`, if those choose them."""
        assert source.owners is not None and target.owners is not None and self.network.fine_matching is not None
        assert source.fine_features is not None and target.fine_features is not None
        count, matching = len(source.fine_features), self.network.fine_matching
        rows = torch.arange(0, count, max(1, count // self.settings.fine_points), device=self.device)
        x, y = source.fine_features[rows] * matching.scale, target.fine_features.T.contiguous()
        if confidence is None:
            columns, scores, mutual = best_partners(x, y)
        else:
            prior = coarse_prior(confidence, matching.guidance)
            columns, scores, mutual = best_partners(x, y, prior, source.owners[rows], target.owners)
        sure = scores > self.config.confidence_threshold
        sure = sure & mutual if self.config.mutual else sure
        found = most_confident(rows[sure], columns[sure], scores[sure], self.settings.fine_matches)
        x_points, y_points = source.surface.points[found[0]], target.surface.points[found[1]]
        return Matches(x_points + source.offset, y_points + target.offset, found[2])


def most_confident(
    rows: Tensor, columns: Tensor, scores: Tensor, count: int | None = None
) -> tuple[IntArray, IntArray, FloatArray]:
    """The `count` most confident of the matches (M,) between rows and columns, in main memory."""
    order = scores.argsort(descending=True, stable=True)[:count]
    a, b, confidences = (value[order].cpu().numpy() for value in (rows, columns, scores))
    return a, b, confidences.astype(np.float64)


def local_matches(matches: Matches, source: EncodedCloud, target: EncodedCloud) -> Matches:
    """Matches in the clouds' local frames, without their offsets."""
    return Matches(matches.source - source.offset, matches.target - target.offset, matches.confidence)


def surest(confidence: Tensor) -> float:
    """The mean confidence of the surest coarse matches of a table (n, m): higher after a right motion."""
    best = confidence.amax(1)
    return float(best.topk(min(SUREST, len(best))).values.mean())


def rigid_fit(motions: FloatArray, scale: float, device: torch.device) -> RigidFit:
    """Motions (H, 4, 4) in metres as the network takes them, where a metre is `scale`."""
    given = torch.from_numpy(motions).to(device, torch.float32)
    return RigidFit(given[:, :3, :3], given[:, :3, 3:] * scale, given.new_ones(len(given)))
