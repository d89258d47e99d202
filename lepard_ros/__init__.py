# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Learned matching of partial point clouds, rigid and deformable, for ROS 2.

The public API is `Matcher`; everything below `lepard_ros.ros` needs ROS 2, nothing else does.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

# The generated messages (`lepard_ros.msg`) are installed elsewhere than this source tree.
__path__ = pkgutil.extend_path(__path__, __name__)

__version__ = "0.1.0"
__all__ = ["EncodedCloud", "Matcher", "Matches", "Registration", "Status", "__version__"]

if TYPE_CHECKING:
    from lepard_ros.encoded_cloud import EncodedCloud
    from lepard_ros.matcher import Matcher
    from lepard_ros.registration.types import Matches, Registration, Status

_HOMES = {
    "EncodedCloud": "lepard_ros.encoded_cloud",
    "Matcher": "lepard_ros.matcher",
    "Matches": "lepard_ros.registration.types",
    "Registration": "lepard_ros.registration.types",
    "Status": "lepard_ros.registration.types",
}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, so that `import lepard_ros` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lepard_ros' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
