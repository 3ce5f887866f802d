"""The command `hetjax partition`: partition a dataset into blocks, report their quality, write them to a file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from hetjax.arguments import MOST_SEED, whole
from hetjax.data import RowSource, load
from hetjax.data.files import npz_samples
from hetjax.data.source_blocks import check_same_data, fingerprint, parse_features, read_classes, read_features
from hetjax.report import blocks as blocks_report
from hetjax.report.display import progress_bar
from hetjax.sampling.blocks import Blocks, class_balanced_blocks, random_blocks, validate_rates
from hetjax.sampling.quality import quality
from hetjax.sampling.submodular import OBJECTIVES, RULES, recut, submodular_blocks
from hetjax.sampling.submodular.greedy import resolve_rule

MOST_WORKERS = 1024  # each is a row of the table and a color of the figure


def cut(
    dataset: str,
    rates: list[float],
    out: Path,
    console: Console,
    *,
    objective: str | None = None,
    rule: str | None = None,
    features: str | None = None,
    bandwidth: float | None = None,
    pseudo_classes: int | None = None,
    compare: bool = False,
    old: Path | None = None,
    seed: int = 0,
) -> None:
    """Make blocks, or adapt those of the file `old` to new rates; print their quality and draw them."""
    rates_W = validate_rates(rates)
    whole("--seed", seed, 0, MOST_SEED)
    if out.is_dir() or not out.parent.is_dir():
        why = "is a folder" if out.is_dir() else f"is in {out.parent}, but there is no such folder"
        raise ValueError(f"--out {out} {why}: give the path of a file in an existing folder.")
    before = None if old is None else Blocks.load(old)
    if before is not None:
        given = {"objective": objective, "rule": rule, "bandwidth": bandwidth, "pseudo-classes": pseudo_classes}
        features = _features_of(before, f"{old}", features, {**given, "compare": compare or None})
    features = features or "pca"
    source = _samples(dataset)
    if len(rates) > len(source):
        raise ValueError(
            f"There are {len(rates):,} workers for {len(source):,} samples: expected at most one worker per sample."
        )
    data = fingerprint(source)
    if before is not None:
        check_same_data(before, data, f"{old}")
    features_DxF = read_features(source, parse_features(features))
    heading = f"{source.description.name}: {len(source):,} samples, {features_DxF.shape[1]} features ({features})"
    console.print(heading, highlight=False, soft_wrap=True)
    if before is not None:
        name = "re-cut"
        with progress_bar(name, len(source), console) as tick:
            new = recut(before, features_DxF, rates_W, progress=tick)
        blocks = new.blocks
        console.print(new.summary, highlight=False, soft_wrap=True)
    else:
        classes_D = read_classes(source, features_DxF, pseudo_classes, seed)
        width = "median" if bandwidth is None else bandwidth
        make = lambda f, r, tick: submodular_blocks(
            features_DxF, classes_D, rates_W, objective=f, rule=r, bandwidth=width, progress=tick
        )
        objective, rule = objective or "facility-location", resolve_rule(rule or "auto", rates_W)
        name = f"{objective}, {rule}"
        with progress_bar(name, len(source), console) as tick:
            blocks = make(objective, rule, tick)
    blocks = blocks.with_settings(dataset=dataset, features=features, data=data)
    blocks.save(out)
    partitions = {name: blocks}
    for make_baseline in (random_blocks, class_balanced_blocks):
        baseline = make_baseline(blocks.classes_D, rates_W, seed)
        partitions[str(baseline.settings["name"])] = baseline
    if compare:
        for f in OBJECTIVES:
            for r in RULES:
                if (other_name := f"{f}, {r}") not in partitions:
                    with progress_bar(other_name, len(source), console) as tick:
                        partitions[other_name] = make(f, r, tick)
    widths = blocks.settings["bandwidths"]
    with console.status("measuring"):
        found = quality(features_DxF, partitions, bandwidth=widths)
    blocks_report.show(console, blocks, name, found)
    title = f"{source.description.name}: {len(source):,} samples for rates {', '.join(f'{r:g}' for r in rates_W)}"
    figure, _ = blocks_report.draw(out, title, features_DxF, partitions, found)
    console.print(f"blocks: {out}\nfigure: {figure}", soft_wrap=True, highlight=False)


def parse_rates(text: str | None, workers: int) -> list[float]:
    """Parse --rates; without it, --workers equal rates."""
    if text is None:
        return [1.0] * whole("--workers", workers, 1, MOST_WORKERS)
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--rates is {text!r}: expected numbers separated by commas, such as 4,2,1,1.") from None
    whole("The number of --rates", len(rates), 1, MOST_WORKERS)
    return rates


def _features_of(before: Blocks, path: str, features: str | None, given: Mapping[str, Any]) -> str:
    """The features of the blocks to be re-cut; raise ValueError for flags that would have no effect."""
    ignored = [f"--{name}" for name, value in given.items() if value is not None]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)} cannot be given with --recut, which uses the settings of {path}. Leave it out, or "
            "make new blocks without --recut."
        )
    kept = before.settings.get("features")
    if kept is None and features is None:
        raise ValueError(f"{path} does not record its features: give them by --features.")
    if kept is not None and features not in (None, kept):
        raise ValueError(
            f"{path} was made with the features {kept}, but --features is {features}. Leave it out, or make new blocks "
            "without --recut."
        )
    return str(kept or features)


def _samples(dataset: str) -> RowSource:
    """Training samples. Labels are not needed: an NPZ file may hold any targets, or none."""
    kind, _, path = dataset.partition(":")
    return npz_samples(path) if kind == "npz" and path else load(dataset, "train")
