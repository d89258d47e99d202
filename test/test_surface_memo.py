# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What is remembered for a surface, and that it goes when the surface goes."""

import gc
import weakref

import numpy as np

from lepard_ros.registration.free_space import FreeSpaceSettings, conflicts
from lepard_ros.registration.rigid.icp import sample
from lepard_ros.registration.surface_memo import MOST_KEPT, kept_for_surface
from lepard_ros.registration.types import Surface


def wall(distance: float = 1.0, points: int = 50) -> Surface:
    x, y = np.meshgrid(np.linspace(-1, 1, points), np.linspace(-1, 1, points))
    flat = np.stack([x, y, np.full_like(x, distance)], axis=-1).reshape(-1, 3)
    return Surface(flat, np.tile([0.0, 0.0, -1.0], (len(flat), 1)), 0.04)


def test_a_result_is_made_once_for_each_surface_and_value() -> None:
    made: list[int] = []

    @kept_for_surface
    def count(surface: Surface, step: int) -> int:
        made.append(step)
        return len(surface.points) + step

    first, second = wall(points=5), wall(points=6)
    assert [count(first, 1), count(first, 1), count(first, 2), count(second, 1)] == [26, 26, 27, 37]
    assert made == [1, 2, 1]


def test_the_clouds_of_a_sensor_do_not_stay_when_they_are_over() -> None:
    """Sampled and judged by its free space, as each live cloud is: 32 of them once stayed in memory, some 70 MB."""
    gone = []
    for number in range(40):
        surface = wall(1.0 + 0.01 * number)
        assert len(sample(surface, 100).points) == 100
        assert sample(surface, 10_000) is surface
        assert conflicts(np.array([[0.0, 0.0, 0.5]]), surface, FreeSpaceSettings()).all()
        gone.append(weakref.ref(surface))
        del surface
    gc.collect()
    assert not any(reference() for reference in gone)


def test_of_living_surfaces_the_last_results_are_kept() -> None:
    made: list[float] = []

    @kept_for_surface
    def distance(surface: Surface) -> float:
        made.append(float(surface.points[0, 2]))
        return made[-1]

    surfaces = [wall(float(number), points=2) for number in range(MOST_KEPT + 1)]
    for surface in surfaces:
        distance(surface)
    distance(surfaces[-1])
    assert len(made) == MOST_KEPT + 1
    assert distance(surfaces[0]) == 0.0 and len(made) == MOST_KEPT + 2, "the oldest result made room"
