# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Input checks on stamp and frame_id, before any processing.

A single outlier (other frame, stamp far in the past or future) is rejected. Several consistent ones in a row are a
lasting change, such as a bag that restarts.
"""

from typing import NamedTuple

from lepard_ros.errors import InputError

# Messages can arrive out of order. A cloud older by less than this is late; more is a time jump.
REORDERING_NS = 1_000_000_000
# A stamp this far ahead of the node's clock breaks TF lookups, so the cloud is rejected.
AHEAD_NS = 10_000_000_000
# A stamp may advance by JUMP_RATE times the elapsed node time plus JUMP_NS: a bag may play faster than real time, and
# the sensor may have paused.
JUMP_NS = 2_000_000_000
JUMP_RATE = 2
CHANGE_AFTER = 5


class Seen(NamedTuple):
    """Stamp and frame_id of a cloud, and the node's clock when it was checked; times in nanoseconds."""

    stamp_ns: int
    frame_id: str
    now_ns: int


class Change(NamedTuple):
    """A lasting change of the input: the reason, and whether time went back, as when a recording restarts."""

    reason: str
    restarted: bool


class InputGuard:
    """Checks each cloud against the stamp and frame_id of the last valid one."""

    def __init__(self, change_after: int = CHANGE_AFTER) -> None:
        """change_after: number of consecutive outliers that make a lasting change."""
        self.change_after = change_after
        self._last: Seen | None = None
        self._outliers: list[Seen] = []

    def check(self, stamp_ns: int, frame_id: str, now_ns: int) -> Change | None:
        """Check the stamp and frame_id of a cloud against the node's clock and the last valid cloud.

        Returns None if the cloud continues the input, or the lasting change that it completes: the tracker must then
        relocalise. Raises InputError for a cloud that must not be used.
        """
        cloud = Seen(stamp_ns, frame_id, now_ns)
        _reject_invalid(cloud)
        change = self._change(cloud)
        if change is not None:
            self._count_outlier(cloud, change)
        self._last, self._outliers = cloud, []
        return change

    def _change(self, cloud: Seen) -> Change | None:
        """How a valid cloud departs from the last one; raises InputError for a cloud that is only late."""
        last = self._last
        if last is None:
            return None
        if cloud.frame_id != last.frame_id:
            return Change(f"The clouds' frame changed from '{last.frame_id}' to '{cloud.frame_id}'.", False)
        step = cloud.stamp_ns - last.stamp_ns
        if -REORDERING_NS < step <= 0:
            raise InputError(
                f"The cloud's stamp is {-step * 1e-9:.3f} s before the last one; "
                "the driver must publish each cloud once and in order."
            )
        if step < 0:
            return Change(f"Time jumped back by {-step * 1e-9:.1f} s.", True)
        if step > JUMP_NS + JUMP_RATE * max(cloud.now_ns - last.now_ns, 0):
            return Change(f"Time jumped ahead by {step * 1e-9:.1f} s.", False)
        return None

    def _count_outlier(self, cloud: Seen, change: Change) -> None:
        """Raise InputError unless enough consistent outliers came in a row: same frame_id, increasing stamps."""
        before = self._outliers[-1] if self._outliers else None
        consistent = before is not None and before.frame_id == cloud.frame_id and before.stamp_ns < cloud.stamp_ns
        self._outliers = [*self._outliers, cloud] if consistent else [cloud]
        if len(self._outliers) < self.change_after:
            raise InputError(
                f"{change.reason} The cloud is dropped; after {self.change_after} such clouds in a row "
                "the node relocalises in its map."
            )


def _reject_invalid(cloud: Seen) -> None:
    if not cloud.frame_id.strip("/ "):
        raise InputError("The cloud has an empty frame_id; set the frame in the sensor's driver.")
    if cloud.stamp_ns <= 0:
        raise InputError("The cloud has stamp 0; the sensor's driver must stamp its messages.")
    ahead = cloud.stamp_ns - cloud.now_ns
    if ahead > AHEAD_NS:
        raise InputError(
            f"The cloud is stamped {ahead * 1e-9:.0f} s ahead of this node's clock; synchronise the clocks, "
            "or check that /clock is published if use_sim_time is set."
        )
