# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The trajectory of the sensor: each pose is stored relative to a keyframe, so it moves when the map is corrected."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import orthonormal
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer


class Step(NamedTuple):
    """One pose. step: (4, 4), the sensor in the frame of the keyframe."""

    stamp: float
    keyframe_id: int
    step: FloatArray


class SensorPath:
    """The newest `max_poses` accepted poses."""

    def __init__(self, max_poses: int) -> None:
        """An empty path."""
        self._max_poses = max_poses
        self._steps: list[Step] = []

    def __len__(self) -> int:
        """Number of poses."""
        return len(self._steps)

    def add(self, stamp: float, keyframe_id: int, step: FloatArray) -> None:
        """Add the newest pose."""
        self._steps.append(Step(stamp, keyframe_id, step))
        if len(self._steps) > self._max_poses:
            del self._steps[: len(self._steps) - self._max_poses]

    def anchor_last(self, keyframe: Keyframe) -> None:
        """Attach the newest pose to the keyframe made from the same cloud."""
        self._steps[-1] = Step(self._steps[-1].stamp, keyframe.id, np.eye(4))

    def rebase(self, old: Keyframe, new: Keyframe) -> None:
        """Attach the poses of a keyframe that will be removed to another one."""
        shift = invert(new.pose) @ old.pose
        self._steps = [Step(s.stamp, new.id, shift @ s.step) if s.keyframe_id == old.id else s for s in self._steps]

    def latest(self, keyframes: KeyframeBuffer, count: int) -> list[tuple[float, FloatArray]]:
        """The newest stamps and poses, newest first."""
        steps = self._steps[: -count - 1 : -1]
        starts = np.array([keyframes[s.keyframe_id].pose for s in steps]).reshape(-1, 4, 4)
        poses = orthonormal(starts @ np.array([s.step for s in steps]).reshape(-1, 4, 4))
        return list(zip((s.stamp for s in steps), poses, strict=True))

    def poses(
        self, keyframes: KeyframeBuffer, max_poses: int | None = None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Stamps (K,) and poses (K, 4, 4), oldest first, with the current keyframe poses.

        max_poses: return at most this many, evenly spaced.
        """
        steps = self._steps[:: 1 if max_poses is None else max(1, -(-len(self) // max_poses))]
        stamps = np.array([s.stamp for s in steps], dtype=np.float64)
        starts = np.array([keyframes[s.keyframe_id].pose for s in steps]).reshape(-1, 4, 4)
        steps_only = np.array([s.step for s in steps]).reshape(-1, 4, 4)
        return stamps, np.asarray(orthonormal(starts @ steps_only), dtype=np.float64)
