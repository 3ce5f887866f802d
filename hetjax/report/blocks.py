"""The picture of a partition: samples in two dimensions coloured by block, and the classes of every block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import PercentFormatter

from hetjax.report.colors import worker_colour
from hetjax.report.drawing import DARK, save, style

_POINTS = 2500  # of a panel; more only hide each other


@dataclass(frozen=True)
class View:
    """Some of the samples, and where each lies on the plane."""

    title: str
    samples_V: np.ndarray
    points_Vx2: np.ndarray


def draw_blocks(
    folder: Path, stem: str, title: str, owners: Mapping[str, np.ndarray], views: list[View], classes_WxL: Mapping
) -> tuple[Path, Path]:
    """Write STEM.png and STEM.svg: a column for every partition, a row for every view, and the classes below.

    owners        partition -> the worker of every sample
    classes_WxL   partition -> samples of every class in every block
    """
    with style():
        return save(blocks_figure(title, owners, views, classes_WxL), folder, stem)


def blocks_figure(title: str, owners: Mapping[str, np.ndarray], views: list[View], classes_WxL: Mapping) -> Figure:
    """To be called and saved under `style()`."""
    columns, rows = len(owners), len(views) + 1
    figure = Figure(figsize=(4.4 * columns, 3.7 * len(views) + 3.0), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    axes_RxC = figure.subplots(rows, columns, squeeze=False, height_ratios=[3.7] * len(views) + [2.2])
    for column, (name, owner_D) in enumerate(owners.items()):
        workers = len(classes_WxL[name])
        for row, view in enumerate(views):
            axes = axes_RxC[row, column]
            _scatter(axes, view, owner_D[view.samples_V], workers)
            axes.set_title(f"{name}\n{view.title}" if row == 0 else view.title)
        _classes(axes_RxC[-1, column], np.asarray(classes_WxL[name]))
    top = max(axes.get_ylim()[1] for axes in axes_RxC[-1])
    for axes in axes_RxC[-1]:
        axes.set_ylim(0, top)
    axes_RxC[-1, 0].set_ylabel("share of the block")
    handles, labels = axes_RxC[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=min(len(labels), 9), frameon=False)
    return figure


def _scatter(axes: Axes, view: View, owner_V: np.ndarray, workers: int) -> None:
    """Points in the colour of their block; the mean and the ellipse of one standard deviation of every block."""
    few = np.unique(np.linspace(0, len(owner_V) - 1, _POINTS).astype(int))  # not by chance: blocks may be dealt so too
    colours = np.array([worker_colour(worker) for worker in range(workers)])
    points, size = view.points_Vx2[few], float(np.clip(6000 / len(few), 4, 16))
    axes.scatter(points[:, 0], points[:, 1], s=size, c=colours[owner_V[few]], alpha=0.45, linewidths=0, rasterized=True)
    for worker in range(workers):
        own = view.points_Vx2[owner_V == worker]
        if len(own):
            _moments(axes, own, colours[worker], "-", f"block {worker}")
    _moments(axes, view.points_Vx2, DARK, "--", "all: mean and standard deviation")
    axes.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")


def _moments(axes: Axes, points_Vx2: np.ndarray, colour: str, line: str, label: str) -> None:
    mean_2, covariance_2x2 = points_Vx2.mean(axis=0), np.cov(points_Vx2.T, bias=True)
    variance_2, direction_2x2 = np.linalg.eigh(covariance_2x2)
    width, height = 2.0 * np.sqrt(np.maximum(variance_2, 0.0))
    angle = float(np.degrees(np.arctan2(direction_2x2[1, 0], direction_2x2[0, 0])))
    centre = (float(mean_2[0]), float(mean_2[1]))
    axes.add_patch(Ellipse(centre, width, height, angle=angle, fill=False, color="white", linewidth=3.5))
    axes.add_patch(Ellipse(centre, width, height, angle=angle, fill=False, color=colour, linestyle=line, linewidth=1.6))
    axes.plot(*centre, "o" if line == "-" else "+", color=colour, markersize=8, markeredgewidth=1.6,
              markeredgecolor="white" if line == "-" else colour, label=label)  # fmt: skip


def _classes(axes: Axes, classes_WxL: np.ndarray) -> None:
    """Bars of every block's class shares, side by side for every class; lines where there are many classes."""
    workers, classes = classes_WxL.shape
    share_WxL = classes_WxL / np.maximum(classes_WxL.sum(axis=1, keepdims=True), 1)
    for worker in range(workers):
        colour = worker_colour(worker)
        if classes <= 20:
            axes.bar(
                np.arange(classes) + (worker + 0.5) / workers * 0.8 - 0.4,
                share_WxL[worker],
                0.8 / workers,
                color=colour,
            )
        else:
            axes.plot(share_WxL[worker], color=colour, linewidth=1, alpha=0.8)
    axes.set_title("Classes of every block")
    axes.set_xlabel("class")
    if classes <= 20:
        axes.set_xticks(range(classes))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
