# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The public API of the core: encode clouds once, then match, register or warp them."""

import math
import os
import time
from collections.abc import Callable, Sequence
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
from lepard_ros.registration.rigid.estimate import RigidSettings, agreement, candidate_motions, register_matches
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Status, Surface

__all__ = ["EncodedCloud", "Matcher", "MatcherSettings", "PointsLike"]

Side = tuple[EncodedCloud, EncodedCloud, Matches]
SMALL_CELLS = 12  # a cloud with fewer cells across is an object, not a place
FINE_POINTS = 1500  # source points that are matched where time matters more than the best matches
HARDER = 2.0  # factor on points, matches, seeds and hypotheses in a further try
COARSE_CELLS = 1_500  # of the smaller cloud, on the second grid of a further try
MIN_COARSER = 1.4  # minimum factor between the two grids
PATIENCE = 2  # factor on the iterations that refine the motion of a further try
FURTHER_ODDS = math.log(2.0)  # additional log-odds that a third try needs: the rule was fitted on two
# Additional log-odds that `register` needs: nothing else confirms its motion, whereas a tracker confirms each jump. Of
# 299 pairs of unseen rooms and 212 of real training scans (below 35 % overlap) and 298 of different rooms, 345 correct
# motions pass, 1 wrong one, and 1 of different rooms. With 0.7: 360, 1 and 1; with 0.4: 369, 4 and 4. Raised from 0.7
# for the goal of 3DLoMatch, at most 2 % wrong: that set is not independent of it.
ALONE_ODDS = 1.0
MAX_SIDES = 2  # orientations of clouds without a viewpoint that are tried again
COARSE_TOLERANCE = 2.0  # factor on the tolerances for coarse matches, relative to fine ones
MAX_GUIDED = 3  # repositioned pairs for which fine matches are computed
RANKING_POINTS = 400  # source points that are matched to rank targets
SUREST = 50  # most confident coarse matches that rank repositioned pairs
# A rotation (3, 3) about no grid axis: the same points then fall into other cells.
TURN = exponential(np.array([[0.0, 0.0, 0.0, 0.5, 0.4, 0.3]]))[0, :3, :3]

if TYPE_CHECKING:
    from lepard_ros.registration.deformable.nonrigid import WarpSettings
    from lepard_ros.registration.deformable.warp import Warp


@dataclass(frozen=True)
class MatcherSettings:
    """Runtime settings of a matcher.

    fine_points: maximum number of source points that are matched against all target points (None: all points of a
    rigid pair; FINE_POINTS if one cloud is matched with several, or guided). fine_matches: maximum number of matches.
    guided: whether the transformer's coarse matches guide the fine ones (None: for deformable scenes
    only; in rigid scenes the descriptors alone register more pairs, see docs/training.md). grid: metres, for encoding
    (None: the network's own, or for raw rigid clouds one that suits their size). gridded: clouds are already on that
    grid, like the files of the benchmarks (None: if hardly any two points share a cell). rigid: how a motion is
    estimated from the matches.
    effort: further tries of `register` for a refused pair; see `Matcher.register`.
    repositionings: number of hypotheses that reposition the source for the transformer in a further try; its matches
    then give additional motions (0: none).
    """

    fine_points: int | None = None
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
        points, matches = round((self.fine_points or FINE_POINTS) * times), round(self.fine_matches * times)
        rigid = replace(self.rigid.patient(PATIENCE), consistency=more)
        return replace(self, rigid=rigid, fine_points=points, fine_matches=matches, effort=0)


class Matcher:
    """Matches point clouds with a Lepard network. Not thread-safe."""

    def __init__(
        self, network: Lepard, card: Card, device: str = "auto", settings: MatcherSettings | None = None
    ) -> None:
        """network and card: from `network.weights.load`. device: auto, cpu, cuda, cuda:i or onnx."""
        self.device = choose_device(device)
        if device == ONNX:
            network = run_by_onnx(network, card.sha256)
        self.network = network.to(self.device).eval()
        self.card, self.config = card, network.config
        self.settings = settings or MatcherSettings()
        guided = card.mode == "deformable" if self.settings.guided is None else self.settings.guided
        # Without fine features there are only coarse matches, on a grid four times as wide.
        self.guided = guided or not self.config.fine_dim
        rigid = self.settings.rigid if self.config.fine_dim else self.settings.rigid.widened(COARSE_TOLERANCE)
        self.rigid = replace(rigid, device=str(self.device))

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str] = "rigid", device: str = "auto", settings: MatcherSettings | None = None
    ) -> "Matcher":
        """A matcher with shipped weights ("rigid", "deformable") or those of a .safetensors file."""
        network, card = load(name)
        if device == ONNX:  # `lepard export` writes the graphs next to the weights
            network = run_by_onnx(network, card.sha256, find_weights(name).parent)
        return cls(network, card, device, settings)

    @property
    def weights_id(self) -> str:
        """The SHA-256 of the weights: clouds encoded with others, or for other use, cannot be compared."""
        use = "" if self.guided else ":descriptors"
        return self.card.sha256 + use + (f":{self.settings.grid:g}" if self.settings.grid else "")

    @property
    def runs_on(self) -> str:
        """The device that runs the network: cpu, cuda:i or onnx."""
        return ONNX if isinstance(self.network, OnnxLepard) else str(self.device)

    def warm_up(self) -> None:
        """Run once on a small synthetic cloud, so that the first real cloud is not slower."""
        side = torch.linspace(0, 20 * self.config.grid, 40)
        x, y = torch.meshgrid(side, side, indexing="ij")
        points = torch.stack([x, y, 1 + 0.2 * (9 * x).sin()], dim=-1).reshape(-1, 3)
        cloud = self.encode(points)
        self.match(cloud, cloud)

    def encode(
        self, points: PointsLike, viewpoint: PointsLike | str | None = None, grid: float | None = None
    ) -> EncodedCloud:
        """Encode a cloud.

        points: (N, 3) metres; rows that are not finite are ignored. viewpoint: (3,), position of the sensor in the
        cloud's frame (None: at its origin), or "unknown" for fused maps, models and clouds that were moved; encoding
        then takes twice as long. grid: metres, if not that of the settings.
        A cloud with fewer than 3 points gives an encoded cloud of length 0, which matches nothing.
        """
        grid = grid or self.settings.grid or self.config.grid
        gridded = self.settings.gridded
        return encode_cloud(self.network, points, viewpoint, grid, self.weights_id, self.device, self.guided, gridded)

    def encode_all(
        self, clouds: Sequence[PointsLike], viewpoints: Sequence[PointsLike | str | None] | None = None
    ) -> list[EncodedCloud]:
        """Encode clouds for comparison, on one grid that suits them all."""
        grid, places = self.suitable_grid(clouds), viewpoints or [None] * len(clouds)
        return [self.encode(cloud, place, grid) for cloud, place in zip(clouds, places, strict=True)]

    def suitable_grid(self, clouds: Sequence[PointsLike]) -> float:
        """The grid in metres for comparing raw clouds, for rigid scenes at any scale."""
        own = self.settings.grid or self.config.grid
        if self.card.mode == "deformable" or not self.config.fine_dim or self.settings.grid:
            return own
        return suitable_grid(clouds, own, self.device)

    @property
    def network_grid(self) -> float:
        """The grid in metres that the network was trained on."""
        return self.config.grid

    def tracking_grid(self, points: PointsLike) -> float:
        """The grid in metres for a map that starts with this cloud (N, 3): the network's own, unless it is unsuitable.

        A street needs a coarser grid, a small object a finer one. A narrow view of a room does not: the next view may
        be wide.
        """
        own, grid = self.settings.grid or self.config.grid, self.suitable_grid([points])
        finite = checked_points(points)
        small = len(finite) > 0 and np.linalg.norm(np.ptp(finite, axis=0)) < SMALL_CELLS * own
        return grid if grid > 2 * own or (small and grid < own / 2) else own

    def match(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """Correspondences from source to target, most confident first."""
        cloud, other = self._encoded([source, target])
        return self._sides(cloud, other)[0][2]

    def match_back(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """The matches found from target to source, as matches from source to target.

        Raw clouds are encoded in another orientation than by `match`: their points fall into other cells, so that the
        errors of both are independent.
        """
        if isinstance(source, EncodedCloud) or isinstance(target, EncodedCloud):
            back = self.match(target, source)
            return Matches(back.target, back.source, back.confidence)
        turned = self.encode_all([checked_points(cloud) @ TURN.T for cloud in (target, source)])
        back = self.match(*turned)
        return Matches(back.target @ TURN, back.source @ TURN, back.confidence)

    def match_both_ways(self, source: PointsLike | EncodedCloud, target: PointsLike | EncodedCloud) -> Matches:
        """The matches of `match`, and those of `match_back`.

        A motion that both support is more likely correct: the acceptance of warps relies on this.
        """
        there = self.match(*self._encoded([source, target]))
        return joined(there, self.match_back(source, target))

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

    @torch.no_grad()
    def _match_pair(self, source: EncodedCloud, target: EncodedCloud) -> Matches:
        """The matches of one pair. Unguided, every source point is matched.

        That costs three times as much as FINE_POINTS (0.09 CPU-s) and raises the inlier ratio by half.
        """
        quick = self.guided or self.settings.fine_points is not None or self.config.normalisation == "joint"
        if quick or not (len(source) and len(target)):
            return self.match_many(source, [target])[0]
        return self._fine_matches(source, target, None, len(source.surface.points))

    def _match_together(self, cloud: EncodedCloud, other: EncodedCloud) -> Matches:
        """Matches of a pair whose features depend on both clouds."""
        source, target = encode_together(self.network, cloud, other)
        return self._matches(source, target, self._confidences(source, [target])[0])

    def _confidences(self, cloud: EncodedCloud, others: list[EncodedCloud]) -> list[Tensor]:
        """The transformer's confidences (n, m) for one cloud and each of several others, in one batch."""
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
        """The rigid motion from the source to the target; refused (transform None) unless it is reliable.

        It needs more evidence than a motion of `register_many`, because nothing else confirms it.

        effort (None: that of the settings): further tries if the motion is refused. 1: with matches on a coarser grid.
        2: also with more matches and hypotheses, then with a rotated grid and unknown viewpoints, which needs raw
        clouds.
        """
        effort = self.settings.effort if effort is None else effort
        cloud, other = self._encoded([source, target])
        seconds = {"encode": sum(c.seconds for c, raw in ((cloud, source), (other, target)) if c is not raw)}
        started = time.perf_counter()
        sides = self._sides(cloud, other)
        seconds["match"] = time.perf_counter() - started
        result = self._register(*sides[0], seconds, odds=ALONE_ODDS)
        if result.ok or effort < 1 or result.status is Status.TOO_FEW_POINTS:
            return result
        started = time.perf_counter()
        tries: list[Callable[[], Registration]] = [lambda: self._try_coarser(sides)]
        if effort > 1:
            tries.append(lambda: self._try_harder(sides))
            if not (isinstance(source, EncodedCloud) or isinstance(target, EncodedCloud)):
                tries.append(lambda: self._try_turned(source, target, cloud.surface.spacing))
        for further_try in tries:
            result = better(result, further_try())
            if result.ok:
                break
        return replace(result, seconds=seconds | {"further tries": time.perf_counter() - started})

    def try_coarser(self, source: EncodedCloud, target: EncodedCloud) -> Registration:
        """The first further try of `register` alone, to fit the acceptance rule."""
        return self._try_coarser(self._sides(source, target))

    def _try_coarser(self, sides: Sequence["Side"]) -> Registration:
        """Try with additional matches of the same clouds on a coarser grid; the first accepted motion.

        Its descriptors see more of the scene, and its matches fail on other pairs than those of the finer grid
        (docs/training_log.md, eighth round). Both grids' matches give hypotheses and evidence on the finer surfaces.
        """
        matcher = self._with(replace(self.settings, rigid=self.settings.rigid.patient(PATIENCE)))
        for source, target, matches in sides[:MAX_SIDES]:
            grid = coarser_grid(source.surface, target.surface)
            first, second, coarse = self._sides(self._regridded(source, grid), self._regridded(target, grid))[0]
            further = candidate_motions(coarse, first.surface, second.surface, self.rigid).motions
            placed = Matches(coarse.source + source.offset, coarse.target + target.offset, coarse.confidence)
            result = matcher._register(source, target, merged(matches, placed), {}, further, ALONE_ODDS)
            if result.ok:
                break
        return result

    def _regridded(self, cloud: EncodedCloud, grid: float) -> EncodedCloud:
        """An encoded cloud on another grid in metres."""
        place = cloud.surface.viewpoint
        return self.encode(cloud.surface.points, place if np.isfinite(place).all() else UNKNOWN, grid)

    def _try_harder(self, sides: Sequence["Side"]) -> Registration:
        """Try with more matches and hypotheses, orientations with the most matches first; the first accepted motion."""
        matcher = self._with(self.settings.with_more())
        for source, target, _ in sides[:MAX_SIDES]:
            more = matcher.match_many(source, [target])[0]
            candidates = matcher.repositioned_motions(source, target, more)
            result = matcher._register(source, target, more, {}, candidates, ALONE_ODDS + FURTHER_ODDS)
            if result.ok:
                break
        return result

    def _try_turned(self, source: PointsLike, target: PointsLike, grid: float) -> Registration:
        """Try with the source rotated, so that its points fall into other cells, and with unknown viewpoints."""
        turned = self.encode(checked_points(source) @ TURN.T, UNKNOWN, grid)
        result = self._try_harder(self._sides(turned, self.encode(target, UNKNOWN, grid)))
        back = np.eye(4)
        back[:3, :3] = TURN
        transform, guess = (None if m is None else m @ back for m in (result.transform, result.guess))
        matches = result.matches._replace(source=result.matches.source @ TURN)
        return replace(result, transform=transform, guess=guess, matches=matches)

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

    def register_best(
        self, source: EncodedCloud, targets: Sequence[EncodedCloud], count: int
    ) -> dict[int, Registration]:
        """Register one cloud to the `count` targets whose matches agree best, by their index, best first.

        Ranking a target costs a tenth of registering it, so that a map can be searched.
        """
        if not targets:
            return {}
        quick = self._with(replace(self.settings, fine_points=RANKING_POINTS))
        found = quick.match_many(source, targets)
        scores = [agreement(matches, source.surface.spacing, self.rigid) for matches in found]
        best = np.argsort(np.negative(scores), kind="stable")[:count].tolist()
        return dict(zip(best, self.register_many(source, [targets[index] for index in best]), strict=True))

    def _with(self, settings: MatcherSettings) -> "Matcher":
        """The same network with other settings."""
        return Matcher(self.network, self.card, str(self.device), settings)

    def warp(self, source: PointsLike, target: PointsLike, settings: "WarpSettings | None" = None) -> "Warp":
        """The non-rigid warp of the source surface to the target; clouds (N, 3), or organised (H, W, 3).

        Walls, floors and separate objects are ignored (`settings.foreground`).
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
        """The pair with its matches; for unknown viewpoints with both orientations, most matches first."""
        sources, targets = ([c] if c.reverse is None else [c, c.reverse] for c in (source, target))
        sides = [(first, second, self._match_pair(first, second)) for second in targets for first in sources]
        return sorted(sides, key=lambda side: -side[2].confidence.sum())

    def _register(
        self,
        source: EncodedCloud,
        target: EncodedCloud,
        matches: Matches,
        seconds: dict[str, float],
        further: FloatArray | None = None,
        odds: float | None = None,
    ) -> Registration:
        """Estimate in the clouds' local frames, then apply their offsets.

        further: additional motions (H, 4, 4). odds: log-odds needed in addition to those of the settings, for a pair
        that nothing else confirms.
        """
        if not len(source) or not len(target):
            return Registration(None, Status.TOO_FEW_POINTS, matches, np.zeros(0, dtype=bool), seconds=seconds)
        local = local_matches(matches, source, target)
        rule = self.rigid if odds is None else self.rigid.alone(odds)
        rigid = replace(rule, patch=PATCH_CELLS * target.surface.spacing)
        result = register_matches(local, source.surface, target.surface, rigid, further=further)
        transform, guess = (with_offsets(motion, source, target) for motion in (result.transform, result.guess))
        return replace(result, transform=transform, guess=guess, matches=matches, seconds=seconds | result.seconds)

    @torch.no_grad()
    def repositioned_motions(self, source: EncodedCloud, target: EncodedCloud, matches: Matches) -> FloatArray | None:
        """Motions (H, 4, 4), in the local frames, from the transformer after hypotheses repositioned the source.

        Half of the hypotheses come from descriptor matches, half from coarse matches; the latter are returned too. The
        most confident repositioned pairs give further motions. None if the settings disable this.
        """
        count = self.settings.repositionings
        if not count or len(matches.confidence) < MIN_INLIERS or self.config.normalisation == "joint":
            return None
        surfaces, rule = (source.surface, target.surface), self.rigid
        coarse = self._coarse_matches(source, target, self._confidences(source, [target])[0], mutual=True)
        by_descriptors = candidate_motions(local_matches(matches, source, target), *surfaces, rule).motions
        wide = rule.widened(COARSE_TOLERANCE)
        by_coarse = candidate_motions(local_matches(coarse, source, target), *surfaces, wide).motions
        motions = np.concatenate([by_descriptors[: (count + 1) // 2], by_coarse[: count // 2]])
        if not len(motions):
            return None
        tables = sorted(self._repositioned(source, target, motions), key=surest, reverse=True)[:MAX_GUIDED]
        guided = [local_matches(self._matches(source, target, table), source, target) for table in tables]
        return np.concatenate([by_coarse, *(candidate_motions(m, *surfaces, rule).motions[:2] for m in guided)])

    def _repositioned(self, source: EncodedCloud, target: EncodedCloud, motions: FloatArray) -> list[Tensor]:
        """The transformer's confidences (n, m) after each of the motions (H, 4, 4) repositioned the source."""
        x, y = (pad_clouds([c.features], [c.points], [c.normals], self._prepared) for c in (source, target))
        with mixed_precision(self.network, self.device):
            output = self.network.match(x, y, rigid_fit(motions, source.scale, self.device))
        return list(output.confidence.float())

    @property
    def _prepared(self) -> bool:
        """Whether encoded clouds already include the first self attention."""
        return self.guided and self.network.can_prepare()

    def _encoded(self, clouds: Sequence[PointsLike | EncodedCloud]) -> list[EncodedCloud]:
        """Encode the clouds that are not encoded yet, on the grid of the others; raises InputError if grids differ."""
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
        """The coarse matches with sufficient confidence (n, m); mutual: None for the network's default."""
        mutual = self.config.mutual if mutual is None else mutual
        index = select_matches(confidence[None], self.config.confidence_threshold, mutual)[:, 1:]
        x, y = index.T
        rows, columns, scores = most_confident(x, y, confidence[x, y])
        return Matches(source.coarse_points[rows], target.coarse_points[columns], scores)

    def _fine_matches(
        self, source: EncodedCloud, target: EncodedCloud, confidence: Tensor | None, max_points: int | None = None
    ) -> Matches:
        """Fine points with their best matches in the whole target; with `mutual`, only mutual ones."""
        assert source.owners is not None and target.owners is not None and self.network.fine_matching is not None
        assert source.fine_features is not None and target.fine_features is not None
        count, matching = len(source.fine_features), self.network.fine_matching
        max_points = max_points or self.settings.fine_points or FINE_POINTS
        rows = torch.arange(0, count, max(1, count // max_points), device=self.device)
        x, y = source.fine_features[rows] * matching.scale, target.fine_features.T.contiguous()
        if confidence is None:
            columns, scores, mutual = best_partners(x, y, nothing=matching.nothing)
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


def with_offsets(motion: FloatArray | None, source: EncodedCloud, target: EncodedCloud) -> FloatArray | None:
    """A motion (4, 4) of local frames as one of the clouds' own frames."""
    if motion is None or not (source.offset.any() or target.offset.any()):
        return motion
    motion = motion.copy()
    motion[:3, 3] += target.offset - motion[:3, :3] @ source.offset
    return motion


def better(refused: Registration, further: Registration) -> Registration:
    """A further try if it was accepted or has the likelier motion, else the refused one before it."""
    qualities = np.nan_to_num([refused.quality, further.quality], nan=-np.inf)
    return further if further.ok or qualities[1] > qualities[0] else refused


def joined(first: Matches, second: Matches) -> Matches:
    """The matches of both, in this order."""
    return Matches(*(np.concatenate(column) for column in zip(first, second, strict=True)))


def merged(first: Matches, second: Matches) -> Matches:
    """The matches of both, most confident first, as the estimator reports their inliers."""
    both = joined(first, second)
    order = np.argsort(-both.confidence, kind="stable")
    return Matches(*(column[order] for column in both))


def coarser_grid(source: Surface, target: Surface) -> float:
    """The second grid in metres of a pair of surfaces: the smaller one has about COARSE_CELLS cells on it."""
    cells = min(len(source.points), len(target.points))
    return target.spacing * max(MIN_COARSER, float(np.sqrt(cells / COARSE_CELLS)))


def local_matches(matches: Matches, source: EncodedCloud, target: EncodedCloud) -> Matches:
    """Matches in the clouds' local frames, without their offsets."""
    return Matches(matches.source - source.offset, matches.target - target.offset, matches.confidence)


def surest(confidence: Tensor) -> float:
    """Mean confidence of the most confident coarse matches of a table (n, m): higher after a correct motion."""
    best = confidence.amax(1)
    return float(best.topk(min(SUREST, len(best))).values.mean())


def rigid_fit(motions: FloatArray, scale: float, device: torch.device) -> RigidFit:
    """Motions (H, 4, 4) in metres, converted to the network's units, where a metre is `scale`."""
    given = torch.from_numpy(motions).to(device, torch.float32)
    return RigidFit(given[:, :3, :3], given[:, :3, 3:] * scale, given.new_ones(len(given)))
