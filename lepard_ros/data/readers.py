# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Data sets with ground truth, in the benchmarks' own layouts and in compact ones, with one interface."""

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.files import NUMPY_DAMAGE
from lepard_ros.data.recordings import Recording, listing, open_recording
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.geometry.overlap import overlap_ratio
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.geometry.voxel_grid import group_by_cell

COMPACT_UNIT = 0.00025  # metres per step of the int16 clouds
OVERLAP_DISTANCE = 0.05  # metres, for pairs drawn from a sequence
OVERLAP_BANDS = ((0.1, 0.3), (0.3, 0.6), (0.6, 1.01))
DRAWN_PAIRS = 150  # of a sequence without a list of pairs
PAIR_KEYS, INFORMATION_KEY = ("src", "tgt", "rot", "trans", "overlap"), "gt_cov"  # training lists have no gt_cov
ROTATION_TOLERANCE = 1e-2  # of R R' to the identity; published matrices are rounded


@dataclass(frozen=True)
class RigidPair:
    """Two clouds by key and the true motion (4, 4) from source to target, or None where they do not overlap.

    overlap: the benchmark's share in [0, 1]. information: (6, 6) `gt_cov` of the benchmark, or None.
    """

    source: str
    target: str
    scene: str
    truth: FloatArray | None
    overlap: float
    information: FloatArray | None = None

    @property
    def name(self) -> str:
        """The pair's name in records and pictures."""
        return f"{self.source}->{self.target}"


class PairSource(Protocol):
    """Where pairs come from: a list of them, and their clouds by key. Must survive pickling to worker processes."""

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """`count` pairs drawn without replacement with `seed`, or all of them."""

    def cloud(self, key: str) -> NDArray[np.float32]:
        """The cloud (N, 3), metres."""


def draw(pairs: Sequence[RigidPair], count: int | None, seed: int) -> list[RigidPair]:
    """`count` of the pairs without replacement, in their own order; all when there are not more."""
    if count is None or count >= len(pairs):
        return list(pairs)
    chosen = np.random.default_rng(seed).choice(len(pairs), size=count, replace=False)
    return [pairs[i] for i in np.sort(chosen)]


def load_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Arrays of an npz file, without pickles; refused with a sentence when the file or a key is missing or broken."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive.files]
            if missing:
                found = ", ".join(archive.files[:8])
                raise InputError(f"{path} has no array {', '.join(missing)} (found: {found}).")
            return {key: archive[key] for key in (keys or archive.files)}
    except InputError:
        raise
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; {path.parent} holds {listing(path.parent)}.") from error
    except NUMPY_DAMAGE as error:
        raise InputError(f"{path} is not a readable npz file ({error}); fetch or write it again.") from error


def motion(rotation: FloatArray, translation: FloatArray) -> FloatArray:
    """A (4, 4) transform of a rotation (3, 3) and a translation (3,) or (3, 1)."""
    transform = np.eye(4)
    transform[:3, :3], transform[:3, 3] = rotation, np.ravel(translation)
    return transform


# --- 3DMatch ---------------------------------------------------------------------------------------------------------


class CompactScenes:
    """3DMatch in one npz of int16 clouds per scene, with `gt_<set>.npz` beside them."""

    def __init__(self, folder: Path, benchmark: str) -> None:
        self.folder, self.benchmark = folder, benchmark

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """Pairs of the ground-truth file."""
        keys = (*PAIR_KEYS, INFORMATION_KEY)
        path = self.folder / f"gt_{self.benchmark}.npz"
        return draw(_listed_pairs(load_npz(path, keys), path), count, seed)

    def cloud(self, key: str) -> NDArray[np.float32]:
        """A fragment by "scene/number"."""
        scene, number = key.rsplit("/", 1)
        path = self.folder / f"{scene}.npz"
        clouds = _compact_scene(path)
        if number not in clouds:
            raise InputError(f"{path} has no fragment {number}; it holds {len(clouds)}: {', '.join(list(clouds)[:8])}.")
        return as_cloud(clouds[number], f"the fragment {number} of {path}") * np.float32(COMPACT_UNIT)

    def cloud_keys(self) -> list[str]:
        """Every fragment of every scene."""
        scenes = sorted(path for path in self.folder.glob("*.npz") if not path.name.startswith("gt_"))
        return [f"{path.stem}/{number}" for path in scenes for number in sorted(_compact_scene(path), key=_by_number)]


def _by_number(name: str) -> tuple[int, str]:
    """The order of fragments: by their number, those without one last."""
    return (int(name), name) if name.isdecimal() else (sys.maxsize, name)


@lru_cache(maxsize=8)
def _compact_scene(path: Path) -> dict[str, NDArray[np.int16]]:
    return load_npz(path, ())


def _listed_pairs(truth: dict[str, Any], where: Path) -> list[RigidPair]:
    """Pairs of a table with src, tgt, rot, trans, overlap and maybe gt_cov, all of one length; where: its file."""
    lengths = {key: len(values) if np.ndim(values) else "no list" for key, values in truth.items()}
    if len(set(lengths.values())) != 1 or "no list" in lengths.values():
        found = ", ".join(f"{key} {length}" for key, length in lengths.items())
        raise InputError(f"the lists of {where} differ in length ({found}).")
    return [_listed_pair(dict(zip(truth, row, strict=True)), f"pair {number} of {where}")
            for number, row in enumerate(zip(*truth.values(), strict=True))]  # fmt: skip


def _listed_pair(row: dict[str, Any], where: str) -> RigidPair:
    """One row of the table, of which every value is checked: a wrong shape would only be felt in some method."""
    source, target = _fragment_key(row["src"], where), _fragment_key(row["tgt"], where)
    turn = _numbers(row["rot"], (3, 3), f"rot of {where}")
    shift = _numbers(np.ravel(row["trans"]), (3,), f"trans of {where}")
    overlap = float(_numbers(row["overlap"], (), f"overlap of {where}"))
    information = _numbers(row["gt_cov"], (6, 6), f"gt_cov of {where}") if INFORMATION_KEY in row else None
    if np.abs(turn @ turn.T - np.eye(3)).max() > ROTATION_TOLERANCE or np.linalg.det(turn) < 0:
        raise InputError(f"rot of {where} is not a rotation.")
    return RigidPair(source, target, _scene_of(source), motion(turn, shift), overlap, information)


def _numbers(values: Any, shape: tuple[int, ...], where: str) -> FloatArray:
    """Finite numbers of a given shape; raises InputError otherwise."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} should hold numbers ({error}).") from error
    if array.shape != shape or not np.isfinite(array).all():
        finite = "" if np.isfinite(array).all() else ", not all of them finite"
        raise InputError(f"{where} should have the shape {shape}, but has {array.shape}{finite}.")
    return array


def _fragment_key(value: Any, where: str) -> str:
    """The path of a fragment below the data's folder, at least scene/name."""
    key = Path(str(value))
    if len(key.parts) < 2 or key.is_absolute() or ".." in key.parts:
        raise InputError(f"{where} names the fragment {str(value)!r}, but it should be like scene/0.")
    return str(value)


def _scene_of(key: str) -> str:
    """The folder that holds a fragment: the scene."""
    return Path(key).parent.name


class OfficialScenes:
    """3DMatch as published: a pickled table of pairs (`3DMatch.pkl`) and one `.pth` file per fragment."""

    def __init__(self, folder: Path, benchmark: str) -> None:
        self.folder, self.benchmark = folder, benchmark

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """Pairs of the pickled table."""
        path = find_file(self.folder, f"{self.benchmark}.pkl")
        table = _safe_unpickle(path)
        missing = [key for key in PAIR_KEYS if not isinstance(table, dict) or key not in table]
        if missing:
            raise InputError(f"{path} is no table of pairs: it lacks {', '.join(missing)}.")
        keys = [*PAIR_KEYS, *(key for key in (INFORMATION_KEY,) if key in table)]
        return draw(_listed_pairs({key: table[key] for key in keys}, path), count, seed)

    def cloud(self, key: str) -> NDArray[np.float32]:
        """A fragment by its path in the table, below the folder or its `indoor` folder."""
        for candidate in (
            self.folder / key,
            self.folder / "indoor" / key,
            self.folder / "data" / "indoor" / key,
        ):
            if candidate.is_file():
                return as_cloud(_load_pth(candidate), str(candidate))
        raise InputError(f"the fragment {key} is not below {self.folder}, which holds {listing(self.folder)}.")

    def cloud_keys(self) -> list[str]:
        """Every fragment that a pair of this set names."""
        pairs = self.pairs(None, 0)
        return sorted({key for pair in pairs for key in (pair.source, pair.target)})


def find_file(folder: Path, name: str) -> Path:
    """The file of that name in the folder or up to three folders below it."""
    for pattern in (name, f"*/{name}", f"*/*/{name}", f"*/*/*/{name}"):
        found = sorted(folder.glob(pattern))
        if found:
            return found[0]
    raise InputError(f"{folder} has no {name}; it holds {listing(folder)}.")


class _ArrayUnpickler(pickle.Unpickler):
    """Reads pickled lists and numpy arrays and nothing that could run code."""

    _allowed = {
        (module, name)
        for module in (
            "numpy",
            "numpy.core.multiarray",
            "numpy._core.multiarray",
            "numpy.core.numeric",
        )
        for name in ("ndarray", "dtype", "_reconstruct", "scalar", "_frombuffer")
    } | {("numpy._core.numeric", "_frombuffer"), ("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise InputError(f"the pickle names {module}.{name}, which is not an array: refused, it could run code.")
        return super().find_class(module.replace("numpy.core", "numpy._core") if _NEW_NUMPY else module, name)


_NEW_NUMPY = int(np.__version__.split(".")[0]) >= 2


def _safe_unpickle(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return _ArrayUnpickler(file).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        IndexError,
        UnicodeDecodeError,
    ) as error:
        raise InputError(f"{path} is not a readable table of pairs ({error}).") from error


def _load_pth(path: Path) -> Any:
    """What torch.save wrote: an array or a tensor. Any other pickled class is refused."""
    import torch
    from numpy.dtypes import Float32DType, Float64DType

    reconstruct = np.empty(0).__reduce__()[0]
    safe: list[Any] = [reconstruct, (reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype]
    try:
        with torch.serialization.safe_globals([*safe, Float32DType, Float64DType]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{path} is not a readable fragment ({first}).") from error


def as_cloud(values: Any, where: str) -> NDArray[np.float32]:
    """The values as an (N, 3) float32 array without the rows that are not finite, or a sentence."""
    points = np.asarray(values)
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in "fiu":
        raise InputError(f"{where} should hold an N x 3 array of numbers, but holds {points.dtype} {points.shape}.")
    points = points.astype(np.float32)
    return points[np.isfinite(points).all(axis=1)]


# --- unrelated pairs -------------------------------------------------------------------------------------------------


class UnrelatedScenes:
    """Pairs of fragments of different scenes: nothing to register, every acceptance is false."""

    def __init__(self, scenes: CompactScenes | OfficialScenes) -> None:
        self.scenes = scenes

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """`count` (100 by default) pairs, both scenes and both fragments drawn evenly."""
        by_scene: dict[str, list[str]] = {}
        for key in self.scenes.cloud_keys():
            by_scene.setdefault(_scene_of(key), []).append(key)
        if len(by_scene) < 2:
            raise InputError(f"unrelated pairs need two scenes, but {self.scenes.folder} has {len(by_scene)}.")
        random = np.random.default_rng(seed)
        return [self._pair(by_scene, random) for _ in range(count or 100)]

    def _pair(self, by_scene: dict[str, list[str]], random: Generator) -> RigidPair:
        first, second = random.choice(sorted(by_scene), size=2, replace=False)
        source, target = random.choice(by_scene[first]), random.choice(by_scene[second])
        return RigidPair(str(source), str(target), str(first), None, 0.0)

    def cloud(self, key: str) -> NDArray[np.float32]:
        """A fragment of the scenes."""
        return self.scenes.cloud(key)


# --- sequences of a depth camera -------------------------------------------------------------------------------------


class DepthSequence:
    """A recording of a moving depth camera (TUM's or 7-Scenes' layout) with poses, and maybe a list of pairs.

    `pairs.txt` has rows of target stamp, source stamp, overlap. More pairs than are listed are drawn evenly over three
    bands of overlap, measured at 5 cm as the smaller of both directions.
    """

    def __init__(self, folder: Path, camera_file: Path | None = None) -> None:
        recording = open_recording(folder, camera_file)
        assert isinstance(recording, Recording)
        self.folder, self.recording, self.camera_file = folder, recording, camera_file
        self.shots = {shot.path.stem: shot for shot in recording.shots if shot.pose is not None}
        if len(self.shots) < 2:
            raise InputError(f"{folder} has {len(self.shots)} depth images with a pose, but a pair needs two.")

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The listed pairs first, then drawn ones."""
        listed = self._listed()
        if listed and (count is None or count <= len(listed)):
            return draw(listed, count, seed)
        wanted = (count or DRAWN_PAIRS) - len(listed)
        return listed + self._drawn(wanted, seed, {(p.source, p.target) for p in listed})

    def cloud(self, key: str) -> NDArray[np.float32]:
        """The points of the image named `key`, in the camera's frame."""
        if key not in self.shots:
            raise InputError(f"{self.folder} has no depth image {key} with a pose.")
        frame = next(replace(self.recording, shots=(self.shots[key],)).frames())
        points = depth_to_points(frame.depth, self.recording.camera).reshape(-1, 3)
        return points[np.isfinite(points[:, 0])]

    def motion(self, source: str, target: str) -> FloatArray:
        """The true motion (4, 4) from the source's frame to the target's."""
        first, second = self.shots[source].pose, self.shots[target].pose
        assert first is not None
        assert second is not None
        return invert(second) @ first

    def _listed(self) -> list[RigidPair]:
        path = self.folder / "pairs.txt"
        rows = read_pair_list(path) if path.is_file() else []
        unknown = [key for target, source, _ in rows for key in (target, source) if key not in self.shots]
        if unknown:
            raise InputError(f"{path} names {unknown[0]}, for which there is no depth image with a pose.")
        return [self._pair(source, target, overlap) for target, source, overlap in rows]

    def _pair(self, source: str, target: str, overlap: float) -> RigidPair:
        return RigidPair(source, target, self.folder.name, self.motion(source, target), overlap)

    def _drawn(self, count: int, seed: int, taken: set[tuple[str, str]]) -> list[RigidPair]:
        """Pairs by rejection, until each band has its share or the tries run out."""
        random, keys = np.random.default_rng(seed), sorted(self.shots)
        room = [count // len(OVERLAP_BANDS) + (i < count % len(OVERLAP_BANDS)) for i in range(len(OVERLAP_BANDS))]
        found: list[RigidPair] = []
        for _ in range(200 * count):
            source, target = (str(key) for key in random.choice(keys, size=2, replace=False))
            if len(found) == count or (source, target) in taken:
                continue
            taken.add((source, target))
            overlap = self._overlap(source, target)
            band = next((i for i, (low, high) in enumerate(OVERLAP_BANDS) if low <= overlap < high), None)
            if band is not None and room[band] > 0:
                room[band] -= 1
                found.append(self._pair(source, target, overlap))
        return found

    def _overlap(self, source: str, target: str) -> float:
        """The smaller of both directions' overlap."""
        first, second = _coarse_frame(self, source), _coarse_frame(self, target)
        forward = self.motion(source, target)
        if overlap_ratio(first[::50], second, forward, 4 * OVERLAP_DISTANCE) == 0:
            return 0.0  # most pairs of a sequence: a fiftieth of the points settles it
        backward = invert(forward)
        return min(
            overlap_ratio(first, second, forward, OVERLAP_DISTANCE),
            overlap_ratio(second, first, backward, OVERLAP_DISTANCE),
        )


@lru_cache(maxsize=1024)
def _coarse_frame(sequence: DepthSequence, key: str) -> NDArray[np.float32]:
    """A frame with one point per cube of the overlap's distance; ordered by z, as the pairs drawn so far need it."""
    points = sequence.cloud(key)
    return points[group_by_cell(points[:, ::-1], OVERLAP_DISTANCE).first]


def read_pair_list(path: Path) -> list[tuple[str, str, float]]:
    """Rows of target, source, overlap; # starts a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text ({error}).") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        try:
            target, source, overlap = words[0], words[1], float(words[2])
        except (IndexError, ValueError) as error:
            raise InputError(f"line {number} of {path} should be: target stamp, source stamp, overlap.") from error
        rows.append((target, source, overlap))
    return rows


# --- choice ----------------------------------------------------------------------------------------------------------

RIGID_SETS = ("3DMatch", "3DLoMatch", "tum", "unrelated")


def open_set(folder: Path, name: str, camera_file: Path | None = None) -> PairSource:
    """The pairs of a set by its name: 3DMatch, 3DLoMatch, tum (whose camera a file may give), unrelated."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the folder of the data set.")
    if name == "tum":
        return DepthSequence(folder, camera_file)
    if name == "unrelated":
        return UnrelatedScenes(_open_scenes(folder, "3DMatch"))
    if name in ("3DMatch", "3DLoMatch"):
        return _open_scenes(folder, name)
    raise InputError(f"unknown set {name!r}: choose one of {', '.join(RIGID_SETS)}.")


def _open_scenes(folder: Path, benchmark: str) -> CompactScenes | OfficialScenes:
    if (folder / f"gt_{benchmark}.npz").is_file():
        return CompactScenes(folder, benchmark)
    if any(folder.glob(f"**/{benchmark}.pkl")):
        return OfficialScenes(folder, benchmark)
    raise InputError(
        f"{folder} has neither gt_{benchmark}.npz nor {benchmark}.pkl, so it is no 3DMatch folder; "
        f"it holds {listing(folder)}."
    )
