# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Keyframes: clouds with poses that make up the map, limited in number and memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import invert, move, rotation_angle
from lepard_ros.registration.rigid.icp import sample
from lepard_ros.registration.types import Surface
from lepard_ros.tracking.views import View

PROBES = 300  # sample points for predicting an overlap: accurate to about three per cent
OVERLAP_CANDIDATES = 40  # maximum number of keyframes whose overlap is predicted
DEGREES_PER_METRE = 60.0  # a rotation by this much changes the view about as much as one metre of translation


@dataclass(eq=False)  # equal by identity: == cannot compare the arrays inside
class Keyframe:
    """A cloud of the map. pose: (4, 4) T_map_sensor. covariance: (6, 6) of the pose, in the map frame."""

    id: int
    stamp: float
    pose: FloatArray
    view: View
    covariance: FloatArray = field(default_factory=lambda: np.zeros((6, 6)))
    nbytes: int = 0

    @property
    def surface(self) -> Surface:
        """The surface in the sensor frame."""
        return self.view.surface

    def update_nbytes(self) -> None:
        """Update the memory count. Called only after the background job, so that eviction is deterministic."""
        self.nbytes = self.view.nbytes


class KeyframeBuffer:
    """Keyframes by id, oldest first. A full buffer evicts the most redundant keyframe."""

    def __init__(self, max_count: int, max_bytes: float) -> None:
        """Create an empty buffer. max_bytes: limit for all encoded clouds; one keyframe is always kept."""
        self._max_count, self._max_bytes = max_count, max_bytes
        self._frames: dict[int, Keyframe] = {}

    def __len__(self) -> int:
        """Number of keyframes."""
        return len(self._frames)

    def __iter__(self) -> Iterator[Keyframe]:
        """Iterate over the keyframes, oldest first."""
        return iter(self._frames.values())

    def __contains__(self, keyframe_id: int) -> bool:
        """Whether the buffer holds this keyframe."""
        return keyframe_id in self._frames

    def __getitem__(self, keyframe_id: int) -> Keyframe:
        """The keyframe with this id."""
        return self._frames[keyframe_id]

    @property
    def nbytes(self) -> int:
        """Bytes of all encoded clouds."""
        return sum(frame.nbytes for frame in self)

    @property
    def next_id(self) -> int:
        """An id that was never used."""
        return max(self._frames, default=-1) + 1

    def copy(self) -> "KeyframeBuffer":
        """A snapshot: the same clouds with their current poses."""
        snapshot = KeyframeBuffer(self._max_count, self._max_bytes)
        snapshot._frames = {frame.id: replace(frame) for frame in self}
        return snapshot

    def add(self, frame: Keyframe) -> None:
        """Add a keyframe; check `evictable` afterwards."""
        self._frames[frame.id] = frame

    def evictable(self) -> Keyframe | None:
        """The keyframe to remove if the buffer exceeds its limits, else None."""
        full = len(self) > self._max_count or self.nbytes > self._max_bytes
        return self._most_redundant() if full and len(self) > 1 else None

    def remove(self, keyframe_id: int) -> None:
        """Remove a keyframe."""
        del self._frames[keyframe_id]

    def nearest(self, pose: FloatArray) -> Keyframe:
        """The keyframe with the view closest to a pose (4, 4)."""
        distances = view_distances(self.poses(), pose)
        return list(self)[int(distances.argmin())]

    def poses(self) -> FloatArray:
        """All poses (K, 4, 4), oldest first."""
        return np.array([frame.pose for frame in self]).reshape(-1, 4, 4)

    def distances_walked(self) -> dict[int, float]:
        """The length of the sensor's path from each keyframe to the newest, by id: metres, with rotation converted."""
        poses = self.poses()
        since_first = np.concatenate([[0.0], np.cumsum(view_distances(poses[:-1], poses[1:]))])[: len(poses)]
        return {frame.id: float(since_first[-1] - length) for frame, length in zip(self, since_first, strict=True)}

    def by_overlap(
        self,
        surface: Surface,
        pose: FloatArray,
        slack: float = 0.0,
        max_count: int = OVERLAP_CANDIDATES,
        among: Sequence[Keyframe] | None = None,
    ) -> list[tuple[float, Keyframe]]:
        """Keyframes with their predicted overlap with the surface at `pose`, largest first.

        slack: pose error in metres. max_count: only this many keyframes are considered, those with the closest views.
        among: the keyframes to consider (None: all). Keyframes without overlap are omitted.
        """
        frames = list(self if among is None else among)
        poses = np.array([frame.pose for frame in frames]).reshape(-1, 4, 4)
        order = np.argsort(view_distances(poses, pose), kind="stable")[:max_count]
        probes = move(pose, sample(surface, PROBES).points)
        rated = [(predicted_overlap(probes, frames[index], slack), frames[index]) for index in order]
        return sorted((pair for pair in rated if pair[0] > 0), key=lambda pair: -pair[0])

    def _most_redundant(self) -> Keyframe:
        """The keyframe closest to another one. The first and the newest are kept: map and trajectory refer to them."""
        frames = list(self)
        poses = self.poses()
        distances = np.array([np.partition(view_distances(poses, pose), 1)[1] for pose in poses])
        distances[[0, -1]] = np.inf
        return frames[int(distances.argmin())] if len(frames) > 2 else frames[0]


def expected_overlap(surface: Surface, pose: FloatArray, frame: Keyframe) -> float:
    """Predicted overlap of a surface at a pose (4, 4) in the map frame with a keyframe."""
    return predicted_overlap(move(pose, sample(surface, PROBES).points), frame, 0.0)


def predicted_overlap(probes: FloatArray, frame: Keyframe, slack: float) -> float:
    """Share of points (n, 3), in the map frame, that lie within two spacings (plus slack) of a keyframe."""
    reach = 2 * frame.surface.spacing + slack
    distance, _ = frame.surface.tree.query(move(invert(frame.pose), probes), distance_upper_bound=reach)
    return float(np.isfinite(distance).mean())


def view_distances(poses: FloatArray, pose: FloatArray) -> NDArray[np.floating]:
    """Distance of views from one view in metres, with rotation converted to metres. poses: (K, 4, 4) -> (K,).

    pose: (4, 4), or (K, 4, 4) to compare pairs.
    """
    turns = np.degrees(rotation_angle(np.swapaxes(poses[:, :3, :3], 1, 2) @ pose[..., :3, :3]))
    return np.linalg.norm(poses[:, :3, 3] - pose[..., :3, 3], axis=1) + turns / DEGREES_PER_METRE


def distinct_views(frames: Sequence[Keyframe], spacing: float, max_count: int) -> list[Keyframe]:
    """The first `max_count` keyframes at least `spacing` metres (with rotation converted) from all chosen before."""
    chosen: list[Keyframe] = []
    poses = np.zeros((max_count, 4, 4))
    for frame in frames:
        if len(chosen) == max_count:
            break
        if not chosen or view_distances(poses[: len(chosen)], frame.pose).min() >= spacing:
            poses[len(chosen)] = frame.pose
            chosen.append(frame)
    return chosen
