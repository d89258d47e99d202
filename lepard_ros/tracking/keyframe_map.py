# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The map: keyframes, the motions measured between them, and the path of the sensor, corrected together."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between, orthonormal
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer
from lepard_ros.tracking.path import SensorPath
from lepard_ros.tracking.pose_graph import Edge, PoseGraph
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

SURFACE_SPACING = 0.03  # metres: of the grid on which clouds are aligned, for the network's own grid
MAX_PATH = 100_000  # poses, the newest: an hour at 27 Hz
TIED = 3  # edges between two keyframes of one part of the map
# A loop within this of the current map only ties the keyframes together. Correcting by less would trade the local
# map's accuracy for that of two single views (on TUM fr1_desk the error of the path doubled).
CONTRADICTION = 0.15  # metres
CONTRADICTION_DEGREES = 6.0
WAITING = 8  # edges that wait for a second one: the newest


class Correction(NamedTuple):
    """Poses (4, 4) and covariances (6, 6) by keyframe, as the pose graph has them."""

    poses: dict[int, FloatArray]
    covariances: dict[int, FloatArray]


class KeyframeMap:
    """Keyframes with a pose graph and the sensor's path."""

    def __init__(self, settings: TrackerSettings) -> None:
        """An empty map."""
        self.settings = settings
        self.spacing = SURFACE_SPACING
        self.grid: float | None = None  # metres, on which its clouds are encoded: chosen with the first one
        self.keyframes = KeyframeBuffer(settings.max_keyframes, settings.max_megabytes * 1e6)
        self.graph = PoseGraph()
        self.path = SensorPath(MAX_PATH)
        self._waiting: list[Edge] = []  # edges that contradict the map and that no other bears out yet

    def begin(self, view: View, stamp: float, pose: FloatArray) -> Keyframe:
        """Start a map with a cloud whose pose (4, 4) in the map is known by definition."""
        return self._add(view, stamp, pose, np.zeros((6, 6)))

    def insert(
        self, view: View, stamp: float, seen_from: Keyframe, registration: Registration, covariance: FloatArray
    ) -> Keyframe:
        """Add a keyframe that was registered to another one."""
        if registration.transform is None or registration.covariance is None:
            raise ValueError("a keyframe needs an accepted registration")
        frame = self._add(view, stamp, orthonormal(seen_from.pose @ registration.transform), covariance)
        self.graph.add(Edge(frame.id, seen_from.id, registration.transform, registration.covariance))
        self._evict()
        return frame

    def add_edges(self, edges: list[Edge]) -> list[Edge]:
        """Add measured motions between keyframes that are still here, and return those."""
        kept = self._still_here(edges)
        for edge in kept:
            self.graph.add(edge)
        return kept

    def borne_out(self, edges: list[Edge]) -> list[Edge]:
        """New edges that may be added: those that agree with the map, and those that contradict it as another one does.

        One look is never enough to move the map: an edge that stands alone waits for a second one.
        """
        agreeing = [edge for edge in self._still_here(edges) if not self.contradicts(edge)]
        others = [edge for edge in self._still_here([*self._waiting, *edges]) if self.contradicts(edge)]
        sure = [any(self._agree(edge, other) for other in others if other is not edge) for edge in others]
        self._waiting = [edge for edge, is_sure in zip(others, sure, strict=True) if not is_sure][-WAITING:]
        return agreeing + [edge for edge, is_sure in zip(others, sure, strict=True) if is_sure]

    def _still_here(self, edges: list[Edge]) -> list[Edge]:
        return [edge for edge in edges if edge.source in self.keyframes and edge.target in self.keyframes]

    def contradicts(self, edge: Edge) -> bool:
        """Whether an edge disagrees with the poses by more than two alignments of one surface do."""
        distance, turn = motion_between(self._claimed(edge), self.keyframes[edge.source].pose)
        return distance > CONTRADICTION or turn > CONTRADICTION_DEGREES

    def _claimed(self, edge: Edge) -> FloatArray:
        """Where an edge puts its source, (4, 4)."""
        return self.keyframes[edge.target].pose @ edge.transform

    def _agree(self, edge: Edge, other: Edge) -> bool:
        """Whether two edges of different keyframes ask for the same correction, up to half of a contradiction."""
        shift = self._claimed(other) @ invert(self.keyframes[other.source].pose)
        distance, turn = motion_between(self._claimed(edge), shift @ self.keyframes[edge.source].pose)
        return distance < CONTRADICTION / 2 and turn < CONTRADICTION_DEGREES / 2

    def correction(self) -> Callable[[], "Correction"]:
        """The work of optimising the map as it is now, to be done elsewhere; the answer goes to `correct`."""
        graph = PoseGraph(list(self.graph.edges))
        poses = {frame.id: frame.pose for frame in self.keyframes}
        return lambda: _optimised(graph, poses)

    def correct(self, correction: "Correction") -> None:
        """Move the keyframes; those added since the optimisation began go along with the one before them."""
        shift = np.eye(4)
        for frame in self.keyframes:
            if frame.id in correction.poses:
                corrected = correction.poses[frame.id]
                shift = corrected @ invert(frame.pose)
                frame.pose = orthonormal(corrected)
                frame.covariance = correction.covariances.get(frame.id, frame.covariance)
            else:
                frame.pose = orthonormal(shift @ frame.pose)

    def has_view(self, pose: FloatArray, seen_from: Keyframe) -> bool:
        """Whether another keyframe than the one a cloud was registered to already looks from this pose (4, 4).

        One of a part of the map that is not tied to this one yet does not count: a new keyframe closes the loop.
        """
        near = self.keyframes.nearest(pose)
        distance, turn = motion_between(near.pose, pose)
        close = distance <= self.settings.keyframe_distance and turn <= self.settings.keyframe_degrees
        return close and near is not seen_from and near.id in self.graph.around(seen_from.id, TIED)

    def points(self, spacing: float) -> FloatArray:
        """The whole map on a grid, (N, 3) metres in the map's frame."""
        if not len(self.keyframes):
            return np.zeros((0, 3))
        clouds = [move(frame.pose, frame.surface.points) for frame in self.keyframes]
        (grid,) = grid_subsample(torch.from_numpy(np.concatenate(clouds)), spacing)
        return grid.numpy()

    def _add(self, view: View, stamp: float, pose: FloatArray, covariance: FloatArray) -> Keyframe:
        view.settle()
        frame = Keyframe(self.keyframes.next_id, stamp, pose, view, covariance)
        self.keyframes.add(frame)
        return frame

    def _evict(self) -> None:
        """Remove keyframes until the buffer is within its bounds."""
        while (gone := self.keyframes.evictable()) is not None:
            self.keyframes.remove(gone.id)
            self.path.rebase(gone, self.keyframes.nearest(gone.pose))
            self.graph.remove_node(gone.id)


def _optimised(graph: PoseGraph, poses: dict[int, FloatArray]) -> Correction:
    corrected = graph.optimised(poses)
    return Correction(corrected, graph.covariances(corrected))
