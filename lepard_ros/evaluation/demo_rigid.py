# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo --mode rigid`: a camera that is carried around a room, and where the node says it is."""

from pathlib import Path

from lepard_ros.evaluation.bag_writer import CAMERA_FRAME
from lepard_ros.evaluation.demo_processes import run_node
from lepard_ros.evaluation.demo_report import Figures, measure, write_report
from lepard_ros.evaluation.demo_story import DemoRun, Story
from lepard_ros.evaluation.demo_story import make_story as record

__all__ = ["LEAST_FRAMES", "OPENING", "SEED", "measure", "play_into_node", "record", "what_went_wrong", "write_report"]

OPENING = "Rendering a room"
SEED = 3
LEAST_FRAMES = 20
LEAST_TRACKED = 0.8  # share of the clouds that show something; less is no demonstration


def play_into_node(story: Story, output: Path, weights: str, fallback: str) -> DemoRun:
    """Play the bag in `output` into the node, and record what it publishes."""
    from lepard_ros.evaluation.demo_recorder import Recorder

    recorder = Recorder()
    parameters = {"weights": weights, "fallback": fallback}
    node = run_node(recorder, output / "bag", len(story.stamps_ns), parameters, output / "node.log")
    return DemoRun(story, recorder.recorded, CAMERA_FRAME, node, weights)


def what_went_wrong(run: DemoRun, figures: Figures) -> list[str]:
    """One sentence for each thing that a working node does not do."""
    wrong = []
    if figures.tracked < LEAST_TRACKED * figures.seen:
        wrong.append("Too few clouds were given a pose.")
    if figures.false_poses:
        wrong.append("A pose was published that is far from the truth.")
    if run.node.exit_code:
        wrong.append(f"The node ended with code {run.node.exit_code}.")
    return wrong
