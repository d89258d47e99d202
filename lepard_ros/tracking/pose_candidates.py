# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Pose candidates: poses of one cloud found from several keyframes, and their consensus."""

from dataclasses import dataclass

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between, orthonormal
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.keyframes import Keyframe

# Two candidates within these limits agree.
SAME_PLACE = 0.15  # metres
SAME_TURN = 8.0  # degrees


@dataclass(frozen=True, eq=False)  # equal by identity: == cannot compare the arrays inside
class PoseCandidate:
    """A keyframe and the registration of the cloud to it."""

    keyframe: Keyframe
    registration: Registration

    @property
    def pose(self) -> FloatArray | None:
        """The pose (4, 4) T_map_sensor of the cloud, or None if the registration was refused."""
        transform = self.registration.transform
        return None if transform is None else orthonormal(self.keyframe.pose @ transform)


def same_place(first: FloatArray, second: FloatArray) -> bool:
    """Whether two poses agree."""
    distance, turn = motion_between(first, second)
    return distance < SAME_PLACE and turn < SAME_TURN


def largest_group(candidates: list[PoseCandidate]) -> list[PoseCandidate]:
    """The largest group of accepted candidates that agree, most likely first; empty if two groups tie."""
    accepted = sorted((s for s in candidates if s.pose is not None), key=lambda s: -s.registration.quality)
    groups: list[list[PoseCandidate]] = []
    for candidate in accepted:
        home = next((group for group in groups if _agree(group[0], candidate)), None)
        if home is None:
            groups.append([candidate])
        else:
            home.append(candidate)
    groups.sort(key=len, reverse=True)
    tie = len(groups) > 1 and len(groups[0]) == len(groups[1]) and len(groups[0]) > 1
    return groups[0] if groups and not tie else []


def _agree(first: PoseCandidate, second: PoseCandidate) -> bool:
    return first.pose is not None and second.pose is not None and same_place(first.pose, second.pose)
