# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Cloud files: PLY, PCD, NPY, NPZ and XYZ text, read and written as (N, 3) metres."""

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.headers import check_header
from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray

NPZ_KEYS = ("points", "xyz", "pc", "pcd", "s_pc")
# What numpy raises on damaged npy and npz files: found by fuzzing. TokenError and SyntaxError: a header is a Python
# literal. RuntimeError: an encrypted member, or a compression that zipfile does not know.
NUMPY_DAMAGE = (
    *(OSError, ValueError, EOFError, KeyError, AttributeError, TypeError, RuntimeError, OverflowError, MemoryError),
    *(SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error),
)


def read_cloud(path: str | Path) -> NDArray[np.float32]:
    """The finite points (N, 3) of a cloud file, metres.

    Raises InputError if the file is missing, of an unknown type, damaged or without any finite point.
    """
    path = Path(path)
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise InputError(f"{path} is not a cloud file that can be read: use {', '.join(_READERS)}.")
    if not path.is_file():
        raise InputError(f"the cloud file {path} does not exist.")
    points = _checked(reader(path), path)
    finite = points[np.isfinite(points).all(axis=1)]
    if len(finite) == 0:
        raise InputError(f"{path} holds no finite point (of {len(points)}).")
    return finite


def write_cloud(path: str | Path, points: FloatArray, colours: FloatArray | None = None) -> None:
    """Write points (N, 3), metres, in the format of the file's suffix; colours (N, 3) in [0, 1] for PLY, PCD."""
    path = Path(path)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise InputError(f"{path} is not a kind of cloud file that can be written: use {', '.join(_WRITERS)}.")
    checked = _checked(np.asarray(points), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(path, checked, colours)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error}).") from error


def _checked(points: NDArray[np.generic], path: Path) -> NDArray[np.float32]:
    """The points as float32 (N, 3); an organised (H, W, 3) cloud is laid flat, further columns are dropped."""
    if points.dtype.kind not in "fiu" or points.ndim not in (2, 3) or points.shape[-1] < 3:
        raise InputError(f"{path} should hold points as N x 3 numbers, but holds {points.dtype} {points.shape}.")
    return points.reshape(-1, points.shape[-1])[:, :3].astype(np.float32)


def _read_open3d(path: Path) -> NDArray[np.generic]:
    """For a damaged file Open3D prints a warning and returns an empty cloud, which the caller rejects."""
    check_header(path)  # Open3D trusts the header: a false one makes it hang or allocate without limit
    o3d = import_open3d()
    with o3d.utility.VerbosityContextManager(o3d.utility.VerbosityLevel.Error):
        cloud = o3d.io.read_point_cloud(str(path), remove_nan_points=False, remove_infinite_points=False)
    if not cloud.has_points():
        raise InputError(f"{path} is damaged or empty: Open3D reads no point from it.")
    return np.asarray(cloud.points)


def _read_npy(path: Path) -> NDArray[np.generic]:
    try:
        return np.load(path, allow_pickle=False)
    except NUMPY_DAMAGE as error:
        raise InputError(f"{path} is not a readable npy file ({error}).") from error


def _read_npz(path: Path) -> NDArray[np.generic]:
    """The array with a common name, or the only one."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = archive.files
            name = next((key for key in NPZ_KEYS if key in names), names[0] if len(names) == 1 else None)
            if name is None:
                raise InputError(f"{path} should have an array named points, but has {', '.join(names) or 'none'}.")
            return archive[name]
    except InputError:
        raise
    except NUMPY_DAMAGE as error:
        raise InputError(f"{path} is not a readable npz file ({error}).") from error


def _read_text(path: Path) -> NDArray[np.generic]:
    """Rows of x y z, separated by spaces or commas; # starts a comment; further columns are dropped."""
    import warnings

    try:
        text = path.read_text(encoding="utf-8").replace(",", " ")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an empty file warns; the caller rejects it
            return np.loadtxt(text.splitlines(), ndmin=2, usecols=(0, 1, 2)).reshape(-1, 3)
    except (OSError, ValueError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path} is not a text of x y z rows ({reason}).") from error


def _write_open3d(path: Path, points: NDArray[np.float32], colours: FloatArray | None) -> None:
    o3d = import_open3d()
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(points.astype(np.float64)))
    if colours is not None:
        cloud.colors = o3d.utility.Vector3dVector(np.asarray(colours, dtype=np.float64))
    if not o3d.io.write_point_cloud(str(path), cloud):
        raise InputError(f"{path} cannot be written: is the folder writable, and is there any point?")


def _write_npy(path: Path, points: NDArray[np.float32], _colours: FloatArray | None) -> None:
    np.save(path, points)


def _write_npz(path: Path, points: NDArray[np.float32], _colours: FloatArray | None) -> None:
    np.savez_compressed(path, points=points)


def _write_text(path: Path, points: NDArray[np.float32], _colours: FloatArray | None) -> None:
    np.savetxt(path, points, fmt="%.6f")


_READERS: dict[str, Callable[[Path], NDArray[np.generic]]] = {
    ".ply": _read_open3d,
    ".pcd": _read_open3d,
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".xyz": _read_text,
    ".txt": _read_text,
}
_WRITERS: dict[str, Callable[[Path, NDArray[np.float32], FloatArray | None], None]] = {
    ".ply": _write_open3d,
    ".pcd": _write_open3d,
    ".npy": _write_npy,
    ".npz": _write_npz,
    ".xyz": _write_text,
    ".txt": _write_text,
}
