# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The `lepard` command: imports the module of a subcommand and runs it.

A subcommand's module has `HELP: str`, `add_arguments(parser)` and `run(args) -> int`. It is imported only when the
subcommand is called, so that `lepard --help` is quick and needs neither torch nor ROS. `args.command` (also
`parser.get_default("command")`) is the subcommand's name; `args.ros_arguments` is everything after `--ros-args`.
"""

import argparse
import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from lepard_ros import __version__
from lepard_ros.errors import InputError
from lepard_ros.network.allocator import keep_freed_memory
from lepard_ros.network.threads import Threads, choose_threads, wait_without_spinning


class Command(NamedTuple):
    """Module of a subcommand, its summary, and whether it runs long enough to choose the number of threads."""

    module: str
    summary: str
    computes: bool = False


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "lepard_ros.commands.demo", "track a synthetic sensor with the real node and make a report", computes=True
    ),
    "match": Command("lepard_ros.commands.match", "match two cloud files and print the alignment", computes=True),
    "node": Command("lepard_ros.ros.main", "run the ROS 2 node"),
    "replay": Command("lepard_ros.commands.replay", "track a recorded bag, every frame in order", computes=True),
    "map": Command("lepard_ros.commands.map", "inspect, export, merge or draw saved maps", computes=True),
    "bag": Command("lepard_ros.commands.bag", "make, list or play a bag"),
    "evaluate": Command(
        "lepard_ros.commands.evaluate", "compare methods on pairs or bags with ground truth", computes=True
    ),
    "reproduce": Command(
        "lepard_ros.commands.reproduce",
        "reproduce the paper's tables from the published data and weights",
        computes=True,
    ),
    "train": Command("lepard_ros.commands.train", "train the network", computes=True),
    "synthesise": Command("lepard_ros.commands.synthesise", "generate training data", computes=True),
    "convert": Command("lepard_ros.commands.weights", "convert an authors' checkpoint to safetensors"),
    "export": Command("lepard_ros.commands.weights", "export the network as ONNX graphs"),
    "info": Command("lepard_ros.commands.weights", "describe a weights file"),
}

# The extra of `pip install` that provides a missing module; others belong to the core.
_EXTRAS = {
    "rclpy": "ros",
    "tf2_msgs": "ros",
    "rosbags": "eval",
    "evo": "eval",
    "matplotlib": "eval",
    "kiss_matcher": "eval",
    "kiss_icp": "eval",
    "pycpd": "eval",
    "distributed": "cluster",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 2 with one sentence for bad input."""
    arguments, ros_arguments = split_ros_arguments(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments, ros_arguments)
        finally:
            sys.stdout.flush()  # here, where a closed pipe is handled, not at interpreter exit
    except InputError as error:
        print(f"lepard: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("lepard: stopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 141  # like a program ended by SIGPIPE: `lepard info rigid | head -2` is not an error


def _reader_is_gone() -> bool:
    """Whether the reader of our output has closed the pipe; the rest of the output is then discarded."""
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a file
        return False
    poll = select.poll()
    poll.register(output, select.POLLOUT)
    gone = any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return gone


def split_ros_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split off the ROS arguments: everything from `--ros-args` on, which argparse cannot parse."""
    position = list(arguments).index("--ros-args") if "--ros-args" in arguments else len(arguments)
    return list(arguments[:position]), list(arguments[position:])


def _run(arguments: list[str], ros_arguments: list[str]) -> int:
    name = _parse_name(arguments)
    if name is None:
        print(_overview())
        return 0
    if name in ("-V", "--version"):
        print(f"lepard_ros {__version__}")
        return 0
    # Programs choose this, not the library. Threads first: torch reads them when it is imported.
    wait_without_spinning()
    threads = choose_threads() if COMMANDS[name].computes else None
    try:
        module = _load(name)
        parser = _parser(name, module)
        args = parser.parse_args(arguments[1:])
        args.ros_arguments = ros_arguments
        keep_freed_memory()
        code = int(module.run(args))
        if threads is not None:  # at the end, so that an input error prints nothing but its message
            print(_threads_line(threads, getattr(args, "jobs", 1)), file=sys.stderr)
        return code
    except ModuleNotFoundError as error:
        raise InputError(_missing_module(name, error)) from error


def _threads_line(threads: Threads, jobs: int) -> str:
    """A line about the chosen threads. jobs: number of worker processes, with one thread each."""
    if jobs > 1:
        return f"lepard: ran in {jobs} processes of one thread each; --jobs sets another number."
    return f"lepard: ran with {threads.number} thread{'s' if threads.number > 1 else ''} {threads.why}."


def _parse_name(arguments: list[str]) -> str | None:
    """The subcommand's name or a version flag; None for help; raises InputError with the nearest name otherwise."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return None
    name = arguments[0]
    if name in COMMANDS or name in ("-V", "--version"):
        return name
    near = difflib.get_close_matches(name, COMMANDS, n=2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(COMMANDS)}."
    raise InputError(f"there is no command {name!r}: {hint}")


def _overview() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lepard COMMAND [arguments]",
            "",
            "Matching of partial point clouds, rigid and deformable. `lepard COMMAND --help` explains a command.",
            "",
            *lines,
            "",
            "  --version   print the version",
        ]
    )


def _load(name: str) -> ModuleType:
    return importlib.import_module(COMMANDS[name].module)


def _parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"lepard {name}", description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(command=name)
    module.add_arguments(parser)
    return parser


def _missing_module(name: str, error: ModuleNotFoundError) -> str:
    """The message for a module that cannot be imported: not built yet (ours) or not installed (others)."""
    missing = error.name or str(error)
    if missing == COMMANDS[name].module:
        return f"`lepard {name}` is not part of this version."
    package = missing.split(".")[0]
    if package == "lepard_ros":
        return f"`lepard {name}` needs {missing}, which is not built: run `make` in the source tree, or colcon build."
    extra = _EXTRAS.get(package)
    if extra == "ros" or package.endswith(("_msgs", "_srvs")):
        return f"ROS 2 is missing ({package}): source a ROS 2 workspace, or pip install 'lepard_ros[ros]'."
    remedy = f"pip install 'lepard_ros[{extra}]'" if extra else f"pip install {package}"
    return f"`lepard {name}` needs the Python package {package}: {remedy}."


if __name__ == "__main__":
    sys.exit(main())
