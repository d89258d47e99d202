# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Observations of a deforming object: past clouds with the warped model, and correspondences with them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import invert, kabsch, move, rotation_angle
from lepard_ros.registration.deformable.foreground import NO_BACKGROUND
from lepard_ros.registration.deformable.graph import Skinning
from lepard_ros.registration.deformable.match_filter import FilterSettings, chosen, weigh_matches
from lepard_ros.registration.deformable.nonrigid import matched_normals
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Surface
from lepard_ros.tracking.model import CanonicalModel, WarpedModel, warped_model

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher


class LiveCloud(NamedTuple):
    """A cloud split into object and background.

    points: (N, 3) of the object. surface: the same, downsampled, with normals. background: downsampled.
    background_count: number of background points in the full cloud.
    """

    points: FloatArray
    surface: Surface
    background: Surface
    background_count: int
    stamp: float


class Observation(NamedTuple):
    """A past cloud with the model warped to it. nodes: (n, 3) there. turn: (3, 3) mean rotation of the model."""

    live: LiveCloud
    warped_model: WarpedModel
    nodes: FloatArray
    turn: FloatArray

    def without_cloud(self) -> "Observation":
        """A copy without the raw points and the background, to save memory in keyframes."""
        return self._replace(live=self.live._replace(points=self.live.points[:0], background=NO_BACKGROUND))

    def is_new_to(self, other: "Observation", min_motion: float, min_degrees: float) -> bool:
        """Whether the model has moved (mean, metres) or rotated relative to the other observation."""
        return mean_motion(other.nodes, self.nodes) > min_motion or degrees_between(self.turn, other.turn) > min_degrees


class View(NamedTuple):
    """An encoded observation. cloud: from the matching worker, an `EncodedCloud` or its arrays."""

    observation: Observation
    cloud: Any


class CloudMatches(NamedTuple):
    """The encoded live cloud, and weighted matches from the rest shape to it."""

    cloud: Any
    matches: Matches


def observe(live: LiveCloud, model: CanonicalModel, warp: Warp, skin: Skinning | None = None) -> Observation:
    """Store a live cloud with the model warped to it. skin: of the model's points on the warp's nodes, if known."""
    return Observation(live, warped_model(model.points, warp, skin), warp.moved_nodes, turn_of(warp))


def match_cloud(
    matcher: "Matcher", live: LiveCloud, views: list[View], settings: FilterSettings, reach: float
) -> CloudMatches:
    """Encode a live cloud, match it with past ones, and transfer the matches to the rest shape.

    reach: maximum distance in metres of a matched point from the model.
    """
    cloud = matcher.encode(live.points)
    found = matcher.match_many(cloud, [view.cloud for view in views])
    parts = [
        _to_rest(matches, view.observation, live, settings, reach) for matches, view in zip(found, views, strict=True)
    ]
    return CloudMatches(cloud, Matches(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def _to_rest(
    matches: Matches, observation: Observation, live: LiveCloud, settings: FilterSettings, reach: float
) -> Matches:
    """Convert matches (live -> past cloud) to weighted matches (rest shape -> live cloud)."""
    swapped = Matches(*(np.asarray(part, float) for part in (matches.target, matches.source, matches.confidence)))
    if not len(swapped.confidence):
        return swapped
    weighted = weigh_matches(swapped, settings, matched_normals(swapped, observation.live.surface, live.surface))
    rest, near = observation.warped_model.to_rest(weighted.source, reach)
    return chosen(weighted._replace(source=rest), near)


def carry_forward(matches: Matches, then: WarpedModel, now: Warp, reach: float) -> tuple[Matches, BoolArray]:
    """Move the targets of matches with a past cloud along with the model to the present.

    then: the model warped to that cloud. now: the current warp. Also returns which matches (M,) could be moved.
    """
    rest, near = then.to_rest(matches.target, reach)
    moved, covered = now.apply(rest)
    return chosen(matches._replace(target=moved), near & covered), near & covered


class BodyVelocity(NamedTuple):
    """Rigid velocity of the object, per second: rotation vector (3,) about its centre, and translation (3,) of it."""

    turn: FloatArray
    shift: FloatArray

    def over(self, seconds: float, nodes: FloatArray) -> FloatArray:
        """The motion (4, 4) over a time, for an object with these nodes (n, 3)."""
        centre, motion = nodes.mean(axis=0), np.eye(4)
        motion[:3, :3] = Rotation.from_rotvec(seconds * self.turn).as_matrix()
        motion[:3, 3] = centre + seconds * self.shift - motion[:3, :3] @ centre
        return motion


AT_REST = BodyVelocity(np.zeros(3), np.zeros(3))


class StampedWarp(NamedTuple):
    """A warp with its stamp. scene_motion: (4, 4) of the static scene relative to the camera since the model start."""

    stamp: float
    warp: Warp
    scene_motion: FloatArray


def corrected(now: Warp, then: Warp, right: Warp) -> Warp:
    """Correct the warp `now`, given that the warp `then` to an earlier cloud should have been `right`.

    All three use the same nodes: each node takes its correct earlier position and the motion since then.
    """
    since = now.rotation_matrices @ then.rotation_matrices.transpose(0, 2, 1)
    shift = now.translations + np.einsum("nij,nj->ni", since, right.translations - then.translations)
    return Warp.from_motion(now.graph, since @ right.rotation_matrices, shift, status=now.status, support=right.support)


def extrapolated(before: StampedWarp, now: StampedWarp, seconds: float) -> Warp:
    """The warp `now`, with the motion of every node since `before` continued for a time; the scene stays where it is.

    Both warps use the same nodes.
    """
    last = before.warp.moved_by(now.scene_motion @ invert(before.scene_motion))
    share, rotation = seconds / (now.stamp - before.stamp), now.warp.rotation_matrices
    turn = Rotation.from_matrix(rotation @ last.rotation_matrices.transpose(0, 2, 1)).as_rotvec()
    shift = now.warp.translations + share * (now.warp.translations - last.translations)
    turned = Rotation.from_rotvec(share * turn).as_matrix() @ rotation
    return Warp.from_motion(now.warp.graph, turned, shift, status=now.warp.status, support=now.warp.support)


def body_velocity(first: StampedWarp, second: StampedWarp) -> BodyVelocity:
    """The velocity of the object between two warps, without the motion of the camera."""
    before, after, seconds = first.warp, second.warp, second.stamp - first.stamp
    now, known = after.apply(before.graph.nodes)
    known &= before.graph.active
    if not seconds > 0 or known.sum() < 3:
        return AT_REST
    then, now = move(second.scene_motion @ invert(first.scene_motion), before.moved_nodes[known]), now[known]
    turn = Rotation.from_matrix(rigid_motion(then, now)[:3, :3]).as_rotvec()
    return BodyVelocity(turn / seconds, (now.mean(axis=0) - then.mean(axis=0)) / seconds)


def rigid_motion(before: FloatArray, after: FloatArray) -> FloatArray:
    """The least-squares rigid motion (4, 4) between two point sets (n, 3)."""
    return kabsch(torch.from_numpy(before), torch.from_numpy(after), torch.ones(len(before))).numpy()


def turn_of(warp: Warp) -> FloatArray:
    """The mean rotation (3, 3) of a warp."""
    use = warp.graph.active
    return rigid_motion(warp.graph.nodes[use], warp.moved_nodes[use])[:3, :3]


def degrees_between(first: FloatArray, second: FloatArray) -> float:
    """The angle between two rotations (3, 3), in degrees."""
    return float(np.degrees(rotation_angle(first.T @ second)))


def mean_motion(before: FloatArray, after: FloatArray) -> float:
    """Mean distance in metres of the common nodes; nodes are only ever appended."""
    count = min(len(before), len(after))
    return float(np.linalg.norm(after[:count] - before[:count], axis=1).mean()) if count else float("inf")


def median_motion(before: Warp, after: Warp) -> float:
    """Median distance in metres between the node positions in two warps of one graph."""
    return float(np.median(np.linalg.norm(after.moved_nodes - before.moved_nodes, axis=1)))


def most_redundant(views: list[View]) -> int:
    """Index of the view whose orientation is closest to another one's; never the first view."""

    def nearest(index: int) -> float:
        others = (view for other, view in enumerate(views) if other != index)
        return min(degrees_between(views[index].observation.turn, view.observation.turn) for view in others)

    return min(range(1, len(views)), key=nearest)
