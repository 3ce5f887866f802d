"""Steps of several buckets under one controller: one cost model, and counts for each bucket."""

from itertools import pairwise

import numpy as np
import pytest

from hetjax.planning import controllers
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Observation
from hetjax.planning.limits import Limits

SHARES, BATCH = (1.0, 0.5, 0.25, 0.125), 64
SPEED_W, STARTUP_W = np.array([1.0, 0.6, 0.3, 0.1]), np.array([0.0, 0.004, 0.001, 0.02])
PER_WORK_W = 1e-3 / SPEED_W


def limits_of(bucket):
    """The work of a sample is its share of the longest; a step of the shortest is dominated by the startups."""
    stair = SHARES[bucket] * np.arange(BATCH + 1, dtype=np.float64)
    return Limits(np.full(4, BATCH), np.zeros(4, np.int64), 1, np.zeros(4, np.int64), (stair,), bucket)


LIMITS = [limits_of(bucket) for bucket in range(len(SHARES))]


def run(controller, steps, batches=(BATCH,) * 4, noise=0.05):
    """Buckets at random; the plan of a step is made after the observation of the last but one."""
    rng, late, rows = np.random.default_rng(0), [], []
    for step in range(steps):
        bucket = int(rng.integers(len(SHARES)))
        limits, batch = LIMITS[bucket], batches[bucket]
        counts_W = controller.plan(batch, limits).counts_W
        assert counts_W.sum() == batch
        work_W = limits.work(counts_W)
        expected_W = np.where(counts_W > 0, STARTUP_W + PER_WORK_W * work_W, 0.0)
        times_W = np.round(expected_W * rng.lognormal(0, noise, 4), 6)
        best = solve(STARTUP_W, PER_WORK_W, limits, batch).time
        rows.append((bucket, counts_W, expected_W.max(), best))
        late.append(Observation(counts_W, work_W, np.where(counts_W > 0, times_W, np.nan), 0, step))
        if len(late) > 1:
            controller.observe(late.pop(0))
    return rows


@pytest.mark.parametrize("batches", [(64, 64, 64, 64), (8, 16, 32, 64)], ids=["samples", "tokens"])
def test_every_bucket_gets_counts_close_to_the_best(batches):
    rows = run(controllers.make("balanced"), 300, batches)[60:]
    reached = sum(best for *_, best in rows) / sum(time for _, _, time, _ in rows)
    assert reached > 0.93
    for bucket in range(len(SHARES)):  # counts are kept from step to step of a bucket, whatever comes in between
        mine = [counts_W for k, counts_W, *_ in rows if k == bucket]
        changes = sum(not np.array_equal(a, b) for a, b in pairwise(mine))
        assert changes <= len(mine) // 4


def test_a_saved_state_goes_on_with_any_bucket():
    controller = controllers.make("balanced")
    run(controller, 50)
    restored = controllers.make("balanced")
    restored.load_state_dict(controller.state_dict())
    for limits in LIMITS:
        counts_W = restored.plan(BATCH, limits).counts_W
        time = np.where(counts_W > 0, STARTUP_W + PER_WORK_W * limits.work(counts_W), 0.0).max()
        assert time < 1.3 * solve(STARTUP_W, PER_WORK_W, limits, BATCH).time
