# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The output of a replayed bag: its files, and one page with pictures."""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.files import write_cloud
from lepard_ros.data.trajectories import Trajectory, TrajectoryError, write_tum
from lepard_ros.errors import InputError
from lepard_ros.evaluation.replay import Example, Replay, error_of, summary, write_status
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.report.figure import pyplot
from lepard_ros.report.page import Page, made_with
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import Track, TrackingState

BLUE, RED, GREY, GREEN, ORANGE = "#1f5fb4", "#c8372d", "#8a8f98", "#2f8f5b", "#e08a1e"
STATE_COLOURS = {
    TrackingState.OK: GREEN,
    TrackingState.RELOCALISED: BLUE,
    TrackingState.LOST: RED,
    TrackingState.INITIALISING: GREY,
}
MAX_LINES = 120


class Picture(NamedTuple):
    """A drawn figure, the name of its file, and what it shows."""

    name: str
    figure: Any
    caption: str


def replay_report(directory: Path, name: str, replay: Replay, tracker: RigidTracker) -> Path:
    """Write the page of a replayed bag: its figures, times per stage, path, errors, map, and matched pairs."""
    page = Page(f"Tracking of {name}")
    page.text(f"{made_with()} {len(replay.tracks)} frames of the bag, in order.")
    page.heading("Summary")
    lines = [line.split("  ", 1) for line in summary(replay, tracker).splitlines()]
    page.table([["what", "value"], *([first.strip(), second.strip()] for first, second in lines)])
    page.heading("Time per frame")
    page.table(_stage_rows([track.seconds for track in replay.tracks]))
    page.heading("Pictures")
    for picture in draw_replay(replay, tracker.map_points(0.02), error_of(replay)):
        page.figure(picture.figure, picture.caption)
    return page.write(directory / "index.html")


def _stage_rows(seconds: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Wall milliseconds of every stage over the frames that had it; the first row is the header."""
    rows = [["stage", "frames", "median ms", "95 % ms"]]
    for stage in dict.fromkeys(name for own in seconds for name in own):
        values = 1e3 * np.array([own[stage] for own in seconds if stage in own])
        rows.append([stage, str(len(values)), f"{np.median(values):.0f}", f"{np.percentile(values, 95):.0f}"])
    return rows


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
        save_pictures(draw_replay(replay, map_points, error_of(replay)), output)


def draw_replay(replay: Replay, map_points: FloatArray, error: TrajectoryError | None) -> list[Picture]:
    """All pictures of a replay."""
    plt = pyplot()
    drawn = [
        Picture("path.png", _draw_path(plt, replay, error), "The path of the sensor, and the true path if known."),
        Picture("frames.png", _draw_frames(plt, replay, error), "Error, agreement and state of every frame."),
    ]
    if len(map_points):
        drawn.append(Picture("map.png", _draw_map(plt, replay, map_points), "The map, and the path in it."))
    for number, example in enumerate(replay.examples):
        caption = f"Frame at {example.stamp - replay.tracks[0].stamp:.1f} s: inliers blue, outliers red."
        drawn.append(Picture(f"pair_{number}.png", _draw_pair(plt, example), caption))
    for picture in drawn:
        plt.close(picture.figure)  # pyplot would keep it; it can still be saved
    return drawn


def save_pictures(drawn: Sequence[Picture], output: Path) -> None:
    """Write the pictures to a folder."""
    for picture in drawn:
        picture.figure.savefig(output / picture.name, dpi=130, bbox_inches="tight")


def _principal_plane(points: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The centre (3,) of points and the two directions (2, 3) along which they spread most."""
    centre = np.median(points, axis=0)
    return centre, np.linalg.svd(points - centre, full_matrices=False)[2][:2]


def _draw_path(plt: Any, replay: Replay, error: TrajectoryError | None) -> Any:
    """The path, seen so that it spreads most."""
    figure, axis = plt.subplots(figsize=(7, 6))
    positions = error.estimate if error else replay.published().poses[:, :3, 3]
    if len(positions) > 2:
        centre, plane = _principal_plane(error.truth if error else positions)
        if error:
            axis.plot(*((error.truth - centre) @ plane.T).T, color=GREY, lw=3, alpha=0.6, label="truth")
        stamps = error.stamps if error else replay.published().stamps
        _plot_unbroken(axis, (positions - centre) @ plane.T, stamps, "tracked")
        axis.scatter(*((positions[0] - centre) @ plane.T), color=BLUE, s=40, zorder=5)
        axis.annotate("start", (positions[0] - centre) @ plane.T, textcoords="offset points", xytext=(7, 7))
    title = f"ATE RMSE {error.ate_rmse:.3f} m, " if error else ""
    axis.set_title(f"{title}{len(replay.published())} of {len(replay.tracks)} frames with a pose")
    axis.set_aspect("equal")
    axis.set_xlabel("metres, along the path's widest direction")
    axis.set_ylabel("metres")
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(loc="best")
    return figure


def _plot_unbroken(axis: Any, points: FloatArray, stamps: NDArray[np.float64], label: str, colour: str = BLUE) -> None:
    """A line with gaps where poses are missing."""
    steps = np.diff(stamps)
    gaps = np.flatnonzero(steps > 1.5 * np.median(steps)) + 1 if len(steps) else np.zeros(0, dtype=np.int64)
    for part, piece in enumerate(np.split(points, gaps)):
        axis.plot(*piece.T, color=colour, lw=1.5, marker=".", ms=3, label=label if part == 0 else None)


def _draw_frames(plt: Any, replay: Replay, error: TrajectoryError | None) -> Any:
    """Error, overlap and state over time."""
    figure, axes = plt.subplots(3, 1, figsize=(9, 7), sharex=True, height_ratios=[3, 3, 0.8])
    start = replay.tracks[0].stamp
    times = np.array([track.stamp for track in replay.tracks]) - start
    if error:
        axes[0].plot(error.stamps - start, 100 * error.errors, ".-", color=BLUE, ms=3, lw=1)
        axes[0].set_ylim(bottom=0)
    else:
        axes[0].text(0.5, 0.5, "the bag holds no truth", transform=axes[0].transAxes, ha="center", color=GREY)
    axes[0].set_ylabel("position error, cm")
    axes[1].plot(
        times, [_overlap(track) for track in replay.tracks], color=ORANGE, lw=1, label="overlap with the keyframe"
    )
    axes[1].plot(times, [_inlier_share(track) for track in replay.tracks], color=BLUE, lw=1, label="matches that agree")
    axes[1].set_ylim(0, 1)
    axes[1].set_ylabel("share")
    axes[1].legend(loc="lower left", fontsize=8)
    for axis in axes[:2]:
        axis.grid(alpha=0.3)
    _draw_states(axes[2], times, replay.tracks)
    return figure


def _draw_states(axis: Any, times: NDArray[np.float64], tracks: list[Track]) -> None:
    """One coloured stroke per frame, a tick above each new keyframe, a star at each loop."""
    for state, colour in STATE_COLOURS.items():
        chosen = [t for t, track in zip(times, tracks, strict=True) if track.state is state]
        axis.vlines(chosen, 0, 1, color=colour, lw=2, label=state.name) if chosen else None
    keyframes = [t for t, track in zip(times, tracks, strict=True) if track.new_keyframe]
    loops = [t for t, track in zip(times, tracks, strict=True) if track.loop_closed]
    axis.plot(keyframes, np.full(len(keyframes), 1.25), "|", color="black", ms=7, label="keyframe")
    axis.plot(loops, np.full(len(loops), 1.6), "*", color=ORANGE, ms=6, label="loop closed")
    axis.set_ylim(0, 1.9)
    axis.set_yticks([])
    axis.set_xlabel("seconds")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.8), ncols=6, fontsize=8, frameon=False)


def _overlap(track: Track) -> float:
    return track.registration.overlap if track.registration else float("nan")


def _inlier_share(track: Track) -> float:
    inliers = track.registration.inliers if track.registration else ()
    return float(np.mean(inliers)) if len(inliers) else float("nan")


def _draw_map(plt: Any, replay: Replay, points: FloatArray) -> Any:
    """The map from above, shaded by height, with the path."""
    up = _up(points)
    axes = np.linalg.svd(np.eye(3) - np.outer(up, up))[0][:, :2].T
    middle = np.median(points, axis=0)
    height = (points - middle) @ up
    order = np.argsort(height)
    figure, axis = plt.subplots(figsize=(8, 7))
    flat = (points - middle) @ axes.T
    low, high = np.percentile(height, [2, 98])
    shown = axis.scatter(*flat[order].T, c=height[order], s=0.6, cmap="viridis", vmin=low, vmax=high, linewidths=0)
    path = replay.published().poses[:, :3, 3]
    if len(path):
        _plot_unbroken(axis, (path - middle) @ axes.T, replay.published().stamps, "path", RED)
        axis.legend(loc="best")
    figure.colorbar(shown, ax=axis, label="height, metres", shrink=0.7)
    limits = np.percentile(flat, [0.5, 99.5], axis=0)
    if len(path):
        walked = (path - middle) @ axes.T
        limits = np.array([np.minimum(limits[0], walked.min(axis=0)), np.maximum(limits[1], walked.max(axis=0))])
    axis.set_xlim(*(limits[:, 0] + [-0.3, 0.3]))
    axis.set_ylim(*(limits[:, 1] + [-0.3, 0.3]))
    axis.set_aspect("equal")
    axis.set_xlabel("metres")
    axis.set_ylabel("metres")
    axis.set_title("the map from above")
    return figure


def _up(points: FloatArray) -> NDArray[np.float64]:
    """The vertical: normal of the largest plane of the map (a floor or a table), towards the first camera.

    Without gravity in the data this is the best guess; the first camera of a map looks along z, with y downwards.
    """
    from lepard_ros.cloud.open3d import import_open3d

    o3d = import_open3d()
    o3d.utility.random.seed(0)
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(points.astype(np.float64)))
    best, rest = np.array([0.0, -1.0, 0.0]), cloud
    for _ in range(4):
        if len(rest.points) < 100:
            break
        plane, inside = rest.segment_plane(0.03, 3, 300)
        normal = np.array(plane[:3]) / np.linalg.norm(plane[:3])
        if abs(normal[1]) > 0.5:  # rather level: y of a camera held upright points down
            return normal if normal[1] < 0 else -normal
        rest = rest.select_by_index(inside, invert=True)
    return best


def _draw_pair(plt: Any, example: Example) -> Any:
    """Cloud and keyframe side by side as their cameras saw them, with lines between matches."""
    registration = example.registration
    source, target = _projected(example.source), _projected(example.target)
    shift = np.array([np.ptp(target[:, 0]) * 0.6 + np.ptp(source[:, 0]) * 0.6 + 0.1, 0.0])
    figure, axis = plt.subplots(figsize=(11, 5))
    for points, flat, offset in ((example.source, source, 0 * shift), (example.target, target, shift)):
        grey = {"cmap": "bone", "vmin": 0.0, "vmax": 1.4 * np.percentile(points[:, 2], 98)}  # the far is not white
        axis.scatter(*(flat + offset).T, c=points[:, 2], s=1.2, linewidths=0, **grey)
    _draw_lines(axis, registration, shift)
    inliers = int(registration.inliers.sum())
    verdict = "accepted" if registration.ok else registration.status.value
    axis.set_title(
        f"cloud (left) and keyframe (right): {inliers} of {len(registration.inliers)} matches agree, {verdict}"
        f" ({registration.method})"
    )
    low, high = np.percentile(np.concatenate([source[:, 1], target[:, 1]]), [0.1, 99.9])
    axis.set_ylim(high + 0.05, low - 0.05)  # y of a camera points down
    axis.set_aspect("equal")
    axis.axis("off")
    return figure


def _draw_lines(axis: Any, registration: Any, shift: FloatArray) -> None:
    """Matches that agree in blue over those that do not in red, a sample of them."""
    count = len(registration.inliers)
    chosen = np.arange(0, count, max(count // MAX_LINES, 1))
    first, second = _projected(registration.matches.source), _projected(registration.matches.target) + shift
    for index in sorted(chosen, key=lambda i: bool(registration.inliers[i])):
        colour = BLUE if registration.inliers[index] else RED
        axis.plot(*zip(first[index], second[index], strict=True), color=colour, lw=0.6, alpha=0.7)


def _projected(points: FloatArray) -> FloatArray:
    """Points (N, 3) as a pinhole camera sees them, (N, 2)."""
    return points[:, :2] / np.maximum(points[:, 2:], 0.1)
