# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The upward direction for a map without a robot frame: from the sensor's axes or from an IMU."""

import numpy as np
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Imu

from lepard_ros.geometry.arrays import FloatArray

# Weight of each new measurement in the running mean: at 200 Hz it covers the last quarter of a second.
IMU_SHARE = 0.02
# Up and forward in an optical frame, where x points right, y down and z forward (REP-103).
OPTICAL_UP = np.array([0.0, -1.0, 0.0])
FORWARD = np.array([0.0, 0.0, 1.0])
# Forward directions this close to the vertical (cosine) do not define a heading.
VERTICAL = 0.95


class GravityWatch:
    """Listens to the topic `imu` for the direction of gravity."""

    def __init__(self, node: Node) -> None:
        """Start listening."""
        self._node = node
        self.frame_id = ""
        self.up: FloatArray | None = None  # (3,) mean acceleration in the IMU frame; points up when at rest
        self._subscription = node.create_subscription(Imu, "imu", self._hear, qos_profile_sensor_data)

    def _hear(self, message: Imu) -> None:
        force = message.linear_acceleration
        new = np.array([force.x, force.y, force.z])
        if np.isfinite(new).all() and new.any():
            self.frame_id = message.header.frame_id
            self.up = new if self.up is None else (1 - IMU_SHARE) * self.up + IMU_SHARE * new

    def close(self) -> None:
        """Stop listening."""
        self._node.destroy_subscription(self._subscription)


def level_pose(up: FloatArray) -> FloatArray:
    """The pose (4, 4) of an optical frame at the origin of a map with z up and x along the viewing direction.

    up: (3,) upward direction in the optical frame, of any length. For a sensor that looks straight up or down, the
    upper edge of its image defines the heading.
    """
    z = up / np.linalg.norm(up)
    ahead = FORWARD if abs(z @ FORWARD) < VERTICAL else OPTICAL_UP * -np.sign(z @ FORWARD)
    x = ahead - (ahead @ z) * z
    x /= np.linalg.norm(x)
    pose = np.eye(4)
    pose[:3, :3] = np.stack([x, np.cross(z, x), z])
    return pose
