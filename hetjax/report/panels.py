"""The panels of a run's figure.

All runs: counts, efficiency, loss. With a barrier: timelines of a few steps. Asynchronous: batch sizes, utilization,
update shares, staleness.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, PercentFormatter

from hetjax.report.drawing import BLUE, DARK, RED, THOUSANDS, curve, label_beside, thinned, window_sums, worker_color
from hetjax.report.run_folder import RecordedRun

_NAMED = 30  # changes of the members that are named; more would hide the curve


def mark_members(axes: Axes, run: RecordedRun, x_S: np.ndarray, named: bool) -> None:
    """Mark the changes of an elastic fleet's members by lines; `named`: with who left, who came, and the seconds."""
    changed = [index for index, changes in enumerate(run.members_S) if changes]
    for index in changed:
        axes.axvline(x_S[index], color=RED, linewidth=0.8, linestyle=":")
        if named and len(changed) <= _NAMED:
            signs = " ".join(change.sign for change in run.members_S[index])
            text = f" {signs}, {sum(change.seconds for change in run.members_S[index]):.1f} s"
            axes.annotate(
                text, (x_S[index], 0.98), xycoords=axes.get_xaxis_transform(), rotation=90, va="top", ha="right",
                color=RED, fontsize=8,
            )  # fmt: skip
    if changed:
        axes.plot([], [], color=RED, linewidth=0.8, linestyle=":", label="members changed")


def counts_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw the counts, stacked: the total height is the batch, and equal counts do not hide each other."""
    axes.set_title("Samples per worker (total: the batch)")
    full = np.flatnonzero(run.full_S)
    all_SxW = np.nan_to_num(run.counts_SxW[full])
    first_of_plan = np.flatnonzero((all_SxW[1:] != all_SxW[:-1]).any(axis=1)) + 1
    some = thinned(len(full), first_of_plan)
    drawn, counts_SxW = full[some], all_SxW[some]
    edges = np.append(run.step_S[drawn], run.step_S[drawn[-1]] + 1) - 0.5  # a layer begins with its first step
    level = np.zeros(len(drawn))
    for worker in range(run.workers):
        above = level + counts_SxW[:, worker]
        axes.stairs(above, edges, baseline=level, fill=True, color=worker_color(worker), linewidth=0)
        if run.workers <= 16:
            axes.stairs(above, edges, baseline=None, color="white", linewidth=0.8)
        level = above
    axes.set(xlim=(edges[0], edges[-1]), ylim=(0, max(1, level.max())), xlabel="step", ylabel="samples")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    mark_members(axes, run, run.step_S - 0.5, named=False)
    _last_counts(axes, counts_SxW[-1])


def _last_counts(axes: Axes, counts_W: np.ndarray) -> None:
    """Label the layers that are high enough for a line of text with worker and last count."""
    middle_W = np.cumsum(counts_W) - counts_W / 2
    high_W = counts_W > 0.05 * max(1, counts_W.sum())
    for worker in range(len(counts_W)):
        if high_W[worker]:
            label_beside(axes, worker, f"{counts_W[worker]:.0f}", float(middle_W[worker]))


def efficiency_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw measured over ideal samples/s; where the ideal is unknown, samples/s."""
    speed_S = run.samples_per_s_S
    if run.asynchronous:  # a step is one interval of reporting: too noisy alone
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
        axes.set_title("Samples per second (ideal unknown)")
        axes.yaxis.set_major_formatter(THOUSANDS)
        top = 0.0
    if len(speed):
        top = max(top, float(np.quantile(speed, 0.99)))  # one outlier must not flatten the curve
    axes.set_ylim(0, 1.12 * top or 1)
    curve(axes, step, speed, BLUE, jumps=np.flatnonzero(run.changed_S[known] > 0))
    changes = run.step_S[run.changes] - 0.5  # between two steps, where the layers of the counts begin
    if len(changes):
        low = np.full(len(changes), 0.03)
        axes.plot(
            changes,
            low,
            "|",
            transform=axes.get_xaxis_transform(),
            color="#D55E00",
            markersize=12,
            label="batch sizes changed" if run.asynchronous else "counts changed",
        )
    mark_members(axes, run, run.step_S - 0.5, named=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 0.06), frameon=False)
    axes.set(xlabel="step", xlim=(run.step_S[0] - 0.5, run.step_S[-1] + 0.5))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def loss_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw the loss against seconds, on a log scale where it falls by more than a factor of 20."""
    axes.set_title("Loss against seconds")
    finite = np.isfinite(run.loss_S) & np.isfinite(run.seconds_S)
    loss = run.loss_S[finite]
    if len(loss) and loss.min() > 0 and loss.max() > 20 * loss.min():
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(THOUSANDS)
        axes.yaxis.set_minor_locator(NullLocator())
    curve(axes, run.seconds_S[finite], loss, BLUE)
    mark_members(axes, run, run.seconds_S, named=True)
    lost = int(np.sum(~np.isfinite(run.loss_S)))
    if lost:
        message = f"{lost} steps without a finite loss"
        axes.annotate(message, (0.98, 0.95), xycoords="axes fraction", ha="right", va="top", color=DARK)
    axes.set(xlabel="seconds", ylabel="loss")
    axes.xaxis.set_major_formatter(THOUSANDS)
    axes.xaxis.set_major_locator(MaxNLocator(6))


_WAITING, _REDUCE = "#E8E8E8", "#BDBDBD"


def timeline_steps(run: RecordedRun, steps: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of up to `steps` timed steps before the counts first changed, and of the last ones.

    If the counts never changed, those of the first and of the last timed steps.
    """
    timed = np.flatnonzero(run.full_S & np.isfinite(run.times_SxW).any(axis=1))
    changes = run.changes
    if len(changes) == 0:
        return timed[:steps], timed[steps:][-steps:]
    return timed[timed < changes[0]][-steps:], timed[timed >= changes[0]][-steps:]


def timelines(figure: SubFigure, run: RecordedRun) -> None:
    """Draw what each worker does in a few steps before and after balancing, on one time scale."""
    before, after = timeline_steps(run)
    titles = ("Before balancing", "After balancing") if len(run.changes) else ("At the start", "At the end")
    panels = [(title, steps) for title, steps in zip(titles, (before, after), strict=True) if len(steps)]
    if not panels:
        axes = figure.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "No worker was timed in this run.", ha="center", color=DARK)
        return
    longest = max(float(_durations(run, steps).sum()) for _, steps in panels)
    unit, scale = ("milliseconds", 1e3) if longest < 2 else ("seconds", 1.0)
    axes_pair = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (title, steps) in zip(axes_pair, panels, strict=True):
        axes.set_title(f"{title}: {_step_names(run.step_S[steps])}")
        _timeline(axes, run, steps, scale)
        axes.set(xlim=(0, longest * scale), xlabel=unit)
    every = -(-run.workers // 16)  # label at most 16 workers
    axes_pair[0].set_yticks(range(0, run.workers, every), [f"worker {w}" for w in range(0, run.workers, every)])
    axes_pair[0].set_ylim(run.workers - 0.4, -0.6)
    handles = [
        Patch(color=worker_color(0), label="computing (in the worker's color)"),
        Patch(facecolor=_WAITING, edgecolor="white", hatch="////", label="waiting at the barrier"),
        Line2D([], [], color=DARK, linewidth=1.2, marker="|", markersize=10, linestyle="", label="barrier"),
        Patch(color=_REDUCE, label="reduce, update, host"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _durations(run: RecordedRun, steps: np.ndarray) -> np.ndarray:
    """Return the duration of each step, at least that of its slowest worker."""
    return np.fmax(run.step_time_S[steps], np.nanmax(run.times_SxW[steps], axis=1))


def _timeline(axes: Axes, run: RecordedRun, steps: np.ndarray, scale: float) -> None:
    ends = np.cumsum(_durations(run, steps)) * scale
    starts = np.append(0, ends[:-1])
    barriers = starts + np.nanmax(run.times_SxW[steps], axis=1) * scale
    for worker in range(run.workers):
        times = np.nan_to_num(run.times_SxW[steps, worker]) * scale
        span = (worker - 0.4, 0.8)
        waits = list(zip(starts + times, barriers - starts - times, strict=True))
        axes.broken_barh(waits, span, facecolor=_WAITING, edgecolor="white", hatch="////", linewidth=0)
        axes.broken_barh(list(zip(starts, times, strict=True)), span, color=worker_color(worker), linewidth=0)
    for barrier, end in zip(barriers, ends, strict=True):
        axes.axvspan(barrier, end, color=_REDUCE, linewidth=0)
        axes.axvline(barrier, color=DARK, linewidth=1.2)


def _step_names(steps: np.ndarray) -> str:
    first, last = int(steps[0]), int(steps[-1])
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first == len(steps) - 1 else "steps " + ", ".join(map(str, steps))


def asynchronous_panels(figure: SubFigure, run: RecordedRun) -> None:
    """Draw utilization and update shares over the steps, and the histogram of staleness."""
    busy, updates, stale = figure.subplots(1, 3, width_ratios=[3, 3, 2])
    utilization_panel(busy, run)
    updates_panel(updates, run)
    staleness_panel(stale, run)


def batches_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw the batch size of each worker; the labels show the last ones."""
    axes.set_title("Batch size per worker")
    drawn = thinned(run.steps, run.changes)
    for worker in range(run.workers):
        batch_S = run.batches_SxW[:, worker]
        axes.step(run.step_S[drawn] - 0.5, batch_S[drawn], where="post", color=worker_color(worker), linewidth=1.6)
    last_W = run.batches_SxW[-1]
    for worker in range(run.workers):
        if np.isfinite(last_W[worker]) and last_W[worker] not in last_W[:worker]:  # labels of equal sizes would overlap
            label_beside(axes, worker, f"{last_W[worker]:.0f}", float(last_W[worker]))
    axes.set(xlabel="step", ylabel="samples", ylim=(0, None), xlim=(run.step_S[0] - 1, run.step_S[-1]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def utilization_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw the fraction of time that each worker computed, smoothed; the legend shows that of the whole run."""
    axes.set_title("Utilization per worker")
    seconds_S = np.nan_to_num(run.step_time_S)
    busy_SxW = np.nan_to_num(run.times_SxW)
    share_SxW = window_sums(busy_SxW) / np.maximum(window_sums(seconds_S[:, None]), 1e-12)
    whole_W = busy_SxW.sum(axis=0) / max(float(seconds_S.sum()), 1e-12)
    drawn = thinned(run.steps)
    for worker in range(run.workers):
        label = f"worker {worker}: {whole_W[worker]:.0%}" if run.workers <= 8 else None
        axes.plot(run.step_S[drawn], share_SxW[drawn, worker], color=worker_color(worker), label=label, linewidth=1.6)
    axes.axhline(1, color=DARK, linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylim=(0, 1.12))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if run.workers <= 8:
        axes.legend(loc="lower right", frameon=False, fontsize=9, ncols=-(-run.workers // 4))


def updates_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw each worker's share of the updates, stacked and smoothed; the labels show those of the whole run."""
    axes.set_title("Share of updates per worker")
    made_SxW = np.nan_to_num(run.updates_SxW)
    smooth_SxW = window_sums(made_SxW)
    share_SxW = smooth_SxW / np.maximum(smooth_SxW.sum(axis=1, keepdims=True), 1e-12)
    drawn = thinned(run.steps)
    layers = np.cumsum(share_SxW[drawn], axis=1)
    below = np.zeros(len(drawn))
    whole_W = made_SxW.sum(axis=0) / max(float(made_SxW.sum()), 1e-12)
    for worker in range(run.workers):
        axes.fill_between(run.step_S[drawn], below, layers[:, worker], color=worker_color(worker), linewidth=0)
        below = layers[:, worker]
    middle_W = np.cumsum(whole_W) - whole_W / 2
    for worker in np.flatnonzero(whole_W > 0.06).tolist():
        label_beside(axes, worker, f"{whole_W[worker]:.0%}", float(middle_W[worker]))
    axes.set(xlabel="step", ylim=(0, 1), xlim=(run.step_S[0], max(run.step_S[-1], run.step_S[0] + 1)))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def staleness_panel(axes: Axes, run: RecordedRun) -> None:
    """Draw the histogram of staleness: updates by others between read and update; the last bar includes all above."""
    axes.set_title("Staleness of updates")
    recorded = run.summary.get("staleness")
    try:
        histogram = {int(k): int(n) for k, n in recorded.items() if int(k) >= 0} if isinstance(recorded, dict) else {}
    except (ValueError, TypeError, OverflowError):  # a damaged summary
        histogram = {}
    if not histogram:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "known at the end of the run", ha="center", color=DARK)
        return
    widest = 24
    bars = np.zeros(min(max(histogram), widest) + 1)
    for staleness, number in histogram.items():
        bars[min(staleness, widest)] += number
    axes.bar(np.arange(len(bars)), bars, color=BLUE, width=0.9)
    mean = sum(k * n for k, n in histogram.items()) / sum(histogram.values())
    axes.annotate(f"mean {mean:.1f}", (0.97, 0.93), xycoords="axes fraction", ha="right", va="top", color=DARK)
    axes.set(xlabel="staleness (updates by others)", ylabel="updates")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(THOUSANDS)
