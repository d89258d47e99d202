# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `lepard`: receives the newest cloud, tracks it with a mode, publishes the result."""

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseWithCovarianceStamped
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_srvs.srv import Trigger

from lepard_ros import __version__
from lepard_ros.cloud.ranges import LIVE_POINTS, crop_range
from lepard_ros.errors import InputError
from lepard_ros.msg import TrackingStatus
from lepard_ros.network.allocator import RELEASE_SECONDS, release_freed_memory
from lepard_ros.registration.types import StageClock
from lepard_ros.ros import conversion
from lepard_ros.ros.compat import TransformBroadcaster
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.diagnostics import Health, diagnostics_message
from lepard_ros.ros.extrapolation import Extrapolator
from lepard_ros.ros.frames import FramePlan, MissingTransformError, make_plan
from lepard_ros.ros.memory import process_within_memory
from lepard_ros.ros.modes import EVERY_FRAME, TF, Mode, Output, Placement, Result
from lepard_ros.ros.parameters import (
    NodeSettings,
    check_change,
    declare_settings,
    read_settings,
    settings_fields,
)
from lepard_ros.ros.status import status_message
from lepard_ros.ros.worker import Worker
from lepard_ros.tracking.background import never
from lepard_ros.tracking.input_guard import InputGuard

DIAGNOSTICS_PERIOD = 1.0
# Camera infos that are kept, to match images by stamp.
CAMERA_INFOS = 30
INPUT_QUEUE = 5  # clouds
# How long the worker may finish its cloud after a request to stop.
STOP_SECONDS = 1.2
# Number of distinct worker errors that are logged in full, once each; others are only counted.
ERRORS_LOGGED = 50
_STATES = {getattr(TrackingStatus, name): name for name in ("INITIALISING", "OK", "LOST", "RELOCALISED")}
# Suffix of `map_name` for a map that was backed up before a reset.
SET_ASIDE = "_unsaved"
INACTIVE = 0  # the session of a node that is not active


class Arrival(NamedTuple):
    """A message that is not decoded yet, so that dropping it is cheap.

    infos: the newest camera infos, oldest first. session: the activation of the node during which it arrived.
    """

    data: bytes
    infos: tuple[CameraInfo, ...]
    session: int


class Refusal(NamedTuple):
    """Why a cloud was dropped: a constant of TrackingStatus, a key for counting, and a message."""

    reason: int
    kind: str
    sentence: str


class LepardNode(LifecycleNode):
    """Tracks point clouds with the mode chosen by its parameters."""

    def __init__(self, **arguments: Any) -> None:
        """Declare the parameters; raises InputError for invalid ones."""
        super().__init__("lepard", automatically_declare_parameters_from_overrides=True, **arguments)
        self.settings = declare_settings(self)
        self.health = Health()
        self._lock = threading.Lock()  # held while the mode runs
        self._gate = threading.Lock()  # held while publishing
        self._session, self._sessions = INACTIVE, itertools.count(INACTIVE + 1)
        self._mode: Mode | None = None
        self._plan: FramePlan | None = None
        self._worker: Worker[Arrival] | None = None
        self._guard = InputGuard()
        self._outputs: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._camera_infos: deque[CameraInfo] = deque(maxlen=CAMERA_INFOS)
        self._extrapolator = Extrapolator()
        self._standing: Placement | None = None  # transform that is repeated while the pose is known
        self._errors_logged: set[str] = set()
        self._serve()

    def _serve(self) -> None:
        """Create everything that exists in every lifecycle state."""
        self.add_post_set_parameters_callback(self._take_parameters)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", EVERY_FRAME)
        # A steady clock, so that diagnostics are published even with use_sim_time and no /clock.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(DIAGNOSTICS_PERIOD, self._publish_diagnostics, clock=steady)
        self.create_timer(RELEASE_SECONDS, release_freed_memory, clock=steady)
        self.create_service(Trigger, "~/reset", self._on_reset)
        self.create_service(Trigger, "~/save", self._on_save)
        self._broadcaster = TransformBroadcaster(self)
        if self.settings.odom_frame and self.settings.tf_rate:
            self.create_timer(1 / self.settings.tf_rate, self._repeat_transform, clock=steady)
        elif self.settings.extrapolation_rate:
            self.create_timer(1 / self.settings.extrapolation_rate, self._send_prediction, clock=steady)

    # ---- lifecycle ----

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load and warm up the network; on failure log the reason and stay unconfigured."""
        try:
            self._plan = make_plan(self, self.settings)
            self._mode = make_mode(self.settings, self._plan, self.get_logger(), _weakly(self._next_has_arrived))
        except InputError as error:
            self.health.configure_problem = str(error)
            self.get_logger().error(str(error))
            self._release()
            return TransitionCallbackReturn.FAILURE
        self.health.configure_problem = ""
        self._outputs = {
            name: self.create_publisher(topic.kind, f"~/{name}", topic.qos) for name, topic in self._mode.topics.items()
        }
        self._outputs["status"] = self.create_publisher(TrackingStatus, "~/status", EVERY_FRAME)
        for line in self._introduction():
            self.get_logger().info(line)
        return TransitionCallbackReturn.SUCCESS

    def _introduction(self) -> list[str]:
        """Startup summary for the log, one line each."""
        settings, mode = self.settings, self._mode
        topics = ("points",) if settings.input == "cloud" else ("depth", "camera_info")
        frames = f"{settings.map_frame} -> {settings.odom_frame or settings.base_frame or 'the frame of the clouds'}"
        told = frames if settings.publish_tf else "no transform is published"
        return [
            f"lepard_ros {__version__}, {settings.mode} mode, {mode.description if mode else ''}",
            f"Input: {', '.join(self.resolve_topic_name(topic) for topic in topics)} ({settings.qos})",
            f"Frames: {told if settings.mode == 'rigid' else 'none are published in deformable mode'}",
        ]

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Subscribe to the input."""
        self.health = Health(active_since=time.monotonic(), state="INITIALISING")
        self._guard = InputGuard(self.settings.change_after)
        self._session = next(self._sessions)
        self._worker = Worker(self._process, self._on_worker_error, bridges=self.settings.mode == "rigid")
        self._inputs = self._subscribe()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Unsubscribe from the input; keep the map."""
        self._stop_input()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the network and the map."""
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Shut down from any state."""
        self._stop_input()
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free everything after an unexpected error in a transition, so that configure can be tried again."""
        self._stop_input()
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def stop_worker(self) -> bool:
        """Stop the worker; False if it is still busy after STOP_SECONDS."""
        return self._worker is None or self._worker.stop(STOP_SECONDS)

    def _stop_input(self) -> None:
        with self._gate:  # from here on nothing is published, not even the result of the current cloud
            self._session, self._standing = INACTIVE, None
            self._extrapolator.forget()
        for subscription in self._inputs:
            self.destroy_subscription(subscription)
        self._inputs = []
        if not self.stop_worker():
            self.get_logger().warning("The last cloud is still being tracked; its result is discarded.")
        self._worker = None
        self.health.active_since, self.health.state = None, "inactive"

    def _release(self) -> None:
        for publisher in self._outputs.values():
            self.destroy_publisher(publisher)
        if self._plan is not None:
            self._plan.close()
        if self._mode is not None:
            self._mode.close()
        self._outputs, self._mode, self._plan = {}, None, None

    # ---- input ----

    def _subscribe(self) -> list[Any]:
        """Subscribe to the input; messages stay serialised until the worker processes them."""
        qos = input_qos(self.settings.qos)
        raw: dict[str, Any] = {"raw": True}
        raw["event_callbacks"] = SubscriptionEventCallbacks(incompatible_qos=self._on_qos_mismatch)
        hint = self.create_subscription(PoseWithCovarianceStamped, "initialpose", self._on_initial_pose, 1)
        if self.settings.input == "cloud":
            return [hint, self.create_subscription(PointCloud2, "points", self._on_data, qos, **raw)]
        several = QoSProfile(depth=CAMERA_INFOS, reliability=qos.reliability)
        return [
            hint,
            self.create_subscription(Image, "depth", self._on_data, qos, **raw),
            self.create_subscription(CameraInfo, "camera_info", self._on_camera_info, several),
        ]

    def _on_camera_info(self, message: CameraInfo) -> None:
        self._camera_infos.append(message)

    def _on_initial_pose(self, message: PoseWithCovarianceStamped) -> None:
        """Handle an initial pose from RViz ("2D Pose Estimate") or a fleet manager."""
        if message.header.frame_id not in ("", self.settings.map_frame):
            self.get_logger().warning(
                f"Ignoring the initial pose: its frame is '{message.header.frame_id}', not '{self.settings.map_frame}'."
            )
            return
        try:
            pose = conversion.matrix_from_pose(message.pose.pose)
        except InputError as error:
            self.get_logger().warning(f"The initial pose is ignored: {error}")
            return
        self.get_logger().info("Relocalising around the initial pose.")
        with self._lock:
            if self._mode is not None:
                self._mode.hint(pose)

    def _on_data(self, data: bytes) -> None:
        self.health.last_received = time.monotonic()
        if self._worker is not None:
            self._worker.offer(Arrival(data, tuple(self._camera_infos), self._session))

    def _on_qos_mismatch(self, event: Any) -> None:
        self.health.qos_mismatches = event.total_count
        self.health.qos_problem = (
            f"the node asks for '{self.settings.qos}' and the publisher offers less "
            f"({event.last_policy_kind}); set the parameter qos to best_available or sensor_data."
        )
        self.get_logger().warning(f"No clouds from a publisher: {self.health.qos_problem}")

    # ---- one cloud ----

    def _next_has_arrived(self) -> bool:
        """Whether another cloud arrived while the worker processes one."""
        return self._worker is not None and self._worker.has_newer()

    def _process(self, arrival: Arrival) -> bool:
        """Process one cloud, in the worker's thread; whether it needed a search."""
        header: Any = None
        clock = StageClock()
        try:
            message, header = self._read(arrival)
            frame = self._decode(message, arrival)
            self._check_sequence(frame)
            frame = self._crop(self._plan.to_sensor(frame) if self._plan is not None else frame)
            clock.stop("decode")
            with self._lock:
                if self._mode is None:
                    return False
                result = process_within_memory(self._mode, frame, self._wanted(), self.get_logger())
                clock.stop("mode")
                self._publish(result, clock, arrival.session)
            self.health.rejected_in_a_row = 0
            return "search" in result.status.stage_names
        except MissingTransformError as error:
            reason = Refusal(int(TrackingStatus.REASON_NO_TRANSFORM), "no transform", str(error))
            self._reject(header, reason, arrival.session)
        except InputError as error:
            self._reject(
                header, Refusal(int(TrackingStatus.REASON_BAD_INPUT), "bad input", str(error)), arrival.session
            )
        return False

    def _read(self, arrival: Arrival) -> tuple[Any, Any]:
        """The message and its header."""
        message = conversion.deserialise(arrival.data, PointCloud2 if self.settings.input == "cloud" else Image)
        return message, message.header

    def _decode(self, message: Any, arrival: Arrival) -> Frame:
        # The rigid tracker would downsample it anyway; doing it here avoids copying unused points.
        max_points = LIVE_POINTS if self.settings.mode == "rigid" else None
        if self.settings.input == "cloud":
            return conversion.frame_from_cloud(message, max_points)
        if not arrival.infos:
            raise InputError(
                "A depth image arrived without camera info; remap camera_info to the depth camera's topic."
            )
        same = [info for info in arrival.infos if info.header.stamp == message.header.stamp]
        return conversion.frame_from_depth(message, (same or arrival.infos)[-1], self._rectified(), max_points)

    def _rectified(self) -> bool:
        """Whether depth images have no lens distortion; by default decided from their topic name."""
        if self.settings.rectified == "by_name":
            return "rect" in self.resolve_topic_name("depth").rsplit("/", 1)[-1]
        return self.settings.rectified == "always"

    def _crop(self, frame: Frame) -> Frame:
        points = crop_range(frame.points, self.settings.min_range, self.settings.max_range)
        return frame._replace(points=points)

    def _check_sequence(self, frame: Frame) -> None:
        """Reject a cloud that does not continue the last one; after a lasting change relocalise.

        The map is dropped only if a recording restarts and `reset_on_time_jump` is set.
        """
        change = self._guard.check(frame.stamp_ns, frame.frame_id, self._now_ns())
        if change is None:
            return
        if change.restarted and self.settings.reset_on_time_jump:
            self.get_logger().warning(f"{change.reason} A new map starts. {self._reset()}".strip())
            return
        self.get_logger().warning(f"{change.reason} Keeping the map and relocalising.")
        with self._lock:
            if self._mode is not None:
                self._mode.relocalise()
            if self._plan is not None and change.restarted:
                self._plan.forget_motion()

    def _wanted(self) -> set[str]:
        return {name for name, publisher in self._outputs.items() if publisher.get_subscription_count() > 0}

    def _publish(self, result: Result, clock: StageClock, session: int) -> None:
        """Publish all messages of one cloud, the status last: it signals that the others are out."""
        for output in result.outputs:
            self._send(output, session)
        clock.stop("publish")
        status = _with_own_stages(result.status, clock.seconds["decode"], clock.seconds["publish"])
        if session != self._session:
            return
        if status.state not in (TrackingStatus.OK, TrackingStatus.RELOCALISED):
            self._standing = None
            self._extrapolator.forget()
        self.health.state, self.health.state_reason = _STATES[status.state], status.reason_text
        self.health.stages = dict(zip(status.stage_names, status.stage_seconds, strict=True))
        self.health.latencies.append(self._latency(status))
        self._publish_status(status, session)

    def _send(self, output: Output, session: int) -> None:
        """Publish one message, unless the node was deactivated since its cloud arrived."""
        topic, message = output
        with self._gate:
            if session != self._session:
                return
            if topic == TF:
                self._send_transform(message)
            elif topic in self._outputs:
                self._outputs[topic].publish(message)

    def _send_transform(self, placed: Placement) -> None:
        """Send a transform, with the gate held. A transform to odom_frame is future-dated and repeated."""
        if self.settings.odom_frame and self.settings.tf_rate:
            self._standing = placed
            tolerance = int(self.settings.transform_tolerance * 1e9)
            placed = placed._replace(stamp_ns=self._now_ns() + tolerance)
        else:
            self._extrapolator.note(placed, self._now_ns())
        if self._plan is not None:
            self._plan.note_sent(placed.parent, placed.child, placed.stamp_ns)
        self._broadcaster.send(placed.parent, placed.child, placed.stamp_ns, placed.matrix)

    def _repeat_transform(self) -> None:
        """Repeat the last map -> odom transform, as AMCL does."""
        with self._gate:
            if self._standing is not None and self.settings.publish_tf and self._session != INACTIVE:
                self._send_transform(self._standing)

    def _send_prediction(self) -> None:
        """Between two clouds, send a transform extrapolated with constant velocity."""
        with self._gate:
            placed = self._extrapolator.at(self._now_ns())
            if placed is not None and self.settings.publish_tf and self._session != INACTIVE:
                self._broadcaster.send(placed.parent, placed.child, placed.stamp_ns, placed.matrix)

    def _latency(self, status: TrackingStatus) -> float:
        return (self._now_ns() - conversion.stamp_to_ns(status.header.stamp)) * 1e-9

    def _publish_status(self, status: TrackingStatus, session: int) -> None:
        self._count()
        status.latency = self._latency(status)
        status.frames_received, status.frames_processed = self.health.received, self.health.processed + 1
        status.frames_dropped, status.frames_rejected = self.health.dropped, sum(self.health.rejected.values())
        self._send(Output("status", status), session)

    def _reject(self, header: Any, refusal: Refusal, session: int) -> None:
        """Report why a cloud was dropped: in the status, the diagnostics and (throttled) the log."""
        if session != self._session:
            return
        self.health.rejected[refusal.kind] += 1
        self.health.rejected_in_a_row += 1
        self.health.last_rejection = refusal.sentence
        self.get_logger().warning(refusal.sentence, throttle_duration_sec=5.0)
        stamp_ns, frame_id = (conversion.stamp_to_ns(header.stamp), header.frame_id) if header else (0, "")
        status = status_message(stamp_ns, frame_id, "REFUSED", self.settings.mode)
        status.reason, status.reason_text = refusal.reason, refusal.sentence
        status.keyframes = self._mode.keyframe_count() if self._mode is not None else 0
        self._publish_status(status, session)

    def _on_worker_error(self, arrival: Arrival, error: Exception) -> None:
        """Handle an unexpected error: log it once, skip the cloud, continue with the next."""
        sentence = f"Tracking a cloud failed: {type(error).__name__}: {error}"
        if sentence not in self._errors_logged and len(self._errors_logged) < ERRORS_LOGGED:
            import traceback

            self._errors_logged.add(sentence)
            self.get_logger().error(sentence + "\n" + "".join(traceback.format_exception(error)))
        header = self._read(arrival)[1]
        refusal = Refusal(int(TrackingStatus.REASON_INTERNAL_ERROR), "internal error", sentence)
        self._reject(header, refusal, arrival.session)

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    # ---- services ----

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._mode is None:
            response.message = "The node is not configured; configure it first."
            return response
        self._guard = InputGuard(self.settings.change_after)
        where = self._reset()
        response.success, response.message = True, f"Tracking restarts with the next cloud. {where}".strip()
        return response

    def _reset(self) -> str:
        """Start a new map; returns where an unsaved old one was backed up."""
        with self._lock:
            if self._mode is None:
                return ""
            where = self._set_aside(self._mode)
            self._mode.reset()
            self._standing = None
            self._extrapolator.forget()
            if self._plan is not None:
                self._plan.forget_motion()
        return where

    def _set_aside(self, mode: Mode) -> str:
        """Back up an unsaved map, replacing the previous backup; returns a message."""
        if not mode.unsaved():
            return ""
        target = Path(self.settings.map_directory).expanduser() / f"{self.settings.map_name}{SET_ASIDE}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            return f"The map was not saved; backup: {mode.save(target)}."
        except (OSError, InputError) as error:
            self.get_logger().error(f"The map was not saved and could not be backed up: {error}")
            return "The map was not saved, and its backup failed; see the log."

    def _on_save(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """Write the map below map_directory; the service takes no path, so it cannot write elsewhere."""
        target = Path(self.settings.map_directory).expanduser() / self.settings.map_name
        try:
            if self._mode is None:
                raise InputError("The node is not configured; configure it first.")
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                response.message = self._mode.save(target)
            response.success = True
        except Exception as error:  # the caller must always get a response
            response.message = f"Nothing was saved: {error}"
            self.get_logger().error(response.message)
        return response

    # ---- parameters ----
    # Parameter[...] is quoted because it is not generic in the rclpy of Jazzy.

    def set_parameters_atomically(self, parameter_list: "list[Parameter[Any]]") -> SetParametersResult:
        """Check and apply every request to set parameters.

        This is not a callback, because rclpy's own checks run before callbacks, and their messages suggest neither the
        nearest names nor the expected type.
        """
        try:
            check_change(self.settings, {one.name: one.value for one in parameter_list})
        except InputError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return super().set_parameters_atomically(parameter_list)

    def _take_parameters(self, parameters: "list[Parameter[Any]]") -> None:
        if any(one.name in settings_fields() for one in parameters):
            self.settings = read_settings(self)
            self._guard.change_after = self.settings.change_after
            with self._lock:
                if self._mode is not None:
                    self._mode.apply(self.settings)

    # ---- diagnostics ----

    def _count(self) -> None:
        worker, health = self._worker, self.health
        if worker is not None:
            health.received, health.processed, health.dropped = worker.received, worker.processed, worker.dropped

    def _publish_diagnostics(self) -> None:
        self._count()
        topic = "points" if self.settings.input == "cloud" else "depth"
        self.health.publishers = self.count_publishers(self.resolve_topic_name(topic))
        own = (self.get_name(), self.get_namespace())
        self.health.tf_problem = self._plan.problem() if self._plan is not None else ""
        self.health.same_name = self.get_node_names_and_namespaces().count(own)
        mode = self._mode
        facts = {"mode": self.settings.mode, **(mode.facts() if mode is not None else {})}
        name = self.get_fully_qualified_name()
        silence = self.settings.silence
        self._diagnostics.publish(diagnostics_message(name, self.health, facts, silence, self._now_ns()))


def _with_own_stages(status: TrackingStatus, decode: float, publish: float) -> TrackingStatus:
    """Add the node's own time [s] to the stages of the mode."""
    status.stage_names = ["decode", *status.stage_names, "publish"]
    status.stage_seconds = [decode, *status.stage_seconds, publish]
    return status


def input_qos(name: str) -> QoSProfile:
    """QoS of the input.

    Its queue holds messages that arrive while Python is busy. The worker's one-place mailbox follows it: clouds dropped
    there are counted, those dropped by the middleware are not.
    """
    reliability = {
        "sensor_data": ReliabilityPolicy.BEST_EFFORT,
        "best_available": ReliabilityPolicy.BEST_AVAILABLE,
        "reliable": ReliabilityPolicy.RELIABLE,
    }
    return QoSProfile(depth=INPUT_QUEUE, reliability=reliability[name])


def _weakly(method: Callable[[], bool]) -> Callable[[], bool]:
    """A method of the node that does not keep it alive: a busy background worker may outlive the node for a while."""
    reference = weakref.WeakMethod(method)

    def call() -> bool:
        found = reference()
        return found is not None and found()

    return call


def make_mode(settings: NodeSettings, plan: FramePlan, logger: Any, hurried: Callable[[], bool] = never) -> Mode:
    """Load the weights, warm up everything that the first clouds need, and create the mode.

    hurried: whether the next cloud has arrived.
    """
    import torch

    from lepard_ros.matcher import MatcherSettings
    from lepard_ros.tracking.matching_process import MatchingProcess, Weights
    from lepard_ros.tracking.remote_matcher import RemoteMatcher

    # Leave one core for tracking, which does not use torch.
    torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() - 1))
    choices, name = MatcherSettings(grid=settings.grid or None), settings.weights or settings.mode
    weights = Weights(name, settings.device, choices, torch.get_num_threads())
    if settings.mode == "deformable":
        from lepard_ros.ros.deformable_mode import DeformableMode

        worker = MatchingProcess(weights)
        description = _described(*worker.facts, settings, logger)
        return DeformableMode(None, settings, plan, description, worker=worker)
    matcher = RemoteMatcher.start(weights)
    description = _described(matcher.card.name, matcher.card.mode, matcher.runs_on, settings, logger)
    from lepard_ros.ros.rigid_mode import RigidMode
    from lepard_ros.tracking.compiled import small_gicp

    small_gicp()  # load it, or warn, now instead of with the first cloud
    closes_loops = _ready_for_loops(settings, logger)
    matcher.wait_until_ready()  # it loaded the network while this process imported Open3D
    return RigidMode(matcher, settings, plan, description, closes_loops=closes_loops, hurried=hurried)


def _described(name: str, mode: str, runs_on: str, settings: NodeSettings, logger: Any) -> str:
    """What was loaded, for the log: weights, device and threads. Warns if the weights are for another mode."""
    import torch

    if mode != settings.mode:
        logger.warning(
            f"The weights '{name}' were trained for {mode} scenes, but the mode is "
            f"{settings.mode}; leave the parameter weights empty to use those of the mode."
        )
    return f"weights {name}, device {runs_on}, threads: {torch.get_num_threads()}"


def _ready_for_loops(settings: NodeSettings, logger: Any) -> bool:
    """Import and run the pose graph once, because the first time takes seconds; False if Open3D is missing."""
    from lepard_ros.tracking.pose_graph import Edge, PoseGraph

    if not settings.loop_closures or not settings.mapping:
        return settings.loop_closures
    try:
        PoseGraph([Edge(0, 1, np.eye(4), 1e-4 * np.eye(6))]).optimised({0: np.eye(4), 1: np.eye(4)})
    except InputError as error:
        logger.warning(f"Loop closure is off: {error}")
        return False
    return True
