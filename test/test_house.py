# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The house rules that a program can check: public names are typed and documented, functions are short."""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "lepard_ros"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_MEDIAN_LINES = 10
Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = Function | ast.ClassDef


def public_names(tree: ast.Module) -> Iterator[tuple[str, Named]]:
    """Classes, functions and methods of a module whose names, and those of their class, have no underscore first."""
    for node in tree.body:
        if isinstance(node, Named) and not node.name.startswith("_"):
            yield node.name, node
            if isinstance(node, ast.ClassDef):
                own = (part for part in node.body if isinstance(part, Function) and not part.name.startswith("_"))
                yield from ((f"{node.name}.{part.name}", part) for part in own)


def untyped(function: Function) -> list[str]:
    """What a function leaves untyped: names of arguments, and "return"."""
    given = function.args
    static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    missing = [one.arg for one in arguments if one.annotation is None and (static or one.arg not in ("self", "cls"))]
    return missing + (["return"] if function.returns is None else [])


def is_documented(node: Named) -> bool:
    """Whether a name has a docstring, or is said by its base class (a method marked with a decorator of ours)."""
    return ast.get_docstring(node) is not None or any("overload" in ast.unparse(one) for one in node.decorator_list)


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_public_names_are_typed_and_documented(module: Path) -> None:
    tree = ast.parse(module.read_text())
    assert ast.get_docstring(tree) or module.name == "__init__.py", "the module has no docstring"
    names = list(public_names(tree))
    assert [name for name, node in names if not is_documented(node)] == []
    assert {name: untyped(node) for name, node in names if isinstance(node, Function) and untyped(node)} == {}


def test_the_median_function_is_short() -> None:
    lengths = [
        node.end_lineno - node.lineno + 1
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, Function) and node.end_lineno is not None
    ]
    assert len(lengths) > 500
    assert statistics.median(lengths) < MAX_MEDIAN_LINES


def test_the_rule_notices_what_is_missing() -> None:
    tree = ast.parse("class A:\n  def b(self, c): ...\n  def _d(self): ...\ndef e() -> None:\n  'Says.'\n")
    names = dict(public_names(tree))
    assert list(names) == ["A", "A.b", "e"]
    assert [is_documented(node) for node in names.values()] == [False, False, True]
    assert untyped(names["A.b"]) == ["c", "return"] and untyped(names["e"]) == []  # type: ignore[arg-type]


def test_the_architecture_page_names_files_that_exist_and_every_room() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = {name for name in re.findall(r"`([a-z_0-9/]+\.py)`", page) if not name.startswith("test/")}
    names = {path.name for path in MODULES}
    missing = [name for name in named if not (PACKAGE / name).is_file() and ("/" in name or name not in names)]
    assert missing == []
    rooms = {
        path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file() and any(path.glob("[a-z]*.py"))
    }
    assert {room for room in rooms if f"| `{room}/` |" not in page} == set()


@pytest.mark.parametrize("page", ["nav2", "reliability", "security", "warp"])
def test_a_page_names_tests_that_exist(page: str) -> None:
    """`test_x.py::test_a`, `::test_b` names two tests of one file."""
    folder = Path(__file__).resolve().parent
    words = (PACKAGE.parent / "docs" / f"{page}.md").read_text()
    file = ""
    named = re.findall(r"`(?:test/)?(test_\w+\.py)?(?:::(test_\w+))?`", words)
    for name, function in named:
        file = name or file
        if name or function:
            assert f"def {function}" in (folder / file).read_text(), f"docs/{page}.md: {file} has no {function}"
