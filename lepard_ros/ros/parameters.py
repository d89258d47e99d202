# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The node's parameters: one table of names, defaults, ranges and descriptions, from which everything else is made."""

import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lepard_ros.cloud.ranges import FARTHEST, NEAREST
from lepard_ros.errors import InputError

DEFORMABLE_DELAY = 1  # clouds: matches are used as soon as they are there
FASTDDS_VARIABLES = ("FASTDDS_DEFAULT_PROFILES_FILE", "FASTRTPS_DEFAULT_PROFILES_FILE")
# Parameters that rclpy declares for every node.
_OF_EVERY_NODE = {"use_sim_time", "start_type_description_service"}


def _option(
    default: Any,
    description: str,
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    live: bool = False,
) -> Any:
    """A field of NodeSettings. low, high: inclusive range; live: may be changed while the node runs."""
    facts = {"description": description, "low": low, "high": high, "choices": choices, "live": live}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class NodeSettings:
    """Every parameter of the node, with its default."""

    # What the node does.
    autostart: bool = _option(True, "Configure and activate at startup; set to false if a lifecycle manager does it.")
    mode: str = _option("rigid", "What is tracked.", choices=("rigid", "deformable"))
    weights: str = _option("", "Name or path of the weights; empty: those of the mode.")
    grid: float = _option(
        0.0,
        "Spacing of the matched points [m]; 0: that of the weights; use a smaller one for a desk.",
        low=0.0,
        high=1.0,
    )
    device: str = _option("auto", "Where the network runs.", choices=("auto", "cpu", "cuda", "onnx"))
    threads: int = _option(0, "CPU threads of the network; 0: all cores but one.", low=0, high=256)
    fallback: str = _option(
        "none", "Classical method to try when all of Lepard's motions are refused.", choices=("none", "fpfh")
    )

    # What comes in.
    input: str = _option(
        "cloud", "cloud: topic points; depth: topics depth and camera_info.", choices=("cloud", "depth")
    )
    rectified: str = _option(
        "by_name",
        "Whether depth images are rectified; by_name: if the last part of their topic contains 'rect'.",
        choices=("by_name", "always", "never"),
    )
    qos: str = _option(
        "sensor_data",
        "QoS of the input; best_available adapts to the publisher.",
        choices=("sensor_data", "best_available", "reliable"),
    )
    min_range: float = _option(NEAREST, "Points nearer to the sensor are ignored [m].", low=0.0, high=100.0, live=True)
    max_range: float = _option(
        FARTHEST, "Points farther from the sensor are ignored [m].", low=0.1, high=1000.0, live=True
    )
    change_after: int = _option(
        5,
        "Consecutive clouds with another frame_id, or with a jump of the stamps, before the node relocalises.",
        low=1,
        high=1000,
        live=True,
    )
    reset_on_time_jump: bool = _option(
        False, "Start a new map when time jumps back, as when a bag restarts.", live=True
    )
    silence: float = _option(
        2.0, "The diagnostics warn after this time without input [s].", low=0.1, high=3600.0, live=True
    )

    # Frames, as in REP-105.
    map_frame: str = _option("map", "The parent frame of all poses.")
    base_frame: str = _option("", "If set, map -> this frame is published instead of map -> the cloud's frame.")
    odom_frame: str = _option("", "If set, map -> this frame is published; the robot's own odometry stays below it.")
    prediction: str = _option(
        "motion",
        "Initial guess for the next cloud: constant velocity, or the odometry of odom_frame.",
        choices=("motion", "odom"),
    )
    sensor_frame: str = _option(
        "", "The sensor's frame, if the clouds arrive in another one (base_link); TF transforms them."
    )
    upright: str = _option(
        "sensor",
        "Orientation of a new map without base_frame and odom_frame: that of the first cloud; z up for a level optical "
        "frame; or z up from gravity measured on the topic imu.",
        choices=("sensor", "optical", "imu"),
    )
    publish_tf: bool = _option(True, "Publish the transform; the odometry topic is always published.", live=True)
    tf_rate: float = _option(
        20.0,
        "Rate at which map -> odom_frame is repeated while the pose is known [Hz]; 0: once per cloud.",
        low=0.0,
        high=200.0,
    )
    extrapolation_rate: float = _option(
        0.0,
        "Rate of extrapolated transforms between two clouds [Hz], with constant velocity for at most one sensor "
        "period. 0: measured poses only. Not used with odom_frame, where the odometry does this.",
        low=0.0,
        high=200.0,
    )
    transform_tolerance: float = _option(
        0.2,
        "How far the repeated transform is future-dated, so that lookups succeed [s].",
        low=0.0,
        high=5.0,
        live=True,
    )
    tf_timeout: float = _option(0.2, "How long to wait for a missing transform [s].", low=0.0, high=10.0, live=True)

    # Keyframes and the map.
    mapping: bool = _option(True, "Add keyframes; false: only localise in the given map.", live=True)
    map_file: str = _option("", "Map to start from: a directory written by ~/save, or a PLY or PCD cloud.")
    map_directory: str = _option("~/.ros/lepard_maps", "Directory of saved maps; ~/save writes nowhere else.")
    map_name: str = _option("map", "Name that ~/save gives to the map inside map_directory.", live=True)
    max_keyframes: int = _option(1000, "Most keyframes held.", low=2, high=100_000)
    max_megabytes: float = _option(1024.0, "Maximum memory of the keyframes [MB].", low=16.0, high=1e6)
    keyframe_distance: float = _option(
        0.3, "Add a keyframe after this translation [m].", low=0.01, high=100.0, live=True
    )
    keyframe_degrees: float = _option(
        20.0, "Add a keyframe after this rotation [degrees].", low=1.0, high=180.0, live=True
    )
    keyframe_overlap: float = _option(
        0.6,
        "Add a keyframe if less than this share of the cloud overlaps the last one.",
        low=0.05,
        high=0.95,
        live=True,
    )
    candidates: int = _option(2, "Keyframes matched with each cloud.", low=1, high=32, live=True)
    max_speed: float = _option(2.0, "Maximum speed of the sensor [m/s].", low=0.01, high=100.0, live=True)
    max_turn: float = _option(
        180.0, "Maximum angular speed of the sensor [degrees/s].", low=1.0, high=3600.0, live=True
    )
    loop_closures: bool = _option(True, "Close loops: correct the keyframes when a place is seen again.")

    # Deformable mode: the object and its background.
    foreground: str = _option(
        "body",
        "body: remove large planes and track the part that fills most of the view; all: track the whole cloud.",
        choices=("body", "all"),
        live=True,
    )
    foreground_box: str = _option(
        "",
        "Region of interest in the sensor's frame: lowest and highest corner, six numbers [m]; empty: everything.",
        live=True,
    )
    min_plane_area: float = _option(
        1.0, "Planes at least this large are background: wall, floor, table top [m^2].", low=0.05, high=100.0, live=True
    )
    part_gap: float = _option(0.1, "Maximum gap between parts of the object [m].", low=0.03, high=1.0, live=True)
    match_delay: int = _option(
        DEFORMABLE_DELAY,
        "Least delay, in clouds, of the matches from the matching process; 0: each cloud waits for its own matches.",
        low=0,
        high=100,
    )

    # What goes out.
    map_spacing: float = _option(0.05, "Point spacing of ~/map [m].", low=0.005, high=10.0, live=True)
    map_period: float = _option(5.0, "Minimum time between two ~/map messages [s].", low=0.1, high=3600.0, live=True)
    marker_lines: int = _option(200, "Maximum number of matches drawn in ~/markers.", low=0, high=5000, live=True)


def settings_fields() -> dict[str, dataclasses.Field[Any]]:
    """The parameters by name."""
    return {one.name: one for one in dataclasses.fields(NodeSettings)}


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """An error message for an unknown name, with the most similar valid ones."""
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    hint = " or ".join(f"'{one}'" for one in near)
    return f"There is no {kind} '{name}'; " + (f"did you mean {hint}?" if near else f"choose from {', '.join(names)}.")


def check_value(name: str, value: Any) -> Any:
    """The value in the parameter's type; raises InputError for a wrong type, range or choice."""
    known = settings_fields()
    if name not in known:
        raise InputError(unknown_name("parameter", name, known))
    one = known[name]
    wanted: type = type(one.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise InputError(f"Parameter '{name}' must be a {_WORDS[wanted]}, not {value!r}.")
    low, high, choices = one.metadata["low"], one.metadata["high"], one.metadata["choices"]
    if low is not None and not low <= value <= high:
        raise InputError(f"Parameter '{name}' must be between {low} and {high}, not {value}.")
    if choices and value not in choices:
        raise InputError(f"Parameter '{name}': " + unknown_name("choice", str(value), choices))
    if name == "map_name" and (Path(str(value)).name != value or value in ("", ".", "..")):
        raise InputError(f"Parameter 'map_name' must be a plain name without a path, not {value!r}.")
    return value


_WORDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


def check_together(settings: NodeSettings) -> None:
    """Raise InputError for values that contradict each other."""
    if settings.min_range >= settings.max_range:
        raise InputError(
            f"min_range ({settings.min_range}) must be less than max_range ({settings.max_range}), or no point is left."
        )
    taken = [name for name in (settings.map_frame, settings.odom_frame, settings.base_frame) if name]
    if not settings.map_frame or len(set(taken)) != len(taken):
        raise InputError("map_frame must be set, and map_frame, odom_frame and base_frame must differ from each other.")
    parse_box(settings.foreground_box)
    if settings.prediction == "odom" and not settings.odom_frame:
        raise InputError("prediction is odom but odom_frame is empty; set odom_frame to the odometry's frame.")
    if not settings.mapping and not settings.map_file:
        raise InputError("mapping is false but map_file is empty; set map_file to the map to localise in.")


def parse_box(text: str) -> tuple[tuple[float, float, float], tuple[float, float, float]] | None:
    """The two corners of `foreground_box`, or None if it is empty; raises InputError if it is invalid."""
    if not text.strip():
        return None
    try:
        x, y, z, right, top, far = (float(part) for part in text.replace(",", " ").split())
    except ValueError:
        raise InputError(f"foreground_box must be six numbers, x y z of two corners, not {text!r}.") from None
    if not (x < right and y < top and z < far):
        raise InputError(f"foreground_box must give the minimum corner first, then the maximum, not {text!r}.")
    return (x, y, z), (right, top, far)


def declare_settings(node: Any) -> NodeSettings:
    """Declare every parameter on a node made with automatically_declare_parameters_from_overrides.

    Raises InputError for an unknown name or an invalid value.
    """
    known = settings_fields()
    given = {name: node.get_parameter(name).value for name in node.list_parameters([], 0).names}
    for name in given:
        if name not in known and name not in _OF_EVERY_NODE and not name.startswith("qos_overrides."):
            raise InputError(unknown_name("parameter", name, known))
    for name, one in known.items():
        value = check_value(name, given.get(name, one.default))
        if name in given:
            node.undeclare_parameter(name)
        node.declare_parameter(name, value, _descriptor(one), ignore_override=True)
    settings = read_settings(node)
    check_together(settings)
    return settings


def read_settings(node: Any) -> NodeSettings:
    """The current values of the declared parameters."""
    return NodeSettings(**{name: node.get_parameter(name).value for name in settings_fields()})


def check_change(settings: NodeSettings, changes: dict[str, Any]) -> None:
    """Raise InputError unless `settings` may be changed like this at runtime."""
    known = settings_fields()
    ours = {name: check_value(name, value) for name, value in changes.items() if name not in _OF_EVERY_NODE}
    for name in ours:
        if not known[name].metadata["live"]:
            raise InputError(f"Parameter '{name}' is read when the node starts; restart it with the new value.")
    check_together(dataclasses.replace(settings, **ours))


def _descriptor(one: dataclasses.Field[Any]) -> Any:
    """The ROS descriptor of a parameter."""
    from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor

    facts = one.metadata
    choices = f" One of: {', '.join(facts['choices'])}." if facts["choices"] else ""
    descriptor = ParameterDescriptor(description=facts["description"] + choices, read_only=not facts["live"])
    if facts["low"] is not None and isinstance(one.default, float):
        descriptor.floating_point_range = [FloatingPointRange(from_value=facts["low"], to_value=facts["high"])]
    elif facts["low"] is not None:
        descriptor.integer_range = [IntegerRange(from_value=facts["low"], to_value=facts["high"])]
    return descriptor


def share_directory() -> Path:
    """The directory of config/ and launch/: next to the source, or below share/ of the installation."""
    package = Path(__file__).resolve().parents[1]
    installed = [parent / "share" / "lepard_ros" for parent in (Path(sys.prefix), *package.parents)]
    for folder in (package.parent, *installed):
        if (folder / "config" / "rigid.yaml").is_file():
            return folder
    raise InputError("The configuration files of lepard_ros were not found; install the package again.")


def fastdds_profile() -> dict[str, str]:
    """The environment variable that lets Fast DDS carry large clouds; empty if the user has set a profile.

    With the default profile a publisher loses clouds of 300,000 points: they do not fit into its shared memory.
    """
    if any(os.environ.get(name) for name in FASTDDS_VARIABLES):
        return {}
    return {FASTDDS_VARIABLES[0]: str(share_directory() / "config" / "fastdds.xml")}


def use_fastdds_profile() -> None:
    """Enable large clouds from this process; call it before rclpy.init."""
    os.environ.update(fastdds_profile())


def preset_file(name: str) -> Path:
    """The YAML file of a preset, or the path itself if it is a file."""
    if Path(name).is_file():
        return Path(name)
    folder = share_directory() / "config"
    presets = sorted(path.stem for path in folder.glob("*.yaml"))
    if name not in presets:
        raise InputError(unknown_name("preset", name, presets))
    return folder / f"{name}.yaml"


def markdown_table() -> str:
    """The parameters as the table of docs/parameters.md."""
    lines = ["| name | default | range or choices | while running | meaning |", "|---|---|---|---|---|"]
    for name, one in settings_fields().items():
        facts = one.metadata
        span = f"{facts['low']:g} to {facts['high']:g}" if facts["low"] is not None else ""
        default = json.dumps(one.default)
        limits = ", ".join(facts["choices"]) or span
        live = "yes" if facts["live"] else "no"
        lines.append(f"| `{name}` | {default} | {limits} | {live} | {facts['description']} |")
    return "\n".join(lines) + "\n"
