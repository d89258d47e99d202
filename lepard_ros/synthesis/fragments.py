# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""From a room to clouds: hand-held camera poses, single frames and fused fragments on a grid."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.geometry.voxel_grid import grid_subsample
from lepard_ros.synthesis.rooms import Room
from lepard_ros.synthesis.sensor import DepthSensor, Scene, look, observe, pinhole

GRID = 0.025  # metres
SINGLE, FUSED = 0, 1
FUSED_WIDTH, SINGLE_WIDTH, PREVIEW_WIDTH = 160, 320, 24  # pixels
FUSED_FRAMES = 9  # represents about fifty frames: more would only average the noise further
PREVIEW_POSES = 3
# Scanning software fuses frames in a cube in front of the first camera; its faces crop the public fragments.
VOLUME_LOW, VOLUME_HIGH = np.array([-1.5, -1.5, 0.5]), np.array([1.5, 1.5, 3.5])


@dataclass(frozen=True)
class Shot:
    """A planned cloud. poses: (F, 4, 4) camera to room, one for a single frame, several for a fused fragment."""

    poses: FloatArray

    @property
    def kind(self) -> int:
        """SINGLE or FUSED."""
        return SINGLE if len(self.poses) == 1 else FUSED


@dataclass(frozen=True)
class Fragment:
    """A cloud in its own frame, that of its first camera. points, normals: (N, 3). pose: (4, 4) cloud to room."""

    points: FloatArray
    normals: FloatArray
    pose: FloatArray
    kind: int

    def in_room(self) -> FloatArray:
        """The points in the room's frame."""
        return self.points @ self.pose[:3, :3].T + self.pose[:3, 3]


def camera_pose(position: FloatArray, yaw: float, pitch: float, roll: float) -> FloatArray:
    """A camera (z forward, y down) at `position` looking along yaw about z, pitch above the horizon; radians."""
    level = np.array([[0.0, 0, 1], [-1, 0, 0], [0, -1, 0]])  # looks along the room's x
    turn = Rotation.from_euler("ZYX", [yaw, -pitch, roll]).as_matrix()
    pose = np.eye(4)
    pose[:3, :3], pose[:3, 3] = turn @ level, position
    return pose


def hand_held_path(rng: Generator, start: FloatArray, frames: int, travel: float, turn: float) -> FloatArray:
    """Smooth camera poses (F, 4, 4) from `start`: about `travel` metres and `turn` radians, with hand shake."""
    time = np.linspace(0, 1, frames)[:, None]
    sweep = rng.normal(size=(2, 3)) * np.array([[1.0, 0.4, 0.7], [0.5, 1.0, 0.25]])
    sweep /= np.linalg.norm(sweep, axis=1, keepdims=True)
    wobble = np.sum([np.sin(k * np.pi * time) * rng.normal(0, 0.15 / k, (1, 6)) for k in (1, 2, 3)], axis=0)
    shift = travel * (sweep[0] * time + wobble[:, :3])
    rotation = Rotation.from_rotvec(turn * (sweep[1] * time + wobble[:, 3:])).as_matrix()
    poses = np.tile(start, (frames, 1, 1))
    poses[:, :3, :3] = start[:3, :3] @ rotation
    poses[:, :3, 3] = start[:3, 3] + shift @ start[:3, :3].T
    return poses


def random_shots(rng: Generator, room: Room, scene: Scene, count: int) -> list[Shot]:
    """Candidate shots: new viewpoints, and small motions from earlier ones, so that some pairs have high overlap."""
    shots: list[Shot] = []
    positions = rng.uniform(room.low, room.high, (count * 6, 3))
    positions = positions[scene.clearance(positions) > 0.35][:count]
    for position in positions:
        if shots and rng.random() < 0.5:
            start = _moved(rng, shots[rng.integers(len(shots))].poses[0], rng.uniform(0.2, 1.6))
        else:
            roll = rng.uniform(-0.7, 0.7) if rng.random() < 0.15 else rng.normal(0, 0.12)
            start = camera_pose(position, rng.uniform(0, 2 * np.pi), rng.normal(-0.38, 0.25), roll)
        frames = 1 if rng.random() < 0.4 else FUSED_FRAMES
        shots.append(Shot(hand_held_path(rng, start, frames, rng.uniform(0.1, 1.3), np.radians(rng.uniform(5, 60)))))
    ends = np.concatenate([shot.poses[[0, -1], :3, 3] for shot in shots])
    clear = scene.clearance(ends).reshape(-1, 2).min(axis=1) > 0.25
    return [shot for shot, good in zip(shots, clear, strict=True) if good]


def companion(rng: Generator, shot: Shot) -> Shot:
    """A shot of the same kind from nearly the same viewpoint, for a pair with high overlap."""
    start = _moved(rng, shot.poses[0], rng.uniform(0.05, 0.35))
    poses = hand_held_path(rng, start, len(shot.poses), 0.3, 0.2)
    poses[1:, :3, 3] += (shot.poses[1:, :3, 3] - shot.poses[0, :3, 3]) * 0.9
    return Shot(poses)


def _moved(rng: Generator, pose: FloatArray, reach: float) -> FloatArray:
    """A camera about `reach` metres from another one, rotated in proportion, and raised or lowered."""
    moved = pose.copy()
    moved[:3, 3] += reach * rng.normal(size=3) * [0.7, 0.7, 0.3]
    turn = Rotation.from_euler("zyx", rng.normal(size=3) * [0.6 * reach, 0.15, 0.1]).as_matrix()
    moved[:3, :3] = turn @ moved[:3, :3]
    return moved


@dataclass(frozen=True)
class Thumbnails:
    """Small images of S shots.

    points, normals: (S, P, 3) in the room. seen: (S, P) mask of visible points. detail: (S,) share of neighbouring
    pixels that lie on different surfaces.
    """

    points: FloatArray
    normals: FloatArray
    seen: NDArray[np.bool_]
    detail: FloatArray


def preview(scene: Scene, sensor: DepthSensor, shots: list[Shot]) -> Thumbnails:
    """Thumbnails of the first, middle and last pose of every shot."""
    picks = [np.linspace(0, len(shot.poses) - 1, PREVIEW_POSES).astype(int) for shot in shots]
    poses = np.stack([shot.poses[pick] for shot, pick in zip(shots, picks, strict=True)])
    rays = pinhole(PREVIEW_WIDTH, field_of_view(sensor)).rays()
    directions = np.einsum("stij,hwj->sthwi", poses[..., :3, :3], rays)
    origins = np.broadcast_to(poses[..., None, None, :3, 3], directions.shape)
    hits = scene.cast(np.concatenate([origins, directions], axis=-1))
    seen = (hits.distance > sensor.near) & (hits.distance < sensor.far)
    points = origins + directions * np.where(seen, hits.distance, 0)[..., None]
    step = np.diff(points, axis=3)
    off_plane = np.abs(np.einsum("sthwi,sthwi->sthw", step, hits.normals[:, :, :, :-1]))
    detail = (off_plane > 0.04) & seen[..., :-1] & seen[..., 1:]
    flat = (len(shots), -1, 3)
    return Thumbnails(
        points.reshape(flat),
        hits.normals.reshape(flat),
        seen.reshape(len(shots), -1),
        detail.reshape(len(shots), -1).mean(axis=1),
    )


def field_of_view(sensor: DepthSensor) -> float:
    """Horizontal, radians."""
    return 2 * float(np.arctan(sensor.camera.width / 2 / sensor.camera.fx))


def spread(normals: FloatArray) -> float:
    """How well surfaces with these unit normals (N, 3) constrain a rigid motion: 0 if it can slide, 1/3 at best."""
    return float(np.linalg.eigvalsh(normals.T @ normals / max(len(normals), 1))[0])


def take(
    rng: Generator, room: Room, scene: Scene, sensor: DepthSensor, shot: Shot, in_volume: bool = False
) -> Fragment:
    """Render a shot with sensor noise and put it on the grid in the frame of its first camera.

    in_volume: crop a fused fragment to the cube of a TSDF volume.
    """
    width = SINGLE_WIDTH if shot.kind == SINGLE else FUSED_WIDTH
    sensor = replace(sensor, camera=pinhole(width, field_of_view(sensor)))
    calm = 1.0 if shot.kind == SINGLE else rng.uniform(0.4, 0.9)
    estimated = tracking_drift(rng, len(shot.poses)) @ invert(shot.poses[0]) @ shot.poses
    parts = []
    for true, assumed in zip(shot.poses, estimated, strict=True):
        view = look(scene, sensor.camera, true)
        depth = observe(rng, sensor, view, room.hole_rate, calm)
        parts.append(_placed(depth, view.normals, sensor.camera, assumed))
    cloud = np.concatenate(parts)
    if shot.kind == FUSED and in_volume:
        cloud = cloud[((cloud[:, :3] > VOLUME_LOW) & (cloud[:, :3] < VOLUME_HIGH)).all(axis=1)]
    points, normals = on_grid(cloud[:, :3], cloud[:, 3:])
    return Fragment(points, normals, shot.poses[0], shot.kind)


def _placed(depth: FloatArray, normals: FloatArray, camera: Camera, pose: FloatArray) -> FloatArray:
    """The valid points of a depth image, moved by a pose (4, 4), with unchanged normals: (N, 6)."""
    seen = depth > 0
    points = depth_to_points(depth, camera)[seen]
    placed = points @ pose[:3, :3].T.astype(np.float32) + pose[:3, 3].astype(np.float32)
    return np.concatenate([placed, normals[seen]], axis=1)


def on_grid(points: FloatArray, normals: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Barycentres (M, 3) of the points (N, 3) on the grid, and unit normals (M, 3), zero where they cancel."""
    if not len(points):
        return points, normals
    centres, means = grid_subsample(torch.from_numpy(points), GRID, torch.from_numpy(normals))
    return centres.numpy(), torch.nn.functional.normalize(means, dim=1).numpy()


def tracking_drift(rng: Generator, frames: int) -> FloatArray:
    """Pose errors (F, 4, 4) of fused frames: a random walk from zero to one or two centimetres."""
    steps = rng.normal(size=(frames, 6)) * np.repeat([rng.uniform(0.0005, 0.005), rng.uniform(0.0002, 0.0025)], 3)
    steps[0] = 0
    walk = np.cumsum(steps, axis=0)
    errors = np.tile(np.eye(4), (frames, 1, 1))
    errors[:, :3, :3] = Rotation.from_rotvec(walk[:, 3:]).as_matrix()
    errors[:, :3, 3] = walk[:, :3]
    return errors
