# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformation graph: nodes on a surface, edges along it, and the skinning of points to nodes.

Distances are geodesic, along the surface: two limbs that come close share neither edges nor nodes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components, dijkstra, minimum_spanning_tree
from scipy.spatial import cKDTree

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import BoolArray, FloatArray, IntArray
from lepard_ros.geometry.voxel_grid import cell_indices, group_by_cell

MAX_SPACING = 0.0067  # metres between the points of the surface along which nodes are joined: limbs 2 cm apart stay two
CELL = 1.4  # width of a node's cell, of the coverage: its corners are that far from its middle, along the surface
PAPER_COVERAGE = 0.009  # metres: a node's coverage for 4DMatch in the paper


@dataclass(frozen=True)
class GraphSettings:
    """Settings of the graph; lengths in metres.

    coverage: radius of a node, and sigma of the skinning weights.
    edges: neighbours of a node in the as-rigid-as-possible term. skinning: nodes per point.
    max_side: triangles of an organised cloud with a longer side, and longer links in any cloud, are not surface.
    max_fold: degrees; neighbours in an unorganised cloud whose normals differ by more are not linked, because there two
    surfaces touch.
    min_cluster: connected parts of the surface with fewer nodes, counted at the paper's coverage of 0.9 cm, are not
    warped: their nodes are not `active`, and their points are reported as not covered. This is an area, not a count: a
    node represents about coverage^2 of surface, so at a coverage of 2 cm the same area has 40 (0.9 / 2)^2 = 8 nodes, at
    2.5 cm 5 (`min_nodes`). A smaller part within `max_side` of a larger one joins it instead.
    """

    coverage: float = 0.04
    edges: int = 6
    skinning: int = 4
    max_side: float = 0.04
    max_fold: float = 60.0
    min_cluster: int = 40

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes of a warped part at this coverage: the same area as `min_cluster` at 0.9 cm.

        At least 4 (or `min_cluster`, if less): fewer nodes cannot describe how a surface bends.
        """
        return max(round(self.min_cluster * (PAPER_COVERAGE / self.coverage) ** 2), min(self.min_cluster, 4))


class Skinning(NamedTuple):
    """Skinning of points: nodes (N, k), weights (N, k) that sum to 1, covered (N,) bool.

    A point that is not covered lies off the surface or on a part too small to warp; its weights are meaningless.
    """

    nodes: IntArray
    weights: FloatArray
    covered: BoolArray


@dataclass(frozen=True)
class DeformationGraph:
    """Nodes on a surface and the edges between them.

    nodes: (n, 3) metres. edges: (E, 2) pairs of connected nodes, each once, the smaller index first.
    active: (n,) bool, nodes in clusters large enough to be warped. coverage: metres. skinning: nodes per point.
    """

    nodes: FloatArray
    edges: IntArray
    active: BoolArray
    coverage: float
    skinning: int = 4

    @cached_property
    def tree(self) -> cKDTree:
        """The k-d tree of the nodes, then the midpoints of the edges; built on first use."""
        return cKDTree(np.concatenate([self.nodes, self.nodes[self.edges].mean(axis=1)]))

    def nearest_node(self, points: FloatArray) -> tuple[FloatArray, IntArray]:
        """The distance (N,) of points (N, 3) to the graph, and a node there (N,).

        Edges are represented by their midpoints. With nodes alone, a point between nodes might go to the next limb.
        """
        distance, index = self.tree.query(points)
        return distance, np.concatenate([np.arange(len(self.nodes)), self.edges[:, 0]])[index]

    @cached_property
    def reach(self) -> IntArray:
        """(n, K): each node, then the nodes within two edges of it, the nearest first, padded with itself."""
        return _two_rings(self.nodes, self.edges, keep=4 * self.skinning)

    def skin(self, points: FloatArray) -> Skinning:
        """Skin points (N, 3) to nodes; `docs/warp.md` describes the rule.

        Points in the same cell (a quarter of the coverage) share their nodes, so a million points are cheap.
        """
        cells, cell_of_point = _cells_of_points(points, self.coverage / 4)
        distance, nearest = self.nearest_node(cells)
        nodes = _nearest_candidates(cells, self.nodes, self.reach[nearest], self.skinning)[cell_of_point]
        covered = (self.active[nearest] & (distance < 2 * self.coverage))[cell_of_point]
        return Skinning(nodes, self._weights(points, nodes), covered)

    def _weights(self, points: FloatArray, nodes: IntArray) -> FloatArray:
        """C exp(-|g - p|^2 / (2 coverage^2)), normalised; a padded (repeated) node counts once.

        Column by column: numpy reduces along a short last axis slowly.
        """
        columns = nodes.T
        square = np.zeros(columns.shape)
        for node, out in zip(columns, square, strict=True):
            for axis in range(3):
                out += np.square(self.nodes[:, axis][node] - points[:, axis])
        square -= square[0]  # the nearest node comes first, up to the size of a cell
        weights = np.exp(square * (-0.5 / self.coverage**2))
        weights[1:][columns[1:] == columns[0]] = 0.0
        weights /= np.sum(weights, axis=0)
        return weights.T

    def active_part(self) -> "DeformationGraph":
        """The graph of the active nodes alone, in their order."""
        number = np.cumsum(self.active) - 1
        edges = number[self.edges[self.active[self.edges[:, 0]]]]
        nodes = self.nodes[self.active]
        return DeformationGraph(nodes, edges, np.ones(len(nodes), dtype=bool), self.coverage, self.skinning)

    def without_edges(self, cut: BoolArray, min_nodes: int = 1) -> "DeformationGraph":
        """The graph without the edges in the mask `cut` (E,); parts that become too small are no longer warped."""
        edges = self.edges[~cut]
        active = self.active & in_large_cluster(edges, len(self.nodes), min_nodes)
        return DeformationGraph(self.nodes, edges, active, self.coverage, self.skinning)


def build_graph(
    points: FloatArray, settings: GraphSettings | None = None, keep_nodes: FloatArray | None = None
) -> DeformationGraph:
    """Build a deformation graph over a cloud: (N, 3), or organised (H, W, 3) with NaN without a measurement.

    keep_nodes: (m, 3) nodes of an earlier graph that remain the first m nodes, for a surface that has grown.
    """
    settings = settings or GraphSettings()
    surface, links = _surface(np.asarray(points, dtype=np.float64), settings)
    surface, links, kept = _with_kept_nodes(surface, links, keep_nodes, settings)
    is_node = _spread_nodes(surface, links, settings.coverage, kept)
    index = np.concatenate([kept, np.setdiff1d(np.flatnonzero(is_node), kept)]).astype(np.int64)
    edges = _edges(_node_distances(surface, links, index), settings.edges)
    edges = _join_scraps(surface[index], edges, settings)
    active = in_large_cluster(edges, len(index), settings.min_nodes)
    return DeformationGraph(surface[index], edges, active, settings.coverage, settings.skinning)


def _surface(points: FloatArray, settings: GraphSettings) -> tuple[FloatArray, sparse.csr_matrix]:
    """The surface, downsampled to a third of the coverage or finer (S, 3), and its links with lengths (S, S)."""
    spacing = min(settings.coverage / 3, MAX_SPACING)
    if points.ndim == 3 and points.shape[-1] == 3:
        seen: BoolArray = np.asarray(np.isfinite(points).all(axis=-1))
        pairs = _pixel_mesh_pairs(points, seen, settings.max_side)
        surface, cell = _thin(_not_empty(points[seen]), spacing)
        number = np.cumsum(seen.ravel()) - 1
        pairs = cell[number[pairs]]
    elif points.ndim == 2 and points.shape[-1] == 3:
        surface, _ = _thin(_not_empty(points[np.isfinite(points).all(axis=-1)]), spacing)
        pairs = _radius_pairs(surface, settings)
    else:
        raise InputError(f"A cloud must have the shape (N, 3) or (H, W, 3), but this one has {points.shape}.")
    return surface, _links(surface, pairs)


def _not_empty(points: FloatArray) -> FloatArray:
    if len(points) == 0:
        raise InputError("The cloud has no finite point, so no deformation graph can be built; check the sensor.")
    return points


def _pixel_mesh_pairs(points: FloatArray, seen: BoolArray, longest: float) -> IntArray:
    """(P, 2) flat pixel numbers: the sides of the triangles between neighbouring pixels whose sides are all short."""
    number = np.arange(seen.size).reshape(seen.shape)
    a, b, c, d = number[:-1, :-1], number[:-1, 1:], number[1:, :-1], number[1:, 1:]
    triangles = np.concatenate([np.stack(t, axis=-1).reshape(-1, 3) for t in ((a, b, c), (b, d, c))])
    flat = points.reshape(-1, 3)
    triangles = triangles[seen.ravel()[triangles].all(axis=1)]
    corners = flat[triangles]
    sides = np.linalg.norm(corners - np.roll(corners, 1, axis=1), axis=-1)
    triangles = triangles[(sides <= longest).all(axis=1)]
    return np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])


def _radius_pairs(points: FloatArray, settings: GraphSettings) -> IntArray:
    """(P, 2) pairs of points closer than twice the usual distance to the fourth neighbour, with like normals."""
    if len(points) < 5:
        return np.zeros((0, 2), dtype=np.int64)
    tree = cKDTree(points)
    usual = np.median(tree.query(points, 5)[0][:, 4])
    pairs = tree.query_pairs(min(2.0 * float(usual), settings.max_side), output_type="ndarray")
    normals = surface_normals(points, neighbours=10)
    likeness = np.abs(np.sum(normals[pairs[:, 0]] * normals[pairs[:, 1]], axis=1))
    return pairs[likeness >= np.cos(np.radians(settings.max_fold))]


def _each_once(pairs: IntArray, n: int) -> IntArray:
    """(P', 2): every pair of pairs (P, 2) of numbers below n once, the smaller number first, in order.

    As one number each: `np.unique` of rows takes ten times as long, which was half the time of a graph.
    """
    low, high = np.minimum(pairs[:, 0], pairs[:, 1]), np.maximum(pairs[:, 0], pairs[:, 1])
    return np.stack(np.divmod(np.unique(low.astype(np.int64) * n + high), n), axis=1)


def _links(points: FloatArray, pairs: IntArray) -> sparse.csr_matrix:
    """Symmetric (S, S) matrix of the lengths of the pairs, each once."""
    pairs = _each_once(pairs[pairs[:, 0] != pairs[:, 1]], len(points))
    # A kept node may coincide with a point; a sparse matrix cannot store a link of length 0.
    length = np.maximum(np.linalg.norm(points[pairs[:, 0]] - points[pairs[:, 1]], axis=-1), 1e-9)
    matrix = sparse.coo_matrix((length, (pairs[:, 0], pairs[:, 1])), shape=(len(points),) * 2)
    return (matrix + matrix.T).tocsr()


def _with_kept_nodes(
    surface: FloatArray, links: sparse.csr_matrix, keep: FloatArray | None, settings: GraphSettings
) -> tuple[FloatArray, sparse.csr_matrix, IntArray]:
    """Append the kept nodes to the surface, each linked to the surface around its nearest point."""
    if keep is None or len(keep) == 0:
        return surface, links, np.zeros(0, dtype=np.int64)
    distance, nearest = cKDTree(surface).query(keep)
    if distance.max() > settings.coverage:
        raise InputError("A node to keep lies off the surface; remove it before building the graph.")
    number = len(surface) + np.arange(len(keep))
    old = links.tocoo()
    around = links[nearest].tocoo()
    pairs = np.concatenate(
        [
            np.stack([old.row, old.col], axis=-1),
            np.stack([number, nearest], axis=-1),
            np.stack([number[around.row], around.col], axis=-1),
        ]
    )
    points = np.concatenate([surface, keep])
    return points, _links(points, pairs), number


def _spread_nodes(surface: FloatArray, links: sparse.csr_matrix, coverage: float, kept: IntArray) -> BoolArray:
    """Mask (S,) of the points that become nodes: one for each connected piece of the surface in a grid cell.

    A cell may contain pieces of two limbs: each gets a node. Small pieces at the border of a cell join their neighbour.
    Pieces that a kept node covers get none. There is no loop over points, and the result is deterministic.
    """
    piece = _pieces(surface, links, CELL * coverage)
    groups = np.bincount(piece)
    centre = np.stack([np.bincount(piece, column) / groups for column in surface.T], axis=1)
    off = np.square(surface - centre[piece]).sum(axis=1)
    order = np.lexsort((off, piece))
    middle = order[np.searchsorted(piece[order], np.arange(len(groups)))]
    is_node = np.zeros(len(surface), dtype=bool)
    if len(kept):
        reached = dijkstra(links, indices=kept, min_only=True, limit=coverage)
        middle = middle[~np.isfinite(reached[middle])]
        is_node[kept] = True
    is_node[middle] = True
    return is_node


def _pieces(surface: FloatArray, links: sparse.csr_matrix, size: float) -> IntArray:
    """(S,) the piece of each point: connected inside a cell; small pieces join their largest neighbour."""
    cell, link = group_by_cell(surface, size).cell, links.tocoo()
    inside = cell[link.row] == cell[link.col]
    within = sparse.coo_matrix((link.data[inside], (link.row[inside], link.col[inside])), shape=links.shape)
    piece = connected_components(within, directed=False)[1]
    count = np.bincount(piece)
    first, second = piece[link.row], piece[link.col]
    grazing = (count[first] < 0.3 * np.median(count)) & (count[second] > count[first])
    order = np.argsort(count[second[grazing]], kind="stable")  # the largest neighbour is written last
    host = np.arange(len(count))
    host[first[grazing][order]] = second[grazing][order]
    return np.unique(host[host][piece], return_inverse=True)[1].reshape(-1)


def _node_distances(surface: FloatArray, links: sparse.csr_matrix, nodes: IntArray) -> sparse.csr_matrix:
    """(n, n): lengths along the surface between nodes whose neighbourhoods (points nearest to them) touch."""
    distance, _, source = dijkstra(links, indices=nodes, min_only=True, return_predecessors=True)
    number = np.full(len(surface), -1)
    number[nodes] = np.arange(len(nodes))
    owner = number[source]
    link = links.tocoo()
    first, second = owner[link.row], owner[link.col]
    length = distance[link.row] + link.data + distance[link.col]
    across = first != second
    return _shortest(first[across], second[across], length[across], len(nodes))


def _shortest(first: IntArray, second: IntArray, length: FloatArray, n: int) -> sparse.csr_matrix:
    """(n, n) matrix of the shortest length given for each pair."""
    order = np.lexsort((length, second, first))
    first, second, length = first[order], second[order], length[order]
    new = np.ones(len(first), dtype=bool)
    new[1:] = (first[1:] != first[:-1]) | (second[1:] != second[:-1])
    return sparse.csr_matrix((length[new], (first[new], second[new])), shape=(n, n))


def _edges(adjacency: sparse.csr_matrix, count: int) -> IntArray:
    """(E, 2): each node with its `count` nearest along the surface, and a spanning tree so that no neck is cut."""
    near = _two_steps(adjacency).tocoo()
    order = np.lexsort((near.data, near.row))
    row, col = near.row[order], near.col[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row)
    nearest = np.stack([row, col], axis=-1)[rank < count]
    tree = minimum_spanning_tree(adjacency).tocoo()
    spine = np.stack([tree.row, tree.col], axis=-1)
    return np.unique(np.sort(np.concatenate([nearest, spine]), axis=1).astype(np.int64), axis=0)


def _join_scraps(nodes: FloatArray, edges: IntArray, settings: GraphSettings) -> IntArray:
    """Add edges that join each part too small to warp to the nearest larger part, and to that one only.

    In a pixel mesh, triangles of up to `max_side` keep such fragments attached; a radius graph loses them wherever the
    cloud is sparse. Large parts are never joined to each other.
    """
    part = clusters(edges, len(nodes))
    large = in_large_cluster(edges, len(nodes), settings.min_nodes)
    small = np.flatnonzero(~large)
    if not len(small) or not large.any():
        return edges
    reach = settings.max_side + settings.coverage / 2  # nodes lie slightly inside the border of their parts
    distance, nearest = cKDTree(nodes[large]).query(nodes[small], distance_upper_bound=reach)
    found = np.isfinite(distance)
    order = np.argsort(distance[found])
    scrap, host = small[found][order], np.flatnonzero(large)[nearest[found]][order]
    first = np.unique(part[scrap], return_index=True)
    chosen = np.full(part.max() + 1, -1)
    chosen[first[0]] = part[host[first[1]]]
    same = chosen[part[scrap]] == part[host]
    joined = np.sort(np.stack([scrap[same], host[same]], axis=1), axis=1)
    return np.unique(np.concatenate([edges, joined]), axis=0)


def _two_steps(lengths: sparse.csr_matrix) -> sparse.csr_matrix:
    """Shortest lengths between nodes one or two links apart, none along itself."""
    link = lengths.tocoo()
    start = lengths.indptr[link.col]
    count = lengths.indptr[link.col + 1] - start
    which = np.repeat(np.arange(len(count)), count)
    onward = start[which] + np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    first = np.concatenate([link.row, link.row[which]])
    second = np.concatenate([link.col, lengths.indices[onward]])
    length = np.concatenate([link.data, link.data[which] + lengths.data[onward]])
    apart = first != second
    return _shortest(first[apart], second[apart], length[apart], lengths.shape[0])


def in_large_cluster(edges: IntArray, n: int, smallest: int) -> BoolArray:
    """(n,) bool: whether a node's connected part has at least `smallest` nodes."""
    label = clusters(edges, n)
    return np.bincount(label)[label] >= smallest


def clusters(edges: IntArray, n: int) -> IntArray:
    """(n,) the number of the connected part that each node belongs to."""
    matrix = sparse.coo_matrix((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(n, n))
    return connected_components(matrix, directed=False)[1]


def _two_rings(nodes: FloatArray, edges: IntArray, keep: int) -> IntArray:
    """(n, K): each node, then the nodes within two edges either way by straight distance, padded with the node."""
    n = len(nodes)
    both = np.concatenate([edges, edges[:, ::-1]])
    ones = sparse.csr_matrix((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(n, n))
    near = (ones @ ones + ones).tocoo()
    apart = near.row != near.col
    row, col = near.row[apart], near.col[apart]
    order = np.lexsort((np.linalg.norm(nodes[row] - nodes[col], axis=-1), row))
    row, col = row[order], col[order]
    rank = np.arange(len(row)) - np.searchsorted(row, row) + 1
    rings = np.tile(np.arange(n)[:, None], (1, keep))
    rings[row[rank < keep], rank[rank < keep]] = col[rank < keep]
    return rings


def finite_points(cloud: FloatArray) -> FloatArray:
    """The finite points (N, 3) of a cloud (N, 3) or (H, W, 3), float64."""
    flat = np.asarray(cloud, dtype=np.float64).reshape(-1, 3)
    return flat[np.isfinite(flat).all(axis=1)]


def _thin(points: FloatArray, spacing: float) -> tuple[FloatArray, IntArray]:
    """The mean of the points of each cell of a grid, and the cell of each point."""
    groups = group_by_cell(points, spacing)
    return groups.mean(points), groups.cell


def _cells_of_points(points: FloatArray, size: float) -> tuple[FloatArray, IntArray]:
    """The centres (C, 3) of the occupied cells of a grid, and the cell of each point (N,)."""
    groups = group_by_cell(points, size)
    return (cell_indices(points[groups.first], size) + 0.5) * size, groups.cell


def _nearest_candidates(points: FloatArray, nodes: FloatArray, candidates: IntArray, count: int) -> IntArray:
    """(C, count): of each point's candidate nodes (C, K) the nearest; column 0 is the nearest of all.

    Padding repeats a candidate's first node; it is sorted behind every real one, so that only it repeats.
    """
    distance = np.linalg.norm(nodes[candidates] - points[:, None], axis=-1)
    distance[:, 1:][candidates[:, 1:] == candidates[:, :1]] = np.inf
    order = np.argsort(distance, axis=1)[:, :count]
    chosen = np.take_along_axis(candidates, order, axis=1)
    missing = ~np.isfinite(np.take_along_axis(distance, order, axis=1))
    return np.where(missing, chosen[:, :1], chosen)
