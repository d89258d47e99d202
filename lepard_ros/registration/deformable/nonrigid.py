# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Non-rigid registration: fit a source surface to a target, first by matches, then by non-rigid ICP.

`warp_from_matches` is the complete pipeline from matches to a warp; `solve_nonrigid` is the solver alone. Without
matches it is the paper's baseline, N-ICP.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, IntArray
from lepard_ros.registration.deformable.acceptance import NEAR, gather_evidence, judge, node_support
from lepard_ros.registration.deformable.fit import (
    INLIER_RADIUS,
    SURFACE_POINTS,
    Fit,
    NonrigidSettings,
    Problem,
    begin,
    fit_matches,
    fit_surface,
    follow_overruled_matches,
)
from lepard_ros.registration.deformable.foreground import ForegroundSettings, find_foreground
from lepard_ros.registration.deformable.graph import DeformationGraph, GraphSettings, build_graph
from lepard_ros.registration.deformable.match_filter import FilterSettings, chosen, weigh_matches
from lepard_ros.registration.deformable.normal_equations import Motion
from lepard_ros.registration.deformable.surface_contact import sample_contact, thinned_surface
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.rigid.icp import IcpSettings, align, equations, touch
from lepard_ros.registration.types import NO_MATCHES, Matches, StageClock, Status, Surface

# The paper's baseline: without matches, correspondences are searched far away and for any orientation of the normals.
NICP = NonrigidSettings(surface_reach=0.5, surface_degrees=180.0, surface_weight=1.0)

MIN_MATCHES = 6  # minimum number of matches on the surface
MIN_INLIERS = 0.3  # minimum share of inliers before the ICP phase
MAX_STRAIN = 0.5  # RMS misfit of the edges relative to their length
# Rigid ICP before the non-rigid one: minimum number of points, iterations, and the reach in spacings of the target (6
# are 8 cm in the tracker). Chosen on the demonstration's film (seed 0).
MIN_ALIGNED, ALIGN_ITERATIONS, ALIGNMENT = 30, 8, IcpSettings(first_reach=6.0, last_reach=3.0)
FIRST_BONUS = 0.03  # share of points by which another start must lie better on the target than the first
# Least eigenvalue of that ICP's normal equations, per point and with turns in units of the object's radius, for which
# every rigid motion is observed: 0.06 to 0.12 for the bodies of three films, 0.0001 for a disc and a sheet.
MIN_CONSTRAINT = 0.02


@dataclass(frozen=True)
class WarpSettings:
    """All settings from matches to a warp. foreground: segmentation in `Matcher.warp`; None uses the whole cloud."""

    graph: GraphSettings = field(default_factory=GraphSettings)
    solver: NonrigidSettings = field(default_factory=NonrigidSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    foreground: ForegroundSettings | None = field(default_factory=ForegroundSettings)


def warp_from_matches(
    source: FloatArray, target: FloatArray, matches: Matches, settings: WarpSettings | None = None
) -> Warp:
    """Warp a source cloud to a target cloud: weight matches by agreement with their neighbours, then fit.

    source, target: (N, 3), or organised (H, W, 3) with NaN without a measurement. The result's `match_inliers` has one
    flag for each of `matches`.
    """
    settings = settings or WarpSettings()
    clock = StageClock()
    matches = _checked(matches)
    surfaces = [thinned_surface(cloud, settings.graph.coverage / 3) for cloud in (source, target)]
    clock.stop("normals")
    weighted = weigh_matches(matches, settings.filter, matched_normals(matches, *surfaces))
    clock.stop("filter")
    graph = build_graph(source, settings.graph)
    clock.stop("graph")
    warp = solve_nonrigid(graph, surfaces[0], surfaces[1], weighted, settings.solver)
    return replace(warp, seconds=clock.seconds | warp.seconds)


def without_background(cloud: FloatArray, settings: ForegroundSettings | None) -> FloatArray:
    """The cloud, (N, 3) or (H, W, 3), with its background set to NaN."""
    if settings is None:
        return cloud
    flat = np.array(cloud, dtype=np.float64).reshape(-1, 3)
    finite = np.flatnonzero(np.isfinite(flat).all(axis=1))
    flat[finite[~find_foreground(flat[finite], settings)]] = np.nan
    return flat.reshape(np.shape(cloud))


def matched_normals(matches: Matches, source: Surface, target: Surface) -> tuple[FloatArray, FloatArray]:
    """The normals (M, 3) of the surfaces at the matched points of source and target."""
    ends = ((matches.source, source), (matches.target, target))
    first, second = (surface.normals[surface.tree.query(points)[1]] for points, surface in ends)
    return first, second


def solve_nonrigid(
    graph: DeformationGraph,
    source: Surface,
    target: Surface,
    matches: Matches | None = None,
    settings: NonrigidSettings | None = None,
    start: Warp | None = None,
) -> Warp:
    """Fit a graph to a target. On failure the status is not OK and the warp is the identity.

    source: points on the graph's surface, to be laid on the target. matches: their confidences are the weights of the
    fit; one with confidence 0 is not fitted, but is evidence. None for N-ICP. start: a warp on the same graph to begin
    with; else the matches say where each node begins, and without matches all nodes rest.
    """
    settings = settings or (NICP if matches is None else NonrigidSettings())
    given = NO_MATCHES if matches is None else _checked(matches)
    clock = StageClock()
    problem = _problem(graph, source, target, given, settings)
    status = _reason_not_to_begin(problem, needs_matches=matches is not None)
    if status is not Status.OK:
        return _refused(graph, status, given)
    fit = begin(problem, start, np.flatnonzero(graph.active))
    if matches is not None:
        fit = fit_matches(problem, fit)
        # A start, such as the warp of the last cloud, outweighs matches that contradict it.
        if start is None and not problem.out_of_time:
            led = follow_overruled_matches(problem, fit)
            fit = fit if led is fit else fit_matches(problem, led)
        clock.stop("matches")
        status = _verdict_on_matches(problem, fit)
        if status is not Status.OK:
            return replace(_refused(graph, status, given), iterations=fit.iterations, seconds=clock.seconds)
    fit = fit_surface(problem, fit)
    clock.stop("surface")
    warp = _finished(graph, problem, fit, given)
    clock.stop("verdict")
    return replace(warp, seconds=clock.seconds)


class SurfaceFollower:
    """Tracks a graph through consecutive clouds by non-rigid ICP alone, each from a warp that is nearly correct.

    Contact points, skinning and the symbolic factorisation are computed once, which saves a third of the time.
    """

    def __init__(self, graph: DeformationGraph, source: Surface, settings: NonrigidSettings) -> None:
        """graph and source as in `solve_nonrigid`; they must not change afterwards."""
        self.graph, self._settings = graph, settings
        self._problem = _problem(graph, source, source, NO_MATCHES, settings)
        self._first = begin(self._problem, None, np.flatnonzero(graph.active))
        self._skin = graph.skin(self._problem.contact.points)

    def solve(self, target: Surface, start: Warp) -> Warp:
        """Fit the warp to a target, starting from a warp on the same nodes, which should be placed on the target."""
        deadline = time.perf_counter() + self._settings.max_seconds
        contact = replace(self._problem.contact, target=target)
        problem = replace(self._problem, contact=contact, deadline=deadline)
        status = _reason_not_to_begin(problem, needs_matches=False)
        if status is not Status.OK:
            return _refused(self.graph, status, NO_MATCHES)
        rows = np.flatnonzero(self.graph.active)
        fit = replace(self._first, motion=Motion(start.rotation_matrices[rows], start.translations[rows]))
        return _finished(self.graph, problem, fit_surface(problem, fit), NO_MATCHES)

    def is_constrained(self, target: Surface, warp: Warp) -> bool:
        """Whether the target shows every rigid motion of the warped surface: a flat or a round one may slide unseen."""
        seen = self._facing_sensor(target, warp)
        if len(seen.points) < MIN_ALIGNED:
            return False
        given = equations(seen, target, np.eye(4)[None], ALIGNMENT.last_reach * target.spacing, ALIGNMENT)
        radius = float(np.sqrt(np.square(seen.points - seen.points.mean(axis=0)).sum(axis=1).mean()))
        unit = np.array([1.0, 1.0, 1.0, 1 / radius, 1 / radius, 1 / radius])  # turns as metres at the radius
        hessian = given.hessian[0] * np.outer(unit, unit) / max(float(given.total[0]), 1e-12)
        return bool(np.linalg.eigvalsh(hessian)[0] > MIN_CONSTRAINT)

    def place(self, target: Surface, starts: list[Warp]) -> Warp:
        """The best of the starts, moved rigidly onto the target by point-to-plane ICP of the surface facing the sensor.

        Non-rigid ICP pulls each node along the target's normals only, and ends before a common turn or slide has spread
        through the graph. As one rigid motion these are observed by the whole surface. Each start is also tried from
        where its centre is that of the target: the body may have moved further than ICP reaches.
        """
        placed = [self._aligned(target, start) for start in starts]
        shares = [share + FIRST_BONUS * (number == 0) for number, (_, share) in enumerate(placed)]
        return placed[int(np.argmax(shares))][0]

    def _aligned(self, target: Surface, start: Warp) -> tuple[Warp, float]:
        """The start moved rigidly onto the target, and the share of its surface facing the sensor that lies on it."""
        seen = self._facing_sensor(target, start)
        if len(seen.points) < MIN_ALIGNED:
            return start, 0.0
        centred = np.eye(4)
        centred[:3, 3] = target.points.mean(axis=0) - seen.points.mean(axis=0)
        motions, _ = align(seen, target, np.stack([np.eye(4), centred]), ALIGN_ITERATIONS, ALIGNMENT)
        lying = touch(seen, target, motions, ALIGNMENT.last_reach * target.spacing).lying(target.spacing).mean(axis=1)
        best = int(lying.argmax())
        return start.moved_by(motions[best]), float(lying[best])

    def _facing_sensor(self, target: Surface, warp: Warp) -> Surface:
        """The warped contact points that face the target's sensor."""
        contact = self._problem.contact
        moved, turns, covered = warp.apply_with_turns(contact.points, self._skin)
        normals = np.einsum("nij,nj->ni", turns, contact.normals)
        normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
        facing = covered & (np.einsum("ni,ni->n", normals, target.viewpoint - moved) > 0)
        return Surface(moved[facing], normals[facing], target.spacing, target.viewpoint)


def _problem(
    graph: DeformationGraph, source: Surface, target: Surface, matches: Matches, settings: NonrigidSettings
) -> Problem:
    """The solver's input: active nodes, their matches with weight, contact points."""
    fitted = (matches.confidence > 0) & graph.skin(matches.source).covered
    contact = sample_contact(source, target, graph.skin(source.points).covered, SURFACE_POINTS)
    deadline = time.perf_counter() + settings.max_seconds
    return Problem(graph.active_part(), chosen(matches, fitted), contact, settings, deadline)


def _checked(matches: Matches) -> Matches:
    """Matches as float64; raises InputError if the shapes disagree or a value is not finite."""
    source, target, confidence = (np.asarray(part, dtype=np.float64) for part in matches)
    count = confidence.size
    if source.shape != (count, 3) or target.shape != (count, 3) or confidence.shape != (count,):
        raise InputError("Matches need source (M, 3), target (M, 3) and confidence (M,) with one M.")
    if not all(np.isfinite(part).all() for part in (source, target, confidence)):
        raise InputError("Matches must be finite; drop those with NaN or infinity.")
    return Matches(source, target, confidence)


def _reason_not_to_begin(problem: Problem, needs_matches: bool) -> Status:
    if len(problem.graph.nodes) == 0 or len(problem.contact.points) == 0 or len(problem.contact.target.points) == 0:
        return Status.TOO_FEW_POINTS
    anchors = problem.matches.source
    if not needs_matches:
        return Status.OK
    if len(anchors) < MIN_MATCHES:
        return Status.TOO_FEW_MATCHES
    spread = np.linalg.svd(anchors - anchors.mean(axis=0), compute_uv=False)
    return Status.DEGENERATE if spread[1] < 0.02 * spread[0] else Status.OK


def _verdict_on_matches(problem: Problem, fit: Fit) -> Status:
    inliers = int((fit.misfit < INLIER_RADIUS).sum())
    if fit.out_of_time and fit.iterations == 0:  # later iterations only refine the result
        return Status.OUT_OF_TIME
    if inliers < max(MIN_INLIERS * len(fit.misfit), MIN_MATCHES):
        return Status.TOO_FEW_INLIERS
    return Status.OK if fit.strain < MAX_STRAIN else Status.HIGH_RESIDUAL


def _refused(graph: DeformationGraph, status: Status, matches: Matches) -> Warp:
    """The identity warp."""
    return Warp.rest(
        graph,
        status,
        support=np.zeros(len(graph.nodes)),
        match_inliers=np.zeros(len(matches.confidence), dtype=bool),
    )


def _finished(graph: DeformationGraph, problem: Problem, fit: Fit, matches: Matches) -> Warp:
    """The warp with its status and evidence."""
    assert fit.touched is not None
    warp = _warp_of(graph, fit)
    moved, carried = warp.apply(matches.source)
    agrees = carried & (np.linalg.norm(moved - matches.target, axis=1) < INLIER_RADIUS)
    support = node_support(problem.graph, matches, agrees)
    evidence = gather_evidence(problem.contact, fit, agrees, support)
    status = judge(evidence, problem.settings.min_quality) if len(matches.confidence) else Status.OK
    if fit.strain >= MAX_STRAIN:
        status = Status.HIGH_RESIDUAL
    on_nodes = np.zeros(len(graph.nodes))
    on_nodes[graph.active] = support
    if status is not Status.OK:
        warp = _refused(graph, status, matches)
    return replace(
        warp,
        support=on_nodes,
        energy=fit.energy,
        converged=fit.converged,
        overlap=float((fit.touched.distance < NEAR).mean()),
        residual=evidence.residual,
        evidence=evidence,
        match_inliers=agrees & (matches.confidence > 0),
        iterations=fit.iterations,
        cut_edges=fit.cuts,
    )


def _warp_of(graph: DeformationGraph, fit: Fit) -> Warp:
    """The fitted motion of the active nodes on the whole graph; the other nodes do not move."""
    rows: IntArray = np.flatnonzero(graph.active)
    rotation, translation = np.tile(np.eye(3), (len(graph.nodes), 1, 1)), np.zeros_like(graph.nodes)
    rotation[rows], translation[rows] = fit.motion.rotation, fit.motion.translation
    idle = graph.edges[~graph.active[graph.edges[:, 0]]]
    edges = np.unique(np.concatenate([idle, rows[fit.system.graph.edges]]), axis=0)
    return Warp.from_motion(replace(graph, edges=edges), rotation, translation)
