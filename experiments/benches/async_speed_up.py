"""Whether the threads of hogbatch run in parallel: two equal workers against one, with simulated and real speeds.

Real workers share XLA's CPU runtime, memory, and two cores with the prefetch thread, so two bare threads with the same
gradient are measured for comparison. Phases of 0.2 s match those of the simulated workers; phases of 0.03 s show the
host's share of a batch, about 5 ms on the same cores.
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

VARIANTS = ("hogbatch", "bare")
PHASES = {0.2: ((1024, 1024, 1024, 10), 2048), 0.03: ((256, 256, 256, 10), 4096)}  # seconds: (layer widths, batch)


def simulated_speed_up() -> float:
    """Samples/s of two equal workers over those of one, in phases of 0.2 s."""
    problem = random_problem((64, 32, 10), 4096)
    speeds = lambda workers: Simulation(constant([1.0] * workers), row_time=4e-4)
    one, two = (hogbatch(workers, problem, 512, workers, speeds(workers)) for workers in (1, 2))
    return two / one


def real_speed_up(phase: float, repeats: int = 5) -> dict[str, float]:
    """The same with one core per worker: medians of alternating runs; NaN with fewer than two cores."""
    if len(os.sched_getaffinity(0)) < 2:
        return dict.fromkeys(VARIANTS, float("nan"))
    ratios = [
        {variant: in_own_process(variant, phase, 2) / in_own_process(variant, phase, 1) for variant in VARIANTS}
        for _ in range(repeats)
    ]
    return {variant: float(np.median([ratio[variant] for ratio in ratios])) for variant in VARIANTS}


def in_own_process(variant: str, phase: float, workers: int) -> float:
    """Samples/s in a process pinned to one core per worker; unpinned, XLA would give a single worker all cores."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    pinned = f"import os; os.sched_setaffinity(0, {cores}); from benches import async_speed_up as here"
    command = [sys.executable, "-c", f"{pinned}; print(here.real({variant!r}, {phase}, {workers}))"]
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={workers}"}
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout.split()[-1])


def real(variant: str, phase: float, workers: int, seconds: float = 4.0) -> float:
    """Samples/s on real devices, measured for about `seconds`."""
    widths, batch = PHASES[phase]
    batches = 4  # in an epoch
    problem, calls = random_problem(widths, batches * batch), round(seconds / phase)
    if variant == "bare":
        return bare(workers, problem, batch, calls)
    return hogbatch(workers, problem, batch, workers * calls // batches)


def random_problem(widths: tuple[int, ...], size: int) -> Problem:
    """Random data: only speed matters."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(size, widths[0])), rng.integers(0, widths[-1], size)
    return Problem({"x": x.astype(np.float32), "y": y.astype(np.int32)}, widths, rate=0.01, target=0.0)


def hogbatch(workers: int, problem: Problem, batch: int, epochs: int, speeds: Simulation | None = None) -> float:
    """Samples/s of a Hogbatch run."""
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
    """Samples/s of one thread per device that computes the gradient of one batch repeatedly."""
    gradient = jax.jit(jax.grad(lambda params, rows: loss_fn(params, rows, None).mean()))
    first = {name: values[:batch] for name, values in problem.rows.items()}
    arguments_W = [jax.device_put((problem.params(0), first), device) for device in jax.devices()[:workers]]
    for arguments in arguments_W:
        jax.block_until_ready(gradient(*arguments))

    def repeat(arguments: tuple) -> None:
        for _ in range(calls):
            jax.block_until_ready(gradient(*arguments))

    with ThreadPoolExecutor(workers) as threads:
        began = time.perf_counter()
        list(threads.map(repeat, arguments_W))
        return workers * calls * batch / (time.perf_counter() - began)
