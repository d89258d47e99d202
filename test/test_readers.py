# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Readers of data sets, on files that the test writes in each layout, whole and broken."""

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy.spatial.transform import Rotation

from lepard_ros import cli
from lepard_ros.data import readers
from lepard_ros.errors import InputError
from lepard_ros.evaluation.metrics import transform_points

ROTATION = Rotation.from_rotvec([0.1, 0.2, 0.3]).as_matrix()


def cloud(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, size=(30, 3))


def table() -> dict[str, list]:
    return {
        "src": ["kitchen/0", "kitchen/1", "hotel/0"],
        "tgt": ["kitchen/1", "kitchen/0", "hotel/1"],
        "rot": [ROTATION] * 3,
        "trans": [np.array([[1.0], [2.0], [3.0]])] * 3,
        "overlap": [0.5, 0.2, 0.15],
        "gt_cov": [np.eye(6)] * 3,
    }


def write_compact(folder: Path) -> None:
    np.savez(folder / "gt_3DMatch.npz", **{key: np.array(values) for key, values in table().items()})
    for scene in ("kitchen", "hotel"):
        steps = {str(i): np.round(cloud(i) / readers.COMPACT_UNIT).astype(np.int16) for i in range(2)}
        np.savez(folder / f"{scene}.npz", **steps)


def write_official(folder: Path) -> None:
    import torch

    pairs = table()
    for key in ("src", "tgt"):
        pairs[key] = [f"test/{name.replace('/', '/cloud_bin_')}.pth" for name in pairs[key]]
    (folder / "3DMatch.pkl").write_bytes(pickle.dumps(pairs))
    for name in {*pairs["src"], *pairs["tgt"]}:
        path = folder / "indoor" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(cloud(int(path.stem[-1])), path)


@pytest.mark.parametrize("write", [write_compact, write_official])
def test_scenes_in_both_layouts(tmp_path: Path, write) -> None:
    write(tmp_path)
    scenes = readers.open_set(tmp_path, "3DMatch")
    pairs = scenes.pairs(None, 0)
    assert [pair.scene for pair in pairs] == ["kitchen", "kitchen", "hotel"]
    np.testing.assert_allclose(pairs[0].truth[:3, :3], ROTATION)
    np.testing.assert_allclose(pairs[0].truth[:3, 3], [1, 2, 3])
    assert pairs[2].overlap == pytest.approx(0.15)
    np.testing.assert_allclose(scenes.cloud(pairs[0].source), cloud(0), atol=readers.COMPACT_UNIT)
    assert scenes.cloud(pairs[0].target).dtype == np.float32


@pytest.mark.parametrize("write", [write_compact, write_official])
def test_unrelated_pairs_are_of_different_scenes(tmp_path: Path, write) -> None:
    write(tmp_path)
    unrelated = readers.open_set(tmp_path, "unrelated")
    pairs = unrelated.pairs(20, 3)
    assert len(pairs) == 20
    assert all(Path(pair.source).parent != Path(pair.target).parent for pair in pairs)
    assert all(pair.truth is None for pair in pairs)
    assert [pair.name for pair in pairs] == [pair.name for pair in unrelated.pairs(20, 3)]
    assert unrelated.cloud(pairs[0].source).shape == (30, 3)


def test_a_draw_is_repeatable_and_without_replacement() -> None:
    pairs = [readers.RigidPair(str(i), "t", "s", np.eye(4), 0.5) for i in range(50)]
    drawn = readers.draw(pairs, 20, 1)
    assert drawn == readers.draw(pairs, 20, 1)
    assert len({pair.source for pair in drawn}) == 20
    assert drawn != readers.draw(pairs, 20, 2)
    assert readers.draw(pairs, 99, 0) == pairs


def test_missing_and_broken_scenes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        readers.open_set(tmp_path / "absent", "3DMatch")
    (tmp_path / "holiday.jpg").touch()
    with pytest.raises(InputError, match=r"holds holiday\.jpg"):
        readers.open_set(tmp_path, "3DMatch")
    with pytest.raises(InputError, match="unknown set"):
        readers.open_set(tmp_path, "5DMatch")
    (tmp_path / "gt_3DMatch.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(InputError, match=r"gt_3DMatch\.npz"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)
    np.savez(tmp_path / "gt_3DMatch.npz", src=np.array(["a/0"]))
    with pytest.raises(InputError, match="tgt"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)


def test_a_missing_fragment_is_named(tmp_path: Path) -> None:
    write_compact(tmp_path)
    scenes = readers.open_set(tmp_path, "3DMatch")
    with pytest.raises(InputError, match="no fragment 7"):
        scenes.cloud("kitchen/7")
    with pytest.raises(InputError, match=r"garage\.npz is missing"):
        scenes.cloud("garage/0")


def test_lists_of_different_length(tmp_path: Path) -> None:
    values = {key: np.array(rows) for key, rows in table().items()}
    np.savez(tmp_path / "gt_3DMatch.npz", **{**values, "overlap": values["overlap"][:2]})
    with pytest.raises(InputError, match="differ in length"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rot", np.eye(2), r"rot of pair 0 of .*gt_3DMatch\.npz should have the shape \(3, 3\), but has \(2, 2\)"),
        ("rot", np.full((3, 3), np.nan), "not all of them finite"),
        ("rot", np.diag([1.0, 1.0, -1.0]), "not a rotation"),
        ("trans", np.zeros(2), r"trans of pair 0 .* \(2,\)"),
        ("overlap", "much", "overlap of pair 0 .* should hold numbers"),
        ("gt_cov", np.eye(3), r"gt_cov .* \(6, 6\), but has \(3, 3\)"),
        ("src", "kitchen", "names the fragment 'kitchen'"),
        ("tgt", "../../etc/0", "names the fragment"),
    ],
)
def test_a_table_of_wrong_shapes_says_which(tmp_path: Path, key: str, value, sentence: str, capsys) -> None:
    write_compact(tmp_path)
    values = {name: np.array([rows[0]]) for name, rows in table().items()}
    np.savez(tmp_path / "gt_3DMatch.npz", **{**values, key: np.array([value])})
    with pytest.raises(InputError, match=sentence):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)
    assert cli.main(["evaluate", "3dmatch", str(tmp_path), "--methods", "icp", "--jobs", "1", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lepard: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("fragment", "sentence"),
    [
        (np.zeros((5, 2), np.int16), r"fragment 0 of .*kitchen\.npz should hold an N x 3 .* int16 \(5, 2\)"),
        (np.array(["a", "b"]), "should hold an N x 3 array"),
        (np.zeros((0, 3), np.int16), "kitchen/0 has 0 points"),
        (np.full((40, 3), np.nan, np.float32), "kitchen/0 has 0 points"),
    ],
)
def test_a_fragment_of_a_wrong_shape_is_named(tmp_path: Path, fragment: np.ndarray, sentence: str, capsys) -> None:
    write_compact(tmp_path)
    np.savez(tmp_path / "kitchen.npz", **{"0": fragment, "1": np.ones((30, 3), np.int16)})
    assert cli.main(["evaluate", "3dmatch", str(tmp_path), "--methods", "icp", "--jobs", "1", "--quiet"]) == 2
    error = capsys.readouterr().err
    assert re.search(sentence, error) and error.count("\n") == 1


class Malice:
    """A pickle that would run a command."""

    def __reduce__(self) -> tuple:
        import os

        return os.system, ("touch should_not_exist",)


def test_pickles_that_could_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    write_official(tmp_path)
    torch.save(Malice(), tmp_path / "indoor" / "test" / "kitchen" / "cloud_bin_0.pth")
    with pytest.raises(InputError, match="not a readable fragment"):
        readers.open_set(tmp_path, "3DMatch").cloud("test/kitchen/cloud_bin_0.pth")
    (tmp_path / "3DMatch.pkl").write_bytes(pickle.dumps(Malice()))
    with pytest.raises(InputError, match="could run code"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)
    (tmp_path / "3DMatch.pkl").write_bytes(pickle.dumps({"src": []}))
    with pytest.raises(InputError, match="lacks tgt"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)
    (tmp_path / "3DMatch.pkl").write_bytes(b"garbage")
    with pytest.raises(InputError, match=r"3DMatch\.pkl"):
        readers.open_set(tmp_path, "3DMatch").pairs(None, 0)
    assert not (tmp_path / "should_not_exist").exists()


# --- depth sequences -------------------------------------------------------------------------------------------------

STAMPS = [f"{10 + i / 10:.6f}" for i in range(8)]


def write_depth(folder: Path, shift: float = 0.1) -> None:
    """A camera that moves sideways before a wavy wall, 40 x 30 pixels."""
    (folder / "depth").mkdir(parents=True, exist_ok=True)
    for i, stamp in enumerate(STAMPS):
        u, v = np.meshgrid(np.arange(40), np.arange(30))
        depth = 2 + 0.1 * np.sin((u + i * shift * 20) / 4) + 0 * v
        depth[:2] = 0
        Image.fromarray((depth * 5000).astype(np.uint16)).save(folder / "depth" / f"{stamp}.png")


def write_compact_sequence(folder: Path) -> None:
    write_depth(folder)
    (folder / "camera.txt").write_text("fx 40 fy 40 cx 19.5 cy 14.5 width 40 height 30 depth_scale 5000\n# a comment\n")
    poses = [f"{stamp} {0.1 * i} 0 0 0 0 0 1" for i, stamp in enumerate(STAMPS)]
    (folder / "poses.txt").write_text("# stamp tx ty tz qx qy qz qw\n" + "\n".join(poses))
    (folder / "pairs.txt").write_text(f"{STAMPS[0]} {STAMPS[1]} 0.595\n{STAMPS[0]} {STAMPS[4]} 0.2\n")


def test_depth_sequence(tmp_path: Path) -> None:
    write_compact_sequence(tmp_path)
    sequence = readers.open_set(tmp_path, "tum")
    pairs = sequence.pairs(None, 0)
    assert [(pair.source, pair.target, pair.overlap) for pair in pairs] == [
        (STAMPS[1], STAMPS[0], 0.595),
        (STAMPS[4], STAMPS[0], 0.2),
    ]
    np.testing.assert_allclose(pairs[1].truth[:3, 3], [0.4, 0, 0], atol=1e-12)
    points = sequence.cloud(STAMPS[0])
    assert points.shape == (28 * 40, 3)
    assert np.abs(points[:, 2] - 2).max() < 0.11


def test_more_pairs_are_drawn_by_overlap(tmp_path: Path) -> None:
    write_compact_sequence(tmp_path)
    sequence = readers.open_set(tmp_path, "tum")
    pairs = sequence.pairs(8, 0)
    assert [pair.name for pair in pairs] == [pair.name for pair in readers.open_set(tmp_path, "tum").pairs(8, 0)]
    assert len({pair.name for pair in pairs}) == len(pairs) > 2
    for pair in pairs[2:]:
        forward = transform_points(pair.truth, sequence.cloud(pair.source))
        gap = np.linalg.norm(forward[:, None] - sequence.cloud(pair.target)[None], axis=2).min(axis=1)
        assert abs(pair.overlap - np.mean(gap < 0.05)) < 0.25


def test_seven_scenes_layout_has_pairs_too(tmp_path: Path) -> None:
    for i in range(3):
        Image.fromarray(np.full((480, 640), 2000, dtype=np.uint16)).save(tmp_path / f"frame-00000{i}.depth.png")
        pose = np.eye(4)
        pose[0, 3] = 0.5 * i
        np.savetxt(tmp_path / f"frame-00000{i}.pose.txt", pose)
    sequence = readers.open_set(tmp_path, "tum")
    pairs = sequence.pairs(4, 0)
    assert pairs
    expected = {("0", "1"): 0.5, ("1", "2"): 0.5, ("0", "2"): 1.0}
    for pair in pairs:
        ends = sorted((pair.source[11], pair.target[11]))
        assert abs(pair.truth[0, 3]) == pytest.approx(expected[tuple(ends)])


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("camera.txt", "fx 1 fy 2", "camera.txt"),
        ("poses.txt", "1 2 3", "poses.txt"),
        ("pairs.txt", "1.0 2.0", "line 1"),
        ("pairs.txt", "# target source\n1.0 2.0 much", "line 2"),
        ("pairs.txt", "1.0 2.0 0.5", "names 1.0"),
    ],
)
def test_broken_tables(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    write_compact_sequence(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=sentence):
        readers.open_set(tmp_path, "tum").pairs(None, 0)


def test_broken_sequence(tmp_path: Path) -> None:
    write_compact_sequence(tmp_path)
    sequence = readers.open_set(tmp_path, "tum")
    (tmp_path / "depth" / f"{STAMPS[0]}.png").write_bytes(b"no image")
    with pytest.raises(InputError, match="not a readable"):
        sequence.cloud(STAMPS[0])
    with pytest.raises(InputError, match="no depth image 99"):
        sequence.cloud("99")
    (tmp_path / "poses.txt").unlink()
    with pytest.raises(InputError, match="0 depth images with a pose"):
        readers.open_set(tmp_path, "tum")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.text(max_size=120) | st.binary(max_size=80))
def test_any_list_gives_rows_or_a_sentence(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "pairs.txt"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    try:
        rows = readers.read_pair_list(path)
    except InputError:
        return
    assert all(isinstance(overlap, float) for _, _, overlap in rows)
