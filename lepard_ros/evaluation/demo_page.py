# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""What the pages of all demonstrations share: colours, the table, the page, and the closing words."""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lepard_ros.errors import InputError
from lepard_ros.evaluation.demo_story import FrameNote, NodeRun
from lepard_ros.evaluation.pictures import small_png

COLOURS = {"OK": "#2a9d4a", "RELOCALISED": "#1f5fd0", "LOST": "#d03020", "INITIALISING": "#999999"}
Rows = list[tuple[str, str]]

_STYLE = (
    "body{font-family:sans-serif;max-width:60em;margin:2em auto;color:#222;line-height:1.5}"
    "td{padding:.15em 1.2em .15em 0;vertical-align:top}td:last-child{font-weight:bold}img{max-width:100%}"
    "figcaption{color:#555;margin-bottom:1.5em}details td{font-weight:normal!important;font-size:80%}"
)


def pyplot() -> Any:
    """matplotlib.pyplot without a window, or one clear error."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("The demonstration's pictures need matplotlib: pip install matplotlib.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def save_figure(figure: Any, path: Path, dpi: int = 100) -> None:
    """Write a figure and forget it."""
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)
    pyplot().close(figure)


def effort_rows(notes: list[FrameNote], node: NodeRun, weights: str) -> Rows:
    """What the node needed for its clouds, and how it ended."""
    total = [sum(note.seconds.values()) for note in notes if note.seconds]
    per_cloud = node.cpu_seconds / max(len(notes), 1)
    return [
        ("node, each cloud", f"{np.median(total) if total else 0:.2f} s median, {per_cloud:.2f} s of processor time"),
        ("weights", weights),
        ("node's exit code", str(node.exit_code)),
    ]


def write_page(output: Path, story: str, rows: Rows, pictures: dict[str, str], seconds: float, more: str = "") -> str:
    """Write report.html to `output`; the closing words with the table and the paths.

    story: HTML, what was done. pictures: file names in `output` with what they show; those without words are left out.
    more: HTML for the end of the page.
    """
    drawn = {name: text for name, text in pictures.items() if text}
    page = output / "report.html"
    page.write_text(html_page(story, rows, drawn, output, more), encoding="utf-8")
    width = max(len(name) for name, _ in rows)
    lines = ["", *(f"  {name:<{width}}  {value}" for name, value in rows), ""]
    paths = "\n          ".join(str(output / name) for name in drawn)
    return "\n".join([*lines, f"Done in {seconds:.0f} s.", f"Page:     {page}", f"Pictures: {paths}"])


def html_page(story: str, rows: Rows, pictures: dict[str, str], folder: Path, more: str = "") -> str:
    """The page as one file, pictures included."""
    figures = "".join(
        f'<figure><img alt="{html.escape(text)}" src="data:image/png;base64,{_base64(folder / name)}">'
        f"<figcaption>{html.escape(text)}</figcaption></figure>"
        for name, text in pictures.items()
    )
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>lepard_ros demonstration</title>'
        f"<style>{_STYLE}</style></head><body><h1>What the node does</h1><p>{story}</p>{html_table(rows)}"
        f"{figures}{more}</body></html>\n"
    )


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of plain text."""
    cells = ("".join(f"<td>{html.escape(value)}</td>" for value in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _base64(path: Path) -> str:
    return base64.b64encode(small_png(path.read_bytes())).decode()
