# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A depth video of a procedural room, for demos and tests: a hand-held camera that returns to its start."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.fragments import Shot, camera_pose, preview
from lepard_ros.synthesis.meshes import MeshLibrary
from lepard_ros.synthesis.rooms import Room, compose_room
from lepard_ros.synthesis.sensor import DepthSensor, Scene, look, observe, pinhole

WALKING_SPEED = 0.35  # metres per second
TURNING_SPEED = np.radians(25)  # per second
LOOPS_TRIED = 60
ROOMS_TRIED = 50
MIN_CLEARANCE = 0.4  # metres between the camera and any surface


@dataclass(frozen=True)
class Sequence:
    """A depth video.

    stamps: (F,) seconds. depths: (F, H, W) float32 metres, 0 without a measurement. poses: (F, 4, 4) T_world_camera,
    exact; the world has z up.
    """

    camera: Camera
    stamps: FloatArray
    depths: NDArray[np.float32]
    poses: FloatArray


def room_sequence(seed: int, frames: int, rate: float, width: int = 320) -> Sequence:
    """A loop through a room of procedural furniture.

    frames: number of images; the last one has the pose of the first. rate: images per second; the camera moves at
    walking speed, so few frames at a high rate stay near the start. width: columns of the 4:3 image, at most 640.
    """
    if frames < 2 or not rate > 0 or not 16 <= width <= 640:
        raise InputError("A sequence needs at least 2 frames, a rate above 0 and a width of 16 to 640 pixels.")
    rng = np.random.default_rng([seed, 2])
    sensor = steady_sensor(width)
    room, scene, poses = _room_with_loop(rng, sensor, frames, frames / rate)
    depths = [observe(rng, sensor, look(scene, sensor.camera, pose), room.hole_rate) for pose in poses]
    return Sequence(sensor.camera, np.arange(frames) / rate, np.stack(depths).astype(np.float32), poses)


def steady_sensor(width: int) -> DepthSensor:
    """A depth camera of average quality, as used on robots."""
    return DepthSensor(
        pinhole(width, np.radians(62)),
        near=0.3,
        far=4.5,
        step=0.002,
        noise=0.4,
        jitter=0.6,
        distortion=np.array([0.002, 0.001, -0.001, 0.002, 0.001, 0.0]),
        grazing=0.12,
        edge=0.03,
    )


def _room_with_loop(rng: Generator, sensor: DepthSensor, frames: int, seconds: float) -> tuple[Room, Scene, FloatArray]:
    """The first sampled room with a collision-free loop that always shows enough detail."""
    for _ in range(ROOMS_TRIED):
        room = compose_room(rng, MeshLibrary())
        scene = Scene(room.meshes)
        poses = _best_loop(rng, room, scene, sensor, frames, seconds)
        if poses is not None:
            return room, scene, poses
    raise InputError("No room with a clear loop was found for this seed; choose another seed.")


def _best_loop(
    rng: Generator, room: Room, scene: Scene, sensor: DepthSensor, frames: int, seconds: float
) -> FloatArray | None:
    """The collision-free random loop whose worst view shows the most detail; None if that is too little."""
    loops = [_loop(rng, room, frames, seconds) for _ in range(LOOPS_TRIED)]
    clearance = np.array([scene.clearance(loop[:: max(1, frames // 24), :3, 3]).min() for loop in loops])
    clear = [loop for loop, distance in zip(loops, clearance, strict=True) if distance > MIN_CLEARANCE]
    if not clear:
        return None
    barest = [_barest_view(scene, sensor, loop) for loop in clear]
    best = int(np.argmax(barest))
    return clear[best] if barest[best] > 0 else None


def _barest_view(scene: Scene, sensor: DepthSensor, loop: FloatArray) -> float:
    """The minimum detail of eight views along a loop, 0 if one of them sees too little."""
    views = [Shot(loop[[index]]) for index in np.linspace(0, len(loop) - 1, 8).astype(int)]
    thumbnails = preview(scene, sensor, views)
    seen = thumbnails.seen.mean(axis=1)
    return float(thumbnails.detail.min()) if seen.min() > 0.5 and thumbnails.detail.min() > 0.1 else 0.0


def _loop(rng: Generator, room: Room, frames: int, seconds: float) -> FloatArray:
    """A closed loop of camera poses (F, 4, 4): an ellipse at eye height; the camera rotates once or swings."""
    phase = np.linspace(0, 2 * np.pi, frames)
    reach = np.minimum((room.high - room.low)[:2] * 0.35, WALKING_SPEED * seconds / (2 * np.pi))
    centre = rng.uniform(room.low[:2] + reach, room.high[:2] - reach)
    start = rng.uniform(0, 2 * np.pi)
    position = np.column_stack(
        [centre + reach * np.column_stack([np.cos(phase + start), np.sin(phase + start)]), 0 * phase]
    )
    position[:, 2] = rng.uniform(1.0, 1.6) + 0.06 * np.sin(2 * phase) + 0.02 * np.sin(5 * phase)
    around = TURNING_SPEED * seconds >= 2 * np.pi
    turn = phase if around else TURNING_SPEED * seconds / (2 * np.pi) * np.sin(phase)
    yaw = rng.uniform(0, 2 * np.pi) + turn + 0.05 * np.sin(3 * phase)
    pitch = -0.35 + 0.08 * np.sin(phase + 1) + 0.03 * np.sin(4 * phase)
    roll = 0.05 * np.sin(2 * phase + 2)
    return np.stack([camera_pose(p, *angles) for p, *angles in zip(position, yaw, pitch, roll, strict=True)])
