# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable pairs in the file format of the 4DMatch benchmark."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.flow import blend_flow

FIELDS = ("s_pc", "t_pc", "s2t_flow", "rot", "trans", "correspondences")
OPTIONAL_FIELDS = ("metric_index", "s_overlap_rate")  # the published training files have neither
# Folders of a published set, and of ours. Test pairs are never trained on, training pairs never evaluated.
TEST_PARTS, VALIDATION_PART, TRAINING_PART = ("4DMatch", "4DLoMatch"), "val", "train"
LOW_OVERLAP = 0.45  # 4DLoMatch lies below, 4DMatch above
RATE_RADIUS = 0.0375  # metres, of the published overlap rate
OVERLAP_RADIUS = 0.015  # metres: a point whose true place has a point of the other cloud this near is seen by both
# Coordinates are stored as float32 multiples of this (a quarter of a millimetre): most bits are zero and compress away.
QUANTUM = 2.0**-12


@dataclass(frozen=True)
class DeformablePair:
    """Two clouds of a deforming object, and the true position of every source point in the second.

    source: (N, 3), target: (M, 3), metres, each in its own camera's frame. flow: (N, 3), in the source's frame:
    rotation @ (source + flow) + translation lies on the target's surface (where the target camera saw it).
    matches: (K, 2) indices of source and target points at one place. metric_index: (L,) source points on which the
    benchmark measures the recall, None where the file names none. overlap_rate: the file's own share of source points
    that the target saw (published within 0.0375 m), None where it has none.
    """

    source: NDArray[np.float32]
    target: NDArray[np.float32]
    flow: NDArray[np.float32]
    rotation: FloatArray
    translation: FloatArray
    matches: NDArray[np.int64]
    metric_index: NDArray[np.int64] | None
    overlap_rate: float | None = None

    @property
    def warped(self) -> NDArray[np.float32]:
        """The source points where they truly are in the target's frame: (N, 3) metres."""
        moved = (self.source + self.flow) @ self.rotation.T + self.translation
        return moved.astype(np.float32)

    @property
    def transform(self) -> FloatArray:
        """The motion of the camera alone, (4, 4), source to target."""
        transform = np.eye(4)
        transform[:3, :3], transform[:3, 3] = self.rotation, self.translation
        return transform

    @property
    def seen(self) -> NDArray[np.int64]:
        """Source points that the target also saw, by the matches: (S,) indices."""
        return np.unique(self.matches[:, 0])

    @property
    def overlap(self) -> float:
        """The share of source points that the target also saw: the file's own figure, else that of the matches."""
        return len(self.seen) / max(len(self.source), 1) if self.overlap_rate is None else self.overlap_rate

    def places(self, points: FloatArray) -> FloatArray:
        """Where points (K, 3) near the source truly are in the target's frame, by the flow of the points around."""
        moved = points + blend_flow(points, self.source, self.flow)
        return moved @ self.rotation.T + self.translation


def load_pair(path: str | Path) -> DeformablePair:
    """Read a pair from an .npz file of 4DMatch, or of ours.

    Raises InputError if the file is invalid or inconsistent.
    """
    path = Path(path)
    try:
        arrays = _read_arrays(path)
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, TypeError) as error:
        raise InputError(f"{path.name} is not an .npz file in the 4DMatch format ({error}).") from error
    return _checked_pair(arrays, path.name)


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of the format in a file."""
    with np.load(path) as file:
        missing = [name for name in FIELDS if name not in file]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        return {name: np.asarray(file[name]) for name in (*FIELDS, *OPTIONAL_FIELDS) if name in file}


def _checked_pair(arrays: dict[str, NDArray[Any]], name: str) -> DeformablePair:
    source, target, flow = (_points(arrays[key], key, name) for key in ("s_pc", "t_pc", "s2t_flow"))
    if len(flow) != len(source):
        raise InputError(f"{name}: s2t_flow has {len(flow)} rows for {len(source)} points in s_pc; they must agree.")
    if arrays["rot"].shape != (3, 3) or arrays["trans"].size != 3:
        raise InputError(f"{name}: rot must be 3 x 3 and trans have 3 numbers.")
    matches = arrays["correspondences"].astype(np.int64).reshape(-1, 2)
    metric = arrays["metric_index"].astype(np.int64).reshape(-1) if "metric_index" in arrays else None
    sizes = np.array([len(source), len(target)])
    if not _within(matches, sizes) or (metric is not None and not _within(metric, sizes[:1])):
        raise InputError(f"{name}: correspondences or metric_index name points that do not exist.")
    rate = float(arrays["s_overlap_rate"]) if arrays.get("s_overlap_rate", np.zeros(2)).size == 1 else None
    if rate is not None and not 0 <= rate <= 1:
        raise InputError(f"{name}: s_overlap_rate is {rate}, but should be a share from 0 to 1.")
    rotation, translation = arrays["rot"].astype(np.float64), arrays["trans"].astype(np.float64).reshape(3)
    return DeformablePair(source, target, flow, rotation, translation, matches, metric, rate)


def _within(index: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    return bool((index >= 0).all() and (index < sizes).all())


def _points(values: NDArray[Any], key: str, name: str) -> NDArray[np.float32]:
    if values.ndim != 2 or values.shape[1] != 3 or values.dtype.kind != "f" or not np.isfinite(values).all():
        raise InputError(f"{name}: {key} must be an N x 3 array of finite floats.")
    return values.astype(np.float32)


def save_pair(path: str | Path, pair: DeformablePair) -> None:
    """Write a pair in the 4DMatch format, compressed and atomically. Coordinates are rounded to QUANTUM."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    index_type = np.int16 if max(len(pair.source), len(pair.target)) <= np.iinfo(np.int16).max else np.int32
    optional: dict[str, Any] = {}
    if pair.metric_index is not None:
        optional["metric_index"] = pair.metric_index.astype(index_type)
    if pair.overlap_rate is not None:
        optional["s_overlap_rate"] = np.float32(pair.overlap_rate)
    with draft.open("wb") as file:
        np.savez_compressed(
            file,
            s_pc=_rounded(pair.source),
            t_pc=_rounded(pair.target),
            s2t_flow=_rounded(pair.flow),
            rot=pair.rotation,
            trans=pair.translation.reshape(3, 1),
            correspondences=pair.matches.astype(index_type),
            **optional,
        )
    draft.replace(path)


def _rounded(points: FloatArray) -> NDArray[np.float32]:
    return (np.round(points / QUANTUM) * QUANTUM).astype(np.float32)


def list_pairs(folder: str | Path) -> list[Path]:
    """All pairs below a folder, sorted: a split of 4DMatch (a folder a sequence), or a set of ours."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the folder of the data set.")
    paths = sorted(folder.rglob("*.npz"))
    if not paths:
        raise InputError(f"{folder} holds no .npz files: give a split of 4DMatch or a synthesised set.")
    return paths


def part_of(path: Path, folder: Path) -> str:
    """The part of a data set that a pair below its folder belongs to: train, val, 4DMatch, 4DLoMatch, or ""."""
    parts = (folder.resolve().name, *path.relative_to(folder).parts[:-1])
    known = [part for part in parts if part in (TRAINING_PART, VALIDATION_PART, *TEST_PARTS)]
    return known[-1] if known else ""


def training_files(folder: Path) -> list[Path]:
    """The pairs below a folder that may be trained on: neither validation nor test pairs."""
    return [path for path in list_pairs(folder) if part_of(path, folder) in (TRAINING_PART, "")]


def validation_files(folder: Path) -> list[Path]:
    """The pairs of a folder's `val`."""
    return [path for path in list_pairs(folder) if part_of(path, folder) == VALIDATION_PART]


def evaluation_files(folder: Path, part: str | None = None) -> list[Path]:
    """The pairs below a folder to evaluate on: no training and validation pairs, unless that folder itself is given.

    part: only those of 4DMatch or 4DLoMatch, where a set has such folders.
    """
    own = part_of(folder / "pair.npz", folder)
    skipped = {TRAINING_PART, VALIDATION_PART} - {own}
    files = [path for path in list_pairs(folder) if part_of(path, folder) not in skipped]
    if part is not None and any(part_of(path, folder) in TEST_PARTS for path in files):
        files = [path for path in files if part_of(path, folder) == part]
    if not files:
        raise InputError(f"{folder} holds no pairs to evaluate{f' of {part}' if part else ''}, only train and val.")
    return files


def benchmark_of(path: Path, pair: DeformablePair) -> str:
    """4DMatch or 4DLoMatch: by the folder's name in a published set, else by the overlap (below or above 45 %)."""
    named = [part for part in path.parts if part in TEST_PARTS]
    return named[-1] if named else TEST_PARTS[pair.overlap < LOW_OVERLAP]
