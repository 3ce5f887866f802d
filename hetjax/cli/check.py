"""The command `hetjax check`: the devices found, whether they compute what a single one does, and their speeds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from hetjax.adapters.contract import control, example_keys
from hetjax.devices import memory
from hetjax.devices.fake import fake_devices
from hetjax.devices.workers import device_kind
from hetjax.sampling.order import Sampler
from hetjax.trainer import Trainer
from hetjax.zoo.tasks import Task, make_task

BATCH, STEPS = 512, 8
TOLERANCE = 1e-4  # relative difference of two updates that rounding explains


def check(count: int | None, console: Console) -> None:
    """Check the devices and print the results.

    Args:
        count: number of devices, as for `fake_devices`
        console: where to print

    Raises:
        AssertionError: one step on all devices differs from the same step on one of them.
    """
    devices = fake_devices(count)
    console.print(_device_table(devices))
    if devices[0].platform == "cpu" and len(devices) > 1:
        console.print(f"Simulated devices of equal speed, sharing {os.cpu_count()} CPU cores.", highlight=False)
    task = make_task("digits", "cnn", dropout=0.0)
    with _log_to(console), _trainer(task, devices, optax.sgd(0.1)) as trainer:
        state = trainer.init(task.model.params)
        state, first = trainer.fit(state, task.train, steps=1)
        distance = _distance(state.params, _one_step_on_one_device(task, devices[0]), task.model.params)
        _, history = trainer.fit(state, task.train, steps=STEPS)
    rates_W = np.nanmedian([r.counts_W / r.times_W for r in history.records], axis=0)
    console.print(f"Transport {first.transport}.", highlight=False)
    speeds = _table("worker")
    speeds.add_column("samples/s", justify="right")
    for worker, rate in enumerate(rates_W):
        speeds.add_row(str(worker), f"{rate:,.0f}")
    speeds.add_row("all", f"{rates_W.sum():,.0f}")
    speeds.add_row("with the reduce", f"{np.median([r.samples_per_s for r in history.records]):,.0f}")
    console.print(f"A small CNN, {BATCH} samples per step, equal counts, all devices at once:", highlight=False)
    console.print(speeds)
    agrees = distance < TOLERANCE  # False for NaN
    verdict = "agree" if agrees else "DO NOT AGREE"
    console.print(
        f"One step on {len(devices)} devices and on one {verdict}: relative difference of the updates {distance:.1e}.",
        soft_wrap=True,
        highlight=False,
    )
    if not agrees:
        raise AssertionError("one step on all devices differs from the same step on one of them.")


def _device_table(devices: list[jax.Device]) -> Table:
    table = _table("worker", "device", "kind", "process", "memory")
    for worker, device in enumerate(devices):
        free = memory.available(device)
        size = "unknown" if free is None else f"{free / 2**30:.1f} GiB"
        table.add_row(str(worker), str(device), device_kind(device), str(device.process_index), size)
    return table


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2), pad_edge=False, header_style="bold")


def _trainer(task: Task, devices: list[jax.Device], optimizer: optax.GradientTransformation) -> Trainer:
    return Trainer(task.model, optimizer, batch_size=BATCH, controller="equal", devices=devices)


def _one_step_on_one_device(task: Task, device: jax.Device) -> object:
    """The parameters after the same step in plain JAX: SGD on the mean loss of the whole batch."""
    sampler = Sampler(len(task.train), BATCH)
    batch = task.train.rows(sampler.indices(0, 0, BATCH))

    def mean_loss(params: object) -> jax.Array:
        keys_b = example_keys(jnp.asarray(control(BATCH, seed=0, epoch=0, position=0)), BATCH)
        return jnp.mean(task.model.loss_fn(params, batch, keys_b).loss_b)

    with jax.default_device(device):
        grads = jax.jit(jax.grad(mean_loss))(task.model.params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, task.model.params, grads)


def _distance(a: object, b: object, start: object) -> float:
    """Relative difference of two updates, |a - b| / |b - start|."""
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
    return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b) - flat(start)))


class _ConsoleHandler(logging.Handler):
    """Prints log messages on a console as plain lines."""

    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), soft_wrap=True, highlight=False)


@contextmanager
def _log_to(console: Console) -> Iterator[None]:
    """Print hetjax's log, such as the engine and the ladder chosen, on the console."""
    log, handler = logging.getLogger("hetjax"), _ConsoleHandler(console)
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
