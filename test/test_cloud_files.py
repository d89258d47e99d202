# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Cloud files: what is written comes back, and what is broken is refused with a sentence."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lepard_ros.cloud.files import read_cloud, write_cloud
from lepard_ros.errors import InputError

KINDS = [".ply", ".pcd", ".npy", ".npz", ".xyz", ".txt"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_comes_back(tmp_path: Path, kind: str) -> None:
    points = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    write_cloud(tmp_path / f"cloud{kind}", points)
    np.testing.assert_allclose(read_cloud(tmp_path / f"cloud{kind}"), points, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"cloud{kind}"
    path.write_bytes(b"\x00\x01 this is no cloud \xff\xfe")
    with pytest.raises(InputError, match="cloud"):
        read_cloud(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="cloud"):
        read_cloud(path)


@pytest.mark.parametrize("kind", [".npz", ".npy"])
def test_truncated_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"cloud{kind}"
    write_cloud(path, np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InputError, match="readable"):
        read_cloud(path)


def test_points_that_are_not_finite_are_dropped(tmp_path: Path) -> None:
    organised = np.zeros((2, 2, 3), dtype=np.float32)
    organised[0, 0] = np.nan
    organised[1, 1, 2] = np.inf
    np.save(tmp_path / "cloud.npy", organised)
    assert read_cloud(tmp_path / "cloud.npy").shape == (2, 3)
    np.save(tmp_path / "none.npy", np.full((4, 3), np.nan))
    with pytest.raises(InputError, match="no finite point"):
        read_cloud(tmp_path / "none.npy")


def test_shapes_and_names_are_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros((5, 2)))
    with pytest.raises(InputError, match="N x 3"):
        read_cloud(tmp_path / "flat.npy")
    np.savez(tmp_path / "two.npz", first=np.zeros((1, 3)), second=np.zeros((1, 3)))
    with pytest.raises(InputError, match="first, second"):
        read_cloud(tmp_path / "two.npz")
    np.savez(tmp_path / "named.npz", other=np.zeros(1), points=np.ones((1, 3)))
    assert read_cloud(tmp_path / "named.npz").tolist() == [[1, 1, 1]]
    with pytest.raises(InputError, match="does not exist"):
        read_cloud(tmp_path / "absent.ply")
    with pytest.raises(InputError, match=r"\.ply"):
        read_cloud(tmp_path / "cloud.docx")
    with pytest.raises(InputError, match=r"\.ply"):
        write_cloud(tmp_path / "cloud.docx", np.zeros((1, 3)))


def test_colours_are_written(tmp_path: Path) -> None:
    write_cloud(tmp_path / "cloud.ply", np.zeros((3, 3)), np.ones((3, 3)))
    assert b"red" in (tmp_path / "cloud.ply").read_bytes()


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    np.save(tmp_path / "cloud.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError):
        read_cloud(tmp_path / "cloud.npy")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode), kind=st.sampled_from(KINDS[2:]))
def test_any_bytes_give_points_or_a_sentence(tmp_path: Path, content: bytes, kind: str) -> None:
    path = tmp_path / f"cloud{kind}"
    path.write_bytes(content)
    try:
        points = read_cloud(path)
    except InputError:
        return
    assert points.shape[1:] == (3,)
    assert np.isfinite(points).all()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("kind", [".ply", ".pcd"])
def test_what_open3d_writes_passes_the_check_of_its_header_and_what_is_cut_does_not(
    tmp_path: Path, kind: str, text: bool, compressed: bool
) -> None:
    from lepard_ros.cloud.open3d import import_open3d

    o3d = import_open3d()
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(np.random.default_rng(0).normal(size=(50, 3))))
    cloud.colors = cloud.normals = cloud.points
    path = tmp_path / f"cloud{kind}"
    assert o3d.io.write_point_cloud(str(path), cloud, write_ascii=text, compressed=compressed)
    assert len(read_cloud(path)) == 50
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(InputError, match="damaged"):
        read_cloud(path)
