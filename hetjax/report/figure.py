"""The figure of one run: counts, efficiency, a timeline of a few steps, and the loss.

Asynchronous runs have no barrier: theirs shows batches, utilization, update shares and staleness instead.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from hetjax.report.drawing import DARK, RED, save, style
from hetjax.report.panels import (
    asynchronous_panels,
    batches_panel,
    counts_panel,
    efficiency_panel,
    loss_panel,
    timelines,
)
from hetjax.report.run_folder import RecordedRun


def draw_run(run: RecordedRun) -> tuple[Path, Path]:
    """Draw the run, write run.png and run.svg to its folder, and return both paths."""
    with style():
        return save(run_figure(run), run.folder, "run")


def run_figure(run: RecordedRun) -> Figure:
    """Return the figure of a run; call and save it inside `style()`."""
    middle = 3.1 if run.asynchronous else min(5.5, 1.5 + 0.26 * run.workers)
    figure = Figure(figsize=(12, 7.2 + middle), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    figure.suptitle(headline(run), x=0.01, ha="left", fontsize=13, fontweight="bold")
    if run.warnings:
        figure.supxlabel(fill(" ".join(run.warnings), 150), x=0.01, ha="left", fontsize=9, color=RED)
    if run.workers == 0 or not run.full_S.any():
        figure.set_size_inches(12, 3)
        figure.text(0.5, 0.5, "There is no finished step to draw.", ha="center", fontsize=14, color=DARK)
        return figure
    parts = figure.subfigures(3, 1, height_ratios=[3.3, middle, 3.1], hspace=0.04, squeeze=False)[:, 0]
    left, right = parts[0].subplots(1, 2)
    (batches_panel if run.asynchronous else counts_panel)(left, run)
    efficiency_panel(right, run)
    (asynchronous_panels if run.asynchronous else timelines)(parts[1], run)
    loss_panel(parts[2].subplots(), run)
    return figure


def headline(run: RecordedRun) -> str:
    """Return name, dataset, model, workers and throughput of the run in one line."""
    setup = [run.config[key] for key in ("dataset", "model") if isinstance(run.config.get(key), str)]
    parts = [", ".join([run.name, *setup])]
    if run.workers:
        parts.append(f"{run.workers} worker{'s' if run.workers > 1 else ''}")
    speed, efficiency = run.summary.get("samples_per_s"), run.summary.get("efficiency")
    if isinstance(speed, (int, float)):
        parts.append(f"{speed:,.0f} samples/s")
    if isinstance(efficiency, (int, float)):
        parts.append(f"{efficiency:.0%} of the ideal")
    return "   |   ".join(parts)
