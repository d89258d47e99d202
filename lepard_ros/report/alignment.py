# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One alignment of two clouds as text and as JSON."""

from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.geometry.arrays import BoolArray, FloatArray
from lepard_ros.registration.types import Matches, Registration

if TYPE_CHECKING:
    from lepard_ros.registration.deformable.warp import Warp


def rigid_text(result: Registration) -> str:
    """A registration as text."""
    count = f"{int(result.inliers.sum())} of {len(result.inliers)} matches are inliers"
    if result.transform is None:
        return f"refused: {result.status.value} ({count})."
    matrix = "\n".join("  " + " ".join(f"{value:10.6f}" for value in row) for row in result.transform)
    lines = [f"accepted: {count}, overlap {100 * result.overlap:.0f} %, residual {100 * result.rmse:.1f} cm."]
    lines += ["source to target:", matrix]
    if result.covariance is not None:
        spread = np.sqrt(np.diag(result.covariance))
        turn = np.degrees(spread[3:]).max()
        lines.append(f"standard deviation: at most {100 * spread[:3].max():.2f} cm and {turn:.2f} degrees per axis.")
    return "\n".join([*lines, _time_text(result.seconds)])


def deformable_text(warp: "Warp", matches: Matches) -> str:
    """A warp as text."""
    count = f"{int(warp.match_inliers.sum())} of {len(matches.source)} matches are inliers"
    if not warp.ok:
        return f"refused: {warp.status.value} ({count})."
    surface = f"overlap {100 * warp.overlap:.0f} %, residual {100 * warp.residual:.1f} cm"
    return f"accepted: {count}, {len(warp.graph.nodes)} nodes, {surface}.\n{_time_text(warp.seconds)}"


def _time_text(seconds: dict[str, float]) -> str:
    return "seconds: " + ", ".join(f"{stage} {value:.2f}" for stage, value in seconds.items()) + "."


def rigid_json(result: Registration) -> dict[str, Any]:
    """A registration as plain JSON values; unknown values are null."""
    return {
        "mode": "rigid",
        "status": result.status.name,
        "transform": _listed(result.transform),
        "covariance": _listed(result.covariance),
        "rmse": result.rmse if np.isfinite(result.rmse) else None,
        "overlap": result.overlap,
        "seconds": result.seconds,
        "matches": _matches_json(result.matches, result.inliers),
    }


def deformable_json(warp: "Warp", matches: Matches) -> dict[str, Any]:
    """A warp as plain JSON values: its nodes, where they went and how they turned."""
    return {
        "mode": "deformable",
        "status": warp.status.name,
        "nodes": warp.graph.nodes.tolist(),
        "translations": warp.translations.tolist(),
        "rotation_vectors": warp.rotations.tolist(),
        "residual": warp.residual if np.isfinite(warp.residual) else None,
        "overlap": warp.overlap,
        "seconds": warp.seconds,
        "matches": _matches_json(matches, warp.match_inliers),
    }


def _matches_json(matches: Matches, inliers: BoolArray) -> dict[str, Any]:
    lists = {name: np.round(getattr(matches, name), 5).tolist() for name in ("source", "target", "confidence")}
    return {**lists, "inlier": inliers.tolist()}


def _listed(array: FloatArray | None) -> list[Any] | None:
    return None if array is None else array.tolist()
