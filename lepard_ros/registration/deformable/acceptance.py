# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Whether a warp can be trusted, and which parts of it: evidence from matches and surfaces, and one rule."""

from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.registration.deformable.fit import Fit
from lepard_ros.registration.deformable.graph import DeformationGraph
from lepard_ros.registration.deformable.surface_contact import Contact, Touch
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.types import Matches, Status, Surface

NEAR = 0.02  # metres: a warped point this near to the target lies on it
FREE_SPACE = FreeSpaceSettings(cells=256, margin=0.04, relative_margin=0.01)
MAX_FLIP = 0.5  # a surface of which half lies inside out is a mirror image, however good the rest
# Of a warped surface that is right, half lies on the target, or half of the target under it; of the 84 good warps that
# the rule was fitted on the least was 0.59. Matches that are wrong together agree with each other, but not with this.
MIN_CONTACT = 0.5
SUPPORT_RADIUS, SUPPORT_MATCHES = 0.1, 16  # metres around a node, and at most so many matches there


class WarpEvidence(NamedTuple):
    """Evidence for a warp. The surface that the warp turns away from the sensor cannot be seen, and does not count.

    inliers: share of all matches that agree with it, those that the filter dropped included. agreeing: how many do.
    overlap: share of the warped surface, of what faces the sensor, that lies on the target. covered: share of the
    target under the warped surface. flip: of all surface that lies on the target, the share that lies inside out: its
    normal, turned by the warp, points away from the sensor that is said to see it. conflict: share of the warped
    surface in the target's free space. residual: metres, root mean square distance along the
    normals of what lies on the target. roughness: metres, the same between neighbours on the target itself: what
    noise and curvature make of a perfect fit. strain: root mean square misfit of the edges, of their length. torn:
    share of the edges cut. twist: degrees between neighbouring nodes, 95 % are below. supported: mean support of
    what faces the sensor. aligned: mean cosine between the normals of what lies on the target. turning: how much the
    parts turn against each other, 0 (as one) to 1 (every way): a body bends at its joints, and a mirrored or a shuffled
    one is turned inside itself.
    """

    inliers: float
    agreeing: float
    overlap: float
    covered: float
    flip: float
    conflict: float
    residual: float
    roughness: float
    strain: float
    torn: float
    twist: float
    supported: float
    aligned: float
    turning: float


def gather_evidence(contact: Contact, fit: Fit, agrees: BoolArray, support: FloatArray) -> WarpEvidence:
    """The evidence of a finished fit: how it touches the target, which matches (M,) agree, support of nodes (n,)."""
    assert fit.touched is not None
    touched, edges = fit.touched, fit.system.graph.edges
    near, visible = touched.distance < NEAR, facing_sensor(touched, contact.target.viewpoint)
    above = cKDTree(touched.warped).query(contact.target.points, distance_upper_bound=2 * NEAR)[0]
    carrier = fit.system.data.skin.nodes[-len(contact.points) :, 0]
    return WarpEvidence(
        inliers=_share(agrees),
        agreeing=float(agrees.sum()),
        overlap=_share(near[visible]),
        covered=_share(np.isfinite(above)),
        flip=_share(touched.facing[near] < 0),
        conflict=_share(conflicts(touched.warped, contact.target, FREE_SPACE)),
        residual=float(np.sqrt(np.mean(np.square(touched.height[near])))) if near.any() else NEAR,
        roughness=_roughness(contact.target),
        strain=fit.strain,
        torn=fit.cuts / max(len(edges) + fit.cuts, 1),
        twist=_twist(fit.motion.rotation[edges]),
        supported=float(support[carrier[visible]].mean()) if visible.any() else 0.0,
        aligned=float(touched.facing[near].mean()) if near.any() else 0.0,
        turning=1.0 - float(np.linalg.svd(fit.motion.rotation.mean(axis=0), compute_uv=False).mean()),
    )


def facing_sensor(touched: Touch, viewpoint: FloatArray) -> BoolArray:
    """(C,) which warped contact points face the sensor at viewpoint (3,)."""
    return np.einsum("ni,ni->n", touched.normals, viewpoint - touched.warped) > 0


def _roughness(surface: Surface) -> float:
    """Root mean square distance in metres of neighbouring points from each other's tangent planes."""
    sample = np.arange(0, len(surface.points), max(1, len(surface.points) // 1000))
    index = surface.tree.query(surface.points[sample], min(4, len(surface.points)))[1].reshape(len(sample), -1)[:, 1:]
    offset = surface.points[index] - surface.points[sample, None]
    return float(np.sqrt(np.mean(np.square(np.einsum("nki,ni->nk", offset, surface.normals[sample]))) + 1e-6))


def _share(which: BoolArray) -> float:
    return float(which.mean()) if len(which) else 0.0


def _twist(rotations: FloatArray) -> float:
    """Degrees that 95 % of the pairs of neighbours (E, 2, 3, 3) turn less against each other."""
    if not len(rotations):
        return 0.0
    trace = np.einsum("nij,nij->n", rotations[:, 0], rotations[:, 1])
    return float(np.degrees(np.arccos(np.clip((np.quantile(trace, 0.05) - 1) / 2, -1.0, 1.0))))


def node_support(graph: DeformationGraph, matches: Matches, agrees: BoolArray) -> FloatArray:
    """(n,) in [0, 1]: how far the motion of each node can be trusted.

    The share of the matches within 10 cm that agree with the warp, those dropped by the filter included, as if one
    more did not agree: 0 where there are no matches around.
    """
    if not len(matches.source):
        return np.zeros(len(graph.nodes))
    distance, index = _around(matches.source, graph.nodes)
    weight = np.where(np.isfinite(distance), np.exp(-0.5 * np.square(2 * distance / SUPPORT_RADIUS)), 0.0)
    return (weight * agrees[index]).sum(axis=1) / (weight.sum(axis=1) + 1.0)


def _around(points: FloatArray, nodes: FloatArray) -> tuple[FloatArray, np.ndarray]:
    """The nearest points within the support radius of each node: distances, inf for none, and numbers."""
    count = min(SUPPORT_MATCHES, len(points))
    distance, index = cKDTree(points).query(nodes, count, distance_upper_bound=SUPPORT_RADIUS)
    distance, index = distance.reshape(len(nodes), count), index.reshape(len(nodes), count)
    return distance, np.where(np.isfinite(distance), index, 0)


# Log-odds that a warp is right (mean end-point error on the overlap at most 10 cm) = BIAS + COEFFICIENTS * (feature -
# CENTRE), a ridge regression by bench/warp_acceptance.py with the shipped deformable weights and matches both ways, on
# the 73 pairs of TOSCA and 60 held-out synthesised pairs. The four features, and a min_quality of 0.5, were chosen by
# the cross-validated loss over the creatures of both sets, so its figures (docs/benchmarks.md) are a little optimistic.
# Fit again for other weights.
FEATURES = ("supported", "turning", "aligned", "overlap")
CENTRE = np.array([0.529, 0.325, 0.767, 0.743])
COEFFICIENTS = np.array([10.165, -8.312, 1.512, 2.539])
BIAS = 1.52


def features(evidence: WarpEvidence) -> FloatArray:
    """What the rule weighs, (F,), in the order of FEATURES."""
    return np.array([getattr(evidence, name) for name in FEATURES])


def contributions(evidence: WarpEvidence) -> FloatArray:
    """What each feature adds to the log-odds, (F,)."""
    return COEFFICIENTS * (features(evidence) - CENTRE)


def quality(evidence: WarpEvidence) -> float:
    """Log-odds that the warp is right."""
    return float(BIAS + contributions(evidence).sum())


REASONS = {
    "supported": Status.TOO_FEW_INLIERS,
    "turning": Status.SCRAMBLED,
    "aligned": Status.HIGH_RESIDUAL,
    "overlap": Status.LOW_OVERLAP,
}


def judge(evidence: WarpEvidence, min_quality: float) -> Status:
    """The verdict: OK, or the strongest evidence against the warp."""
    if evidence.flip > MAX_FLIP and np.isfinite(min_quality):
        return Status.INSIDE_OUT
    if max(evidence.overlap, evidence.covered) < MIN_CONTACT and np.isfinite(min_quality):
        return Status.LOW_OVERLAP
    if quality(evidence) >= min_quality:
        return Status.OK
    return REASONS[FEATURES[int(np.argmin(contributions(evidence)))]]
