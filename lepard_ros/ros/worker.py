# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A thread that processes the newest item and drops older ones, except a few that bridge a hold-up."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Generic, TypeVar

Item = TypeVar("Item")
# If items arrive faster than they are processed, an item that has waited for more than STALE seconds is skipped if the
# next one is due within SOON seconds: this reduces the latency at little cost. The item is kept until the next one has
# arrived. A worker that keeps up processes every item, so it can catch up after a slow one.
STALE, SOON, LATENESS = 0.03, 0.075, 0.01
REMEMBERED = 9  # newest processing times; their median is the usual one, whatever a single search takes
# While an item takes more than HOLD_UP seconds, some of those that arrive are kept and processed before the newest:
# after a search of 0.5 s the sensor may have moved too far for tracking from the cloud that was found to the newest
# one, and the next search would begin. One is kept every BRIDGE_STEP seconds, or every CATCH_UP times the usual
# processing time, so that the worker catches up on a slow machine too. If a kept item needs a search, the others are
# dropped: the newest one is as good a start. Searches do not count as usual.
HOLD_UP, BRIDGE_STEP, CATCH_UP, BRIDGE_ITEMS = 0.07, 0.07, 1.5, 8


class Worker(Generic[Item]):
    """A thread with a one-place mailbox: a newer item replaces a waiting one, so no backlog builds up.

    With `bridges`, a few of the items that arrive while one takes long are processed too, oldest first.
    If `process` raises, `on_error` gets the item and the exception; the thread continues with the next item.
    """

    def __init__(
        self, process: Callable[[Item], bool | None], on_error: Callable[[Item, Exception], None], bridges: bool = False
    ) -> None:
        """process and on_error run in the worker's thread. `process` returns True if the item needed a search."""
        self._process, self._on_error, self._bridges = process, on_error, bridges
        self._bridge: deque[Item] = deque()  # kept during a hold-up, oldest first
        self._bridging = False  # the last item came from the bridge
        self._kept = 0.0  # when the mailbox was last emptied, or an item last joined the bridge
        self._waiting: Item | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self.received = self.processed = self.dropped = 0
        self._arrived, self._period = time.monotonic(), math.inf  # of the newest item; between it and the one before
        self._times: deque[float] = deque([0.0], maxlen=REMEMBERED)  # processing times in seconds, newest last
        self._usual_times: deque[float] = deque([0.0], maxlen=REMEMBERED)  # those of items without a search
        self._searched = False  # the last item needed a search
        self._thread = threading.Thread(target=self._run, name="lepard_worker", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> None:
        """Put the newest item into the mailbox; returns immediately."""
        with self._changed:
            now = time.monotonic()
            self._arrived, self._period = now, now - self._arrived
            self.received += 1
            if self._waiting is not None and self._may_bridge(now):
                self._bridge.append(self._waiting)
                self._kept = now
            else:
                self.dropped += self._waiting is not None
            self._waiting = item
            self._changed.notify()

    def has_newer(self) -> bool:
        """Whether another item has arrived since the current one was taken."""
        return self._waiting is not None or bool(self._bridge)

    def _may_bridge(self, now: float) -> bool:
        """Whether to keep the waiting item instead of dropping it."""
        room = self._bridges and len(self._bridge) < BRIDGE_ITEMS
        return room and now - self._kept > max(BRIDGE_STEP, CATCH_UP * median(self._usual_times))

    def stop(self, timeout: float) -> bool:
        """Finish the current item and stop the thread; False if it still runs after `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._waiting = None
            self._bridge.clear()
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            started, searched = time.monotonic(), False
            try:
                searched = bool(self._process(item))
            except Exception as error:  # the thread must survive any error in a frame
                self._on_error(item, error)
            with self._changed:
                self._remember(time.monotonic() - started, searched)

    def _remember(self, took: float, searched: bool) -> None:
        """Count an item, its processing time in seconds and whether it needed a search."""
        if not self.processed:
            self._times.clear()
        self._times.append(took)
        self._searched = searched
        if not searched:
            self._usual_times.append(took)
        self.processed += 1

    def _take(self) -> Item | None:
        """The oldest item of the bridge, or wait for the newest item; None when the worker must stop."""
        with self._changed:
            took = self._times[-1]
            self._bridging = bool(self._bridge) and (not self._searched if self._bridging else took > HOLD_UP)
            if self._bridging:
                return self._bridge.popleft()
            self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
            item, due = self._waiting, self._arrived + self._period - time.monotonic()
            behind = median(self._times) > self._period
            if behind and time.monotonic() - self._arrived > STALE and 0 < due < SOON:
                self._changed.wait_for(lambda: self._stopping or self._waiting is not item, due + LATENESS)
            self.dropped += len(self._bridge)
            self._bridge.clear()  # what came before the newest item
            item, self._waiting, self._kept = self._waiting, None, time.monotonic()
            return None if self._stopping else item
