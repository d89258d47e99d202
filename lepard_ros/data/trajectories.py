# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Trajectories: files in TUM format, and their errors (ATE, RPE) computed with evo."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from lepard_ros.errors import InputError

if TYPE_CHECKING:
    from evo.core.trajectory import PoseTrajectory3D

# A published pose with a larger error than one of these is false.
FALSE_POSE = 0.5  # metres
FALSE_TURN = 15.0  # degrees


@dataclass(frozen=True)
class Trajectory:
    """stamps: (K,) seconds, rising. poses: (K, 4, 4) sensor to world."""

    stamps: NDArray[np.float64]
    poses: NDArray[np.float64]

    def __len__(self) -> int:
        """How many poses there are."""
        return len(self.stamps)


@dataclass(frozen=True)
class TrajectoryError:
    """Error of an estimated trajectory, after rigid alignment to the ground truth.

    stamps: (K,) seconds of the compared poses. errors: (K,) metres, of which ate_rmse is the root mean square.
    turns: (K,) degrees, error of the rotation after the one rotation that aligns all of them best.
    rpe_translation: metres, rpe_rotation: degrees, root mean squares over one second of motion.
    estimate, truth: the aligned positions, (K, 3) metres in the truth's frame. alignment: (4, 4).
    """

    stamps: NDArray[np.float64]
    errors: NDArray[np.float64]
    turns: NDArray[np.float64]
    ate_rmse: float
    rpe_translation: float
    rpe_rotation: float
    estimate: NDArray[np.float64]
    truth: NDArray[np.float64]
    alignment: NDArray[np.float64]

    def false(self) -> NDArray[np.bool_]:
        """Which of the poses were false, by position or by rotation; (K,)."""
        return (self.errors > FALSE_POSE) | (self.turns > FALSE_TURN)


def stamps_to_ns(stamps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Seconds to nanoseconds, rounded to the microsecond that a float of today's date can hold."""
    return np.round(stamps * 1e6).astype(np.int64) * 1000


def read_tum(path: Path) -> Trajectory:
    """A file of lines `time tx ty tz qx qy qz qw`, with # comments."""
    try:
        rows = np.loadtxt(path, comments="#", ndmin=2)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a trajectory in TUM format ({error}).") from error
    if rows.shape[1:] != (8,) or not len(rows):
        raise InputError(f"{path} should have lines of eight numbers: time tx ty tz qx qy qz qw.")
    if not np.isfinite(rows).all() or (np.linalg.norm(rows[:, 4:], axis=1) < 1e-6).any():
        raise InputError(f"{path} holds a pose that is not finite or has a zero quaternion.")
    order = np.argsort(rows[:, 0], kind="stable")
    return Trajectory(rows[order, 0], poses_from_rows(rows[order, 1:]))


def write_tum(path: Path, trajectory: Trajectory) -> None:
    """Write lines `time tx ty tz qx qy qz qw`."""
    rows = np.column_stack([trajectory.stamps, rows_from_poses(trajectory.poses)])
    header = "timestamp tx ty tz qx qy qz qw (sensor to map)"
    np.savetxt(path, rows.reshape(-1, 8), fmt=["%.9f"] + ["%.7f"] * 7, header=header)


def poses_from_rows(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K, 7) of tx ty tz qx qy qz qw to (K, 4, 4)."""
    poses = np.tile(np.eye(4), (len(rows), 1, 1))
    if not len(rows):
        return poses
    poses[:, :3, :3] = Rotation.from_quat(rows[:, 3:]).as_matrix()
    poses[:, :3, 3] = rows[:, :3]
    return poses


def rows_from_poses(poses: NDArray[np.float64]) -> NDArray[np.float64]:
    """(K, 4, 4) to (K, 7) of tx ty tz qx qy qz qw."""
    if not len(poses):
        return np.zeros((0, 7))
    return np.column_stack([poses[:, :3, 3], Rotation.from_matrix(poses[:, :3, :3]).as_quat()])


def interpolate(trajectory: Trajectory, stamp: float, longest_gap: float = 0.5) -> NDArray[np.float64] | None:
    """The pose at a time between two poses at most `longest_gap` seconds apart, else None."""
    from scipy.spatial.transform import Slerp

    after = int(np.searchsorted(trajectory.stamps, stamp))
    if after < len(trajectory) and abs(trajectory.stamps[after] - stamp) < 1e-6:
        return trajectory.poses[after]
    if after == 0 or after == len(trajectory):
        return None
    pair = slice(after - 1, after + 1)
    times, poses = trajectory.stamps[pair], trajectory.poses[pair]
    if times[1] - times[0] > longest_gap:
        return None
    share = (stamp - times[0]) / (times[1] - times[0])
    pose = np.eye(4)
    pose[:3, :3] = Slerp([0, 1], Rotation.from_matrix(poses[:, :3, :3]))(share).as_matrix()
    pose[:3, 3] = (1 - share) * poses[0, :3, 3] + share * poses[1, :3, 3]
    return pose


def compare(estimate: Trajectory, truth: Trajectory, tolerance: float = 0.02) -> TrajectoryError:
    """ATE and RPE of an estimate; poses are paired by time within `tolerance` seconds."""
    metrics, sync = _evo()
    try:
        reference, measured = sync.associate_trajectories(_to_evo(truth), _to_evo(estimate), max_diff=tolerance)
    except sync.SyncException as error:
        raise InputError(f"The trajectory and its truth share no time ({error}).") from error
    if len(measured.timestamps) < 3:
        raise InputError("Fewer than three poses have a truth at the same time; nothing can be compared.")
    alignment = _align(measured, reference)
    ape = metrics.APE(metrics.PoseRelation.translation_part)
    ape.process_data((reference, measured))
    return TrajectoryError(
        stamps=np.array(measured.timestamps),
        errors=np.array(ape.error),
        turns=_turns(np.array(measured.poses_se3), np.array(reference.poses_se3)),
        ate_rmse=float(ape.get_statistic(metrics.StatisticsType.rmse)),
        rpe_translation=_relative_error(metrics, reference, measured, "translation_part"),
        rpe_rotation=_relative_error(metrics, reference, measured, "rotation_angle_deg"),
        estimate=np.array(measured.positions_xyz),
        truth=np.array(reference.positions_xyz),
        alignment=alignment,
    )


def _evo() -> tuple[Any, Any]:
    try:
        from evo.core import metrics, sync
    except ImportError as error:
        raise InputError("The trajectory error needs the package evo: pip install evo.") from error
    return metrics, sync


def _to_evo(trajectory: Trajectory) -> "PoseTrajectory3D":
    from evo.core.trajectory import PoseTrajectory3D

    return PoseTrajectory3D(poses_se3=list(trajectory.poses), timestamps=np.asarray(trajectory.stamps))


def _align(measured: "PoseTrajectory3D", reference: "PoseTrajectory3D") -> NDArray[np.float64]:
    """Move `measured` rigidly onto `reference` in place; by the first pose where the path has no extent."""
    from evo.core.geometry import GeometryException

    try:
        rotation, translation, _ = measured.align(reference)
        alignment = np.eye(4)
        alignment[:3, :3], alignment[:3, 3] = rotation, translation
        return alignment
    except GeometryException:
        return np.asarray(measured.align_origin(reference))


def _turns(measured: NDArray[np.float64], reference: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotation between poses (K, 4, 4) and the truth in degrees, (K,), after the rotation that aligns them best.

    The alignment of the positions would not do: those of a straight path leave the rotation about it open.
    """
    apart = Rotation.from_matrix(reference[:, :3, :3]) * Rotation.from_matrix(measured[:, :3, :3]).inv()
    return np.asarray(np.degrees((apart.mean().inv() * apart).magnitude()))


def _relative_error(metrics: Any, reference: "PoseTrajectory3D", measured: "PoseTrajectory3D", kind: str) -> float:
    """The root mean square over pairs one second apart, or NaN for a shorter trajectory."""
    step = max(1, round(1.0 / float(np.median(np.diff(reference.timestamps)))))
    if len(reference.timestamps) <= step:
        return float("nan")
    rpe = metrics.RPE(
        metrics.PoseRelation[kind],
        delta=step,
        delta_unit=metrics.Unit.frames,
        all_pairs=True,
    )
    rpe.process_data((reference, measured))
    return float(rpe.get_statistic(metrics.StatisticsType.rmse))
