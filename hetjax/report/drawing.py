"""How every picture looks: its style, its colors, its curves, and the files it becomes.

One color per worker, the same in every picture and for every number of workers.

How every picture looks: its style, its curves, and the files it becomes.
"""

from __future__ import annotations

import io
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

# M. Okabe, K. Ito: Color Universal Design, 2008. Told apart with every common form of color blindness.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#5A5A5A", "#8C7A00")

# How far each further eight workers are mixed towards white or black: never so far that the hue is lost.
_SHADES = ((0, 0), (0.22, 255), (0.25, 0), (0.38, 255), (0.4, 0), (0.5, 255), (0.52, 0), (0.56, 255))


def worker_color(worker: int) -> str:
    """Neighbors differ in hue; each further eight workers take the same hues lighter and darker by turns."""
    base = [int(_HUES[worker % 8][place : place + 2], 16) for place in (1, 3, 5)]
    strength, target = _SHADES[worker // 8 % 8]
    mixed = [round(part + (target - part) * strength) for part in base]
    return "#{:02X}{:02X}{:02X}".format(*mixed)


def run_color(run: int) -> str:
    """The color of a run where several are compared."""
    return worker_color(run)


DARK, BLUE, RED = "#333333", "#0072B2", "#B00020"
_POINTS = 800  # more cannot be told apart on the page
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.10g}")


def style() -> AbstractContextManager[None]:
    """The settings under which figures are made and saved."""
    settings: dict[Any, Any] = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "hetjax",  # with no date, the same run gives the same file
    }
    return rc_context(settings)


def save(figure: Figure, folder: Path, stem: str) -> tuple[Path, Path]:
    """Write the figure as PNG and SVG."""
    png, svg = folder / f"{stem}.png", folder / f"{stem}.svg"
    figure.savefig(png, dpi=120)
    figure.set_layout_engine("none")  # everything has its place now; finding it again takes as long as drawing
    svg.write_bytes(svg_bytes(figure))
    return png, svg


def svg_bytes(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, *, label: str | None = None, raw: bool = True) -> None:
    """A running median and, faintly behind it, every point; few points are drawn as they are."""
    if len(y) < 20:
        axes.plot(x, y, color=color, marker="o", markersize=3, label=label)
        return
    few = thinned(len(y))
    if raw:
        axes.plot(x[few], y[few], color=color, alpha=0.3, linewidth=0.8)
    axes.plot(x[few], running_median(y, max(5, len(y) // 100))[few], color=color, linewidth=1.8, label=label)


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """The median of up to `width` (an odd number) values around each one, fewer at the ends."""
    half = width // 2
    padded = np.pad(values.astype(np.float64), half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def window_sums(values_SxK: np.ndarray) -> np.ndarray:
    """Sums over a window of a twentieth of the rows (at least five) around each one, fewer at the ends."""
    half = max(2, len(values_SxK) // 40)
    total = np.vstack([np.zeros((1, values_SxK.shape[1])), np.cumsum(values_SxK, axis=0)])
    place = np.arange(len(values_SxK))
    return total[np.minimum(place + half + 1, len(values_SxK))] - total[np.maximum(place - half, 0)]


def thinned(length: int) -> np.ndarray:
    """Indices of all points, or of evenly spread ones of many; the first and the last are always there."""
    return np.unique(np.linspace(0, length - 1, min(_POINTS, length)).astype(int))


def name_beside(axes: Axes, worker: int, value: str, y: float) -> None:
    """The worker and a value in its color, right of the axes at the height y."""
    axes.annotate(
        f" {worker}: {value}",
        (1, y),
        xycoords=("axes fraction", "data"),
        va="center",
        color=worker_color(worker),
        fontweight="bold",
        annotation_clip=False,
    )
