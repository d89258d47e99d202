# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Recordings of a moving depth camera: a TUM folder or a 7-Scenes folder."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import Camera
from lepard_ros.data.trajectories import read_tum, stamps_to_ns
from lepard_ros.errors import InputError

# TUM publishes no camera file. Its depth images are registered to the colour camera, whose published calibrations
# (fx, fy, cx, cy; pixels) these are; sequences of another Kinect have the driver's default.
TUM_CAMERAS = {
    "1": (517.3, 516.5, 318.6, 255.3),
    "2": (520.9, 521.0, 325.1, 249.7),
    "3": (535.4, 539.2, 320.1, 247.6),
}
DEFAULT_KINECT = (525.0, 525.0, 319.5, 239.5)
TUM_SCALE = 5000.0
SEVEN_SCENES_CAMERA = Camera(640, 480, 585.0, 585.0, 320.0, 240.0)
SEVEN_SCENES_SCALE = 1000.0
SEVEN_SCENES_RATE = 30.0
SEVEN_SCENES_INVALID = 65535
START_NS = 10**9  # of recordings without a date: a stamp of zero would mean "unknown" to ROS
POSE_TOLERANCE_NS = 20_000_000
CAMERA_HELP = "camera file of the depth images (default: camera.txt beside them, else the data set's published one)"


class DepthFrame(NamedTuple):
    """One depth image. stamp_ns: when it was taken. depth: (H, W) metres, 0 where nothing was seen.

    pose: (4, 4) camera to world, or None where the recording has no truth.
    """

    stamp_ns: int
    depth: NDArray[np.float32]
    pose: NDArray[np.float64] | None


class Calibration(NamedTuple):
    """A camera, the units per metre of its depth images, and the source of both."""

    camera: Camera
    scale: float
    origin: str

    def __str__(self) -> str:
        """A readable description."""
        c = self.camera
        return f"fx {c.fx:g} fy {c.fy:g} cx {c.cx:g} cy {c.cy:g}, {self.scale:g} units a metre, from {self.origin}"


class _Shot(NamedTuple):
    """Where one image lies on the disc, and its pose."""

    stamp_ns: int
    path: Path
    pose: NDArray[np.float64] | None


@dataclass(frozen=True)
class Recording:
    """A sequence of depth images that is read from the disc one by one. invalid: what a pixel without depth holds."""

    calibration: Calibration
    shots: tuple[_Shot, ...]
    invalid: int = 0

    @property
    def camera(self) -> Camera:
        """The intrinsics of the camera."""
        return self.calibration.camera

    def __len__(self) -> int:
        """Number of images."""
        return len(self.shots)

    def frames(self) -> Iterator[DepthFrame]:
        """All images in order of time."""
        for shot in self.shots:
            yield DepthFrame(shot.stamp_ns, self._read(shot.path), shot.pose)

    def _read(self, path: Path) -> NDArray[np.float32]:
        raw = read_depth_png(path)
        if raw.shape != (self.camera.height, self.camera.width):
            raise InputError(
                f"{path} has {raw.shape[1]} x {raw.shape[0]} pixels, but the camera (from {self.calibration.origin}) "
                f"{self.camera.width} x {self.camera.height}: give a camera file that fits."
            )
        raw = np.where(raw == self.invalid, 0, raw) if self.invalid else raw
        return (raw / self.calibration.scale).astype(np.float32)


def open_recording(folder: Path, camera_file: Path | None = None) -> Recording:
    """The recording in a folder: TUM's layout or 7-Scenes'.

    camera_file: see `read_camera`; without one, the folder's camera.txt, else what its layout is known to have.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is neither a folder with depth images nor synthetic:SEED.")
    if (folder / "depth").is_dir():
        return _open_tum(folder, camera_file)
    if next(folder.glob("frame-*.depth.png"), None):
        return _open_seven_scenes(folder, camera_file)
    found = listing(folder)
    raise InputError(f"{folder} has neither depth/*.png (TUM) nor frame-*.depth.png (7-Scenes); it holds {found}.")


def listing(folder: Path, limit: int = 8) -> str:
    """A short listing of a folder, for an error message."""
    if not folder.is_dir():
        return "not a folder" if folder.exists() else "no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) + more) or "nothing"


def _calibration(folder: Path, camera_file: Path | None, known: Calibration) -> Calibration:
    """The camera of a folder: of the given file, else of its camera.txt, else what is known of its layout."""
    path = camera_file or folder / "camera.txt"
    if camera_file is None and not path.exists():
        return known
    return Calibration(*read_camera(path), str(path))


def tum_calibration(folder: Path) -> Calibration:
    """The published calibration of a TUM sequence's camera, chosen by the folder name: rgbd_dataset_freiburg2_..."""
    number = re.search(r"(?:freiburg|fr)([123])(?!\d)", folder.resolve().name)
    if number is None:
        return Calibration(Camera(640, 480, *DEFAULT_KINECT), TUM_SCALE, "the Kinect driver's default")
    camera = Camera(640, 480, *TUM_CAMERAS[number[1]])
    return Calibration(camera, TUM_SCALE, f"TUM's calibration of freiburg{number[1]}")


def read_depth_png(path: Path) -> NDArray[np.uint16]:
    """A 16-bit depth image: (H, W)."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            array = np.asarray(image)
    except (OSError, SyntaxError) as error:
        raise InputError(f"{path} is not a readable PNG image ({error}).") from error
    if array.ndim != 2 or array.dtype.itemsize < 2:
        shape = " x ".join(map(str, array.shape))
        raise InputError(f"{path} is not a depth image of one 16-bit channel; it holds {array.dtype} {shape}.")
    return array.astype(np.uint16)


def _open_tum(folder: Path, camera_file: Path | None) -> Recording:
    calibration = _calibration(folder, camera_file, tum_calibration(folder))
    truth = next(
        (folder / name for name in ("poses.txt", "groundtruth.txt") if (folder / name).is_file()),
        None,
    )
    paths = sorted((folder / "depth").glob("*.png"), key=_stamp_of)
    if not paths:
        raise InputError(f"{folder / 'depth'} has no PNG image; it holds {listing(folder / 'depth')}.")
    stamps = np.array([_stamp_of(path) for path in paths])
    poses = _poses_at(truth, stamps) if truth else [None] * len(paths)
    shots = tuple(_Shot(int(s), path, pose) for s, path, pose in zip(stamps, paths, poses, strict=True))
    return Recording(calibration, shots)


def _stamp_of(path: Path) -> int:
    """Nanoseconds from a file name in decimal seconds, without the rounding of a float."""
    whole, _, fraction = path.stem.partition(".")
    if not whole.isdigit() or (fraction and not fraction.isdigit()):
        raise InputError(f"{path} should be named by its time in seconds, as in 1305031453.374112.png.")
    return int(whole) * 10**9 + int((fraction + "0" * 9)[:9])


def read_camera(path: Path) -> tuple[Camera, float]:
    """The camera and the units per metre of a line such as `fx 517.3 fy 516.5 cx 318.6 cy 255.3 width 640 ...`."""
    try:
        words = next(line for line in path.read_text().splitlines() if not line.startswith("#")).split()
        values = dict(zip(words[::2], map(float, words[1::2]), strict=True))
        size = int(values["width"]), int(values["height"])
        return Camera(*size, *(values[name] for name in ("fx", "fy", "cx", "cy"))), values["depth_scale"]
    except (OSError, ValueError, KeyError, StopIteration) as error:
        line = "fx 525 fy 525 cx 319.5 cy 239.5 width 640 height 480 depth_scale 5000"
        raise InputError(f"{path} should hold one line such as '{line}' ({error}).") from error


def _poses_at(path: Path, stamps: NDArray[np.int64]) -> list[NDArray[np.float64] | None]:
    """The pose nearest in time to each stamp, None where there is none within the tolerance."""
    trajectory = read_tum(path)
    known = stamps_to_ns(trajectory.stamps)
    after = np.searchsorted(known, stamps).clip(0, len(known) - 1)
    before = (after - 1).clip(0)
    nearest = np.where(np.abs(known[before] - stamps) <= np.abs(known[after] - stamps), before, after)
    close = np.abs(known[nearest] - stamps) <= POSE_TOLERANCE_NS
    return [trajectory.poses[i] if ok else None for i, ok in zip(nearest, close, strict=True)]


def _open_seven_scenes(folder: Path, camera_file: Path | None) -> Recording:
    known = Calibration(SEVEN_SCENES_CAMERA, SEVEN_SCENES_SCALE, "7-Scenes' description")
    paths = sorted(folder.glob("frame-*.depth.png"))
    shots = [
        _Shot(START_NS + round(i * 1e9 / SEVEN_SCENES_RATE), path, _seven_scenes_pose(path))
        for i, path in enumerate(paths)
    ]
    return Recording(_calibration(folder, camera_file, known), tuple(shots), SEVEN_SCENES_INVALID)


def _seven_scenes_pose(path: Path) -> NDArray[np.float64] | None:
    pose_path = path.with_name(path.name.replace(".depth.png", ".pose.txt"))
    if not pose_path.is_file():
        return None
    try:
        pose = np.loadtxt(pose_path).reshape(4, 4)
    except (OSError, ValueError) as error:
        raise InputError(f"{pose_path} should hold a 4 x 4 matrix ({error}).") from error
    return pose if np.isfinite(pose).all() else None


def select_frames(
    frames: Iterable[DepthFrame],
    *,
    every: int = 1,
    gap: tuple[float, float] | None = None,
    first: int | None = None,
) -> Iterator[DepthFrame]:
    """Every n-th of the first frames, without those in the gap (start, length in seconds from the first frame)."""
    start_ns: int | None = None
    for index, frame in enumerate(frames):
        if first is not None and index >= first:
            return
        start_ns = frame.stamp_ns if start_ns is None else start_ns
        seconds = (frame.stamp_ns - start_ns) * 1e-9
        if index % every == 0 and not (gap and gap[0] <= seconds < gap[0] + gap[1]):
            yield frame


def shrink_camera(camera: Camera, stride: int) -> Camera:
    """The camera of an image of which every n-th pixel was kept, beginning with the first."""
    size = -(-camera.width // stride), -(-camera.height // stride)
    return Camera(
        *size,
        camera.fx / stride,
        camera.fy / stride,
        camera.cx / stride,
        camera.cy / stride,
    )
