# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Writes requirements.lock: one pinned version of every package, for each Python that the project supports.

Run by `make lock`. It asks pip what it would install; nothing is installed. Pythons that are not on this machine are
left out with a word of warning.
"""

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12")
TORCH = "torch==2.13.0"
HEADER = """\
# Every package of `make`, pinned; written by `make lock`. Also a constraint: pip install -c requirements.lock ".[ros]"
# torch pins its own CUDA libraries, which are therefore not named here.
"""
# What builds the messages without build isolation, besides the extras of setup.py.
BUILD = ("pip", "wheel")


def resolve(python: str, requirements: list[str]) -> dict[str, str]:
    """Name -> version of all that the requirements need under one Python."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        report = Path(folder) / "report.json"
        subprocess.run([python, "-m", "venv", environment], check=True)
        ask = [str(environment / "bin" / "pip"), "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*ask, "--report", str(report), *requirements], check=True)
        installs = json.loads(report.read_text())["install"]
    versions = {item["metadata"]["name"]: item["metadata"]["version"].split("+")[0] for item in installs}
    return {name: version for name, version in versions.items() if not is_cuda(name)}


def project_requirements() -> list[str]:
    """The requirements of setup.py with all extras, and of the build in pyproject.toml."""
    importlib.import_module("setuptools")  # Brings distutils, which Python 3.12 lacks.
    run_setup = importlib.import_module("distutils.core").run_setup
    distribution = run_setup(str(ROOT / "setup.py"), stop_after="init")
    extras = [requirement for group in distribution.extras_require.values() for requirement in group]
    return [TORCH, *distribution.install_requires, *extras, *build_requirements(), *BUILD]


def build_requirements() -> list[str]:
    """build-system.requires of pyproject.toml (Python 3.10 has no TOML reader: pip's own)."""
    from pip._vendor import tomli

    with (ROOT / "pyproject.toml").open("rb") as file:
        return list(tomli.load(file)["build-system"]["requires"])


def is_cuda(name: str) -> bool:
    """Whether a package is one of the libraries that torch's CUDA wheel pins itself."""
    return name.lower().startswith(("nvidia-", "triton", "cuda-"))


def merge(by_python: dict[str, dict[str, str]]) -> list[str]:
    """Lines `name==version`, with a marker where the version depends on the Python."""
    lines = []
    for name in sorted({name for versions in by_python.values() for name in versions}, key=str.lower):
        pins: dict[str, list[str]] = {}
        for python, versions in by_python.items():
            if name in versions:
                pins.setdefault(versions[name], []).append(python)
        for version, pythons in pins.items():
            marker = " or ".join(f'python_version == "{python}"' for python in pythons)
            everywhere = len(pythons) == len(by_python)
            lines.append(f"{name}=={version}" if everywhere else f"{name}=={version} ; {marker}")
    return lines


def main() -> int:
    pythons = {version: shutil.which(f"python{version}") for version in PYTHONS}
    for version in [version for version, python in pythons.items() if python is None]:
        print(f"python{version} is not here: its versions are left out.", file=sys.stderr)
    requirements = project_requirements()
    with ThreadPoolExecutor() as pool:
        jobs = {version: pool.submit(resolve, python, requirements) for version, python in pythons.items() if python}
    lines = merge({version: job.result() for version, job in jobs.items()})
    (ROOT / "requirements.lock").write_text(HEADER + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
