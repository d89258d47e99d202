# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A body that turns in a furnished room, followed with the shipped weights."""

import numpy as np
import pytest

from lepard_ros.matcher import Matcher
from lepard_ros.synthesis.creature_sequences import CreatureSequence, creature_sequence
from lepard_ros.tracking.deformable import DeformableTrack, DeformableTracker

FRAMES, TURN = 10, 67.5  # as fast as a full turn in 4.8 s at 10 Hz


@pytest.fixture(scope="module")
def film() -> CreatureSequence:
    return creature_sequence(0, FRAMES, width=320, turn=TURN, furnished=True)


@pytest.fixture(scope="module")
def tracker() -> DeformableTracker:
    return DeformableTracker(Matcher.from_pretrained("deformable"))


@pytest.fixture(scope="module")
def tracks(film: CreatureSequence, tracker: DeformableTracker) -> list[DeformableTrack]:
    return [tracker.process(film.cloud(frame), float(film.stamps[frame])) for frame in range(FRAMES)]


def visible_error(track: DeformableTrack, film: CreatureSequence, frame: int) -> float:
    """Median distance in metres between where the warp puts what a frame sees, and where that is."""
    assert track.warp is not None
    rest, live = film.at_first[frame].reshape(-1, 3), film.cloud(frame).reshape(-1, 3)
    known = np.isfinite(rest).all(axis=1) & np.isfinite(live).all(axis=1)
    moved, covered = track.warp.apply(rest[known].astype(float))
    return float(np.median(np.linalg.norm(moved - live[known], axis=1)[covered]))


def test_a_turning_body_is_followed_within_five_centimetres(
    film: CreatureSequence, tracks: list[DeformableTrack]
) -> None:
    accepted = [(frame, track) for frame, track in enumerate(tracks) if track.warp is not None]
    assert len(accepted) >= 0.8 * FRAMES
    assert max(visible_error(track, film, frame) for frame, track in accepted) < 0.05


def test_the_room_is_left_out_and_the_model_stays_one(
    tracks: list[DeformableTrack], tracker: DeformableTracker, film: CreatureSequence
) -> None:
    assert [track.reset for track in tracks] == [True] + [False] * (FRAMES - 1)
    assert min(track.background for track in tracks) > 0.7 * np.isfinite(film.cloud(0)).all(axis=-1).sum()
    assert tracker.model is not None and len(tracker.model.points) < 2 * len(tracks[0].model_points)
    assert sum(track.new_keyframe for track in tracks) >= 2
