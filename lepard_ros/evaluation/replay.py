# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The tracker over a recorded bag, every frame in order, without ROS."""

import csv
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lepard_ros.cloud.ranges import FARTHEST, LIVE_POINTS, NEAREST, crop_range, thinned
from lepard_ros.data.bag_reader import Bag, BagFrame
from lepard_ros.data.trajectories import FALSE_POSE, FALSE_TURN, Trajectory, TrajectoryError, compare
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.input_guard import InputGuard
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

Listener = Callable[[BagFrame, Track], None]
EXAMPLES = 4
STATUS_COLUMNS = (
    *("stamp", "state", "reason", "method", "keyframe", "matches", "inliers"),
    *("overlap", "rmse", "new_keyframe", "loop_closed", "seconds"),
)


class Example(NamedTuple):
    """A frame to be drawn: the cloud and its keyframe, (N, 3) and (M, 3) points each in its own frame."""

    stamp: float
    source: FloatArray
    target: FloatArray
    registration: Registration


@dataclass
class Replay:
    """The result for a bag.

    tracks: one per frame. truth: true trajectory of the sensor, if known. seconds: CPU time of all frames. left_out:
    number of duplicate or late frames, which the node rejects too.
    """

    tracks: list[Track] = field(default_factory=list)
    truth: Trajectory | None = None
    examples: list[Example] = field(default_factory=list)
    seconds: float = 0.0
    left_out: int = 0

    def published(self) -> Trajectory:
        """The poses as they were given at the time."""
        known = [track for track in self.tracks if track.pose is not None]
        poses = np.array([track.pose for track in known]).reshape(-1, 4, 4)
        return Trajectory(np.array([track.stamp for track in known]), poses)

    def tracked_share(self) -> float:
        """The share of frames that got a pose."""
        return len(self.published()) / max(len(self.tracks), 1)


def load_matcher(weights: str, device: str = "auto", grid: float | None = None) -> "Matcher":
    """The matcher for a weights name; "fpfh" needs no network. grid: metres (None: that of the weights)."""
    if weights == "fpfh":
        from lepard_ros.evaluation.fpfh_matcher import FpfhMatcher

        return FpfhMatcher()  # type: ignore[return-value]  # it has what the tracker uses
    from lepard_ros.matcher import Matcher, MatcherSettings

    return Matcher.from_pretrained(weights, device=device, settings=MatcherSettings(grid=grid))


def replay_bag(
    bag: Bag,
    tracker: RigidTracker,
    topic: str,
    *,
    truth_topic: str | None = None,
    every: int = 1,
    ranges: tuple[float, float] = (NEAREST, FARTHEST),
    progress: bool = False,
    listener: Listener | None = None,
) -> Replay:
    """Track every n-th frame of a topic. ranges: metres from the sensor between which points are used.

    listener: called with every tracked frame.
    """
    # Ground truth first: if it cannot be read, fail before the work and not after it.
    truth = bag.truth(next(bag.frames(topic)).frame_id, truth_topic)
    frames = tracked_frames(bag, topic, every, ranges, progress)
    replay = _track_all(frames, tracker, max(bag.frame_count(topic) // every // EXAMPLES, 1), listener)
    replay.truth = truth
    return replay


def tracked_frames(
    bag: Bag, topic: str, every: int, ranges: tuple[float, float], progress: bool = False
) -> Iterator[BagFrame]:
    """Every n-th frame of a topic with the points between two ranges [m], with a progress bar."""
    total = -(-bag.frame_count(topic) // every)
    frames = (frame for index, frame in enumerate(bag.frames(topic)) if index % every == 0)
    for frame in tqdm(frames, total=total, desc="replay", unit="frame", disable=not progress):
        yield frame._replace(points=_as_the_node_crops(frame.points, ranges))


def _as_the_node_crops(points: NDArray[np.float32], ranges: tuple[float, float]) -> NDArray[np.float32]:
    """Downsample organised clouds first, so that a replay uses exactly the points of the node's tracker."""
    return crop_range(thinned(points, LIVE_POINTS) if points.ndim == 3 else points, *ranges)


def _track_all(
    frames: Iterable[BagFrame], tracker: RigidTracker, example_every: int, listener: Listener | None
) -> Replay:
    """Track every frame; the node's own input guard rejects frames and detects changes of the input."""
    replay, guard = Replay(), InputGuard()
    for frame in frames:
        try:
            # An empty frame_id is allowed, because nothing is published; the bag's time serves as the clock.
            change = guard.check(frame.stamp_ns, frame.frame_id or "sensor", frame.stamp_ns)
        except InputError:
            replay.left_out += 1
            continue
        if change is not None:
            tracker.relocalise()
        started = time.process_time()
        track = tracker.process(frame.points, frame.stamp_ns * 1e-9)
        replay.seconds += time.process_time() - started
        if len(replay.tracks) % example_every == example_every // 2:
            replay.examples += _example(track, frame, tracker)
        replay.tracks.append(track)
        if listener is not None:
            listener(frame, track)
    return replay


def _example(track: Track, frame: BagFrame, tracker: RigidTracker) -> list[Example]:
    if track.registration is None or track.keyframe_id is None or track.keyframe_id not in tracker.keyframes:
        return []
    points = frame.points.reshape(-1, 3)
    points = points[np.isfinite(points).all(axis=1)]
    thinned = points[:: max(len(points) // 6000, 1)]
    return [Example(track.stamp, thinned, tracker.keyframes[track.keyframe_id].surface.points, track.registration)]


def write_status(path: Path, tracks: list[Track]) -> None:
    """One line per frame."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(STATUS_COLUMNS)
        for track in tracks:
            writer.writerow(_status_row(track))


def _status_row(track: Track) -> list[object]:
    r = track.registration
    measured = ["", "", "", "", ""]
    if r is not None:
        numbers = f"{r.overlap:.4f}", f"{r.rmse:.5f}"
        measured = [r.method, str(len(r.inliers)), str(int(r.inliers.sum())), *numbers]
    keyframe = "" if track.keyframe_id is None else track.keyframe_id
    flags = [int(track.new_keyframe), int(track.loop_closed), f"{sum(track.seconds.values()):.4f}"]
    return [f"{track.stamp:.9f}", track.state.name, track.reason, measured[0], keyframe, *measured[1:], *flags]


def error_of(replay: Replay) -> TrajectoryError | None:
    """The error of the published poses, if there is ground truth."""
    if replay.truth is None or len(replay.published()) < 3:
        return None
    return compare(replay.published(), replay.truth)


def figures(replay: Replay, tracker: RigidTracker) -> dict[str, float | None]:
    """The row of a bag in a table of several; errors are None without ground truth."""
    error = error_of(replay)
    return {
        "frames": len(replay.tracks),
        "tracked": replay.tracked_share(),
        "keyframes": len(tracker.keyframes),
        "ate": None if error is None else float(error.ate_rmse),
        "rpe": None if error is None else float(error.rpe_translation),
        "false": None if error is None else int(error.false().sum()),
        "cpu_seconds": replay.seconds / max(len(replay.tracks), 1),
    }


def summary(replay: Replay, tracker: RigidTracker) -> str:
    """A short summary."""
    tracks = replay.tracks
    counts = {state: sum(track.state is state for track in tracks) for state in TrackingState}
    states = ", ".join(f"{state.name} {count}" for state, count in counts.items() if count)
    loops = sum(track.loop_closed for track in tracks)
    megabytes = tracker.keyframes.nbytes / 1e6
    lines = [
        f"frames        {len(tracks)}, of which {100 * replay.tracked_share():.1f} % with a pose ({states})",
        f"map           {len(tracker.keyframes)} keyframes ({megabytes:.1f} MB), {loops} loop closures",
        f"CPU time      {replay.seconds / max(len(tracks), 1):.3f} s a frame",
    ]
    if replay.left_out:
        lines.insert(1, f"rejected      {replay.left_out} duplicate or late frames")
    error = error_of(replay)
    return "\n".join(lines + (_error_lines(replay, tracker, error) if error else [_no_error_line(replay)]))


def _no_error_line(replay: Replay) -> str:
    return "truth         none in the bag" if replay.truth is None else "ATE RMSE      unknown: fewer than three poses"


def _error_lines(replay: Replay, tracker: RigidTracker, error: TrajectoryError) -> list[str]:
    stamps, poses = tracker.path()
    lines = [
        f"ATE RMSE      {error.ate_rmse:.3f} m as published (largest {error.errors.max():.3f} m)",
        f"RPE over 1 s  {error.rpe_translation:.3f} m, {error.rpe_rotation:.2f} degrees",
        f"false poses   {int(error.false().sum())} (more than {FALSE_POSE} m or {FALSE_TURN:.0f} degrees off)",
    ]
    if len(stamps) > 2 and replay.truth is not None:
        lines.insert(1, f"              {compare(Trajectory(stamps, poses), replay.truth).ate_rmse:.3f} m as corrected")
    return lines
