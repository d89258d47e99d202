# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Bags from recordings, or from a synthetic room instead of one: `lepard bag make synthetic:7`."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lepard_ros.cloud.depth import Camera
from lepard_ros.data.bag_writer import BagWriter
from lepard_ros.data.recordings import (
    START_NS,
    DepthFrame,
    Recording,
    open_recording,
    select_frames,
    shrink_camera,
)
from lepard_ros.data.trajectories import stamps_to_ns
from lepard_ros.errors import InputError
from lepard_ros.synthesis.room_sequences import Sequence, room_sequence


@dataclass(frozen=True)
class RoomRecording:
    """A synthetic sequence of a room, rendered when it is read."""

    seed: int
    count: int
    rate: float

    @property
    def camera(self) -> Camera:
        """The intrinsics of the camera."""
        return self._sequence.camera

    def __len__(self) -> int:
        """Number of images."""
        return self.count

    def frames(self) -> Iterator[DepthFrame]:
        """All images in order of time."""
        sequence = self._sequence
        stamps = START_NS + stamps_to_ns(np.asarray(sequence.stamps))
        for stamp, depth, pose in zip(stamps, sequence.depths, sequence.poses, strict=True):
            yield DepthFrame(int(stamp), np.asarray(depth, np.float32), np.asarray(pose, np.float64))

    @cached_property
    def _sequence(self) -> Sequence:
        """All rendered images; the camera path must be found before the first one."""
        return room_sequence(self.seed, self.count, self.rate)


def open_source(
    source: str, *, frames: int = 60, rate: float = 10.0, camera_file: Path | None = None
) -> Recording | RoomRecording:
    """Open a recording: a folder, or "synthetic:SEED" (`frames` images at `rate` Hz)."""
    if source.startswith("synthetic:"):
        return RoomRecording(_seed(source), frames, rate)
    return open_recording(Path(source), camera_file)


def make_bag(
    source: str,
    output: Path,
    *,
    depth: bool = False,
    tf: bool = False,
    stride: int = 1,
    every: int = 1,
    gap: tuple[float, float] | None = None,
    frames: int | None = None,
    rate: float = 10.0,
    storage: str = "mcap",
    progress: bool = False,
    camera_file: Path | None = None,
) -> int:
    """Write a recording (see `open_source`) as a rosbag2; returns the number of frames written.

    stride: keep every n-th pixel. every: keep every n-th image. gap: (start, length) in seconds from the first image,
    omitted as if the sensor had been carried away. frames: only the first n. progress: show progress and the camera.
    """
    recording = open_source(source, frames=frames or 60, rate=rate, camera_file=camera_file)
    if progress and isinstance(recording, Recording):
        print(f"camera: {recording.calibration}")
    chosen = select_frames(recording.frames(), every=every, gap=gap, first=frames)
    count = 0
    writer = BagWriter(output, shrink_camera(recording.camera, stride), depth=depth, tf=tf, storage=storage)
    with closing(writer) as bag:
        for frame in tqdm(chosen, total=len(recording), desc="bag", unit="frame", disable=not progress):
            bag.write(frame.stamp_ns, frame.depth[::stride, ::stride], frame.pose)
            count += 1
    if not count:
        raise InputError("There is no frame to write: the gap covers the whole recording.")
    return count


def _seed(source: str) -> int:
    digits = source.partition(":")[2]
    if not digits.isdigit():
        raise InputError(f"{source!r} needs an integer after the colon, as in synthetic:7.")
    return int(digits)
