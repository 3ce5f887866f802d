"""Asynchronous against synchronous training on a CPU-like and a GPU-like worker.

    python experiments/bench_async.py [--json FILE] [--seeds 3] [--ratios 1:4 1:16 1:64] [--quick]

Two workers with simulated speeds of 1:4, 1:16 and 1:64 train a small MLP on the digits and on synthetic sparse
features, by each of: equal counts, balanced (both synchronous), hogbatch, adaptive-hogbatch, adaptive-sgd; the fast
worker alone (alone), also with small batches (alone-small), at the learning rate scaled by the batch; and the slow
worker alone (alone-slow), a CPU of four Hogwild threads, each with its part of a small batch. All see the same samples
in the same order. Reported, as medians over the seeds: the utilization of the less busy worker, updates and their share
per worker, and seconds and samples until the loss over the whole training set is below a target. The loss is evaluated
on a third device and not charged. Takes more than an hour, most of it for equal counts and the slow worker alone at
1:64.

Every training is run to the target, and all of it is charged: also the first two steps of a balanced run, which have
equal counts to measure timings.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from benches.async_problems import Problem, digits, loss_fn, sparse
from benches.async_speed_up import PHASES, real_speed_up, simulated_speed_up
from benches.flags import JsonFile, Switch, from_flags
from rich.console import Console
from rich.table import Table

from hetjax import Chunked, Simulation, Trainer
from hetjax.data import MemorySource
from hetjax.devices.chosen import chosen_devices
from hetjax.history import History
from hetjax.planning import controllers
from hetjax.simulation.speeds import constant
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch

ALONE = {"alone": 256, "alone-small": 32}  # batch of the fast worker without the slow one
SLOW_ALONE, THREADS = "alone-slow", 4  # the slow worker without the fast one, and its Hogwild threads
SYNCS = ("equal", "balanced", *ALONE, SLOW_ALONE, "hogbatch", "adaptive-hogbatch", "adaptive-sgd")
RATIOS = ("1:4", "1:16", "1:64")
BATCH, SMALLEST, LARGEST = 256, 16, 256
PHASE = 0.12  # seconds of the shortest phase, about 60 times the gap between two phases
MIN_PHASES = 80, 40  # a run lasts at least this many of the shortest and of the longest phases
MAX_SAMPLES = 40_000  # a run that has not reached the target by then has failed


class ToTarget:
    """A hook that notes when the loss over the whole training set reaches the target, and then stops the run."""

    min_seconds = 0.0  # of a run, so that its start and end carry little weight

    def __init__(self, problem: Problem, trainer: Trainer, min_samples: int):
        spare = jax.devices()[2]
        rows = jax.device_put(problem.rows, spare)
        self.loss = jax.jit(lambda params: jnp.mean(loss_fn(params, rows, None)))
        self.problem, self.trainer, self.min_samples, self.spare = problem, trainer, min_samples, spare
        self.reset()

    def reset(self) -> None:
        self.seconds: float | None = None
        self.samples: int | None = None

    def __call__(self, record: Any, state: Any) -> None:
        loss = float(self.loss(jax.device_put(state.params, self.spare)))
        if self.seconds is None and loss <= self.problem.target:
            self.seconds, self.samples = record.seconds, record.samples
        if self.seconds is not None and record.samples >= self.min_samples and record.seconds >= self.min_seconds:
            self.trainer.stop()


def make_trainer(problem: Problem, sync: str, simulation: Simulation) -> Trainer:
    """A trainer of two workers or one; as published, the CPU starts at its smallest batch, the GPU at its largest."""
    common = {"batches": [SMALLEST, LARGEST], "smallest": SMALLEST}
    syncs: dict[str, Callable[[], Any]] = {
        "hogbatch": lambda: Hogbatch(**common),
        "adaptive-hogbatch": lambda: AdaptiveHogbatch(**common),
        "adaptive-sgd": lambda: AdaptiveSgd(**common, mega_batch=4 * BATCH),
        SLOW_ALONE: lambda: Hogbatch(batches=SMALLEST, smallest=SMALLEST, threads=THREADS),
    }
    stepped = {"controller": "equal" if sync in ALONE else sync, "engine": Chunked(rungs=[1, 4, 16, 64, 256])}
    options = {"sync": syncs[sync]()} if sync in syncs else stepped
    devices_of = {SLOW_ALONE: jax.devices()[:1]} | dict.fromkeys(ALONE, jax.devices()[1:2])
    batch, devices = ALONE.get(sync, BATCH), devices_of.get(sync, jax.devices()[:2])
    optimizer = optax.sgd(problem.rate * batch / BATCH)
    return Trainer(loss_fn, optimizer, batch_size=batch, devices=devices, speeds=simulation, **options)


def speeds_of(sync: str, ratio: float) -> list[float]:
    """Speeds of the workers that take part."""
    return [ratio] if sync in ALONE else [1.0] if sync == SLOW_ALONE else [1.0, ratio]


def row_time(ratio: float) -> float:
    """Seconds per row at speed 1, such that neither worker's shortest phase is below PHASE."""
    return max(PHASE / SMALLEST, PHASE * ratio / LARGEST)


def min_seconds(ratio: float) -> float:
    """Seconds of a run, long enough that the wait for the other worker's last batch carries little weight."""
    longest = row_time(ratio) * max(SMALLEST, LARGEST / ratio)
    return max(MIN_PHASES[0] * PHASE, MIN_PHASES[1] * longest)


def run_figures(history: History, target: ToTarget) -> dict[str, Any]:
    """The figures of one run."""
    if history.more:
        utilization, share, updates = (history.more[key] for key in ("utilization", "update_share", "updates"))
    else:  # synchronous: every worker contributes to every update
        times_SxW = np.array([record.times_W for record in history.records])
        utilization = (np.nansum(times_SxW, axis=0) / sum(record.step_time for record in history.records)).tolist()
        share, updates = np.full(len(utilization), 1 / len(utilization)).tolist(), len(history.records)
    return {
        "utilization": min(utilization),
        "time_to_target_s": target.seconds,
        "samples_to_target": target.samples,
        "update_share": share,
        "utilization_per_worker": utilization,
        "updates": updates,
        "overruns": history.overruns,
        "step_time": float(np.median([record.step_time for record in history.records])),
    }


def bench(problem: Problem, ratios: list[str], seeds: int, log: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Medians over the seeds, by ratio and sync. One trainer per sync: ratios and seeds share its programs."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {ratio: {sync: [] for sync in SYNCS} for ratio in ratios}
    source = MemorySource(problem.rows)
    for sync in SYNCS:
        simulation = Simulation(constant(speeds_of(sync, 1.0)), row_time=1.0)
        with make_trainer(problem, sync, simulation) as trainer:
            hook = ToTarget(problem, trainer, min_samples=12 * BATCH)
            for ratio in ratios:
                speed = float(ratio.partition(":")[2])
                simulation.trace = constant(speeds_of(sync, speed))
                simulation.row_time, hook.min_seconds = row_time(speed), min_seconds(speed)
                for seed in range(seeds):
                    simulation.phases = simulation.overruns = 0
                    trainer.seed = seed
                    if sync == "balanced":
                        trainer.controller = controllers.make(sync)  # one that knows nothing: its start is charged
                    hook.reset()
                    state = trainer.init(problem.params(seed))
                    steps = MAX_SAMPLES // ALONE.get(sync, BATCH)
                    _, history = trainer.fit(state, source, steps=steps, hooks=[hook])
                    found[ratio][sync].append(run_figures(history, hook))
                    seconds, busy = hook.seconds or np.nan, found[ratio][sync][-1]["utilization"]
                    log(f"{ratio} {sync}, seed {seed}: target after {seconds:.1f} s, busy {busy:.1%}")
    return {ratio: {sync: medians(runs) for sync, runs in by_sync.items()} for ratio, by_sync in found.items()}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds; a target missed by one seed counts as missed."""

    def median(key: str) -> Any:
        values = [run[key] for run in runs]
        if any(value is None for value in values):
            return None
        return np.median(np.array(values, float), axis=0).tolist()

    return {key: median(key) for key in runs[0]} | {"seeds": len(runs)}


def print_table(name: str, found: dict[str, dict[str, Any]], console: Console) -> None:
    """Prints the figures of one problem, and which sync to use at each ratio."""
    shown = Table(title=f"{name}: to the target", title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for column in ("speeds", "sync", "busy", "seconds", "samples", "updates", "CPU's"):
        shown.add_column(column, justify="left" if column in ("speeds", "sync") else "right", no_wrap=True)
    for ratio, by_sync in found.items():
        for sync, figures in by_sync.items():
            seconds, samples = figures["time_to_target_s"], figures["samples_to_target"]
            shown.add_row(
                ratio if sync == SYNCS[0] else "",
                sync,
                f"{figures['utilization']:.1%}",
                "not reached" if seconds is None else f"{seconds:.1f}",
                "–" if samples is None else f"{samples:,.0f}",
                f"{figures['updates']:.0f}",
                "–" if sync in ALONE else "all" if sync in SYNCS[:2] else f"{figures['update_share'][0]:.0%}",
            )
    console.print(shown)
    console.print(
        "busy: utilization of the less busy worker; CPU's: share of updates by the slower worker.", highlight=False
    )
    alone = ", ".join(f"{name} in batches of {batch}" for name, batch in ALONE.items())
    console.print(f"The fast worker without the other: {alone}; the slow one: {SLOW_ALONE}.", highlight=False)
    for ratio, by_sync in found.items():
        console.print(verdict(ratio, by_sync), soft_wrap=True, highlight=False)


def verdict(ratio: str, by_sync: dict[str, Any]) -> str:
    """A sentence on which sync to use."""
    seconds = {sync: f["time_to_target_s"] for sync, f in by_sync.items() if f["time_to_target_s"] is not None}
    balanced = seconds.pop("balanced", None)
    asynchronous = {sync: s for sync, s in seconds.items() if sync not in ("equal", *ALONE, SLOW_ALONE)}
    if not asynchronous and balanced is None:
        return f"{ratio}: no training reached the target."
    if not asynchronous or balanced is None:
        return f"{ratio}: {'only asynchronous' if asynchronous else 'no asynchronous'} training reached the target."
    best = min(asynchronous, key=lambda sync: asynchronous[sync])
    gain = asynchronous[best] / balanced
    both = f"{balanced:.1f} s to the target, {best}, the best asynchronous one, {asynchronous[best]:.1f} s"
    if gain > 1.02:
        return f"{ratio}: balanced synchronous training is the better choice: {both} ({gain:.2f} times as long)."
    if gain > 0.98:
        return f"{ratio}: balanced synchronous training and {best} are equally fast: {both}."
    return f"{ratio}: {best} is the better choice: balanced synchronous training needs {both} ({gain:.2f} of that)."


def main(
    json_file: JsonFile = None,
    seeds: int = 3,
    ratios: tuple[str, ...] = RATIOS,
    quick: Switch = False,
) -> None:
    """Compare synchronous and asynchronous training.

    Args:
        json_file: write the figures to this file (--json FILE), by ratio and sync; those of the sparse features are
            under "sparse".
        seeds: number of seeds, for parameters and sample order; medians are reported.
        ratios: speeds of the two workers.
        quick: a smoke test of about a minute: one ratio, one seed, the digits only.
    """
    chosen_devices(3)  # two workers, and one to evaluate on
    console, progress = Console(), Console(stderr=True)
    log = lambda text: progress.print(text, highlight=False)
    if quick:
        seeds, ratios = 1, ("1:16",)
    found = bench(digits(), list(ratios), seeds, log)
    print_table("Digits", found, console)
    if not quick:
        on_sparse = bench(sparse(), list(ratios), seeds, log)
        print_table("Sparse features", on_sparse, console)
        for ratio, by_sync in on_sparse.items():
            for sync, figures in by_sync.items():
                found[ratio][sync]["sparse"] = figures
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    summary = f"Two equal workers against one: {simulated_speed_up():.2f} times the samples/s with simulated speeds"
    for phase in () if quick else PHASES:
        real = real_speed_up(phase)
        summary += (
            f"; {real['hogbatch']:.2f} times with real ones, a core each, in phases of {phase} s (two bare threads "
        )
        summary += f"{real['bare']:.2f} times)"
    console.print(f"{summary}.", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    from_flags(main)
