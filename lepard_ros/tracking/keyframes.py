# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The keyframes: clouds with poses that the map consists of, bounded in number and in bytes."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import invert, move, rotation_angle
from lepard_ros.registration.rigid.icp import sample
from lepard_ros.registration.types import Surface
from lepard_ros.tracking.views import View

PROBES = 300  # points of a cloud that are looked up to predict an overlap: good to about three per cent
ALIKE = 40  # keyframes whose overlap is predicted, of however many there are
DEGREES_PER_METRE = 60.0  # a turn by this much changes the view about as much as a step of one metre


@dataclass
class Keyframe:
    """A cloud of the map. pose: (4, 4) T_map_sensor. covariance: (6, 6) of it, in the map's frame."""

    id: int
    stamp: float
    pose: FloatArray
    view: View
    covariance: FloatArray = field(default_factory=lambda: np.zeros((6, 6)))
    nbytes: int = 0

    @property
    def surface(self) -> Surface:
        """The surface, in its sensor's frame."""
        return self.view.surface

    def weigh(self) -> None:
        """Count the bytes; only when the second worker is done, so that all machines evict the same keyframes."""
        self.nbytes = self.view.nbytes


class KeyframeBuffer:
    """Keyframes by id, oldest first. When it is full, the one whose view is best covered by another one goes."""

    def __init__(self, max_count: int, max_bytes: float) -> None:
        """An empty buffer. max_bytes: of the encoded clouds; one keyframe is always kept."""
        self._max_count, self._max_bytes = max_count, max_bytes
        self._frames: dict[int, Keyframe] = {}

    def __len__(self) -> int:
        """How many keyframes there are."""
        return len(self._frames)

    def __iter__(self) -> Iterator[Keyframe]:
        """Keyframes, oldest first."""
        return iter(self._frames.values())

    def __contains__(self, keyframe_id: int) -> bool:
        """Whether a keyframe is (still) here."""
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
        """A snapshot: the same clouds at the poses that they have now."""
        snapshot = KeyframeBuffer(self._max_count, self._max_bytes)
        snapshot._frames = {frame.id: replace(frame) for frame in self}
        return snapshot

    def add(self, frame: Keyframe) -> None:
        """Add a keyframe; `evictable` says afterwards whether one must go."""
        self._frames[frame.id] = frame

    def evictable(self) -> Keyframe | None:
        """The keyframe to remove if the buffer is over its bounds, else None."""
        full = len(self) > self._max_count or self.nbytes > self._max_bytes
        return self._most_redundant() if full and len(self) > 1 else None

    def remove(self, keyframe_id: int) -> None:
        """Forget a keyframe."""
        del self._frames[keyframe_id]

    def nearest(self, pose: FloatArray) -> Keyframe:
        """The keyframe whose view is most like that of a pose."""
        distances = view_distances(self.poses(), pose)
        return list(self)[int(distances.argmin())]

    def poses(self) -> FloatArray:
        """(K, 4, 4), oldest first."""
        return np.array([frame.pose for frame in self]).reshape(-1, 4, 4)

    def by_overlap(
        self, surface: Surface, pose: FloatArray, slack: float = 0.0, max_count: int = ALIKE
    ) -> list[tuple[float, Keyframe]]:
        """Keyframes with the share of the surface at `pose` that should lie on them, largest first.

        slack: metres by which the pose may be wrong. max_count: only so many are looked at, those whose views are most
        like that of the pose. Keyframes that share nothing are left out.
        """
        frames = list(self)
        order = np.argsort(view_distances(self.poses(), pose), kind="stable")[:max_count]
        probes = move(pose, sample(surface, PROBES).points)
        rated = [(predicted_overlap(probes, frames[index], slack), frames[index]) for index in order]
        return sorted((pair for pair in rated if pair[0] > 0), key=lambda pair: -pair[0])

    def _most_redundant(self) -> Keyframe:
        """The keyframe nearest to another one; the newest and the first stay, since paths and maps hang on them."""
        frames = list(self)
        poses = self.poses()
        distances = np.array([np.partition(view_distances(poses, pose), 1)[1] for pose in poses])
        distances[[0, -1]] = np.inf
        return frames[int(distances.argmin())] if len(frames) > 2 else frames[0]


def expected_overlap(surface: Surface, pose: FloatArray, frame: Keyframe) -> float:
    """The share of a surface at a pose (4, 4) of the map's frame that should lie on a keyframe."""
    return predicted_overlap(move(pose, sample(surface, PROBES).points), frame, 0.0)


def predicted_overlap(probes: FloatArray, frame: Keyframe, slack: float) -> float:
    """The share of points (n, 3) of the map's frame that lie within two spacings (and slack) of a keyframe."""
    reach = 2 * frame.surface.spacing + slack
    distance, _ = frame.surface.tree.query(move(invert(frame.pose), probes), distance_upper_bound=reach)
    return float(np.isfinite(distance).mean())


def view_distances(poses: FloatArray, pose: FloatArray) -> NDArray[np.floating]:
    """How much views differ from one view, in metres, a turn counted as a step. poses: (K, 4, 4) -> (K,)."""
    turns = np.degrees(rotation_angle(np.swapaxes(poses[:, :3, :3], 1, 2) @ pose[:3, :3]))
    return np.linalg.norm(poses[:, :3, 3] - pose[:3, 3], axis=1) + turns / DEGREES_PER_METRE
