# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A simulated depth camera: ray casting on meshes, and a model of sensor errors."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import zoom

from lepard_ros.cloud.depth import Camera
from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.geometry.arrays import FloatArray, Generator
from lepard_ros.synthesis.meshes import Mesh


class Hits(NamedTuple):
    """First hits of rays: distance (...,) in ray lengths, inf without a hit; normals (..., 3); mesh (...,), else -1."""

    distance: FloatArray
    normals: FloatArray
    mesh: NDArray[np.int64]


class Scene:
    """Meshes prepared for ray casting on one thread (rooms are made in parallel, one per process)."""

    def __init__(self, meshes: list[Mesh]) -> None:
        self._open3d: Any = import_open3d()
        self._scene = self._open3d.t.geometry.RaycastingScene(nthreads=1)
        for mesh in meshes:
            self._scene.add_triangles(self._tensor(mesh.vertices, np.float32), self._tensor(mesh.faces, np.uint32))

    def _tensor(self, array: NDArray[Any], kind: type) -> Any:
        return self._open3d.core.Tensor(np.ascontiguousarray(array, kind))

    def cast(self, rays: FloatArray) -> Hits:
        """The first hits of (..., 6) rays, origin and direction."""
        result = self._scene.cast_rays(self._tensor(rays, np.float32), nthreads=1)
        mesh = result["geometry_ids"].numpy().astype(np.int64)
        mesh[mesh == self._open3d.t.geometry.RaycastingScene.INVALID_ID] = -1
        return Hits(result["t_hit"].numpy(), result["primitive_normals"].numpy(), mesh)

    def clearance(self, points: FloatArray) -> FloatArray:
        """Distance (N,) metres of (N, 3) points to the nearest surface."""
        return self._scene.compute_distance(self._tensor(points, np.float32), nthreads=1).numpy()


class View(NamedTuple):
    """The output of an ideal depth camera.

    depth: (H, W) metres along z, inf without a hit. normals: (H, W, 3) in the room, towards the camera. cosine: (H, W)
    of the angle between ray and normal. mesh: (H, W) index, -1 without a hit.
    """

    depth: FloatArray
    normals: FloatArray
    cosine: FloatArray
    mesh: NDArray[np.int64]


def look(scene: Scene, camera: Camera, pose: FloatArray) -> View:
    """Cast one ray per pixel from a camera at pose (4, 4), camera to room."""
    rays = np.empty((camera.height, camera.width, 6), np.float32)
    rays[..., :3] = pose[:3, 3]
    np.matmul(_rays(camera), pose[:3, :3].T.astype(np.float32), out=rays[..., 3:])
    hits = scene.cast(rays)
    along = np.einsum("hwc,hwc->hw", hits.normals, rays[..., 3:])
    normals = hits.normals * -np.sign(along)[..., None]  # a thin panel is visible from either side
    return View(hits.distance, normals, np.abs(along) / _ray_lengths(camera), hits.mesh)


@lru_cache(8)
def _rays(camera: Camera) -> NDArray[np.float32]:
    return camera.rays()


@lru_cache(8)
def _ray_lengths(camera: Camera) -> NDArray[np.float32]:
    return np.linalg.norm(camera.rays(), axis=-1)


@dataclass(frozen=True)
class DepthSensor:
    """One depth camera with its own systematic errors, the same for all its frames.

    near, far: range, metres. step: quantisation at 1 m, metres; step and noise grow with the range squared.
    noise: standard deviation in quantisation steps. jitter: lateral noise, pixels at 640 columns.
    distortion: (6,) factors of a smooth depth error over the image, each a share of the depth.
    grazing: cosine of the angle below which pixels are lost. edge: relative depth jump at which pixels are lost.
    ripple: standard deviation, in quantisation steps, of noise that is correlated over patches of the image.
    """

    camera: Camera
    near: float
    far: float
    step: float
    noise: float
    jitter: float
    distortion: FloatArray
    grazing: float
    edge: float
    ripple: float = 0.0


def pinhole(width: int, field_of_view: float) -> Camera:
    """A 4:3 camera with the given columns and horizontal field of view (radians)."""
    focal, height = width / 2 / np.tan(field_of_view / 2), width * 3 // 4
    return Camera(width, height, focal, focal, (width - 1) / 2, (height - 1) / 2)


def random_sensor(rng: Generator, width: int = 320) -> DepthSensor:
    """A typical structured-light or stereo camera: 50-75 degrees wide, range 0.4 to 4.5 (sometimes 6) metres."""
    camera = pinhole(width, np.radians(rng.uniform(50, 75)))
    far = rng.uniform(4.5, 6.0) if rng.random() < 0.25 else rng.uniform(3.0, 4.5)
    return DepthSensor(
        camera,
        near=rng.uniform(0.3, 0.55),
        far=far,
        step=0.004 * rng.uniform(0.15, 1.0),
        noise=rng.uniform(0.3, 1.0),
        jitter=rng.uniform(0.3, 1.0),
        distortion=rng.normal(0, rng.uniform(0.001, 0.007), 6),
        grazing=rng.uniform(0.06, 0.25),
        edge=rng.uniform(0.02, 0.06),
        ripple=rng.uniform(0.2, 1.2),
    )


def distortion_field(sensor: DepthSensor) -> NDArray[np.float32]:
    """Factor (H, W) for a sensor's systematic depth error: a smooth quadratic over the image."""
    return 1 + _quadratics(sensor.camera.height, sensor.camera.width) @ sensor.distortion.astype(np.float32)


@lru_cache(8)
def _quadratics(height: int, width: int) -> NDArray[np.float32]:
    """The six quadratic functions over an image, (H, W, 6)."""
    v, u = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    return np.stack([np.ones_like(u), u, v, u * u - 0.5, v * v - 0.5, u * v], -1).astype(np.float32)


def smooth_noise(rng: Generator, shape: tuple[int, int]) -> FloatArray:
    """Unit-variance noise (H, W), correlated between neighbouring pixels as in block matching."""
    white = rng.standard_normal((shape[0] + 2, shape[1] + 2), np.float32)
    rows = white[:-2] + 2 * white[1:-1] + white[2:]
    return (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / 6.0  # (1 2 1) twice has energy 6 x 6


def observe(rng: Generator, sensor: DepthSensor, view: View, hole_rate: FloatArray, calm: float = 1.0) -> FloatArray:
    """The depth image (H, W) of a view: metres, 0 without a measurement.

    hole_rate: (M,) by mesh. calm: factor on noise and quantisation; 1 for a single frame, smaller for frames that will
    be fused, because averaging fifty frames reduces both.
    """
    depth = _shaken(rng, sensor, view.depth) * distortion_field(sensor)
    inverse_step = 1.0 / max(sensor.step * calm, 1e-6)
    with np.errstate(divide="ignore", invalid="ignore"):
        disparity = inverse_step / depth + sensor.noise * smooth_noise(rng, depth.shape)
        if sensor.ripple:
            disparity += sensor.ripple * _ripples(rng, depth.shape)
        measured = inverse_step / np.round(disparity)
    lost = _lost(rng, sensor, view, depth, hole_rate)
    good = np.isfinite(measured) & (measured > sensor.near) & (measured < sensor.far) & ~lost
    return np.where(good, measured, 0.0)


def _shaken(rng: Generator, sensor: DepthSensor, depth: FloatArray) -> FloatArray:
    """Lateral noise: a pixel may take the depth of its neighbour."""
    height, width = depth.shape
    sigma = sensor.jitter * width / 640
    shift = np.rint(rng.standard_normal((2, height, width), np.float32) * sigma).astype(np.int64)
    rows = np.clip(np.arange(height)[:, None] + shift[0], 0, height - 1)
    columns = np.clip(np.arange(width) + shift[1], 0, width - 1)
    return depth[rows, columns]


def _lost(
    rng: Generator, sensor: DepthSensor, view: View, depth: FloatArray, hole_rate: FloatArray
) -> NDArray[np.bool_]:
    """Mask of lost pixels: at depth edges, at grazing angles, on dark or shiny surfaces, and at random."""
    chance = rng.random(depth.shape, np.float32)
    at_edge = _depth_edges(depth, sensor.edge * 320 / depth.shape[1]) & (chance < 0.8)
    grazing = view.cosine < sensor.grazing * (0.5 + chance)
    rate = np.append(hole_rate, 0.0).astype(np.float32)[view.mesh]
    holes = chance < rate * _blotches(rng, depth.shape) if rate.any() else False
    return at_edge | grazing | holes | (chance < 0.004)


def _depth_edges(depth: FloatArray, jump: float) -> NDArray[np.bool_]:
    """Mask (H, W) of pixels on either side of a depth step larger than `jump` times the depth."""
    edge = np.zeros(depth.shape, bool)
    with np.errstate(invalid="ignore"):
        across = np.abs(np.diff(depth, axis=1)) > jump * np.minimum(depth[:, :-1], depth[:, 1:])
        down = np.abs(np.diff(depth, axis=0)) > jump * np.minimum(depth[:-1], depth[1:])
    edge[:, :-1] |= across
    edge[:, 1:] |= across
    edge[:-1] |= down
    edge[1:] |= down
    return edge


def _ripples(rng: Generator, shape: tuple[int, int]) -> FloatArray:
    """Noise (H, W) of about unit variance with a correlation length of a fortieth of the image width."""
    patch = max(2, shape[1] // 40)
    coarse = rng.normal(0, 1.3, (shape[0] // patch + 2, shape[1] // patch + 2))  # interpolation removes about a third
    return _enlarged(coarse, patch, shape)


def _blotches(rng: Generator, shape: tuple[int, int]) -> FloatArray:
    """A smooth random pattern (H, W) between 0 and 1.5 that clusters holes into patches."""
    coarse = rng.uniform(-0.5, 2.0, (shape[0] // 12 + 2, shape[1] // 12 + 2))
    return np.clip(_enlarged(coarse, 12, shape), 0, 1.5)


def _enlarged(coarse: FloatArray, factor: int, shape: tuple[int, int]) -> FloatArray:
    """A coarse image interpolated to (H, W)."""
    return zoom(coarse.astype(np.float32), factor, order=1)[: shape[0], : shape[1]]
