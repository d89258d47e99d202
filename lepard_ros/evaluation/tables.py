# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Summaries of the records per method, and the printed table."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lepard_ros.evaluation import metrics
from lepard_ros.evaluation.bootstrap import mean_interval, paired_difference
from lepard_ros.evaluation.methods import LEPARD

Record = dict[str, Any]
Summary = dict[str, Any]

BANDS = ((0.0, 0.1), (0.1, 0.2), (0.2, 0.3), (0.3, 0.6), (0.6, 1.01))
TUM_BANDS = ((0.1, 0.3), (0.3, 0.6), (0.6, 1.01))
# Inlier ratios and feature matching recalls of all matches, of the 250 most confident ones, and of the consistent ones.
RATIOS = {"inlier_ratio": "fmr", "inlier_ratio_surest": "fmr_surest", "inlier_ratio_consistent": "fmr_consistent"}
TUM_ROTATION, TUM_TRANSLATION = 15.0, 0.3  # degrees, metres
CRITERIA = {
    "3DMatch": "official error sqrt(e'Ie/I00) <= 0.2 m",
    "3DLoMatch": "official error sqrt(e'Ie/I00) <= 0.2 m",
    "tum": "within 15 degrees and 0.3 m",
    "unrelated": "nothing to register: every acceptance is false",
}


def is_success(record: Record) -> bool:
    """Whether a record counts as registered: by the official error where there is one, else within 15 deg and 0.3 m."""
    if "information_rmse" in record:
        error = record["information_rmse"]
        return error is not None and error <= metrics.RECALL_RMSE
    angle, distance = record.get("rre"), record.get("rte")
    return angle is not None and distance is not None and angle <= TUM_ROTATION and distance <= TUM_TRANSLATION


def summarise(records: Sequence[Record], bands: Sequence[tuple[float, float]] = BANDS) -> Summary:
    """Summary of one method's records: shares in [0, 1], degrees, metres, seconds; intervals as (mean, low, high)."""
    success = [is_success(record) for record in records]
    accepted = [bool(record["accepted"]) for record in records]
    solved = [record for record, good in zip(records, success, strict=True) if good]
    total = metrics.recall(success, [record["scene"] for record in records])
    return {
        "pairs": len(records),
        "recall": mean_interval(np.asarray(success, dtype=float)),
        "recall_scenes": total.scenes,
        "recall_rmse": _share([_below(r.get("rmse"), metrics.RECALL_RMSE) for r in records]),
        "bands": [_band_summary(records, success, band) for band in bands],
        "rre_mean": _mean(record["rre"] for record in solved),
        "rte_mean": _mean(record["rte"] for record in solved),
        "rre": _median(record["rre"] for record in solved),
        "rte": _median(record["rte"] for record in solved),
        **_ratio_means(records),
        "accepted": _share(accepted),
        "right_accepts": mean_interval(np.asarray(accepted) & np.asarray(success)),
        "false_accepts": mean_interval(np.asarray(accepted) & ~np.asarray(success)),
        "seconds": float(np.mean([record["seconds"] for record in records])),
        "cpu_seconds": float(np.mean([record["cpu_seconds"] for record in records])),
        "stages": _stage_means(records),
        "statuses": _counts(record["status"] for record in records),
        "calibration_error": _calibration_error(records),
        "covariance_ratio": _median(r["nees"] / 6 for r in solved if r.get("nees") is not None),
    }


def _ratio_means(records: Sequence[Record]) -> Summary:
    """The means of RATIOS, None without matches."""
    means: Summary = {}
    for ratio, recall in RATIOS.items():
        values = [record[ratio] for record in records if record.get(ratio) is not None]
        means[ratio] = float(np.mean(values)) if values else None
        means[recall] = metrics.feature_matching_recall(values) if values else None
    return means


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value <= limit


def _share(values: Sequence[bool]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def _mean(values: Any) -> float | None:
    listed = list(values)
    return float(np.mean(listed)) if listed else None


def _median(values: Any) -> float | None:
    listed = list(values)
    return float(np.median(listed)) if listed else None


def _counts(values: Any) -> dict[str, int]:
    names, numbers = np.unique(list(values), return_counts=True)
    return {str(name): int(number) for name, number in zip(names, numbers, strict=True)}


def _stage_means(records: Sequence[Record]) -> dict[str, float]:
    """Mean wall seconds per pair of each stage; a pair that ended early spent nothing on the later ones."""
    names = list(dict.fromkeys(name for record in records for name in record.get("stages", {})))
    return {name: float(np.mean([r.get("stages", {}).get(name, 0.0) for r in records])) for name in names}


def _calibration_error(records: Sequence[Record]) -> float | None:
    """The expected calibration error of all matches of all pairs."""
    bins = [record["confidence_bins"] for record in records if record.get("confidence_bins")]
    if not bins:
        return None
    number, confidence, right = np.sum(bins, axis=0).T
    return float(np.abs(confidence - right).sum() / max(1.0, number.sum()))


def _band_summary(records: Sequence[Record], success: Sequence[bool], band: tuple[float, float]) -> Summary:
    inside = [good for record, good in zip(records, success, strict=True) if band[0] <= record["overlap"] < band[1]]
    return {
        "low": band[0],
        "high": min(1.0, band[1]),
        "pairs": len(inside),
        "recall": mean_interval(np.asarray(inside, float)),
    }


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each method, in order."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["method"], []).append(record)
    return grouped


def summarise_all(set_name: str, records: Sequence[Record]) -> dict[str, Summary]:
    """The summary of every method, with a paired comparison of ours with the best of the others."""
    bands = TUM_BANDS if set_name == "tum" else BANDS
    grouped = by_method(records)
    summaries = {name: summarise(own, bands) for name, own in grouped.items()}
    others = [name for name in grouped if not name.startswith(LEPARD)]
    if others:
        best = max(others, key=lambda name: summaries[name]["recall"].mean)
        baseline = np.array([is_success(record) for record in grouped[best]], dtype=float)
        for name in grouped:
            if name.startswith(LEPARD):
                own = np.array([is_success(record) for record in grouped[name]], dtype=float)
                summaries[name]["against"] = {"method": best, "difference": paired_difference(own, baseline)}
    return summaries


# --- text ------------------------------------------------------------------------------------------------------------


def rigid_rows(set_name: str, summaries: dict[str, Summary]) -> list[list[str]]:
    """The table's rows, the first is the header."""
    if set_name == "unrelated":
        header = ["method", "pairs", "false accepts % [95 %]", "s/pair", "CPU s/pair"]
        return [header] + [_unrelated_row(name, s) for name, s in summaries.items()]
    bands = [b for b in next(iter(summaries.values()))["bands"] if b["pairs"]]
    header = ["method", "pairs", "RR % [95 %]", "RR scenes", "RR rmse"]
    header += [f"{100 * b['low']:.0f}-{100 * b['high']:.0f} % (n={b['pairs']})" for b in bands]
    header += ["RRE deg", "RTE cm", "IR %", "FMR %", "IR 250", "FMR 250", "IR cons.", "FMR cons."]
    header += ["accepted", "rightly", "wrongly", "s/pair", "CPU s/pair"]
    return [header] + [_rigid_row(name, s) for name, s in summaries.items()]


def _rigid_row(name: str, s: Summary) -> list[str]:
    shown = [percent(b["recall"].mean) for b in s["bands"] if b["pairs"]]
    rte = None if s["rte"] is None else 100 * s["rte"]
    start = [name, str(s["pairs"]), interval(s["recall"]), percent(s["recall_scenes"]), percent(s["recall_rmse"])]
    accepted = [percent(share) for share in (s["accepted"], s["right_accepts"].mean, s["false_accepts"].mean)]
    end = [*(percent(s[key]) for pair in RATIOS.items() for key in pair), *accepted]
    return [*start, *shown, number(s["rre"]), number(rte), *end, number(s["seconds"], 2), number(s["cpu_seconds"], 2)]


def _unrelated_row(name: str, s: Summary) -> list[str]:
    times = [number(s["seconds"], 2), number(s["cpu_seconds"], 2)]
    return [name, str(s["pairs"]), interval(s["false_accepts"]), *times]


def percent(share: float | None) -> str:
    """A share as per cent, or a dash."""
    return "-" if share is None or np.isnan(share) else f"{100 * share:.1f}"


def number(value: float | None, digits: int = 1) -> str:
    """A number, or a dash."""
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def interval(values: Any) -> str:
    """A share with its interval, in per cent."""
    mean, low, high = values
    return "-" if np.isnan(mean) else f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table with aligned columns, for the terminal and for documents."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def comparison_lines(summaries: dict[str, Summary]) -> list[str]:
    """A sentence per method of ours: the difference to the best baseline and whether it is more than noise."""
    lines = []
    for name, summary in summaries.items():
        if "against" in summary:
            mean, low, high = summary["against"]["difference"]
            verdict = "more than noise" if low > 0 or high < 0 else "within noise"
            lines.append(
                f"{name} against {summary['against']['method']}: {100 * mean:+.1f} points "
                f"[{100 * low:+.1f}, {100 * high:+.1f}], {verdict}."
            )
    return lines
