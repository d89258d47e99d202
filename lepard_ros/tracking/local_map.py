# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The surface around the sensor: the newest clouds and the nearest keyframes, merged, for live clouds to align to."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.tracking.compiled import Shape, align_shapes, shape_of
from lepard_ros.tracking.keyframe_map import TIED, KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, view_distances
from lepard_ros.tracking.views import View

# Tuned on TUM fr1_desk: a cloud joins the local map beyond one of these, and so many clouds make it up.
STEP = 0.1  # metres
STEP_DEGREES = 7.0
CLOUDS = 10
PIECES = 100  # clouds that are remembered, about 0.1 MB each


class _Piece(NamedTuple):
    """A tracked cloud: its points (n, 3), and its pose (4, 4) in the frame of a keyframe, with which it moves."""

    keyframe_id: int
    step: FloatArray
    points: FloatArray


class LocalMap:
    """A bounded number of clouds around the sensor, merged in the frame of the newest one."""

    def __init__(self, keyframe_map: KeyframeMap) -> None:
        """Around a sensor that moves in this map."""
        self._map, self._keyframes = keyframe_map, keyframe_map.keyframes
        self._pieces: deque[_Piece] = deque(maxlen=PIECES)
        self._base: FloatArray | None = None  # the pose of the sensor when the surface was merged
        self._shape: Shape | None = None

    def align(self, view: View, guesses: Sequence[FloatArray], near: Keyframe, wide: bool) -> FloatArray:
        """The pose (4, 4) of a live cloud in the map, from guesses of it; near: a keyframe in this part of the map.

        wide: the guesses may be far off.
        """
        if self._shape is None or self._base is None:
            self._base, self._shape = guesses[0], self._merged(guesses[0], near)
        back = invert(self._base)
        return self._base @ align_shapes(view.shape, self._shape, [back @ guess for guess in guesses], wide)

    def note(self, view: View, keyframe: Keyframe, step: FloatArray) -> None:
        """Take in a tracked cloud if the sensor has moved on; step: (4, 4), its pose in the keyframe's frame."""
        pose = keyframe.pose @ step
        distance, turn = motion_between(self._base, pose) if self._base is not None else (np.inf, np.inf)
        if distance > STEP or turn > STEP_DEGREES:
            self._pieces.append(_Piece(keyframe.id, step, view.surface.points))
            self.forget_surface()

    def forget_surface(self) -> None:
        """Merge again before the next cloud: the map was corrected, or the sensor moved on."""
        self._base = self._shape = None

    def _merged(self, pose: FloatArray, near: Keyframe) -> Shape:
        """The clouds whose views are most like that of a pose, on one grid in the frame of that pose.

        Keyframes that no short chain of edges ties to `near` may have drifted away from it and would blur the surface.
        """
        tied = self._map.graph.around(near.id, TIED)
        kept = [piece for piece in self._pieces if piece.keyframe_id in self._keyframes]
        clouds: list[tuple[FloatArray, FloatArray]] = [
            (self._keyframes[piece.keyframe_id].pose @ piece.step, piece.points) for piece in kept
        ]
        frames = (self._keyframes[node] for node in sorted(tied) if node in self._keyframes)
        clouds += [(frame.pose, frame.surface.points) for frame in frames]
        order = np.argsort(view_distances(np.array([place for place, _ in clouds]), pose), kind="stable")[:CLOUDS]
        back = invert(pose)
        merged = np.concatenate([move(back @ clouds[index][0], clouds[index][1]) for index in order])
        return shape_of(merged, self._map.spacing)
