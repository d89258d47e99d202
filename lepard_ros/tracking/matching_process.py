# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Matching in a process of its own: threads of one interpreter take turns, and tracking would wait for the network.

The process is started anew, not forked (DDS has threads), and talks over two pipes that nobody else has. It ends when
its pipe does: when it is closed, and also when the node is killed. What a library prints there goes to the node's log.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.tracking.background import NICER
from lepard_ros.tracking.sights import Study, View

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher, MatcherSettings
    from lepard_ros.tracking.examination import Examined, Task

END_SECONDS = 2.0  # to end by itself


class Weights(NamedTuple):
    """What the process loads: the arguments of `Matcher.from_pretrained`, and with how many threads torch computes."""

    name: str
    device: str
    settings: "MatcherSettings"
    threads: int


class Facts(NamedTuple):
    """What was loaded: the weights' name and the mode they were trained for, and what computes the network."""

    name: str
    mode: str
    runs_on: str


class MatchingProcess:
    """An examiner whose network lives in another process. If that ends, the next request starts another."""

    def __init__(self, weights: Weights) -> None:
        """Start the process and wait until the network is loaded; raises InputError if it cannot be."""
        self._weights = weights
        self._busy = threading.Lock()  # held from a request to its answer
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        with self._busy:
            self.facts = self._start()

    @property
    def pid(self) -> int | None:
        """The number of the process, None if there is none."""
        return None if self._process is None else self._process.pid

    def encode(self, points: FloatArray) -> Any:
        """The arrays of a cloud (N, 3) as the network sees it."""
        return self._ask("encode", points)

    def examine(self, task: "Task") -> "Examined":
        """Match a cloud, warp the model to it and let a copy of the model learn."""
        found: Examined = self._ask("examine", task)
        return found

    def close(self) -> None:
        """End the process."""
        self._closed = True
        self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._requests.close()  # at which it ends, whatever it does
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _ask(self, name: str, argument: Any) -> Any:
        with self._busy:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                self._requests.send((name, argument))
                return self._answer()
            except (EOFError, OSError) as error:
                self._end()  # its pipe ends before it does, and the next request must not go to it, too
                raise InputError("The process that matches clouds has ended; the next cloud starts another.") from error

    def _start(self) -> Facts:
        if self._closed:
            raise InputError("The process that matches clouds was closed.")
        (theirs, self._requests), (self._answers, ours) = _pipe(), _pipe()
        ends = theirs.fileno(), ours.fileno()
        # Not with -m: what is sent over the pipe must belong to this module, not to __main__.
        command = [sys.executable, "-c", f"from {__name__} import main; main()", *map(str, ends)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(command, pass_fds=ends, env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        ours.close()
        try:
            self._requests.send(self._weights)
            facts: Facts = self._answer()
        except (EOFError, OSError) as error:
            raise InputError("The process that matches clouds did not start; the log says why.") from error
        return facts

    def _answer(self) -> Any:
        well, answer = self._answers.recv()
        if well:
            return answer
        raise answer


def _pipe() -> tuple[Connection, Connection]:
    """The reading and the writing end."""
    reader, writer = os.pipe()
    return Connection(reader, writable=False), Connection(writer, readable=False)


# ---- in the other process ----


def main() -> None:
    """Serve requests until nobody holds the other end of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both; the node decides
    requests, answers = (Connection(int(number)) for number in sys.argv[1:])
    os.nice(NICER)
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, waiting), daemon=True).start()
    weights: Weights = waiting.get()
    well, matcher = _outcome(_load, weights)
    if not well:
        answers.send((False, matcher))
        return
    answers.send((True, Facts(matcher.card.name, matcher.card.mode, matcher.runs_on)))
    while True:
        name, argument = waiting.get()
        answers.send(_outcome(SERVICES[name], matcher, argument))


def _read(requests: Connection, waiting: "queue.SimpleQueue[Any]") -> None:
    """Take in requests beside the work; without the other end this process ends, even in the middle of its work."""
    try:
        while True:
            waiting.put(requests.recv())
    except (EOFError, OSError):
        os._exit(0)


def _outcome(work: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
    """Whether something went well, and its result or the exception."""
    try:
        return True, work(*arguments)
    except Exception as error:  # whoever asked shall know
        return False, error


def _load(weights: Weights) -> "Matcher":
    from lepard_ros.network.allocator import keep_freed_memory

    keep_freed_memory()
    import torch

    from lepard_ros.matcher import Matcher

    torch.set_num_threads(weights.threads)
    matcher = Matcher.from_pretrained(weights.name, device=weights.device, settings=weights.settings)
    matcher.warm_up()
    return matcher


def _encode(matcher: "Matcher", points: FloatArray) -> Any:
    return matcher.encode(points).to_arrays()


def _examine(matcher: "Matcher", task: "Task") -> "Examined":
    """Clouds come and go as arrays: a tensor would be handed over in shared memory, and with a device's context."""
    from lepard_ros.encoded_cloud import EncodedCloud
    from lepard_ros.tracking.examination import examine

    views = [View(view.sight, EncodedCloud.from_arrays(view.cloud, matcher.device)) for view in task.views]
    found = examine(matcher, task._replace(views=views))
    cloud = found.study.cloud.to_arrays()
    learnt = found.learnt and found.learnt._replace(view=found.learnt.view._replace(cloud=cloud))
    return found._replace(study=Study(cloud, found.study.matches), learnt=learnt)


SERVICES: dict[str, Callable[["Matcher", Any], Any]] = {"encode": _encode, "examine": _examine}
