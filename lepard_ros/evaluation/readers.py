"""Data sets with known motions, in the benchmarks' own layouts and in compact ones, behind one interface."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.errors import InputError
from lepard_ros.evaluation.metrics import overlap_ratio

FloatArray = NDArray[np.floating]

COMPACT_UNIT = 0.00025  # metres per step of the int16 clouds
DEPTH_UNIT = 1 / 5000  # metres per step of a TUM depth image
OVERLAP_DISTANCE = 0.05  # metres, for pairs drawn from a sequence
OVERLAP_BANDS = ((0.1, 0.3), (0.3, 0.6), (0.6, 1.01))
TUM_CAMERAS = {
    "freiburg1": Camera(640, 480, 517.3, 516.5, 318.6, 255.3),
    "freiburg2": Camera(640, 480, 520.9, 521.0, 325.1, 249.7),
    "freiburg3": Camera(640, 480, 535.4, 539.2, 320.1, 247.6),
}


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


def listing(folder: Path, most: int = 8) -> str:
    """What a folder holds, in a few words for an error message."""
    if not folder.is_dir():
        return "not a folder" if folder.exists() else "no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) + more) or "nothing"


def load_npz(path: Path, keys: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Arrays of an npz file, without pickles; refused with a sentence when the file or a key is missing or broken."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive.files]
            if missing:
                found = ", ".join(archive.files[:8])
                raise InputError(f"{path} has no array {', '.join(missing)} (found: {found}).")
            return {key: archive[key] for key in (keys or archive.files)}
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing; {path.parent} holds {listing(path.parent)}.") from error
    except (OSError, ValueError, EOFError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is not a readable npz file ({error}); fetch or write it again.") from error
    except Exception as error:  # zipfile and zlib raise their own kinds on a truncated archive
        raise InputError(f"{path} is damaged ({error}); fetch or write it again.") from error


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
        keys = ("src", "tgt", "rot", "trans", "overlap", "gt_cov")
        truth = load_npz(self.folder / f"gt_{self.benchmark}.npz", keys)
        return draw(_listed_pairs(truth), count, seed)

    def cloud(self, key: str) -> NDArray[np.float32]:
        """A fragment by "scene/number"."""
        scene, number = key.rsplit("/", 1)
        clouds = _compact_scene(self.folder / f"{scene}.npz")
        if number not in clouds:
            raise InputError(f"{self.folder / scene}.npz has no fragment {number}.")
        return clouds[number].astype(np.float32) * np.float32(COMPACT_UNIT)

    def cloud_keys(self) -> list[str]:
        """Every fragment of every scene."""
        scenes = sorted(path for path in self.folder.glob("*.npz") if not path.name.startswith("gt_"))
        return [f"{path.stem}/{number}" for path in scenes for number in sorted(_compact_scene(path), key=int)]


@lru_cache(maxsize=8)
def _compact_scene(path: Path) -> dict[str, NDArray[np.int16]]:
    return load_npz(path, ())


def _listed_pairs(truth: dict[str, Any]) -> list[RigidPair]:
    """Pairs of a table with src, tgt, rot, trans, overlap, gt_cov, each as long as the others."""
    lengths = {key: len(values) for key, values in truth.items()}
    if len(set(lengths.values())) != 1:
        raise InputError(f"the lists of the ground-truth file differ in length ({lengths}).")
    return [
        RigidPair(
            str(src),
            str(tgt),
            _scene_of(str(src)),
            motion(rot, trans),
            float(overlap),
            np.asarray(gt_cov),
        )
        for src, tgt, rot, trans, overlap, gt_cov in zip(
            *(truth[key] for key in ("src", "tgt", "rot", "trans", "overlap", "gt_cov")),
            strict=True,
        )
    ]


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
        keys = ("src", "tgt", "rot", "trans", "overlap", "gt_cov")
        missing = [key for key in keys if not isinstance(table, dict) or key not in table]
        if missing:
            raise InputError(f"{path} is no table of pairs: it lacks {', '.join(missing)}.")
        return draw(_listed_pairs({key: table[key] for key in keys}), count, seed)

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
    """The values as an (N, 3) float32 array, or a sentence."""
    points = np.asarray(values)
    if points.ndim != 2 or points.shape[1] != 3 or points.dtype.kind not in "fiu":
        raise InputError(f"{where} should hold an N x 3 array of numbers, but holds {points.dtype} {points.shape}.")
    return points.astype(np.float32)


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

    def _pair(self, by_scene: dict[str, list[str]], random: np.random.Generator) -> RigidPair:
        first, second = random.choice(sorted(by_scene), size=2, replace=False)
        source, target = random.choice(by_scene[first]), random.choice(by_scene[second])
        return RigidPair(str(source), str(target), str(first), None, 0.0)

    def cloud(self, key: str) -> NDArray[np.float32]:
        """A fragment of the scenes."""
        return self.scenes.cloud(key)


# --- sequences of a depth camera -------------------------------------------------------------------------------------


class DepthSequence:
    """A folder in TUM's style: depth images named by their stamp, poses, and maybe a list of pairs.

    Compact: `depth/<stamp>.png`, `camera.txt`, `poses.txt`, `pairs.txt`. Official: `depth.txt`, `groundtruth.txt`, a
    folder named after its camera ("...freiburg1..."). More pairs than are listed are drawn evenly over three bands of
    overlap, measured at 5 cm as the smaller of both directions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.camera, self.unit = read_camera(folder)
        self.poses = read_poses(folder)

    def pairs(self, count: int | None, seed: int) -> list[RigidPair]:
        """The listed pairs first, then drawn ones."""
        listed = self._listed()
        if count is None or count <= len(listed):
            return draw(listed, count, seed)
        return listed + self._drawn(count - len(listed), seed, {(p.source, p.target) for p in listed})

    def cloud(self, key: str) -> NDArray[np.float32]:
        """The points seen at the stamp `key`, in the camera's frame."""
        depth = read_depth(self.folder / self._depth_file(key), self.unit)
        if depth.shape != (self.camera.height, self.camera.width):
            size = f"{self.camera.height} x {self.camera.width}"
            raise InputError(f"the depth image {key} is {depth.shape}, but the camera's is {size}.")
        points = depth_to_points(depth, self.camera).reshape(-1, 3)
        return points[np.isfinite(points[:, 0])]

    def motion(self, source: str, target: str) -> FloatArray:
        """The true motion (4, 4) from the source's frame to the target's."""
        return np.linalg.inv(self.poses[target]) @ self.poses[source]

    def _depth_file(self, key: str) -> str:
        return _official_depth_files(self.folder).get(key, f"depth/{key}.png")

    def _listed(self) -> list[RigidPair]:
        path = self.folder / "pairs.txt"
        rows = read_rows(path, 3) if path.is_file() else []
        unknown = [stamp for row in rows for stamp in row[:2] if stamp not in self.poses]
        if unknown:
            raise InputError(f"{path} names the stamp {unknown[0]}, for which there is no pose.")
        return [self._pair(row[1], row[0], _number(row[2], path)) for row in rows]

    def _pair(self, source: str, target: str, overlap: float) -> RigidPair:
        return RigidPair(source, target, self.folder.name, self.motion(source, target), overlap)

    def _drawn(self, count: int, seed: int, taken: set[tuple[str, str]]) -> list[RigidPair]:
        """Pairs by rejection, until each band has its share or the tries run out."""
        random, keys = np.random.default_rng(seed), sorted(self.poses)
        room = [count // len(OVERLAP_BANDS) + (i < count % len(OVERLAP_BANDS)) for i in range(len(OVERLAP_BANDS))]
        found: list[RigidPair] = []
        for _ in range(200 * count):
            source, target = (str(key) for key in random.choice(keys, size=2, replace=False))
            if len(found) == count or (source, target) in taken:
                continue
            taken.add((source, target))
            overlap = self._overlap(source, target)
            band = next(
                (i for i, (low, high) in enumerate(OVERLAP_BANDS) if low <= overlap < high),
                None,
            )
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
        backward = np.linalg.inv(forward)
        return min(
            overlap_ratio(first, second, forward, OVERLAP_DISTANCE),
            overlap_ratio(second, first, backward, OVERLAP_DISTANCE),
        )


@lru_cache(maxsize=1024)
def _coarse_frame(sequence: DepthSequence, key: str) -> NDArray[np.float32]:
    """A frame with one point per cube of the overlap's distance."""
    points = sequence.cloud(key)
    cubes = np.floor(points / OVERLAP_DISTANCE).astype(np.int64)
    _, first = np.unique(cubes @ np.array([1, 1 << 20, 1 << 40]), return_index=True)
    return points[first]


def read_rows(path: Path, columns: int) -> list[list[str]]:
    """Rows of a text table with at least `columns` words; # starts a comment, commas count as spaces."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as text; {path.parent} holds {listing(path.parent)}.") from error
    rows = [line.split("#")[0].replace(",", " ").split() for line in lines]
    short = next((i for i, row in enumerate(rows) if row and len(row) < columns), None)
    if short is not None:
        raise InputError(f"line {short + 1} of {path} should have {columns} columns, but has {len(rows[short])}.")
    return [row for row in rows if row]


def _number(word: str, path: Path) -> float:
    """A finite number of a text table."""
    try:
        value = float(word)
    except ValueError:
        value = float("nan")
    if not np.isfinite(value):
        raise InputError(f"{path} has {word!r} where a number should stand.")
    return value


def read_camera(folder: Path) -> tuple[Camera, float]:
    """The camera and the metres per step of its depth images."""
    path = folder / "camera.txt"
    if not path.is_file():
        known = next((TUM_CAMERAS[name] for name in TUM_CAMERAS if name in folder.name), None)
        if known is None:
            raise InputError(f"{folder} has no camera.txt (fx fy cx cy width height); it holds {listing(folder)}.")
        return known, DEPTH_UNIT
    words = [word for row in read_rows(path, 2) for word in row]
    values = {key: _number(value, path) for key, value in zip(words[::2], words[1::2], strict=False)}
    missing = [key for key in ("fx", "fy", "cx", "cy", "width", "height") if key not in values]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)}.")
    camera = Camera(
        int(values["width"]),
        int(values["height"]),
        *(values[key] for key in ("fx", "fy", "cx", "cy")),
    )
    return camera, 1 / values.get("depth_scale", 1 / DEPTH_UNIT)


def read_poses(folder: Path) -> dict[str, FloatArray]:
    """Camera to world (4, 4) by stamp: `poses.txt`, or `groundtruth.txt` interpolated at the depth images' stamps."""
    if (folder / "poses.txt").is_file():
        stamps, motions = _trajectory(folder / "poses.txt")
        return dict(zip(stamps, motions, strict=True))
    path = folder / "groundtruth.txt"
    if not path.is_file():
        raise InputError(f"{folder} has neither poses.txt nor groundtruth.txt; it holds {listing(folder)}.")
    stamps, motions = _trajectory(path)
    return _interpolated(np.array(stamps, dtype=float), motions, list(_official_depth_files(folder)))


def _trajectory(path: Path) -> tuple[list[str], FloatArray]:
    """Stamps and poses (K, 4, 4) of rows `stamp tx ty tz qx qy qz qw`."""
    from scipy.spatial.transform import Rotation

    rows = read_rows(path, 8)
    if not rows:
        raise InputError(f"{path} holds no pose.")
    values = np.array([[_number(word, path) for word in row[1:8]] for row in rows])
    if np.any(np.linalg.norm(values[:, 3:], axis=1) < 1e-6):
        raise InputError(f"{path} has a quaternion of length zero.")
    poses = np.tile(np.eye(4), (len(rows), 1, 1))
    poses[:, :3, :3], poses[:, :3, 3] = (
        Rotation.from_quat(values[:, 3:]).as_matrix(),
        values[:, :3],
    )
    return [row[0] for row in rows], poses


def _interpolated(stamps: FloatArray, poses: FloatArray, wanted: list[str]) -> dict[str, FloatArray]:
    """Poses at the wanted stamps that lie within the trajectory, with no gap over 0.1 s around them."""
    from scipy.spatial.transform import Rotation, Slerp

    slerp = Slerp(stamps, Rotation.from_matrix(poses[:, :3, :3]))
    result = {}
    for key in wanted:
        after = int(np.searchsorted(stamps, float(key)))
        if 0 < after < len(stamps) and stamps[after] - stamps[after - 1] < 0.1:
            where = [np.interp(float(key), stamps, poses[:, axis, 3]) for axis in range(3)]
            result[key] = motion(slerp(float(key)).as_matrix(), np.array(where))
    return result


@lru_cache(maxsize=8)
def _official_depth_files(folder: Path) -> dict[str, str]:
    """Stamp to file of `depth.txt`, or nothing where there is none."""
    path = folder / "depth.txt"
    return {row[0]: row[1] for row in read_rows(path, 2)} if path.is_file() else {}


def read_depth(path: Path, unit: float) -> NDArray[np.float32]:
    """A 16 bit depth image (H, W) in metres, 0 where nothing was seen."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            return np.asarray(image).astype(np.float32) * np.float32(unit)
    except FileNotFoundError as error:
        raise InputError(f"the depth image {path} is missing.") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise InputError(f"{path} is not a readable depth image ({error}).") from error


# --- 4DMatch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeformablePair:
    """Two clouds of a moving body, metres, and where every source point truly went.

    source: (N, 3). target: (M, 3). truth: (N, 3), the source's points in the target's frame.
    matches: (K, 2) indices of points seen in both. metric: indices (L,) of the source points that NFMR is read at.
    """

    name: str
    source: NDArray[np.float32]
    target: NDArray[np.float32]
    truth: NDArray[np.float32]
    matches: NDArray[np.integer]
    metric: NDArray[np.integer]
    overlap: float


def deformable_files(folder: Path) -> list[Path]:
    """Every pair below the folder, in order."""
    files = sorted(folder.rglob("*.npz"))
    if not files:
        raise InputError(f"{folder} has no npz pair below it; it holds {listing(folder)}.")
    return files


def read_deformable(path: Path) -> DeformablePair:
    """A pair in 4DMatch's format: R (s_pc + s2t_flow) + t lies on t_pc."""
    arrays = load_npz(path, ())
    needed = ("s_pc", "t_pc", "s2t_flow", "rot", "trans", "correspondences")
    missing = [key for key in needed if key not in arrays]
    if missing:
        raise InputError(f"{path} lacks {', '.join(missing)} (found: {', '.join(arrays)}).")
    source, target = (
        as_cloud(arrays["s_pc"], f"s_pc of {path}"),
        as_cloud(arrays["t_pc"], f"t_pc of {path}"),
    )
    flow = as_cloud(arrays["s2t_flow"], f"s2t_flow of {path}")
    matches = np.asarray(arrays["correspondences"])
    if len(flow) != len(source) or matches.ndim != 2 or matches.shape[1] != 2:
        raise InputError(f"{path} has {len(source)} points, {len(flow)} flows, correspondences {matches.shape}.")
    if len(matches) and (matches.min() < 0 or (matches.max(axis=0) >= (len(source), len(target))).any()):
        raise InputError(f"{path} has correspondences beyond its points.")
    truth = (source + flow) @ arrays["rot"].T + np.ravel(arrays["trans"])
    seen = np.unique(matches[:, 0])
    overlap = float(arrays.get("s_overlap_rate", len(seen) / max(1, len(source))))
    metric = np.asarray(arrays.get("metric_index", seen)).astype(np.int64)
    name = f"{path.parent.name}/{path.stem}"
    return DeformablePair(name, source, target, truth.astype(np.float32), matches, metric, overlap)


# --- choice ----------------------------------------------------------------------------------------------------------

RIGID_SETS = ("3DMatch", "3DLoMatch", "tum", "unrelated")


def open_set(folder: Path, name: str) -> PairSource:
    """The pairs of a set by its name: 3DMatch, 3DLoMatch, tum, unrelated."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the folder of the data set.")
    if name == "tum":
        return DepthSequence(folder)
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
