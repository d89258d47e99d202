# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The demonstration on one page: a table, four pictures, and what they show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.evaluation.demo_page import COLOURS, Rows, effort_rows, pyplot, save_figure, write_page
from lepard_ros.evaluation.demo_story import DemoRun, FrameNote, MatchNote
from lepard_ros.evaluation.trajectories import Trajectory, TrajectoryError, compare

WRONG = 0.5  # metres: a pose published as good that is further off than this is a false one
BLUE, RED = "#2659f2", "#e0261a"
LINES_DRAWN = 60
_STORY = (
    "A depth camera was carried once around a synthesised room. Then a hand covered its lens, and when the hand was "
    "gone the camera was somewhere else in the room. The recording was played as ROS 2 point clouds from one process "
    "into the node <code>lepard</code> in another. For every cloud the node either publishes the camera's pose in its "
    "map (TF <code>map</code> &rarr; the camera's frame, and odometry with covariance), or says that it does not know "
    "it: it never guesses. All figures compare what was published with the true poses."
)


@dataclass(frozen=True)
class Figures:
    """What the table is made of. error: against the truth, None with fewer than three poses."""

    error: TrajectoryError | None
    trajectory: Trajectory
    tracked: int
    seen: int
    false_poses: int
    silent_when_covered: int
    frames_until_found: int | None


def write_report(run: DemoRun, figures: Figures, output: Path, seconds: float) -> str:
    """Write pictures and report.html to `output`; the closing words with the table and the paths."""
    rows = table_rows(run, figures)
    pictures = {
        "storyboard.png": draw_storyboard(run, output / "storyboard.png"),
        "path.png": draw_path(run, figures, output / "path.png"),
        "error.png": draw_error(run, figures, output / "error.png"),
        "matches.png": draw_matches(run, output / "matches.png"),
    }
    return write_page(output, _STORY, rows, pictures, seconds)


def measure(run: DemoRun) -> Figures:
    """Compare what was published with the truth."""
    trajectory = run.recorded.trajectory("map", run.frame)
    story = run.story
    published = set(run.recorded.tf.get(("map", run.frame), {}))
    error = compare(trajectory, story.truth()) if len(trajectory) >= 3 else None
    stamps = np.array(story.stamps_ns)
    found = [index for index, stamp in enumerate(stamps[story.moved]) if stamp in published]
    return Figures(
        error=error,
        trajectory=trajectory,
        tracked=sum(stamp in published for stamp in stamps[~story.covered]),
        seen=int((~story.covered).sum()),
        false_poses=int((error.errors > WRONG).sum()) if error else 0,
        silent_when_covered=sum(stamp not in published for stamp in stamps[story.covered]),
        frames_until_found=found[0] + 1 if found else None,
    )


def table_rows(run: DemoRun, figures: Figures) -> Rows:
    """Name and value of every line of the table."""
    notes, story = run.recorded.frames, run.story
    covered = int(story.covered.sum())
    found = figures.frames_until_found
    again = f"with cloud {found} after the lens was free" if found else "not found again"
    rows = [
        ("clouds played over DDS", f"{len(story.stamps_ns)}, of which {covered} with a covered lens"),
        ("clouds answered / dropped", f"{len(notes)} / {notes[-1].dropped if notes else 0}"),
        ("pose published", f"{figures.tracked} of {figures.seen} clouds that show something"),
        ("no pose with a covered lens", f"{figures.silent_when_covered} of {covered} clouds"),
        ("known place recognised", again),
        (f"false poses (over {WRONG} m off)", str(figures.false_poses)),
    ]
    if figures.error is not None:
        error = figures.error
        relative = f"{error.rpe_translation * 100:.1f} cm, {error.rpe_rotation:.2f} degrees"
        rows += [
            ("position error (ATE RMSE)", f"{error.ate_rmse * 100:.1f} cm"),
            ("drift over a second (RPE)", relative),
        ]
    loops = sum(note.loop_closed for note in notes)
    rows.append(("keyframes / loops closed", f"{notes[-1].keyframes if notes else 0} / {loops}"))
    return rows + effort_rows(notes, run.node, run.weights)


# ---- pictures ----


def _notes_by_stamp(run: DemoRun) -> dict[int, FrameNote]:
    return {note.stamp_ns: note for note in run.recorded.frames}


def draw_storyboard(run: DemoRun, path: Path) -> str:
    """Eight moments of the story as depth images, with what the node said to each."""
    story, notes = run.story, _notes_by_stamp(run)
    plt = pyplot()
    walk = np.flatnonzero(~story.covered & ~story.moved)
    moved, covered = np.flatnonzero(story.moved), np.flatnonzero(story.covered)
    chosen = [*walk[np.linspace(0, len(walk) - 1, 4).astype(int)], covered[0], *moved[[0, 1, -1]]]
    figure, axes = plt.subplots(2, 4, figsize=(13, 6.2))
    for axis, index in zip(axes.flat, chosen, strict=True):
        note = notes.get(story.stamps_ns[index])
        state = note.state if note else "no answer"
        depth = np.where(story.depths[index] > 0, story.depths[index], np.nan)
        axis.imshow(depth, cmap="viridis_r", vmin=0.2, vmax=4.5)
        seconds = (story.stamps_ns[index] - story.stamps_ns[0]) * 1e-9
        axis.set_title(f"{seconds:.1f} s   {state}", color=COLOURS.get(state, "black"), fontsize=12, fontweight="bold")
        axis.set_xlabel(_what_happens(run, index), fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
    save_figure(figure, path, dpi=90)
    return "What the camera saw (near is bright), and the node's state at that moment."


def _what_happens(run: DemoRun, index: int) -> str:
    if run.story.covered[index]:
        return "a hand covers the lens"
    return "somewhere else in the room" if run.story.moved[index] else "carried around the room"


def draw_path(run: DemoRun, figures: Figures, path: Path) -> str:
    """The room from above as the node mapped it, with the true and the published path."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(8, 7))
    if figures.error is not None:
        points = run.recorded.map_points.astype(float)
        alignment = figures.error.alignment
        world = points @ alignment[:3, :3].T + alignment[:3, 3]
        # The floor and the ceiling would cover everything else.
        inside = world[(world[:, 2] > np.percentile(world[:, 2], 15)) & (world[:, 2] < np.percentile(world[:, 2], 90))]
        axis.scatter(inside[:, 0], inside[:, 1], s=2, c="#b8bcc4", linewidths=0, label="map (seen from above)")
    for part, label in ((~run.story.covered & ~run.story.moved, "true path"), (run.story.moved, None)):
        truth = run.story.poses[part][:, :3, 3]
        axis.plot(truth[:, 0], truth[:, 1], color="black", linewidth=1.2, label=label)
    _draw_published(axis, run, figures)
    axis.set_aspect("equal")
    axis.set_xlabel("x [m]")
    axis.set_ylabel("y [m]")
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=2, frameon=False)  # above: it covers nothing
    save_figure(figure, path)
    return "The node's map from above, the true path of the camera, and the poses that the node published on TF."


def _draw_published(axis: Any, run: DemoRun, figures: Figures) -> None:
    """The published positions, coloured by the state that came with them."""
    if figures.error is None:
        return
    notes = _notes_by_stamp(run)
    states = [
        notes[round(stamp * 1e9)].state if round(stamp * 1e9) in notes else "OK" for stamp in figures.error.stamps
    ]
    for state in ("OK", "RELOCALISED"):
        chosen = figures.error.estimate[[one == state for one in states]]
        if len(chosen):
            size = 22 if state == "OK" else 110
            marker = "o" if state == "OK" else "*"
            label = f"published pose ({state})"
            axis.scatter(chosen[:, 0], chosen[:, 1], s=size, marker=marker, c=COLOURS[state], label=label, zorder=3)


def draw_error(run: DemoRun, figures: Figures, path: Path) -> str:
    """The position error over time; where the node was lost there is none."""
    if figures.error is None:
        return ""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(10, 3.6))
    start = run.story.stamps_ns[0] * 1e-9
    axis.plot(
        figures.error.stamps - start, figures.error.errors * 100, ".", color=COLOURS["OK"], label="error of the pose"
    )
    lost = [note.stamp_ns * 1e-9 - start for note in run.recorded.frames if note.state == "LOST"]
    for index, seconds in enumerate(lost):
        label = "lost: no pose published" if index == 0 else None
        axis.axvspan(seconds - 0.1, seconds + 0.1, color=COLOURS["LOST"], alpha=0.25, linewidth=0, label=label)
    found = [note.stamp_ns * 1e-9 - start for note in run.recorded.frames if note.state == "RELOCALISED"]
    for index, seconds in enumerate(found):
        axis.axvline(seconds, color=COLOURS["RELOCALISED"], label="found again" if index == 0 else None)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("time [s]")
    axis.set_ylabel("position error [cm]")
    axis.legend(loc="best")
    save_figure(figure, path)
    return "Error of every published pose against the truth, and the time in which the node knew that it was lost."


def _evenly(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` of the rows (N,), evenly spread."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(int))] if len(rows) else rows


def draw_matches(run: DemoRun, path: Path) -> str:
    """The cloud with the most telling matches beside its keyframe, with lines: inliers blue, outliers red."""
    note = _telling_matches(run)
    if note is None:
        return ""
    plt = pyplot()
    story = run.story
    live, key = (story.depths[story.stamps_ns.index(stamp)] for stamp in (note.stamp_ns, note.keyframe_ns))
    gap = 12
    image = np.concatenate([live, np.full((live.shape[0], gap), np.nan, np.float32), key], axis=1)
    figure, axis = plt.subplots(figsize=(12, 5))
    axis.imshow(np.where(image > 0, image, np.nan), cmap="gray_r", vmin=0.2, vmax=5.5)
    left, right = pixels(note.source, story.camera), pixels(note.target, story.camera)
    right[:, 0] += live.shape[1] + gap
    agreeing = np.asarray(note.inlier, dtype=bool)
    wrong, right_ones = (
        _evenly(np.flatnonzero(one), count) for one, count in ((~agreeing, 20), (agreeing, LINES_DRAWN))
    )
    for rows, colour, alpha in ((wrong, RED, 0.4), (right_ones, BLUE, 0.9)):
        for index in rows:
            ends = np.stack([left[index], right[index]])
            axis.plot(ends[:, 0], ends[:, 1], "-o", color=colour, linewidth=0.9, markersize=3, alpha=alpha)
    axis.set_title(
        f"{agreeing.sum()} of {len(agreeing)} matches agree with the motion; "
        f"drawn are {len(right_ones)} of these (blue) and {len(wrong)} of the others (red)"
    )
    axis.set_axis_off()
    save_figure(figure, path)
    return "A live cloud (left) and the keyframe it was matched with (right): inliers blue, outliers red."


def _telling_matches(run: DemoRun) -> MatchNote | None:
    """Of the clouds with a pose and enough inliers, the one that is furthest in time from its keyframe."""
    stamps = set(run.story.stamps_ns)
    published = run.recorded.tf.get(("map", run.frame), {})
    usable = [
        note
        for note in run.recorded.matches
        if note.stamp_ns in published and note.keyframe_ns in stamps and note.inlier.sum() >= 10
    ]
    return max(usable, key=lambda note: abs(note.stamp_ns - note.keyframe_ns), default=None)


def pixels(points: NDArray[np.floating], camera: Any) -> NDArray[np.float64]:
    """Where a camera sees points (M, 3) of its frame: (M, 2) column and row."""
    x, y, z = points.astype(float).T
    return np.stack([camera.fx * x / z + camera.cx, camera.fy * y / z + camera.cy], axis=1)
