"""How long a row takes where speeds are simulated: equal phases of all workers at once, timed with the same engine."""

from __future__ import annotations

import numpy as np

from hetjax.data.prefetch import Rows
from hetjax.engines.session import Session
from hetjax.fleet.agree import gather
from hetjax.planning.allocation import solve
from hetjax.reduce.base import Replicas
from hetjax.sampling.order import Span
from hetjax.simulation.speeds import Simulation

_ROUNDS = 5  # after one to warm up


def calibrate(
    simulation: Simulation, session: Session, replicas: Replicas, sample: Rows, batch: int, seed: int
) -> None:
    """Fix the simulated row time by the rows and the median seconds of each worker's phase.

    Args:
        sample: any rows; they are repeated as often as it takes.
        batch: the samples to share out evenly, or what the workers can take if that is less.
    """
    engine, workers = session.engine, session.engine.workers
    limits = engine.limits()
    samples = min(batch, int(limits.capacity_W.sum()))  # single batches without a barrier may be small
    counts_W = solve(np.zeros(limits.workers), np.ones(limits.workers), limits, samples).counts_W
    packed = engine.pack(sample, Span(0, 0, samples), counts_W, seed)
    rounds = [session.clocks.wait(engine.start(replicas, packed)) for _ in range(1 + _ROUNDS)][1:]
    rows_W = np.array([lap.rows for lap in rounds[0]], np.int64)
    seconds_W = np.median([[lap.seconds for lap in laps] for laps in rounds], axis=0)
    if workers.several_processes:
        gathered = gather([rows_W.tolist(), seconds_W.tolist()])
        rows_W, seconds_W = (np.concatenate(parts) for parts in zip(*gathered, strict=True))
    simulation.calibrate(rows_W, seconds_W)
