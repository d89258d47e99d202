# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node with a preset, and on demand RViz and a bag.

ros2 launch lepard_ros lepard.launch.py config:=realsense rviz:=true
"""

import tempfile
from pathlib import Path

from ament_index_python.packages import PackageNotFoundError, get_package_prefix
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    LogInfo,
    OpaqueFunction,
    SetEnvironmentVariable,
)
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from lepard_ros.ros.parameters import fastdds_profile, preset_file
from lepard_ros.ros.rviz import rviz_config

# Arguments that are parameters of the node: empty leaves them to the preset.
PARAMETERS = {
    "mode": "rigid or deformable",
    "weights": "name or path of the weights; empty takes those of the mode",
    "input": "cloud or depth",
    "map_frame": "the frame that poses are given in",
    "base_frame": "publish map -> this frame",
    "odom_frame": "publish map -> this frame, above another odometry",
    "map_file": "map to start from",
    "mapping": "true or false; false only localises in map_file",
}
# Arguments that are topics: what the node's own names are mapped to.
TOPICS = {
    "points": "cloud topic (input: cloud)",
    "depth": "depth image topic (input: depth)",
    "camera_info": "camera info topic (input: depth)",
    "imu": "IMU topic (upright: imu)",
}
OTHERS = {
    "config": ("rigid", "preset: a file of config/ without .yaml, or the path of a YAML file"),
    "namespace": ("", "namespace of the node and its relative topics"),
    "rviz": ("false", "open RViz, if it is installed"),
    "fixed_frame": ("", "RViz's fixed frame; empty takes map_frame. In deformable mode give the cloud's frame"),
    "bag": ("", "play this bag; time is then the bag's"),
    "rate": ("1.0", "speed of the bag"),
    "use_sim_time": ("", "true or false; empty means true with a bag"),
    "log_level": ("info", "log level of the node"),
}


def generate_launch_description() -> LaunchDescription:
    """Declare the arguments; what they mean is worked out when they are known."""
    arguments = [DeclareLaunchArgument(name, default_value="", description=text) for name, text in PARAMETERS.items()]
    arguments += [DeclareLaunchArgument(name, default_value=name, description=text) for name, text in TOPICS.items()]
    arguments += [
        DeclareLaunchArgument(name, default_value=default, description=text) for name, (default, text) in OTHERS.items()
    ]
    return LaunchDescription([*arguments, OpaqueFunction(function=_start)])


def _start(context: LaunchContext) -> list[LaunchDescriptionEntity]:
    """The processes that the arguments ask for."""
    given = {name: LaunchConfiguration(name).perform(context) for name in [*PARAMETERS, *TOPICS, *OTHERS]}
    sim_time = given["use_sim_time"].lower() == "true" if given["use_sim_time"] else bool(given["bag"])
    profile = [SetEnvironmentVariable(name, value) for name, value in fastdds_profile().items()]
    actions = [*profile, _node(given, sim_time)]
    if given["rviz"].lower() == "true":
        actions.append(_rviz(given, sim_time))
    if given["bag"]:
        actions.append(_player(given))
    return actions


def _installed(package: str) -> bool:
    try:
        get_package_prefix(package)
    except PackageNotFoundError:
        return False
    return True


def _node(given: dict[str, str], sim_time: bool) -> Node:
    overrides: dict[str, object] = {name: given[name] for name in PARAMETERS if given[name]}
    if "mapping" in overrides:
        overrides["mapping"] = given["mapping"].lower() == "true"
    return Node(
        package="lepard_ros",
        executable="lepard_node",
        name="lepard",
        namespace=given["namespace"],
        output="screen",
        parameters=[str(preset_file(given["config"])), {**overrides, "use_sim_time": sim_time}],
        remappings=[(name, given[name]) for name in TOPICS if given[name] != name],
        # Of the node's own logger: all of rcl at debug would be fifty lines a second.
        arguments=["--ros-args", "--log-level", f"{_logger(given['namespace'])}:={given['log_level']}"],
    )


def _player(given: dict[str, str]) -> LaunchDescriptionEntity:
    """What plays the bag: rosbag2, or our own player where it is not installed."""
    play = ["bag", "play", given["bag"], "--clock", "--rate", given["rate"]]
    if _installed("ros2bag"):
        return ExecuteProcess(cmd=["ros2", *play], output="screen")
    # It waits until the node listens: loading the weights takes some seconds.
    node = f"{given['namespace'].strip('/')}/lepard"
    return Node(package="lepard_ros", executable="lepard", arguments=[*play, "--wait-for", node], output="screen")


def _logger(namespace: str) -> str:
    return ".".join([*namespace.strip("/").split("/"), "lepard"]).lstrip(".")


def _rviz(given: dict[str, str], sim_time: bool) -> LaunchDescriptionEntity:
    """RViz with this node's topics; where it is not installed a sentence, for the node does not need it."""
    if not _installed("rviz2"):
        return LogInfo(
            msg="rviz:=true, but rviz2 is not installed (apt install ros-$ROS_DISTRO-rviz2); going on without."
        )
    frame = given["fixed_frame"] or given["map_frame"] or "map"
    config = Path(tempfile.mkdtemp(prefix="lepard_rviz_")) / "lepard.rviz"
    config.write_text(rviz_config(given["points"], given["namespace"], frame))
    return Node(
        package="rviz2",
        executable="rviz2",
        arguments=["-d", str(config)],
        parameters=[{"use_sim_time": sim_time}],
        output="log",
    )
