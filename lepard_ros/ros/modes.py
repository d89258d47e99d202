# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the node runs: a mode turns one cloud into messages. The node does not know which one it has."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.msg import TrackingStatus
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.parameters import NodeSettings

# Outputs are small or rare, so they are reliable; what describes a lasting state is kept for late subscribers.
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
    """What came of one cloud. The node adds counts and latency to the status.

    outputs: in the order of publishing, perhaps made only when it is their turn: what others wait for comes first.
    """

    status: TrackingStatus
    outputs: Iterable[Output]


class Mode(Protocol):
    """Tracking of one kind. All methods are called with the node's lock held, never two at once."""

    topics: ClassVar[dict[str, Topic]]
    # The grid [m] on which a cloud is tried again when memory does not suffice; None if it must not be made coarser.
    coarse_grid: float | None

    # What runs, for the log: weights, device, threads.
    description: str

    def keyframe_count(self) -> int:
        """How many keyframes are held."""
        ...

    def process(self, frame: Frame, wanted: set[str]) -> Result:
        """Track one cloud. wanted: the topics that somebody listens to; others need not be computed."""
        ...

    def apply(self, settings: NodeSettings) -> None:
        """Take over parameters that changed while running."""
        ...

    def reset(self) -> None:
        """Drop all state; the next cloud starts a new map or model."""
        ...

    def relocalise(self) -> None:
        """The input changed for good: keep the map, and find the place in it again."""
        ...

    def hint(self, pose: FloatArray) -> None:
        """Somebody says where the body is in the map, (4, 4)."""
        ...

    def unsaved(self) -> bool:
        """Whether `reset` would lose a map that was not saved."""
        ...

    def save(self, directory: Path) -> str:
        """Write the map to `directory`, atomically, and say what was written."""
        ...

    def close(self) -> None:
        """The node lets go of the mode: end what runs beside it."""
        ...

    def facts(self) -> dict[str, str]:
        """What the diagnostics show of the mode."""
        ...
