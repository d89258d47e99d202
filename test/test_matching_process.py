# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The process that matches beside tracking: its answers, and its end, however the one that started it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from box_room import CAMERA, render, sweep
from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.errors import InputError
from lepard_ros.matcher import Matcher, MatcherSettings
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from lepard_ros.tracking.deformable import DeformableTracker
from lepard_ros.tracking.deformable_settings import DeformableSettings
from lepard_ros.tracking.matching_process import MatchingProcess, Weights
from lepard_ros.tracking.remote_matcher import RemoteMatcher, align_keyframes
from lepard_ros.tracking.rigid import RigidTracker

pytestmark = pytest.mark.slow
SHIPPED = Weights("deformable", "cpu", MatcherSettings(), 1)


@pytest.fixture(scope="module")
def process() -> Iterator[MatchingProcess]:
    started = MatchingProcess(SHIPPED)
    yield started
    started.close()


@pytest.fixture(scope="module")
def film() -> CreatureSequence:
    return creature_sequence(0, 8, width=160)


def runs(pid: int) -> bool:
    """Whether a process runs; one that only waits to be asked for its end does not.

    A killed one may still have threads that end: nobody can ask for its end before they are gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return False
    state, threads = fields[0], int(fields[17])
    return state != "Z" or threads > 1


def ends(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


def test_another_process_finds_the_same_warps(process: MatchingProcess, film: CreatureSequence) -> None:
    settings = DeformableSettings(background_clouds=2)  # not threaded: a live sensor does not wait for its matches
    alone = DeformableTracker(Matcher.from_pretrained("deformable"), settings)
    beside = DeformableTracker(None, settings, process)
    for frame in range(6):
        own, other = (one.process(film.cloud(frame), float(film.stamps[frame])) for one in (alone, beside))
        assert own.method == other.method and own.warp is not None and other.warp is not None
        np.testing.assert_allclose(own.warp.translations, other.warp.translations, atol=1e-6)
    assert other.method == "lepard" and len(other.matches.confidence) > 100


def test_another_process_gives_the_same_poses_and_loops() -> None:
    remote, local = RemoteMatcher.start(SHIPPED._replace(name="rigid")), Matcher.from_pretrained("rigid", device="cpu")
    trackers = [RigidTracker(matcher) for matcher in (local, remote)]
    poses = [*sweep(12), *sweep(3)]  # then back at the start: the pose is searched for
    for number, pose in enumerate(poses):
        cloud, stamp = depth_to_points(render(pose, number), CAMERA), 0.1 * number + 5.0 * (number >= 12)
        own, other = (tracker.process(cloud, stamp) for tracker in trackers)
        assert own.state is other.state and own.reason == other.reason
        if own.pose is not None:
            np.testing.assert_array_equal(own.pose, other.pose)
    for tracker in trackers:
        tracker.finish()
    for own_edge, other_edge in zip(*(tracker.edges() for tracker in trackers), strict=True):
        np.testing.assert_array_equal(own_edge.transform, other_edge.transform)
    assert len(trackers[0].keyframes) > 2
    first, second = (trackers[0].keyframes[number] for number in (0, 1))
    guess = (np.linalg.inv(first.pose) @ second.pose)[None]
    rule = local.settings.rigid
    there, here = (align_keyframes(one, second.surface, first.surface, guess, rule) for one in (remote, local))
    assert there.ok and here.transform is not None
    np.testing.assert_array_equal(there.transform, here.transform)
    pid = remote.process_id
    assert pid is not None and runs(pid)
    remote.close()
    assert ends(pid)


def test_a_rigid_tracker_outlives_its_matching_process() -> None:
    remote = RemoteMatcher.start(SHIPPED._replace(name="rigid"))
    tracker = RigidTracker(remote)
    clouds = [depth_to_points(render(pose, number), CAMERA) for number, pose in enumerate(sweep(8))]
    for number, cloud in enumerate(clouds):
        assert tracker.process(cloud, 0.1 * number).pose is not None
    tracker.finish()
    first = remote.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    assert ends(first)
    tracker.relocalise()
    found = tracker.process(clouds[0], 60.0)
    assert found.pose is not None and remote.process_id != first
    remote.close()


def test_a_process_that_was_killed_is_said_to_be_so_and_another_takes_its_place(film: CreatureSequence) -> None:
    cloud = film.cloud(0)[np.isfinite(film.cloud(0)).all(axis=-1)]
    process = MatchingProcess(SHIPPED)  # not the shared one, which a tracker's thread may still ask
    first = process.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)  # it shall not answer before it is killed
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {first}"])
    with pytest.raises(InputError, match="has ended"):
        process.encode(cloud)
    killer.wait(10)
    arrays = process.encode(cloud)
    assert process.pid != first and len(arrays["points"]) > 50
    process.close()


def test_it_ends_when_it_is_closed_and_when_its_node_is_killed() -> None:
    program = (
        "from lepard_ros.tracking.matching_process import MatchingProcess, Weights\n"
        "from lepard_ros.matcher import MatcherSettings\n"
        "import time\n"
        "one, two = (MatchingProcess(Weights('deformable', 'cpu', MatcherSettings(), 1)) for _ in range(2))\n"
        "print(one.pid, two.pid, flush=True)\n"
        "one.close()\n"
        "print('closed', flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        closed, left = map(int, node.stdout.readline().split())
        assert node.stdout.readline() == "closed\n"
        assert not runs(closed) and runs(left)
        node.kill()
        assert ends(left)


def test_weights_that_do_not_exist_are_named() -> None:
    with pytest.raises(InputError, match="nonesuch"):
        MatchingProcess(SHIPPED._replace(name="nonesuch"))
