# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Registration methods by name, with one interface and the same timing."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.evaluation.baselines import RIGID_BASELINES, Guess
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Matches, Registration

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher


LEPARD = "lepard:"
# Estimators for Lepard's matches: ours, which refuses unreliable motions, or those of the paper.
ESTIMATORS = ("ours", "ransac", "ransac+icp")


@dataclass(frozen=True)
class MethodResult:
    """A method's result for a pair.

    transform: (4, 4) source to target, the best guess if refused, None without one. accepted: whether the method
    accepts the pair.
    seconds, cpu_seconds: wall and CPU time from raw points to the result. status: the method's own status.
    matches: its matches, or None. inliers: (M,) bool. trust: (M,) in [0, 1], or None. covariance: (6, 6) or None.
    stages: wall seconds by stage. quality: log-odds of the acceptance rule, NaN without one.
    """

    transform: FloatArray | None
    accepted: bool
    seconds: float
    cpu_seconds: float
    status: str = ""
    matches: Matches | None = None
    inliers: NDArray[np.bool_] | None = None
    covariance: FloatArray | None = None
    stages: dict[str, float] = field(default_factory=dict)
    quality: float = float("nan")
    trust: FloatArray | None = None


class Method(Protocol):
    """A method that registers two clouds."""

    def register(self, source: FloatArray, target: FloatArray) -> MethodResult:
        """Register source (N, 3) to target (M, 3), metres."""


class BaselineMethod:
    """A rigid baseline by its name."""

    def __init__(self, name: str) -> None:
        self._run: Callable[[FloatArray, FloatArray], Guess] = RIGID_BASELINES[name]

    def register(self, source: FloatArray, target: FloatArray) -> MethodResult:
        """Run the baseline. Its transform is reported even if it rejects the pair."""
        wall, cpu = time.perf_counter(), time.process_time()
        guess = self._run(source, target)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        return MethodResult(
            guess.transform, guess.accepted, seconds, cpu_seconds, "ok" if guess.accepted else "refused"
        )


def timed(register: Callable[[], Registration]) -> MethodResult:
    """What a call of `Matcher.register` gave, and how long it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = register()
    return MethodResult(
        transform=result.transform if result.ok else result.guess,
        accepted=result.ok,
        seconds=time.perf_counter() - wall,
        cpu_seconds=time.process_time() - cpu,
        status=result.status.name,
        matches=result.matches,
        inliers=result.inliers,
        covariance=result.covariance,
        stages=dict(result.seconds),
        quality=result.quality,
        trust=result.trust,
    )


class LepardMethod:
    """The matcher, end to end and alone: encode both clouds, match, register."""

    def __init__(self, matcher: "Matcher", estimator: str = "ours") -> None:
        self.matcher, self.estimator = matcher, estimator

    def register(self, source: FloatArray, target: FloatArray) -> MethodResult:
        """Register with `Matcher.register`, or from its matches as the paper does."""
        if self.estimator != "ours":
            return self._as_in_the_paper(source, target)
        return timed(lambda: self.matcher.register(source, target))

    def _as_in_the_paper(self, source: FloatArray, target: FloatArray) -> MethodResult:
        """RANSAC over the matches, and maybe ICP: a motion for every pair, never refused."""
        from lepard_ros.evaluation.ransac import ransac, refine_icp

        wall, cpu = time.perf_counter(), time.process_time()
        matches = self.matcher.match(source, target)
        matched = time.perf_counter() - wall
        transform = ransac(matches)
        if self.estimator == "ransac+icp":
            transform = refine_icp(transform, source, target)
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        stages = {"match": matched, "estimate": seconds - matched}
        return MethodResult(transform, True, seconds, cpu_seconds, self.estimator, matches, stages=stages)


def split_estimator(name: str) -> tuple[str, str]:
    """The weights and the estimator of a Lepard method's name.

    >>> split_estimator("lepard:rigid"), split_estimator("lepard:rigid+ransac+icp")
    (('rigid', 'ours'), ('rigid', 'ransac+icp'))
    """
    weights = name.removeprefix(LEPARD)
    for estimator in sorted(ESTIMATORS[1:], key=len, reverse=True):
        if weights.endswith(f"+{estimator}"):
            return weights.removesuffix(f"+{estimator}"), estimator
    return weights, "ours"


def with_estimators(names: list[str], estimators: list[str]) -> list[str]:
    """The methods with each of Lepard's once for each estimator.

    >>> with_estimators(["lepard:rigid", "icp"], ["ours", "ransac"])
    ['lepard:rigid', 'lepard:rigid+ransac', 'icp']
    """
    rows = {name: [name if e == "ours" else f"{name}+{e}" for e in estimators] for name in names}
    return [row for name in names for row in (rows[name] if name.startswith(LEPARD) else [name])]


def method_names() -> str:
    """The valid names, for help and errors."""
    return ", ".join(
        ["lepard:rigid", "lepard:<weights>", "lepard:<weights>+ransac", "+x0.1", "+moved", *RIGID_BASELINES]
    )


def check_method_names(names: list[str]) -> None:
    """Raise InputError for an unknown method before any work is done."""
    unknown = [name for name in names if not name.startswith(LEPARD) and name not in RIGID_BASELINES]
    if unknown or not names:
        raise InputError(f"unknown method {', '.join(unknown) or '(none given)'}: choose from {method_names()}.")


def use_published_grid(matcher: "Matcher", grid: float | None) -> None:
    """Use clouds without gridding if the set was published on the network's own grid (metres), that of the paper."""
    if grid is not None and matcher.config.grid == grid:
        matcher.settings = replace(matcher.settings, gridded=True)


def make_method(name: str, published_grid: float | None = None) -> Method:
    """The method of that name, ready to run: "lepard:<name or path of weights>" or a baseline.

    published_grid: metres, of the clouds that it will see, if they are on one.
    """
    check_method_names([name])
    if not name.startswith(LEPARD):
        return BaselineMethod(name)
    from lepard_ros.evaluation.disturbance import Disturbance, DisturbedMethod, split_disturbance
    from lepard_ros.matcher import Matcher

    name, disturbance = split_disturbance(name)
    weights, estimator = split_estimator(name)
    matcher = Matcher.from_pretrained(weights)
    if disturbance != Disturbance():
        return DisturbedMethod(matcher, disturbance)
    use_published_grid(matcher, published_grid)
    return LepardMethod(matcher, estimator)
