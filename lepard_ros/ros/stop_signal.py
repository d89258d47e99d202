# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""SIGINT and SIGTERM as a flag for a loop to poll: rclpy's own handlers sometimes end the process with code 1."""

import os
import signal
import sys
from types import FrameType


class StopSignal:
    """Set by SIGINT or SIGTERM. Before spinning, a signal ends the process at once, since loading does not poll."""

    def __init__(self) -> None:
        """Install handlers for both signals."""
        # Not an Event: a second signal inside of `Event.set` would wait for ever for the lock that the first one holds.
        self.asked = False
        self.spinning = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self.asked = self.asked, True
        if self.spinning:
            return
        if again:  # the import of a compiled module may have suppressed the first exception
            os._exit(0)
        sys.exit(0)
