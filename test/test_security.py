# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Nothing that runs code from data: the syntax trees of the package hold no eval, no open pickle, no shell."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lepard_ros"
FORBIDDEN = {
    "eval",
    "exec",
    "compile",
    "os.system",
    "os.popen",
    "pickle.load",
    "pickle.loads",
    "marshal.loads",
    "shelve.open",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
# Arguments that open the door: numpy's default is closed, torch's was open for years and has to be said.
OPENING = {("shell", True), ("allow_pickle", True), ("weights_only", False)}


def dangers(source: str) -> list[str]:
    """What a module does that could run code from data, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {
            keyword.arg: keyword.value.value for keyword in node.keywords if isinstance(keyword.value, ast.Constant)
        }
        unsaid = name == "torch.load" and "weights_only" not in given
        if name in FORBIDDEN or unsaid or OPENING & set(given.items()):
            found.append(f"line {node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_runs_code_from_data(path: Path) -> None:
    assert dangers(path.read_text()) == []


CALLS = [f"{name}(x)" for name in FORBIDDEN] + [f"f(x, {name}={value})" for name, value in OPENING] + ["torch.load(x)"]


@pytest.mark.parametrize("line", sorted(CALLS))
def test_the_check_notices(line: str) -> None:
    assert dangers(line)


def test_weights_are_safetensors_only() -> None:
    names = {path.suffix for path in (PACKAGE / "weights").iterdir()}
    assert names <= {".safetensors", ".json"}
