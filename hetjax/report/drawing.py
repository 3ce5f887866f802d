"""What all figures share: style, colors, smoothed curves, and saving as PNG and SVG."""

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

# M. Okabe, K. Ito: Color Universal Design, 2008. Distinguishable under all common forms of color blindness.
_HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#5A5A5A", "#8C7A00")

# (strength, 255 white or 0 black): how each further group of eight workers is tinted, always keeping the hue.
_SHADES = ((0, 0), (0.22, 255), (0.25, 0), (0.38, 255), (0.4, 0), (0.5, 255), (0.52, 0), (0.56, 255))


def worker_color(worker: int) -> str:
    """Return the color of a worker, the same in every figure and for any number of workers.

    Neighbors differ in hue; each further group of eight repeats the hues, alternately lighter and darker.
    """
    base = [int(_HUES[worker % 8][start : start + 2], 16) for start in (1, 3, 5)]
    strength, target = _SHADES[worker // 8 % 8]
    mixed = [round(channel + (target - channel) * strength) for channel in base]
    return "#{:02X}{:02X}{:02X}".format(*mixed)


def run_color(run: int) -> str:
    """Return the color of a run in a comparison."""
    return worker_color(run)


DARK, BLUE, RED = "#333333", "#0072B2", "#B00020"
_POINTS = 800  # more cannot be distinguished on the page
THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.10g}")


def style() -> AbstractContextManager[None]:
    """Return a context with the matplotlib settings to create and save figures under."""
    settings: dict[Any, Any] = {
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "svg.hashsalt": "hetjax",  # and no date: the same run gives the same file
    }
    return rc_context(settings)


def save(figure: Figure, folder: Path, stem: str) -> tuple[Path, Path]:
    """Write the figure as PNG and SVG."""
    png, svg = folder / f"{stem}.png", folder / f"{stem}.svg"
    figure.savefig(png, dpi=120)
    figure.set_layout_engine("none")  # the layout is done; a second pass would take as long as drawing
    svg.write_bytes(svg_bytes(figure))
    return png, svg


def svg_bytes(figure: Figure) -> bytes:
    """Return the figure as an SVG file."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def curve(
    axes: Axes,
    x: np.ndarray,
    y: np.ndarray,
    color: str,
    *,
    label: str | None = None,
    raw: bool = True,
    jumps: np.ndarray | tuple[()] = (),
) -> None:
    """Draw the running median and, faintly behind it, the points; fewer than 20 points are drawn as they are.

    Args:
        axes: where to draw.
        x: positions.
        y: values.
        color: color of the line.
        label: label of the line.
        raw: whether to draw the points too.
        jumps: indices at which the values may jump; they and those before them are drawn in any case.
    """
    if len(y) < 20:
        axes.plot(x, y, color=color, marker="o", markersize=3, label=label)
        return
    drawn = thinned(len(y), np.maximum(np.append(jumps, np.subtract(jumps, 1)), 0))
    if raw:
        axes.plot(x[drawn], y[drawn], color=color, alpha=0.3, linewidth=0.8)
    axes.plot(x[drawn], running_median(y, max(5, len(y) // 100))[drawn], color=color, linewidth=1.8, label=label)


def running_median(values: np.ndarray, width: int) -> np.ndarray:
    """Return the median of the `width` (an odd number) values around each value, fewer at the ends."""
    half = width // 2
    padded = np.pad(values.astype(np.float64), half, constant_values=np.nan)
    return np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=1)


def window_sums(values_SxK: np.ndarray) -> np.ndarray:
    """Return sums over a window of a twentieth of the rows (at least five) around each row, fewer at the ends."""
    half = max(2, len(values_SxK) // 40)
    total = np.vstack([np.zeros((1, values_SxK.shape[1])), np.cumsum(values_SxK, axis=0)])
    row = np.arange(len(values_SxK))
    return total[np.minimum(row + half + 1, len(values_SxK))] - total[np.maximum(row - half, 0)]


def thinned(length: int, keep: np.ndarray | tuple[()] = ()) -> np.ndarray:
    """Return the indices of the points to draw: all, or 800 evenly spaced ones including the first and the last.

    Up to 800 points in `keep` are drawn too, such as those where a curve jumps: it jumps there, not near there.
    """
    even = np.linspace(0, length - 1, min(_POINTS, length)).astype(int)
    return np.unique(np.append(even, keep if len(keep) <= _POINTS else ())).astype(int)


def label_beside(axes: Axes, worker: int, value: str, y: float) -> None:
    """Write the worker and a value in its color to the right of the axes, at height y."""
    axes.annotate(
        f" {worker}: {value}",
        (1, y),
        xycoords=("axes fraction", "data"),
        va="center",
        color=worker_color(worker),
        fontweight="bold",
        annotation_clip=False,
    )
