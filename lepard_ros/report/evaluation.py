# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One self-contained page per evaluation: tables, curves, and the pairs themselves, failures first."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros.data.readers import PairSource, RigidPair
from lepard_ros.evaluation import metrics
from lepard_ros.evaluation.methods import LEPARD, LepardMethod, make_method
from lepard_ros.evaluation.pairs import INLIER_DISTANCE, Task
from lepard_ros.evaluation.tables import (
    BANDS,
    CRITERIA,
    TUM_BANDS,
    by_method,
    comparison_lines,
    is_success,
    number,
    rigid_rows,
    summarise_all,
)
from lepard_ros.report import cloud_pictures, curves
from lepard_ros.report.page import Page, made_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Record = dict[str, Any]

SHOWN_FAILURES, SHOWN_SUCCESSES = 6, 4

# --- rigid -----------------------------------------------------------------------------------------------------------


def rigid_report(directory: Path, task: Task, pairs: Sequence[RigidPair], records: Sequence[Record]) -> Path:
    """Write the page of a rigid evaluation; returns its path."""
    summaries, grouped = summarise_all(task.set_name, records), by_method(records)
    page = Page(f"Registration of {len(pairs)} pairs of {task.set_name}")
    count = "all" if task.count is None else f"{task.count}"
    page.text(f"{made_with()} Pairs: {count}, seed {task.seed}. Recall: {CRITERIA[task.set_name]}.")
    page.heading("Table")
    page.table(rigid_rows(task.set_name, summaries))
    for line in comparison_lines(summaries):
        page.text(line)
    if task.set_name != "unrelated":
        _add_curves(page, task.set_name, grouped)
    page.heading("Time per pair")
    page.figure(curves.timing_figure(summaries), "Wall seconds per pair on one thread, by stage where known.")
    _add_honesty(page, grouped, summaries)
    _add_pairs(page, task, pairs, grouped)
    return page.write(directory / "index.html")


def _add_curves(page: Page, set_name: str, grouped: dict[str, list[Record]]) -> None:
    page.heading("Recall and errors")
    bands = TUM_BANDS if set_name == "tum" else BANDS
    page.figure(curves.recall_figure(grouped, bands), "Recall over overlap, with 95 % bootstrap intervals.")
    page.figure(curves.error_figure(grouped), "Share of all pairs within an error; a refused pair never is.")
    ratios = {
        name: [r["inlier_ratio"] for r in own if r.get("inlier_ratio") is not None] for name, own in grouped.items()
    }
    ratios = {name: values for name, values in ratios.items() if values}
    if ratios:
        page.figure(curves.histogram_figure(ratios, "inlier ratio", 1.0), "Share of right matches, pair by pair.")


def _add_honesty(page: Page, grouped: dict[str, list[Record]], summaries: dict[str, Any]) -> None:
    """Why pairs were refused, and the calibration of confidences and covariances."""
    page.heading("Honesty")
    counts = {name: {key.upper(): n for key, n in s["statuses"].items()} for name, s in summaries.items()}
    statuses = sorted({status for own in counts.values() for status in own}, key=lambda s: (s != "OK", s))
    rows = [[name, *(str(own.get(status, 0)) for status in statuses)] for name, own in counts.items()]
    page.table([["method", *(status.replace("_", " ").lower() for status in statuses)], *rows])
    for name, own in grouped.items():
        bins = [r["confidence_bins"] for r in own if r.get("confidence_bins")]
        if bins:
            error = summaries[name]["calibration_error"]
            caption = f"{name}: how often a match of a confidence is right; calibration error {number(error, 3)}."
            page.figure(curves.calibration_figure(np.sum(bins, axis=0)), caption)


def _add_pairs(page: Page, task: Task, pairs: Sequence[RigidPair], grouped: dict[str, list[Record]]) -> None:
    """Pictures of single pairs of the first method of ours, or else of the first method."""
    name = next((method for method in grouped if method.startswith(LEPARD)), next(iter(grouped)))
    together = list(zip(pairs, grouped[name], strict=True))
    failed = [both for both in together if (both[1]["accepted"] if both[0].truth is None else not is_success(both[1]))]
    solved = [both for both in together if both[0].truth is not None and is_success(both[1])]
    source, method = task.open(), make_method(name)
    for title, chosen, max_shown in (("Failures", failed, SHOWN_FAILURES), ("Successes", solved, SHOWN_SUCCESSES)):
        page.heading(f"{title} of {name}: {min(max_shown, len(chosen))} of {len(chosen)}")
        spread = (
            [chosen[i] for i in np.unique(np.linspace(0, len(chosen) - 1, max_shown).astype(int))] if chosen else []
        )
        figures = [_pair_figure(source, pair, record, method) for pair, record in spread]
        page.gallery(figures)
        if spread and isinstance(method, LepardMethod) and title == "Successes":
            page.figure(*_feature_figure(source, spread[0][0], method))


def _pair_figure(source: PairSource, pair: RigidPair, record: Record, method: Any) -> tuple["Figure", str]:
    """The matches of a pair with the method of ours, or else the clouds as the method laid them."""
    first, second = source.cloud(pair.source), source.cloud(pair.target)
    caption = f"{pair.name}: overlap {100 * pair.overlap:.0f} %, {record['status']}"
    if record.get("rre") is not None:
        caption += f", off by {number(record['rre'])} degrees and {number(100 * record['rte'])} cm"
    if not isinstance(method, LepardMethod):
        transform = np.eye(4) if record["transform"] is None else np.array(record["transform"])
        return cloud_pictures.alignment_figure(first, second, transform), caption
    result = method.matcher.register(first, second)
    inliers = result.inliers
    if pair.truth is not None:
        moved = metrics.transform_points(pair.truth, result.matches.source)
        inliers = np.linalg.norm(moved - result.matches.target, axis=1) < INLIER_DISTANCE
    pose = pair.truth if pair.truth is not None else result.transform
    return cloud_pictures.matches_figure(first, second, result.matches, inliers, pose), caption


def _feature_figure(source: PairSource, pair: RigidPair, method: LepardMethod) -> tuple["Figure", str]:
    """Both clouds in the colours of their features."""
    first, second = (method.matcher.encode(source.cloud(key)) for key in (pair.source, pair.target))
    caption = f"{pair.name}: the three main axes of the network's features as colours; similar where features agree."
    return cloud_pictures.features_figure(first, second, pair.truth), caption


# --- ablations -------------------------------------------------------------------------------------------------------


def ablation_report(
    directory: Path, heading: str, rows: list[list[str]], others: list[str], results: dict[str, list[Record]]
) -> Path:
    """Write the page of an ablation: its table, recall by overlap or NFMR, and what needs a training of its own."""
    page = Page("Ablations")
    page.text(f"{made_with()} {heading}")
    page.heading("Table")
    page.table(rows)
    if all("nfmr" in record for own in results.values() for record in own):
        nfmr = {name: [record["nfmr"] or 0.0 for record in own] for name, own in results.items()}
        page.figure(curves.histogram_figure(nfmr, "NFMR", 1.0), "Non-rigid matching recall, pair by pair.")
    else:
        page.figure(curves.recall_figure(results, BANDS), "Recall over overlap, with 95 % bootstrap intervals.")
    page.heading("Not in the table")
    for line in others:
        page.text(line)
    return page.write(directory / "index.html")


# --- deformable ------------------------------------------------------------------------------------------------------


def deformable_report(
    directory: Path, files: Sequence[Path], methods: Sequence[str], records: Sequence[Record]
) -> Path:
    """Write the page of a deformable evaluation; returns its path."""
    from lepard_ros.evaluation.deformable import NEAR, deformable_rows, deformable_tables

    page = Page(f"Deformable matching of {len(files)} pairs")
    page.text(f"{made_with()} IR and NFMR at {NEAR} m; NFMR over the true matches; EPE over points seen twice.")
    for title, summaries in deformable_tables(records).items():
        page.heading(title)
        page.table(deformable_rows(summaries))
    grouped = by_method(records)
    nfmr = {name: [r["nfmr"] or 0.0 for r in own] for name, own in grouped.items()}
    page.figure(curves.histogram_figure(nfmr, "NFMR", 1.0), "Non-rigid matching recall, pair by pair.")
    first = next(iter(grouped.values()))
    worst_first = [files[i] for i in np.argsort([record["nfmr"] or 0.0 for record in first])]
    picked = [worst_first[i] for i in np.unique(np.linspace(0, len(files) - 1, 4).astype(int))]
    page.heading(f"Pairs of {methods[0]}, worst first")
    with_warps = any(record.get("epe") is not None for record in first)
    for path in picked:
        for figure, caption in _deformable_figures(path, methods[0], with_warps):
            page.figure(figure, caption)
    return page.write(directory / "index.html")


def _deformable_figures(path: Path, name: str, with_warp: bool) -> list[tuple["Figure", str]]:
    """The matches of a pair and, where there is one, its warp with the error as a colour."""
    from lepard_ros.data.fourdmatch import load_pair
    from lepard_ros.evaluation.deformable import NEAR, make_deformable

    pair = load_pair(path)
    result = make_deformable(name, register=with_warp).align(pair.source, pair.target)
    moved = pair.places(np.asarray(result.matches.source, dtype=np.float64))
    right = np.linalg.norm(moved - result.matches.target, axis=1) < NEAR
    title = f"{path.parent.name}/{path.stem}"
    view = cloud_pictures.sensor_view(0.15)
    drawn = cloud_pictures.matches_figure(pair.source, pair.target, result.matches, right, pair.transform, title, view)
    figures = [(drawn, f"{title}: overlap {100 * pair.overlap:.0f} %, inliers blue, outliers red.")]
    if result.warp is not None:
        warped = result.warp(pair.source.astype(float))
        errors = np.linalg.norm(warped - pair.warped, axis=1)
        figures.append(
            (cloud_pictures.warp_figure(pair.source, pair.target, warped, errors, title), f"{title}: the warp.")
        )
    return figures
