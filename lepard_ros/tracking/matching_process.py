# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Matching in a separate process: with threads, tracking would compete with the network for the interpreter lock.

The process is spawned, not forked (DDS has threads), and communicates over two private pipes. It exits when its pipe
closes, also when the node is killed. Its output goes to the node's log.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.network.allocator import RELEASE_SECONDS, keep_freed_memory, release_freed_memory
from lepard_ros.tracking.background import NICE_INCREMENT
from lepard_ros.tracking.observations import CloudMatches, View

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher, MatcherSettings
    from lepard_ros.registration.rigid.estimate import RigidSettings
    from lepard_ros.registration.types import Registration, Surface
    from lepard_ros.tracking.matching_worker import MatchingResult, MatchingTask

EXIT_SECONDS = 0.5  # time to exit before it is killed; it holds nothing that must be saved


class Weights(NamedTuple):
    """What the process loads: the arguments of `Matcher.from_pretrained`, and the number of torch threads."""

    name: str
    device: str
    settings: "MatcherSettings"
    threads: int


class Facts(NamedTuple):
    """What was loaded: name of the weights, the mode they were trained for, and the device that runs the network."""

    name: str
    mode: str
    runs_on: str


class MatchingProcess:
    """A matching worker in another process. If the process ends, the next request starts a new one."""

    def __init__(self, weights: Weights, wait: bool = True) -> None:
        """Start the process and wait until the network is loaded; raises InputError if that fails.

        wait: False lets the first request wait for the network instead.
        """
        self._weights = weights
        self._busy = threading.Lock()  # held from a request to its reply
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: Facts | None = None
        self._closed = False
        with self._busy:
            self._start()
        if wait:
            _ = self.facts

    @property
    def facts(self) -> Facts:
        """What was loaded; waits until it is."""
        with self._busy:
            return self._wait_until_loaded()

    @property
    def pid(self) -> int | None:
        """The process id, or None if no process is running."""
        return None if self._process is None else self._process.pid

    def encode(self, points: FloatArray, grid: float | None = None) -> Any:
        """Encode a cloud (N, 3) on a grid in metres; returns the arrays of the encoded cloud."""
        return self._request("encode", (points, grid))

    def compare(self, method: str, source: Any, targets: list[Any], *more: Any) -> Any:
        """Call a method of the matcher that compares one cloud with several; clouds as arrays."""
        return self._request(method, (source, targets, more))

    def align(
        self, source: "Surface", target: "Surface", guesses: FloatArray, settings: "RigidSettings"
    ) -> "Registration":
        """Align a surface to another one from guesses (G, 4, 4)."""
        # Without what is derived from them, such as their search trees.
        bare = [one.part(np.arange(len(one.points))) for one in (source, target)]
        found: Registration = self._request("align", (*bare, guesses, settings))
        return found

    def match_and_update(self, task: "MatchingTask") -> "MatchingResult":
        """Match a cloud, warp the model to it and update a copy of the model."""
        found: MatchingResult = self._request("match_and_update", task)
        return found

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._requests.close()  # makes the process exit, even while it is busy
        try:
            process.wait(EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _request(self, name: str, argument: Any) -> Any:
        with self._busy:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._wait_until_loaded()
            try:
                self._requests.send((name, argument))
                return self._receive()
            except (EOFError, OSError) as error:
                self._end()  # the pipe closes before the process exits; the next request must start a new one
                raise InputError("The matching process has ended; the next cloud starts a new one.") from error

    def _start(self) -> None:
        if self._closed:
            raise InputError("The matching process is closed.")
        (theirs, self._requests), (self._replies, ours) = _pipe(), _pipe()
        ends = theirs.fileno(), ours.fileno()
        # Not with -m: classes sent over the pipe must belong to this module, not to __main__.
        command = [sys.executable, "-c", f"from {__name__} import main; main()", *map(str, ends)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, pass_fds=ends, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        ours.close()
        self._loaded = None
        self._requests.send(self._weights)

    def _wait_until_loaded(self) -> Facts:
        if self._loaded is None:
            try:
                self._loaded = self._receive()
            except (EOFError, OSError) as error:
                raise InputError("The matching process did not start; see the log for the reason.") from error
        return self._loaded

    def _receive(self) -> Any:
        ok, reply = self._replies.recv()
        if ok:
            return reply
        raise reply


def _pipe() -> tuple[Connection, Connection]:
    """The read end and the write end of a new pipe."""
    reader, writer = os.pipe()
    return Connection(reader, writable=False), Connection(writer, readable=False)


# ---- in the other process ----


def main() -> None:
    """Serve requests until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both processes; the node handles it
    requests, replies = (Connection(int(number)) for number in sys.argv[1:])
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    weights: Weights = waiting.get()
    ok, matcher = _outcome(_load, weights)
    if not ok:
        replies.send((False, matcher))
        return
    os.nice(NICE_INCREMENT)  # not earlier: the node waits until the network is loaded
    replies.send((True, Facts(matcher.card.name, matcher.card.mode, matcher.runs_on)))
    released = time.monotonic()
    while True:
        name, argument = waiting.get()
        replies.send(_outcome(SERVICES[name], matcher, argument))
        if time.monotonic() - released > RELEASE_SECONDS:
            release_freed_memory()
            released = time.monotonic()


def _read(requests: Connection, waiting: "queue.SimpleQueue[Any]") -> None:
    """Read requests in a thread of their own; exit as soon as the pipe closes, even in the middle of a request."""
    try:
        while True:
            waiting.put(requests.recv())
    except (EOFError, OSError):
        os._exit(0)


def _outcome(work: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether a call succeeded, and its result or exception."""
    try:
        return True, work(*arguments)
    except Exception as error:  # passed on to the caller
        return False, error


def _load(weights: Weights) -> "Matcher":
    keep_freed_memory()
    import torch

    from lepard_ros.matcher import Matcher

    torch.set_num_threads(weights.threads)
    matcher = Matcher.from_pretrained(weights.name, device=weights.device, settings=weights.settings)
    matcher.warm_up()
    return matcher


def _encode(matcher: "Matcher", argument: tuple[FloatArray, float | None]) -> Any:
    points, grid = argument
    return matcher.encode(points, grid=grid).to_arrays()


def _compare(method: str, matcher: "Matcher", argument: tuple[Any, list[Any], tuple[Any, ...]]) -> Any:
    from lepard_ros.encoded_cloud import EncodedCloud

    source, targets, more = argument
    cloud, *others = (EncodedCloud.from_arrays(arrays, matcher.device) for arrays in (source, *targets))
    return getattr(matcher, method)(cloud, others, *more)


def _align(_: "Matcher", argument: tuple["Surface", "Surface", FloatArray, "RigidSettings"]) -> "Registration":
    from lepard_ros.registration.types import NO_MATCHES
    from lepard_ros.tracking.prior import align_from_guesses

    source, target, guesses, settings = argument
    return align_from_guesses(source, target, guesses, NO_MATCHES, settings)


def _match_and_update(matcher: "Matcher", task: "MatchingTask") -> "MatchingResult":
    """Run a task. Clouds are sent as arrays: tensors would need shared memory and a device context."""
    from lepard_ros.encoded_cloud import EncodedCloud
    from lepard_ros.tracking.matching_worker import match_and_update

    views = [View(view.observation, EncodedCloud.from_arrays(view.cloud, matcher.device)) for view in task.views]
    found = match_and_update(matcher, task._replace(views=views))
    cloud = found.cloud_matches.cloud.to_arrays()
    update = found.update and found.update._replace(view=found.update.view._replace(cloud=cloud))
    return found._replace(cloud_matches=CloudMatches(cloud, found.cloud_matches.matches), update=update)


SERVICES: dict[str, Callable[["Matcher", Any], Any]] = {
    "align": _align,
    "encode": _encode,
    "match_and_update": _match_and_update,
    **{name: partial(_compare, name) for name in ("match_many", "register_many", "register_best")},
}
