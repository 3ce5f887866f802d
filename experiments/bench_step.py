"""The overhead of hetjax itself: local phase, step with equal counts, planning, recompiles.

    python experiments/bench_step.py [--quick] [--json FILE]

work_tax       time of the auto engine at n rows / time of a plain jitted gradient at batch n: geometric mean over 12
               log-spaced n from capacity / 16 to capacity (--quick: every third); also for masked and looped
               (--quick: mlp only)
even_overhead  time of a hetjax step with equal counts / time of a hand-written jitted data-parallel step: same model,
               same fake devices, rows from arrays in memory, loaded while the previous step computes; for hetjax.Step
               in the user's own loop (own_loop), for Trainer.fit (trainer), and the ratio of both (own_over_trainer)
plan_us        time per step of the balanced controller (observe and plan) with 8 and with 1,024 workers
recompiles     programs compiled during 100 random plans

All ratios are medians, measured in turns within one run.
"""

from __future__ import annotations

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benches.flags import JsonFile, from_flags
from flax import nnx
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax import Example, zoo
from hetjax.devices.compile import compiles
from hetjax.devices.workers import AXIS, Workers
from hetjax.planning import controllers
from hetjax.planning.controllers.base import Observation, Plan
from hetjax.planning.limits import Limits


@dataclass(frozen=True)
class Case:
    """A model and as much data as its capacity."""

    name: str
    flax: hetjax.FlaxModel
    data: dict[str, np.ndarray]

    @property
    def capacity(self) -> int:
        return len(next(iter(self.data.values())))


def image_loss(model: Any, example: Any, rngs: Any) -> Example:
    score = zoo.classification(model(example["image"], rngs=rngs), example["label"])
    return Example(score.loss, None, {"accuracy": score.correct})


def text_loss(model: Any, example: Any, rngs: Any) -> Example:
    score = zoo.next_token(model(example["tokens"], rngs=rngs), example["targets"], example["weights"])
    return Example(score.loss, score.weight, {"accuracy": score.correct})


def case(name: str) -> Case:
    """The model of this name with random data."""
    rng, rngs = np.random.default_rng(0), nnx.Rngs(0)
    if name == "transformer":
        model = zoo.Transformer(32, 128, width=64, depth=1, heads=4, dropout=0.0, rngs=rngs)
        tokens = rng.integers(0, 128, (256, 33)).astype(np.int32)
        data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((256, 32), np.float32)}
        return Case(name, hetjax.from_nnx(model, text_loss), data)
    image, label = rng.random((256, 28, 28, 1), np.float32), rng.integers(0, 10, 256).astype(np.int32)
    options = {"mlp": {"hidden": (1024, 1024)}, "cnn": {}}[name]
    model = {"mlp": zoo.MLP, "cnn": zoo.CNN}[name]((28, 28, 1), 10, rngs=rngs, **options)
    return Case(name, hetjax.from_nnx(model, image_loss), {"image": image, "label": label})


# -- work_tax --


def step_for(case: Case, engine: Any) -> hetjax.Step:
    """A step on one worker."""
    return hetjax.Step(
        case.flax,
        optax.sgd(0.0),
        batch_size=case.capacity,
        controller="equal",
        engine=engine,
        devices=jax.devices()[:1],
        capacity=case.capacity,
    )


def plain_gradient(case: Case, n: int) -> Callable[[], Any]:
    """The baseline: the jitted gradient of the mean loss over a batch of n."""
    batch = jax.tree.map(lambda x: x[:n], case.data)

    @jax.jit
    def gradient(params: Any, batch: Any) -> Any:
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(0)))(jnp.arange(n))

        def mean(params: Any) -> Any:
            example = case.flax.loss_fn(params, batch, keys)
            weight = n if example.weight_b is None else example.weight_b.sum()
            return example.loss_b.sum() / weight, jax.tree.map(jnp.sum, example.metrics)

        return jax.value_and_grad(mean, has_aux=True)(params)

    params = jax.device_put(case.flax.params, jax.devices()[0])
    return lambda: jax.block_until_ready(gradient(params, batch))


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int, seconds: float) -> dict[str, float]:
    """Median seconds of each run, measured in turns, after one warm-up run each."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    until = time.perf_counter() + seconds
    while len(times[next(iter(runs))]) < repeats and (time.perf_counter() < until or len(times[next(iter(runs))]) < 5):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return {name: float(np.median(values)) for name, values in times.items()}


def odd_sizes(capacity: int) -> list[int]:
    """12 log-spaced sizes from capacity / 16 to capacity, all but the last raised to a prime: never a rung."""
    prime = lambda n: all(n % k for k in range(2, int(n**0.5) + 1))
    sizes = [round(n) for n in np.geomspace(capacity / 16, capacity, 12)]
    return [*(next(k for k in range(n, 2 * n) if prime(k)) for n in sizes[:-1]), capacity]


def work_tax(name: str, quick: bool) -> tuple[float, dict[str, Any]]:
    """The ratio of the auto engine for one model, and the details of all engines."""
    made = case(name)
    specs: dict[str, Any] = {"auto": "auto"}
    if name == "mlp" or not quick:  # these programs take longest to compile
        specs |= {"looped": hetjax.Looped(micro=made.capacity // 16), "masked": "masked"}
    steps = {engine: step_for(made, spec) for engine, spec in specs.items()}
    states = {engine: step(step.init(made.flax.params), made.data)[0] for engine, step in steps.items()}
    auto = steps["auto"].engine
    rows, ratios = [], {engine: [] for engine in steps}
    for position, n in enumerate(odd_sizes(made.capacity)[2::3] if quick else odd_sizes(made.capacity)):
        counts = np.array([n])
        auto.settle(counts)  # as in training, where rungs are added while the counts stay the same
        runs: dict[str, Callable[[], Any]] = {"plain": plain_gradient(made, int(n))}
        for engine, step in steps.items():
            if quick and engine != "auto" and position % 2 == 0:
                continue  # for comparison only: half of the sizes suffice
            runs[engine] = step.local_phases(states[engine], made.data, counts)
        seconds = in_turns(runs, repeats=25 if quick else 41, seconds=0.8 if quick else 4.0)
        for engine in set(steps) & set(runs):
            ratios[engine].append(seconds[engine] / seconds["plain"])
        ms = {name: round(1e3 * value, 2) for name, value in seconds.items()}
        rows.append({"n": int(n), "rows": auto.rows_of(0, int(n)), **ms})
    (ladder,) = auto.ladders.values()
    rungs = sorted(ladder.programs)
    odd = sum(all(row["n"] % rung for rung in rungs) for row in rows)
    mean = {engine: float(np.exp(np.mean(np.log(values)))) for engine, values in ratios.items()}
    for step in steps.values():
        step.close()
    return mean["auto"], {"ladder": rungs, "odd_n": odd, "geometric_mean": mean, "ms": rows}


# -- even_overhead --


def even_overhead(quick: bool) -> tuple[dict[str, float], dict[str, Any]]:
    """Blocks of steps in turns, against a hand-written step with shard_map, pmean and donation."""
    made, batch = case("mlp"), 2048
    rng = np.random.default_rng(1)
    data = {
        "image": rng.random((8 * batch, 28, 28, 1), np.float32),
        "label": rng.integers(0, 10, 8 * batch).astype(np.int32),
    }
    optimizer = optax.sgd(0.01, momentum=0.9)
    workers = Workers.of(None)
    steps = 16  # per block: its first and last step, which overlap with nothing, then weigh little

    def by_hand_step(params: Any, opt_state: Any, rows: Any, index: jax.Array) -> Any:
        n = len(rows["label"])
        keys = jax.vmap(partial(jax.random.fold_in, jax.random.key(0)))(index[0] + jnp.arange(n))

        def mean(params: Any) -> Any:
            example = made.flax.loss_fn(params, rows, keys)
            return example.loss_b.mean(), jax.tree.map(jnp.mean, example.metrics)

        (loss, metrics), grads = jax.value_and_grad(mean, has_aux=True)(params)
        grads, loss, metrics = jax.lax.pmean((grads, loss, metrics), AXIS)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, metrics

    specs = {"mesh": workers.mesh, "in_specs": (P(), P(), P(AXIS), P(AXIS)), "out_specs": P(), "check_vma": False}
    by_hand = jax.jit(jax.shard_map(by_hand_step, **specs), donate_argnums=(0, 1))
    copy = lambda tree: jax.device_put(jax.tree.map(jnp.array, tree), workers.replicated)
    held = [copy(made.flax.params), copy(optimizer.init(made.flax.params))]
    index = jax.device_put(np.arange(len(workers), dtype=np.int32), workers.sharded)
    order = rng.permutation(len(data["label"]))

    def run_by_hand(steps: int = steps) -> None:
        loss = None
        for k in range(steps):
            chosen = order[(k % 8) * batch : (k % 8 + 1) * batch]
            rows = jax.device_put({name: values[chosen] for name, values in data.items()}, workers.sharded)
            held[0], held[1], loss, _ = by_hand(*held, rows, index)
        jax.block_until_ready(loss)

    chosen = [order[k * batch : (k + 1) * batch] for k in range(8)]
    loader = lambda steps: ({name: values[chosen[k % 8]] for name, values in data.items()} for k in range(steps))
    options = {"batch_size": batch, "controller": "fixed:" + ",".join("1" * len(workers))}
    with (
        hetjax.Trainer(made.flax, optimizer, **options) as trainer,
        hetjax.Step(made.flax, optimizer, **options) as step,
    ):
        trained = [trainer.fit(trainer.init(made.flax.params), data, steps=40)[0]]  # the ladder grows
        live = [step.init(made.flax.params)]

        def run_own_loop(steps: int = steps) -> None:
            for rows in loader(steps):
                live[0], _ = step(live[0], rows)
            step.flush()

        def run_trainer() -> None:
            trained[0], history = trainer.fit(trained[0], data, steps=steps)
            inside.append(sum(record.step_time for record in history.records))

        inside: list[float] = []
        times: dict[str, list[float]] = {"by_hand": [], "own_loop": [], "trainer": []}
        run_own_loop(40)
        step.engine.settle(np.full(len(workers), batch // len(workers)))
        trainer.step.engine.settle(np.full(len(workers), batch // len(workers)))
        run_own_loop(2)
        run_by_hand(2)
        for turn in range(3 if quick else 15):
            runs = [("by_hand", run_by_hand), ("own_loop", run_own_loop), ("trainer", run_trainer)]
            for name, run in runs[turn % 3 :] + runs[: turn % 3]:  # each goes first in turn
                began = time.perf_counter()
                run()
                seconds = inside[-1] if name == "trainer" else time.perf_counter() - began
                times[name].append(seconds / steps)
    over = lambda a, b: np.array(times[a]) / np.array(times[b])
    quartiles = lambda ratios: np.percentile(ratios, [25, 75]).round(3).tolist()
    pairs = {name: (name, "by_hand") for name in ("own_loop", "trainer")} | {
        "own_over_trainer": ("own_loop", "trainer")
    }
    ratios = {name: float(np.median(over(*pair))) for name, pair in pairs.items()}
    spread = {name: quartiles(over(*pair)) for name, pair in pairs.items()}
    ms = {name: 1e3 * float(np.median(values)) for name, values in times.items()}
    return ratios, {"step_ms": ms, "quartiles": spread, "workers": len(workers), "batch": batch}


# -- plan_us --


def plan_us(workers: int, steps: int = 200) -> float:
    """Mean microseconds of observe + plan of the balanced controller under 5% noise, without the first plan."""
    rng = np.random.default_rng(2)
    limits = Limits.plain(workers, 64 * workers)
    controller = controllers.make("balanced")
    speed = rng.uniform(0.2, 1.0, workers)
    plans = [controller.plan(64 * workers, limits), controller.plan(64 * workers, limits)]
    seconds = []
    for step in range(steps):
        counts = plans[step].counts_W
        times = np.round((1e-3 + counts * 1e-4 / speed) * rng.lognormal(0, 0.05, workers), 6)
        observation = Observation(counts, limits.work(counts), np.where(counts > 0, times, np.nan), 0, step)
        began = time.perf_counter()
        controller.observe(observation)
        plans.append(controller.plan(64 * workers, limits))
        seconds.append(time.perf_counter() - began)
    return 1e6 * float(np.mean(seconds[1:]))


# -- recompiles --


class RandomSplits:
    """A new random split every step."""

    name = "random"

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        return Plan(self.rng.multinomial(batch, self.rng.dirichlet(np.ones(limits.workers))).astype(np.int64))

    def observe(self, observation: Observation) -> None:
        """Ignores timings."""


def recompiles() -> int:
    """Programs compiled while counts change, after a first step."""
    made = case("mlp")
    with hetjax.Trainer(made.flax, optax.sgd(0.1), batch_size=64, controller=RandomSplits()) as trainer:
        state, _ = trainer.fit(trainer.init(made.flax.params), made.data, steps=1)
        before = compiles()
        _, history = trainer.fit(state, made.data, steps=100)
    assert len({tuple(counts) for counts in history.counts}) > 90
    return compiles() - before


def main(json_file: JsonFile = None, quick: bool = False) -> None:
    """Measure the overhead of hetjax itself.

    Args:
        json_file: write the results to this file (--json FILE).
        quick: fewer repetitions; takes 90 seconds on two idle cores.
    """
    began = time.perf_counter()
    taxes, details = {}, {}
    for name in ("mlp", "cnn", "transformer"):
        taxes[name], details[name] = work_tax(name, quick)
        means = ", ".join(f"{engine} {value:.2f}" for engine, value in details[name]["geometric_mean"].items())
        odd = f"{details[name]['odd_n']} of {len(details[name]['ms'])} n not a multiple of any rung"
        print(f"\n{name}: ladder {details[name]['ladder']}, {odd}")
        for row in details[name]["ms"]:
            print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))
        print(f"  work_tax (geometric mean): {means}   [target: auto <= 1.10]")
    overhead, details["even_overhead"] = even_overhead(quick)
    print(f"\neven_overhead: own loop {overhead['own_loop']:.3f}, trainer {overhead['trainer']:.3f}   [target <= 1.05]")
    print(f"own loop over trainer {overhead['own_over_trainer']:.3f}   [target <= 1.01]  {details['even_overhead']}")
    planning = {"8": plan_us(8), "1024": plan_us(1024)}
    print(f"plan_us { ({k: round(v) for k, v in planning.items()}) }   [targets < 1,000 and < 10,000]")
    compiled = recompiles()
    print(f"recompiles {compiled}   [target 0]\n{time.perf_counter() - began:.0f} s")
    if json_file is not None:
        figures = {"work_tax": taxes, "even_overhead": overhead, "plan_us": planning, "recompiles": compiled}
        json_file.write_text(json.dumps({**figures, "details": details}, indent=1) + "\n")


if __name__ == "__main__":
    from_flags(main)
