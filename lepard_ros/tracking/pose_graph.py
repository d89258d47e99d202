# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The pose graph: relative motions between keyframes, and its optimisation."""

import heapq
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import compose_covariance, invert_covariance_frame
from lepard_ros.geometry.rigid_motion import invert

# Open3D weights an edge by its number of corresponding points; we assume a point accuracy of one centimetre.
POINT_SIGMA = 0.01
# A loop that contradicts the other edges by much more than this is treated as an outlier and loses its weight (metres).
# It must exceed the drift that a loop has to correct.
LOOP_TOLERANCE = 0.5
# Added to every variance (square metres, square radians), so that a singular covariance can be inverted.
MIN_VARIANCE = 1e-8


@dataclass(frozen=True)
class Edge:
    """A measured motion between two keyframes: `transform` (4, 4) maps the source's frame to the target's.

    covariance: (6, 6) of [translation, rotation vector] in the target's frame. loop: a loop closure, may be an outlier.
    """

    source: int
    target: int
    transform: FloatArray
    covariance: FloatArray
    loop: bool = False

    def reversed(self) -> "Edge":
        """The same measurement in the opposite direction."""
        covariance = invert_covariance_frame(self.transform, self.covariance)
        return Edge(self.target, self.source, invert(self.transform), covariance, self.loop)


@dataclass
class PoseGraph:
    """Edges between keyframes."""

    edges: list[Edge] = field(default_factory=list)

    def add(self, edge: Edge) -> None:
        """Add a measurement."""
        self.edges.append(edge)

    def remove_node(self, node: int) -> None:
        """Remove a keyframe and connect its neighbours, so that the graph stays connected."""
        ends = [edge if edge.target == node else edge.reversed() for edge in self.edges if node in _ends(edge)]
        self.edges = [edge for edge in self.edges if node not in _ends(edge)]
        if not ends:
            return
        hub = min(ends, key=lambda edge: float(np.trace(edge.covariance)))
        for edge in ends:
            if edge.source != hub.source:
                self.edges.append(_chain(edge, hub.reversed()))

    def around(self, node: int, hops: int) -> set[int]:
        """The keyframes within `hops` edges of a keyframe, itself included."""
        links: dict[int, set[int]] = {}
        for edge in self.edges:
            links.setdefault(edge.source, set()).add(edge.target)
            links.setdefault(edge.target, set()).add(edge.source)
        reached = {node}
        for _ in range(hops):
            reached = reached.union(*(links.get(one, ()) for one in reached))
        return reached

    def optimised(self, poses: dict[int, FloatArray]) -> dict[int, FloatArray]:
        """Optimise poses (4, 4), given by id, over all edges; the first one stays fixed."""
        o3d = import_open3d().pipelines.registration
        order = {node: index for index, node in enumerate(poses)}
        graph = o3d.PoseGraph()
        for pose in poses.values():
            graph.nodes.append(o3d.PoseGraphNode(pose))
        information = [_information(edge) for edge in self.edges]
        for edge, weight in zip(self.edges, information, strict=True):
            ends = order[edge.source], order[edge.target]
            graph.edges.append(o3d.PoseGraphEdge(*ends, edge.transform, weight, uncertain=edge.loop))
        option = o3d.GlobalOptimizationOption(
            max_correspondence_distance=_tolerance(information) if information else LOOP_TOLERANCE,
            edge_prune_threshold=0.25,
            preference_loop_closure=1.0,
            reference_node=0,
        )
        criteria = o3d.GlobalOptimizationConvergenceCriteria()
        method = o3d.GlobalOptimizationLevenbergMarquardt()
        with _quiet(import_open3d()):
            o3d.global_optimization(graph, method, criteria, option)
        anchor = next(iter(poses.values())) @ invert(np.array(graph.nodes[0].pose))
        return {node: anchor @ np.array(graph.nodes[index].pose) for node, index in order.items()}

    def covariances(self, poses: dict[int, FloatArray]) -> dict[int, FloatArray]:
        """The covariance (6, 6) of every pose, along the least uncertain chain of edges from the first one."""
        root = next(iter(poses))
        steps = self._steps()
        found: dict[int, FloatArray] = {}
        ticket = itertools.count()  # breaks ties: arrays cannot be compared
        queue: list[tuple[float, int, int, FloatArray]] = [(0.0, next(ticket), root, np.zeros((6, 6)))]
        while queue:
            _, _, node, covariance = heapq.heappop(queue)
            if node in found:
                continue
            found[node] = covariance
            for edge in steps.get(node, []):
                if edge.source not in found:
                    step = compose_covariance(poses[node], covariance, edge.transform, edge.covariance)
                    heapq.heappush(queue, (float(np.trace(step)), next(ticket), edge.source, step))
        return found

    def _steps(self) -> dict[int, list[Edge]]:
        """For each node, the edges that have it as target."""
        steps: dict[int, list[Edge]] = {}
        for edge in self.edges:
            steps.setdefault(edge.target, []).append(edge)
            steps.setdefault(edge.source, []).append(edge.reversed())
        return steps


def _ends(edge: Edge) -> tuple[int, int]:
    return edge.source, edge.target


def _chain(first: Edge, second: Edge) -> Edge:
    """The motion from the source of `first` to the target of `second`, through the node they share."""
    transform = second.transform @ first.transform
    covariance = compose_covariance(second.transform, second.covariance, first.transform, first.covariance)
    return Edge(first.source, second.target, transform, covariance, first.loop or second.loop)


def _information(edge: Edge) -> FloatArray:
    """Open3D's weight (6, 6) of an edge: the inverse of its covariance, rotation first, in the source's frame.

    Open3D measures the error as inv(measured) @ current, so in the source's frame; our covariance is in the target's.
    """
    into_source = np.zeros((6, 6))
    into_source[:3, 3:] = into_source[3:, :3] = edge.transform[:3, :3].T  # [translation, rotation] -> [rotation, ...]
    covariance = into_source @ edge.covariance @ into_source.T
    return POINT_SIGMA**2 * np.linalg.inv(covariance + MIN_VARIANCE * np.eye(6))


def _tolerance(information: list[FloatArray]) -> float:
    """The `max_correspondence_distance` (metres) with which Open3D applies LOOP_TOLERANCE in every direction.

    Open3D scales it by the mean of the last diagonal entries: the weight along z, which may not be typical.
    """
    along_z = np.mean([weight[5, 5] for weight in information])
    all_directions = np.mean([np.trace(weight[3:, 3:]) / 3 for weight in information])
    return LOOP_TOLERANCE * float(np.sqrt(all_directions / along_z))


def _quiet(o3d: Any) -> Any:
    """A context in which Open3D prints nothing."""
    return o3d.utility.VerbosityContextManager(o3d.utility.VerbosityLevel.Error)
