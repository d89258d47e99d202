# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Small files in the layouts of the benchmarks, for tests."""

from pathlib import Path

import numpy as np
from scipy.spatial.transform import Rotation


def motion(rotation_vector: list[float], translation: list[float]) -> np.ndarray:
    """A (4, 4) transform."""
    transform = np.eye(4)
    transform[:3, :3] = Rotation.from_rotvec(rotation_vector).as_matrix()
    transform[:3, 3] = translation
    return transform


def corner(seed: int) -> np.ndarray:
    """The walls of a room's corner with a few boxes: enough shape for any method."""
    random = np.random.default_rng(seed)
    flat = random.uniform(0, 2, size=(3000, 2))
    walls = [np.insert(flat[i::3], axis, 0, axis=1) for i, axis in enumerate(range(3))]
    boxes = [random.uniform(0, 0.4, size=(300, 3)) + random.uniform(0.2, 1.4, size=3) for _ in range(4)]
    return np.concatenate([*walls, *boxes])


def write_corner_pairs(folder: Path) -> Path:
    """Two scenes, three small motions each, in the compact layout of 3DMatch."""
    folder.mkdir()
    rows: dict[str, list] = {key: [] for key in ("src", "tgt", "rot", "trans", "overlap", "gt_cov")}
    for number, scene in enumerate(("kitchen", "hotel")):
        target = corner(number)
        clouds = {"0": target}
        for i in range(1, 4):
            rotation, shift = Rotation.from_rotvec([0, 0, 0.02 * i]).as_matrix(), np.array([0.02 * i, 0, 0])
            clouds[str(i)] = (target - shift) @ rotation  # the motion back: R p + t gives the target
            information = np.diag([100.0, 100, 100, 100, 100, 100])
            values = (f"{scene}/{i}", f"{scene}/0", rotation, shift[:, None], 0.1 + 0.2 * i, information)
            for key, value in zip(rows, values, strict=True):
                rows[key].append(value)
        steps = {key: np.round(cloud / 0.00025).astype(np.int16) for key, cloud in clouds.items()}
        np.savez(folder / f"{scene}.npz", **steps)  # type: ignore[arg-type]
    np.savez(folder / "gt_3DMatch.npz", **{key: np.array(values) for key, values in rows.items()})  # type: ignore[arg-type]
    return folder
