# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Installs the Python package, and builds its messages where ROS 2 and a compiler are at hand.

`pip install .` gives the core, `pip install ".[ros]"` the node as well. In a ROS workspace colcon builds the package by
CMakeLists.txt and does not read this file. Ranges are given here; requirements.lock pins.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, find_packages, setup
from setuptools.command.build import build
from setuptools.dist import Distribution

ROOT = Path(__file__).resolve().parent
X86_LINUX = "platform_machine == 'x86_64' and sys_platform == 'linux'"

CORE = [
    "numpy>=1.26",
    "scipy>=1.11",
    "torch>=2.1",
    "safetensors>=0.4",
    "tqdm>=4.60",
    "Pillow>=9",
    f"open3d-cpu>=0.18; {X86_LINUX}",
    "open3d>=0.18; platform_machine != 'x86_64' or sys_platform != 'linux'",
    "libusb-package>=1.0.26; sys_platform == 'linux'",
    # Tracking at the sensor's rate; where there is no wheel our own slower ICP does the work.
    f"small_gicp>=1.0; {X86_LINUX}",
]
ROS = [
    "ros-kilted-rclpy[fastrtps]",
    "ros-kilted-diagnostic-msgs",
    "ros-kilted-geometry-msgs",
    "ros-kilted-lifecycle-msgs",
    "ros-kilted-nav-msgs",
    "ros-kilted-sensor-msgs",
    "ros-kilted-std-msgs",
    "ros-kilted-std-srvs",
    "ros-kilted-visualization-msgs",
    "PyYAML>=6",
]
EVALUATION = ["rosbags>=0.10", "evo>=1.28", "matplotlib>=3.7", "kiss-matcher>=1.0", "kiss-icp>=1.2", "pycpd>=2.0"]
TRAINING = ["matplotlib>=3.7"]
CLUSTER = ["distributed>=2024.1"]
DOCS = ["sphinx>=7", "myst-parser>=2"]
ONNX = ["onnx>=1.16", "onnxruntime>=1.18", "onnxscript>=0.1"]
TEST = [
    "pytest>=8",
    "pytest-cov>=5",
    "pytest-xdist>=3",
    "hypothesis>=6.100",
    "ruff>=0.6",
    "mypy>=1.11",
    "colcon-common-extensions>=0.3",
    "transforms3d>=0.4",
    f"atheris>=2.3; {X86_LINUX}",
]


class LepardDistribution(Distribution):
    """Says that the wheel belongs to one platform when it holds compiled messages."""

    def has_ext_modules(self) -> bool:
        return can_build_messages() or super().has_ext_modules()

    def has_data(self) -> bool:
        """The name by which an editable install asks for data files (setuptools says has_data_files elsewhere)."""
        return bool(self.has_data_files())


class BuildMessages(Command):
    """Generates and compiles the messages with CMake, and hands all that it installs to the wheel as data files."""

    description = "build the ROS 2 messages"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_temp: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_temp", "build_temp"))

    def run(self) -> None:
        if not can_build_messages():
            return
        work = Path(self.build_temp or "build").resolve() / "messages"
        stage = work / "stage"
        shutil.rmtree(stage, ignore_errors=True)
        if not has_real_tf2_msgs():
            run_cmake(ROOT / "cmake" / "tf2_msgs", work / "tf2_msgs", stage)
        run_cmake(ROOT, work / "lepard_ros", stage)
        write_executables(stage)
        # In place: the command that installs data files may hold the list already.
        self.distribution.data_files[:] = data_files(Path(f"{stage}{sys.prefix}"))

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them.


def ros_prefixes() -> list[str]:
    """Folders of ROS 2 installations: those of a sourced workspace, and the Python environments of sys.path."""
    sourced = [entry for entry in os.environ.get("AMENT_PREFIX_PATH", "").split(os.pathsep) if entry]
    environments = [str(Path(entry).parents[2]) for entry in sys.path if Path(entry).name.endswith("-packages")]
    found = dict.fromkeys(sourced + environments)
    return [prefix for prefix in found if (Path(prefix) / "share" / "ament_index").is_dir()]


def can_build_messages() -> bool:
    """Whether the generators of ROS 2, CMake and a C++ compiler are here; without them only the core is installed."""
    generators = any((Path(prefix) / "share" / "rosidl_default_generators").is_dir() for prefix in ros_prefixes())
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    return bool(generators and compiler and shutil.which("cmake"))


def has_real_tf2_msgs() -> bool:
    """Whether ROS 2 brings tf2_msgs; ours, from an earlier installation, is built again."""
    manifests = [Path(prefix) / "share" / "tf2_msgs" / "package.xml" for prefix in ros_prefixes()]
    return any("generated for Python environments" not in path.read_text() for path in manifests if path.is_file())


def run_cmake(source: Path, work: Path, stage: Path) -> None:
    """Build one CMake project and install it below the stage, under the path of this environment.

    The environment is the prefix (and DESTDIR the stage) since CMake refuses one that lies inside the source folder
    unless it installs there. An old cache may name an environment that is gone.
    """
    shutil.rmtree(work, ignore_errors=True)
    prefixes = ros_prefixes()
    environment = {
        **os.environ,
        "AMENT_PREFIX_PATH": os.pathsep.join([*prefixes, f"{stage}{sys.prefix}"]),
        "CMAKE_PREFIX_PATH": os.pathsep.join([*prefixes, f"{stage}{sys.prefix}"]),
    }
    options = [
        f"-DCMAKE_INSTALL_PREFIX={sys.prefix}",
        f"-DCMAKE_PROJECT_INCLUDE={ROOT / 'cmake' / 'wheels.cmake'}",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DCMAKE_BUILD_TYPE=Release",
        "-DBUILD_TESTING=OFF",
        "-DLEPARD_INSTALL_PYTHON=OFF",
    ]
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    subprocess.run(["cmake", *generator, "-S", str(source), "-B", str(work), *options], env=environment, check=True)
    subprocess.run(["cmake", "--build", str(work), "--parallel"], env=environment, check=True)
    subprocess.run(["cmake", "--install", str(work)], env={**environment, "DESTDIR": str(stage)}, check=True)


def write_executables(stage: Path) -> None:
    """What `ros2 run` and launch files start; the commands of the environment, wherever it is moved to."""
    folder = Path(f"{stage}{sys.prefix}") / "lib" / "lepard_ros"
    folder.mkdir(parents=True)
    for name in ("lepard", "lepard_node"):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "$(dirname "$0")/../../bin/{name}" "$@"\n')
        script.chmod(0o755)


def data_files(prefix: Path) -> list[tuple[str, list[str]]]:
    """All staged files with their folders below the prefix.

    Left out: C sources, metadata of pseudo-packages, and the generated, empty lepard_ros/__init__.py, which would stand
    in the way of ours.
    """
    unwanted = re.compile(r"\.c$|\.egg-info/|-packages/lepard_ros/__init__\.py$")
    folders: dict[str, list[str]] = {}
    for path in sorted(prefix.rglob("*")):
        relative = path.relative_to(prefix)
        if path.is_file() and not unwanted.search(relative.as_posix()):
            folders.setdefault(str(relative.parent), []).append(str(path))
    return list(folders.items())


class BuildWithMessages(build):
    """The usual build, then the messages."""

    sub_commands: ClassVar = [*build.sub_commands, ("build_messages", None)]


def version() -> str:
    """The one version of the package, from its __init__.py."""
    text = (ROOT / "lepard_ros" / "__init__.py").read_text()
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match, "lepard_ros/__init__.py must hold __version__"
    return match.group(1)


setup(
    name="lepard_ros",
    version=version(),
    description="Learned matching of partial point clouds (Lepard, CVPR 2022), rigid and deformable, for ROS 2",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    packages=find_packages(include=["lepard_ros", "lepard_ros.*"]),
    # Named so that an editable install is a plain path: the messages lie in another folder of the same package.
    package_dir={"": "."},
    package_data={"lepard_ros": ["weights/*.safetensors", "weights/*.json", "py.typed"]},
    data_files=[],  # Filled by BuildMessages.
    install_requires=CORE,
    extras_require={
        "ros": ROS,
        "eval": EVALUATION,
        "train": TRAINING,
        "cluster": CLUSTER,
        "onnx": ONNX,
        "docs": DOCS,
        "test": [*TEST, *EVALUATION, *TRAINING, *CLUSTER, *ONNX],
    },
    entry_points={"console_scripts": ["lepard = lepard_ros.cli:main", "lepard_node = lepard_ros.ros.main:main"]},
    distclass=LepardDistribution,
    cmdclass={"build": BuildWithMessages, "build_messages": BuildMessages},
)
