# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Gauss-Newton with Levenberg-Marquardt damping on a deformation graph."""

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.deformable.block_cholesky import NotPositiveDefinite
from lepard_ros.registration.deformable.normal_equations import Motion, NormalEquations

# Targets (D, 3) in metres and weights (D,) of the points, for the current motion.
Aim = Callable[[Motion], tuple[FloatArray, FloatArray]]

_MIN_DAMPING, _FIRST_DAMPING, _MAX_DAMPING = 1e-8, 1e-4, 1e4


class LinearSolver(Protocol):
    """Solves the equations of one pattern: `BlockCholesky` on the CPU, `BlockConjugateGradients` on any device."""

    def factorise(self, blocks: FloatArray) -> None:
        """Take the blocks (P, 6, 6) of a new matrix."""
        ...

    def solve(self, right: FloatArray) -> FloatArray:
        """x (n, 6) for the right side (n, 6)."""
        ...


class Descent(NamedTuple):
    """The result of a descent: converged, out of iterations, or out of time."""

    motion: Motion
    energy: float
    iterations: int
    converged: bool
    out_of_time: bool


class Limits(NamedTuple):
    """When to stop: after `iterations`, below a relative decrease of `tolerance`, at `deadline` (time.perf_counter)."""

    iterations: int
    tolerance: float
    deadline: float


def descend(equations: NormalEquations, solver: LinearSolver, motion: Motion, aim: Aim, limits: Limits) -> Descent:
    """Minimise the energy over the motion of the nodes; targets and weights are updated in every iteration.

    The first step removes most of the energy. A later step that changes it by less than the tolerance, up or down,
    ends the descent: factorising again with more damping after a rise of 1 % costs as much as a step and gains nothing.
    """
    damping, energy = _FIRST_DAMPING, float("inf")
    for iteration in range(limits.iterations):
        if time.perf_counter() > limits.deadline:
            return Descent(motion, energy, iteration, False, True)
        targets, weights = aim(motion)
        before = equations.energy(motion, targets, weights)
        step = _damped_step(equations, solver, motion, targets, weights, damping)
        while step.energy > (1 + limits.tolerance) * before and step.damping < _MAX_DAMPING:
            step = _damped_step(equations, solver, motion, targets, weights, 10 * step.damping)
        if not step.energy <= before:
            return Descent(motion, before, iteration + 1, True, False)
        motion, energy, damping = step.motion, step.energy, max(step.damping / 10, _MIN_DAMPING)
        if before - energy <= limits.tolerance * before:
            return Descent(motion, energy, iteration + 1, True, False)
    return Descent(motion, energy, limits.iterations, False, False)


class _Step(NamedTuple):
    motion: Motion
    energy: float
    damping: float


def _damped_step(
    equations: NormalEquations,
    solver: LinearSolver,
    motion: Motion,
    targets: FloatArray,
    weights: FloatArray,
    damping: float,
) -> _Step:
    """One step, with damping raised until the matrix is positive definite."""
    blocks = equations.blocks(motion, equations.moments(weights))
    right = -equations.gradient(motion, targets, weights)
    own = blocks[equations.own_slots]
    while True:
        blocks[equations.own_slots] = own
        for axis in range(6):
            # The small constant regularises nodes without edges and points (a single node has no stiffness).
            blocks[equations.own_slots, axis, axis] += damping * own[:, axis, axis] + 1e-12
        try:
            solver.factorise(blocks)
            break
        except NotPositiveDefinite:
            damping *= 10
    moved = motion.step(solver.solve(right))
    return _Step(moved, equations.energy(moved, targets, weights), damping)
