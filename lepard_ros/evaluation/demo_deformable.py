"""`lepard demo --mode deformable`: a creature that moves before a depth camera, and what the node makes of it."""

import argparse
import sys
import time
from pathlib import Path

from lepard_ros.errors import InputError
from lepard_ros.evaluation.demo_deformable_measure import Figures, measure
from lepard_ros.evaluation.demo_deformable_report import write_report
from lepard_ros.evaluation.demo_deformable_story import Film, WarpRun, make_film
from lepard_ros.evaluation.demo_processes import prepare_folder, prepare_surroundings, run_node
from lepard_ros.evaluation.demo_story import write_bag

SEED = 0
LEAST_FRAMES = 12
LEAST_FOLLOWED = 0.8  # share of the clouds that show the creature; less is no demonstration
MOST_GROWTH = 60.0  # megabytes, as in the soak test


def show_deformable(args: argparse.Namespace) -> int:
    """A creature before a camera; 0 if the node followed it, 1 if not."""
    if args.frames < LEAST_FRAMES:
        raise InputError(f"The film needs at least {LEAST_FRAMES} frames.")
    started = time.monotonic()
    output = prepare_folder(args.output)
    print(f"Filming a creature, {args.frames} depth images ...", flush=True)
    film = make_film(SEED if args.seed is None else args.seed, args.frames)
    write_bag(film, output / "bag")
    run = play_into_node(film, output, args.weights or "deformable")
    figures = measure(run)
    print(write_report(run, figures, output, time.monotonic() - started))
    complaints = what_went_wrong(run, figures)
    for complaint in complaints:
        print(f"Not what this is to show: {complaint} The node's log is {output / 'node.log'}.", file=sys.stderr)
    return 1 if complaints else 0


def play_into_node(film: Film, output: Path, weights: str) -> WarpRun:
    """Play the bag in `output` into the node, and record what it publishes."""
    prepare_surroundings()
    from lepard_ros.evaluation.demo_recorder import WarpRecorder

    recorder = WarpRecorder()
    parameters = {"mode": "deformable", "weights": weights}
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
