# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Deformable pairs: a motion at two times, each seen by a depth camera from its own viewpoint."""

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from lepard_ros.cloud.depth import Camera, depth_to_points
from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.data.fourdmatch import OVERLAP_RADIUS, DeformablePair
from lepard_ros.geometry.arrays import FloatArray, Generator, IntArray
from lepard_ros.geometry.rigid_motion import invert
from lepard_ros.geometry.voxel_grid import group_by_cell
from lepard_ros.synthesis.motions import Motion
from lepard_ros.synthesis.sensor import DepthSensor, View, observe

GRID = 0.01  # metres, as in 4DMatch
MAX_NOISE = 0.03  # metres
METRIC_POINTS = 1000
MIN_POINTS = 500
MAX_CLOUD = 12_000
CANDIDATE_CAMERAS = 12
CLUTTER_CHANCE = 0.2
NOISE_CHANCE = 0.55
ATTEMPTS = 8
NOT_HIT = 0xFFFFFFFF


class Rendering(NamedTuple):
    """Output of the ray caster for a mesh.

    depth: (H, W) metres, inf for no hit. triangle: (H, W), -1 for no hit. corners: (H, W, 2) barycentric weights of the
    triangle's second and third corner. cosine: (H, W) of the incidence angle.
    """

    depth: FloatArray
    triangle: IntArray
    corners: FloatArray
    cosine: FloatArray


@dataclass(frozen=True)
class Moments:
    """One scene at two times: the same triangles (T, 3) over vertices (V, 3) now and later, metres in the world.

    The first `body` triangles move; the others are static clutter.
    """

    triangles: IntArray
    before: FloatArray
    after: FloatArray
    body: int


@lru_cache(maxsize=1)
def _open3d() -> ModuleType:
    """Open3D, imported once: locating its system libraries takes longer than rendering an image."""
    return import_open3d()


class RayScene:
    """A mesh prepared for ray casting on one thread."""

    def __init__(self, vertices: FloatArray, triangles: IntArray) -> None:
        self._o3d = _open3d()
        self._scene = self._o3d.t.geometry.RaycastingScene(nthreads=1)
        tensor = self._o3d.core.Tensor
        self._scene.add_triangles(tensor(vertices.astype(np.float32)), tensor(triangles.astype(np.uint32)))

    def look(self, camera: Camera, pose: FloatArray) -> Rendering:
        """Cast one ray per pixel from a camera at `pose` (4, 4), camera to world."""
        directions = camera.rays() @ pose[:3, :3].T.astype(np.float32)
        origin = np.broadcast_to(pose[:3, 3].astype(np.float32), directions.shape)
        rays = self._o3d.core.Tensor(np.concatenate([origin, directions], axis=-1))
        hits = self._scene.cast_rays(rays, nthreads=1)
        triangle = hits["primitive_ids"].numpy().astype(np.int64)
        triangle[triangle == NOT_HIT] = -1
        along = np.abs(np.einsum("hwc,hwc->hw", hits["primitive_normals"].numpy(), directions))
        cosine = along / np.linalg.norm(directions, axis=-1)
        return Rendering(hits["t_hit"].numpy(), triangle, hits["primitive_uvs"].numpy(), cosine)

    def sees(self, eye: FloatArray, points: FloatArray) -> NDArray[np.bool_]:
        """Which points (N, 3) of the mesh are visible from an eye (3,): (N,)."""
        rays = np.concatenate([np.broadcast_to(eye, points.shape), points - eye], axis=1).astype(np.float32)
        distance = self._scene.cast_rays(self._o3d.core.Tensor(rays), nthreads=1)["t_hit"].numpy()
        return distance > 1 - OVERLAP_RADIUS / np.linalg.norm(points - eye, axis=1)


def make_pair(motion: Motion, rng: Generator, overlap: float, clean: bool = False) -> DeformablePair | None:
    """Render two times of a motion from two viewpoints with an overlap of about `overlap`.

    clean: as in 4DMatch, without clutter and sensor noise; otherwise some pairs have both.
    Returns None if no pair of views is suitable; the final overlap must lie between 0.12 and 0.98.
    """
    for _ in range(ATTEMPTS):
        moments = gather_scene(motion, rng, 0.0 if clean else CLUTTER_CHANCE)
        scenes = (RayScene(moments.before, moments.triangles), RayScene(moments.after, moments.triangles))
        sensor, noisy = random_close_sensor(rng), not clean and rng.random() < NOISE_CHANCE
        poses = _choose_views(moments, scenes, sensor.camera, rng, overlap)
        pair = _observe_pair(moments, scenes, poses, sensor, noisy, rng)
        if pair is not None and 0.12 <= pair.overlap <= 0.98:
            return pair
    return None


def gather_scene(motion: Motion, rng: Generator, clutter_chance: float) -> Moments:
    """The start and the end of the motion, sometimes with clutter."""
    before, after, triangles = motion.at(0.0), motion.at(1.0), np.asarray(motion.triangles)
    body = len(triangles)
    if rng.random() < clutter_chance:
        vertices, extra = clutter(rng, np.minimum(before.min(axis=0), after.min(axis=0)), before.max(axis=0))
        triangles = np.concatenate([triangles, extra + len(before)])
        before, after = np.concatenate([before, vertices]), np.concatenate([after, vertices])
    return Moments(triangles, before, after, body)


def clutter(rng: Generator, low: FloatArray, high: FloatArray) -> tuple[FloatArray, IntArray]:
    """A piece of floor (in half of the cases) and a few boxes around an object with the bounds `low` and `high`."""
    centre, reach = (low + high) / 2, float(np.linalg.norm(high - low) / 2)
    boxes = []
    if rng.random() < 0.5:
        side = rng.uniform(0.3, 0.6) * reach
        boxes.append((np.array([centre[0], low[1] - 0.02, centre[2]]), np.array([side, 0.01, side]), 0.0))
    for _ in range(int(rng.integers(1, 5))):
        angle, away = rng.uniform(0, 2 * np.pi), rng.uniform(0.5, 1.1) * reach
        size = rng.uniform(0.03, 0.2, 3) * reach
        place = centre + away * np.array([np.cos(angle), rng.uniform(-0.7, 0.5), np.sin(angle)])
        boxes.append((place, size, rng.uniform(0, np.pi)))
    parts = [_box(*box) for box in boxes]
    starts = np.cumsum([0] + [len(vertices) for vertices, _ in parts[:-1]])
    faces = [triangles + start for (_, triangles), start in zip(parts, starts, strict=True)]
    return np.concatenate([vertices for vertices, _ in parts]), np.concatenate(faces)


def _box(centre: FloatArray, half: FloatArray, turn: float) -> tuple[FloatArray, IntArray]:
    """A box with half sizes (3,), rotated about y."""
    corners = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)]) * half
    cosine, sine = np.cos(turn), np.sin(turn)
    rotated = corners @ np.array([[cosine, 0, -sine], [0, 1, 0], [sine, 0, cosine]])
    quads = np.array([[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]])
    return centre + rotated, np.concatenate([quads[:, [0, 1, 2]], quads[:, [0, 2, 3]]])


def random_close_sensor(rng: Generator) -> DepthSensor:
    """A depth camera for objects of one or two metres: several times more precise than one for rooms."""
    focal = rng.uniform(400, 580)
    return DepthSensor(
        Camera(480, 430, focal, focal, 239.5, 214.5),
        near=0.25,
        far=6.0,
        step=rng.uniform(0.0003, 0.0014),
        noise=rng.uniform(0.2, 0.7),
        jitter=rng.uniform(0.2, 0.8),
        distortion=rng.normal(0, rng.uniform(0.0003, 0.0025), 6),
        grazing=rng.uniform(0.06, 0.25),
        edge=rng.uniform(0.02, 0.06),
    )


def look_at(eye: FloatArray, centre: FloatArray, roll: float) -> FloatArray:
    """The pose (4, 4), camera to world, of a camera that looks from `eye` at `centre`; y of the world is up."""
    forward = (centre - eye) / np.linalg.norm(centre - eye)
    right = np.cross(forward, [0.0, 1.0, 0.0])
    right = right / max(np.linalg.norm(right), 1e-9)
    down = np.cross(forward, right)
    cosine, sine = np.cos(roll), np.sin(roll)
    pose = np.eye(4)
    pose[:3, 0], pose[:3, 1], pose[:3, 2] = cosine * right + sine * down, cosine * down - sine * right, forward
    pose[:3, 3] = eye
    return pose


def random_view(box: FloatArray, camera: Camera, rng: Generator, azimuth: float, elevation: float) -> FloatArray:
    """A camera pose (4, 4) from which an object with the bounds `box` (2, 3) roughly fills the image."""
    centre = (box[0] + box[1]) / 2
    radius = float(np.linalg.norm(box[1] - box[0])) / 2
    fitting = radius * camera.fy / (camera.height / 2)
    distance = fitting * (rng.uniform(0.6, 0.9) if rng.random() < 0.15 else rng.uniform(0.95, 1.4))
    direction = np.array([np.cos(elevation) * np.sin(azimuth), np.sin(elevation), np.cos(elevation) * np.cos(azimuth)])
    centre = centre + rng.normal(0, 0.05, 3) * radius
    return look_at(centre + max(distance, 0.6) * direction, centre, float(rng.normal(0, 0.08)))


def _choose_views(
    moments: Moments, scenes: tuple[RayScene, RayScene], camera: Camera, rng: Generator, overlap: float
) -> tuple[FloatArray, FloatArray]:
    """Camera poses for the two times whose views have about the requested overlap."""
    used = np.unique(moments.triangles[: moments.body])
    before, after = moments.before[used], moments.after[used]
    azimuth, elevation = rng.uniform(0, 2 * np.pi), np.radians(rng.uniform(-15, 50))
    boxes = [np.stack([vertices.min(axis=0), vertices.max(axis=0)]) for vertices in (before, after)]
    first = random_view(boxes[0], camera, rng, azimuth, elevation)
    sample = rng.choice(len(used), min(1500, len(used)), replace=False)
    seen = sample[scenes[0].sees(first[:3, 3], before[sample])]
    best, smallest = first, np.inf
    for reach in rng.choice([1.0, 0.25], CANDIDATE_CAMERAS):  # also nearby views, for high overlaps
        turn, tilt = reach * rng.uniform(-1, 1, 2) * np.radians([105, 65])
        rise = np.clip(elevation + tilt, *np.radians([-15, 50]))
        pose = random_view(boxes[1], camera, rng, azimuth + turn, rise)
        share = float(scenes[1].sees(pose[:3, 3], after[seen]).mean()) if len(seen) else 0.0
        if abs(share - overlap) < smallest:
            best, smallest = pose, abs(share - overlap)
    return first, best


def _observe_pair(
    moments: Moments,
    scenes: tuple[RayScene, RayScene],
    poses: tuple[FloatArray, FloatArray],
    sensor: DepthSensor,
    noisy: bool,
    rng: Generator,
) -> DeformablePair | None:
    """Both clouds with ground truth, or None if a camera saw too little of the body."""
    renderings = [scene.look(sensor.camera, pose) for scene, pose in zip(scenes, poses, strict=True)]
    depths = [measure(rendering, sensor, noisy, rng) for rendering in renderings]
    on_body = [np.sum((d > 0) & (s.triangle < moments.body)) for d, s in zip(depths, renderings, strict=True)]
    if min(on_body) < MIN_POINTS:
        return None
    seen = depths[0] > 0
    now, later = (
        at_hits(vertices, moments.triangles, renderings[0], seen) for vertices in (moments.before, moments.after)
    )
    flow = (later - now) @ poses[0][:3, :3]
    source, source_flow = thin_out(depth_to_points(depths[0], sensor.camera)[seen], flow)
    target, _ = thin_out(depth_to_points(depths[1], sensor.camera)[depths[1] > 0])
    return assemble_pair(source, target, source_flow, invert(poses[1]) @ poses[0], rng)


def measure(rendering: Rendering, sensor: DepthSensor, noisy: bool, rng: Generator) -> FloatArray:
    """The depth image (H, W) of a rendering, metres, 0 without a measurement; noise-free depth has steps of 1 mm.

    Pixels whose noise took the depth of another surface are dropped: their ground truth would be wrong.
    """
    if not noisy:
        return np.where(np.isfinite(rendering.depth), np.round(rendering.depth, 3), 0.0)
    view = View(rendering.depth, np.empty(0), rendering.cosine, np.minimum(rendering.triangle, 0))
    measured = observe(rng, sensor, view, np.array([0.02]))
    own = np.abs(measured - rendering.depth) < MAX_NOISE
    return np.where(own & (rendering.triangle >= 0), measured, 0.0)


def at_hits(vertices: FloatArray, triangles: IntArray, rendering: Rendering, seen: NDArray[np.bool_]) -> FloatArray:
    """Positions (N, 3), for given vertices of the mesh, of the points hit by the `seen` (H, W) pixels."""
    corners = vertices[triangles[rendering.triangle[seen]]]
    second, third = rendering.corners[seen].T
    return np.einsum("nk,nkc->nc", np.stack([1 - second - third, second, third], axis=1), corners)


def thin_out(points: FloatArray, flow: FloatArray | None = None) -> tuple[FloatArray, FloatArray]:
    """The barycentre of every cell of GRID, (M, 3), and the flow of the point nearest to it, (M, 3).

    The flow is not averaged: where two limbs touch, each cell follows one of them.
    """
    flow = np.zeros_like(points) if flow is None else flow
    groups = group_by_cell(points, GRID)
    centres = groups.mean(points)
    order = np.lexsort([np.linalg.norm(points - centres[groups.cell], axis=1), groups.cell])
    nearest = order[np.concatenate([[0], np.cumsum(groups.counts)[:-1]])]
    return centres, flow[nearest]


def assemble_pair(
    source: FloatArray, target: FloatArray, flow: FloatArray, transform: FloatArray, rng: Generator
) -> DeformablePair:
    """A pair from gridded clouds, the flow in the source's frame, and the transform (4, 4) between the cameras."""
    if len(source) > MAX_CLOUD:
        kept = np.sort(rng.choice(len(source), MAX_CLOUD, replace=False))
        source, flow = source[kept], flow[kept]
    if len(target) > MAX_CLOUD:
        target = target[np.sort(rng.choice(len(target), MAX_CLOUD, replace=False))]
    rotation, translation = transform[:3, :3], transform[:3, 3]
    warped = (source + flow) @ rotation.T + translation
    distance, nearest = cKDTree(target).query(warped, distance_upper_bound=OVERLAP_RADIUS)
    both = np.flatnonzero(np.isfinite(distance))
    metric = rng.choice(len(source), min(METRIC_POINTS, len(source)), replace=False)
    matches = np.stack([both, nearest[both]], axis=1)
    source, target, flow = (array.astype(np.float32) for array in (source, target, flow))
    return DeformablePair(source, target, flow, rotation, translation, matches, np.sort(metric))
