# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo --mode rigid`: the node tracks a camera that moves around a room."""

from pathlib import Path

import numpy as np

from lepard_ros.data.bag_writer import CAMERA_FRAME
from lepard_ros.data.trajectories import FALSE_POSE, FALSE_TURN
from lepard_ros.demo import pictures
from lepard_ros.demo.processes import run_node
from lepard_ros.demo.results import RigidFigures, Rows, effort_rows, write_page
from lepard_ros.demo.results import measure_rigid as measure
from lepard_ros.demo.story import RigidRun, Story
from lepard_ros.demo.story import make_story as record

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

OPENING = "Rendering a room"
SEED = 3
PACE = "real"  # two cores keep up with the camera
MIN_FRAMES, FRAMES = 20, 60
MIN_TRACKED = 0.8  # minimum share of tracked clouds, among those with a free lens
_STORY = (
    "A depth camera moved once around a synthetic room. Then a hand covered its lens, and when the hand was gone the "
    "camera was somewhere else in the room. The recording was played as ROS 2 point clouds from one process into the "
    "node <code>lepard</code> in another, at the camera's own rate: clouds that arrive while the node is busy are "
    "dropped. For every cloud that it processes, the node either publishes the camera's pose in its map (TF "
    "<code>map</code> &rarr; the camera's frame, and odometry with covariance), or reports that it is lost: it "
    "never guesses. All figures compare the published poses with the true ones."
)


def play_into_node(story: Story, output: Path, weights: str, fallback: str, real_time: bool) -> RigidRun:
    """Play the bag in `output` into the node, and record what it publishes. real_time: do not wait for its answers."""
    from lepard_ros.demo.recorder import Recorder

    recorder = Recorder()
    parameters = {"weights": weights, "fallback": fallback}
    node = run_node(recorder, output / "bag", len(story.stamps_ns), parameters, output / "node.log", real_time)
    return RigidRun(story, recorder.recorded, CAMERA_FRAME, node, weights)


def what_went_wrong(run: RigidRun, figures: RigidFigures) -> list[str]:
    """One message for each missed target."""
    wrong = []
    if figures.tracked < MIN_TRACKED * figures.seen:
        wrong.append("Too few clouds were given a pose.")
    if figures.false_poses:
        wrong.append("A pose was published that is far from the truth.")
    if run.node.exit_code:
        wrong.append(f"The node ended with code {run.node.exit_code}.")
    return wrong


def write_report(run: RigidRun, figures: RigidFigures, output: Path, seconds: float) -> str:
    """Write pictures and report.html to `output`; returns the summary with the table and the paths."""
    rows = table_rows(run, figures)
    drawn = {
        "storyboard.png": pictures.draw_walk(run, output / "storyboard.png"),
        "path.png": pictures.draw_path(run, figures, output / "path.png"),
        "error.png": pictures.draw_error(run, figures, output / "error.png"),
        "matches.png": pictures.draw_matches(run, output / "matches.png"),
    }
    return write_page(output, _STORY, rows, drawn, seconds)


def table_rows(run: RigidRun, figures: RigidFigures) -> Rows:
    """Name and value of every line of the table."""
    notes, story = run.recorded.frames, run.story
    covered = int(story.covered.sum())
    found = figures.frames_until_found
    again = f"with cloud {found} after the lens was free" if found else "not found again"
    rows = [
        ("clouds played over DDS", f"{len(story.stamps_ns)}, of which {covered} with a covered lens"),
        ("clouds answered / dropped", f"{len(notes)} / {notes[-1].dropped if notes else 0}"),
        ("pose published", f"{figures.tracked} of {figures.seen} clouds that show something"),
        ("sensor's rate / poses", f"{sensor_rate(story):.1f} / {pose_rate(run, figures):.1f} a second"),
        ("no pose with a covered lens", f"{figures.silent_when_covered} of {covered} clouds"),
        ("known place recognised", again),
        (f"false poses (over {FALSE_POSE} m or {FALSE_TURN:.0f} degrees off)", str(figures.false_poses)),
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


def sensor_rate(story: Story) -> float:
    """Clouds a second."""
    return 1e9 / float(np.median(np.diff(story.stamps_ns)))


def pose_rate(run: RigidRun, figures: RigidFigures) -> float:
    """Poses per second while the lens was free: the sensor's rate if no cloud was dropped or lost."""
    return sensor_rate(run.story) * figures.tracked / max(figures.seen, 1)
