# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Cholesky factorisation of a sparse matrix of 6 x 6 blocks, for many matrices of one pattern.

The unknowns belong to nodes with positions in space, so halving the nodes by position gives a good elimination order
(nested dissection). Each half is eliminated as one dense block (the multifrontal method): BLAS does the work, which
grows almost linearly with the number of nodes of a surface. scipy's SuperLU takes twice as long and reorders each time.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg.blas import dsyrk, dtrsm
from scipy.linalg.lapack import dpotrf

from lepard_ros.geometry.arrays import FloatArray, IntArray

BLOCK = 6
_LEAF_NODES = 24


@dataclass
class _Front:
    """One step of the elimination: `own` nodes are eliminated, `border` nodes (eliminated later) get the update.

    Both are sorted (own by index, border by order of elimination), own first. `parent` and `place` give the destination
    of the update; `slots`, `rows` and `columns` give the matrix blocks that are assembled here, and their positions.
    """

    own: IntArray
    border: IntArray
    parent: int = -1
    place: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    slots: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rows: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    columns: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


class NotPositiveDefinite(ArithmeticError):
    """The matrix has no Cholesky factor."""


class BlockCholesky:
    """Solves H x = b for symmetric positive definite H, given by blocks of one fixed pattern.

    positions: (n, 3) of the nodes. first, second: (P,) nodes of each block; a pair appears once, in either order, and
    every node has its own block (i, i).
    """

    def __init__(self, positions: FloatArray, first: IntArray, second: IntArray) -> None:
        self.n = len(positions)
        self._fronts = _plan(positions, first, second)
        self._factors: list[tuple[FloatArray, FloatArray]] = []

    def factorise(self, blocks: FloatArray) -> None:
        """Take blocks (P, 6, 6), block p being rows `first[p]` and columns `second[p]` of H."""
        both = np.concatenate([blocks, blocks.transpose(0, 2, 1)])
        dense = [_assemble(front, both) for front in self._fronts]
        self._factors = []
        for front, matrix in zip(self._fronts, dense, strict=True):
            lower, below, share = _eliminate(matrix, BLOCK * len(front.own))
            self._factors.append((lower, below))
            if front.parent >= 0:
                _add_share(dense[front.parent], share, front.place)

    def solve(self, right: FloatArray) -> FloatArray:
        """x (n, 6) for b (n, 6), with the last factor."""
        x = np.array(right, dtype=np.float64)
        for front, (lower, below) in zip(self._fronts, self._factors, strict=True):
            own = dtrsm(1.0, lower, x[front.own].reshape(-1, 1), lower=1)
            x[front.own] = own.reshape(-1, BLOCK)
            x[front.border] -= (below @ own).reshape(-1, BLOCK)
        for front, (lower, below) in zip(reversed(self._fronts), reversed(self._factors), strict=True):
            own = x[front.own].reshape(-1, 1) - below.T @ x[front.border].reshape(-1, 1)
            x[front.own] = dtrsm(1.0, lower, own, lower=1, trans_a=1).reshape(-1, BLOCK)
        return x


def _assemble(front: _Front, blocks: FloatArray) -> FloatArray:
    """The dense matrix of a front with the blocks of H that belong to its own nodes, in Fortran order."""
    size = len(front.own) + len(front.border)
    matrix = np.zeros((size, BLOCK, size, BLOCK))
    # The matrix is symmetric: writing block (row, column) transposed into (column, row) fills Fortran order directly.
    matrix[front.columns, :, front.rows, :] = blocks[front.slots].transpose(0, 2, 1)
    return matrix.reshape(size * BLOCK, size * BLOCK).T


def _eliminate(matrix: FloatArray, own: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Lower factor of the own part, the part below it, and the update of the border (only its lower half is valid)."""
    lower, failed = dpotrf(matrix[:own, :own], lower=1, clean=1)
    if failed:
        raise NotPositiveDefinite
    if matrix.shape[0] == own:
        return lower, np.zeros((0, own)), np.zeros((0, 0))
    below = dtrsm(1.0, lower, matrix[own:, :own], side=1, lower=1, trans_a=1)
    share = dsyrk(-1.0, below, beta=1.0, c=matrix[own:, own:], lower=1)
    return lower, below, share


def _add_share(matrix: FloatArray, share: FloatArray, place: IntArray) -> None:
    """Add `share` to the rows and columns `place` (increasing, so lower stays lower) of a matrix in Fortran order.

    Whole columns are copied twice instead of single numbers once, which is several times faster.
    """
    wide = np.zeros((matrix.shape[0], len(place)))
    wide[place] = share
    matrix.T[place] += wide.T


def _plan(positions: FloatArray, first: IntArray, second: IntArray) -> list[_Front]:
    """The fronts in order of elimination, children before parents, with the places of their blocks."""
    neighbours = _adjacency(len(positions), first, second)
    fronts: list[_Front] = []
    _dissect(np.arange(len(positions)), positions, neighbours, fronts)
    step = np.empty(len(positions), dtype=np.int64)
    for number, front in enumerate(fronts):
        step[front.own] = number
    _find_borders(fronts, step, neighbours)
    _place_blocks(fronts, step, first, second)
    return fronts


def _adjacency(n: int, first: IntArray, second: IntArray) -> tuple[IntArray, IntArray]:
    """Neighbours of each node without itself, as (start (n + 1,), neighbour (2P',))."""
    apart = first != second
    row = np.concatenate([first[apart], second[apart]])
    column = np.concatenate([second[apart], first[apart]])
    order = np.argsort(row, kind="stable")
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=n))]), column[order]


def _neighbours_of(nodes: IntArray, adjacency: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
    """For all links of `nodes`: (position in `nodes`, the neighbour)."""
    start, column = adjacency
    count = start[nodes + 1] - start[nodes]
    which = np.repeat(np.arange(len(nodes)), count)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return which, column[start[nodes][which] + inside]


def _dissect(
    nodes: IntArray, positions: FloatArray, adjacency: tuple[IntArray, IntArray], fronts: list[_Front]
) -> None:
    """Append the fronts of `nodes`: two halves that do not touch, then the nodes between them."""
    if len(nodes) <= _LEAF_NODES:
        if len(nodes):
            fronts.append(_Front(own=nodes, border=nodes[:0]))
        return
    axis = int(np.argmax(np.ptp(positions[nodes], axis=0)))
    order = nodes[np.argsort(positions[nodes, axis], kind="stable")]
    low, high = order[: len(order) // 2], order[len(order) // 2 :]
    between = min(_touching(low, high, adjacency), _touching(high, low, adjacency), key=len)
    _dissect(np.setdiff1d(low, between), positions, adjacency, fronts)
    _dissect(np.setdiff1d(high, between), positions, adjacency, fronts)
    if len(between):
        fronts.append(_Front(own=between, border=nodes[:0]))


def _touching(nodes: IntArray, others: IntArray, adjacency: tuple[IntArray, IntArray]) -> IntArray:
    """Those of `nodes` that have a neighbour among `others`, in order."""
    which, neighbour = _neighbours_of(nodes, adjacency)
    return np.unique(nodes[which[np.isin(neighbour, others)]])


def _find_borders(fronts: list[_Front], step: IntArray, adjacency: tuple[IntArray, IntArray]) -> None:
    """Fill in each front's border (its own and its children's later neighbours), its parent and the places there."""
    inherited: list[list[IntArray]] = [[] for _ in fronts]
    for number, front in enumerate(fronts):
        later = np.unique(np.concatenate([_neighbours_of(front.own, adjacency)[1], *inherited[number]]))
        later = later[step[later] > number]
        front.border = later[np.argsort(step[later], kind="stable")]
        if len(front.border):
            front.parent = int(step[front.border[0]])
            inherited[front.parent].append(front.border)
    for front in fronts:
        if front.parent >= 0:
            parent = fronts[front.parent]
            place = _positions_in(np.concatenate([parent.own, parent.border]), front.border)
            front.place = (place[:, None] * BLOCK + np.arange(BLOCK)).ravel()


def _place_blocks(fronts: list[_Front], step: IntArray, first: IntArray, second: IntArray) -> None:
    """Give every block to the front that eliminates its first node, at (row, column) and mirrored."""
    count = len(first)
    off = np.flatnonzero(first != second)
    slot = np.concatenate([np.arange(count), count + off])
    row = np.concatenate([first, second[off]])
    column = np.concatenate([second, first[off]])
    home = np.minimum(step[row], step[column])
    order = np.argsort(home, kind="stable")
    bounds = np.searchsorted(home[order], np.arange(len(fronts) + 1))
    for number, front in enumerate(fronts):
        mine = order[bounds[number] : bounds[number + 1]]
        nodes = np.concatenate([front.own, front.border])
        front.slots = slot[mine]
        front.rows, front.columns = _positions_in(nodes, row[mine]), _positions_in(nodes, column[mine])


def _positions_in(nodes: IntArray, wanted: IntArray) -> IntArray:
    """The position in `nodes` of each wanted node."""
    order = np.argsort(nodes, kind="stable")
    return order[np.searchsorted(nodes[order], wanted)]
