# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The frame contract (REP-105) of the real node over real DDS, and the input from depth images."""

import time
from itertools import count

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import TrackingStatus
from scipy.spatial.transform import Rotation
from tf2_msgs.msg import TFMessage

from lepard_ros.ros.compat import matrix_from_transform
from lepard_ros.ros.compat.transforms import stamped_transform
from node_harness import SENSOR_FRAME, STEP_NS, NodeProcess, Probe, box_room, cloud_at, look, pose_at

pytestmark = pytest.mark.slow

MOUNT = np.eye(4)  # T_base_camera: the camera's pose on the robot
MOUNT[:3, :3] = Rotation.from_euler("xyz", [-90, 0, -90], degrees=True).as_matrix()
MOUNT[:3, 3] = [0.2, 0.05, 0.4]


def publish_mount(probe: Probe, parent: str = "base_link") -> None:
    probe.tf_static.publish(TFMessage(transforms=[stamped_transform(parent, SENSOR_FRAME, 0, MOUNT)]))


def test_with_a_base_frame_the_base_moves_in_the_map() -> None:
    with NodeProcess(base_frame="base_link") as node, Probe() as probe:
        probe.connect()
        stamps = count(time.time_ns(), STEP_NS // 2)
        status = probe.track(cloud_at(0), next(stamps))  # nobody has said where the camera is on the robot
        assert status.reason == TrackingStatus.REASON_NO_TRANSFORM
        assert "'base_link'" in status.reason_text
        assert status.frames_rejected == 1
        publish_mount(probe)
        probe.until(lambda: probe.track(cloud_at(0), next(stamps)).state == TrackingStatus.OK)
        for step in range(1, 4):
            assert probe.track(cloud_at(step), next(stamps)).state == TrackingStatus.OK
        heard = probe.transforms()
        assert set(heard) == {("map", "base_link")}, "the cloud's own frame must not get a second parent"
        truth = np.linalg.inv(pose_at(0)) @ pose_at(3) @ np.linalg.inv(MOUNT)
        np.testing.assert_allclose(matrix_from_transform(heard["map", "base_link"][-1].transform), truth, atol=0.03)
        assert probe.heard["odometry"][-1].child_frame_id == "base_link"
        assert "No transform from 'base_link' to 'camera'" in node.log()


def test_with_an_odom_frame_the_drift_of_the_odometry_is_corrected() -> None:
    drift = np.eye(4)
    drift[:3, 3] = [0.5, -0.2, 0.1]
    with NodeProcess(odom_frame="odom", tf_timeout=2.0) as _, Probe() as probe:
        probe.connect()
        publish_mount(probe)
        start = time.time_ns()
        for step in range(3):
            stamp = start + step * STEP_NS
            probe.send(cloud_at(step), stamp)
            probe.spin(0.3)  # the odometry comes late: the cloud must wait for it
            odometry = np.linalg.inv(drift) @ pose_at(step) @ np.linalg.inv(MOUNT)
            moving = [stamped_transform("odom", "base_link", stamp + side, odometry) for side in (-(10**7), 10**7)]
            probe.tf.publish(TFMessage(transforms=moving))
            probe.until_heard("status", step + 1)
            assert probe.heard["status"][-1].state == TrackingStatus.OK
        heard = [one for (parent, child), many in probe.transforms().items() if parent == "map" for one in many]
        assert {one.child_frame_id for one in heard} == {"odom"}
        for one in heard:  # constant, since the odometry drifted by a constant
            truth = np.linalg.inv(pose_at(0)) @ drift
            np.testing.assert_allclose(matrix_from_transform(one.transform), truth, atol=0.03)


def test_a_frame_that_has_a_parent_gets_no_second_one() -> None:
    with NodeProcess() as _, Probe() as probe:
        probe.connect()
        publish_mount(probe, parent="camera_link")
        probe.spin(1.0)
        status = probe.track(cloud_at(0), time.time_ns())
        assert status.reason == TrackingStatus.REASON_NO_TRANSFORM
        assert "set base_frame to the root of its tree, 'camera_link'" in status.reason_text
        probe.spin(0.5)
        assert ("map", SENSOR_FRAME) not in probe.transforms()
        assert probe.set_parameter("publish_tf", False).successful
        assert probe.track(cloud_at(0), time.time_ns()).state == TrackingStatus.OK
        probe.until(lambda: probe.heard["odometry"])
        assert ("map", SENSOR_FRAME) not in probe.transforms()


def test_frames_that_loop_are_refused_and_do_not_hang() -> None:
    with NodeProcess(base_frame="base_link", tf_timeout=0.1) as node, Probe() as probe:
        probe.connect()
        ring = [("a", "base_link"), ("b", "a"), ("base_link", "b"), ("c", SENSOR_FRAME), (SENSOR_FRAME, "c")]
        probe.tf_static.publish(
            TFMessage(transforms=[stamped_transform(parent, child, 0, np.eye(4)) for parent, child in ring])
        )
        probe.spin(1.0)
        assert probe.track(cloud_at(0), time.time_ns()).reason == TrackingStatus.REASON_NO_TRANSFORM
        assert node.alive()
        assert not [pair for pair in probe.transforms() if pair[0] == "map"]


def test_depth_images_with_camera_info() -> None:
    with NodeProcess(input="depth") as _, Probe() as probe:
        probe.until(lambda: probe.depths.get_subscription_count() and probe.infos.get_subscription_count(), 60)
        probe.until(lambda: probe.node.count_publishers("/lepard/status"), 60)
        start = time.time_ns()
        for step in range(3):
            depth = np.round(look(box_room(), pose_at(step)) * 1000).astype(np.uint16)
            probe.send_depth(depth, start + step * STEP_NS)
            probe.until_heard("status", step + 1)
            probe.spin(0.2)
        # The first image may overtake the first camera info; it is then refused and says so.
        first, *_, last = probe.heard["status"]
        assert first.state == TrackingStatus.OK or "no camera info" in first.reason_text
        assert last.state == TrackingStatus.OK
        translation = probe.transforms()["map", SENSOR_FRAME][-1].transform.translation
        assert abs(translation.x) < 0.3
