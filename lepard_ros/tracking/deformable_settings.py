# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""How a bending thing is followed."""

from dataclasses import dataclass, field

from lepard_ros.errors import InputError
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.foreground import ForegroundSettings
from lepard_ros.registration.deformable.match_filter import FilterSettings
from lepard_ros.tracking.model import ModelSettings


@dataclass(frozen=True)
class DeformableSettings:
    """How a bending thing is followed. Lengths in metres.

    max_keyframes: past clouds that are kept, from all sides of the body.
    keyframe_motion, keyframe_degrees: mean motion and turn of the model, since every keyframe, that makes a new one.
    min_overlap: share of the warped model on the live cloud. max_rejections: searches for a lost body
    that may be in vain before the model restarts.
    follower: the solver without matches; it goes on from the last warp to the nearest surface, which only sees small
    motions and no sliding. So it runs within FOLLOW_SECONDS of the last accepted cloud, and for at most max_followed
    clouds in a row.
    background_clouds: 0 matches every cloud before it is warped. Else the follower keeps the sensor's pace, and a
    second worker matches one cloud at a time: so many clouds later the model learns from that one, and the last warp is
    corrected. threaded: whether the worker is a thread (a live sensor) or works at once (a replay, the same warps).
    max_range: points beyond are left out. foreground: how the body is told from the room, or None to take the whole
    cloud.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    solver: NonrigidSettings = field(default_factory=lambda: NonrigidSettings(iterations=10, max_seconds=10.0))
    follower: NonrigidSettings = field(
        default_factory=lambda: NonrigidSettings(surface_reach=0.06, iterations=6, tolerance=0.02, max_seconds=10.0)
    )
    filter: FilterSettings = field(default_factory=FilterSettings)
    foreground: ForegroundSettings | None = field(default_factory=ForegroundSettings)
    max_keyframes: int = 12
    keyframe_motion: float = 0.15
    keyframe_degrees: float = 25.0
    min_overlap: float = 0.15
    max_rejections: int = 10
    max_followed: int = 15
    max_range: float = float("inf")
    background_clouds: int = 0
    threaded: bool = False

    def __post_init__(self) -> None:
        """Refuse settings that make no sense."""
        if self.max_keyframes < 1 or self.max_rejections < 1 or not self.keyframe_motion > 0:
            raise InputError("max_keyframes, max_rejections and keyframe_motion must be more than 0.")

    @property
    def reach(self) -> float:
        """Metres from the model, within which a matched point belongs to it."""
        return 2 * self.model.graph.coverage
