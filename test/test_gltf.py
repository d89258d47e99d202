# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The glTF reader, against a small file written here byte by byte."""

import base64
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lepard_ros.errors import InputError
from lepard_ros.synthesis.gltf import read_model, read_models

QUARTER_TURN_Z = (0.0, 0.0, np.sqrt(0.5), np.sqrt(0.5))
TYPES = {1: "SCALAR", 3: "VEC3", 4: "VEC4", 16: "MAT4"}
CODES = {"<f4": 5126, "<u2": 5123, "|u1": 5121, "<u1": 5121}


class Writer:
    """Collects arrays into one buffer with its accessors."""

    def __init__(self) -> None:
        self.binary = b""
        self.views: list[dict[str, Any]] = []
        self.accessors: list[dict[str, Any]] = []

    def add(self, values: Any, dtype: str, **extra: Any) -> int:
        array = np.asarray(values, dtype)
        width = array.shape[1] if array.ndim == 2 else 1
        self.views.append({"buffer": 0, "byteOffset": len(self.binary), "byteLength": array.nbytes})
        code = CODES[array.dtype.str if array.dtype.str in CODES else dtype]
        accessor = {"bufferView": len(self.views) - 1, "componentType": code, "count": len(array), "type": TYPES[width]}
        self.accessors.append({**accessor, **extra})
        self.binary += array.tobytes() + b"\0" * (-array.nbytes % 4)
        return len(self.accessors) - 1


def two_bone_model(weights: Any = ((1, 0, 0, 0), (0.5, 0.5, 0, 0), (0, 1, 0, 0))) -> tuple[dict[str, Any], bytes]:
    """A triangle along y: its foot on a bone at the origin, its tip on a child bone at (0, 1, 0) that a clip turns."""
    writer = Writer()
    lower, upper = np.eye(4), np.eye(4)
    upper[1, 3] = -1.0
    attributes = {
        "POSITION": writer.add([[0, 0, 0], [0, 1, 0], [0, 2, 0]], "<f4"),
        "JOINTS_0": writer.add([[0, 1, 0, 0]] * 3, "<u1"),
        "WEIGHTS_0": writer.add(weights, "<f4"),
    }
    indices = writer.add([0, 1, 2], "<u2")
    binds = writer.add(np.stack([lower.T.ravel(), upper.T.ravel()]), "<f4")
    times, turns = writer.add([0.0, 2.0], "<f4"), writer.add([(0, 0, 0, 1), QUARTER_TURN_Z], "<f4")
    target = {"node": 0, "path": "rotation"}
    tree = {
        "asset": {"version": "2.0"},
        # The child comes first, so that the reader has to sort the joints.
        "nodes": [{"translation": [0, 1, 0]}, {"children": [0]}, {"mesh": 0, "skin": 0, "translation": [9, 9, 9]}],
        "meshes": [{"primitives": [{"attributes": attributes, "indices": indices}]}],
        "skins": [{"joints": [1, 0], "inverseBindMatrices": binds}],
        "animations": [
            {
                "name": "nod",
                "samplers": [{"input": times, "output": turns}],
                "channels": [{"sampler": 0, "target": target}],
            }
        ],
        "accessors": writer.accessors,
        "bufferViews": writer.views,
        "buffers": [{"byteLength": len(writer.binary)}],
    }
    return tree, writer.binary


def write_glb(path: Path, tree: dict[str, Any], binary: bytes) -> Path:
    text = json.dumps(tree).encode()
    text += b" " * (-len(text) % 4)
    chunks = struct.pack("<II", len(text), 0x4E4F534A) + text + struct.pack("<II", len(binary), 0x004E4942) + binary
    path.write_bytes(struct.pack("<III", 0x46546C67, 2, 12 + len(chunks)) + chunks)
    return path


def test_reads_mesh_and_skeleton(tmp_path: Path) -> None:
    model = read_model(write_glb(tmp_path / "nod.glb", *two_bone_model()))
    assert model.name == "nod"
    assert model.mesh.triangles.tolist() == [[0, 1, 2]]
    assert model.mesh.weights.tolist() == [[1, 0], [0.5, 0.5], [0, 1]]
    joint, parent = model.mesh.bones[1], model.mesh.bones[0]
    assert model.mesh.parents[joint] == parent and parent < joint
    # In the rest pose the skin lies as it was bound; the mesh node's own place is ignored, as the standard says.
    np.testing.assert_allclose(model.mesh.posed(model.rest), [[0, 0, 0], [0, 1, 0], [0, 2, 0]], atol=1e-7)


def test_clip_bends_the_tip_by_hand_computed_angles(tmp_path: Path) -> None:
    model = read_model(write_glb(tmp_path / "nod.glb", *two_bone_model()))
    clip = model.clips[0]
    assert clip.name == "nod" and clip.duration == 2.0
    # A quarter turn about z at (0, 1, 0) takes the tip from one above the joint to one beside it.
    np.testing.assert_allclose(model.mesh.posed(model.pose(clip, 2.0)), [[0, 0, 0], [0, 1, 0], [-1, 1, 0]], atol=1e-6)
    half = [[0, 0, 0], [0, 1, 0], [-np.sqrt(0.5), 1 + np.sqrt(0.5), 0]]
    np.testing.assert_allclose(model.mesh.posed(model.pose(clip, 1.0)), half, atol=1e-6)
    np.testing.assert_allclose(model.mesh.posed(model.pose(clip, 99.0))[2], [-1, 1, 0], atol=1e-6)


def test_reads_data_uris_neighbouring_files_and_node_matrices(tmp_path: Path) -> None:
    tree, binary = two_bone_model()
    tree["nodes"][0] = {"matrix": [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 1]}
    tree["buffers"][0]["uri"] = "data:application/octet-stream;base64," + base64.b64encode(binary).decode()
    (tmp_path / "inline.gltf").write_text(json.dumps(tree))
    tree["buffers"][0]["uri"] = "beside.bin"
    (tmp_path / "beside.gltf").write_text(json.dumps(tree))
    (tmp_path / "beside.bin").write_bytes(binary)
    for name in ("inline.gltf", "beside.gltf"):
        model = read_model(tmp_path / name)
        np.testing.assert_allclose(model.mesh.posed(model.rest)[2], [0, 2, 0], atol=1e-7)


def test_normalised_byte_weights(tmp_path: Path) -> None:
    tree, binary = two_bone_model()
    writer = Writer()
    writer.binary, writer.views, writer.accessors = binary, tree["bufferViews"], tree["accessors"]
    weights = writer.add([[255, 0, 0, 0], [51, 204, 0, 0], [0, 255, 0, 0]], "<u1", normalized=True)
    tree["meshes"][0]["primitives"][0]["attributes"]["WEIGHTS_0"] = weights
    model = read_model(write_glb(tmp_path / "bytes.glb", tree, writer.binary))
    np.testing.assert_allclose(model.mesh.weights[1], [0.2, 0.8], atol=1e-6)


def test_models_with_bad_weights_are_skipped_with_a_sentence(tmp_path: Path) -> None:
    write_glb(tmp_path / "good.glb", *two_bone_model())
    write_glb(tmp_path / "hollow.glb", *two_bone_model([(np.nan, 0, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0)]))
    models, skipped = read_models(tmp_path)
    assert [model.name for model in models] == ["good"]
    assert len(skipped) == 1 and "hollow.glb" in skipped[0] and "not finite" in skipped[0]


@pytest.mark.parametrize("uri", ["/etc/hostname", "../secret.bin"])
def test_buffers_outside_the_folder_are_refused(tmp_path: Path, uri: str) -> None:
    tree, _ = two_bone_model()
    tree["buffers"][0]["uri"] = uri
    (tmp_path / "sly.gltf").write_text(json.dumps(tree))
    with pytest.raises(InputError, match="outside"):
        read_model(tmp_path / "sly.gltf")


def test_absent_files_and_empty_folders_say_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_model(tmp_path / "none.glb")
    with pytest.raises(InputError, match="no usable"):
        read_models(tmp_path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broken_files_give_a_model_or_a_sentence(tmp_path: Path, data: st.DataObject) -> None:
    whole = write_glb(tmp_path / "whole.glb", *two_bone_model()).read_bytes()
    broken = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if broken:
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "broken.glb").write_bytes(bytes(broken))
    try:
        mesh = read_model(tmp_path / "broken.glb").mesh
    except InputError:
        return
    assert mesh.vertices.shape[1] == 3 and mesh.triangles.max() < len(mesh.vertices) == len(mesh.weights)


def test_shared_models_move_and_stay_finite(shared_data: Any) -> None:
    models, skipped = read_models(shared_data("train_deform") / "animals_pack")
    assert len(models) == 12 and not skipped
    for model in models:
        still = model.mesh.posed(model.rest)
        moved = model.mesh.posed(model.pose(model.clips[0], model.clips[0].duration / 2))
        assert np.isfinite(moved).all() and np.abs(moved - still).max() > 0.02 * np.ptp(still)
