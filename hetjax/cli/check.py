"""A first look at new hardware: what the devices are, whether they compute the same as one, how fast each is."""

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
AGREE = 1e-4  # largest relative difference of an update that rounding explains


def check(count: int | None, console: Console) -> None:
    """Print the findings; AssertionError if the devices together do not compute what one of them computes."""
    devices = fake_devices(count)
    console.print(_device_table(devices))
    if devices[0].platform == "cpu" and len(devices) > 1:
        told = f"Fake devices: they share this machine's {os.cpu_count()} cores, and none is faster than another."
        console.print(told, highlight=False)
    task = make_task("digits", "cnn", dropout=0.0)
    with _log_shown(console), _trainer(task, devices, optax.sgd(0.1)) as trainer:
        state = trainer.init(task.model.params)
        state, first = trainer.fit(state, task.train, steps=1)
        apart = _distance(state.params, _one_step_on_one_device(task, devices[0]), task.model.params)
        _, history = trainer.fit(state, task.train, steps=STEPS)
    rates_W = np.nanmedian([r.counts_W / r.times_W for r in history.records], axis=0)
    console.print(f"Transport {first.transport}.", highlight=False)
    shown = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    shown.add_column("worker")
    shown.add_column("samples/s", justify="right")
    for worker, rate in enumerate(rates_W):
        shown.add_row(str(worker), f"{rate:,.0f}")
    shown.add_row("all", f"{rates_W.sum():,.0f}")
    shown.add_row("with the reduce", f"{np.median([r.samples_per_s for r in history.records]):,.0f}")
    console.print(f"A small CNN, {BATCH} samples a step, equal counts, all devices at once:", highlight=False)
    console.print(shown)
    verdict = "agree" if apart < AGREE else "DO NOT AGREE"
    console.print(
        f"One step on {len(devices)} devices and on one {verdict}: updates differ by {apart:.1e} of their size.",
        soft_wrap=True,
        highlight=False,
    )
    if apart >= AGREE:
        raise AssertionError("the devices together do not compute what one of them computes.")


def _device_table(devices: list[jax.Device]) -> Table:
    table = Table(box=None, padding=(0, 2), pad_edge=False, header_style="bold")
    for column in ("worker", "device", "kind", "process", "memory"):
        table.add_column(column)
    for worker, device in enumerate(devices):
        room = memory.available(device)
        shown = "unknown" if room is None else f"{room / 2**30:.1f} GiB"
        table.add_row(str(worker), str(device), device_kind(device), str(device.process_index), shown)
    return table


def _trainer(task: Task, devices: list[jax.Device], optimizer: optax.GradientTransformation) -> Trainer:
    return Trainer(task.model, optimizer, batch_size=BATCH, controller="equal", devices=devices)


def _one_step_on_one_device(task: Task, device: jax.Device) -> object:
    """The same step in plain JAX: the mean loss of the whole batch, its gradient, and no hetjax below."""
    sampler = Sampler(len(task.train), BATCH)
    batch = task.train.rows(sampler.indices(0, 0, BATCH))

    def mean_loss(params: object) -> jax.Array:
        keys_b = example_keys(jnp.asarray(control(BATCH, seed=0, epoch=0, position=0)), BATCH)
        return jnp.mean(task.model.loss_fn(params, batch, keys_b).loss_b)

    with jax.default_device(device):
        grads = jax.jit(jax.grad(mean_loss))(task.model.params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, task.model.params, grads)


def _distance(a: object, b: object, start: object) -> float:
    """|a - b| over |b - start|: the difference of two updates over the size of one."""
    flat = lambda tree: np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])
    return float(np.linalg.norm(flat(a) - flat(b)) / np.linalg.norm(flat(b) - flat(start)))


class _LogLines(logging.Handler):
    """Log lines as plain lines of a console."""

    def __init__(self, console: Console):
        super().__init__(logging.INFO)
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        self.console.print(record.getMessage(), soft_wrap=True, highlight=False)


@contextmanager
def _log_shown(console: Console) -> Iterator[None]:
    """What hetjax says about its engine and the ladder that fits into memory, on the console."""
    log, handler = logging.getLogger("hetjax"), _LogLines(console)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
