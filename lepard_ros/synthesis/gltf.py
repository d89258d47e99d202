# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Skinned, animated models from glTF 2.0 files: geometry, skeleton, skin, clips. Materials and morphs are ignored."""

import base64
import binascii
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.synthesis.skinning import Pose, SkinnedMesh, blend_quaternions

COMPONENTS = {5120: "<i1", 5121: "<u1", 5122: "<i2", 5123: "<u2", 5125: "<u4", 5126: "<f4"}
WIDTHS = {"SCALAR": 1, "VEC2": 2, "VEC3": 3, "VEC4": 4, "MAT4": 16}
TRIANGLE_MODE = 4
GLB_MAGIC, JSON_CHUNK, BINARY_CHUNK = 0x46546C67, 0x4E4F534A, 0x004E4942


class Channel(NamedTuple):
    """One animated quantity of a joint: values (K, 3) or (K, 4) at times (K,) in seconds."""

    joint: int
    quantity: str
    times: FloatArray
    values: FloatArray
    stepped: bool


class Clip(NamedTuple):
    """A named animation of `duration` seconds."""

    name: str
    duration: float
    channels: tuple[Channel, ...]


@dataclass(frozen=True, eq=False)
class AnimatedModel:
    """A skinned mesh with its rest pose and its clips."""

    name: str
    mesh: SkinnedMesh
    rest: Pose
    clips: tuple[Clip, ...]

    def pose(self, clip: Clip, time: float) -> Pose:
        """The pose of a clip at `time` seconds; joints without a channel keep their rest pose."""
        arrays = {name: np.array(values) for name, values in self.rest._asdict().items()}
        for channel in clip.channels:
            arrays[channel.quantity][channel.joint] = sample_channel(channel, time)
        return Pose(**arrays)


class GltfFile:
    """The JSON tree of a glTF file with its binary buffers. `read_model` converts indexing errors to InputError."""

    def __init__(self, path: Path) -> None:
        content = path.read_bytes()
        if content[:4] == struct.pack("<I", GLB_MAGIC):
            chunks = _glb_chunks(content)
            self.tree: dict[str, Any] = json.loads(chunks[JSON_CHUNK])
            embedded = chunks.get(BINARY_CHUNK, b"")
        else:
            self.tree = json.loads(content)
            embedded = b""
        self.buffers = [_load_buffer(buffer, embedded, path) for buffer in self.tree.get("buffers", [])]

    def items(self, name: str) -> list[dict[str, Any]]:
        """A top-level list of the tree, empty when absent."""
        return self.tree.get(name, [])

    def array(self, accessor_index: int) -> NDArray[Any]:
        """The values of an accessor: (count, width), or (count,) for scalars. Normalised integers become floats."""
        accessor = self.tree["accessors"][accessor_index]
        if "sparse" in accessor or "bufferView" not in accessor:
            raise InputError("sparse glTF accessors are not supported: export the model without them.")
        view = self.tree["bufferViews"][accessor["bufferView"]]
        dtype, width = np.dtype(COMPONENTS[accessor["componentType"]]), WIDTHS[accessor["type"]]
        start = view.get("byteOffset", 0) + accessor.get("byteOffset", 0)
        stride = view.get("byteStride", dtype.itemsize * width)
        values = np.ndarray(
            (accessor["count"], width), dtype, self.buffers[view["buffer"]], start, (stride, dtype.itemsize)
        ).copy()
        if accessor.get("normalized") and dtype.kind in "iu":
            values = np.maximum(values / np.float32(np.iinfo(dtype).max), -1)
        return values[:, 0] if width == 1 else values


def read_model(path: str | Path) -> AnimatedModel:
    """Read a skinned model from a .glb or .gltf file.

    Raises InputError if the file is not glTF, has no skinned triangles, or has skin weights that are not finite.
    """
    path = Path(path)
    try:
        return _build_model(path.stem, GltfFile(path))
    except InputError as error:
        raise InputError(f"{path.name}: {error}") from error
    except OSError as error:
        raise InputError(f"{path.name} cannot be read ({error.strerror}): give a .glb or .gltf file.") from error
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RecursionError, struct.error) as error:
        raise InputError(f"{path.name} is not a valid glTF 2.0 file ({error!r}): export it again.") from error


def read_models(folder: str | Path) -> tuple[list[AnimatedModel], list[str]]:
    """All usable models below a folder, sorted by path, and a message for each skipped one."""
    models, skipped = [], []
    for path in sorted(Path(folder).rglob("*.gl[bt]*")):
        try:
            models.append(read_model(path))
        except InputError as error:
            skipped.append(str(error))
    if not models:
        raise InputError(f"{folder} holds no usable skinned glTF models: give a folder of .glb files.")
    return models, skipped


def sample_channel(channel: Channel, time: float) -> FloatArray:
    """The value of a channel at a time: linear (rotations along the shorter arc) or stepped, held beyond the ends."""
    times, values = channel.times, channel.values
    after = int(np.clip(np.searchsorted(times, time, side="right"), 1, max(len(times) - 1, 1)))
    if len(times) == 1:
        return values[0]
    amount = float(np.clip((time - times[after - 1]) / max(times[after] - times[after - 1], 1e-9), 0, 1))
    amount = float(amount >= 1) if channel.stepped else amount
    if channel.quantity == "rotation":
        return blend_quaternions(values[after - 1], values[after], amount)
    return (1 - amount) * values[after - 1] + amount * values[after]


def _glb_chunks(content: bytes) -> dict[int, bytes]:
    """The chunks of a binary glTF file by type."""
    chunks: dict[int, bytes] = {}
    position = 12
    while position + 8 <= len(content):
        length, kind = struct.unpack_from("<II", content, position)
        chunks.setdefault(kind, content[position + 8 : position + 8 + length])
        position += 8 + length
    return chunks


def _load_buffer(buffer: dict[str, Any], embedded: bytes, path: Path) -> bytes:
    """The bytes of a buffer: in the file itself, in a data URI, or in a neighbouring file."""
    uri = buffer.get("uri")
    if uri is None:
        return embedded
    if uri.startswith("data:"):
        try:
            return base64.b64decode(uri.split(",", 1)[1])
        except binascii.Error as error:
            raise InputError("a data URI holds invalid base64: export the file again.") from error
    if Path(uri).is_absolute() or ".." in Path(uri).parts:
        raise InputError(f"the buffer {uri!r} lies outside the model's folder: put it next to the model.")
    return (path.parent / uri).read_bytes()


def _build_model(name: str, file: GltfFile) -> AnimatedModel:
    order, parents = _joint_order(file)
    place = {node: joint for joint, node in enumerate(order)}
    return AnimatedModel(name, _build_mesh(file, place, parents), _rest_pose(file, order), _read_clips(file, place))


def _joint_order(file: GltfFile) -> tuple[list[int], NDArray[np.int64]]:
    """The nodes with parents before children, and the parent of each in that order (-1 for a root)."""
    nodes = file.items("nodes")
    parent_of = {child: parent for parent, node in enumerate(nodes) for child in node.get("children", [])}
    order: list[int] = []
    pending = [node for node in range(len(nodes)) if node not in parent_of]
    while pending:
        node = pending.pop()
        order.append(node)
        pending.extend(nodes[node].get("children", []))
    place = {node: joint for joint, node in enumerate(order)}
    return order, np.array([place[parent_of[node]] if node in parent_of else -1 for node in order])


def _rest_pose(file: GltfFile, order: list[int]) -> Pose:
    nodes = [file.items("nodes")[node] for node in order]
    if any("matrix" in node for node in nodes):
        nodes = [_without_matrix(node) for node in nodes]
    return Pose(
        np.array([node.get("translation", (0, 0, 0)) for node in nodes], float),
        np.array([node.get("rotation", (0, 0, 0, 1)) for node in nodes], float),
        np.array([node.get("scale", (1, 1, 1)) for node in nodes], float),
    )


def _without_matrix(node: dict[str, Any]) -> dict[str, Any]:
    """A node whose matrix, if it has one, is split into translation, rotation and scale (no shear)."""
    if "matrix" not in node:
        return node
    from scipy.spatial.transform import Rotation

    matrix = np.array(node["matrix"], float).reshape(4, 4).T
    scale = np.linalg.norm(matrix[:3, :3], axis=0)
    scale[0] *= np.sign(np.linalg.det(matrix[:3, :3]))
    rotation = Rotation.from_matrix(matrix[:3, :3] / scale).as_quat()
    return {"translation": matrix[:3, 3], "rotation": rotation, "scale": scale}


def _build_mesh(file: GltfFile, place: dict[int, int], parents: NDArray[np.int64]) -> SkinnedMesh:
    """All skinned primitives as one mesh; every skin brings its own columns of weights."""
    skins = file.items("skins")
    first_column = np.cumsum([0] + [len(skin["joints"]) for skin in skins])
    vertices, triangles, weights, count = [], [], [], 0
    for node in file.items("nodes"):
        if "skin" not in node or "mesh" not in node:
            continue
        for primitive in file.tree["meshes"][node["mesh"]]["primitives"]:
            if primitive.get("mode", TRIANGLE_MODE) != TRIANGLE_MODE or "JOINTS_0" not in primitive["attributes"]:
                continue
            points, faces, columns = _read_primitive(file, primitive, first_column[node["skin"]], first_column[-1])
            vertices.append(points)
            triangles.append(faces + count)
            weights.append(columns)
            count += len(points)
    if not vertices:
        raise InputError("the file holds no skinned triangles: export the mesh together with its armature.")
    bones = np.array([place[joint] for skin in skins for joint in skin["joints"]])
    binds = np.concatenate([_inverse_binds(file, skin) for skin in skins])
    faces = np.concatenate(triangles)
    if faces.min() < 0 or faces.max() >= count:
        raise InputError("a triangle refers to a missing vertex: export the file again.")
    return SkinnedMesh(np.concatenate(vertices), faces, parents, bones, binds, np.concatenate(weights))


def _inverse_binds(file: GltfFile, skin: dict[str, Any]) -> FloatArray:
    if "inverseBindMatrices" not in skin:
        return np.tile(np.eye(4), (len(skin["joints"]), 1, 1))
    stored = file.array(skin["inverseBindMatrices"]).astype(float)
    return stored.reshape(-1, 4, 4).transpose(0, 2, 1)  # glTF stores columns first


def _read_primitive(
    file: GltfFile, primitive: dict[str, Any], first: int, total: int
) -> tuple[FloatArray, NDArray[np.int64], FloatArray]:
    """The vertices (V, 3), triangles (T, 3) and dense weights (V, total) of one primitive."""
    attributes = primitive["attributes"]
    vertices = file.array(attributes["POSITION"]).astype(float)
    joints, shares = file.array(attributes["JOINTS_0"]).astype(np.int64), file.array(attributes["WEIGHTS_0"])
    if not (np.isfinite(shares).all() and np.isfinite(vertices).all()):
        raise InputError("skin weights or vertices are not finite: repair or remove the model.")
    dense = np.zeros((len(vertices), total))
    np.add.at(dense, (np.arange(len(vertices))[:, None], first + joints), shares)
    sums = dense.sum(axis=1, keepdims=True)
    if (sums <= 0).any():
        raise InputError("a vertex has no skin weights: normalise the weights and export again.")
    indices = file.array(primitive["indices"]) if "indices" in primitive else np.arange(len(vertices))
    return vertices, indices.astype(np.int64).reshape(-1, 3), dense / sums


def _read_clips(file: GltfFile, place: dict[int, int]) -> tuple[Clip, ...]:
    clips = []
    for number, animation in enumerate(file.items("animations")):
        channels = tuple(
            _read_channel(file, animation["samplers"][channel["sampler"]], channel["target"], place)
            for channel in animation["channels"]
            if channel["target"].get("path") in Pose._fields and "node" in channel["target"]
        )
        if channels:
            duration = max(float(channel.times[-1]) for channel in channels)
            clips.append(Clip(animation.get("name", f"clip {number}"), duration, channels))
    return tuple(clips)


def _read_channel(file: GltfFile, sampler: dict[str, Any], target: dict[str, Any], place: dict[int, int]) -> Channel:
    times, values = file.array(sampler["input"]).astype(float), file.array(sampler["output"]).astype(float)
    mode = sampler.get("interpolation", "LINEAR")
    if mode == "CUBICSPLINE":  # in-tangent, value, out-tangent: with dense keys the values alone are accurate enough
        values = values.reshape(len(times), 3, -1)[:, 1]
    return Channel(place[target["node"]], target["path"], times, values, mode == "STEP")
