# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What all tests share: quiet surroundings, the data folder, fast tests first."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from node_harness import NodeProcess, Probe

REPOSITORY = Path(__file__).resolve().parent.parent

# Set before any test imports torch or rclpy, and inherited by the processes that tests start: one thread each, and a
# ROS domain that no other run on this machine or network hears (domains up to 101 stay clear of ephemeral ports). The
# demonstration takes one of the lower domains. Each process of pytest-xdist has a domain of its own.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
_DOMAIN = 61 + 2 * (os.getppid() % 20) + int(_WORKER[2:]) % 2 if _WORKER else 61 + os.getpid() % 40
_SURROUNDINGS = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MPLBACKEND": "Agg",
    "ROS_DOMAIN_ID": str(_DOMAIN),
    "ROS_AUTOMATIC_DISCOVERY_RANGE": "LOCALHOST",
    "ROS_LOG_DIR": tempfile.mkdtemp(prefix="lepard_ros_log_"),
    "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
}
os.environ.update(_SURROUNDINGS)
sys.path.insert(0, str(REPOSITORY))


def shared_data(*parts: str) -> Path:
    """The folder (or file below it) of real data; skips the test with a sentence where it is not present.

    The folder is named by LEPARD_SHARED, or lies beside the repository: `shared_data("3dmatch")`.
    """
    folder = Path(os.environ.get("LEPARD_SHARED", REPOSITORY.parent / "shared")) / "data"
    path = folder.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"the real data {'/'.join(parts)!r} is not here; set LEPARD_SHARED to the folder that holds data/")
    return path


@pytest.fixture(name="shared_data")
def shared_data_fixture() -> Callable[..., Path]:
    """`shared_data` as a fixture, for tests that would rather not import it."""
    return shared_data


@pytest.fixture(scope="module")
def probe(node: "NodeProcess") -> "Iterator[Probe]":
    """A listener that is connected to the node of a test module (its fixture `node`)."""
    from node_harness import Probe

    with Probe() as connected:
        connected.connect()
        yield connected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests marked `slow` last, so that a plain mistake shows within seconds."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
