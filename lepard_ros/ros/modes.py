# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The interface of a mode, which turns one cloud into messages. The node does not depend on a specific mode."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.msg import TrackingStatus
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.parameters import NodeSettings

# Outputs are small or rare, so they are reliable; lasting state is latched for late subscribers.
EVERY_FRAME = QoSProfile(depth=10, reliability=ReliabilityPolicy.RELIABLE)
LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE, durability=DurabilityPolicy.TRANSIENT_LOCAL)
TF = "tf"


class Topic(NamedTuple):
    """A topic that a mode publishes."""

    kind: Any
    qos: QoSProfile = EVERY_FRAME


class Placement(NamedTuple):
    """A transform for TF: `matrix` (4, 4) maps points of the child to the parent at a time in nanoseconds."""

    parent: str
    child: str
    stamp_ns: int
    matrix: FloatArray


class Output(NamedTuple):
    """A message for a topic of the mode, or a Placement for TF."""

    topic: str
    message: Any


class Result(NamedTuple):
    """The result for one cloud. The node adds counts and latency to the status.

    outputs: in order of publishing, possibly lazy: the most urgent ones come first.
    """

    status: TrackingStatus
    outputs: Iterable[Output]


class Mode(Protocol):
    """Interface of the two modes. All methods are called with the node's lock held, never concurrently."""

    topics: ClassVar[dict[str, Topic]]
    # Grid [m] for a retry when memory runs out; None if clouds must not be made coarser.
    coarse_grid: float | None

    # What runs, for the log: weights, device, threads.
    description: str

    def keyframe_count(self) -> int:
        """Number of keyframes in the map."""
        ...

    def process(self, frame: Frame, wanted: set[str]) -> Result:
        """Track one cloud. wanted: topics with subscribers; others need not be computed."""
        ...

    def apply(self, settings: NodeSettings) -> None:
        """Apply parameters that changed at runtime."""
        ...

    def reset(self) -> None:
        """Drop all state; the next cloud starts a new map or model."""
        ...

    def relocalise(self) -> None:
        """Keep the map and relocalise in it, after a lasting change of the input."""
        ...

    def hint(self, pose: FloatArray) -> None:
        """Use an approximate pose (4, 4) of the body in the map, given by the user."""
        ...

    def unsaved(self) -> bool:
        """Whether `reset` would lose a map that was not saved."""
        ...

    def save(self, directory: Path) -> str:
        """Write the map to `directory`, atomically; returns a message for the user."""
        ...

    def close(self) -> None:
        """Stop everything that runs in the background."""
        ...

    def facts(self) -> dict[str, str]:
        """Values for the diagnostics."""
        ...
