# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A warp is refused when it should be, and says which of its parts to believe."""

import time

import numpy as np
import pytest

from lepard_ros.matcher import Matcher
from lepard_ros.registration.deformable.acceptance import WarpEvidence, judge
from lepard_ros.registration.deformable.fit import NonrigidSettings
from lepard_ros.registration.deformable.graph import build_graph
from lepard_ros.registration.deformable.match_filter import weigh_matches
from lepard_ros.registration.deformable.nonrigid import WarpSettings, solve_nonrigid, warp_from_matches
from lepard_ros.registration.deformable.surface_contact import thinned_surface
from lepard_ros.registration.types import Matches, Status
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from test_graph import plane

EVERYTHING = NonrigidSettings(min_quality=float("-inf"))
GOOD = WarpEvidence(0.8, 700, 0.9, 0.9, 0.01, 0.0, 0.003, 0.003, 0.1, 0.0, 15.0, 0.8, 0.95, 0.95, 0.1)


def mirrored_matches(points: np.ndarray, count: int = 300) -> Matches:
    chosen = np.random.default_rng(0).permutation(len(points))[:count]
    image = points[chosen] * [-1, 1, 1] + np.array([0.6, 0.0, 0.0])
    return Matches(points[chosen], image, np.ones(count))


def test_a_mirrored_sheet_lies_inside_out_and_is_refused_as_that() -> None:
    sheet = plane(0.6, 0.4)
    graph, surface = build_graph(sheet), thinned_surface(sheet, 0.01)
    warp = solve_nonrigid(graph, surface, surface, mirrored_matches(sheet), EVERYTHING)
    assert warp.evidence is not None and warp.evidence.flip > 0.8 and warp.match_inliers.mean() > 0.9
    refused = solve_nonrigid(graph, surface, surface, mirrored_matches(sheet))
    assert refused.status is Status.INSIDE_OUT
    np.testing.assert_array_equal(refused(sheet), sheet)
    assert judge(GOOD, 0.5) is Status.OK and judge(GOOD._replace(flip=0.6), 0.5) is Status.INSIDE_OUT


def test_the_filter_drops_matches_that_turn_the_surface_inside_out() -> None:
    sheet = plane(0.6, 0.4)
    matches = mirrored_matches(sheet)
    towards_sensor = np.tile([0.0, 0.0, -1.0], (len(matches.source), 1))
    assert (weigh_matches(matches).confidence > 0).mean() > 0.9  # distances alone cannot tell
    assert (weigh_matches(matches, None, (towards_sensor, towards_sensor)).confidence > 0).mean() < 0.1


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, Status.OK),
        ({"supported": 0.999}, Status.OK),
        ({"supported": 0.25}, Status.TOO_FEW_INLIERS),
        ({"turning": 0.95}, Status.SCRAMBLED),
        ({"torn": 0.4}, Status.SCRAMBLED),
        ({"covered": 0.1, "overlap": 0.55}, Status.LOW_OVERLAP),
        ({"flip": 0.6}, Status.INSIDE_OUT),
    ],
)
def test_one_kind_of_evidence_against_a_warp_is_enough_and_named(change: dict[str, float], status: Status) -> None:
    fair = GOOD._replace(supported=0.7, covered=0.8)
    assert judge(fair._replace(**change), 1.0) is status


def uneven_sheet() -> np.ndarray:
    """A sheet with waves and two bumps, a metre wide, 1.5 m ahead: nowhere like its mirror image."""
    x, y = np.meshgrid(np.linspace(-0.5, 0.5, 140), np.linspace(-0.4, 0.4, 140))
    waves = 0.06 * np.sin(7 * x + 2 * y) + 0.05 * np.cos(9 * y - 3 * x**2)
    bumps = 0.08 * np.exp(-((x - 0.2) ** 2 + (y + 0.1) ** 2) / 0.02)
    bumps -= 0.06 * np.exp(-((x + 0.25) ** 2 + (y - 0.2) ** 2) / 0.01)
    return np.stack([x, y, 1.5 + waves + bumps], axis=-1).reshape(-1, 3)


def test_with_the_shipped_weights_a_bent_sheet_is_warped_and_its_mirror_image_is_inside_out() -> None:
    sheet = uneven_sheet()
    bent = sheet + np.stack([0 * sheet[:, 0] + 0.05, 0 * sheet[:, 0], 0.3 * sheet[:, 0] ** 2], axis=1)
    matcher = Matcher.from_pretrained("deformable")
    warp = warp_from_matches(sheet, bent, matcher.match_both_ways(sheet, bent))
    assert warp.ok and warp.evidence is not None and warp.evidence.flip < 0.02
    assert np.median(np.linalg.norm(warp(sheet) - bent, axis=1)) < 0.01
    image = bent * [-1, 1, 1]
    found = matcher.match_both_ways(sheet, image)
    assert not warp_from_matches(sheet, image, found).ok, "the filter, which knows the normals, leaves no matches"
    graph, source, target = build_graph(sheet), thinned_surface(sheet, 0.013), thinned_surface(image, 0.013)
    believed = solve_nonrigid(graph, source, target, found, EVERYTHING)
    assert believed.evidence is not None and believed.evidence.flip > 0.5
    assert solve_nonrigid(graph, source, target, found).status is Status.INSIDE_OUT


@pytest.fixture(scope="module")
def film() -> CreatureSequence:
    return creature_sequence(2, 12, width=240)


def clouds(film: CreatureSequence, frame: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """First cloud and a later one, organised; which pixels of the first are known, and where they are later."""
    truth = film.first_now[frame].reshape(-1, 3)
    first = film.cloud(0).reshape(-1, 3)
    known = np.isfinite(first).all(axis=1) & np.isfinite(truth).all(axis=1)
    return film.cloud(0), film.cloud(frame), known, truth


def test_the_matcher_warps_a_creature_to_where_it_truly_is(film: CreatureSequence) -> None:
    first, later, known, truth = clouds(film, 6)
    warp = Matcher.from_pretrained("deformable").warp(first, later)
    assert warp.ok and warp.support.shape == (len(warp.graph.nodes),)
    moved, covered = warp.apply(first.reshape(-1, 3)[known])
    error = np.linalg.norm(moved - truth[known], axis=1)[covered]
    assert covered.mean() > 0.8 and np.median(error) < 0.03
    assert np.median(error) < 0.5 * np.median(np.linalg.norm(first.reshape(-1, 3)[known] - truth[known], axis=1))
    assert sum(warp.seconds.values()) > 0 and set(warp.seconds) >= {"filter", "graph", "matches", "surface", "verdict"}


def planted(film: CreatureSequence, share: float) -> tuple[np.ndarray, np.ndarray, Matches, np.ndarray]:
    """True matches, of which the upper part of the body lands together, 40 cm from where it belongs."""
    first, later, known, truth = clouds(film, 6)
    source, target = first.reshape(-1, 3)[known].astype(float), truth[known].astype(float)
    chosen = np.random.default_rng(0).permutation(len(source))[:600]
    wrong = source[chosen, 1] < np.quantile(source[:, 1], share)
    place = target[chosen] + np.where(wrong[:, None], [0.0, 0.45, 0.0], 0.0)
    return first, later, Matches(source[chosen], place, np.ones(len(chosen))), wrong


def test_true_matches_are_accepted_and_a_planted_wrong_group_is_not_believed(film: CreatureSequence) -> None:
    first, later, matches, _ = planted(film, 0.0)
    right = warp_from_matches(first, later, matches)
    first, later, matches, _ = planted(film, 0.6)
    wrong = warp_from_matches(first, later, matches)
    assert right.ok
    assert wrong.status is Status.LOW_OVERLAP
    assert wrong.evidence is not None and wrong.evidence.inliers > 0.9, "its matches agree, only the surface does not"
    np.testing.assert_array_equal(wrong(first.reshape(-1, 3)[:9]), first.reshape(-1, 3)[:9])


def test_a_wrong_group_among_the_matches_of_the_shipped_weights_is_not_believed(film: CreatureSequence) -> None:
    first, later, _, _ = clouds(film, 6)
    matcher = Matcher.from_pretrained("deformable")
    found = matcher.match_both_ways(*(cloud.reshape(-1, 3) for cloud in (first, later)))
    assert warp_from_matches(first, later, found).ok
    source, target = np.array(found.source, dtype=float), np.array(found.target, dtype=float)
    upper = source[:, 1] < np.quantile(source[:, 1], 0.6)
    moved = Matches(source, target + np.where(upper[:, None], [0.0, 0.45, 0.0], 0.0), np.array(found.confidence))
    wrong = warp_from_matches(first, later, moved)
    assert not wrong.ok
    np.testing.assert_array_equal(wrong(first.reshape(-1, 3)[:9]), first.reshape(-1, 3)[:9])


def test_support_is_low_where_matches_disagree(film: CreatureSequence) -> None:
    first, later, matches, _ = planted(film, 0.0)
    high = matches.source[:, 1] < np.quantile(matches.source[:, 1], 0.25)
    scattered = np.random.default_rng(1).permutation(matches.target)
    matches = matches._replace(target=np.where(high[:, None], scattered, matches.target))
    warp = warp_from_matches(first, later, matches, WarpSettings(solver=EVERYTHING))
    spoiled = warp.graph.nodes[:, 1] < np.max(matches.source[high, 1]) - 0.1
    active = warp.graph.active
    assert np.median(warp.support[~spoiled & active]) > 0.7
    assert np.median(warp.support[spoiled & active]) < 0.3


def test_all_rounds_of_cuts_are_booked_as_matches() -> None:
    """The seconds of a stage add up: they were overwritten by the last round."""
    sheet = plane(0.5, 0.3)
    apart = sheet + np.where(sheet[:, :1] > 0.25, [0.3, 0.0, 0.0], 0.0)
    matches = Matches(sheet[::7], apart[::7], np.ones(len(sheet[::7])))
    began = time.perf_counter()
    warp = warp_from_matches(sheet, apart, matches, WarpSettings(solver=EVERYTHING))
    spent = time.perf_counter() - began
    assert warp.cut_edges > 0
    assert 0.8 * spent < sum(warp.seconds.values()) <= spent
