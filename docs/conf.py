# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The documentation site: Markdown pages and API pages from the docstrings; `make docs` or rosdoc2 builds it."""

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any


def package_root() -> Path:
    """The folder of the package. rosdoc2 runs this file through a wrapper elsewhere, which names the original."""
    here = Path(__file__).resolve()
    original = re.search(r'exec\(open\("(.+?)"\)', here.read_text())
    return (Path(original[1]) if original else here).parent.parent


ROOT = package_root()
sys.path.insert(0, str(ROOT))

from lepard_ros import __version__  # noqa: E402

project = "lepard_ros"
author = "the lepard_ros authors"
copyright = "2026, the lepard_ros authors"
release = version = __version__

extensions = ["sphinx.ext.autodoc", "myst_parser"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"description": "Learned matching of point clouds for ROS 2", "page_width": "70em"}
html_extra_path = ["demo.html"]
myst_heading_anchors = 3
myst_enable_extensions = ["dollarmath"]
add_module_names = False
suppress_warnings = ["toc.not_readable"]
PACKAGE_PAGES = ("interfaces/*", "standard[s]")  # messages and standard documents, which only rosdoc2 writes

autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": True, "ignore-module-all": True}
autodoc_member_order = "bysource"
# The site can be built where ROS 2 and the packages of evaluations are not installed.
NEEDED = (
    *("rclpy", "rcl_interfaces", "ament_index_python", "builtin_interfaces", "diagnostic_msgs", "geometry_msgs"),
    *("lifecycle_msgs", "nav_msgs", "sensor_msgs", "std_msgs", "std_srvs", "tf2_msgs", "tf2_ros", "visualization_msgs"),
    *("rosbags", "evo", "matplotlib", "kiss_matcher", "kiss_icp", "pycpd", "open3d", "yaml", "distributed", "onnx"),
    "rosgraph_msgs",
)
rosdoc2_settings = {"enable_autodoc": False}  # it is on already, and rosdoc2 would replace the list below
autodoc_mock_imports = [name for name in NEEDED if importlib.util.find_spec(name) is None]

ROOMS = {
    "matcher": "Public API: Matcher, encoded clouds, errors",
    "geometry": "Geometry",
    "cloud": "Clouds",
    "network": "Network",
    "registration": "Registration",
    "tracking": "Tracking",
    "ros": "ROS 2 node",
    "data": "Data",
    "synthesis": "Synthesis",
    "training": "Training",
    "evaluation": "Evaluation",
    "report": "Reports",
    "demo": "Demonstrations",
    "commands": "Commands",
}


def modules_of(room: str) -> list[str]:
    """The modules of a room, by their full names."""
    if room == "matcher":
        return ["lepard_ros.matcher", "lepard_ros.encoded_cloud", "lepard_ros.errors"]
    paths = sorted((ROOT / "lepard_ros" / room).rglob("*.py"))
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__init__.py"]


def write_api_pages(app: Any) -> None:
    """One page for each room, which holds all its modules."""
    for room, title in ROOMS.items():
        lines = [title, "=" * len(title), ""]
        for module in modules_of(room):
            lines += [module, "-" * len(module), "", f".. automodule:: {module}", ""]
        path = Path(app.srcdir) / "api" / f"{room}.rst"
        text = "\n".join(lines)
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)


def without_absent_pages(app: Any, document: str, source: list[str]) -> None:
    """Leave out of the index what does not exist: Sphinx warns about a pattern that matches nothing."""
    for pattern in PACKAGE_PAGES if document == "index" else ():
        if not any(Path(app.srcdir).glob(f"{pattern}.*")):
            source[0] = source[0].replace(f"   {pattern}\n", "")


def docstring_as_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Our docstrings are plain text with `names` in backticks: other marks of reStructuredText are escaped."""
    in_example, text = False, []
    for line in lines:
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        text.append(line if in_example else _escaped(line.strip()))
    lines[:] = text


def _escaped(line: str) -> str:
    parts = re.split(r"(`[^`]+`)", line)
    plain = (re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part) for part in parts[::2])
    named = (f"`{part}`" if part else "" for part in [*parts[1::2], ""])
    joined = "".join(one for pair in zip(plain, named, strict=True) for one in pair)
    return re.sub(r"(``[^`]+``)(?=\w)", r"\1\\ ", re.sub(r"(?<=\w)(``[^`]+``)", r"\\ \1", joined)).replace(
        "-- ", r"\-- "
    )


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_api_pages)
    app.connect("source-read", without_absent_pages)
    app.connect("autodoc-process-docstring", docstring_as_text)
