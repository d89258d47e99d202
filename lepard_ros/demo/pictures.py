# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of both demonstrations. Each function draws one, writes it, and returns its caption."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.demo.results import DROPPED, FrameFigures, RigidFigures, WarpFigures
from lepard_ros.demo.story import FrameNote, MatchNote, RigidRun, WarpRun
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.report.figure import INLIER, OUTLIER, pyplot

COLOURS = {
    "OK": "#2a9d4a",
    "RELOCALISED": "#1f5fd0",
    "LOST": "#d03020",
    "INITIALISING": "#999999",
    "REFUSED": "#b07010",
    "dropped": "#dddddd",
}
LINES_DRAWN = 60
MAX_ERROR = 0.05  # metres, the end of the colour scale
ERROR_COLOURS, GREY = "turbo", (0.62, 0.62, 0.62)
GROWN = 0.02  # metres: a model point farther than this from the first cloud's points is new surface
COLUMNS = 6


def _save(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a figure and forget it."""
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)


# --- rigid -----------------------------------------------------------------------------------------------------------


def _notes_by_stamp(run: RigidRun) -> dict[int, FrameNote]:
    return {note.stamp_ns: note for note in run.recorded.frames}


def draw_walk(run: RigidRun, path: Path) -> str:
    """Eight depth images of the sequence, with the node's state for each."""
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
    _save(figure, path, dpi=90)
    return "Depth images (near is bright), and the node's state at that time."


def _what_happens(run: RigidRun, index: int) -> str:
    if run.story.covered[index]:
        return "a hand covers the lens"
    return "somewhere else in the room" if run.story.moved[index] else "carried around the room"


def draw_path(run: RigidRun, figures: RigidFigures, path: Path) -> str:
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
    _save(figure, path)
    return "The node's map from above, the true path of the camera, and the poses that the node published on TF."


def _draw_published(axis: Any, run: RigidRun, figures: RigidFigures) -> None:
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


def draw_error(run: RigidRun, figures: RigidFigures, path: Path) -> str:
    """The position error over time; none while the node was lost."""
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
    _save(figure, path)
    return "Error of every published pose, and the time during which the node reported that it was lost."


def _evenly(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` of the rows (N,), evenly spread."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, count).astype(int))] if len(rows) else rows


def draw_matches(run: RigidRun, path: Path) -> str:
    """A cloud with informative matches next to its keyframe, with lines: inliers blue, outliers red."""
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
    for rows, colour, alpha in ((wrong, OUTLIER, 0.4), (right_ones, INLIER, 0.9)):
        for index in rows:
            ends = np.stack([left[index], right[index]])
            axis.plot(ends[:, 0], ends[:, 1], "-o", color=colour, linewidth=0.9, markersize=3, alpha=alpha)
    axis.set_title(
        f"{agreeing.sum()} of {len(agreeing)} matches agree with the motion; "
        f"drawn are {len(right_ones)} of these (blue) and {len(wrong)} of the others (red)"
    )
    axis.set_axis_off()
    _save(figure, path)
    return "A live cloud (left) and the keyframe it was matched with (right): inliers blue, outliers red."


def _telling_matches(run: RigidRun) -> MatchNote | None:
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


# --- deformable: seen as the camera sees, x to the right, y down, far points first ------------------------------------


def draw_film(run: WarpRun, figures: WarpFigures, path: Path) -> str:
    """Six moments: the live cloud, the model as the node warped it, and the error of the warp."""
    plt = pyplot()
    moments = _moments(figures)
    figure, axes = plt.subplots(3, len(moments), figsize=(2.5 * len(moments), 8.6), layout="constrained")
    limits = _limits([run.film.cloud(one.index) for one in figures.frames if not one.covered])
    for column, one in zip(axes.T, moments, strict=True):
        column[0].set_title(
            f"{one.seconds:.1f} s  {one.state}", color=COLOURS.get(one.state, "black"), fontweight="bold"
        )
        _draw_live(column[0], run, one)
        _draw_model(column[1], run, one)
        image = _draw_errors(column[2], one)
        for axis in column:
            _frame_axis(axis, limits)
    for axis, text in zip(
        axes[:, 0], ("what the camera sees", "the node's model, warped", "error of the warp"), strict=True
    ):
        axis.set_ylabel(text, fontsize=12)
    bar = figure.colorbar(image, ax=axes[2], orientation="horizontal", fraction=0.08, aspect=50, extend="max")
    bar.set_label("distance of each point of the first cloud from where it truly is [cm]")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    return (
        "Six times. Top: the live cloud, near is bright. Middle: the warped model; every point keeps its colour "
        "from the start, so a hand stays the colour of a hand; grey is surface that was seen only later. Bottom: the "
        "warped points of the first cloud, coloured by their error."
    )


def _moments(figures: WarpFigures) -> list[FrameFigures]:
    """The frames to show: the first, some on the way, the covered lens, the first after it, the last; none dropped."""
    frames = [one for one in figures.frames if one.state != DROPPED] or figures.frames
    hidden = [number for number, one in enumerate(frames) if one.covered]
    if not hidden:
        return [frames[index] for index in np.linspace(0, len(frames) - 1, COLUMNS).astype(int)]
    before = np.linspace(0, max(hidden[0] - 1, 0), COLUMNS - 3).astype(int)
    chosen = [*before, hidden[len(hidden) // 2], min(hidden[-1] + 1, len(frames) - 1), len(frames) - 1]
    return [frames[index] for index in chosen]


def _limits(clouds: list[FloatArray]) -> tuple[float, float, float, float]:
    """Left, right, bottom and top that hold all clouds with a rim, metres."""
    points = np.concatenate([cloud[:, :2] for cloud in clouds])
    low, high = points.min(axis=0) - 0.08, points.max(axis=0) + 0.08
    return float(low[0]), float(high[0]), float(high[1]), float(low[1])


def _frame_axis(axis: Any, limits: tuple[float, float, float, float]) -> None:
    axis.set_xlim(limits[0], limits[1])
    axis.set_ylim(limits[2], limits[3])
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])


def _scatter(axis: Any, points: FloatArray, **style: Any) -> Any:
    """Dots at points (N, 3), the far ones first; a style `c` with one value or colour for each point is sorted, too."""
    order = np.argsort(-points[:, 2])
    if isinstance(style.get("c"), np.ndarray):
        style["c"] = style["c"][order]
    return axis.scatter(points[order, 0], points[order, 1], **{"s": 3, "linewidths": 0, **style})


def _say(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#777777", fontsize=11)


def _draw_live(axis: Any, run: WarpRun, one: FrameFigures) -> None:
    if one.covered:
        _say(axis, "a hand\ncovers the lens")
        return
    points = run.film.cloud(one.index)
    _scatter(axis, points, c=points[:, 2], cmap="viridis_r")


def _draw_model(axis: Any, run: WarpRun, one: FrameFigures) -> None:
    """The published model in the colours of the first cloud's points nearest to it, grey where there is none."""
    if not one.has_warp:
        _say(axis, "no warp\npublished")
        return
    model = run.recorded.warped[run.film.stamps_ns[one.index]]
    distance, index = cKDTree(one.places).query(model)
    rest = run.film.truth(_rest(run, one), one.index)[0]
    colours = np.where((distance < GROWN)[:, None], _place_colours(rest)[index], GREY)
    _scatter(axis, model, c=colours)


def _draw_errors(axis: Any, one: FrameFigures) -> Any:
    known = np.isfinite(one.errors)
    style = {"cmap": ERROR_COLOURS, "vmin": 0, "vmax": 100 * MAX_ERROR}
    if not one.has_warp:
        _say(axis, "nothing to\ncompare")
        return axis.scatter([], [], c=[], **style)
    axis.set_xlabel(f"median {100 * one.error(50):.1f} cm", fontsize=10)
    return _scatter(axis, one.places[known], c=100 * one.errors[known], **style)


def _rest(run: WarpRun, one: FrameFigures) -> int:
    """The frame that the model of a frame's warp began with."""
    stamps = run.film.stamps_ns
    return stamps.index(run.recorded.warps[stamps[one.index]].rest_ns)


def _place_colours(points: FloatArray) -> FloatArray:
    """A colour (N, 3) for each of points (N, 3): hue by height, with another half turn of it from left to right."""
    from matplotlib.colors import hsv_to_rgb

    low, high = points.min(axis=0), points.max(axis=0)
    share = (points - low) / np.maximum(high - low, 1e-9)
    hue = (0.75 * share[:, 1] + 0.45 * share[:, 0]) % 1.0
    return hsv_to_rgb(np.stack([hue, np.full_like(hue, 0.85), np.full_like(hue, 0.88)], axis=1))


def draw_time(figures: WarpFigures, path: Path) -> str:
    """Over time: the state of each cloud, the error of each warp, the size of the model, the node's memory."""
    plt = pyplot()
    figure, axes = plt.subplots(4, 1, figsize=(10, 8), sharex=True, height_ratios=(0.4, 3, 1.3, 1.3))
    seconds = np.array([one.seconds for one in figures.frames])
    _draw_states(axes[0], figures, seconds)
    _draw_error_curve(axes[1], figures, seconds)
    for name, colour in (("points", "#444444"), ("nodes", "#a05a9c")):
        size = np.array([getattr(one, name) or np.nan for one in figures.frames])
        label = "points of the model" if name == "points" else "nodes of its graph"
        axes[2].plot(seconds, size, ".-", color=colour, label=label)
    axes[3].plot(seconds, [one.memory for one in figures.frames], ".-", color="#b07010", label="node's memory [MB]")
    for axis in axes[1:]:
        axis.set_ylim(0, 1.15 * axis.get_ylim()[1])
        axis.grid(alpha=0.3)
    for axis in axes:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    axes[3].set_xlabel("time [s]")
    _save(figure, path)
    return (
        "Over time, from top to bottom: the node's state for each cloud (LOST: no warp is published); the error of the "
        "warp, with the creature's own motion since the start, which would be the error without a warp; the size of "
        "the model, which grows while new sides of the creature are seen; the node's memory."
    )


def _draw_states(axis: Any, figures: WarpFigures, seconds: FloatArray) -> None:
    """A row of squares, one for each cloud."""
    for state, colour in COLOURS.items():
        when = seconds[[one.state == state for one in figures.frames]]
        if len(when):
            axis.plot(when, np.zeros(len(when)), "s", color=colour, markersize=6, label=state)
    axis.set_axis_off()


def _draw_error_curve(axis: Any, figures: WarpFigures, seconds: FloatArray) -> None:
    middle, high = (100 * np.array([one.error(percent) for one in figures.frames]) for percent in (50, 95))
    motion = 100 * np.array([one.motion for one in figures.frames])
    axis.plot(seconds, motion, "--", color="#888888", label="motion since the start\n(median point)")
    axis.fill_between(
        seconds, middle, high, color="#2659f2", alpha=0.18, linewidth=0, label="error, up to 95 %\nof the points"
    )
    axis.plot(seconds, middle, ".-", color="#2659f2", label="error of the warp\n(median point)")
    axis.set_ylabel("[cm]")


def draw_graph(run: WarpRun, figures: WarpFigures, path: Path) -> str:
    """The deformation graph at rest and bent to the last cloud, edges coloured by how much they were stretched."""
    known = [one for one in figures.frames if one.has_warp]
    if not known:
        return ""
    one = known[-1]
    warp = run.recorded.warps[run.film.stamps_ns[one.index]].warp
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(12, 7), layout="constrained")
    begin = run.film.cloud(_rest(run, one))
    moments = (
        (begin, warp.graph.nodes, "at rest, on the first cloud"),
        (run.film.cloud(one.index), warp.moved_nodes, f"bent to the cloud at {one.seconds:.1f} s"),
    )
    limits = _limits([cloud for cloud, _, _ in moments])
    for axis, (cloud, nodes, text) in zip(axes, moments, strict=True):
        _scatter(axis, cloud, s=2, color="#eceef2")
        lines = _draw_edges(axis, nodes, warp)
        axis.set_title(text)
        _frame_axis(axis, limits)
    bar = figure.colorbar(lines, ax=axes, orientation="horizontal", shrink=0.6, aspect=50, extend="both")
    bar.set_label("length of an edge when bent, as a share of its length at rest")
    figure.savefig(path, dpi=90)
    plt.close(figure)
    left_out = int((~warp.graph.active).sum())
    return (
        f"The deformation graph: {len(warp.graph.nodes)} nodes (dots) on the surface and {len(warp.graph.edges)} edges "
        "that hold neighbours together, drawn over the cloud in grey. Each node carries a rotation and a translation. "
        f"{left_out or 'No'} nodes lie on parts too small to be warped (crosses)."
    )


def _draw_edges(axis: Any, nodes: FloatArray, warp: Any) -> Any:
    """Edges between nodes (n, 3) coloured by their stretch, and the nodes."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap

    stretch_colours = LinearSegmentedColormap.from_list("stretch", ["#1f4fd8", "#9a9a9a", "#d8261f"])
    ends = nodes[warp.graph.edges][:, :, :2]
    lines = LineCollection(list(ends), array=warp.stretch(), cmap=stretch_colours, linewidths=1.2)
    lines.set_clim(0.6, 1.4)
    axis.add_collection(lines)
    active = warp.graph.active
    axis.plot(*nodes[active, :2].T, ".", color="#222222", markersize=3)
    axis.plot(*nodes[~active, :2].T, "x", color="black", markersize=4)
    return lines
