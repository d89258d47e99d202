# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Classical rigid registration baselines: Open3D and KISS-Matcher.

All of them use the clouds on a 5 cm grid and end with the same ICP, so that only their search differs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lepard_ros.cloud.open3d import import_open3d
from lepard_ros.errors import InputError
from lepard_ros.geometry.arrays import FloatArray

GRID = 0.05  # metres
RANSAC_ITERATIONS = 100_000
ICP_DISTANCE = 1.5 * GRID
LONE_ICP_DISTANCE = 0.3  # metres: ICP without an initial guess needs a larger correspondence distance
KISS_GRID = 0.05  # metres: the best of 0.05, 0.075, 0.1, 0.15 on 3DMatch and TUM
KISS_LEAST_INLIERS = 5  # KISS-Matcher's own example treats fewer inliers as a failure


class Guess(NamedTuple):
    """A baseline's result: source to target (4, 4), and whether it reports success."""

    transform: FloatArray
    accepted: bool


def fpfh_ransac(source: FloatArray, target: FloatArray) -> Guess:
    """FPFH features, RANSAC with 100,000 iterations, ICP."""
    o3d = import_open3d()
    o3d.utility.random.seed(0)
    reg = o3d.pipelines.registration
    first, second = _prepared(source), _prepared(target)
    result = reg.registration_ransac_based_on_feature_matching(
        first,
        second,
        _fpfh(first),
        _fpfh(second),
        True,
        ICP_DISTANCE,
        reg.TransformationEstimationPointToPoint(False),
        3,
        [
            reg.CorrespondenceCheckerBasedOnEdgeLength(0.9),
            reg.CorrespondenceCheckerBasedOnDistance(ICP_DISTANCE),
        ],
        reg.RANSACConvergenceCriteria(RANSAC_ITERATIONS, 0.999),
    )
    return _refined(first, second, result.transformation, len(result.correspondence_set) > 0)


def fpfh_fgr(source: FloatArray, target: FloatArray) -> Guess:
    """FPFH features, Fast Global Registration, ICP."""
    o3d = import_open3d()
    o3d.utility.random.seed(0)
    reg = o3d.pipelines.registration
    first, second = _prepared(source), _prepared(target)
    option = reg.FastGlobalRegistrationOption(
        maximum_correspondence_distance=GRID, use_absolute_scale=True, decrease_mu=True
    )
    result = reg.registration_fgr_based_on_feature_matching(first, second, _fpfh(first), _fpfh(second), option)
    return _refined(first, second, result.transformation, len(result.correspondence_set) > 0)


def icp(source: FloatArray, target: FloatArray) -> Guess:
    """Point-to-plane ICP from the identity."""
    reg = import_open3d().pipelines.registration
    return _from_identity(reg.registration_icp, source, target, reg.TransformationEstimationPointToPlane())


def gicp(source: FloatArray, target: FloatArray) -> Guess:
    """Generalised ICP from the identity."""
    reg = import_open3d().pipelines.registration
    return _from_identity(
        reg.registration_generalized_icp, source, target, reg.TransformationEstimationForGeneralizedICP()
    )


def _from_identity(align: Callable[..., Any], source: FloatArray, target: FloatArray, estimation: Any) -> Guess:
    criteria = import_open3d().pipelines.registration.ICPConvergenceCriteria(max_iteration=60)
    result = align(_prepared(source), _prepared(target), LONE_ICP_DISTANCE, np.eye(4), estimation, criteria)
    return Guess(np.asarray(result.transformation), len(result.correspondence_set) > 0)


def kiss_matcher(source: FloatArray, target: FloatArray, grid: float = KISS_GRID) -> Guess:
    """KISS-Matcher (FasterPFH, graph-based pruning, graduated non-convexity), ICP."""
    try:
        import kiss_matcher as kiss
    except ModuleNotFoundError as error:
        raise InputError("the method kiss-matcher needs a package: pip install kiss-matcher.") from error
    matcher = kiss.KISSMatcher(kiss.KISSMatcherConfig(voxel_size=grid))
    solution = matcher.estimate(source.astype(np.float32), target.astype(np.float32))
    transform = np.eye(4)
    transform[:3, :3] = np.asarray(solution.rotation)
    transform[:3, 3] = np.ravel(solution.translation)
    accepted = bool(solution.valid) and matcher.get_num_final_inliers() >= KISS_LEAST_INLIERS
    return _refined(_prepared(source), _prepared(target), transform, accepted)


RIGID_BASELINES: dict[str, Callable[[FloatArray, FloatArray], Guess]] = {
    "fpfh+ransac": fpfh_ransac,
    "fpfh+fgr": fpfh_fgr,
    "icp": icp,
    "gicp": gicp,
    "kiss-matcher": kiss_matcher,
}


def _prepared(points: FloatArray) -> Any:
    """The cloud on the grid, with normals towards the sensor at the origin."""
    o3d = import_open3d()
    cloud = o3d.geometry.PointCloud(o3d.utility.Vector3dVector(np.asarray(points, dtype=np.float64)))
    cloud = cloud.voxel_down_sample(GRID)
    cloud.estimate_normals(o3d.geometry.KDTreeSearchParamHybrid(radius=2 * GRID, max_nn=30))
    cloud.orient_normals_towards_camera_location(np.zeros(3))
    return cloud


def _fpfh(cloud: Any) -> Any:
    """The FPFH features of a prepared cloud."""
    o3d = import_open3d()
    search = o3d.geometry.KDTreeSearchParamHybrid(radius=5 * GRID, max_nn=100)
    return o3d.pipelines.registration.compute_fpfh_feature(cloud, search)


def _refined(first: Any, second: Any, transform: FloatArray, accepted: bool) -> Guess:
    """The motion after point-to-plane ICP."""
    reg = import_open3d().pipelines.registration
    estimation = reg.TransformationEstimationPointToPlane()
    criteria = reg.ICPConvergenceCriteria(max_iteration=30)
    result = reg.registration_icp(first, second, ICP_DISTANCE, transform, estimation, criteria)
    return Guess(np.asarray(result.transformation), accepted)
