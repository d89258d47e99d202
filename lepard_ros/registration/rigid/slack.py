# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Unconstrained directions of an alignment: in a bare corridor a cloud can slide along the walls and fits everywhere.

The Hessian of the alignment alone does not reveal them: noise of the normals on bare walls constrains sliding as much
as a few real edges do. Neighbouring points share the surface but hardly the noise, so here the Hessian is summed over
pairs of different points of a patch, where the noise averages out.
"""

from typing import NamedTuple

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import exponential, invert
from lepard_ros.registration.rigid.covariance import turn_about
from lepard_ros.registration.rigid.icp import Contact, sample, touch
from lepard_ros.registration.types import Surface

PATCH = 7.0  # spacings: the side of a patch
REACH = 1.5  # spacings within which surfaces touch
# A direction is unconstrained if the mean sine between it and the surfaces is below this. With true motions of
# synthetic clouds, bare corridors have up to 0.02 along the corridor; the minimum for rooms and furnished corridors is
# 0.066. At 0.04, correct motions of a real desk were rejected (TUM fr1_desk, every tenth frame: 16 of 20 instead of
# 18).
HELD = 0.025
# Minimum overlap for this test: HELD was set on such contacts.
MIN_OVERLAP = 0.5


class Slack(NamedTuple):
    """Unconstrained directions of an alignment.

    directions: (6, K) in the target's frame, [translation, rotation] about `centre` (3,); each moves the touching
    points by one metre on average.
    """

    directions: FloatArray
    centre: FloatArray

    def __bool__(self) -> bool:
        """Whether any direction is unconstrained."""
        return self.directions.shape[1] > 0

    def keep(self, motion: FloatArray, predicted: FloatArray) -> FloatArray:
        """A motion (4, 4) with its unconstrained directions taken from `predicted` (4, 4)."""
        apart = predicted @ invert(motion)
        shift = apart[:3, 3] + apart[:3, :3] @ self.centre - self.centre
        turn = np.array([apart[2, 1] - apart[1, 2], apart[0, 2] - apart[2, 0], apart[1, 0] - apart[0, 1]]) / 2
        share = np.linalg.pinv(self.directions) @ np.concatenate([shift, turn])
        step = exponential((self.directions @ share)[None])[0]
        step[:3, 3] += self.centre - step[:3, :3] @ self.centre
        return step @ motion

    def covariance(self, motion: FloatArray, sigma: float) -> FloatArray:
        """Covariance (6, 6) of a motion (4, 4) with an error of `sigma` metres in its unconstrained directions."""
        carry = turn_about(motion[:3, 3] - self.centre) @ self.directions
        return sigma**2 * carry @ carry.T


class Resistance(NamedTuple):
    """How strongly touching surfaces constrain small motions.

    strength: (6,) mean sine of the normals against each of the motions `axes` (6, 6): columns of [translation,
    rotation] about `centre` (3,) in the target's frame, rotation in units of motion at `radius` (metres).
    """

    strength: FloatArray
    axes: FloatArray
    centre: FloatArray
    radius: float

    def below(self, held: float) -> Slack:
        """The motions that are constrained by less than `held`."""
        loose = self.axes[:, self.strength < held].copy()
        loose[3:] /= self.radius
        return Slack(loose, self.centre)

    def covariance(self, motion: FloatArray, sigma: float, held: float, least: float) -> FloatArray:
        """Covariance (6, 6) of a motion (4, 4) in the directions constrained by `least` to `held`.

        sigma: metres, error of the surfaces across themselves; a sine s between them and a direction makes it sigma / s
        along that direction.
        """
        weak = (self.strength >= least) & (self.strength < held)
        along = self.axes[:, weak] / self.strength[weak]
        along[3:] /= self.radius
        return Slack(along, self.centre).covariance(motion, sigma)


UNKNOWN = Resistance(np.ones(6), np.eye(6), np.zeros(3), 1.0)  # no unconstrained directions are reported


def slack_between(source: Surface, target: Surface, motion: FloatArray, points: int) -> Slack:
    """The unconstrained directions of a motion (4, 4) of the source to the target, from a sample of the source."""
    contact = touch(sample(source, points), target, motion[None], REACH * target.spacing)
    return resistance_of(contact, target.spacing).below(HELD)


def resistance_of(contact: Contact, spacing: float) -> Resistance:
    """How a contact (of one motion) constrains it; UNKNOWN if the overlap is too small. spacing: metres, target's."""
    lying = contact.lying(spacing)[0]
    if lying.mean() < MIN_OVERLAP:
        return UNKNOWN
    return _resistance(contact, lying.astype(float), PATCH * spacing)


def _resistance(contact: Contact, weight: FloatArray, patch: float) -> Resistance:
    """The same of the points with a weight (n,). patch: metres."""
    used = weight > 0
    points, normals, weight = contact.moved[0][used], contact.normal[0][used], weight[used]
    if len(points) < 3:
        return UNKNOWN._replace(strength=np.zeros(6))
    centre = weight @ points / weight.sum()
    arms = points - centre
    radius = max(float(np.sqrt(weight @ (arms**2).sum(1) / weight.sum())), 1e-6)
    rows = np.concatenate([normals, np.cross(arms, normals) / radius], axis=1)  # rotation: motion at `radius`
    squared, axes = np.linalg.eigh(_shared_curvature(points, rows, weight, patch))
    return Resistance(np.sqrt(np.clip(squared, 0.0, None)), axes, centre, radius)


def _shared_curvature(points: FloatArray, rows: FloatArray, weight: FloatArray, patch: float) -> FloatArray:
    """The mean product (6, 6) of the rows (n, 6) of two different points of one patch; single points are ignored."""
    cell = np.floor(points / patch).astype(np.int64)
    cell -= cell.min(axis=0)
    # One number for a cell: numpy sorts whole rows ten times more slowly.
    _, place = np.unique(np.ravel_multi_index(cell.T, cell.max(axis=0) + 1), return_inverse=True)
    count = int(place.max()) + 1
    total, squares = np.bincount(place, weight, count), np.bincount(place, weight**2, count)
    sums = np.stack([np.bincount(place, weight * column, count) for column in rows.T], axis=1)
    pairs = total**2 - squares
    share = np.divide(total, pairs, out=np.zeros(count), where=pairs > 1e-9)
    alone = (rows * (share[place] * weight**2)[:, None]).T @ rows
    return (sums.T @ (sums * share[:, None]) - alone) / weight.sum()
