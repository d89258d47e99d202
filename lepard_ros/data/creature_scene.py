# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Several clouds of one deforming object, in several poses and from all sides, with the motion of every point."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.files import NUMPY_DAMAGE
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray

UNIT = 0.00025  # metres per stored integer
FIELDS = ("points", "offset", "pose", "moment", "places", "pairs", "overlap")


@dataclass(frozen=True)
class CreatureScene:
    """C clouds at M moments.

    points: (sum N, 3) int16, times UNIT metres, each cloud in its camera's frame. offset: (C + 1,). pose: (C, 4, 4)
    camera to world. moment: (C,) when a cloud was seen. places: (M, sum N, 3) int16, times UNIT: where the surface
    under each point is in the world at every moment. pairs: (P, 2) source and target clouds. overlap: (P,) share of
    the source that the target also saw.
    """

    points: NDArray[np.int16]
    offset: NDArray[np.int64]
    pose: FloatArray
    moment: NDArray[np.int64]
    places: NDArray[np.int16]
    pairs: NDArray[np.int64]
    overlap: NDArray[np.float32]

    def cloud(self, index: int) -> NDArray[np.float32]:
        """The points (N, 3) of one cloud, metres, in its camera's frame."""
        return self.points[self.offset[index] : self.offset[index + 1]].astype(np.float32) * np.float32(UNIT)

    def flows(self, index: int) -> NDArray[np.float32]:
        """How the points of a cloud move until each moment, in its camera's frame: (N, 3 M) metres."""
        places = self.places[:, self.offset[index] : self.offset[index + 1]].astype(np.float32) * np.float32(UNIT)
        moved = (places - places[self.moment[index]]) @ self.pose[index, :3, :3].astype(np.float32)
        return np.concatenate(list(moved), axis=1)


def save_scene(path: Path, scene: CreatureScene) -> None:
    """Write a scene atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        np.savez_compressed(file, **{name: getattr(scene, name) for name in FIELDS})
    draft.replace(path)


def load_scene(path: Path) -> CreatureScene:
    """Read a scene; raises InputError for an invalid file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            scene = CreatureScene(**{name: arrays[name] for name in FIELDS})
    except NUMPY_DAMAGE as error:
        raise InputError(f"{path} is not a scene of `lepard synthesise creatures` ({error}); make it again.") from error
    clouds, total = len(scene.pose), len(scene.points)
    if scene.offset.shape != (clouds + 1,) or scene.offset[-1] != total or scene.places.shape[1:] != (total, 3):
        raise InputError(f"{path} is damaged: its arrays differ in length; make it again.")
    return scene


def scene_files(folders: list[Path]) -> list[Path]:
    """All scenes in folders, by name."""
    return sorted(path for folder in folders for path in Path(folder).glob("scene_*.npz"))
