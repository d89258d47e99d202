# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The background worker: runs slow jobs while tracking continues; delivers results after a fixed number of clouds.

Counting clouds instead of seconds makes a replay deterministic: a result is delivered exactly `delay` clouds after the
job was submitted, on any machine. With a fast sensor it comes later: at least `seconds` by the clouds' stamps. Tracking
waits for a job that takes longer, unless it is `hurried` (a live sensor whose next cloud has arrived): then the result
is delivered with the first cloud after the job is done.
"""

import itertools
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")
POLL_SECONDS = 0.005  # between two looks at `hurried`
NICE_INCREMENT = 5  # added to the nice value of the worker thread, so that tracking runs first
IDLE_SECONDS = 5.0  # an idle thread ends after this time; the next job starts a new one


class _Job(NamedTuple):
    """A submitted job. Its result is delivered from the cloud with index `due` on.

    submitted, earliest: stamps of the clouds with which it was submitted, and before which it is not delivered.
    """

    due: int
    submitted: float
    earliest: float
    result: "Future[Any]"
    deliver: Callable[[Any], None]


class _Waiting(NamedTuple):
    """A job that the worker has not started; sorted by the first two fields. number: unique, in order of submission."""

    after_others: bool
    number: int
    work: Callable[[], Any]
    result: "Future[Any]"


def never() -> bool:
    """Nothing hurries the caller."""
    return False


class Background:
    """Runs jobs in order, in its own thread or (threaded=False) immediately in the caller's."""

    def __init__(self, threaded: bool, delay: int, hurried: Callable[[], bool] = never, seconds: float = 0.0) -> None:
        """delay: number of clouds between submitting a job and delivering its result.

        hurried: whether to stop waiting for results that are due. seconds: minimum delay by the clouds' stamps.
        """
        self._threaded, self._delay, self._hurried, self._seconds = threaded, delay, hurried, seconds
        self._clouds, self._stamp = 0, 0.0
        self._jobs: deque[_Job] = deque()
        self._waiting: queue.PriorityQueue[_Waiting] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        """Number of results that have not been delivered yet."""
        return len(self._jobs)

    def submit(self, work: Callable[[], Result], deliver: Callable[[Result], None]) -> None:
        """Queue a job; `deliver` receives its result later, in the thread that calls `next_cloud`."""
        earliest = self._stamp + self._seconds
        self._jobs.append(_Job(self._clouds + self._delay, self._stamp, earliest, self._start(work), deliver))

    def run(self, work: Callable[[], Result], first: bool = False) -> Result:
        """Run a job in the worker, after the queued ones or before them (`first`), and wait for the result."""
        return self._start(work, first).result()

    def next_cloud(self, stamp: float = 0.0) -> None:
        """Count a cloud and deliver the results that are due; wait for unfinished ones. stamp: seconds."""
        self._clouds, self._stamp = self._clouds + 1, stamp
        while self._jobs and self._is_due(self._jobs[0]) and self._waited_for(self._jobs[0].result):
            self._deliver_first()

    def _waited_for(self, result: "Future[Any]") -> bool:
        """Wait for a result; False if it is not there and the caller is in a hurry."""
        while not result.done():
            if self._hurried():
                return False
            wait([result], POLL_SECONDS)
        return True

    def _is_due(self, job: _Job) -> bool:
        too_early = job.submitted <= self._stamp < job.earliest  # an earlier stamp: the clock was set back
        return job.due <= self._clouds and not too_early

    def finish(self) -> None:
        """Wait for all jobs and deliver their results."""
        while self._jobs:
            self._deliver_first()

    def drop(self) -> None:
        """Discard all jobs, for example because their map was reset."""
        for job in self._jobs:
            job.result.cancel()
        self._jobs.clear()

    def _deliver_first(self) -> None:
        job = self._jobs.popleft()
        job.deliver(job.result.result())

    def _start(self, work: Callable[[], Result], first: bool = False) -> "Future[Result]":
        result: Future[Result] = Future()
        if not self._threaded or threading.current_thread() is self._thread:
            _run_job(work, result)
            return result
        with self._lock:
            self._waiting.put(_Waiting(not first, next(self._numbers), work, result))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="lepard_background", daemon=True)
                self._thread.start()
        return result

    def _work(self) -> None:
        _lower_priority()
        while True:
            try:
                _, _, work, result = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._thread = None
                        return
                continue
            _run_job(work, result)


def _lower_priority() -> None:
    """Lower the priority of this thread only, so that tracking runs first on machines with few cores."""
    if sys.platform == "linux":  # other systems have no per-thread nice value
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, min(19, os.getpriority(os.PRIO_PROCESS, own) + NICE_INCREMENT))


def _run_job(work: Callable[[], Result], result: "Future[Result]") -> None:
    """Run a job and store its result or its exception."""
    if not result.set_running_or_notify_cancel():
        return
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)
