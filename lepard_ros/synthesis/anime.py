# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""DeformingThings4D animations (.anime files), and 4DMatch pairs rendered from them."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.data.fourdmatch import RATE_RADIUS, DeformablePair, benchmark_of
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.synthesis.deformable_pairs import make_pair

LARGEST = 10**8  # limit for vertices x frames: above any real animation, and within memory
# The world of DeformingThings4D has z up, ours y up.
Y_UP = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, -1.0, 0.0]])


@dataclass(frozen=True)
class Animation:
    """A mesh whose vertices move from frame to frame.

    vertices: (V, 3) metres in frame 0. triangles: (T, 3). offsets: (F - 1, V, 3), from frame 0 to each later frame.
    """

    name: str
    vertices: NDArray[np.float32]
    triangles: NDArray[np.int32]
    offsets: NDArray[np.float32]

    @property
    def frames(self) -> int:
        """Number of frames."""
        return len(self.offsets) + 1

    def frame(self, number: int) -> NDArray[np.float32]:
        """The vertices (V, 3) in a frame."""
        return self.vertices if number == 0 else self.vertices + self.offsets[number - 1]


@dataclass(frozen=True)
class TwoFrames:
    """A motion made of two frames of an animation, with y up."""

    animation: Animation
    first: int
    last: int

    @property
    def triangles(self) -> NDArray[np.int32]:
        """(T, 3)."""
        return self.animation.triangles

    def at(self, time: float) -> FloatArray:
        """The vertices (V, 3): of the first frame before time 0.5, then of the last one."""
        return self.animation.frame(self.first if time < 0.5 else self.last) @ Y_UP.T


def read_anime(path: str | Path) -> Animation:
    """Read an .anime file: int32 counts of frames, vertices, triangles; then vertices, triangles, offsets.

    Raises InputError if the file is truncated or not an .anime file.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path.name} cannot be read ({error.strerror}): give an .anime file.") from error
    if len(content) < 12:
        raise InputError(f"{path.name} is too short for an .anime file: download it again.")
    frames, vertices, triangles = (int(count) for count in np.frombuffer(content, "<i4", 3))
    expected = 12 + 12 * (frames * vertices + triangles)
    if min(frames, vertices, triangles) < 1 or frames * vertices > LARGEST or len(content) != expected:
        raise InputError(f"{path.name} has {len(content)} bytes; its header says {expected}: download it again.")
    points = np.frombuffer(content, "<f4", 3 * vertices, 12).reshape(-1, 3)
    faces = np.frombuffer(content, "<i4", 3 * triangles, 12 + points.nbytes).reshape(-1, 3)
    offsets = np.frombuffer(content, "<f4", offset=12 + points.nbytes + faces.nbytes).reshape(frames - 1, vertices, 3)
    if faces.min() < 0 or faces.max() >= vertices or not (np.isfinite(points).all() and np.isfinite(offsets).all()):
        raise InputError(f"{path.name} has invalid vertex indices or values that are not finite: download it again.")
    return Animation(path.stem, points, faces, offsets)


def render_pairs(animation: Animation, count: int) -> Iterator[tuple[str, DeformablePair]]:
    """Render pairs of frames from two cameras, without noise on the 0.01 m grid of 4DMatch; with file names.

    The same animation always gives the same pairs. An animation with one frame gives none.
    """
    if animation.frames < 2:
        return
    for number in range(count):
        rng = np.random.default_rng([zlib.crc32(animation.name.encode()), number])
        first, last = rng.choice(animation.frames, 2, replace=False)
        pair = make_pair(TwoFrames(animation, int(first), int(last)), rng, rng.uniform(0.12, 0.98), clean=True)
        if pair is not None:
            yield f"cam{2 * number}_{first:04d}_cam{2 * number + 1}_{last:04d}.npz", _with_rate(pair)


def _with_rate(pair: DeformablePair) -> DeformablePair:
    """Add the overlap rate as 4DMatch defines it: the share of source points near the target."""
    return replace(pair, overlap_rate=float(np.mean(cKDTree(pair.target).query(pair.warped)[0] < RATE_RADIUS)))


def split_of(name: str, pair: DeformablePair) -> str:
    """The split of an animation's pair: 70 % train, 10 % val, the rest 4DMatch or 4DLoMatch by overlap.

    The authors' list of test sequences is not public, so the animation's name decides.
    """
    share = zlib.crc32(name.encode()) % 100
    if share < 80:
        return "train" if share < 70 else "val"
    return benchmark_of(Path(name), pair)
