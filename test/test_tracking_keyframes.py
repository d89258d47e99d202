# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The keyframe buffer: its bounds, what it evicts, and the overlap it predicts."""

from dataclasses import replace

import numpy as np

from box_room import CAMERA, look, render, sweep
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.evaluation.fpfh_matcher import FpfhCloud, FpfhMatcher
from lepard_ros.geometry.rigid_motion import invert, move
from lepard_ros.registration.rigid.estimate import RigidSettings
from lepard_ros.registration.types import NO_MATCHES, Registration, Status, Surface
from lepard_ros.tracking.compiled import Shape
from lepard_ros.tracking.follower import Follower
from lepard_ros.tracking.keyframe_map import KeyframeMap
from lepard_ros.tracking.keyframes import Keyframe, KeyframeBuffer, distinct_views, predicted_overlap, view_distances
from lepard_ros.tracking.path import SensorPath
from lepard_ros.tracking.pose_candidates import PoseCandidate, largest_group
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.relocaliser import Relocaliser
from lepard_ros.tracking.track import TrackerSettings
from lepard_ros.tracking.views import View, make_view


def tiny_view(points: int = 10) -> View:
    surface = Surface(np.zeros((points, 3)), np.zeros((points, 3)), 0.05)
    return View(Shape(surface), cloud=FpfhCloud(surface))


def seen_from(pose: np.ndarray) -> View:
    return make_view(depth_to_points(render(pose, None), CAMERA).reshape(-1, 3), 0.05)


def filled(poses: list[np.ndarray], max_count: int, max_bytes: float = 1e9) -> tuple[KeyframeBuffer, list[int]]:
    """A buffer that saw all poses in turn, and the ids that had to go."""
    buffer, gone = KeyframeBuffer(max_count, max_bytes), []
    for number, pose in enumerate(poses):
        buffer.add(Keyframe(number, float(number), pose, tiny_view(), nbytes=tiny_view().nbytes))
        while (victim := buffer.evictable()) is not None:
            buffer.remove(victim.id)
            gone.append(victim.id)
    return buffer, gone


def test_the_buffer_is_bounded_by_count_and_by_bytes() -> None:
    poses = [look(0.1 * i, 0, 0) for i in range(30)]
    assert len(filled(poses, 7)[0]) == 7
    by_bytes, _ = filled(poses, 1000, max_bytes=5 * tiny_view().nbytes)
    assert len(by_bytes) == 5 and by_bytes.nbytes <= 5 * tiny_view().nbytes


def test_one_keyframe_is_kept_even_if_it_is_too_large() -> None:
    buffer, _ = filled([np.eye(4)], 10, max_bytes=1)
    assert len(buffer) == 1


def test_eviction_keeps_every_place_covered() -> None:
    """A sensor that stands still for long between two far places: the crowd is thinned, the far places stay."""
    places = [look(0.0, 0, 0)] + [look(2.0 + 0.001 * i, 0, 0) for i in range(20)] + [look(4.0, 0, 0), look(4.0, 0, 90)]
    buffer, _ = filled(places, 5)
    kept = buffer.poses()
    uncovered = max(view_distances(kept, pose).min() for pose in places)
    assert uncovered < 0.05
    assert 0 in buffer and 22 in buffer


def test_ids_are_never_used_twice_while_the_newest_is_kept() -> None:
    buffer, gone = filled([look(0.1 * i, 0, 0) for i in range(9)], 4)
    assert buffer.next_id == 9 and len(gone) == 5


def test_predicted_overlap_agrees_with_brute_force() -> None:
    poses = sweep(6)
    clouds = [seen_from(pose) for pose in poses[::5]]
    frame = Keyframe(0, 0.0, poses[0], clouds[0])
    probes = move(poses[5], clouds[1].surface.points)
    local = move(invert(poses[0]), probes)
    brute = np.linalg.norm(local[:, None] - frame.surface.points[None], axis=2).min(axis=1)
    assert predicted_overlap(probes, frame, 0.0) == np.mean(brute < 0.1)


def test_keyframes_come_by_overlap() -> None:
    buffer = KeyframeBuffer(10, 1e9)
    yaws = [0.0, 30.0, 170.0]
    for number, yaw in enumerate(yaws):
        pose = look(0, 0, yaw)
        buffer.add(Keyframe(number, 0.0, pose, seen_from(pose)))
    seen = seen_from(look(0, 0, 27.0))
    rated = buffer.by_overlap(seen.surface, look(0, 0, 27.0))
    assert [frame.id for _, frame in rated][:2] == [1, 0]
    assert rated[0][0] > 0.85 and rated[0][0] > rated[1][0]


def test_the_path_follows_its_keyframes_and_survives_their_eviction() -> None:
    buffer = KeyframeBuffer(10, 1e9)
    first, second = (Keyframe(i, 0.0, look(float(i), 0, 20.0 * i), tiny_view()) for i in range(2))
    buffer.add(first)
    buffer.add(second)
    path = SensorPath(100)
    step = look(0.1, 0.2, 5)
    path.add(1.0, first.id, step)
    path.add(2.0, second.id, step)
    _, before = path.poses(buffer)
    path.rebase(second, first)
    buffer.remove(second.id)
    assert np.allclose(path.poses(buffer)[1], before, atol=1e-9)
    first.pose = look(5.0, 0, 0) @ first.pose
    assert np.allclose(path.poses(buffer)[1], look(5.0, 0, 0) @ before, atol=1e-9)


def test_the_path_is_bounded() -> None:
    path = SensorPath(3)
    for stamp in range(10):
        path.add(float(stamp), 0, np.eye(4))
    assert len(path) == 3


def test_an_edge_that_contradicts_the_map_waits_for_a_second_one() -> None:
    keyframes = KeyframeMap(TrackerSettings())
    for number in range(6):
        keyframes.keyframes.add(Keyframe(number, float(number), look(0.3 * number, 0, 0), tiny_view()))

    def edge(source: int, target: int, shift: float) -> Edge:
        """What puts the source `shift` metres to the side of where the map has it."""
        claimed = keyframes.keyframes[source].pose.copy()
        claimed[2, 3] += shift
        return Edge(source, target, invert(keyframes.keyframes[target].pose) @ claimed, np.eye(6), loop=True)

    fitting, wrong, first, second = edge(3, 0, 0.05), edge(4, 1, -0.6), edge(4, 0, 0.4), edge(5, 1, 0.42)
    assert keyframes.confirmed([fitting, wrong, first]) == [fitting]
    assert keyframes.confirmed([edge(3, 0, 0.41)]) == [], "what misled one view of keyframe 0 misleads the other, too"
    assert [(one.source, one.target) for one in keyframes.confirmed([second])] == [(4, 0), (3, 0), (5, 1)]
    assert keyframes.confirmed([]) == [], "what was taken does not come again"
    keyframes.keyframes.remove(1)
    assert keyframes.confirmed([edge(5, 0, -0.6)]) == [], "an edge to a keyframe that is gone bears out nothing"


def test_the_distance_walked_counts_turns_and_ends_at_the_newest_keyframe() -> None:
    buffer, _ = filled([look(0.0, 0, 0), look(1.0, 0, 0), look(1.0, 0, 60), look(1.0, 2.0, 60)], 10)
    assert np.allclose(list(buffer.distances_walked().values()), [4.0, 3.0, 2.0, 0.0])


def test_distinct_views_leave_out_what_shows_the_same() -> None:
    buffer, _ = filled([look(0.1 * i, 0, 0) for i in range(20)] + [look(0.0, 0, 90)], 30)
    assert [frame.id for frame in distinct_views(list(buffer), 0.5, 10)] == [0, 5, 10, 15, 20]
    assert [frame.id for frame in distinct_views(list(buffer), 0.5, 2)] == [0, 5]


def relocaliser_in(keyframes: KeyframeMap) -> Relocaliser:
    settings, rigid = TrackerSettings(), RigidSettings()
    return Relocaliser(FpfhMatcher(), keyframes, Follower(keyframes, settings, rigid), settings, rigid)


def seen_at(place: float, number: int, overlap: float = 0.5, quality: float = 5.0) -> PoseCandidate:
    frame = Keyframe(number, 0.0, look(place, 0, 0), tiny_view())
    none = np.zeros(0, dtype=bool)
    return PoseCandidate(frame, Registration(np.eye(4), Status.OK, NO_MATCHES, none, overlap=overlap, quality=quality))


def test_a_pose_is_not_confirmed_while_another_place_fits_almost_as_well() -> None:
    relocaliser = relocaliser_in(KeyframeMap(TrackerSettings()))
    here = [seen_at(0.0, 0, 0.8), seen_at(0.05, 1, 0.7)]
    assert relocaliser.confirm(tiny_view(), [*here, seen_at(13.0, 2, 0.75)], 0.0) is None
    assert relocaliser.confirm(tiny_view(), here[:1], 0.0) is None, "one look is never enough"
    assert relocaliser.confirm(tiny_view(), [*here, seen_at(13.0, 2, 0.4)], 0.0) is here[0]


def test_of_two_poses_that_disagree_the_more_likely_one_is_taken() -> None:
    poor, good = seen_at(0.0, 0, overlap=0.8, quality=-1.7), seen_at(0.3, 1, overlap=0.6, quality=-1.1)
    assert largest_group([poor, good]) == [good]


def follower_after(places: list[float], seconds: float = 0.1) -> Follower:
    """A follower in a map of one keyframe, after poses at these metres along x."""
    keyframes = KeyframeMap(TrackerSettings())
    keyframes.keyframes.add(Keyframe(0, 0.0, np.eye(4), tiny_view()))
    follower = Follower(keyframes, TrackerSettings(), RigidSettings())
    for number, place in enumerate(places):
        keyframes.path.add(10 + seconds * number, 0, look(place, 0, 0, 0))
    return follower


def test_an_error_of_one_pose_hardly_changes_the_predicted_velocity() -> None:
    follower = follower_after([0.0, 0.05, 0.1, 0.15, 0.23])  # 0.5 m/s, the last pose is 3 cm ahead
    (ahead, newest, last) = follower.predict(10.5)
    assert last[0, 3] == 0.23 and 0.05 < ahead[0, 3] - last[0, 3] < 0.062
    assert np.isclose(newest[0, 3], 0.31), "a second guess, in case it was no error but a sharp turn"


def test_the_velocity_of_a_slow_sensor_is_that_of_its_last_two_poses() -> None:
    assert np.isclose(follower_after([0.0, 0.5, 1.2], seconds=1.0).predict(13.0)[0][0, 3], 1.9)


def test_a_jump_is_no_velocity() -> None:
    """The sensor was found again somewhere else: what was before that says nothing about its motion."""
    follower = follower_after([0.0, 5.0, 5.05])
    assert np.isclose(follower.predict(10.3)[0][0, 3], 5.1)


def test_an_aligned_pose_is_verified_with_the_keyframes_around_it() -> None:
    """The prediction was 60 degrees off: the keyframe that was chosen there shows nothing of the cloud."""
    follower = follower_after([])
    for number, turn in enumerate((0.0, 60.0), 1):
        follower._map.keyframes.add(Keyframe(number, 0.0, look(0, 0, turn, 0), seen_from(look(0, 0, turn, 0))))
    view, first = seen_from(look(0, 0, 55, 0)), follower._map.keyframes[1]
    judges = list(follower._judging_keyframes(view, look(0, 0, 55, 0), first))
    assert [frame.id for frame in judges[:2]] == [1, 2]


def test_doubtful_motions_do_not_support_each_other_for_long() -> None:
    follower = follower_after([0.0, 0.05])
    keyframe = next(iter(follower._map.keyframes))

    def moved(quality: float) -> PoseCandidate:
        return PoseCandidate(
            keyframe, replace(seen_at(0.0, 0, quality=quality).registration, transform=look(0.1, 0, 0, 0))
        )

    for _ in range(2):
        assert follower.credible(moved(-1.5), 10.2), "tracking may go on for a while without much evidence"
        follower.accept(tiny_view(), moved(-1.5), 10.2, None)
    assert not follower.credible(moved(-1.5), 10.2), "but the last pose is not worth much by now"
    follower.accept(tiny_view(), moved(4.0), 10.2, None)
    assert follower.credible(moved(-1.5), 10.2)


def test_two_poses_from_one_keyframe_are_rivals_too() -> None:
    """They share the keyframe and differ in arrays, which == cannot compare."""
    relocaliser = relocaliser_in(KeyframeMap(TrackerSettings()))
    here = [seen_at(0.0, 0, 0.8), seen_at(0.05, 1, 0.7)]
    elsewhere = replace(here[0].registration, transform=look(13.0, 0, 0), overlap=0.75)
    rival = PoseCandidate(here[0].keyframe, elsewhere)
    assert relocaliser.confirm(tiny_view(), [*here, rival], 0.0) is None


def test_a_place_among_many_needs_more_evidence_unless_the_sensor_was_just_near_it() -> None:
    keyframes = KeyframeMap(TrackerSettings())
    for number in range(60):
        keyframes.keyframes.add(Keyframe(number, float(number), look(0.5 * number, 0, 0), tiny_view()))
    relocaliser, weak = relocaliser_in(keyframes), seen_at(10.0, 20, quality=2.0)
    assert not relocaliser._likely(weak, 100.0) and relocaliser._likely(seen_at(10.0, 20, quality=5.0), 100.0)
    keyframes.path.add(99.0, 19, np.eye(4))
    assert relocaliser._likely(weak, 100.0), "half a metre from the last pose, one second later"
    assert not relocaliser._likely(weak, 200.0), "by then the sensor may be anywhere"


def test_a_place_that_the_sensor_cannot_have_reached_needs_a_doubted_pose_or_time() -> None:
    """The back of a cabinet looked like its front: a search jumped there with much evidence, and tracking stayed."""
    keyframes = KeyframeMap(TrackerSettings())
    for number in range(3):
        keyframes.keyframes.add(Keyframe(number, float(number), look(0.5 * number, 0, 0), tiny_view()))
    relocaliser, far = relocaliser_in(keyframes), seen_at(20.0, 2, quality=8.0)
    keyframes.path.add(99.0, 0, np.eye(4))
    assert not relocaliser._likely(far, 100.0), "20 m in one second"
    assert relocaliser._likely(far, 100.0, doubted=True), "the network contradicted the last pose"
    assert relocaliser._likely(far, 103.0), "carried away with a covered lens"
