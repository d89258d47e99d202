# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Input and output of a demonstration: the camera's path and the node's results. Does not need ROS."""

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.cloud.depth import Camera
from lepard_ros.data.bag_writer import BagWriter
from lepard_ros.data.trajectories import Trajectory
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.deformable.warp import Warp

if TYPE_CHECKING:
    from lepard_ros.synthesis.creature_sequences import CreatureSequence

HAND = 0.2  # metres: a hand before the lens, nearer than the node's min_range
START_NS = 1_000_000_000_000

WALK_RATE = 5.0  # clouds a second of the walk
WALK_COVERED, WALK_FOUND = 4, 12  # frames with a covered lens, and after it

FILM_RATE = 10.0  # clouds a second of the film
FILM_WIDTH = 320  # pixels
FILM_FRAMES = 100  # of the whole film; a shorter demonstration shows its beginning, at the same speed
FILM_COVERED = 3
SAME_PLACE = 0.008  # metres at the film's start: two pixels nearer than this show the same place of the creature


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
class Film(Recording):
    """What the camera saw of the creature. sequence: the same with the truth of every pixel."""

    sequence: "CreatureSequence"

    def cloud(self, frame: int) -> NDArray[np.float64]:
        """The points (N, 3) of the creature that a frame shows, metres, in the camera's frame."""
        points = self.sequence.cloud(frame).reshape(-1, 3)
        known = np.isfinite(self.sequence.at_first[frame]).reshape(-1, 3).all(axis=1)  # the room has no truth
        return points[known].astype(np.float64)

    def truth(self, rest: int, frame: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Points (N, 3) that frame `rest` saw, and where these places of the creature are at `frame` (N, 3).

        For rest 0 the second is exact, without noise, and also known where the place is hidden at `frame`. For a model
        that began later it is the nearest pixel of `frame` that shows the same place.
        """
        if rest == 0:
            points = self.sequence.cloud(0).reshape(-1, 3)
            now = self.sequence.first_now[frame].reshape(-1, 3)
            seen = np.isfinite(now).all(axis=1)
            return points[seen].astype(np.float64), now[seen].astype(np.float64)
        before, after = (self._at_start(one) for one in (rest, frame))
        distance, index = cKDTree(after).query(before)
        same = distance < SAME_PLACE
        return self.cloud(rest)[same], self.cloud(frame)[index[same]]

    def _at_start(self, frame: int) -> FloatArray:
        """Where the points of `cloud(frame)` were at frame 0: (N, 3)."""
        places = self.sequence.at_first[frame].reshape(-1, 3)
        return places[np.isfinite(places).all(axis=1)]


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
    """Everything received. tf: by (parent, child), stamps in nanoseconds with (4, 4) matrices."""

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
class WarpNote:
    """A warp that the node published. rest_ns: stamp of the cloud that its model began with."""

    stamp_ns: int
    rest_ns: int
    warp: Warp


@dataclass
class RecordedWarps:
    """What is received in deformable mode only, by the live cloud's stamp in nanoseconds.

    warped: the model (N, 3) as it lay in each live cloud, metres.
    """

    warps: dict[int, WarpNote] = field(default_factory=dict)
    warped: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeRun:
    """Figures of the node's process. seconds: of playing; cpu_seconds: of the node meanwhile; exit_code: when it was
    told to end; memory: megabytes, before the first cloud and after each."""

    seconds: float
    cpu_seconds: float
    exit_code: int
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class RigidRun:
    """The story and what the node said. frame: the camera's."""

    story: Story
    recorded: Recorded
    frame: str
    node: NodeRun
    weights: str


@dataclass(frozen=True)
class WarpRun:
    """The film and what the node said about it."""

    film: Film
    recorded: RecordedWarps
    notes: list[FrameNote]
    node: NodeRun
    weights: str


def make_story(seed: int, frames: int) -> Story:
    """A walk around a room, then the covered lens, then a known place seen again from nearby poses."""
    from lepard_ros.synthesis.room_sequences import room_sequence

    video = room_sequence(seed, 2 * frames, 2 * WALK_RATE)
    walk = np.arange(0, 2 * frames, 2)
    # The frames between those of the walk, so that no image is seen twice.
    middle = min(2 * (frames // 2), 2 * (frames - WALK_FOUND)) + 1
    found = np.arange(middle, middle + 2 * WALK_FOUND, 2)
    order = np.concatenate([walk, np.full(WALK_COVERED, walk[-1]), found])
    covered = np.zeros(len(order), bool)
    covered[len(walk) : len(walk) + WALK_COVERED] = True
    depths = np.where(covered[:, None, None], np.float32(HAND), video.depths[order])
    stamps = [START_NS + round(index * 1e9 / WALK_RATE) for index in range(len(order))]
    moved = np.arange(len(order)) >= len(walk) + WALK_COVERED
    return Story(video.camera, stamps, depths, video.poses[order], covered, moved)


def make_film(seed: int, frames: int, turns: int = 1) -> Film:
    """A biped that turns round in a furnished room, before a camera that sways; a hand covers the lens.

    turns: in so many times FILM_FRAMES clouds.
    """
    from lepard_ros.synthesis.creature_sequences import creature_sequence

    sequence = creature_sequence(
        seed, max(frames, FILM_FRAMES * turns), rate=FILM_RATE, width=FILM_WIDTH, turn=360.0 * turns, furnished=True
    )
    stamps = [START_NS + round(float(stamp) * 1e9) for stamp in sequence.stamps[:frames]]
    covered = np.zeros(frames, dtype=bool)
    first = 2 * frames // 3
    covered[first : first + FILM_COVERED] = True
    depths = np.where(covered[:, None, None], np.float32(HAND), sequence.depths[:frames])
    poses = sequence.poses[:frames].astype(np.float64)
    return Film(sequence.camera, stamps, depths, poses, covered, sequence)


def write_bag(recording: Recording, path: Path) -> None:
    """Write a recording as a rosbag2 with clouds and the true poses."""
    with closing(BagWriter(path, recording.camera)) as bag:
        for stamp, depth, pose in zip(recording.stamps_ns, recording.depths, recording.poses, strict=True):
            bag.write(stamp, depth, pose)
