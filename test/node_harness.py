# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The real node in its own process, a probe that speaks to it over DDS, and a small world to look at."""

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from geometry_msgs.msg import PoseWithCovarianceStamped
from lepard_ros.msg import Correspondences, TrackingStatus
from nav_msgs.msg import Odometry
from nav_msgs.msg import Path as PathMessage
from numpy.typing import NDArray
from rcl_interfaces.msg import SetParametersResult
from rcl_interfaces.srv import SetParameters
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from scipy.spatial.transform import Rotation
from sensor_msgs.msg import CameraInfo, Image, PointCloud2
from std_srvs.srv import Trigger
from tf2_msgs.msg import TFMessage
from visualization_msgs.msg import MarkerArray

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.ros.conversion import cloud_message, header, stamp_to_ns

CAMERA = Camera(160, 120, 140.0, 140.0, 79.5, 59.5)
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
SENSOR_FRAME = "camera"
DISCOVERY_SECONDS = 20.0
STEP_NS = 100_000_000


# ---- the world: boxes in a room, and a depth camera ----


def box_room(seed: int = 0) -> NDArray[np.float64]:
    """Axis-aligned boxes (B, 2, 3), lowest and highest corners; the first is the room, seen from inside."""
    generator = np.random.default_rng(seed)
    centre = np.stack([generator.uniform(-2, 2, 14), generator.uniform(-1, 1, 14), generator.uniform(0.8, 3.2, 14)], 1)
    size = generator.uniform(0.15, 0.9, (14, 3))
    boxes = np.stack([centre - size / 2, centre + size / 2], 1)
    return np.concatenate([[[[-3.0, -1.3, -2.0], [3.0, 1.3, 4.0]]], boxes])


def look(boxes: NDArray[np.float64], pose: NDArray[np.float64], camera: Camera = CAMERA) -> NDArray[np.float32]:
    """The depth image (H, W) that a camera at `pose` (T_world_camera) sees, in metres, with a little noise."""
    rays = camera.rays().astype(np.float64) @ pose[:3, :3].T
    with np.errstate(divide="ignore"):
        hits = (boxes[:, None, None] - pose[:3, 3]) / rays[None, :, :, None]  # (B, H, W, 2 corners, 3 axes)
    enter, leave = hits.min(axis=3).max(axis=-1), hits.max(axis=3).min(axis=-1)
    distance = np.where((leave > enter) & (enter > 0), enter, np.inf)
    distance[0] = leave[0]
    depth = distance.min(axis=0)
    noise = np.random.default_rng(int(abs(pose[:3].sum()) * 1e6)).normal(size=depth.shape)
    return (depth + 0.002 * noise).astype(np.float32)


def pose_at(step: float) -> NDArray[np.float64]:
    """A smooth path through the room: 3 cm and about a degree a step, out and back again after 60 steps."""
    phase = np.sin(np.pi * step / 60)
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("yx", [30 * phase, 8 * np.sin(2 * np.pi * step / 60)], degrees=True).as_matrix()
    pose[:3, 3] = [0.9 * phase, 0.1 * phase, -1.0 + 0.6 * phase]
    return pose


def cloud_at(step: float, seed: int = 0) -> NDArray[np.float32]:
    """The organised cloud (H, W, 3) seen at a step of the path."""
    return depth_to_points(look(box_room(seed), pose_at(step)), CAMERA)


# ---- the node ----


@functools.cache
def untrained_weights() -> Path:
    """Weights of a very small rigid network before training, for what only needs a file that loads quickly."""
    import torch

    from lepard_ros.network.config import SMALL_RIGID
    from lepard_ros.network.lepard import Lepard
    from lepard_ros.network.weights import Card, save

    torch.manual_seed(0)
    # A threshold as trained networks had it at first: below it an untrained one claims too much.
    config = replace(SMALL_RIGID, grid=0.1, width=16, feature_dim=48, voxel_size=0.4, confidence_threshold=0.02)
    folder = Path(tempfile.mkdtemp(prefix="lepard_weights_"))
    return save(Lepard(config), Card("untrained", config, mode="rigid"), folder / "untrained.safetensors")


class NodeProcess:
    """`lepard_node` in a process of its own. Its output goes to a file that `log` reads."""

    def __init__(self, *ros_arguments: str, **parameters: Any) -> None:
        """Parameters by name (so the shipped weights of the mode); further arguments as after --ros-args."""
        given = [part for name, value in parameters.items() for part in ("-p", f"{name}:={_text(value)}")]
        self._file = Path(tempfile.mkstemp(prefix="lepard_node_", suffix=".log")[1])
        command = [sys.executable, "-m", "lepard_ros.ros.main", "--ros-args", *given, *ros_arguments]
        with self._file.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ.copy())
        self.pid = self._process.pid

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.log())
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._file.unlink()

    def log(self) -> str:
        """Everything it wrote so far."""
        return self._file.read_text()

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def stop(self, number: int = signal.SIGINT) -> tuple[int, float]:
        """Send a signal; the exit code and the seconds it took."""
        start = time.monotonic()
        self._process.send_signal(number)
        return self._process.wait(15 * patience()), time.monotonic() - start

    def wait(self, timeout: float = 30.0) -> int:
        """The exit code of a process that ends by itself."""
        return self._process.wait(timeout * patience())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


# ---- the probe ----


def patience() -> float:
    """By how much everything takes longer than on an idle machine: the load on each processor, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Probe:
    """A node of the test's own that sends clouds and keeps everything that comes back, by topic."""

    def __init__(self, reliable: bool = True, name: str = "lepard") -> None:
        """Listen to the outputs of the node `name`. reliable: how clouds are sent."""
        self.context = Context()
        rclpy.init(context=self.context)
        self.node = Node("probe", context=self.context)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self.heard: dict[str, list[Any]] = defaultdict(list)
        self.name = name
        reliability = ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT
        qos = QoSProfile(depth=5, reliability=reliability)
        self.clouds = self.node.create_publisher(PointCloud2, "points", qos)
        self.depths = self.node.create_publisher(Image, "depth", qos)
        self.infos = self.node.create_publisher(CameraInfo, "camera_info", qos)
        self.tf = self.node.create_publisher(TFMessage, "/tf", 100)
        self.tf_static = self.node.create_publisher(TFMessage, "/tf_static", LATCHED)
        self._listen()

    def _listen(self) -> None:
        own = f"/{self.name}/"
        outputs: list[tuple[Any, str, QoSProfile | int]] = [
            (TFMessage, "/tf", 100),
            (DiagnosticArray, "/diagnostics", 10),
            (TrackingStatus, own + "status", 10),
            (Odometry, own + "odometry", 10),
            (PoseWithCovarianceStamped, own + "pose", 10),
            (Correspondences, own + "correspondences", 10),
            (MarkerArray, own + "markers", 10),
            (PathMessage, own + "path", LATCHED),
            (PointCloud2, own + "map", LATCHED),
        ]
        for kind, topic, qos in outputs:
            key = topic.rsplit("/", 1)[1]
            self.node.create_subscription(kind, topic, self.heard[key].append, qos)

    def __enter__(self) -> "Probe":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.remove_node(self.node)
        self.node.destroy_node()
        self._executor.shutdown()
        rclpy.shutdown(context=self.context)

    def spin(self, seconds: float) -> None:
        """Take in what comes for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def until(self, condition: Callable[[], Any], seconds: float = 20.0, what: str = "") -> Any:
        """Take in what comes until the condition holds; its value. Fails after `seconds`, more on a busy machine."""
        deadline = time.monotonic() + seconds * patience()
        while not (value := condition()):
            assert time.monotonic() < deadline, f"waited {seconds} s in vain {what}; last: {self._last_words()}"
            self._executor.spin_once(timeout_sec=0.1)
        return value

    def until_heard(self, topic: str, number: int, seconds: float = 20.0) -> list[Any]:
        """Wait until a topic brought this many messages since it was cleared; all of them."""
        self.until(lambda: len(self.heard[topic]) >= number, seconds, f"for {number} of {topic}")
        return self.heard[topic]

    def _last_words(self) -> str:
        return str({key: str(messages[-1])[:400] for key, messages in self.heard.items() if messages})

    def connect(self, seconds: float = 60.0) -> None:
        """Wait until the node listens to the clouds, and is heard."""
        self.until(lambda: self.clouds.get_subscription_count() > 0, seconds, "for the node to subscribe")
        status = f"/{self.name}/status"
        self.until(lambda: self.node.count_publishers(status) > 0, seconds, "for the node's status")

    def send(self, points: NDArray[np.floating], stamp_ns: int, frame_id: str = SENSOR_FRAME) -> None:
        """Publish one cloud."""
        self.clouds.publish(cloud_message(points, stamp_ns, frame_id))

    def track(
        self, points: NDArray[np.floating], stamp_ns: int, frame_id: str = SENSOR_FRAME, seconds: float = 20.0
    ) -> TrackingStatus:
        """Publish one cloud and wait for its status."""
        before = len(self.heard["status"])
        sent = -1e9

        def answered() -> bool:
            nonlocal sent
            # Best effort may lose a cloud while the two sides are still finding each other: send it again.
            if time.monotonic() - sent > 8 * patience():
                self.send(points, stamp_ns, frame_id)
                sent = time.monotonic()
            return len(self.heard["status"]) > before

        self.until(answered, seconds, "for a status")
        status = self.heard["status"][before]
        assert stamp_to_ns(status.header.stamp) == stamp_ns
        return status

    def send_info(self, stamp_ns: int, camera: Camera = CAMERA) -> None:
        """Publish a camera info."""
        info = CameraInfo(header=header(stamp_ns, SENSOR_FRAME), width=camera.width, height=camera.height)
        info.k = [camera.fx, 0.0, camera.cx, 0.0, camera.fy, camera.cy, 0.0, 0.0, 1.0]
        self.infos.publish(info)

    def send_depth(self, depth: NDArray[np.uint16], stamp_ns: int) -> None:
        """Publish a 16UC1 depth image."""
        image = Image(header=header(stamp_ns, SENSOR_FRAME), height=depth.shape[0], width=depth.shape[1])
        image.encoding, image.step, image.data = "16UC1", 2 * depth.shape[1], depth.astype("<u2").tobytes()
        self.depths.publish(image)

    def call(self, service: str, seconds: float = 20.0) -> Trigger.Response:
        """Call ~/reset or ~/save."""
        return self._request(Trigger, f"/{self.name}/{service}", Trigger.Request(), seconds)

    def set_parameter(self, name: str, value: Any) -> SetParametersResult:
        """Set one parameter as `ros2 param set` does."""
        request = SetParameters.Request(parameters=[Parameter(name, value=value).to_parameter_msg()])
        return self._request(SetParameters, f"/{self.name}/set_parameters", request).results[0]

    def change_state(self, transition: int) -> bool:
        """Ask for a lifecycle transition."""
        from lifecycle_msgs.srv import ChangeState

        request = ChangeState.Request()
        request.transition.id = transition
        return bool(self._request(ChangeState, f"/{self.name}/change_state", request, 60.0).success)

    def _request(self, kind: Any, name: str, request: Any, seconds: float = 20.0) -> Any:
        client: Any = self.node.create_client(kind, name)
        self.until(client.service_is_ready, DISCOVERY_SECONDS, f"for the service {name}")
        future = client.call_async(request)
        self.until(future.done, seconds, f"for an answer of {name}")
        self.node.destroy_client(client)
        return future.result()

    def transforms(self) -> dict[tuple[str, str], list[Any]]:
        """TF heard so far, by (parent, child)."""
        found = defaultdict(list)
        for message in self.heard["tf"]:
            for one in message.transforms:
                found[one.header.frame_id, one.child_frame_id].append(one)
        return found

    def diagnosis(self, entry: str) -> Any:
        """The newest diagnostic entry whose name ends with `entry`, or None."""
        for message in reversed(self.heard["diagnostics"]):
            for status in message.status:
                if status.name.endswith(entry):
                    return status
        return None
