"""The panels of a run's picture: counts, efficiency, loss, a Gantt strip, and those of a run without a barrier.

The panels of a run over time: samples per worker, efficiency, loss.

Gantt strips of a few steps: who computes, who waits at the barrier for the slowest, and the reduce behind it.

Panels of a run without a barrier: the batches of its workers, how busy they were, their updates and staleness.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from hetjax.report.drawing import BLUE, DARK, THOUSANDS, curve, name_beside, thinned, window_sums, worker_color
from hetjax.report.run_folder import RecordedRun


def counts_panel(axes: Axes, run: RecordedRun) -> None:
    """Stacked, so that the height is the batch and equal counts do not hide each other."""
    axes.set_title("Samples per worker (together: the batch)")
    full = np.flatnonzero(run.full_S)
    shown = full[thinned(len(full))]
    counts_SxW = np.nan_to_num(run.counts_SxW[shown])
    edges = np.append(run.step_S[shown[0]] - 1, run.step_S[shown])  # the layer of step k lies left of k
    level = np.zeros(len(shown))
    for worker in range(run.workers):
        above = level + counts_SxW[:, worker]
        axes.stairs(above, edges, baseline=level, fill=True, color=worker_color(worker), linewidth=0)
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


def efficiency_panel(axes: Axes, run: RecordedRun) -> None:
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


def loss_panel(axes: Axes, run: RecordedRun, x_S: np.ndarray, what: str) -> None:
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


_WAITING, _REDUCE = "#E8E8E8", "#BDBDBD"


def strip_steps(run: RecordedRun, steps: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Indices of up to `steps` timed steps just before the counts first changed, and of the last ones of the run.

    If they never changed, of the first and the last ones.
    """
    timed = np.flatnonzero(run.full_S & np.isfinite(run.times_SxW).any(axis=1))
    changes = run.changes
    if len(changes) == 0:
        return timed[:steps], timed[steps:][-steps:]
    return timed[timed < changes[0]][-steps:], timed[timed >= changes[0]][-steps:]


def strips(figure: SubFigure, run: RecordedRun) -> None:
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
        Patch(color=worker_color(0), label="computing, in the worker's color"),
        Patch(facecolor=_WAITING, edgecolor="white", hatch="////", label="waiting at the barrier"),
        Line2D([], [], color=DARK, linewidth=1.2, marker="|", markersize=10, linestyle="", label="barrier"),
        Patch(color=_REDUCE, label="reduce, update and host"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _lengths(run: RecordedRun, steps: np.ndarray) -> np.ndarray:
    """How long each step took, never less than its slowest worker."""
    return np.fmax(run.step_time_S[steps], np.nanmax(run.times_SxW[steps], axis=1))


def _strip(axes: Axes, run: RecordedRun, steps: np.ndarray, scale: float) -> None:
    ends = np.cumsum(_lengths(run, steps)) * scale
    starts = np.append(0, ends[:-1])
    barriers = starts + np.nanmax(run.times_SxW[steps], axis=1) * scale
    for worker in range(run.workers):
        times = np.nan_to_num(run.times_SxW[steps, worker]) * scale
        place = (worker - 0.4, 0.8)
        waits = list(zip(starts + times, barriers - starts - times, strict=True))
        axes.broken_barh(waits, place, facecolor=_WAITING, edgecolor="white", hatch="////", linewidth=0)
        axes.broken_barh(list(zip(starts, times, strict=True)), place, color=worker_color(worker), linewidth=0)
    for barrier, end in zip(barriers, ends, strict=True):
        axes.axvspan(barrier, end, color=_REDUCE, linewidth=0)
        axes.axvline(barrier, color=DARK, linewidth=1.2)


def _names(steps: np.ndarray) -> str:
    first, last = int(steps[0]), int(steps[-1])
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first == len(steps) - 1 else "steps " + ", ".join(map(str, steps))


def shares(figure: SubFigure, run: RecordedRun) -> None:
    """Utilization and update shares over the steps, and the histogram of staleness."""
    busy, updates, stale = figure.subplots(1, 3, width_ratios=[3, 3, 2])
    utilization_panel(busy, run)
    updates_panel(updates, run)
    staleness_panel(stale, run)


def batches_panel(axes: Axes, run: RecordedRun) -> None:
    """The batch that each worker took last; beside the lines the last of all."""
    axes.set_title("Batch of each worker")
    few = thinned(run.steps)
    for worker in range(run.workers):
        batch_S = run.batches_SxW[:, worker]
        axes.step(run.step_S[few], batch_S[few], where="post", color=worker_color(worker), linewidth=1.6)
    last_W = run.batches_SxW[-1]
    for worker in range(run.workers):
        if np.isfinite(last_W[worker]) and last_W[worker] not in last_W[:worker]:  # like ones would overlap
            name_beside(axes, worker, f"{last_W[worker]:.0f}", float(last_W[worker]))
    axes.set(xlabel="step", ylabel="samples", ylim=(0, None), xlim=(run.step_S[0] - 1, run.step_S[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def utilization_panel(axes: Axes, run: RecordedRun) -> None:
    """The share of time that each worker computed, smoothed over neighboring steps; the legend has the whole run's."""
    axes.set_title("Utilization per worker")
    seconds_S = np.nan_to_num(run.step_time_S)
    busy_SxW = np.nan_to_num(run.times_SxW)
    share_SxW = window_sums(busy_SxW) / np.maximum(window_sums(seconds_S[:, None]), 1e-12)
    whole_W = busy_SxW.sum(axis=0) / max(float(seconds_S.sum()), 1e-12)
    few = thinned(run.steps)
    for worker in range(run.workers):
        named = f"worker {worker}: {whole_W[worker]:.0%}" if run.workers <= 8 else None
        axes.plot(run.step_S[few], share_SxW[few, worker], color=worker_color(worker), label=named, linewidth=1.6)
    axes.axhline(1, color=DARK, linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylim=(0, 1.12))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if run.workers <= 8:
        axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=-(-run.workers // 4))


def updates_panel(axes: Axes, run: RecordedRun) -> None:
    """Stacked to one, smoothed over neighboring steps; beside the layers the shares of the whole run."""
    axes.set_title("Share of updates per worker")
    made_SxW = np.nan_to_num(run.updates_SxW)
    smooth_SxW = window_sums(made_SxW)
    share_SxW = smooth_SxW / np.maximum(smooth_SxW.sum(axis=1, keepdims=True), 1e-12)
    few = thinned(run.steps)
    layers = np.cumsum(share_SxW[few], axis=1)
    below = np.zeros(len(few))
    whole_W = made_SxW.sum(axis=0) / max(float(made_SxW.sum()), 1e-12)
    for worker in range(run.workers):
        axes.fill_between(run.step_S[few], below, layers[:, worker], color=worker_color(worker), linewidth=0)
        below = layers[:, worker]
    middle_W = np.cumsum(whole_W) - whole_W / 2
    for worker in np.flatnonzero(whole_W > 0.06).tolist():
        name_beside(axes, worker, f"{whole_W[worker]:.0%}", float(middle_W[worker]))
    axes.set(xlabel="step", ylim=(0, 1), xlim=(run.step_S[0], max(run.step_S[-1], run.step_S[0] + 1)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def staleness_panel(axes: Axes, run: RecordedRun) -> None:
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
