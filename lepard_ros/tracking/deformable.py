# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Following a bending thing: its model is warped to every live cloud, and learns from each."""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.errors import InputError
from lepard_ros.registration.graph import BoolArray
from lepard_ros.registration.match_filter import FilterSettings, filter_matches
from lepard_ros.registration.nonrigid import NonrigidSettings, chosen, solve_nonrigid
from lepard_ros.registration.types import FloatArray, Matches, StageClock
from lepard_ros.registration.warp import Warp
from lepard_ros.tracking.model import CanonicalModel, Change, Imprint, ModelSettings, imprint, thin
from lepard_ros.tracking.track import TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher

_NO_MATCHES = Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))


@dataclass(frozen=True)
class DeformableSettings:
    """How a bending thing is followed. Lengths in metres.

    keyframes: past clouds, besides the last one, that the live cloud is matched with. keyframe_motion: the mean motion
    of the model since the last keyframe that makes a new one. least_overlap: share of the warped model on the live
    cloud. most_rejections: clouds in a row that may be refused before the model begins anew.
    follower: the solver for a cloud whose matches do not suffice; it goes on from the last warp to the nearest surface,
    which only sees small motions and no sliding. So it is asked at most follow_seconds after the last accepted cloud
    and for at most most_followed clouds in a row, and believed only with follow_overlap of the model on the cloud.
    least_points: of a cloud on the model's grid. farthest: points beyond are background and left out.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    solver: NonrigidSettings = field(
        default_factory=lambda: NonrigidSettings(match_iterations=12, closest_iterations=12, budget=10.0)
    )
    follower: NonrigidSettings = field(
        default_factory=lambda: NonrigidSettings(closest_reach=0.06, closest_iterations=12, budget=10.0)
    )
    filter: FilterSettings = field(default_factory=FilterSettings)
    keyframes: int = 4
    keyframe_motion: float = 0.15
    least_overlap: float = 0.15
    most_rejections: int = 10
    follow_seconds: float = 0.35
    most_followed: int = 10
    follow_overlap: float = 0.7
    least_points: int = 200
    farthest: float = float("inf")

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        if self.keyframes < 1 or self.most_rejections < 1 or not self.keyframe_motion > 0:
            raise InputError("keyframes, most_rejections and keyframe_motion must be more than 0.")


@dataclass(frozen=True)
class DeformableTrack:
    """What became of one cloud.

    state: OK or RELOCALISED come with a warp, the others never do. reason: a sentence.
    warp: from the model's rest shape (the first cloud's frame) to the live cloud, or None.
    model_points: (N, 3) in the rest shape. warped_points: (N', 3) those of them that the warp carries, in the live
    cloud's frame. matches: from the rest shape to the live cloud, those that the filter kept; inliers: (M,) bool.
    method: what found the warp, "lepard", "nicp" (the nearest surface alone), or empty without a warp.
    change: what the model learnt. overlap: share of the warped model on the cloud. residual: metres, there.
    cut_edges: edges that stayed torn and are now cut. reset: the model began (anew) with this cloud. model_stamp: of
    the cloud that the model began with. seconds: by stage.
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
    seconds: dict[str, float] = field(default_factory=dict)


class _Sight(NamedTuple):
    """A past cloud and where the model lay in it."""

    cloud: "EncodedCloud"
    imprint: Imprint


class DeformableTracker:
    """Follows one bending thing. Not to be shared between threads."""

    def __init__(self, matcher: "Matcher", settings: DeformableSettings | None = None) -> None:
        """matcher: with weights for deformable scenes."""
        self.matcher, self.settings = matcher, settings or DeformableSettings()
        self.reset()

    def reset(self) -> None:
        """Forget the model; the next cloud begins a new one."""
        self.model: CanonicalModel | None = None
        self._keyframes: deque[_Sight] = deque(maxlen=self.settings.keyframes)
        self._last: _Sight | None = None
        self._rejected, self._followed = 0, 0
        self._model_stamp = self._last_stamp = 0.0
        self._keyframe_shape: FloatArray = np.zeros((0, 3))

    def process(self, points: FloatArray, stamp: float) -> DeformableTrack:
        """Warp the model to a live cloud, (N, 3) or organised (H, W, 3) with NaN, and let it learn from it."""
        clock = StageClock()
        live = self._foreground(points)
        if len(live) < self.settings.least_points:
            return self._refused(stamp, "the cloud has too few points", clock)
        cloud = self.matcher.encode(live)
        clock.stop("encode")
        if self.model is None:
            return self._begin(cloud, live, stamp, clock)
        matches = self._find_matches(cloud)
        clock.stop("match")
        warp = self._solve(live, matches)
        reason, method = self._reason_to_refuse(warp), "lepard"
        if reason:
            followed = self._follow(live, stamp)
            if followed is None:
                clock.stop("warp")
                return self._refused(stamp, reason, clock, (cloud, live), matches, warp)
            warp, matches, method = followed, _NO_MATCHES, "nicp"
        clock.stop("warp")
        change = self.model.update(warp, live)
        clock.stop("fuse")
        return replace(self._accept(cloud, stamp, matches, warp, change, clock), method=method)

    def _foreground(self, points: FloatArray) -> FloatArray:
        if np.ndim(points) not in (2, 3) or np.shape(points)[-1] != 3:
            raise InputError(f"A cloud must have the shape (N, 3) or (H, W, 3), but this one has {np.shape(points)}.")
        live = thin(points, self.settings.model.spacing / 2)
        return live[np.linalg.norm(live, axis=1) < self.settings.farthest]

    def _begin(self, cloud: "EncodedCloud", live: FloatArray, stamp: float, clock: StageClock) -> DeformableTrack:
        """Make the live cloud the model."""
        self.reset()
        self.model, self._model_stamp = CanonicalModel(live, self.settings.model), stamp
        if not self.model.graph.active.any():
            self.model = None
            return self._refused(stamp, "the cloud has no connected surface that is large enough", clock)
        self._remember(cloud, stamp, keyframe=True)
        clock.stop("fuse")
        track = self._report(stamp, TrackingState.OK, "the model begins here", clock, self.model.warp, reset=True)
        return replace(track, method="lepard")

    def _find_matches(self, cloud: "EncodedCloud") -> Matches:
        """Matches from the rest shape to the live cloud, over the last cloud and the keyframes, filtered each."""
        sights = [sight for sight in (self._last, *self._keyframes) if sight is not None]
        sights = list({id(sight.cloud): sight for sight in sights}.values())
        found = self.matcher.match_many(cloud, [sight.cloud for sight in sights])
        parts = [self._to_rest(matches, sight) for matches, sight in zip(found, sights, strict=True)]
        return Matches(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def _to_rest(self, matches: Matches, sight: _Sight) -> Matches:
        """Matches live -> past cloud, turned round and carried back to the rest shape."""
        turned = Matches(matches.target, matches.source, matches.confidence)
        kept = chosen(turned, filter_matches(turned, self.settings.filter))
        reach = 2 * self.settings.model.graph.coverage
        rest, near = sight.imprint.to_rest(np.asarray(kept.source), reach)
        return chosen(Matches(rest, kept.target, np.asarray(kept.confidence, dtype=np.float64)), near)

    def _solve(self, live: FloatArray, matches: Matches) -> Warp:
        """The warp to the live cloud by the matches, begun at the last warp; if that is refused, begun at the matches.

        After a refused cloud the last warp is old, and the matches come first.
        """
        assert self.model is not None
        model, normals = self.model, surface_normals(live)
        starts = (model.warp, None) if self._rejected == 0 else (None, model.warp)
        for start in starts:
            warp = solve_nonrigid(model.graph, model.points, live, normals, matches, self.settings.solver, start)
            if not self._reason_to_refuse(warp):
                break
        return warp

    def _follow(self, live: FloatArray, stamp: float) -> Warp | None:
        """The warp from the last one to the nearest surface, without matches, or None where that cannot be trusted."""
        assert self.model is not None
        settings, model = self.settings, self.model
        if stamp - self._last_stamp > settings.follow_seconds or self._followed >= settings.most_followed:
            return None
        normals = surface_normals(live)
        warp = solve_nonrigid(model.graph, model.points, live, normals, None, settings.follower, model.warp)
        return warp if warp.ok and warp.overlap >= settings.follow_overlap else None

    def _reason_to_refuse(self, warp: Warp) -> str:
        """Why a warp is not believed, or an empty string."""
        if not warp.ok:
            return warp.status.value
        if warp.overlap < self.settings.least_overlap:
            return f"only {warp.overlap:.0%} of the warped model lies on the cloud"
        return ""

    def _accept(
        self, cloud: "EncodedCloud", stamp: float, matches: Matches, warp: Warp, change: Change, clock: StageClock
    ) -> DeformableTrack:
        assert self.model is not None
        state = TrackingState.OK if self._rejected == 0 else TrackingState.RELOCALISED
        self._rejected = 0
        self._followed = 0 if len(matches.confidence) else self._followed + 1
        keyframe = self._followed == 0 and self._moved_since_keyframe() > self.settings.keyframe_motion
        self._remember(cloud, stamp, keyframe)
        reason = f"{change.cut} edges were torn and are cut" if change.cut else "the warp is known"
        track = self._report(stamp, state, reason, clock, self.model.warp, matches, warp.match_inliers)
        return replace(
            track,
            change=change,
            new_keyframe=keyframe,
            overlap=warp.overlap,
            residual=warp.residual,
            cut_edges=change.cut,
        )

    def _remember(self, cloud: "EncodedCloud", stamp: float, keyframe: bool) -> None:
        assert self.model is not None
        self._last_stamp = stamp
        self._last = _Sight(cloud, imprint(self.model))
        if keyframe:
            self._keyframes.append(self._last)
            self._keyframe_shape = self.model.warp.moved_nodes

    def _moved_since_keyframe(self) -> float:
        """Mean motion in metres of the nodes that there were at the last keyframe."""
        assert self.model is not None
        count = min(len(self._keyframe_shape), len(self.model.graph.nodes))
        moved = self.model.warp.moved_nodes[:count] - self._keyframe_shape[:count]
        return float(np.linalg.norm(moved, axis=1).mean()) if count else float("inf")

    def _refused(
        self,
        stamp: float,
        reason: str,
        clock: StageClock,
        live: "tuple[EncodedCloud, FloatArray] | None" = None,
        matches: Matches | None = None,
        warp: Warp | None = None,
    ) -> DeformableTrack:
        """Say why there is no warp; after too many of these in a row begin anew."""
        if self.model is None:
            return self._report(stamp, TrackingState.INITIALISING, reason, clock)
        self._rejected += 1
        if self._rejected > self.settings.most_rejections and live is not None:
            track = self._begin(*live, stamp, clock)
            return replace(track, reason=f"the model begins anew: {reason}")
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
        if warp is not None:
            moved, covered = warp.apply(model_points)
            warped_points = moved[covered]
        return DeformableTrack(
            stamp=stamp,
            state=state,
            reason=reason,
            warp=warp,
            model_points=model_points,
            warped_points=warped_points,
            matches=_NO_MATCHES if matches is None else matches,
            inliers=np.zeros(0, dtype=bool) if inliers is None else inliers,
            reset=reset,
            model_stamp=self._model_stamp,
            seconds=clock.seconds,
        )
