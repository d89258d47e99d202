# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Save and load maps, or build one from a plain cloud file for localisation.

A saved map is one directory: `map.json` (poses, edges, the id of the weights, a SHA-256 per file) and one
`keyframe_<id>.npz` per keyframe (surface, features). Saving is atomic.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.cloud.files import NUMPY_DAMAGE
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.registration.types import Surface
from lepard_ros.tracking.compiled import Shape
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe
from lepard_ros.tracking.places import describe
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.views import View, make_view

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher

MANIFEST = "map.json"
FORMAT = "lepard_ros map"
VERSION = 1
# A plain cloud is split into blocks about as large as the view of a depth camera (metres); they overlap by half.
BLOCK = 5.0
MIN_BLOCK_POINTS = 500


def save_map(keyframe_map: KeyframeMap, directory: Path, weights_id: str) -> None:
    """Write a map to a temporary directory and move it into place; replaces an existing map."""
    directory = Path(directory)
    if directory.exists() and not (directory / MANIFEST).is_file():
        raise InputError(f"{directory} exists and is not a map; choose another directory for the map.")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as scratch:
            fresh = Path(scratch) / "map"
            fresh.mkdir()
            _write(keyframe_map, fresh, weights_id)
            _replace(fresh, directory, Path(scratch) / "previous")
    except OSError as error:
        raise InputError(f"The map cannot be written to {directory} ({error.strerror or error}).") from error


def fill_map(keyframe_map: KeyframeMap, path: Path, matcher: "Matcher") -> None:
    """Fill an empty map from a saved one, or from a plain cloud file (PLY, PCD, ...)."""
    if path.is_dir():
        _read(keyframe_map, path, matcher)
    elif path.is_file():
        from lepard_ros.cloud.files import read_cloud

        _read_plain(keyframe_map, np.asarray(read_cloud(path), dtype=np.float64), matcher, path)
    else:
        raise InputError(f"There is no map at {path}; give a saved map or a cloud file.")


def _replace(fresh: Path, directory: Path, previous: Path) -> None:
    """Move `fresh` to `directory`. The old directory is moved away first: a rename cannot overwrite it."""
    if directory.exists():
        directory.rename(previous)
    try:
        fresh.rename(directory)
    except OSError:
        if previous.exists():
            previous.rename(directory)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _write(keyframe_map: KeyframeMap, directory: Path, weights_id: str) -> None:
    frames = [_write_keyframe(frame, directory) for frame in keyframe_map.keyframes]
    edges = [_edge_to_json(edge) for edge in keyframe_map.graph.edges]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "weights_id": weights_id,
        "keyframes": frames,
        "edges": edges,
    }
    _write_synced(directory / MANIFEST, json.dumps(manifest, indent=1).encode())


def _write_keyframe(frame: Keyframe, directory: Path) -> dict[str, Any]:
    buffer = io.BytesIO()
    features = {} if frame.view.cloud is None else frame.view.cloud.to_arrays()
    arrays: dict[str, Any] = {**features, **_surface_to_arrays(frame.surface)}
    np.savez(buffer, **arrays)
    name = f"keyframe_{frame.id:06d}.npz"
    _write_synced(directory / name, buffer.getvalue())
    return {
        "id": frame.id,
        "stamp": frame.stamp,
        "pose": frame.pose.tolist(),
        "covariance": frame.covariance.tolist(),
        "file": name,
        "sha256": hashlib.sha256(buffer.getvalue()).hexdigest(),
    }


def _write_synced(path: Path, data: bytes) -> None:
    """Write and sync a file, so that it survives a power cut."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _edge_to_json(edge: Edge) -> dict[str, Any]:
    arrays = {"transform": edge.transform.tolist(), "covariance": edge.covariance.tolist()}
    return {"source": edge.source, "target": edge.target, "loop": edge.loop, **arrays}


def _read(keyframe_map: KeyframeMap, directory: Path, matcher: "Matcher") -> None:
    try:
        manifest = json.loads((directory / MANIFEST).read_bytes())
        if manifest["format"] != FORMAT or manifest["version"] != VERSION:
            raise InputError(f"{directory} is a map of another version; record it again.")
        same_weights = bool(matcher.weights_id) and manifest["weights_id"] == matcher.weights_id
        frames = [_read_keyframe(entry, directory, matcher, same_weights) for entry in manifest["keyframes"]]
        edges = [_edge_from_json(entry) for entry in manifest["edges"]]
    except InputError:
        raise
    except NUMPY_DAMAGE as error:
        reason = error or type(error).__name__
        raise InputError(f"{directory} is not a complete map ({reason}); save it again.") from error
    known = {frame.id for frame in frames}
    if not frames or any(edge.source not in known or edge.target not in known for edge in edges):
        raise InputError(f"{directory} is not a complete map (keyframes are missing); save it again.")
    for frame in frames:
        keyframe_map.keyframes.add(frame)
    for edge in edges:
        keyframe_map.graph.add(edge)


def _read_keyframe(entry: dict[str, Any], directory: Path, matcher: "Matcher", same_weights: bool) -> Keyframe:
    name = str(entry["file"])
    if Path(name).name != name:
        raise InputError(f"{directory} refers to a file outside the map ({name}); save the map again.")
    data = (directory / name).read_bytes()
    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
        raise InputError(f"{directory / name} is damaged (its checksum differs); save the map again.")
    with np.load(io.BytesIO(data), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    cloud = _cloud(arrays, matcher, same_weights)
    view = View(Shape(_surface_from_arrays(arrays)), cloud=cloud, descriptor=describe(cloud))
    pose, covariance = _finite(entry["pose"], (4, 4)), _finite(entry["covariance"], (6, 6))
    return Keyframe(int(entry["id"]), float(entry["stamp"]), pose, view, covariance, view.nbytes)


def _cloud(arrays: dict[str, Any], matcher: "Matcher", same_weights: bool) -> "EncodedCloud":
    """The stored features, or new ones from the stored points if the weights differ."""
    if same_weights:
        from lepard_ros.matcher import EncodedCloud

        return EncodedCloud.from_arrays(arrays, matcher.device)
    stored = float(arrays["spacing"]) if "spacing" in arrays else None
    return matcher.encode(arrays["aligned_points"], grid=matcher.settings.grid or stored)


def _surface_to_arrays(surface: Surface) -> dict[str, Any]:
    """The fine surface, under keys that an encoded cloud does not use."""
    arrays = {"aligned_points": surface.points, "aligned_normals": surface.normals}
    return arrays | {"aligned_spacing": np.float64(surface.spacing), "aligned_viewpoint": surface.viewpoint}


def _surface_from_arrays(arrays: dict[str, Any]) -> Surface:
    members = arrays["aligned_points"], arrays["aligned_normals"]
    if members[0].shape != members[1].shape or members[0].shape[1:] != (3,):
        raise ValueError("points and normals of a surface differ in shape")
    return Surface(*members, float(arrays["aligned_spacing"]), arrays["aligned_viewpoint"])


def _finite(values: Any, shape: tuple[int, ...]) -> FloatArray:
    array = np.array(values, dtype=np.float64)
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"a matrix is not of shape {shape} or not finite")
    return array


def _edge_from_json(entry: dict[str, Any]) -> Edge:
    matrices = _finite(entry["transform"], (4, 4)), _finite(entry["covariance"], (6, 6))
    return Edge(int(entry["source"]), int(entry["target"]), *matrices, loop=bool(entry["loop"]))


def _read_plain(keyframe_map: KeyframeMap, points: FloatArray, matcher: "Matcher", path: Path) -> None:
    """Make each block of a plain cloud a keyframe, with the sensor at its centre; the map frame is that of the file."""
    points = points[np.isfinite(points).all(axis=1)]
    for number, (centre, block) in enumerate(_blocks(points)):
        pose = np.eye(4)
        pose[:3, 3] = centre
        view = make_view(block - centre, keyframe_map.spacing)
        view.encode(matcher)
        view.drop_live_data()
        keyframe_map.keyframes.add(Keyframe(number, 0.0, pose, view, nbytes=view.nbytes))
    if not len(keyframe_map.keyframes):
        raise InputError(f"{path} has too few points for a map ({len(points)}); give a denser or larger cloud.")


def _blocks(points: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
    """Split points into cubes that overlap by half: (centre, points) each; a small cloud gives one."""
    if not len(points):
        return []
    lowest, highest = points.min(axis=0), points.max(axis=0)
    counts = np.maximum(np.ceil((highest - lowest) / (BLOCK / 2)).astype(int) - 1, 1)
    blocks = []
    for index in np.ndindex(*counts):
        centre = lowest + (highest - lowest) * (np.array(index) + 1.0) / (counts + 1.0)
        inside = points[(np.abs(points - centre) <= np.maximum(BLOCK / 2, 1e-9)).all(axis=1)]
        if len(inside) >= MIN_BLOCK_POINTS:
            blocks.append((centre, inside))
    return blocks
