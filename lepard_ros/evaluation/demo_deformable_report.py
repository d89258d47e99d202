# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformable demonstration on one page: every frame compared with the truth, a table, three pictures."""

import csv
from pathlib import Path

import numpy as np

from lepard_ros.evaluation.demo_deformable_measure import FALSE, Figures, FrameFigures, warm
from lepard_ros.evaluation.demo_deformable_pictures import draw_graph, draw_storyboard, draw_time
from lepard_ros.evaluation.demo_deformable_story import WarpRun
from lepard_ros.evaluation.demo_page import Rows, effort_rows, html_table, write_page

_STORY = (
    "A depth camera looked at a synthesised creature that moves its limbs and turns, while the camera itself "
    "swayed. For a moment a hand covered the lens. The recording was played as ROS 2 point clouds from one "
    "process into the node <code>lepard</code> with <code>mode: deformable</code> in another. The first cloud "
    "becomes the node's model. For every further cloud the node either publishes a warp, which says how the "
    "model has bent since then (<code>~/warp</code>, and the bent model as <code>~/warped_points</code>), or "
    "says that it does not know. The error is the distance between the place where the warp puts a point of the "
    "first cloud and the place where that point of the creature truly is, known exactly since the creature is "
    "synthesised; points that are hidden by now count, too."
)


def write_report(run: WarpRun, figures: Figures, output: Path, seconds: float) -> str:
    """Write pictures, frames.csv and report.html to `output`; the closing words with the table and the paths."""
    pictures = {
        "storyboard.png": draw_storyboard(run, figures, output / "storyboard.png"),
        "error.png": draw_time(figures, output / "error.png"),
        "graph.png": draw_graph(run, figures, output / "graph.png"),
    }
    rows = [FRAME_COLUMNS, *(frame_row(one) for one in figures.frames)]
    with (output / "frames.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    more = f"<details><summary>Every cloud (also in frames.csv)</summary>{html_table(rows)}</details>"
    words = write_page(output, _STORY, table_rows(run, figures), pictures, seconds, more)
    return f"{words}\nFrames:   {output / 'frames.csv'}"


def table_rows(run: WarpRun, figures: Figures) -> Rows:
    """Name and value of every line of the table."""
    found = figures.clouds_until_found
    dropped = run.notes[-1].dropped if run.notes else 0
    rows = [
        ("clouds played over DDS", f"{len(figures.frames)}, of which {figures.covered} with a covered lens"),
        ("clouds answered / dropped", f"{figures.answered} / {dropped}"),
        ("warp published", f"{figures.followed} of {figures.seen} clouds that show the creature"),
        ("no warp with a covered lens", f"{figures.silent_when_covered} of {figures.covered} clouds"),
        ("found again", f"with cloud {found} after the lens was free" if found else "not found again"),
        (f"false warps (over {FALSE * 100:.0f} cm off)", str(figures.false_warps)),
    ]
    rows += _error_rows(figures)
    memory = (run.node.memory[0], warm(figures.frames).memory, figures.frames[-1].memory)
    rows.append(("node's memory", "{:.0f} MB at start, {:.0f} MB when warm, {:.0f} MB at the end".format(*memory)))
    return rows + effort_rows(run.notes, run.node, run.weights)


def _error_rows(figures: Figures) -> Rows:
    known = [one for one in figures.frames if one.has_warp]
    if not known:
        return []
    middle, high = (np.array([one.error(percent) for one in known]) for percent in (50, 95))
    worst = known[int(middle.argmax())]
    gap = np.median([one.gap for one in known])
    return [
        ("creature's own motion", f"{100 * max(one.motion for one in known):.0f} cm median since the start, at most"),
        ("error of the warp, median point", f"{100 * middle.mean():.1f} cm mean over the clouds"),
        ("error of the warp, 95 % of points", f"below {100 * high.mean():.1f} cm, mean over the clouds"),
        ("worst cloud", f"{100 * middle.max():.1f} cm median, at {worst.seconds:.1f} s"),
        ("live cloud to warped model", f"{100 * gap:.1f} cm median"),
        (
            "model",
            f"{known[0].points} points, {known[0].nodes} nodes; at the end {known[-1].points}, {known[-1].nodes}",
        ),
    ]


FRAME_COLUMNS = [
    *(
        "cloud",
        "seconds",
        "state",
        "error_median_m",
        "error_mean_m",
        "error_95_m",
        "motion_median_m",
        "live_to_model_m",
    ),
    *("matches", "inliers", "model_points", "graph_nodes", "node_megabytes", "reason"),
]


def frame_row(one: FrameFigures) -> list[str]:
    """The line of one cloud in frames.csv: see FRAME_COLUMNS. Empty where there is no warp."""
    mean = float(np.nanmean(one.errors)) if one.has_warp else float("nan")
    lengths = [one.error(50), mean, one.error(95), one.motion, one.gap]
    return [
        *(str(one.index), f"{one.seconds:.1f}", one.state),
        *("" if np.isnan(value) else f"{value:.4f}" for value in lengths),
        *(str(value) for value in (one.matches, one.inliers, one.points, one.nodes, round(one.memory))),
        one.reason,
    ]
