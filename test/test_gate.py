# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The regression gate: shipped weights must not get worse than recorded, and the gate itself must be able to fail."""

from dataclasses import replace

import numpy as np
import pytest

from lepard_ros.evaluation.gate import (
    PAIRS_PER_ROOM,
    RECORDED,
    UNRELATED_PAIRS,
    GateScore,
    gate_pairs,
    gate_rooms,
    run_gate,
)
from lepard_ros.matcher import Matcher
from lepard_ros.network.weights import SHIPPED, Card
from lepard_ros.registration.types import NO_MATCHES, Registration, Status
from lepard_ros.synthesis.shards import Shard

GOOD = GateScore(recall=0.8, false_accepts=0.0, rotation=0.5, translation=0.02)


@pytest.fixture(scope="module")
def rooms() -> list[Shard]:
    return gate_rooms()


class Knowing:
    """Answers with the true motion of every pair, shifted if wanted."""

    def __init__(self, rooms: list[Shard], accept_unrelated: bool = False, shift: float = 0.0) -> None:
        clouds, pairs = gate_pairs(rooms)
        self.truth = {(pair.source, pair.target): pair.truth for pair in pairs}
        self.places = {cloud.tobytes(): place for place, cloud in enumerate(clouds)}
        self.accept_unrelated, self.shift = accept_unrelated, shift

    def encode(self, points: np.ndarray) -> int:
        return self.places[points.tobytes()]

    def register(self, source: int, target: int) -> Registration:
        motion = self.truth[(source, target)]
        if motion is None:
            motion = np.eye(4) if self.accept_unrelated else None
        if motion is None:
            return Registration(None, Status.LOW_OVERLAP, NO_MATCHES, np.zeros(0, dtype=bool))
        moved = motion.copy()
        moved[0, 3] += self.shift
        return Registration(moved, Status.OK, NO_MATCHES, np.zeros(0, dtype=bool))


def test_the_pairs_overlap_as_they_say(rooms: list[Shard]) -> None:
    from lepard_ros.geometry.overlap import overlap_ratio

    clouds, pairs = gate_pairs(rooms)
    assert len(pairs) == len(rooms) * PAIRS_PER_ROOM + UNRELATED_PAIRS
    related = [pair for pair in pairs if pair.truth is not None]
    shares = [overlap_ratio(clouds[p.source][::10], clouds[p.target], p.truth, 0.05) for p in related[::5]]
    assert min(shares) > 0.08
    assert max(shares) > 0.5


def test_the_rooms_are_the_same_every_time(rooms: list[Shard]) -> None:
    from lepard_ros.evaluation.gate import ROOM_SEEDS
    from lepard_ros.synthesis.meshes import load_library
    from lepard_ros.synthesis.shards import make_room

    np.testing.assert_array_equal(make_room(ROOM_SEEDS[0], load_library(None)).points, rooms[0].points)


def test_the_truth_scores_best_and_blunders_score_worse(rooms: list[Shard]) -> None:
    best = run_gate(Knowing(rooms), rooms)  # type: ignore[arg-type]
    assert (best.recall, best.false_accepts) == (1.0, 0.0)
    assert best.rotation < 1e-5
    assert best.failures(GOOD) == []
    boasting = run_gate(Knowing(rooms, accept_unrelated=True), rooms)  # type: ignore[arg-type]
    assert boasting.false_accepts == 1.0
    off = run_gate(Knowing(rooms, shift=0.2), rooms)  # type: ignore[arg-type]
    assert off.recall == 0.0
    assert len(off.failures(GOOD)) == 3  # the errors of no registered pair are unknown, which is worse too


def test_the_gate_fails_on_each_thing_that_gets_worse() -> None:
    assert GOOD.failures(GOOD) == []
    for change in ({"recall": 0.7}, {"false_accepts": 0.2}, {"rotation": 0.7}, {"translation": 0.03}):
        (sentence,) = replace(GOOD, **change).failures(GOOD)
        assert next(iter(change)).split("_")[0] in sentence
    assert replace(GOOD, recall=GOOD.recall - 0.02).failures(GOOD) == []


def shipped_rigid() -> list[str]:
    cards = [Card.from_json(path.read_text(), path.name) for path in sorted(SHIPPED.glob("*.json"))]
    return [path.stem for path, card in zip(sorted(SHIPPED.glob("*.json")), cards, strict=True) if card.mode == "rigid"]


def test_every_shipped_rigid_network_has_a_recorded_score() -> None:
    assert set(shipped_rigid()) <= set(RECORDED), "run `lepard evaluate gate` and record its score in gate.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_shipped_weights_are_not_worse_than_recorded(name: str, rooms: list[Shard]) -> None:
    assert run_gate(Matcher.from_pretrained(name, device="cpu"), rooms).failures(RECORDED[name]) == []
