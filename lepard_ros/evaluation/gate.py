# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The regression gate: a small fixed set of synthetic rooms on which shipped weights must not get worse.

The rooms need no files and are the same everywhere: procedural furniture, with seeds that training never uses.
`lepard evaluate gate` prints a score; record it here when weights are shipped.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lepard_ros.evaluation import metrics
from lepard_ros.geometry.arrays import FloatArray

if TYPE_CHECKING:
    from lepard_ros.matcher import EncodedCloud, Matcher
    from lepard_ros.synthesis.shards import Shard


ROOM_SEEDS = (910_001, 910_002, 910_003)
PAIRS_PER_ROOM = 12
UNRELATED_PAIRS = 12
ROTATION, TRANSLATION = 5.0, 0.15  # degrees, metres: tighter than for real data, because the ground truth is exact
RECALL_SLACK = 1 / (len(ROOM_SEEDS) * PAIRS_PER_ROOM)  # one pair: the last bits of a float may turn one
ERROR_SLACK = 1.25


@dataclass(frozen=True)
class GateScore:
    """recall: share of overlapping pairs registered. false_accepts: share of unrelated pairs called registered.

    rotation: degrees, translation: metres, medians over the registered pairs (nan without any).
    """

    recall: float
    false_accepts: float
    rotation: float
    translation: float

    def failures(self, recorded: "GateScore") -> list[str]:
        """One message for each value that is worse than recorded."""
        checks = (
            ("recall", self.recall < recorded.recall - RECALL_SLACK - 1e-9, self.recall, recorded.recall),
            (
                "false accepts",
                self.false_accepts > recorded.false_accepts + 1 / UNRELATED_PAIRS + 1e-9,
                self.false_accepts,
                recorded.false_accepts,
            ),
            (
                "rotation error",
                not self.rotation <= ERROR_SLACK * recorded.rotation,
                self.rotation,
                recorded.rotation,
            ),
            (
                "translation error",
                not self.translation <= ERROR_SLACK * recorded.translation,
                self.translation,
                recorded.translation,
            ),
        )
        return [f"{name} is {now:.3f}, recorded {before:.3f}" for name, worse, now, before in checks if worse]


# By the name of the shipped weights, as `lepard evaluate gate --weights NAME` printed it.
RECORDED: dict[str, GateScore] = {
    "rigid": GateScore(recall=1.0, false_accepts=0.0, rotation=0.590, translation=0.0200),
}


class GatePair(NamedTuple):
    """A source and a target cloud (N, 3) by place in a list, and the true motion (4, 4), or None if unrelated."""

    source: int
    target: int
    truth: FloatArray | None


def gate_rooms() -> "list[Shard]":
    """Render the rooms: a few seconds."""
    from lepard_ros.synthesis.meshes import load_library
    from lepard_ros.synthesis.shards import make_room

    return [make_room(seed, load_library(None)) for seed in ROOM_SEEDS]


def gate_pairs(rooms: "list[Shard]") -> tuple[list[FloatArray], list[GatePair]]:
    """All clouds of the rooms, and the pairs: evenly over the overlap in each room, then across rooms."""
    clouds: list[FloatArray] = []
    pairs: list[GatePair] = []
    starts = []
    for room in rooms:
        starts.append(len(clouds))
        by_overlap = np.argsort(room.overlap.min(axis=1), kind="stable")
        chosen = by_overlap[np.linspace(0, len(by_overlap) - 1, PAIRS_PER_ROOM).astype(int)]
        for source, target in room.pairs[chosen]:
            truth = room.transform(int(source), int(target))
            pairs.append(GatePair(starts[-1] + int(source), starts[-1] + int(target), truth))
        clouds += [room.cloud(i) for i in range(len(room.offset) - 1)]
    random = np.random.default_rng(0)
    for _ in range(UNRELATED_PAIRS):
        first, second = random.choice(len(rooms), size=2, replace=False)
        ends = [int(starts[room] + random.integers(len(rooms[room].offset) - 1)) for room in (first, second)]
        pairs.append(GatePair(ends[0], ends[1], None))
    return clouds, pairs


def run_gate(matcher: "Matcher", rooms: "list[Shard]") -> GateScore:
    """The score of a matcher on the rooms; every cloud is encoded once."""
    clouds, pairs = gate_pairs(rooms)
    encoded: dict[int, EncodedCloud] = {}
    errors, false_accepts = [], []
    for pair in pairs:
        for place in (pair.source, pair.target):
            if place not in encoded:
                encoded[place] = matcher.encode(clouds[place])
        result = matcher.register(encoded[pair.source], encoded[pair.target])
        if pair.truth is None:
            false_accepts.append(result.ok)
            continue
        motion = result.transform
        errors.append((metrics.rotation_error(motion, pair.truth), metrics.translation_error(motion, pair.truth)))
    table = np.array(errors)
    solved = (table[:, 0] < ROTATION) & (table[:, 1] < TRANSLATION)
    medians = np.median(table[solved], axis=0) if solved.any() else np.full(2, np.nan)
    return GateScore(float(solved.mean()), float(np.mean(false_accepts)), float(medians[0]), float(medians[1]))
