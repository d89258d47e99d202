# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The canonical model of a bending thing: points in its rest shape, and the graph that bends them.

The rest shape is the first cloud. Each accepted warp brings the model to a live cloud; there it is compared, corrected,
extended and, where the sensor looked through it, cut back. Everything is stored in the rest shape.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.spatial import cKDTree

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.graph import BoolArray, DeformationGraph, GraphSettings, build_graph
from lepard_ros.registration.nonrigid import local_motions
from lepard_ros.registration.normal_equations import Motion
from lepard_ros.registration.types import FloatArray, Matches, Status, Surface
from lepard_ros.registration.warp import Warp, edge_stretch


@dataclass(frozen=True)
class ModelSettings:
    """How the model is kept. Lengths in metres.

    spacing: of its points. fuse_reach: a live point this near to the model corrects it. grow_reach: a live point
    farther than fuse_reach, but not than this, is new surface. steady: observations after which a point no longer
    yields. doubts: clouds in a row that must look through a point before it goes. tears: clouds that a cut edge
    must stay torn, that is stretched beyond `healed`, to be cut for good; wrong matches tear for one cloud, after which
    the edge is put back. most_points, most_nodes: bounds.
    """

    graph: GraphSettings = field(default_factory=lambda: GraphSettings(coverage=0.025))
    spacing: float = 0.01
    fuse_reach: float = 0.015
    grow_reach: float = 0.04
    steady: int = 20
    doubts: int = 3
    tears: int = 3
    healed: float = 1.25
    most_points: int = 60_000
    most_nodes: int = 4_000
    free_space: FreeSpaceSettings = field(default_factory=lambda: FreeSpaceSettings(cells=256, margin=0.04))


class Change(NamedTuple):
    """What one cloud changed: points fused, added and removed, nodes added, edges cut."""

    fused: int = 0
    added: int = 0
    removed: int = 0
    nodes: int = 0
    cut: int = 0


class CanonicalModel:
    """Points (N, 3) in the rest shape with how often each was seen, the graph over them, and the last warp."""

    def __init__(self, points: FloatArray, settings: ModelSettings) -> None:
        """Begin with a first cloud (N, 3), which is the rest shape; scraps that no graph can carry are left out."""
        self.settings = settings
        thinned = thin(points, settings.spacing)
        graph = build_graph(thinned, settings.graph)
        self.points = thinned[graph.skin(thinned).covered]
        self._seen = np.ones(len(self.points))
        self._doubt = np.zeros(len(self.points), dtype=np.int64)
        self._torn = False
        self._wounds: dict[tuple[bytes, bytes], int] = {}  # edges that are cut, and for how many clouds
        self.warp = Warp.rest(graph, Status.OK)

    @property
    def graph(self) -> DeformationGraph:
        """The graph over the model's points."""
        return self.warp.graph

    def update(self, warp: Warp, live: FloatArray) -> Change:
        """Take over an accepted warp and what the live cloud (L, 3) adds, corrects and contradicts."""
        self.warp = warp = self._mind_wounds(warp)
        live = thin(live, self.settings.spacing)
        normals = surface_normals(live)
        warped, covered = warp.apply(self.points)
        fused = self._fuse(warped, covered, live, normals)
        added = self._grow(warped, covered, live)
        removed = self._drop_contradicted(warped, covered, Surface(live, normals, self.settings.spacing), fused)
        nodes = self._extend_graph() if added else 0
        return Change(int(fused.sum()), added, removed, nodes, warp.cut_edges)

    def _mind_wounds(self, warp: Warp) -> Warp:
        """The warp with the edges back that are no longer torn; its cut_edges are those that now are cut for good.

        An edge is known by the places of its nodes: their numbers change when the graph grows.
        """
        self._wounds |= dict.fromkeys(_names(self.graph) - _names(warp.graph), 0)
        if not self._wounds:
            return replace(warp, cut_edges=0)
        number = {node.tobytes(): index for index, node in enumerate(warp.graph.nodes)}
        wounds = [name for name in self._wounds if name[0] in number and name[1] in number]
        edges = np.array([[number[end] for end in name] for name in wounds], dtype=np.int64).reshape(-1, 2)
        closed = edge_stretch(replace(warp.graph, edges=edges), warp.translations) < self.settings.healed
        open_for = {name: self._wounds[name] + 1 for name, heals in zip(wounds, closed, strict=True) if not heals}
        self._wounds = {name: clouds for name, clouds in open_for.items() if clouds < self.settings.tears}
        cut = len(open_for) - len(self._wounds)
        self._torn |= cut > 0
        whole = np.unique(np.concatenate([warp.graph.edges, edges[closed]]), axis=0)
        return replace(warp, graph=replace(warp.graph, edges=whole), cut_edges=cut)

    def _fuse(self, warped: FloatArray, covered: BoolArray, live: FloatArray, normals: FloatArray) -> BoolArray:
        """Correct the points that the live cloud sees, along its normals; (N,) which they are."""
        distance, index = cKDTree(live).query(warped)
        seen = covered & (distance < self.settings.fuse_reach)
        normal = normals[index[seen]]
        offset = np.sum((live[index[seen]] - warped[seen]) * normal, axis=1)
        share = offset / (np.minimum(self._seen[seen], self.settings.steady) + 1)
        self.points[seen] += _turned_back(self.warp, self.points[seen], share[:, None] * normal)
        self._seen[seen] += 1
        return seen

    def _grow(self, warped: FloatArray, covered: BoolArray, live: FloatArray) -> int:
        """Add live points beside the model, carried back to the rest shape."""
        room = self.settings.most_points - len(self.points)
        if room <= 0 or not covered.any():
            return 0
        distance = cKDTree(warped[covered]).query(live)[0]
        new = np.flatnonzero((distance > self.settings.fuse_reach) & (distance < self.settings.grow_reach))[:room]
        points = live[new] + self._way_back(live[new]).translation
        # Two poses of one place may both be "new" and fall together in the rest shape.
        points = points[cKDTree(self.points).query(points)[0] > 0.5 * self.settings.spacing]
        self._append(points)
        return len(points)

    def _way_back(self, live: FloatArray) -> Motion:
        """The motion to the rest shape at points beside the model: that of the nodes around.

        The turn of a single node at the rim is too uncertain; its error would grow with every strip of new surface.
        """
        use = self.graph.active
        pairs = Matches(self.warp.moved_nodes[use], self.graph.nodes[use], np.ones(int(use.sum())))
        return local_motions(live, pairs, width=2 * self.settings.graph.coverage)

    def _append(self, points: FloatArray) -> None:
        self.points = np.concatenate([self.points, points])
        self._seen = np.concatenate([self._seen, np.ones(len(points))])
        self._doubt = np.concatenate([self._doubt, np.zeros(len(points), dtype=np.int64)])

    def _drop_contradicted(self, warped: FloatArray, covered: BoolArray, live: Surface, fused: BoolArray) -> int:
        """Remove points that the sensor looked through several times in a row, and how many they were."""
        old = len(warped)
        through = covered & ~fused & conflicts(warped, live, self.settings.free_space)
        self._doubt[:old] = np.where(through, self._doubt[:old] + 1, np.where(fused, 0, self._doubt[:old]))
        keep = self._doubt < self.settings.doubts
        self.points, self._seen, self._doubt = self.points[keep], self._seen[keep], self._doubt[keep]
        return int((~keep).sum())

    def _extend_graph(self) -> int:
        """Spread nodes over points that the graph does not carry; how many were added."""
        missing = ~self.graph.skin(self.points).covered
        beyond = self.graph.nearest_node(self.points)[0] > self.settings.graph.coverage
        if not (missing | beyond).sum() * self.settings.spacing**2 > self.settings.graph.coverage**2:
            return 0  # not a node's worth of new surface
        old = len(self.graph.nodes)
        if old >= self.settings.most_nodes:
            return 0
        on_surface = cKDTree(self.points).query(self.graph.nodes)[0] < self.settings.graph.coverage
        graph = build_graph(self.points, self.settings.graph, keep_nodes=self.graph.nodes[on_surface])
        if self._torn or self._wounds:
            graph = _keep_cuts(graph, self.graph, on_surface, self.settings.graph.fewest_nodes)
        self.warp = self.warp.onto(graph)
        return len(graph.nodes) - int(on_surface.sum())


class Imprint(NamedTuple):
    """Where the model lay in one live cloud: lets points of that cloud be found in the rest shape.

    warped: (N, 3) model points in the live cloud. rest: (N, 3) the same in the rest shape. turn: (N, 3, 3) between.
    """

    warped: FloatArray
    rest: FloatArray
    turn: FloatArray

    def to_rest(self, points: FloatArray, reach: float) -> tuple[FloatArray, BoolArray]:
        """Points (M, 3) of that live cloud in the rest shape, and which of them lie within `reach` of the model."""
        if not len(self.warped):
            return points, np.zeros(len(points), dtype=bool)
        distance, index = cKDTree(self.warped).query(points)
        offset = np.einsum("nji,nj->ni", self.turn[index], points - self.warped[index])
        return self.rest[index] + offset, distance < reach


def imprint(model: CanonicalModel) -> Imprint:
    """The imprint of a model's last warp."""
    warped, covered = model.warp.apply(model.points)
    rest = model.points[covered]
    axes = [model.warp.rotate(rest, np.tile(axis, (len(rest), 1))) for axis in np.eye(3)]
    return Imprint(warped[covered], rest, np.stack(axes, axis=2))


def thin(points: FloatArray, spacing: float) -> FloatArray:
    """One point, the mean, for each occupied cell of a grid; the finite points of any cloud (..., 3)."""
    flat = np.asarray(points, dtype=np.float64).reshape(-1, 3)
    flat = flat[np.isfinite(flat).all(axis=1)]
    _, cell, count = np.unique(np.floor(flat / spacing), axis=0, return_inverse=True, return_counts=True)
    sums = [np.bincount(cell.reshape(-1), flat[:, axis], len(count)) for axis in range(3)]
    return np.stack(sums, axis=1) / count[:, None]


def _names(graph: DeformationGraph) -> set[tuple[bytes, bytes]]:
    """The edges of a graph by the places of their nodes."""
    places = [node.tobytes() for node in graph.nodes]
    return {(places[first], places[second]) for first, second in graph.edges.tolist()}


def _turned_back(warp: Warp, points: FloatArray, vectors: FloatArray) -> FloatArray:
    """Vectors (N, 3) of the live cloud at model points (N, 3), turned to the rest shape."""
    axes = np.stack([warp.rotate(points, np.tile(axis, (len(points), 1))) for axis in np.eye(3)], axis=2)
    return np.einsum("nji,nj->ni", axes, vectors)


def _keep_cuts(grown: DeformationGraph, old: DeformationGraph, kept: BoolArray, fewest: int) -> DeformationGraph:
    """The grown graph without edges between old nodes that were far apart on the old graph: what was cut stays cut.

    kept: (n,) which old nodes are the first nodes of the grown graph.
    """
    count = int(kept.sum())
    number = np.where(kept, np.cumsum(kept) - 1, -1)
    edges = number[old.edges]
    edges = edges[(edges >= 0).all(axis=1)]
    links = sparse.coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(count, count)).tocsr()
    links = links + links.T
    near = links + links @ links + links @ links @ links
    between_old = (grown.edges < count).all(axis=1)
    apart = np.zeros(len(grown.edges), dtype=bool)
    apart[between_old] = np.asarray(near[tuple(grown.edges[between_old].T)]).ravel() == 0
    return grown.without_edges(apart, fewest)
