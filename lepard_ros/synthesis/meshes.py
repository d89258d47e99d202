# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Triangle meshes: primitives to build furniture from, and the library of scanned and modelled objects."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import Generator

MAX_FOOTPRINT = 3.3  # metres: longer objects (a shop front, a road barrier) do not fit into a room


class Mesh(NamedTuple):
    """Triangles. vertices: (V, 3) float32 metres, z up. faces: (F, 3) int32 indices."""

    vertices: NDArray[np.float32]
    faces: NDArray[np.int32]

    @property
    def size(self) -> NDArray[np.float32]:
        """(3,) metres, the extents of the bounding box."""
        return np.ptp(self.vertices, axis=0)

    def scaled(self, factor: float | NDArray[np.floating]) -> "Mesh":
        """The mesh scaled about its origin by one factor or three."""
        return Mesh((self.vertices * factor).astype(np.float32), self.faces)

    def placed(self, at: NDArray[np.floating] | tuple[float, float, float], yaw: float = 0.0) -> "Mesh":
        """The mesh rotated about z by yaw (radians), with its origin moved to `at` (metres)."""
        c, s = np.cos(yaw), np.sin(yaw)
        turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1]])
        return Mesh((self.vertices @ turn.T + np.asarray(at)).astype(np.float32), self.faces)

    def turned(self, rotation: NDArray[np.floating]) -> "Mesh":
        """The mesh rotated by (3, 3) and placed on z = 0, centred in x and y."""
        return standing(Mesh((self.vertices @ rotation.T).astype(np.float32), self.faces))


def standing(mesh: Mesh) -> Mesh:
    """The mesh centred in x and y, with its lowest point at z = 0."""
    low, high = mesh.vertices.min(axis=0), mesh.vertices.max(axis=0)
    origin = np.array([(low[0] + high[0]) / 2, (low[1] + high[1]) / 2, low[2]])
    return Mesh((mesh.vertices - origin).astype(np.float32), mesh.faces)


def merge(meshes: list[Mesh]) -> Mesh:
    """Merge meshes into one."""
    starts = np.cumsum([0] + [len(mesh.vertices) for mesh in meshes[:-1]])
    faces = [mesh.faces + start for mesh, start in zip(meshes, starts, strict=True)]
    return Mesh(np.concatenate([mesh.vertices for mesh in meshes]), np.concatenate(faces).astype(np.int32))


_BOX_FACES = np.array(
    [
        [0, 2, 1],
        [0, 3, 2],
        [4, 5, 6],
        [4, 6, 7],
        [0, 1, 5],
        [0, 5, 4],
        [1, 2, 6],
        [1, 6, 5],
        [2, 3, 7],
        [2, 7, 6],
        [3, 0, 4],
        [3, 4, 7],
    ],
    np.int32,
)
_BOX_CORNERS = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])


def box(width: float, depth: float, height: float, at: tuple[float, float, float] = (0.0, 0.0, 0.0)) -> Mesh:
    """A box; `at` is the centre of its bottom face. Metres along x, y, z."""
    flat = _BOX_CORNERS * (width, depth)
    low, high = np.insert(flat, 2, 0.0, axis=1), np.insert(flat, 2, height, axis=1)
    return Mesh((np.concatenate([low, high]) + np.asarray(at)).astype(np.float32), _BOX_FACES)


def grid_mesh(points: NDArray[np.floating]) -> Mesh:
    """The surface through a (R, C, 3) lattice of points."""
    rows, columns = points.shape[:2]
    index = np.arange(rows * columns).reshape(rows, columns)
    a, b, c, d = index[:-1, :-1], index[:-1, 1:], index[1:, 1:], index[1:, :-1]
    faces = np.concatenate([np.stack([a, b, c], -1).reshape(-1, 3), np.stack([a, c, d], -1).reshape(-1, 3)])
    return Mesh(points.reshape(-1, 3).astype(np.float32), faces.astype(np.int32))


def lathe(profile: NDArray[np.floating], sides: int = 16) -> Mesh:
    """A profile of (P, 2) radii and heights (metres) revolved about z: bottles, lamps, bowls, columns."""
    angle = np.linspace(0, 2 * np.pi, sides + 1)
    radius, height = profile[:, :1], profile[:, 1:]
    points = np.stack(
        [radius * np.cos(angle), radius * np.sin(angle), np.broadcast_to(height, (len(profile), sides + 1))], -1
    )
    return grid_mesh(points)


def cylinder(radius: float, height: float, at: tuple[float, float, float] = (0.0, 0.0, 0.0), sides: int = 14) -> Mesh:
    """A closed cylinder; `at` is the centre of its bottom."""
    return lathe(np.array([[0, 0], [radius, 0], [radius, height], [0, height]]), sides).placed(at)


def blob(rng: Generator, size: NDArray[np.floating], roughness: float = 0.25) -> Mesh:
    """A soft lump (bag, cushion, heap of clothes) of `size` (3,) metres: a rounded box with smooth dents."""
    theta, phi = np.meshgrid(np.linspace(0, 2 * np.pi, 25), np.linspace(-np.pi / 2, np.pi / 2, 13))
    power = rng.uniform(0.4, 1.0)
    ball = np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)
    rounded = np.sign(ball) * np.abs(ball) ** power
    waves = rng.normal(size=(4, 3)) * 2.5
    dents = sum(np.sin(ball @ wave + rng.uniform(0, 6)) for wave in waves) / 4
    return standing(grid_mesh(rounded * (1 + roughness * dents[..., None]) * np.asarray(size) / 2))


@dataclass
class MeshLibrary:
    """Objects to furnish rooms with, by where they go, and whole buildings.

    floor: furniture. clutter: small objects that stand on others. wall, ceiling: hanging objects (back towards +y).
    """

    floor: list[Mesh] = field(default_factory=list)
    clutter: list[Mesh] = field(default_factory=list)
    wall: list[Mesh] = field(default_factory=list)
    ceiling: list[Mesh] = field(default_factory=list)
    buildings: list[Mesh] = field(default_factory=list)


def load_library(directory: Path | None) -> MeshLibrary:
    """The meshes of a folder: a packed .npz (`verts`, `faces`, offsets) holds objects, one with `v`, `f` a building.

    Without a folder the library is empty, and rooms get procedural furniture only.
    """
    library = MeshLibrary()
    if directory is None:
        return library
    paths = sorted(Path(directory).glob("*.npz"))
    if not paths:
        raise InputError(f"No .npz mesh file was found in {directory}; give another folder or leave out --meshes.")
    for path in paths:
        with np.load(path, allow_pickle=False) as arrays:
            _add_file(library, {name: arrays[name] for name in arrays.files}, path)
    return library


def _add_file(library: MeshLibrary, arrays: dict[str, NDArray[Any]], path: Path) -> None:
    """Sort one file's meshes into the library."""
    if {"v", "f"} <= arrays.keys():
        library.buildings.append(_building(arrays["v"], arrays["f"]))
        return
    if not {"verts", "faces", "vert_offset", "face_offset"} <= arrays.keys():
        raise InputError(
            f"{path} holds neither `v`, `f` nor `verts`, `faces`, `vert_offset`, `face_offset`; remove it."
        )
    names = arrays.get("names", np.array([""] * (len(arrays["vert_offset"]) - 1)))
    sources = arrays.get("source", np.array([""] * len(names)))
    for index, (name, source) in enumerate(zip(names, sources, strict=True)):
        vertices = arrays["verts"][slice(*arrays["vert_offset"][index : index + 2])]
        faces = arrays["faces"][slice(*arrays["face_offset"][index : index + 2])].astype(np.int32)
        if source == "kaykit_furniture":  # this set has y up
            vertices = vertices[:, [0, 2, 1]] * np.array([1, -1, 1], np.float32)
        _add_object(library, standing(Mesh(vertices.astype(np.float32), faces)), str(name).lower())


def _add_object(library: MeshLibrary, mesh: Mesh, name: str) -> None:
    """Sort an object by name and size; objects that do not fit into a room are skipped."""
    size = mesh.size
    if size[:2].max() > MAX_FOOTPRINT or size[2] > MAX_FOOTPRINT:
        return
    if any(word in name for word in ("chandelier", "light")):
        library.ceiling.append(mesh)
    elif "door" not in name and size[2] > 0.12 and size[:2].min() < 0.16 and size.max() > 0.45:
        library.wall.append(mesh if size[0] >= size[1] else mesh.placed((0, 0, 0), np.pi / 2))
    elif size.max() < 0.6:
        library.clutter.append(mesh)
    else:
        library.floor.append(mesh)


def _building(vertices: NDArray[np.floating], faces: NDArray[np.integer]) -> Mesh:
    """A whole building, without stray geometry far away."""
    near = np.abs(vertices).max(axis=1) < 100
    return Mesh(vertices.astype(np.float32), faces[near[faces].all(axis=1)].astype(np.int32))
