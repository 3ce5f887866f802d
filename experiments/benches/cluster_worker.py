"""One process of bench_cluster.py: trains under several controllers in turn and tells what it saw.

Its orders come as JSON on the command line. Process 0 asks its parent for quotas by a line on standard output, and
waits for a line on standard input that says they hold.
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

from hetjax.fleet.agree import gather
from hetjax.fleet.distributed import initialize, leave
from hetjax.history import History, Record
from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller
from hetjax.reduce.update import State
from hetjax.trainer import Trainer
from hetjax.zoo.layers import max_pool
from hetjax.zoo.tasks import classification


def init_cnn(hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    """28x28 images: two convolutions of 16 and 32 channels, each pooled, then (a hidden layer and) the logits."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(0, np.prod(shape[:-1]) ** -0.5, shape).astype(np.float32)
    params = {"conv1": normal(3, 3, 1, 16), "bias1": np.zeros(16, np.float32)}
    params |= {"conv2": normal(3, 3, 16, 32), "bias2": np.zeros(32, np.float32)}
    if hidden:
        params |= {"dense": normal(7 * 7 * 32, hidden), "bias3": np.zeros(hidden, np.float32)}
    return params | {"head": normal(hidden or 7 * 7 * 32, 10), "bias4": np.zeros(10, np.float32)}


def loss_fn(params: dict[str, jax.Array], batch: dict[str, jax.Array], keys: jax.Array) -> jax.Array:
    x = batch["image"]
    for conv, bias in (("conv1", "bias1"), ("conv2", "bias2")):
        x = jax.lax.conv_general_dilated(x, params[conv], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = max_pool(jax.nn.relu(x + params[bias]))
    x = x.reshape(len(x), -1)
    if "dense" in params:
        x = jax.nn.relu(x @ params["dense"] + params["bias3"])
    return jax.vmap(classification)(x @ params["head"] + params["bias4"], batch["label"]).loss


class Parent:
    """The pipe to bench_cluster.py. Only process 0 has it; the others do nothing."""

    def __init__(self, process: int):
        self.mine = process == 0

    def tell(self, **message: Any) -> None:
        if self.mine:
            print(json.dumps(message), flush=True)

    def ask_for(self, quotas: Sequence[float] | None) -> None:
        """Returns when these quotas hold."""
        self.tell(quotas=quotas)
        if self.mine and not sys.stdin.readline():
            raise RuntimeError("The parent is gone.")


class Quotas:
    """A hook that asks for other quotas after certain steps of a run, counted from its first one; 0: before it."""

    def __init__(self, parent: Parent, by_step: dict[int, Sequence[float]], before: int):
        self.parent, self.by_step, self.before = parent, by_step, before

    def begin(self, history: History) -> None:
        self.parent.ask_for(self.by_step[0])

    def __call__(self, record: Record, state: State) -> None:
        if (quotas := self.by_step.get(record.step - self.before)) is not None:
            self.parent.ask_for(quotas)


def solo_rates(trainer: Trainer, state: State, data: Any, quotas: Sequence[float], seconds: float) -> list[float]:
    """Samples per second of each worker with the trainer's own engine, no reduce, all of them at once."""
    counts_W = np.floor(trainer.batch_size * np.asarray(quotas) / sum(quotas)).astype(np.int64)
    batch = {name: values[: trainer.batch_size] for name, values in data.items()}
    run = trainer.step.local_phases(state, batch, counts_W)
    gather("all are here")
    began, rounds = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        run()
        rounds += 1
    rate = rounds * int(counts_W[list(trainer.workers.local)].sum()) / (time.perf_counter() - began)
    return [rate for _, rate in sorted(gather([jax.process_index(), rate]))]


def swapped(quotas: Sequence[float]) -> list[float]:
    """With those of the fastest and the slowest worker swapped."""
    other, fast, slow = list(quotas), int(np.argmax(quotas)), int(np.argmin(quotas))
    other[fast], other[slow] = quotas[slow], quotas[fast]
    return other


def told(history: History) -> dict[str, Any]:
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
    orders = json.loads(sys.argv[1])
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(everywhere)})  # XLA makes a thread for each core it may use: one will do here
    here = initialize(wait_limit=120)
    jax.devices()
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), everywhere)
    parent, batch, quotas = Parent(here.process), orders["batch_size"], orders["quotas"]
    rng = np.random.default_rng(1)
    data = {
        "image": rng.random((4 * batch, 28, 28, 1), np.float32),
        "label": rng.integers(0, 10, 4 * batch).astype(np.int32),
    }
    params = init_cnn(orders["hidden"])
    with Trainer(loss_fn, optax.sgd(0.01), batch_size=batch, controller="equal", wait_limit=120) as trainer:
        state, _ = trainer.fit(trainer.init(params), data, steps=2)
        (ladder,) = trainer.step.engine.ladders.values()
        prices = {rung: round(1e6 * price / rung, 1) for rung, price in sorted(ladder.price_list.prices.items())}
        parent.tell(parameters=int(sum(np.size(p) for p in params.values())), us_per_row=prices)

        def fresh() -> dict[str, Controller]:
            return {name: controllers.make(kind, **options) for name, kind, options in orders["controllers"]}

        def run(controller: Controller, by_step: dict[int, Sequence[float]], steps: int) -> dict[str, Any]:
            nonlocal state
            trainer.controller = controller
            parent.ask_for(None)  # what is left to compile is compiled at full speed
            state, history = trainer.fit(state, data, steps=steps, hooks=[Quotas(parent, by_step, state.step)])
            return told(history)

        def solo() -> None:
            parent.ask_for(quotas)
            parent.tell(solo=solo_rates(trainer, state, data, quotas, orders["solo_s"]))

        solo()
        quiet = fresh()
        names = list(quiet)
        for k in range(orders["rounds"]):
            first = k * len(names) // orders["rounds"]  # nobody is always the first or the last
            for name in names[first:] + names[:first]:
                parent.tell(controller=name, quiet=run(quiet[name], {0: quotas}, orders["steps"] // orders["rounds"]))
                solo()
        every, swaps, other = orders["swap_every"], orders["swaps"], swapped(quotas)
        by_step = {0: quotas} | {every * k: other if k % 2 else quotas for k in range(1, swaps + 1)}
        for name, controller in fresh().items() if swaps else ():
            parent.tell(controller=name, swapped=run(controller, by_step, every * (swaps + 1)))
    leave(0, together=True)


if __name__ == "__main__":
    main()
