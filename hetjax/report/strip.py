"""Gantt strips of a few steps: who computes, who waits at the barrier for the slowest, and the reduce behind it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from hetjax.report.colors import worker_colour
from hetjax.report.drawing import DARK
from hetjax.report.run_folder import Run

_WAITING, _REDUCE = "#E8E8E8", "#BDBDBD"


def strip_steps(run: Run, steps: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Indices of up to `steps` timed steps just before the counts first changed, and of the last ones of the run.

    If they never changed, of the first and the last ones.
    """
    timed = np.flatnonzero(run.full_S & np.isfinite(run.times_SxW).any(axis=1))
    changes = run.changes
    if len(changes) == 0:
        return timed[:steps], timed[steps:][-steps:]
    return timed[timed < changes[0]][-steps:], timed[timed >= changes[0]][-steps:]


def strips(figure: SubFigure, run: Run) -> None:
    """Two strips on one scale of time, so that a shorter step looks shorter."""
    before, after = strip_steps(run)
    titles = ("Before balancing", "After balancing") if len(run.changes) else ("At the start", "At the end")
    panels = [(title, steps) for title, steps in zip(titles, (before, after), strict=True) if len(steps)]
    if not panels:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No worker was timed in this run.", ha="center", color=DARK)
        return
    longest = max(float(_lengths(run, steps).sum()) for _, steps in panels)
    unit, scale = ("milliseconds", 1e3) if longest < 2 else ("seconds", 1.0)
    many = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, steps) in zip(many, panels, strict=True):
        axes.set_title(f"{title}: {_names(run.step_S[steps])}")
        _strip(axes, run, steps, scale)
        axes.set(xlim=(0, longest * scale), xlabel=unit)
    every = -(-run.workers // 16)
    many[0].set_yticks(range(0, run.workers, every), [f"worker {w}" for w in range(0, run.workers, every)])
    many[0].set_ylim(run.workers - 0.4, -0.6)
    marks = [
        Patch(color=worker_colour(0), label="computing, in the worker's colour"),
        Patch(facecolor=_WAITING, edgecolor="white", hatch="////", label="waiting at the barrier"),
        Line2D([], [], color=DARK, linewidth=1.2, marker="|", markersize=10, linestyle="", label="barrier"),
        Patch(color=_REDUCE, label="reduce, update and host"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _lengths(run: Run, steps: np.ndarray) -> np.ndarray:
    """How long each step took, never less than its slowest worker."""
    return np.fmax(run.step_time_S[steps], np.nanmax(run.times_SxW[steps], axis=1))


def _strip(axes: Axes, run: Run, steps: np.ndarray, scale: float) -> None:
    ends = np.cumsum(_lengths(run, steps)) * scale
    starts = np.append(0, ends[:-1])
    barriers = starts + np.nanmax(run.times_SxW[steps], axis=1) * scale
    for worker in range(run.workers):
        times = np.nan_to_num(run.times_SxW[steps, worker]) * scale
        place = (worker - 0.4, 0.8)
        waits = list(zip(starts + times, barriers - starts - times, strict=True))
        axes.broken_barh(waits, place, facecolor=_WAITING, edgecolor="white", hatch="////", linewidth=0)
        axes.broken_barh(list(zip(starts, times, strict=True)), place, color=worker_colour(worker), linewidth=0)
    for barrier, end in zip(barriers, ends, strict=True):
        axes.axvspan(barrier, end, color=_REDUCE, linewidth=0)
        axes.axvline(barrier, color=DARK, linewidth=1.2)


def _names(steps: np.ndarray) -> str:
    first, last = int(steps[0]), int(steps[-1])
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first == len(steps) - 1 else "steps " + ", ".join(map(str, steps))
