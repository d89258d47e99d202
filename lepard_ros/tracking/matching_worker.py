# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Matching of one cloud in deformable mode: match, warp, verify, update a copy of the model.

It depends only on an immutable task and returns its result, so it can run in any thread or process.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.deformable.nonrigid import SurfaceFollower, solve_nonrigid
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Status
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.model import CanonicalModel, Change
from lepard_ros.tracking.observations import (
    CloudMatches,
    LiveCloud,
    View,
    degrees_between,
    match_cloud,
    median_motion,
    observe,
    turn_of,
)
from lepard_ros.tracking.recovery import moved_by_matches, possible_matches

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# Maximum strain of a warp (RMS misfit of the edges relative to their length). On test sequences, correctly tracked
# objects had 0.03 to 0.10, and up to 0.19 when fitted to matches. With swapped legs or a wrong hidden side it was 0.22
# and more.
MAX_STRAIN = 0.2
# For a lost object: minimum share of inliers among the matches, and minimum mean cosine between normals. There is no
# other evidence of the pose, and front and back look alike: swapped, they had 0.08 to 0.37 and 0.15 to 0.84.
MIN_FOUND_INLIERS, MIN_FOUND_ALIGNED = 0.5, 0.7
MAX_JUMP = 0.1  # metres: maximum median distance of the nodes from their expected positions


class MatchingTask(NamedTuple):
    """Input of the matching worker.

    expected: approximate warp that the result must stay near, if known. max_degrees: maximum rotation relative to
    `predicted`. lost: the object has no current pose.
    """

    settings: DeformableSettings
    model: CanonicalModel
    live: LiveCloud
    predicted: Warp
    expected: Warp | None
    max_degrees: float
    views: list[View]
    lost: bool


class ModelUpdate(NamedTuple):
    """An updated model, the change, the cloud as a view, and a follower for the new model."""

    model: CanonicalModel
    change: Change
    view: View
    follower: SurfaceFollower


class MatchingResult(NamedTuple):
    """Output of the matching worker: features and matches, the warp, the reason to refuse it (or ""), the update."""

    live: LiveCloud
    cloud_matches: CloudMatches
    warp: Warp
    reason: str
    update: ModelUpdate | None


class MatchingWorker(Protocol):
    """Owner of the network: this process or another one (`matching_process.py`)."""

    def encode(self, points: FloatArray) -> Any:
        """Encode a cloud (N, 3) for use in the views of a task."""
        ...

    def match_and_update(self, task: MatchingTask) -> MatchingResult:
        """Match a cloud, warp the model to it and update a copy of the model."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class LocalWorker:
    """Runs matching in this process."""

    def __init__(self, matcher: "Matcher") -> None:
        """matcher: with weights for deformable scenes."""
        self.matcher = matcher

    def encode(self, points: FloatArray) -> Any:
        """Encode a cloud (N, 3)."""
        return self.matcher.encode(points)

    def match_and_update(self, task: MatchingTask) -> MatchingResult:
        """Match a cloud, warp the model to it and update a copy of the model."""
        return match_and_update(self.matcher, task)

    def close(self) -> None:
        """Nothing to do."""


def match_and_update(matcher: "Matcher", task: MatchingTask) -> MatchingResult:
    """Match a cloud, warp the model to it and update a copy of the model."""
    found = match_cloud(matcher, task.live, task.views, task.settings.filter, task.settings.reach)
    warp = _solve(task, found.matches)
    reason = _reason_to_refuse(warp, task)
    return MatchingResult(task.live, found, warp, reason, None if reason else _update(task, found, warp))


def _update(task: MatchingTask, found: CloudMatches, warp: Warp) -> ModelUpdate:
    """The model after this cloud."""
    model, change = task.model.updated(warp, task.live.points)
    view = View(observe(task.live, model, model.warp), found.cloud)
    return ModelUpdate(model, change, view, SurfaceFollower(model.graph, model.surface, task.settings.follower))


def _solve(task: MatchingTask, matches: Matches) -> Warp:
    """Fit the warp to the matches, starting from the prediction; if refused, from a rigid motion found by the matches.

    While the object is lost, the prediction is old and the order is reversed. No edges are cut then: a failed
    search fitted and cut four times in a row, which took 1.3 of its 1.7 CPU seconds.
    """
    model, live, solver = task.model, task.live, task.settings.solver
    solver = replace(solver, max_cut_rounds=0) if task.lost else solver
    warp = Warp.rest(model.graph, Status.TOO_FEW_INLIERS, match_inliers=np.zeros(len(matches.confidence), dtype=bool))
    for start in _starts(task, matches):
        usable = possible_matches(start, matches, model.surface, live.surface)
        warp = solve_nonrigid(model.graph, model.surface, live.surface, usable, solver, start)
        if not _reason_to_refuse(warp, task):
            break
    return warp


def _starts(task: MatchingTask, matches: Matches) -> Iterator[Warp]:
    """Initial warps, the most likely first. Lazy: the rigid motion takes a tenth of the time and is rarely needed."""
    if not task.lost:
        yield task.predicted
    led = moved_by_matches(task.predicted, matches, task.model.surface, task.live.surface, task.max_degrees)
    if led is not None:
        yield led
    if task.lost and task.expected is not None:
        yield task.predicted


def _reason_to_refuse(warp: Warp, task: MatchingTask) -> str:
    """Why a warp is refused, or an empty string."""
    if not warp.ok:
        return warp.status.value
    if warp.overlap < task.settings.min_overlap:
        return f"only {warp.overlap:.0%} of the warped model lies on the cloud"
    if warp.evidence is not None and warp.evidence.strain > MAX_STRAIN:
        return f"the strain of the warp is too high ({warp.evidence.strain:.0%})"
    if task.lost and not _is_relocalised(warp):
        return "too few matches agree on the pose of the lost object"
    turned = degrees_between(turn_of(task.predicted), turn_of(warp))
    if turned > task.max_degrees:
        return f"the object would have rotated by {turned:.0f} degrees"
    jump = 0.0 if task.expected is None else median_motion(task.expected, warp)
    return f"the object would have jumped by {100 * jump:.0f} cm" if jump > MAX_JUMP else ""


def _is_relocalised(warp: Warp) -> bool:
    """Whether the evidence is sufficient to relocalise a lost object."""
    known = warp.evidence
    if known is None or known.aligned < MIN_FOUND_ALIGNED:
        return False
    return bool(warp.match_inliers.mean() >= MIN_FOUND_INLIERS)
