"""Do the threads of hogbatch run in parallel? Two equal workers against one, with simulated and with real speeds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
from async_problems import Problem, loss_fn

from hetjax import Simulation, Trainer
from hetjax.data import MemorySource
from hetjax.run.simulate import constant
from hetjax.sync import Hogbatch


def speed_up(simulated: bool) -> float:
    """Samples per second of two equal workers over one's. With real speeds every worker has a core."""
    rates = [throughput(workers, True) if simulated else own_process(workers) for workers in (1, 2)]
    return rates[1] / rates[0]


def throughput(workers: int, simulated: bool) -> float:
    """Of hogbatch with equal workers, in phases of 0.2 s (simulated) or 0.04 s, beside which an update is short."""
    rng, widths = np.random.default_rng(0), (64, 32, 10) if simulated else (256, 256, 256, 10)
    batch, size = (512, 4096) if simulated else (4096, 32768)
    rows = {"x": rng.normal(size=(size, widths[0])).astype(np.float32), "y": rng.integers(0, 10, size).astype(np.int32)}
    speeds = Simulation(constant([1.0] * workers), row_time=4e-4) if simulated else None
    with Trainer(
        loss_fn,
        optax.sgd(0.01),
        batch_size=batch,
        devices=jax.devices()[:workers],
        speeds=speeds,
        sync=Hogbatch(batches=batch, smallest=batch),
    ) as trainer:
        state = trainer.init(Problem(rows, widths, 0.01, 0.0).params(0))
        _, history = trainer.fit(state, MemorySource(rows), epochs=workers * (1 if simulated else 12))
    return history.samples_per_s(skip=workers)


def own_process(workers: int) -> float:
    """The throughput on as many cores as there are workers: otherwise XLA gives one worker all of them."""
    cores = sorted(os.sched_getaffinity(0))[:workers]
    if len(cores) < workers:
        return float("nan")
    pinned = f"import os; os.sched_setaffinity(0, {cores}); import async_speed_up as here"
    command = [sys.executable, "-c", f"{pinned}; print(here.throughput({workers}, False))"]
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={workers}"}
    folder = Path(__file__).resolve().parent
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    return float(done.stdout.split()[-1])
