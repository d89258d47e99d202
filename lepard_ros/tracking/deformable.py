# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformable tracker: warps a model of the object to every live cloud and updates the model."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.registration.deformable.foreground import NO_BACKGROUND, camera_motion, split_scene
from lepard_ros.registration.deformable.graph import Skinning, finite_points
from lepard_ros.registration.deformable.nonrigid import SurfaceFollower
from lepard_ros.registration.deformable.surface_contact import thinned_surface
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import NO_MATCHES, Matches, StageClock
from lepard_ros.tracking.background import Background
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.matching_worker import (
    MAX_STRAIN,
    LocalWorker,
    MatchingResult,
    MatchingTask,
    MatchingWorker,
    ModelUpdate,
)
from lepard_ros.tracking.model import CanonicalModel, Change, WarpedModel, thin
from lepard_ros.tracking.observations import (
    AT_REST,
    BodyVelocity,
    LiveCloud,
    Observation,
    StampedWarp,
    View,
    body_velocity,
    carry_forward,
    corrected,
    degrees_between,
    extrapolated,
    median_motion,
    most_redundant,
    observe,
)
from lepard_ros.tracking.track import TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

MIN_POINTS = 200  # minimum number of points of a cloud on the model's grid
# Maximum rotation relative to the prediction, in degrees and degrees per second: front and back may look alike.
MAX_DEGREES, MAX_DEGREES_A_SECOND = 40.0, 45.0
# Views that a cloud is matched with: the last one, and the keyframe with the most similar orientation. A third view
# made a match of 0.55 CPU-s one of 0.72.
MATCHED_VIEWS = 2
LOST_KEYFRAMES = 3  # keyframes for a lost object; each further search tries the next ones
# Time between two matched clouds from which the velocity is computed (seconds): at shorter intervals matching errors
# dominate, at longer ones the velocity may have changed. And the number of matched clouds kept for this.
MATCHED_SECONDS, MAX_MATCHED = (0.19, 1.5), 8
SUPPORT_DECAY = 0.9  # factor on the support of the last matches, for every cloud tracked without matches
# Seconds for which a refused cloud is tracked on; then the object is lost. They begin again with every cloud that fits,
# and with the arrival of good matches, not with the stamp of their cloud: a match takes most of a second. But a cloud
# that fits is not enough for longer than MAX_UNMATCHED_SECONDS without good matches.
FOLLOW_SECONDS, MAX_UNMATCHED_SECONDS = 1.0, 4.0
# Clouds that arrive during a search are kept at this interval (seconds), at most so many, to track the object through
# them to the present once it is found. Tracking does not reach much further in one step while the object turns.
CATCH_UP_SECONDS, MAX_CATCH_UP = 0.25, 8
# Limits of tracking without matches: minimum sum of the share of the cloud on the model and the share of the visible
# model on the cloud (a rotating object shows surface that the model does not have yet, so neither alone decides);
# minimum mean cosine between normals; maximum share of the model in free space. Inside-out surface is not limited: the
# far side of a thin limb counts as such. If less than MIN_FOLLOWED_COVER of the cloud lies on the model, what does must
# fit within MAX_FOLLOWED_RESIDUAL metres. Chosen on the demonstration's films with seeds 0 to 2, in real-time play and
# over 0.3 to 1.4 s in one step: accepted 340 of 375 warps within 7 cm and 0 of 81 that were wrong by more than 10 cm.
MIN_FOLLOWED_CONTACT, MIN_FOLLOWED_ALIGNED, MAX_FOLLOWED_CONFLICT = 1.2, 0.7, 0.1
MIN_FOLLOWED_COVER, MAX_FOLLOWED_RESIDUAL = 0.75, 0.006
# Seconds after a matched cloud for which tracking without matches is allowed: drift accumulates. A match of 0.6 s is
# that old when the next one begins, and twice that when the next one ends. On the demonstration's films with seeds 0 to
# 5 and a match every second, the error did not grow with this age, up to 2.0 s, as long as KNOWN_COVER of the cloud lay
# on the model: at most 4.4 cm after 1.2 s (29 clouds). Where the body shows more surface that the model does not have,
# it did: up to 11 cm after 1.5 s. Where the surface does not show every rigid motion, it slides unseen.
MAX_MATCH_AGE, MAX_GROWING_AGE, MAX_UNCONSTRAINED_AGE = 2.0, 1.5, 0.9
KNOWN_COVER = 0.8
# If fewer of the matches agree, they do not correct a tracked warp that fits its cloud by more than this (median of the
# nodes, metres). In a trial variant on seed 3, a match with 0.40 moved one from 5 to 7 cm off, and the next clouds to
# 12 cm; most matches that corrected a warp well had 0.46 to 0.98. Chosen on seeds 0 to 5.
MIN_CORRECTING_INLIERS, MAX_WEAK_CORRECTION = 0.42, 0.03
# Metres a second (median of the nodes) that an object may move, over at least MIN_SECONDS: further away there is
# something else, or it must be matched.
MAX_SPEED, MIN_SECONDS = 2.0, 0.1
MAX_EXTRAPOLATION = 1.5  # the last motion of every node is continued for this many times its duration at most
EXPECTED_SECONDS = 0.5  # for this long the object must stay near its predicted position, whatever the matches say


@dataclass(frozen=True)
class DeformableTrack:
    """The result for one cloud.

    state: OK and RELOCALISED come with a warp, the others never do. reason: a short text.
    warp: from the model's rest shape (frame of the first cloud) to the live cloud, or None.
    model_points: (N, 3) in the rest shape. warped_points: (N', 3) the points that the warp covers, in the live cloud's
    frame. support: (N',) in [0, 1], how far their motion can be trusted. matches: from the rest shape to the live
    cloud, after filtering; inliers: (M,) bool.
    method: how the warp was found: "lepard", "nicp" (non-rigid ICP without matches), or empty without a warp.
    change: update of the model. overlap: share of the warped model on the cloud. residual: metres, in the overlap.
    cut_edges: edges that stayed torn and were removed now. reset: the model started with this cloud. model_stamp: stamp
    of the cloud that started the model. background: number of background points. seconds: time by stage.
    """

    stamp: float
    state: TrackingState
    reason: str
    warp: Warp | None
    model_points: FloatArray
    warped_points: FloatArray
    support: FloatArray
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


class _WarpResult(NamedTuple):
    """A warp to the live cloud, its method and matches, and the update of the model that came with it.

    of_this_cloud: the matches belong to this cloud, not to a past one.
    """

    warp: Warp
    method: str
    matches: Matches = NO_MATCHES
    inliers: BoolArray = np.zeros(0, dtype=bool)
    change: Change = Change()
    keyframe: bool = False
    of_this_cloud: bool = False


class _Pending(NamedTuple):
    """The tracked warp to the cloud that the background worker is matching. accepted: it was published."""

    tracked: StampedWarp
    accepted: bool


class _PastUpdate(NamedTuple):
    """A model update from a past cloud. then: the warped model in that cloud."""

    result: MatchingResult
    then: WarpedModel
    change: Change
    keyframe: bool


def is_plausible(warp: Warp) -> bool:
    """Whether the tracked model and the live cloud lie on each other, and none of it in observed free space."""
    known = warp.evidence
    if known is None or known.strain > MAX_STRAIN:
        return False
    if known.covered + known.overlap < MIN_FOLLOWED_CONTACT or known.seen_aligned < MIN_FOLLOWED_ALIGNED:
        return False
    if known.covered < MIN_FOLLOWED_COVER and known.residual > MAX_FOLLOWED_RESIDUAL:
        return False
    return known.conflict <= MAX_FOLLOWED_CONFLICT


def _distinct(views: list[View]) -> list[View]:
    """The views without repetitions, in their order."""
    return list({id(view.cloud): view for view in views}.values())


class DeformableTracker:
    """Tracks one deforming object. Not thread-safe."""

    def __init__(
        self,
        matcher: "Matcher | None",
        settings: DeformableSettings | None = None,
        worker: MatchingWorker | None = None,
    ) -> None:
        """matcher: with weights for deformable scenes. worker: used instead of a matcher if given."""
        if worker is None:
            assert matcher is not None
            worker = LocalWorker(matcher)
        self.settings = now = settings or DeformableSettings()
        self.matcher, self._worker = matcher, worker
        self._background = Background(now.threaded, now.background_clouds, hurried=lambda: now.threaded)
        self._now = 0.0  # stamp of the cloud that is being processed
        self.reset()

    def reset(self) -> None:
        """Clear the model; the next cloud starts a new one."""
        self.model: CanonicalModel | None = None
        self._background.drop()
        self._keyframes: list[View] = []
        self._last_encoded: View | None = None
        self._last: Observation | None = None
        self._warp: Warp | None = None  # to the last tracked cloud, accepted or not
        self._before: StampedWarp | None = None  # to the tracked cloud before that, on the same nodes
        self._accepted_stamp = 0.0  # of the last accepted cloud
        self._tracked_at = 0.0  # stamp of the cloud at which tracking was last known to work: see FOLLOW_SECONDS
        self._unseen: list[LiveCloud] = []  # arrived during a search, not tracked yet
        self._lost_reason = "the object is searched for"
        # Motion of the static scene relative to the camera, from the first to the last tracked cloud.
        self._scene_motion = np.eye(4)
        self._pending: _Pending | None = None  # what the background worker is matching
        self._matched: list[StampedWarp] = []  # the last few warps from matches
        self._past_update: _PastUpdate | None = None
        self._velocity: BodyVelocity | None = None  # None until it is known
        self._follower: SurfaceFollower | None = None
        self._skinned: tuple[CanonicalModel, Skinning] | None = None  # the model, and the skinning of its points
        self._constrained = False  # whether the last tracked surface shows every rigid motion
        self._rejected = self._failed_searches = 0  # in a row
        self._unmatched = 0  # clouds in a row that were tracked without matches
        self._model_stamp = 0.0

    def close(self) -> None:
        """Stop the background worker; do not process clouds afterwards."""
        self._background.drop()
        self._worker.close()

    def process(self, points: FloatArray, stamp: float) -> DeformableTrack:
        """Warp the model to a live cloud, (N, 3) or organised (H, W, 3) with NaN, and update the model."""
        clock, self._now = StageClock(), stamp
        self._background.next_cloud()
        clock.stop("learn")
        live = self._live(points, stamp)
        clock.stop("foreground")
        if len(live.points) < MIN_POINTS:
            return self._refused(stamp, "the cloud has too few points", clock)
        if self.model is None:
            return self._begin(live, clock)
        if self._failed_searches >= self.settings.max_rejections:
            return replace(self._begin(live, clock), reason="the model restarts: the object was not found again")
        if self._is_lost(live) and self.settings.background_clouds:
            return self._look_for(live, clock)
        self._catch_up()
        camera = self._camera_motion(live)
        clock.stop("predict")
        if self._may_follow and not self._is_lost(live):
            found = self._follow(live, camera, clock)
        else:
            found = self._search(live, camera, clock)
        if isinstance(found, DeformableTrack):
            return found
        self._advance(live, camera, found.warp, found.of_this_cloud)
        return self._accept(live, found, clock)

    def _advance(self, live: LiveCloud, camera: FloatArray, warp: Warp, matched: bool = False) -> None:
        """Continue with this cloud and this warp to it. matched: the warp is from matches of this cloud."""
        assert self.model is not None and self._warp is not None and self._last is not None
        same_nodes = np.array_equal(self._warp.graph.nodes, warp.graph.nodes)
        before = self._warp if same_nodes else self._warp.onto(warp.graph)
        self._before = StampedWarp(self._last.live.stamp, before, self._scene_motion)
        self._update_velocity(live, camera, warp, matched)
        self._warp, self._last = warp, observe(live, self.model, warp, self._model_skin())

    def _model_skin(self) -> Skinning:
        """The skinning of the model's points, computed once per model."""
        assert self.model is not None
        if self._skinned is None or self._skinned[0] is not self.model:
            self._skinned = self.model, self.model.graph.skin(self.model.points)
        return self._skinned[1]

    def _update_velocity(self, live: LiveCloud, camera: FloatArray, warp: Warp, matched: bool) -> None:
        """Update the velocity used for prediction.

        ICP observes translation, but not always sliding along the surface, such as the rotation of a round object. The
        motion between two matched clouds shows that.
        """
        assert self._warp is not None
        before = StampedWarp(live.stamp - self._elapsed(live), self._warp, self._scene_motion)
        self._scene_motion = camera @ self._scene_motion
        after = StampedWarp(live.stamp, warp, self._scene_motion)
        if matched:
            self._velocity = self._velocity_to(after) or self._velocity
            self._matched = [*self._matched, after][-MAX_MATCHED:]
        elif self._velocity is not None:
            self._velocity = self._velocity._replace(shift=body_velocity(before, after).shift)
        elif self._constrained:
            self._velocity = body_velocity(before, after)

    def _velocity_to(self, after: StampedWarp) -> BodyVelocity | None:
        """The velocity since the newest matched cloud at a suitable interval, if there is one."""
        for before in reversed(self._matched):
            if MATCHED_SECONDS[0] <= after.stamp - before.stamp <= MATCHED_SECONDS[1]:
                return body_velocity(before, after)
        return None

    def _live(self, points: FloatArray, stamp: float) -> LiveCloud:
        """Separate a cloud from its background."""
        if np.ndim(points) not in (2, 3) or np.shape(points)[-1] != 3:
            raise InputError(f"A cloud must have the shape (N, 3) or (H, W, 3), but this one has {np.shape(points)}.")
        model = self.settings.model
        finite = finite_points(points)
        finite = finite[np.linalg.norm(finite, axis=1) < self.settings.max_range]
        background, background_count = NO_BACKGROUND, 0
        if self.settings.foreground is not None and len(finite) >= MIN_POINTS:
            last = None if self._last is None else self._last.warped_model.warped
            scene = split_scene(finite, self.settings.foreground, last)
            background, background_count = scene.background, int((~scene.body).sum())
            finite = finite[scene.body]
        body = thin(finite, model.spacing / 2)
        return LiveCloud(body, thinned_surface(body, model.graph.coverage / 3), background, background_count, stamp)

    def _begin(self, live: LiveCloud, clock: StageClock) -> DeformableTrack:
        """Start a model with the live cloud."""
        self.reset()
        self.model, self._model_stamp = CanonicalModel(live.points, self.settings.model), live.stamp
        if not self.model.graph.active.any():
            self.model = None
            return self._refused(live.stamp, "the cloud has no sufficiently large connected surface", clock)
        clock.stop("fuse")
        self._warp, self._last = self.model.warp, observe(live, self.model, self.model.warp)
        self._matched = [StampedWarp(live.stamp, self._warp, self._scene_motion)]
        self._accepted_stamp = self._tracked_at = live.stamp
        self._follower = SurfaceFollower(self.model.graph, self.model.surface, self.settings.follower)
        self._constrained = self._follower.is_constrained(live.surface, self._warp)
        self._add_view(View(self._last, self._background.run(lambda: self._worker.encode(live.points))))
        clock.stop("encode")
        track = self._report(live.stamp, TrackingState.OK, "the model starts here", clock, self._warp, reset=True)
        return replace(track, method="lepard", background=live.background_count)

    def _camera_motion(self, live: LiveCloud) -> FloatArray:
        """Motion (4, 4) of the static scene relative to the camera since the last tracked cloud."""
        assert self._last is not None
        return camera_motion(self._last.live.background, live.background)

    def _elapsed(self, live: LiveCloud) -> float:
        """Seconds since the last tracked cloud, accepted or not."""
        assert self._last is not None
        return live.stamp - self._last.live.stamp

    def _unverified(self, live: LiveCloud) -> float:
        """Seconds since the last cloud that was accepted or matched."""
        return live.stamp - max(self._accepted_stamp, self._matched[-1].stamp)

    def _is_lost(self, live: LiveCloud) -> bool:
        """Whether the object was neither accepted nor matched for too long to find it from where it was."""
        return self._rejected > 0 and live.stamp - self._tracked_at > FOLLOW_SECONDS

    def _placed(self, live: LiveCloud, camera: FloatArray) -> Warp:
        """The last warp, extrapolated and moved rigidly onto the live cloud. camera: (4, 4), motion of the scene.

        The best of three predictions: the body keeps its velocity, it stops, or every node keeps its own velocity. A
        body that jumps is not where its velocity leads, and limbs swing.
        """
        assert self._warp is not None and self._last is not None and self._follower is not None
        warp, elapsed = self._warp.moved_by(camera), min(max(self._elapsed(live), 0.0), FOLLOW_SECONDS)
        starts = [warp.moved_by((self._velocity or AT_REST).over(elapsed, warp.moved_nodes)), warp]
        if self._before is not None and self._last.live.stamp > self._before.stamp:
            now = StampedWarp(self._last.live.stamp, self._warp, self._scene_motion)
            longest = MAX_EXTRAPOLATION * (now.stamp - self._before.stamp)
            starts.append(extrapolated(self._before, now, min(elapsed, longest)).moved_by(camera))
        return self._follower.place(live.surface, starts)

    # ---- tracking without matches, while the background worker matches one cloud at a time ----

    def _follow(self, live: LiveCloud, camera: FloatArray, clock: StageClock) -> "_WarpResult | DeformableTrack":
        """Track without matches from the last warp.

        A warp that is not reliable is not published, but tracking goes on from it: it is accepted again when a later
        cloud fits, or when the matches of an earlier one have corrected it. Waiting for them would take longer.
        """
        placed = self._placed(live, camera)
        starts = not len(self._background)
        if starts:
            task = self._task(live, placed)
            self._background.submit(lambda: self._worker.match_and_update(task), self._apply_past_match)
        warp = self._fitted(live, placed)
        clock.stop("follow")
        jumped = self._jumped(live, camera, warp)
        reason = self._reason_to_refuse(warp, live)
        if starts:
            tracked = StampedWarp(live.stamp, warp, camera @ self._scene_motion)
            self._pending = _Pending(tracked, not (jumped or reason))
        if jumped or reason:
            if not jumped:
                self._advance(live, camera, warp)
            if not jumped and is_plausible(warp) and live.stamp - self._matched[-1].stamp < MAX_UNMATCHED_SECONDS:
                self._tracked_at = live.stamp
            track = self._refused(live.stamp, reason or "the object would have jumped", clock)
            return replace(track, background=live.background_count)
        past_update, self._past_update = self._past_update, None
        if past_update is None:
            return _WarpResult(warp, "nicp")
        matches, agrees = past_update.result.cloud_matches.matches, past_update.result.warp.match_inliers
        matches, carried = carry_forward(matches, past_update.then, warp, self.settings.reach)
        return _WarpResult(warp, "lepard", matches, agrees[carried], past_update.change, past_update.keyframe)

    @property
    def _may_follow(self) -> bool:
        """Whether clouds are tracked before they are matched.

        The first clouds of a model must be matched if its surface does not show every rigid motion: the velocity is
        unknown, and unobserved motion would accumulate.
        """
        return self.settings.background_clouds > 0 and (self._velocity is not None or self._constrained)

    def _fitted(self, live: LiveCloud, placed: Warp) -> Warp:
        """Non-rigid ICP without matches from a placed warp; that warp, without evidence, if there is no fit.

        The support is that of the last matches, decayed with every cloud.
        """
        assert self._follower is not None
        support = SUPPORT_DECAY * placed.support
        warp = self._follower.solve(live.surface, placed)
        if not warp.ok or warp.evidence is None or warp.evidence.strain > MAX_STRAIN:
            return replace(placed, support=support, evidence=None)
        self._constrained = self._follower.is_constrained(live.surface, warp)
        return replace(warp, support=support)

    def _jumped(self, live: LiveCloud, camera: FloatArray, warp: Warp) -> bool:
        """Whether a tracked warp is further from the last one than an object moves in that time."""
        assert self._warp is not None
        reach = MAX_SPEED * max(self._elapsed(live), MIN_SECONDS)
        return median_motion(self._warp.moved_by(camera), warp) > reach

    def _reason_to_refuse(self, warp: Warp, live: LiveCloud) -> str:
        """Why a warp that was tracked without matches is not published, or an empty string."""
        if not is_plausible(warp):
            return "the tracked model does not fit the cloud"
        assert warp.evidence is not None
        max_age = MAX_MATCH_AGE if warp.evidence.covered >= KNOWN_COVER else MAX_GROWING_AGE
        max_age = max_age if self._constrained else MAX_UNCONSTRAINED_AGE
        if live.stamp - self._matched[-1].stamp > max_age or self._unmatched >= self.settings.max_followed:
            return "the last matched cloud is too old"
        return ""

    def _apply_past_match(self, result: MatchingResult) -> None:
        """Update the model from a past cloud, and correct the last warp by its matches.

        A cloud with too few good matches does not update the model, but the next cloud is still matched with it: it has
        more in common with it than with older ones. Where neither the tracked nor the matched warp fits the cloud, the
        matches correct what is tracked, but neither the model nor what is published relies on them: the model would
        grow by surface that nobody verified (seed 6 of the demonstration: 12 cm off).
        """
        pending, model = self._pending, self.model
        if pending is None or self._warp is None or model is None:
            return
        then, inliers = pending.tracked, result.warp.match_inliers
        weak = bool(inliers.mean() < MIN_CORRECTING_INLIERS)
        overruled = weak and pending.accepted and median_motion(then.warp, result.warp) > MAX_WEAK_CORRECTION
        if result.update is None or overruled:
            self._last_encoded = View(observe(result.live, model, then.warp), result.cloud_matches.cloud)
            return
        self._correct(then.warp, result.warp)
        if not (pending.accepted or is_plausible(result.warp)):
            self._last_encoded = View(observe(result.live, model, result.warp), result.cloud_matches.cloud)
            return
        matched = then._replace(warp=result.warp)
        velocity = self._velocity_to(matched)
        if velocity is not None:
            self._velocity = velocity if self._velocity is None else self._velocity._replace(turn=velocity.turn)
        self._matched = [*self._matched, matched][-MAX_MATCHED:]
        graph = result.update.model.graph
        self._warp = self._warp.onto(graph)
        self._before = self._before and self._before._replace(warp=self._before.warp.onto(graph))
        self._apply_late_update(result, result.update)

    def _correct(self, then: Warp, right: Warp) -> None:
        """Correct the last two warps, given that the warp `then` to an earlier cloud should have been `right`."""
        assert self._warp is not None
        self._warp = corrected(self._warp, then, right)
        if self._before is not None:
            self._before = self._before._replace(warp=corrected(self._before.warp, then, right))

    def _apply_late_update(self, result: MatchingResult, update: ModelUpdate) -> None:
        """Apply a model update from a past cloud; the next accepted cloud reports it."""
        keyframe = self._apply_update(update)
        self._past_update = _PastUpdate(result, update.view.observation.warped_model, update.change, keyframe)
        self._tracked_at = self._now

    # ---- a lost object: it is searched for in one cloud after the other, while clouds go on arriving ----

    def _look_for(self, live: LiveCloud, clock: StageClock) -> DeformableTrack:
        """Search for the object in this cloud if the background worker is idle, else keep the cloud for later."""
        if not len(self._background):
            camera, self._unseen = self._camera_motion(live), []
            task = self._task(live, self._placed(live, camera))
            self._background.submit(
                lambda: self._worker.match_and_update(task), lambda result: self._apply_search(result, camera)
            )
        elif not self._unseen or live.stamp - self._unseen[-1].stamp >= CATCH_UP_SECONDS:
            self._unseen = [*self._unseen, live][-MAX_CATCH_UP:]
        clock.stop("predict")
        return replace(self._refused(live.stamp, self._lost_reason, clock), background=live.background_count)

    def _apply_search(self, result: MatchingResult, camera: FloatArray) -> None:
        """Continue with the cloud in which the object was found. camera: (4, 4), motion of the scene up to it."""
        if result.update is None:
            self._failed_searches, self._lost_reason = self._failed_searches + 1, result.reason
            return
        self._apply_late_update(result, result.update)
        self._velocity, self._failed_searches = AT_REST, 0  # what it was before the object was lost says nothing
        self._advance(result.live, camera, result.update.model.warp, matched=True)
        self._before = None

    def _catch_up(self) -> None:
        """Track through the clouds that arrived during a search."""
        unseen, self._unseen = self._unseen, []
        for cloud in unseen:
            camera = self._camera_motion(cloud)
            warp = self._fitted(cloud, self._placed(cloud, camera))
            if self._jumped(cloud, camera, warp):
                return
            self._advance(cloud, camera, warp)

    # ---- matching: tracking waits for it ----

    def _search(self, live: LiveCloud, camera: FloatArray, clock: StageClock) -> "_WarpResult | DeformableTrack":
        """The warp from matches of this cloud; else from non-rigid ICP alone; else the report of a lost object."""
        self._background.finish()
        placed = self._placed(live, camera)
        task = self._task(live, placed)
        result = self._background.run(lambda: self._worker.match_and_update(task))
        clock.stop("match")
        if result.reason and not self._may_follow and self._unverified(live) <= EXPECTED_SECONDS:
            followed = self._fitted(live, placed)
            clock.stop("follow")
            plausible = is_plausible(followed) and not self._jumped(live, camera, followed)
            if plausible and self._unmatched < self.settings.max_followed:
                return _WarpResult(followed, "nicp")
        matches, inliers = result.cloud_matches.matches, result.warp.match_inliers
        if result.update is None:
            self._failed_searches += 1
            return self._refused(live.stamp, result.reason, clock, matches, result.warp)
        keyframe = self._apply_update(result.update)
        clock.stop("fuse")
        warp = replace(result.update.model.warp, overlap=result.warp.overlap, residual=result.warp.residual)
        return _WarpResult(warp, "lepard", matches, inliers, result.update.change, keyframe, of_this_cloud=True)

    def _task(self, live: LiveCloud, predicted: Warp) -> MatchingTask:
        """The input of the matching worker; nothing in it changes while the worker runs."""
        assert self.model is not None
        unverified, lost = self._unverified(live), self._is_lost(live)
        expected = predicted if unverified <= EXPECTED_SECONDS else None
        max_degrees = MAX_DEGREES + MAX_DEGREES_A_SECOND * unverified
        views = self._views_to_match(lost)
        return MatchingTask(self.settings, self.model, live, predicted, expected, max_degrees, views, lost)

    def _apply_update(self, update: ModelUpdate) -> bool:
        """Apply a model update; return whether its cloud became a keyframe."""
        self.model, self._follower, self._unmatched = update.model, update.follower, 0
        return self._add_view(update.view)

    def _views_to_match(self, lost: bool) -> list[View]:
        """The last view and the keyframes with the most similar orientation; while lost, a different set each time."""
        assert self._last is not None and self._last_encoded is not None
        last = self._last
        ranked = sorted(self._keyframes, key=lambda view: degrees_between(view.observation.turn, last.turn))
        if not lost:
            return _distinct([self._last_encoded, *ranked])[:MATCHED_VIEWS]
        first = LOST_KEYFRAMES * self._failed_searches % len(ranked)
        views = [*ranked[first:], *ranked[:first]][:LOST_KEYFRAMES]
        return views if self._failed_searches else _distinct([self._last_encoded, *views])

    def _accept(self, live: LiveCloud, found: _WarpResult, clock: StageClock) -> DeformableTrack:
        assert self.model is not None
        state = TrackingState.OK if self._rejected == 0 else TrackingState.RELOCALISED
        self._rejected = self._failed_searches = 0
        self._unmatched = self._unmatched + 1 if found.method == "nicp" else 0
        self._accepted_stamp = self._tracked_at = live.stamp
        change = found.change
        reason = f"{change.cut} torn edges were cut" if change.cut else "the warp is known"
        track = self._report(live.stamp, state, reason, clock, found.warp, found.matches, found.inliers)
        return replace(
            track,
            method=found.method,
            change=change,
            new_keyframe=found.keyframe,
            overlap=found.warp.overlap,
            residual=found.warp.residual,
            cut_edges=change.cut,
            background=live.background_count,
        )

    def _add_view(self, view: View) -> bool:
        """Store a view as the last one, and as a keyframe if it shows a new side; return whether it does.

        If there are too many keyframes, the most redundant one is removed.
        """
        view = view._replace(observation=view.observation.without_cloud())
        self._last_encoded = view
        least = self.settings.keyframe_motion, self.settings.keyframe_degrees
        keyframe = all(view.observation.is_new_to(other.observation, *least) for other in self._keyframes)
        if keyframe:
            self._keyframes.append(view)
            if len(self._keyframes) > self.settings.max_keyframes:
                del self._keyframes[most_redundant(self._keyframes)]
        return keyframe

    def _refused(
        self,
        stamp: float,
        reason: str,
        clock: StageClock,
        matches: Matches | None = None,
        warp: Warp | None = None,
    ) -> DeformableTrack:
        """Report why there is no warp."""
        if self.model is None:
            return self._report(stamp, TrackingState.INITIALISING, reason, clock)
        self._rejected += 1
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
        support: FloatArray = np.zeros(0)
        if warp is not None and self._last is not None:
            warped_points, support = self._last.warped_model.warped, self._last.warped_model.support
        return DeformableTrack(
            stamp=stamp,
            state=state,
            reason=reason,
            warp=warp,
            model_points=model_points,
            warped_points=warped_points,
            support=support,
            matches=NO_MATCHES if matches is None else matches,
            inliers=np.zeros(0, dtype=bool) if inliers is None else inliers,
            reset=reset,
            model_stamp=self._model_stamp,
            seconds=clock.seconds,
        )
