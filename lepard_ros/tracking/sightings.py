# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Sightings: what several keyframes say about where one cloud was seen, and when to believe them."""

from dataclasses import dataclass

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between, orthonormal
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.keyframes import Keyframe

# Two sightings within this of each other tell of one place.
SAME_PLACE = 0.15  # metres
SAME_TURN = 8.0  # degrees
# How much more overlap a motion needs to be preferred to the one that is expected.
CLEARLY_BETTER = 0.1


@dataclass(frozen=True)
class Sighting:
    """A keyframe, and the motion of the cloud to it. pose: (4, 4) T_map_sensor, or None if refused."""

    keyframe: Keyframe
    registration: Registration

    @property
    def pose(self) -> FloatArray | None:
        """The pose of the cloud in the map."""
        transform = self.registration.transform
        return None if transform is None else orthonormal(self.keyframe.pose @ transform)


def same_place(first: FloatArray, second: FloatArray) -> bool:
    """Whether two poses are one place."""
    distance, turn = motion_between(first, second)
    return distance < SAME_PLACE and turn < SAME_TURN


def preferred(expected: Registration, matched: Registration) -> Registration:
    """The better of two motions to the same keyframe: one from the motion so far, one from the matches."""
    if not expected.ok and not matched.ok:
        return expected if expected.overlap > matched.overlap else matched  # its reason is nearer to the truth
    if not expected.ok or not matched.ok:
        return expected if expected.ok else matched
    return matched if matched.overlap > expected.overlap + CLEARLY_BETTER else expected


def largest_group(sightings: list[Sighting]) -> list[Sighting]:
    """The accepted sightings that agree on one place, the best overlap first; empty if two places tie."""
    accepted = sorted((s for s in sightings if s.pose is not None), key=lambda s: -s.registration.overlap)
    groups: list[list[Sighting]] = []
    for sighting in accepted:
        home = next((group for group in groups if _agree(group[0], sighting)), None)
        if home is None:
            groups.append([sighting])
        else:
            home.append(sighting)
    groups.sort(key=len, reverse=True)
    tie = len(groups) > 1 and len(groups[0]) == len(groups[1]) and len(groups[0]) > 1
    return groups[0] if groups and not tie else []


def _agree(first: Sighting, second: Sighting) -> bool:
    return first.pose is not None and second.pose is not None and same_place(first.pose, second.pose)
