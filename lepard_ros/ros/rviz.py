# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The RViz configuration for a running node: the file of config/ with the node's actual topics and frame."""

from typing import Any

import yaml

from lepard_ros.ros.parameters import share_directory

NODE = "/lepard/"  # as in the file of config/: the node without a namespace


def rviz_config(points: str = "points", namespace: str = "", fixed_frame: str = "map") -> str:
    """The text of an RViz configuration. points: the cloud topic, relative to the namespace unless it starts with /."""
    config = yaml.safe_load((share_directory() / "config" / "lepard.rviz").read_text())
    manager = config["Visualization Manager"]
    manager["Global Options"]["Fixed Frame"] = fixed_frame
    for part in [*manager["Displays"], *manager["Tools"]]:
        if "Topic" in part:
            part["Topic"]["Value"] = _resolved(str(part["Topic"]["Value"]), points, namespace)
    return _dump(config)


def _resolved(topic: str, points: str, namespace: str) -> str:
    """The absolute name of a topic of the file for a node in a namespace."""
    root = "/" + namespace.strip("/") if namespace.strip("/") else ""
    if topic.startswith(NODE):
        return root + topic
    name = points if topic == "points" else topic
    return name if name.startswith("/") else f"{root}/{name}"


def _dump(config: dict[str, Any]) -> str:
    return str(yaml.safe_dump(config, sort_keys=False))
