# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformation graph: even, along the surface, and honest about what it leaves out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import cKDTree

from lepard_ros.errors import InputError
from lepard_ros.registration.deformable.graph import GraphSettings, _each_once, build_graph, clusters


def plane(width: float, height: float, spacing: float = 0.005) -> np.ndarray:
    """An even sheet of points (N, 3) at z = 1."""
    x, y = np.meshgrid(np.arange(0, width, spacing), np.arange(0, height, spacing))
    return np.stack([x.ravel(), y.ravel(), np.ones(x.size)], axis=1)


def two_limbs(gap: float) -> tuple[np.ndarray, np.ndarray]:
    """Two sheets (N, 3) that face each other at a distance of `gap` metres, and which point belongs to the second."""
    first = plane(0.4, 0.15)
    second = first + np.array([0.0, 0.0, gap])
    return np.concatenate([first, second]), np.repeat([False, True], [len(first), len(second)])


def test_every_point_has_a_node_within_the_coverage_and_nodes_are_spread_evenly() -> None:
    points = plane(0.4, 0.3)
    graph = build_graph(points, GraphSettings(coverage=0.02))
    tree = cKDTree(graph.nodes)
    assert tree.query(points)[0].max() <= 0.02 + 0.005  # the surface is thinned before nodes are spread over it
    nearest = tree.query(graph.nodes, 2)[0][:, 1]
    assert nearest.min() > 0.01 and np.median(nearest) > 0.02


def test_edges_join_each_node_to_its_neighbours_once() -> None:
    graph = build_graph(plane(0.4, 0.3))
    assert (graph.edges[:, 0] < graph.edges[:, 1]).all()
    assert len(np.unique(graph.edges, axis=0)) == len(graph.edges)
    assert np.bincount(graph.edges.ravel(), minlength=len(graph.nodes)).min() >= 5
    length = np.linalg.norm(graph.nodes[graph.edges[:, 0]] - graph.nodes[graph.edges[:, 1]], axis=1)
    assert length.max() < 5 * 0.04


def test_limbs_two_centimetres_apart_share_neither_edges_nor_nodes() -> None:
    points, second = two_limbs(gap=0.02)
    graph = build_graph(points)
    side = graph.nodes[:, 2] > 1.01
    assert (side[graph.edges[:, 0]] == side[graph.edges[:, 1]]).all()
    assert len(np.unique(clusters(graph.edges, len(graph.nodes)))) == 2
    skin = graph.skin(points)
    carried = (side[skin.nodes] == second[:, None]) | (skin.weights == 0)
    assert carried.all()


def test_a_sheet_that_stands_close_over_another_is_not_linked_to_it() -> None:
    upright = plane(0.2, 0.1)[:, [0, 2, 1]] * [1, 1, -1] + [0.1, -0.85, 0.99]
    cloud = np.concatenate([plane(0.4, 0.3), upright])

    def links_across(fold: float) -> int:
        graph = build_graph(cloud, GraphSettings(max_fold=fold))
        stands = graph.nodes[:, 2] < 0.995
        return int((stands[graph.edges[:, 0]] != stands[graph.edges[:, 1]]).sum())

    assert links_across(60.0) == 0 < links_across(90.0)


def test_a_fold_of_a_quarter_turn_over_five_centimetres_holds() -> None:
    x, y, _ = plane(0.4, 0.3).T
    angle = np.clip((x - 0.2) / 0.03, 0, np.pi / 2)
    down = 0.03 * (1 - np.cos(angle)) + np.maximum(x - 0.2 - 0.03 * np.pi / 2, 0)
    graph = build_graph(np.stack([np.minimum(x, 0.2) + 0.03 * np.sin(angle), y, 1 - down], axis=1))
    assert len(np.unique(clusters(graph.edges, len(graph.nodes)))) == 1


def test_an_organised_cloud_is_cut_at_depth_steps_of_more_than_four_centimetres() -> None:
    u, v = np.meshgrid(np.arange(120), np.arange(80))
    depth = np.where(u < 60, 1.0, 1.05)
    cloud = np.stack([(u - 60) * 0.005 * depth, (v - 40) * 0.005 * depth, depth], axis=-1)
    cloud[10:14, 20:24] = np.nan
    apart = build_graph(cloud)
    assert len(np.unique(clusters(apart.edges, len(apart.nodes)))) == 2
    cloud[..., 2] = np.where(u < 60, 1.0, 1.02)
    joined = build_graph(cloud)
    assert len(np.unique(clusters(joined.edges, len(joined.nodes)))) == 1


def test_small_parts_are_reported_and_not_carried() -> None:
    scrap = plane(0.03, 0.03) + np.array([1.0, 0.0, 0.0])
    body = plane(0.4, 0.3)
    graph = build_graph(np.concatenate([body, scrap]))
    assert graph.skin(body).covered.all()
    assert not graph.skin(scrap).covered.any()


@pytest.mark.parametrize(("coverage", "nodes"), [(0.009, 40), (0.02, 8), (0.025, 5), (0.04, 4), (0.2, 4)])
def test_forty_nodes_at_the_papers_coverage_are_an_area_that_has_fewer_at_a_wider_one(
    coverage: float, nodes: int
) -> None:
    assert GraphSettings(coverage=coverage).min_nodes == nodes
    assert GraphSettings(coverage=coverage, min_cluster=1).min_nodes == 1


@pytest.mark.parametrize("coverage", [0.009, 0.02])
def test_which_parts_are_left_out_hardly_depends_on_the_coverage(coverage: float) -> None:
    small = plane(0.03, 0.03, 0.003) + np.array([1.0, 0.0, 0.0])
    large = plane(0.10, 0.10, 0.003) + np.array([2.0, 0.0, 0.0])
    graph = build_graph(np.concatenate([small, large]), GraphSettings(coverage=coverage))
    near_small = graph.nodes[:, 0] < 1.5
    assert near_small.sum() < GraphSettings(coverage=coverage).min_nodes <= (~near_small).sum()
    np.testing.assert_array_equal(graph.active, ~near_small)
    assert not graph.skin(small).covered.any() and graph.skin(large).covered.all()


def test_points_far_off_the_surface_are_not_covered() -> None:
    graph = build_graph(plane(0.4, 0.3))
    assert not graph.skin(np.array([[0.2, 0.15, 1.3], [2.0, 0.0, 1.0]])).covered.any()


def test_skinning_weights_follow_the_formula() -> None:
    graph = build_graph(plane(0.4, 0.3), GraphSettings(coverage=0.02))
    points = np.random.default_rng(0).uniform([0.05, 0.05, 1.0], [0.35, 0.25, 1.005], (200, 3))
    skin = graph.skin(points)
    square = np.square(graph.nodes[skin.nodes] - points[:, None]).sum(axis=-1)
    expected = np.exp(-square / (2 * 0.02**2))
    np.testing.assert_allclose(skin.weights, expected / expected.sum(axis=1, keepdims=True), atol=1e-12)


def test_kept_nodes_stay_first_and_new_surface_gets_new_nodes() -> None:
    old = build_graph(plane(0.3, 0.3))
    grown = build_graph(plane(0.4, 0.3), keep_nodes=old.nodes)
    np.testing.assert_array_equal(grown.nodes[: len(old.nodes)], old.nodes)
    assert len(grown.nodes) > len(old.nodes)
    assert (grown.nodes[len(old.nodes) :, 0] > 0.27).all()
    assert grown.skin(plane(0.4, 0.3)).covered.all()


def test_links_are_made_once_for_each_pair_whichever_way_it_is_named() -> None:
    pairs = np.array([[3, 1], [1, 3], [0, 2], [1, 3], [2, 1]])
    np.testing.assert_array_equal(_each_once(pairs, 4), [[0, 2], [1, 2], [1, 3]])
    assert _each_once(np.zeros((0, 2), dtype=np.int64), 4).shape == (0, 2)


def test_the_same_surface_again_needs_no_new_nodes() -> None:
    points = np.concatenate([plane(0.3, 0.3), [[0.8, 0.0, 1.0], [1.2, 0.0, 1.0]]])  # and points on their own
    old = build_graph(points)
    np.testing.assert_array_equal(build_graph(points, keep_nodes=old.nodes).nodes, old.nodes)


def test_a_cut_leaves_two_independent_parts() -> None:
    graph = build_graph(plane(0.4, 0.2))
    left = graph.nodes[:, 0] < 0.2
    cut = graph.without_edges(left[graph.edges[:, 0]] != left[graph.edges[:, 1]])
    assert len(np.unique(clusters(cut.edges, len(cut.nodes)))) == 2


@pytest.mark.parametrize("cloud", [np.zeros((0, 3)), np.full((4, 5, 3), np.nan), np.zeros((5, 2)), np.zeros(3)])
def test_a_cloud_without_points_or_with_a_wrong_shape_is_an_input_error(cloud: np.ndarray) -> None:
    with pytest.raises(InputError):
        build_graph(cloud)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), st.integers(0, 10_000))
def test_any_cloud_gives_a_graph_whose_skinning_adds_up(count: int, seed: int) -> None:
    points = np.random.default_rng(seed).uniform(-0.1, 0.1, (count, 3))
    graph = build_graph(points, GraphSettings(min_cluster=1))
    skin = graph.skin(points)
    np.testing.assert_allclose(skin.weights.sum(axis=1), 1.0)
    assert skin.nodes.min() >= 0 and skin.nodes.max() < len(graph.nodes)
    assert (graph.edges.max(initial=0) < len(graph.nodes)) and skin.covered.all()
