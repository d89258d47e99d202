# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The frame contract (REP-105) of the real node over real DDS, and the input from depth images."""

import os
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from geometry_msgs.msg import PoseWithCovarianceStamped
from lepard_ros.msg import TrackingStatus
from lifecycle_msgs.msg import Transition
from scipy.spatial.transform import Rotation
from sensor_msgs.msg import Imu
from tf2_msgs.msg import TFMessage

from lepard_ros.ros.compat import matrix_from_transform
from lepard_ros.ros.compat.transforms import stamped_transform
from lepard_ros.ros.conversion import header, matrix_from_pose, stamp_to_ns
from node_harness import CAMERA, SENSOR_FRAME, STEP_NS, NodeProcess, Probe, box_room, cloud_at, look, patience, pose_at

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
        first, *_, last = (matrix_from_transform(one.transform) for one in heard["map", "base_link"])
        np.testing.assert_allclose(first, np.eye(4), atol=1e-6)  # so that map is z-up, as the base is (REP-103)
        truth = MOUNT @ np.linalg.inv(pose_at(0)) @ pose_at(3) @ np.linalg.inv(MOUNT)
        np.testing.assert_allclose(last, truth, atol=0.03)
        odometry = probe.heard["odometry"]
        assert odometry[-1].child_frame_id == "base_link"
        first_covariance = odometry[0].pose.covariance.reshape(6, 6)
        assert np.linalg.eigvalsh(first_covariance).min() > 0, "a filter takes zero for unknown"
        assert np.diag(odometry[0].twist.covariance.reshape(6, 6)).min() >= 1e5
        assert "No transform from 'base_link' to 'camera'" in node.log()


def test_with_an_odom_frame_the_drift_of_the_odometry_is_corrected() -> None:
    drift = np.eye(4)
    drift[:3, 3] = [0.5, -0.2, 0.1]
    with NodeProcess(odom_frame="odom", base_frame="base_link", tf_timeout=2.0) as _, Probe() as probe:
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
            truth = MOUNT @ np.linalg.inv(pose_at(0)) @ drift
            np.testing.assert_allclose(matrix_from_transform(one.transform), truth, atol=0.03)
        _check_pose_of_the_base(probe)
        _check_repeated_transform(probe)


def _check_pose_of_the_base(probe: Probe) -> None:
    """~/odometry and ~/pose give the robot's pose, not that of odom."""
    odometry, pose = probe.until_heard("odometry", 3)[2], probe.until_heard("pose", 3)[2]
    assert odometry.child_frame_id == "base_link"
    assert pose.pose == odometry.pose
    assert pose.header == odometry.header
    truth = MOUNT @ np.linalg.inv(pose_at(0)) @ pose_at(2) @ np.linalg.inv(MOUNT)
    np.testing.assert_allclose(matrix_from_pose(pose.pose.pose), truth, atol=0.03)


def _check_repeated_transform(probe: Probe) -> None:
    """Without any cloud map -> odom goes on at about 20 Hz, dated ahead; a deactivated node is silent."""
    probe.heard["tf"].clear()
    before = time.time_ns()
    probe.until(lambda: len(probe.transforms()["map", "odom"]) >= 10, 5)
    stamps = [stamp_to_ns(one.header.stamp) for one in probe.transforms()["map", "odom"]]
    assert (stamps[-1] - before) * 1e-9 < 3 * patience()
    assert stamps[-1] > before + 10**8  # the first ones may have waited in a queue
    assert stamps == sorted(stamps)
    assert probe.change_state(Transition.TRANSITION_DEACTIVATE)
    probe.spin(0.2)
    probe.heard["tf"].clear()
    probe.spin(0.5)
    assert not probe.transforms()


def test_clouds_in_the_frame_of_the_base_are_seen_from_the_sensor() -> None:
    with NodeProcess(sensor_frame=SENSOR_FRAME, base_frame="base_link") as _, Probe() as probe:
        probe.connect()
        publish_mount(probe)
        stamps = count(time.time_ns(), STEP_NS // 2)

        def in_base(step: int) -> np.ndarray:
            return (cloud_at(step) @ MOUNT[:3, :3].T + MOUNT[:3, 3]).astype(np.float32)

        probe.until(lambda: probe.track(in_base(0), next(stamps), "base_link").state == TrackingStatus.OK)
        for step in range(1, 4):
            status = probe.track(in_base(step), next(stamps), "base_link")
            assert status.state == TrackingStatus.OK
        assert status.header.frame_id == SENSOR_FRAME
        last = matrix_from_transform(probe.transforms()["map", "base_link"][-1].transform)
        truth = MOUNT @ np.linalg.inv(pose_at(0)) @ pose_at(3) @ np.linalg.inv(MOUNT)
        np.testing.assert_allclose(last, truth, atol=0.03)


def test_a_level_optical_frame_gives_a_map_with_z_up() -> None:
    with NodeProcess(upright="optical") as _, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        assert probe.track(cloud_at(0), start).state == TrackingStatus.OK
        pose = matrix_from_pose(probe.until_heard("odometry", 1)[0].pose.pose)
        np.testing.assert_allclose(pose[:3, :3] @ [0, -1, 0], [0, 0, 1], atol=1e-9)  # up in the image is up
        np.testing.assert_allclose(pose[:3, :3] @ [0, 0, 1], [1, 0, 0], atol=1e-9)  # forward is x


def test_an_imu_says_where_up_is() -> None:
    tilt = Rotation.from_euler("x", 25, degrees=True).as_matrix()  # the camera looks down
    with NodeProcess(upright="imu") as _, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        assert "topic imu" in probe.track(cloud_at(0), start).reason_text
        force = tilt @ np.array([0.0, -9.81, 0.0])
        imu = Imu(header=header(start, SENSOR_FRAME))
        imu.linear_acceleration.x, imu.linear_acceleration.y, imu.linear_acceleration.z = force
        publisher = probe.node.create_publisher(Imu, "imu", 5)
        probe.until(lambda: publisher.get_subscription_count() > 0)
        stamps = count(start + STEP_NS, STEP_NS)

        def started() -> bool:
            publisher.publish(imu)  # best effort: one alone may be lost
            return probe.track(cloud_at(0), next(stamps)).state == TrackingStatus.OK

        probe.until(started)
        pose = matrix_from_pose(probe.until_heard("odometry", 1)[0].pose.pose)
        np.testing.assert_allclose(pose[:3, :3] @ force / 9.81, [0, 0, 1], atol=1e-9)


def test_an_initial_pose_starts_a_search() -> None:
    with NodeProcess(keyframe_distance=0.1) as node, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        for step in range(4):
            status = probe.track(cloud_at(2 * step), start + step * STEP_NS)
        keyframes = status.keyframes
        assert keyframes >= 2
        publisher = probe.node.create_publisher(PoseWithCovarianceStamped, "initialpose", 1)
        probe.until(lambda: publisher.get_subscription_count() > 0)
        hint = PoseWithCovarianceStamped(header=header(start, "map"))
        hint.pose.pose.orientation.w = 1.0
        publisher.publish(hint)
        probe.until(lambda: "around the initial pose" in node.log())
        states = []
        for step in range(4, 12):  # a busy machine may drop one, and one look is not enough
            states.append(probe.track(cloud_at(1), start + step * STEP_NS).state)
            if states[-1] == TrackingStatus.RELOCALISED:
                break
        assert TrackingStatus.RELOCALISED in states
        assert set(states[: states.index(TrackingStatus.RELOCALISED)]) <= {TrackingStatus.LOST}
        assert probe.heard["status"][-1].keyframes >= keyframes


def test_a_second_publisher_of_the_same_transform_is_reported() -> None:
    with NodeProcess() as _, Probe() as probe:
        probe.connect()
        start = time.time_ns()
        assert probe.track(cloud_at(0), start).state == TrackingStatus.OK
        probe.heard["diagnostics"].clear()
        assert "Another node" not in probe.until(lambda: probe.diagnosis(": tracking")).message

        def said() -> bool:
            rival = stamped_transform("map", SENSOR_FRAME, time.time_ns(), MOUNT)
            probe.tf.publish(TFMessage(transforms=[rival]))
            entry = probe.diagnosis(": tracking")
            return entry is not None and "Another node publishes the same transform" in entry.message

        probe.until(said, 60, "for the node to hear the other publisher")


def test_a_busy_tf_costs_little_without_a_base_frame() -> None:
    with NodeProcess() as node, Probe() as probe:
        probe.connect()
        assert probe.track(cloud_at(0), time.time_ns()).state == TrackingStatus.OK
        many = [stamped_transform("base_link", f"joint_{index}", time.time_ns(), MOUNT) for index in range(20)]
        message = TFMessage(transforms=many)
        probe.until(
            lambda: probe.tf.get_subscription_count() == 1, 30, "for the node to listen to TF only now and then"
        )  # the probe itself
        spent = cpu_seconds(node.pid)
        for _ in range(400):  # two seconds of 200 Hz
            probe.tf.publish(message)
            time.sleep(0.005)
        probe.spin(0.2)
        spent = cpu_seconds(node.pid) - spent
    assert spent < 0.25, f"{spent:.2f} CPU seconds for 400 messages of 20 transforms"


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    """Each with the info of its own stamp, though infos of another zoom come beside it."""
    with NodeProcess(input="depth") as _, Probe() as probe:
        probe.until(lambda: probe.depths.get_subscription_count() and probe.infos.get_subscription_count(), 60)
        probe.until(lambda: probe.node.count_publishers("/lepard/status"), 60)
        start = time.time_ns()
        zoomed = replace(CAMERA, fx=2 * CAMERA.fx, fy=2 * CAMERA.fy)
        for step in range(5):
            depth = np.round(look(box_room(), pose_at(step)) * 1000).astype(np.uint16)
            probe.send_info(start + step * STEP_NS)
            probe.send_info(start + step * STEP_NS + 1, zoomed)
            probe.spin(0.4 * patience())  # an image must not overtake its info
            probe.send_depth(depth, start + step * STEP_NS)
            probe.until_heard("status", step + 1)
        assert [one.state for one in probe.heard["status"]] == [TrackingStatus.OK] * 5
        translation = probe.transforms()["map", SENSOR_FRAME][-1].transform.translation
        truth = (np.linalg.inv(pose_at(0)) @ pose_at(4))[:3, 3]
        np.testing.assert_allclose([translation.x, translation.y, translation.z], truth, atol=0.03)
