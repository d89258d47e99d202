# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`lepard demo --mode deformable`: a creature that moves before a depth camera, and what the node makes of it."""

from pathlib import Path

from lepard_ros.evaluation.demo_deformable_measure import Figures, measure
from lepard_ros.evaluation.demo_deformable_report import write_report
from lepard_ros.evaluation.demo_deformable_story import Film, WarpRun
from lepard_ros.evaluation.demo_deformable_story import make_film as record
from lepard_ros.evaluation.demo_processes import run_node

__all__ = ["LEAST_FRAMES", "OPENING", "SEED", "measure", "play_into_node", "record", "what_went_wrong", "write_report"]

OPENING = "Filming a creature"
SEED = 0
LEAST_FRAMES = 12
LEAST_FOLLOWED = 0.8  # share of the clouds that show the creature; less is no demonstration
MOST_GROWTH = 60.0  # megabytes, as in the soak test


def play_into_node(film: Film, output: Path, weights: str, fallback: str) -> WarpRun:
    """Play the bag in `output` into the node, and record what it publishes."""
    from lepard_ros.evaluation.demo_recorder import WarpRecorder

    recorder = WarpRecorder()
    parameters = {"mode": "deformable", "weights": weights, "fallback": fallback}
    node = run_node(recorder, output / "bag", len(film.stamps_ns), parameters, output / "node.log")
    return WarpRun(film, recorder.warps, recorder.recorded.frames, node, weights)


def what_went_wrong(run: WarpRun, figures: Figures) -> list[str]:
    """One sentence for each thing that a working node does not do."""
    wrong = []
    if figures.answered < len(run.film.stamps_ns):
        wrong.append("Some clouds were not answered.")
    if figures.followed < LEAST_FOLLOWED * figures.seen:
        wrong.append("Too few clouds were given a warp.")
    if figures.false_warps:
        wrong.append("A warp was published that is far from the truth.")
    if figures.silent_when_covered < figures.covered:
        wrong.append("A warp was published while the lens was covered.")
    if figures.memory_growth > MOST_GROWTH:
        wrong.append(f"The node's memory grew by {figures.memory_growth:.0f} MB.")
    if run.node.exit_code:
        wrong.append(f"The node ended with code {run.node.exit_code}.")
    return wrong
