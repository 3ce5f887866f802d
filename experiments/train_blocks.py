"""The partition of a training run: a name, or for `submodular` the blocks that the workers' rates ask for."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import optax
from rich.console import Console
from train_config import Config
from train_setup import numbers

from hetjax.plan.blocks import Blocks
from hetjax.run.simulate import Simulation
from hetjax.source_blocks import make_blocks, named_features
from hetjax.strategies import Strategy
from hetjax.task import Task
from hetjax.trainer import Trainer

FILE = "blocks.npz"
PROBE_STEPS = 6


def partition_of(
    config: Config,
    strategy: Strategy,
    task: Task,
    devices: list[jax.Device],
    simulation: Simulation | None,
    folder: Path,
    console: Console,
) -> str | Blocks:
    """Blocks from --blocks, from the run that is resumed if they are for as many workers, or made and kept anew."""
    if strategy.partition != "submodular":
        return strategy.partition
    asked, kept = config.submodular, folder / FILE
    if asked.blocks is not None:
        return Blocks.load(asked.blocks)
    if config.output.resume and kept.is_file() and (before := Blocks.load(kept)).workers == len(devices):
        return before
    rates_W = rates(config, task, devices, simulation)
    blocks = make_blocks(
        task.train,
        rates_W.tolist(),
        features=named_features(asked.features),
        objective=asked.objective,
        rule="min-block" if config.method.faithful else "auto",
        carry=not config.method.faithful,
    )
    told = ", ".join(f"{rate:.3g}" for rate in rates_W)
    said = f"blocks of {blocks.sizes_W.tolist()} samples for rates {told} ({blocks.settings['name']})"
    console.print(said, soft_wrap=True, highlight=False)
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        blocks.save(kept)
    return blocks


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
