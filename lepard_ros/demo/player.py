# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The sensor of the demonstration: plays the clouds of a bag over DDS, in its own process.

python -m lepard_ros.demo.player BAG [--real-time]
It keeps the timing of the recording. Without --real-time it also waits for the node's status before the next cloud, so
that a slow machine processes every cloud too, only later.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rclpy
from rclpy.node import Node
from rclpy.qos import QoSProfile
from sensor_msgs.msg import PointCloud2

from lepard_ros.data.bag_reader import open_bag
from lepard_ros.errors import InputError
from lepard_ros.msg import TrackingStatus
from lepard_ros.ros.bag_player import Pace
from lepard_ros.ros.conversion import cloud_message, stamp_to_ns

DISCOVERY_SECONDS = 60.0
STATUS_SECONDS = 60.0
# DDS discovery completes for the publisher before the subscription. A cloud sent in between is lost, so the first one
# is repeated until the node responds. The node rejects duplicates.
AGAIN_SECONDS = 3.0
LOOP_RATE = 10.0  # clouds a second
# In a loop the last digits of a stamp (nanoseconds) are the number of the frame in its bag, to know the truth of it.
FRAME_NUMBERS = 1000


class Player(Node):
    """Publishes clouds and waits for the status of each."""

    def __init__(self) -> None:
        """Make the publisher of the clouds."""
        super().__init__("demo_sensor")
        self._publisher = self.create_publisher(PointCloud2, "points", QoSProfile(depth=2))
        self.create_subscription(TrackingStatus, "lepard/status", self._on_status, 10)
        self._answered = 0

    def play(self, bag_path: Path, real_time: bool = False) -> int:
        """Play every cloud of the bag; how many there were. real_time: whether the node follows or not."""
        self._wait(lambda: self._publisher.get_subscription_count() > 0, DISCOVERY_SECONDS, "the node does not listen")
        self._wait(lambda: self.count_publishers("lepard/status") > 0, DISCOVERY_SECONDS, "the node does not answer")
        clouds, pace = _clouds(bag_path), Pace()
        self._publish_until_answered(*clouds[0])
        pace.restart(clouds[0][0])  # with the first cloud a model begins, and the sensor starts its run
        for stamp_ns, data in clouds[1:]:
            left = pace.seconds_until(stamp_ns)
            if left < 0 and not real_time:
                pace.restart(stamp_ns)
            time.sleep(max(0.0, left))
            self._publisher.publish(data)
            if real_time:
                rclpy.spin_once(self, timeout_sec=0.0)
            else:
                self._wait(partial(self._has_answered, stamp_ns), STATUS_SECONDS, "no status came")
        self._wait(partial(self._has_answered, clouds[-1][0]), STATUS_SECONDS, "no last status came")
        return len(clouds)

    def loop(self, bag_path: Path, seconds: float) -> int:
        """Play there and back again at LOOP_RATE, stamped with the present time, whether the node follows or not."""
        self._wait(lambda: self._publisher.get_subscription_count() > 0, DISCOVERY_SECONDS, "the node does not listen")
        with open_bag(bag_path) as bag:
            frames = list(enumerate(bag.frames(bag.cloud_topic())))
        deadline, number = time.monotonic() + seconds, 0
        for index, frame in itertools.cycle([*frames, *frames[-2:0:-1]]):
            if time.monotonic() > deadline:
                return number
            due = time.monotonic() + 1.0 / LOOP_RATE
            stamp_ns = int(self.get_clock().now().nanoseconds) // FRAME_NUMBERS * FRAME_NUMBERS + index
            self._publisher.publish(cloud_message(frame.points, stamp_ns, frame.frame_id))
            number += 1
            rclpy.spin_once(self, timeout_sec=0.0)
            time.sleep(max(0.0, due - time.monotonic()))
        return number

    def _publish_until_answered(self, stamp_ns: int, data: bytes) -> None:
        """Publish the first cloud, every AGAIN_SECONDS, until the node's status of it comes."""
        sent = -AGAIN_SECONDS

        def answered() -> bool:
            nonlocal sent
            if time.monotonic() - sent > AGAIN_SECONDS:
                sent = time.monotonic()
                self._publisher.publish(data)
            return self._has_answered(stamp_ns)

        self._wait(answered, STATUS_SECONDS, "no status came")

    def _has_answered(self, stamp_ns: int) -> bool:
        return self._answered >= stamp_ns

    def _on_status(self, status: TrackingStatus) -> None:
        self._answered = max(self._answered, stamp_to_ns(status.header.stamp))

    def _wait(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise InputError(f"The demonstration stopped: {problem} for {seconds:.0f} s; see the node's log.")
            rclpy.spin_once(self, timeout_sec=0.05)


def _clouds(bag_path: Path) -> list[tuple[int, bytes]]:
    """Stamps and serialised clouds of a demonstration's bag, read at once: reading must not slow the sensor down."""
    with open_bag(bag_path) as bag:
        wanted = bag.cloud_topic()
        return [(stamp_ns, bytes(data)) for _, stamp_ns, data in bag.raw_messages(lambda topic, _: topic == wanted)]


def main() -> int:
    """Play the bag named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bag", type=Path, help="the bag to play")
    parser.add_argument("--loop", type=float, default=0.0, help="play for this many seconds, at the sensor's rate")
    parser.add_argument("--real-time", action="store_true", help="do not wait for the node")
    args = parser.parse_args()
    rclpy.init()
    player = Player()
    try:
        if args.loop:
            player.loop(args.bag, args.loop)
        else:
            player.play(args.bag, args.real_time)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        player.destroy_node()
        rclpy.try_shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
