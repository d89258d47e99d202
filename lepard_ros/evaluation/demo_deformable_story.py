# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The film of a moving creature, what the node said about it, and the truth to compare it with. Without ROS."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.evaluation.demo_story import HAND, START_NS, FrameNote, NodeRun, Recording
from lepard_ros.registration.warp import Warp

if TYPE_CHECKING:
    from lepard_ros.learning.creature_sequences import CreatureSequence

RATE = 10.0  # clouds a second
WIDTH = 320  # pixels
WHOLE_FILM = 60  # frames; a shorter demonstration shows its beginning, at the same speed
COVERED_FRAMES = 3
SAME_PLACE = 0.008  # metres at the film's start: two pixels nearer than this show the same place of the creature
Floats = NDArray[np.floating]


@dataclass(frozen=True)
class Film(Recording):
    """What the camera saw of the creature. sequence: the same with the truth of every pixel."""

    sequence: "CreatureSequence"

    def cloud(self, frame: int) -> NDArray[np.float64]:
        """The points (N, 3) of the creature that a frame shows, metres, in the camera's frame."""
        points = self.sequence.cloud(frame).reshape(-1, 3)
        return points[np.isfinite(points).all(axis=1)].astype(np.float64)

    def truth(self, rest: int, frame: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Points (N, 3) that frame `rest` saw, and where these places of the creature are at `frame` (N, 3).

        For rest 0 the second is exact, without noise, and also known where the place is hidden at `frame`. For a model
        that began later it is the nearest pixel of `frame` that shows the same place.
        """
        if rest == 0:
            points = self.sequence.cloud(0).reshape(-1, 3)
            seen = np.isfinite(points).all(axis=1)
            now = self.sequence.first_now[frame].reshape(-1, 3)
            return points[seen].astype(np.float64), now[seen].astype(np.float64)
        before, after = (self._at_start(one) for one in (rest, frame))
        distance, index = cKDTree(after).query(before)
        same = distance < SAME_PLACE
        return self.cloud(rest)[same], self.cloud(frame)[index[same]]

    def _at_start(self, frame: int) -> Floats:
        """Where the points of `cloud(frame)` were at frame 0: (N, 3)."""
        places = self.sequence.at_first[frame].reshape(-1, 3)
        return places[np.isfinite(places).all(axis=1)]


@dataclass(frozen=True)
class WarpNote:
    """A warp that the node published. rest_ns: stamp of the cloud that its model began with."""

    stamp_ns: int
    rest_ns: int
    warp: Warp


@dataclass
class RecordedWarps:
    """What is heard in deformable mode only, by the live cloud's stamp in nanoseconds.

    warped: the model (N, 3) as it lay in each live cloud, metres.
    """

    warps: dict[int, WarpNote] = field(default_factory=dict)
    warped: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class WarpRun:
    """The film and what the node said about it."""

    film: Film
    recorded: RecordedWarps
    notes: list[FrameNote]
    node: NodeRun
    weights: str


def make_film(seed: int, frames: int) -> Film:
    """A walking biped before a camera that sways around it; after two thirds of it a hand covers the lens."""
    from lepard_ros.learning.creature_sequences import creature_sequence

    sequence = creature_sequence(seed, max(frames, WHOLE_FILM), rate=RATE, width=WIDTH)
    stamps = [START_NS + round(float(stamp) * 1e9) for stamp in sequence.stamps[:frames]]
    covered = np.zeros(frames, dtype=bool)
    first = 2 * frames // 3
    covered[first : first + COVERED_FRAMES] = True
    depths = np.where(covered[:, None, None], np.float32(HAND), sequence.depths[:frames])
    poses = sequence.poses[:frames].astype(np.float64)
    return Film(sequence.camera, stamps, depths, poses, covered, sequence)
