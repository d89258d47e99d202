# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Past clouds of a bending thing with the model in them, and the matches that the network finds with them."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import invert, kabsch, move, rotation_angle
from lepard_ros.registration.deformable.foreground import NO_BACKGROUND
from lepard_ros.registration.deformable.match_filter import FilterSettings, chosen, weigh_matches
from lepard_ros.registration.deformable.nonrigid import matched_normals
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Surface
from lepard_ros.tracking.model import CanonicalModel, Imprint, imprint

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher


class Live(NamedTuple):
    """A cloud without its background: points (N, 3), the same thinned with normals, the background thinned.

    left_out: how many points of the cloud are background.
    """

    points: FloatArray
    surface: Surface
    background: Surface
    left_out: int
    stamp: float


class Sight(NamedTuple):
    """A past cloud and where the model lay in it: nodes (n, 3) there, and the turn (3, 3) of the whole model."""

    live: Live
    imprint: Imprint
    nodes: FloatArray
    turn: FloatArray

    def without_cloud(self) -> "Sight":
        """The same without what only the next cloud needs: a keyframe lives long, and that is most of its size."""
        return self._replace(live=self.live._replace(points=self.live.points[:0], background=NO_BACKGROUND))

    def is_new_to(self, other: "Sight", min_motion: float, min_degrees: float) -> bool:
        """Whether the model has moved (metres, mean) or turned since the other sight."""
        return mean_motion(other.nodes, self.nodes) > min_motion or degrees_between(self.turn, other.turn) > min_degrees


class View(NamedTuple):
    """A sight that the network has seen. cloud: what the examiner made of it, an `EncodedCloud` or its arrays."""

    sight: Sight
    cloud: Any


class Study(NamedTuple):
    """What the network says about a live cloud: its features, and matches from the rest shape to it, weighed."""

    cloud: Any
    matches: Matches


def sight_of(live: Live, model: CanonicalModel, warp: Warp) -> Sight:
    """A live cloud and the model that was warped to it."""
    return Sight(live, imprint(model.points, warp), warp.moved_nodes, turn_of(warp))


def study(matcher: "Matcher", live: Live, views: list[View], settings: FilterSettings, reach: float) -> Study:
    """Encode a live cloud, match it with past ones, and carry the matches back to the rest shape.

    reach: metres from the model, beyond which a matched point belongs to no place of it.
    """
    cloud = matcher.encode(live.points)
    found = matcher.match_many(cloud, [view.cloud for view in views])
    parts = [_to_rest(matches, view.sight, live, settings, reach) for matches, view in zip(found, views, strict=True)]
    return Study(cloud, Matches(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def _to_rest(matches: Matches, sight: Sight, live: Live, settings: FilterSettings, reach: float) -> Matches:
    """Matches live -> past cloud, weighed, turned round and carried back to the rest shape."""
    turned = Matches(*(np.asarray(part, float) for part in (matches.target, matches.source, matches.confidence)))
    if not len(turned.confidence):
        return turned
    weighed = weigh_matches(turned, settings, matched_normals(turned, sight.live.surface, live.surface))
    rest, near = sight.imprint.to_rest(weighed.source, reach)
    return chosen(weighed._replace(source=rest), near)


def carried_on(matches: Matches, then: Imprint, now: Warp, reach: float) -> tuple[Matches, BoolArray]:
    """Matches from the rest shape to a past cloud, with their targets moved on as the model moved since then.

    then: where the model lay in that cloud. now: where it lies by now. Also which of the matches (M,) could be.
    """
    rest, near = then.to_rest(matches.target, reach)
    moved, covered = now.apply(rest)
    return chosen(matches._replace(target=moved), near & covered), near & covered


class Drift(NamedTuple):
    """How a body moves as a whole, per second: a turn (3,) in radians about its centre, and the centre's shift (3,)."""

    turn: FloatArray
    shift: FloatArray

    def over(self, seconds: float, nodes: FloatArray) -> FloatArray:
        """(4, 4): the motion in so many seconds of a body whose nodes (n, 3) lie here."""
        centre, motion = nodes.mean(axis=0), np.eye(4)
        motion[:3, :3] = Rotation.from_rotvec(seconds * self.turn).as_matrix()
        motion[:3, 3] = centre + seconds * self.shift - motion[:3, :3] @ centre
        return motion


RESTING = Drift(np.zeros(3), np.zeros(3))


class Place(NamedTuple):
    """Where the model lay in a cloud, and how the room (4, 4) had moved before the camera since the model began."""

    stamp: float
    warp: Warp
    room: FloatArray


def corrected(now: Warp, then: Warp, right: Warp) -> Warp:
    """What `now` should have been, when `right` is what `then`, the warp to an earlier cloud, should have been.

    All on the same nodes: each goes where it should have been then, and on as it has moved since.
    """
    since = now.rotation_matrices @ then.rotation_matrices.transpose(0, 2, 1)
    shift = now.translations + np.einsum("nij,nj->ni", since, right.translations - then.translations)
    return Warp.from_motion(now.graph, since @ right.rotation_matrices, shift, status=now.status, support=right.support)


def drift_between(first: Place, second: Place) -> Drift:
    """The body's own motion from one place to the next, without that of the camera."""
    before, after, seconds = first.warp, second.warp, second.stamp - first.stamp
    now, known = after.apply(before.graph.nodes)
    known &= before.graph.active
    if not seconds > 0 or known.sum() < 3:
        return RESTING
    then, now = move(second.room @ invert(first.room), before.moved_nodes[known]), now[known]
    turn = Rotation.from_matrix(rigid_motion(then, now)[:3, :3]).as_rotvec()
    return Drift(turn / seconds, (now.mean(axis=0) - then.mean(axis=0)) / seconds)


def rigid_motion(before: FloatArray, after: FloatArray) -> FloatArray:
    """(4, 4): what takes points (n, 3) to points (n, 3) best."""
    return kabsch(torch.from_numpy(before), torch.from_numpy(after), torch.ones(len(before))).numpy()


def turn_of(warp: Warp) -> FloatArray:
    """(3, 3): the rotation of the warp as a whole."""
    use = warp.graph.active
    return rigid_motion(warp.graph.nodes[use], warp.moved_nodes[use])[:3, :3]


def degrees_between(first: FloatArray, second: FloatArray) -> float:
    """The angle between two rotations (3, 3)."""
    return float(np.degrees(rotation_angle(first.T @ second)))


def mean_motion(before: FloatArray, after: FloatArray) -> float:
    """Mean distance in metres of the nodes that there were before; nodes are only added."""
    count = min(len(before), len(after))
    return float(np.linalg.norm(after[:count] - before[:count], axis=1).mean()) if count else float("inf")


def median_motion(before: Warp, after: Warp) -> float:
    """Median distance in metres between the places of the nodes in two warps of one graph."""
    return float(np.median(np.linalg.norm(after.moved_nodes - before.moved_nodes, axis=1)))


def most_redundant(views: list[View]) -> int:
    """The view, never the first one, whose side another one shows almost as well."""

    def nearest(index: int) -> float:
        others = (view for other, view in enumerate(views) if other != index)
        return min(degrees_between(views[index].sight.turn, view.sight.turn) for view in others)

    return min(range(1, len(views)), key=nearest)
