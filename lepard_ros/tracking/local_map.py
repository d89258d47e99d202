# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The local map: the newest clouds and the nearest keyframes, merged into the target for aligning live clouds."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.tracking.compiled import Shape, align_shapes, target_shape_of
from lepard_ros.tracking.keyframe_map import MAX_HOPS, KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, view_distances
from lepard_ros.tracking.views import View

# Tuned on TUM fr1_desk: motion after which a cloud joins the local map, and the number of clouds in it.
STEP = 0.1  # metres
STEP_DEGREES = 7.0
CLOUDS = 10
PIECES = 100  # clouds that are kept, about 0.1 MB each


class _Piece(NamedTuple):
    """A tracked cloud: points (n, 3) and pose (4, 4) relative to a keyframe, so that it moves with the keyframe."""

    keyframe_id: int
    step: FloatArray
    points: FloatArray


class LocalMap:
    """A fixed number of clouds around the sensor, merged in the frame of the newest one."""

    def __init__(self, keyframe_map: KeyframeMap) -> None:
        """A local map for a sensor in this map."""
        self._map, self._keyframes = keyframe_map, keyframe_map.keyframes
        self._pieces: deque[_Piece] = deque(maxlen=PIECES)
        self._base: FloatArray | None = None  # pose of the sensor when the surface was merged
        self._shape: Shape | None = None

    def align(self, view: View, guesses: Sequence[FloatArray], near: Keyframe, wide: bool) -> FloatArray:
        """Align a live cloud from initial guesses; return its pose (4, 4) in the map.

        near: a keyframe in this part of the map. wide: the guesses may be far off.
        """
        if self._shape is None or self._base is None:
            self._base, self._shape = guesses[0], self._merged(guesses[0], near)
        back = invert(self._base)
        return self._base @ align_shapes(view.shape, self._shape, [back @ guess for guess in guesses], wide)

    def note(self, view: View, keyframe: Keyframe, step: FloatArray) -> None:
        """Add a tracked cloud if the sensor has moved far enough; step: (4, 4), its pose in the keyframe's frame."""
        pose = keyframe.pose @ step
        distance, turn = motion_between(self._base, pose) if self._base is not None else (np.inf, np.inf)
        if distance > STEP or turn > STEP_DEGREES:
            self._pieces.append(_Piece(keyframe.id, step, view.surface.points))
            self.forget_surface()

    def forget_surface(self) -> None:
        """Merge again before the next alignment, because the map was corrected or the sensor has moved."""
        self._base = self._shape = None

    def _merged(self, pose: FloatArray, near: Keyframe) -> Shape:
        """The clouds with the views closest to a pose, merged on one grid in the frame of that pose.

        Keyframes more than MAX_HOPS edges away from `near` may have drifted relative to it and would blur the surface.
        """
        connected = self._map.graph.around(near.id, MAX_HOPS)
        kept = [piece for piece in self._pieces if piece.keyframe_id in self._keyframes]
        clouds: list[tuple[FloatArray, FloatArray]] = [
            (self._keyframes[piece.keyframe_id].pose @ piece.step, piece.points) for piece in kept
        ]
        frames = (self._keyframes[node] for node in sorted(connected) if node in self._keyframes)
        clouds += [(frame.pose, frame.surface.points) for frame in frames]
        order = np.argsort(view_distances(np.array([place for place, _ in clouds]), pose), kind="stable")[:CLOUDS]
        back = invert(pose)
        merged = np.concatenate([move(back @ clouds[index][0], clouds[index][1]) for index in order])
        return target_shape_of(merged, self._map.spacing)
