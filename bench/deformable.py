# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Warps in a furnished room: one pair of whole scenes, a body that turns round, and the node at a sensor's rate.

    python bench/deformable.py scene                       raw clouds of 640 x 480 to a warp, the room left out
    python bench/deformable.py turn [--frames 100] [--background 0] [--every 1]
    python bench/deformable.py virtual [--seed 0] [--frames 100] [--tracking 0.16] [--matching 0.5] [--search 1.0]
        [--turns 1] [--rounds 0]
    python bench/deformable.py node [--rate 10] [--seconds 30]

turn: a full turn in so many clouds, each processed, by the tracker alone. --background 2 is what the node does: follow,
and take in the matches of a past cloud; 0 matches every cloud. --every 3: only every third cloud is processed.
virtual: the demonstration's film in virtual time: ten clouds a second, of which those are dropped that come while
tracking works (so many seconds a cloud); a match takes so many seconds of the matching process, a search for a lost
object more. --rounds 3: the film there and back, three times, as the soak test plays it. --turns 2 --frames 200: the
body turns round twice; model and memory must not grow with the second turn.
node: the demo's clouds (320 x 240) there and back again at a sensor's rate over real DDS, into the node in a process of
its own. latency: from the stamp, which is taken when the cloud is published, to the arrival of the warp.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from lepard_ros.demo.processes import cpu_seconds, node_process, prepare_surroundings, resident_megabytes
from lepard_ros.demo.story import Film, make_film, write_bag
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.matcher import Matcher
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from lepard_ros.tracking.background import Background
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.matching_worker import LocalWorker, MatchingResult, MatchingTask
from lepard_ros.tracking.observations import LiveCloud

WARM_UP = 3  # clouds, left out of the figures
DISCOVERY_SECONDS = 120.0


def visible_error(warp: Warp, film: CreatureSequence, frame: int) -> float:
    """Median metres between where the warp puts what a frame sees, and where that is."""
    rest, live = film.at_first[frame].reshape(-1, 3), film.cloud(frame).reshape(-1, 3)
    known = np.isfinite(rest).all(axis=1) & np.isfinite(live).all(axis=1)
    moved, covered = warp.apply(rest[known].astype(float))
    return float(np.median(np.linalg.norm(moved - live[known], axis=1)[covered]))


def scene() -> None:
    """One pair of whole scenes."""
    film = creature_sequence(0, 12, width=640, turn=90.0, furnished=True)
    matcher, first, later = Matcher.from_pretrained("deformable"), film.cloud(0), film.cloud(2)
    matcher.warm_up()
    began = time.process_time()
    warp = matcher.warp(first, later)
    spent = time.process_time() - began
    body = np.isfinite(film.at_first[0]).all(axis=-1)
    room = np.isfinite(first).all(axis=-1) & ~body
    print(f"{np.isfinite(first).all(axis=-1).sum()} points, status {warp.status.name}, {spent:.2f} CPU-s in all")
    moved = warp(first[body].astype(float))
    error = np.linalg.norm(moved - film.first_now[2][body], axis=1)
    print(f"body: median error {100 * np.nanmedian(error):.1f} cm; room points that it would move: ", end="")
    print(f"{warp.covers(first[room].astype(float)).mean():.1%}")


def turn(args: argparse.Namespace) -> None:
    """A full turn, by the tracker alone."""
    film = creature_sequence(0, args.frames, width=320, turn=360.0, furnished=True)
    tracker = DeformableTracker(
        Matcher.from_pretrained("deformable"), DeformableSettings(background_clouds=args.background)
    )
    errors, spent, models = [], [], 0
    for frame in range(0, args.frames, args.every):
        began = time.process_time()
        track = tracker.process(film.cloud(frame), float(film.stamps[frame]))
        spent.append(time.process_time() - began)
        errors.append(np.nan if track.warp is None else visible_error(track.warp, film, frame))
        models += track.reset
        words = (track.state.name, track.method, len(track.model_points), track.reason)
        print(f"cloud {frame:3d}: {100 * errors[-1]:5.1f} cm {spent[-1]:.2f} CPU-s", *words, flush=True)
    seen = np.isfinite(errors)
    print(
        f"accepted {seen.sum()} of {len(errors)}, models {models}; visible error of the accepted clouds: worst", end=" "
    )
    print(f"{100 * np.nanmax(errors):.1f} cm, median {100 * np.nanmedian(errors):.1f} cm", end="; ")
    print(f"over 5 cm: {(np.array(errors)[seen] > 0.05).sum()}; {np.mean(spent):.2f} CPU-s a cloud")


# ---- the node's tracker in virtual time ----


class VirtualTime:
    """The clock of a tracker that needs so many seconds for a cloud, with a worker that needs so many for a job."""

    def __init__(self, costs: "Costs") -> None:
        """Begin at 0."""
        self.now, self.costs, self._worker_free = 0.0, costs, 0.0

    def end_cloud(self, steps: int) -> None:
        """Tracking is done with a cloud, for which it fitted the model to so many clouds."""
        self.now += self.costs.reading + steps * (self.costs.tracking - self.costs.reading)

    def job_end(self, seconds: float) -> float:
        """When the worker is done with a job of so many seconds that is given to it now."""
        self._worker_free = max(self.now, self._worker_free) + seconds
        return self._worker_free


class Costs(NamedTuple):
    """Seconds: of a tracked cloud, of which to read and segment it, of a match, and of a search for a lost object."""

    tracking: float
    reading: float
    matching: float
    search: float


class VirtualResult(Future[Any]):
    """A result that is there, but only counts from a point in virtual time."""

    def __init__(self, time: VirtualTime, value: Any, seconds: float) -> None:
        """value: what the job gave. seconds: that it took."""
        super().__init__()
        self._time, self._end = time, time.job_end(seconds)
        self.set_result(value)

    def done(self) -> bool:
        """Whether the worker would have ended by now."""
        return self._end <= self._time.now

    def result(self, timeout: float | None = None) -> Any:
        """The value; waiting for it takes virtual time."""
        self._time.now = max(self._time.now, self._end)
        return super().result()


class VirtualBackground(Background):
    """The node's background worker in virtual time."""

    def __init__(self, time: VirtualTime, worker: "TimedWorker") -> None:
        """As the node has it: matches are used as soon as they are there."""
        super().__init__(threaded=True, delay=1, hurried=lambda: True)
        self._time, self._worker = time, worker

    def _start(self, work: Any) -> VirtualResult:
        value = work()
        return VirtualResult(self._time, value, self._worker.seconds)


class TimedWorker(LocalWorker):
    """A matching worker that knows how long its last job takes in virtual time."""

    def __init__(self, matcher: Matcher, costs: Costs) -> None:
        """costs: what jobs take in virtual time."""
        super().__init__(matcher)
        self.costs, self.seconds, self.spent = costs, 0.0, {True: [0.0], False: [0.0]}

    def encode(self, points: FloatArray) -> Any:
        """As a match, which encodes too."""
        self.seconds = self.costs.matching
        return super().encode(points)

    def match_and_update(self, task: MatchingTask) -> MatchingResult:
        """Match, and note what it takes; `spent`: the processor's real seconds, of searches and of other matches."""
        began = time.process_time()
        result = super().match_and_update(task)
        self.spent[task.lost].append(time.process_time() - began)
        self.seconds = self.costs.search if task.lost else self.costs.matching
        return result


class CountingTracker(DeformableTracker):
    """Counts how often it fits the model to a cloud: not at all while the object is lost, repeatedly to catch up."""

    fits = 0

    def _fitted(self, live: LiveCloud, placed: Warp) -> Warp:
        self.fits += 1
        return super()._fitted(live, placed)


def virtual(args: argparse.Namespace) -> None:
    """The demonstration's film, there and back again for so many rounds, with clouds dropped as the node drops them."""
    film, costs = make_film(args.seed, args.frames, args.turns), Costs(args.tracking, 0.06, args.matching, args.search)
    there = np.arange(args.frames)
    order = np.tile(np.concatenate([there, there[-2:0:-1]]), args.rounds) if args.rounds else there
    time_of, worker = VirtualTime(costs), TimedWorker(Matcher.from_pretrained(args.weights), costs)
    tracker = CountingTracker(None, DeformableSettings(background_clouds=1), worker)
    tracker.process(film.sequence.cloud(0), 0.0)  # the player waits for this one
    tracker._background = VirtualBackground(time_of, worker)
    rows, place = [], 1
    while place < len(order):
        time_of.now, frame = max(time_of.now, 0.1 * place), int(order[place])
        cloud = np.full((1, 3), np.nan) if film.covered[frame] else film.sequence.cloud(frame)
        tracker.fits = 0
        track = tracker.process(cloud, 0.1 * place)
        time_of.end_cloud(tracker.fits)
        rest = int(order[round(10 * track.model_stamp)])
        rows.append(virtual_row(track, film, (rest, frame), place, time_of.now - 0.1 * place))
        words = (track.state.name, track.method, len(track.model_points), track.reason)
        errors = f"{100 * rows[-1].error:5.1f} cm, visible {100 * rows[-1].visible:5.1f} cm"
        memory = f"{resident_megabytes(os.getpid()):.0f} MB"
        print(f"cloud {place:3d} ({frame:2d}): {errors}, {rows[-1].latency:.2f} s, {memory}", *words, flush=True)
        place = max(place + 1, int(time_of.now / 0.1 + 1e-6))
    report_virtual(args, rows, film, tracker)
    spent = ", ".join(
        f"{name} {len(worker.spent[lost]) - 1} of {np.mean(worker.spent[lost]):.2f} CPU-s"
        for name, lost in (("matches", False), ("searches", True))
    )
    print(f"  {spent}")


class VirtualRow(NamedTuple):
    """One processed cloud: seconds, and metres (NaN without a warp) of `film_error` and `visible_error`."""

    place: int
    frame: int
    state: str
    latency: float
    error: float
    visible: float


def virtual_row(track: DeformableTrack, film: Film, frames: tuple[int, int], place: int, latency: float) -> VirtualRow:
    """The figures of a cloud; the visible error is only known for a model that began with the film.

    frames: of the film, that the model began with and that the cloud shows. place: of the cloud in what was played.
    """
    (rest, frame), state = frames, track.state.name
    if track.warp is None:
        return VirtualRow(place, frame, state, latency, np.nan, np.nan)
    visible = np.nan if rest else visible_error(track.warp, film.sequence, frame)
    return VirtualRow(place, frame, state, latency, film_error(track.warp, film, rest, frame), visible)


def report_virtual(args: argparse.Namespace, rows: list[VirtualRow], film: Film, tracker: DeformableTracker) -> None:
    """Print the figures of a run."""
    places, frames, states, latency, error, visible = (np.array(column) for column in zip(*rows, strict=True))
    good, shown = np.isfinite(error), ~film.covered[frames]
    after = shown & (places > np.flatnonzero(film.covered).max(initial=0))
    found = np.flatnonzero(good[after])
    again = f"found with cloud {found[0] + 1} after the lens" if len(found) else "not found after the lens"
    print(f"seed {args.seed}: {good.sum()} warps, {good.sum() / (0.1 * places[-1]):.1f} a second; latency", end=" ")
    print(f"{np.median(latency):.2f} s median, {np.percentile(latency, 95):.2f} s at 95 %; lost", end=" ")
    print(f"{(shown & ~good).sum()} of {shown.sum()}; {again}; over 10 cm: {(error[good] > 0.1).sum()};", end=" ")
    print(f"mean {100 * np.nanmean(error):.1f} cm, worst {100 * np.nanmax(error):.1f} cm; visible", end=" ")
    print(
        f"{100 * np.nanmean(visible):.1f} and {100 * np.nanmax(visible):.1f} cm, over 5 cm: {(visible > 0.05).sum()};"
    )
    nodes = len(tracker.model.graph.nodes) if tracker.model else 0
    print(f"  model {len(tracker.model.points) if tracker.model else 0} points, {nodes} nodes", end="; ")
    known = states[places > 2 * args.frames] if args.rounds else states
    print(", ".join(f"{name} {(known == name).sum()}" for name in ("OK", "RELOCALISED", "LOST")), end="; ")
    print(f"{(known == 'OK').mean():.0%} OK{' from the second round on' if args.rounds else ''}")


def film_error(warp: Warp, film: Film, rest: int, frame: int) -> float:
    """Median metres between where the warp puts the points of the model's first cloud, hidden ones too, and the truth.

    The demonstration calls a warp false by this. rest: the frame that the model began with.
    """
    points, truth = film.truth(rest, frame)
    moved, covered = warp.apply(points)
    return float(np.median(np.linalg.norm(moved - truth, axis=1)[covered]))


# ---- the node ----


class Listener:
    """Notes when warps and statuses arrive."""

    def __init__(self) -> None:
        """Begin to listen."""
        import rclpy
        from lepard_ros.msg import DeformationGraph, TrackingStatus
        from rclpy.executors import SingleThreadedExecutor
        from sensor_msgs.msg import PointCloud2

        rclpy.init()
        self._node = rclpy.create_node("bench_listener")
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self._node)
        self.warps: list[tuple[float, float]] = []  # stamp and arrival, seconds
        self.statuses: list[Any] = []
        self._node.create_subscription(DeformationGraph, "lepard/warp", self._on_warp, 100)
        self._node.create_subscription(TrackingStatus, "lepard/status", self.statuses.append, 100)
        self._node.create_subscription(PointCloud2, "lepard/warped_points", lambda _: None, 10, raw=True)

    def spin(self, seconds: float = 0.1) -> None:
        """Take in messages for a moment."""
        self._executor.spin_once(timeout_sec=seconds)

    def wait_for_node(self, node: "subprocess.Popen[bytes]") -> None:
        """Spin until the node's status topic exists."""
        deadline = time.monotonic() + DISCOVERY_SECONDS
        while self._node.count_publishers("lepard/status") == 0:
            if node.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The node did not come up.")
            self.spin()

    def _on_warp(self, message: Any) -> None:
        stamp = message.target_header.stamp
        self.warps.append((stamp.sec + 1e-9 * stamp.nanosec, time.time()))


def node(args: argparse.Namespace) -> None:
    """The node at a sensor's rate."""
    film: Film = make_film(0, 60)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        write_bag(film, path / "bag")
        prepare_surroundings()
        with (path / "node.log").open("w") as log:
            process = node_process({"mode": "deformable"}, log)
        listener = Listener()
        try:
            listener.wait_for_node(process)
            used, memory = cpu_seconds(process.pid), []
            script = str(Path(__file__).with_name("latency.py"))
            numbers = [str(args.rate), str(args.seconds)]
            sensor = subprocess.Popen([sys.executable, script, "--sensor", str(path / "bag"), *numbers])
            while sensor.poll() is None:
                listener.spin()
                memory.append(resident_megabytes(process.pid))
            used = cpu_seconds(process.pid) - used
        finally:
            process.terminate()
            process.wait(60)
        report_node(listener, used, memory)
    sys.stdout.flush()
    os._exit(0)  # rclpy's context is not worth waiting for


def report_node(listener: Listener, used: float, memory: list[float]) -> None:
    """Print what was seen."""
    warps = np.array(listener.warps)[WARM_UP:]
    if len(warps) < 2:
        print(f"{len(listener.warps)} warps arrived; the last words of the node:")
        for status in listener.statuses[-3:]:
            print(f"  state {status.state}: {status.reason_text}; {status.frames_received} received")
        return
    last = listener.statuses[-1]
    stages: dict[str, list[float]] = {}
    for status in listener.statuses[WARM_UP:]:
        for name, seconds in zip(status.stage_names, status.stage_seconds, strict=True):
            stages.setdefault(name, []).append(seconds)
    rate = (len(warps) - 1) / (warps[-1, 1] - warps[0, 1])
    latency = 1e3 * (warps[:, 1] - warps[:, 0])
    print(f"clouds: {last.frames_received} received, {last.frames_processed} processed, {last.frames_dropped} dropped")
    print(f"{len(warps)} warps, {rate:.1f} a second; latency {np.median(latency):.0f} ms median,", end=" ")
    print(f"{np.percentile(latency, 95):.0f} ms at 95 %; {used / max(last.frames_processed, 1):.2f} CPU-s a cloud")
    print(
        f"memory {memory[len(memory) // 3]:.0f} MB after a third, {memory[-1]:.0f} MB at the end; stages [ms]:", end=" "
    )
    print({name: round(1e3 * float(np.median(values))) for name, values in stages.items()})


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("scene", "turn", "virtual", "node"))
    parser.add_argument("--frames", type=int, default=100, help="turn, virtual: number of clouds (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="virtual: the film (default 0, the demonstration's own)")
    parser.add_argument("--tracking", type=float, default=0.16, help="virtual: seconds of tracking a cloud")
    parser.add_argument("--matching", type=float, default=0.5, help="virtual: seconds of a match")
    parser.add_argument("--search", type=float, default=1.0, help="virtual: seconds of a search for a lost object")
    parser.add_argument("--rounds", type=int, default=0, help="virtual: so many times there and back (default: there)")
    parser.add_argument("--turns", type=int, default=1, help="virtual: of the body, in 100 clouds each")
    parser.add_argument("--weights", default="deformable", help="virtual: the weights (default deformable)")
    parser.add_argument("--every", type=int, default=1, help="turn: process every so-manyth cloud")
    parser.add_argument("--background", type=int, default=0, help="turn: DeformableSettings.background_clouds")
    parser.add_argument("--rate", type=float, default=10.0, help="node: clouds a second (default 10)")
    parser.add_argument("--seconds", type=float, default=30.0, help="node: how long (default 30)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "scene":
        scene()
    else:
        {"turn": turn, "virtual": virtual, "node": node}[args.what](args)


if __name__ == "__main__":
    main()
