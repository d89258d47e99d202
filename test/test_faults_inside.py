# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Faults inside the node, made by a mode that fails on demand; the rest is the real node, in this process."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

import rclpy
from lepard_ros.msg import TrackingStatus
from rclpy.context import Context
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.parameter import Parameter
from std_srvs.srv import Trigger

from lepard_ros.errors import InputError
from lepard_ros.ros import node as node_module
from lepard_ros.ros.conversion import Frame, cloud_message
from lepard_ros.ros.diagnostics import resident_megabytes
from lepard_ros.ros.frames import FramePlan
from lepard_ros.ros.memory import coarsen, process_within_memory
from lepard_ros.ros.modes import Result, Topic
from lepard_ros.ros.node import Arrival, LepardNode
from lepard_ros.ros.parameters import NodeSettings
from lepard_ros.ros.status import status_message
from node_harness import STEP_NS, cloud_at, untrained_weights


class FragileMode:
    """A mode whose next clouds end as the test says; None ends well."""

    topics: ClassVar[dict[str, Topic]] = {}
    coarse_grid: float | None = 0.08
    description = "fragile"

    def __init__(self) -> None:
        self.failures: list[Exception | None] = []
        self.processed: list[int] = []
        self.saving: Exception | None = None
        self.busy: threading.Event | None = None  # works until this is set

    def process(self, frame: Frame, wanted: set[str]) -> Result:
        self.processed.append(len(frame.points.reshape(-1, 3)))
        if self.busy is not None:
            self.busy.wait(20)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        return Result(status_message(frame.stamp_ns, frame.frame_id, "OK", "rigid"), [])

    def apply(self, settings: NodeSettings) -> None: ...

    def reset(self) -> None: ...

    def relocalise(self) -> None: ...

    def hint(self, pose: np.ndarray) -> None: ...

    def unsaved(self) -> bool:
        return False

    def keyframe_count(self) -> int:
        return 7

    def save(self, directory: Path) -> str:
        if self.saving is not None:
            raise self.saving
        return "saved"

    def close(self) -> None: ...

    def facts(self) -> dict[str, str]:
        return {}


@pytest.fixture
def mode() -> FragileMode:
    return FragileMode()


@pytest.fixture
def node(mode: FragileMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LepardNode]:
    monkeypatch.setattr(node_module, "make_mode", lambda settings, plan, logger, hurried: mode)
    context = Context()
    rclpy.init(context=context)
    made = LepardNode(context=context, parameter_overrides=[Parameter("map_directory", value=str(tmp_path))])
    assert made.trigger_configure() == TransitionCallbackReturn.SUCCESS
    assert made.trigger_activate() == TransitionCallbackReturn.SUCCESS
    yield made
    made.trigger_shutdown()
    made.destroy_node()
    rclpy.shutdown(context=context)


@pytest.fixture
def said(node: LepardNode, monkeypatch: pytest.MonkeyPatch) -> list[TrackingStatus]:
    """Every status that the node publishes."""
    statuses: list[TrackingStatus] = []
    monkeypatch.setattr(node._outputs["status"], "publish", statuses.append)
    return statuses


def offer(node: LepardNode, step: int) -> None:
    """Hand a cloud to the node as its subscription does, and wait until it was dealt with."""
    worker = node._worker
    assert worker is not None
    done = worker.processed
    node._on_data(serialised(step))
    wait(lambda: worker.processed > done)


def serialised(step: int) -> bytes:
    """A cloud as bytes."""
    from rclpy.serialization import serialize_message

    return serialize_message(cloud_message(cloud_at(0), time.time_ns() + step * STEP_NS, "camera"))


def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_exception_costs_one_cloud_and_is_logged_once(
    node: LepardNode, mode: FragileMode, said: list[TrackingStatus], capfd: pytest.CaptureFixture[str]
) -> None:
    mode.failures = [RuntimeError("a bug"), RuntimeError("a bug"), None]
    for step in range(3):
        offer(node, step)
    internal, ok = int(TrackingStatus.REASON_INTERNAL_ERROR), int(TrackingStatus.REASON_NONE)
    assert [status.reason for status in said] == [internal, internal, ok]
    assert "RuntimeError: a bug" in said[0].reason_text
    assert said[-1].state == TrackingStatus.OK
    assert said[-1].frames_rejected == 2
    assert capfd.readouterr().err.count("Traceback") == 1


def test_out_of_memory_is_tried_once_on_a_coarser_grid_then_refused(
    node: LepardNode, mode: FragileMode, said: list[TrackingStatus]
) -> None:
    mode.failures = [MemoryError(), None, MemoryError(), MemoryError(), None]
    offer(node, 0)
    assert said[-1].state == TrackingStatus.OK
    assert mode.processed[1] < mode.processed[0] / 3
    offer(node, 1)
    assert said[-1].reason == TrackingStatus.REASON_BAD_INPUT
    assert "Not enough memory" in said[-1].reason_text
    offer(node, 2)
    assert said[-1].reason == TrackingStatus.REASON_NONE


def test_a_mode_that_must_not_see_coarse_clouds_refuses_at_once(
    node: LepardNode, mode: FragileMode, said: list[TrackingStatus]
) -> None:
    mode.coarse_grid = None  # as in deformable mode, whose model would learn the coarse cloud
    mode.failures = [MemoryError(), None]
    offer(node, 0)
    assert said[-1].state == TrackingStatus.REFUSED
    assert "Not enough memory" in said[-1].reason_text
    assert len(mode.processed) == 1


def test_a_refused_cloud_does_not_claim_a_pose(node: LepardNode, mode: FragileMode, said: list[TrackingStatus]) -> None:
    mode.failures = [None, InputError("no.")]
    offer(node, 0)
    offer(node, 1)
    assert [status.state for status in said] == [TrackingStatus.OK, TrackingStatus.REFUSED]
    assert said[-1].keyframes == mode.keyframe_count()


def test_nothing_leaves_a_node_that_was_deactivated_while_busy(
    node: LepardNode, mode: FragileMode, said: list[TrackingStatus]
) -> None:
    worker = node._worker
    assert worker is not None
    mode.busy = threading.Event()
    node._on_data(serialised(0))
    wait(lambda: bool(mode.processed))
    assert node.trigger_deactivate() == TransitionCallbackReturn.SUCCESS
    mode.busy.set()
    wait(lambda: worker.processed > 0)
    assert not said
    assert node.trigger_activate() == TransitionCallbackReturn.SUCCESS
    offer(node, 1)
    assert [status.state for status in said] == [TrackingStatus.OK]


def test_the_device_running_out_of_memory_counts_too() -> None:
    import torch

    mode = FragileMode()
    mode.failures = [torch.OutOfMemoryError("CUDA out of memory")] * 2
    frame = Frame(cloud_at(0), 1, "camera")
    with pytest.raises(InputError, match="memory"):
        process_within_memory(mode, frame, set(), rclpy.logging.get_logger("test"))
    assert len(mode.processed) == 2


@pytest.mark.parametrize(("mode", "weights"), [("rigid", "deformable"), ("deformable", "rigid")])
def test_weights_of_the_other_mode_work_and_are_named(
    mode: str, weights: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = NodeSettings(mode=mode, weights=weights, device="cpu", publish_tf=False)
    made = node_module.make_mode(settings, FramePlan(settings, None, None), rclpy.logging.get_logger("test"))
    assert f"were trained for {weights} scenes" in capfd.readouterr().err
    part = slice(None) if mode == "rigid" else slice(40, 80)  # a whole room has too many nodes for a quick test
    for step in range(2):
        status = made.process(Frame(cloud_at(step)[part, part], (step + 1) * STEP_NS, "camera"), set()).status
        assert (status.mode, status.reason == TrackingStatus.REASON_INTERNAL_ERROR) == (mode, False)
    made.close()
    assert mode == "deformable" or status.state == TrackingStatus.OK


def test_without_open3d_the_node_tracks_and_says_that_loops_stay_open(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from lepard_ros.tracking import pose_graph

    def missing() -> None:
        raise InputError("Open3D is missing: pip install open3d-cpu.")

    monkeypatch.setattr(pose_graph, "import_open3d", missing)
    settings = NodeSettings(weights=str(untrained_weights()), device="cpu", publish_tf=False, keyframe_distance=0.1)
    made = node_module.make_mode(settings, FramePlan(settings, None, None), rclpy.logging.get_logger("test"))
    assert "Loop closure is off: Open3D is missing" in capfd.readouterr().err
    for step in range(6):
        status = made.process(Frame(cloud_at(step), (step + 1) * STEP_NS, "camera"), set()).status
        assert status.state == TrackingStatus.OK
    assert status.keyframes >= 2


def test_everything_heavy_is_imported_when_the_node_is_configured() -> None:
    code = (
        "import sys; from lepard_ros.ros.node import make_mode; from lepard_ros.ros.frames import FramePlan; "
        "from lepard_ros.ros.parameters import NodeSettings; import rclpy.logging; s = NodeSettings(device='cpu'); "
        "make_mode(s, FramePlan(s, None, None), rclpy.logging.get_logger('test')); assert 'open3d' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_coarsening_keeps_one_point_a_cell() -> None:
    points = np.random.default_rng(0).uniform(0, 1, (5000, 3)).astype(np.float32)
    coarse = coarsen(points, 0.25)
    assert len(coarse) == 64
    assert len(np.unique(np.floor(coarse / 0.25), axis=0)) == 64


def test_a_full_disc_is_an_answer_and_not_the_end(node: LepardNode, mode: FragileMode) -> None:
    mode.saving = OSError(28, "No space left on device")
    answer = node._on_save(Trigger.Request(), Trigger.Response())
    assert not answer.success
    assert "No space left" in answer.message
    mode.saving = None
    assert node._on_save(Trigger.Request(), Trigger.Response()).success


def test_bytes_that_are_no_message_are_refused(node: LepardNode, said: list[TrackingStatus]) -> None:
    worker = node._worker
    assert worker is not None
    for data in (b"", b"\x00\x01\x00\x00", b"\x00\x01\x00\x00" + b"\xff" * 50):
        done = worker.processed
        worker.offer(Arrival(data, (), node._session))
        wait(lambda before=done: worker.processed > before)  # type: ignore[misc]
        assert said[-1].reason == TrackingStatus.REASON_BAD_INPUT
    offer(node, 0)
    assert said[-1].state == TrackingStatus.OK


@pytest.mark.slow
def test_two_hundred_lifecycles_leave_nothing_behind() -> None:
    context = Context()
    rclpy.init(context=context)
    node = LepardNode(context=context, parameter_overrides=[Parameter("weights", value=str(untrained_weights()))])
    memory, threads = [], []
    for cycle in range(200):
        for step in ("configure", "activate", "deactivate", "cleanup"):
            assert getattr(node, f"trigger_{step}")() == TransitionCallbackReturn.SUCCESS
        if cycle % 20 == 19:
            gc.collect()
            memory.append(resident_megabytes())
            threads.append(threading.active_count())
    # Second workers of earlier tests end while this one runs; none may come.
    assert threads == sorted(threads, reverse=True), threads
    assert memory[-1] - memory[2] < 5, f"megabytes over the cycles: {memory}"
    _track_one(node)
    node.trigger_shutdown()
    node.destroy_node()
    rclpy.shutdown(context=context)


def _track_one(node: Any) -> None:
    """After all the cycles the node still does its work."""
    node.trigger_configure()
    node.trigger_activate()
    offer(node, 0)
    assert node.health.state == "OK"
