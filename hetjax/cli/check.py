"""The command `hetjax check`: the fleet as it would be used, and whether it computes what a single device does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

from hetjax import processes
from hetjax.adapters.contract import control, example_keys
from hetjax.arguments import whole
from hetjax.devices import memory
from hetjax.devices.chosen import chosen_devices
from hetjax.devices.workers import DeviceChoice, Workers
from hetjax.fleet.distributed import initialize
from hetjax.history import History
from hetjax.sampling.order import Sampler
from hetjax.simulation.speeds import Simulation
from hetjax.trainer import Trainer
from hetjax.zoo.tasks import Task, make_task

BATCH, STEPS = 512, 32  # steps that also try what the fleet does without a member
TOLERANCE = 1e-4  # relative difference of two updates that rounding explains


def main(devices: str | int | None, parameters: int | None = None) -> None:
    """Join the other processes, if the launcher started several, and check the fleet; process 0 prints.

    Args:
        devices: the devices of this process, as for `hetjax.devices`.
        parameters: size of the model whose exchange is timed. Default: that of the small CNN that is trained.

    Raises:
        AssertionError: one step of the fleet differs from the same step on one device.
    """
    rank = initialize(devices=devices)
    check(devices, Console(quiet=not rank.first), parameters)


def check(
    devices: DeviceChoice,
    console: Console,
    parameters: int | None = None,
    speeds: Simulation | None = None,
) -> None:
    """Check the devices of all processes and print the results. Collective.

    Args:
        devices: the devices of this process, or a choice as for `hetjax.devices`.
        console: where to print.
        parameters: size of the model whose exchange is timed. Default: that of the small CNN that is trained.
        speeds: simulated speeds, for devices that stand for others. Default: real speeds.

    Raises:
        AssertionError: one step of the fleet differs from the same step on one device.
    """
    if parameters is not None:
        parameters = whole("parameters", parameters, 1, 2**31)
    if devices is None or isinstance(devices, str | int):
        devices = chosen_devices(devices)  # before the task uses JAX, which fixes their number
    chosen = list(devices)
    task = make_task("digits", "cnn", dropout=0.0)
    with _log_to(console), _trainer(task, chosen, speeds) as trainer:
        workers = trainer.workers
        state = trainer.init(task.model.params)
        state, _ = trainer.fit(state, task.train, steps=1)
        alone = _one_step_on_one_device(task, workers.own[0])
        distances_P = processes.gather(_distance(state.params, alone, task.model.params))
        _, history = trainer.fit(state, task.train, steps=STEPS)
        benched = {} if trainer.step.bench is None else trainer.step.bench.benched_W
    found = _measured(history, benched)
    found["parameters"] = parameters or sum(leaf.size for leaf in jax.tree.leaves(task.model.params))
    if parameters is not None:
        found["exchange_seconds"] = _exchange_seconds(chosen, parameters)
    for line in (
        _heading(workers, simulated=speeds is not None),
        fleet_table(workers, found),
        *sentences(workers, found),
    ):
        console.print(line, soft_wrap=isinstance(line, str), highlight=False)
    distance = max(distances_P, key=lambda d: (np.isnan(d), d))
    agrees = distance < TOLERANCE  # False for NaN
    console.print(
        f"One step on {_number(len(workers), 'worker')} and on one device {'agree' if agrees else 'DO NOT AGREE'}: "
        f"relative difference of the updates {distance:.1e}.",
        soft_wrap=True,
        highlight=False,
    )
    if not agrees:
        raise AssertionError("one step on all devices differs from the same step on one of them.")


def _measured(history: History, benched: Mapping[int, str]) -> dict[str, Any]:
    """What a short run shows of the fleet: see `sentences` for the names."""
    workers = history.workers
    timed = [record for record in history.records if np.isfinite(record.times_W).any()]
    return {
        "transport": history.transport,
        "rates_W": [_median([record.counts_W[w] / record.times_W[w] for record in timed]) for w in range(workers)],
        "samples_per_s": float(np.median([record.samples_per_s for record in timed])),
        "exchange_seconds": _beyond_local_phases(history),
        "benched": benched,
    }


def _beyond_local_phases(history: History) -> float:
    """Seconds of a step beyond its slowest local phase: exchange, update and host."""
    timed = [record for record in history.records if np.isfinite(record.times_W).any()]
    return float(np.median([record.step_time - np.nanmax(record.times_W) for record in timed]))


def _exchange_seconds(devices: list[jax.Device], parameters: int) -> float:
    """The same for a model of this size, of which a step computes next to nothing."""

    def loss_fn(params: Any, batch: Any, keys: Any) -> jax.Array:
        return batch[0] * params[0]

    with Trainer(loss_fn, optax.sgd(0.1), batch_size=BATCH, controller="equal", devices=devices) as trainer:
        state = trainer.init(jnp.zeros(parameters))
        return _beyond_local_phases(trainer.fit(state, (np.ones(BATCH, np.float32),), steps=STEPS)[1])


def _median(values: Sequence[float]) -> float:
    """The median of those that are finite; NaN without any."""
    finite = [value for value in values if np.isfinite(value)]
    return float(np.median(finite)) if finite else float("nan")


def _heading(workers: Workers, simulated: bool) -> str:
    size = _number(processes.count(), "process", "es")
    note = ""
    if simulated:
        note = " Their speeds are simulated."
    elif len(workers.own) > 1 and {member.platform for member in workers.members} == {"cpu"}:
        note = f" Simulated devices of equal speed share {processes.usable_cores()} CPU cores."
    return f"{_number(len(workers), 'worker')} in {size}.{note}"


def fleet_table(workers: Workers, found: Mapping[str, Any]) -> Table:
    """One row per worker of every process; `found`: see `sentences`. It fits 80 columns."""
    table = _table("worker", "process", "device", "kind", "memory", "samples/s")
    for column in table.columns[-2:]:
        column.justify = "right"
    if found["benched"]:
        table.add_column("used")
    for worker, (member, rate) in enumerate(zip(workers.members, found["rates_W"], strict=True)):
        size = "unknown" if member.memory is None else memory.gib(member.memory)
        kind = member.kind.partition(":")[2] or member.kind
        row = [str(worker), str(member.process), member.name, kind, size, f"{rate:,.0f}" if rate > 0 else "-"]
        table.add_row(*row, *(["benched" if worker in found["benched"] else "yes"] if found["benched"] else []))
    return table


def sentences(workers: Workers, found: Mapping[str, Any]) -> list[str]:
    """What was found about the fleet as a whole.

    Args:
        workers: all workers.
        found: `transport`, how sums travel; `rates_W`, samples/s of each worker; `samples_per_s` of whole steps;
            `exchange_seconds`, the time of a step beyond its slowest local phase, for a model of `parameters`, or None;
            `benched`, workers that would not be used, with the reason.
    """
    all_rates = float(np.nansum(found["rates_W"]))
    fastest = float(np.nanmax(found["rates_W"], initial=0.0))
    lines = [
        f"A small CNN, {BATCH} samples per step, balanced, all at once: {all_rates:,.0f} samples/s; with the "
        f"exchange {found['samples_per_s']:,.0f}.",
        *(
            [
                f"All others together reach r = {all_rates / fastest - 1:.2f} times the rate of the fastest worker, so "
                f"all can be at most 1 + r = {all_rates / fastest:.2f} times as fast as it alone."
            ]
            if len(workers) > 1 and fastest > 0
            else []
        ),
        f"Sums travel by {_ways(workers, found['transport'])}.",
    ]
    if found["exchange_seconds"] is not None:
        lines[-1] += (
            f" Exchange and update of {found['parameters']:,} parameters take "
            f"{1e3 * max(0.0, found['exchange_seconds']):.1f} ms of a step, beyond its slowest local phase."
        )
    lines += [f"Worker {worker} would be benched: {reason}." for worker, reason in sorted(found["benched"].items())]
    return lines


def _ways(workers: Workers, transport: str) -> str:
    """How sums travel, inside processes and between them."""
    if not workers.several_processes:
        return transport
    return "host, between processes over ZeroMQ" if workers.by_host else "mesh, between processes by XLA's collectives"


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _trainer(task: Task, devices: list[jax.Device], speeds: Simulation | None) -> Trainer:
    return Trainer(task.model, optax.sgd(0.1), batch_size=BATCH, controller="balanced", devices=devices, speeds=speeds)


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
