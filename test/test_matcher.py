# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The public API, with a small untrained network: inputs of every kind, never a crash, never a silent identity."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

from lepard_ros import EncodedCloud, Matcher, Status
from lepard_ros.errors import InputError
from lepard_ros.matcher import ALONE_ODDS, FINE_POINTS, MatcherSettings
from lepard_ros.network.config import SMALL_RIGID, LepardConfig
from lepard_ros.network.lepard import Lepard
from lepard_ros.network.weights import Card
from lepard_ros.registration.rigid.acceptance import AcceptanceSettings
from lepard_ros.registration.rigid.estimate import RigidSettings

TINY = LepardConfig.from_dict({**SMALL_RIGID.to_dict(), "width": 16, "feature_dim": 48, "confidence_threshold": 0.0})


@pytest.fixture(scope="module")
def matcher() -> Matcher:
    torch.manual_seed(0)
    return Matcher(Lepard(TINY), Card("tiny", TINY, sha256="0" * 64), device="cpu")


def room(seed: int = 0, count: int = 20_000) -> np.ndarray:
    """A corner of a room with a few boxes, as a depth camera at the origin might see it."""
    rng = np.random.default_rng(seed)
    faces = []
    for axis, place in ((0, 1.5), (1, 1.2), (2, 3.0)):
        face = rng.uniform(-1.2, 1.5, (count // 4, 3)) + np.array([0, 0, 1.5])
        face[:, axis] = place
        faces.append(face)
    for centre in rng.uniform(-0.8, 0.8, (4, 3)) + np.array([0, 0, 2.2]):
        box = rng.uniform(-0.25, 0.25, (count // 16, 3))
        box[np.arange(len(box)), rng.integers(0, 3, len(box))] = -0.25
        faces.append(centre + box)
    return np.concatenate(faces)


def test_encode_and_match_give_arrays_of_the_promised_shapes(matcher: Matcher) -> None:
    cloud = matcher.encode(room())
    matches = matcher.match(cloud, room(1))
    assert isinstance(cloud, EncodedCloud)
    assert matches.source.shape == matches.target.shape == (len(matches.confidence), 3)
    assert (np.diff(matches.confidence) <= 0).all()
    assert ((matches.confidence >= 0) & (matches.confidence <= 1)).all()


def test_numpy_and_torch_of_any_float_type_are_the_same(matcher: Matcher) -> None:
    points = room().astype(np.float32)
    kinds = [points, points.astype(np.float64), torch.from_numpy(points)]
    features = [matcher.encode(kind).features for kind in kinds]
    torch.testing.assert_close(features[0], features[1])
    torch.testing.assert_close(features[0], features[2])


def test_encoded_or_raw_gives_the_same_matches(matcher: Matcher) -> None:
    source, target = room(0), room(1)
    raw, encoded = matcher.match(source, target), matcher.match(matcher.encode(source), matcher.encode(target))
    np.testing.assert_array_equal(raw.source, encoded.source)
    np.testing.assert_array_equal(raw.confidence, encoded.confidence)


def test_a_motion_that_nothing_else_confirms_needs_more_evidence(matcher: Matcher) -> None:
    clouds = [matcher.encode(room(0)), matcher.encode(room(0))]
    settings = MatcherSettings(fine_points=FINE_POINTS)
    quality = Matcher(matcher.network, matcher.card, settings=settings).register_many(clouds[0], clouds[1:])[0].quality
    rule = AcceptanceSettings(min_quality=quality - ALONE_ODDS / 2)
    narrow = replace(settings, rigid=RigidSettings(acceptance=rule))
    judge = Matcher(matcher.network, matcher.card, settings=narrow)
    assert judge.register_many(clouds[0], clouds[1:])[0].ok
    alone = judge.register(*clouds, effort=0)
    assert not alone.ok and alone.guess is not None and alone.quality == pytest.approx(quality)


def test_matches_back_are_in_the_frames_of_the_clouds_although_raw_clouds_are_turned(matcher: Matcher) -> None:
    source, target = room(0), room(1)
    back = matcher.match_back(source, target)
    for cloud, ends in ((source, back.source), (target, back.target)):
        assert len(ends) > 100
        assert cKDTree(cloud).query(ends)[0].max() < 2 * TINY.grid  # barycentres of cells of the turned cloud
    encoded = matcher.encode(source), matcher.encode(target)
    same_grid = matcher.match(*encoded[::-1])
    np.testing.assert_array_equal(matcher.match_back(*encoded).source, same_grid.target)
    both = matcher.match_both_ways(source, target)
    forth = matcher.match(source, target)
    np.testing.assert_array_equal(both.source, np.concatenate([forth.source, back.source]))


def test_all_points_of_a_rigid_pair_look_for_their_partner(matcher: Matcher) -> None:
    """Against a table of all scores: who chooses whom, and how sure, less what the partner's best friend is ahead."""
    source, target = matcher.encode(room(0)), matcher.encode(room(1))
    assert len(source.surface.points) > FINE_POINTS and matcher.network.fine_matching is not None
    assert source.fine_features is not None and target.fine_features is not None
    matches = matcher.match(source, target)
    scores = (source.fine_features * matcher.network.fine_matching.scale @ target.fine_features.T).detach()
    best, partner = scores.max(1)
    sure = (best - scores.amax(0)[partner]).exp() / (scores - best[:, None]).exp().sum(1)
    order = sure.argsort(descending=True)[: len(matches.confidence)]
    np.testing.assert_allclose(matches.confidence, sure[order].numpy(), rtol=1e-3)
    apart = source.surface.points[order[:50].numpy()] + source.offset - matches.source[:50]
    assert (np.abs(apart).max(1) < 1e-6).mean() > 0.9  # near ties may change places


def test_many_at_once_equal_one_by_one() -> None:
    torch.manual_seed(0)
    settings = MatcherSettings(fine_points=FINE_POINTS)  # alone, all points of a pair would look for their partner
    matcher = Matcher(Lepard(TINY), Card("tiny", TINY, sha256="0" * 64), device="cpu", settings=settings)
    source = matcher.encode(room(0))
    targets = [matcher.encode(room(k, 8000 + 4000 * k)) for k in range(1, 4)]
    for together, target in zip(matcher.match_many(source, targets), targets, strict=True):
        alone = matcher.match(source, target)
        assert abs(len(together.confidence) - len(alone.confidence)) <= 2
        np.testing.assert_allclose(together.confidence[:20], alone.confidence[:20], rtol=1e-3, atol=1e-5)


def test_only_the_best_of_many_targets_are_registered(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source itself is one of the targets; an untrained network ranks too badly to choose it."""
    source = matcher.encode(room(0))
    targets = [matcher.encode(room(2, 6000)), source, matcher.encode(room(1, 6000))]
    scores = iter([1.0, 9.0, 5.0])
    monkeypatch.setattr("lepard_ros.matcher.agreement", lambda *_: next(scores, 0.0))
    found = matcher.register_best(source, targets, 2)
    assert list(found) == [1, 2] and found[1].ok
    assert found[1].quality > 0 and not found[2].quality > 0
    assert matcher.register_best(source, [], 2) == {}


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_points_match_nothing(matcher: Matcher, count: int) -> None:
    points = np.zeros((count, 3))
    assert len(matcher.match(points, room()).confidence) == 0
    result = matcher.register(points, room())
    assert result.transform is None
    assert result.status is Status.TOO_FEW_POINTS


@pytest.mark.parametrize(
    "points",
    [
        np.random.default_rng(0).normal(size=(5, 3)),
        np.linspace(0, 1, 50)[:, None] * np.array([[1.0, 2.0, 3.0]]),
        np.ones((1000, 3)),
        np.array([[np.nan, 0, 0], [np.inf, 1, 1], [0, 0, 1.0]]),
    ],
    ids=["five points", "a line", "one point many times", "hardly anything finite"],
)
def test_poor_clouds_are_rejected_not_registered(matcher: Matcher, points: np.ndarray) -> None:
    for pair in ((points, room()), (room(), points), (points, points)):
        result = matcher.register(*pair)
        assert result.transform is None
        assert result.status is not Status.OK


def test_rows_that_are_not_finite_are_left_out(matcher: Matcher) -> None:
    points = room()
    spoilt = np.concatenate([points, np.full((100, 3), np.nan)])
    torch.testing.assert_close(matcher.encode(points).features, matcher.encode(spoilt).features)


def test_far_from_the_origin_is_as_good_as_near(matcher: Matcher) -> None:
    points, far = room(), np.array([1e6, -2e6, 5e5])
    near = matcher.encode(points)
    away = matcher.encode(points + far, viewpoint=far)
    assert len(near) == pytest.approx(len(away), rel=0.1)
    distance, _ = cKDTree(near.coarse_points).query(away.coarse_points - far)
    assert distance.max() < 0.2
    assert np.median(distance) < 0.1


def test_two_million_points_are_handled(matcher: Matcher) -> None:
    rng = np.random.default_rng(0)
    points = (rng.random((2_000_000, 3)) * [6, 6, 0.01] + [0, 0, 2]).astype(np.float32)
    assert len(matcher.encode(points)) > 100


def test_a_huge_extent_keeps_what_is_near_the_sensor(matcher: Matcher) -> None:
    points = np.random.default_rng(0).uniform(-200, 200, (100_000, 3))
    cloud = matcher.encode(points)
    assert len(cloud.surface.points) <= 40_000


@pytest.mark.parametrize("bad", [np.zeros((5, 2)), np.zeros((2, 2, 3)), np.zeros(3)])
def test_wrong_shapes_are_refused(matcher: Matcher, bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"\(N, 3\)"):
        matcher.encode(bad)


@pytest.mark.parametrize("bad", [np.zeros((5, 3), dtype=int), [[0.0, 0, 0]], "cloud"])
def test_wrong_types_are_refused(matcher: Matcher, bad: object) -> None:
    with pytest.raises(TypeError, match="cloud"):
        matcher.encode(bad)  # type: ignore[arg-type]


def test_viewpoints_must_be_three_numbers(matcher: Matcher) -> None:
    with pytest.raises(InputError, match="viewpoint"):
        matcher.encode(room(), viewpoint=np.array([0.0, np.nan, 0.0]))


@pytest.mark.parametrize("device", ["tpu", "cuda:97", "meta"])
def test_devices_that_are_not_there_are_refused(device: str) -> None:
    with pytest.raises(InputError, match="device"):
        Matcher(Lepard(TINY), Card("tiny", TINY), device=device)


def test_clouds_of_other_weights_are_refused(matcher: Matcher) -> None:
    other = Matcher(Lepard(TINY), Card("other", TINY, sha256="1" * 64), device="cpu")
    with pytest.raises(InputError, match="other weights"):
        matcher.match(other.encode(room()), room())


def test_encoded_clouds_survive_as_arrays(matcher: Matcher) -> None:
    cloud = matcher.encode(room())
    again = EncodedCloud.from_arrays(cloud.to_arrays())
    before, after = matcher.match(cloud, room(1)), matcher.match(again, room(1))
    np.testing.assert_array_equal(before.confidence, after.confidence)
    assert again.weights_id == matcher.weights_id
    with pytest.raises(InputError, match="encode"):
        EncodedCloud.from_arrays({"points": np.zeros((2, 3))})


def test_paper_network_without_fine_matching_matches_coarse_points() -> None:
    config = LepardConfig(
        grid=0.05, width=16, feature_dim=48, neighbour_limits=(20, 20, 20, 20), confidence_threshold=0.0
    )
    matcher = Matcher(Lepard(config), Card("paper", config, sha256="2" * 64), device="cpu")
    cloud = matcher.encode(room(count=4000))
    matches = matcher.match(cloud, cloud)
    assert len(matches.confidence) > 0
    coarse = {tuple(np.round(p, 4)) for p in cloud.coarse_points}
    assert {tuple(np.round(p, 4)) for p in matches.source} <= coarse


def test_mutual_holds_for_fine_matches_too() -> None:
    """No point of the target is given twice, and what is left are the matches without it that are mutual."""
    found = {}
    for mutual in (False, True):
        torch.manual_seed(0)
        config = replace(TINY, mutual=mutual)
        matcher = Matcher(Lepard(config), Card("tiny", config, sha256="3" * 64), device="cpu")
        found[mutual] = matcher.match(room(0), room(1))
    targets = [tuple(point) for point in found[True].target]
    assert 0 < len(targets) < len(found[False].target)
    assert len(set(targets)) == len(targets)
    assert {tuple(p) for p in found[True].source} <= {tuple(p) for p in found[False].source}


def test_coarse_matches_are_in_metres_whatever_the_grid() -> None:
    config = LepardConfig(
        grid=0.05, width=16, feature_dim=48, neighbour_limits=(20, 20, 20, 20), confidence_threshold=0.0
    )
    matcher = Matcher(
        Lepard(config), Card("paper", config, sha256="2" * 64), device="cpu", settings=MatcherSettings(grid=0.1)
    )
    cloud = matcher.encode(room(count=4000))
    matches = matcher.match(cloud, cloud)
    assert len(matches.confidence) > 0
    for found in (matches.source, matches.target):
        distance, _ = cKDTree(cloud.coarse_points).query(found)
        assert distance.max() < 1e-5


def test_warming_up_leaves_the_matches_as_they_were(matcher: Matcher, monkeypatch: pytest.MonkeyPatch) -> None:
    before = matcher.match(room(0), room(1))
    matched: list[int] = []
    whole = matcher._match_pair
    monkeypatch.setattr(matcher, "_match_pair", lambda *given: matched.append(len(given[0])) or whole(*given))
    matcher.warm_up()
    assert matched and matched[0] > 0, "the whole path ran, on a cloud that has coarse points"
    after = matcher.match(room(0), room(1))
    np.testing.assert_array_equal(before.source, after.source)
    np.testing.assert_array_equal(before.confidence, after.confidence)
