"""Do the threads of hogbatch run in parallel? Two equal workers against one, with simulated and with real speeds.

Real ones share XLA's CPU runtime, memory, and their two cores with the thread that fetches rows: what two bare threads
reach with the same gradient is measured beside them. Phases of 0.2 s are the ones that simulated workers have, too; in
those of 0.03 s the host's part of a batch, some 5 ms on the same cores, is seen.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import optax
from benches.async_problems import Problem, loss_fn

from hetjax import Simulation, Trainer
from hetjax.data import MemorySource
from hetjax.simulation.speeds import constant
from hetjax.sync import Hogbatch

WAYS = ("hogbatch", "bare")
PHASES = {0.2: ((1024, 1024, 1024, 10), 2048), 0.03: ((256, 256, 256, 10), 4096)}  # by seconds: widths and batch


def simulated_speed_up() -> float:
    """Samples per second of two equal workers over one's, in phases of 0.2 s."""
    problem, speeds = made((64, 32, 10), 4096), lambda workers: Simulation(constant([1.0] * workers), row_time=4e-4)
    one, two = (hogbatch(workers, problem, 512, workers, speeds(workers)) for workers in (1, 2))
    return two / one


def real_speed_up(phase: float, repeats: int = 5) -> dict[str, float]:
    """The same where every worker has a core: medians of runs in turn. NaN if there are no two cores."""
    if len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(WAYS, float("nan"))
    ratios = [{way: own_process(way, phase, 2) / own_process(way, phase, 1) for way in WAYS} for _ in range(repeats)]
    return {way: float(np.median([ratio[way] for ratio in ratios])) for way in WAYS}


def own_process(way: str, phase: float, workers: int) -> float:
    """Samples per second on as many cores as there are workers: otherwise XLA gives one worker all of them."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    pinned = f"import os; os.sched_setaffinity(0, {cores}); from benches import async_speed_up as here"
    command = [sys.executable, "-c", f"{pinned}; print(here.real({way!r}, {phase}, {workers}))"]
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={workers}"}
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout.split()[-1])


def real(way: str, phase: float, workers: int, seconds: float = 4.0) -> float:
    """On real devices, for some seconds."""
    widths, batch = PHASES[phase]
    batches = 4  # in an epoch
    problem, calls = made(widths, batches * batch), round(seconds / phase)
    if way == "bare":
        return bare(workers, problem, batch, calls)
    return hogbatch(workers, problem, batch, workers * calls // batches)


def made(widths: tuple[int, ...], size: int) -> Problem:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(size, widths[0])), rng.integers(0, widths[-1], size)
    return Problem({"x": x.astype(np.float32), "y": y.astype(np.int32)}, widths, rate=0.01, target=0.0)


def hogbatch(workers: int, problem: Problem, batch: int, epochs: int, speeds: Simulation | None = None) -> float:
    with Trainer(
        loss_fn,
        optax.sgd(problem.rate),
        batch_size=batch,
        devices=jax.devices()[:workers],
        speeds=speeds,
        sync=Hogbatch(batches=batch, smallest=batch),
    ) as trainer:
        _, history = trainer.fit(trainer.init(problem.params(0)), MemorySource(problem.rows), epochs=epochs)
    return history.samples_per_s(skip=workers)


def bare(workers: int, problem: Problem, batch: int, calls: int) -> float:
    """Nothing but the gradient of one batch again and again, on a thread per device."""
    gradient = jax.jit(jax.grad(lambda params, rows: loss_fn(params, rows, None).mean()))
    first = {name: values[:batch] for name, values in problem.rows.items()}
    placed = [jax.device_put((problem.params(0), first), device) for device in jax.devices()[:workers]]
    for arguments in placed:
        jax.block_until_ready(gradient(*arguments))

    def again(arguments: tuple) -> None:
        for _ in range(calls):
            jax.block_until_ready(gradient(*arguments))

    with ThreadPoolExecutor(workers) as threads:
        began = time.perf_counter()
        list(threads.map(again, placed))
        return workers * calls * batch / (time.perf_counter() - began)
