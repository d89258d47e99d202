# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The messages that the node would publish for a replay, serialised for a bag. Does not use DDS."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rclpy.serialization import serialize_message
from tf2_msgs.msg import TFMessage

from lepard_ros.ros.compat.transforms import stamped_transform
from lepard_ros.ros.conversion import Frame
from lepard_ros.ros.deformable_mode import DeformableMode
from lepard_ros.ros.frames import FramePlan
from lepard_ros.ros.modes import LATCHED, TF, Output
from lepard_ros.ros.parameters import NodeSettings, share_directory
from lepard_ros.ros.rigid_mode import RigidMode
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track

NAMESPACE = "/lepard/"  # prefix of the node's own topics, unless it is renamed
PACKAGE = "lepard_ros"


class Written(NamedTuple):
    """A message for a bag. kind: such as nav_msgs/msg/Odometry. latched: late subscribers get the last one."""

    topic: str
    kind: str
    latched: bool
    data: bytes


class Scribe:
    """Produces the messages that the node publishes with default parameters, cloud by cloud."""

    def __init__(self, tracker: RigidTracker | DeformableTracker) -> None:
        """tracker: the tracker of the replay; only its map is read."""
        self._rigid = isinstance(tracker, RigidTracker)
        settings = NodeSettings(mode="rigid" if self._rigid else "deformable")
        self._plan = FramePlan(settings, None, None)
        kind: Any = RigidMode if self._rigid else DeformableMode
        self._mode = kind(tracker.matcher, settings, self._plan, tracker=tracker)
        self._count = 0

    def write(
        self, track: Track | DeformableTrack, points: NDArray[np.float32], stamp_ns: int, frame_id: str
    ) -> Iterator[Written]:
        """All messages of one cloud, the status last, as the node sends them. A frame without a name gets one."""
        frame = Frame(points, stamp_ns, frame_id or "sensor")
        frames = [self._plan.anchor(frame.frame_id, frame.stamp_ns)] if self._rigid else []
        result = self._mode.report(track, frame, *frames, set(self._mode.topics))
        yield from self._outputs(result.outputs)
        self._count += 1
        result.status.frames_received = result.status.frames_processed = self._count
        yield _written(NAMESPACE + "status", result.status, latched=False)

    def _outputs(self, outputs: Iterable[Output]) -> Iterator[Written]:
        for topic, message in outputs:
            if topic == TF:
                moved = stamped_transform(message.parent, message.child, message.stamp_ns, message.matrix)
                yield _written("/tf", TFMessage(transforms=[moved]), latched=False)
            else:
                yield _written(NAMESPACE + topic, message, self._mode.topics[topic].qos is LATCHED)


def _written(topic: str, message: Any, latched: bool) -> Written:
    kind = type(message)
    return Written(topic, f"{kind.__module__.split('.')[0]}/msg/{kind.__name__}", latched, serialize_message(message))


def definitions() -> dict[str, str]:
    """Definitions of our own messages by type name, for storage in the bag."""
    folder = share_directory() / "msg"
    return {f"{PACKAGE}/msg/{path.stem}": path.read_text() for path in sorted(folder.glob("*.msg"))}
