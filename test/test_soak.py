"""A minute of the soak of `make soak`: memory flat, every frame accounted for, no exceptions, a clean end."""

import sys

import numpy as np
import pytest

pytest.importorskip("rclpy", reason="ROS 2 is not installed")

from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "tools"))

from soak import Soak, report, soak

pytestmark = pytest.mark.slow


def test_a_minute_at_sensor_rate_leaves_nothing_behind() -> None:
    result = soak(seconds=60, rate=10)
    print(report(result))
    assert result.faults() == []
    assert result.statuses[-1].frames_received >= 0.9 * result.sent


def test_a_leak_would_be_noticed() -> None:
    leaking = Soak(100, [], np.linspace(300, 500, 60), np.zeros(0), exceptions=1, exit_code=3)
    assert len(leaking.faults()) == 4
