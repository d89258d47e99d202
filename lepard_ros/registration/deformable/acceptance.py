# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Acceptance of a warp, and support of its nodes: evidence from matches and surfaces, and one rule."""

from typing import NamedTuple

import numpy as np
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.registration.deformable.fit import Fit
from lepard_ros.registration.deformable.graph import DeformationGraph
from lepard_ros.registration.deformable.surface_contact import Contact, Touch
from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.types import Matches, Status, Surface

NEAR = 0.02  # metres: a warped point this close to the target lies on it
FREE_SPACE = FreeSpaceSettings(cells=256, margin=0.04, relative_margin=0.01)
MAX_FLIP = 0.5  # a surface that lies inside out to this share is a mirror image, however good the rest
# For a correct warp, half of the warped surface lies on the target, or covers half of the target; the minimum over 84
# good warps was 0.59. Consistently wrong matches support each other, but fail this test.
MIN_CONTACT = 0.5
SUPPORT_RADIUS, SUPPORT_MATCHES = 0.1, 16  # metres around a node, and the maximum number of matches used


class WarpEvidence(NamedTuple):
    """Evidence for a warp. Warped surface that faces away from the sensor is not observable and does not count.

    inliers: share of inliers among all matches, including those that the filter dropped. agreeing: their number.
    overlap: share of the warped surface facing the sensor that lies on the target. covered: share of the target under
    the warped surface. flip: share of the overlapping surface that lies inside out, with the rotated normal pointing
    away from the sensor. conflict: share of the warped surface in the target's free space. residual: metres, RMS
    distance along the normals in the overlap. roughness: metres, the same between neighbours on the target itself, as
    noise and curvature cause it for a perfect fit. strain: RMS misfit of the edges relative to their length. torn:
    share of the edges that were cut. twist: degrees between neighbouring nodes, 95th percentile. supported: mean
    support of the surface facing the sensor. aligned: mean cosine between the normals in the overlap. seen_aligned: the
    same for the surface facing the sensor; the far side of a thin limb lies in the overlap, too. turning: how much
    the parts rotate against each other, from 0 (as one) to 1 (in all directions): a body bends at its joints, a
    mirrored or scrambled one rotates everywhere.
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
    seen_aligned: float
    turning: float


def gather_evidence(contact: Contact, fit: Fit, agrees: BoolArray, support: FloatArray) -> WarpEvidence:
    """The evidence for a finished fit, from its contact with the target, inliers (M,) and node support (n,)."""
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
        seen_aligned=float(touched.facing[near & visible].mean()) if (near & visible).any() else 0.0,
        turning=1.0 - float(np.linalg.svd(fit.motion.rotation.mean(axis=0), compute_uv=False).mean()),
    )


def facing_sensor(touched: Touch, viewpoint: FloatArray) -> BoolArray:
    """Mask (C,) of the warped contact points that face the sensor at viewpoint (3,)."""
    return np.einsum("ni,ni->n", touched.normals, viewpoint - touched.warped) > 0


def _roughness(surface: Surface) -> float:
    """RMS distance in metres of neighbouring points from each other's tangent planes."""
    sample = np.arange(0, len(surface.points), max(1, len(surface.points) // 1000))
    index = surface.tree.query(surface.points[sample], min(4, len(surface.points)))[1].reshape(len(sample), -1)[:, 1:]
    offset = surface.points[index] - surface.points[sample, None]
    return float(np.sqrt(np.mean(np.square(np.einsum("nki,ni->nk", offset, surface.normals[sample]))) + 1e-6))


def _share(which: BoolArray) -> float:
    return float(which.mean()) if len(which) else 0.0


def _twist(rotations: FloatArray) -> float:
    """95th percentile, in degrees, of the relative rotation of neighbours (E, 2, 3, 3)."""
    if not len(rotations):
        return 0.0
    trace = np.einsum("nij,nij->n", rotations[:, 0], rotations[:, 1])
    return float(np.degrees(np.arccos(np.clip((np.quantile(trace, 0.05) - 1) / 2, -1.0, 1.0))))


def node_support(graph: DeformationGraph, matches: Matches, agrees: BoolArray) -> FloatArray:
    """Support of each node, (n,) in [0, 1].

    The share of inliers among the matches within 10 cm, including those that the filter dropped, computed as if there
    were one more outlier: 0 without matches.
    """
    if not len(matches.source):
        return np.zeros(len(graph.nodes))
    distance, index = _around(matches.source, graph.nodes)
    weight = np.where(np.isfinite(distance), np.exp(-0.5 * np.square(2 * distance / SUPPORT_RADIUS)), 0.0)
    return (weight * agrees[index]).sum(axis=1) / (weight.sum(axis=1) + 1.0)


def _around(points: FloatArray, nodes: FloatArray) -> tuple[FloatArray, np.ndarray]:
    """The nearest points within the support radius of each node: distances (inf for none) and indices."""
    count = min(SUPPORT_MATCHES, len(points))
    distance, index = cKDTree(points).query(nodes, count, distance_upper_bound=SUPPORT_RADIUS)
    distance, index = distance.reshape(len(nodes), count), index.reshape(len(nodes), count)
    return distance, np.where(np.isfinite(distance), index, 0)


# Log-odds that a warp is correct (mean end-point error in the overlap at most 10 cm) = BIAS + COEFFICIENTS * (feature -
# CENTRE), a ridge regression by bench/warp_acceptance.py with the shipped deformable weights and matches both ways, on
# the 73 pairs of TOSCA and 260 held-out synthesised pairs. Features and threshold were chosen by cross-validation over
# the creatures of all sets, among those that accept the authors' own matches of the moose, so the figures of TOSCA
# (docs/benchmarks.md) are a little optimistic. Fit again for other weights.
FEATURES = ("supported", "turning", "covered", "torn")
CENTRE = np.array([0.7044, 0.0721, 0.7663, 0.0255])
COEFFICIENTS = np.array([2.032, -5.032, 4.819, -9.243])
BIAS = 3.13
MAX_SUPPORTED = 0.99  # more counts as this much


def feature(evidence: WarpEvidence, name: str) -> float:
    """A field of the evidence as the rule uses it: support as log-odds, turning squared, the others as they are.

    A body may bend at all of its joints, but hardly ever rotates everywhere; support of 0.9 is worth far more than 0.8.
    """
    value = float(getattr(evidence, name))
    if name == "supported":
        share = min(max(value, 1 - MAX_SUPPORTED), MAX_SUPPORTED)
        return float(np.log(share / (1 - share)))
    return value**2 if name == "turning" else value


def features(evidence: WarpEvidence) -> FloatArray:
    """Features (F,) of the rule, in the order of FEATURES."""
    return np.array([feature(evidence, name) for name in FEATURES])


def contributions(evidence: WarpEvidence) -> FloatArray:
    """Contribution of each feature to the log-odds, (F,)."""
    return COEFFICIENTS * (features(evidence) - CENTRE)


def quality(evidence: WarpEvidence) -> float:
    """Log-odds that the warp is correct."""
    return float(BIAS + contributions(evidence).sum())


REASONS = {
    "supported": Status.TOO_FEW_INLIERS,
    "turning": Status.SCRAMBLED,
    "covered": Status.LOW_OVERLAP,
    "torn": Status.SCRAMBLED,
}


def judge(evidence: WarpEvidence, min_quality: float) -> Status:
    """The status: OK, or the strongest evidence against the warp."""
    if evidence.flip > MAX_FLIP and np.isfinite(min_quality):
        return Status.INSIDE_OUT
    if max(evidence.overlap, evidence.covered) < MIN_CONTACT and np.isfinite(min_quality):
        return Status.LOW_OVERLAP
    if quality(evidence) >= min_quality:
        return Status.OK
    return REASONS[FEATURES[int(np.argmin(contributions(evidence)))]]
