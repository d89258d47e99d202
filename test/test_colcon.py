# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The other way in: colcon builds the package against the ROS 2 of this environment, and the installed node runs."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import REPOSITORY
from test_packaging import copy_sources

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which the package was built with colcon."""
    if shutil.which("colcon") is None or importlib.util.find_spec("rosidl_adapter") is None:
        pytest.skip("colcon or the message generators of ROS 2 are not installed")
    folder = tmp_path_factory.mktemp("workspace")
    copy_sources(folder / "src" / "lepard_ros")
    prefixes = os.pathsep.join(filter(None, [os.environ.get("AMENT_PREFIX_PATH"), sys.prefix]))
    cmake = REPOSITORY / "cmake" / "wheels.cmake"
    for part in ("test", "docs"):  # as a clone has them; some tests read the pages
        shutil.copytree(REPOSITORY / part, folder / "src" / "lepard_ros" / part, dirs_exist_ok=True)
    options = [f"-DPython3_EXECUTABLE={sys.executable}", f"-DCMAKE_PROJECT_INCLUDE={cmake}", "-DBUILD_TESTING=ON"]
    result = subprocess.run(
        ["colcon", "build", "--event-handlers", "console_direct+", "--cmake-args", *options],
        cwd=folder,
        env={**os.environ, "AMENT_PREFIX_PATH": prefixes, "CMAKE_PREFIX_PATH": prefixes},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return folder


def test_colcon_test_runs_the_tests_and_sees_their_results(workspace: Path) -> None:
    prefixes = os.pathsep.join(filter(None, [os.environ.get("AMENT_PREFIX_PATH"), sys.prefix]))
    surroundings = {**environment(), "AMENT_PREFIX_PATH": prefixes, "CMAKE_PREFIX_PATH": prefixes}
    some = "^test_(parameters|launch|compat)$"
    run = ["colcon", "test", "--return-code-on-test-failure", "--ctest-args", "-R", some]
    result = subprocess.run(run, cwd=workspace, env=surroundings, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    summary = subprocess.run(["colcon", "test-result"], cwd=workspace, capture_output=True, text=True, check=True)
    found = re.search(r"Summary: (\d+) tests, 0 errors, 0 failures", summary.stdout)
    assert found, summary.stdout
    assert int(found.group(1)) >= 30


def in_workspace(workspace: Path, command: str) -> list[str]:
    """A command in a shell that has sourced the workspace."""
    return ["bash", "-c", f". {workspace}/install/local_setup.bash && {command}"]


def environment() -> dict[str, str]:
    """Without the source tree on the path, so that the installed package is what runs."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_installed_package_is_complete(workspace: Path) -> None:
    code = "import lepard_ros.msg, lepard_ros.cli; print(lepard_ros.cli.__file__); print(lepard_ros.msg.__file__)"
    command = in_workspace(workspace, f'{sys.executable} -c "{code}"')
    result = subprocess.run(command, env=environment(), cwd=workspace, capture_output=True, text=True, check=True)
    assert all(line.startswith(str(workspace / "install")) for line in result.stdout.split())
    share = workspace / "install" / "lepard_ros" / "share" / "lepard_ros"
    for folder in ("launch", "config"):
        names = [path.name for path in (REPOSITORY / folder).iterdir() if path.name != "__pycache__"]
        assert all((share / folder / name).is_file() for name in names)


def test_the_installed_command_runs(workspace: Path) -> None:
    command = in_workspace(workspace, "exec lepard --version")  # on the PATH, since the workspace is sourced
    result = subprocess.run(command, env=environment(), cwd=workspace, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("lepard_ros ")


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_the_installed_node_runs_and_ends_cleanly(workspace: Path, stop: signal.Signals) -> None:
    rclpy = pytest.importorskip("rclpy")
    name = f"lepard_{stop.name.lower()}"  # a node that an earlier test killed stays in the graph for 20 s as "lepard"
    node = f"exec install/lepard_ros/lib/lepard_ros/lepard_node --ros-args -p autostart:=false -r __node:={name}"
    process = subprocess.Popen(in_workspace(workspace, node), env=environment(), cwd=workspace)
    context = rclpy.Context()
    rclpy.init(context=context)
    watcher = rclpy.create_node("colcon_test_watcher", context=context)
    try:
        deadline = time.monotonic() + 60
        while name not in watcher.get_node_names() and time.monotonic() < deadline:
            assert process.poll() is None, f"the node ended with code {process.returncode}"
            time.sleep(0.2)
        assert name in watcher.get_node_names()
        process.send_signal(stop)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        watcher.destroy_node()
        rclpy.shutdown(context=context)
