# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Pictures of clouds: matches, alignments, warps and features, drawn without a screen."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lepard_ros.evaluation import metrics
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.geometry.flow import blend_flow
from lepard_ros.registration.types import Matches
from lepard_ros.report.figure import INLIER, OUTLIER, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lepard_ros.matcher import EncodedCloud


SOURCE_COLOUR, TARGET_COLOUR = (0.95, 0.70, 0.34), (0.53, 0.72, 0.68)
MAX_POINTS = 25_000  # drawn of a cloud
MAX_RIGHT, MAX_WRONG = 150, 60  # drawn of the matches
LIGHT = np.array([0.3, -0.8, -0.52])
VIEW_PITCH = 0.45  # radians: the camera's own view, from a little higher


@dataclass(frozen=True)
class View:
    """An orthographic view: rotation (3, 3) whose rows are right, down and away."""

    rotation: FloatArray

    def flat(self, points: FloatArray) -> FloatArray:
        """Points (N, 3) as right, up, away (N, 3)."""
        turned = points @ self.rotation.T
        return turned * [1, -1, 1]


def sensor_view(pitch: float = VIEW_PITCH) -> View:
    """The view of a camera whose z looks forward and y down, raised by `pitch` radians."""
    cosine, sine = np.cos(pitch), np.sin(pitch)
    return View(np.array([[1, 0, 0], [0, cosine, -sine], [0, sine, cosine]]))


def matches_figure(
    source: FloatArray,
    target: FloatArray,
    matches: Matches,
    inliers: NDArray[np.bool_],
    transform: FloatArray | None = None,
    title: str = "",
    view: View | None = None,
) -> "Figure":
    """Source (N, 3) on the left, target (M, 3) on the right, lines between the matches: inliers blue, outliers red.

    transform: (4, 4) source to target, so that both stand alike; without one the source is shown as it came.
    """
    view = view or sensor_view()
    pose = np.eye(4) if transform is None else transform
    left = view.flat(metrics.transform_points(pose, _thinned(source)))
    right = view.flat(_thinned(target))
    shift = _side_by_side(left, right)
    figure = new_figure(9, 4.6)
    axes = figure.add_subplot()
    _draw_cloud(axes, left + shift, SOURCE_COLOUR)
    _draw_cloud(axes, right, TARGET_COLOUR)
    starts = view.flat(metrics.transform_points(pose, matches.source)) + shift
    _draw_lines(axes, starts, view.flat(matches.target), inliers)
    _finish(axes, f"{title}   {_share_right(inliers)}".strip())
    return figure


def _share_right(inliers: NDArray[np.bool_]) -> str:
    """Number of correct matches, and number drawn of each kind (not proportional)."""
    right, wrong = int(inliers.sum()), int((~inliers).sum())
    if not len(inliers):
        return "no matches"
    drawn = f"drawn: {min(right, MAX_RIGHT)} right (blue), {min(wrong, MAX_WRONG)} wrong (red)"
    return f"{right} of {right + wrong} matches right; {drawn}"


def alignment_figure(source: FloatArray, target: FloatArray, transform: FloatArray, title: str = "") -> "Figure":
    """Source (N, 3) laid on the target (M, 3): from the sensor, and from above."""
    moved = metrics.transform_points(transform, _thinned(source))
    figure = new_figure(9, 4.4)
    for place, (pitch, name) in enumerate(((VIEW_PITCH, "from the sensor"), (np.pi / 2, "from above"))):
        view = sensor_view(pitch)
        axes = figure.add_subplot(1, 2, place + 1)
        both = np.concatenate([view.flat(_thinned(target)), view.flat(moved)])
        colours = np.repeat([TARGET_COLOUR, SOURCE_COLOUR], [len(both) - len(moved), len(moved)], axis=0)
        _draw_cloud(axes, both, colours)
        _finish(axes, f"{title} {name}".strip())
    return figure


def warp_figure(
    source: FloatArray, target: FloatArray, warped: FloatArray, errors: FloatArray | None = None, title: str = ""
) -> "Figure":
    """Source (N, 3), the same warped on the target (M, 3), and if known the error (N,) in metres as a colour."""
    figure = new_figure(9 if errors is None else 12, 4.4)
    view = sensor_view(0.15)
    panels = [("source", source, None), ("warped on the target", warped, target)]
    for place, (name, points, behind) in enumerate(panels):
        axes = figure.add_subplot(1, 2 if errors is None else 3, place + 1)
        if behind is not None:
            _draw_cloud(axes, view.flat(_thinned(behind)), TARGET_COLOUR)
        _draw_cloud(axes, view.flat(_thinned(points)), SOURCE_COLOUR)
        _finish(axes, f"{title} {name}".strip() if place == 0 else name)
    if errors is not None:
        axes = figure.add_subplot(1, 3, 3)
        flat = view.flat(warped)
        dots = axes.scatter(flat[:, 0], flat[:, 1], c=100 * errors, s=4, cmap="turbo", vmin=0, vmax=10, lw=0)
        figure.colorbar(dots, ax=axes, label="error, cm", shrink=0.8)
        _finish(axes, "error")
    return figure


def deformation_figure(
    source: FloatArray, target: FloatArray, matches: Matches, inliers: NDArray[np.bool_], warped: FloatArray | None
) -> "Figure":
    """Source (N, 3) and target (M, 3) with their matches, and beside them the warped source (N, 3) on the target.

    inliers: (K,) the matches that agree with the warp, blue; the others are red. warped: None for a refused warp.
    """
    figure, view = new_figure(13, 4.6), sensor_view(0.15)
    left, right = view.flat(_thinned(source)), view.flat(_thinned(target))
    shift = _side_by_side(left, right)
    axes = figure.add_subplot(1, 3, (1, 2))
    _draw_cloud(axes, left + shift, SOURCE_COLOUR)
    _draw_cloud(axes, right, TARGET_COLOUR)
    _draw_lines(axes, view.flat(matches.source) + shift, view.flat(matches.target), inliers)
    _finish(axes, f"source and target: {inliers.sum()} of {len(inliers)} matches agree (blue)")
    axes = figure.add_subplot(1, 3, 3)
    moved = np.zeros((0, 3)) if warped is None else view.flat(_thinned(warped))
    colours = np.repeat([TARGET_COLOUR, SOURCE_COLOUR], [len(right), len(moved)], axis=0)
    _draw_cloud(axes, np.concatenate([right, moved]), colours)
    _finish(axes, "the warp was refused" if warped is None else "warped source on the target")
    return figure


def features_figure(
    first: "EncodedCloud", second: "EncodedCloud", transform: FloatArray | None = None, title: str = ""
) -> "Figure":
    """Both clouds coloured by their features: similar colours mean similar features."""
    colours = feature_colours(first, second)
    view = sensor_view()
    pose = np.eye(4) if transform is None else transform
    left = view.flat(metrics.transform_points(pose, first.surface.points))
    right = view.flat(second.surface.points)
    figure = new_figure(9, 4.4)
    axes = figure.add_subplot()
    _draw_cloud(axes, left + _side_by_side(left, right), colours[0], shaded=False)
    _draw_cloud(axes, right, colours[1], shaded=False)
    _finish(axes, title)
    return figure


def feature_colours(first: "EncodedCloud", second: "EncodedCloud") -> tuple[FloatArray, FloatArray]:
    """Colours (N, 3) and (M, 3) in [0, 1] for the points of both surfaces.

    The three main axes of both clouds' coarse features together are red, green and blue; a surface point takes the
    blend of its three nearest coarse points, by inverse distance.
    """
    features = np.concatenate([cloud.features.cpu().numpy() for cloud in (first, second)]).astype(np.float64)
    features /= np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    centred = features - features.mean(axis=0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:3]
    values = centred @ axes.T
    low, high = np.percentile(values, [2, 98], axis=0)
    colours = np.clip((values - low) / np.maximum(high - low, 1e-12), 0, 1)
    split = np.split(colours, [len(first)])
    spread = []
    for cloud, own in zip((first, second), split, strict=True):
        coarse = cloud.coarse_points - cloud.offset
        spread.append(blend_flow(cloud.surface.points, coarse, own, radius=np.inf).clip(0, 1))
    return spread[0], spread[1]


def _thinned(points: FloatArray) -> FloatArray:
    """At most MAX_POINTS of the points, drawn with a fixed seed."""
    if len(points) <= MAX_POINTS:
        return np.asarray(points, dtype=float)
    return np.asarray(points, dtype=float)[np.random.default_rng(0).choice(len(points), MAX_POINTS, replace=False)]


def _side_by_side(left: FloatArray, right: FloatArray) -> FloatArray:
    """The shift (3,) that puts `left` to the left of `right`, at the same height, ignoring a few stray points."""
    low, high = np.percentile(left, [1, 99], axis=0), np.percentile(right, [1, 99], axis=0)
    gap = 0.12 * (low[1, 0] - low[0, 0] + high[1, 0] - high[0, 0])
    return np.array([high[0, 0] - low[1, 0] - gap, high.mean(axis=0)[1] - low.mean(axis=0)[1], 0.0])


def _draw_cloud(axes: "Axes", flat: FloatArray, colour: Any, shaded: bool = True) -> None:
    """Points (N, 3) as right, up, away: far ones first, each as bright as its surface faces the light."""
    colours = np.broadcast_to(np.asarray(colour, dtype=float), (len(flat), 3))
    if shaded:
        colours = np.clip(colours * _brightness(flat)[:, None], 0, 1)
    order = np.argsort(-flat[:, 2])
    size = np.clip(60_000 / max(1, len(flat)), 1.0, 8.0)
    axes.scatter(flat[order, 0], flat[order, 1], c=colours[order], s=size, lw=0, rasterized=True)


def _brightness(points: FloatArray, neighbours: int = 10) -> FloatArray:
    """How bright (N,) a surface is under one lamp, from the plane through each point's neighbours."""
    from scipy.spatial import cKDTree

    if len(points) <= neighbours:
        return np.ones(len(points))
    _, index = cKDTree(points).query(points, k=neighbours)
    centred = points[index] - points[index].mean(axis=1, keepdims=True)
    normals = np.linalg.eigh(np.einsum("nki,nkj->nij", centred, centred))[1][:, :, 0]
    return 0.55 + 0.5 * np.abs(normals @ (LIGHT * [1, -1, 1]))


def _draw_lines(axes: "Axes", starts: FloatArray, ends: FloatArray, inliers: NDArray[np.bool_]) -> None:
    """Lines of the matches, wrong ones below right ones; of each kind a random part, so that neither hides all."""
    from matplotlib.collections import LineCollection

    for right, colour, alpha, max_lines in ((False, OUTLIER, 0.4, MAX_WRONG), (True, INLIER, 0.9, MAX_RIGHT)):
        own = np.flatnonzero(inliers == right)
        if len(own) > max_lines:
            own = np.random.default_rng(0).choice(own, max_lines, replace=False)
        segments = np.stack([starts[own, :2], ends[own, :2]], axis=1)
        axes.add_collection(LineCollection(list(segments), colors=colour, linewidths=0.7, alpha=alpha))


def _finish(axes: "Axes", title: str) -> None:
    axes.set_aspect("equal")
    axes.axis("off")
    axes.autoscale_view()
    axes.set_title(title, fontsize=10)
