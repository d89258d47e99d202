# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The weights that are shipped, through the trackers, with a quality that each must reach.

The node runs both in test_demo.py and test_demo_deformable.py, with a quality gate as well.
"""

from functools import cache

import numpy as np
import pytest
import torch

from box_room import CAMERA, render, sweep
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.matcher import Matcher
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from lepard_ros.synthesis.room_sequences import Sequence, room_sequence
from lepard_ros.tracking.deformable import DeformableTracker
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState

RATE = 2.0  # clouds a second: steps of a third of a metre, which motion alone does not always bridge


@cache
def walk() -> Sequence:
    """A loop through a synthesised room that no training has seen."""
    return room_sequence(3, 24, RATE, width=160)


@cache
def film() -> CreatureSequence:
    """A biped that moves its limbs."""
    return creature_sequence(0, 8, width=240)


@cache
def matcher(mode: str) -> Matcher:
    return Matcher.from_pretrained(mode, device="cpu")


def cloud(frame: int) -> FloatArray:
    return depth_to_points(walk().depths[frame], walk().camera)


def error(track: Track, frame: int) -> float:
    """Metres between the pose and the truth; the map begins at frame 0."""
    assert track.pose is not None
    return motion_between(track.pose, invert(walk().poses[0]) @ walk().poses[frame])[0]


@pytest.mark.slow
def test_rigid_weights_track_a_walk_and_close_its_loop() -> None:
    tracker = RigidTracker(matcher("rigid"), TrackerSettings(background_clouds=3))
    tracks = [tracker.process(cloud(frame), frame / RATE) for frame in range(24)]
    assert [track.state for track in tracks] == [TrackingState.OK] * 24
    assert max(error(track, frame) for frame, track in enumerate(tracks)) < 0.06
    closed = [frame for frame, track in enumerate(tracks) if track.loop_closed]
    assert closed and closed[0] >= 12, "the loop closes when the walk comes back, not before"
    far = [edge for edge in tracker._map.graph.edges if edge.loop]
    assert any(abs(edge.source - edge.target) > 5 for edge in far), "an edge joins the end of the map to its beginning"


@pytest.mark.slow
def test_rigid_weights_find_the_place_again_from_matches_alone() -> None:
    tracker = RigidTracker(matcher("rigid"))
    for frame in range(4):
        tracker.process(cloud(frame), frame / RATE)
    blind = np.full((120, 160, 3), np.nan, np.float32)
    assert tracker.process(blind, 10.0).state is TrackingState.LOST
    back = tracker.process(cloud(1), 60.0)
    assert back.state is TrackingState.RELOCALISED and error(back, 1) < 0.06
    assert back.registration is not None and back.registration.inliers.sum() >= 50


def speechless_matcher() -> Matcher:
    """A network whose confidence never suffices: it gives no matches."""
    torch.manual_seed(0)
    sizes = {"width": 16, "feature_dim": 48, "confidence_threshold": 1.0}
    config = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), **sizes})
    return Matcher(Lepard(config), Card("speechless", config, sha256="5" * 64), device="cpu")


@pytest.mark.parametrize(("fallback", "state"), [("none", TrackingState.LOST), ("fpfh", TrackingState.RELOCALISED)])
def test_the_fallback_is_used_where_the_network_finds_nothing_and_only_if_chosen(
    fallback: str, state: TrackingState
) -> None:
    poses = sweep(10)
    views = [depth_to_points(render(pose, seed), CAMERA) for seed, pose in enumerate(poses)]
    tracker = RigidTracker(speechless_matcher(), TrackerSettings(fallback=fallback))
    assert [tracker.process(view, 0.1 * i).state for i, view in enumerate(views[:2])] == [TrackingState.OK] * 2
    assert tracker.process(np.full((120, 160, 3), np.nan, np.float32), 10.0).state is TrackingState.LOST
    tracker.process(views[2], 60.0)  # too long after the last pose to be guessed
    track = tracker.process(views[2], 60.1)  # a place that only one keyframe names has to be seen twice
    assert track.state is state
    if fallback == "fpfh":
        assert track.registration is not None and track.registration.method == "fpfh" and track.pose is not None
        assert motion_between(track.pose, invert(poses[0]) @ poses[2])[0] < 0.05


def warp_error(points: FloatArray, moved: FloatArray, frame: int) -> tuple[float, float]:
    """Median metres between warped points of frame 0 and the truth, and between the points as they were and it."""
    seen = np.isfinite(film().cloud(0)).all(axis=-1)
    truth = film().first_now[frame][seen]
    return float(np.median(np.linalg.norm(moved - truth, axis=1))), float(
        np.median(np.linalg.norm(points - truth, axis=1))
    )


def first_points() -> FloatArray:
    points = film().cloud(0).reshape(-1, 3)
    return points[np.isfinite(points).all(axis=1)].astype(np.float64)


@pytest.mark.slow
def test_deformable_weights_follow_a_creature() -> None:
    tracker = DeformableTracker(matcher("deformable"))
    for frame in range(4):
        track = tracker.process(film().cloud(frame), frame / 10)
        assert track.state is TrackingState.OK, track.reason
    assert track.warp is not None
    moved, covered = track.warp.apply(first_points())
    assert covered.mean() > 0.9
    after, before = warp_error(first_points(), moved, 3)
    assert before > 0.03, "the creature moved, or this shows nothing"
    assert after < 0.02 and after < 0.5 * before


@pytest.mark.slow
def test_a_warp_of_two_clouds_takes_points_where_they_truly_are() -> None:
    warp = matcher("deformable").warp(film().cloud(0), film().cloud(3))
    assert warp.ok, warp.status
    after, before = warp_error(first_points(), warp(first_points()), 3)
    assert before > 0.03
    assert after < 0.02 and after < 0.5 * before
