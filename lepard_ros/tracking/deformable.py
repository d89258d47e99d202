# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Following a bending thing: its model is warped to every live cloud, and learns from each."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import move
from lepard_ros.registration.deformable.foreground import NO_BACKGROUND, camera_motion, split_scene
from lepard_ros.registration.deformable.graph import finite_points
from lepard_ros.registration.deformable.nonrigid import SurfaceFollower
from lepard_ros.registration.deformable.surface_contact import thinned_surface
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import NO_MATCHES, Matches, StageClock
from lepard_ros.tracking.background import Background
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.examination import MAX_STRAIN, Examined, Examiner, Learnt, OwnExaminer, Task
from lepard_ros.tracking.model import CanonicalModel, Change, Imprint, thin
from lepard_ros.tracking.sights import (
    RESTING,
    Drift,
    Live,
    Place,
    Sight,
    View,
    carried_on,
    corrected,
    degrees_between,
    drift_between,
    most_redundant,
    sight_of,
)
from lepard_ros.tracking.track import TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

MIN_POINTS = 200  # of a cloud on the model's grid
# How far a body turns, at most, from where it was predicted. Its back may look like its front.
MAX_DEGREES, MAX_DEGREES_A_SECOND = 40.0, 45.0
# Keyframes, seen from the most similar side, that a cloud is matched with besides the last view.
MATCHED_KEYFRAMES = 2
LOST_KEYFRAMES = 3  # once the body is lost; each further search tries the next ones
# Of two matched clouds that say how the body moves: nearer in time the error of the matches says more than the motion,
# and farther the motion is another by now.
MATCHED_SECONDS, MAX_MATCHED = (0.19, 1.5), 8
FADING = 0.9  # of the support that the last matches gave, with every cloud that is only followed
# Limits of following without matches: seconds since the last accepted cloud, least share of the cloud on the model,
# most of the model in free space. (What lies inside out is not limited: the far side of a thin limb does.) Seconds
# enough for a live sensor whose clouds were dropped while the body was sought: else it would have to be sought again.
FOLLOW_SECONDS, MIN_FOLLOWED_COVER, MAX_FOLLOWED_CONFLICT = 1.0, 0.75, 0.1
MATCHES_LAST = 0.9  # seconds for which a matched cloud may be followed on: what is not seen of the motion adds up
EXPECTED_SECONDS = 0.5  # for which the body stays near its predicted place, whatever the matches say


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


class _Found(NamedTuple):
    """A warp to the live cloud, what found it, the matches it rests on, and what the model learnt with it.

    of_this_cloud: whether the matches are, not of a past one.
    """

    warp: Warp
    method: str
    matches: Matches = NO_MATCHES
    inliers: BoolArray = np.zeros(0, dtype=bool)
    change: Change = Change()
    keyframe: bool = False
    of_this_cloud: bool = False


class _News(NamedTuple):
    """What the model learnt from a past cloud since the last one. then: where it lay there."""

    examined: Examined
    then: Imprint
    change: Change
    keyframe: bool


class DeformableTracker:
    """Tracks one deforming object. Not thread-safe."""

    def __init__(
        self, matcher: "Matcher | None", settings: DeformableSettings | None = None, examiner: Examiner | None = None
    ) -> None:
        """matcher: with weights for deformable scenes; or an examiner that has one."""
        if examiner is None:
            assert matcher is not None
            examiner = OwnExaminer(matcher)
        self.settings = now = settings or DeformableSettings()
        self.matcher, self._examiner = matcher, examiner
        self._background = Background(now.threaded, now.background_clouds)
        self.reset()

    def reset(self) -> None:
        """Forget the model; the next cloud begins a new one."""
        self.model: CanonicalModel | None = None
        self._background.drop()
        self._keyframes: list[View] = []
        self._studied: View | None = None
        self._last: Sight | None = None
        self._warp: Warp | None = None  # to the last accepted cloud
        self._room = np.eye(4)  # how the room has moved before the camera, from the first to the last accepted cloud
        self._handed_over: Live | None = None  # the cloud that the second worker has
        self._then: Place | None = None  # in that cloud
        self._matched: list[Place] = []  # by matches, the last few
        self._news: _News | None = None
        self._drift: Drift | None = None  # once it is known
        self._follower: SurfaceFollower | None = None
        self._rejected, self._searches, self._unmatched = 0, 0, 0  # clouds in a row; searches in vain; clouds in a row
        self._model_stamp = 0.0

    def close(self) -> None:
        """Let go of the second worker; no cloud may come after that."""
        self._background.drop()
        self._examiner.close()

    def process(self, points: FloatArray, stamp: float) -> DeformableTrack:
        """Warp the model to a live cloud, (N, 3) or organised (H, W, 3) with NaN, and let it learn from it."""
        clock = StageClock()
        self._background.next_cloud()
        clock.stop("learn")
        live = self._live(points, stamp)
        clock.stop("foreground")
        if len(live.points) < MIN_POINTS:
            return self._refused(stamp, "the cloud has too few points", clock)
        if self.model is None:
            return self._begin(live, clock)
        if self._searches >= self.settings.max_rejections:
            return replace(self._begin(live, clock), reason="the model restarts: the body was not found again")
        camera = self._camera_motion(live)
        clock.stop("predict")
        found = self._follow_first(live, camera, clock) or self._search(live, camera, clock)
        if isinstance(found, DeformableTrack):
            return found
        self._note_motion(live, camera, found)
        return self._accept(live, found, clock)

    def _note_motion(self, live: Live, camera: FloatArray, found: _Found) -> None:
        """How the body moves, for the prediction.

        The nearest surface shows where a body goes, but not how it slides along the surface, as one that turns does:
        matches say that, from one matched cloud to the next.
        """
        assert self._warp is not None
        before = Place(live.stamp - self._elapsed(live), self._warp, self._room)
        self._room = camera @ self._room
        after = Place(live.stamp, found.warp, self._room)
        if found.of_this_cloud:
            self._drift = self._drift_to(after) or self._drift
            self._matched = [*self._matched, after][-MAX_MATCHED:]
        elif self._drift is not None:
            self._drift = self._drift._replace(shift=drift_between(before, after).shift)

    def _drift_to(self, place: Place) -> Drift | None:
        """The body's motion from the last matched cloud that is not too near in time, if there is one."""
        for before in reversed(self._matched):
            if MATCHED_SECONDS[0] <= place.stamp - before.stamp <= MATCHED_SECONDS[1]:
                return drift_between(before, place)
        return None

    def _live(self, points: FloatArray, stamp: float) -> Live:
        """A cloud without its background."""
        if np.ndim(points) not in (2, 3) or np.shape(points)[-1] != 3:
            raise InputError(f"A cloud must have the shape (N, 3) or (H, W, 3), but this one has {np.shape(points)}.")
        model = self.settings.model
        finite = finite_points(points)
        finite = finite[np.linalg.norm(finite, axis=1) < self.settings.max_range]
        background, left_out = NO_BACKGROUND, 0
        if self.settings.foreground is not None and len(finite) >= MIN_POINTS:
            last = None if self._last is None else self._last.imprint.warped
            scene = split_scene(finite, self.settings.foreground, last)
            background, left_out = scene.background, int((~scene.body).sum())
            finite = finite[scene.body]
        body = thin(finite, model.spacing / 2)
        return Live(body, thinned_surface(body, model.graph.coverage / 3), background, left_out, stamp)

    def _begin(self, live: Live, clock: StageClock) -> DeformableTrack:
        """Make the live cloud the model."""
        self.reset()
        self.model, self._model_stamp = CanonicalModel(live.points, self.settings.model), live.stamp
        if not self.model.graph.active.any():
            self.model = None
            return self._refused(live.stamp, "the cloud has no connected surface that is large enough", clock)
        clock.stop("fuse")
        self._warp, self._last = self.model.warp, sight_of(live, self.model, self.model.warp)
        self._matched = [Place(live.stamp, self._warp, self._room)]
        self._follower = SurfaceFollower(self.model.graph, self.model.surface, self.settings.follower)
        self._add_view(View(self._last, self._background.run(lambda: self._examiner.encode(live.points))))
        clock.stop("encode")
        track = self._report(live.stamp, TrackingState.OK, "the model begins here", clock, self._warp, reset=True)
        return replace(track, method="lepard", background=live.left_out)

    def _camera_motion(self, live: Live) -> FloatArray:
        """(4, 4): how the room has moved before the camera since the last accepted cloud."""
        assert self._last is not None
        return camera_motion(self._last.live.background, live.background)

    def _elapsed(self, live: Live) -> float:
        """Seconds since the last accepted cloud."""
        assert self._last is not None
        return live.stamp - self._last.live.stamp

    def _predicted(self, live: Live, camera: FloatArray) -> Warp:
        """The last warp, moved on as the body moved last, and as the camera (4, 4) moved since."""
        assert self._warp is not None
        warp, elapsed = self._warp, min(max(self._elapsed(live), 0.0), FOLLOW_SECONDS)
        return warp.moved_by((self._drift or RESTING).over(elapsed, move(camera, warp.moved_nodes)) @ camera)

    # ---- following: the last warp goes on, while a second worker matches one cloud at a time ----

    def _follow_first(self, live: Live, camera: FloatArray, clock: StageClock) -> _Found | None:
        """The warp that goes on from the last one; None where only matches of this very cloud can help.

        So it is with the first clouds after the model's: how the body moves is not known yet, and what cannot be seen
        of it would add up. If following fails while the second worker still has an earlier cloud, what that says may
        put the last warp right.
        """
        if not self._may_follow:
            return None
        if self._is_stale(live):
            self._background.finish()
            clock.stop("learn")
        if self._is_stale(live):
            return None
        starts = not self._rejected and not len(self._background)
        if starts:
            task, self._handed_over = self._task(live, self._predicted(live, camera)), live
            self._background.submit(lambda: self._examiner.examine(task), self._take_in)
        found = self._followed(live, camera)
        clock.stop("follow")
        if starts:
            self._then = None if found is None else Place(live.stamp, found.warp, camera @ self._room)
        elif found is None and len(self._background) and not self._rejected:
            self._background.finish()
            clock.stop("learn")
            found = self._followed(live, camera)
            clock.stop("follow")
        return found

    def _is_stale(self, live: Live) -> bool:
        """Whether the last matched cloud is too old to follow on from it: what is not seen of the motion adds up."""
        return live.stamp - self._matched[-1].stamp > MATCHES_LAST

    @property
    def _may_follow(self) -> bool:
        """Whether clouds are followed before they are matched."""
        return self.settings.background_clouds > 0 and self._drift is not None

    def _followed(self, live: Live, camera: FloatArray) -> _Found | None:
        """The followed warp, with the matches of a past cloud if they came in with this one."""
        news, self._news = self._news, None
        warp = self._followed_warp(live, self._predicted(live, camera))
        if warp is None or news is None:
            return None if warp is None else _Found(warp, "nicp")
        matches, agrees = news.examined.study.matches, news.examined.warp.match_inliers
        matches, carried = carried_on(matches, news.then, warp, self.settings.reach)
        return _Found(warp, "lepard", matches, agrees[carried], news.change, news.keyframe)

    def _followed_warp(self, live: Live, predicted: Warp) -> Warp | None:
        """The warp from the predicted one to the nearest surface, without matches, or None if it cannot be trusted.

        Its support is that of the last matches, which fades with every cloud.
        """
        if self._elapsed(live) > FOLLOW_SECONDS or self._unmatched >= self.settings.max_followed:
            return None
        assert self._follower is not None
        warp = self._follower.solve(live.surface, predicted)
        return replace(warp, support=FADING * predicted.support) if warp.ok and self._explains(warp) else None

    def _explains(self, warp: Warp) -> bool:
        """Whether a followed model lies under the live cloud, and nowhere where the sensor looked through."""
        known = warp.evidence
        if known is None or known.strain > MAX_STRAIN:
            return False
        return known.covered >= MIN_FOLLOWED_COVER and known.conflict <= MAX_FOLLOWED_CONFLICT

    def _take_in(self, examined: Examined) -> None:
        """Let the model learn from a past cloud, and put the last warp right by what its matches said.

        A cloud whose matches did not suffice teaches the model nothing, but the next one is still matched with it: with
        older ones it has less and less in common.
        """
        then, model = self._then, self.model
        if then is None or self._warp is None or model is None:
            return
        if examined.learnt is None:
            self._studied = View(sight_of(examined.live, model, then.warp), examined.study.cloud)
            return
        right = then._replace(warp=examined.warp)
        drift = self._drift_to(right)
        if drift is not None:
            self._drift = drift if self._drift is None else self._drift._replace(turn=drift.turn)
        self._matched = [*self._matched, right][-MAX_MATCHED:]
        self._warp = corrected(self._warp, then.warp, examined.warp).onto(examined.learnt.model.graph)
        keyframe = self._adopt(examined.learnt)
        self._news = _News(examined, examined.learnt.view.sight.imprint, examined.learnt.change, keyframe)

    # ---- matching: tracking cannot go on without it ----

    def _search(self, live: Live, camera: FloatArray, clock: StageClock) -> "_Found | DeformableTrack":
        """The warp by matches of this cloud, or by the nearest surface if they do not suffice, or why there is none."""
        if len(self._background) and self._handed_over is live:
            examined = self._background.claim()
        else:
            self._background.finish()
            task = self._task(live, self._predicted(live, camera))
            examined = self._background.run(lambda: self._examiner.examine(task))
        clock.stop("match")
        if examined.reason and not self._may_follow and self._elapsed(live) <= EXPECTED_SECONDS:
            followed = self._followed_warp(live, self._predicted(live, camera))
            clock.stop("follow")
            if followed is not None:
                return _Found(followed, "nicp")
        matches, inliers = examined.study.matches, examined.warp.match_inliers
        if examined.learnt is None:
            self._searches += 1
            return self._refused(live.stamp, examined.reason, clock, matches, examined.warp)
        keyframe = self._adopt(examined.learnt)
        clock.stop("fuse")
        warp = replace(examined.learnt.model.warp, overlap=examined.warp.overlap, residual=examined.warp.residual)
        return _Found(warp, "lepard", matches, inliers, examined.learnt.change, keyframe, of_this_cloud=True)

    def _task(self, live: Live, predicted: Warp) -> Task:
        """What is to be examined; nothing in it changes while the second worker is at it."""
        assert self.model is not None
        expected = predicted if self._elapsed(live) <= EXPECTED_SECONDS else None
        max_degrees = MAX_DEGREES + MAX_DEGREES_A_SECOND * self._elapsed(live)
        views, lost = self._views_to_match(), self._rejected > 0
        return Task(self.settings, self.model, live, predicted, expected, max_degrees, views, lost)

    def _adopt(self, learnt: Learnt) -> bool:
        """Take over what was learnt; whether its cloud is a keyframe."""
        self.model, self._follower, self._unmatched = learnt.model, learnt.follower, 0
        return self._add_view(learnt.view)

    def _views_to_match(self) -> list[View]:
        """The last view and the keyframes seen from the most similar side; once the body is lost, others by turns."""
        assert self._last is not None and self._studied is not None
        last = self._last
        ranked = sorted(self._keyframes, key=lambda view: degrees_between(view.sight.turn, last.turn))
        first = LOST_KEYFRAMES * self._searches % len(ranked) if self._rejected else 0
        views = [*ranked[first:], *ranked[:first]][:LOST_KEYFRAMES] if self._rejected else ranked[:MATCHED_KEYFRAMES]
        views = views if self._searches else [self._studied, *views]
        return list({id(view.cloud): view for view in views}.values())

    def _accept(self, live: Live, found: _Found, clock: StageClock) -> DeformableTrack:
        assert self.model is not None
        state = TrackingState.OK if self._rejected == 0 else TrackingState.RELOCALISED
        self._rejected = self._searches = 0
        self._unmatched = self._unmatched + 1 if found.method == "nicp" else 0
        self._warp, self._last = found.warp, sight_of(live, self.model, found.warp)
        change = found.change
        reason = f"{change.cut} edges were torn and are cut" if change.cut else "the warp is known"
        track = self._report(live.stamp, state, reason, clock, found.warp, found.matches, found.inliers)
        return replace(
            track,
            method=found.method,
            change=change,
            new_keyframe=found.keyframe,
            overlap=found.warp.overlap,
            residual=found.warp.residual,
            cut_edges=change.cut,
            background=live.left_out,
        )

    def _add_view(self, view: View) -> bool:
        """Keep a view as the last one, and as a keyframe if it shows a new side; whether it does.

        Of too many keyframes the most redundant one goes.
        """
        view = view._replace(sight=view.sight.without_cloud())
        self._studied = view
        least = self.settings.keyframe_motion, self.settings.keyframe_degrees
        keyframe = all(view.sight.is_new_to(other.sight, *least) for other in self._keyframes)
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
        """Say why there is no warp."""
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
