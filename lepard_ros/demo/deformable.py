# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo --mode deformable`: the node tracks a creature that moves in front of a depth camera."""

import csv
from pathlib import Path

import numpy as np

from lepard_ros.demo import pictures
from lepard_ros.demo.processes import run_node
from lepard_ros.demo.results import FALSE_WARP, FrameFigures, Rows, WarpFigures, effort_rows, settled_memory, write_page
from lepard_ros.demo.results import measure_warps as measure
from lepard_ros.demo.story import Film, WarpRun
from lepard_ros.demo.story import make_film as record

__all__ = [
    "FRAMES",
    "MIN_FRAMES",
    "OPENING",
    "PACE",
    "SEED",
    "measure",
    "play_into_node",
    "record",
    "what_went_wrong",
    "write_report",
]

OPENING = "Filming a creature"
SEED = 0
PACE = "wait"  # in real time two cores without a GPU drop half of the clouds
MIN_FRAMES = 12
MIN_FOLLOWED = 0.8  # minimum share of tracked clouds, among those that show the creature and were not dropped
FRAMES = 100  # the whole turn, in ten seconds
# Megabytes, for the node and its matching process together. The model doubles while the body turns: about 70.
MAX_GROWTH = 100.0
MIN_FLAT_FRAMES = 60  # a shorter sequence is only warm-up: the first keyframes and the first relocalisation
_STORY = (
    "A depth camera observed a synthetic creature that moves its limbs and turns around once in a furnished room, "
    "while the camera itself swayed. The node ignores walls, floor and boxes. For a moment a hand covered the lens. "
    "The recording was played as ROS 2 point clouds from one process into the node <code>lepard</code> with "
    "<code>mode: deformable</code> in another, ten clouds a second, or (with <code>--pace wait</code>) each after the "
    "answer to the last. "
    "A cloud that arrives while the node is busy is replaced by the next one, and counted as dropped. The first cloud "
    "becomes the node's model. For every further cloud that it processes, the node either publishes a warp, the "
    "deformation of the model since then (<code>~/warp</code>, and the warped model as <code>~/warped_points</code>), "
    "or reports that it is lost. The error is the distance between the warped and the true position of each point "
    "of the first cloud. The true position is exact, because the creature is synthetic; points that are hidden by now "
    "count, too."
)


def play_into_node(film: Film, output: Path, weights: str, fallback: str, real_time: bool) -> WarpRun:
    """Play the bag in `output` into the node, and record what it publishes. real_time: do not wait for its answers."""
    from lepard_ros.demo.recorder import WarpRecorder

    recorder = WarpRecorder()
    parameters = {"mode": "deformable", "weights": weights, "fallback": fallback}
    if not real_time:
        parameters["match_delay"] = "0"  # the sensor waits, so every cloud waits for its own matches: repeatable
    node = run_node(recorder, output / "bag", len(film.stamps_ns), parameters, output / "node.log", real_time)
    return WarpRun(film, recorder.warps, recorder.recorded.frames, node, weights)


def what_went_wrong(run: WarpRun, figures: WarpFigures) -> list[str]:
    """One message for each missed target."""
    wrong = []
    if figures.answered + dropped_clouds(run) < len(run.film.stamps_ns):
        wrong.append("Some clouds were neither answered nor counted as dropped.")
    if figures.followed < MIN_FOLLOWED * figures.shown:
        wrong.append("Too few clouds were given a warp.")
    if figures.false_warps:
        wrong.append("A warp was published that is far from the truth.")
    if figures.silent_when_covered < figures.covered:
        wrong.append("A warp was published while the lens was covered.")
    if len(figures.frames) >= MIN_FLAT_FRAMES and figures.memory_growth > MAX_GROWTH:
        wrong.append(f"The node's memory grew by {figures.memory_growth:.0f} MB.")
    if run.node.exit_code:
        wrong.append(f"The node ended with code {run.node.exit_code}.")
    return wrong


def write_report(run: WarpRun, figures: WarpFigures, output: Path, seconds: float) -> str:
    """Write pictures, frames.csv and report.html to `output`; returns the summary with the table and the paths."""
    drawn = {
        "storyboard.png": pictures.draw_film(run, figures, output / "storyboard.png"),
        "error.png": pictures.draw_time(figures, output / "error.png"),
        "graph.png": pictures.draw_graph(run, figures, output / "graph.png"),
    }
    rows = [FRAME_COLUMNS, *(frame_row(one) for one in figures.frames)]
    with (output / "frames.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    more = ("Every cloud (also in frames.csv)", rows)
    words = write_page(output, _STORY, table_rows(run, figures), drawn, seconds, more)
    return f"{words}\nFrames:   {output / 'frames.csv'}"


def table_rows(run: WarpRun, figures: WarpFigures) -> Rows:
    """Name and value of every line of the table."""
    found = figures.clouds_until_found
    rate = figures.followed / max(figures.frames[-1].seconds, 1e-9)
    rows = [
        ("clouds played over DDS", f"{len(figures.frames)}, of which {figures.covered} with a covered lens"),
        ("clouds answered / dropped", f"{figures.answered} / {dropped_clouds(run)}"),
        ("warp published", f"{figures.followed} of {figures.shown} answered clouds that show the creature"),
        ("warps a second", f"{rate:.1f}, of {len(figures.frames) / (figures.frames[-1].seconds + 0.1):.0f} clouds"),
        ("no warp with a covered lens", f"{figures.silent_when_covered} of {figures.covered} clouds"),
        ("found again", f"with cloud {found} after the lens was free" if found else "not found again"),
        (f"false warps (over {FALSE_WARP * 100:.0f} cm off)", str(figures.false_warps)),
    ]
    rows += _error_rows(figures)
    memory = run.node.memory[0], *settled_memory(figures.frames)
    rows.append(("node's memory", "{:.0f} MB at start, {:.0f} MB when warm, {:.0f} MB at the end".format(*memory)))
    return rows + effort_rows(run.notes, run.node, run.weights)


def dropped_clouds(run: WarpRun) -> int:
    """The number of clouds that the node reports as dropped."""
    return run.notes[-1].dropped if run.notes else 0


def _error_rows(figures: WarpFigures) -> Rows:
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
