# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Covariance of an alignment, from the curvature of its point-to-plane error."""

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.rigid.icp import Contact, normal_equations

# Neighbouring residuals are correlated (depth distortion, drift of a fused cloud): a patch of this size in metres
# counts as one observation. Set so that the normalised error over validation rooms has a mean of about one; at other
# scales it is PATCH_CELLS of the network's grid.
PATCH, PATCH_CELLS = 0.3, 6.0
# Error floor, independent of the number of points: in patches and radians.
FLOOR_TRANSLATION = 0.008 / PATCH
FLOOR_ROTATION = 0.004
# Apparent determinacy caused by noise of the normals alone, as a share of the mean Hessian.
MIN_CURVATURE = 1e-4


def alignment_covariance(
    contact: Contact, weight: FloatArray, transform: FloatArray, spacing: float, patch: float = PATCH
) -> FloatArray:
    """Covariance (6, 6) of [translation, rotation vector] of `transform` (4, 4), about the target's axes.

    contact, weight: of this one motion, (1, n, ...) and (1, n). The true motion has the translation t + dt and the
    rotation exp(dr) R, where [dt, dr] has this covariance: what a ROS pose with covariance means.
    """
    hessian, _, centre = normal_equations(contact, weight)
    total = max(float(weight.sum()), 1e-9)
    variance = max(float((weight * contact.residual**2).sum()) / total, (0.1 * spacing) ** 2)
    independent = total * min((spacing / patch) ** 2, 1.0)
    curvature = hessian[0] / total + MIN_CURVATURE * np.eye(6)
    about_centre = np.linalg.inv(curvature) * variance / max(independent, 1.0)
    shift = turn_about(transform[:3, 3] - centre[0])
    floor = np.diag([(FLOOR_TRANSLATION * patch) ** 2] * 3 + [FLOOR_ROTATION**2] * 3)
    covariance = shift @ (about_centre + floor) @ shift.T
    return (covariance + covariance.T) / 2.0


def turn_about(offset: FloatArray) -> FloatArray:
    """Matrix (6, 6) that transfers [translation, rotation] at a centre to a point at `offset` (3,) from it."""
    x, y, z = offset
    carry = np.eye(6)
    carry[:3, 3:] = [[0.0, z, -y], [-z, 0.0, x], [y, -x, 0.0]]
    return carry
