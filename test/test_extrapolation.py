# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Transforms between two clouds: where the last motion leads, and for how long it is believed."""

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed here")

from lepard_ros.ros.extrapolation import Extrapolator
from lepard_ros.ros.modes import Placement

MS = 1_000_000


def placed(stamp_ms: int, x: float) -> Placement:
    matrix = np.eye(4)
    matrix[0, 3] = x
    return Placement("map", "camera", stamp_ms * MS, matrix)


def moving(late_ms: int = 30) -> Extrapolator:
    """A sensor that does 1 m/s at 10 Hz; each pose is sent some milliseconds after its stamp."""
    extrapolator = Extrapolator()
    for stamp in (1000, 1100):
        extrapolator.note(placed(stamp, stamp / 1000), (stamp + late_ms) * MS)
    return extrapolator


@pytest.mark.parametrize("now_ms", [1131, 1180, 1230])
def test_the_last_motion_goes_on(now_ms: int) -> None:
    ahead = moving().at(now_ms * MS)
    assert ahead is not None and ahead.stamp_ns == now_ms * MS
    assert (ahead.parent, ahead.child) == ("map", "camera")
    assert ahead.matrix[0, 3] == pytest.approx(now_ms / 1000)


@pytest.mark.parametrize("now_ms", [1090, 1130, 1231, 5000])
def test_never_before_the_pose_nor_more_than_a_period_after_it_was_sent(now_ms: int) -> None:
    assert moving().at(now_ms * MS) is None


def test_one_pose_is_no_motion_and_a_lost_sensor_has_none() -> None:
    extrapolator = Extrapolator()
    extrapolator.note(placed(1000, 1.0), 1030 * MS)
    assert extrapolator.at(1050 * MS) is None
    extrapolator = moving()
    extrapolator.forget()
    assert extrapolator.at(1150 * MS) is None


def test_a_recording_that_starts_over_is_no_motion() -> None:
    extrapolator = moving()
    extrapolator.note(placed(500, 0.5), 1200 * MS)
    assert extrapolator.at(1220 * MS) is None
