# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A lost body is found in its last shape, and what happened since a past cloud is added to a correction of that one."""

from dataclasses import replace

import numpy as np
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.rigid_motion import move, turn
from lepard_ros.registration.deformable.graph import GraphSettings, build_graph
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Status, Surface
from lepard_ros.tracking.observations import corrected
from lepard_ros.tracking.recovery import moved_by_matches, possible_matches


def tube(radius: float = 0.15, height: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Points (N, 3) of an upright tube at 1.5 m with outward normals (N, 3): a body with a front and a back."""
    angle, level = np.meshgrid(np.linspace(0, 2 * np.pi, 90, endpoint=False), np.arange(0, height, 0.012))
    normals = np.stack([np.sin(angle), np.zeros_like(angle), -np.cos(angle)], axis=-1).reshape(-1, 3)
    return radius * normals + np.stack([0 * level, level, 0 * level + 1.5], axis=-1).reshape(-1, 3), normals


def lost_body() -> tuple[Surface, Warp, np.ndarray, Surface]:
    """A tube that lay at rest when it was last seen, the motion (4, 4) since, and what the sensor sees of it now."""
    points, normals = tube()
    model = Surface(points, normals, 0.012)
    motion = np.eye(4)
    motion[:3, :3], motion[:3, 3] = Rotation.from_rotvec([0.0, 0.7, 0.0]).as_matrix(), [1.2, 0.05, 0.3]
    moved, turned = move(motion, points), turn(motion, normals)
    seen = np.einsum("ni,ni->n", turned, -moved) > 0
    graph = build_graph(points, GraphSettings(coverage=0.04))
    return model, Warp.rest(graph, Status.OK), motion, Surface(moved[seen], turned[seen], 0.012)


def matches_of(model: Surface, motion: np.ndarray, live: Surface) -> tuple[Matches, np.ndarray]:
    """True matches of what is seen, and fewer of the hidden side that lead to the seen one; which are true (M,)."""
    rng = np.random.default_rng(0)
    moved = move(motion, model.points)
    seen = np.einsum("ni,ni->n", turn(motion, model.normals), -moved) > 0
    true = rng.choice(np.flatnonzero(seen), 300, replace=False)
    hidden = rng.choice(np.flatnonzero(~seen), 200, replace=False)
    through = moved[hidden] - 0.3 * turn(motion, model.normals)[hidden]  # straight through the tube to its other side
    source = np.concatenate([model.points[true], model.points[hidden]])
    target = np.concatenate([moved[true] + rng.normal(0, 0.01, (300, 3)), live.points[live.tree.query(through)[1]]])
    return Matches(source, target, np.full(500, 0.8)), np.arange(500) < 300


def test_a_lost_body_is_moved_to_where_the_matches_of_its_visible_side_lead() -> None:
    model, last, motion, live = lost_body()
    found = moved_by_matches(last, matches_of(model, motion, live)[0], model, live)
    assert found is not None
    error = np.linalg.norm(found(model.points) - move(motion, model.points), axis=1)
    assert np.median(error) < 0.01 and error.max() < 0.03


def test_matches_without_a_common_motion_move_nothing() -> None:
    model, last, motion, live = lost_body()
    matches, _ = matches_of(model, motion, live)
    rng = np.random.default_rng(1)
    scattered = matches._replace(target=rng.uniform(-3, 3, matches.target.shape))
    assert moved_by_matches(last, scattered, model, live) is None
    assert moved_by_matches(last, Matches(*(part[:5] for part in matches)), model, live) is None


def test_matches_of_the_side_that_is_turned_away_have_no_voice() -> None:
    model, last, motion, live = lost_body()
    matches, true = matches_of(model, motion, live)
    kept = possible_matches(last.moved_by(motion), matches, model, live).confidence > 0
    assert kept[true].mean() > 0.95
    assert kept[~true].mean() < 0.1
    assert len(kept) == len(true), "a match without a voice is still evidence"


def test_a_correction_of_a_past_cloud_keeps_the_motion_since() -> None:
    points = tube()[0]
    graph = build_graph(points, GraphSettings(coverage=0.04))
    rest = Warp.rest(graph, Status.OK)
    slid, since = np.eye(4), np.eye(4)
    slid[:3, 3] = [0.03, 0.0, 0.0]
    since[:3, :3], since[:3, 3] = Rotation.from_rotvec([0.0, 0.4, 0.1]).as_matrix(), [0.2, 0.0, 0.1]
    then, right = rest.moved_by(slid), replace(rest, support=np.full(len(graph.nodes), 0.7))
    found = corrected(then.moved_by(since), then, right)
    np.testing.assert_allclose(found(points), move(since, points), atol=1e-9)
    assert (found.support == 0.7).all()
