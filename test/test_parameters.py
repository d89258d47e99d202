# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Parameters, presets, the guard of stamps and frames, and the worker: what of the node needs no ROS graph."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lepard_ros.errors import InputError
from lepard_ros.ros import worker as worker_module
from lepard_ros.ros.parameters import (
    NodeSettings,
    check_change,
    check_together,
    check_value,
    markdown_table,
    parse_box,
    preset_file,
    settings_fields,
    share_directory,
    unknown_name,
)
from lepard_ros.ros.worker import Worker
from lepard_ros.tracking.input_guard import AHEAD_NS, InputGuard

CONFIG = Path(__file__).resolve().parent.parent / "config"
SECOND = 1_000_000_000


def test_every_parameter_is_described_and_its_default_is_valid() -> None:
    for name, one in settings_fields().items():
        assert one.metadata["description"].endswith("."), name
        assert check_value(name, one.default) == one.default
        if isinstance(one.default, (int, float)) and not isinstance(one.default, bool):
            assert one.metadata["low"] is not None, f"{name} has no range"
    check_together(NodeSettings())


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("max_rnage", 1.0, "did you mean 'max_range'"),
        ("quux", 1.0, "choose from autostart"),
        ("max_range", -1.0, "between 0.1 and 1000.0"),
        ("max_range", float("nan"), "between"),
        ("max_range", "far", "must be a number"),
        ("max_keyframes", 2.5, "whole number"),
        ("autostart", 1, "true or false"),
        ("mode", "rigdi", "did you mean 'rigid'"),
        ("map_name", "../../etc/passwd", "plain name"),
        ("map_name", "..", "plain name"),
        ("map_name", "", "plain name"),
    ],
)
def test_a_bad_value_is_refused_with_a_sentence(name: str, value: object, word: str) -> None:
    with pytest.raises(InputError, match=word):
        check_value(name, value)


def test_a_whole_number_is_a_number() -> None:
    assert check_value("max_range", 5) == 5.0
    assert isinstance(check_value("max_range", 5), float)


def test_changes_while_running() -> None:
    check_change(NodeSettings(), {"max_range": 3.0, "use_sim_time": True})
    with pytest.raises(InputError, match="restart"):
        check_change(NodeSettings(), {"mode": "deformable"})
    with pytest.raises(InputError, match="no point is left"):
        check_change(NodeSettings(), {"max_range": 0.1})
    with pytest.raises(InputError, match="map_file is empty"):
        check_change(NodeSettings(), {"mapping": False})


@pytest.mark.parametrize("box", ["1 2 3", "a b c d e f", "0 0 0 1 1 -1"])
def test_a_region_of_interest_is_two_corners(box: str) -> None:
    assert parse_box("") is None and parse_box("0, 0, 0.5, 1, 1, 2") == ((0, 0, 0.5), (1, 1, 2))
    with pytest.raises(InputError, match="foreground_box"):
        check_change(NodeSettings(), {"foreground_box": box})


def test_frames_must_differ() -> None:
    with pytest.raises(InputError, match="differ"):
        check_together(NodeSettings(odom_frame="map"))


@pytest.mark.parametrize("path", sorted(CONFIG.glob("*.yaml")), ids=lambda path: path.stem)
def test_presets_hold_valid_parameters(path: Path) -> None:
    import yaml

    values = yaml.safe_load(path.read_text())["/**"]["ros__parameters"]
    check_together(NodeSettings(**{name: check_value(name, value) for name, value in values.items()}))


def test_presets_are_found_by_name_or_path(tmp_path: Path) -> None:
    assert preset_file("rigid") == share_directory() / "config" / "rigid.yaml"
    own = tmp_path / "own.yaml"
    own.write_text("")
    assert preset_file(str(own)) == own
    with pytest.raises(InputError, match="did you mean 'realsense'"):
        preset_file("realsens")


def test_unknown_names_come_with_the_nearest() -> None:
    assert unknown_name("preset", "zde", ["zed", "rigid"]) == "There is no preset 'zde'; did you mean 'zed'?"
    assert unknown_name("preset", "???", ["zed", "rigid"]) == "There is no preset '???'; choose from zed, rigid."


def test_the_documented_table_is_the_real_one() -> None:
    page = (CONFIG.parent / "docs" / "parameters.md").read_text()
    assert markdown_table() in page, "write lepard_ros.ros.parameters.markdown_table() into docs/parameters.md"


# ---- live changes ----

LIVE = {
    "min_range": 0.5,
    "max_range": 2.5,
    "change_after": 2,
    "reset_on_time_jump": True,
    "silence": 3.0,
    "publish_tf": False,
    "transform_tolerance": 0.5,
    "tf_timeout": 0.7,
    "mapping": False,
    "map_name": "other",
    "keyframe_distance": 0.05,
    "keyframe_degrees": 5.0,
    "keyframe_overlap": 0.9,
    "candidates": 3,
    "max_speed": 0.5,
    "max_turn": 30.0,
    "map_spacing": 0.2,
    "map_period": 1.0,
    "marker_lines": 7,
    "foreground": "all",
    "foreground_box": "-1 -1 0.3 1 1 2.5",
    "min_plane_area": 0.5,
    "part_gap": 0.2,
}


def test_every_live_parameter_has_a_test_value() -> None:
    assert set(LIVE) == {name for name, one in settings_fields().items() if one.metadata["live"]}
    assert all(value != settings_fields()[name].default for name, value in LIVE.items())


@functools.cache
def shipped_matcher() -> Any:
    from lepard_ros.matcher import Matcher

    return Matcher.from_pretrained("rigid", device="cpu")


@pytest.mark.parametrize("name", LIVE)
def test_a_live_change_reaches_every_part_that_uses_the_parameter(name: str) -> None:
    pytest.importorskip("rclpy", reason="ROS 2 is not installed here")
    from lepard_ros.ros.deformable_mode import DeformableMode
    from lepard_ros.ros.frames import FramePlan
    from lepard_ros.ros.rigid_mode import RigidMode

    matcher = shipped_matcher()
    before = NodeSettings(map_file="somewhere") if name == "mapping" else NodeSettings()
    after = dataclasses.replace(before, **{name: LIVE[name]})
    check_change(before, {name: LIVE[name]})
    plan = FramePlan(before, None, None)
    rigid = RigidMode(matcher, dataclasses.replace(before, map_file=""), plan)
    deformable = DeformableMode(matcher, before, plan)
    rigid.apply(after)
    deformable.apply(after)
    tracker: Any = rigid._tracker
    holders = [rigid._settings, plan.settings, deformable._settings]
    holders += [
        one
        for one in (tracker.settings, tracker._map.settings, tracker._follower.settings, tracker._loop_closer.settings)
        if hasattr(one, name)
    ]
    assert [getattr(one, name) for one in holders] == [LIVE[name]] * len(holders)
    given = deformable._tracker.settings
    taken = given.foreground
    told = {
        "max_range": given.max_range,
        "foreground": "all" if taken is None else "body",
        "foreground_box": None if taken is None else taken.box,
        "min_plane_area": None if taken is None else taken.min_plane_area,
        "part_gap": None if taken is None else taken.gap,
    }
    if name in told:
        assert told[name] == (parse_box(after.foreground_box) if name == "foreground_box" else LIVE[name])


# ---- the guard ----


def test_clouds_in_order_pass() -> None:
    guard = InputGuard()
    assert [guard.check(i * SECOND, "camera", 10 * SECOND) for i in range(1, 5)] == [None] * 4


@pytest.mark.parametrize(
    ("stamp", "frame", "word"),
    [(0, "camera", "stamp 0"), (5, "", "empty frame_id"), (5, "/", "empty"), (86_400 * SECOND, "camera", "ahead")],
)
def test_unusable_clouds_are_refused_and_forgotten(stamp: int, frame: str, word: str) -> None:
    guard = InputGuard()
    guard.check(SECOND, "camera", SECOND)
    with pytest.raises(InputError, match=word):
        guard.check(stamp, frame, SECOND)
    assert guard.check(2 * SECOND, "camera", SECOND) is None


def test_equal_and_slightly_older_stamps_are_left_out_without_a_reset() -> None:
    guard = InputGuard()
    guard.check(5 * SECOND, "camera", 9 * SECOND)
    for stamp in (5 * SECOND, 5 * SECOND - 30_000_000):
        with pytest.raises(InputError, match="before the last"):
            guard.check(stamp, "camera", 9 * SECOND)
    assert guard.check(5 * SECOND + 1, "camera", 9 * SECOND) is None


def strange(guard: InputGuard, stamp: int, frame: str = "camera", now: int = 100 * SECOND) -> str:
    """The sentence with which a cloud is refused."""
    with pytest.raises(InputError) as caught:
        guard.check(stamp, frame, now)
    return str(caught.value)


def test_one_strange_cloud_is_refused_and_changes_nothing() -> None:
    guard = InputGuard()
    guard.check(100 * SECOND, "camera", 100 * SECOND)
    assert "jumped back by 90.0 s" in strange(guard, 10 * SECOND)
    assert "from 'camera' to 'lidar'" in strange(guard, 100 * SECOND, "lidar")
    assert "jumped ahead by 9.0 s" in strange(guard, 109 * SECOND)
    assert guard.check(101 * SECOND, "camera", 100 * SECOND) is None


def test_several_strange_clouds_in_a_row_are_a_lasting_change() -> None:
    guard = InputGuard(change_after=3)
    guard.check(100 * SECOND, "camera", 100 * SECOND)
    strange(guard, 10 * SECOND)
    strange(guard, 11 * SECOND)
    assert guard.check(12 * SECOND, "camera", 100 * SECOND) == ("Time jumped back by 88.0 s.", True)
    assert guard.check(13 * SECOND, "camera", 100 * SECOND) is None
    strange(guard, 14 * SECOND, "lidar")
    strange(guard, 15 * SECOND, "lidar")
    change = guard.check(16 * SECOND, "lidar", 100 * SECOND)
    assert change is not None
    assert not change.restarted
    assert guard.check(17 * SECOND, "lidar", 100 * SECOND) is None


def test_strange_clouds_that_contradict_each_other_are_no_change() -> None:
    guard = InputGuard(change_after=2)
    guard.check(100 * SECOND, "camera", 100 * SECOND)
    for frame in ("a", "b", "a", "b"):
        strange(guard, 101 * SECOND, frame)
    for stamp in (50, 40, 30):
        strange(guard, stamp * SECOND)
    assert guard.check(101 * SECOND, "camera", 100 * SECOND) is None


def test_a_pause_of_the_sensor_is_no_jump() -> None:
    guard = InputGuard()
    guard.check(100 * SECOND, "camera", 100 * SECOND)
    assert guard.check(160 * SECOND, "camera", 160 * SECOND) is None


def test_the_sensor_clock_may_be_a_little_ahead() -> None:
    assert InputGuard().check(SECOND + AHEAD_NS, "camera", SECOND) is None


# ---- the worker ----


def busy_worker() -> tuple[Worker[int], threading.Event, list[int]]:
    """A worker that works on item 0 until the event is set, and what it has done."""
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def process(item: int) -> None:
        begun.set()
        go_on.wait(5)
        done.append(item)

    worker = Worker(process, lambda item, error: None)
    worker.offer(0)
    assert begun.wait(5)
    return worker, go_on, done


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_the_newest_item_wins_and_drops_are_counted() -> None:
    worker, go_on, done = busy_worker()
    for item in range(1, 100):
        worker.offer(item)
    go_on.set()
    wait_for(lambda: worker.processed == 2)
    assert worker.stop(5)
    assert done == [0, 99]
    assert (worker.received, worker.processed, worker.dropped) == (100, 2, 98)


@pytest.mark.parametrize(("period", "newer", "expected"), [(10.0, True, [0, 2]), (0.1, False, [0, 1])])
def test_an_old_item_is_left_for_one_that_is_due_but_not_lost(
    monkeypatch: pytest.MonkeyPatch, period: float, newer: bool, expected: list[int]
) -> None:
    """On a clock of our own: the worker gets free 50 ms after the second item, and the third is due."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(worker_module, "SOON", 100.0)
    worker, go_on, done = busy_worker()
    clock.now = period
    worker.offer(1)
    clock.now += 0.05
    go_on.set()
    wait_for(lambda: done == [0])
    if newer:
        worker.offer(2)
    wait_for(lambda: len(done) == 2)
    assert worker.stop(5)
    assert done == expected


def test_a_worker_that_keeps_up_takes_every_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of our own: one item takes longer than the period, and the next one waits for 50 ms."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(worker_module, "time", clock)
    monkeypatch.setattr(worker_module, "SOON", 100.0)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def process(item: int) -> None:
        if item == 1:
            begun.set()
            go_on.wait(5)
        done.append(item)

    worker: Worker[int] = Worker(process, lambda item, error: None)
    worker.offer(0)
    wait_for(lambda: worker.processed == 1)
    clock.now = 10.0
    worker.offer(1)
    assert begun.wait(5)
    clock.now = 20.0
    worker.offer(2)
    clock.now = 20.05
    go_on.set()
    wait_for(lambda: len(done) == 3)
    assert worker.stop(5)
    assert done == [0, 1, 2] and worker.dropped == 0


@pytest.mark.parametrize(
    ("before", "kept"),
    [([0.5] * 12, [2, 5, 8, 11]), ([0.2, 0.15, *[0.5] * 12], [6]), ([0.1] * 3 + [0.5] * 12, [4, 9])],
)
def test_a_search_after_many_others_is_bridged(
    monkeypatch: pytest.MonkeyPatch, before: list[float], kept: list[int]
) -> None:
    """On a clock of our own: items that took `before` seconds, then a search during which ten items arrive."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(worker_module, "time", clock)
    begun, go_on, done = threading.Event(), threading.Event(), []
    took = dict(enumerate([*before, 0.2], start=-len(before)))

    def process(item: int) -> bool:
        if item == 0:
            begun.set()
            go_on.wait(5)
        clock.now += took.get(item, 0.0)
        done.append(item)
        return took.get(item, 0.0) >= 0.5

    worker: Worker[int] = Worker(process, lambda item, error: None, bridges=True)
    for number, item in enumerate(range(-len(before), 0)):
        worker.offer(item)
        wait_for(lambda reached=number + 1: worker.processed == reached)
    worker.offer(0)
    assert begun.wait(5)
    for item in range(1, 13):
        clock.now += 0.033
        worker.offer(item)
    go_on.set()
    wait_for(lambda: len(done) == len(before) + 1 + len(kept) + 1)
    assert worker.stop(5)
    assert done[len(before) + 1 :] == [*kept, 12]


@pytest.mark.parametrize(
    ("bridges", "second", "searched", "expected"),
    [
        (False, 0.02, False, [0, 1, 16, 17]),
        (True, 0.02, False, [0, 1, 3, 6, 9, 12, 15, 16, 17]),
        (True, 0.4, False, [0, 1, 3, 6, 9, 12, 15, 16, 17]),  # slow, but tracked: the next one is close to it
        (True, 0.5, True, [0, 1, 3, 17]),
    ],
)
def test_items_that_arrive_during_a_hold_up_bridge_it(
    monkeypatch: pytest.MonkeyPatch, bridges: bool, second: float, searched: bool, expected: list[int]
) -> None:
    """On a clock of our own: item 1 takes half a second; if item 3, kept meanwhile, is searched, the rest goes."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(worker_module, "time", clock)
    begun, go_on, done = threading.Event(), threading.Event(), []

    def process(item: int) -> bool:
        if item == 1:
            begun.set()
            go_on.wait(5)
        clock.now += {1: 0.0, 3: second}.get(item, 0.02)
        done.append(item)
        return item == 1 or (item == 3 and searched)

    worker: Worker[int] = Worker(process, lambda item, error: None, bridges=bridges)
    worker.offer(0)
    wait_for(lambda: worker.processed == 1)
    worker.offer(1)
    assert begun.wait(5)
    for item in range(2, 17):
        clock.now += 0.033
        worker.offer(item)
    if searched:
        worker.offer(17)
    go_on.set()
    wait_for(lambda: len(done) == len(expected) - (not searched))
    if not searched:
        worker.offer(17)
    wait_for(lambda: len(done) == len(expected))
    assert worker.stop(5)
    assert done == expected
    assert worker.received == worker.processed + worker.dropped


def test_an_error_goes_to_its_handler_and_the_next_item_is_processed() -> None:
    failed: list[str] = []
    reached = threading.Event()

    def process(item: int) -> None:
        if item == 0:
            raise RuntimeError("broken")
        reached.set()

    worker = Worker(process, lambda item, error: failed.append(f"{item}: {error}"))
    worker.offer(0)
    wait_for(lambda: worker.processed == 1)
    worker.offer(1)
    assert reached.wait(5)
    assert worker.stop(5)
    assert failed == ["0: broken"]


def test_a_busy_worker_is_not_waited_for_beyond_the_limit() -> None:
    begun, release = threading.Event(), threading.Event()

    def process(item: int) -> None:
        begun.set()
        release.wait(10)

    worker = Worker(process, lambda item, error: None)
    worker.offer(1)
    assert begun.wait(5)
    start = time.monotonic()
    assert not worker.stop(0.1)
    assert time.monotonic() - start < 2
    release.set()
    assert worker.stop(5)
