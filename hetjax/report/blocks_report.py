"""What a partition is worth, for people: tables of its quality beside chance, and a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from hetjax.report.blocks import View, draw_blocks
from hetjax.sampling.blocks import Blocks, numbered
from hetjax.sampling.quality import Quality
from hetjax.sampling.submodular import principal_components

MOST_PANELS = 4
_SHORT = {"facility-location": "f loc.", "graph-cut": "f cut"}
_EXPLAINED = """\
Distances of blocks to the whole in units of the whole's own spread: of means
(average and worst block), of means within classes, of covariances. Classes: the
misplaced share of the worst block. f: facility location and graph cut in all."""


def comparison_table(found: Mapping[str, Quality]) -> Table:
    """A line for every partition: distances to the whole, and f in all."""
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
    """A line for every block: its size, f and distances."""
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
    """How many samples of every class each block has: a line for every class, a column for every block."""
    table = _table("class", *(f"block {worker}" for worker in range(blocks.workers)))
    for name, counts_W in zip(np.unique(blocks.classes_D), quality.classes_WxL.T, strict=True):
        table.add_row(str(name), *(f"{count:,}" for count in counts_W))
    return table


def show(console: Console, blocks: Blocks, name: str, found: Mapping[str, Quality]) -> None:
    """All tables, and what the numbers mean."""
    for table in (classes_table(blocks, found[name]), blocks_table(blocks, found[name]), comparison_table(found)):
        console.print(table)
        console.print("")
    console.print(_EXPLAINED, highlight=False)


def draw(
    path: Path, title: str, features_DxF: np.ndarray, partitions: Mapping[str, Blocks], found: Mapping[str, Quality]
) -> tuple[Path, Path]:
    """The picture beside `path`, as PNG and SVG: the first partitions, on all samples and on the largest class."""
    shown = dict(list(partitions.items())[:MOST_PANELS])
    first = next(iter(shown.values()))
    numbers_D, sizes_L = numbered(first.classes_D)
    largest = np.flatnonzero(numbers_D == int(np.argmax(sizes_L)))
    everyone = np.arange(first.size)
    name = first.classes_D[largest[0]]
    views = [
        View("all samples, 2 principal components", everyone, _plane(features_DxF)),
        View(f"class {name} alone", largest, _plane(features_DxF[largest])),
    ]
    owners: dict[str, Any] = {name: blocks.owner_D for name, blocks in shown.items()}
    classes = {name: found[name].classes_WxL for name in shown}
    return draw_blocks(path.parent, path.stem, title, owners, views, classes)


def _plane(features_DxF: np.ndarray) -> np.ndarray:
    """Two principal components; features of one number lie on a line."""
    plane = principal_components(features_DxF, 2)
    return plane if plane.shape[1] == 2 else np.column_stack([plane, np.zeros(len(plane), np.float32)])


def _short(value: float) -> str:
    return f"{value:,.0f}" if value < 1e7 else f"{value:.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place > 0)
    return table
