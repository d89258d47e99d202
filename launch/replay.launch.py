# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A bag played into the node, with RViz.

ros2 launch lepard_ros replay.launch.py bag:=recording points:=/camera/depth/points
"""

from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration

from launch import LaunchDescription
from lepard_ros.ros.parameters import share_directory

# Handed on to lepard.launch.py: name -> default and description; None must be given.
ARGUMENTS: dict[str, tuple[str | None, str]] = {
    "bag": (None, "the bag to play"),
    "config": ("rigid", "preset: a file of config/ without .yaml, or the path of a YAML file"),
    "points": ("/camera/depth/points", "cloud topic in the bag"),
    "namespace": ("", "namespace of the node and its relative topics"),
    "rate": ("1.0", "speed of the bag"),
    "rviz": ("true", "open RViz"),
}


def generate_launch_description() -> LaunchDescription:
    """Include lepard.launch.py with a bag."""
    declared = [
        DeclareLaunchArgument(name, description=text, **({} if default is None else {"default_value": default}))
        for name, (default, text) in ARGUMENTS.items()
    ]
    source = PythonLaunchDescriptionSource(str(share_directory() / "launch" / "lepard.launch.py"))
    handed_on = {name: LaunchConfiguration(name) for name in ARGUMENTS}
    return LaunchDescription([*declared, IncludeLaunchDescription(source, launch_arguments=handed_on.items())])
