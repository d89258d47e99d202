# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Helpers that a ROS installation brings and Python wheels lack: used where they can be imported."""

import functools
import importlib
from typing import Any


@functools.cache
def ros_library(name: str) -> Any:
    """The module (`tf_transformations`, `sensor_msgs_py.point_cloud2`), or None.

    Whatever its import raises counts as missing: Ubuntu's transforms3d below tf_transformations does not load with
    newer numpy, and a node must not fail for that.
    """
    try:
        return importlib.import_module(name)
    except Exception:
        return None
