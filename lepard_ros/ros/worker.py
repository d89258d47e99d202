# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A thread that processes the newest item and drops older ones."""

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
# If items arrive faster than they are processed, an item that has waited for more than STALE seconds is skipped if the
# next one is due within SOON seconds: this reduces the latency at little cost. The item is kept until the next one has
# arrived. A worker that keeps up processes every item, so it can catch up after a slow one.
STALE, SOON, LATENESS = 0.03, 0.075, 0.01
MEMORY = 0.8  # weight of the past in the running mean of the processing time


class Worker(Generic[Item]):
    """A thread with a one-place mailbox: a newer item replaces a waiting one, so no backlog builds up.

    If `process` raises, `on_error` gets the item and the exception; the thread continues with the next item.
    """

    def __init__(self, process: Callable[[Item], None], on_error: Callable[[Item, Exception], None]) -> None:
        """process and on_error are called in the worker's thread."""
        self._process, self._on_error = process, on_error
        self._waiting: Item | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self.received = self.processed = self.dropped = 0
        self._arrived, self._period = time.monotonic(), math.inf  # of the newest item; between it and the one before
        self._usual = 0.0  # mean processing time in seconds
        self._thread = threading.Thread(target=self._run, name="lepard_worker", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> None:
        """Put the newest item into the mailbox; returns immediately."""
        with self._changed:
            now = time.monotonic()
            self._arrived, self._period = now, now - self._arrived
            self.received += 1
            self.dropped += self._waiting is not None
            self._waiting = item
            self._changed.notify()

    def stop(self, timeout: float) -> bool:
        """Finish the current item and stop the thread; False if it still runs after `timeout` seconds."""
        with self._changed:
            self._stopping = True
            self._waiting = None
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            started = time.monotonic()
            try:
                self._process(item)
            except Exception as error:  # the thread must survive any error in a frame
                self._on_error(item, error)
            seconds = time.monotonic() - started
            self._usual = MEMORY * self._usual + (1 - MEMORY) * seconds if self.processed else seconds
            self.processed += 1

    def _take(self) -> Item | None:
        """Wait for the newest item; None when the worker must stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
            item, due = self._waiting, self._arrived + self._period - time.monotonic()
            behind = self._usual > self._period
            if behind and time.monotonic() - self._arrived > STALE and 0 < due < SOON:
                self._changed.wait_for(lambda: self._stopping or self._waiting is not item, due + LATENESS)
            item, self._waiting = self._waiting, None
            return None if self._stopping else item
