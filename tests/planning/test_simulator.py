"""The simulator: delays, noise, and the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from hetjax.planning.controllers import make
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import Trace, best_times, simulate


def two_workers(steps=8, noise=0.0, spike_TxW=None):
    """Worker 1 is 3x slower from step 4 on."""
    per_work_TxW = np.ones((steps, 2))
    per_work_TxW[4:, 1] = 3.0
    return Trace("two", 16, np.zeros((steps, 2)), per_work_TxW, steps, noise, Limits.plain(2, 16), spike_TxW)


@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_timing_reaches_the_first_plan_after_its_delay(delay):
    trace = two_workers()
    run = simulate(make("dbs", every=1), trace, trace.draw(0), delay)
    changed = np.flatnonzero(run.changed_T)
    assert changed[0] == 4 + 1 + delay  # slow in step 4, timed in step 4, seen `delay` steps later
    assert run.counts_TxW[changed[0]].tolist() == [12, 4]
    assert run.times_T[4] == 24.0


def test_the_oracle_follows_a_change_at_once_or_after_its_staleness():
    trace = two_workers()
    counts_TxW, time_T = best_times(trace)
    assert counts_TxW[3].tolist() == [8, 8]
    assert counts_TxW[4].tolist() == [12, 4]
    assert time_T[4] == 12.0
    assert best_times(trace, staleness=1)[1][4:6].tolist() == [24.0, 12.0]
    run = simulate(make("oracle", costs=trace.costs), trace, trace.draw(0), 1)
    assert run.counts_TxW.tolist() == counts_TxW.tolist()


def test_noise_has_mean_one_is_reproducible_and_is_multiplied_by_the_spikes():
    spike_TxW = np.ones((20_000, 2))
    spike_TxW[7, 1] = 5.0
    trace = two_workers(20_000, 0.2, spike_TxW)
    eps_TxW = trace.draw(3)
    assert eps_TxW.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(eps_TxW).std() == pytest.approx(0.2, rel=0.02)
    np.testing.assert_array_equal(eps_TxW, trace.draw(3))
    assert eps_TxW[7, 1] == 5.0 * two_workers(20_000, 0.2).draw(3)[7, 1]
