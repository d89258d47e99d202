# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The launch files: their text against the parameters everywhere, and the real `launch` wherever it is installed."""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "launch").glob("*.launch.py"))


def constant(path: Path, name: str) -> dict[str, object]:
    """The value of a dictionary at the top of a launch file, read without running it."""
    for node in ast.parse(path.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return ast.literal_eval(node.value)  # type: ignore[union-attr]
    raise AssertionError(f"{path.name} has no {name}")


def test_launch_arguments_are_parameters_of_the_node() -> None:
    from lepard_ros.ros.parameters import settings_fields

    assert {"mode", "mapping", "map_file"} <= set(constant(ROOT / "launch" / "lepard.launch.py", "PARAMETERS"))
    assert {"namespace", "log_level"} <= set(constant(ROOT / "launch" / "lepard.launch.py", "OTHERS"))
    assert set(constant(ROOT / "launch" / "lepard.launch.py", "PARAMETERS")) <= set(settings_fields())


def test_replay_hands_on_only_what_the_other_file_knows() -> None:
    main = ROOT / "launch" / "lepard.launch.py"
    known = {name for table in ("PARAMETERS", "TOPICS", "OTHERS") for name in constant(main, table)}
    assert set(constant(ROOT / "launch" / "replay.launch.py", "ARGUMENTS")) <= known


def test_the_rviz_file_shows_topics_that_the_node_publishes() -> None:
    import yaml

    displays = yaml.safe_load((ROOT / "config" / "lepard.rviz").read_text())["Visualization Manager"]["Displays"]
    topics = {display["Topic"]["Value"] for display in displays if "Topic" in display}
    rigid = {"points", "/lepard/map", "/lepard/markers", "/lepard/path", "/lepard/odometry"}
    assert rigid | {"/lepard/warped_points", "/lepard/model"} == topics


def test_the_foxglove_layout_shows_the_same_topics_and_fields_that_exist() -> None:
    import json

    layout = json.loads((ROOT / "config" / "foxglove.json").read_text())
    panels = layout["configById"]
    rigid = {"/points", "/lepard/map", "/lepard/markers", "/lepard/path", "/lepard/odometry", "/lepard/pose"}
    assert set(panels["3D!lepard"]["topics"]) == rigid | {"/lepard/warped_points", "/lepard/model"}
    assert all(f'"{name}"' in json.dumps(layout["layout"]) for name in panels), "every panel has a place"
    message = (ROOT / "msg" / "TrackingStatus.msg").read_text()
    for panel in panels.values():
        for path in panel.get("paths", []):
            topic, field = path["value"].rsplit(".", 1)
            assert topic == "/lepard/status"
            assert f" {field}\n" in message


def test_rviz_gets_the_topics_and_the_frame_of_the_node() -> None:
    import yaml

    from lepard_ros.ros.rviz import rviz_config

    manager = yaml.safe_load(rviz_config("/camera/points", "robot", "world"))["Visualization Manager"]
    topics = {display["Topic"]["Value"] for display in manager["Displays"] if "Topic" in display}
    assert {"/camera/points", "/robot/lepard/map", "/robot/lepard/warped_points"} <= topics
    assert all(topic.startswith(("/robot/", "/camera/")) for topic in topics)
    assert manager["Global Options"]["Fixed Frame"] == "world"
    plain = yaml.safe_load(rviz_config("points"))["Visualization Manager"]
    assert {display["Topic"]["Value"] for display in plain["Displays"] if "Topic" in display} >= {
        "/points",
        "/lepard/map",
    }
    live = next(display for display in plain["Displays"] if display["Name"] == "Live cloud")
    assert live["Topic"]["Depth"] >= 5, "a queue of one drops clouds at 30 Hz"


def started(monkeypatch: pytest.MonkeyPatch, **arguments: str) -> list[object]:
    """The actions that lepard.launch.py makes of its arguments."""
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    from launch.actions import DeclareLaunchArgument, OpaqueFunction

    from launch import LaunchContext

    context = LaunchContext()
    entities = load(ROOT / "launch" / "lepard.launch.py").generate_launch_description().entities
    context.launch_configurations.update(arguments)
    for entity in entities:
        if isinstance(entity, DeclareLaunchArgument):
            entity.execute(context)
    (start,) = (entity for entity in entities if isinstance(entity, OpaqueFunction))
    return list(start.execute(context) or [])


def test_launch_keeps_the_users_fastdds_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTDDS_DEFAULT_PROFILES_FILE", raising=False)
    assert "SetEnvironmentVariable" in [type(action).__name__ for action in started(monkeypatch)]
    monkeypatch.setenv("FASTDDS_DEFAULT_PROFILES_FILE", "/home/me/mine.xml")
    assert "SetEnvironmentVariable" not in [type(action).__name__ for action in started(monkeypatch)]


@pytest.mark.parametrize(("namespace", "logger"), [("", "lepard"), ("robot", "robot.lepard"), ("/a/b/", "a.b.lepard")])
def test_the_log_level_is_that_of_the_node_alone(namespace: str, logger: str) -> None:
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    assert load(ROOT / "launch" / "lepard.launch.py")._logger(namespace) == logger


def test_launch_without_rviz_goes_on_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = [type(action).__name__ for action in started(monkeypatch, rviz="true")]
    if "LogInfo" not in actions:
        pytest.skip("rviz2 is installed here")
    assert actions.count("Node") == 1


def test_a_bag_is_played_by_rosbag2_or_by_our_own_player(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one, by what is installed; both tell the time and play at the rate."""
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    from launch.utilities import perform_substitutions

    from launch import LaunchContext

    for installed in (True, False):
        module = load(ROOT / "launch" / "lepard.launch.py")
        monkeypatch.setattr(module, "_installed", lambda package, here=installed: here)
        given = {"bag": "room_bag", "rate": "2.0", "namespace": "/robot"}
        action = module._player(given)
        command = [perform_substitutions(LaunchContext(), part) for part in action.cmd[0 if installed else 1 :]]
        expected = ["bag", "play", "room_bag", "--clock", "--rate", "2.0"]
        if installed:
            assert command == ["ros2", *expected]
        else:
            assert type(action).__name__ == "Node"
            assert command[:8] == [*expected, "--wait-for", "robot/lepard"]


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem.replace(".", "_"), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_real_launch_accepts_the_file(path: Path) -> None:
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    from launch.actions import DeclareLaunchArgument

    description = load(path).generate_launch_description()
    arguments = {entity.name for entity in description.entities if isinstance(entity, DeclareLaunchArgument)}
    assert {"config", "points", "rviz", "bag"} <= arguments


@pytest.mark.slow
def test_the_real_launch_runs_the_node() -> None:
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    from launch.actions import IncludeLaunchDescription, TimerAction
    from launch.events import Shutdown
    from launch.launch_description_sources import PythonLaunchDescriptionSource

    from launch import LaunchDescription, LaunchService
    from node_harness import untrained_weights

    config = untrained_weights().parent / "launch_test.yaml"
    config.write_text(f"/**:\n  ros__parameters:\n    weights: {untrained_weights()}\n")
    source = PythonLaunchDescriptionSource(str(ROOT / "launch" / "lepard.launch.py"))
    service = LaunchService()
    service.include_launch_description(
        LaunchDescription(
            [
                IncludeLaunchDescription(source, launch_arguments={"config": str(config)}.items()),
                TimerAction(period=20.0, actions=[_shutdown(Shutdown)]),
            ]
        )
    )
    assert service.run() == 0
    assert os.environ["FASTDDS_DEFAULT_PROFILES_FILE"].endswith("fastdds.xml")


@pytest.mark.slow
def test_launch_testing_sees_the_node_track_and_end_cleanly() -> None:
    """By its own runner, since its plugin for pytest does not know pytest 9."""
    pytest.importorskip("launch_testing", reason="launch_testing is not installed here")
    pytest.importorskip("launch_ros", reason="launch and launch_ros are not installed here")
    prefixes = os.pathsep.join(filter(None, [os.environ.get("AMENT_PREFIX_PATH"), sys.prefix]))
    command = [sys.executable, "-m", "launch_testing.launch_test", str(ROOT / "test/launch/robot_launch.py")]
    result = subprocess.run(
        command, env={**os.environ, "AMENT_PREFIX_PATH": prefixes}, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def _shutdown(event: type) -> object:
    from launch.actions import EmitEvent

    return EmitEvent(event=event(reason="the test is over"))
