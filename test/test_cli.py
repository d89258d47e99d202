# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The `lepard` command: the right module is called, and every mistake ends with one sentence and code 2."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from lepard_ros import cli
from lepard_ros.errors import InputError


def add_command(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Write a real module and make it the subcommand `probe`."""
    (folder / "probe_command.py").write_text(source)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "probe_command", raising=False)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command("probe_command", "a probe"))


PROBE = """
from lepard_ros.errors import InputError
HELP = "Probe the command line."
def add_arguments(parser):
    parser.add_argument("number", type=int)
def run(args):
    if args.number < 0:
        raise InputError("the number is negative: give a positive one.")
    if args.number == 99:
        import evo_is_not_here
    if args.number == 98:
        raise KeyboardInterrupt
    print(args.command, args.number, args.ros_arguments)
    return args.number
"""


def test_a_subcommand_gets_its_arguments_and_gives_the_exit_code(monkeypatch, tmp_path, capsys) -> None:
    add_command(monkeypatch, tmp_path, PROBE)
    assert cli.main(["probe", "7", "--ros-args", "-p", "mode:=rigid"]) == 7
    assert capsys.readouterr().out == "probe 7 ['--ros-args', '-p', 'mode:=rigid']\n"


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["probe", "-1"], 2, "lepard: the number is negative: give a positive one.\n"),
        (["probe", "99"], 2, "lepard: `lepard probe` needs the Python package evo_is_not_here: pip install"),
        (["probe", "98"], 130, "lepard: stopped.\n"),
        (["prob", "1"], 2, "lepard: there is no command 'prob': did you mean probe?\n"),
        (["xyzzy"], 2, "lepard: there is no command 'xyzzy': choose from demo, match,"),
    ],
)
def test_mistakes_end_with_one_sentence(monkeypatch, tmp_path, capsys, arguments, code, sentence) -> None:
    add_command(monkeypatch, tmp_path, PROBE)
    assert cli.main(arguments) == code
    captured = capsys.readouterr()
    assert captured.err.startswith(sentence)
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_command_of_a_later_version_says_so(monkeypatch, capsys) -> None:
    monkeypatch.setitem(cli.COMMANDS, "later", cli.Command("lepard_ros.evaluation.not_written_yet", ""))
    assert cli.main(["later"]) == 2
    assert capsys.readouterr().err == "lepard: `lepard later` is not part of this version.\n"


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("rclpy", "lepard_ros[ros]"),
        ("sensor_msgs.msg", "lepard_ros[ros]"),
        ("evo", "lepard_ros[eval]"),
        ("torch", "torch"),
    ],
)
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, tmp_path, capsys, module: str, remedy: str) -> None:
    add_command(monkeypatch, tmp_path, f"raise ModuleNotFoundError('no', name={module!r})")
    assert cli.main(["probe"]) == 2
    assert remedy in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_a_page_of_help(name: str, capsys) -> None:
    if importlib.util.find_spec(cli.COMMANDS[name].module) is None:
        assert cli.main([name]) == 2
        return
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: lepard {name}" in capsys.readouterr().out


def test_overview_lists_every_command_and_needs_no_torch() -> None:
    code = "import sys; from lepard_ros.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"  {name} " in result.stdout for name in cli.COMMANDS)


def test_the_installed_command_prints_the_version() -> None:
    result = subprocess.run([sys.executable, "-m", "lepard_ros.cli", "--version"], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "lepard_ros 0.1.0\n")


def test_open3d_without_its_libraries_gives_one_sentence(monkeypatch) -> None:
    from lepard_ros.cloud import open3d as module

    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(module.importlib, "import_module", refuse)
    with pytest.raises(InputError, match="pip install open3d-cpu"):
        module.import_open3d.__wrapped__()  # not what an earlier test imported


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [1, 20_000])  # fewer than the buffer holds, and more
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, lines: int, unbuffered: str) -> None:
    """As in `lepard info rigid | head -2`."""
    (tmp_path / "chatty.py").write_text(
        f"HELP = ''\ndef add_arguments(parser): pass\ndef run(args):\n  print('a line\\n' * {lines})\n  return 0\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from lepard_ros import cli; "
        "cli.COMMANDS['chatty'] = cli.Command('chatty', ''); sys.stdin.read(); sys.exit(cli.main(['chatty']))"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, **pipes) as process:
        process.stdout.close()
        process.stdin.close()  # only now does it begin to talk
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_another_broken_pipe_is_not_hidden(monkeypatch, tmp_path) -> None:
    add_command(monkeypatch, tmp_path, PROBE.replace("raise KeyboardInterrupt", "raise BrokenPipeError"))
    with pytest.raises(BrokenPipeError):
        cli.main(["probe", "98"])


@pytest.mark.parametrize(
    ("cores", "load", "number"), [(8, 0.0, 8), (8, 5.6, 2), (2, 0.4, 2), (2, 11.0, 1), (1, 0.0, 1), (64, 1.0, 8)]
)
def test_as_many_threads_as_cores_are_idle(cores: int, load: float, number: int) -> None:
    from lepard_ros.network.threads import idle_threads

    assert idle_threads(cores, load).number == number


def test_a_containers_quota_counts_as_cores(tmp_path: Path) -> None:
    from lepard_ros.network.threads import available_cores

    (tmp_path / "one").write_text("150000 100000\n")
    (tmp_path / "all").write_text("max 100000\n")
    assert available_cores(tmp_path / "one") == 1
    assert available_cores(tmp_path / "all") == available_cores(tmp_path / "missing") >= 1


PROBE_OF_THREADS = """
import os, sys
import lepard_ros.network.threads as threads
from lepard_ros import cli

HELP = "says what torch took"
def add_arguments(parser): pass
def run(args):
    import torch
    print(torch.get_num_threads(), os.environ["OMP_WAIT_POLICY"])
    return 0

if __name__ == "__main__":
    threads.available_cores, os.getloadavg = lambda: 3, lambda: (1.2, 0, 0)
    cli.COMMANDS["probe"] = cli.Command("__main__", "", computes=True)
    sys.exit(cli.main(["probe"]))
"""


@pytest.mark.parametrize(("given", "words"), [("", "2 threads of 3 cores, with a load of 1.2"), ("1", "1 thread as")])
def test_a_command_says_how_many_threads_it_took_and_torch_takes_them(given: str, words: str) -> None:
    """In a process of its own, since torch reads its threads when it is imported."""
    surroundings = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    surroundings |= {"OMP_NUM_THREADS": given} if given else {}
    command = [sys.executable, "-c", PROBE_OF_THREADS]
    result = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    assert words in result.stderr
    assert result.stdout.split() == [given or str(min(2, os.cpu_count() or 1)), "PASSIVE"]


@pytest.mark.parametrize(
    ("given", "number"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3"), ({"OMP_NUM_THREADS": "2"}, None)]
)
def test_blas_of_the_node_runs_in_one_thread_unless_the_user_says_otherwise(
    given: dict[str, str], number: str | None
) -> None:
    from lepard_ros.network.threads import use_one_blas_thread

    environment = dict(given)
    use_one_blas_thread(environment)
    assert environment.get("OPENBLAS_NUM_THREADS") == number


def test_the_node_limits_blas_before_numpy_is_imported() -> None:
    """Later it has no effect: a match took three times its processor time, waiting for cores that tracking used."""
    code = """
import os, sys, types
import lepard_ros.ros.main as main
class Rclpy(types.ModuleType):
    def __getattr__(self, name):
        raise SystemExit(os.environ["OPENBLAS_NUM_THREADS"] + str("numpy" in sys.modules))
sys.modules["rclpy"] = Rclpy("rclpy")
main.run_node([])
"""
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stderr.strip() == "1False"


def test_every_command_that_computes_chooses_its_threads() -> None:
    silent = {name for name, command in cli.COMMANDS.items() if not command.computes}
    assert silent == {"node", "bag", "convert", "export", "info"}, "the node chooses its own and logs them"


def test_processes_that_share_the_work_are_said_instead() -> None:
    assert "4 processes of one thread each" in cli._threads_line(cli.Threads(2, ""), 4)
