# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the node itself costs for a cloud of 640 x 480 points, beside the tracking: processor time by stage.

python bench/node.py
Everything is real (messages, serialisation, publishers, a subscriber to each topic) except the tracker, which says "OK"
at once with 1500 matches, so that only the node's own work is timed.
"""

import os
import time
from collections.abc import Callable

os.environ.setdefault("ROS_DOMAIN_ID", "94")
os.environ["ROS_AUTOMATIC_DISCOVERY_RANGE"] = "LOCALHOST"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import rclpy
from lepard_ros.msg import Correspondences, TrackingStatus
from nav_msgs.msg import Odometry
from rclpy.serialization import serialize_message
from sensor_msgs.msg import PointCloud2
from visualization_msgs.msg import MarkerArray

from lepard_ros.cloud.ranges import crop_range
from lepard_ros.registration.types import Matches, Registration, Status
from lepard_ros.ros import conversion
from lepard_ros.ros.markers import match_markers
from lepard_ros.ros.status import status_message

REPEATS = 50
LIMIT_MS = 15.0


def measure(work: Callable[[], object]) -> float:
    """Median processor milliseconds of a piece of work, after warming up."""
    times = []
    for _ in range(REPEATS + 5):
        start = time.process_time()
        work()
        times.append((time.process_time() - start) * 1e3)
    return float(np.median(times[5:]))


def stages() -> dict[str, float]:
    """Processor milliseconds by stage for one cloud."""
    generator = np.random.default_rng(0)
    points = generator.uniform(0.5, 4.0, (480, 640, 3)).astype(np.float32)
    data = serialize_message(conversion.cloud_message(points, 10**18, "camera"))
    message = conversion.deserialise(data, PointCloud2)
    matches = Matches(generator.normal(size=(1500, 3)), generator.normal(size=(1500, 3)), generator.uniform(size=1500))
    inliers = generator.uniform(size=1500) < 0.5
    found = Registration(np.eye(4), Status.OK, matches, inliers, 0.01, 0.8, np.eye(6))
    head = conversion.header(10**18, "camera")

    def correspondences() -> Correspondences:
        return conversion.correspondences_message(matches, inliers, head, head, 0)

    def odometry() -> Odometry:
        return conversion.odometry_message(np.eye(4), np.eye(6), 10**18, "map", "camera")

    def status() -> TrackingStatus:
        return status_message(10**18, "camera", "OK", "rigid", found)

    def markers() -> MarkerArray:
        return match_markers(matches.source, matches.target, inliers, 10**18, "map", 200)

    node = rclpy.create_node("bench")
    kinds = [Correspondences, Odometry, TrackingStatus, MarkerArray]
    for kind in kinds:
        node.create_subscription(kind, f"bench/{kind.__name__}", lambda _: None, 10)
    publishers = [node.create_publisher(kind, f"bench/{kind.__name__}", 10) for kind in kinds]
    made = [correspondences(), odometry(), status(), markers()]
    result = {
        "read the message": measure(lambda: conversion.deserialise(data, PointCloud2)),
        "decode the points": measure(lambda: conversion.frame_from_cloud(message)),
        "crop by range": measure(lambda: crop_range(points, 0.3, 6.0)),
        "correspondences": measure(correspondences),
        "odometry": measure(odometry),
        "status": measure(status),
        "markers": measure(markers),
        "publish all": measure(lambda: [one.publish(two) for one, two in zip(publishers, made, strict=True)]),
    }
    node.destroy_node()
    return result


def main() -> None:
    """Print the table."""
    rclpy.init()
    times = stages()
    rclpy.shutdown()
    for name, milliseconds in times.items():
        print(f"{name:<20}{milliseconds:7.2f} ms")
    total = sum(times.values())
    print(f"{'total':<20}{total:7.2f} ms of processor time a cloud (limit {LIMIT_MS:.0f} ms)")


if __name__ == "__main__":
    main()
