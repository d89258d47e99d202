# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Transforms: the tree against closed forms, broadcaster and buffer over real DDS, and against tf2_ros where it is."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

rclpy = pytest.importorskip("rclpy", reason="ROS 2 is not installed")

from rclpy.qos import DurabilityPolicy, QoSProfile  # noqa: E402
from tf2_msgs.msg import TFMessage  # noqa: E402

from lepard_ros.errors import InputError  # noqa: E402
from lepard_ros.ros import conversion  # noqa: E402
from lepard_ros.ros.compat import (  # noqa: E402
    TransformBroadcaster,
    TransformBuffer,
    TransformTree,
    TransformUnavailable,
    matrix_from_quaternion,
    matrix_from_transform,
    quaternion_from_matrix,
    transform_from_matrix,
)
from lepard_ros.ros.compat import quaternions as quaternions_module  # noqa: E402
from lepard_ros.ros.compat.libraries import ros_library  # noqa: E402
from lepard_ros.ros.compat.transforms import stamped_transform  # noqa: E402

SECOND = 10**9
TF_HASH = "RIHS01_e369d0f05a23ae52508854b66f6aa0437f3449d652e8cbf22d5abe85d020f087"


def pose(seed: int) -> np.ndarray:
    """A random (4, 4) rigid transform."""
    rng = np.random.default_rng(seed)
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.random(random_state=rng).as_matrix()
    matrix[:3, 3] = rng.normal(size=3)
    return matrix


# ---- quaternions ----


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=50, deadline=None)
def test_quaternion_and_matrix_are_inverse_and_agree_with_transforms3d(seed: int) -> None:
    quaternions = pytest.importorskip("transforms3d.quaternions")
    matrix = pose(seed)
    quaternion = quaternion_from_matrix(matrix)
    assert quaternion[3] >= 0
    np.testing.assert_allclose(matrix_from_quaternion(quaternion)[:3, :3], matrix[:3, :3], atol=1e-12)
    w, x, y, z = quaternions.mat2quat(matrix[:3, :3])
    np.testing.assert_allclose(quaternion, np.array([x, y, z, w]) * (1 if w >= 0 else -1), atol=1e-7)


@pytest.mark.parametrize("seed", range(20))
def test_tf_transformations_gives_the_same_results(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tf_transformations", reason="a ROS installation brings it")
    matrix = pose(seed)
    theirs = quaternion_from_matrix(matrix), matrix_from_quaternion(2.5 * quaternion_from_matrix(matrix))
    monkeypatch.setattr(quaternions_module, "ros_library", lambda name: None)
    ours = quaternion_from_matrix(matrix), matrix_from_quaternion(2.5 * quaternion_from_matrix(matrix))
    for their, our in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(their, our, atol=1e-7)


def test_sensor_msgs_py_makes_the_same_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sensor_msgs_py.point_cloud2", reason="a ROS installation brings it")
    points = np.random.default_rng(0).normal(size=(500, 3))
    for cloud in (points, np.where(points > 1, np.nan, points), points[:0]):
        theirs = conversion.cloud_message(cloud, 5 * 10**9 + 7, "camera")
        with monkeypatch.context() as patch:
            patch.setattr(conversion, "ros_library", lambda name: None)
            assert conversion.cloud_message(cloud, 5 * 10**9 + 7, "camera") == theirs


def test_a_library_that_does_not_load_counts_as_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_ros_library.py").write_text("import numpy\nnumpy.no_such_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ros_library("broken_ros_library") is None


def test_quaternion_need_not_be_normalised_but_must_be_a_rotation() -> None:
    np.testing.assert_allclose(matrix_from_quaternion([0, 0, 2, 2]), matrix_from_quaternion([0, 0, 0.5, 0.5]))
    for bad in ([0, 0, 0, 0], [0, 0, np.nan, 1], [1, 0, 0]):
        with pytest.raises(InputError, match="not a rotation"):
            matrix_from_quaternion(bad)


def test_message_and_matrix_are_inverse() -> None:
    np.testing.assert_allclose(matrix_from_transform(transform_from_matrix(pose(1))), pose(1), atol=1e-12)


# ---- the tree ----


def test_chain_across_a_common_ancestor_equals_the_product() -> None:
    tree = TransformTree()
    for seed, (parent, child) in enumerate([("map", "odom"), ("odom", "base"), ("base", "camera"), ("base", "lidar")]):
        tree.set(parent, child, SECOND, pose(seed), static=parent == "base")
    np.testing.assert_allclose(tree.lookup("map", "camera", SECOND), pose(0) @ pose(1) @ pose(2), atol=1e-12)
    np.testing.assert_allclose(
        tree.lookup("camera", "map", SECOND), np.linalg.inv(pose(0) @ pose(1) @ pose(2)), atol=1e-12
    )
    np.testing.assert_allclose(tree.lookup("lidar", "camera", 7 * SECOND), np.linalg.inv(pose(3)) @ pose(2), atol=1e-12)
    np.testing.assert_array_equal(tree.lookup("anything", "anything", SECOND), np.eye(4))


def test_between_two_times_it_moves_straight_and_turns_evenly() -> None:
    tree = TransformTree()
    start, end = np.eye(4), np.eye(4)
    end[:3, :3] = Rotation.from_rotvec([0, 0, 1.2]).as_matrix()
    end[:3, 3] = 4, 0, -2
    tree.set("map", "camera", 2 * SECOND, end)
    tree.set("map", "camera", SECOND, start)
    quarter = tree.lookup("map", "camera", SECOND + SECOND // 4)
    np.testing.assert_allclose(quarter[:3, 3], [1, 0, -0.5], atol=1e-12)
    np.testing.assert_allclose(Rotation.from_matrix(quarter[:3, :3]).as_rotvec(), [0, 0, 0.3], atol=1e-12)
    np.testing.assert_array_equal(tree.lookup("map", "camera", 2 * SECOND), end)


def test_it_never_extrapolates_and_says_what_it_knows() -> None:
    tree = TransformTree()
    tree.set("map", "camera", SECOND, pose(0))
    tree.set("map", "camera", 2 * SECOND, pose(1))
    for stamp in (SECOND - 1, 2 * SECOND + 1):
        with pytest.raises(TransformUnavailable, match=r"'camera' in 'map' from 1\.000 to 2\.000 s"):
            tree.lookup("map", "camera", stamp)
    with pytest.raises(TransformUnavailable, match="'base' is not in the transform tree"):
        tree.lookup("base", "camera", SECOND)


def test_latest_is_the_newest_time_that_all_moving_links_share() -> None:
    tree = TransformTree()
    for second in (1, 2, 3):
        tree.set("map", "odom", second * SECOND, pose(second))
    for second in (1, 2):
        tree.set("odom", "base", second * SECOND, pose(10 + second))
    tree.set("base", "camera", 0, pose(20), static=True)
    np.testing.assert_allclose(tree.lookup("map", "camera", 0), pose(2) @ pose(12) @ pose(20), atol=1e-12)
    np.testing.assert_allclose(tree.lookup("base", "camera", 0), pose(20), atol=1e-12)


def test_a_gap_above_the_common_ancestor_does_not_matter() -> None:
    tree = TransformTree()
    tree.set("map", "base", SECOND, pose(0))
    tree.set("base", "camera", 0, pose(1), static=True)
    tree.set("base", "lidar", 0, pose(2), static=True)
    np.testing.assert_allclose(
        tree.lookup("lidar", "camera", 99 * SECOND), np.linalg.inv(pose(2)) @ pose(1), atol=1e-12
    )


def test_loops_end_with_a_sentence() -> None:
    tree = TransformTree()
    tree.set("a", "b", SECOND, pose(0))
    tree.set("b", "a", SECOND, pose(1))
    with pytest.raises(TransformUnavailable, match="loop"):
        tree.lookup("map", "a", SECOND)
    with pytest.raises(TransformUnavailable):
        tree.lookup("map", "a", 0)


def test_old_poses_are_forgotten_and_clear_keeps_static_ones() -> None:
    tree = TransformTree(cache_seconds=5)
    for second in range(1, 20):
        tree.set("map", "camera", second * SECOND, pose(second))
    tree.set("map", "camera", SECOND, pose(1))
    with pytest.raises(TransformUnavailable, match=r"from 14\.000 to 19\.000"):
        tree.lookup("map", "camera", 13 * SECOND)
    tree.set("map", "mast", 0, pose(0), static=True)
    tree.clear()
    np.testing.assert_array_equal(tree.lookup("map", "mast", SECOND), pose(0))
    with pytest.raises(TransformUnavailable):
        tree.lookup("map", "camera", 0)


@pytest.mark.parametrize("bad", [("", "a", np.eye(4)), ("a", "a", np.eye(4)), ("a", "b", np.full((4, 4), np.nan))])
def test_nonsense_is_refused(bad: tuple) -> None:
    parent, child, matrix = bad
    with pytest.raises(TransformUnavailable, match="not usable"):
        TransformTree().set(parent, child, SECOND, matrix)


# ---- over real DDS ----


@pytest.fixture
def two_nodes() -> Iterator[tuple]:
    """A sender and a receiver, both spinning in a thread."""
    context = rclpy.Context()
    rclpy.init(context=context)
    nodes = [rclpy.create_node(name, context=context) for name in ("tf_sender", "tf_receiver")]
    executor = rclpy.executors.SingleThreadedExecutor(context=context)
    for node in nodes:
        executor.add_node(node)
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            executor.spin_once(timeout_sec=0.05)

    thread = threading.Thread(target=spin)
    thread.start()
    yield tuple(nodes)
    stop.set()
    thread.join()
    executor.shutdown()
    for node in nodes:
        node.destroy_node()
    rclpy.shutdown(context=context)


def test_transforms_are_found_static_and_moving_ones(two_nodes: tuple) -> None:
    sender, receiver = two_nodes
    broadcaster = TransformBroadcaster(sender)
    latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
    fixed = [stamped_transform("base", "camera", 0, pose(2)), stamped_transform("base", "lidar", 0, pose(3))]
    sender.create_publisher(TFMessage, "/tf_static", latched).publish(TFMessage(transforms=fixed))
    time.sleep(0.5)
    buffer = TransformBuffer(receiver)  # Later than the static transforms.
    found = buffer.lookup("lidar", "camera", 0, timeout=15.0)
    assert found is not None, buffer.why
    np.testing.assert_allclose(found, np.linalg.inv(pose(3)) @ pose(2), atol=1e-9)

    for second in (1, 2):
        broadcaster.send("map", "base", second * SECOND, pose(second))
    found = buffer.lookup("map", "camera", 2 * SECOND, timeout=10.0)
    assert found is not None, buffer.why
    np.testing.assert_allclose(found, pose(2) @ pose(2), atol=1e-9)
    assert buffer.why == ""
    assert buffer.lookup("map", "camera", 9 * SECOND, timeout=0.1) is None
    assert "map" in buffer.why
    info = receiver.get_publishers_info_by_topic("/tf")[0]
    assert info.topic_type == "tf2_msgs/msg/TFMessage"
    assert str(info.topic_type_hash) == TF_HASH
    buffer.close()


def test_lookup_waits_for_a_transform_that_is_late(two_nodes: tuple) -> None:
    sender, receiver = two_nodes
    broadcaster, buffer = TransformBroadcaster(sender), TransformBuffer(receiver)
    deadline = time.monotonic() + 15
    while sender.count_subscribers("/tf") == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    timer = threading.Timer(0.3, lambda: broadcaster.send("map", "camera", SECOND, pose(0)))
    timer.start()
    found = buffer.lookup("map", "camera", SECOND, timeout=10.0)
    assert found is not None, buffer.why
    timer.join()
    np.testing.assert_allclose(found, pose(0), atol=1e-9)


def test_own_tree_answers_as_tf2(two_nodes: tuple) -> None:
    tf2_ros = pytest.importorskip("tf2_ros", reason="tf2_ros is not installed, so there is nothing to compare with")
    from lepard_ros.ros.compat.transforms import stamped_transform

    buffer, tree = tf2_ros.Buffer(), TransformTree()
    for second in (1, 2, 3):
        for parent, child in (("map", "base"), ("base", "camera")):
            buffer.set_transform(stamped_transform(parent, child, second * SECOND, pose(second)), "test")
            tree.set(parent, child, second * SECOND, pose(second))
    for stamp in (SECOND, 1_300_000_000, 2_999_999_999, 0):
        theirs = buffer.lookup_transform("map", "camera", rclpy.time.Time(nanoseconds=stamp)).transform
        np.testing.assert_allclose(tree.lookup("map", "camera", stamp), matrix_from_transform(theirs), atol=1e-6)
