"""How long a row takes where speeds are simulated: equal phases of all workers at once, timed with the same engine."""

from __future__ import annotations

import numpy as np

from hetjax.data.feed import Feed
from hetjax.data.source import Source
from hetjax.loop import own_span
from hetjax.plan.allocation import solve
from hetjax.plan.controllers.protocol import Plan
from hetjax.plan.sampler import Sampler
from hetjax.run.agree import gather
from hetjax.run.engines.protocol import Replicas, Rows
from hetjax.run.session import Session
from hetjax.run.simulate import Simulation

_ROUNDS = 5  # after one to warm up


def calibrate(
    simulation: Simulation, session: Session, replicas: Replicas, source: Source, batch: int, seed: int
) -> None:
    """Fix the simulated row time by the rows and the median seconds of each worker's phase."""
    engine, workers = session.engine, session.engine.workers
    sampler = Sampler(len(source), batch, shuffle=False)
    feed, limits, step = Feed(source, sampler), engine.limits(), sampler.step(0)
    samples = min(step.batch, int(limits.capacity_W.sum()))  # single batches without a barrier may be small
    counts_W = solve(np.zeros(limits.workers), np.ones(limits.workers), limits, samples).counts_W
    rows = Rows(*feed.take(step.epoch, *own_span(workers, Plan(counts_W), step)))
    packed = engine.pack(rows, step, counts_W, seed)
    feed.close()
    rounds = [session.clocks.wait(engine.start(replicas, packed)) for _ in range(1 + _ROUNDS)][1:]
    rows_W = np.array([lap.rows for lap in rounds[0]], np.int64)
    seconds_W = np.median([[lap.seconds for lap in laps] for laps in rounds], axis=0)
    if workers.several_processes:
        said = gather([rows_W.tolist(), seconds_W.tolist()])
        rows_W, seconds_W = (np.concatenate(parts) for parts in zip(*said, strict=True))
    simulation.calibrate(rows_W, seconds_W)
