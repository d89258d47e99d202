# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Random motions of random objects: the common interface for pairs and sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from scipy.spatial.transform import Rotation

from lepard_ros.geometry.arrays import FloatArray, Generator, IntArray
from lepard_ros.synthesis.body_plans import PLANS
from lepard_ros.synthesis.cloth import Deformation, blend_deformations, deform, random_deformation, sheet, soft_object
from lepard_ros.synthesis.creatures import build_body, random_pose
from lepard_ros.synthesis.gltf import AnimatedModel
from lepard_ros.synthesis.mesh_refinement import refine
from lepard_ros.synthesis.skinning import Pose, SkinnedMesh, blend_poses, turn_joints

# Sampling weight of each kind; "model" only if glTF models are given.
KINDS = {
    "biped": 0.31,
    "quadruped": 0.14,
    "centaur": 0.04,
    "crawler": 0.03,
    "snake": 0.02,
    "hand": 0.06,
    "cloth": 0.06,
    "soft": 0.04,
    "model": 0.30,
}
UPRIGHT = {"biped", "quadruped", "centaur", "crawler", "model"}
# For validation only: the alpaca's shape is unique among the models, and the dog resembles others.
HELD_OUT_MODELS = ("Alpaca", "ShibaInu")
WAVES = 5
MAX_STRETCH = 2.0  # of a mesh's edges between two poses; above, the skin is torn


class Motion(Protocol):
    """A mesh that moves."""

    @property
    def triangles(self) -> IntArray:
        """(T, 3)."""

    def at(self, time: float) -> FloatArray:
        """The vertices (V, 3), metres, at a time from 0 to 1."""


@dataclass(frozen=True)
class PosedMotion:
    """A skinned mesh that moves through key poses."""

    mesh: SkinnedMesh
    poses: Sequence[Pose]

    @property
    def triangles(self) -> IntArray:
        """(T, 3)."""
        return self.mesh.triangles

    def at(self, time: float) -> FloatArray:
        """The vertices (V, 3) at a time from 0 to 1."""
        key, amount = _between_keys(time, len(self.poses))
        return self.mesh.posed(blend_poses(self.poses[key], self.poses[key + 1], amount))


@dataclass(frozen=True)
class BentMotion:
    """An object without a skeleton that moves through key deformations. waves: (3, W), see `deform`."""

    vertices: FloatArray
    triangles: IntArray
    waves: FloatArray
    states: Sequence[Deformation]

    def at(self, time: float) -> FloatArray:
        """The vertices (V, 3) at a time from 0 to 1."""
        key, amount = _between_keys(time, len(self.states))
        return deform(self.vertices, self.waves, blend_deformations(self.states[key], self.states[key + 1], amount))


@dataclass(frozen=True)
class PlacedMotion:
    """A motion scaled to metres and placed in the world.

    at(t) = Rotation(t * turn) (stretch * (motion.at(t) - centre)) + t * shift, all after the fixed rotation `tilt`.
    """

    motion: Motion
    centre: FloatArray
    stretch: FloatArray
    tilt: Rotation
    turn: FloatArray
    shift: FloatArray

    @property
    def triangles(self) -> IntArray:
        """(T, 3)."""
        return self.motion.triangles

    def at(self, time: float) -> FloatArray:
        """The vertices (V, 3), metres, at a time from 0 to 1."""
        local = self.stretch * (self.motion.at(time) - self.centre)
        return (Rotation.from_rotvec(time * self.turn) * self.tilt).apply(local) + time * self.shift


def _between_keys(time: float, keys: int) -> tuple[int, float]:
    """The key before a time in [0, 1], and the progress to the next one, eased near the keys."""
    place = float(np.clip(time, 0, 1)) * (keys - 1)
    key = min(int(place), keys - 2)
    amount = place - key
    return key, amount * amount * (3 - 2 * amount)


def random_motion(kind: str, rng: Generator, model: AnimatedModel | None = None, keys: int = 2) -> PlacedMotion:
    """A motion through `keys` random key poses of a random object; `kind` as in KINDS, with a model for "model"."""
    strength = 1.0 - 0.75 * rng.random() ** 1.5  # favours large motions, which are harder
    if kind == "model":
        if model is None:
            raise ValueError("the kind 'model' needs a model")
        motion: Motion = model_motion(model, rng, keys, strength)
    elif kind in PLANS:
        motion = body_motion(kind, rng, keys, strength)
    else:
        motion = boneless_motion(kind, rng, keys, strength)
    return place_motion(motion, rng, upright=kind in UPRIGHT)


def body_motion(kind: str, rng: Generator, keys: int, strength: float) -> PosedMotion:
    """A procedural body in `keys` poses, each `strength` of the way from the first one to another random one."""
    plan = PLANS[kind](rng)
    mesh = build_body(plan, rng, lumps=rng.uniform(0.0, 0.012), symmetric=bool(rng.random() < 0.8))
    first = random_pose(plan, rng, rng.uniform(0.0, 1.0))
    others = [random_pose(plan, rng, rng.uniform(0.5, 1.0)) for _ in range(keys - 1)]
    return PosedMotion(mesh, [first] + [blend_poses(first, other, strength) for other in others])


def boneless_motion(kind: str, rng: Generator, keys: int, strength: float) -> BentMotion:
    """Cloth or a soft object in `keys` states."""
    vertices, triangles = sheet(rng) if kind == "cloth" else soft_object(rng)
    floppiness = rng.uniform(0.02, 0.12) if kind == "cloth" else rng.uniform(0.0, 0.04)
    waves = rng.normal(size=(3, WAVES)) * np.linspace(3, 12, WAVES)
    states = [random_deformation(rng, WAVES, rng.uniform(0.1, 1), floppiness) for _ in range(keys)]
    return BentMotion(
        vertices,
        triangles,
        waves,
        [states[0]] + [blend_deformations(states[0], other, strength) for other in states[1:]],
    )


def model_motion(model: AnimatedModel, rng: Generator, keys: int, strength: float) -> PosedMotion:
    """A glTF model in `keys` poses from its clips, with varied proportions and some extra bending."""
    mesh = _refined(model, int(rng.integers(0, 3)))
    lengths = rng.uniform(0.9, 1.12, (len(model.mesh.parents), 1))
    one_clip = model.clips[rng.integers(len(model.clips))] if rng.random() < 0.25 else None
    moments = []
    for _ in range(keys):
        clip = one_clip or model.clips[rng.integers(len(model.clips))]
        moments.append(model.pose(clip, rng.uniform(0, clip.duration)))
    looseness = rng.uniform(0, 28) if rng.random() < 0.8 else 0.0
    turns = np.radians(looseness) * rng.normal(size=(keys, len(lengths), 3))
    for share in (
        1.0,
        0.5,
        0.25,
        0.0,
    ):  # some skins tear when bent beyond their clips: reduce the bending
        stretch = 1 + share * (lengths - 1)
        loose = [Rotation.from_rotvec(share * turn) for turn in turns]
        poses = [
            turn_joints(p._replace(translation=p.translation * stretch), r) for p, r in zip(moments, loose, strict=True)
        ]
        motion = PosedMotion(mesh, [poses[0]] + [blend_poses(poses[0], pose, strength) for pose in poses[1:]])
        if share == 0 or not _tears(motion):
            break
    return motion


@lru_cache(maxsize=128)
def _refined(model: AnimatedModel, smoothing: int) -> SkinnedMesh:
    return refine(model.mesh, rounds=2, smoothing=smoothing)


def _tears(motion: PosedMotion) -> bool:
    """Whether a visible share of the edges is overstretched between the first and the other key poses."""
    triangles = motion.triangles
    first = motion.mesh.posed(motion.poses[0])
    scale = np.ptp(first, axis=0).max()

    def lengths(vertices: FloatArray) -> FloatArray:
        return np.linalg.norm(vertices[triangles[:, 0]] - vertices[triangles[:, 1]], axis=1)

    rest = lengths(first)
    return any(
        bool(((lengths(motion.mesh.posed(pose)) > MAX_STRETCH * rest + 0.01 * scale).mean()) > 0.01)
        for pose in motion.poses[1:]
    )


def place_motion(motion: Motion, rng: Generator, upright: bool) -> PlacedMotion:
    """Scale a motion to about 1.6 m (0.7 to 2.4), vary its proportions, and add a pose and a path."""
    start = motion.at(0.0)
    low, high = start.min(axis=0), start.max(axis=0)
    size = 1.6 * np.clip(np.exp(rng.normal(0, 0.22)), 0.45, 1.5)
    stretch = size / np.linalg.norm(high - low) * rng.uniform(0.88, 1.14, 3)
    free = not upright or rng.random() < 0.1
    tilt = (
        Rotation.random(random_state=rng)
        if free
        else Rotation.from_euler("yxz", rng.normal(0, [90, 6, 6]), degrees=True)
    )
    turn = np.radians(rng.normal(0, [10, 30, 10])) * (rng.random() < 0.6)
    shift = rng.normal(0, 0.12, 3) * (rng.random() < 0.6)
    return PlacedMotion(motion, (low + high) / 2, stretch, tilt, turn, shift)
