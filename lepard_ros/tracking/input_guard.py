# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Which clouds may be tracked: the checks on stamp and frame that come before any work.

One strange cloud (another frame, a stamp far back or far ahead) is refused. Only several in a row that agree with each
other are a lasting change, such as a bag that starts over.
"""

from typing import NamedTuple

from lepard_ros.errors import InputError

# Clouds can overtake each other on the way; older ones by less than this are late, not a jump of time.
REORDERING_NS = 1_000_000_000
# A stamp this far ahead of the node's clock makes every TF consumer fail, so such a cloud is refused.
AHEAD_NS = 10_000_000_000
# Stamps may run ahead of the last cloud by this much more than JUMP_RATE times the time that passed on the node's
# clock: a bag may be played faster than real time, and the sensor may have paused.
JUMP_NS = 2_000_000_000
JUMP_RATE = 2
CHANGE_AFTER = 5


class Seen(NamedTuple):
    """Stamp and frame of a cloud, and the node's clock when it was checked, in nanoseconds."""

    stamp_ns: int
    frame_id: str
    now_ns: int


class Change(NamedTuple):
    """A lasting change of the input: a sentence, and whether time went back, as when a recording starts over."""

    reason: str
    restarted: bool


class InputGuard:
    """Remembers the last good cloud's stamp and frame, and judges the next one's."""

    def __init__(self, change_after: int = CHANGE_AFTER) -> None:
        """Nothing seen yet. change_after: strange clouds in a row that make a lasting change."""
        self.change_after = change_after
        self._last: Seen | None = None
        self._strange: list[Seen] = []

    def check(self, stamp_ns: int, frame_id: str, now_ns: int) -> Change | None:
        """Judge a cloud by its stamp, its frame and the node's clock.

        Returns None for a cloud that continues the last one, or the lasting change that it completes: the tracker must
        then find its place again. Raises InputError for a cloud that must not be used.
        """
        cloud = Seen(stamp_ns, frame_id, now_ns)
        _refuse_unusable(cloud)
        change = self._change(cloud)
        if change is not None:
            self._count_strange(cloud, change)
        self._last, self._strange = cloud, []
        return change

    def _change(self, cloud: Seen) -> Change | None:
        """What is strange about a cloud that may be used; raises InputError for one that is merely late."""
        last = self._last
        if last is None:
            return None
        if cloud.frame_id != last.frame_id:
            return Change(f"The clouds' frame changed from '{last.frame_id}' to '{cloud.frame_id}'.", False)
        step = cloud.stamp_ns - last.stamp_ns
        if -REORDERING_NS < step <= 0:
            raise InputError(
                f"The cloud's stamp is {-step * 1e-9:.3f} s before the last one's; "
                "let the driver send each cloud once and in order."
            )
        if step < 0:
            return Change(f"Time jumped back by {-step * 1e-9:.1f} s.", True)
        if step > JUMP_NS + JUMP_RATE * max(cloud.now_ns - last.now_ns, 0):
            return Change(f"Time jumped ahead by {step * 1e-9:.1f} s.", False)
        return None

    def _count_strange(self, cloud: Seen, change: Change) -> None:
        """Raise InputError unless enough strange clouds came in a row, one after the other in the same frame."""
        before = self._strange[-1] if self._strange else None
        goes_on = before is not None and before.frame_id == cloud.frame_id and before.stamp_ns < cloud.stamp_ns
        self._strange = [*self._strange, cloud] if goes_on else [cloud]
        if len(self._strange) < self.change_after:
            raise InputError(
                f"{change.reason} The cloud is left out; after {self.change_after} such clouds in a row "
                "the node looks for its place in the map again."
            )


def _refuse_unusable(cloud: Seen) -> None:
    if not cloud.frame_id.strip("/ "):
        raise InputError("The cloud has an empty frame_id; set the frame in the sensor's driver.")
    if cloud.stamp_ns <= 0:
        raise InputError("The cloud has the stamp 0; let the sensor's driver stamp its messages.")
    ahead = cloud.stamp_ns - cloud.now_ns
    if ahead > AHEAD_NS:
        raise InputError(
            f"The cloud is stamped {ahead * 1e-9:.0f} s ahead of this node's clock; synchronise the clocks, "
            "or check that /clock is published if use_sim_time is set."
        )
