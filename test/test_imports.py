# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The import rules of docs/architecture.md, checked on the syntax trees."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lepard_ros"
MODULES = sorted(PACKAGE.rglob("*.py"))
CORE = {"geometry", "cloud", "network", "registration", "encoded_cloud", "matcher"}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "geometry": set(),
    "cloud": {"geometry"},
    "network": {"geometry", "cloud"},
    "registration": {"geometry", "cloud"},
    "encoded_cloud": {"geometry", "cloud", "network", "registration"},
    "matcher": {"geometry", "cloud", "network", "registration", "encoded_cloud"},
    "tracking": CORE,
    "ros": CORE | {"tracking", "data"},
    "data": {"geometry", "cloud"},
    "synthesis": {"geometry", "cloud", "registration", "data"},
    "training": {"geometry", "cloud", "network", "registration", "data", "synthesis"},
    "evaluation": CORE | {"tracking", "data", "synthesis"},
    "report": CORE | {"tracking", "data", "synthesis", "evaluation"},
    "demo": CORE | {"tracking", "data", "synthesis", "evaluation", "report"},
    "commands": CORE | {"tracking", "data", "synthesis", "training", "evaluation", "report", "demo"},
    "cli": {"network"},  # allocator and threads only, which need no torch
    "__init__": {"matcher", "encoded_cloud", "registration"},
}
ALL = set(ALLOWED)
ROS_PACKAGES = {
    "rclpy",
    "rcl_interfaces",
    "ament_index_python",
    "tf2_ros",
    "launch",
    "launch_ros",
    "builtin_interfaces",
}
# The demo plays its bag into the real node over DDS and records what comes back; a replay writes the node's messages;
# `lepard bag play` plays a bag.
SPEAKS_DDS = {f"demo/{part}.py" for part in ("processes", "player", "recorder")} | {
    f"commands/{part}.py" for part in ("replay", "bag")
}


def imported(module: Path) -> Iterator[str]:
    """Absolute names of all modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: write absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_ros(name: str) -> bool:
    """Whether a module needs ROS 2: rclpy, its relatives, and every message package, our own messages too."""
    top = name.split(".")[0]
    return top in ROS_PACKAGES or top.endswith(("_msgs", "_srvs")) or name.startswith("lepard_ros.msg")


def breaches(room: str, names: Iterator[str], speaks_dds: bool) -> list[str]:
    """The imports that a room may not have."""
    found = []
    for name in names:
        own, _, rest = name.partition(".")
        other = rest.split(".")[0] if own == "lepard_ros" else ""
        if (
            other in ALL - {"errors"}
            and other != room
            and other not in ALLOWED[room]
            and not (other == "ros" and speaks_dds)
        ):
            found.append(name)
        if is_ros(name) and room != "ros" and not speaks_dds:
            found.append(name)
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_room_imports_only_what_it_may(module: Path) -> None:
    relative = module.relative_to(PACKAGE)
    room = relative.parts[0].removesuffix(".py")
    found = breaches(room, imported(module), relative.as_posix() in SPEAKS_DDS)
    assert not found, f"{room} may not import {', '.join(found)} (docs/architecture.md)"


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("cloud", "from lepard_ros.network import lepard"),
        ("network", "from lepard_ros import tracking"),
        ("tracking", "import rclpy"),
        ("evaluation", "from lepard_ros.ros.conversion import decode"),
        ("training", "from lepard_ros.msg import Correspondences"),
        ("matcher", "def f():\n    import sensor_msgs.msg"),
    ],
)
def test_the_rules_notice_a_breach(room: str, line: str, tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(line)
    assert breaches(room, imported(tmp_path / "module.py"), speaks_dds=False)


def test_no_rooms_import_each_other_in_a_circle() -> None:
    rooms: dict[str, set[str]] = {}
    for module in MODULES:
        room = module.relative_to(PACKAGE).parts[0].removesuffix(".py")
        others = (name.split(".")[1] for name in imported(module) if name.startswith("lepard_ros."))
        rooms.setdefault(room, set()).update(other for other in others if other in ALL and other != room)
    assert len(list(TopologicalSorter(rooms).static_order())) == len(rooms)  # a CycleError names the rooms
    with pytest.raises(CycleError):
        TopologicalSorter({**rooms, "geometry": {"matcher"}}).prepare()


def test_the_public_package_imports_without_heavy_modules() -> None:
    heavy = "{'torch', 'open3d', 'rclpy', 'scipy'}"
    code = f"import sys, lepard_ros, lepard_ros.cli; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_every_python_file_names_its_licence() -> None:
    files = [*MODULES, *Path(__file__).parent.glob("*.py")]
    first_lines = {path.name: path.read_text().partition("\n")[0] for path in files}
    assert [name for name, line in first_lines.items() if "SPDX-License-Identifier: Apache-2.0" not in line] == []


@pytest.mark.parametrize("module", sorted((PACKAGE / "ros").rglob("*.py")), ids=lambda path: path.stem)
def test_no_class_of_rclpy_is_subscripted_at_run_time(module: Path) -> None:
    """Parameter[Any], Publisher[Image]: generic since Kilted; on Jazzy such an annotation ends the import."""
    tree = ast.parse(module.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None]
    names = {alias.name for node in imports if node.module.split(".")[0] == "rclpy" for alias in node.names}
    bases = [node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
    assert not {base.id for base in bases if isinstance(base, ast.Name)} & names
