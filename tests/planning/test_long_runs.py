"""`balanced` over long runs: estimates stay bounded by the timings, and idle workers are retried in time."""

from __future__ import annotations

import numpy as np
import pytest

from hetjax.planning.controllers import Balanced
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import Trace, simulate

WORKERS, BATCH, STARTUP, PER_SAMPLE = 3, 20, 40e-3, 0.1e-3  # seconds; an idle worker hardly slows the others
SLOW = 40.0


def run_long(slow_TxW):
    """Equal workers with costs times `slow_TxW`, all 40x slower in 1% of the steps; NumPy warnings are errors."""
    steps = len(slow_TxW)
    spike_TxW = np.where(np.random.default_rng(1).random((steps, 1)) < 0.01, SLOW, np.ones((1, WORKERS)))
    limits = Limits.plain(WORKERS, BATCH)
    trace = Trace("long", BATCH, STARTUP * slow_TxW, PER_SAMPLE * slow_TxW, steps, 0.1, limits, spike_TxW)
    controller = Balanced()
    with np.errstate(all="raise"):
        run = simulate(controller, trace, trace.draw(0), 1)
    return controller.state.model, run


def pauses(idle_T):
    """Lengths of the periods of idle steps."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], idle_T, [False]]).astype(int)))
    return edges[1::2] - edges[::2]


@pytest.mark.parametrize("steps", [4_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_a_worker_that_recovers_soon_gets_samples_again(steps):
    """Every 1000 steps one worker is 40x slower for d <= 30 steps, which makes it idle."""
    rng, slow_TxW = np.random.default_rng(0), np.ones((steps, WORKERS))
    for start in range(500, steps, 1000):
        slow_TxW[start : start + rng.integers(1, 31), rng.integers(WORKERS)] = SLOW
    model, run = run_long(slow_TxW)
    idle_TxW = run.counts_TxW == 0
    assert 0 < idle_TxW.sum() <= (steps // 1000) * (2 * 30 + 2 * (WORKERS - 1) * SLOW)  # 2 d + 2 M c for each
    assert max(pauses(idle_T).max(initial=0) for idle_T in idle_TxW.T) <= 1000
    assert np.all(model.startup_W <= run.times_T.max())


def test_trials_of_a_worker_that_stays_slow_take_little_of_the_time():
    steps = 3_000
    slow_TxW = np.ones((steps, WORKERS))
    slow_TxW[:, 2] = SLOW
    model, run = run_long(slow_TxW)
    idle_T = run.counts_TxW[:, 2] == 0
    trials = int((~idle_T[10:]).sum())
    assert trials >= 2
    assert 2 ** (trials - 3) * (WORKERS - 1) * 38 < steps  # the k-th pause is 2^k M c, c = 38; two trials are early
    assert pauses(idle_T).max() <= Balanced().retry * SLOW
    assert model.startup_W[2] <= run.times_T.max()
