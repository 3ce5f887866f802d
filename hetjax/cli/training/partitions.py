"""The partition of a training run: its name, or for `submodular` blocks cut in proportion to the workers' rates."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console

from hetjax.cli.training.configs import Config
from hetjax.cli.training.setup import numbers, workers_by_process
from hetjax.data.source_blocks import (
    check_same_data,
    fingerprint,
    make_blocks,
    parse_features,
    read_features,
    shared_blocks,
)
from hetjax.fleet.membership import kept_entries
from hetjax.presets import PRESETS, Choice
from hetjax.report.display import progress_bar
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.submodular import recut
from hetjax.simulation.speeds import Simulation
from hetjax.trainer import Trainer
from hetjax.zoo.tasks import Task

FILE = "blocks.npz"
PROBE_STEPS = 6


def check_flags(config: Config) -> None:
    """Reject block flags that would have no effect."""
    method, flags = config.method, config.submodular
    preset = PRESETS.get(method.strategy or "")
    partition = method.partition or ("global" if preset is None else preset.partition)
    given = [f"--{part.name}" for part in fields(flags) if getattr(flags, part.name) is not None]
    if given and partition != "submodular":
        raise ValueError(
            f"{', '.join(given)}: only for --partition submodular, but this run has the partition {partition!r}. "
            "Omit it, or add --partition submodular."
        )
    if flags.blocks is not None and len(given) > 1:
        raise ValueError(
            f"{', '.join(given[1:])}: describes how to cut blocks, but those in {flags.blocks} are already cut. "
            "Omit it, or omit --blocks."
        )


def partition_of(
    config: Config,
    chosen: Choice,
    task: Task,
    devices: list[jax.Device],
    simulation: Simulation | None,
    folder: Path,
    console: Console,
) -> str | Blocks:
    """Return the name of the partition, or the blocks, which process 0 loads or cuts and shares with all.

    Blocks come from --blocks (recut only if an elastic run lost workers), from the resumed run (recut if rates or
    workers changed), or are cut anew.
    """
    if chosen.partition != "submodular":
        return chosen.partition
    flags, workers = config.submodular, sum(workers_by_process(devices))
    if (path := flags.blocks) is not None:
        given = shared_blocks(lambda: from_file(path, task))
        kept = kept_entries(given.workers, workers)
        if len(kept) == given.workers:
            return given
        return shared_blocks(lambda: cut(config, task, given, given.rates_W[kept], console))
    before = shared_blocks(lambda: of_resumed(config, folder / FILE))
    measures = flags.rates is None and simulation is None
    if measures and before is not None and before.workers == workers:
        return before  # rates measured anew would differ slightly, and move samples in vain
    rates_W = rates(config, task, devices, simulation)
    rates_W = rates_W[kept_entries(len(rates_W), workers)]
    if len(rates_W) != workers:
        raise ValueError(f"There are {len(rates_W)} rates for {workers} workers: give one rate per worker.")
    return shared_blocks(lambda: cut(config, task, before, rates_W, console))


def keep(config: Config, folder: Path, partition: str | Blocks) -> None:
    """Save blocks cut for this run to its folder, for a resumed run."""
    if isinstance(partition, Blocks) and config.submodular.blocks is None:
        folder.mkdir(parents=True, exist_ok=True)
        partition.save(folder / FILE)


def from_file(path: Path, task: Task) -> Blocks:
    """Load blocks and check that they were cut from the data of this task."""
    blocks = Blocks.load(path)
    check_same_data(blocks, fingerprint(task.train), path)
    return blocks


def of_resumed(config: Config, path: Path) -> Blocks | None:
    """Return the blocks of the resumed run if they were cut with the current settings."""
    if not (config.output.resume and path.is_file()):
        return None
    before = Blocks.load(path)
    return before if all(before.settings.get(name) == value for name, value in block_settings(config).items()) else None


def block_settings(config: Config) -> dict[str, Any]:
    """Return the settings of blocks given by the flags."""
    flags = config.submodular
    return {
        "objective": flags.objective or "facility-location",
        "features": flags.features or "pca",
        "carry": not config.method.faithful,
    }


def cut(config: Config, task: Task, before: Blocks | None, rates_W: np.ndarray, console: Console) -> Blocks:
    """Cut blocks for these rates: from earlier ones, moving few samples, or from scratch."""
    if before is not None and _proportional(before.rates_W, rates_W):
        return before
    settings, rule = block_settings(config), "min-block" if config.method.faithful else "auto"
    features = parse_features((before.settings if before is not None else settings).get("features", "pca"))
    with progress_bar("blocks", len(task.train), console) as tick:
        if before is None:
            options = {"rule": rule, "objective": settings["objective"], "carry": settings["carry"], "progress": tick}
            blocks = make_blocks(task.train, rates_W.tolist(), features=features, **options)
            blocks = blocks.with_settings(**settings, dataset=config.data.dataset, data=fingerprint(task.train))
            changes = ""
        else:
            features_DxF = read_features(task.train, features)
            blocks, moves = carried_over(before, features_DxF, rates_W, rule=rule, progress=tick)
            changes = f"; {moves}"
    sizes, rates = blocks.sizes_W.tolist(), ", ".join(f"{rate:.3g}" for rate in rates_W)
    message = f"blocks of {sizes} samples for rates {rates} ({blocks.settings['name']}){changes}"
    console.print(message, soft_wrap=True, highlight=False)
    return blocks


def carried_over(before: Blocks, features_DxF: np.ndarray, rates_W: np.ndarray, **options: Any) -> tuple[Blocks, str]:
    """Recut earlier blocks for the current workers; also returns a description of the moves.

    Workers keep their blocks if it is known which ones were lost; otherwise the last ones count as lost.
    """
    kept = kept_entries(before.workers, len(rates_W))[: len(rates_W)]
    owner_W = [*kept, *range(before.workers, before.workers + len(rates_W) - len(kept))]  # numbers among the old ones
    rate_of = np.zeros(max(before.workers, len(rates_W)))
    rate_of[owner_W] = rates_W
    found = recut(before, features_DxF, rate_of, **options)
    worker_of = np.full(len(rate_of), -1)
    worker_of[owner_W] = np.arange(len(rates_W))
    return replace(found.blocks, owner_D=worker_of[found.blocks.owner_D], rates_W=rates_W), found.summary


def _proportional(before_W: np.ndarray, now_W: np.ndarray) -> bool:
    """Whether the rates are proportional to each other."""
    return len(before_W) == len(now_W) and np.allclose(before_W / before_W.sum(), now_W / now_W.sum())


def rates(config: Config, task: Task, devices: list[jax.Device], simulation: Simulation | None) -> np.ndarray:
    """Return the given rates, otherwise the simulated speeds, otherwise measured ones."""
    if config.submodular.rates is not None:
        return np.array(numbers("--rates", config.submodular.rates))
    return measured(config, task, devices) if simulation is None else np.asarray(simulation.trace(0)[0], np.float64)


def measured(config: Config, task: Task, devices: list[jax.Device]) -> np.ndarray:
    """Measure the samples/s of each worker over a few steps of equal counts; relative to the fastest, rounded to 5%."""
    with Trainer(
        task.model.loss_fn,
        optax.sgd(0.0),
        batch_size=config.data.batch_size,
        controller="equal",
        devices=devices,
    ) as trainer:
        state = trainer.init(task.model.params, task.model.model_state)
        _, history = trainer.fit(state, task.train, steps=PROBE_STEPS)
    rates_W = np.nanmedian([r.counts_W / r.times_W for r in history.records], axis=0)
    return np.maximum(np.round(20 * rates_W / np.nanmax(rates_W)), 1) / 20
