# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Curves and bars over the records of an evaluation: recall, errors, times, calibration."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.evaluation.bootstrap import mean_interval
from lepard_ros.evaluation.tables import is_success
from lepard_ros.geometry.arrays import FloatArray
from lepard_ros.report.figure import INLIER, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINE_COLOURS = ("#1f5fd0", "#e07b00", "#2a9d4a", "#8e44ad", "#7f7f7f", "#c0392b", "#17a2b8", "#b8860b")


def recall_figure(grouped: Mapping[str, Sequence[dict[str, Any]]], bands: Sequence[tuple[float, float]]) -> "Figure":
    """Recall over overlap of every method, with 95 % intervals."""
    figure = new_figure(6.4, 3.8)
    axes = figure.add_subplot()
    for place, (name, records) in enumerate(grouped.items()):
        points = []
        for low, high in bands:
            inside = [float(is_success(r)) for r in records if low <= r["overlap"] < high]
            if inside:
                middle = np.mean([r["overlap"] for r in records if low <= r["overlap"] < high])
                points.append((middle, *mean_interval(inside)))
        if not points:
            continue
        where, mean, low_edge, high_edge = 100 * np.array(points).T
        colour = LINE_COLOURS[place % len(LINE_COLOURS)]
        axes.plot(where, mean, "o-", color=colour, label=name, ms=4)
        axes.fill_between(where, low_edge, high_edge, color=colour, alpha=0.12, lw=0)
    axes.set(xlabel="overlap, %", ylabel="recall, %", ylim=(-3, 103))
    _decorate(axes)
    return figure


def error_figure(grouped: Mapping[str, Sequence[dict[str, Any]]]) -> "Figure":
    """How many of all pairs are within a rotation and a translation error: refused pairs never are."""
    figure = new_figure(9, 3.6)
    for place, (key, label, upper, factor) in enumerate(
        (("rre", "rotation error, degrees", 20.0, 1.0), ("rte", "translation error, cm", 60.0, 100.0))
    ):
        axes = figure.add_subplot(1, 2, place + 1)
        for number, (name, records) in enumerate(grouped.items()):
            values = [factor * r[key] if r.get(key) is not None else np.inf for r in records]
            limits = np.linspace(0, upper, 200)
            share = [100 * np.mean(np.asarray(values) <= limit) for limit in limits]
            axes.plot(limits, share, color=LINE_COLOURS[number % len(LINE_COLOURS)], label=name)
        axes.set(xlabel=label, ylabel="pairs within, %", ylim=(-3, 103), xlim=(0, upper))
        _decorate(axes)
    return figure


def histogram_figure(values: Mapping[str, Sequence[float]], label: str, limit: float) -> "Figure":
    """One histogram per method on a common axis; what lies beyond `limit` is in the last bin."""
    figure = new_figure(6.4, 1.2 + 1.1 * len(values))
    edges = np.linspace(0, limit, 31)
    for place, (name, own) in enumerate(values.items()):
        axes = figure.add_subplot(len(values), 1, place + 1)
        axes.hist(np.clip(own, 0, limit), bins=list(edges), color=LINE_COLOURS[place % len(LINE_COLOURS)], alpha=0.85)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7, labelbottom=place == len(values) - 1)
        axes.locator_params(axis="y", integer=True)
    axes.set_xlabel(label)
    return figure


def timing_figure(summaries: Mapping[str, dict[str, Any]]) -> "Figure":
    """Seconds per pair of every method, by stage where it tells them."""
    figure = new_figure(8.0, 0.9 + 0.42 * len(summaries))
    axes = figure.add_subplot()
    stages = list(dict.fromkeys(stage for s in summaries.values() for stage in s["stages"]))
    for row, summary in enumerate(summaries.values()):
        start, parts = 0.0, summary["stages"] or {"": summary["seconds"]}
        for stage, seconds in parts.items():
            colour = LINE_COLOURS[stages.index(stage) % len(LINE_COLOURS)] if stage else "#b0b0b0"
            axes.barh(row, seconds, left=start, color=colour, label=stage or None)
            start += seconds
        axes.text(
            start, row, f" {summary['seconds']:.2f} s (CPU {summary['cpu_seconds']:.2f} s)", va="center", fontsize=8
        )
    axes.set_yticks(range(len(summaries)), list(summaries))
    axes.invert_yaxis()
    axes.margins(x=0.3)
    axes.set_xlabel("wall seconds per pair, one thread")
    _decorate(axes, outside=True)
    return figure


def calibration_figure(bins: FloatArray) -> "Figure":
    """How often a match of a confidence is right. bins: (B, 3), number, sum of confidences, number right."""
    figure = new_figure(4.2, 3.8)
    axes = figure.add_subplot()
    used = bins[bins[:, 0] > 0]
    axes.plot([0, 1], [0, 1], color="#bbbbbb", lw=1, label="honest")
    axes.plot(used[:, 1] / used[:, 0], used[:, 2] / used[:, 0], "o-", color=INLIER, label="matches")
    axes.set(xlabel="confidence", ylabel="share right", xlim=(0, 1), ylim=(0, 1))
    _decorate(axes)
    return figure


def _decorate(axes: "Axes", outside: bool = False) -> None:
    """Grid and legend; outside: the legend goes to the right of the axes."""
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if outside else {}
    if unique:
        axes.legend(unique.values(), unique.keys(), fontsize=8, frameon=False, **place)
