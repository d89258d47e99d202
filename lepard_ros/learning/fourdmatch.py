# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable pairs in the file format of the 4DMatch benchmark."""

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.learning.skinning import Floats

FIELDS = ("s_pc", "t_pc", "s2t_flow", "rot", "trans", "correspondences", "metric_index")
OVERLAP_RADIUS = 0.015  # metres: a point whose true place has a point of the other cloud this near is seen by both
# Coordinates are stored as float32 multiples of this (a quarter of a millimetre): most bits are zero and compress away.
QUANTUM = 2.0**-12


@dataclass(frozen=True)
class DeformablePair:
    """Two clouds of a thing that moved, and where every source point went.

    source: (N, 3), target: (M, 3), metres, each in its own camera's frame. flow: (N, 3), in the source's frame:
    rotation @ (source + flow) + translation lies on the target's surface (where the target camera saw it).
    matches: (K, 2) indices of source and target points at one place. metric_index: (L,) source points on which the
    benchmark measures the recall.
    """

    source: NDArray[np.float32]
    target: NDArray[np.float32]
    flow: NDArray[np.float32]
    rotation: Floats
    translation: Floats
    matches: NDArray[np.int64]
    metric_index: NDArray[np.int64]

    @property
    def warped(self) -> NDArray[np.float32]:
        """The source points where they truly are in the target's frame: (N, 3) metres."""
        moved = (self.source + self.flow) @ self.rotation.T + self.translation
        return moved.astype(np.float32)

    @property
    def transform(self) -> Floats:
        """The motion of the camera alone, (4, 4), source to target."""
        transform = np.eye(4)
        transform[:3, :3], transform[:3, 3] = self.rotation, self.translation
        return transform

    @property
    def overlap(self) -> float:
        """The share of source points that the target also saw."""
        return len(np.unique(self.matches[:, 0])) / max(len(self.source), 1)


def load_pair(path: str | Path) -> DeformablePair:
    """Read a pair from an .npz file of 4DMatch, or of ours.

    Raises InputError when the file is not one, or does not fit together.
    """
    path = Path(path)
    try:
        arrays = _read_arrays(path)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, TypeError) as error:
        raise InputError(f"{path.name} is not an .npz file in the 4DMatch format ({error}).") from error
    return _checked_pair(arrays, path.name)


def _read_arrays(path: Path) -> dict[str, NDArray]:
    """The arrays of the format in a file."""
    with np.load(path) as file:
        missing = [name for name in FIELDS if name not in file]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return {name: np.asarray(file[name]) for name in FIELDS}


def _checked_pair(arrays: dict[str, NDArray], name: str) -> DeformablePair:
    source, target, flow = (_points(arrays[key], key, name) for key in ("s_pc", "t_pc", "s2t_flow"))
    if len(flow) != len(source):
        raise InputError(f"{name}: s2t_flow has {len(flow)} rows for {len(source)} points in s_pc; they must agree.")
    if arrays["rot"].shape != (3, 3) or arrays["trans"].size != 3:
        raise InputError(f"{name}: rot must be 3 x 3 and trans have 3 numbers.")
    matches = arrays["correspondences"].astype(np.int64).reshape(-1, 2)
    metric = arrays["metric_index"].astype(np.int64).reshape(-1)
    sizes = np.array([len(source), len(target)])
    if (matches < 0).any() or (matches >= sizes).any() or (metric < 0).any() or (metric >= sizes[0]).any():
        raise InputError(f"{name}: correspondences or metric_index name points that do not exist.")
    rotation, translation = arrays["rot"].astype(np.float64), arrays["trans"].astype(np.float64).reshape(3)
    return DeformablePair(source, target, flow, rotation, translation, matches, metric)


def _points(values: NDArray, key: str, name: str) -> NDArray[np.float32]:
    if values.ndim != 2 or values.shape[1] != 3 or values.dtype.kind != "f" or not np.isfinite(values).all():
        raise InputError(f"{name}: {key} must be an N x 3 array of finite floats.")
    return values.astype(np.float32)


def save_pair(path: str | Path, pair: DeformablePair) -> None:
    """Write a pair in the 4DMatch format: compressed, whole or not at all. Coordinates are rounded to QUANTUM."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    index_type = np.int16 if max(len(pair.source), len(pair.target)) <= np.iinfo(np.int16).max else np.int32
    with draft.open("wb") as file:
        np.savez_compressed(
            file,
            s_pc=_rounded(pair.source),
            t_pc=_rounded(pair.target),
            s2t_flow=_rounded(pair.flow),
            rot=pair.rotation,
            trans=pair.translation.reshape(3, 1),
            correspondences=pair.matches.astype(index_type),
            metric_index=pair.metric_index.astype(index_type),
        )
    draft.replace(path)


def _rounded(points: Floats) -> NDArray[np.float32]:
    return (np.round(points / QUANTUM) * QUANTUM).astype(np.float32)


def list_pairs(folder: str | Path) -> list[Path]:
    """All pairs below a folder, sorted: a split of 4DMatch (a folder a sequence), or a set of ours."""
    paths = sorted(Path(folder).rglob("*.npz"))
    if not paths:
        raise InputError(f"{folder} holds no .npz files: give a split of 4DMatch or a synthesised set.")
    return paths
