# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Inputs on which a reader once failed, or would have: read again, each is accepted or refused with a sentence.

test/corpus/<target>/ holds them by the targets of fuzz/fuzz.py; `make fuzz` leaves new ones in
runs/fuzz/<target>/found_*.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.fuzz import TARGETS
from lepard_ros.errors import InputError

CORPUS = Path(__file__).resolve().parent / "corpus"


@pytest.mark.parametrize("target", sorted(folder.name for folder in CORPUS.iterdir()))
def test_past_failures_of_a_reader_stay_mended(target: str) -> None:
    """In a process of its own: some made native code hang, which nothing in this process could end."""
    done = subprocess.run([sys.executable, __file__, target], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def read_all(target: str) -> None:
    """Read every input of a target."""
    for path in sorted((CORPUS / target).iterdir()):
        try:
            TARGETS[target].read(path.read_bytes())
        except InputError as error:
            print(f"{path.name}: {error}")


if __name__ == "__main__":
    read_all(sys.argv[1])
