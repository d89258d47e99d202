# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The map: keyframes, the motions measured between them, and the path of the sensor, corrected together."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from lepard_ros.cloud.grid import grid_subsample
from lepard_ros.registration.kabsch import invert, move
from lepard_ros.registration.rigid import RigidSettings
from lepard_ros.registration.types import FloatArray, Registration
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer
from lepard_ros.tracking.path import SensorPath
from lepard_ros.tracking.pose_graph import Edge, PoseGraph
from lepard_ros.tracking.poses import motion_between, orthonormal
from lepard_ros.tracking.prior import NO_MATCHES, align_from_guesses, followed
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

LEAST_SHARED = 0.25  # predicted overlap from which two keyframes are worth an edge
TIED = 3  # edges between two keyframes of one part of the map
# How far a loop may contradict the map so far: the drift that a tracker can have gathered.
LOOP_DRIFT = 0.3  # metres, at any distance
LOOP_DRIFT_PER_STEP = 0.03  # metres for every keyframe in between
LOOP_DRIFT_DEGREES = 20.0


class KeyframeMap:
    """Keyframes with a pose graph and the sensor's path."""

    def __init__(self, matcher: "Matcher", settings: TrackerSettings, rigid: RigidSettings) -> None:
        """An empty map."""
        self._matcher, self._settings, self._rigid = matcher, settings, rigid
        self.spacing = settings.surface_spacing
        self.keyframes = KeyframeBuffer(settings.max_keyframes, settings.max_megabytes * 1e6)
        self.graph = PoseGraph()
        self.path = SensorPath(settings.max_path)

    def begin(self, view: View, stamp: float) -> Keyframe:
        """Start a map: its origin is where this cloud was seen."""
        return self._add(view, stamp, np.eye(4), np.zeros((6, 6)))

    def insert(
        self,
        view: View,
        stamp: float,
        seen_from: Keyframe,
        registration: Registration,
        covariance: FloatArray,
    ) -> tuple[Keyframe, bool]:
        """Add a keyframe that was registered to another one; says whether a loop was closed with it."""
        if registration.transform is None or registration.covariance is None:
            raise ValueError("a keyframe needs an accepted registration")
        frame = self._add(view, stamp, orthonormal(seen_from.pose @ registration.transform), covariance)
        self.graph.add(Edge(frame.id, seen_from.id, registration.transform, registration.covariance))
        edges = self._neighbour_edges(frame, seen_from)
        for edge in edges:
            self.graph.add(edge)
        if edges:
            self._optimise()
        self._evict()
        return frame, any(edge.loop for edge in edges)

    def has_view(self, pose: FloatArray, seen_from: Keyframe) -> bool:
        """Whether another keyframe than the one a cloud was registered to already looks from this pose (4, 4).

        One of a part of the map that is not tied to this one yet does not count: a new keyframe closes the loop.
        """
        near = self.keyframes.nearest(pose)
        distance, turn = motion_between(near.pose, pose)
        close = distance <= self._settings.keyframe_distance and turn <= self._settings.keyframe_degrees
        return close and near is not seen_from and self.graph.linked(near.id, seen_from.id, TIED)

    def points(self, spacing: float) -> FloatArray:
        """The whole map on a grid, (N, 3) metres in the map's frame."""
        if not len(self.keyframes):
            return np.zeros((0, 3))
        clouds = [move(frame.pose, frame.surface.points) for frame in self.keyframes]
        (grid,) = grid_subsample(torch.from_numpy(np.concatenate(clouds)), spacing)
        return grid.numpy()

    def _add(self, view: View, stamp: float, pose: FloatArray, covariance: FloatArray) -> Keyframe:
        frame = Keyframe(self.keyframes.next_id, stamp, pose, view, covariance)
        self.keyframes.add(frame)
        return frame

    def _neighbour_edges(self, frame: Keyframe, known: Keyframe) -> list[Edge]:
        """Motions from a new keyframe to others that should see the same; to old ones they are loops."""
        if not self._settings.loop_closures:
            return []
        rated = self.keyframes.by_overlap(frame.surface, frame.pose, slack=0.1)
        others = [other for share, other in rated if share > LEAST_SHARED and other not in (frame, known)]
        recent = [other for other in others if not self._is_old(frame, other)][:2]
        old = [other for other in others if self._is_old(frame, other)][: self._settings.loop_candidates]
        measured = [self._aligned(frame, other) for other in recent + old]
        unsure = [other for other, found in zip(recent + old, measured, strict=True) if other in old and not found.ok]
        # The map may have drifted too far for a guess to lead anywhere: then the network has to find the loop.
        matched = self._matcher.register_many(frame.cloud, [other.cloud for other in unsure]) if unsure else []
        found = [*zip(recent + old, measured, strict=True), *zip(unsure, matched, strict=True)]
        return [self._edge(frame, other, motion) for other, motion in found if self._credible(frame, other, motion)]

    def _is_old(self, frame: Keyframe, other: Keyframe) -> bool:
        return frame.id - other.id > self._settings.loop_gap

    def _aligned(self, frame: Keyframe, other: Keyframe) -> Registration:
        guess = invert(other.pose) @ frame.pose
        rule = self._rigid if self._is_old(frame, other) else followed(self._rigid)
        return align_from_guesses(frame.surface, other.surface, guess[None], NO_MATCHES, rule)

    def _edge(self, frame: Keyframe, other: Keyframe, motion: Registration) -> Edge:
        if motion.transform is None or motion.covariance is None:
            raise ValueError("an edge needs an accepted registration")
        return Edge(frame.id, other.id, motion.transform, motion.covariance, self._is_old(frame, other))

    def _credible(self, frame: Keyframe, other: Keyframe, motion: Registration) -> bool:
        """Whether a motion was accepted and contradicts the map by no more than drift can explain."""
        if motion.transform is None:
            return False
        distance, turn = motion_between(frame.pose, other.pose @ motion.transform)
        return distance < LOOP_DRIFT + LOOP_DRIFT_PER_STEP * (frame.id - other.id) and turn < LOOP_DRIFT_DEGREES

    def _optimise(self) -> None:
        poses = {frame.id: frame.pose for frame in self.keyframes}
        corrected = self.graph.optimised(poses)
        covariances = self.graph.covariances(corrected)
        for frame in self.keyframes:
            frame.pose = orthonormal(corrected[frame.id])
            frame.covariance = covariances.get(frame.id, frame.covariance)

    def _evict(self) -> None:
        """Remove keyframes until the buffer is within its bounds."""
        while (gone := self.keyframes.evictable()) is not None:
            self.keyframes.remove(gone.id)
            self.path.rebase(gone, self.keyframes.nearest(gone.pose))
            self.graph.remove_node(gone.id)
