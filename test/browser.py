# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""A page as a real Chromium shows it: what its console says, which pictures can be seen, and a screenshot."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import NamedTuple

import pytest

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--no-first-run", "--disable-component-update", "--enable-logging=stderr", "--virtual-time-budget=5000"),
)
# Writes into the page what a person would see of it; the test reads it from the rendered document.
SCRIPT = """<script>window.onload = () => {
  const seen = [...document.images].map(image => {
    const box = image.getBoundingClientRect();
    return image.complete && image.naturalWidth > 0 && image.checkVisibility() && box.width > 50 && box.height > 50; });
  const wide = document.documentElement.scrollWidth > innerWidth;
  const rows = document.querySelectorAll("tr").length;
  document.body.setAttribute("data-seen", JSON.stringify([seen, rows, wide])); }</script>"""


class Seen(NamedTuple):
    """images: for each whether it is visible. rows: of all tables. too_wide: one must scroll sideways. console: its
    lines, which a sound page has none of. screenshot: a PNG."""

    images: list[bool]
    rows: int
    too_wide: bool
    console: list[str]
    screenshot: Path


def look_at(page: Path, folder: Path) -> Seen:
    """Render a page with a probe in it; skips the test where no Chromium is installed."""
    if BROWSER is None:
        pytest.skip("the page was not rendered: no Chromium is installed")
    probe, screenshot = folder / "probe.html", folder / "screenshot.png"
    probe.write_text(page.read_text().replace("</body>", SCRIPT + "</body>"))
    options = [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,2400", f"--screenshot={screenshot}"]
    command = [BROWSER, *FLAGS, *options, "--dump-dom", probe.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'data-seen="([^"]*)"', result.stdout)
    assert found is not None, result.stderr[-2000:]
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(*json.loads(unescape(found.group(1))), console, screenshot)


def assert_sound(page: Path, folder: Path, images: int, rows: int) -> None:
    """Nothing in the console, at least so many pictures, all visible, at least so many rows, and something painted."""
    from PIL import Image

    seen = look_at(page, folder)
    assert seen.console == []
    assert len(seen.images) >= images and all(seen.images), seen.images
    assert seen.rows >= rows
    assert not seen.too_wide
    with Image.open(seen.screenshot) as picture:
        assert len(picture.convert("L").getcolors() or []) > 30, "the screenshot is nearly blank"
