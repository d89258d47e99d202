# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""`make soak`: the real node at a sensor's rate for a long time. Does it grow, does it slow down, does it fail?

python bench/soak.py --seconds 1800
python bench/soak.py --seconds 600 --mode deformable
A synthesised camera walks around a room again and again, at 10 clouds a second, whatever the node makes of it. Nothing
covers its lens and nobody carries it away: from the second round on the map knows the walk. Printed are memory after
warm-up and at the end, latency percentiles, drops, and states from the second round on; the exit code is 1 if memory
grows, if less than MIN_OK of the clouds that the node took are OK, if an unforeseen error occurs, or if the node ends.
--mode deformable: the film of the demonstration, a body that turns round and back, with a hand before the lens, which
hides it from one cloud in 33. At least MIN_OK_WARPS of the clouds must be OK, and no warp false.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from tqdm import tqdm

from lepard_ros.demo.player import FRAME_NUMBERS
from lepard_ros.demo.processes import (
    node_process,
    player_process,
    prepare_surroundings,
    resident_megabytes,
    wait_for_node,
)
from lepard_ros.demo.recorder import Recorder, WarpRecorder
from lepard_ros.demo.results import FALSE_WARP
from lepard_ros.demo.story import FILM_FRAMES, START_NS, Film, FrameNote, Recording, WarpNote, make_film, write_bag
from lepard_ros.synthesis.room_sequences import room_sequence

WALK_FRAMES, WALK_RATE = 120, 10.0
ROUND_SECONDS = 2 * WALK_FRAMES / WALK_RATE  # there and back again
WARM_UP_SECONDS = 300.0  # after which memory must be flat; a shorter run takes WARM_UP of its time
WARM_UP = 0.5
MAX_GROWTH = 20.0  # megabytes
MINUTE = 60  # samples: the working memory of a cloud comes and goes, so medians over a minute are compared
MIN_OK = 0.99  # share of the clouds from the second round on
MIN_OK_WARPS = 0.8  # the same in deformable mode
MAX_REASONS = 5  # printed, for clouds without a pose or warp
INTERNAL_ERROR = "Tracking a cloud failed"


def main(argv: list[str] | None = None) -> int:
    """Run the soak test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--mode", choices=("rigid", "deformable"), default="rigid")
    parser.add_argument("--weights", help="weights: a shipped name or a file (default: those of the mode)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return soak(Path(folder), args.seconds, args.mode, args.weights or args.mode)


def soak(folder: Path, seconds: float, mode: str, weights: str) -> int:
    """Play the recording of a mode in a loop for some seconds and judge the node; the exit code."""
    film = make_film(seed=0, frames=FILM_FRAMES) if mode == "deformable" else None
    write_bag(film or walk(seed=3), folder / "bag")
    prepare_surroundings()
    recorder = WarpRecorder() if film else Recorder()
    log = folder / "node.log"
    with log.open("w") as file:
        node = node_process({"mode": mode, "weights": weights}, file)
        try:
            wait_for_node(recorder, node, log)
            memory = listen(recorder, node, folder / "bag", seconds)
            ended = node.poll() is not None
        finally:
            node.terminate()
            node.wait(60)
            recorder.close()
    code = judge(recorder, memory, ended, log.read_text(), MIN_OK_WARPS if film else MIN_OK)
    if film and isinstance(recorder, WarpRecorder):
        errors = np.array([film_error(film, warp) for warp in recorder.warps.warps.values()] or [0.0])
        false = int((errors > FALSE_WARP).sum())
        print(f"false warps           {false} of {len(errors)}; mean {100 * errors.mean():.1f} cm", end=", ")
        print(f"95 % {100 * np.percentile(errors, 95):.1f} cm, worst {100 * errors.max():.1f} cm")
        code = code or int(false > 0)
    return code


def film_error(film: Film, note: WarpNote) -> float:
    """Median metres between where a warp puts the points of its model's first cloud, hidden ones too, and the truth."""
    rest, truth = film.truth(note.rest_ns % FRAME_NUMBERS, note.stamp_ns % FRAME_NUMBERS)
    moved, covered = note.warp.apply(rest)
    return float(np.median(np.linalg.norm(moved - truth, axis=1)[covered]))


def walk(seed: int) -> Recording:
    """A loop through a room at walking pace."""
    video = room_sequence(seed, WALK_FRAMES, WALK_RATE)
    stamps = [START_NS + round(float(stamp) * 1e9) for stamp in video.stamps]
    return Recording(video.camera, stamps, video.depths, video.poses, np.zeros(WALK_FRAMES, dtype=bool))


def listen(recorder: Recorder, node: "subprocess.Popen[bytes]", bag: Path, seconds: float) -> list[float]:
    """Listen while the player runs; the node's memory in megabytes, once a second."""
    player = player_process(bag, loop_seconds=seconds)
    memory: list[float] = []
    with tqdm(total=round(seconds), desc="soaking", unit="s") as bar:
        due = time.monotonic()

        def going_on() -> bool:
            nonlocal due
            if time.monotonic() >= due:
                memory.append(resident_megabytes(node.pid))
                due += 1.0
                bar.update(1)
            return player.poll() is None and node.poll() is None

        try:
            recorder.listen_while(going_on)
        finally:
            player.terminate()
            player.wait(60)
    return memory


def judge(recorder: Recorder, memory: list[float], ended: bool, log: str, min_ok: float) -> int:
    """Print the figures; 0 if all is well. min_ok: minimum share of OK among the clouds from the second round on."""
    notes = recorder.recorded.frames
    known = known_walk(notes)
    latency = np.array([note.latency for note in notes]) if notes else np.zeros(1)
    warm = memory[int(min(WARM_UP_SECONDS, len(memory) * WARM_UP)) :] or [0.0]
    before, after = float(np.median(warm[:MINUTE])), float(np.median(warm[-MINUTE:]))
    growth = after - before
    failures = log.count(INTERNAL_ERROR)
    states = {state: sum(note.state == state for note in known) for state in ("OK", "RELOCALISED", "LOST")}
    share = states["OK"] / max(len(known), 1)
    print(f"clouds processed      {len(notes)}, dropped {notes[-1].dropped if notes else 0}")
    told = ", ".join(f"{name} {count}" for name, count in states.items())
    print(f"states, known walk    {told}: {100 * share:.1f} % OK")
    reasons = Counter(note.reason for note in known if note.state == "LOST").most_common(MAX_REASONS)
    for reason, number in reasons:
        print(f"  LOST {number:5}         {reason}")
    print(f"latency               median {np.median(latency):.2f} s, 95 % {np.percentile(latency, 95):.2f} s")
    print(f"memory after warm-up  {before:.0f} MB, at the end {after:.0f} MB ({growth:+.0f}), most {max(warm):.0f} MB")
    print(f"unforeseen errors     {failures}{', and the node ended by itself' if ended else ''}")
    return 1 if ended or failures or growth > MAX_GROWTH or not notes or (known and share < min_ok) else 0


def known_walk(notes: list[FrameNote]) -> list[FrameNote]:
    """The clouds from the second round on."""
    return [note for note in notes if note.stamp_ns - notes[0].stamp_ns > ROUND_SECONDS * 1e9]


if __name__ == "__main__":
    sys.exit(main())
