# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The map: keyframes, the relative motions between them, and the trajectory of the sensor."""

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

SURFACE_SPACING = 0.03  # metres: alignment grid when the network uses its own grid
# A cloud of a desk has 6,000 cells of that size, one of a room 8,000 to 14,000, and tracking time grows with them. A
# sensor whose first cloud has more than MAX_CELLS gets a coarser grid. In a rendered room 3.0 and 4.2 cm have the same
# error (0.7 cm), in 54 and 32 ms. Only these two grids are tested in a bare corridor (`test_tracking_corridor.py`).
MAX_CELLS, COARSER = 7_000, 1.4
MAX_PATH = 100_000  # newest poses that are kept: an hour at 27 Hz
MAX_HOPS = 3  # keyframes within this many edges belong to one part of the map
# A loop that agrees with the map within these limits only adds an edge. Smaller corrections would replace the local
# map's accuracy by that of two single views (on TUM fr1_desk the trajectory error doubled).
CONTRADICTION = 0.15  # metres
CONTRADICTION_DEGREES = 6.0
MAX_UNCONFIRMED = 8  # newest edges that wait for confirmation


class Correction(NamedTuple):
    """Optimised poses (4, 4) and covariances (6, 6) by keyframe id."""

    poses: dict[int, FloatArray]
    covariances: dict[int, FloatArray]


def alignment_spacing(points: FloatArray, scale: float) -> float:
    """The alignment grid in metres for a sensor whose first cloud is points (N, 3).

    scale: encoding grid in multiples of the network's own grid; a coarser one makes the alignment grid coarser too.
    """
    spacing = SURFACE_SPACING * max(scale, 1.0)
    (cells,) = grid_subsample(torch.from_numpy(np.ascontiguousarray(points, dtype=np.float32)), spacing)
    return spacing * COARSER if len(cells) > MAX_CELLS else spacing


class KeyframeMap:
    """Keyframes with a pose graph and the sensor's path."""

    def __init__(self, settings: TrackerSettings) -> None:
        """An empty map."""
        self.settings = settings
        self.spacing = SURFACE_SPACING
        self.grid: float | None = None  # metres, for encoding; chosen with the first cloud
        self.keyframes = KeyframeBuffer(settings.max_keyframes, settings.max_megabytes * 1e6)
        self.graph = PoseGraph()
        self.path = SensorPath(MAX_PATH)
        self._unconfirmed: list[Edge] = []  # edges that contradict the map and await confirmation

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
        """Add edges whose keyframes still exist, and return them."""
        kept = self._existing(edges)
        for edge in kept:
            self.graph.add(edge)
        return kept

    def confirmed(self, edges: list[Edge]) -> list[Edge]:
        """New edges that may be added: they agree with the map, or an independent edge implies the same correction.

        A single measurement never moves the map: an edge without support waits for a second one. Edges that share a
        keyframe are not independent: what misleads the alignment of one view does so in both.
        """
        agreeing = [edge for edge in self._existing(edges) if not self.contradicts(edge)]
        others = [edge for edge in self._existing([*self._unconfirmed, *edges]) if self.contradicts(edge)]
        supported = [any(self._agree(edge, other) for other in others if _independent(edge, other)) for edge in others]
        pairs = list(zip(others, supported, strict=True))
        self._unconfirmed = [edge for edge, has_support in pairs if not has_support][-MAX_UNCONFIRMED:]
        return agreeing + [edge for edge, has_support in pairs if has_support]

    def _existing(self, edges: list[Edge]) -> list[Edge]:
        return [edge for edge in edges if edge.source in self.keyframes and edge.target in self.keyframes]

    def contradicts(self, edge: Edge) -> bool:
        """Whether an edge differs from the current poses by more than alignment error."""
        distance, turn = motion_between(self._implied_pose(edge), self.keyframes[edge.source].pose)
        return distance > CONTRADICTION or turn > CONTRADICTION_DEGREES

    def _implied_pose(self, edge: Edge) -> FloatArray:
        """The pose (4, 4) that an edge implies for its source."""
        return self.keyframes[edge.target].pose @ edge.transform

    def _agree(self, edge: Edge, other: Edge) -> bool:
        """Whether two edges imply the same correction, within half the contradiction limits."""
        shift = self._implied_pose(other) @ invert(self.keyframes[other.source].pose)
        distance, turn = motion_between(self._implied_pose(edge), shift @ self.keyframes[edge.source].pose)
        return distance < CONTRADICTION / 2 and turn < CONTRADICTION_DEGREES / 2

    def correction(self) -> Callable[[], "Correction"]:
        """A job that optimises a snapshot of the map in the background; its result goes to `correct`."""
        graph = PoseGraph(list(self.graph.edges))
        poses = {frame.id: frame.pose for frame in self.keyframes}
        return lambda: _optimised(graph, poses)

    def correct(self, correction: "Correction") -> None:
        """Apply optimised poses; keyframes added since the snapshot move with their predecessor."""
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
        """Whether a keyframe other than `seen_from` already covers this pose (4, 4).

        Keyframes that are not connected to `seen_from` do not count: there a new keyframe can close the loop.
        """
        near = self.keyframes.nearest(pose)
        distance, turn = motion_between(near.pose, pose)
        close = distance <= self.settings.keyframe_distance and turn <= self.settings.keyframe_degrees
        return close and near is not seen_from and near.id in self.graph.around(seen_from.id, MAX_HOPS)

    def points(self, spacing: float) -> FloatArray:
        """The map as one downsampled cloud (N, 3), metres in the map frame."""
        if not len(self.keyframes):
            return np.zeros((0, 3))
        clouds = [move(frame.pose, frame.surface.points) for frame in self.keyframes]
        (grid,) = grid_subsample(torch.from_numpy(np.concatenate(clouds)), spacing)
        return grid.numpy()

    def _add(self, view: View, stamp: float, pose: FloatArray, covariance: FloatArray) -> Keyframe:
        view.drop_live_data()
        frame = Keyframe(self.keyframes.next_id, stamp, pose, view, covariance)
        self.keyframes.add(frame)
        return frame

    def _evict(self) -> None:
        """Remove keyframes until the buffer is within its limits."""
        while (gone := self.keyframes.evictable()) is not None:
            self.keyframes.remove(gone.id)
            self.path.rebase(gone, self.keyframes.nearest(gone.pose))
            self.graph.remove_node(gone.id)


def _independent(edge: Edge, other: Edge) -> bool:
    """Whether two edges have no keyframe in common."""
    return not {edge.source, edge.target} & {other.source, other.target}


def _optimised(graph: PoseGraph, poses: dict[int, FloatArray]) -> Correction:
    corrected = graph.optimised(poses)
    return Correction(corrected, graph.covariances(corrected))
