"""Panels of a run without a barrier: the batches of its workers, how busy they were, their updates and staleness."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hetjax.report.colors import worker_colour
from hetjax.report.drawing import BLUE, DARK, THOUSANDS, name_beside, thinned, window_sums
from hetjax.report.run_folder import Run


def shares(figure: SubFigure, run: Run) -> None:
    """Utilisation and update shares over the steps, and the histogram of staleness."""
    busy, updates, stale = figure.subplots(1, 3, width_ratios=[3, 3, 2])
    utilisation_panel(busy, run)
    updates_panel(updates, run)
    staleness_panel(stale, run)


def batches_panel(axes: Axes, run: Run) -> None:
    """The batch that each worker took last; beside the lines the last of all."""
    axes.set_title("Batch of each worker")
    few = thinned(run.steps)
    for worker in range(run.workers):
        batch_S = run.batches_SxW[:, worker]
        axes.step(run.step_S[few], batch_S[few], where="post", color=worker_colour(worker), linewidth=1.6)
    last_W = run.batches_SxW[-1]
    for worker in range(run.workers):
        if np.isfinite(last_W[worker]) and last_W[worker] not in last_W[:worker]:  # like ones would overlap
            name_beside(axes, worker, f"{last_W[worker]:.0f}", float(last_W[worker]))
    axes.set(xlabel="step", ylabel="samples", ylim=(0, None), xlim=(run.step_S[0] - 1, run.step_S[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def utilisation_panel(axes: Axes, run: Run) -> None:
    """The share of time that each worker computed, smoothed over neighbouring steps; the legend has the whole run's."""
    axes.set_title("Utilisation per worker")
    seconds_S = np.nan_to_num(run.step_time_S)
    busy_SxW = np.nan_to_num(run.times_SxW)
    share_SxW = window_sums(busy_SxW) / np.maximum(window_sums(seconds_S[:, None]), 1e-12)
    whole_W = busy_SxW.sum(axis=0) / max(float(seconds_S.sum()), 1e-12)
    few = thinned(run.steps)
    for worker in range(run.workers):
        named = f"worker {worker}: {whole_W[worker]:.0%}" if run.workers <= 8 else None
        axes.plot(run.step_S[few], share_SxW[few, worker], color=worker_colour(worker), label=named, linewidth=1.6)
    axes.axhline(1, color=DARK, linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylim=(0, 1.12))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if run.workers <= 8:
        axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=-(-run.workers // 4))


def updates_panel(axes: Axes, run: Run) -> None:
    """Stacked to one, smoothed over neighbouring steps; beside the layers the shares of the whole run."""
    axes.set_title("Share of updates per worker")
    made_SxW = np.nan_to_num(run.updates_SxW)
    smooth_SxW = window_sums(made_SxW)
    share_SxW = smooth_SxW / np.maximum(smooth_SxW.sum(axis=1, keepdims=True), 1e-12)
    few = thinned(run.steps)
    layers = np.cumsum(share_SxW[few], axis=1)
    below = np.zeros(len(few))
    whole_W = made_SxW.sum(axis=0) / max(float(made_SxW.sum()), 1e-12)
    for worker in range(run.workers):
        axes.fill_between(run.step_S[few], below, layers[:, worker], color=worker_colour(worker), linewidth=0)
        below = layers[:, worker]
    middle_W = np.cumsum(whole_W) - whole_W / 2
    for worker in np.flatnonzero(whole_W > 0.06).tolist():
        name_beside(axes, worker, f"{whole_W[worker]:.0%}", float(middle_W[worker]))
    axes.set(xlabel="step", ylim=(0, 1), xlim=(run.step_S[0], max(run.step_S[-1], run.step_S[0] + 1)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def staleness_panel(axes: Axes, run: Run) -> None:
    """How many updates of others came between reading the model and an update; the last bar holds all beyond."""
    axes.set_title("Staleness of updates")
    told = run.summary.get("staleness")
    try:
        found = {int(k): int(n) for k, n in told.items() if int(k) >= 0} if isinstance(told, dict) else {}
    except (ValueError, TypeError, OverflowError):  # what somebody else wrote
        found = {}
    if not found:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "not known before the end", ha="center", color=DARK)
        return
    widest = 24
    bars = np.zeros(min(max(found), widest) + 1)
    for staleness, number in found.items():
        bars[min(staleness, widest)] += number
    axes.bar(np.arange(len(bars)), bars, color=BLUE, width=0.9)
    mean = sum(k * n for k, n in found.items()) / sum(found.values())
    axes.annotate(f"mean {mean:.1f}", (0.97, 0.93), xycoords="axes fraction", ha="right", va="top", color=DARK)
    axes.set(xlabel="updates of others between", ylabel="updates")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
