# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Procedural bodies: a random skeleton with joint limits, flesh around it, and poses.

Flesh is a smooth union of round cones, meshed once in the rest pose. Each part of it belongs to one bone, which also
gives the skin weights. In the rest pose a body has x to its left, y up, z forward, and all bones are aligned with the
world.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.mesh_refinement import smooth, surface_of_field
from lepard_ros.synthesis.skinning import Pose, SkinnedMesh

Vector = FloatArray | tuple[float, float, float]
Limits = tuple[tuple[float, float], ...]  # for the three angles of a joint, degrees
STIFF: Limits = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))  # a fixed joint
SMOOTHING = 6
CELLS = 120  # of the meshing grid along a body's longest side


@dataclass(frozen=True)
class Bone:
    """A joint at `place` (metres, rest pose) with its angle limits about x, y, z and its natural angles, degrees."""

    parent: int
    place: FloatArray
    limits: FloatArray
    natural: FloatArray


@dataclass(frozen=True)
class Part:
    """Flesh of a bone: a round cone from `start` (radius `first`) to `end` (radius `last`), metres, rest pose."""

    bone: int
    start: FloatArray
    end: FloatArray
    first: float
    last: float


@dataclass
class BodyPlan:
    """Bones and flesh under construction; `blend` is the width in metres over which parts blend into each other."""

    bones: list[Bone] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    blend: float = 0.04

    def add_bone(
        self, parent: int, place: Vector, limits: Limits = STIFF, natural: Vector = (0, 0, 0), mirrored: bool = False
    ) -> int:
        """Add a joint and return its index. Mirrored joints get the limits of the other side of the body."""
        angles, rest = np.array(limits, float), np.array(natural, float)
        if mirrored:  # mirroring in x reverses rotations about y and z
            angles[1:] = -angles[1:, ::-1]
            rest[1:] = -rest[1:]
        self.bones.append(Bone(parent, np.array(place, float), angles, rest))
        return len(self.bones) - 1

    def add_part(self, bone: int, start: Vector, end: Vector, first: float, last: float) -> None:
        """Add a round cone of flesh to a bone."""
        self.parts.append(Part(bone, np.array(start, float), np.array(end, float), first, last))

    @property
    def rest(self) -> Pose:
        """The rest pose."""
        offsets = [bone.place - (self.bones[bone.parent].place if bone.parent >= 0 else 0) for bone in self.bones]
        return Pose.rest(np.array(offsets))


def random_pose(plan: BodyPlan, rng: Generator, effort: float) -> Pose:
    """A pose within the joint limits: the natural one at effort 0, any allowed one at effort 1."""
    limits = np.array([bone.limits for bone in plan.bones])
    natural = np.array([bone.natural for bone in plan.bones])
    anywhere = rng.uniform(limits[:, :, 0], limits[:, :, 1])
    angles = natural + effort * (anywhere - natural)
    return plan.rest._replace(rotation=Rotation.from_euler("xyz", angles, degrees=True).as_quat())


def build_body(plan: BodyPlan, rng: Generator, lumps: float = 0.01, symmetric: bool = True) -> SkinnedMesh:
    """The skinned mesh of a plan, with `lumps` metres of smooth noise, the same left and right if `symmetric`."""
    vertices, triangles = mesh_flesh(plan)
    weights = skin_weights(plan, vertices)
    folded = np.column_stack([np.abs(vertices[:, 0]), vertices[:, 1:]]) if symmetric else vertices
    uneven = vertices + lumps * smooth_noise(folded, rng, wavelength=0.25) * unit_normals(vertices, triangles)
    places = np.array([bone.place for bone in plan.bones])
    inverse_bind = np.tile(np.eye(4), (len(places), 1, 1))
    inverse_bind[:, :3, 3] = -places
    parents = np.array([bone.parent for bone in plan.bones])
    return SkinnedMesh(uneven, triangles, parents, np.arange(len(places)), inverse_bind, weights, rigid=True)


def mesh_flesh(plan: BodyPlan) -> tuple[FloatArray, NDArray[np.int64]]:
    """The outer surface of the plan's flesh: vertices (V, 3), triangles (T, 3)."""
    ends = np.array([[part.start, part.end] for part in plan.parts])
    reach = np.array([max(part.first, part.last) for part in plan.parts])[:, None, None]
    low, high = (ends - reach).min(axis=(0, 1)), (ends + reach).max(axis=(0, 1))
    spacing = float((high - low).max() / CELLS)
    origin = low - 3 * spacing
    sides = [origin[axis] + spacing * np.arange(int((high - low)[axis] / spacing) + 7) for axis in range(3)]
    field_values = np.full([len(side) for side in sides], 10 * spacing + plan.blend)
    for part in plan.parts:  # parts thinner than the grid would break up
        thick = replace(part, first=max(part.first, 0.8 * spacing), last=max(part.last, 0.8 * spacing))
        _add_flesh(field_values, sides, thick, plan.blend, 3 * spacing + plan.blend)
    vertices, triangles = surface_of_field(field_values, origin, spacing)
    return smooth(vertices, triangles, SMOOTHING), triangles


def _add_flesh(values: FloatArray, sides: list[FloatArray], part: Part, blend: float, margin: float) -> None:
    """Blend a part into the field (X, Y, Z) in place; only cells near the part are visited."""
    reach = max(part.first, part.last) + margin
    low, high = np.minimum(part.start, part.end) - reach, np.maximum(part.start, part.end) + reach
    box = tuple(slice(*np.searchsorted(side, (low[axis], high[axis]))) for axis, side in enumerate(sides))
    grid = np.stack(np.meshgrid(*[side[box[axis]] for axis, side in enumerate(sides)], indexing="ij"), axis=-1)
    values[box] = smooth_minimum(values[box], part_distance(part, grid), blend)


def smooth_minimum(first: FloatArray, second: FloatArray, width: float) -> FloatArray:
    """The minimum of two distances, rounded where they differ by less than `width`."""
    near = np.maximum(width - np.abs(first - second), 0) / width
    return np.minimum(first, second) - near**2 * width / 4


def part_distance(part: Part, points: FloatArray) -> FloatArray:
    """Approximate signed distance of points (..., 3) to a round cone, negative inside: (...)."""
    axis = part.end - part.start
    along = np.clip((points - part.start) @ axis / max(float(axis @ axis), 1e-12), 0, 1)
    offset = points - part.start - along[..., None] * axis
    return np.sqrt(np.einsum("...i,...i", offset, offset)) - (part.first + along * (part.last - part.first))


def skin_weights(plan: BodyPlan, vertices: FloatArray) -> FloatArray:
    """Weight of each bone for each vertex (V, B): the nearest part wins, with a soft transition to adjacent bones.

    Bones that are neither parent nor child get no weight, however near: fingers that touch in the rest pose must be
    able to separate.
    """
    distance = np.full((len(vertices), len(plan.bones)), np.inf)
    width = np.full(len(plan.bones), plan.blend)
    for part in plan.parts:
        distance[:, part.bone] = np.minimum(distance[:, part.bone], part_distance(part, vertices))
        width[part.bone] = max(width[part.bone], 0.6 * min(part.first, part.last))
    nearest = distance.argmin(axis=1)
    beyond = distance - distance.min(axis=1, keepdims=True)
    weights = np.maximum(1 - beyond / width, 0) ** 2 * _kinship(plan)[nearest]
    return weights / weights.sum(axis=1, keepdims=True)


def _kinship(plan: BodyPlan) -> FloatArray:
    """Adjacency (B, B) of 0 and 1: identical bones, or parent and child."""
    kin = np.eye(len(plan.bones))
    for child, bone in enumerate(plan.bones):
        if bone.parent >= 0:
            kin[child, bone.parent] = kin[bone.parent, child] = 1
    return kin


def smooth_noise(points: FloatArray, rng: Generator, wavelength: float, waves: int = 12) -> FloatArray:
    """A smooth random function of position, roughly between -1 and 1: (N, 1)."""
    directions = rng.normal(size=(3, waves)) * (2 * np.pi / wavelength / np.sqrt(3))
    return np.sin(points @ directions + rng.uniform(0, 2 * np.pi, waves)).sum(axis=1, keepdims=True) / np.sqrt(waves)


def unit_normals(vertices: FloatArray, triangles: NDArray[np.integer]) -> FloatArray:
    """Area-weighted vertex normals (V, 3)."""
    a, b, c = (vertices[triangles[:, corner]] for corner in range(3))
    faces = np.cross(b - a, c - a)
    normals = np.zeros_like(vertices)
    for corner in range(3):
        np.add.at(normals, triangles[:, corner], faces)
    return normals / np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-12)
