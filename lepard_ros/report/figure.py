# Copyright 2026 the lepard_ros authors. SPDX-License-Identifier: Apache-2.0
"""Common parts of all pictures: colours, figures without a screen, writing files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lepard_ros.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INLIER, OUTLIER = "#1f5fd0", "#d62728"  # blue and red, as in the paper


def pyplot() -> Any:
    """matplotlib.pyplot without a window, or one clear error."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("pictures need a package: pip install matplotlib.") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def new_figure(width: float, height: float) -> "Figure":
    """A figure (inches) that needs no screen."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError("pictures need a package: pip install matplotlib.") from error
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: "Figure", path: Path) -> Path:
    """Write the figure as the kind its name ends in."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"the picture {path} cannot be written ({error}).") from error
    return path


def small_png(picture: bytes) -> bytes:
    """A PNG with 256 colours: a third of the size, and the eye sees hardly a difference."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(buffer, format="png", optimize=True)
    return buffer.getvalue()
