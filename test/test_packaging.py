# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What is shipped: one version everywhere, all dependencies named, wheels with and without ROS, preflight sentences."""

import ast
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import pytest

import lepard_ros
from conftest import REPOSITORY

PACKAGE_XML = ElementTree.parse(REPOSITORY / "package.xml").getroot()
FOLDERS = ("lepard_ros", "msg", "cmake", "launch", "config")
FILES = ("CMakeLists.txt", "package.xml", "setup.py", "pyproject.toml", "README.md", "MANIFEST.in")


def copy_sources(target: Path) -> Path:
    """The files that a build reads, without the environment beside them."""
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPOSITORY / name, target / name)
    return target


def requirement_name(line: str) -> str:
    """The normalised name at the start of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[;<>=!~]", line.strip())[0]).lower()


def pinned_names() -> dict[str, str]:
    """Name -> whole line of the lock file."""
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    return {requirement_name(line): line for line in lines if line and not line.startswith("#")}


# ---- one truth ----


def test_one_version() -> None:
    assert PACKAGE_XML.findtext("version") == lepard_ros.__version__
    assert f"\n{lepard_ros.__version__} (" in (REPOSITORY / "CHANGELOG.rst").read_text()


def test_cmake_builds_every_message_and_every_field_is_explained() -> None:
    cmake = (REPOSITORY / "CMakeLists.txt").read_text()
    for path in (REPOSITORY / "msg").glob("*.msg"):
        assert f"msg/{path.name}" in cmake
        explained = False
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if line.startswith("#"):
                explained = True
            elif not line.strip():
                explained = False
            else:
                assert explained, f"{path.name}:{number}: no comment above {line!r}"


def imported_ros_packages() -> set[str]:
    """Packages with messages, and rclpy's relatives, that the ROS side imports."""
    names = set()
    for path in (REPOSITORY / "lepard_ros" / "ros").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names |= {module.split(".")[0] for module in modules}
    return {name for name in names if name.endswith(("_msgs", "_srvs", "_interfaces")) or name in ("rclpy", "tf2_ros")}


def test_package_xml_names_every_ros_package_that_is_imported() -> None:
    named = {element.text for element in PACKAGE_XML if element.tag.endswith("depend")}
    keys = {"tf2_ros": "tf2_ros_py"}
    missing = {keys.get(name, name) for name in imported_ros_packages()} - named
    assert not missing


def test_lock_pins_everything_that_setup_asks_for() -> None:
    pinned = pinned_names()
    assert pinned["torch"] == "torch==2.13.0"
    tree = ast.parse((REPOSITORY / "setup.py").read_text())
    lists = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}  # type: ignore[attr-defined]
    asked = {
        requirement_name(ast.unparse(element).strip("f\"'"))
        for name in ("CORE", "ROS", "EVALUATION", "TRAINING", "CLUSTER", "ONNX", "TEST")
        for element in lists[name].elts  # type: ignore[attr-defined]
    }
    assert not asked - set(pinned) - {"open3d"}  # open3d is for other machines than the lock's.
    assert all("==" in line for line in pinned.values())


def test_fastdds_profile_gives_room_for_large_clouds() -> None:
    space = {"dds": "http://www.eprosima.com"}
    profile = ElementTree.parse(REPOSITORY / "config" / "fastdds.xml").getroot()
    segment = profile.findtext(".//dds:segment_size", namespaces=space)
    assert segment is not None
    assert int(segment) >= 64 * 2**20


# ---- wheels ----


def build_wheel(source: Path, environment: dict[str, str]) -> zipfile.ZipFile:
    """Build the wheel of a source folder with the packages of this environment."""
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('dist'))"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    (wheel,) = (source / "dist").glob("*.whl")
    return zipfile.ZipFile(wheel)


def test_without_ros_the_wheel_is_the_core_alone(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "source")
    wheel = build_wheel(source, {**os.environ, "PATH": "/nonexistent"})  # Neither CMake nor a compiler.
    names = wheel.namelist()
    assert Path(wheel.filename or "").name.endswith("-py3-none-any.whl")
    assert "lepard_ros/cli.py" in names
    assert not [name for name in names if name.endswith(".so") or name.startswith(("test/", "bench/", "tools/"))]
    weights = [path.name for path in (REPOSITORY / "lepard_ros" / "weights").glob("*.safetensors")]
    assert all(f"lepard_ros/weights/{name}" in names for name in weights)


@pytest.mark.slow
def test_with_ros_the_wheel_is_a_whole_ament_package(tmp_path: Path) -> None:
    pytest.importorskip("rosidl_adapter", reason="the message generators of ROS 2 are not installed")
    wheel = build_wheel(copy_sources(tmp_path / "source"), dict(os.environ))
    names = {name.split(".data/data/")[-1] for name in wheel.namelist()}
    for wanted in (
        "share/lepard_ros/package.xml",
        "share/lepard_ros/msg/Correspondences.msg",
        "share/lepard_ros/config/fastdds.xml",
        "share/ament_index/resource_index/packages/lepard_ros",
        "lib/lepard_ros/lepard_node",
        "lib/liblepard_ros__rosidl_typesupport_introspection_c.so",
    ):
        assert wanted in names
    python = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    assert f"{python}/lepard_ros/msg/_correspondences.py" in names
    assert f"{python}/lepard_ros/__init__.py" not in names  # It would hide ours.
    assert not [name for name in names if name.endswith(".c")]


# ---- preflight ----


def preflight(folder: Path, tools: tuple[str, ...], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run tools/preflight.sh where only the given tools can be found."""
    folder.mkdir(exist_ok=True)
    for tool in ("sh", "awk", "df", "uname", *tools):
        path = sys.executable if tool == "python3" else shutil.which(tool)
        if path and not (folder / tool).exists():
            (folder / tool).symlink_to(path)
    environment = {"PATH": str(folder), "HOME": str(folder), **variables}
    command = [shutil.which("sh") or "/bin/sh", str(REPOSITORY / "tools" / "preflight.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)


def test_preflight_passes_here(tmp_path: Path) -> None:
    result = preflight(tmp_path / "bin", ("python3", "g++"), LEPARD_DISK_GB="0")
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "python3", "")


@pytest.mark.parametrize(
    ("tools", "variables", "sentence"),
    [
        (("g++",), {}, "Python 3.10, 3.11 or 3.12 is needed and no Python was found: install"),
        (("python3",), {}, "C++ compiler is needed to build the messages: apt install g++"),
        (("python3", "g++"), {"LEPARD_DISK_GB": "99999999"}, "GB of free disk space are needed and"),
        (("python3", "g++"), {"PYTHON": "old_python"}, "is needed and Python 3.9.1 was found"),
    ],
)
def test_preflight_says_what_is_missing(tmp_path: Path, tools, variables, sentence) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    old = folder / "old_python"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.9.1" && exit 0\nexit 1\n')
    old.chmod(0o755)
    result = preflight(folder, tools, **variables)
    assert result.returncode == 1
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
