# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Training shards from real depth data: recordings with refined poses, and single clouds re-rendered from new views."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from tqdm import tqdm

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.cloud.normals import surface_normals
from lepard_ros.data.recordings import Recording, open_recording, read_camera, read_depth_png
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.registration.rigid.icp import IcpSettings, align, sample, touch
from lepard_ros.registration.types import Surface
from lepard_ros.synthesis.fragments import GRID, SINGLE, Fragment, on_grid, spread
from lepard_ros.synthesis.sensor import pinhole
from lepard_ros.synthesis.shards import Shard, pack, room_path, save_room

logger = logging.getLogger(__name__)

FAR = 4.5  # metres: beyond, the noise of a Kinect exceeds the grid size
STEP_BETWEEN_HUBS = 3  # frames
MAX_AROUND_HUB = 11
VIEWS = 8
ROOM_EXTENT = 2.5  # metres: smaller scenes (a table top, a shelf bin) are scaled up to it, by a factor of 3 at most
# Requirements for an alignment to serve as the ground truth of a pair.
MAX_CORRECTION = (0.2, np.radians(7))  # metres, radians from the recorded pose
MAX_RESIDUAL = 0.015  # metres, median over the inliers
MIN_OVERLAP = 0.15
MIN_HOLD = 0.02  # spread of the normals at the inliers


def write_real_shards(data: Path, out: Path) -> int:
    """Write the shards of real data sets; returns their number. Seeds start at 100: all are for training."""
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    for shard in tqdm(real_shards(data), desc="real rooms", unit="room"):
        if len(shard.pairs):
            save_room(room_path(out, 100 + written), shard)
            written += 1
    return written


def real_shards(folder: Path) -> Iterator[Shard]:
    """All shards of the data sets below a folder.

    Each data set has its own folder. With `camera.txt`, `depth/*.png` and `poses.txt` it is a recording
    (`recording_shards`); without poses, or with `*.npz` clouds (`xyz`), it holds single views (`lone_view_shard`).
    """
    found = sorted(path for path in Path(folder).iterdir() if path.is_dir())
    if not found:
        raise InputError(
            f"{folder} holds no folder with a data set; see the documentation of `lepard synthesise real`."
        )
    for index, data in enumerate(found):
        rng = np.random.default_rng([index, 3])
        if (data / "poses.txt").is_file():
            yield from recording_shards(open_recording(data), rng)
        else:
            yield from (lone_view_shard(points, rng) for points in _lone_clouds(data))


def _lone_clouds(data: Path) -> Iterator[FloatArray]:
    """The clouds (N, 3) of a data set without poses, each in its sensor frame."""
    for path in sorted(data.glob("*.npz")):
        with np.load(path, allow_pickle=False) as arrays:
            points = arrays["xyz"].astype(np.float32)
        yield points[np.isfinite(points).all(axis=1)]
    if (data / "camera.txt").is_file():
        camera, scale = read_camera(data / "camera.txt")
        for path in sorted((data / "depth").glob("*.png")):
            raw = read_depth_png(path)
            if raw.shape != (camera.height, camera.width):
                logger.warning("%s is left out: it is not an image of the camera's size", path)
                continue
            yield _seen_points((raw / scale).astype(np.float32), camera)


def _seen_points(depth: FloatArray, camera: Camera) -> FloatArray:
    points = depth_to_points(np.where(depth < FAR, depth, 0), camera)
    return points[np.isfinite(points[..., 2])]


# ---------------------------------------------------------------- recordings


def recording_shards(recording: Recording, rng: Generator) -> Iterator[Shard]:
    """Star-shaped groups: every few frames one is a hub; neighbouring frames that align to it reliably form its shard.

    Recorded poses are only the initial guess: ICP aligns each frame to its hub. A frame is dropped unless the residual
    is small and the result is close to the recorded pose, so a bad pose costs pairs but never yields a wrong one.
    """
    frames = [frame for frame in recording.frames() if frame.pose is not None]
    if not frames:
        return
    scale = enlargement(_seen_points(frames[0].depth, recording.camera))
    surfaces = [_surface(scale * _seen_points(frame.depth, recording.camera)) for frame in frames]
    poses = [np.asarray(frame.pose) * np.array([1, 1, 1, scale]) for frame in frames]
    for pose in poses:
        pose[3, 3] = 1
    for hub in range(0, len(frames), STEP_BETWEEN_HUBS):
        star = [Fragment(surfaces[hub].points, surfaces[hub].normals, np.eye(4), SINGLE)]
        others = sorted((i for i in range(len(frames)) if i != hub), key=lambda i: abs(i - hub))
        for other in others[:MAX_AROUND_HUB]:
            motion = refined_motion(surfaces[other], surfaces[hub], np.linalg.solve(poses[hub], poses[other]))
            if motion is not None:
                star.append(Fragment(surfaces[other].points, surfaces[other].normals, motion, SINGLE))
        shard = pack(star, rng)
        if len(shard.pairs):
            yield shard


def enlargement(points: FloatArray) -> float:
    """The factor that scales a small scene (N, 3) up to room size, so that the grid resolves its shapes."""
    low, high = np.percentile(points, [5, 95], axis=0)
    return float(np.clip(ROOM_EXTENT / (high - low).max(), 1.0, 3.0))


def refined_motion(source: Surface, target: Surface, recorded: FloatArray) -> FloatArray | None:
    """The motion (4, 4) source to target near the recorded one, or None if it is uncertain."""
    settings = IcpSettings(first_reach=6.0, last_reach=1.5)
    thinned = sample(source, 1500)
    motions, settled = align(thinned, target, recorded[None], 16, settings)
    contact = touch(thinned, target, motions, 2 * GRID)
    touching = contact.touching[0]
    change = np.linalg.solve(recorded, motions[0])
    turn = Rotation.from_matrix(change[:3, :3]).magnitude()
    certain = (
        settled[0]
        and touching.mean() > MIN_OVERLAP
        and np.linalg.norm(change[:3, 3]) < MAX_CORRECTION[0]
        and turn < MAX_CORRECTION[1]
        and np.median(np.abs(contact.residual[0][touching])) < MAX_RESIDUAL
        and spread(contact.normal[0][touching]) > MIN_HOLD
    )
    return motions[0] if certain else None


def _surface(points: FloatArray) -> Surface:
    """The cloud (N, 3) on the grid, with normals."""
    centres, _ = on_grid(points, np.zeros_like(points))
    return Surface(centres, surface_normals(centres, 12), GRID)


# ---------------------------------------------------------------- single views


def lone_view_shard(points: FloatArray, rng: Generator) -> Shard:
    """Exact pairs from one real cloud (N, 3): virtual cameras see parts of it, each with its own pixels and noise.

    Each virtual camera keeps a random half of its visible points (inside the frustum, not occluded), so that two
    cameras share the surface but not the noise.
    """
    enlarged = points * np.float32(enlargement(points))
    fragments = [virtual_view(enlarged, rng) for _ in range(VIEWS)]
    return pack([fragment for fragment in fragments if len(fragment.points) > 800], rng)


def virtual_view(points: FloatArray, rng: Generator) -> Fragment:
    """The cloud (N, 3) seen from a new viewpoint; the fragment's pose maps it back to the cloud's frame."""
    aim = points[rng.integers(len(points))].astype(np.float64)
    pose = _virtual_pose(aim, rng)
    local = ((points - pose[:3, 3]) @ pose[:3, :3]).astype(np.float32)
    local = local[_visible(local, pinhole(80, np.radians(rng.uniform(50, 75)))) & (rng.random(len(points)) < 0.5)]
    noise = rng.normal(0, 0.0015, (len(local), 1)) * local[:, 2:] ** 2
    rays = local / np.maximum(np.linalg.norm(local, axis=1, keepdims=True), 1e-6)
    centres, _ = on_grid((local + rays * noise).astype(np.float32), np.zeros_like(local))
    normals = surface_normals(centres, 12) @ pose[:3, :3].T if len(centres) > 12 else np.zeros_like(centres)
    return Fragment(centres, normals, pose, SINGLE)


def _virtual_pose(aim: FloatArray, rng: Generator) -> FloatArray:
    """A camera pose (4, 4), rotated about its target point by up to 40 degrees from the real camera at the origin."""
    turn = Rotation.from_rotvec(rng.normal(0, 0.3, 3).clip(-0.7, 0.7)).as_matrix()
    distance = np.linalg.norm(aim) * rng.uniform(0.6, 1.2)
    forward = turn @ (aim / np.linalg.norm(aim))
    down = turn @ np.array([0.0, 1.0, 0.0]) + rng.normal(0, 0.15, 3)
    down -= forward * (down @ forward)
    if np.linalg.norm(down) < 0.1:  # looking along the y axis of the scan: choose any other direction as down
        down = np.cross(forward, [1.0, 0.3, 0.2])
    down /= np.linalg.norm(down)
    pose = np.eye(4)
    pose[:3, :3] = np.column_stack([np.cross(down, forward), down, forward])
    pose[:3, 3] = aim - forward * distance
    return pose


def _visible(points: FloatArray, camera: Camera) -> NDArray[np.bool_]:
    """Mask of the points (N, 3) visible from a camera at the origin: in its image and not occluded (depth buffer)."""
    z = np.maximum(points[:, 2], 1e-6)
    u = np.rint(points[:, 0] / z * camera.fx + camera.cx)
    v = np.rint(points[:, 1] / z * camera.fy + camera.cy)
    inside = (points[:, 2] > 0.3) & (z < FAR) & (u >= 0) & (u < camera.width) & (v >= 0) & (v < camera.height)
    pixel = (v * camera.width + u)[inside].astype(np.int64)
    nearest = np.full(camera.width * camera.height, np.inf)
    np.minimum.at(nearest, pixel, z[inside])
    visible = np.zeros(len(points), bool)
    visible[inside] = z[inside] < nearest[pixel] * 1.04 + 0.03
    return visible
