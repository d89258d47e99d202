# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The paper's tables: our figures next to theirs, in per cent."""

from typing import Any

from lepard_ros.evaluation.tables import Summary, number, percent

# Lepard (default) in the paper: tables 2 and 3 for 3DMatch, table 1 for 4DMatch.
RIGID: dict[str, dict[str, float]] = {
    "3DMatch": {"FMR": 98.3, "IR": 55.5, "RR": 93.5, "RRE": 2.48, "RTE": 7.2},
    "3DLoMatch": {"FMR": 84.5, "IR": 26.0, "RR": 69.0, "RRE": 4.10, "RTE": 10.8},
}
RIGID_ICP: dict[str, dict[str, float]] = {
    "3DMatch": {"RR": 93.9, "RRE": 1.96, "RTE": 6.0},
    "3DLoMatch": {"RR": 71.3, "RRE": 3.17, "RTE": 8.9},
}
DEFORMABLE: dict[str, dict[str, float]] = {
    "4DMatch": {"NFMR": 83.7, "IR": 82.7, "matches": 596},
    "4DLoMatch": {"NFMR": 66.9, "IR": 55.7, "matches": 407},
}


def rigid_comparison(set_name: str, summaries: dict[str, Summary]) -> list[list[str]]:
    """Rows of the paper's table for a set, ours and theirs one below the other; the first is the header."""
    rows = [["", "pairs", "FMR %", "IR %", "RR %", "RRE deg", "RTE cm"]]
    for name, summary in summaries.items():
        rte = None if summary["rte_mean"] is None else 100 * summary["rte_mean"]
        shares = [percent(summary[key]) for key in ("fmr", "inlier_ratio")] + [percent(summary["recall"].mean)]
        rows.append([name, str(summary["pairs"]), *shares, number(summary["rre_mean"], 2), number(rte)])
    for name, published in (("paper, RANSAC", RIGID), ("paper, RANSAC + ICP", RIGID_ICP)):
        figures = published[set_name]
        rows.append([name, "", *(number(figures.get(key), 2) for key in ("FMR", "IR", "RR", "RRE", "RTE"))])
    return rows


def deformable_comparison(set_name: str, summaries: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Rows of the paper's table for 4DMatch or 4DLoMatch; the first is the header."""
    rows = [["", "pairs", "matches", "NFMR %", "IR %"]]
    for name, s in summaries.items():
        shares = [percent(s["nfmr"].mean), percent(s["inlier_ratio"].mean)]
        rows.append([name, str(s["pairs"]), number(s["matches"], 0), *shares])
    theirs = DEFORMABLE[set_name]
    rows.append(["paper", "", number(theirs["matches"], 0), number(theirs["NFMR"]), number(theirs["IR"])])
    return rows
