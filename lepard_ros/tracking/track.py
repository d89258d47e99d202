# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What a tracker is told and what it says about one cloud."""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Registration


class TrackingState(enum.Enum):
    """The state of a tracker. OK and RELOCALISED come with a pose, the others never do."""

    INITIALISING = "no place in the map is known yet"
    OK = "the pose is known"
    LOST = "the pose is not known; the whole map is searched"
    RELOCALISED = "the pose is known again"


class Twist(NamedTuple):
    """A velocity in the sensor's own frame: (6,) metres and radians per second [linear, angular], (6, 6) covariance."""

    velocity: FloatArray
    covariance: FloatArray


@dataclass(frozen=True)
class Track:
    """What became of one cloud.

    pose: (4, 4) T_map_sensor, or None. covariance: (6, 6) of it, [translation, rotation vector] in the map's frame.
    registration: the accepted motion from the cloud to the keyframe, or the best refused one with the reason.
    keyframe_id, keyframe_stamp, keyframe_pose: the keyframe that `registration` leads to.
    loop_closed: the map was corrected by a loop before this pose. twist: None unless the cloud before had a pose too.
    seconds: by stage.
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
    """How a sensor is followed. Lengths in metres, angles in degrees, times in seconds.

    mapping: add keyframes; else only localise in the map that was loaded. fallback: "none" or "fpfh", what is tried
    when all of Lepard's motions are refused. candidates: keyframes matched with each cloud.
    keyframe_distance, keyframe_degrees, keyframe_overlap: beyond (below) one of them a cloud becomes a keyframe.
    max_speed, max_turn: per second, what a sensor can do. loop_gap: keyframes in between that make a loop.
    background_clouds: how many clouds later the second worker's
    results come in. threaded: whether it is a thread beside tracking (for a live sensor) or does its work
    at once (a replay, which gives the same poses).
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
        """Refuse settings that make no sense."""
        if self.fallback not in ("none", "fpfh"):
            raise InputError(f"fallback is {self.fallback!r}; use none or fpfh.")
        counts = ("candidates", "max_keyframes", "loop_gap")
        for name in (*counts, "background_clouds", "max_megabytes", "max_speed", "max_turn"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} is {getattr(self, name)}; it must be more than 0.")
