# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The canonical model of a deforming object: points in the rest shape and a deformation graph.

The rest shape is the first cloud. Each accepted warp moves the model to a live cloud. There points are fused, new
surface is added, and points in observed free space are removed. Everything is stored in the rest shape.
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
from lepard_ros.registration.deformable.graph import DeformationGraph, GraphSettings, Skinning, build_graph
from lepard_ros.registration.deformable.normal_equations import Motion
from lepard_ros.registration.deformable.warp import Warp, edge_stretch
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.types import Matches, Status, Surface


@dataclass(frozen=True)
class ModelSettings:
    """Settings of the model. Lengths in metres.

    spacing: between its points. max_points, max_nodes: limits; a model that reaches one keeps what it has.
    min_misses: number of consecutive clouds that must see through a point before it is removed. min_torn: number of
    consecutive clouds for which a cut edge must stay torn before it is removed for good; wrong matches may tear an edge
    for one cloud, after which it is restored.
    """

    graph: GraphSettings = field(default_factory=lambda: GraphSettings(coverage=0.04))
    spacing: float = 0.01
    min_misses: int = 3
    min_torn: int = 3
    max_points: int = 60_000
    max_nodes: int = 4_000


# Metres: a live point within FUSE_REACH of the model corrects it; up to GROW_REACH it may be new surface next to it.
FUSE_REACH, GROW_REACH = 0.015, 0.05
MAX_STRIPS = 3  # strips of new surface, each GROW_REACH wide, that one cloud may add
NEW_NODES = 4  # the graph is extended when the new surface is worth this many nodes
MAX_FUSED = 20  # maximum weight of the past observations of a point
HEALED_STRETCH = 1.25  # a cut edge with less stretch is no longer torn
MIN_SUPPORT = 0.3  # minimum support of the node next to new surface: a wrong warp would add a duplicate surface
FREE_SPACE = FreeSpaceSettings(cells=256, margin=0.04)


class Change(NamedTuple):
    """Changes made by one cloud: points fused, added and removed, nodes added, edges cut."""

    fused: int = 0
    added: int = 0
    removed: int = 0
    nodes: int = 0
    cut: int = 0


class CanonicalModel:
    """Points (N, 3) in the rest shape with outward normals and observation counts, the graph, and the last warp."""

    def __init__(self, points: FloatArray, settings: ModelSettings) -> None:
        """Start with a first cloud (N, 3), which is the rest shape; fragments too small for the graph are dropped."""
        self.settings = settings
        thinned = thin(points, settings.spacing)
        graph = build_graph(thinned, settings.graph)
        covered = graph.skin(thinned).covered
        self.points, self.normals = thinned[covered], surface_normals(thinned)[covered]
        self._seen = np.ones(len(self.points))
        self._misses = np.zeros(len(self.points), dtype=np.int64)
        self._has_cuts = False
        self._torn: dict[tuple[bytes, bytes], int] = {}  # torn edges, with the number of clouds since they tore
        self.warp = Warp.rest(graph, Status.OK)

    @property
    def graph(self) -> DeformationGraph:
        """The graph over the model's points."""
        return self.warp.graph

    @property
    def surface(self) -> Surface:
        """The points in the rest shape with their outward normals."""
        return Surface(self.points, self.normals, self.settings.spacing)

    def updated(self, warp: Warp, live: FloatArray) -> "tuple[CanonicalModel, Change]":
        """An updated copy of the model, and the changes."""
        model = copy(self)
        model.points, model._seen = self.points.copy(), self._seen.copy()
        model._misses, model._torn = self._misses.copy(), dict(self._torn)
        return model, model.update(warp, live)

    def update(self, warp: Warp, live: FloatArray) -> Change:
        """Update the model with an accepted warp and its live cloud (L, 3)."""
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
        """Restore edges that are no longer torn. `cut_edges` of the result counts the edges now removed for good.

        Edges are identified by the positions of their nodes, since node indices change when the graph grows.
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
        """Correct observed points along the normals of the live cloud; returns which points (N,) were observed."""
        distance, index = live.tree.query(warped, distance_upper_bound=FUSE_REACH)
        seen = covered & np.isfinite(distance)
        normal = live.normals[index[seen]]
        offset = np.sum((live.points[index[seen]] - warped[seen]) * normal, axis=1)
        share = offset / (np.minimum(self._seen[seen], MAX_FUSED) + 1)
        self.points[seen] += _turned_back(self.warp, self.points[seen], share[:, None] * normal)
        self._seen[seen] += 1
        return seen

    def _grow(self, warped: FloatArray, covered: BoolArray, live: Surface) -> int:
        """Add live points next to the model, transferred to the rest shape; returns their number."""
        room = self.settings.max_points - len(self.points)
        if room <= 0 or not covered.any():
            return 0
        new = self._beyond(warped[covered], live)[:room]
        back = self._way_back(live.points[new])
        points = live.points[new] + back.translation
        normals = np.einsum("nij,nj->ni", back.rotation, live.normals[new])
        apart = ~self._has_surface(points, normals)
        self._append(points[apart], normals[apart])
        return int(apart.sum())

    def _has_surface(self, points: FloatArray, normals: FloatArray) -> BoolArray:
        """Which of points (N, 3) in the rest shape lie on surface that the model has, with a normal like theirs.

        Under an inexact warp known surface looks new. Added again and again, it would let the model grow for as long as
        the object moves. The other side of a thin limb has another normal.
        """
        distance, index = cKDTree(self.points).query(points)
        same_side = np.einsum("ni,ni->n", self.normals[index], normals) > 0
        return np.asarray(distance < np.where(same_side, FUSE_REACH, 0.5 * self.settings.spacing))

    def _beyond(self, warped: FloatArray, live: Surface) -> IntArray:
        """Indices of the live points next to the warped model (W, 3), grown strip by strip.

        A rotating object shows more than one strip of new surface between two matched clouds.
        """
        known, found = warped, np.zeros(0, dtype=np.int64)
        for _ in range(MAX_STRIPS):
            new = np.setdiff1d(self._beside(known, live), found)
            if not len(new):
                break
            known, found = np.concatenate([known, live.points[new]]), np.concatenate([found, new])
        return found

    def _beside(self, warped: FloatArray, live: Surface) -> IntArray:
        """Indices of the live points that continue the warped model (W, 3) at its border.

        A point that is offset along the normal rather than along the surface is not new: it is known surface under an
        inexact warp, and adding it would duplicate the surface.
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
        """The motion to the rest shape at points next to the model, averaged over the nodes around them.

        The rotation of a single border node is too uncertain; its error would grow with every strip.
        """
        use = self.graph.active
        pairs = Matches(self.warp.moved_nodes[use], self.graph.nodes[use], np.ones(int(use.sum())))
        return local_motions(live, pairs, width=0.05)

    def _append(self, points: FloatArray, normals: FloatArray) -> None:
        self.points, self.normals = np.concatenate([self.points, points]), np.concatenate([self.normals, normals])
        self._seen = np.concatenate([self._seen, np.ones(len(points))])
        self._misses = np.concatenate([self._misses, np.zeros(len(points), dtype=np.int64)])

    def _remove_seen_through(self, warped: FloatArray, covered: BoolArray, live: Surface, fused: BoolArray) -> int:
        """Remove points that the sensor saw through several times in a row; returns their number."""
        old = len(warped)
        through = covered & ~fused & conflicts(warped, live, FREE_SPACE)
        self._misses[:old] = np.where(through, self._misses[:old] + 1, np.where(fused, 0, self._misses[:old]))
        keep = self._misses < self.settings.min_misses
        self.points, self.normals = self.points[keep], self.normals[keep]
        self._seen, self._misses = self._seen[keep], self._misses[keep]
        return int((~keep).sum())

    def _extend_graph(self) -> int:
        """Add nodes for points that the graph does not cover; returns their number."""
        missing = ~self.graph.skin(self.points).covered
        beyond = self.graph.nearest_node(self.points)[0] > 1.5 * self.settings.graph.coverage
        if not (missing | beyond).sum() * self.settings.spacing**2 > NEW_NODES * self.settings.graph.coverage**2:
            return 0  # too little new surface to rebuild the graph
        on_surface = cKDTree(self.points).query(self.graph.nodes)[0] < self.settings.graph.coverage
        graph = build_graph(self.points, self.settings.graph, keep_nodes=self.graph.nodes[on_surface])
        if len(graph.nodes) > self.settings.max_nodes:
            return 0
        if self._has_cuts or self._torn:
            graph = _keep_cuts(graph, self.graph, on_surface, self.settings.graph.min_nodes)
        self.warp = self.warp.onto(graph)
        return len(graph.nodes) - int(on_surface.sum())


class WarpedModel(NamedTuple):
    """The model warped to one live cloud; maps points of that cloud to the rest shape.

    warped: (N, 3) model points in the live cloud. rest: (N, 3) the same in the rest shape. turn: (N, 3, 3) rotations.
    support: (N,) in [0, 1], how far the motion of each point can be trusted.
    """

    warped: FloatArray
    rest: FloatArray
    turn: FloatArray
    support: FloatArray

    def to_rest(self, points: FloatArray, reach: float) -> tuple[FloatArray, BoolArray]:
        """Points (M, 3) of that live cloud in the rest shape, and which of them lie within `reach` of the model."""
        if not len(self.warped):
            return points, np.zeros(len(points), dtype=bool)
        distance, index = cKDTree(self.warped).query(points)
        offset = np.einsum("nji,nj->ni", self.turn[index], points - self.warped[index])
        return self.rest[index] + offset, distance < reach


def warped_model(points: FloatArray, warp: Warp, skin: Skinning | None = None) -> WarpedModel:
    """Apply a warp to the points (N, 3) of a model. skin: of these points on the warp's nodes, if known."""
    skin = skin or warp.graph.skin(points)
    warped, turns, covered = warp.apply_with_turns(points, skin)
    support = warp.support_of(skin)[covered]
    return WarpedModel(warped[covered], points[covered], _unit_columns(turns[covered]), support)


def thin(points: FloatArray, spacing: float) -> FloatArray:
    """Downsample the finite points of a cloud (..., 3) to the mean of each occupied grid cell."""
    flat = np.asarray(points, dtype=np.float64).reshape(-1, 3)
    flat = flat[np.isfinite(flat).all(axis=1)]
    return cell_means(flat, spacing)


def _names(graph: DeformationGraph) -> set[tuple[bytes, bytes]]:
    """The edges of a graph, identified by the positions of their nodes."""
    places = [node.tobytes() for node in graph.nodes]
    return {(places[first], places[second]) for first, second in graph.edges.tolist()}


def _turned_back(warp: Warp, points: FloatArray, vectors: FloatArray) -> FloatArray:
    """Rotate vectors (N, 3) at model points (N, 3) from the live cloud to the rest shape."""
    return np.einsum("nji,nj->ni", _unit_columns(warp.turns(points)), vectors)


def _unit_columns(matrices: FloatArray) -> FloatArray:
    """Normalise the columns of blended rotations (N, 3, 3)."""
    return matrices / np.maximum(np.linalg.norm(matrices, axis=1, keepdims=True), 1e-12)


def _keep_cuts(grown: DeformationGraph, old: DeformationGraph, kept: BoolArray, min_nodes: int) -> DeformationGraph:
    """Remove edges of the grown graph between old nodes that were far apart on the old graph, so that cuts persist.

    kept: (n,) mask of the old nodes that are the first nodes of the grown graph.
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
