# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A matcher for the rigid node that computes in another process.

With threads alone, the network and the estimator compete with tracking for the interpreter lock: on two slow cores a
tracked cloud then took 0.1 to 0.4 s instead of 0.03 s while a keyframe was matched. A GPU keeps its own queue, so there
everything stays in this process.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lepard_ros.encoded_cloud import EncodedCloud, PointsLike
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.matcher import Matcher
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.types import NO_MATCHES, Matches, Registration, Surface
from lepard_ros.tracking.matching_process import MatchingProcess, Weights
from lepard_ros.tracking.prior import align_from_guesses


class RemoteMatcher(Matcher):
    """Like `Matcher`, but what the tracker calls for every keyframe and search runs in a process of its own."""

    _process: MatchingProcess | None = None

    @classmethod
    def start(cls, weights: Weights) -> "RemoteMatcher":
        """Load the weights here, and start the process, which loads them too: `wait_until_ready` waits for that.

        The process is used on the CPU only. Networks that normalise over both clouds keep data that is not sent.
        """
        matcher = cls.from_pretrained(weights.name, weights.device, weights.settings)
        assert isinstance(matcher, RemoteMatcher)
        if matcher.runs_on == "cpu" and matcher.config.normalisation != "joint":
            matcher._process = MatchingProcess(weights, wait=False)
        else:
            matcher.warm_up()
        return matcher

    def wait_until_ready(self) -> None:
        """Wait until the process has loaded the network; raises InputError if it cannot."""
        if self._process is not None:
            _ = self._process.facts

    @property
    def process(self) -> MatchingProcess | None:
        """The other process, or None if everything runs in this one."""
        return self._process

    @property
    def process_id(self) -> int | None:
        """The id of the other process, or None if there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.close()

    def encode(
        self, points: PointsLike, viewpoint: PointsLike | str | None = None, grid: float | None = None
    ) -> EncodedCloud:
        """Encode a cloud, see `Matcher.encode`; one with a viewpoint elsewhere than its origin is encoded here."""
        if self._process is None or viewpoint is not None:
            return super().encode(points, viewpoint, grid)
        return EncodedCloud.from_arrays(self._process.encode(np.asarray(points), grid), self.device)

    def match_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Matches]:
        """Match one cloud against several, see `Matcher.match_many`."""
        if self._process is None:
            return super().match_many(source, targets)
        found: list[Matches] = self._compare("match_many", source, targets)
        return found

    def register_many(
        self, source: PointsLike | EncodedCloud, targets: Sequence[PointsLike | EncodedCloud]
    ) -> list[Registration]:
        """Register one cloud to each of several targets, see `Matcher.register_many`."""
        if self._process is None:
            return super().register_many(source, targets)
        found: list[Registration] = self._compare("register_many", source, targets)
        return found

    def register_best(
        self, source: EncodedCloud, targets: Sequence[EncodedCloud], count: int
    ) -> dict[int, Registration]:
        """Register one cloud to the targets whose matches agree best, see `Matcher.register_best`."""
        if self._process is None:
            return super().register_best(source, targets, count)
        found: dict[int, Registration] = self._compare("register_best", source, targets, count)
        return found

    def _compare(
        self,
        method: str,
        source: PointsLike | EncodedCloud,
        targets: Sequence[PointsLike | EncodedCloud],
        *more: Any,
    ) -> Any:
        assert self._process is not None
        cloud, *others = (one.to_arrays() for one in self._encoded([source, *targets]))
        return self._process.compare(method, cloud, others, *more)


def align_keyframes(
    matcher: Matcher, source: Surface, target: Surface, guesses: FloatArray, settings: RigidSettings
) -> Registration:
    """Align a keyframe to another one from guesses (G, 4, 4), in the matcher's process if it has one.

    It takes many small numpy calls, which would hold up tracking in the same interpreter.
    """
    process = matcher.process if isinstance(matcher, RemoteMatcher) else None
    if process is not None:
        return process.align(source, target, guesses, settings)
    return align_from_guesses(source, target, guesses, NO_MATCHES, settings)
