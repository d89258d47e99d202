# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Matches on the mirrored limb: counted exactly on a body with two alike sides, not at all on one without."""

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from lepard_ros.data.fourdmatch import DeformablePair
from lepard_ros.evaluation.deformable import DeformableResult, evaluate_deformable, summarise_deformable
from lepard_ros.evaluation.symmetry import Mirror, count_mirrored, find_mirror
from lepard_ros.registration.types import Matches

SIDES = {"arm": ((0.12, -0.45, 0.0), (0.6, -0.5, 0.1), 0.04), "leg": ((0.08, 0.1, 0.0), (0.16, 0.75, 0.0), 0.055)}
MIDDLE = {"trunk": ((0.0, -0.5, 0.0), (0.0, 0.12, 0.0), 0.13), "head": ((0.0, -0.6, 0.0), (0.0, -0.85, 0.02), 0.08)}
FLIP = np.array([-1.0, 1.0, 1.0])


def tube(start: np.ndarray, end: np.ndarray, radius: float) -> np.ndarray:
    """Points (N, 3) about 1.5 cm apart on a tube with round ends, the same at every call."""
    along = end - start
    length = float(np.linalg.norm(along))
    across = np.linalg.svd(along[None])[2][1:]
    step = np.arange(-radius, length + radius, 0.015)
    ring = 2 * np.pi * np.arange(0, 1, 0.015 / (2 * np.pi * radius))
    height, angle = (axis.ravel() for axis in np.meshgrid(step, ring))
    beyond = np.maximum(0, np.maximum(-height, height - length))
    narrow = np.sqrt(np.maximum(0, radius**2 - beyond**2))[:, None]
    turn = np.cos(angle)[:, None] * across[0] + np.sin(angle)[:, None] * across[1]
    return start + height[:, None] * along / length + narrow * turn


def body(sides: tuple[str, ...] = ("left", "right")) -> dict[str, np.ndarray]:
    """The parts of a figure that stands with its arms out; a right part is the left one's exact mirror image."""
    parts = {name: tube(*(np.array(end) for end in ends), radius) for name, (*ends, radius) in MIDDLE.items()}
    for name, (*ends, radius) in SIDES.items():
        left = tube(*(np.array(end) for end in ends), radius)
        parts |= {f"{side} {name}": left if side == "left" else left * FLIP for side in sides}
    return parts


def posed(parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The figure with its left arm raised and its right leg to the front, turned and moved."""
    turn = Rotation.from_rotvec([0.3, -0.5, 0.2]).as_matrix()
    bend = {"left arm": ([0.0, 0.0, -0.9], (0.12, -0.45, 0.0)), "right leg": ([0.8, 0.0, 0.0], (-0.08, 0.1, 0.0))}
    moved = {}
    for name, points in parts.items():
        angle, joint = bend.get(name, ([0.0, 0.0, 0.0], (0.0, 0.0, 0.0)))
        bent = (points - joint) @ Rotation.from_rotvec(angle).as_matrix().T + joint
        moved[name] = bent @ turn.T + [0.1, 0.2, 2.0]
    return moved


@pytest.fixture(scope="module")
def mirror() -> Mirror:
    found = find_mirror(np.concatenate(list(posed(body()).values())))
    assert found is not None
    return found


def limb_end(points: np.ndarray, trunk: np.ndarray) -> np.ndarray:
    """Numbers of the limb's points that are well away from the body."""
    return np.flatnonzero(np.linalg.norm(points - trunk.mean(axis=0), axis=1) > 0.5)


def test_a_bent_body_s_mirror_is_found(mirror: Mirror) -> None:
    parts = posed(body())
    for left, right in (("left arm", "right arm"), ("left leg", "right leg")):
        index = limb_end(body()[left], body()["trunk"])
        for one, other in ((left, right), (right, left)):
            place = parts[one][index]
            image = mirror.images[np.linalg.norm(mirror.places[None] - place[:, None], axis=2).argmin(axis=1)]
            error = np.linalg.norm(image - parts[other][index], axis=1)
            assert np.median(error) < 0.12
            assert np.mean(error < 0.15) > 0.98
    head = parts["head"]
    image = mirror.images[np.linalg.norm(mirror.places[None] - head[:, None], axis=2).argmin(axis=1)]
    assert np.linalg.norm(image - head, axis=1).max() < 0.2


def test_planted_mirrored_matches_are_counted_exactly() -> None:
    rest, moved = body(), posed(body())
    parts = list(rest)
    source, target = (np.concatenate([points[name] for name in parts]) for points in (rest, moved))
    start = dict(zip(parts, np.cumsum([0, *(len(rest[name]) for name in parts)]), strict=False))
    every = np.arange(len(source))
    pair = DeformablePair(
        source.astype(np.float32),
        target.astype(np.float32),
        (target - source).astype(np.float32),
        np.eye(3),
        np.zeros(3),
        np.stack([every, every], axis=1),
        every,
    )
    index = {name: limb_end(rest[name], rest["trunk"])[::7] + start[name] for name in ("left arm", "left leg")}
    swapped = {name: value - start[name] + start[name.replace("left", "right")] for name, value in index.items()}
    right = every[::11]  # matches that are true
    lost = index["left arm"][:9]  # wrong ones, on the head
    ends = [(right, right), *((index[name], swapped[name]) for name in index), (lost, lost * 0 + start["head"])]
    first, second = (np.concatenate(part) for part in zip(*ends, strict=True))

    class Planted:
        def align(self, *_: np.ndarray) -> DeformableResult:
            matches = Matches(source[first], target[second], np.ones(len(first)))
            return DeformableResult(matches, None, True, 0.1, 0.1, "matched")

    planted = sum(len(value) for value in index.values())
    record = evaluate_deformable(Planted(), pair, find_mirror(np.concatenate([pair.target, pair.warped])))
    assert planted > 60
    assert record["mirrored"] == planted
    assert record["mirrored_by_chance"] < 0.1 * planted
    summary = summarise_deformable([record, {**record, "mirrored": None}])
    assert summary["symmetric_pairs"] == 1
    assert summary["mirrored"] == pytest.approx(planted / len(first))


def test_a_body_without_another_side_has_no_mirror() -> None:
    one_sided = body(sides=("left",))
    one_sided["left arm"] = one_sided["left arm"] * [1.3, 1.0, 1.0]
    assert find_mirror(np.concatenate(list(one_sided.values()))) is None
    assert find_mirror(np.zeros((5, 3)) + np.arange(5)[:, None]) is None


def test_ends_of_a_sheet_are_not_left_and_right() -> None:
    x, y = (axis.ravel() for axis in np.meshgrid(np.arange(0, 1, 0.02), np.arange(0, 0.6, 0.02)))
    assert find_mirror(np.stack([x, y, 1 + 0 * x], axis=1)) is None


def test_no_matches_are_none(mirror: Mirror) -> None:
    nothing = np.zeros((0, 3))
    assert count_mirrored(mirror, nothing, nothing, mirror.places) == (0, 0.0)
