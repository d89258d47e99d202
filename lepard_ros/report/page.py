# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""The page builder of all reports and demonstrations: one self-contained HTML file."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from lepard_ros import __version__
from lepard_ros.errors import InputError
from lepard_ros.evaluation.methods import LEPARD
from lepard_ros.report.figure import small_png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
.facts td:last-child { text-align: left; white-space: normal; font-weight: 600; }
.pairs { display: grid; grid-template-columns: repeat(auto-fill, minmax(28rem, 1fr)); gap: 1rem; }
"""


@dataclass
class Page:
    """A self-contained page, built part by part; pictures are embedded."""

    title: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        """A new section."""
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def markup(self, text: str) -> None:
        """A paragraph of our own that is HTML already."""
        self.parts.append(f"<p>{text}</p>")

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        """A table whose first row is the header; rows of ours stand out."""
        self.parts.append(_table_html(rows[1:], rows[0]))

    def facts(self, rows: Sequence[tuple[str, str]]) -> None:
        """A table of names and values, without a header."""
        self.parts.append(f'<div class="facts">{_table_html(rows)}</div>')

    def details(self, summary: str, rows: Sequence[Sequence[str]]) -> None:
        """A table that is folded away behind its summary; its first row is the header."""
        table = _table_html(rows[1:], rows[0])
        self.parts.append(f"<details><summary>{html.escape(summary)}</summary>{table}</details>")

    def figure(self, figure: "Figure", caption: str) -> None:
        """A drawn figure with its caption."""
        self.parts.append(_figure_html(figure, caption))

    def picture(self, path: Path, caption: str) -> None:
        """A PNG file with its caption."""
        self.parts.append(_picture_html(path.read_bytes(), caption))

    def gallery(self, figures: Sequence[tuple["Figure", str]]) -> None:
        """Figures side by side."""
        self.parts.append('<div class="pairs">' + "".join(_figure_html(*one) for one in figures) + "</div>")

    def html(self) -> str:
        """The whole page."""
        title = html.escape(self.title)
        head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        body = f"<h1>{title}</h1>" + "\n".join(self.parts)
        return f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}</style></head><body>{body}</body></html>\n'

    def write(self, path: Path) -> Path:
        """Write the page and return its path."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.html(), encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path} cannot be written ({error.strerror}): give another folder.") from error
        return path


def _table_html(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """A table of plain text; rows whose first cell names a method of ours are marked."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        kind = ' class="ours"' if row[0].startswith(LEPARD) else ""
        body += f"<tr{kind}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{table}</div>'


def _figure_html(figure: "Figure", caption: str) -> str:
    """The figure as a PNG inside the page."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", bbox_inches="tight")
    return _picture_html(drawn.getvalue(), caption)


def _picture_html(png: bytes, caption: str) -> str:
    data = base64.b64encode(small_png(png)).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'


def made_with() -> str:
    """Which version made a page, and when."""
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    return f"Made by lepard_ros {__version__} on {day}."
