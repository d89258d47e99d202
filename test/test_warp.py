# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The warp: what it moves, what it leaves, and that nothing is lost on the way through arrays and files."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from lepard_ros.errors import InputError
from lepard_ros.registration.deformable.graph import GraphSettings, build_graph
from lepard_ros.registration.deformable.warp import Warp, write_coloured_ply
from lepard_ros.registration.types import Status
from rigid_warps import rigid_warp
from test_graph import plane


def bent_warp(points: np.ndarray, amount: float = 1.0) -> Warp:
    """A smooth bend of a plane about the y axis: node i turns by `amount` radians per metre of x."""
    graph = build_graph(points)
    angle = amount * graph.nodes[:, 0]
    turn = Rotation.from_rotvec(angle[:, None] * [0.0, 1.0, 0.0]).as_matrix()
    return Warp.from_motion(graph, turn, np.stack([0.1 * angle, 0 * angle, 0.2 * angle**2], axis=1))


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def some_transform() -> np.ndarray:
    transform = np.eye(4)
    transform[:3, :3] = Rotation.from_rotvec([0.3, -2.0, 0.7]).as_matrix()
    transform[:3, 3] = [0.4, -1.2, 2.0]
    return transform


def test_a_rigid_warp_moves_points_as_its_transform() -> None:
    points, transform = plane(0.3, 0.2), some_transform()
    moved = rigid_warp(points, transform)(points)
    np.testing.assert_allclose(moved, points @ transform[:3, :3].T + transform[:3, 3], atol=1e-12)


def test_points_follow_the_formula_of_the_paper() -> None:
    points = plane(0.3, 0.2)
    warp = bent_warp(points)
    skin, turn = warp.graph.skin(points), warp.rotation_matrices
    expected = np.zeros_like(points)
    for column in range(skin.nodes.shape[1]):
        node = skin.nodes[:, column]
        g = warp.graph.nodes[node]
        moved = np.einsum("nij,nj->ni", turn[node], points - g) + g + warp.translations[node]
        expected += skin.weights[:, column, None] * moved
    np.testing.assert_allclose(warp(points), expected, atol=1e-12)


def test_an_organised_cloud_keeps_its_shape_and_its_holes() -> None:
    points = plane(0.3, 0.2)
    cloud = points[: 40 * 60].reshape(40, 60, 3).copy()
    cloud[3, 4] = np.nan
    warped, moved = bent_warp(points).apply(cloud)
    assert warped.shape == cloud.shape and moved.shape == (40, 60)
    assert np.isnan(warped[3, 4]).all() and not moved[3, 4] and moved.sum() == 40 * 60 - 1


def test_points_that_are_not_covered_stay_and_are_reported() -> None:
    warp = bent_warp(plane(0.3, 0.2))
    far = np.array([[3.0, 3.0, 3.0]])
    np.testing.assert_array_equal(warp(far), far)
    assert not warp.covers(far).any()


def test_a_refused_warp_moves_nothing() -> None:
    points = plane(0.3, 0.2)
    warp = Warp.rest(build_graph(points), Status.TOO_FEW_MATCHES)
    np.testing.assert_array_equal(warp(points), points)
    assert not warp.ok and not warp.covers(points).any()


def test_a_million_points_take_little_longer_than_finding_their_nodes() -> None:
    points = plane(0.8, 0.6)
    warp = bent_warp(points)
    many = points[np.random.default_rng(0).integers(0, len(points), 1_000_000)]
    many = many + np.random.default_rng(1).normal(0, 0.002, many.shape)
    warp(many[:1000])
    warped, found = cpu_seconds(lambda: warp(many)), cpu_seconds(lambda: cKDTree(warp.graph.nodes).query(many, k=4))
    assert warped < 4 * found  # in the same run: other work on the same cores slows both down


def test_composition_is_one_warp_after_the_other() -> None:
    points, transform = plane(0.3, 0.2), some_transform()
    first = bent_warp(points, 0.8)
    second = rigid_warp(first(points), transform)
    both = first.then(second)
    np.testing.assert_allclose(both(points), second(first(points)), atol=1e-9)
    assert first.then(Warp.rest(second.graph, Status.OUT_OF_TIME)).status is Status.OUT_OF_TIME


def test_the_motion_carries_over_to_a_graph_that_has_grown() -> None:
    transform = some_transform()
    small, large = plane(0.3, 0.2), plane(0.4, 0.2)
    warp = rigid_warp(small, transform)
    grown = warp.onto(build_graph(large, keep_nodes=warp.graph.nodes))
    np.testing.assert_allclose(grown(large), large @ transform[:3, :3].T + transform[:3, 3], atol=1e-9)


def test_normals_turn_with_the_surface() -> None:
    points, transform = plane(0.3, 0.2), some_transform()
    normals = np.tile([0.0, 0.0, -1.0], (len(points), 1))
    turned = rigid_warp(points, transform).rotate(points, normals)
    np.testing.assert_allclose(turned, normals @ transform[:3, :3].T, atol=1e-9)


def test_arrays_and_files_lose_nothing(tmp_path) -> None:
    points = plane(0.3, 0.2)
    warp = bent_warp(points)
    warp.save(tmp_path / "warp.npz")
    for again in (Warp.from_arrays(warp.to_arrays()), Warp.load(tmp_path / "warp.npz")):
        np.testing.assert_array_equal(again(points), warp(points))
        assert again.status is warp.status and again.energy == warp.energy


def test_flat_arrays_as_in_the_message_are_read_too() -> None:
    points = plane(0.3, 0.2)
    warp = bent_warp(points)
    flat = {key: value.reshape(-1) if value.ndim == 2 else value for key, value in warp.to_arrays().items()}
    np.testing.assert_array_equal(Warp.from_arrays(flat)(points), warp(points))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(bent_warp(plane(0.1, 0.1)).to_arrays())), st.integers(0, 3))
def test_broken_arrays_are_an_input_error(key: str, how: int) -> None:
    arrays = bent_warp(plane(0.1, 0.1)).to_arrays()
    if how == 0:
        del arrays[key]
    elif key in ("nodes", "rotations", "translations"):
        arrays[key] = arrays[key].reshape(-1)[: -1 - (how == 2)] if how < 3 else arrays[key][:-1]
    elif key == "edges":
        arrays[key] = arrays[key] + len(arrays["nodes"])
    elif key == "optimised":
        arrays[key] = arrays[key][:-1]
    elif key in ("gamma", "neighbours"):
        arrays[key] = np.array(0)
    elif key == "status":
        arrays[key] = np.array("SPLENDID")
    else:
        return
    with pytest.raises(InputError):
        Warp.from_arrays(arrays)


def test_a_file_that_is_no_warp_is_an_input_error(tmp_path) -> None:
    (tmp_path / "no.npz").write_bytes(b"nothing")
    with pytest.raises(InputError):
        Warp.load(tmp_path / "no.npz")
    with pytest.raises(InputError):
        bent_warp(plane(0.1, 0.1))(np.zeros((4, 2)))


def test_the_ply_can_be_read_and_its_colours_tell_the_error(tmp_path) -> None:
    points = plane(0.1, 0.1)
    errors = np.linspace(0, 0.05, len(points))
    errors[0] = np.nan
    write_coloured_ply(tmp_path / "cloud.ply", points, errors)
    header, body = (tmp_path / "cloud.ply").read_bytes().split(b"end_header\n", 1)
    assert f"element vertex {len(points)}".encode() in header and len(body) == 15 * len(points)
    colour = np.frombuffer(body, dtype=[("p", "<f4", 3), ("c", "u1", 3)])["c"]
    assert colour[0].tolist() == [128, 128, 128] and colour[-1].tolist() == [255, 0, 0]


def test_graph_settings_reach_the_warp() -> None:
    graph = build_graph(plane(0.2, 0.2), GraphSettings(coverage=0.03, skinning=6))
    again = Warp.from_arrays(Warp.rest(graph, Status.OK).to_arrays()).graph
    assert again.coverage == 0.03 and again.skinning == 6


def test_the_listing_for_consumers_in_the_documentation_is_right() -> None:
    page = (Path(__file__).resolve().parent.parent / "docs" / "warp.md").read_text()
    listing = next(part for part in page.split("```python\n")[1:] if "def apply(message" in part).split("```")[0]
    names: dict = {}
    exec(listing, names)  # noqa: S102 - the page's own code is what is tested
    surface = plane(0.3, 0.2)
    rng = np.random.default_rng(0)
    warp = bent_warp(surface + rng.normal(0, 5e-4, surface.shape))  # no two nodes equally far, or order decides
    points = surface[::7] + rng.normal(0, 0.002, surface[::7].shape)
    message = SimpleNamespace(**{key: value.reshape(-1) for key, value in warp.to_arrays().items()})
    message.gamma, message.neighbours = float(message.gamma[0]), int(message.neighbours[0])
    far = np.array([[3.0, 3.0, 3.0]])
    moved = names["apply"](message, np.concatenate([points, far]))
    assert np.isnan(moved[-1]).all()
    np.testing.assert_allclose(moved[:-1], warp(points), atol=1e-9)
