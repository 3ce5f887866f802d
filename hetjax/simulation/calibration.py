"""Calibration of simulated speeds: the time of a row, measured with all workers computing at once."""

from __future__ import annotations

import numpy as np

from hetjax import processes
from hetjax.data.prefetch import Rows
from hetjax.engines.session import Session
from hetjax.planning.allocation import solve
from hetjax.reduce.base import Replicas
from hetjax.sampling.order import Span
from hetjax.simulation.speeds import Simulation

_ROUNDS = 5  # after one warm-up round


def calibrate(
    simulation: Simulation, session: Session, replicas: Replicas, sample: Rows, batch: int, seed: int
) -> None:
    """Set the simulated row time from the rows and the median seconds of each worker's local phase.

    Args:
        simulation: receives the row time.
        session: engine and clocks of the run.
        replicas: parameters on the devices.
        sample: any rows; they are repeated as needed.
        batch: samples, split evenly; at most the total capacity is used.
        seed: seed of the run.
    """
    engine, workers = session.engine, session.engine.workers
    limits = engine.limits()
    samples = min(batch, int(limits.capacity_W.sum()))  # single batches of asynchronous syncs may be small
    counts_W = solve(np.zeros(limits.workers), np.ones(limits.workers), limits, samples).counts_W
    packed = engine.pack(sample, Span(0, 0, samples), counts_W, seed)
    rounds = [session.clocks.wait(engine.start(replicas, packed)) for _ in range(1 + _ROUNDS)][1:]
    rows_W = np.array([result.rows for result in rounds[0]], np.int64)
    seconds_W = np.median([[result.seconds for result in results] for results in rounds], axis=0)
    if workers.several_processes:
        gathered = processes.gather([rows_W.tolist(), seconds_W.tolist()])
        rows_W, seconds_W = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    simulation.calibrate(rows_W, seconds_W)
