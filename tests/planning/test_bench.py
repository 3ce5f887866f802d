"""In virtual time: a member that does not pay is benched, tried again, and used when it pays; nobody else is."""

from dataclasses import replace

import numpy as np
import pytest

from hetjax.planning.bench import Bench
from hetjax.planning.controllers import make
from hetjax.planning.controllers.base import Observation
from hetjax.planning.limits import Limits

BATCH, STEPS, STARTUP, EXCHANGE = 256, 500, 2e-3, 1e-2
FAST_W = np.array([1e-3, 1e-3, 1.5e-3])  # seconds per sample


def train(per_sample_W, exchange_TxW, benches, noise=0.0, rate_W=None):
    """Seconds of all steps, of a fleet whose exchange takes as long as that of its slowest member with samples."""
    workers, rng = len(per_sample_W), np.random.default_rng(7)
    limits, law = replace(Limits.plain(workers, BATCH), rate_W=rate_W), make("balanced")
    bench = Bench(np.arange(workers), "worker")
    total, before, pending, counts_TxW = [], np.nan, [], []
    draw = lambda *shape: np.exp(noise * rng.standard_normal(shape) - noise**2 / 2)
    for step in range(STEPS):
        allowed = bench.limits(BATCH, limits) if benches else limits
        counts_W = bench.planned(law.plan(BATCH, allowed)).counts_W
        used_W = counts_W > 0
        local_W = np.where(used_W, STARTUP + per_sample_W * counts_W, 0.0) * draw(4)[:workers]  # alike in every fleet
        exchange_W = exchange_TxW[min(step, len(exchange_TxW) - 1)]
        total.append(local_W.max() + exchange_W[used_W].max() * draw(1)[0])
        times_W = np.round(np.where(used_W, local_W, np.nan), 6)
        pending.append(Observation(counts_W, limits.work(counts_W), times_W, 0, step, before))
        before = total[-1]
        counts_TxW.append(counts_W)
        if len(pending) > 1:  # as in the pipeline
            law.observe(observation := pending.pop(0))
            bench.observe(observation)
    return np.array(total), np.array(counts_TxW), bench


def with_worst(exchange_T, noise=0.0, per_sample=2e-3, benches=True):
    """The fleet with a fourth member that is slow, and whose exchange takes this long in each step."""
    exchange_TxW = np.array([[*[EXCHANGE] * 3, seconds] for seconds in exchange_T])
    return train(np.append(FAST_W, per_sample), exchange_TxW, benches, noise)


def without_worst(noise=0.0):
    return train(FAST_W, np.full((1, 3), EXCHANGE), False, noise)[0]


@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("exchange", [0.02, 0.03, 0.07, 0.1])
def test_never_slower_than_without_the_worst_member(exchange, noise):
    """Over 500 steps, with the equal first plans, trials and retries, where steps take up to 70% longer with it."""
    without = without_worst(noise).sum()
    total, _, bench = with_worst([exchange], noise)
    assert total.sum() <= without / 0.99
    if with_worst([exchange], noise, benches=False)[0].sum() > 1.05 * without:
        assert list(bench.benched) == [3]
        assert "worker 3 benched: steps took" in bench.events[0]


@pytest.mark.parametrize("exchange", [0.2, 2.0])
def test_a_member_that_costs_far_more_is_left_out_as_soon_as_its_cost_is_known(exchange):
    """Step 0 warms up, and the time of step 1 is known when step 4 is planned: no rule saves the first four steps."""
    total, counts_TxW, bench = with_worst([exchange], per_sample=1e-2)
    assert list(bench.benched) == [3]
    assert np.flatnonzero(counts_TxW[:, 3]).max() <= 4  # the first timing has the counts of the first plan
    assert total[5:].sum() <= without_worst()[5:].sum() / 0.99


def test_a_lucky_step_makes_no_member_suspect():
    """Members that pay are not left out because the local phases of a single step were short."""
    for exchange in (0.01, 0.015):
        _, counts_TxW, bench = with_worst([exchange], noise=0.1)
        assert not bench.events
        assert (counts_TxW[:, :3] > 0).all()


def test_a_member_whose_exchange_recovers_is_used_again():
    _, counts_TxW, bench = with_worst([0.05] * 60 + [0.01])
    assert not bench.benched
    assert [event.split(": ")[1] for event in bench.events] == ["worker 3 benched", "worker 3 back in use"]
    assert (counts_TxW[-50:, 3] > 0).all()


@pytest.mark.parametrize("slowdown", [10, 100])
def test_an_unlike_member_costs_nothing_in_the_first_steps_where_speeds_were_measured_before(slowdown):
    """With equal first counts it would hold up two steps for as long as 10 and 100 others take."""
    per_sample_W, exchange_TxW = np.append(FAST_W, slowdown * FAST_W[-1]), np.full((1, 4), EXCHANGE)
    without = without_worst().sum()
    blind, _, _ = train(per_sample_W, exchange_TxW, True)
    assert blind.sum() > without / 0.99
    for error in (0.6, 1.0, 1.6):  # of the measured speed
        rate_W = 1.0 / per_sample_W * [1, 1, 1, error]
        total, counts_TxW, _ = train(per_sample_W, exchange_TxW, True, rate_W=rate_W)
        assert total.sum() <= without / 0.99
        assert counts_TxW[0].min() > 0  # all are timed


def test_members_that_pay_are_left_alone():
    total, _, bench = with_worst([EXCHANGE])
    assert not bench.events
    np.testing.assert_array_equal(total, with_worst([EXCHANGE], benches=False)[0])


def test_a_member_is_not_left_out_if_the_others_have_no_room():
    limits = Limits.plain(2, 8)
    bench = Bench(np.arange(2), "process")
    bench.benched[1] = "slow"
    assert bench.limits(16, limits) is limits
    assert bench.limits(8, limits).capacity_W.tolist() == [8, 0]
