# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The lifecycle node `lepard`: takes in the newest cloud, lets a mode track it, publishes what came of it."""

import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from diagnostic_msgs.msg import DiagnosticArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.clock import Clock, ClockType
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_srvs.srv import Trigger

from lepard_ros.cloud.ranges import crop_range
from lepard_ros.errors import InputError
from lepard_ros.msg import TrackingStatus
from lepard_ros.registration.types import StageClock
from lepard_ros.ros import conversion
from lepard_ros.ros.compat import TransformBroadcaster
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.diagnostics import Health, diagnostics_message
from lepard_ros.ros.frames import FramePlan, MissingTransformError, make_plan
from lepard_ros.ros.memory import process_within_memory
from lepard_ros.ros.modes import EVERY_FRAME, TF, Mode, Result
from lepard_ros.ros.parameters import (
    NodeSettings,
    check_change,
    declare_settings,
    read_settings,
    settings_fields,
)
from lepard_ros.ros.status import status_message
from lepard_ros.ros.worker import Worker
from lepard_ros.tracking.input_guard import InputGuard

DIAGNOSTICS_PERIOD = 1.0
# How long the worker may go on with a cloud after it was told to stop.
STOP_SECONDS = 1.2
# Different errors of the worker that are logged in full, each once; more are only counted.
ERRORS_LOGGED = 50
_STATES = {getattr(TrackingStatus, name): name for name in ("INITIALISING", "OK", "LOST", "RELOCALISED")}


class Arrival(NamedTuple):
    """A message as it came, not yet decoded: what is dropped costs next to nothing. info: of a depth image."""

    data: bytes
    info: CameraInfo | None


class LepardNode(LifecycleNode):
    """Tracks point clouds. What is tracked and how is the business of its mode."""

    def __init__(self, **arguments: Any) -> None:
        """Declare the parameters; raises InputError for those that make no sense."""
        super().__init__("lepard", automatically_declare_parameters_from_overrides=True, **arguments)
        self.settings = declare_settings(self)
        self.health = Health()
        self._lock = threading.Lock()  # held while the mode works
        self._mode: Mode | None = None
        self._plan: FramePlan | None = None
        self._worker: Worker[Arrival] | None = None
        self._guard = InputGuard()
        self._outputs: dict[str, Any] = {}
        self._inputs: list[Any] = []
        self._camera_info: CameraInfo | None = None
        self._errors_logged: set[str] = set()
        self._state = int(TrackingStatus.INITIALISING)
        self._serve()

    def _serve(self) -> None:
        """Everything that exists in every lifecycle state."""
        self.add_post_set_parameters_callback(self._take_parameters)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", EVERY_FRAME)
        # A steady clock, since with use_sim_time and no /clock the node must still speak.
        self.create_timer(DIAGNOSTICS_PERIOD, self._publish_diagnostics, clock=Clock(clock_type=ClockType.STEADY_TIME))
        self.create_service(Trigger, "~/reset", self._on_reset)
        self.create_service(Trigger, "~/save", self._on_save)
        self._broadcaster = TransformBroadcaster(self)

    # ---- lifecycle ----

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load and warm up the model; on failure say why and stay unconfigured."""
        try:
            self._plan = make_plan(self, self.settings)
            self._mode = make_mode(self.settings, self._plan)
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
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Begin to listen."""
        self.health = Health(active_since=time.monotonic(), state="INITIALISING")
        self._guard = InputGuard()
        self._worker = Worker(self._process, self._on_worker_error)
        self._inputs = self._subscribe()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop listening; the map stays."""
        self._stop_input()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Free the model and the map."""
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """End from any state."""
        self._stop_input()
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """An unforeseen error in a transition: free everything, so that configure can be tried again."""
        self._stop_input()
        self._release()
        return TransitionCallbackReturn.SUCCESS

    def stop_worker(self) -> bool:
        """End the worker; False if it is still busy after STOP_SECONDS."""
        return self._worker is None or self._worker.stop(STOP_SECONDS)

    def _stop_input(self) -> None:
        for subscription in self._inputs:
            self.destroy_subscription(subscription)
        self._inputs = []
        if not self.stop_worker():
            self.get_logger().warning("The cloud in work takes long; its result will be thrown away.")
        self._worker = None
        self.health.active_since, self.health.state = None, "inactive"

    def _release(self) -> None:
        for publisher in self._outputs.values():
            self.destroy_publisher(publisher)
        if self._plan is not None:
            self._plan.close()
        self._outputs, self._mode, self._plan = {}, None, None

    # ---- input ----

    def _subscribe(self) -> list[Any]:
        """Subscribe to the input; messages stay bytes until the worker has time for them."""
        qos = input_qos(self.settings.qos)
        raw: dict[str, Any] = {"raw": True}
        raw["event_callbacks"] = SubscriptionEventCallbacks(incompatible_qos=self._on_qos_mismatch)
        if self.settings.input == "cloud":
            return [self.create_subscription(PointCloud2, "points", self._on_data, qos, **raw)]
        return [
            self.create_subscription(Image, "depth", self._on_data, qos, **raw),
            self.create_subscription(CameraInfo, "camera_info", self._on_camera_info, qos),
        ]

    def _on_data(self, data: bytes) -> None:
        self.health.last_received = time.monotonic()
        if self._worker is not None:
            self._worker.offer(Arrival(data, self._camera_info))

    def _on_camera_info(self, message: CameraInfo) -> None:
        self._camera_info = message

    def _on_qos_mismatch(self, event: Any) -> None:
        self.health.qos_mismatches = event.total_count
        self.health.qos_problem = (
            f"the node asks for '{self.settings.qos}' and the publisher offers less "
            f"({event.last_policy_kind}); set the parameter qos to best_available or sensor_data."
        )
        self.get_logger().warning(f"No clouds from a publisher: {self.health.qos_problem}")

    # ---- one cloud ----

    def _process(self, arrival: Arrival) -> None:
        """The walk of one cloud, in the worker's thread."""
        header: Any = None
        clock = StageClock()
        try:
            message, header = self._read(arrival)
            frame = self._decode(message, arrival)
            self._reset_if_new(frame)
            frame = self._crop(frame)
            clock.stop("decode")
            with self._lock:
                if self._mode is None:
                    return
                result = process_within_memory(self._mode, frame, self._wanted(), self.get_logger())
                clock.stop("mode")
                self._publish(result, clock)
            self.health.rejected_in_a_row = 0
        except MissingTransformError as error:
            self._reject(header, int(TrackingStatus.REASON_NO_TRANSFORM), "no transform", str(error))
        except InputError as error:
            self._reject(header, int(TrackingStatus.REASON_BAD_INPUT), "bad input", str(error))

    def _read(self, arrival: Arrival) -> tuple[Any, Any]:
        """The message and its header."""
        message = conversion.deserialise(arrival.data, PointCloud2 if self.settings.input == "cloud" else Image)
        return message, message.header

    def _decode(self, message: Any, arrival: Arrival) -> Frame:
        if self.settings.input == "cloud":
            return conversion.frame_from_cloud(message)
        if arrival.info is None:
            raise InputError("A depth image came but no camera info yet; remap camera_info to the depth camera's.")
        return conversion.frame_from_depth(message, arrival.info)

    def _crop(self, frame: Frame) -> Frame:
        points = crop_range(frame.points, self.settings.min_range, self.settings.max_range)
        return frame._replace(points=points)

    def _reset_if_new(self, frame: Frame) -> None:
        """Refuse what must not be tracked, and begin anew where a new recording begins."""
        reason = self._guard.check(frame.stamp_ns, frame.frame_id, self._now_ns())
        if reason is not None:
            self.get_logger().warning(f"{reason} Tracking starts anew.")
            self._reset()

    def _wanted(self) -> set[str]:
        return {name for name, publisher in self._outputs.items() if publisher.get_subscription_count() > 0}

    def _publish(self, result: Result, clock: StageClock) -> None:
        """Send everything of one cloud, the status last: who has it knows that the rest is out."""
        for topic, message in result.outputs:
            if topic == TF:
                self._broadcaster.send(message.parent, message.child, message.stamp_ns, message.matrix)
            elif topic in self._outputs:
                self._outputs[topic].publish(message)
        clock.stop("publish")
        status = _with_own_stages(result.status, clock.seconds["decode"], clock.seconds["publish"])
        self._state = int(status.state)
        self.health.state, self.health.state_reason = _STATES[self._state], status.reason_text
        self.health.stages = dict(zip(status.stage_names, status.stage_seconds, strict=True))
        self.health.latencies.append(self._latency(status))
        self._publish_status(status)

    def _latency(self, status: TrackingStatus) -> float:
        return (self._now_ns() - conversion.stamp_to_ns(status.header.stamp)) * 1e-9

    def _publish_status(self, status: TrackingStatus) -> None:
        self._count()
        status.latency = self._latency(status)
        status.frames_received, status.frames_processed = self.health.received, self.health.processed + 1
        status.frames_dropped, status.frames_rejected = self.health.dropped, sum(self.health.rejected.values())
        if "status" in self._outputs:
            self._outputs["status"].publish(status)

    def _reject(self, header: Any, reason: int, kind: str, sentence: str) -> None:
        """Say why a cloud was left out: in the status, in the diagnostics, and now and then in the log."""
        self.health.rejected[kind] += 1
        self.health.rejected_in_a_row += 1
        self.health.last_rejection = sentence
        self.get_logger().warning(sentence, throttle_duration_sec=5.0)
        stamp_ns, frame_id = (conversion.stamp_to_ns(header.stamp), header.frame_id) if header else (0, "")
        status = status_message(stamp_ns, frame_id, _STATES[self._state], self.settings.mode)
        status.reason, status.reason_text = reason, sentence
        self._publish_status(status)

    def _on_worker_error(self, arrival: Arrival, error: Exception) -> None:
        """An error that nobody foresaw: log it once, leave the cloud out, go on with the next."""
        sentence = f"Tracking a cloud failed: {type(error).__name__}: {error}"
        if sentence not in self._errors_logged and len(self._errors_logged) < ERRORS_LOGGED:
            import traceback

            self._errors_logged.add(sentence)
            self.get_logger().error(sentence + "\n" + "".join(traceback.format_exception(error)))
        header = self._read(arrival)[1]
        self._reject(header, int(TrackingStatus.REASON_INTERNAL_ERROR), "internal error", sentence)

    def _now_ns(self) -> int:
        return int(self.get_clock().now().nanoseconds)

    # ---- services ----

    def _on_reset(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._mode is None:
            response.message = "The node is not configured; configure it first."
            return response
        self._guard = InputGuard()
        self._reset()
        response.success, response.message = True, "Tracking starts anew with the next cloud."
        return response

    def _reset(self) -> None:
        with self._lock:
            if self._mode is not None:
                self._mode.reset()
            if self._plan is not None:
                self._plan.forget_motion()
        self._state = int(TrackingStatus.INITIALISING)

    def _on_save(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        """Write the map below map_directory; the service takes no path, so nothing else can be written."""
        target = Path(self.settings.map_directory).expanduser() / self.settings.map_name
        try:
            if self._mode is None:
                raise InputError("The node is not configured; configure it first.")
            target.parent.mkdir(parents=True, exist_ok=True)
            with self._lock:
                response.message = self._mode.save(target)
            response.success = True
        except Exception as error:  # whatever it is, the caller must get an answer
            response.message = f"Nothing was saved: {error}"
            self.get_logger().error(response.message)
        return response

    # ---- parameters ----

    def set_parameters_atomically(self, parameter_list: list[Parameter[Any]]) -> SetParametersResult:
        """What every request to set parameters goes through. Checked here and not in a callback, since rclpy's own
        checks come before callbacks and say less: neither the nearest names nor the type that is wanted."""
        try:
            check_change(self.settings, {one.name: one.value for one in parameter_list})
        except InputError as error:
            return SetParametersResult(successful=False, reason=str(error))
        return super().set_parameters_atomically(parameter_list)

    def _take_parameters(self, parameters: list[Parameter[Any]]) -> None:
        if any(one.name in settings_fields() for one in parameters):
            self.settings = read_settings(self)
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
        self.health.same_name = self.get_node_names_and_namespaces().count(own)
        mode = self._mode
        facts = {"mode": self.settings.mode, **(mode.facts() if mode is not None else {})}
        name = self.get_fully_qualified_name()
        silence = self.settings.silence
        self._diagnostics.publish(diagnostics_message(name, self.health, facts, silence, self._now_ns()))


def _with_own_stages(status: TrackingStatus, decode: float, publish: float) -> TrackingStatus:
    """Add the node's own work [s] to the stages of the mode."""
    status.stage_names = ["decode", *status.stage_names, "publish"]
    status.stage_seconds = [decode, *status.stage_seconds, publish]
    return status


def input_qos(name: str) -> QoSProfile:
    """The quality of service of the input, always with a queue of one: the newest cloud wins."""
    reliability = {
        "sensor_data": ReliabilityPolicy.BEST_EFFORT,
        "best_available": ReliabilityPolicy.BEST_AVAILABLE,
        "reliable": ReliabilityPolicy.RELIABLE,
    }
    return QoSProfile(depth=1, reliability=reliability[name])


def make_mode(settings: NodeSettings, plan: FramePlan) -> Mode:
    """Load the weights, warm them up, and make the mode that the settings ask for."""
    import torch

    from lepard_ros.matcher import Matcher, MatcherSettings

    if settings.threads:
        torch.set_num_threads(settings.threads)
    choices = MatcherSettings(grid=settings.grid or None)
    matcher = Matcher.from_pretrained(settings.weights or settings.mode, device=settings.device, settings=choices)
    matcher.warm_up()
    if settings.mode == "deformable":
        from lepard_ros.ros.deformable_mode import DeformableMode

        return DeformableMode(matcher, settings, plan)
    from lepard_ros.ros.rigid_mode import RigidMode

    return RigidMode(matcher, settings, plan)
