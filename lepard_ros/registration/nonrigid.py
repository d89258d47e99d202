# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Non-rigid registration: bend a source surface onto a target, by matches first and by nearest surface then.

`warp_from_matches` is the whole way from matches to a warp; `solve_nonrigid` is the solver alone. Without matches it is
the paper's baseline, N-ICP.
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from scipy.spatial import cKDTree

from lepard_ros.cloud.normals import surface_normals
from lepard_ros.errors import InputError
from lepard_ros.registration.block_cholesky import BlockCholesky
from lepard_ros.registration.block_pcg import BlockConjugateGradients
from lepard_ros.registration.gauss_newton import Aim, Descent, Limits, LinearSolver, descend
from lepard_ros.registration.graph import BoolArray, DeformationGraph, GraphSettings, IntArray, Skinning, build_graph
from lepard_ros.registration.kabsch import kabsch, nearest_rotation
from lepard_ros.registration.match_filter import FilterSettings, filter_matches
from lepard_ros.registration.normal_equations import DataTerm, Motion, NormalEquations
from lepard_ros.registration.types import FloatArray, Matches, Status
from lepard_ros.registration.warp import Warp, edge_stretch


@dataclass(frozen=True)
class NonrigidSettings:
    """How a graph is fitted. Lengths in metres, times in seconds.

    match_weight, closest_weight, arap_weight: of the terms of the energy; where there are more matches or points than
    nodes, the first two are scaled down to as many as nodes, so that the balance does not depend on the density.
    match_iterations, closest_iterations: at most, as in the paper. tolerance: a relative drop of the energy below this
    ends a phase. match_scale: a match this far off counts a quarter. closest_reach: how far the nearest surface may be.
    closest_degrees: by how much normals may differ. closest_points: of the source, used for the nearest surface.
    longest_stretch: an edge that the matches stretch beyond this is cut, in up to most_cuts rounds of a fit.
    supposed_weight: with which a node stays where the matches around it suggest, if none is within supposed_distance:
    nothing else keeps a part without matches from swinging about its seam. least_matches: to begin at all.
    inlier_radius: of matches that agree. least_inliers: share of them to accept.
    largest_strain: root mean square misfit of the edges, of their length. budget: in all. device: of the linear solver,
    "cpu" (Cholesky) or a torch device such as "cuda" (conjugate gradients).
    """

    match_weight: float = 1.0
    closest_weight: float = 0.5
    arap_weight: float = 0.1
    match_iterations: int = 20
    closest_iterations: int = 45
    tolerance: float = 3e-4
    match_scale: float = 0.04
    closest_reach: float = 0.04
    closest_degrees: float = 45.0
    closest_points: int = 2000
    longest_stretch: float = 1.6
    most_cuts: int = 3
    supposed_weight: float = 0.01
    supposed_distance: float = 0.1
    least_matches: int = 6
    inlier_radius: float = 0.05
    least_inliers: float = 0.3
    largest_strain: float = 0.5
    budget: float = 120.0
    device: str = "cpu"


# The paper's baseline: no matches, so that the nearest surface has to be sought far away and whichever way it faces.
NICP = NonrigidSettings(closest_reach=0.5, closest_degrees=180.0, closest_weight=1.0)


@dataclass(frozen=True)
class WarpSettings:
    """All settings from matches to a warp."""

    graph: GraphSettings = field(default_factory=GraphSettings)
    solver: NonrigidSettings = field(default_factory=NonrigidSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)


def warp_from_matches(
    source: FloatArray, target: FloatArray, matches: Matches, settings: WarpSettings | None = None
) -> Warp:
    """Warp a source cloud to a target cloud: drop matches that do not move with their neighbours, then fit.

    source, target: (N, 3), or organised (H, W, 3) with NaN where nothing was seen. The result's `match_inliers` has one
    flag for each of `matches`.
    """
    settings = settings or WarpSettings()
    began = time.perf_counter()
    kept = filter_matches(matches, settings.filter)
    graph = build_graph(source, settings.graph)
    prepared = time.perf_counter()
    target = finite_points(target)
    warp = solve_nonrigid(
        graph, finite_points(source), target, surface_normals(target), chosen(matches, kept), settings.solver
    )
    inliers = kept.copy()
    inliers[kept] = warp.match_inliers
    return replace(warp, match_inliers=inliers, seconds={"graph": prepared - began, **warp.seconds})


def solve_nonrigid(
    graph: DeformationGraph,
    source_points: FloatArray,
    target_points: FloatArray,
    target_normals: FloatArray | None = None,
    matches: Matches | None = None,
    settings: NonrigidSettings | None = None,
    start: Warp | None = None,
) -> Warp:
    """Fit a graph to a target. Ends with a status other than OK, and a warp that moves nothing, if that fails.

    source_points: (N, 3) on the graph's surface, to be laid on target_points (T, 3), with target_normals (T, 3) or
    None (then distances are not measured along normals). matches: None for N-ICP. start: a warp on the same graph to
    begin with; else the matches say where each node begins, and without matches all nodes rest.
    """
    settings = settings or (NICP if matches is None else NonrigidSettings())
    used = _no_matches() if matches is None else _checked(matches)
    fit = _Fit(graph, settings, used)
    status = _reason_not_to_begin(fit, target_points, needs_matches=matches is not None)
    if status is not Status.OK:
        return fit.refused(status)
    fit.begin(start)
    if matches is not None:
        status = fit.follow_matches_and_cut()
        # A start, such as the last cloud's warp, is better evidence than matches that contradict it.
        if status is Status.OK and start is None and not fit.out_of_time and fit.hear_outvoted():
            status = fit.follow_matches_and_cut()
        if status is not Status.OK:
            return fit.refused(status)
    contact = _Contact(source_points, target_points, target_normals, settings)
    fit.follow_surface(contact)
    return fit.accepted(contact)


def finite_points(cloud: FloatArray) -> FloatArray:
    """The finite points (N, 3) of a cloud (N, 3) or (H, W, 3), float64."""
    flat = np.asarray(cloud, dtype=np.float64).reshape(-1, 3)
    return flat[np.isfinite(flat).all(axis=1)]


def chosen(matches: Matches, kept: BoolArray) -> Matches:
    """The matches that are kept."""
    return Matches(matches.source[kept], matches.target[kept], matches.confidence[kept])


def local_motions(nodes: FloatArray, matches: Matches, neighbours: int = 24, width: float = 0.1) -> Motion:
    """A first motion for nodes (n, 3): the rigid motion of the matches around each.

    Where these lie on a line or a plane, they leave a turn open; the motion of all matches decides it.
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


def moving_together(matches: Matches, radius: float, neighbours: int = 6) -> BoolArray:
    """(M,) matches that keep their distance to at least three of their nearest, up to a quarter of it.

    radius: metres; nearest within twice that.
    """
    count = min(neighbours + 1, len(matches.source))
    if count < 4:
        return np.zeros(len(matches.source), dtype=bool)
    before, index = cKDTree(matches.source).query(matches.source, count)
    after = np.linalg.norm(matches.target[index] - matches.target[:, None], axis=-1)
    kept = (before < 2 * radius) & (np.abs(after - before) < 0.25 * before + 0.005)
    return kept[:, 1:].sum(axis=1) >= 3


def _rigid_motion(matches: Matches) -> FloatArray:
    """(4, 4): the rigid motion of all matches."""
    parts = (torch.from_numpy(np.ascontiguousarray(part)) for part in matches)
    return kabsch(*parts).numpy()


def _no_matches() -> Matches:
    return Matches(np.zeros((0, 3)), np.zeros((0, 3)), np.zeros(0))


def _checked(matches: Matches) -> Matches:
    """Matches as float64; raises InputError when the shapes disagree or a number is not finite."""
    source, target, confidence = (np.asarray(part, dtype=np.float64) for part in matches)
    count = confidence.size
    if source.shape != (count, 3) or target.shape != (count, 3) or confidence.shape != (count,):
        raise InputError("Matches need source (M, 3), target (M, 3) and confidence (M,) with one M.")
    if not all(np.isfinite(part).all() for part in (source, target, confidence)):
        raise InputError("Matches must be finite; drop those with NaN or infinity.")
    return Matches(source, target, confidence)


def _reason_not_to_begin(fit: "_Fit", target: FloatArray, needs_matches: bool) -> Status:
    if len(fit.nodes_in_use) == 0 or len(target) == 0:
        return Status.TOO_FEW_POINTS
    if not needs_matches:
        return Status.OK
    anchors = fit.matches.source[fit.carried]
    if len(anchors) < fit.settings.least_matches:
        return Status.TOO_FEW_MATCHES
    spread = np.linalg.svd(anchors - anchors.mean(axis=0), compute_uv=False)
    return Status.DEGENERATE if spread[1] < 0.02 * spread[0] else Status.OK


class _Fit:
    """One fit of a graph: the nodes in use and their motion, phase after phase."""

    def __init__(self, graph: DeformationGraph, settings: NonrigidSettings, matches: Matches) -> None:
        self.settings, self.matches = settings, matches
        self._use(graph)
        self.deadline = time.perf_counter() + settings.budget
        self.seconds: dict[str, float] = {}
        self.inliers = np.zeros(len(matches.confidence), dtype=bool)
        self.iterations = self.cuts = 0
        self.followed = False

    def _use(self, graph: DeformationGraph) -> None:
        self.graph = graph
        self.nodes_in_use = np.flatnonzero(graph.active)
        self._number = np.zeros(len(graph.nodes), dtype=np.int64)
        self._number[self.nodes_in_use] = np.arange(len(self.nodes_in_use))
        edges = self._number[graph.edges[graph.active[graph.edges[:, 0]]]]
        used = graph.active[self.nodes_in_use]
        self._part = DeformationGraph(graph.nodes[self.nodes_in_use], edges, used, graph.coverage, graph.skinning)
        self.carried = graph.skin(self.matches.source).covered

    def follow_matches_and_cut(self) -> Status:
        """Follow the matches, and again after each round of cuts that this calls for."""
        status = self.follow_matches()
        for _ in range(self.settings.most_cuts):
            if self.out_of_time or not self.cut():
                break
            status = self.follow_matches()
        return status

    def cut(self) -> bool:
        """Cut the edges that the matches pull apart: they joined surfaces that only touched. Whether there were any."""
        moved = np.zeros_like(self.graph.nodes)
        moved[self.nodes_in_use] = self.motion.translation
        too_long = edge_stretch(self.graph, moved) > self.settings.longest_stretch
        if too_long.any():
            self._use(self.graph.without_edges(too_long))
        self.cuts += int(too_long.sum())
        return bool(too_long.any())

    def hear_outvoted(self) -> bool:
        """Let nodes whose own matches were outvoted by those around them go where these lead; whether there were any.

        Where one surface lies on another, the matches of the smaller one look like outliers of the larger one's
        motion. They are not if they move as one piece: then the two are cut apart.
        """
        outvoted = self.carried & ~self.inliers
        outvoted[outvoted] = moving_together(chosen(self.matches, outvoted), self.settings.inlier_radius)
        if not outvoted.any():
            return False
        own, other = self._weight_on_nodes(outvoted), self._weight_on_nodes(self.carried & self.inliers)
        led = own > np.maximum(other, 0.1 * own.max())
        if not led.any():
            return False
        motion = local_motions(self._part.nodes[led], chosen(self.matches, outvoted), neighbours=6, width=0.03)
        self.motion.rotation[led], self.motion.translation[led] = motion.rotation, motion.translation
        self.cut()
        return True

    def _weight_on_nodes(self, which: BoolArray) -> FloatArray:
        """(n,) how much of these matches each node in use carries."""
        data, kept = self.carry(self.matches.source[which])
        return self._sum_on_nodes(data.skin, np.square(self.matches.confidence[which][kept]))

    def _sum_on_nodes(self, skin: Skinning, values: FloatArray) -> FloatArray:
        """(n,): values (N,) of carried points, shared out among the nodes in use that carry them."""
        total = np.zeros(len(self.nodes_in_use))
        np.add.at(total, skin.nodes, skin.weights * values[:, None])
        return total

    @property
    def out_of_time(self) -> bool:
        """Whether the budget is used up."""
        return time.perf_counter() > self.deadline

    def carry(self, points: FloatArray) -> tuple[DataTerm, BoolArray]:
        """Those of points (N, 3) that the nodes in use carry, and which they are."""
        skin = self.graph.skin(points)
        kept = skin.covered
        return DataTerm(points[kept], Skinning(self._number[skin.nodes[kept]], skin.weights[kept], kept[kept])), kept

    def begin(self, start: Warp | None) -> None:
        """Place the nodes: at a given warp, at what the matches around them do, or at rest."""
        count = len(self.nodes_in_use)
        if start is not None:
            self.motion = Motion(start.rotation_matrices[self.nodes_in_use], start.translations[self.nodes_in_use])
        elif len(self.matches.source):
            self.motion = local_motions(self._part.nodes, self.matches)
        else:
            self.motion = Motion(np.tile(np.eye(3), (count, 1, 1)), np.zeros((count, 3)))
        self._suppose()

    def _suppose(self) -> None:
        """Remember where nodes without matches around them begin: (k, 3) metres before and after."""
        nodes, source = self._part.nodes, self.matches.source[self.carried]
        lonely = np.zeros(len(nodes), dtype=bool)
        if len(source):
            lonely = cKDTree(source).query(nodes)[0] > self.settings.supposed_distance
        self.supposed = nodes[lonely], nodes[lonely] + self.motion.translation[lonely]

    def follow_matches(self) -> Status:
        """Gauss-Newton on the matches; those that stay far off lose their weight."""
        target, trust = self.matches.target[self.carried], self._trust(self.carried)
        count = len(target)
        data, kept = self.carry(np.concatenate([self.matches.source[self.carried], self.supposed[0]]))
        supposed = self.supposed[1][kept[count:]]
        equations = NormalEquations(self._part, data, self.settings.arap_weight)
        hold = np.full(len(supposed), self.settings.supposed_weight)

        def aim(motion: Motion) -> tuple[FloatArray, FloatArray]:
            misfit = np.linalg.norm(equations.warped(motion)[:count] - target, axis=1)
            weight = trust * _robust(misfit, self.settings.match_scale)
            return np.concatenate([target, supposed]), np.concatenate([weight, hold])

        descent = self._descend("matches", equations, aim, self.settings.match_iterations)
        misfit = np.linalg.norm(equations.warped(self.motion)[:count] - target, axis=1)
        self.inliers[self.carried] = misfit < self.settings.inlier_radius
        status = self._judge_matches(equations, descent)
        self.followed = True
        return status

    def _judge_matches(self, equations: NormalEquations, descent: Descent) -> Status:
        if descent.out_of_time and not self.followed:  # later it only refines what was found
            return Status.OUT_OF_TIME
        if self.inliers.sum() < max(self.settings.least_inliers * self.carried.sum(), self.settings.least_matches):
            return Status.TOO_FEW_INLIERS
        return Status.OK if self._strain(equations) < self.settings.largest_strain else Status.HIGH_RESIDUAL

    def _strain(self, equations: NormalEquations) -> float:
        """Root mean square misfit of the edges, of their length."""
        ends = self._part.nodes[self._part.edges]
        length = float(np.mean(np.square(ends[:, 1] - ends[:, 0])))
        misfit = float(np.mean(np.square(equations.edge_residuals(self.motion))))
        return float(np.sqrt(misfit / max(length, 1e-12)))

    def follow_surface(self, contact: "_Contact") -> None:
        """Gauss-Newton on the nearest surface, with the matches that agree as anchors against sliding."""
        held = self.inliers & self.carried
        anchors = self.matches.source[held]
        data, kept = self.carry(np.concatenate([anchors, contact.points]))
        contact.keep(kept[len(anchors) :], data.skin.nodes[len(anchors) :, 0])
        self.surface = data
        target, trust = self.matches.target[held], self._trust(held)
        equations = NormalEquations(self._part, data, self.settings.arap_weight)
        count, scale = len(anchors), self._share(len(contact.points)) * self.settings.closest_weight

        def aim(motion: Motion) -> tuple[FloatArray, FloatArray]:
            warped = equations.warped(motion)
            hold = trust * _robust(np.linalg.norm(warped[:count] - target, axis=1), self.settings.match_scale)
            nearest, weight = contact.targets(warped[count:], motion.rotation)
            return np.concatenate([target, nearest]), np.concatenate([hold, scale * weight])

        descent = self._descend("surface", equations, aim, self.settings.closest_iterations)
        self.converged, self.energy = descent.converged, descent.energy
        self._warped_surface = equations.warped(self.motion)[count:]
        self._final_strain = self._strain(equations)

    def _trust(self, kept: BoolArray) -> FloatArray:
        """Weights of the kept matches: the square of their confidence, as in the paper."""
        trust = np.square(self.matches.confidence[kept])
        return trust * (self.settings.match_weight * self._share(len(trust)))

    def _share(self, count: int) -> float:
        return min(1.0, len(self.nodes_in_use) / max(count, 1))

    def _descend(self, name: str, equations: NormalEquations, aim: Aim, iterations: int) -> Descent:
        began = time.perf_counter()
        solver = self._linear_solver(equations)
        limits = Limits(iterations, self.settings.tolerance, self.deadline)
        descent = descend(equations, solver, self.motion, aim, limits)
        self.motion, self.iterations = descent.motion, self.iterations + descent.iterations
        self.seconds[name] = time.perf_counter() - began
        return descent

    def _linear_solver(self, equations: NormalEquations) -> LinearSolver:
        if self.settings.device == "cpu":
            return BlockCholesky(self._part.nodes, equations.first, equations.second)
        return BlockConjugateGradients(len(self._part.nodes), equations.first, equations.second, self.settings.device)

    def refused(self, status: Status) -> Warp:
        """The warp that moves nothing."""
        support = np.zeros(len(self.graph.nodes))
        return Warp.rest(
            self.graph,
            status,
            support=support,
            match_inliers=self.inliers,
            iterations=self.iterations,
            seconds=self.seconds,
        )

    def accepted(self, contact: "_Contact") -> Warp:
        """The warp that was found, unless it lies nowhere on the target."""
        distance = contact.distance(self._warped_surface)
        near = distance < self.settings.closest_reach / 2
        if not near.any():
            return self.refused(Status.LOW_OVERLAP)
        if self._final_strain >= self.settings.largest_strain:
            return self.refused(Status.HIGH_RESIDUAL)
        rotation = np.tile(np.eye(3), (len(self.graph.nodes), 1, 1))
        translation = np.zeros_like(self.graph.nodes)
        rotation[self.nodes_in_use], translation[self.nodes_in_use] = self.motion.rotation, self.motion.translation
        return Warp.from_motion(
            self.graph,
            rotation,
            translation,
            support=self._support(near),
            energy=self.energy,
            converged=self.converged,
            overlap=float(near.mean()),
            residual=float(np.sqrt(np.mean(np.square(distance[near])))),
            match_inliers=self.inliers,
            iterations=self.iterations,
            cut_edges=self.cuts,
            seconds=self.seconds,
        )

    def _support(self, near: BoolArray) -> FloatArray:
        """(n,) how much of each node's points have a match or surface that holds them."""
        holds = np.concatenate([np.ones(len(self.surface.points) - len(near)), near])
        total, held = (self._sum_on_nodes(self.surface.skin, values) for values in (np.ones_like(holds), holds))
        support = np.zeros(len(self.graph.nodes))
        support[self.nodes_in_use] = held / np.maximum(total, 1e-12)
        return support


class _Contact:
    """A sample of the source's surface and where it meets the target."""

    def __init__(
        self, source: FloatArray, target: FloatArray, normals: FloatArray | None, settings: NonrigidSettings
    ) -> None:
        self._settings, self._target, self._target_normals = settings, target, normals
        self._tree = cKDTree(target)
        count = min(settings.closest_points, len(source))
        sample = np.sort(np.random.default_rng(0).permutation(len(source))[:count])
        self.points = source[sample]
        self._normals = surface_normals(source)[sample]

    def keep(self, kept: BoolArray, nodes: IntArray) -> None:
        """Go on with the kept points only; nodes: the nearest node of each."""
        self.points, self._normals, self._nodes = self.points[kept], self._normals[kept], nodes

    def distance(self, warped: FloatArray) -> FloatArray:
        """(N,) metres from warped points (N, 3) to the target."""
        return self._tree.query(warped)[0]

    def targets(self, warped: FloatArray, rotation: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Where on the target each warped point belongs (N, 3), and with what weight (N,), 0 where it has no partner.

        With normals it belongs to the nearest point of the tangent plane, so that it may slide along the surface.
        """
        reach = self._settings.closest_reach
        distance, index = self._tree.query(warped, distance_upper_bound=reach)
        near = np.isfinite(distance)
        index[~near] = 0
        partner = self._target[index]
        weight = np.where(near, np.square(1 - np.square(np.where(near, distance, 0) / reach)), 0.0)
        if self._target_normals is None:
            return partner, weight
        normal = self._target_normals[index]
        mine = np.einsum("nij,nj->ni", rotation[self._nodes], self._normals)
        facing = np.abs(np.sum(mine * normal, axis=1)) >= np.cos(np.radians(self._settings.closest_degrees))
        along = np.sum((partner - warped) * normal, axis=1, keepdims=True)
        return warped + along * normal, np.where(facing, weight, 0.0)


def _robust(misfit: FloatArray, scale: float) -> FloatArray:
    """Geman and McClure's weights of misfits (N,): 1 for none, a quarter at the scale, which is wide at first."""
    scale = max(scale, 3.0 * float(np.median(misfit))) if len(misfit) else scale
    return np.square(scale**2 / (scale**2 + np.square(misfit)))
