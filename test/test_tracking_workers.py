# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The tracker's two workers and its state machine: what comes in when, and that a slow machine changes nothing."""

import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from box_room import CAMERA, look, render, sweep
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.evaluation.fpfh_matcher import FpfhCloud, FpfhMatcher
from lepard_ros.geometry.poses import motion_between, twist_transport, velocity_between
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.matcher import EncodedCloud, Matcher
from lepard_ros.registration.types import NO_MATCHES, Registration, Status
from lepard_ros.tracking.background import Background
from lepard_ros.tracking.keyframes import Keyframe
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.state import TRANSITIONS, Event, next_state
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState

SETTINGS = TrackerSettings(keyframe_degrees=12.0, background_clouds=3)


@dataclass(frozen=True)
class SlowMatcher(FpfhMatcher):
    """FPFH on a slow machine."""

    def encode(self, points: np.ndarray, viewpoint: np.ndarray | None = None, grid: float | None = None) -> FpfhCloud:
        time.sleep(0.3)
        return super().encode(points, viewpoint, grid)


class SlowLepard(Matcher):
    """The network on a slow machine."""

    def encode(self, *arguments: Any, **named: Any) -> EncodedCloud:
        time.sleep(0.3)
        return super().encode(*arguments, **named)


def shipped(kind: type[Matcher]) -> Matcher:
    """A matcher with the weights that are shipped for rigid scenes."""
    return kind.from_pretrained("rigid", device="cpu")


@dataclass(frozen=True)
class BlindMatcher(FpfhMatcher):
    """A network that recognises nothing."""

    def register_many(self, source: FpfhCloud, targets: list[FpfhCloud]) -> list[Registration]:
        return [Registration(None, Status.TOO_FEW_MATCHES, NO_MATCHES, np.zeros(0, dtype=bool)) for _ in targets]


def cloud_at(pose: np.ndarray, seed: int = 0) -> np.ndarray:
    return depth_to_points(render(pose, seed), CAMERA)


def walk(tracker: RigidTracker, poses: list[np.ndarray]) -> list[Track]:
    return [tracker.process(cloud_at(pose, i), 0.1 * i) for i, pose in enumerate(poses)]


@pytest.mark.parametrize("threaded", [False, True])
def test_a_result_comes_in_after_so_many_clouds_however_long_the_work_takes(threaded: bool) -> None:
    background, order = Background(threaded, delay=3), []
    for seconds in (0.1, 0.0):
        background.submit(lambda seconds=seconds: time.sleep(seconds) or seconds, order.append)
        background.next_cloud()
    background.next_cloud()
    background.next_cloud()
    assert order[0] == 0.1
    background.next_cloud()
    assert order == [0.1, 0.0] and len(background) == 0


@pytest.mark.parametrize(("rate", "clouds"), [(5, 3), (10, 3), (30, 6)])
def test_a_fast_sensor_waits_for_as_long_as_its_stamps_say(rate: float, clouds: int) -> None:
    """Three clouds of a sensor with 30 Hz are too short for a network; the count is the same on any machine."""
    background, order = Background(threaded=False, delay=3, seconds=0.19), []
    background.next_cloud(100.0)
    background.submit(lambda: "done", order.append)
    passed = 0
    while not order:
        passed += 1
        background.next_cloud(100.0 + passed / rate)
    assert passed == clouds


def test_a_clock_that_was_set_back_does_not_hold_back_results() -> None:
    background, order = Background(threaded=False, delay=1, seconds=1.0), []
    background.next_cloud(100.0)
    background.submit(lambda: "done", order.append)
    background.next_cloud(5.0)
    assert order == ["done"]


def test_a_search_does_not_wait_for_keyframes() -> None:
    background, order, go = Background(threaded=True, delay=9), [], threading.Event()
    background.submit(lambda: go.wait(10), order.append)
    background.submit(lambda: order.append("keyframe"), lambda _: None)
    threading.Timer(0.1, go.set).start()
    background.run(lambda: order.append("search"), first=True)
    background.finish()
    assert order.index("search") < order.index("keyframe")


def test_who_cannot_wait_gets_a_late_result_with_the_first_cloud_after_it() -> None:
    background, order, go = Background(threaded=True, delay=1, hurried=lambda: True), [], threading.Event()
    background.submit(lambda: go.wait(10), order.append)
    for _ in range(3):
        background.next_cloud()  # would wait for ten seconds
    assert order == [] and len(background) == 1
    go.set()
    background.run(lambda: None)  # the worker does one job after the other
    background.next_cloud()
    assert order == [True] and len(background) == 0


def test_a_cloud_waits_for_a_result_until_the_next_one_arrives() -> None:
    arrived, order, go = threading.Event(), [], threading.Event()
    background = Background(threaded=True, delay=1, hurried=arrived.is_set)
    background.submit(lambda: time.sleep(0.1) or "soon", order.append)
    background.submit(lambda: go.wait(10), order.append)
    threading.Timer(0.4, arrived.set).start()
    background.next_cloud()
    assert order == ["soon"] and len(background) == 1 and arrived.is_set()
    go.set()
    background.finish()
    assert order == ["soon", True]


def test_work_that_fails_is_told_to_the_one_who_takes_it_in() -> None:
    background = Background(threaded=True, delay=1)
    background.submit(lambda: 1 / 0, print)
    with pytest.raises(ZeroDivisionError):
        background.next_cloud()
    assert background.run(lambda: "still here") == "still here"


def test_the_result_for_a_map_that_was_reset_meanwhile_is_dropped() -> None:
    tracker = RigidTracker(SlowMatcher(0.06), replace(SETTINGS, threaded=True))
    walk(tracker, sweep(10)[:3])
    assert len(tracker._background) > 0
    tracker.reset()
    assert len(tracker._background) == 0
    tracker.finish()
    assert len(tracker.keyframes) == 0
    first = tracker.process(cloud_at(sweep(10)[5]), 9.0)
    assert first.keyframe_id == 0 and np.array_equal(first.pose, np.eye(4))


def test_a_loop_of_a_map_that_was_reset_is_not_closed_in_the_next_one() -> None:
    settings = replace(SETTINGS, threaded=True, loop_gap=1, keyframe_degrees=5.0, background_clouds=6)
    tracker, poses = RigidTracker(shipped(Matcher), settings), sweep(10)[:6]
    walk(tracker, poses[:5])
    assert len(tracker.keyframes) == 5  # the third one sees the first again: due with the ninth cloud
    tracker.reset()
    again = walk(tracker, poses)  # the same views and numbers, so that a stale loop would fit
    assert len(tracker.keyframes) == 6 and not any(track.loop_closed for track in again)
    tracker.finish()
    assert any(edge.loop for edge in tracker.edges()), "its own loops come later"


@pytest.mark.slow
def test_tracking_on_a_slow_machine_gives_the_same_poses() -> None:
    there_and_back = [*sweep(6, -25, 5), *sweep(6, -25, 5)[-2::-1]]
    settings = replace(SETTINGS, loop_gap=1)
    fast = walk(RigidTracker(shipped(Matcher), settings), there_and_back)
    slow = walk(RigidTracker(shipped(SlowLepard), replace(settings, threaded=True)), there_and_back)
    for one, other in zip(fast, slow, strict=True):
        assert (one.state, one.new_keyframe, one.loop_closed) == (other.state, other.new_keyframe, other.loop_closed)
        np.testing.assert_array_equal(one.pose, other.pose)
    assert any(track.loop_closed for track in slow), "a loop is closed while tracking goes on"


def test_the_network_is_not_asked_about_a_cloud_that_is_followed() -> None:
    tracker = RigidTracker(BlindMatcher(0.06), SETTINGS)
    poses = sweep(10)[:5]
    tracks = walk(tracker, poses)
    assert [track.registration.method for track in tracks[1:]] == ["motion"] * 4
    assert all(motion_between(t.pose, invert(poses[0]) @ p)[0] < 0.03 for t, p in zip(tracks, poses, strict=True))


def test_a_pose_is_checked_now_and_then_where_no_keyframe_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a known map nothing else asks the network; a pose that it disputes is looked for with the next cloud."""
    tracker, checked = RigidTracker(FpfhMatcher(0.06), SETTINGS), []

    def is_disputed(frame: Keyframe, reference: Keyframe) -> bool:
        assert motion_between(reference.pose, frame.pose)[0] < 0.03 and frame.id not in tracker.keyframes
        checked.append(frame.stamp)
        return len(checked) == 2

    monkeypatch.setattr(tracker._loop_closer, "is_disputed", is_disputed)
    stamps = [0.25 * i for i in range(50)]
    tracks = [tracker.process(cloud_at(np.eye(4), 0), stamp) for stamp in stamps]
    assert checked == [5.0, 10.0] and len(tracker.keyframes) == 1
    searched = [track.stamp for track in tracks if "search" in track.seconds]
    assert len(searched) == 1 and 10.0 < searched[0] < 12.0
    assert all(track.pose is not None for track in tracks)


@pytest.mark.parametrize(("fallback", "method"), [("none", None), ("fpfh", "fpfh")])
def test_the_fallback_finds_what_the_network_does_not(fallback: str, method: str | None) -> None:
    tracker = RigidTracker(BlindMatcher(0.06), replace(SETTINGS, fallback=fallback))
    walk(tracker, sweep(10)[:4])
    tracks = [tracker.process(cloud_at(sweep(10)[1] @ look(0.02 * i, 0, i, 0), 50 + i), 90 + 0.1 * i) for i in range(2)]
    found = {track.registration.method for track in tracks if track.pose is not None and track.registration}
    assert found == set() if method is None else method in found
    assert tracks[0].state in (TrackingState.LOST, TrackingState.RELOCALISED)


def test_the_second_worker_works_in_another_thread() -> None:
    names = []
    background = Background(threaded=True, delay=1)
    background.submit(lambda: names.append(threading.current_thread().name), lambda _: None)
    background.finish()
    assert names == ["lepard_background"]


def test_every_state_knows_what_every_event_does_to_it() -> None:
    for state in TrackingState:
        for event in (Event.FOLLOWED, Event.MISSED, Event.FOUND):
            assert (state, event) in TRANSITIONS
        assert next_state(state, Event.RESET) is TrackingState.INITIALISING
    assert next_state(TrackingState.INITIALISING, Event.STARTED) is TrackingState.OK
    with pytest.raises(KeyError):
        next_state(TrackingState.LOST, Event.STARTED)


def test_the_twist_is_the_velocity_in_the_body_s_own_frame() -> None:
    first, second = look(0, 0, 10), look(0, 0, 10)
    second[:3, 3] = first[:3, 3] + first[:3, :3] @ [0, 0, 0.2]
    np.testing.assert_allclose(velocity_between(first, second, 0.1), [0, 0, 2, 0, 0, 0], atol=1e-9)
    arm = np.eye(4)
    arm[0, 3] = 0.5  # the body is half a metre to the right of a sensor that turns about y, down
    np.testing.assert_allclose(twist_transport(arm) @ [0, 0, 0, 0, 1, 0], [0, 0, -0.5, 0, 1, 0], atol=1e-9)


def test_a_tracked_cloud_has_a_twist_and_a_jump_has_none() -> None:
    tracker = RigidTracker(FpfhMatcher(0.06), SETTINGS)
    poses = sweep(10)[:3]
    tracks = walk(tracker, poses)
    assert tracks[0].twist is None and tracks[2].twist is not None
    truth = velocity_between(poses[1], poses[2], 0.1)
    assert np.abs(tracks[2].twist.velocity - truth).max() < 0.25
    assert np.linalg.eigvalsh(tracks[2].twist.covariance).min() > 0


def test_odometry_predicts_where_the_motion_so_far_does_not() -> None:
    poses = [look(0, -0.5, 0), look(0.0, -0.5, 1), look(0.1, -0.3, 30)]
    tracker = RigidTracker(BlindMatcher(0.06), SETTINGS)
    drifting = look(3.0, 1.0, 40)
    tracks = [tracker.process(cloud_at(p, i), 0.1 * i, drifting @ p) for i, p in enumerate(poses)]
    assert tracks[-1].pose is not None
    assert motion_between(tracks[-1].pose, invert(poses[0]) @ poses[-1])[0] < 0.03
