# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The warp message: lossless there and back, and refused when its arrays contradict each other."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.msg import DeformationGraph as DeformationGraphMessage
from rclpy.serialization import deserialize_message, serialize_message

from lepard_ros.errors import InputError
from lepard_ros.registration.deformable.graph import build_graph
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Status
from lepard_ros.ros.conversion import header
from lepard_ros.ros.warp_message import warp_from_message, warp_message


def bent_sheet() -> tuple[np.ndarray, Warp]:
    """Points of a sheet (N, 3), and a warp that bends it."""
    side = np.linspace(0, 0.4, 60)
    points = np.stack([*np.meshgrid(side, side), np.zeros((60, 60))], axis=-1).reshape(-1, 3)
    graph = build_graph(points)
    turn = np.zeros_like(graph.nodes)
    turn[:, 0] = 2 * graph.nodes[:, 1]
    shift = np.stack([0 * turn[:, 0], 0 * turn[:, 0], graph.nodes[:, 1] ** 2], axis=1)
    return points, Warp(graph, turn, shift, support=np.linspace(0, 1, len(shift)))


def test_a_warp_survives_the_wire_unchanged() -> None:
    points, warp = bent_sheet()
    message = warp_message(warp, header(1, "camera"), header(2, "camera"))
    received = warp_from_message(deserialize_message(serialize_message(message), DeformationGraphMessage))
    np.testing.assert_array_equal(received(points), warp(points))
    np.testing.assert_array_equal(received.covers(points), warp.covers(points))
    np.testing.assert_allclose(received.support, warp.support, atol=1e-7)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status.OK, DeformationGraphMessage.OK),
        (Status.OUT_OF_TIME, DeformationGraphMessage.NOT_CONVERGED),
        (Status.TOO_FEW_MATCHES, DeformationGraphMessage.REJECTED),
    ],
)
def test_the_status_is_told(status: Status, code: int) -> None:
    _, warp = bent_sheet()
    message = warp_message(Warp.rest(warp.graph, status), header(1, "camera"), header(2, "camera"))
    assert message.status == code
    assert bool(message.status_text) == (status is not Status.OK)
    assert warp_from_message(message).ok == (status is Status.OK)


def test_the_consumer_of_the_documentation_acts_on_supported_places_only() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "warp.md").read_text()
    listing = next(part for part in page.split("```python\n")[1:] if "def on_warp(message" in part).split("```")[0]
    names: dict = {}
    exec(listing, names)  # noqa: S102 - the page's own code is what is tested
    _, warp = bent_sheet()
    low = warp.graph.nodes[:, 0] < 0.2
    warp = replace(warp, support=np.where(low, 0.1, 0.9))
    message = warp_message(warp, header(1, "camera"), header(2, "camera"))
    guessed, known, off = np.array([0.05, 0.2, 0.0]), np.array([0.35, 0.2, 0.0]), np.array([2.0, 0.2, 0.0])
    np.testing.assert_array_equal(names["on_warp"](message, known), warp(known[None])[0])
    assert names["on_warp"](message, guessed) is None and names["on_warp"](message, off) is None
    refused = warp_message(Warp.rest(warp.graph, Status.LOW_OVERLAP), header(1, "camera"), header(2, "camera"))
    assert names["on_warp"](refused, known) is None


@pytest.mark.parametrize("fault", ["nodes", "rotations", "edges", "gamma", "status"])
def test_contradictions_are_refused(fault: str) -> None:
    _, warp = bent_sheet()
    message = warp_message(warp, header(1, "camera"), header(2, "camera"))
    if fault == "nodes":
        message.nodes = message.nodes[:-1]
    elif fault == "rotations":
        message.rotations = message.rotations[:-3]
    elif fault == "edges":
        message.edges[0] = 10**6
    elif fault == "gamma":
        message.gamma = 0.0
    else:
        message.status = 99
    with pytest.raises(InputError):
        warp_from_message(message)
