"""The quality of a partition: tables that compare it with random ones, and a figure of its blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from hetjax.report.drawing import DARK, save, style, worker_color
from hetjax.sampling.blocks import Blocks, encode_classes
from hetjax.sampling.quality import Quality
from hetjax.sampling.submodular import principal_components

_POINTS = 2500  # per panel; more would only hide each other


@dataclass(frozen=True)
class View:
    """Some of the samples, and their positions in the plane."""

    title: str
    samples_V: np.ndarray
    points_Vx2: np.ndarray


def draw_blocks(
    folder: Path, stem: str, title: str, owners: Mapping[str, np.ndarray], views: list[View], classes_WxL: Mapping
) -> tuple[Path, Path]:
    """Write STEM.png and STEM.svg: a column per partition, a row per view, and the classes of every block below.

    Args:
        folder: Where to write.
        stem: Name of the files.
        title: Title of the figure.
        owners: Partition -> the worker of every sample.
        views: Samples in two dimensions, colored by block.
        classes_WxL: Partition -> number of samples of every class in every block.
    """
    with style():
        return save(blocks_figure(title, owners, views, classes_WxL), folder, stem)


def blocks_figure(title: str, owners: Mapping[str, np.ndarray], views: list[View], classes_WxL: Mapping) -> Figure:
    """The figure of `draw_blocks`; call and save it inside `style()`."""
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
    """Points in the color of their block; mean and standard-deviation ellipse of every block."""
    # Evenly spaced, not drawn: the same generator may have dealt the blocks.
    few = np.unique(np.linspace(0, len(owner_V) - 1, _POINTS).astype(int))
    colors = np.array([worker_color(worker) for worker in range(workers)])
    points, size = view.points_Vx2[few], float(np.clip(6000 / len(few), 4, 16))
    axes.scatter(points[:, 0], points[:, 1], s=size, c=colors[owner_V[few]], alpha=0.45, linewidths=0, rasterized=True)
    for worker in range(workers):
        own = view.points_Vx2[owner_V == worker]
        if len(own):
            _moments(axes, own, colors[worker], "-", f"block {worker}")
    _moments(axes, view.points_Vx2, DARK, "--", "all: mean and standard deviation")
    axes.set(xticks=[], yticks=[], aspect="equal", adjustable="datalim")


def _moments(axes: Axes, points_Vx2: np.ndarray, color: str, line: str, label: str) -> None:
    mean_2, covariance_2x2 = points_Vx2.mean(axis=0), np.cov(points_Vx2.T, bias=True)
    variance_2, direction_2x2 = np.linalg.eigh(covariance_2x2)
    width, height = 2.0 * np.sqrt(np.maximum(variance_2, 0.0))
    angle = float(np.degrees(np.arctan2(direction_2x2[1, 0], direction_2x2[0, 0])))
    center = (float(mean_2[0]), float(mean_2[1]))
    axes.add_patch(Ellipse(center, width, height, angle=angle, fill=False, color="white", linewidth=3.5))
    axes.add_patch(Ellipse(center, width, height, angle=angle, fill=False, color=color, linestyle=line, linewidth=1.6))
    axes.plot(*center, "o" if line == "-" else "+", color=color, markersize=8, markeredgewidth=1.6,
              markeredgecolor="white" if line == "-" else color, label=label)  # fmt: skip


def _classes(axes: Axes, classes_WxL: np.ndarray) -> None:
    """Class proportions of every block: bars side by side, or lines if there are many classes."""
    workers, classes = classes_WxL.shape
    share_WxL = classes_WxL / np.maximum(classes_WxL.sum(axis=1, keepdims=True), 1)
    for worker in range(workers):
        color = worker_color(worker)
        if classes <= 20:
            axes.bar(
                np.arange(classes) + (worker + 0.5) / workers * 0.8 - 0.4,
                share_WxL[worker],
                0.8 / workers,
                color=color,
            )
        else:
            axes.plot(share_WxL[worker], color=color, linewidth=1, alpha=0.8)
    axes.set_title("Classes of every block")
    axes.set_xlabel("class")
    if classes <= 20:
        axes.set_xticks(range(classes))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))


MAX_PARTITIONS = 4  # in one figure
_SHORT = {"facility-location": "f loc.", "graph-cut": "f cut"}
_EXPLAINED = """\
Distances between block and dataset, relative to the spread of the dataset: of
means (average and worst block), of means within classes, of covariances. classes:
total variation distance of the worst block's class proportions. f: total facility
location and graph cut."""


def comparison_table(found: Mapping[str, Quality]) -> Table:
    """A row per partition: distances to the dataset, and total f."""
    table = _table("", "mean", "worst", "within", "covar.", "classes", *_SHORT.values())
    for name, quality in found.items():
        numbers = (
            np.nanmean(quality.mean_distance_W),
            np.nanmax(quality.mean_distance_W),
            np.nanmean(quality.within_distance_W),
            np.nanmean(quality.covariance_distance_W),
        )
        values = [_short(quality.values[f].sum()) if f in quality.values else "–" for f in _SHORT]
        table.add_row(
            name.replace(",", ""), *(f"{x:.4f}" for x in numbers), f"{np.nanmax(quality.class_distance_W):.2%}", *values
        )
    return table


def blocks_table(blocks: Blocks, quality: Quality) -> Table:
    """A row per block: its size, f and distances."""
    table = _table("block", "rate", "samples", *(_SHORT[f] for f in quality.values), "mean", "within", "covar.")
    for worker in range(blocks.workers):
        distances = (quality.mean_distance_W, quality.within_distance_W, quality.covariance_distance_W)
        table.add_row(
            str(worker),
            f"{blocks.rates_W[worker]:g}",
            f"{quality.sizes_W[worker]:,}",
            *(_short(values_W[worker]) for values_W in quality.values.values()),
            *(f"{values_W[worker]:.4f}" for values_W in distances),
        )
    return table


def classes_table(blocks: Blocks, quality: Quality) -> Table:
    """Number of samples of every class in every block: a row per class, a column per block."""
    table = _table("class", *(f"block {worker}" for worker in range(blocks.workers)))
    for name, counts_W in zip(np.unique(blocks.classes_D), quality.classes_WxL.T, strict=True):
        table.add_row(str(name), *(f"{count:,}" for count in counts_W))
    return table


def show(console: Console, blocks: Blocks, name: str, found: Mapping[str, Quality]) -> None:
    """Print all tables, and what the numbers mean."""
    for table in (classes_table(blocks, found[name]), blocks_table(blocks, found[name]), comparison_table(found)):
        console.print(table)
        console.print("")
    console.print(_EXPLAINED, highlight=False)


def draw(
    path: Path, title: str, features_DxF: np.ndarray, partitions: Mapping[str, Blocks], found: Mapping[str, Quality]
) -> tuple[Path, Path]:
    """Draw the first partitions next to `path`, as PNG and SVG: all samples, and the largest class alone."""
    shown = dict(list(partitions.items())[:MAX_PARTITIONS])
    first = next(iter(shown.values()))
    codes_D, sizes_L = encode_classes(first.classes_D)
    largest = np.flatnonzero(codes_D == int(np.argmax(sizes_L)))
    all_D = np.arange(first.size)
    name = first.classes_D[largest[0]]
    views = [
        View("all samples, 2 principal components", all_D, _plane(features_DxF)),
        View(f"class {name} alone", largest, _plane(features_DxF[largest])),
    ]
    owners: dict[str, Any] = {name: blocks.owner_D for name, blocks in shown.items()}
    classes = {name: found[name].classes_WxL for name in shown}
    return draw_blocks(path.parent, path.stem, title, owners, views, classes)


def _plane(features_DxF: np.ndarray) -> np.ndarray:
    """Two principal components; the second is zero for one-dimensional features."""
    plane = principal_components(features_DxF, 2)
    return plane if plane.shape[1] == 2 else np.column_stack([plane, np.zeros(len(plane), np.float32)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value < 1e7 else f"{value:.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number > 0)
    return table
