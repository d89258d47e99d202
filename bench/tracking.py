# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Trackers on the same clouds: ours, KISS-ICP, small_gicp's odometry, and Open3D's frame-to-frame ICP.

    python bench/tracking.py DATA [--weights rigid] [--cases all every10 gap]
                                  [--methods lepard kiss-icp small-gicp open3d-icp]

DATA is what `lepard bag make` takes: a folder with depth images and poses, or synthetic:SEED. The cases: all frames;
every 10th frame (large motion); all frames but two seconds in the middle (the sensor is carried away). KISS-ICP and
frame-to-frame ICP always give a pose; ours may say that it has none.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lepard_ros.cloud.depth import depth_to_points
from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.data.recordings import select_frames
from lepard_ros.data.trajectories import Trajectory, compare
from lepard_ros.evaluation.replay import load_matcher
from lepard_ros.synthesis.room_recording import open_source
from lepard_ros.tracking.rigid import RigidTracker
from lepard_ros.tracking.track import TrackerSettings, TrackingState

CASES: dict[str, dict[str, object]] = {"all": {}, "every10": {"every": 10}, "gap": {"gap": (9.0, 2.0)}}
Step = Callable[[NDArray[np.float32], float], "NDArray[np.float64] | None"]


class Frame(NamedTuple):
    """One cloud. points: (H, W, 3). pose: (4, 4), the truth."""

    stamp: float
    points: NDArray[np.float32]
    pose: NDArray[np.float64] | None


def frames_of(source: str, case: str, first: int | None) -> Iterator[Frame]:
    """The clouds of a case."""
    recording = open_source(source)
    for frame in select_frames(recording.frames(), first=first, **CASES[case]):  # type: ignore[arg-type]
        yield Frame(frame.stamp_ns * 1e-9, depth_to_points(frame.depth, recording.camera), frame.pose)


def lepard(weights: str, fallback: str) -> Step:
    """Ours; prints its states at the end of a lost stretch."""
    tracker = RigidTracker(load_matcher(weights), TrackerSettings(fallback=fallback))
    lost = 0

    def step(points: NDArray[np.float32], stamp: float) -> NDArray[np.float64] | None:
        nonlocal lost
        track = tracker.process(points, stamp)
        if track.state is TrackingState.RELOCALISED:
            print(f"    found again after {lost} frames: {track.reason}")
        lost = lost + 1 if track.pose is None else 0
        return track.pose

    return step


def kiss_icp() -> Step:
    """KISS-ICP with the ranges of a depth camera indoors."""
    from kiss_icp.config import KISSConfig
    from kiss_icp.kiss_icp import KissICP

    config = KISSConfig()
    config.data.max_range, config.data.min_range, config.data.deskew = 8.0, 0.3, False
    config.mapping.voxel_size = 0.05
    config.adaptive_threshold.initial_threshold = 0.3
    odometry = KissICP(config)

    def step(points: NDArray[np.float32], stamp: float) -> NDArray[np.float64]:
        odometry.register_frame(_finite(points), np.zeros(0))
        return np.array(odometry.last_pose)

    return step


def small_gicp_odometry(spacing: float = 0.03, reach: float = 0.25) -> Step:
    """GICP of each cloud to a voxel map of all before it, from constant velocity."""
    import small_gicp

    target = small_gicp.GaussianVoxelMap(4 * spacing)
    pose, motion = np.eye(4), np.eye(4)

    def step(points: NDArray[np.float32], stamp: float) -> NDArray[np.float64]:
        nonlocal pose, motion
        cloud, _ = small_gicp.preprocess_points(_finite(points), spacing, 10, 1)
        if target.size():
            found = small_gicp.align(target, cloud, pose @ motion, reach, 1).T_target_source
            pose, motion = found, np.linalg.inv(pose) @ found
        target.insert(cloud, pose)
        return np.array(pose)

    return step


def open3d_icp(spacing: float = 0.025, reach: float = 0.1) -> Step:
    """Point-to-plane ICP of each cloud to the one before it, from no motion."""
    o3d = import_open3d()
    registration = o3d.pipelines.registration
    pose, before = np.eye(4), None

    def step(points: NDArray[np.float32], stamp: float) -> NDArray[np.float64]:
        nonlocal pose, before
        cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(_finite(points))).voxel_down_sample(spacing)
        cloud.estimate_normals(o3d.geometry.KDTreeSearchParamHybrid(3 * spacing, 30))
        if before is not None:
            method = registration.TransformationEstimationPointToPlane()
            pose = pose @ registration.registration_icp(cloud, before, reach, np.eye(4), method).transformation
        before = cloud
        return pose

    return step


def _finite(points: NDArray[np.float32]) -> NDArray[np.float64]:
    flat = points.reshape(-1, 3).astype(np.float64)
    return flat[np.isfinite(flat).all(axis=1)]


def measure(name: str, step: Step, frames: Iterator[Frame]) -> None:
    """Run one method over one case and print its row."""
    estimate: list[tuple[float, NDArray[np.float64]]] = []
    truth: list[tuple[float, NDArray[np.float64]]] = []
    seconds, count = 0.0, 0
    for frame in frames:
        started = time.process_time()
        pose = step(frame.points, frame.stamp)
        seconds += time.process_time() - started
        count += 1
        estimate += [(frame.stamp, pose)] if pose is not None else []
        truth += [(frame.stamp, frame.pose)] if frame.pose is not None else []
    error = compare(_trajectory(estimate), _trajectory(truth))
    print(
        f"  {name:<12} tracked {len(estimate)}/{count}  ATE {error.ate_rmse:.3f} m  RPE {error.rpe_translation:.3f} m"
        f" {error.rpe_rotation:.2f} deg  worst {error.errors.max():.2f} m {error.turns.max():.1f} deg"
        f"  false {int(error.false().sum())}  {seconds / count:.3f} CPU-s a frame",
        flush=True,
    )


def _trajectory(rows: list[tuple[float, NDArray[np.float64]]]) -> Trajectory:
    return Trajectory(np.array([stamp for stamp, _ in rows]), np.array([pose for _, pose in rows]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--weights", default="rigid")
    parser.add_argument("--fallback", default="none")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--methods", nargs="+", default=["lepard", "kiss-icp", "small-gicp", "open3d-icp"])
    parser.add_argument("--frames", type=int)
    args = parser.parse_args()
    makers = {
        "lepard": lambda: lepard(args.weights, args.fallback),
        "kiss-icp": kiss_icp,
        "small-gicp": small_gicp_odometry,
        "open3d-icp": open3d_icp,
    }
    for case in args.cases:
        print(f"{args.data}, {case}", flush=True)
        for name in args.methods:
            measure(name, makers[name](), frames_of(args.data, case, args.frames))


if __name__ == "__main__":
    main()
