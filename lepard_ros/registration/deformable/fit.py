# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The phases of a non-rigid fit. Each is a function from one `Fit` to the next; nothing is changed in place."""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import BoolArray, FloatArray, IntArray
from lepard_ros.geometry.rigid_motion import kabsch, nearest_rotation
from lepard_ros.registration.deformable.block_cholesky import BlockCholesky
from lepard_ros.registration.deformable.block_pcg import BlockConjugateGradients
from lepard_ros.registration.deformable.gauss_newton import Aim, Limits, LinearSolver, descend
from lepard_ros.registration.deformable.graph import DeformationGraph, Skinning
from lepard_ros.registration.deformable.match_filter import chosen
from lepard_ros.registration.deformable.normal_equations import DataTerm, Motion, NormalEquations, Pattern
from lepard_ros.registration.deformable.surface_contact import Contact, Touch, closest_targets, touch
from lepard_ros.registration.deformable.warp import Warp, edge_stretch
from lepard_ros.registration.types import Matches

SURFACE_POINTS = 1200  # source points used by the non-rigid ICP
INLIER_RADIUS = 0.05  # metres: maximum residual of an inlier match
MATCH_SCALE = 0.04  # metres: a match with this residual gets a quarter of its weight
MAX_STRETCH = 1.6  # edges that the matches stretch further are cut: they joined surfaces that only touched
# A part without matches could swing freely: its nodes are held where the surrounding matches first placed them.
HOLD_WEIGHT, HOLD_DISTANCE = 0.01, 0.1  # metres to the nearest match


@dataclass(frozen=True)
class NonrigidSettings:
    """Settings of the non-rigid fit. Lengths in metres.

    stiffness: weight of the as-rigid-as-possible term relative to the matches; both data terms are normalised to at
    most one point per node, so that the balance does not depend on the density. surface_weight: weight of the ICP term
    (0 skips that phase). surface_reach: maximum correspondence distance. surface_degrees: maximum angle between
    normals. iterations: maximum per phase. tolerance: a smaller relative change of the energy ends a phase.
    max_cut_rounds: how often overstretched edges are cut and the matches fitted again.
    min_quality: minimum log-odds for acceptance; higher refuses more, -inf accepts all. max_seconds: total time limit.
    device: of the linear solver, "cpu" (Cholesky) or a torch device such as "cuda" (conjugate gradients).
    """

    stiffness: float = 0.1
    surface_weight: float = 0.5
    surface_reach: float = 0.04
    surface_degrees: float = 45.0
    iterations: int = 20
    tolerance: float = 0.01
    max_cut_rounds: int = 3
    min_quality: float = 1.0
    max_seconds: float = 120.0
    device: str = "cpu"


@dataclass(frozen=True)
class Problem:
    """The constant input of a fit: a graph, matches (M) on it, and the target surface."""

    graph: DeformationGraph
    matches: Matches
    contact: Contact
    settings: NonrigidSettings
    deadline: float

    @property
    def out_of_time(self) -> bool:
        """Whether the time limit is reached."""
        return time.perf_counter() > self.deadline


@dataclass(frozen=True)
class System:
    """A graph and every point it carries (matches, held nodes, contact points), with one symbolic factorisation."""

    graph: DeformationGraph
    data: DataTerm
    pattern: Pattern
    solver: LinearSolver
    known: dict[tuple[bytes, float], NormalEquations] = field(
        default_factory=dict
    )  # for fits of one system to many clouds

    def equations(self, rows: IntArray, stiffness: float) -> NormalEquations:
        """The equations of some of the points; the last ones are kept."""
        name = rows.tobytes(), stiffness
        if name not in self.known:
            skin = self.data.skin
            part = Skinning(skin.nodes[rows], skin.weights[rows], skin.covered[rows])
            self.known.clear()
            self.known[name] = NormalEquations(
                self.graph, DataTerm(self.data.points[rows], part), stiffness, self.pattern
            )
        return self.known[name]


@dataclass(frozen=True)
class Fit:
    """The state of a fit.

    held, held_at: (H, 3) nodes without matches around them, and the positions that hold them. misfit: (M,) residuals of
    the matches in metres. strain: RMS misfit of the edges relative to their length. touched: contact points on the
    target, after the ICP phase.
    """

    system: System
    motion: Motion
    held: FloatArray
    held_at: FloatArray
    misfit: FloatArray
    strain: float = 0.0
    energy: float = 0.0
    iterations: int = 0
    cuts: int = 0
    converged: bool = False
    out_of_time: bool = False
    touched: Touch | None = None


def begin(problem: Problem, start: Warp | None, rows: IntArray) -> Fit:
    """Initialise the nodes: from a given warp (its nodes `rows`), from the surrounding matches, or at rest."""
    nodes, matches = problem.graph.nodes, problem.matches
    if start is not None:
        motion = Motion(start.rotation_matrices[rows], start.translations[rows])
    elif len(matches.source):
        motion = local_motions(nodes, matches)
    else:
        motion = Motion(np.tile(np.eye(3), (len(nodes), 1, 1)), np.zeros_like(nodes))
    lonely = np.zeros(len(nodes), dtype=bool)
    if len(matches.source):
        lonely = cKDTree(matches.source).query(nodes)[0] > HOLD_DISTANCE
    held = nodes[lonely]
    system = build_system(problem, problem.graph, held)
    return Fit(system, motion, held, held + motion.translation[lonely], np.full(len(matches.source), np.inf))


def build_system(problem: Problem, graph: DeformationGraph, held: FloatArray) -> System:
    """Skin all points to a graph and analyse the pattern of its equations, once for all phases."""
    points = np.concatenate([problem.matches.source, held, problem.contact.points])
    skin = graph.skin(points)
    pattern = Pattern.of(graph, skin.nodes)
    solver: LinearSolver
    if problem.settings.device == "cpu":
        solver = BlockCholesky(graph.nodes, pattern.first, pattern.second)
    else:
        solver = BlockConjugateGradients(len(graph.nodes), pattern.first, pattern.second, problem.settings.device)
    return System(graph, DataTerm(points, skin), pattern, solver)


def fit_matches(problem: Problem, fit: Fit) -> Fit:
    """Fit the matches, and repeat after each round of cuts."""
    fit = _fit_matches_once(problem, fit)
    for _ in range(problem.settings.max_cut_rounds):
        cut = cut_stretched(problem, fit)
        if cut is fit or problem.out_of_time:
            break
        fit = _fit_matches_once(problem, cut)
    return fit


def _fit_matches_once(problem: Problem, fit: Fit) -> Fit:
    """Gauss-Newton on the matches with robust weights."""
    count = len(problem.matches.source)
    rows = np.arange(count + len(fit.held))
    equations = fit.system.equations(rows, problem.settings.stiffness)
    carried = fit.system.data.skin.covered[rows].astype(float)
    targets = np.concatenate([problem.matches.target, fit.held_at])
    trust = _per_node(problem, problem.matches.confidence * carried[:count])
    hold = HOLD_WEIGHT * carried[count:]

    def aim(motion: Motion) -> tuple[FloatArray, FloatArray]:
        misfit = np.linalg.norm(equations.warped(motion)[:count] - problem.matches.target, axis=1)
        return targets, np.concatenate([trust * _robust(misfit), hold])

    return _descended(problem, fit, equations, aim)


def fit_surface(problem: Problem, fit: Fit) -> Fit:
    """Gauss-Newton on the nearest surface, with the matches that agree as anchors against sliding."""
    settings, matches, count = problem.settings, problem.matches, len(problem.matches.source)
    first = count + len(fit.held)
    anchors = np.flatnonzero((fit.misfit < INLIER_RADIUS) & fit.system.data.skin.covered[:count])
    rows = np.concatenate([anchors, np.arange(first, first + len(problem.contact.points))])
    equations = fit.system.equations(rows, settings.stiffness)
    skin = fit.system.data.skin
    targets, trust = matches.target[anchors], _per_node(problem, matches.confidence[anchors])
    weight = _per_node(problem, settings.surface_weight * skin.covered[first:])
    carrier = skin.nodes[first:, 0]

    def touched_by(motion: Motion) -> tuple[FloatArray, Touch]:
        warped = equations.warped(motion)
        contact = touch(problem.contact, warped[len(anchors) :], motion.rotation[carrier], settings.surface_reach)
        return warped[: len(anchors)], contact

    def aim(motion: Motion) -> tuple[FloatArray, FloatArray]:
        anchored, touched = touched_by(motion)
        nearest, near = closest_targets(touched, settings.surface_reach, settings.surface_degrees)
        hold = trust * _robust(np.linalg.norm(anchored - targets, axis=1))
        return np.concatenate([targets, nearest]), np.concatenate([hold, weight * near])

    if settings.surface_weight > 0:
        fit = _descended(problem, fit, equations, aim)
    return replace(fit, touched=touched_by(fit.motion)[1])


def _descended(problem: Problem, fit: Fit, equations: NormalEquations, aim: Aim) -> Fit:
    limits = Limits(problem.settings.iterations, problem.settings.tolerance, problem.deadline)
    end = descend(equations, fit.system.solver, fit.motion, aim, limits)
    misfit = fit.misfit
    if len(misfit):
        all_matches = fit.system.equations(np.arange(len(misfit)), 0.0)
        misfit = np.linalg.norm(all_matches.warped(end.motion) - problem.matches.target, axis=1)
    return replace(
        fit,
        motion=end.motion,
        misfit=misfit,
        strain=strain(fit.system.graph, equations.edge_residuals(end.motion)),
        energy=end.energy,
        iterations=fit.iterations + end.iterations,
        converged=end.converged,
        out_of_time=end.out_of_time,
    )


def strain(graph: DeformationGraph, residuals: FloatArray) -> float:
    """Root mean square of the edge residuals (2E, 3), of the edges' length."""
    ends = graph.nodes[graph.edges]
    length = float(np.mean(np.square(ends[:, 1] - ends[:, 0]))) if len(ends) else 1.0
    return float(np.sqrt(np.mean(np.square(residuals)) / max(length, 1e-12))) if len(ends) else 0.0


def cut_stretched(problem: Problem, fit: Fit) -> Fit:
    """Cut the edges that the matches pull apart; the same fit if there are none."""
    too_long = edge_stretch(fit.system.graph, fit.motion.translation) > MAX_STRETCH
    if not too_long.any():
        return fit
    system = build_system(problem, fit.system.graph.without_edges(too_long), fit.held)
    return replace(fit, system=system, cuts=fit.cuts + int(too_long.sum()))


def follow_overruled_matches(problem: Problem, fit: Fit) -> Fit:
    """Let nodes whose own matches were overruled by those around them go where these lead; the same fit if none are.

    Where one surface lies on another, the matches of the smaller one look like outliers of the larger one's motion.
    They are not if they move as one piece: then the two are cut apart.
    """
    agrees = fit.misfit < INLIER_RADIUS
    overruled = ~agrees & fit.system.data.skin.covered[: len(agrees)]
    overruled[overruled] = moving_together(chosen(problem.matches, overruled), INLIER_RADIUS)
    own, other = (_weight_on_nodes(problem, fit, which) for which in (overruled, agrees))
    led = own > np.maximum(other, 0.1 * own.max(initial=0.0))
    if not led.any():
        return fit
    lead = local_motions(fit.system.graph.nodes[led], chosen(problem.matches, overruled), neighbours=6, width=0.03)
    rotation, translation = fit.motion.rotation.copy(), fit.motion.translation.copy()
    rotation[led], translation[led] = lead.rotation, lead.translation
    return cut_stretched(problem, replace(fit, motion=Motion(rotation, translation)))


def _weight_on_nodes(problem: Problem, fit: Fit, which: BoolArray) -> FloatArray:
    """(n,) how much of these matches (M,) each node carries."""
    skin, rows = fit.system.data.skin, np.flatnonzero(which)
    weights = skin.weights[rows] * problem.matches.confidence[rows, None]
    return np.asarray(np.bincount(skin.nodes[rows].ravel(), weights.ravel(), len(problem.graph.nodes)), dtype=float)


def _per_node(problem: Problem, weights: FloatArray) -> FloatArray:
    """Weights scaled down to one a node where there are more."""
    return weights * min(1.0, len(problem.graph.nodes) / max(len(weights), 1))


def _robust(misfit: FloatArray) -> FloatArray:
    """Geman and McClure's weights of misfits (N,): 1 for none, a quarter at the scale, which is wide at first."""
    scale = max(MATCH_SCALE, 3.0 * float(np.median(misfit))) if len(misfit) else MATCH_SCALE
    return np.square(scale**2 / (scale**2 + np.square(misfit)))


def local_motions(nodes: FloatArray, matches: Matches, neighbours: int = 24, width: float = 0.1) -> Motion:
    """An initial motion for nodes (n, 3): the rigid motion of the matches around each.

    If these are collinear or coplanar, a rotation is unconstrained; the motion of all matches fills it in.
    """
    count = min(neighbours, len(matches.source))
    distance, index = cKDTree(matches.source).query(nodes, count)
    distance, index = distance.reshape(len(nodes), count), index.reshape(len(nodes), count)
    width_here = np.maximum(width, distance[:, count // 3])[:, None]
    weight = np.exp(-0.5 * np.square(distance / width_here)) * matches.confidence[index]
    weight /= np.maximum(weight.sum(axis=1, keepdims=True), 1e-12)
    source, target = matches.source[index], matches.target[index]
    centre_source = np.einsum("nk,nki->ni", weight, source)
    centre_target = np.einsum("nk,nki->ni", weight, target)
    moment = np.einsum("nk,nki,nkj->nij", weight, target - centre_target[:, None], source - centre_source[:, None])
    moment += 0.1 * width**2 * _rigid_motion(matches)[:3, :3]
    rotation = nearest_rotation(torch.from_numpy(moment)).numpy()
    moved = np.einsum("nij,nj->ni", rotation, nodes - centre_source) + centre_target
    return Motion(rotation, moved - nodes)


def _rigid_motion(matches: Matches) -> FloatArray:
    """(4, 4): the rigid motion of all matches."""
    parts = (torch.from_numpy(np.ascontiguousarray(part)) for part in matches)
    return kabsch(*parts).numpy()


def moving_together(matches: Matches, radius: float, neighbours: int = 6) -> BoolArray:
    """Mask (M,) of the matches that keep their distance to at least three neighbours within 25 %.

    radius: metres; neighbours are searched within twice that.
    """
    count = min(neighbours + 1, len(matches.source))
    if count < 4:
        return np.zeros(len(matches.source), dtype=bool)
    before, index = cKDTree(matches.source).query(matches.source, count)
    after = np.linalg.norm(matches.target[index] - matches.target[:, None], axis=-1)
    kept = (before < 2 * radius) & (np.abs(after - before) < 0.25 * before + 0.005)
    return kept[:, 1:].sum(axis=1) >= 3
