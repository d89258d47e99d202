# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The canonical model of a bending thing: points in its rest shape, and the graph that bends them.

The rest shape is the first cloud. Each accepted warp brings the model to a live cloud; there it is compared, corrected,
extended and, where the sensor looked through it, cut back. Everything is stored in the rest shape.
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.spatial import cKDTree

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.geometry.arrays import BoolArray, FloatArray, IntArray
from lepard_ros.geometry.voxel_grid import cell_means
from lepard_ros.registration.deformable.fit import local_motions
from lepard_ros.registration.deformable.graph import DeformationGraph, GraphSettings, build_graph
from lepard_ros.registration.deformable.normal_equations import Motion
from lepard_ros.registration.deformable.warp import Warp, edge_stretch
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.types import Matches, Status, Surface


@dataclass(frozen=True)
class ModelSettings:
    """How the model is kept. Lengths in metres.

    spacing: of its points. max_points, max_nodes: bounds.
    min_misses: clouds in a row that must look through a point before it is removed. min_torn: clouds in a row that a
    cut edge must stay torn to be cut for good; wrong matches tear an edge for one cloud, after which it is put back.
    """

    graph: GraphSettings = field(default_factory=lambda: GraphSettings(coverage=0.04))
    spacing: float = 0.01
    min_misses: int = 3
    min_torn: int = 3
    max_points: int = 60_000
    max_nodes: int = 4_000


# Metres: a live point this near to the model corrects it; farther, up to GROW_REACH, it may be new surface beside it.
FUSE_REACH, GROW_REACH = 0.015, 0.05
MAX_STRIPS = 3  # of new surface, each GROW_REACH wide, that one cloud may add
NEW_NODES = 4  # nodes' worth of new surface that make the graph grow
MAX_FUSED = 20  # observations after which a point yields no further to new ones
HEALED_STRETCH = 1.25  # a cut edge that is stretched less than this is no longer torn
MIN_SUPPORT = 0.3  # of the node next to new surface: elsewhere the warp may be wrong, and would add a second surface
FREE_SPACE = FreeSpaceSettings(cells=256, margin=0.04)


class Change(NamedTuple):
    """What one cloud changed: points fused, added and removed, nodes added, edges cut."""

    fused: int = 0
    added: int = 0
    removed: int = 0
    nodes: int = 0
    cut: int = 0


class CanonicalModel:
    """Points (N, 3) in the rest shape with outward normals and how often each was seen, the graph, the last warp."""

    def __init__(self, points: FloatArray, settings: ModelSettings) -> None:
        """Begin with a first cloud (N, 3), which is the rest shape; scraps that no graph can carry are left out."""
        self.settings = settings
        thinned = thin(points, settings.spacing)
        graph = build_graph(thinned, settings.graph)
        covered = graph.skin(thinned).covered
        self.points, self.normals = thinned[covered], surface_normals(thinned)[covered]
        self._seen = np.ones(len(self.points))
        self._misses = np.zeros(len(self.points), dtype=np.int64)
        self._has_cuts = False
        self._torn: dict[tuple[bytes, bytes], int] = {}  # edges that are torn, and for how many clouds
        self.warp = Warp.rest(graph, Status.OK)

    @property
    def graph(self) -> DeformationGraph:
        """The graph over the model's points."""
        return self.warp.graph

    @property
    def surface(self) -> Surface:
        """The points at rest with their outward normals."""
        return Surface(self.points, self.normals, self.settings.spacing)

    def updated(self, warp: Warp, live: FloatArray) -> "tuple[CanonicalModel, Change]":
        """A model that has learnt from a live cloud, and what changed; this one stays as it is."""
        model = copy(self)
        model.points, model._seen = self.points.copy(), self._seen.copy()
        model._misses, model._torn = self._misses.copy(), dict(self._torn)
        return model, model.update(warp, live)

    def update(self, warp: Warp, live: FloatArray) -> Change:
        """Take over an accepted warp and what the live cloud (L, 3) adds, corrects and contradicts."""
        self.warp = warp = self._restore_healed_edges(warp)
        live = thin(live, self.settings.spacing)
        seen = Surface(live, surface_normals(live, neighbours=10), self.settings.spacing)
        warped, covered = warp.apply(self.points)
        fused = self._fuse(warped, covered, seen)
        added = self._grow(warped, covered, seen)
        removed = self._remove_seen_through(warped, covered, seen, fused)
        nodes = self._extend_graph() if added else 0
        return Change(int(fused.sum()), added, removed, nodes, warp.cut_edges)

    def _restore_healed_edges(self, warp: Warp) -> Warp:
        """The warp with the edges back that are no longer torn; its cut_edges are those that now are cut for good.

        An edge is known by the places of its nodes: their numbers change when the graph grows.
        """
        self._torn |= dict.fromkeys(_names(self.graph) - _names(warp.graph), 0)
        if not self._torn:
            return replace(warp, cut_edges=0)
        number = {node.tobytes(): index for index, node in enumerate(warp.graph.nodes)}
        torn = [name for name in self._torn if name[0] in number and name[1] in number]
        edges = np.array([[number[end] for end in name] for name in torn], dtype=np.int64).reshape(-1, 2)
        healed = edge_stretch(replace(warp.graph, edges=edges), warp.translations) < HEALED_STRETCH
        open_for = {name: self._torn[name] + 1 for name, heals in zip(torn, healed, strict=True) if not heals}
        self._torn = {name: clouds for name, clouds in open_for.items() if clouds < self.settings.min_torn}
        cut = len(open_for) - len(self._torn)
        self._has_cuts |= cut > 0
        whole = np.unique(np.concatenate([warp.graph.edges, edges[healed]]), axis=0)
        return replace(warp, graph=replace(warp.graph, edges=whole), cut_edges=cut)

    def _fuse(self, warped: FloatArray, covered: BoolArray, live: Surface) -> BoolArray:
        """Correct the points that the live cloud sees, along its normals; (N,) which they are."""
        distance, index = live.tree.query(warped, distance_upper_bound=FUSE_REACH)
        seen = covered & np.isfinite(distance)
        normal = live.normals[index[seen]]
        offset = np.sum((live.points[index[seen]] - warped[seen]) * normal, axis=1)
        share = offset / (np.minimum(self._seen[seen], MAX_FUSED) + 1)
        self.points[seen] += _turned_back(self.warp, self.points[seen], share[:, None] * normal)
        self._seen[seen] += 1
        return seen

    def _grow(self, warped: FloatArray, covered: BoolArray, live: Surface) -> int:
        """Add live points beside the model, carried back to the rest shape."""
        room = self.settings.max_points - len(self.points)
        if room <= 0 or not covered.any():
            return 0
        new = self._beyond(warped[covered], live)[:room]
        back = self._way_back(live.points[new])
        points = live.points[new] + back.translation
        normals = np.einsum("nij,nj->ni", back.rotation, live.normals[new])
        # Two poses of one place may both be "new" and fall together in the rest shape.
        apart = cKDTree(self.points).query(points)[0] > 0.5 * self.settings.spacing
        self._append(points[apart], normals[apart])
        return int(apart.sum())

    def _beyond(self, warped: FloatArray, live: Surface) -> IntArray:
        """Numbers of the live points beside the warped model (W, 3), and of those beside these, and so on.

        A body that turns shows more than one strip of new surface between two matched clouds.
        """
        known, found = warped, np.zeros(0, dtype=np.int64)
        for _ in range(MAX_STRIPS):
            new = np.setdiff1d(self._beside(known, live), found)
            if not len(new):
                break
            known, found = np.concatenate([known, live.points[new]]), np.concatenate([found, new])
        return found

    def _beside(self, warped: FloatArray, live: Surface) -> IntArray:
        """Numbers of the live points that go on where the warped model (W, 3) ends.

        A point that lies off the model across the surface rather than along it is no new surface: it is the known one
        under a warp that is not exact, and would make a second surface.
        """
        distance, index = cKDTree(warped).query(live.points, distance_upper_bound=GROW_REACH)
        new = np.flatnonzero((distance > FUSE_REACH) & np.isfinite(distance))
        step = live.points[new] - warped[index[new]]
        across = np.abs(np.einsum("ni,ni->n", step, live.normals[new]))
        along = across < 0.5 * distance[new]
        if len(self.warp.support) == len(self.graph.nodes):
            nearest = cKDTree(self.warp.moved_nodes).query(live.points[new])[1]
            along &= self.warp.support[nearest] >= MIN_SUPPORT
        return new[along]

    def _way_back(self, live: FloatArray) -> Motion:
        """The motion to the rest shape at points beside the model: that of the nodes around.

        The turn of a single node at the rim is too uncertain; its error would grow with every strip of new surface.
        """
        use = self.graph.active
        pairs = Matches(self.warp.moved_nodes[use], self.graph.nodes[use], np.ones(int(use.sum())))
        return local_motions(live, pairs, width=0.05)

    def _append(self, points: FloatArray, normals: FloatArray) -> None:
        self.points, self.normals = np.concatenate([self.points, points]), np.concatenate([self.normals, normals])
        self._seen = np.concatenate([self._seen, np.ones(len(points))])
        self._misses = np.concatenate([self._misses, np.zeros(len(points), dtype=np.int64)])

    def _remove_seen_through(self, warped: FloatArray, covered: BoolArray, live: Surface, fused: BoolArray) -> int:
        """Remove points that the sensor looked through several times in a row, and how many they were."""
        old = len(warped)
        through = covered & ~fused & conflicts(warped, live, FREE_SPACE)
        self._misses[:old] = np.where(through, self._misses[:old] + 1, np.where(fused, 0, self._misses[:old]))
        keep = self._misses < self.settings.min_misses
        self.points, self.normals = self.points[keep], self.normals[keep]
        self._seen, self._misses = self._seen[keep], self._misses[keep]
        return int((~keep).sum())

    def _extend_graph(self) -> int:
        """Spread nodes over points that the graph does not carry; how many were added."""
        missing = ~self.graph.skin(self.points).covered
        beyond = self.graph.nearest_node(self.points)[0] > 1.5 * self.settings.graph.coverage
        if not (missing | beyond).sum() * self.settings.spacing**2 > NEW_NODES * self.settings.graph.coverage**2:
            return 0  # not worth to build the graph again
        if len(self.graph.nodes) >= self.settings.max_nodes:
            return 0
        on_surface = cKDTree(self.points).query(self.graph.nodes)[0] < self.settings.graph.coverage
        graph = build_graph(self.points, self.settings.graph, keep_nodes=self.graph.nodes[on_surface])
        if self._has_cuts or self._torn:
            graph = _keep_cuts(graph, self.graph, on_surface, self.settings.graph.min_nodes)
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


def imprint(points: FloatArray, warp: Warp) -> Imprint:
    """Where a model's points (N, 3) lie under a warp."""
    warped, turns, covered = warp.apply_with_turns(points)
    return Imprint(warped[covered], points[covered], _unit_columns(turns[covered]))


def thin(points: FloatArray, spacing: float) -> FloatArray:
    """One point, the mean, for each occupied cell of a grid; the finite points of any cloud (..., 3)."""
    flat = np.asarray(points, dtype=np.float64).reshape(-1, 3)
    flat = flat[np.isfinite(flat).all(axis=1)]
    return cell_means(flat, spacing)


def _names(graph: DeformationGraph) -> set[tuple[bytes, bytes]]:
    """The edges of a graph by the places of their nodes."""
    places = [node.tobytes() for node in graph.nodes]
    return {(places[first], places[second]) for first, second in graph.edges.tolist()}


def _turned_back(warp: Warp, points: FloatArray, vectors: FloatArray) -> FloatArray:
    """Vectors (N, 3) of the live cloud at model points (N, 3), turned to the rest shape."""
    return np.einsum("nji,nj->ni", _unit_columns(warp.turns(points)), vectors)


def _unit_columns(matrices: FloatArray) -> FloatArray:
    """Blended rotations (N, 3, 3) with columns of length 1 again."""
    return matrices / np.maximum(np.linalg.norm(matrices, axis=1, keepdims=True), 1e-12)


def _keep_cuts(grown: DeformationGraph, old: DeformationGraph, kept: BoolArray, min_nodes: int) -> DeformationGraph:
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
    return grown.without_edges(apart, min_nodes)
