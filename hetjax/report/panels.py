"""The panels of a run over time: samples per worker, efficiency, loss."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from hetjax.report.colors import worker_colour
from hetjax.report.drawing import BLUE, DARK, THOUSANDS, curve, name_beside, thinned, window_sums
from hetjax.report.run_folder import Run


def counts_panel(axes: Axes, run: Run) -> None:
    """Stacked, so that the height is the batch and equal counts do not hide each other."""
    axes.set_title("Samples per worker (together: the batch)")
    full = np.flatnonzero(run.full_S)
    shown = full[thinned(len(full))]
    counts_SxW = np.nan_to_num(run.counts_SxW[shown])
    edges = np.append(run.step_S[shown[0]] - 1, run.step_S[shown])  # the layer of step k lies left of k
    level = np.zeros(len(shown))
    for worker in range(run.workers):
        above = level + counts_SxW[:, worker]
        axes.stairs(above, edges, baseline=level, fill=True, color=worker_colour(worker), linewidth=0)
        if run.workers <= 16:
            axes.stairs(above, edges, baseline=None, color="white", linewidth=0.8)
        level = above
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, max(1, level.max())), xlabel="step", ylabel="samples")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _last_counts(axes, counts_SxW[-1])


def _last_counts(axes: Axes, counts_W: np.ndarray) -> None:
    """Worker and last count beside the layers that are high enough for a line of text."""
    middle_W = np.cumsum(counts_W) - counts_W / 2
    high_W = counts_W > 0.05 * max(1, counts_W.sum())
    for worker in range(len(counts_W)):
        if high_W[worker]:
            name_beside(axes, worker, f"{counts_W[worker]:.0f}", float(middle_W[worker]))


def efficiency_panel(axes: Axes, run: Run) -> None:
    """Measured speed over the ideal; without an ideal the speed itself."""
    speed_S = run.samples_per_s_S
    if run.asynchronous:  # a step is whatever was finished meanwhile: only several together say how fast it was
        done_Sx2 = np.column_stack([np.nansum(run.counts_SxW, axis=1), np.nan_to_num(run.step_time_S)])
        samples_S, seconds_S = window_sums(done_Sx2).T
        speed_S = samples_S / np.maximum(seconds_S, 1e-12)
    known = run.full_S & np.isfinite(speed_S)
    step, speed = run.step_S[known], speed_S[known]
    if run.ideal is not None:
        axes.set_title("Efficiency (samples/s over the ideal)")
        speed = speed / run.ideal
        axes.axhline(1, color=DARK, linestyle="--", linewidth=1)
        axes.annotate("ideal", (1, 1), xycoords=("axes fraction", "data"), va="bottom", ha="right", color=DARK)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        top = 1.0
    else:
        axes.set_title("Samples per second (the ideal is not known)")
        axes.yaxis.set_major_formatter(THOUSANDS)
        top = 0.0
    if len(speed):
        top = max(top, float(np.quantile(speed, 0.99)))  # one lucky step must not flatten the curve
    axes.set_ylim(0, 1.12 * top or 1)
    curve(axes, step, speed, BLUE)
    changes = run.step_S[run.changes]
    if len(changes):
        low = np.full(len(changes), 0.03)
        axes.plot(
            changes,
            low,
            "|",
            transform=axes.get_xaxis_transform(),
            color="#D55E00",
            markersize=12,
            label="batches changed" if run.asynchronous else "counts changed",
        )
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.06), frameon=False)
    axes.set(xlabel="step", xlim=(run.step_S[0] - 1, run.step_S[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def loss_panel(axes: Axes, run: Run, x_S: np.ndarray, what: str) -> None:
    axes.set_title(f"Loss against {what}")
    finite = np.isfinite(run.loss_S) & np.isfinite(x_S)
    loss = run.loss_S[finite]
    if len(loss) and loss.min() > 0 and loss.max() > 20 * loss.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(THOUSANDS)
        axes.yaxis.set_minor_locator(NullLocator())
    curve(axes, x_S[finite], loss, BLUE)
    lost = int(np.sum(~np.isfinite(run.loss_S)))
    if lost:
        told = f"{lost} steps without a finite loss"
        axes.annotate(told, (0.98, 0.95), xycoords="axes fraction", ha="right", va="top", color=DARK)
    axes.set(xlabel=what, ylabel="loss")
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.xaxis.set_major_locator(MaxNLocator(6))
