# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node with a preset, and on demand RViz and a bag.

ros2 launch lepard_ros lepard.launch.py config:=realsense rviz:=true
"""

from launch.actions import DeclareLaunchArgument, ExecuteProcess, OpaqueFunction, SetEnvironmentVariable
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from launch import LaunchContext, LaunchDescription, LaunchDescriptionEntity
from lepard_ros.ros.parameters import preset_file, share_directory

# Arguments that are parameters of the node: empty leaves them to the preset.
PARAMETERS = {
    "mode": "rigid or deformable",
    "input": "cloud or depth",
    "map_frame": "the frame that poses are given in",
    "base_frame": "publish map -> this frame",
    "odom_frame": "publish map -> this frame, above another odometry",
    "map_file": "map to start from",
}
# Arguments that are topics: what the node's own names are mapped to.
TOPICS = {
    "points": "cloud topic (input: cloud)",
    "depth": "depth image topic (input: depth)",
    "camera_info": "camera info topic (input: depth)",
}
OTHERS = {
    "config": ("rigid", "preset: a file of config/ without .yaml, or the path of a YAML file"),
    "rviz": ("false", "open RViz"),
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
    share = share_directory()
    sim_time = given["use_sim_time"].lower() == "true" if given["use_sim_time"] else bool(given["bag"])
    actions: list[LaunchDescriptionEntity] = [
        # Large clouds get lost in Fast DDS's default shared memory; the bag player below needs this too.
        SetEnvironmentVariable("FASTDDS_DEFAULT_PROFILES_FILE", str(share / "config" / "fastdds.xml")),
        _node(given, sim_time),
    ]
    if given["rviz"].lower() == "true":
        actions.append(_rviz(str(share / "config" / "lepard.rviz"), sim_time))
    if given["bag"]:
        play = ["ros2", "bag", "play", given["bag"], "--clock", "--rate", given["rate"]]
        actions.append(ExecuteProcess(cmd=play, output="screen"))
    return actions


def _node(given: dict[str, str], sim_time: bool) -> Node:
    overrides = {name: given[name] for name in PARAMETERS if given[name]}
    return Node(
        package="lepard_ros",
        executable="lepard_node",
        name="lepard",
        output="screen",
        parameters=[str(preset_file(given["config"])), {**overrides, "use_sim_time": sim_time}],
        remappings=[(name, given[name]) for name in TOPICS if given[name] != name],
        arguments=["--ros-args", "--log-level", given["log_level"]],
    )


def _rviz(config: str, sim_time: bool) -> Node:
    return Node(
        package="rviz2",
        executable="rviz2",
        arguments=["-d", config],
        parameters=[{"use_sim_time": sim_time}],
        output="log",
    )
