# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What matches say about one cloud of a bending thing: the second worker's part of tracking.

It reads a task, in which nothing changes meanwhile, and gives back what was found; so it can run anywhere.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.deformable.nonrigid import SurfaceFollower, solve_nonrigid
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.model import CanonicalModel, Change
from lepard_ros.tracking.recovery import moved_by_matches, possible_matches
from lepard_ros.tracking.sights import (
    Live,
    Study,
    View,
    degrees_between,
    median_motion,
    sight_of,
    study,
    turn_of,
)

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

# Most strain of a warp (root mean square misfit of the edges, of their length). Bodies in films that were followed
# rightly had 0.03 to 0.10, fitted to matches up to 0.19; where legs were exchanged, or the hidden side led astray, it
# was 0.22 and more.
MAX_STRAIN = 0.2
# Of a body that was lost: least share of the matches that agree, and least mean cosine between the normals. Nothing
# else says where it is, and front and back look alike: exchanged they had 0.08 to 0.37 and 0.15 to 0.84.
MIN_FOUND_INLIERS, MIN_FOUND_ALIGNED = 0.5, 0.7
MAX_JUMP = 0.1  # metres: the median node does not leave the place where it is expected farther than this


class Task(NamedTuple):
    """What is needed to examine a cloud.

    expected: where the body must be, roughly, if that is known. max_degrees: from where it is predicted.
    """

    settings: DeformableSettings
    model: CanonicalModel
    live: Live
    predicted: Warp
    expected: Warp | None
    max_degrees: float
    views: list[View]
    lost: bool


class Learnt(NamedTuple):
    """The model that has learnt from a cloud, what changed, that cloud as a view, and a follower of the new model."""

    model: CanonicalModel
    change: Change
    view: View
    follower: SurfaceFollower


class Examined(NamedTuple):
    """What matching says about a cloud: the warp to it, or the reason to refuse that one, and what was learnt."""

    live: Live
    study: Study
    warp: Warp
    reason: str
    learnt: Learnt | None


class Examiner(Protocol):
    """Whoever has the network: this process, or another one (`matching_process.py`)."""

    def encode(self, points: FloatArray) -> Any:
        """What the network says about a cloud (N, 3), to be given back in the views of a task."""
        ...

    def examine(self, task: Task) -> Examined:
        """Match a cloud, warp the model to it and let a copy of the model learn."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


class OwnExaminer:
    """Examines in this process."""

    def __init__(self, matcher: "Matcher") -> None:
        """matcher: with weights for deformable scenes."""
        self.matcher = matcher

    def encode(self, points: FloatArray) -> Any:
        """The cloud as the network sees it."""
        return self.matcher.encode(points)

    def examine(self, task: Task) -> Examined:
        """Match a cloud, warp the model to it and let a copy of the model learn."""
        return examine(self.matcher, task)

    def close(self) -> None:
        """Nothing to do."""


def examine(matcher: "Matcher", task: Task) -> Examined:
    """Match a cloud, warp the model to it and let a copy of the model learn."""
    found = study(matcher, task.live, task.views, task.settings.filter, task.settings.reach)
    warp = _solve(task, found.matches)
    reason = _reason_to_refuse(warp, task)
    return Examined(task.live, found, warp, reason, None if reason else _learn(task, found, warp))


def _learn(task: Task, found: Study, warp: Warp) -> Learnt:
    """What the model would be after this cloud."""
    model, change = task.model.updated(warp, task.live.points)
    view = View(sight_of(task.live, model, model.warp), found.cloud)
    return Learnt(model, change, view, SurfaceFollower(model.graph, model.surface, task.settings.follower))


def _solve(task: Task, matches: Matches) -> Warp:
    """The warp to the live cloud by the matches, begun where it is predicted; if that is refused, where they lead.

    Once the body is lost the prediction is old, and where the matches lead comes first.
    """
    model, live, solver = task.model, task.live, task.settings.solver
    led = moved_by_matches(task.predicted, matches, model.surface, live.surface, task.max_degrees)
    starts = [task.predicted] if led is None else [task.predicted, led]
    for start in starts[::-1] if task.lost else starts:
        believed = possible_matches(start, matches, model.surface, live.surface)
        warp = solve_nonrigid(model.graph, model.surface, live.surface, believed, solver, start)
        if not _reason_to_refuse(warp, task):
            break
    return warp


def _reason_to_refuse(warp: Warp, task: Task) -> str:
    """Why a warp is not believed, or an empty string."""
    if not warp.ok:
        return warp.status.value
    if warp.overlap < task.settings.min_overlap:
        return f"only {warp.overlap:.0%} of the warped model lies on the cloud"
    if warp.evidence is not None and warp.evidence.strain > MAX_STRAIN:
        return f"the body would be strained by {warp.evidence.strain:.0%}"
    if task.lost and not _finds(warp):
        return "too few matches agree on where the lost body is"
    turned = degrees_between(turn_of(task.predicted), turn_of(warp))
    if turned > task.max_degrees:
        return f"the body would have turned by {turned:.0f} degrees"
    jump = 0.0 if task.expected is None else median_motion(task.expected, warp)
    return f"the body would have jumped by {100 * jump:.0f} cm" if jump > MAX_JUMP else ""


def _finds(warp: Warp) -> bool:
    """Whether the evidence suffices for a body that was lost, which nothing else says anything about."""
    known = warp.evidence
    if known is None or known.aligned < MIN_FOUND_ALIGNED:
        return False
    return bool(warp.match_inliers.mean() >= MIN_FOUND_INLIERS)
