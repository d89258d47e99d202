# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Motion first: predict where the sensor is, align its cloud to the surface around it, and put that to the test."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import extrapolate, motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.rigid.slack import slack_between
from lepard_ros.registration.types import NO_MATCHES, Status
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe
from lepard_ros.tracking.local_map import LocalMap
from lepard_ros.tracking.prior import followed, judge_guess, with_prediction
from lepard_ros.tracking.sightings import Sighting
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

FOLLOW_SECONDS = 0.5  # for so long after a pose the sensor counts as followed
PRIOR_SECONDS = 1.5  # for so long the last pose is a useful guess
SLOW_SENSOR = 1.5  # a slow sensor's last pose is a useful guess for this many times the gap between its clouds
STAY = 0.05  # how much more overlap another keyframe must promise before it is matched instead of the last one
# What a sensor may do between two clouds on top of its speed: the error of two poses.
SLACK = 0.2  # metres
SLACK_DEGREES = 15.0
# Points on which a followed motion is judged: enough for a motion that is expected, at a tenth of the time.
JUDGED_POINTS = 800
# How much more likely than a match a followed motion is (log-odds); below that the network decides. On TUM fr1_desk
# that is 5 % of the clouds, and with them all whose motion was wrong by more than 0.1 m.
SURE_ODDS = 1.0
# A right motion puts at most 0.05 of the points into free space there, and 95 % of them at most 0.01; a cloud that slid
# along the walls of a room puts 0.04 to 0.27.
MAX_CONFLICT = 0.03
# Where the surfaces leave a motion open (a bare corridor), it is predicted for as long as the prediction is worth it:
# one sigma of it, metres. A velocity is known to so many m/s when it was last measured, and wanders by so many m/s
# within a second; odometry is wrong by a share of its way.
MAX_PREDICTED = 0.5
VELOCITY_ERROR, VELOCITY_WANDER = 0.1, 0.3
ODOMETRY_ERROR, ODOMETRY_DRIFT = 0.01, 0.05
ALIKE = 6  # keyframes around a predicted pose whose overlap with the cloud is compared
# Between two predictions from which both are tried.
STANDING = 0.02  # metres
STANDING_DEGREES = 2.0


class Pace(NamedTuple):
    """How often clouds come: the stamp of the last one, and the two gaps before it, in seconds (0: not known)."""

    stamp: float = 0.0
    gaps: tuple[float, float] = (0.0, 0.0)


class Follower:
    """Follows the sensor from cloud to cloud."""

    def __init__(self, keyframe_map: KeyframeMap, settings: TrackerSettings, rigid: RigidSettings) -> None:
        """Follow a sensor through a map."""
        self._map, self.settings = keyframe_map, settings
        rule = followed(rigid)
        self._mild = replace(rule, refine_points=JUDGED_POINTS)
        sure = replace(rule.acceptance, min_quality=rigid.acceptance.min_quality - SURE_ODDS)
        self._sure = replace(self._mild, acceptance=sure)
        self.unsure: list[Sighting] = []  # a motion that `follow` refused, and that will do if nothing better is found
        self._last_keyframe: int | None = None
        self._odometry: FloatArray | None = None  # of the last accepted cloud
        # Stamp and odometry when all of a motion was last measured.
        self._held: tuple[float, FloatArray | None] = (0.0, None)
        self.pace = Pace()  # of the sensor: a tracker that restarts its map keeps it
        self._followable = True  # the last pose says something about the next one
        self._hint: FloatArray | None = None  # where somebody said that the sensor is
        self.local_map = LocalMap(keyframe_map)

    def note_stamp(self, stamp: float) -> None:
        """A cloud came, whatever becomes of it."""
        last, (_, gap) = self.pace
        self.pace = Pace(stamp, (gap, stamp - last if last else 0.0))

    def give_up(self, hint: FloatArray | None) -> None:
        """The last pose says nothing about the next one. hint: (4, 4), about where the sensor is."""
        self._followable, self._hint = False, hint

    def last_seen(self) -> FloatArray | None:
        """Where a search should begin, (4, 4): at the hint, else at the last pose."""
        latest = self._map.path.latest(self._map.keyframes, 1)
        return self._hint if self._hint is not None or not latest else latest[0][1]

    def predict(self, stamp: float, odometry: FloatArray | None = None) -> list[FloatArray]:
        """Poses (4, 4) to start from: where odometry leads; else gone on as before, or stood still. None after a while.

        odometry: (4, 4), the sensor in a frame that drifts but does not jump.
        """
        if not self._followable:
            return [] if self._hint is None else [self._hint]
        latest = self._map.path.latest(self._map.keyframes, 2)
        longest = max(PRIOR_SECONDS, SLOW_SENSOR * min(self.pace.gaps))
        if not latest or abs(stamp - latest[0][0]) > longest:
            return []
        last_stamp, last = latest[0]
        if odometry is not None and self._odometry is not None:
            return [last @ invert(self._odometry) @ odometry, last]
        if len(latest) == 1 or not 0 < last_stamp - latest[1][0] <= longest:
            return [last]
        share = min((stamp - last_stamp) / (last_stamp - latest[1][0]), 2.0)  # no motion goes on forever
        return [extrapolate(latest[1][1], last, share), last]

    def follow(
        self, view: View, stamp: float, guesses: list[FloatArray], odometry: FloatArray | None = None
    ) -> Sighting | None:
        """The motion to the keyframe that shows most of the cloud; None where it cannot be trusted.

        guesses: of `predict`, the first one fills in what the surfaces leave open. odometry: where it came from.
        """
        self.unsure = []
        if not guesses or not self.recent(stamp):
            return None
        frame = self.candidates(view, guesses[0], 1)[0]
        guesses, sigma = _distinct(guesses), self._prediction_sigma(stamp, odometry)
        for wide in (False, True):
            motion = invert(frame.pose) @ self.local_map.align(view, guesses, frame, wide)
            predicted = invert(frame.pose) @ guesses[0]
            sighting = self._judged(view, frame, motion, predicted, sigma, self._sure)
            if self.reachable_from_last(sighting, stamp):
                return sighting
            mild = self._judged(view, frame, motion, predicted, sigma, self._mild)
            self.unsure = self.unsure or [mild] * self.reachable_from_last(mild, stamp)
        return None

    def _judged(
        self,
        view: View,
        frame: Keyframe,
        motion: FloatArray,
        predicted: FloatArray,
        sigma: float,
        rule: RigidSettings,
    ) -> Sighting:
        """The verdict on an aligned motion (4, 4), with what the surfaces leave open as predicted to `sigma` metres."""
        slack = slack_between(view.surface, frame.surface, motion, rule.refine_points)
        motion = slack.keep(motion, predicted) if slack else motion
        found = judge_guess(view.surface, frame.surface, motion[None], True, NO_MATCHES, rule, MAX_CONFLICT)
        if slack and sigma > MAX_PREDICTED:
            found = replace(found, transform=None, covariance=None, status=Status.DEGENERATE)
        return Sighting(frame, with_prediction(found, slack, sigma) if slack else found)

    def _prediction_sigma(self, stamp: float, odometry: FloatArray | None) -> float:
        """One sigma in metres of a position that was only predicted since all of a motion was last measured."""
        since, then = self._held
        if odometry is not None and then is not None:
            return ODOMETRY_ERROR + ODOMETRY_DRIFT * motion_between(then, odometry)[0]
        seconds = abs(stamp - since)
        return VELOCITY_ERROR * seconds + VELOCITY_WANDER * seconds**1.5 / 3**0.5

    def recent(self, stamp: float) -> bool:
        """Whether the last pose is so young that its motion still counts."""
        latest = self._map.path.latest(self._map.keyframes, 1)
        return self._followable and bool(latest) and abs(stamp - latest[0][0]) <= FOLLOW_SECONDS

    def candidates(self, view: View, pose: FloatArray, count: int) -> list[Keyframe]:
        """The keyframes that should see most of a cloud at a pose (4, 4); the last one a little preferred."""
        keyframes = self._map.keyframes
        rated = keyframes.by_overlap(view.surface, pose, max_count=ALIKE)
        rated.sort(key=lambda pair: -pair[0] - (STAY if pair[1].id == self._last_keyframe else 0.0))
        return [frame for _, frame in rated[:count]] or [keyframes.nearest(pose)]

    def accept(self, view: View, believed: Sighting, stamp: float, odometry: FloatArray | None) -> None:
        """Note where the cloud was: the next one starts from there."""
        frame, transform = believed.keyframe, believed.registration.transform
        if not believed.registration.predicted:
            self._held = stamp, odometry
        self._last_keyframe, self._odometry = frame.id, odometry
        self._followable, self._hint = True, None
        self.local_map.note(view, frame, np.eye(4) if transform is None else transform)

    def begin(self, frame: Keyframe) -> None:
        """A map starts with this keyframe."""
        self._held = frame.stamp, None
        self.stay_with(frame)

    def stay_with(self, frame: Keyframe) -> None:
        """Prefer a keyframe from now on: the newest one."""
        self._last_keyframe = frame.id

    def reachable_from_last(self, sighting: Sighting, stamp: float) -> bool:
        """Whether a sighting was accepted, at a place that the sensor can have reached since its last pose."""
        latest = self._map.path.latest(self._map.keyframes, 1)
        if not self._followable or sighting.pose is None:
            return False
        return bool(latest) and self.reachable(*latest[0], stamp, sighting.pose)

    def reachable(self, since: float, start: FloatArray, stamp: float, pose: FloatArray) -> bool:
        """Whether the sensor can have come from one pose to another in the time between."""
        distance, turn = motion_between(start, pose)
        seconds = abs(stamp - since)
        near = distance <= SLACK + self.settings.max_speed * seconds
        return near and turn <= SLACK_DEGREES + self.settings.max_turn * seconds


def _distinct(guesses: list[FloatArray]) -> list[FloatArray]:
    """The first guess, and those that lead elsewhere."""

    def differs(guess: FloatArray) -> bool:
        distance, turn = motion_between(guesses[0], guess)
        return distance > STANDING or turn > STANDING_DEGREES

    return guesses[:1] + [guess for guess in guesses[1:] if differs(guess)]
