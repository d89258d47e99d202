# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformable tracker over a recorded bag, every frame in order, without ROS."""

import csv
from collections.abc import Callable, Iterable
from pathlib import Path

from lepard_ros.cloud.files import write_cloud
from lepard_ros.data.bag_reader import BagFrame
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker

COLUMNS = (
    *("stamp", "state", "reason", "method", "matches", "inliers"),
    *("overlap", "residual", "model_points", "nodes", "new_keyframe", "reset", "seconds"),
)


def replay_deformable(
    frames: Iterable[BagFrame],
    tracker: DeformableTracker,
    output: Path,
    listener: Callable[[BagFrame, DeformableTrack], None] | None = None,
) -> str:
    """Track a deforming object through all frames; writes status.csv and model.ply, and returns a summary."""
    total = warped = 0
    with (output / "status.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for frame in frames:
            track = tracker.process(frame.points, frame.stamp_ns * 1e-9)
            writer.writerow(_row(track))
            total, warped = total + 1, warped + (track.warp is not None)
            if listener is not None:
                listener(frame, track)
    if tracker.model is not None:
        write_cloud(output / "model.ply", tracker.model.points)
    size = 0 if tracker.model is None else len(tracker.model.points)
    return f"frames        {total}, of which {warped} with a warp\nmodel         {size} points"


def _row(track: DeformableTrack) -> list[object]:
    nodes = 0 if track.warp is None else len(track.warp.graph.nodes)
    quality = f"{track.overlap:.4f}", f"{track.residual:.5f}", len(track.model_points), nodes
    flags = int(track.new_keyframe), int(track.reset), f"{sum(track.seconds.values()):.4f}"
    found = track.method, len(track.inliers), int(track.inliers.sum())
    return [f"{track.stamp:.9f}", track.state.name, track.reason, *found, *quality, *flags]
