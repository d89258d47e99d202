# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Depth sequences of a moving creature with ground truth for every point: for the deformable demo and tracker tests."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.geometry.arrays import FloatArray, Generator, IntArray
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.synthesis.deformable_pairs import RayScene, at_hits, look_at, measure, random_close_sensor
from lepard_ros.synthesis.motions import PlacedMotion, random_motion

FRAMES_PER_POSE = 25
SWAY = np.radians(12.0)  # amplitude of the camera's arc around the creature


@dataclass(frozen=True)
class CreatureSequence:
    """Depth images of one moving object from a camera that swings around it.

    stamps: (F,) seconds. depths: (F, H, W) metres, 0 without a measurement. poses: (F, 4, 4), camera to world.
    at_first: (F, H, W, 3), positions of each frame's points at frame 0, in the camera frame of frame 0.
    first_now: (F, H, W, 3), positions at each frame of the points seen in frame 0, in that frame's camera frame.
    Both ground truths are in metres, without noise, and NaN without a measurement.
    """

    camera: Camera
    stamps: FloatArray
    depths: NDArray[np.float32]
    poses: FloatArray
    at_first: NDArray[np.float32]
    first_now: NDArray[np.float32]

    def cloud(self, frame: int) -> NDArray[np.float32]:
        """The organised cloud (H, W, 3) of a frame, metres, NaN without a measurement."""
        return depth_to_points(self.depths[frame], self.camera)


def creature_sequence(
    seed: int,
    frames: int,
    *,
    kind: str = "biped",
    rate: float = 10.0,
    width: int = 320,
    noisy: bool = True,
    turn: float = 0.0,
    furnished: bool = False,
) -> CreatureSequence:
    """Render a random object (a kind of motions.KINDS other than "model"). The same seed gives the same sequence.

    turn: rotation in degrees about its vertical axis until the last frame. furnished: add a floor, walls and boxes;
    the ground truth is NaN there.
    """
    rng = np.random.default_rng([seed, 3])
    motion = random_motion(kind, rng, keys=max(2, 1 + frames // FRAMES_PER_POSE))
    camera = Camera(width, width * 3 // 4, 0.95 * width, 0.95 * width, (width - 1) / 2, (width * 3 // 4 - 1) / 2)
    times = np.linspace(0, 1, frames)
    shapes = [motion.at(time) for time in times]
    shapes = [_turned(shape, np.radians(turn) * time) for shape, time in zip(shapes, times, strict=True)]
    poses = _swaying_poses(motion, shapes, camera, times, rng)
    room = _room(shapes, poses) if furnished else None
    depths, at_first, first_now = _film(motion, shapes, poses, camera, noisy, rng, room)
    return CreatureSequence(camera, np.arange(frames) / rate, depths, poses, at_first, first_now)


def _swaying_poses(
    motion: PlacedMotion, shapes: list[FloatArray], camera: Camera, times: FloatArray, rng: Generator
) -> FloatArray:
    """Camera poses (F, 4, 4) on an arc from which the whole motion is visible, starting in front of the creature."""
    low, high = np.min([shape.min(axis=0) for shape in shapes], axis=0), np.max([s.max(axis=0) for s in shapes], axis=0)
    centre, radius = (low + high) / 2, float(np.linalg.norm(high - low)) / 2
    distance = 0.8 * radius * camera.fy / (camera.height / 2)
    face = motion.tilt.apply([0.0, 0.0, 1.0])
    start, cycles = np.arctan2(face[0], face[2]) + rng.uniform(-0.5, 0.5), rng.uniform(0.5, 1.0)
    poses = []
    for time in times:
        azimuth, elevation = start + SWAY * np.sin(2 * np.pi * cycles * time), 0.2 + 0.1 * np.sin(2 * np.pi * time)
        direction = np.array(
            [np.sin(azimuth) * np.cos(elevation), np.sin(elevation), np.cos(azimuth) * np.cos(elevation)]
        )
        poses.append(look_at(centre + distance * direction, centre, 0.0))
    return np.array(poses)


def _film(
    motion: PlacedMotion,
    shapes: list[FloatArray],
    poses: FloatArray,
    camera: Camera,
    noisy: bool,
    rng: Generator,
    room: "tuple[FloatArray, IntArray] | None" = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Depths (F, H, W), and the ground truths at_first and first_now (F, H, W, 3) of CreatureSequence."""
    sensor = replace(random_close_sensor(rng), camera=camera)
    to_camera = invert(poses)
    size = (len(shapes), camera.height, camera.width)
    depths = np.zeros(size, np.float32)
    at_first, first_now = np.full((*size, 3), np.nan, np.float32), np.full((*size, 3), np.nan, np.float32)
    for frame, shape in enumerate(shapes):
        vertices, triangles = _with_room(shape, motion.triangles, room)
        rendering = RayScene(vertices, triangles).look(camera, poses[frame])
        depths[frame] = measure(rendering, sensor, noisy, rng)
        seen = (depths[frame] > 0) & (rendering.triangle < len(motion.triangles))
        if frame == 0:
            first_rendering, first_seen = rendering, seen
        at_first[frame][seen] = _moved(to_camera[0], at_hits(shapes[0], motion.triangles, rendering, seen))
        now = at_hits(shape, motion.triangles, first_rendering, first_seen)
        first_now[frame][first_seen] = _moved(to_camera[frame], now)
    return depths, at_first, first_now


def _moved(transform: FloatArray, points: FloatArray) -> FloatArray:
    return points @ transform[:3, :3].T + transform[:3, 3]


def _turned(shape: FloatArray, angle: float) -> FloatArray:
    """Rotate vertices (V, 3) by an angle in radians about the vertical (y) axis through their centre."""
    centre = (shape.min(axis=0) + shape.max(axis=0)) / 2
    return (shape - centre) @ Rotation.from_rotvec([0.0, angle, 0.0]).as_matrix().T + centre


def _with_room(
    shape: FloatArray, triangles: IntArray, room: "tuple[FloatArray, IntArray] | None"
) -> tuple[FloatArray, IntArray]:
    """The mesh of the creature together with that of the room."""
    if room is None:
        return shape, triangles
    return np.concatenate([shape, room[0]]), np.concatenate([triangles, room[1] + len(shape)])


def _room(shapes: list[FloatArray], poses: FloatArray) -> tuple[FloatArray, IntArray]:
    """A floor, a wall behind the creature and one beside it, two boxes: vertices (V, 3), triangles (T, 3)."""
    low, high = np.min([s.min(axis=0) for s in shapes], axis=0), np.max([s.max(axis=0) for s in shapes], axis=0)
    centre = (low + high) / 2
    ahead = centre - poses[0, :3, 3]
    ahead = np.array([ahead[0], 0.0, ahead[2]]) / np.hypot(ahead[0], ahead[2])
    right, up = np.cross(ahead, [0.0, 1.0, 0.0]), np.array([0.0, 1.0, 0.0])
    floor, radius = np.array([centre[0], low[1] - 0.02, centre[2]]), float(np.hypot(*(high - low)[[0, 2]])) / 2 + 0.4
    back = floor + radius * ahead
    quads = [
        (floor - 4 * right - 4 * ahead, 8 * right, 8 * ahead),
        (back - 4 * right, 8 * right, 3 * up),
        (back - 1.6 * right - 6 * ahead, 6 * ahead, 3 * up),
    ]
    meshes = [_quad(*quad) for quad in quads]
    for side, size in ((0.9, 0.5), (-1.0, 0.7)):
        corner = back + side * right - 0.4 * ahead
        faces = ((corner, 0.4 * right, size * up), (corner, 0.4 * ahead, size * up))
        meshes += [_quad(*face) for face in faces] + [_quad(corner + size * up, 0.4 * right, 0.4 * ahead)]
    offsets = np.cumsum([0, *(len(vertices) for vertices, _ in meshes)])
    triangles = [corners + offset for (_, corners), offset in zip(meshes, offsets, strict=False)]
    return np.concatenate([vertices for vertices, _ in meshes]), np.concatenate(triangles)


def _quad(corner: FloatArray, first: FloatArray, second: FloatArray) -> tuple[FloatArray, IntArray]:
    """A rectangle from a corner along two sides, as two triangles."""
    return np.stack([corner, corner + first, corner + first + second, corner + second]), np.array(
        [[0, 1, 2], [0, 2, 3]]
    )
