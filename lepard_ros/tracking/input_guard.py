# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Which clouds may be tracked: the checks on stamp and frame that come before any work."""

from lepard_ros.errors import InputError

# Clouds can overtake each other on the way; older ones by less than this are left out, not taken for a new recording.
REORDERING_NS = 1_000_000_000
# A stamp this far ahead of the node's clock makes every TF consumer fail, so such a cloud is refused.
AHEAD_NS = 10_000_000_000


class InputGuard:
    """Remembers the last cloud's stamp and frame, and judges the next one's."""

    def __init__(self) -> None:
        """Nothing seen yet."""
        self._stamp_ns: int | None = None
        self._frame_id = ""

    def check(self, stamp_ns: int, frame_id: str, now_ns: int) -> str | None:
        """Judge a cloud by its stamp, its frame and the node's clock.

        Returns None for a cloud that continues the last one, or the reason (a sentence) why tracking must start anew
        with it. Raises InputError for a cloud that must not be used.
        """
        self._refuse_unusable(stamp_ns, frame_id, now_ns)
        reset = self._reason_to_reset(stamp_ns, frame_id)
        self._stamp_ns, self._frame_id = stamp_ns, frame_id
        return reset

    def _refuse_unusable(self, stamp_ns: int, frame_id: str, now_ns: int) -> None:
        if not frame_id.strip("/ "):
            raise InputError("The cloud has an empty frame_id; set the frame in the sensor's driver.")
        if stamp_ns <= 0:
            raise InputError("The cloud has the stamp 0; let the sensor's driver stamp its messages.")
        if stamp_ns - now_ns > AHEAD_NS:
            ahead = (stamp_ns - now_ns) * 1e-9
            raise InputError(
                f"The cloud is stamped {ahead:.0f} s ahead of this node's clock; synchronise the clocks, "
                "or check that /clock is published if use_sim_time is set."
            )
        last = self._stamp_ns
        if last is not None and frame_id == self._frame_id and last - REORDERING_NS < stamp_ns <= last:
            raise InputError(
                f"The cloud's stamp is {(last - stamp_ns) * 1e-9:.3f} s before the last one's; "
                "let the driver send each cloud once and in order."
            )

    def _reason_to_reset(self, stamp_ns: int, frame_id: str) -> str | None:
        if self._stamp_ns is None:
            return None
        if frame_id != self._frame_id:
            return f"The clouds' frame changed from '{self._frame_id}' to '{frame_id}'."
        if stamp_ns < self._stamp_ns:
            return f"Time jumped back by {(self._stamp_ns - stamp_ns) * 1e-9:.1f} s."
        return None
