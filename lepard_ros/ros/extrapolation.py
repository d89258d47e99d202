# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Transforms between two clouds: extrapolate the last motion, for at most one sensor period."""

from lepard_ros.geometry.poses import extrapolate
from lepard_ros.ros.modes import Placement


class Extrapolator:
    """Keeps the last two transforms and extrapolates with constant velocity."""

    def __init__(self) -> None:
        """Start without a pose."""
        self.forget()

    def forget(self) -> None:
        """Stop extrapolating, because the pose was lost."""
        self._last: Placement | None = None
        self._before: Placement | None = None
        self._sent_ns = 0

    def note(self, placed: Placement, now_ns: int) -> None:
        """Record a measured transform and the node time at which it was sent."""
        continues = self._last is not None and self._last.stamp_ns < placed.stamp_ns
        self._before, self._last, self._sent_ns = self._last if continues else None, placed, now_ns

    def at(self, now_ns: int) -> Placement | None:
        """The extrapolated transform; None without a motion, or one sensor period after the last measured transform."""
        if self._last is None or self._before is None:
            return None
        period = self._last.stamp_ns - self._before.stamp_ns
        if not self._sent_ns < now_ns <= self._sent_ns + period or now_ns <= self._last.stamp_ns:
            return None
        share = (now_ns - self._last.stamp_ns) / period
        matrix = extrapolate(self._before.matrix, self._last.matrix, share)
        return self._last._replace(stamp_ns=now_ns, matrix=matrix)
