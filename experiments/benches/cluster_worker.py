"""One process of bench_cluster.py: trains under several controllers in turn and reports timings.

Settings come as JSON on the command line. Process 0 requests quotas by a line on standard output and waits for a line
on standard input that confirms them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from hetjax import processes, profiling
from hetjax.fleet.distributed import initialize, leave
from hetjax.history import History, Record
from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller
from hetjax.state import State
from hetjax.trainer import Trainer
from hetjax.zoo.layers import max_pool
from hetjax.zoo.tasks import classification


def init_cnn(hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    """A CNN for 28x28 images: two convolutions (16 and 32 channels), each pooled, an optional hidden layer, logits."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
    params = {"conv1": normal(3, 3, 1, 16), "bias1": np.zeros(16, np.float32)}
    params |= {"conv2": normal(3, 3, 16, 32), "bias2": np.zeros(32, np.float32)}
    if hidden:
        params |= {"dense": normal(7 * 7 * 32, hidden), "bias3": np.zeros(hidden, np.float32)}
    return params | {"head": normal(hidden or 7 * 7 * 32, 10), "bias4": np.zeros(10, np.float32)}


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
    """Cross-entropy per example."""
    x = batch["image"]
    for conv, bias in (("conv1", "bias1"), ("conv2", "bias2")):
        x = jax.lax.conv_general_dilated(x, params[conv], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = max_pool(jax.nn.relu(x + params[bias]))
    x = x.reshape(len(x), -1)
    if "dense" in params:
        x = jax.nn.relu(x @ params["dense"] + params["bias3"])
    return jax.vmap(classification)(x @ params["head"] + params["bias4"], batch["label"]).loss


class Parent:
    """The pipe to bench_cluster.py, used by process 0 only; in other processes all methods do nothing."""

    def __init__(self, process: int):
        self.connected = process == 0

    def send(self, **message: Any) -> None:
        if self.connected:
            print(json.dumps(message), flush=True)

    def request(self, quotas: Sequence[float] | None) -> None:
        """Request quotas and wait until they are set."""
        self.send(quotas=quotas)
        if self.connected and not sys.stdin.readline():
            raise RuntimeError("The parent process has exited.")

    def give_turn(self) -> None:
        """Let others run that take part, and wait."""
        self.send(turn=True)
        if self.connected and not sys.stdin.readline():
            raise RuntimeError("The parent process has exited.")


class Quotas:
    """A hook that requests quotas after given steps of a run; 0: before the first."""

    def __init__(self, parent: Parent, by_step: dict[int, Sequence[float]], before: int):
        self.parent, self.by_step, self.before = parent, by_step, before

    def begin(self, history: History) -> None:
        self.parent.request(self.by_step[0])

    def __call__(self, record: Record, state: State) -> None:
        if (quotas := self.by_step.get(record.step - self.before)) is not None:
            self.parent.request(quotas)


class Phases:
    """A hook that keeps the seconds of this process's phases in every step."""

    def __init__(self) -> None:
        self.by_step: list[dict[str, float]] = []
        self._seconds = profiling.Seconds()

    def __call__(self, record: Record, state: State) -> None:
        self.by_step.append({name: round(seconds, 6) for name, seconds in self._seconds.take().items()})

    def end(self, history: History) -> None:
        self._seconds.end()


def solo_rates(trainer: Trainer, state: State, data: Any, quotas: Sequence[float], seconds: float) -> list[float]:
    """Samples per second of each worker with the trainer's engine, all at once, without reduce."""
    counts_W = np.floor(trainer.batch_size * np.asarray(quotas) / sum(quotas)).astype(np.int64)
    batch = {name: values[: trainer.batch_size] for name, values in data.items()}
    run = trainer.step.local_phases(state, batch, counts_W)
    processes.gather("ready")
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        run()
        rounds += 1
    rate = rounds * int(counts_W[list(trainer.workers.local)].sum()) / (time.perf_counter() - began)
    return [rate for _, rate in sorted(processes.gather([processes.index(), rate]))]


def fresh(settings: dict[str, Any]) -> dict[str, Controller]:
    """New controllers by their names in the table."""
    made = {name: controllers.make(kind, **options) for name, kind, options in settings["controllers"]}
    for controller in made.values() if settings["no_bench"] else ():
        controller.benches = False  # type: ignore[misc]
    return made


def swapped(quotas: Sequence[float]) -> list[float]:
    """The quotas with those of the fastest and slowest worker swapped."""
    other, fast, slow = list(quotas), int(np.argmax(quotas)), int(np.argmin(quotas))
    other[fast], other[slow] = quotas[slow], quotas[fast]
    return other


def summary(history: History) -> dict[str, Any]:
    """The records of a run as JSON values."""
    records = history.records
    return {
        "counts": [r.counts_W.tolist() for r in records],
        "times": [[None if np.isnan(t) else float(t) for t in r.times_W] for r in records],
        "step_times": [r.step_time for r in records],
        "changed": [bool(r.changed) for r in records],
        "reasons": [r.reason for r in records if r.changed],
        "recompiles": history.recompiles_after_warmup,
    }


def main() -> None:
    settings = json.loads(sys.argv[1])
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})  # XLA starts a thread per core it may use; use one
    info = initialize(wait_limit=600)
    jax.devices()
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), everywhere)
    parent, batch, quotas = Parent(info.process), settings["batch_size"], settings["quotas"]
    rng = np.random.default_rng(1)
    data = {
        "image": rng.random((4 * batch, 28, 28, 1), np.float32),
        "label": rng.integers(0, 10, 4 * batch).astype(np.int32),
    }
    params = init_cnn(settings["hidden"])
    options = {"controller": "equal", "wait_limit": 600}
    options |= {name: settings[name] for name in ("update", "wire", "delay")}
    with Trainer(loss_fn, optax.sgd(0.01), batch_size=batch, **options) as trainer:
        state, _ = trainer.fit(trainer.init(params), data, steps=2)
        (ladder,) = trainer.step.engine.ladders.values()
        prices = {rung: round(1e6 * price / rung, 1) for rung, price in sorted(ladder.price_list.prices.items())}
        parent.send(parameters=int(sum(np.size(p) for p in params.values())), us_per_row=prices)

        def run(controller: Controller, by_step: dict[int, Sequence[float]], steps: int) -> dict[str, Any]:
            nonlocal state
            trainer.controller = controller
            parent.request(None)  # compile at full speed
            phases = Phases() if settings["breakdown"] else None
            hooks = [Quotas(parent, by_step, state.step), *([] if phases is None else [phases])]
            state, history = trainer.fit(state, data, steps=steps, hooks=hooks)
            return summary(history) | ({} if phases is None else {"phases": processes.gather(phases.by_step)})

        def solo() -> None:
            parent.request(quotas)
            parent.send(solo=solo_rates(trainer, state, data, quotas, settings["solo_s"]))

        if settings["second"]:
            parent.give_turn()
        solo()
        quiet = fresh(settings)
        names, steps = list(quiet), settings["steps"] // settings["rounds"]
        for k in range(settings["rounds"]):
            first = k * len(names) // settings["rounds"]  # rotate the order
            for name in names[first:] + names[:first]:
                parent.send(controller=name, quiet=run(quiet[name], {0: quotas}, steps))
                solo()
            parent.give_turn()
        every, swaps, other = settings["swap_every"], settings["swaps"], swapped(quotas)
        by_step = {0: quotas} | {every * k: other if k % 2 else quotas for k in range(1, swaps + 1)}
        for name, controller in fresh(settings).items() if swaps else ():
            parent.send(controller=name, swapped=run(controller, by_step, every * (swaps + 1)))
    leave(0, together=True)


if __name__ == "__main__":
    main()
