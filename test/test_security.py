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
# Calls that are safe with one argument only.
REQUIRED = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False)}


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
        if name in FORBIDDEN or given.get("shell") is True:
            found.append(f"line {node.lineno}: {name}")
        if name in REQUIRED and given.get(REQUIRED[name][0]) is not REQUIRED[name][1]:
            found.append(f"line {node.lineno}: {name} without {REQUIRED[name][0]}={REQUIRED[name][1]}")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_runs_code_from_data(path: Path) -> None:
    assert dangers(path.read_text()) == []


@pytest.mark.parametrize(
    "line",
    ["eval(x)", "pickle.load(f)", "yaml.load(f)", "torch.load(p)", "np.load(p)", "np.load(p, allow_pickle=True)"]
    + ["subprocess.run(c, shell=True)", "torch.load(p, weights_only=False)"],
)
def test_the_check_notices(line: str) -> None:
    assert dangers(line)


def test_weights_are_safetensors_only() -> None:
    names = {path.suffix for path in (PACKAGE / "weights").iterdir()}
    assert names <= {".safetensors", ".json"}
