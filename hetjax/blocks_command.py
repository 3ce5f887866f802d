"""The command `hetjax partition`: cut a data set into blocks, show what they are worth, write them to a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hetjax import blocks_report
from hetjax.data import load
from hetjax.plan.blocks import Blocks, checked_rates, class_balanced_blocks, random_blocks
from hetjax.plan.quality import quality
from hetjax.plan.submodular import OBJECTIVES, RULES, recut, submodular_blocks
from hetjax.plan.submodular.cut import chosen_rule
from hetjax.plan.submodular.greedy import Progress as Tick
from hetjax.source_blocks import named_features, read_classes, read_features


def cut(
    dataset: str,
    rates: list[float],
    out: Path,
    console: Console,
    *,
    objective: str,
    rule: str,
    features: str,
    bandwidth: float | None,
    pseudo_classes: int | None,
    compare: bool,
    old: Path | None,
    seed: int,
) -> None:
    """Cut anew, or re-cut an old partition, and tell everything about it."""
    rates_W = checked_rates(rates)
    source = load(dataset, "train")
    features_DxF = read_features(source, named_features(features))
    told = f"{source.description.name}: {len(source):,} samples, features {features} of {features_DxF.shape[1]}"
    console.print(told, highlight=False, soft_wrap=True)
    if old is not None:
        name, blocks = "re-cut", _moved(old, features_DxF, rates_W, console)
    else:
        classes_D = read_classes(source, features_DxF, pseudo_classes, seed)
        width = "median" if bandwidth is None else bandwidth
        make = lambda f, r, tick: submodular_blocks(
            features_DxF, classes_D, rates_W, objective=f, rule=r, bandwidth=width, progress=tick
        )
        rule = chosen_rule(rule, rates_W)
        name = f"{objective}, {rule}"
        with _bar(name, len(source), console) as tick:
            blocks = make(objective, rule, tick)
    blocks = blocks.renamed(dataset=dataset, features=features)
    blocks.save(out)
    partitions = {name: blocks}
    for other in (random_blocks, class_balanced_blocks):
        chance = other(blocks.classes_D, rates_W, seed)
        partitions[str(chance.settings["name"])] = chance
    if compare and old is None:
        for f in OBJECTIVES:
            for r in RULES:
                if (other_name := f"{f}, {r}") not in partitions:
                    with _bar(other_name, len(source), console) as tick:
                        partitions[other_name] = make(f, r, tick)
    widths = blocks.settings["bandwidths"]
    with console.status("measuring"):
        found = quality(features_DxF, partitions, bandwidth=widths)
    blocks_report.show(console, blocks, name, found)
    title = f"{source.description.name}: {len(source):,} samples for rates {', '.join(f'{r:g}' for r in rates_W)}"
    picture, _ = blocks_report.draw(out, title, features_DxF, partitions, found)
    console.print(f"blocks:  {out}\npicture: {picture}", soft_wrap=True, highlight=False)


def parse_rates(text: str | None, workers: int) -> list[float]:
    """The rates that --rates or --workers say."""
    if text is None:
        if workers < 1:
            raise ValueError(f"--workers is {workers}: give at least 1.")
        return [1.0] * workers
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--rates is {text!r}: expected numbers with commas between, such as 4,2,1,1.") from None


def _moved(old: Path, features_DxF: np.ndarray, rates_W: np.ndarray, console: Console) -> Blocks:
    before = Blocks.load(old)
    with _bar("re-cut", len(features_DxF), console) as tick:
        new = recut(before, features_DxF, rates_W, progress=tick)
    console.print(
        f"{new.moved:,} samples moved; a cut from scratch would move {new.fresh_moved:,}. f in all: "
        f"{new.value_before:,.1f} before, {new.value_after:,.1f} now, {new.value_fresh:,.1f} from scratch "
        f"({new.lost:+.3%} lost).",
        highlight=False,
        soft_wrap=True,
    )
    return new.blocks


@contextmanager
def _bar(name: str, total: int, console: Console) -> Iterator[Tick]:
    """A progress bar on a terminal, one line elsewhere; told how many samples have been placed since."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=total)
        yield lambda placed: progress.advance(task, placed)
