# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The deformable tracker on films whose every point is known; matches are the true ones with planted outliers."""

from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from scipy.spatial import cKDTree
from scipy.spatial.transform import Rotation

from lepard_ros.errors import InputError
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.registration.deformable.acceptance import WarpEvidence
from lepard_ros.registration.deformable.graph import GraphSettings, clusters
from lepard_ros.registration.deformable.warp import Warp
from lepard_ros.registration.types import Matches, Status
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker, is_plausible
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.matching_worker import LocalWorker, MatchingResult, MatchingTask
from lepard_ros.tracking.model import CanonicalModel, ModelSettings, warped_model
from lepard_ros.tracking.observations import StampedWarp, extrapolated
from lepard_ros.tracking.track import TrackingState
from test_graph import plane, two_limbs
from test_nonrigid import flat_trunk

STAGES = {"learn", "foreground", "predict", "match", "fuse"}


class Film:
    """A rolling sheet in front of a camera at the origin: shape(t) of fixed surface points (N, 3)."""

    def __init__(self, points: np.ndarray, bend_rate: float = 0.12) -> None:
        self.points, self.rate = points, bend_rate

    def shape(self, time: float) -> np.ndarray:
        curvature = self.rate * time + 1e-9
        angle = (self.points[:, 0] - 0.25) * curvature
        x = 0.25 + np.sin(angle) / curvature
        z = self.points[:, 2] + (1 - np.cos(angle)) / curvature
        return np.stack([x + 0.01 * time, self.points[:, 1], z], axis=1)


class TrueMatcher:
    """Stands in for the network: knows which surface point each live point is, and is wrong for one match in eight.

    The time of the live cloud is set by the test.
    """

    def __init__(self, film: Film, wrong: float = 0.125) -> None:
        self.film, self.time, self.wrong = film, 0.0, wrong
        self._rng = np.random.default_rng(0)
        self.silent = False

    def encode(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The coarse points of a cloud (n, 3), and the number of the surface point that each is."""
        distance, index = cKDTree(self.film.shape(self.time)).query(points)
        first = group_by_cell(points, 0.03).first
        first = first[distance[first] < 0.01]
        return points[first], index[first]

    def match_many(self, source, targets) -> list[Matches]:
        """Matches from the live cloud to past ones, 4 mm wrong in each coordinate, and some quite wrong."""
        return [self._match(source, target) for target in targets]

    def _match(self, source, target) -> Matches:
        rest, now = self.film.points, self.film.shape(self.time)
        seen = cKDTree(rest[source[1]]).query(rest[target[1]])[0] < 0.03
        kept = np.flatnonzero(seen & (not self.silent))
        place = now[target[1][kept]] + self._rng.normal(0, 0.004, (len(kept), 3))
        wrong = self._rng.random(len(kept)) < self.wrong
        place[wrong] = self._rng.permutation(now)[: wrong.sum()]
        return Matches(place, target[0][kept], np.full(len(kept), 0.8))


def everything(time: float) -> slice:
    """All points are seen."""
    return slice(None)


def track_film(
    film: Film, frames: int, seen=everything, matcher: TrueMatcher | None = None
) -> tuple[list[DeformableTrack], DeformableTracker]:
    matcher = matcher or TrueMatcher(film)
    tracker = DeformableTracker(matcher, DeformableSettings(keyframe_motion=0.04))
    tracks = []
    for time in range(frames):
        matcher.time = float(time)
        tracks.append(tracker.process(film.shape(time)[seen(time)], stamp=0.1 * time))
    return tracks, tracker


def begun(**settings: int) -> tuple[Film, TrueMatcher, DeformableTracker]:
    """A film of a bending sheet, and a tracker that has seen its first cloud."""
    film = Film(plane(0.5, 0.3))
    matcher = TrueMatcher(film)
    tracker = DeformableTracker(matcher, DeformableSettings(**settings))
    tracker.process(film.shape(0), 0.0)
    return film, matcher, tracker


def error(track: DeformableTrack, film: Film, time: float) -> float:
    """Mean distance in metres of the warped first cloud from the truth."""
    assert track.warp is not None
    moved, covered = track.warp.apply(film.points)
    assert covered.mean() > 0.95
    return float(np.linalg.norm(moved - film.shape(time), axis=1)[covered].mean())


def test_a_rolling_sheet_is_followed_and_its_model_stays_the_size_it_is() -> None:
    film = Film(plane(0.5, 0.3))
    tracks, tracker = track_film(film, frames=12)
    assert all(track.state is TrackingState.OK for track in tracks)
    assert max(error(track, film, time) for time, track in enumerate(tracks)) < 0.008
    assert not any(track.cut_edges for track in tracks)
    assert len(tracker.model.points) < 1.1 * len(tracks[0].model_points)
    assert sum(track.new_keyframe for track in tracks[1:]) >= 1
    assert tracks[-1].inliers.sum() > 30 and set(tracks[-1].seconds) == STAGES


def test_surface_that_comes_into_view_is_added_in_the_rest_shape() -> None:
    film = Film(plane(0.5, 0.3))
    tracks, tracker = track_film(film, 8, seen=lambda time: film.points[:, 0] < 0.25 + 0.03 * time)
    assert all(track.state is TrackingState.OK for track in tracks)
    assert len(tracker.model.points) > 1.5 * len(tracks[0].model_points)
    assert sum(track.change.nodes for track in tracks) > 12
    distance, _ = cKDTree(film.points).query(tracker.model.points)  # frame 0 is the rest shape, nearly flat
    assert np.quantile(distance, 0.95) < 0.02


def test_a_cloud_without_matches_is_refused_and_the_next_good_one_is_recognised() -> None:
    film, matcher, tracker = begun()
    matcher.time, matcher.silent = 1.0, True
    lost = tracker.process(film.shape(1), 5.0)  # too long after the last one to follow its surface
    assert lost.state is TrackingState.LOST and lost.warp is None and "match" in lost.reason and lost.method == ""
    matcher.time, matcher.silent = 2.0, False
    found = tracker.process(film.shape(2), 5.1)
    assert found.state is TrackingState.RELOCALISED and error(found, film, 2) < 0.008
    assert found.method == "lepard"


def test_a_small_motion_is_followed_without_matches_but_not_for_ever() -> None:
    film, matcher, tracker = begun(max_followed=3)
    matcher.silent = True
    followed = [tracker.process(film.shape(0.5 * k), 0.1 * k) for k in range(1, 4)]
    assert all(track.state is TrackingState.OK and track.method == "nicp" for track in followed)
    assert not any(len(track.matches.confidence) or track.new_keyframe for track in followed)
    distance, _ = cKDTree(film.shape(1.5)).query(followed[-1].warped_points)
    assert np.median(distance) < 0.005
    assert tracker.process(film.shape(2.0), 0.4).state is TrackingState.LOST


def test_a_jump_is_not_followed_without_matches() -> None:
    film, matcher, tracker = begun()
    matcher.silent = True
    assert tracker.process(film.shape(0) + np.array([0.3, 0.1, 0.2]), 0.1).state is TrackingState.LOST


def test_after_too_many_rejections_the_model_begins_anew() -> None:
    film, matcher, tracker = begun(max_rejections=2)
    matcher.silent = True
    states = [tracker.process(film.shape(0), 1.0 * k) for k in range(1, 4)]
    assert [track.reset for track in states] == [False, False, True]
    assert states[-1].state is TrackingState.OK and states[-1].model_stamp == pytest.approx(3.0)


def test_an_empty_or_misshapen_cloud_is_said_to_be_so() -> None:
    tracker = DeformableTracker(TrueMatcher(Film(plane(0.5, 0.3))))
    assert tracker.process(np.full((4, 5, 3), np.nan), 0.0).state is TrackingState.INITIALISING
    with pytest.raises(InputError):
        tracker.process(np.zeros((5, 2)), 0.0)
    with pytest.raises(InputError):
        DeformableSettings(max_keyframes=0)


def test_points_that_the_sensor_looks_through_go_after_a_few_clouds() -> None:
    wall = plane(0.6, 0.4) + np.array([-0.3, -0.2, 0.5])
    stray = plane(0.12, 0.12) + np.array([0.0, 0.0, 0.35])
    model = CanonicalModel(np.concatenate([wall, stray]), ModelSettings(min_misses=3))
    assert (model.points[:, 2] < 1.4).sum() > 100
    removed = [model.update(model.warp, wall).removed for _ in range(3)]
    assert removed[:2] == [0, 0] and removed[2] > 100
    assert not (model.points[:, 2] < 1.4).any()


class TurningDisc(Film):
    """A disc that turns about its axis by 36 degrees a second, ten clouds a second: its surface does not show that."""

    def __init__(self) -> None:
        points = plane(0.4, 0.4)
        super().__init__(points[np.linalg.norm(points[:, :2] - 0.2, axis=1) < 0.2])

    def shape(self, time: float) -> np.ndarray:
        angle, centre = np.radians(3.6 * time), np.array([0.2, 0.2, 0.0])
        turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        return (self.points - centre) @ turn.T + centre


def test_a_turn_that_the_surface_does_not_show_is_known_from_matched_clouds() -> None:
    """Followed clouds lay up to 4 cm off: each began where the last one lay, and nothing turned them."""
    film = TurningDisc()
    matcher = TrueMatcher(film, wrong=0.0)
    tracker = DeformableTracker(matcher, DeformableSettings(background_clouds=3))
    methods, errors = [], []
    for time in range(12):
        matcher.time = float(time)
        track = tracker.process(film.shape(time), 0.1 * time)
        methods.append(track.method)
        errors.append(error(track, film, time))
    assert methods[1:3] == ["lepard", "lepard"], "the motion is not known before two clouds are matched"
    assert methods.count("nicp") >= 5
    assert max(errors) < 0.012


class Trunk(Film):
    """A flat trunk that turns by 36 degrees and moves by 20 cm a second, and jumps by 12 cm at time 6."""

    def __init__(self) -> None:
        super().__init__(flat_trunk(0.0)[0])

    def shape(self, time: float) -> np.ndarray:
        return flat_trunk(3.6 * time)[0] + np.array([0.02 * time + 0.12 * (time >= 6), 0.0, 0.0])

    def seen(self, time: float) -> np.ndarray:
        """The side that the camera sees."""
        points, normals = self.shape(time), flat_trunk(3.6 * time)[1]
        return points[(points * normals).sum(axis=1) < 0]

    def error(self, track: DeformableTrack, time: float) -> float:
        """Median distance in metres of the first cloud, warped, from the truth."""
        assert track.warp is not None
        first = self.seen(0)
        known = cKDTree(self.points).query(first)[1]
        return float(np.median(np.linalg.norm(track.warp(first) - self.shape(time)[known], axis=1)))


class LateWorker(LocalWorker):
    """Matches nothing while it is held up, and each cloud at its own time."""

    def __init__(self, matcher: TrueMatcher) -> None:
        super().__init__(matcher)  # type: ignore[arg-type]
        self.go = Event()
        self.go.set()

    def match_and_update(self, task: MatchingTask) -> MatchingResult:
        assert self.go.wait(20)
        self.matcher.time = round(10 * task.live.stamp)  # type: ignore[attr-defined]
        return super().match_and_update(task)


def trunk_tracker() -> tuple[Trunk, LateWorker, DeformableTracker]:
    """A tracker that knows the trunk's velocity from three matched clouds; from now on matches are held up."""
    film = Trunk()
    worker = LateWorker(TrueMatcher(film))
    tracker = DeformableTracker(None, DeformableSettings(background_clouds=1, threaded=True), worker)
    assert all(tracker.process(film.seen(time), 0.1 * time).method == "lepard" for time in range(3))
    worker.go.clear()
    return film, worker, tracker


def test_a_refused_cloud_is_not_waited_for_and_tracking_goes_on_from_it() -> None:
    """Tracking waited for the matches of the refused cloud, 0.7 s, and the body was then too far away to be found."""
    film, worker, tracker = trunk_tracker()
    tracks = {3: tracker.process(film.seen(3), 0.3)}
    torn = film.seen(4)
    torn[(torn[:, 1] // 0.05) % 2 == 0, 2] += 0.1  # something else stands before and behind it
    refused = [tracker.process(torn, 0.1 * time) for time in (4, 5)]
    assert all(track.state is TrackingState.LOST and track.warp is None for track in refused)
    tracks |= {time: tracker.process(film.seen(time), 0.1 * time) for time in (6, 7)}
    assert [track.state.name for track in tracks.values()] == ["OK", "RELOCALISED", "OK"]
    assert all(track.method == "nicp" for track in tracks.values())
    assert not any("match" in track.seconds for track in [*tracks.values(), *refused])
    assert max(film.error(track, time) for time, track in tracks.items()) < 0.02
    worker.go.set()


def lost_trunk() -> tuple[Trunk, LateWorker, DeformableTracker]:
    """A tracker that has seen nothing for a second, and then one cloud, in which the trunk is being searched for."""
    film, worker, tracker = trunk_tracker()
    assert tracker.process(np.full((10, 3), np.nan), 0.3).state is TrackingState.LOST
    assert tracker.process(film.seen(14), 1.4).state is TrackingState.LOST
    return film, worker, tracker


def finish_search(tracker: DeformableTracker) -> None:
    """Wait until the result of the search is there, without delivering it."""
    tracker._background._jobs[0].result.result(20)


def test_a_lost_object_is_tracked_from_where_it_was_found_through_the_clouds_since() -> None:
    """Tracking waited for a search, 1 s; the trunk had turned by 36 degrees meanwhile, was lost again, and so on."""
    film, worker, tracker = lost_trunk()
    waiting = [tracker.process(film.seen(time), 0.1 * time) for time in range(15, 21)]
    assert all(track.state is TrackingState.LOST and track.warp is None for track in waiting)
    worker.go.set()
    finish_search(tracker)
    found = tracker.process(film.seen(21), 2.1)
    assert found.state is TrackingState.RELOCALISED and found.method == "lepard"
    assert film.error(found, 21) < 0.02
    after = tracker.process(film.seen(22), 2.2)
    assert after.state is TrackingState.OK and film.error(after, 22) < 0.02


def test_a_failed_search_is_followed_by_one_in_the_newest_cloud() -> None:
    film, worker, tracker = lost_trunk()
    worker.matcher.silent = True
    worker.go.set()
    finish_search(tracker)
    worker.matcher.silent = False
    failed = tracker.process(film.seen(24), 2.4)
    assert failed.state is TrackingState.LOST and failed.warp is None and "match" in failed.reason
    finish_search(tracker)
    found = tracker.process(film.seen(25), 2.5)
    assert found.state is TrackingState.RELOCALISED and film.error(found, 25) < 0.02


def test_matches_of_which_few_agree_do_not_correct_a_warp_that_fits() -> None:
    film, worker, tracker = trunk_tracker()
    assert tracker.process(film.seen(3), 0.3).method == "nicp"
    before, matched = tracker._warp, len(tracker._matched)
    worker.go.set()
    result = tracker._background._jobs.popleft().result.result()
    assert result.update is not None and result.warp.match_inliers.mean() > 0.6
    few = np.arange(len(result.warp.match_inliers)) < 0.3 * len(result.warp.match_inliers)
    aside = np.eye(4)
    aside[0, 3] = 0.05
    tracker._apply_past_match(result._replace(warp=replace(result.warp.moved_by(aside), match_inliers=few)))
    assert tracker._warp is before and len(tracker._matched) == matched
    tracker._apply_past_match(result)
    assert tracker._warp is not before and len(tracker._matched) == matched + 1


def test_matches_that_do_not_fit_their_cloud_do_not_correct_a_refused_warp() -> None:
    """The model grew by what they brought, and later clouds were accepted on it, 12 cm off."""
    film, worker, tracker = trunk_tracker()
    tracker.process(film.seen(3), 0.3)
    assert tracker._pending is not None
    tracker._pending, model = tracker._pending._replace(accepted=False), tracker.model
    worker.go.set()
    result = tracker._background._jobs.popleft().result.result(20)
    assert result.update is not None and is_plausible(result.warp)
    apart = result.warp.evidence._replace(covered=0.5, overlap=0.4)
    tracker._apply_past_match(result._replace(warp=replace(result.warp, evidence=apart)))
    assert tracker.model is model
    tracker._apply_past_match(result)
    assert tracker.model is not model


def test_every_node_continues_its_own_motion_while_the_camera_moves() -> None:
    graph = CanonicalModel(plane(0.4, 0.3), ModelSettings()).graph
    rng = np.random.default_rng(0)
    still, step = Warp.rest(graph, Status.OK), rng.normal(0, 0.01, graph.nodes.shape)
    turns = Rotation.from_rotvec(rng.normal(0, 0.1, graph.nodes.shape)).as_matrix()
    moved = Warp.from_motion(graph, turns, step)
    camera = np.eye(4)
    camera[:3, :3] = Rotation.from_rotvec([0.0, 0.2, 0.0]).as_matrix()
    camera[:3, 3] = [0.1, 0.0, 0.3]
    first, second = StampedWarp(0.0, still, np.eye(4)), StampedWarp(0.1, moved.moved_by(camera), camera)
    ahead = extrapolated(first, second, 0.2)
    expected = Warp.from_motion(graph, turns @ turns @ turns, 3 * step).moved_by(camera)
    np.testing.assert_allclose(ahead.moved_nodes, expected.moved_nodes, atol=1e-9)
    np.testing.assert_allclose(ahead.rotation_matrices, expected.rotation_matrices, atol=1e-9)


class TornFilm(Film):
    """A sheet that tears across its middle at time 3; the right half moves away."""

    def shape(self, time: float) -> np.ndarray:
        shape = super().shape(time)
        shape[self.points[:, 0] > 0.25, 0] += 0.04 * max(0.0, time - 3)
        return shape


def test_a_torn_sheet_is_cut_in_two_and_said_to_be() -> None:
    film = TornFilm(plane(0.5, 0.3), bend_rate=0.05)
    tracks, tracker = track_film(film, frames=10)
    assert all(track.state is TrackingState.OK for track in tracks)
    cut = [track.cut_edges for track in tracks]
    assert sum(cut[:6]) == 0 and sum(cut) > 10  # torn in three clouds before it is believed
    assert all(("cut" in track.reason) == (track.cut_edges > 0) for track in tracks)
    edges = tracker.model.graph.edges
    assert len(np.unique(clusters(edges, len(tracker.model.graph.nodes)))) == 2
    assert error(tracks[-1], film, 9) < 0.02  # half a node's spacing at the tear


class PatchyMatcher(TrueMatcher):
    """At time 4 the matches of a patch agree among each other, and are wrong."""

    def _match(self, source, target) -> Matches:
        matches = super()._match(source, target)
        place = self.film.points[cKDTree(self.film.shape(self.time)).query(matches.source)[1]]
        patch = (np.abs(place[:, :2] - [0.25, 0.15]) < 0.08).all(axis=1)
        if self.time == 4:
            matches.source[patch] += [0.0, 0.06, 0.05]
        return matches


def test_wrong_matches_of_one_cloud_cut_nothing() -> None:
    film = Film(plane(0.5, 0.3))
    tracks, tracker = track_film(film, 7, matcher=PatchyMatcher(film))
    assert not any(track.cut_edges for track in tracks)
    assert len(np.unique(clusters(tracker.model.graph.edges, len(tracker.model.graph.nodes)))) == 1
    assert error(tracks[-1], film, 6) < 0.008


def test_known_surface_under_an_inexact_warp_is_not_added_again() -> None:
    """The live cloud lies 2 cm beside where the warp puts the model, as after a turn; it was added as new surface."""
    points = plane(0.4, 0.3)
    model = CanonicalModel(points, ModelSettings())
    before = len(model.points)
    right = plane(0.4, 0.3) + np.array([0.02, 0.0, 0.0])
    normals = np.tile(model.normals[0], (len(right), 1))
    assert model._has_surface(points, np.tile(model.normals[0], (len(points), 1))).all()
    assert not model._has_surface(right, normals)[right[:, 0] > 0.418].any(), "beyond the rim there is none"
    assert not model._has_surface(points + np.array([0.0, 0.0, 0.01]), -normals).any(), (
        "the back of a thin sheet is another one"
    )
    warp = Warp(model.graph, model.warp.rotations, model.warp.translations, support=np.ones(len(model.graph.nodes)))
    for _ in range(3):
        model.update(warp, points)
    assert len(model.points) == before


def test_a_model_never_exceeds_its_limits() -> None:
    """The graph was extended beyond the limit by all the nodes that one cloud asked for."""

    def grown(settings: ModelSettings) -> CanonicalModel:
        model = CanonicalModel(plane(0.2, 0.3), settings)
        for _ in range(4):
            model.update(replace(model.warp, support=np.ones(len(model.graph.nodes))), plane(0.4, 0.3))
        return model

    free = grown(ModelSettings())
    points, nodes = len(free.points), len(free.graph.nodes)
    assert len(grown(ModelSettings(max_points=points - 50)).points) == points - 50
    assert len(grown(ModelSettings(max_nodes=nodes - 1)).graph.nodes) < nodes


def contact(covered: float, overlap: float, residual: float, aligned: float = 0.9) -> Warp:
    """A warp with such evidence."""
    rest = CanonicalModel(plane(0.3, 0.3), ModelSettings()).warp
    evidence = WarpEvidence(*np.zeros(len(WarpEvidence._fields)))._replace(
        covered=covered, overlap=overlap, residual=residual, seen_aligned=aligned
    )
    return replace(rest, evidence=evidence)


def test_new_surface_does_not_end_tracking_but_a_poor_fit_does() -> None:
    assert is_plausible(contact(0.58, 0.73, 0.0055)), "much new surface, and the rest lies on the cloud"
    assert is_plausible(contact(0.8, 0.5, 0.007))
    assert not is_plausible(contact(0.6, 0.61, 0.0071)), "this one was 13 cm off (seed 0, a match of 0.75 s)"
    assert not is_plausible(contact(0.5, 0.6, 0.004))
    assert not is_plausible(contact(0.9, 0.9, 0.004, aligned=0.5))


def test_cut_edges_stay_cut_when_the_graph_grows() -> None:
    points, second = two_limbs(gap=0.012)  # near enough to be joined
    model = CanonicalModel(points, ModelSettings(GraphSettings(coverage=0.025), min_torn=1))
    side = model.graph.nodes[:, 2] > 1.006
    across = side[model.graph.edges[:, 0]] != side[model.graph.edges[:, 1]]
    assert across.any()
    cut = model.graph.without_edges(across)
    away = np.array([0.0, 0.0, 0.1])
    warp = Warp(cut, model.warp.rotations, side[:, None] * away, cut_edges=int(across.sum()))
    wider = np.concatenate([points + second[:, None] * away, plane(0.03, 0.15) + np.array([0.4, 0.0, 0.0])])
    change = model.update(warp, wider)
    assert change.nodes > 0
    old = len(cut.nodes)
    again = model.graph.edges[(model.graph.edges < old).all(axis=1)]
    assert (side[again[:, 0]] == side[again[:, 1]]).all()
    assert len(np.unique(clusters(cut.edges, old))) >= 2


def test_an_imprint_finds_live_points_in_the_rest_shape() -> None:
    points = plane(0.4, 0.3)
    model = CanonicalModel(points, ModelSettings())
    shift = np.tile([0.3, 0.0, 0.2], (len(model.graph.nodes), 1))
    model.warp = Warp(model.graph, model.warp.rotations, shift)
    rest, near = warped_model(model.points, model.warp).to_rest(
        np.array([[0.5, 0.1, 1.21], [3.0, 0.0, 0.0]]), reach=0.05
    )
    assert near.tolist() == [True, False]
    np.testing.assert_allclose(rest[0], [0.2, 0.1, 1.01], atol=1e-9)
