# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A tree of moving coordinate frames, which answers as tf2 does. Knows nothing of messages."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.spatial.transform import Rotation, Slerp

from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.ros.compat.quaternions import Matrix

LATEST = 0  # As in tf2: the newest time at which every link of the chain is known.


class TransformUnavailable(LookupError):
    """No transform: one sentence that says which link is missing, or between which times it is known."""


@dataclass
class _Link:
    """What is known of one child frame: parallel lists, oldest first. A static link has one entry, always valid."""

    static: bool
    stamps: list[int] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    matrices: list[Matrix] = field(default_factory=list)

    def insert(self, stamp_ns: int, parent: str, matrix: Matrix) -> None:
        """Put a pose in its place in time; a second one for the same time replaces the first."""
        place = bisect_left(self.stamps, stamp_ns)
        replaced = 1 if place < len(self.stamps) and self.stamps[place] == stamp_ns else 0
        self.stamps[place : place + replaced] = [stamp_ns]
        self.parents[place : place + replaced] = [parent]
        self.matrices[place : place + replaced] = [matrix]

    def forget_before(self, stamp_ns: int) -> None:
        """Drop what is older than `stamp_ns`."""
        count = bisect_left(self.stamps, stamp_ns)
        del self.stamps[:count], self.parents[:count], self.matrices[:count]

    def at(self, child: str, stamp_ns: int) -> tuple[str, Matrix]:
        """The parent and the pose in it at a time, between two poses by interpolation, never beyond them."""
        if self.static:
            return self.parents[-1], self.matrices[-1]
        if not self.stamps[0] <= stamp_ns <= self.stamps[-1]:
            raise TransformUnavailable(
                f"frame {child!r} is known from {_seconds(self.stamps[0])} to {_seconds(self.stamps[-1])} s, "
                f"not at {_seconds(stamp_ns)} s."
            )
        after = bisect_right(self.stamps, stamp_ns)
        before = after - 1
        if self.stamps[before] == stamp_ns or self.parents[before] != self.parents[after]:
            return self.parents[before], self.matrices[before]
        share = (stamp_ns - self.stamps[before]) / (self.stamps[after] - self.stamps[before])
        return self.parents[before], interpolate(self.matrices[before], self.matrices[after], share)


class TransformTree:
    """Poses of frames in their parents over the last seconds.

    Like tf2, it interpolates between known times, never extrapolates, and drops what is older than `cache_seconds`
    before the newest pose of a frame. Not locked: see TransformBuffer.
    """

    def __init__(self, cache_seconds: float = 10.0) -> None:
        self._cache_ns = int(cache_seconds * 1e9)
        self._links: dict[str, _Link] = {}

    def set(self, parent: str, child: str, stamp_ns: int, matrix: ArrayLike, static: bool = False) -> None:
        """Note that `matrix` (4, 4) maps points of `child` to `parent` at a time; refused if it makes no sense."""
        values = np.array(matrix, dtype=np.float64)
        if not parent or not child or parent == child or values.shape != (4, 4) or not np.isfinite(values).all():
            raise TransformUnavailable(f"the transform from {child!r} to {parent!r} is not usable and was ignored.")
        link = self._links.get(child)
        if link is None or link.static != static or static:
            link = self._links[child] = _Link(static)
        if link.stamps and stamp_ns < link.stamps[-1] - self._cache_ns:
            return  # Older than all that is kept.
        link.insert(stamp_ns, parent, values)
        link.forget_before(link.stamps[-1] - self._cache_ns)

    def clear(self) -> None:
        """Forget what moves; static frames stay, since nobody publishes them again (time jumped back)."""
        self._links = {child: link for child, link in self._links.items() if link.static}

    def lookup(self, target: str, source: str, stamp_ns: int = LATEST) -> Matrix:
        """The (4, 4) matrix that maps points of `source` to `target` at a time, 0 meaning the latest common one.

        Raises TransformUnavailable with the reason.
        """
        if target == source:
            return np.eye(4)
        if stamp_ns == LATEST:
            stamp_ns = self._latest_common(target, source)
        source_chain = self._chain(source, stamp_ns, until=target)
        if target in source_chain:
            return source_chain[target]
        target_chain = self._chain(target, stamp_ns, until=source)
        common = next((frame for frame in source_chain if frame in target_chain), None)
        if common is None:
            raise TransformUnavailable(self._why_not_connected(target, source))
        return invert(target_chain[common]) @ source_chain[common]

    def _chain(self, frame: str, stamp_ns: int, until: str) -> dict[str, Matrix]:
        """Ancestors of a frame, nearest first, each with the matrix that maps the frame's points to it.

        A link that is unknown at this time ends the chain: it may lie above the common ancestor.
        """
        chain = {frame: np.eye(4)}
        here = frame
        while here != until and here in self._links:
            try:
                parent, matrix = self._links[here].at(here, stamp_ns)
            except TransformUnavailable:
                break
            if parent in chain:
                raise TransformUnavailable(f"the frames loop: {' -> '.join([*chain, parent])}.")
            chain[parent] = matrix @ chain[here]
            here = parent
        return chain

    def _ancestry(self, frame: str) -> list[str]:
        """The frame and its newest ancestors, nearest first; stops at a loop."""
        ancestry = [frame]
        while ancestry[-1] in self._links:
            parent = self._links[ancestry[-1]].parents[-1]
            if parent in ancestry:
                break
            ancestry.append(parent)
        return ancestry

    def _latest_common(self, target: str, source: str) -> int:
        """The newest time at which every moving link between two frames is known; any time if none moves."""
        from_source, from_target = self._ancestry(source), self._ancestry(target)
        common = next((frame for frame in from_source if frame in from_target), None)
        if common is None:
            raise TransformUnavailable(self._why_not_connected(target, source))
        links = from_source[: from_source.index(common)] + from_target[: from_target.index(common)]
        newest = [self._links[frame].stamps[-1] for frame in links if not self._links[frame].static]
        return min(newest, default=1)

    def _why_not_connected(self, target: str, source: str) -> str:
        """Which frame is unknown, or between which times the moving links are known."""
        parents = {parent for link in self._links.values() for parent in link.parents}
        unknown = [frame for frame in (target, source) if frame not in self._links and frame not in parents]
        if unknown:
            return f"frame {unknown[0]!r} is not in the transform tree."
        spans = [
            f"{frame!r} in {link.parents[-1]!r} from {_seconds(link.stamps[0])} to {_seconds(link.stamps[-1])} s"
            for frame in dict.fromkeys(self._ancestry(source) + self._ancestry(target))
            if (link := self._links.get(frame)) is not None and not link.static
        ]
        known = f"; known: {', '.join(spans)}" if spans else ""
        return f"no transform joins {source!r} and {target!r} at that time{known}."


def interpolate(before: Matrix, after: Matrix, share: float) -> Matrix:
    """The pose between two (4, 4) poses: straight translation, rotation along the shortest arc."""
    matrix = np.eye(4)
    rotations = Rotation.from_matrix(np.stack([before[:3, :3], after[:3, :3]]))
    matrix[:3, :3] = Slerp([0.0, 1.0], rotations)(share).as_matrix()
    matrix[:3, 3] = (1.0 - share) * before[:3, 3] + share * after[:3, 3]
    return matrix


def _seconds(stamp_ns: int) -> str:
    return f"{stamp_ns / 1e9:.3f}"
