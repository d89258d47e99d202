# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Merge two maps: Lepard finds keyframes that show the same place, and the pose graph joins them."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.poses import motion_between, orthonormal
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.registration.types import Registration
from lepard_ros.tracking.keyframes import Keyframe
from lepard_ros.tracking.places import most_similar
from lepard_ros.tracking.pose_graph import Edge
from lepard_ros.tracking.rigid import RigidTracker

QUERIES = 24  # keyframes of the second map that are matched, evenly distributed
CANDIDATES = 8  # keyframes of the first map that each of them is matched with
# Two links agree if they place the second map within these limits: both maps may have drifted.
AGREE = 0.5  # metres
AGREE_DEGREES = 10.0
MIN_LINKS = 2  # from different keyframes: a single match may be wrong


class Link(NamedTuple):
    """A keyframe of the second map registered to one of the first; placement: (4, 4), the second map in the first."""

    source: Keyframe
    target: Keyframe
    motion: Registration
    placement: FloatArray


def merge(first: RigidTracker, second: RigidTracker) -> int:
    """Add the second map to the first, in the frame of the first; return the number of links between them.

    The second map must not be used afterwards. Raises InputError if the maps share no place.
    """
    links = _agreeing(_links(first, second))
    if len({link.source.id for link in links}) < MIN_LINKS:
        raise InputError(
            f"The maps share no place that {MIN_LINKS} keyframes agree on, so they cannot be merged; "
            "record the second map so that it overlaps the first."
        )
    shift = first.keyframes.next_id
    for frame in second.keyframes:
        pose = orthonormal(links[0].placement @ frame.pose)
        first.keyframes.add(replace(frame, id=frame.id + shift, pose=pose))
    edges = [replace(edge, source=edge.source + shift, target=edge.target + shift) for edge in second.edges()]
    edges += [_edge(link, shift) for link in links]
    first.join(edges)
    return len(links)


def _links(first: RigidTracker, second: RigidTracker) -> list[Link]:
    """Registrations between similar keyframes of the two maps."""
    targets, sources = list(first.keyframes), list(second.keyframes)
    spread = np.unique(np.linspace(0, len(sources) - 1, min(QUERIES, len(sources))).round().astype(int))
    descriptors = [frame.view.descriptor for frame in targets]
    links = []
    for source in (sources[index] for index in spread):
        chosen = most_similar(source.view.descriptor, descriptors, CANDIDATES) or range(min(CANDIDATES, len(targets)))
        alike = [targets[index] for index in chosen]
        clouds = [frame.view.encode(first.matcher) for frame in alike]
        found = first.matcher.register_many(source.view.encode(first.matcher), clouds)
        links += [_link(source, target, motion) for target, motion in zip(alike, found, strict=True) if motion.ok]
    return links


def _link(source: Keyframe, target: Keyframe, motion: Registration) -> Link:
    if motion.transform is None:
        raise ValueError("a link needs an accepted registration")
    return Link(source, target, motion, target.pose @ motion.transform @ invert(source.pose))


def _agreeing(links: list[Link]) -> list[Link]:
    """The largest group of links that agree on the placement of the second map, largest overlap first."""
    groups = [[other for other in links if _agree(link, other)] for link in links]
    best = max(groups, key=lambda group: len({link.source.id for link in group}), default=[])
    return sorted(best, key=lambda link: -link.motion.overlap)


def _agree(one: Link, other: Link) -> bool:
    distance, turn = motion_between(one.placement, other.placement)
    return distance < AGREE and turn < AGREE_DEGREES


def _edge(link: Link, shift: int) -> Edge:
    motion = link.motion
    if motion.transform is None or motion.covariance is None:
        raise ValueError("a link needs an accepted registration")
    return Edge(link.source.id + shift, link.target.id, motion.transform, motion.covariance, loop=True)
