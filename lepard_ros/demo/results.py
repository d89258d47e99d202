# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The results of a demonstration: poses and warps against ground truth, CPU and memory, and the report page."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from scipy.spatial import cKDTree

from lepard_ros.data.trajectories import Trajectory, TrajectoryError, compare
from lepard_ros.demo.story import FrameNote, NodeRun, RigidRun, WarpRun
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.report.page import Page

FALSE_WARP = 0.1  # metres: an accepted warp with a larger median error is false
Rows = list[tuple[str, str]]
DROPPED = "dropped"  # the state of a cloud that the node did not process
WARM_UP = 0.3  # share of the clouds after which the node's memory must be flat, as in the soak test


@dataclass(frozen=True)
class RigidFigures:
    """What the table is made of. error: against the truth, None with fewer than three poses."""

    error: TrajectoryError | None
    trajectory: Trajectory
    tracked: int
    seen: int
    false_poses: int
    silent_when_covered: int
    frames_until_found: int | None


def measure_rigid(run: RigidRun) -> RigidFigures:
    """Compare the published poses with ground truth."""
    trajectory = run.recorded.trajectory("map", run.frame)
    story = run.story
    published = set(run.recorded.tf.get(("map", run.frame), {}))
    error = compare(trajectory, story.truth()) if len(trajectory) >= 3 else None
    stamps = np.array(story.stamps_ns)
    found = [index for index, stamp in enumerate(stamps[story.moved]) if stamp in published]
    return RigidFigures(
        error=error,
        trajectory=trajectory,
        tracked=sum(stamp in published for stamp in stamps[~story.covered]),
        seen=int((~story.covered).sum()),
        false_poses=int(error.false().sum()) if error else 0,
        silent_when_covered=sum(stamp not in published for stamp in stamps[story.covered]),
        frames_until_found=found[0] + 1 if found else None,
    )


@dataclass(frozen=True)
class FrameFigures:
    """One cloud. Lengths in metres, NaN without a warp.

    places: (N, 3) where the warp puts points of the model's first cloud. errors: (N,) their distance from the truth,
    NaN where they are not warped. motion: median motion of these points since the model began. gap: median distance of
    the live cloud from the warped model. points, nodes: of the model and its graph. memory: of the node, megabytes.
    """

    index: int
    seconds: float
    state: str
    reason: str
    covered: bool
    matches: int = 0
    inliers: int = 0
    places: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))
    errors: FloatArray = field(default_factory=lambda: np.zeros(0))
    motion: float = float("nan")
    gap: float = float("nan")
    points: int = 0
    nodes: int = 0
    memory: float = 0.0

    @property
    def has_warp(self) -> bool:
        """Whether the node published a warp for this cloud."""
        return len(self.errors) > 0

    def error(self, percent: float) -> float:
        """A percentile of the errors."""
        return float(np.nanpercentile(self.errors, percent)) if self.has_warp else float("nan")


@dataclass(frozen=True)
class WarpFigures:
    """What the table is made of: every frame, and counts of clouds.

    answered: of all. seen: that show the creature; shown: those of them that were answered; followed: with a warp.
    """

    frames: list[FrameFigures]
    answered: int
    seen: int
    shown: int
    followed: int
    covered: int
    silent_when_covered: int
    clouds_until_found: int | None
    false_warps: int
    memory_growth: float


def measure_warps(run: WarpRun) -> WarpFigures:
    """Compare the published warps with ground truth."""
    frames = [measure_frame(run, index) for index in range(len(run.film.stamps_ns))]
    seen, hidden = [one for one in frames if not one.covered], [one for one in frames if one.covered]
    after = [one for one in seen if hidden and one.index > hidden[-1].index]
    found = [number for number, one in enumerate(after, 1) if one.has_warp]
    warm, end = settled_memory(frames)
    return WarpFigures(
        frames=frames,
        answered=sum(one.state != DROPPED for one in frames),
        seen=len(seen),
        shown=sum(one.state != DROPPED for one in seen),
        followed=sum(one.has_warp for one in seen),
        covered=len(hidden),
        silent_when_covered=sum(not one.has_warp for one in hidden),
        clouds_until_found=found[0] if found else None,
        false_warps=sum(one.error(50) > FALSE_WARP for one in frames),
        memory_growth=end - warm,
    )


def settled_memory(frames: list[FrameFigures]) -> tuple[float, float]:
    """Megabytes after the warm-up and at the end: medians of a tenth of the frames, because memory fluctuates."""
    first, count = int(WARM_UP * len(frames)), max(1, len(frames) // 10)
    memory = [one.memory for one in frames]
    return float(np.median(memory[first : first + count])), float(np.median(memory[-count:]))


def measure_frame(run: WarpRun, index: int) -> FrameFigures:
    """The node's answer for one cloud, and its error."""
    film, stamp = run.film, run.film.stamps_ns[index]
    said = _said(run, index)
    published, warped = run.recorded.warps.get(stamp), run.recorded.warped.get(stamp)
    if published is None or warped is None:
        return said
    rest, truth = film.truth(film.stamps_ns.index(published.rest_ns), index)
    places, moved = published.warp.apply(rest)
    return replace(
        said,
        places=places,
        errors=np.where(moved, np.linalg.norm(places - truth, axis=1), np.nan),
        motion=float(np.median(np.linalg.norm(truth - rest, axis=1))),
        gap=float(np.median(cKDTree(warped).query(film.cloud(index))[0])),
        points=len(warped),
        nodes=len(published.warp.graph.nodes),
    )


def _said(run: WarpRun, index: int) -> FrameFigures:
    """The node's status of one cloud."""
    stamp, covered = run.film.stamps_ns[index], bool(run.film.covered[index])
    seconds = (stamp - run.film.stamps_ns[0]) * 1e-9
    note = next((note for note in run.notes if note.stamp_ns == stamp), None)
    if note is None:
        return FrameFigures(index, seconds, DROPPED, "a newer cloud came first", covered, memory=_memory_at(run, stamp))
    after = _memory_at(run, stamp)
    return FrameFigures(index, seconds, note.state, note.reason, covered, note.matches, note.inliers, memory=after)


def _memory_at(run: WarpRun, stamp_ns: int) -> float:
    """The node's memory after its last answer up to a stamp; megabytes."""
    answers, memory = sum(note.stamp_ns <= stamp_ns for note in run.notes), run.node.memory
    return memory[min(answers, len(memory) - 1)]


# --- the page --------------------------------------------------------------------------------------------------------


def effort_rows(notes: list[FrameNote], node: NodeRun, weights: str) -> Rows:
    """What the node needed for its clouds, and how it ended."""
    total = [sum(note.seconds.values()) for note in notes if note.seconds]
    per_cloud = node.cpu_seconds / max(len(notes), 1)
    return [
        ("node, each cloud", f"{np.median(total) if total else 0:.2f} s median, {per_cloud:.2f} s of processor time"),
        ("weights", weights),
        ("node's exit code", str(node.exit_code)),
    ]


def write_page(
    output: Path,
    story: str,
    rows: Rows,
    pictures: dict[str, str],
    seconds: float,
    more: tuple[str, Sequence[Sequence[str]]] | None = None,
) -> str:
    """Write report.html to `output`; the closing words with the table and the paths.

    story: HTML, what was done. pictures: file names in `output` with what they show; those without words are left out.
    more: summary and rows of a table that is folded away at the end of the page.
    """
    drawn = {name: text for name, text in pictures.items() if text}
    page = Page("What the node does")
    page.markup(story)
    page.facts(rows)
    for name, text in drawn.items():
        page.picture(output / name, text)
    if more:
        page.details(*more)
    path = page.write(output / "report.html")
    width = max(len(name) for name, _ in rows)
    lines = ["", *(f"  {name:<{width}}  {value}" for name, value in rows), ""]
    paths = "\n          ".join(str(output / name) for name in drawn)
    return "\n".join([*lines, f"Done in {seconds:.0f} s.", f"Page:     {path}", f"Pictures: {paths}"])
