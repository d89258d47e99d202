# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The energy of a deformation graph and its Gauss-Newton equations, assembled block by block.

E = sum_d c_d |W(p_d) - q_d|^2 + a sum_(i,j) |R_i (g_j - g_i) + g_i + t_i - g_j - t_j|^2, each edge both ways (ARAP).
Unknowns of node i: [phi_i, tau_i], with R_i <- exp(phi_i) R_i and t_i <- t_i + tau_i.

With x = R (p - g), the derivative of W(p) by a node that carries it with weight w is w [-x^, I] (the paper's
supplement). A block of J^T J is therefore a sum over points of four terms that are at most bilinear in the x of its two
nodes; the rotations can be taken out of the sum. What is left are 16 moments per block that depend on the rest pose
and the weights c only: an iteration turns them, and its cost hardly depends on the number of matches.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from lepard_ros.registration.graph import DeformationGraph, Skinning
from lepard_ros.registration.types import FloatArray

IntArray = NDArray[np.integer]


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


class NormalEquations:
    """Energy, gradient and J^T J of one graph with one set of carried points, for any motion, targets and weights.

    `first`, `second`: (P,) the nodes of the blocks of J^T J, first <= second, every node with itself included.
    """

    def __init__(self, graph: DeformationGraph, data: DataTerm, arap_weight: float) -> None:
        """Find the pattern, and the moments that do not change."""
        self.nodes, self.arap_weight = graph.nodes, arap_weight
        self._edges = np.concatenate([graph.edges, graph.edges[:, ::-1]])
        self._edge_vector = graph.nodes[self._edges[:, 1]] - graph.nodes[self._edges[:, 0]]
        self._skin, self._lever = data.skin, data.points[:, None] - graph.nodes[data.skin.nodes]
        self._find_pattern()
        self._arap_moments = self._edge_moments()
        self._pair_table = self._pair_moments()

    def _find_pattern(self) -> None:
        n, nodes = len(self.nodes), self._skin.nodes
        left, right = np.triu_indices(nodes.shape[1])
        self._left, self._right = left, right
        pairs = [self._edges, np.stack([nodes[:, left].ravel(), nodes[:, right].ravel()], axis=1)]
        pairs.append(np.stack([np.arange(n)] * 2, axis=1))
        key = np.concatenate([np.minimum(p[:, 0], p[:, 1]) * n + np.maximum(p[:, 0], p[:, 1]) for p in pairs])
        unique, slot = np.unique(key, return_inverse=True)
        self.first, self.second = unique // n, unique % n
        ends = np.cumsum([len(p) for p in pairs])
        self._edge_slot, self._pair_slot, self._own_slot = np.split(slot.reshape(-1), ends[:2])

    def _edge_moments(self) -> FloatArray:
        """(P, 16) moments of the ARAP term: an edge (i, j) has derivatives [-x^, I] by i and [0, -I] by j."""
        tail, head, vector = self._edges[:, 0], self._edges[:, 1], self._edge_vector
        zero, one = np.zeros_like(vector), np.ones(len(vector))
        forward = (tail < head)[:, None]
        across = _moments(-one, np.where(forward, vector, zero), np.where(forward, zero, vector))
        total = _sum_rows(self._edge_slot, across, len(self.first))
        total += _sum_rows(self._own_slot[tail], _moments(one, vector, vector), len(self.first))
        total += _sum_rows(self._own_slot[head], _moments(one, zero, zero), len(self.first))
        return total

    def _pair_moments(self) -> FloatArray:
        """(D T, 16): the moments of every pair of nodes that carry a point, for c = 1."""
        nodes, weights = self._skin.nodes, self._skin.weights
        a, b = self._left, self._right
        swap = (nodes[:, a] > nodes[:, b])[:, :, None]
        lever_a, lever_b = self._lever[:, a], self._lever[:, b]
        weight = weights[:, a] * weights[:, b]
        # A repeated (padded) node has weight zero, so a pair (i, i) counts once: as the diagonal of i.
        return _moments(
            weight.ravel(),
            np.where(swap, lever_b, lever_a).reshape(-1, 3),
            np.where(swap, lever_a, lever_b).reshape(-1, 3),
        )

    def warped(self, motion: Motion) -> FloatArray:
        """W(p) of the carried points, (D, 3)."""
        nodes, weights = self._skin.nodes, self._skin.weights
        moved = _turn(motion.rotation[nodes], self._lever) + (self.nodes + motion.translation)[nodes]
        return np.einsum("dk,dki->di", weights, moved)

    def edge_residuals(self, motion: Motion) -> FloatArray:
        """(2E, 3) metres: where the tail of each edge expects its head, minus where it is."""
        tail, head = self._edges[:, 0], self._edges[:, 1]
        expected = _turn(motion.rotation[tail], self._edge_vector) + motion.translation[tail]
        return expected - self._edge_vector - motion.translation[head]

    def energy(self, motion: Motion, targets: FloatArray, weights: FloatArray) -> float:
        """E for targets (D, 3) and weights c (D,)."""
        data = np.sum(weights * np.sum(np.square(self.warped(motion) - targets), axis=1))
        return float(data + self.arap_weight * np.sum(np.square(self.edge_residuals(motion))))

    def gradient(self, motion: Motion, targets: FloatArray, weights: FloatArray) -> FloatArray:
        """(n, 6): J^T r, half the gradient of E."""
        nodes, n = self._skin.nodes, len(self.nodes)
        residual = weights[:, None] * (self.warped(motion) - targets)
        pull = self._skin.weights[:, :, None] * residual[:, None]
        arm = _turn(motion.rotation[nodes], self._lever)
        data = np.concatenate([_cross(arm, pull), pull], axis=2).reshape(-1, 6)
        tail, head = self._edges[:, 0], self._edges[:, 1]
        strain = self.arap_weight * self.edge_residuals(motion)
        torque = _cross(_turn(motion.rotation[tail], self._edge_vector), strain)
        total = _sum_rows(nodes.ravel(), data, n) + _sum_rows(tail, np.concatenate([torque, strain], axis=1), n)
        total[:, 3:] -= _sum_rows(head, strain, n)
        return total

    def moments(self, weights: FloatArray) -> FloatArray:
        """(P, 16) for the weights c (D,) of the points: to be kept while the weights stay."""
        scaled = self._pair_table * np.repeat(weights, len(self._left))[:, None]
        return self.arap_weight * self._arap_moments + _sum_rows(self._pair_slot, scaled, len(self.first))

    def blocks(self, motion: Motion, moments: FloatArray) -> FloatArray:
        """(P, 6, 6): the blocks (first, second) of J^T J."""
        turn_first, turn_second = motion.rotation[self.first], motion.rotation[self.second]
        product = turn_first @ moments[:, 7:].reshape(-1, 3, 3) @ turn_second.transpose(0, 2, 1)
        out = np.empty((len(self.first), 6, 6))
        out[:, :3, :3] = np.trace(product, axis1=1, axis2=2)[:, None, None] * np.eye(3) - product.transpose(0, 2, 1)
        out[:, :3, 3:] = _hat(_turn(turn_first, moments[:, 1:4]))
        out[:, 3:, :3] = -_hat(_turn(turn_second, moments[:, 4:7]))
        out[:, 3:, 3:] = moments[:, 0, None, None] * np.eye(3)
        return out

    def jacobian(self, motion: Motion, weights: FloatArray) -> sparse.csr_matrix:
        """(3 D + 6 E, 6 n): J itself, rows scaled by the roots of the weights; not used to solve, but to check."""
        nodes, skin_weight = self._skin.nodes, self._skin.weights * np.sqrt(weights)[:, None]
        arm = _turn(motion.rotation[nodes], self._lever)
        eye = np.broadcast_to(np.eye(3), (*nodes.shape, 3, 3))
        data = skin_weight[:, :, None, None] * np.concatenate([-_hat(arm), eye], axis=3)
        arm = _turn(motion.rotation[self._edges[:, 0]], self._edge_vector)
        eye = np.broadcast_to(np.eye(3), (len(arm), 3, 3))
        by_tail = np.concatenate([-_hat(arm), eye], axis=2)
        by_head = np.concatenate([np.zeros_like(eye), -eye], axis=2)
        edges = np.sqrt(self.arap_weight) * np.stack([by_tail, by_head], axis=1)
        n = len(self.nodes)
        return sparse.vstack([_block_rows(nodes, data, n), _block_rows(self._edges, edges, n)]).tocsr()

    @property
    def own_slots(self) -> IntArray:
        """(n,) the block of each node with itself."""
        return self._own_slot


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


def _hat(vectors: FloatArray) -> FloatArray:
    """(..., 3, 3): the matrix of the cross product with vectors (..., 3)."""
    out = np.zeros((*vectors.shape, 3))
    for i, j, k in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        out[..., k, j] = vectors[..., i]
        out[..., j, k] = -vectors[..., i]
    return out


def rotation_from_vector(vectors: FloatArray) -> FloatArray:
    """(n, 3, 3): rotations by |v| radians about v (n, 3), by Rodrigues' formula; exact near zero too."""
    angle = np.linalg.norm(vectors, axis=-1)[:, None, None]
    cross = _hat(vectors)
    half = np.sinc(angle / (2 * np.pi))  # numpy's sinc(x) is sin(pi x) / (pi x)
    return np.eye(3) + np.sinc(angle / np.pi) * cross + 0.5 * half**2 * (cross @ cross)
