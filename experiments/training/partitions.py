"""The partition of a training run: a name, or for `submodular` the blocks that the workers' rates ask for."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from rich.console import Console
from training.configs import Config
from training.setup import numbers

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
    """Refuse flags of blocks that would do nothing."""
    method, asked = config.method, config.submodular
    preset = PRESETS.get(method.strategy or "")
    partition = method.partition or ("global" if preset is None else preset.partition)
    given = [f"--{part.name}" for part in fields(asked) if getattr(asked, part.name) is not None]
    if given and partition != "submodular":
        raise ValueError(
            f"{', '.join(given)}: for the blocks of --partition submodular, and this run has the partition "
            f"{partition!r}. Leave it out, or add --partition submodular."
        )
    if asked.blocks is not None and len(given) > 1:
        raise ValueError(
            f"{', '.join(given[1:])}: says how to cut blocks, and those in {asked.blocks} are cut. Leave it out, or "
            "leave --blocks out."
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
    """Blocks from --blocks; or those of the run that is resumed, re-cut if rates or workers have changed; or new ones.

    Blocks from --blocks are re-cut only where an elastic run has lost workers.

    Whatever the first process finds or makes goes to all.
    """
    if chosen.partition != "submodular":
        return chosen.partition
    asked, kept = config.submodular, folder / FILE
    if asked.blocks is not None:
        given = shared_blocks(lambda: from_file(asked.blocks, task))
        kept = kept_entries(given.workers, len(devices))
        if len(kept) == given.workers:
            return given
        return shared_blocks(lambda: cut(config, task, given, given.rates_W[kept], console))
    before = shared_blocks(lambda: of_resumed(config, kept))
    measures = asked.rates is None and simulation is None
    if measures and before is not None and before.workers == len(devices):
        return before  # rates measured again would differ a little, and move samples for nothing
    rates_W = rates(config, task, devices, simulation)
    rates_W = rates_W[kept_entries(len(rates_W), len(devices))]
    if len(rates_W) != len(devices):
        raise ValueError(f"There are {len(rates_W)} rates for {len(devices)} workers: give one each.")
    return shared_blocks(lambda: cut(config, task, before, rates_W, console))


def keep(config: Config, folder: Path, partition: str | Blocks) -> None:
    """Write blocks that were made for this run where a resumed one finds them."""
    if isinstance(partition, Blocks) and config.submodular.blocks is None:
        folder.mkdir(parents=True, exist_ok=True)
        partition.save(folder / FILE)


def from_file(path: Path, task: Task) -> Blocks:
    blocks = Blocks.load(path)
    check_same_data(blocks, fingerprint(task.train), path)
    return blocks


def of_resumed(config: Config, kept: Path) -> Blocks | None:
    """The blocks of the run that is resumed, if they were cut as is asked for now."""
    if not (config.output.resume and kept.is_file()):
        return None
    before = Blocks.load(kept)
    return before if all(before.settings.get(name) == value for name, value in wanted(config).items()) else None


def wanted(config: Config) -> dict[str, Any]:
    """The settings of blocks that flags stand for."""
    asked = config.submodular
    return {
        "objective": asked.objective or "facility-location",
        "features": asked.features or "pca",
        "carry": not config.method.faithful,
    }


def cut(config: Config, task: Task, before: Blocks | None, rates_W: np.ndarray, console: Console) -> Blocks:
    """Blocks for these rates: from earlier ones with few samples moved, or from scratch."""
    if before is not None and _alike(before.rates_W, rates_W):
        return before
    settings, rule = wanted(config), "min-block" if config.method.faithful else "auto"
    features = parse_features((before.settings if before is not None else settings).get("features", "pca"))
    with progress_bar("blocks", len(task.train), console) as tick:
        if before is None:
            options = {"rule": rule, "objective": settings["objective"], "carry": settings["carry"], "progress": tick}
            blocks = make_blocks(task.train, rates_W.tolist(), features=features, **options)
            blocks = blocks.with_settings(**settings, dataset=config.data.dataset, data=fingerprint(task.train))
            told = ""
        else:
            features_DxF = read_features(task.train, features)
            blocks, moves = carried_over(before, features_DxF, rates_W, rule=rule, progress=tick)
            told = f"; {moves}"
    sizes, by_rate = blocks.sizes_W.tolist(), ", ".join(f"{rate:.3g}" for rate in rates_W)
    said = f"blocks of {sizes} samples for rates {by_rate} ({blocks.settings['name']}){told}"
    console.print(said, soft_wrap=True, highlight=False)
    return blocks


def carried_over(before: Blocks, features_DxF: np.ndarray, rates_W: np.ndarray, **options: Any) -> tuple[Blocks, str]:
    """Earlier blocks re-cut for the workers there are now, and what that moved.

    A worker keeps its own block where it is known who was lost; otherwise the last ones count as lost.
    """
    kept = kept_entries(before.workers, len(rates_W))[: len(rates_W)]
    place_W = [*kept, *range(before.workers, before.workers + len(rates_W) - len(kept))]
    by_place = np.zeros(max(before.workers, len(rates_W)))
    by_place[place_W] = rates_W
    found = recut(before, features_DxF, by_place, **options)
    worker_of = np.full(len(by_place), -1)
    worker_of[place_W] = np.arange(len(rates_W))
    return replace(found.blocks, owner_D=worker_of[found.blocks.owner_D], rates_W=rates_W), found.summary


def _alike(before_W: np.ndarray, now_W: np.ndarray) -> bool:
    """Whether rates stand in the same proportions."""
    return len(before_W) == len(now_W) and np.allclose(before_W / before_W.sum(), now_W / now_W.sum())


def rates(config: Config, task: Task, devices: list[jax.Device], simulation: Simulation | None) -> np.ndarray:
    """As given; else the simulated speeds; else measured."""
    if config.submodular.rates is not None:
        return np.array(numbers("--rates", config.submodular.rates))
    return measured(config, task, devices) if simulation is None else np.asarray(simulation.trace(0)[0], np.float64)


def measured(config: Config, task: Task, devices: list[jax.Device]) -> np.ndarray:
    """Samples/s of every worker in a few steps of equal counts, relative to the fastest, in steps of 5%."""
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
