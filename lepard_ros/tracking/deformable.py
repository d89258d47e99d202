# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Following a bending thing: its model is warped to every live cloud, and learns from each."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import kabsch, rotation_angle
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.foreground import ForegroundSettings, camera_motion, find_foreground
from lepard_ros.registration.deformable.graph import finite_points
from lepard_ros.registration.deformable.match_filter import FilterSettings, chosen, weigh_matches
from lepard_ros.registration.deformable.nonrigid import matched_normals, solve_nonrigid
from lepard_ros.registration.deformable.surface_contact import thinned_surface
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import NO_MATCHES, Matches, StageClock, Surface
from lepard_ros.tracking.model import CanonicalModel, Change, Imprint, ModelSettings, imprint, thin
from lepard_ros.tracking.track import TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher

MIN_POINTS = 200  # of a cloud on the model's grid
# Keyframes, seen from the most similar side, that a cloud is matched with besides the last cloud; all once it is lost.
MATCHED_KEYFRAMES = 2
FOLLOW_SECONDS, FOLLOW_OVERLAP = 0.5, 0.7  # limits of following without matches, see `DeformableSettings.follower`


@dataclass(frozen=True)
class DeformableSettings:
    """How a bending thing is followed. Lengths in metres.

    max_keyframes: past clouds that are kept, from all sides of the body.
    keyframe_motion, keyframe_degrees: mean motion and turn of the model, since every keyframe, that makes a new one.
    min_overlap: share of the warped model on the live cloud. max_rejections: clouds in a row that may be refused
    before the model restarts.
    follower: the solver for a cloud whose matches do not suffice; it goes on from the last warp to the nearest surface,
    which only sees small motions and no sliding. So it runs at most FOLLOW_SECONDS after the last accepted cloud
    and for at most max_followed clouds in a row, and believed only with FOLLOW_OVERLAP of the model on the cloud.
    max_range: points beyond are left out. foreground: how the body is told
    from the room, or None to take the whole cloud.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    solver: NonrigidSettings = field(default_factory=lambda: NonrigidSettings(iterations=10, max_seconds=10.0))
    follower: NonrigidSettings = field(
        default_factory=lambda: NonrigidSettings(surface_reach=0.06, iterations=10, max_seconds=10.0)
    )
    filter: FilterSettings = field(default_factory=FilterSettings)
    foreground: ForegroundSettings | None = field(default_factory=ForegroundSettings)
    max_keyframes: int = 12
    keyframe_motion: float = 0.15
    keyframe_degrees: float = 25.0
    min_overlap: float = 0.15
    max_rejections: int = 10
    max_followed: int = 10
    max_range: float = float("inf")

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        if self.max_keyframes < 1 or self.max_rejections < 1 or not self.keyframe_motion > 0:
            raise InputError("max_keyframes, max_rejections and keyframe_motion must be more than 0.")


@dataclass(frozen=True)
class DeformableTrack:
    """What became of one cloud.

    state: OK or RELOCALISED come with a warp, the others never do. reason: a sentence.
    warp: from the model's rest shape (the first cloud's frame) to the live cloud, or None.
    model_points: (N, 3) in the rest shape. warped_points: (N', 3) those of them that the warp carries, in the live
    cloud's frame. matches: from the rest shape to the live cloud, those that the filter kept; inliers: (M,) bool.
    method: what found the warp, "lepard", "nicp" (the nearest surface alone), or empty without a warp.
    change: what the model learnt. overlap: share of the warped model on the cloud. residual: metres, there.
    cut_edges: edges that stayed torn and are now cut. reset: the model started with this cloud. model_stamp: of
    the cloud that the model began with. background: points that were left out. seconds: by stage.
    """

    stamp: float
    state: TrackingState
    reason: str
    warp: Warp | None
    model_points: FloatArray
    warped_points: FloatArray
    matches: Matches
    inliers: BoolArray
    method: str = ""
    change: Change = field(default_factory=Change)
    overlap: float = 0.0
    residual: float = float("nan")
    cut_edges: int = 0
    new_keyframe: bool = False
    reset: bool = False
    model_stamp: float = 0.0
    background: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class _Live(NamedTuple):
    """A cloud without its background: points (N, 3), the same thinned with normals, the background (M, 3)."""

    points: FloatArray
    surface: Surface
    background: FloatArray
    cloud: "EncodedCloud"
    stamp: float


class _Sight(NamedTuple):
    """A past cloud and where the model lay in it: nodes (n, 3) there, and the turn (3, 3) of the whole model."""

    live: _Live
    imprint: Imprint
    nodes: FloatArray
    turn: FloatArray


class DeformableTracker:
    """Follows one bending thing. Not to be shared between threads."""

    def __init__(self, matcher: "Matcher", settings: DeformableSettings | None = None) -> None:
        """matcher: with weights for deformable scenes."""
        self.matcher, self.settings = matcher, settings or DeformableSettings()
        self.reset()

    def reset(self) -> None:
        """Forget the model; the next cloud begins a new one."""
        self.model: CanonicalModel | None = None
        self._keyframes: list[_Sight] = []
        self._last: _Sight | None = None
        self._rejected, self._followed = 0, 0
        self._model_stamp = 0.0

    def process(self, points: FloatArray, stamp: float) -> DeformableTrack:
        """Warp the model to a live cloud, (N, 3) or organised (H, W, 3) with NaN, and let it learn from it."""
        clock = StageClock()
        body, background = self._split(points)
        clock.stop("foreground")
        if len(body) < MIN_POINTS:
            return self._refused(stamp, "the cloud has too few points", clock)
        surface = thinned_surface(body, self.settings.model.graph.coverage / 3)
        live = _Live(body, surface, background, self.matcher.encode(body), stamp)
        clock.stop("encode")
        if self.model is None:
            return self._begin(live, clock)
        matches = self._find_matches(live)
        clock.stop("match")
        warp, method = self._solve(live, matches), "lepard"
        reason = self._reason_to_refuse(warp)
        if reason:
            followed = self._follow(live)
            if followed is None:
                clock.stop("warp")
                return self._refused(stamp, reason, clock, live, matches, warp)
            warp, matches, method = followed, NO_MATCHES, "nicp"
        clock.stop("warp")
        change = self.model.update(warp, live.points)
        clock.stop("fuse")
        return replace(self._accept(live, matches, warp, change, clock), method=method)

    def _split(self, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The body (N, 3), thinned, and the background (M, 3) of a cloud."""
        if np.ndim(points) not in (2, 3) or np.shape(points)[-1] != 3:
            raise InputError(f"A cloud must have the shape (N, 3) or (H, W, 3), but this one has {np.shape(points)}.")
        finite = finite_points(points)
        finite = finite[np.linalg.norm(finite, axis=1) < self.settings.max_range]
        if self.settings.foreground is None or len(finite) < MIN_POINTS:
            return thin(finite, self.settings.model.spacing / 2), finite[:0]
        last = None if self._last is None else self._last.imprint.warped
        body = find_foreground(finite, self.settings.foreground, last)
        return thin(finite[body], self.settings.model.spacing / 2), finite[~body]

    def _begin(self, live: _Live, clock: StageClock) -> DeformableTrack:
        """Make the live cloud the model."""
        self.reset()
        self.model, self._model_stamp = CanonicalModel(live.points, self.settings.model), live.stamp
        if not self.model.graph.active.any():
            self.model = None
            return self._refused(live.stamp, "the cloud has no connected surface that is large enough", clock)
        self._remember(live, keyframe=True)
        clock.stop("fuse")
        track = self._report(live.stamp, TrackingState.OK, "the model begins here", clock, self.model.warp, reset=True)
        return replace(track, method="lepard", background=len(live.background))

    def _find_matches(self, live: _Live) -> Matches:
        """Matches from the rest shape to the live cloud, over the last cloud and the keyframes, weighed each."""
        sights = self._sights_to_match()
        found = self.matcher.match_many(live.cloud, [sight.live.cloud for sight in sights])
        parts = [self._to_rest(matches, sight, live) for matches, sight in zip(found, sights, strict=True)]
        return Matches(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _sights_to_match(self) -> list[_Sight]:
        """The last cloud and the keyframes seen from the most similar side; all of them once the body is lost."""
        assert self._last is not None
        last = self._last
        ranked = sorted(self._keyframes, key=lambda sight: _degrees_between(sight.turn, last.turn))
        sights = ranked if self._rejected else [last, *ranked[:MATCHED_KEYFRAMES]]
        return list({id(sight.live): sight for sight in sights}.values())

    def _to_rest(self, matches: Matches, sight: _Sight, live: _Live) -> Matches:
        """Matches live -> past cloud, weighed, turned round and carried back to the rest shape."""
        turned = Matches(*(np.asarray(part, float) for part in (matches.target, matches.source, matches.confidence)))
        if not len(turned.confidence):
            return turned
        normals = matched_normals(turned, sight.live.surface, live.surface)
        weighed = weigh_matches(turned, self.settings.filter, normals)
        rest, near = sight.imprint.to_rest(weighed.source, 2 * self.settings.model.graph.coverage)
        return chosen(weighed._replace(source=rest), near)

    def _predicted(self, live: _Live) -> Warp:
        """The last warp, moved on by the camera's own motion as the background shows it."""
        assert self.model is not None and self._last is not None
        if not len(self._last.live.background) or not len(live.background):
            return self.model.warp
        return self.model.warp.moved_by(camera_motion(self._last.live.background, live.background))

    def _solve(self, live: _Live, matches: Matches) -> Warp:
        """The warp to the live cloud by the matches, begun at the last warp; if that is refused, begun at the matches.

        After a refused cloud the last warp is old, and the matches come first.
        """
        assert self.model is not None
        model, predicted = self.model, self._predicted(live)
        starts = (predicted, None) if self._rejected == 0 else (None, predicted)
        for start in starts:
            warp = solve_nonrigid(model.graph, model.surface, live.surface, matches, self.settings.solver, start)
            if not self._reason_to_refuse(warp):
                break
        return warp

    def _follow(self, live: _Live) -> Warp | None:
        """The warp from the last one to the nearest surface, without matches, or None where that cannot be trusted."""
        assert self.model is not None and self._last is not None
        settings, model = self.settings, self.model
        if live.stamp - self._last.live.stamp > FOLLOW_SECONDS or self._followed >= settings.max_followed:
            return None
        start = self._predicted(live)
        warp = solve_nonrigid(model.graph, model.surface, live.surface, None, settings.follower, start)
        known = warp.evidence
        return warp if warp.ok and known is not None and known.overlap >= FOLLOW_OVERLAP else None

    def _reason_to_refuse(self, warp: Warp) -> str:
        """Why a warp is not believed, or an empty string."""
        if not warp.ok:
            return warp.status.value
        if warp.overlap < self.settings.min_overlap:
            return f"only {warp.overlap:.0%} of the warped model lies on the cloud"
        return ""

    def _accept(self, live: _Live, matches: Matches, warp: Warp, change: Change, clock: StageClock) -> DeformableTrack:
        assert self.model is not None
        state = TrackingState.OK if self._rejected == 0 else TrackingState.RELOCALISED
        self._rejected = 0
        self._followed = 0 if len(matches.confidence) else self._followed + 1
        keyframe = self._remember(live, self._followed == 0 and self._sees_a_new_side())
        reason = f"{change.cut} edges were torn and are cut" if change.cut else "the warp is known"
        track = self._report(live.stamp, state, reason, clock, self.model.warp, matches, warp.match_inliers)
        return replace(
            track,
            change=change,
            new_keyframe=keyframe,
            overlap=warp.overlap,
            residual=warp.residual,
            cut_edges=change.cut,
            background=len(live.background),
        )

    def _remember(self, live: _Live, keyframe: bool) -> bool:
        """Keep the cloud as the last one, and as a keyframe; of too many keyframes the most redundant one goes."""
        assert self.model is not None
        warp = self.model.warp
        self._last = _Sight(live, imprint(self.model), warp.moved_nodes, _turn_of(warp))
        if keyframe:
            self._keyframes.append(self._last)
            if len(self._keyframes) > self.settings.max_keyframes:
                del self._keyframes[_most_redundant(self._keyframes)]
        return keyframe

    def _sees_a_new_side(self) -> bool:
        """Whether the model has moved or turned since every keyframe."""
        assert self.model is not None
        nodes, turn = self.model.warp.moved_nodes, _turn_of(self.model.warp)
        return all(
            _mean_motion(sight.nodes, nodes) > self.settings.keyframe_motion
            or _degrees_between(sight.turn, turn) > self.settings.keyframe_degrees
            for sight in self._keyframes
        )

    def _refused(
        self,
        stamp: float,
        reason: str,
        clock: StageClock,
        live: _Live | None = None,
        matches: Matches | None = None,
        warp: Warp | None = None,
    ) -> DeformableTrack:
        """Say why there is no warp; after too many in a row restart the model."""
        if self.model is None:
            return self._report(stamp, TrackingState.INITIALISING, reason, clock)
        self._rejected += 1
        if self._rejected > self.settings.max_rejections and live is not None:
            return replace(self._begin(live, clock), reason=f"the model restarts: {reason}")
        inliers = None if warp is None else warp.match_inliers
        return self._report(stamp, TrackingState.LOST, reason, clock, None, matches, inliers)

    def _report(
        self,
        stamp: float,
        state: TrackingState,
        reason: str,
        clock: StageClock,
        warp: Warp | None = None,
        matches: Matches | None = None,
        inliers: BoolArray | None = None,
        reset: bool = False,
    ) -> DeformableTrack:
        model_points = np.zeros((0, 3)) if self.model is None else self.model.points.copy()
        warped_points: FloatArray = np.zeros((0, 3))
        if warp is not None and self._last is not None:
            warped_points = self._last.imprint.warped
        return DeformableTrack(
            stamp=stamp,
            state=state,
            reason=reason,
            warp=warp,
            model_points=model_points,
            warped_points=warped_points,
            matches=NO_MATCHES if matches is None else matches,
            inliers=np.zeros(0, dtype=bool) if inliers is None else inliers,
            reset=reset,
            model_stamp=self._model_stamp,
            seconds=clock.seconds,
        )


def _turn_of(warp: Warp) -> FloatArray:
    """(3, 3): the rotation of the warp as a whole."""
    use = warp.graph.active
    before, after = (torch.from_numpy(part[use]) for part in (warp.graph.nodes, warp.moved_nodes))
    return kabsch(before, after, torch.ones(len(before))).numpy()[:3, :3]


def _degrees_between(first: FloatArray, second: FloatArray) -> float:
    return float(np.degrees(rotation_angle(first.T @ second)))


def _mean_motion(before: FloatArray, after: FloatArray) -> float:
    """Mean distance in metres of the nodes that there were before; nodes are only added."""
    count = min(len(before), len(after))
    return float(np.linalg.norm(after[:count] - before[:count], axis=1).mean()) if count else float("inf")


def _most_redundant(keyframes: list[_Sight]) -> int:
    """The keyframe, never the first one, whose side another keyframe sees almost as well."""

    def nearest(index: int) -> float:
        others = (sight for other, sight in enumerate(keyframes) if other != index)
        return min(_degrees_between(keyframes[index].turn, sight.turn) for sight in others)

    return min(range(1, len(keyframes)), key=nearest)
