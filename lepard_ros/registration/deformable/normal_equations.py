# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The energy of a deformation graph and its Gauss-Newton equations, assembled block by block.

E = sum_d c_d |W(p_d) - q_d|^2 + a sum_(i,j) |R_i (g_j - g_i) + g_i + t_i - g_j - t_j|^2, each edge both ways (ARAP).
Unknowns of node i: [phi_i, tau_i], with R_i <- exp(phi_i) R_i and t_i <- t_i + tau_i.

With x = R (p - g), the derivative of W(p) by a node that carries it with weight w is w [-x^, I] (the paper's
supplement). A block of J^T J is therefore a sum over points of four terms that are at most bilinear in the x of its two
nodes; the rotations can be factored out of the sum. What remains are 16 moments per block that depend only on the rest
pose and the weights c. An iteration only rotates them, so its cost hardly depends on the number of matches.
"""

from dataclasses import dataclass

import numpy as np
from scipy import sparse

from lepard_ros.geometry.arrays import FloatArray, IntArray
from lepard_ros.geometry.rigid_motion import cross_matrix, rotation_from_vector
from lepard_ros.registration.deformable.graph import DeformationGraph, Skinning


@dataclass(frozen=True)
class Motion:
    """One motion per node: rotation (n, 3, 3), translation (n, 3) metres."""

    rotation: FloatArray
    translation: FloatArray

    def step(self, update: FloatArray) -> "Motion":
        """This motion after the update (n, 6) = [phi, tau]."""
        return Motion(rotation_from_vector(update[:, :3]) @ self.rotation, self.translation + update[:, 3:])


@dataclass(frozen=True)
class DataTerm:
    """Points that the graph carries: points (D, 3), in the rest pose, with their skinning."""

    points: FloatArray
    skin: Skinning


@dataclass(frozen=True)
class Pattern:
    """The non-zero blocks of J^T J: first, second (P,), first <= second, including the diagonal.

    One pattern, and one symbolic factorisation, serves every fit of a graph with the same points.
    """

    count: int
    first: IntArray
    second: IntArray

    @classmethod
    def of(cls, graph: DeformationGraph, carriers: IntArray) -> "Pattern":
        """The pattern for a graph and points carried by the nodes (D, k)."""
        n, own = len(graph.nodes), np.arange(len(graph.nodes))
        left, right = np.triu_indices(carriers.shape[1])
        pairs = [(graph.edges[:, 0], graph.edges[:, 1]), (own, own)]
        pairs += [(carriers[:, a], carriers[:, b]) for a, b in zip(left, right, strict=True)]
        unique = np.unique(np.concatenate([np.minimum(a, b) * n + np.maximum(a, b) for a, b in pairs]))
        return cls(n, unique // n, unique % n)

    def slots(self, first: IntArray, second: IntArray) -> IntArray:
        """The numbers of the blocks of pairs of nodes, in either order."""
        key = np.minimum(first, second) * self.count + np.maximum(first, second)
        return np.searchsorted(self.first * self.count + self.second, key)


class NormalEquations:
    """Energy, gradient and J^T J of one graph with one set of carried points, for any motion, targets and weights.

    Warped points and edge residuals are linear in the columns of the rotations and the translations, so both are one
    product with a sparse matrix that never changes; its transpose gives the gradient.
    """

    def __init__(
        self, graph: DeformationGraph, data: DataTerm, arap_weight: float, pattern: Pattern | None = None
    ) -> None:
        """Find the matrices and moments that do not change. pattern: one that includes these points, if known."""
        self.nodes, self.arap_weight = graph.nodes, arap_weight
        self.pattern = pattern or Pattern.of(graph, data.skin.nodes)
        self._edges = np.concatenate([graph.edges, graph.edges[:, ::-1]])
        self._edge_vector = graph.nodes[self._edges[:, 1]] - graph.nodes[self._edges[:, 0]]
        self._skin, self._lever = data.skin, data.points[:, None] - graph.nodes[data.skin.nodes]
        own = np.arange(len(graph.nodes))
        self.own_slots = self.pattern.slots(own, own)
        self._carry = _lever_matrix(data.skin.nodes, data.skin.weights, self._lever, len(own))
        self._pull = self._carry.T.tocsr()
        self._strain = _edge_matrix(self._edges, self._edge_vector, len(own))
        self._strain_pull = self._strain.T.tocsr()
        self._arap_moments = self._edge_moments()
        self._find_pair_moments()

    @property
    def first(self) -> IntArray:
        """(P,) first nodes of the blocks."""
        return self.pattern.first

    @property
    def second(self) -> IntArray:
        """(P,) second nodes of the blocks."""
        return self.pattern.second

    def _edge_moments(self) -> FloatArray:
        """(P, 16) moments of the ARAP term: an edge (i, j) has derivatives [-x^, I] by i and [0, -I] by j."""
        tail, head, vector = self._edges[:, 0], self._edges[:, 1], self._edge_vector
        zero, one = np.zeros_like(vector), np.ones(len(vector))
        forward = (tail < head)[:, None]
        across = _moments(-one, np.where(forward, vector, zero), np.where(forward, zero, vector))
        total = _sum_rows(self.pattern.slots(tail, head), across, len(self.first))
        total += _sum_rows(self.own_slots[tail], _moments(one, vector, vector), len(self.first))
        total += _sum_rows(self.own_slots[head], _moments(one, zero, zero), len(self.first))
        return total

    def _find_pair_moments(self) -> None:
        """The moments (D T, 16) of every pair of nodes that carry a point, for c = 1, and the matrix that sums them."""
        nodes, weights = self._skin.nodes, self._skin.weights
        a, b = np.triu_indices(nodes.shape[1])
        swap = (nodes[:, a] > nodes[:, b])[:, :, None]
        lever_a, lever_b = self._lever[:, a], self._lever[:, b]
        # A repeated (padded) node has weight zero, so a pair (i, i) counts once: as the diagonal of i.
        self._pair_table = _moments(
            (weights[:, a] * weights[:, b]).ravel(),
            np.where(swap, lever_b, lever_a).reshape(-1, 3),
            np.where(swap, lever_a, lever_b).reshape(-1, 3),
        )
        slot = self.pattern.slots(nodes[:, a].ravel(), nodes[:, b].ravel())
        order = np.argsort(slot, kind="stable")
        start = np.searchsorted(slot[order], np.arange(len(self.first) + 1))
        self._pair_owner = order // max(len(a), 1)
        self._pair_sum = sparse.csr_matrix((np.ones(len(order)), order, start), shape=(len(self.first), len(order)))

    def warped(self, motion: Motion) -> FloatArray:
        """W(p) of the carried points, (D, 3)."""
        return self._carry @ _columns(motion.rotation, self.nodes + motion.translation)

    def edge_residuals(self, motion: Motion) -> FloatArray:
        """(2E, 3) metres: where the tail of each edge expects its head, minus where it is."""
        return self._strain @ _columns(motion.rotation, motion.translation) - self._edge_vector

    def energy(self, motion: Motion, targets: FloatArray, weights: FloatArray) -> float:
        """E for targets (D, 3) and weights c (D,)."""
        data = weights @ np.square(self.warped(motion) - targets).sum(axis=1)
        return float(data + self.arap_weight * np.square(self.edge_residuals(motion)).sum())

    def gradient(self, motion: Motion, targets: FloatArray, weights: FloatArray) -> FloatArray:
        """(n, 6): J^T r, half the gradient of E."""
        pull = self._pull @ (weights[:, None] * (self.warped(motion) - targets))
        pull += self._strain_pull @ (self.arap_weight * self.edge_residuals(motion))
        pull = pull.reshape(-1, 4, 3)
        torque = _cross(motion.rotation.transpose(0, 2, 1), pull[:, :3]).sum(axis=1)
        return np.concatenate([torque, pull[:, 3]], axis=1)

    def moments(self, weights: FloatArray) -> FloatArray:
        """(P, 16) for the weights c (D,) of the points: to be kept while the weights stay."""
        self._pair_sum.data = weights[self._pair_owner]
        return self.arap_weight * self._arap_moments + self._pair_sum @ self._pair_table

    def blocks(self, motion: Motion, moments: FloatArray) -> FloatArray:
        """(P, 6, 6): the blocks (first, second) of J^T J."""
        turn_first, turn_second = motion.rotation[self.first], motion.rotation[self.second]
        product = turn_first @ moments[:, 7:].reshape(-1, 3, 3) @ turn_second.transpose(0, 2, 1)
        out = np.empty((len(self.first), 6, 6))
        out[:, :3, :3] = np.trace(product, axis1=1, axis2=2)[:, None, None] * np.eye(3) - product.transpose(0, 2, 1)
        out[:, :3, 3:] = cross_matrix(_turn(turn_first, moments[:, 1:4]))
        out[:, 3:, :3] = -cross_matrix(_turn(turn_second, moments[:, 4:7]))
        out[:, 3:, 3:] = moments[:, 0, None, None] * np.eye(3)
        return out

    def jacobian(self, motion: Motion, weights: FloatArray) -> sparse.csr_matrix:
        """(3 D + 6 E, 6 n): J itself, rows scaled by the roots of the weights; not used to solve, but to check."""
        nodes, skin_weight = self._skin.nodes, self._skin.weights * np.sqrt(weights)[:, None]
        arm = _turn(motion.rotation[nodes], self._lever)
        eye = np.broadcast_to(np.eye(3), (*nodes.shape, 3, 3))
        data = skin_weight[:, :, None, None] * np.concatenate([-cross_matrix(arm), eye], axis=3)
        arm = _turn(motion.rotation[self._edges[:, 0]], self._edge_vector)
        eye = np.broadcast_to(np.eye(3), (len(arm), 3, 3))
        by_tail = np.concatenate([-cross_matrix(arm), eye], axis=2)
        by_head = np.concatenate([np.zeros_like(eye), -eye], axis=2)
        edges = np.sqrt(self.arap_weight) * np.stack([by_tail, by_head], axis=1)
        n = len(self.nodes)
        return sparse.vstack([_block_rows(nodes, data, n), _block_rows(self._edges, edges, n)]).tocsr()


def _columns(rotation: FloatArray, translation: FloatArray) -> FloatArray:
    """(4 n, 3): for each node the three columns of its rotation (n, 3, 3), then its translation (n, 3)."""
    return np.concatenate([rotation.transpose(0, 2, 1), translation[:, None]], axis=1).reshape(-1, 3)


def _lever_matrix(nodes: IntArray, weights: FloatArray, lever: FloatArray, n: int) -> sparse.csr_matrix:
    """(D, 4 n): times `_columns` gives the sum of weights (D, k) times R lever (D, k, 3) + t over nodes (D, k)."""
    values = weights[:, :, None] * np.concatenate([lever, np.ones((*weights.shape, 1))], axis=2)
    columns = 4 * nodes[:, :, None] + np.arange(4)
    start = np.arange(len(nodes) + 1) * 4 * nodes.shape[1]
    return sparse.csr_matrix((values.ravel(), columns.ravel(), start), shape=(len(nodes), 4 * n))


def _edge_matrix(edges: IntArray, vector: FloatArray, n: int) -> sparse.csr_matrix:
    """(2 E, 4 n): times `_columns` gives R_tail vector + t_tail - t_head of each directed edge."""
    one = np.ones((len(edges), 1))
    columns = np.concatenate([4 * edges[:, :1] + np.arange(4), 4 * edges[:, 1:] + 3], axis=1)
    start = np.arange(len(edges) + 1) * 5
    values = np.concatenate([vector, one, -one], axis=1)
    return sparse.csr_matrix((values.ravel(), columns.ravel(), start), shape=(len(edges), 4 * n))


def _block_rows(nodes: IntArray, blocks: FloatArray, n: int) -> sparse.coo_matrix:
    """A sparse matrix with 3 rows per entry of nodes (D, k), holding blocks (D, k, 3, 6)."""
    count = len(nodes)
    row = 3 * np.arange(count)[:, None, None, None] + np.arange(3)[:, None]
    column = 6 * nodes[:, :, None, None] + np.arange(6)
    row, column = np.broadcast_to(row, blocks.shape), np.broadcast_to(column, blocks.shape)
    return sparse.coo_matrix((blocks.ravel(), (row.ravel(), column.ravel())), shape=(3 * count, 6 * n))


def _moments(weight: FloatArray, first: FloatArray, second: FloatArray) -> FloatArray:
    """(Q, 16): weight times [1, y_first, y_second, y_first y_second^T]."""
    table = np.empty((len(weight), 16))
    table[:, 0] = weight
    table[:, 1:4] = weight[:, None] * first
    table[:, 4:7] = weight[:, None] * second
    table[:, 7:] = (table[:, 1:4, None] * second[:, None, :]).reshape(-1, 9)
    return table


def _sum_rows(index: IntArray, rows: FloatArray, count: int) -> FloatArray:
    """(count, C): the sum of the rows (Q, C) that share an index (Q,)."""
    start = np.arange(len(index) + 1)
    chosen = sparse.csr_matrix((np.ones(len(index)), index, start), shape=(len(index), count))
    return np.asarray(chosen.T @ rows)


def _turn(rotation: FloatArray, vectors: FloatArray) -> FloatArray:
    """Rotations (..., 3, 3) times vectors (..., 3)."""
    return np.matmul(rotation, vectors[..., None])[..., 0]


def _cross(a: FloatArray, b: FloatArray) -> FloatArray:
    """The cross product of vectors (..., 3): numpy's own is several times slower."""
    out = np.empty(np.broadcast_shapes(a.shape, b.shape))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        out[..., i] = a[..., j] * b[..., k] - a[..., k] * b[..., j]
    return out
