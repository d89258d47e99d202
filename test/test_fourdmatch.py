# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Loaders of 4DMatch pairs and DeformingThings4D animations, against files written here."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from lepard_ros.data.fourdmatch import (
    OPTIONAL_FIELDS,
    QUANTUM,
    DeformablePair,
    evaluation_files,
    list_pairs,
    load_pair,
    save_pair,
    training_files,
    validation_files,
)
from lepard_ros.errors import InputError
from lepard_ros.synthesis.anime import Animation, read_anime, render_pairs, split_of
from lepard_ros.synthesis.creatures import BodyPlan, mesh_flesh
from lepard_ros.training.deformable_samples import training_pairs


def arrays_of_a_pair() -> dict[str, Any]:
    """As 4DMatch writes them: 60 points, of which 40 are seen again after a flow and a camera's motion."""
    rng = np.random.default_rng(5)
    source, flow = rng.normal(size=(60, 3)).astype(np.float32), rng.normal(size=(60, 3)).astype(np.float32)
    rotation, translation = Rotation.from_rotvec([0.3, -0.2, 0.5]).as_matrix(), np.array([[0.1], [0.2], [1.5]])
    target = ((source[:40] + flow[:40]) @ rotation.T + translation.T).astype(np.float32)
    matches = np.stack([np.arange(40), np.arange(40)], axis=1)
    return {
        "s_pc": source,
        "t_pc": target,
        "s2t_flow": flow,
        "rot": rotation,
        "trans": translation,
        "correspondences": matches,
        "metric_index": np.arange(0, 60, 7),
        "s_overlap_rate": np.float32(0.66),
    }


def test_reads_the_benchmarks_layout(tmp_path: Path) -> None:
    folder = tmp_path / "split" / "4DMatch" / "bear3EP_Attack1"
    folder.mkdir(parents=True)
    np.savez(folder / "cam1_0010_cam2_0033.npz", **arrays_of_a_pair())
    (path,) = list_pairs(tmp_path / "split" / "4DMatch")
    pair = load_pair(path)
    np.testing.assert_allclose(pair.warped[pair.matches[:, 0]], pair.target[pair.matches[:, 1]], atol=1e-5)
    assert pair.overlap == pytest.approx(0.66)  # the file's own, not the share of matches
    assert pair.translation.shape == (3,)
    assert pair.metric_index is not None and pair.metric_index.dtype == np.int64
    moved = (np.c_[pair.source + pair.flow, np.ones(60)] @ pair.transform.T)[:, :3]
    np.testing.assert_allclose(moved, pair.warped, atol=1e-5)


def test_metric_index_and_overlap_rate_are_optional_as_in_the_published_loaders(tmp_path: Path) -> None:
    needed = {key: value for key, value in arrays_of_a_pair().items() if key not in OPTIONAL_FIELDS}
    np.savez(tmp_path / "pair.npz", **needed)
    pair = load_pair(tmp_path / "pair.npz")
    assert pair.metric_index is None
    assert pair.overlap == pytest.approx(40 / 60)
    save_pair(tmp_path / "again.npz", pair)
    assert load_pair(tmp_path / "again.npz").metric_index is None


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The four parts of the published layout, one pair each."""
    for part in ("train", "val", "4DMatch", "4DLoMatch"):
        (tmp_path / "split" / part / "bear").mkdir(parents=True)
        np.savez(tmp_path / "split" / part / "bear" / "cam1_0010_cam2_0033.npz", **arrays_of_a_pair())
    return tmp_path


def parts(paths: list[Path]) -> list[str]:
    return sorted(path.parts[-3] for path in paths)


@pytest.mark.parametrize("below", ["", "split"])
def test_test_pairs_are_not_trained_on_nor_training_pairs_evaluated(published: Path, below: str) -> None:
    folder = published / below
    assert parts(training_files(folder)) == ["train"]
    assert parts(training_pairs([folder])) == ["train"]
    assert parts(validation_files(folder)) == ["val"]
    assert parts(evaluation_files(folder)) == ["4DLoMatch", "4DMatch"]
    assert parts(evaluation_files(folder, "4DMatch")) == ["4DMatch"]


def test_a_part_that_is_named_itself(published: Path) -> None:
    for part in ("val", "4DMatch", "4DLoMatch"):
        assert parts(evaluation_files(published / "split" / part)) == [part]
    assert training_files(published / "split" / "4DMatch") == []
    with pytest.raises(InputError, match="test pairs do not count"):
        training_pairs([published / "split" / "4DLoMatch"])
    (published / "only").mkdir()
    (published / "split" / "train").rename(published / "only" / "train")
    with pytest.raises(InputError, match="only train and val"):
        evaluation_files(published / "only")
    with pytest.raises(InputError, match="not a folder"):
        evaluation_files(published / "absent")


def test_saving_keeps_a_pair_up_to_a_quarter_of_a_millimetre(tmp_path: Path) -> None:
    np.savez(tmp_path / "first.npz", **arrays_of_a_pair())
    pair = load_pair(tmp_path / "first.npz")
    save_pair(tmp_path / "deep" / "second.npz", pair)
    again = load_pair(tmp_path / "deep" / "second.npz")
    for name in ("source", "target", "flow"):
        np.testing.assert_allclose(getattr(again, name), getattr(pair, name), atol=QUANTUM / 2 + 1e-7)
        assert getattr(again, name).dtype == np.float32
    assert (again.matches == pair.matches).all()
    np.testing.assert_array_equal(again.metric_index, pair.metric_index)
    assert again.overlap_rate == pair.overlap_rate
    np.testing.assert_array_equal(again.rotation, pair.rotation)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["second.npz"]  # no draft is left behind
    with np.load(tmp_path / "deep" / "second.npz") as file:
        assert file["trans"].shape == (3, 1) and file["s_pc"].dtype == np.float32


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"s2t_flow": np.zeros((3, 3), np.float32)}, "must agree"),
        ({"s_pc": np.full((60, 3), np.nan, np.float32)}, "finite"),
        ({"t_pc": np.zeros((40, 2), np.float32)}, "N x 3"),
        ({"rot": np.eye(4)}, "3 x 3"),
        ({"correspondences": np.array([[0, 40]])}, "do not exist"),
        ({"metric_index": np.array([-1])}, "do not exist"),
        ({"s_pc": None}, "it lacks s_pc"),
    ],
)
def test_bad_pairs_are_refused_with_a_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    arrays = {name: value for name, value in {**arrays_of_a_pair(), **change}.items() if value is not None}
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(InputError, match=sentence):
        load_pair(tmp_path / "bad.npz")


def test_files_that_are_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    for name in ("text.npz", "array.npz", "absent.npz"):
        with pytest.raises(InputError, match=name):
            load_pair(tmp_path / name)
    with pytest.raises(InputError, match="not a folder"):
        list_pairs(tmp_path / "nothing")


def bending_animation() -> Animation:
    """A blob with a horn that bends more in each of five frames; z is up in these files."""
    plan = BodyPlan(blend=0.05)
    bone = plan.add_bone(-1, (0, 0, 0))
    plan.add_part(bone, (0, 0, 0), (0, 0, 0.7), 0.3, 0.2)
    plan.add_part(bone, (0, 0, 0.5), (0.3, 0.1, 1.2), 0.12, 0.05)
    vertices, triangles = mesh_flesh(plan)
    offsets = np.stack([np.c_[0.06 * frame * vertices[:, 2] ** 2, 0 * vertices[:, :2]] for frame in range(1, 5)])
    return Animation("blob_bends", vertices.astype(np.float32), triangles.astype(np.int32), offsets.astype(np.float32))


def write_anime(path: Path, animation: Animation) -> Path:
    counts = np.array([animation.frames, len(animation.vertices), len(animation.triangles)], "<i4")
    parts = (counts, animation.vertices, animation.triangles, animation.offsets)
    path.write_bytes(b"".join(part.tobytes() for part in parts))
    return path


def test_anime_files_round_trip(tmp_path: Path) -> None:
    written = bending_animation()
    read = read_anime(write_anime(tmp_path / "blob_bends.anime", written))
    assert read.name == "blob_bends" and read.frames == 5
    np.testing.assert_array_equal(read.triangles, written.triangles)
    np.testing.assert_array_equal(read.frame(0), written.vertices)
    np.testing.assert_array_equal(read.frame(3), written.vertices + written.offsets[2])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_broken_anime_files_give_a_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.anime").write_bytes(content)
    try:
        animation = read_anime(tmp_path / "broken.anime")
    except InputError:
        return
    assert animation.frames >= 1 and np.isfinite(animation.frame(animation.frames - 1)).all()


def test_rendered_animations_are_4dmatch_pairs(tmp_path: Path) -> None:
    animation = bending_animation()
    pairs = dict(render_pairs(animation, 3))
    assert len(pairs) == 3
    for name, pair in pairs.items():
        first = int(name.split("_")[1])
        assert name.startswith("cam") and 0 <= first < 5
        distance, _ = cKDTree(pair.target).query(pair.warped[pair.matches[:, 0]])
        assert distance.max() < 0.016
        assert split_of(animation.name, pair) in ("train", "val", "4DMatch", "4DLoMatch")
        assert 0.12 <= pair.overlap <= 0.98
        _check_on_surface(pair)
    again = dict(render_pairs(animation, 3))
    assert all((again[name].source == pair.source).all() for name, pair in pairs.items())


def _check_on_surface(pair: DeformablePair) -> None:
    """Clean clouds: where both cameras saw the surface, warped points lie on the target within the grid."""
    distance, _ = cKDTree(pair.target).query(pair.warped)
    assert np.median(distance[pair.matches[:, 0]]) < 0.006


def test_reads_every_shared_pair(shared_data: Any) -> None:
    paths = list_pairs(shared_data("tosca_pairs"))
    assert len(paths) == 73
    for path in paths[::12]:
        pair = load_pair(path)
        ends = pair.warped[pair.matches[:, 0]] - pair.target[pair.matches[:, 1]]
        assert np.linalg.norm(ends, axis=1).max() < 0.0155
