# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A bare corridor: its walls let a cloud slide, and the tracker must say so."""

from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import numpy as np
import pytest

from box_room import CAMERA, look, render
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.evaluation.fpfh_matcher import FpfhCloud, FpfhMatcher
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.rigid.acceptance import contact_between
from lepard_ros.registration.rigid.covariance import PATCH
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.rigid.slack import resistance_of, slack_between
from lepard_ros.registration.types import NO_MATCHES, Registration, Status, Surface
from lepard_ros.tracking import keyframe_map
from lepard_ros.tracking.follower import MAX_PREDICTED_SIGMA
from lepard_ros.tracking.prior import (
    WEAKLY_HELD,
    align_from_guesses,
    best_supported,
    judge_guess,
    with_weak_directions,
)
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackingState
from lepard_ros.tracking.views import live_points, make_view

HALF, END = 1.1, 20.0  # metres: of its width; where it ends, out of sight
WALLS = [
    [[-HALF, -1.3, -3.0], [HALF, -1.2, END]],
    [[-HALF, 1.2, -3.0], [HALF, 1.3, END]],
    [[-HALF - 0.1, -1.3, -3.0], [-HALF, 1.3, END]],
    [[HALF, -1.3, -3.0], [HALF + 0.1, 1.3, END]],
]
FURNITURE = [
    [[-1.1, 0.4, 1.6], [-0.7, 1.2, 2.2]],
    [[0.7, -1.2, 2.4], [1.1, 1.2, 2.7]],
    [[-1.1, 0.6, 2.9], [-0.8, 1.2, 3.3]],
    [[0.8, 0.7, 1.2], [1.1, 1.2, 1.7]],
]
CORRIDOR = np.array(WALLS + FURNITURE)
ALONG = 2  # the axis of the corridor
BARE = 2.4  # metres along it from which nothing but walls is in sight


@dataclass(frozen=True)
class BlindMatcher(FpfhMatcher):
    """A network that recognises nothing: only the motion is on trial."""

    def register_many(self, source: FpfhCloud, targets: list[FpfhCloud]) -> list[Registration]:
        return [Registration(None, Status.TOO_FEW_MATCHES, NO_MATCHES, np.zeros(0, dtype=bool)) for _ in targets]


def place(z: float) -> np.ndarray:
    return look(0.1 * np.sin(3 * z), z, 5 * np.sin(5 * z))


def cloud_at(z: float, seed: int) -> np.ndarray:
    return depth_to_points(render(place(z), seed, CORRIDOR), CAMERA)


def surface_at(z: float, seed: int) -> Surface:
    return make_view(live_points(cloud_at(z, seed)), 0.03).surface


def steps() -> np.ndarray:
    """Places of a walk out of the furnished part that slows down as soon as nothing but walls is in sight."""
    return np.concatenate([np.arange(0.4, 2.2, 0.15), 2.2 + np.arange(0, 0.8, 0.05)])


@cache
def walked(max_cells: int = keyframe_map.MAX_CELLS) -> tuple[RigidTracker, list[Track]]:
    """max_cells: of the first cloud on the alignment grid, before the coarser one is taken."""
    tracker = RigidTracker(BlindMatcher(0.06))
    with patch.object(keyframe_map, "MAX_CELLS", max_cells):
        return tracker, [tracker.process(cloud_at(z, i), 0.1 * i) for i, z in enumerate(steps())]


def slid(track: Track, z: float) -> tuple[float, float]:
    """The error along the corridor and one sigma of it, metres."""
    assert track.pose is not None and track.covariance is not None
    truth = invert(place(steps()[0])) @ place(z)
    axis = place(steps()[0])[:3, :3].T[:, ALONG]
    return float(abs(axis @ (track.pose - truth)[:3, 3])), float(np.sqrt(axis @ track.covariance[:3, :3] @ axis))


@pytest.mark.parametrize(("max_cells", "spacing"), [(10**9, 0.03), (0, 0.042)])
def test_a_pose_that_slides_along_a_bare_corridor_says_how_far_it_may_be_wrong(max_cells: int, spacing: float) -> None:
    """Before, the pose was 0.6 m off and more, with a sigma of 0.06 m."""
    tracker, tracks = walked(max_cells)
    assert tracker.keyframes[0].surface.spacing == pytest.approx(spacing)
    rows = [(*slid(track, z), track) for track, z in zip(tracks, steps(), strict=True) if track.pose is not None]
    assert len(rows) > 15
    assert all(error < 3 * sigma + 0.02 for error, sigma, _ in rows), [(e, s) for e, s, _ in rows]
    predicted = [
        (error, sigma, track) for error, sigma, track in rows if track.registration and track.registration.predicted
    ]
    assert predicted, "nothing but walls was in sight, but no pose says that it was predicted"
    assert all("predicted" in track.reason for _, _, track in predicted)
    assert predicted[-1][1] > 0.2  # metres: the uncertainty has grown


def test_a_corridor_is_lost_once_the_prediction_is_worth_nothing() -> None:
    tracker, tracks = walked()
    sigmas = [track.registration.predicted for track in tracks if track.pose is not None and track.registration]
    assert max(sigmas) <= MAX_PREDICTED_SIGMA
    late = tracker.process(cloud_at(3.0, 99), tracks[-1].stamp + 2.0)
    assert late.state is TrackingState.LOST and late.pose is None


def test_what_holds_a_motion_and_what_does_not() -> None:
    bare, furnished = (slack_between(surface_at(z, 1), surface_at(z - 0.1, 2), step(z), 800) for z in (3.0, 0.6))
    assert bare.directions.shape == (6, 1) and not furnished
    along = (place(2.9)[:3, :3].T @ np.eye(3)[ALONG]) @ bare.directions[:3, 0]
    assert abs(along) > 0.95 * np.linalg.norm(bare.directions[:3, 0])


def step(z: float) -> np.ndarray:
    return invert(place(z - 0.1)) @ place(z)


def test_what_is_open_stays_as_predicted_and_the_rest_as_measured() -> None:
    slack = slack_between(surface_at(3.0, 1), surface_at(2.9, 2), step(3.0), 800)
    axis = place(2.9)[:3, :3].T
    predicted = step(3.0).copy()
    predicted[:3, 3] += axis @ [0.05, 0.0, 0.2]  # wrong across the corridor, which the walls measure
    kept = slack.keep(step(3.0), predicted)
    moved = axis.T @ (kept - step(3.0))[:3, 3]
    assert moved[ALONG] == pytest.approx(0.2, abs=0.02) and abs(moved[0]) < 0.02
    sigma = np.sqrt(np.linalg.eigvalsh(slack.covariance(step(3.0), 0.3)[:3, :3])[-1])
    assert sigma == pytest.approx(0.3, rel=0.1)


def test_a_slid_alignment_is_replaced_by_a_prediction_that_fits_better() -> None:
    """At this place furniture holds the cloud, but weakly."""
    source, target, true = surface_at(1.2, 1), surface_at(1.1, 2), step(1.2)
    slid = true.copy()
    slid[:3, 3] += place(1.1)[:3, :3].T[:, ALONG] * 0.15
    for aligned, predicted in ((slid, true), (true, slid)):
        motion, _, resistance = best_supported(source, target, aligned, predicted, 800)
        assert np.linalg.norm((motion - true)[:3, 3]) < 0.02
        assert 0.0 < resistance.strength[0] < WEAKLY_HELD


def test_a_direction_is_as_uncertain_as_the_surfaces_that_hold_it_are_oblique() -> None:
    """At this place furniture holds the cloud, but weakly; the Hessian takes the noise of the normals for more."""
    source, target, true = surface_at(1.2, 1), surface_at(1.1, 2), step(1.2)
    contact = contact_between(source, target, true[None], 800)
    resistance = resistance_of(contact, target.spacing)
    found = judge_guess(source, target, true[None], True, NO_MATCHES, RigidSettings(refine_points=800), contact=contact)
    weak = with_weak_directions(found, resistance, target.spacing, 800.0)
    assert found.covariance is not None and weak.covariance is not None
    along = place(1.1)[:3, :3].T[:, ALONG]
    before, now = (float(np.sqrt(along @ one.covariance[:3, :3] @ along)) for one in (found, weak))
    across = found.rmse / (800 * (target.spacing / PATCH) ** 2) ** 0.5
    assert now**2 - before**2 == pytest.approx((across / resistance.strength[0]) ** 2, rel=0.2)
    strong = resistance._replace(strength=np.full(6, 0.5))
    assert with_weak_directions(found, strong, target.spacing, 800.0).covariance == pytest.approx(found.covariance)


def test_a_corridor_gives_no_edge_and_no_place() -> None:
    """A guess 0.2 m off along the corridor fits as well as the truth: it must not be taken for a measurement."""
    guess = step(3.0)
    guess[:3, 3] += place(2.9)[:3, :3].T[:, ALONG] * 0.2
    found = align_from_guesses(surface_at(3.0, 1), surface_at(2.9, 2), guess[None], NO_MATCHES, RigidSettings())
    assert found.status is Status.DEGENERATE and found.transform is None


def test_the_status_of_a_predicted_pose_names_the_reason_and_the_diagnostics_warn() -> None:
    pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
    from lepard_ros.msg import TrackingStatus

    from lepard_ros.ros.diagnostics import Health, judge_tracking
    from lepard_ros.ros.status import reason_code

    tracks = [track for track in walked()[1] if track.pose is not None and track.registration]
    for track in tracks:
        expected = TrackingStatus.REASON_DEGENERATE if track.registration.predicted else TrackingStatus.REASON_NONE
        assert reason_code(track) == expected
    told = next(track.reason for track in tracks if track.registration.predicted)
    assert judge_tracking(Health(active_since=0.0, state="OK", state_reason=told)) == ("warn", told)
    assert judge_tracking(Health(active_since=0.0, state="OK"))[0] == "ok"
