# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Detection of matches on the mirrored limb, from the intrinsic symmetry of a body, without labels.

The body of a pair is its target together with its whole source at its true position. Mirroring preserves geodesic
distances, in any pose. The tips of limbs (the points farthest from everything else) are therefore paired so that all
distances between them are preserved, and every other point maps to the point at the same distances from the paired
tips. A body seen from one side, or one whose parts touch, has no such map: the pair is then not counted.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components, dijkstra
from scipy.spatial import cKDTree

from lepard_ros.geometry.arrays import FloatArray, IntArray
from lepard_ros.registration.deformable.graph import GraphSettings, build_graph

Swap = list[tuple[int, int]]  # tips and their images; a tip on the symmetry plane is its own image

SURFACE = GraphSettings(coverage=0.0215, edges=10)  # nodes about 3 cm apart
BRIDGE = 0.12  # metres: parts with at most this gap still belong to the body
MIN_PLACES, MAX_PLACES = 100, 2000  # points about 3 cm apart: more would be a room rather than a body
MAX_TIPS = 8
TIP_RADIUS = 0.12  # of the body's size: minimum distance between tips
TIP_TOLERANCE = 0.04  # of the body's size: maximum mean change of the distances between tips under mirroring
SIGNATURE_RADII = (0.06, 0.12, 0.25)  # of the body's size: radii of geodesic discs whose areas describe a point
SIGNATURE_WEIGHT = 0.05  # of the body's size, for one standard deviation
LANDMARKS, REFINEMENTS = 40, 2  # points that replace the tips in the refinement, and number of refinements
TRIED = 20  # swaps of tips that are extended to all points
AWAY = 0.3  # metres, geodesic: a point closer to its own image is central, neither left nor right
NEAR = 0.15  # metres, slightly more than the width of a limb: a match this close to its mirror image is mirrored
WRONG = 0.04  # metres: a match with a smaller error is correct, wherever its mirror image is


class Limits(NamedTuple):
    """When a map is accepted as the mirror map. Lengths are shares of the body's size, its largest geodesic distance.

    distortion: maximum, 90th percentile over all distances. fold: maximum median distance of a point from itself after
    mirroring twice. likeness: minimum correlation of the surroundings of a point and its image. moved: minimum share of
    points that are not central.
    """

    distortion: float = 0.05
    fold: float = 0.04
    likeness: float = 0.85
    moved: float = 0.15


class Mirror(NamedTuple):
    """A body's points (n, 3), their mirror images (n, 3), and the geodesic distance between both (n,); metres."""

    places: FloatArray
    images: FloatArray
    ways: FloatArray


class MirrorCount(NamedTuple):
    """mirrored: matches on the mirrored limb. by_chance: the expected number if wrong matches were random."""

    mirrored: int
    by_chance: float


def count_mirrored(mirror: Mirror, truth: FloatArray, landed: FloatArray, target: FloatArray) -> MirrorCount:
    """Count the matches at landed (M, 3), with true positions truth (M, 3), that lie on the mirrored side.

    A match counts if it is wrong, lies within 0.15 m of its mirror image and closer to that than to the true position,
    and the geodesic distance between the two exceeds 0.3 m. target: (T, 3), possible positions of wrong matches: the
    share around the mirror image gives the chance level.
    """
    if len(truth) == 0:
        return MirrorCount(0, 0.0)
    nearest = cKDTree(mirror.places).query(truth)[1]
    image, miss = mirror.images[nearest], np.linalg.norm(landed - truth, axis=1)
    doubtful = (miss > WRONG) & (mirror.ways[nearest] > AWAY)
    there = np.linalg.norm(landed - image, axis=1) < np.minimum(NEAR, miss)
    around = cKDTree(target).query_ball_point(image[doubtful], NEAR, return_length=True)
    return MirrorCount(int((doubtful & there).sum()), float(np.sum(around)) / max(len(target), 1))


def find_mirror(body: FloatArray, limits: Limits | None = None) -> Mirror | None:
    """The mirror map of a body (N, 3), metres, or None if its two sides are not similar enough."""
    limits = limits or Limits()
    places, distance = _distances(body)
    if not MIN_PLACES <= len(places) <= MAX_PLACES:
        return None
    signature = _signature(distance)
    best, image = 0.0, None
    for swap in _tip_swaps(distance, _tips(distance))[:TRIED]:
        tried = _refine(distance, signature, _extend(distance, signature, swap))
        if (quality := _quality(distance, signature, tried, limits)) > best:
            best, image = quality, tried
    return None if image is None else Mirror(places, places[image], distance[np.arange(len(image)), image])


def _distances(body: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Evenly spaced points (n, 3) of the body's largest part, and their geodesic distances (n, n)."""
    graph = build_graph(body, SURFACE)
    edges = _bridged(graph.nodes, graph.edges)
    length = np.linalg.norm(graph.nodes[edges[:, 0]] - graph.nodes[edges[:, 1]], axis=1)
    links = sparse.coo_matrix((length, tuple(edges.T)), shape=(len(graph.nodes),) * 2).tocsr()
    part = connected_components(links, directed=False)[1]
    own = np.flatnonzero(part == np.bincount(part).argmax())
    return graph.nodes[own], dijkstra(links[own][:, own], directed=False)


def _bridged(nodes: FloatArray, edges: IntArray) -> IntArray:
    """The edges, plus the shortest bridges from the largest part to the next ones, while they are short enough."""
    while True:
        links = sparse.coo_matrix((np.ones(len(edges)), tuple(edges.T)), shape=(len(nodes),) * 2)
        part = connected_components(links, directed=False)[1]
        largest = part == np.bincount(part).argmax()
        inside, outside = np.flatnonzero(largest), np.flatnonzero(~largest)
        if len(outside) == 0:
            return edges
        gap, nearest = cKDTree(nodes[inside]).query(nodes[outside])
        if gap.min() > BRIDGE:
            return edges
        step = [inside[nearest[gap.argmin()]], outside[gap.argmin()]]
        edges = np.concatenate([edges, [step]])


def _signature(distance: FloatArray) -> FloatArray:
    """Mirror-invariant signature (n, 4) of each point: areas of discs around it and its mean distance, standardised."""
    size = distance.max()
    columns = [(distance < radius * size).mean(axis=1) for radius in SIGNATURE_RADII]
    values = np.log(np.stack([*columns, distance.mean(axis=1)], axis=1))
    return (values - values.mean(axis=0)) / np.maximum(values.std(axis=0), 1e-12)


def _tips(distance: FloatArray) -> list[int]:
    """The ends of limbs: points farther from everything, on average, than all points around them."""
    mean, near = distance.mean(axis=1), distance < TIP_RADIUS * distance.max()
    highest = np.flatnonzero(mean >= np.where(near, mean, 0).max(axis=1))
    return [int(tip) for tip in highest[np.argsort(-mean[highest])][:MAX_TIPS]]


def _tip_swaps(distance: FloatArray, tips: Sequence[int]) -> list[Swap]:
    """Swaps of tips that preserve distances: most pairs first, then most tips, then smallest distortion."""
    ranked = []
    for swap in _partial_swaps(tips):
        fixed = sum(tip == other for tip, other in swap)
        pairs = (len(swap) - fixed) // 2
        # A left-right swap keeps the head or a tail; swaps of front and rear, or of a sheet's ends, do not.
        if pairs == 0 or fixed == 0:
            continue
        before, after = zip(*swap, strict=True)
        change = np.abs(distance[np.ix_(before, before)] - distance[np.ix_(after, after)]).mean() / distance.max()
        if change < TIP_TOLERANCE:
            ranked.append((4 * pairs + fixed - change / TIP_TOLERANCE, swap))
    return [swap for _, swap in sorted(ranked, key=lambda item: -item[0])]


def _partial_swaps(tips: Sequence[int]) -> Iterator[Swap]:
    """All ways to pair some tips, keep some and omit the others (the camera may not have seen a foot)."""
    if not tips:
        yield []
        return
    first, rest = tips[0], list(tips[1:])
    for swap in _partial_swaps(rest):
        yield swap
        yield [(first, first), *swap]
    for other in rest:
        for swap in _partial_swaps([tip for tip in rest if tip != other]):
            yield [(first, other), (other, first), *swap]


def _extend(distance: FloatArray, signature: FloatArray, swap: Swap) -> IntArray:
    """Image (n,) of each point: the same distances from the swapped tips, with similar surroundings."""
    before, after = (list(tips) for tips in zip(*swap, strict=True))
    surroundings = SIGNATURE_WEIGHT * distance.max() * signature
    from_after = np.concatenate([distance[:, after], surroundings], axis=1)
    from_before = np.concatenate([distance[:, before], surroundings], axis=1)
    return cKDTree(from_after).query(from_before)[1]


def _refine(distance: FloatArray, signature: FloatArray, image: IntArray) -> IntArray:
    """The same with many points instead of the tips; points that do not map back to themselves are omitted."""
    every = np.arange(len(image))
    for _ in range(REFINEMENTS):
        steady = every[distance[every, image[image]] <= 0.05 * distance.max()]
        known = steady[:: max(len(steady) // LANDMARKS, 1)]
        if len(known) < 3:
            return image
        image = _extend(distance, signature, [(int(point), int(image[point])) for point in known])
    return image


def _quality(distance: FloatArray, signature: FloatArray, image: IntArray, limits: Limits) -> float:
    """Score of a map: 0 if it is not a mirror map; higher if it moves more points and preserves distances better."""
    size, every = distance.max(), np.arange(len(image))
    distortion = float(np.quantile(np.abs(distance[np.ix_(image, image)] - distance), 0.9)) / size
    moved = distance[every, image] > 0.1 * size
    fold = np.median(distance[every, image[image]]) / size
    if moved.mean() < limits.moved or distortion > limits.distortion or fold > limits.fold:
        return 0.0
    alike = _likeness(signature[moved], signature[image[moved]]) >= limits.likeness
    return float(moved.mean() + 10 * (limits.distortion - distortion)) if alike else 0.0


def _likeness(first: FloatArray, second: FloatArray) -> float:
    """The mean correlation of the disc areas of points with those of their images."""
    areas = range(len(SIGNATURE_RADII))
    with np.errstate(invalid="ignore"):
        return float(np.mean([np.corrcoef(first[:, i], second[:, i])[0, 1] for i in areas]))
