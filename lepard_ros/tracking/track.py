# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Settings of the rigid tracker, and its result for one cloud."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Registration


class TrackingState(enum.Enum):
    """The state of a tracker. OK and RELOCALISED come with a pose, the others never do."""

    INITIALISING = "no pose in the map yet"
    OK = "the pose is known"
    LOST = "the pose is unknown; the tracker searches the map"
    RELOCALISED = "the pose is known again"


class Twist(NamedTuple):
    """A velocity in the sensor's own frame: (6,) metres and radians per second [linear, angular], (6, 6) covariance."""

    velocity: FloatArray
    covariance: FloatArray


@dataclass(frozen=True)
class Track:
    """The result for one cloud.

    pose: (4, 4) T_map_sensor, or None. covariance: (6, 6) of the pose, [translation, rotation vector] in the map frame.
    registration: the accepted motion from the cloud to the keyframe, or the best refused one with its status.
    keyframe_id, keyframe_stamp, keyframe_pose: the target keyframe of `registration`.
    loop_closed: a loop corrected the map before this pose. twist: None unless the previous cloud had a pose too.
    seconds: time by stage.
    """

    stamp: float
    state: TrackingState
    reason: str
    pose: FloatArray | None = None
    covariance: FloatArray | None = None
    registration: Registration | None = None
    keyframe_id: int | None = None
    keyframe_stamp: float | None = None
    keyframe_pose: FloatArray | None = None
    new_keyframe: bool = False
    loop_closed: bool = False
    twist: Twist | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TrackerSettings:
    """Settings of the rigid tracker. Lengths in metres, angles in degrees, times in seconds.

    mapping: add keyframes; otherwise only localise in the loaded map. fallback: "none" or "fpfh", the method to try
    when all of Lepard's motions are refused. candidates: keyframes matched with each cloud.
    keyframe_distance, keyframe_degrees, keyframe_overlap: a cloud beyond (below) one of them becomes a keyframe.
    max_speed, max_turn: limits of the sensor, per second. loop_gap: minimum number of keyframes inside a loop.
    background_clouds: delay, in clouds, after which results of the background worker are used. threaded: run that
    worker in its own thread (live sensor) or immediately (replay); both give the same poses.
    """

    mapping: bool = True
    fallback: str = "none"
    candidates: int = 2
    keyframe_distance: float = 0.3
    keyframe_degrees: float = 20.0
    keyframe_overlap: float = 0.6
    max_keyframes: int = 1000
    max_megabytes: float = 1024.0
    max_speed: float = 2.0
    max_turn: float = 180.0
    loop_closures: bool = True
    loop_gap: int = 8
    background_clouds: int = 15
    threaded: bool = False

    def __post_init__(self) -> None:
        """Reject invalid settings."""
        if self.fallback not in ("none", "fpfh"):
            raise InputError(f"fallback is {self.fallback!r}; use none or fpfh.")
        counts = ("candidates", "max_keyframes", "loop_gap")
        for name in (*counts, "background_clouds", "max_megabytes", "max_speed", "max_turn"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be more than 0.")
