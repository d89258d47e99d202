# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Plays a bag over DDS without rosbag2: same topics, types, bytes, QoS and timing."""

import importlib
import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import rclpy
from builtin_interfaces.msg import Time
from rclpy.duration import Duration
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock

from lepard_ros.data.bag_reader import Bag, open_bag
from lepard_ros.errors import InputError
from lepard_ros.ros.parameters import use_fastdds_profile
from lepard_ros.ros.stop_signal import StopSignal

CLOCK_TOPIC = "/clock"
CLOCK_SECONDS = 0.025  # 40 Hz, as `ros2 bag play --clock`
DEPTH = 10  # queue depth of a publisher if the bag does not record it: DDS does not transmit it
ACKNOWLEDGE_SECONDS = 5.0
LINGER_SECONDS = 2.0
LISTENER_SECONDS = 120.0  # enough for a node to load its weights on a slow machine
_KIND = re.compile(r"([a-z][a-z0-9_]*)/msg/([A-Z][A-Za-z0-9]*)")


class Pace:
    """Schedules the messages of a recording."""

    def __init__(self, rate: float = 1.0) -> None:
        """rate: playback speed, 1 for real time."""
        self._rate = rate
        self._start: tuple[int, float] | None = None  # a time of the recording (ns), and when it was played (s)

    def restart(self, recorded_ns: int) -> None:
        """Map this time of the recording to now."""
        self._start = recorded_ns, time.monotonic()

    def seconds_until(self, recorded_ns: int) -> float:
        """Seconds until a time of the recording is due, negative if late. The first call starts the clock."""
        if self._start is None:
            self.restart(recorded_ns)
        assert self._start is not None
        start_ns, started = self._start
        return started + (recorded_ns - start_ns) * 1e-9 / self._rate - time.monotonic()


class Played(NamedTuple):
    """Result of playing. messages: number published. late: the largest delay in seconds."""

    messages: int
    late: float


class BagPlayer(Node):
    """Publishes the messages of a bag."""

    def __init__(self, bag: Bag, topics: Sequence[str] = (), clock: bool = False) -> None:
        """topics: play only these. clock: publish the time of the recording on /clock."""
        super().__init__("bag_player")
        if bag.is_ros1():
            raise InputError(f"{bag.path} is a ROS 1 bag; rosbags-convert turns it into one that can be played.")
        self._bag = bag
        self._clock_output = self.create_publisher(Clock, CLOCK_TOPIC, DEPTH) if clock else None
        self._outputs = {
            topic: self.create_publisher(kind, topic, played_qos(bag.offered_qos(topic)))
            for topic, kind in self._classes(topics)
            if not (clock and topic == CLOCK_TOPIC)
        }
        if not self._outputs:
            raise InputError(f"{bag.path} has nothing to play; it holds {bag.listed()}.")

    def topics(self) -> list[str]:
        """The topics that are played."""
        return list(self._outputs)

    def wait_for(self, listener: str, stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait up to LISTENER_SECONDS for the named node to subscribe to a topic; returns whether it did."""
        deadline = time.monotonic() + LISTENER_SECONDS
        while listener.strip("/") not in self._listeners():
            if stop() or time.monotonic() > deadline:
                return False
            rclpy.spin_once(self, timeout_sec=0.05)
        return True

    def _listeners(self) -> set[str]:
        """Nodes that subscribe to a played topic, with namespace, without the leading slash."""
        found = [one for topic in self._outputs for one in self.get_subscriptions_info_by_topic(topic)]
        return {f"{one.node_namespace}/{one.node_name}".strip("/").replace("//", "/") for one in found}

    def play(self, rate: float = 1.0, stop: Callable[[], bool] = lambda: False) -> Played:
        """Play all messages at the pace of the recording times `rate`, or until `stop()`."""
        pace, count, late = Pace(rate), 0, 0.0
        for connection, recorded_ns, data in self._bag.raw_messages(lambda topic, _: topic in self._outputs):
            self._pass_time(pace, recorded_ns, rate, stop)
            if stop():
                break
            late = max(late, -pace.seconds_until(recorded_ns))
            self._outputs[connection.topic].publish(bytes(data))
            count += 1
        self._linger(stop)
        return Played(count, late)

    def _linger(self, stop: Callable[[], bool]) -> None:
        """Keep the publishers alive until the last messages have arrived.

        Reliable subscribers acknowledge them. Best-effort ones, such as our node, do not, so they get some time.
        """
        for output in self._outputs.values():
            output.wait_for_all_acked(Duration(seconds=0.0 if stop() else ACKNOWLEDGE_SECONDS))
        leave = time.monotonic() + LINGER_SECONDS
        while time.monotonic() < leave and not stop():
            rclpy.spin_once(self, timeout_sec=0.05)

    def _pass_time(self, pace: Pace, recorded_ns: int, rate: float, stop: Callable[[], bool]) -> None:
        """Sleep until a time of the recording; publish /clock meanwhile."""
        while (left := pace.seconds_until(recorded_ns)) > 0 and not stop():
            self._tell_time(recorded_ns - int(left * rate * 1e9))
            rclpy.spin_once(self, timeout_sec=min(left, CLOCK_SECONDS))
        self._tell_time(recorded_ns)

    def _tell_time(self, nanoseconds: int) -> None:
        if self._clock_output is not None:
            seconds, rest = divmod(nanoseconds, 10**9)
            self._clock_output.publish(Clock(clock=Time(sec=seconds, nanosec=rest)))

    def _classes(self, topics: Sequence[str]) -> Iterator[tuple[str, Any]]:
        """Topics to play with their message classes; topics of missing types are logged and skipped."""
        kinds = {topic: kind for topic, (kind, _) in self._bag.topics().items()}
        unknown = [topic for topic in topics if topic not in kinds]
        if unknown:
            raise InputError(f"{self._bag.path} has no topic {', '.join(unknown)}; it holds {self._bag.listed()}.")
        for topic in topics or kinds:
            message = message_class(kinds[topic])
            if message is None:
                self.get_logger().warning(f"{topic} is not played: {kinds[topic]} is not installed here.")
            else:
                yield topic, message


def play_bag(
    path: Path,
    topics: Sequence[str] = (),
    rate: float = 1.0,
    clock: bool = False,
    wait_for: str = "",
    ros_arguments: Sequence[str] = (),
) -> Played:
    """Play a bag from this process to its end, or until SIGINT or SIGTERM. wait_for: a node to wait for."""
    stop = StopSignal()
    use_fastdds_profile()
    with open_bag(path) as bag:
        rclpy.init(args=list(ros_arguments), signal_handler_options=SignalHandlerOptions.NO)
        try:
            stop.spinning = True
            player = BagPlayer(bag, topics, clock)
            player.get_logger().info(f"Playing {path}: {', '.join(player.topics())}")
            if wait_for and not player.wait_for(wait_for, lambda: stop.asked) and not stop.asked:
                raise InputError(f"The node {wait_for} has not subscribed after {LISTENER_SECONDS:.0f} s; see its log.")
            played = player.play(rate, lambda: stop.asked)
            player.destroy_node()
            return played
        finally:
            rclpy.try_shutdown()


def played_qos(offered: Sequence[Any]) -> QoSProfile:
    """The QoS to play a topic with, compatible with every subscriber of its recorded publishers. offered: from rosbags.

    Reliable and transient local only if every recorded publisher was.
    """
    reliable = all(one.reliability.name == "RELIABLE" for one in offered)
    latched = bool(offered) and all(one.durability.name == "TRANSIENT_LOCAL" for one in offered)
    return QoSProfile(
        depth=max((one.depth for one in offered if one.history.name == "KEEP_LAST"), default=0) or DEPTH,
        reliability=ReliabilityPolicy.RELIABLE if reliable else ReliabilityPolicy.BEST_EFFORT,
        durability=DurabilityPolicy.TRANSIENT_LOCAL if latched else DurabilityPolicy.VOLATILE,
    )


def message_class(kind: str) -> Any:
    """The class of a message type such as sensor_msgs/msg/PointCloud2; None if it is not installed."""
    named = _KIND.fullmatch(kind)
    # The type name comes from the bag, and importing runs code: only import packages that contain messages.
    if named is None or not any((Path(folder) / "msg").is_dir() for folder in _folders(named[1])):
        return None
    try:
        return getattr(importlib.import_module(f"{named[1]}.msg"), named[2], None)
    except ImportError:
        return None


def _folders(package: str) -> list[str]:
    """The location of a package, without importing it."""
    if package in sys.modules:
        return list(getattr(sys.modules[package], "__path__", []))
    found = importlib.util.find_spec(package)
    return list(found.submodule_search_locations or []) if found else []
