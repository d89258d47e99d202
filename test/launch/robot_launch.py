# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""For launch_testing: the launch file starts the node of a robot, which tracks clouds and ends cleanly.

launch_test test/launch/robot_launch.py        (test_launch.py does so where launch_testing is installed)
"""

import sys
import time
import unittest
from pathlib import Path

import launch_testing.actions
import launch_testing.asserts
import rclpy
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from lepard_ros.msg import TrackingStatus
from sensor_msgs.msg import PointCloud2

from launch import LaunchDescription
from lepard_ros.ros.conversion import cloud_message
from lepard_ros.ros.parameters import share_directory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from node_harness import STEP_NS, cloud_at, patience

LAUNCH_FILE = share_directory() / "launch" / "lepard.launch.py"


def generate_test_description() -> LaunchDescription:
    """The launch file in a namespace, with another topic of clouds."""
    source = PythonLaunchDescriptionSource(str(LAUNCH_FILE))
    arguments = {"namespace": "robot", "points": "/camera/points", "mode": "rigid"}
    node = IncludeLaunchDescription(source, launch_arguments=arguments.items())
    return LaunchDescription([node, launch_testing.actions.ReadyToTest()])


class TestWhileItRuns(unittest.TestCase):
    """Over DDS, while the node runs."""

    def test_a_cloud_is_tracked(self, proc_output: launch_testing.io_handler.ActiveIoHandler) -> None:
        """A status comes back from the namespace, and the log has said what runs."""
        rclpy.init()
        probe = rclpy.create_node("launch_probe")
        heard: list[TrackingStatus] = []
        probe.create_subscription(TrackingStatus, "/robot/lepard/status", heard.append, 10)
        clouds = probe.create_publisher(PointCloud2, "/camera/points", 1)
        deadline = time.monotonic() + 90 * patience()
        while not heard and time.monotonic() < deadline:
            if clouds.get_subscription_count():
                clouds.publish(cloud_message(cloud_at(0), time.time_ns() // STEP_NS * STEP_NS, "camera"))
            rclpy.spin_once(probe, timeout_sec=1.0)
        rclpy.shutdown()
        assert heard, "no status came"
        assert heard[0].state == TrackingStatus.OK, heard[0].reason_text
        proc_output.assertWaitFor("rigid mode", timeout=10)


@launch_testing.post_shutdown_test()
class TestAfterItsEnd(unittest.TestCase):
    """When launch has ended it."""

    def test_it_ended_with_0(self, proc_info: launch_testing.ProcInfoHandler) -> None:
        """As a clean shutdown does."""
        launch_testing.asserts.assertExitCodes(proc_info, allowable_exit_codes=[0])
