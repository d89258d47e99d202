# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The second worker: slow work beside tracking, whose results come in after a fixed number of clouds.

Counting clouds instead of seconds makes a replay repeatable: a job's result is taken in exactly `delay` clouds after it
was handed over, on a fast and on a slow machine. Tracking waits for a job that takes longer than that.
"""

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

Answer = TypeVar("Answer")
NICER = 5  # how much less urgent than tracking its thread is, in steps of nice
IDLE_SECONDS = 5.0  # a thread without work ends after so long; the next job starts another


class _Job(NamedTuple):
    """A job under way. due: the number of the cloud at which its result is taken in."""

    due: int
    result: "Future[Any]"
    take_in: Callable[[Any], None]


class Background:
    """Jobs one after the other, in a thread of their own or (threaded=False) at once in the caller's."""

    def __init__(self, threaded: bool, delay: int) -> None:
        """delay: clouds between handing a job over and taking its result in."""
        self._threaded, self._delay = threaded, delay
        self._clouds = 0
        self._jobs: deque[_Job] = deque()
        self._waiting: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """How many results have not been taken in yet."""
        return len(self._jobs)

    def submit(self, work: Callable[[], Answer], take_in: Callable[[Answer], None]) -> None:
        """Hand over a job; `take_in` gets its result later, in the thread that counts the clouds."""
        self._jobs.append(_Job(self._clouds + self._delay, self._start(work), take_in))

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Do something in the worker, behind what it has to do already, and wait for the result."""
        return self._start(work).result()

    def next_cloud(self) -> None:
        """Count a cloud and take in the results that are due, waiting for them if need be."""
        self._clouds += 1
        while self._jobs and self._jobs[0].due <= self._clouds:
            self._take_in_first()

    def finish(self) -> None:
        """Take in all results now."""
        while self._jobs:
            self._take_in_first()

    def claim(self) -> Any:
        """Wait for the job that was handed over last; its result is given back now instead of being taken in later."""
        return self._jobs.pop().result.result()

    def drop(self) -> None:
        """Forget all jobs: their results belong to a map that is gone."""
        for job in self._jobs:
            job.result.cancel()
        self._jobs.clear()

    def _take_in_first(self) -> None:
        job = self._jobs.popleft()
        job.take_in(job.result.result())

    def _start(self, work: Callable[[], Answer]) -> "Future[Answer]":
        result: Future[Answer] = Future()
        if not self._threaded or threading.current_thread() is self._thread:
            _perform(work, result)
            return result
        with self._lock:
            self._waiting.put((work, result))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lepard_background", daemon=True)
                self._thread.start()
        return result

    def _work(self) -> None:
        _step_back()
        while True:
            try:
                work, result = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return
                continue
            _perform(work, result)


def _step_back() -> None:
    """Let tracking go first where processors are few: only this thread is made less urgent."""
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own, or no number to name it by
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + NICER))


def _perform(work: Callable[[], Answer], result: "Future[Answer]") -> None:
    """Run a job; its exception goes to whoever takes the result."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
