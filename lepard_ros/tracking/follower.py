# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Frame-to-map tracking: predict the pose, align the cloud to the local map, and verify the result."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import extrapolate, motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.acceptance import contact_between
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.rigid.slack import HELD
from lepard_ros.registration.types import NO_MATCHES, Status
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe
from lepard_ros.tracking.local_map import LocalMap
from lepard_ros.tracking.pose_candidates import PoseCandidate
from lepard_ros.tracking.prior import (
    FOLLOWED_ODDS,
    best_supported,
    followed,
    judge_guess,
    with_prediction,
    with_weak_directions,
)
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

FOLLOW_SECONDS = 0.5  # maximum age of the last pose for frame-to-map tracking
PRIOR_SECONDS = 1.5  # maximum age of the last pose for use as an initial guess
# The velocity is that over this time: over 0.1 s, errors of 2 cm in two poses are 0.3 m/s, which a prediction of
# unconstrained directions would keep from cloud to cloud. VELOCITY_POSES: newest poses that are considered.
VELOCITY_SECONDS, VELOCITY_POSES = 0.35, 12
SLOW_SENSOR = 1.5  # for slow sensors: the same limit, in multiples of the interval between clouds
HYSTERESIS = 0.05  # extra predicted overlap that another keyframe needs to replace the last one
# Margin on top of the maximum speed between two clouds: it covers the errors of both poses.
MOTION_MARGIN = 0.2  # metres
MOTION_MARGIN_DEGREES = 15.0
# Points used to verify a tracked motion: enough for a motion that is expected, at a tenth of the time.
JUDGED_POINTS = 800
# Prior log-odds of a tracked motion over a matched one; below this the network decides. On TUM fr1_desk that is 5 % of
# the clouds, including all whose motion was wrong by more than 0.1 m.
STRICT_ODDS = 1.0
# Maximum share of points in free space. On fr1_desk a correct motion has at most 0.05, and at most 0.01 in 95 % of the
# clouds. A cloud that slid along the walls of a room has 0.04 to 0.27.
MAX_CONFLICT = 0.03
# Unconstrained directions (a bare corridor) are filled from the prediction until its standard deviation exceeds
# MAX_PREDICTED_SIGMA metres. Velocity model: initial error in m/s, random walk in m/s after one second. Odometry model:
# constant error in metres, drift per metre travelled.
MAX_PREDICTED_SIGMA = 0.5
VELOCITY_ERROR, VELOCITY_RANDOM_WALK = 0.1, 0.3
ODOMETRY_ERROR, ODOMETRY_DRIFT = 0.01, 0.05
# Keyframes around an aligned pose that verify it if the one at the predicted pose refuses it, and the minimum log-odds
# there: below them the network decides (TUM fr1_desk: ATE 0.057 m without this limit).
JUDGES, JUDGE_QUALITY = 2, 2.0
OVERLAP_CANDIDATES = 6  # keyframes around a predicted pose whose predicted overlap is compared
# Initial guesses closer than this count as one.
SAME_GUESS = 0.02  # metres
SAME_GUESS_DEGREES = 2.0


class Pace(NamedTuple):
    """Timing of the clouds: stamp of the last one and the two intervals before it, in seconds (0: unknown)."""

    stamp: float = 0.0
    gaps: tuple[float, float] = (0.0, 0.0)


class Follower:
    """Tracks the sensor from cloud to cloud."""

    def __init__(self, keyframe_map: KeyframeMap, settings: TrackerSettings, rigid: RigidSettings) -> None:
        """Track a sensor in a map."""
        self._map, self.settings = keyframe_map, settings
        self._rule = replace(followed(rigid), refine_points=JUDGED_POINTS)
        # Log-odds that the last pose is right: the prior of a tracked motion. Doubtful motions lower them, so that they
        # do not support each other for long.
        self._belief = FOLLOWED_ODDS
        self._min_quality = rigid.acceptance.min_quality
        # A motion that `follow` refused; it is used if relocalisation finds nothing better.
        self.uncertain: list[PoseCandidate] = []
        self._last_keyframe: int | None = None
        self._odometry: FloatArray | None = None  # at the last accepted cloud
        # Stamp and odometry when all six degrees of freedom were last constrained.
        self._last_constrained: tuple[float, FloatArray | None] = (0.0, None)
        self.pace = Pace()  # survives a restart of the map
        self._pose_valid = True  # the last pose may be used to predict the next one
        self._hint: FloatArray | None = None  # approximate pose given by the user
        self.local_map = LocalMap(keyframe_map)

    def add_stamp(self, stamp: float) -> None:
        """Record the arrival of a cloud, whether or not it is tracked."""
        last, (_, gap) = self.pace
        self.pace = Pace(stamp, (gap, stamp - last if last else 0.0))

    def invalidate_pose(self, hint: FloatArray | None) -> None:
        """Stop predicting from the last pose. hint: (4, 4), approximate pose of the sensor."""
        self._pose_valid, self._hint = False, hint

    def search_start(self) -> FloatArray | None:
        """The pose (4, 4) around which a search starts: the hint, else the last pose."""
        latest = self._map.path.latest(self._map.keyframes, 1)
        return self._hint if self._hint is not None or not latest else latest[0][1]

    def predict(self, stamp: float, odometry: FloatArray | None = None) -> list[FloatArray]:
        """Initial guesses (4, 4), best first: odometry or constant velocity, then the last pose. Empty if that is old.

        The velocity is that over VELOCITY_SECONDS, then that of the two newest poses: the sensor may just have begun to
        turn.

        odometry: (4, 4), the sensor in a frame that drifts but does not jump.
        """
        if not self._pose_valid:
            return [] if self._hint is None else [self._hint]
        latest = self._map.path.latest(self._map.keyframes, VELOCITY_POSES)
        longest = max(PRIOR_SECONDS, SLOW_SENSOR * min(self.pace.gaps))
        if not latest or abs(stamp - latest[0][0]) > longest:
            return []
        last_stamp, last = latest[0]
        if odometry is not None and self._odometry is not None:
            return [last @ invert(self._odometry) @ odometry, last]
        if len(latest) == 1 or not 0 < last_stamp - latest[1][0] <= longest:
            return [last]
        earlier_stamp, earlier = self._velocity_baseline(latest)
        share = min((stamp - last_stamp) / (last_stamp - earlier_stamp), 2.0)  # limits the extrapolation
        recent_stamp, recent = latest[1]
        newest = min((stamp - last_stamp) / (last_stamp - recent_stamp), 2.0)
        return [extrapolate(earlier, last, share), extrapolate(recent, last, newest), last]

    def _velocity_baseline(self, latest: list[tuple[float, FloatArray]]) -> tuple[float, FloatArray]:
        """The pose from which the velocity is measured: about VELOCITY_SECONDS old, and no jump since.

        latest: at least two stamps and poses, newest first.
        """
        oldest = latest[1]
        for pose in latest[2:]:
            if latest[0][0] - pose[0] > VELOCITY_SECONDS or not self.reachable(*pose, *oldest):
                break
            oldest = pose
        return oldest

    def follow(
        self, view: View, stamp: float, guesses: list[FloatArray], odometry: FloatArray | None = None
    ) -> PoseCandidate | None:
        """Track a cloud: its motion to the keyframe with the largest overlap, or None if it is not reliable.

        guesses: from `predict`; the first one fills unconstrained directions. odometry: as given to `predict`.
        """
        self.uncertain = []
        if not guesses or not self.recent(stamp):
            return None
        first = self.overlapping_keyframes(view, guesses[0], 1)[0]
        guesses, sigma = _distinct(guesses), self._prediction_sigma(stamp, odometry)
        for wide in (False, True):
            pose = self.local_map.align(view, guesses, first, wide)
            for frame in self._judging_keyframes(view, pose, first):
                motion, predicted = invert(frame.pose) @ pose, invert(frame.pose) @ guesses[0]
                candidate = self._judged(view, frame, motion, predicted, sigma)
                if not self.credible(candidate, stamp):
                    continue
                strict = self._min_quality - STRICT_ODDS
                if candidate.registration.quality >= (strict if frame is first else max(strict, JUDGE_QUALITY)):
                    return candidate
                self.uncertain = self.uncertain or [candidate]
        return None

    def _judging_keyframes(self, view: View, pose: FloatArray, first: Keyframe) -> Iterator[Keyframe]:
        """Keyframes to verify an aligned pose (4, 4) with: `first`, then those with the largest overlap there.

        `first` was chosen at the predicted pose. If that is wrong by 20 degrees, the two hardly overlap.
        """
        yield first
        around = self.overlapping_keyframes(view, pose, JUDGES)
        yield from (frame for frame in around if frame.id != first.id)

    def _judged(
        self, view: View, frame: Keyframe, motion: FloatArray, predicted: FloatArray, sigma: float
    ) -> PoseCandidate:
        """Verify an aligned motion (4, 4); unconstrained directions come from the prediction (`sigma` in metres)."""
        source, target, rule, points = view.surface, frame.surface, self._rule, self._rule.refine_points
        motion, contact, resistance = best_supported(source, target, motion, predicted, points)
        slack = resistance.below(HELD)
        if slack:
            motion = slack.keep(motion, predicted)
            contact = contact_between(source, target, motion[None], points)
        found = judge_guess(source, target, motion[None], True, NO_MATCHES, rule, MAX_CONFLICT, contact)
        if slack and sigma > MAX_PREDICTED_SIGMA:
            found = replace(found, transform=None, covariance=None, status=Status.DEGENERATE)
        found = with_weak_directions(found, resistance, target.spacing, found.overlap * points)
        return PoseCandidate(frame, with_prediction(found, slack, sigma) if slack else found)

    def _prediction_sigma(self, stamp: float, odometry: FloatArray | None) -> float:
        """Standard deviation (metres) of a position predicted since the motion was last fully constrained."""
        since, then = self._last_constrained
        if odometry is not None and then is not None:
            return ODOMETRY_ERROR + ODOMETRY_DRIFT * motion_between(then, odometry)[0]
        seconds = abs(stamp - since)
        return VELOCITY_ERROR * seconds + VELOCITY_RANDOM_WALK * seconds**1.5 / 3**0.5

    def recent(self, stamp: float, max_seconds: float = FOLLOW_SECONDS) -> bool:
        """Whether the last pose is recent enough, by default for frame-to-map tracking."""
        latest = self._map.path.latest(self._map.keyframes, 1)
        return self._pose_valid and bool(latest) and abs(stamp - latest[0][0]) <= max_seconds

    def overlapping_keyframes(self, view: View, pose: FloatArray, count: int) -> list[Keyframe]:
        """The keyframes with the largest predicted overlap at a pose (4, 4), with hysteresis for the last one."""
        keyframes = self._map.keyframes
        rated = keyframes.by_overlap(view.surface, pose, max_count=OVERLAP_CANDIDATES)
        rated.sort(key=lambda pair: -pair[0] - (HYSTERESIS if pair[1].id == self._last_keyframe else 0.0))
        return [frame for _, frame in rated[:count]] or [keyframes.nearest(pose)]

    def accept(self, view: View, accepted: PoseCandidate, stamp: float, odometry: FloatArray | None) -> None:
        """Store an accepted pose; the next prediction starts from it."""
        frame, transform = accepted.keyframe, accepted.registration.transform
        self._belief = min(FOLLOWED_ODDS, self._belief + accepted.registration.quality)
        if not accepted.registration.predicted:
            self._last_constrained = stamp, odometry
        self._last_keyframe, self._odometry = frame.id, odometry
        self._pose_valid, self._hint = True, None
        self.local_map.note(view, frame, np.eye(4) if transform is None else transform)

    def begin(self, frame: Keyframe) -> None:
        """Start a map with this keyframe."""
        self._last_constrained = frame.stamp, None
        self.prefer(frame)

    def prefer(self, frame: Keyframe) -> None:
        """Prefer a keyframe (usually the newest one) from now on."""
        self._last_keyframe = frame.id

    def credible(self, candidate: PoseCandidate, stamp: float) -> bool:
        """Whether a candidate continues the motion: within reach, and likely enough if the last pose is doubtful."""
        likely = candidate.registration.quality >= self._min_quality - self._belief
        return likely and self.reachable_from_last(candidate, stamp)

    def reachable_from_last(self, candidate: PoseCandidate, stamp: float, max_seconds: float = np.inf) -> bool:
        """Whether a candidate was accepted and the sensor can have reached its pose since the last one.

        max_seconds: maximum age of the last pose.
        """
        latest = self._map.path.latest(self._map.keyframes, 1)
        if not self._pose_valid or candidate.pose is None or not latest or stamp - latest[0][0] > max_seconds:
            return False
        return self.reachable(*latest[0], stamp, candidate.pose)

    def reachable(self, since: float, start: FloatArray, stamp: float, pose: FloatArray) -> bool:
        """Whether the sensor can have moved from one pose to another in the time between."""
        distance, turn = motion_between(start, pose)
        seconds = abs(stamp - since)
        near = distance <= MOTION_MARGIN + self.settings.max_speed * seconds
        return near and turn <= MOTION_MARGIN_DEGREES + self.settings.max_turn * seconds


def _distinct(guesses: list[FloatArray]) -> list[FloatArray]:
    """The first guess, and the others that differ from it."""

    def differs(guess: FloatArray) -> bool:
        distance, turn = motion_between(guesses[0], guess)
        return distance > SAME_GUESS or turn > SAME_GUESS_DEGREES

    return guesses[:1] + [guess for guess in guesses[1:] if differs(guess)]
