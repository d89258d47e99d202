# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One thread that works on the newest item and drops what it has no time for."""

import math
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
# Where items come faster than they are worked on, one that has waited for more than STALE seconds is left for the next
# one if that is due within SOON seconds: the result is then younger when it comes, and little time is lost. It is kept
# until the next one is really there. A worker that keeps up takes every item: it makes up for one that took long.
STALE, SOON, LATENESS = 0.03, 0.075, 0.01
MEMORY = 0.8  # how much of the usual time of work stays with each item


class Worker(Generic[Item]):
    """A thread with a queue of one: a newer item replaces the one that still waits, so that no backlog builds up.

    An exception of `process` goes to `on_error` with the item; the thread then takes the next item.
    """

    def __init__(self, process: Callable[[Item], None], on_error: Callable[[Item, Exception], None]) -> None:
        """process and on_error are called in the worker's thread."""
        self._process, self._on_error = process, on_error
        self._waiting: Item | None = None
        self._stopping = False
        self._changed = threading.Condition()
        self.received = self.processed = self.dropped = 0
        self._arrived, self._period = time.monotonic(), math.inf  # of the newest item; between it and the one before
        self._usual = 0.0  # seconds of work on an item
        self._thread = threading.Thread(target=self._run, name="lepard_worker", daemon=True)
        self._thread.start()

    def offer(self, item: Item) -> None:
        """Hand over the newest item; returns at once."""
        with self._changed:
            now = time.monotonic()
            self._arrived, self._period = now, now - self._arrived
            self.received += 1
            self.dropped += self._waiting is not None
            self._waiting = item
            self._changed.notify()

    def stop(self, timeout: float) -> bool:
        """Finish the current item and end the thread; False if it still runs after `timeout` seconds."""
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
            except Exception as error:  # the one place that must survive whatever a frame does
                self._on_error(item, error)
            seconds = time.monotonic() - started
            self._usual = MEMORY * self._usual + (1 - MEMORY) * seconds if self.processed else seconds
            self.processed += 1

    def _take(self) -> Item | None:
        """The newest item, as soon as there is one; None when the worker is to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._waiting is not None)
            item, due = self._waiting, self._arrived + self._period - time.monotonic()
            behind = self._usual > self._period
            if behind and time.monotonic() - self._arrived > STALE and 0 < due < SOON:
                self._changed.wait_for(lambda: self._stopping or self._waiting is not item, due + LATENESS)
            item, self._waiting = self._waiting, None
            return None if self._stopping else item
