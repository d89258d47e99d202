# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Settings of the deformable tracker."""

from dataclasses import dataclass, field

from lepard_ros.errors import InputError
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.foreground import ForegroundSettings
from lepard_ros.registration.deformable.match_filter import FilterSettings
from lepard_ros.tracking.model import ModelSettings


@dataclass(frozen=True)
class DeformableSettings:
    """Settings of the deformable tracker. Lengths in metres.

    max_keyframes: past clouds that are kept, from all sides of the object.
    keyframe_motion, keyframe_degrees: a cloud becomes a keyframe if the model moved (mean) or rotated by this much
    relative to every other keyframe.
    min_overlap: minimum share of the warped model on the live cloud. max_rejections: failed searches for a lost object
    before the model restarts.
    follower: solver for tracking without matches (non-rigid ICP from the last warp). It handles small motions and
    cannot observe sliding, so it runs within FOLLOW_SECONDS of the last verified cloud and for at most max_followed
    clouds in a row.
    background_clouds: with 0, every cloud is matched before it is warped. Otherwise clouds are tracked without matches,
    and a background worker matches one cloud at a time; this many clouds later its result updates the model and
    corrects the last warp. threaded: run that worker in its own thread (live sensor), where a result that is late is
    not waited for, or immediately (replay).
    max_range: points beyond are ignored. foreground: segmentation of the object, or None to use the whole cloud.
    """

    model: ModelSettings = field(default_factory=ModelSettings)
    solver: NonrigidSettings = field(default_factory=lambda: NonrigidSettings(iterations=10, max_seconds=10.0))
    follower: NonrigidSettings = field(
        default_factory=lambda: NonrigidSettings(surface_reach=0.06, iterations=6, tolerance=0.02, max_seconds=10.0)
    )
    # Milder than for a pair: the matches beside a tear have few neighbours that move as they do.
    filter: FilterSettings = field(default_factory=lambda: FilterSettings(min_trust=0.5))
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
        """Reject invalid settings."""
        if self.max_keyframes < 1 or self.max_rejections < 1 or not self.keyframe_motion > 0:
            raise InputError("max_keyframes, max_rejections and keyframe_motion must be more than 0.")

    @property
    def reach(self) -> float:
        """Maximum distance in metres of a matched point from the model."""
        return 2 * self.model.graph.coverage
