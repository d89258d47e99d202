# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""One self-contained page per evaluation: tables, curves, and the pairs themselves, failures first."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lepard_ros import __version__
from lepard_ros.errors import InputError
from lepard_ros.evaluation import metrics, pictures
from lepard_ros.evaluation.methods import LEPARD, LepardMethod, make_method
from lepard_ros.evaluation.pairs import INLIER_DISTANCE, Task
from lepard_ros.evaluation.readers import PairSource, RigidPair
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from lepard_ros.evaluation.replay import Replay
    from lepard_ros.tracking.rigid import RigidTracker

Record = dict[str, Any]

SHOWN_FAILURES, SHOWN_SUCCESSES = 6, 4
STYLE = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .8rem; }
.wide { overflow-x: auto; } th, td { padding: .3rem .4rem; border-bottom: 1px solid var(--line); text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tr.ours td { font-weight: 600; }
img { max-width: 100%; background: #fff; border-radius: 4px; } figure { margin: 1rem 0; }
figcaption { font-size: .85rem; opacity: .8; } code { font-size: .85em; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(28rem, 1fr)); gap: 1rem; }
"""


@dataclass
class Page:
    """A page that is put together part by part and stands alone: its pictures are inside it."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A new section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A table whose first row is the header; rows of ours stand out."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
        body = ""
        for row in rows[1:]:
            kind = ' class="ours"' if row[0].startswith(LEPARD) else ""
            body += f"<tr{kind}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self.parts.append(f'<div class="wide">{table}</div>')

    def figure(self, figure: "Figure", caption: str) -> None:
        """A drawn figure with its caption."""
        self.parts.append(_figure_html(figure, caption))

    def gallery(self, figures: Sequence[tuple["Figure", str]]) -> None:
        """Figures side by side."""
        self.parts.append('<div class="pairs">' + "".join(_figure_html(*one) for one in figures) + "</div>")

    def write(self, directory: Path) -> Path:
        """Write `index.html` and return its path."""
        title = html.escape(self.title)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        body = f"<h1>{title}</h1>" + "\n".join(self.parts)
        page = f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>'
        path = directory / "index.html"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}): give another --report folder.") from error
        return path


def _figure_html(figure: "Figure", caption: str) -> str:
    """The figure as a PNG inside the page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    data = base64.b64encode(pictures.small_png(drawn.getvalue())).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def _made_with() -> str:
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return f"Made by lepard_ros {__version__} on {day}."


# --- rigid -----------------------------------------------------------------------------------------------------------


def rigid_report(directory: Path, task: Task, pairs: Sequence[RigidPair], records: Sequence[Record]) -> Path:
    """Write the page of a rigid evaluation; returns its path."""
    summaries, grouped = summarise_all(task.set_name, records), by_method(records)
    page = Page(f"Registration of {len(pairs)} pairs of {task.set_name}")
    count = "all" if task.count is None else f"{task.count}"
    page.text(f"{_made_with()} Pairs: {count}, seed {task.seed}. Recall: {CRITERIA[task.set_name]}.")
    page.heading("Table")
    page.table(rigid_rows(task.set_name, summaries))
    for line in comparison_lines(summaries):
        page.text(line)
    if task.set_name != "unrelated":
        _add_curves(page, task.set_name, grouped)
    page.heading("Time per pair")
    page.figure(pictures.timing_figure(summaries), "Wall seconds per pair on one thread, by stage where known.")
    _add_honesty(page, grouped, summaries)
    _add_pairs(page, task, pairs, grouped)
    return page.write(directory)


def _add_curves(page: Page, set_name: str, grouped: dict[str, list[Record]]) -> None:
    page.heading("Recall and errors")
    bands = TUM_BANDS if set_name == "tum" else BANDS
    page.figure(pictures.recall_figure(grouped, bands), "Recall over overlap, with 95 % bootstrap intervals.")
    page.figure(pictures.error_figure(grouped), "Share of all pairs within an error; a refused pair never is.")
    ratios = {
        name: [r["inlier_ratio"] for r in own if r.get("inlier_ratio") is not None] for name, own in grouped.items()
    }
    ratios = {name: values for name, values in ratios.items() if values}
    if ratios:
        page.figure(pictures.histogram_figure(ratios, "inlier ratio", 1.0), "Share of right matches, pair by pair.")


def _add_honesty(page: Page, grouped: dict[str, list[Record]], summaries: dict[str, Any]) -> None:
    """Why pairs were refused, and whether confidences and covariances mean what they say."""
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
            page.figure(pictures.calibration_figure(np.sum(bins, axis=0)), caption)


def _add_pairs(page: Page, task: Task, pairs: Sequence[RigidPair], grouped: dict[str, list[Record]]) -> None:
    """Pictures of single pairs of the first method of ours, or else of the first method."""
    name = next((method for method in grouped if method.startswith(LEPARD)), next(iter(grouped)))
    together = list(zip(pairs, grouped[name], strict=True))
    failed = [both for both in together if (both[1]["accepted"] if both[0].truth is None else not is_success(both[1]))]
    solved = [both for both in together if both[0].truth is not None and is_success(both[1])]
    source, method = task.open(), make_method(name)
    for title, chosen, most in (("Failures", failed, SHOWN_FAILURES), ("Successes", solved, SHOWN_SUCCESSES)):
        page.heading(f"{title} of {name}: {min(most, len(chosen))} of {len(chosen)}")
        spread = [chosen[i] for i in np.unique(np.linspace(0, len(chosen) - 1, most).astype(int))] if chosen else []
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
        return pictures.alignment_figure(first, second, transform), caption
    result = method.matcher.register(first, second)
    inliers = result.inliers
    if pair.truth is not None:
        moved = metrics.transform_points(pair.truth, result.matches.source)
        inliers = np.linalg.norm(moved - result.matches.target, axis=1) < INLIER_DISTANCE
    pose = pair.truth if pair.truth is not None else result.transform
    return pictures.matches_figure(first, second, result.matches, inliers, pose), caption


def _feature_figure(source: PairSource, pair: RigidPair, method: LepardMethod) -> tuple["Figure", str]:
    """Both clouds in the colours of their features."""
    first, second = (method.matcher.encode(source.cloud(key)) for key in (pair.source, pair.target))
    caption = f"{pair.name}: the three main axes of the network's features as colours; alike where they see the same."
    return pictures.features_figure(first, second, pair.truth), caption


# --- ablations -------------------------------------------------------------------------------------------------------


def ablation_report(
    directory: Path, heading: str, rows: list[list[str]], others: list[str], results: dict[str, list[Record]]
) -> Path:
    """Write the page of an ablation: its table, recall by overlap or NFMR, and what needs a training of its own."""
    page = Page("Ablations")
    page.text(f"{_made_with()} {heading}")
    page.heading("Table")
    page.table(rows)
    if all("nfmr" in record for own in results.values() for record in own):
        nfmr = {name: [record["nfmr"] or 0.0 for record in own] for name, own in results.items()}
        page.figure(pictures.histogram_figure(nfmr, "NFMR", 1.0), "Non-rigid matching recall, pair by pair.")
    else:
        page.figure(pictures.recall_figure(results, BANDS), "Recall over overlap, with 95 % bootstrap intervals.")
    page.heading("Not in the table")
    for line in others:
        page.text(line)
    return page.write(directory)


# --- deformable ------------------------------------------------------------------------------------------------------


def deformable_report(
    directory: Path, files: Sequence[Path], methods: Sequence[str], records: Sequence[Record]
) -> Path:
    """Write the page of a deformable evaluation; returns its path."""
    from lepard_ros.evaluation.deformable import NEAR, deformable_rows, deformable_tables

    page = Page(f"Deformable matching of {len(files)} pairs")
    page.text(f"{_made_with()} IR and NFMR at {NEAR} m; NFMR over the true matches; EPE over points seen twice.")
    for title, summaries in deformable_tables(records).items():
        page.heading(title)
        page.table(deformable_rows(summaries))
    grouped = by_method(records)
    nfmr = {name: [r["nfmr"] or 0.0 for r in own] for name, own in grouped.items()}
    page.figure(pictures.histogram_figure(nfmr, "NFMR", 1.0), "Non-rigid matching recall, pair by pair.")
    first = next(iter(grouped.values()))
    worst_first = [files[i] for i in np.argsort([record["nfmr"] or 0.0 for record in first])]
    picked = [worst_first[i] for i in np.unique(np.linspace(0, len(files) - 1, 4).astype(int))]
    page.heading(f"Pairs of {methods[0]}, worst first")
    with_warps = any(record.get("epe") is not None for record in first)
    for path in picked:
        for figure, caption in _deformable_figures(path, methods[0], with_warps):
            page.figure(figure, caption)
    return page.write(directory)


def _deformable_figures(path: Path, name: str, with_warp: bool) -> list[tuple["Figure", str]]:
    """The matches of a pair and, where there is one, its warp with the error as a colour."""
    from lepard_ros.evaluation.deformable import NEAR, make_deformable, true_places
    from lepard_ros.learning.fourdmatch import load_pair

    pair = load_pair(path)
    result = make_deformable(name, register=with_warp).align(pair.source, pair.target)
    moved = true_places(pair, result.matches.source)
    right = np.linalg.norm(moved - result.matches.target, axis=1) < NEAR
    title = f"{path.parent.name}/{path.stem}"
    view = pictures.sensor_view(0.15)
    drawn = pictures.matches_figure(pair.source, pair.target, result.matches, right, pair.transform, title, view)
    figures = [(drawn, f"{title}: overlap {100 * pair.overlap:.0f} %, inliers blue, outliers red.")]
    if result.warp is not None:
        warped = result.warp(pair.source.astype(float))
        errors = np.linalg.norm(warped - pair.warped, axis=1)
        figures.append((pictures.warp_figure(pair.source, pair.target, warped, errors, title), f"{title}: the warp."))
    return figures


# --- bags ------------------------------------------------------------------------------------------------------------


def replay_report(directory: Path, name: str, replay: "Replay", tracker: "RigidTracker") -> Path:
    """Write the page of a replayed bag: its figures, times per stage, path, errors, map, and matched pairs."""
    from lepard_ros.evaluation.replay import error_of, summary
    from lepard_ros.evaluation.replay_pictures import draw_replay

    page = Page(f"Tracking of {name}")
    page.text(f"{_made_with()} {len(replay.tracks)} frames of the bag, in order.")
    page.heading("Summary")
    lines = [line.split("  ", 1) for line in summary(replay, tracker).splitlines()]
    page.table([["what", "value"], *([first.strip(), second.strip()] for first, second in lines)])
    page.heading("Time per frame")
    page.table(_stage_rows([track.seconds for track in replay.tracks]))
    page.heading("Pictures")
    for picture in draw_replay(replay, tracker.map_points(0.02), error_of(replay)):
        page.figure(picture.figure, picture.caption)
    return page.write(directory)


def _stage_rows(seconds: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Wall milliseconds of every stage over the frames that had it; the first row is the header."""
    rows = [["stage", "frames", "median ms", "95 % ms"]]
    for stage in dict.fromkeys(name for own in seconds for name in own):
        values = 1e3 * np.array([own[stage] for own in seconds if stage in own])
        rows.append([stage, str(len(values)), f"{np.median(values):.0f}", f"{np.percentile(values, 95):.0f}"])
    return rows
