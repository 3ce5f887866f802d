"""Asynchronous against synchronous training on a CPU-like and a GPU-like worker.

    python experiments/bench_async.py [--json FILE] [--seeds 3] [--ratios 1:4 1:16 1:64] [--quick]

Two workers whose simulated speeds are 1:4, 1:16 and 1:64 train a small MLP on the digits and on a made-up set with few
non-zero features: synchronous with equal counts, synchronous and balanced, hogbatch, adaptive-hogbatch, adaptive-sgd.
All see the same samples in the same order with the same learning rate. Told are the utilization of the less busy
worker, updates and their share per worker, and the seconds and samples until the loss over the whole training set is
below a target (medians of the seeds). The evaluation runs beside the training and is not charged. Some 20 minutes.

A balanced run first takes two steps of equal counts, to time them. They are taken before and not charged, as in a
longer training they would not count; what they took is told beside (`uncharged_s`). Equal counts are the same training
as balanced ones, only slower (tests of hetjax see to that). So only some of their steps are run, and their time to the
target is the balanced run's number of steps at that speed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from benches.async_problems import Problem, digits, loss_fn, sparse
from benches.async_speed_up import PHASES, real_speed_up, simulated_speed_up
from rich.console import Console
from rich.table import Table

from hetjax import Chunked, Simulation, Trainer, fake_devices
from hetjax.data import MemorySource
from hetjax.history import History
from hetjax.planning import controllers
from hetjax.simulation.speeds import constant
from hetjax.sync import AdaptiveHogbatch, AdaptiveSgd, Hogbatch

SYNCS = ("equal", "balanced", "hogbatch", "adaptive-hogbatch", "adaptive-sgd")
RATIOS = ("1:4", "1:16", "1:64")
BATCH, SMALLEST, LARGEST = 256, 16, 256
PHASE = 0.12  # seconds of the shortest phase: some 60 times what lies between two phases
LEAST_PHASES = 80, 40  # of the shortest and of the longest kind: a run goes on for both
EQUAL_STEPS = 4
MOST_SAMPLES = 40_000  # a run that is not there by then has failed


class ToTarget:
    """A hook that notes when the loss over the whole training set is low enough, and ends the run then."""

    least_s = 0.0  # a run goes on for so many seconds, that its start and end do not count for much

    def __init__(self, problem: Problem, trainer: Trainer, least: int):
        spare = jax.devices()[2]
        rows = jax.device_put(problem.rows, spare)
        self.loss = jax.jit(lambda params: jnp.mean(loss_fn(params, rows, None)))
        self.problem, self.trainer, self.least, self.spare = problem, trainer, least, spare
        self.reset()

    def reset(self) -> None:
        self.seconds: float | None = None
        self.samples: int | None = None

    def __call__(self, record: Any, state: Any) -> None:
        loss = float(self.loss(jax.device_put(state.params, self.spare)))
        if self.seconds is None and loss <= self.problem.target:
            self.seconds, self.samples = record.seconds, record.samples
        if self.seconds is not None and record.samples >= self.least and record.seconds >= self.least_s:
            self.trainer.stop()


def make_trainer(problem: Problem, sync: str, simulation: Simulation) -> Trainer:
    """CPUs start at their smallest batch and GPUs at their largest, as published."""
    common = {"batches": [SMALLEST, LARGEST], "smallest": SMALLEST}
    syncs: dict[str, Callable[[], Any]] = {
        "hogbatch": lambda: Hogbatch(**common),
        "adaptive-hogbatch": lambda: AdaptiveHogbatch(**common),
        "adaptive-sgd": lambda: AdaptiveSgd(**common, mega_batch=4 * BATCH),
    }
    stepped = {"controller": sync, "engine": Chunked(rungs=[1, 4, 16, 64, 256])}
    how = {"sync": syncs[sync]()} if sync in syncs else stepped
    devices = jax.devices()[:2]
    return Trainer(loss_fn, optax.sgd(problem.rate), batch_size=BATCH, devices=devices, speeds=simulation, **how)


def row_time(ratio: float) -> float:
    """Seconds of a row at speed 1, such that neither worker's shortest phase is below PHASE."""
    return max(PHASE / SMALLEST, PHASE * ratio / LARGEST)


def least_seconds(ratio: float) -> float:
    """That one worker waits for the other's last batch at the end is not to count for much."""
    longest = row_time(ratio) * max(SMALLEST, LARGEST / ratio)
    return max(LEAST_PHASES[0] * PHASE, LEAST_PHASES[1] * longest)


def told(sync: str, history: History, there: ToTarget) -> dict[str, Any]:
    """The figures of one run."""
    if history.more:
        utilization, share, updates = (history.more[key] for key in ("utilization", "update_share", "updates"))
    else:  # all workers take part in every update
        kept = history.records[len(history.records) // 3 :]  # the controller has to see a step first
        times = np.array([record.times_W for record in kept])
        utilization = (np.nansum(times, axis=0) / sum(record.step_time for record in kept)).tolist()
        share, updates = [0.5, 0.5], len(history.records)
    return {
        "utilization": min(utilization),
        "time_to_target_s": there.seconds,
        "samples_to_target": there.samples,
        "update_share": share,
        "utilization_per_worker": utilization,
        "updates": updates,
        "overruns": history.overruns,
        "step_time": float(np.median([record.step_time for record in history.records])),
    }


def bench(problem: Problem, ratios: list[str], seeds: int, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Medians over the seeds, by ratio and sync. One trainer per sync: its programs serve all ratios and seeds."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {ratio: {sync: [] for sync in SYNCS} for ratio in ratios}
    source = MemorySource(problem.rows)
    for sync in (*SYNCS[1:], "equal"):
        simulation = Simulation(constant([1.0, 1.0]), row_time=1.0)
        with make_trainer(problem, sync, simulation) as trainer:
            hook = ToTarget(problem, trainer, least=12 * BATCH)
            for ratio in ratios:
                speed = float(ratio.partition(":")[2])
                simulation.trace, simulation.row_time = constant([1.0, speed]), row_time(speed)
                hook.least_s = least_seconds(speed)
                uncharged = {}
                if sync == "balanced":
                    trainer.controller = controllers.make(sync)
                    _, before = trainer.fit(trainer.init(problem.params(0)), source, steps=EQUAL_STEPS)
                    uncharged = {"uncharged_s": sum(record.step_time for record in before.records[:2])}
                for seed in range(seeds if sync != "equal" else 1):
                    simulation.phases = simulation.overruns = 0
                    trainer.seed = seed
                    hook.reset()
                    steps = EQUAL_STEPS if sync == "equal" else MOST_SAMPLES // BATCH
                    state = trainer.init(problem.params(seed))
                    _, history = trainer.fit(state, source, steps=steps, hooks=[hook])
                    found[ratio][sync].append(told(sync, history, hook) | uncharged)
                    seconds, busy = hook.seconds or np.nan, found[ratio][sync][-1]["utilization"]
                    say(f"{ratio} {sync}, seed {seed}: target after {seconds:.1f} s, busy {busy:.1%}")
                if sync == "equal":
                    found[ratio][sync] = as_balanced(found[ratio][sync][0], found[ratio]["balanced"])
    return {ratio: {sync: summed(runs) | derived(sync) for sync, runs in of.items()} for ratio, of in found.items()}


def derived(sync: str) -> dict[str, Any]:
    """That equal counts were run for some steps of one seed only: the rest follows from the balanced runs."""
    return {"derived": True, "steps_run": EQUAL_STEPS} if sync == "equal" else {}


def as_balanced(equal: dict[str, Any], balanced: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps of the balanced runs, each as long as the equal one's."""
    steps = [None if run["samples_to_target"] is None else run["samples_to_target"] / BATCH for run in balanced]
    return [
        equal
        | {"samples_to_target": run["samples_to_target"], "updates": run["updates"]}
        | {"time_to_target_s": None if count is None else count * equal["step_time"]}
        for run, count in zip(balanced, steps, strict=True)
    ]


def summed(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the seeds; a target that one of them missed counts as missed."""

    def middle(key: str) -> Any:
        values = [run[key] for run in runs]
        if any(value is None for value in values):
            return None
        return np.median(np.array(values, float), axis=0).tolist()

    return {key: middle(key) for key in runs[0]} | {"seeds": len(runs)}


def table(name: str, found: dict[str, dict[str, Any]], console: Console) -> None:
    shown = Table(title=f"{name}: to the target", title_justify="left", box=None, padding=(0, 2), pad_edge=False)
    for column in ("speeds", "sync", "busy", "seconds", "samples", "updates", "CPU's"):
        shown.add_column(column, justify="left" if column in ("speeds", "sync") else "right", no_wrap=True)
    for ratio, of in found.items():
        for sync, figures in of.items():
            seconds, samples = figures["time_to_target_s"], figures["samples_to_target"]
            shown.add_row(
                ratio if sync == SYNCS[0] else "",
                sync,
                f"{figures['utilization']:.1%}",
                "not reached" if seconds is None else f"{seconds:.1f}",
                "–" if samples is None else f"{samples:,.0f}",
                f"{figures['updates']:.0f}",
                "all" if sync in SYNCS[:2] else f"{figures['update_share'][0]:.0%}",
            )
    console.print(shown)
    console.print("busy: of the less busy worker; CPU's: share of the updates by the CPU-like one.", highlight=False)
    console.print("equal: from some of its steps and the number that balanced took.", highlight=False)
    first = ", ".join(f"{of['balanced']['uncharged_s']:.1f} s at {ratio}" for ratio, of in found.items())
    console.print(f"balanced: without its first two steps, of equal counts ({first}).", highlight=False)
    for ratio, of in found.items():
        console.print(verdict(ratio, of), soft_wrap=True, highlight=False)


def verdict(ratio: str, of: dict[str, Any]) -> str:
    """Which one to use, in a sentence."""
    seconds = {sync: f["time_to_target_s"] for sync, f in of.items() if f["time_to_target_s"] is not None}
    balanced = seconds.pop("balanced", None)
    rivals = {sync: s for sync, s in seconds.items() if sync != "equal"}
    if not rivals and balanced is None:
        return f"{ratio}: no training reached the target."
    if not rivals or balanced is None:
        return f"{ratio}: {'only asynchronous' if rivals else 'no asynchronous'} training reached the target."
    best = min(rivals, key=lambda sync: rivals[sync])
    gain = rivals[best] / balanced
    both = f"{balanced:.1f} s to the target, {best}, the best of the asynchronous ones, {rivals[best]:.1f} s"
    if gain > 1.02:
        return f"{ratio}: balanced synchronous training is the better choice: {both} ({gain:.2f} times as long)."
    if gain > 0.98:
        return f"{ratio}: balanced synchronous training and {best} are equally fast: {both}."
    return f"{ratio}: {best} is the better choice: balanced synchronous training needs {both} ({gain:.2f} of that)."


def main(
    json_file: Annotated[Path | None, tyro.conf.arg(name="json")] = None,
    seeds: int = 3,
    ratios: tuple[str, ...] = RATIOS,
    quick: bool = False,
) -> None:
    """Compare synchronous and asynchronous training.

    Args:
        json_file: write the figures to this file (--json FILE): by ratio and sync, those of the digits; those of the
            sparse set are in "sparse".
        seeds: of parameters and of the order of samples, of which the medians are told.
        ratios: of the two workers' speeds.
        quick: a smoke test of under a minute: one ratio, one seed, the digits only.
    """
    fake_devices(3)  # two workers, and one for evaluations
    console, progress = Console(), Console(stderr=True)
    say = lambda text: progress.print(text, highlight=False)
    if quick:
        seeds, ratios = 1, ("1:16",)
    found = bench(digits(), list(ratios), seeds, say)
    table("Digits", found, console)
    if not quick:
        other = bench(sparse(), list(ratios), seeds, say)
        table("Sparse features", other, console)
        for ratio, of in other.items():
            for sync, figures in of.items():
                found[ratio][sync]["sparse"] = figures
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    said = f"Two equal workers against one: {simulated_speed_up():.2f} times the samples/s with simulated speeds"
    for phase in () if quick else PHASES:
        real = real_speed_up(phase)
        said += f"; {real['hogbatch']:.2f} times with real ones, a core each, in phases of {phase} s (two bare threads "
        said += f"{real['bare']:.2f} times)"
    console.print(f"{said}.", soft_wrap=True, highlight=False)


if __name__ == "__main__":
    tyro.cli(main)
