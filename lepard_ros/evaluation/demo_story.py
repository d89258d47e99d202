# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the demonstration tells, and what is noted of it: the camera's story, the node's words. Without ROS."""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera
from lepard_ros.evaluation.bag_writer import BagWriter
from lepard_ros.evaluation.trajectories import Trajectory

RATE = 5.0  # clouds a second of the walk
COVERED_FRAMES = 4
FOUND_FRAMES = 12
HAND = 0.2  # metres: a hand before the lens, nearer than the node's min_range
START_NS = 1_000_000_000_000


@dataclass(frozen=True)
class Recording:
    """What a camera saw, in order. depths: (F, H, W) metres. poses: (F, 4, 4) camera to world. covered: (F,) bool,
    which frames show nothing but a hand before the lens."""

    camera: Camera
    stamps_ns: list[int]
    depths: NDArray[np.float32]
    poses: NDArray[np.float64]
    covered: NDArray[np.bool_]


@dataclass(frozen=True)
class Story(Recording):
    """A walk around a room. moved: (F,) bool, which frames show the place where the camera was carried to."""

    moved: NDArray[np.bool_]

    def truth(self) -> Trajectory:
        """The true path, without the moment in which nothing was seen."""
        seen = ~self.covered
        return Trajectory(np.array(self.stamps_ns)[seen] * 1e-9, self.poses[seen])


@dataclass(frozen=True)
class FrameNote:
    """What the node said about one cloud. seconds: by stage; latency: from stamp to status, if stamped when sent."""

    stamp_ns: int
    state: str
    reason: str
    method: str
    matches: int
    inliers: int
    keyframes: int
    new_keyframe: bool
    loop_closed: bool
    seconds: dict[str, float]
    dropped: int
    latency: float = 0.0


@dataclass(frozen=True)
class MatchNote:
    """Matches of one cloud with a keyframe: (M, 3) metres each, and which of them agree (M,)."""

    stamp_ns: int
    keyframe_ns: int
    source: NDArray[np.float32]
    target: NDArray[np.float32]
    inlier: NDArray[np.bool_]


@dataclass
class Recorded:
    """Everything heard. tf: by (parent, child), stamps in nanoseconds with (4, 4) matrices."""

    frames: list[FrameNote] = field(default_factory=list)
    matches: list[MatchNote] = field(default_factory=list)
    tf: dict[tuple[str, str], dict[int, NDArray[np.float64]]] = field(default_factory=dict)
    odometry: int = 0
    map_points: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 3), np.float32))

    def trajectory(self, parent: str, child: str) -> Trajectory:
        """The path that was published on TF."""
        link = self.tf.get((parent, child), {})
        stamps = sorted(link)
        poses = np.array([link[stamp] for stamp in stamps]).reshape(-1, 4, 4)
        return Trajectory(np.array(stamps) * 1e-9, poses)


@dataclass(frozen=True)
class NodeRun:
    """How the node's process fared. seconds: of playing; cpu_seconds: of the node meanwhile; exit_code: when it was
    told to end; memory: megabytes, before the first cloud and after each."""

    seconds: float
    cpu_seconds: float
    exit_code: int
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class DemoRun:
    """The story and what the node said. frame: the camera's."""

    story: Story
    recorded: Recorded
    frame: str
    node: NodeRun
    weights: str


def make_story(seed: int, frames: int) -> Story:
    """A walk around a room, then the covered lens, then a known place seen again from nearby poses."""
    from lepard_ros.learning.sequences import room_sequence

    video = room_sequence(seed, 2 * frames, 2 * RATE)
    walk = np.arange(0, 2 * frames, 2)
    # The frames between those of the walk, so that no image is seen twice.
    middle = min(2 * (frames // 2), 2 * (frames - FOUND_FRAMES)) + 1
    found = np.arange(middle, middle + 2 * FOUND_FRAMES, 2)
    order = np.concatenate([walk, np.full(COVERED_FRAMES, walk[-1]), found])
    covered = np.zeros(len(order), bool)
    covered[len(walk) : len(walk) + COVERED_FRAMES] = True
    depths = np.where(covered[:, None, None], np.float32(HAND), video.depths[order])
    stamps = [START_NS + round(index * 1e9 / RATE) for index in range(len(order))]
    moved = np.arange(len(order)) >= len(walk) + COVERED_FRAMES
    return Story(video.camera, stamps, depths, video.poses[order], covered, moved)


def write_bag(recording: Recording, path: Path) -> None:
    """Write a recording as a rosbag2 with clouds and the true poses."""
    with closing(BagWriter(path, recording.camera)) as bag:
        for stamp, depth, pose in zip(recording.stamps_ns, recording.depths, recording.poses, strict=True):
            bag.write(stamp, depth, pose)
