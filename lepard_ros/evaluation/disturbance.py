# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Robustness to scale and frame: the same pairs at another scale, or in a frame other than the sensor's."""

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.normals import UNKNOWN
from lepard_ros.evaluation.methods import LEPARD, MethodResult, timed
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.rigid_motion import move
from lepard_ros.registration.types import Registration

if TYPE_CHECKING:
    from lepard_ros.matcher import Matcher

MAX_SHIFT = 1.0  # metres
NAME = re.compile(r"^(?P<method>.*?)(\+x(?P<scale>\d+(\.\d+)?))?(?P<moved>\+moved)?$")


@dataclass(frozen=True)
class Disturbance:
    """scale: factor on both clouds. moved: the source is rotated and shifted, and its viewpoint is unknown."""

    scale: float = 1.0
    moved: bool = False


def split_disturbance(name: str) -> tuple[str, Disturbance]:
    """A method's name without its disturbance, and that disturbance.

    >>> split_disturbance("lepard:rigid+x0.1")
    ('lepard:rigid', Disturbance(scale=0.1, moved=False))
    >>> split_disturbance("lepard:rigid+moved")
    ('lepard:rigid', Disturbance(scale=1.0, moved=True))
    >>> split_disturbance("lepard:rigid+ransac")
    ('lepard:rigid+ransac', Disturbance(scale=1.0, moved=False))
    """
    found = NAME.match(name) if name.startswith(LEPARD) else None
    if found is None:
        return name, Disturbance()
    return found["method"], Disturbance(float(found["scale"] or 1.0), found["moved"] is not None)


class DisturbedMethod:
    """`Matcher.register` on disturbed clouds; the result is transformed back, so that the ground truth applies."""

    def __init__(self, matcher: "Matcher", disturbance: Disturbance) -> None:
        self.matcher, self.disturbance = matcher, disturbance

    def register(self, source: FloatArray, target: FloatArray) -> MethodResult:
        """Disturb, register from raw points, undo."""
        scale, moved = self.disturbance.scale, self.disturbance.moved
        placed = random_placement(len(source), len(target)) if moved else np.eye(4)
        clouds, viewpoints = [move(placed, source) * scale, target * scale], [UNKNOWN if moved else None, None]

        def register() -> Registration:
            first, second = self.matcher.encode_all(clouds, viewpoints)
            return self.matcher.register(first, second)

        result = timed(register)
        assert result.matches is not None
        matches = result.matches._replace(
            source=move(np.linalg.inv(placed), result.matches.source / scale), target=result.matches.target / scale
        )
        result = replace(result, matches=matches, covariance=None)  # that of the disturbed frame
        if result.transform is None:
            return result
        transform = result.transform.copy()
        transform[:3, 3] /= scale
        return replace(result, transform=transform @ placed)


def random_placement(*seed: int) -> FloatArray:
    """A random motion (4, 4): any rotation, translation up to MAX_SHIFT metres; deterministic for a seed."""
    rng = np.random.default_rng(seed)
    placed = np.eye(4)
    placed[:3, :3] = Rotation.random(random_state=rng).as_matrix()
    placed[:3, 3] = rng.uniform(-MAX_SHIFT, MAX_SHIFT, 3) / np.sqrt(3)
    return placed
