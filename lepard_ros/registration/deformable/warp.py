# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The warp: a deformation graph with a motion per node, which moves any point of that surface."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from scipy.spatial.transform import Rotation

from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.geometry.rigid_motion import nearest_rotation
from lepard_ros.registration.deformable.graph import DeformationGraph, Skinning
from lepard_ros.registration.types import Status

if TYPE_CHECKING:
    from lepard_ros.registration.deformable.acceptance import WarpEvidence

# Of 100 nodes with a support between 0.5 and 0.6, 83 lay within 10 cm of the truth; over 0.9, 97; below 0.1, 21
# (TOSCA and held-out creatures, refused warps included).
MIN_SUPPORT = 0.5
_CHUNK = 1 << 14


@dataclass(frozen=True)
class Warp:
    """Moves points of a source surface to the target's frame: W(p) = sum_i w_i(p) (R_i (p - g_i) + g_i + t_i).

    rotations: (n, 3) axis times angle, radians. translations: (n, 3) metres.
    status: OK, or why there is no warp; then the warp is the identity.
    support: (n,) in [0, 1], share of inliers among the matches around each node; 0 without matches, where the node only
    follows its neighbours. See `supported`.
    energy: of the last iteration. converged: whether the last phase ended before its iteration or time limit.
    overlap: share of the warped surface on the target. residual: metres, RMS distance in the overlap.
    match_inliers: (M,) bool, the matches that agree with the warp. iterations: total number.
    evidence: evidence for acceptance, or None.
    cut_edges: number of torn edges that were removed from `graph`.
    seconds: wall time by stage.
    """

    graph: DeformationGraph
    rotations: FloatArray
    translations: FloatArray
    status: Status = Status.OK
    support: FloatArray = field(default_factory=lambda: np.zeros(0))
    energy: float = 0.0
    converged: bool = True
    overlap: float = 0.0
    residual: float = float("nan")
    iterations: int = 0
    cut_edges: int = 0
    match_inliers: BoolArray = field(default_factory=lambda: np.zeros(0, dtype=bool))
    evidence: "WarpEvidence | None" = None
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_motion(
        cls, graph: DeformationGraph, rotation: FloatArray, translation: FloatArray, **rest: object
    ) -> "Warp":
        """A warp from rotation matrices (n, 3, 3) and translations (n, 3)."""
        return cls(graph, Rotation.from_matrix(rotation).as_rotvec(), translation, **rest)  # type: ignore[arg-type]

    @classmethod
    def rest(cls, graph: DeformationGraph, status: Status, **rest: Any) -> "Warp":
        """The identity warp with a given `status`; rest: any other field."""
        still = np.zeros_like(graph.nodes)
        return cls(graph, still, still, status, **rest)

    @property
    def ok(self) -> bool:
        """Whether the warp was accepted."""
        return self.status is Status.OK

    @cached_property
    def rotation_matrices(self) -> FloatArray:
        """(n, 3, 3) of the nodes."""
        return Rotation.from_rotvec(self.rotations).as_matrix()

    @property
    def moved_nodes(self) -> FloatArray:
        """Node positions (n, 3) in the target's frame, metres."""
        return self.graph.nodes + self.translations

    def __call__(self, points: FloatArray) -> FloatArray:
        """Points of the source (..., 3) in the target's frame; points that are not covered are not moved."""
        return self.apply(points)[0]

    def covers(self, points: FloatArray) -> BoolArray:
        """(...,) bool: which points (..., 3) the warp moves; the others lie off the surface, or on too small a part."""
        return self.apply(points)[1]

    def apply(self, points: FloatArray) -> tuple[FloatArray, BoolArray]:
        """The warped points (..., 3), float64, and which of them were moved (...,) bool."""
        shape = np.shape(points)
        if not shape or shape[-1] != 3:
            raise InputError(f"Points to warp must have the shape (..., 3), but these have {shape}.")
        flat = np.array(points, dtype=np.float64).reshape(-1, 3)
        moved = np.zeros(len(flat), dtype=bool)
        finite = np.flatnonzero(np.isfinite(flat).all(axis=1)) if self.ok else np.zeros(0, dtype=np.int64)
        if len(finite):
            flat[finite], moved[finite] = self._apply_finite(flat[finite])
        return flat.reshape(shape), moved.reshape(shape[:-1])

    def _apply_finite(self, points: FloatArray) -> tuple[FloatArray, BoolArray]:
        skin = self.graph.skin(points)
        out = points.copy()
        for start in range(0, len(points), _CHUNK):  # chunks that fit into the cache
            part = slice(start, start + _CHUNK)
            blended = _blend(self._affine, skin.nodes[part], skin.weights[part])
            moved = np.einsum("nij,nj->ni", blended[:, :, :3], points[part]) + blended[:, :, 3]
            out[part] = np.where(skin.covered[part, None], moved, points[part])
        return out, skin.covered

    @cached_property
    def _affine(self) -> FloatArray:
        """(n, 3, 4): the motion of each node as p -> A [p, 1]."""
        turn = self.rotation_matrices
        shift = self.moved_nodes - np.einsum("nij,nj->ni", turn, self.graph.nodes)
        return np.concatenate([turn, shift[:, :, None]], axis=2)

    def supported(self, points: FloatArray, min_support: float = MIN_SUPPORT) -> BoolArray:
        """Mask (N,) of the points (N, 3) whose motion is supported by matches; the others only follow neighbours."""
        skin = self.graph.skin(np.asarray(points, dtype=np.float64))
        return skin.covered & self.ok & (self.support_of(skin) >= min_support)

    def support_of(self, skin: Skinning) -> FloatArray:
        """The support (N,) in [0, 1] of points with this skinning, from that of the nodes around them."""
        if not len(self.support):
            return np.zeros(len(skin.covered))
        return np.asarray(np.einsum("nk,nk->n", skin.weights, self.support[skin.nodes]))

    def turns(self, points: FloatArray) -> FloatArray:
        """Blended rotations (N, 3, 3) of the surface at points (N, 3); identity where they are not covered."""
        skin = self.graph.skin(np.asarray(points, dtype=np.float64))
        blended = _blend(self._affine, skin.nodes, skin.weights)[:, :, :3]
        return np.where(skin.covered[:, None, None], blended, np.eye(3))

    def apply_with_turns(
        self, points: FloatArray, skin: Skinning | None = None
    ) -> tuple[FloatArray, FloatArray, BoolArray]:
        """`apply` and `turns` for finite points (N, 3) in one call: (N, 3), (N, 3, 3), mask of moved points (N,).

        skin: of these points on a graph with the same nodes, if known; it takes half of the time.
        """
        skin = skin or self.graph.skin(points)
        blended = _blend(self._affine, skin.nodes, skin.weights)
        moved = np.einsum("nij,nj->ni", blended[:, :, :3], points) + blended[:, :, 3]
        covered = skin.covered if self.ok else np.zeros(len(points), dtype=bool)
        return moved, blended[:, :, :3], covered

    def rotate(self, points: FloatArray, vectors: FloatArray) -> FloatArray:
        """Rotate vectors (N, 3), such as normals at points (N, 3), with the surface; their length is preserved."""
        turned = np.einsum("nij,nj->ni", self.turns(points), vectors)
        length = np.linalg.norm(vectors, axis=1) / np.maximum(np.linalg.norm(turned, axis=1), 1e-12)
        return turned * length[:, None]

    def then(self, second: "Warp") -> "Warp":
        """Compose this warp with `second` (from this target to another cloud) into one warp on this graph.

        Nothing is inverted. If either status is not OK, the result has the first such status and is the identity.
        """
        status = self.status if not self.ok else second.status
        if status is not Status.OK:
            return Warp.rest(self.graph, status)
        skin = second.graph.skin(self.moved_nodes)
        turn = _nearest_rotation(_blend(second._affine, skin.nodes, skin.weights)[:, :, :3])
        turn = np.where(skin.covered[:, None, None], turn, np.eye(3))
        shift = second(self.moved_nodes) - self.graph.nodes
        return Warp.from_motion(self.graph, turn @ self.rotation_matrices, shift, energy=self.energy + second.energy)

    def onto(self, graph: DeformationGraph) -> "Warp":
        """Transfer the motion to another graph of the same surface, such as one that has grown.

        Nodes off the old surface take the motion of the nearest old node.
        """
        skin = self.graph.skin(graph.nodes)
        blended = _blend(self._affine, skin.nodes, skin.weights)
        blended[:, :, :3] = _nearest_rotation(blended[:, :, :3])
        out = np.flatnonzero(~skin.covered)
        nearest = self.graph.nearest_node(graph.nodes[out])[1]
        shift = self(graph.nodes) - graph.nodes
        shift[out] = np.einsum("nij,nj->ni", self._affine[nearest, :, :3], graph.nodes[out]) - graph.nodes[out]
        shift[out] += self._affine[nearest, :, 3]
        turn = blended[:, :, :3]
        turn[out] = self.rotation_matrices[nearest]
        nearest = self.graph.nearest_node(graph.nodes)[1]
        support = self.support[nearest] if len(self.support) else self.support
        return Warp.from_motion(graph, turn, shift, status=self.status, energy=self.energy, support=support)

    def moved_by(self, transform: FloatArray) -> "Warp":
        """This warp followed by a rigid motion (4, 4)."""
        turn = transform[:3, :3] @ self.rotation_matrices
        shift = self.moved_nodes @ transform[:3, :3].T + transform[:3, 3] - self.graph.nodes
        return Warp.from_motion(self.graph, turn, shift, status=self.status, support=self.support)

    def stretch(self) -> FloatArray:
        """Stretch (E,) of each edge: > 1 if longer, < 1 if shorter."""
        return edge_stretch(self.graph, self.translations)

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Flat arrays for a message or a file, see `docs/warp.md`. `from_arrays` restores the warp exactly."""
        graph = self.graph
        return {
            "nodes": graph.nodes,
            "rotations": self.rotations,
            "translations": self.translations,
            "edges": graph.edges.astype(np.int32),
            "optimised": graph.active.astype(np.uint8),
            "support": self.support,
            "gamma": np.array(graph.coverage),
            "neighbours": np.array(graph.skinning, dtype=np.uint8),
            "status": np.array(self.status.name),
            "energy": np.array(self.energy),
            "residual": np.array(self.residual),
        }

    @classmethod
    def from_arrays(cls, arrays: dict[str, NDArray[Any]]) -> "Warp":
        """The warp of `to_arrays`; raises InputError when an array is missing or the shapes disagree."""
        try:
            graph = _graph_from_arrays(arrays)
            motion = [np.array(arrays[key], dtype=np.float64).reshape(-1, 3) for key in ("rotations", "translations")]
            status, support = Status[str(arrays["status"])], np.array(arrays["support"], dtype=np.float64)
            energy, residual = float(arrays["energy"]), float(arrays["residual"])
        except KeyError as missing:
            raise InputError(f"The arrays of a warp lack a valid {missing}; were they written by to_arrays?") from None
        except ValueError:
            raise InputError("The arrays of a warp must come in rows of three numbers (edges: two).") from None
        if any(len(part) != len(graph.nodes) for part in motion):
            raise InputError("A warp needs as many rotations and translations as nodes.")
        return cls(graph, motion[0], motion[1], status, support, energy, residual=residual)

    def save(self, path: str | Path) -> None:
        """Write the arrays to an .npz file."""
        np.savez_compressed(path, **self.to_arrays())  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> "Warp":
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return cls.from_arrays(dict(arrays))
        except (OSError, ValueError) as error:
            raise InputError(f"{path} is not a warp written by Warp.save: {error}") from None


def _graph_from_arrays(arrays: dict[str, NDArray[Any]]) -> DeformationGraph:
    nodes = np.array(arrays["nodes"], dtype=np.float64).reshape(-1, 3)
    edges = np.array(arrays["edges"], dtype=np.int64).reshape(-1, 2)
    active = np.array(arrays["optimised"]).astype(bool).reshape(-1)
    if len(active) != len(nodes):
        raise InputError("A warp needs one flag `optimised` for each node.")
    if not len(nodes) or edges.max(initial=0) >= len(nodes) or edges.min(initial=0) < 0:
        raise InputError("An edge of the warp refers to a missing node.")
    coverage, skinning = float(arrays["gamma"]), int(arrays["neighbours"])
    if not (coverage > 0 and skinning > 0):
        raise InputError("The coverage and the number of skinning nodes of a warp must be positive.")
    return DeformationGraph(nodes, edges, active, coverage, skinning)


def edge_stretch(graph: DeformationGraph, translations: FloatArray) -> FloatArray:
    """Stretch (E,) of each edge when the nodes move by translations (n, 3)."""
    tail, head = graph.edges[:, 0], graph.edges[:, 1]
    before = graph.nodes[head] - graph.nodes[tail]
    after = before + translations[head] - translations[tail]
    return np.linalg.norm(after, axis=1) / np.maximum(np.linalg.norm(before, axis=1), 1e-9)


def write_coloured_ply(path: str | Path, points: FloatArray, errors: FloatArray, largest: float = 0.05) -> None:
    """Write points (N, 3) as a binary PLY, coloured by `errors` (N,): blue at 0, green, red at `largest` metres.

    Points with NaN error (not warped, or no ground truth) are grey.
    """
    share = np.clip(np.nan_to_num(errors) / largest, 0.0, 1.0)
    colour = np.stack([np.clip(2 * share - 1, 0, 1), 1 - np.abs(2 * share - 1), np.clip(1 - 2 * share, 0, 1)], axis=1)
    colour[~np.isfinite(errors)] = 0.5
    row = np.empty(len(points), dtype=[("p", "<f4", 3), ("c", "u1", 3)])
    row["p"], row["c"] = points, np.round(255 * colour)
    names = "".join(f"property float {axis}\n" for axis in "xyz")
    names += "".join(f"property uchar {name}\n" for name in ("red", "green", "blue"))
    header = f"ply\nformat binary_little_endian 1.0\nelement vertex {len(points)}\n{names}end_header\n"
    Path(path).write_bytes(header.encode() + row.tobytes())


def _blend(affine: FloatArray, nodes: NDArray[np.integer], weights: FloatArray) -> FloatArray:
    """(N, 3, 4): the weighted sum of the nodes' motions."""
    count, width = nodes.shape
    start = np.arange(0, count * width + 1, width)
    chosen = sparse.csr_matrix((weights.ravel(), nodes.ravel(), start), shape=(count, len(affine)))
    return (chosen @ affine.reshape(len(affine), 12)).reshape(-1, 3, 4)


def _nearest_rotation(matrices: FloatArray) -> FloatArray:
    """(N, 3, 3): the rotation nearest to each matrix."""
    return nearest_rotation(torch.from_numpy(np.ascontiguousarray(matrices))).numpy()
