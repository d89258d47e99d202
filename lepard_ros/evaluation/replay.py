# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard replay BAG`: the tracker over a recorded bag, every frame in order, without ROS."""

import argparse
import csv
import errno
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from lepard_ros.cloud.ranges import FARTHEST, NEAREST, crop_range
from lepard_ros.errors import InputError
from lepard_ros.evaluation.bag_reader import Bag, BagFrame, open_bag
from lepard_ros.evaluation.trajectories import Trajectory, TrajectoryError, compare, write_tum
from lepard_ros.registration.types import FloatArray, Registration
from lepard_ros.tracking.input_guard import InputGuard
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackerSettings, TrackingState

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

HELP = """track a recorded bag, every frame in order

Reads clouds (or depth images with camera info) from a rosbag2 (mcap, sqlite3) or a ROS 1 bag, tracks the sensor and
writes to the output folder: trajectory.tum (as published), corrected.tum (after loop closures), status.csv, map.ply,
pictures, and with a truth in the bag (a pose topic, odometry or TF) its error, ATE and RPE."""

TRUTH_HELP = "true poses: a topic, TF, or a file in TUM format (default: /ground_truth if it is there, else TF)"
FALSE_POSE = 0.5  # metres: a pose that is further from the truth than this, and was published, is a false one
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
    """What came of a bag. tracks: one per frame. truth: of the sensor, if there is one. seconds: CPU, of all frames.
    left_out: frames that came twice or too late, which the node refuses too."""

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `lepard replay`."""
    parser.add_argument("bag", type=Path, help="rosbag2 directory, .mcap, .db3 or ROS 1 .bag")
    parser.add_argument("--output", type=Path, default=Path("replay_output"), help="folder (default replay_output)")
    parser.add_argument("--topic", help="of the clouds or depth images (default: the only one there is)")
    parser.add_argument("--truth", metavar="TOPIC|TF|FILE", help=TRUTH_HELP)
    parser.add_argument("--weights", default="rigid", help="rigid, a .safetensors file, or fpfh for no network")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto)")
    parser.add_argument("--grid", type=float, help="metres between matched points (default: as the weights)")
    parser.add_argument("--every", type=int, default=1, help="use every n-th frame (default 1)")
    parser.add_argument("--min-range", type=float, default=NEAREST, help=f"metres, as the node's (default {NEAREST})")
    parser.add_argument("--max-range", type=float, default=FARTHEST, help=f"metres, as the node's (default {FARTHEST})")
    parser.add_argument("--map", type=Path, help="start in this saved map or cloud file")
    parser.add_argument("--save-map", type=Path, help="save the map to this directory")
    parser.add_argument("--localise", action="store_true", help="do not add to the map")
    parser.add_argument("--fallback", choices=("none", "fpfh"), default="none", help="when all matches are refused")
    parser.add_argument("--no-pictures", action="store_true", help="write no pictures")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write a self-contained page DIR/index.html")


def run(args: argparse.Namespace) -> int:
    """Replay a bag and write what came of it."""
    if args.every < 1:
        raise InputError(f"--every is {args.every}; it must be 1 or more.")
    if not 0 <= args.min_range < args.max_range:
        raise InputError(f"--min-range {args.min_range} and --max-range {args.max_range} leave no point.")
    settings = TrackerSettings(mapping=not args.localise, fallback=args.fallback)
    with open_bag(args.bag) as bag:
        topic = bag.cloud_topic(args.topic)
        bag.truth_topic(args.truth)  # before the weights are loaded
        prepare_output(args.output)
        matcher = load_matcher(args.weights, args.device, args.grid)
        tracker = RigidTracker.load(args.map, matcher, settings) if args.map else RigidTracker(matcher, settings)
        ranges = args.min_range, args.max_range
        replay = replay_bag(bag, tracker, topic, truth_topic=args.truth, every=args.every, ranges=ranges, progress=True)
    write_results(replay, tracker, args.output, pictures=not args.no_pictures)
    if args.save_map:
        tracker.save(args.save_map)
    print(summary(replay, tracker))
    print(f"Written to {args.output}")
    if args.report:
        from lepard_ros.evaluation.report import replay_report

        print(f"report: {replay_report(args.report, args.bag.name, replay, tracker)}")
    return 0


def load_matcher(weights: str, device: str = "auto", grid: float | None = None) -> "Matcher":
    """The matcher of a weights name; "fpfh" is one without a network. grid: metres, or the weights' own."""
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
) -> Replay:
    """Track every n-th frame of a topic. ranges: metres from the sensor between which points are used."""
    total = -(-bag.frame_count(topic) // every)
    frames = (frame for index, frame in enumerate(bag.frames(topic)) if index % every == 0)
    frames = tqdm(frames, total=total, desc="replay", unit="frame", disable=not progress)
    cropped = (frame._replace(points=crop_range(frame.points, *ranges)) for frame in frames)
    # The truth first: if it cannot be read, that is said before the work and not after it.
    truth = bag.truth(next(bag.frames(topic)).frame_id, truth_topic)
    replay = _track_all(cropped, tracker, max(total // EXAMPLES, 1))
    replay.truth = truth
    return replay


def _track_all(frames: Iterable[BagFrame], tracker: RigidTracker, example_every: int) -> Replay:
    """Every frame through the tracker; the node's own guard says which are left out and where tracking starts over."""
    replay, guard = Replay(), InputGuard()
    for frame in frames:
        try:
            # Without a frame no transform could be published, but there is none here; the bag's time is the clock.
            reset = guard.check(frame.stamp_ns, frame.frame_id or "sensor", frame.stamp_ns)
        except InputError:
            replay.left_out += 1
            continue
        if reset is not None:
            tracker.reset()
        started = time.process_time()
        track = tracker.process(frame.points, frame.stamp_ns * 1e-9)
        replay.seconds += time.process_time() - started
        if len(replay.tracks) % example_every == example_every // 2:
            replay.examples += _example(track, frame, tracker)
        replay.tracks.append(track)
    return replay


def _example(track: Track, frame: BagFrame, tracker: RigidTracker) -> list[Example]:
    if track.registration is None or track.keyframe_id is None or track.keyframe_id not in tracker.keyframes:
        return []
    points = frame.points.reshape(-1, 3)
    points = points[np.isfinite(points).all(axis=1)]
    thinned = points[:: max(len(points) // 6000, 1)]
    return [Example(track.stamp, thinned, tracker.keyframes[track.keyframe_id].surface.points, track.registration)]


def prepare_output(output: Path) -> None:
    """Make the folder, or say why it cannot be."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not os.access(output, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise InputError(f"{output} cannot be written ({error.strerror}); name another --output.") from error


def write_results(replay: Replay, tracker: RigidTracker, output: Path, *, pictures: bool = True) -> None:
    """Write trajectories, the status of every frame, the map and the pictures."""
    from lepard_ros.cloud.files import write_cloud

    prepare_output(output)
    write_tum(output / "trajectory.tum", replay.published())
    write_tum(output / "corrected.tum", Trajectory(*tracker.path()))
    if replay.truth is not None:
        write_tum(output / "truth.tum", replay.truth)
    write_status(output / "status.csv", replay.tracks)
    (output / "summary.txt").write_text(summary(replay, tracker) + "\n")
    map_points = tracker.map_points(0.02)
    if len(map_points):
        write_cloud(output / "map.ply", map_points)
    if pictures:
        from lepard_ros.evaluation.replay_pictures import draw_replay, save_pictures

        save_pictures(draw_replay(replay, map_points, error_of(replay)), output)


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
    """The error of the published poses, where there is a truth."""
    if replay.truth is None or len(replay.published()) < 3:
        return None
    return compare(replay.published(), replay.truth)


def false_poses(error: TrajectoryError) -> NDArray[np.bool_]:
    """Which of the published poses were false."""
    return error.errors > FALSE_POSE


def summary(replay: Replay, tracker: RigidTracker) -> str:
    """A few lines that say how it went."""
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
        lines.insert(1, f"left out      {replay.left_out}, which came twice or too late")
    error = error_of(replay)
    return "\n".join(lines + (_error_lines(replay, tracker, error) if error else [_no_error_line(replay)]))


def _no_error_line(replay: Replay) -> str:
    return "truth         none in the bag" if replay.truth is None else "ATE RMSE      unknown: fewer than three poses"


def _error_lines(replay: Replay, tracker: RigidTracker, error: TrajectoryError) -> list[str]:
    stamps, poses = tracker.path()
    lines = [
        f"ATE RMSE      {error.ate_rmse:.3f} m as published (largest {error.errors.max():.3f} m)",
        f"RPE over 1 s  {error.rpe_translation:.3f} m, {error.rpe_rotation:.2f} degrees",
        f"false poses   {int(false_poses(error).sum())} (more than {FALSE_POSE} m from the truth)",
    ]
    if len(stamps) > 2 and replay.truth is not None:
        lines.insert(1, f"              {compare(Trajectory(stamps, poses), replay.truth).ate_rmse:.3f} m as corrected")
    return lines
