"""`balanced`: settles fast, keeps its counts in noise, recovers from disturbances, and resumes exactly."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planning.allocation import solve, within_reach
from hetjax.planning.controllers import Balanced, Observation, make
from hetjax.planning.controllers.balanced import _LOOKS
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed
from hetjax.planning.simulator import Trace, best_times, simulate


def constant(rates, *, steps, noise=0.05, batch=512, share=0.05):
    rate_W = np.asarray(rates, float)
    limits = Limits.plain(len(rate_W), batch)
    startup = share * batch / rate_W.sum()
    return Trace("constant", batch, np.full((1, len(rate_W)), startup), 1.0 / rate_W[None], steps, noise, limits)


def slowed(trace, worker, factor, at, until=None):
    factor_TxW = np.ones((trace.steps, trace.workers))
    factor_TxW[at:until, worker] = factor
    return replace(trace, startup_TxW=trace.startup_TxW * factor_TxW, per_work_TxW=trace.per_work_TxW * factor_TxW)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(
    ("rates", "seed"), [((1, 1), 0), ((3, 2, 1.5, 1), 1), ((10, 6, 3, 1), 0), ((6, 6, 5, 5, 2, 2, 1, 1), 1)]
)
def test_settles_in_two_changes_and_then_keeps_its_counts(rates, delay, seed):
    trace = constant(rates, steps=600)
    run = simulate(make("balanced"), trace, trace.draw(seed), delay)
    unsettled_T = np.flatnonzero(run.mean_times_T > 1.05 * best_times(trace)[1])
    settled = unsettled_T[-1] + 1 if len(unsettled_T) else 0
    assert run.changed_T[: settled + 1].sum() <= 2
    assert run.changed_T.sum() <= 4  # the first timings, and three reviews
    assert run.changed_T[12:].sum() <= 2
    assert run.changed_T[200:].sum() == 0


@pytest.mark.parametrize("seed", range(6))
def test_at_most_two_changes_in_200_steps_of_noisy_but_constant_workers(seed):
    trace = constant((4, 2, 1, 1), steps=210, noise=0.1)
    run = simulate(make("balanced"), trace, trace.draw(seed), 1)
    assert run.changed_T[10:].sum() <= 2


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_recovers_from_a_worker_that_becomes_twice_as_slow(delay, seed):
    trace = slowed(constant((3, 2, 1.5, 1), steps=160), seed % 4, 2.0, 150)
    run = simulate(make("balanced"), trace, trace.draw(seed), delay)
    good_T = run.mean_times_T <= 1.1 * best_times(trace)[1]
    assert good_T[155]


@pytest.mark.parametrize(
    ("worker", "factor", "delay"),
    [
        pytest.param(worker, factor, delay, marks=[] if (worker + k + delay) % 2 else pytest.mark.slow)
        for worker in range(4)
        for k, factor in enumerate([1.3, 2.0, 8.0])
        for delay in (0, 1)
    ],
)
def test_a_single_strange_step_changes_nothing(worker, factor, delay):
    trace = slowed(constant((4, 2, 1, 1), steps=160, noise=0.03), worker, factor, 150, 151)
    run = simulate(make("balanced"), trace, trace.draw(0), delay)
    assert run.changed_T[150:].sum() == 0


def test_where_disturbances_last_they_are_followed_sooner():
    trace = constant((4, 2, 1, 1), steps=400, noise=0.02)
    for at in range(150, 400, 50):
        trace = slowed(trace, 0, 2.0, at, at + 25)
    run = simulate(make("balanced"), trace, trace.draw(0), 0)
    first, last = (int(np.argmax(run.changed_T[at:])) for at in (150, 350))
    assert 0 < last < first


def test_a_repeated_swap_of_the_fastest_and_the_slowest_is_followed_within_two_steps():
    trace = constant((4, 2, 1, 1), steps=260, noise=0.05)
    for at in (150, 210):
        trace = slowed(slowed(trace, 0, 4.0, at, at + 30), 3, 0.25, at, at + 30)
    run = simulate(make("balanced"), trace, trace.draw(0), 1)
    first, *repeated = (int(np.argmax(run.changed_T[at:])) for at in (150, 180, 210, 240))
    assert max(repeated) <= 2 <= first  # a timing takes two steps to reach a plan


@pytest.mark.parametrize("seed", range(4))
def test_two_workers_slow_for_three_steps_change_nothing(seed):
    """As measured on real machines, with their noise."""
    trace = slowed(slowed(constant((4, 2, 1, 1), steps=200, noise=0.08), 2, 1.6, 150, 153), 1, 1.6, 150, 153)
    run = simulate(make("balanced"), trace, trace.draw(seed), 1)
    assert run.changed_T[150:].sum() == 0


@pytest.mark.parametrize(
    ("worker", "length"),
    [
        pytest.param(worker, length, marks=[] if (worker + k) % 2 else pytest.mark.slow)
        for worker in range(4)
        for k, length in enumerate([8, 20, 50])
    ],
)
def test_after_a_disturbance_the_counts_are_those_before(worker, length):
    trace = slowed(constant((4, 2, 1, 1), steps=300, noise=0.04), worker, 2.0, 150, 150 + length)
    run = simulate(make("balanced"), trace, trace.draw(0), 1)
    assert np.any(run.counts_TxW[150 + length - 1] != run.counts_TxW[149])
    assert np.all(run.counts_TxW[150 + length + 4 :] == run.counts_TxW[149])


def test_without_noise_the_first_timing_gives_the_best_plan():
    trace = constant((4, 2, 1, 1), steps=30, noise=0.0, share=0.0)
    run = simulate(make("balanced"), trace, trace.draw(0), 1)
    assert run.counts_TxW[0].tolist() == run.counts_TxW[1].tolist() == [128, 128, 128, 128]
    assert run.mean_times_T[2] <= 1.05 * best_times(trace)[1][2]


def drive(controller, limits, batches, rng, rates, lost=0.0):
    """Plan and observe as the trainer does, with a delay of one step and lost timings."""
    plans, pending = [], []
    for step, batch in enumerate(batches):
        plan = controller.plan(batch, limits, step // 20)
        plans.append(plan)
        times_W = np.where(plan.counts_W > 0, plan.counts_W / rates * np.exp(0.05 * rng.standard_normal(len(rates))), 0)
        times_W = np.where(rng.random(len(rates)) < lost, np.nan, np.round(times_W, 6))
        pending.append(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, step // 20, step))
        if len(pending) > 1:
            controller.observe(pending.pop(0))
    return plans


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_every_plan_satisfies_the_limits(seed):
    """With changing limits, short steps, new batches and lost timings."""
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(1, 6))
    rates = rng.uniform(0.1, 10, workers)
    controller = make(str(rng.choice(["balanced", "equal", "static"])))
    pending: list[Observation] = []
    batch = 128
    for step in range(60):
        if step % 10 == 0:
            rung, quantum = int(rng.choice([1, 8, 16])), int(rng.choice([1, 4, 16]))
            capacity = int(rng.choice([64, 128])) * 2
            stair = np.ceil(np.arange(capacity + 1) / rung) * rung
            limits = Limits(
                rng.permutation(np.append(np.full(workers - 1, capacity // 2), capacity)),
                np.zeros(workers, np.int64), quantum, np.zeros(workers, np.int64), (stair,),
            )  # fmt: skip
            batch = int(rng.choice([128, 100, 64]))
        now = int(rng.integers(1, batch)) if step % 7 == 6 else batch
        plan = controller.plan(now, limits, step // 7)
        assert allowed(plan.counts_W, limits, now), f"seed {seed} step {step}: {plan}"
        times_W = np.where(rng.random(workers) < 0.1, np.nan, plan.counts_W / rates * rng.uniform(0.5, 2, workers))
        pending.append(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, 0, step))
        if len(pending) > 1:
            controller.observe(pending.pop(0))


@pytest.mark.parametrize("seed", range(2))
def test_the_short_last_step_of_an_epoch_changes_nothing(seed):
    rates, limits = np.array([300.0, 200.0, 100.0]), Limits.plain(3, 256)
    batches = ([256] * 19 + [37]) * 20
    plans = drive(make("balanced"), limits, batches, np.random.default_rng(seed), rates)
    assert all(plan.counts_W.sum() == batch for plan, batch in zip(plans, batches, strict=True))
    assert not any(plan.changed for plan, batch in zip(plans, batches, strict=True) if batch == 37)
    assert sum(plan.changed for plan in plans) <= 4  # the first timings, and three reviews
    assert not any(plan.changed for plan in plans[80:])
    full = [plan.counts_W for plan, batch in zip(plans, batches, strict=True) if batch == 256]
    np.testing.assert_allclose(full[-1], 256 * rates / 600, atol=6)


def test_a_batch_that_stays_smaller_becomes_the_full_batch():
    controller, limits = make("balanced"), Limits.plain(2, 100)
    rng, rates = np.random.default_rng(0), np.array([3.0, 1.0])
    plans = drive(controller, limits, [100] * 10 + [60] * 10, rng, rates)
    assert controller.state.usual == 60
    assert plans[-1].counts_W.sum() == 60


@pytest.mark.parametrize("name", ["equal", "static", "balanced"])
def test_resuming_is_bit_identical(name):
    limits, rates = Limits.plain(4, 256), np.array([30.0, 20.0, 10.0, 1.0])
    whole, part = make(name), make(name)
    rng = np.random.default_rng(3)
    pending: list[Observation] = []
    for step in range(150):
        batch = 100 if step % 20 == 19 else 256
        expected, plan = whole.plan(batch, limits, step // 20), part.plan(batch, limits, step // 20)
        assert expected.counts_W.tolist() == plan.counts_W.tolist()
        assert (expected.changed, expected.reason) == (plan.changed, plan.reason)
        factor = 2.0 if 60 <= step < 90 else 1.0
        times_W = plan.counts_W / rates * np.array([factor, 1, 1, 1]) * np.exp(0.1 * rng.standard_normal(4))
        pending.append(Observation(plan.counts_W, limits.work(plan.counts_W), np.round(times_W, 6), 0, step))
        if len(pending) > 1:
            seen = pending.pop(0)
            whole.observe(seen)
            part.observe(seen)
        if step % 11 == 0:
            saved = json.loads(json.dumps(part.state_dict(), allow_nan=False))
            part = make(name)
            part.load_state_dict(saved)


@pytest.mark.parametrize("noise", [0.05, 0.1, 1.0])
def test_reviews_are_skipped_in_noise_except_the_last(noise):
    """Of 8 workers the worst mean of n timings is off by about sqrt(2 ln 8) noise / sqrt(n)."""
    controller = make("balanced")
    controller._reset(8)
    controller.state.model.noise = noise
    due = []
    for controller.state.calm in range(1, 200):
        if controller._review_due():
            due.append(controller.state.calm)
    good = [calm for calm in _LOOKS if np.sqrt(2 * np.log(8) / calm) * noise <= controller.polish]
    assert due == sorted({*good, _LOOKS[-1]})


def test_a_disturbance_that_passed_leaves_no_trace_even_if_saved_in_between():
    def calm_and_looks(disturbed_at):
        limits, rates, controller = Limits.plain(4, 256), np.array([30.0, 20.0, 10.0, 8.0]), make("balanced")
        seen = []
        for step in range(60):
            plan = controller.plan(256, limits)
            seen.append((controller.state.calm, controller.state.looks))
            factor = 9.0 if step == disturbed_at else 1.0
            times_W = np.round(plan.counts_W / rates * np.array([factor, 1, 1, 1]), 6)
            controller.observe(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, 0, step))
            saved = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
            controller = make("balanced")
            controller.load_state_dict(saved)
        return seen

    undisturbed, disturbed = calm_and_looks(None), calm_and_looks(50)
    assert disturbed[51][0] == 0
    assert disturbed[:51] == undisturbed[:51]
    assert disturbed[52:] == undisturbed[52:]


def test_fields_that_a_state_of_an_older_version_lacks_start_fresh():
    old, new = make("balanced"), make("balanced")
    drive(old, Limits.plain(4, 64), [64] * 10, np.random.default_rng(0), np.array([4.0, 3, 2, 1]))
    saved = old.state_dict()
    del saved["looks"], saved["looks_before"], saved["model"]["common"]
    new.load_state_dict(saved)
    assert new.plan(64, Limits.plain(4, 64)).counts_W.tolist() == old.plan(64, Limits.plain(4, 64)).counts_W.tolist()


def test_a_state_for_other_workers_is_reset_and_one_of_another_controller_is_rejected():
    four, eight = make("balanced"), make("balanced")
    drive(four, Limits.plain(4, 64), [64] * 10, np.random.default_rng(0), np.array([4.0, 3, 2, 1]))
    eight.load_state_dict(four.state_dict())
    assert eight.plan(64, Limits.plain(8, 64)).counts_W.tolist() == [8] * 8
    with pytest.raises(ValueError, match="belongs to controller 'balanced', this one is 'equal'"):
        make("equal").load_state_dict(four.state_dict())


def test_finer_stairs_are_used_once_available():
    coarse = Limits(
        np.full(2, 128), np.zeros(2, np.int64), 1, np.zeros(2, np.int64), (np.ceil(np.arange(129) / 64) * 64,)
    )
    fine = replace(coarse, stairs=(np.ceil(np.arange(129) / 8) * 8,))
    controller, rates = make("balanced"), np.array([300.0, 100.0])
    for step in range(60):
        limits = coarse if step < 30 else fine
        plan = controller.plan(128, limits)
        work_W = limits.work(plan.counts_W)
        controller.observe(Observation(plan.counts_W, work_W, work_W / rates, 0, step))
    assert plan.counts_W.tolist() == [96, 32]


def test_an_idle_worker_is_retried_and_used_once_it_has_recovered():
    controller, limits = make("balanced"), Limits.plain(2, 8)
    idle_steps, trials = 0, 0
    for step in range(3000):
        plan = controller.plan(8, limits)
        slow = 12.0 if step < 2000 else 1.0
        times_W = np.where(plan.counts_W > 0, plan.counts_W * np.array([1.0, slow]), 0.0)
        controller.observe(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, 0, step))
        if 10 < step < 2000:
            idle_steps += plan.counts_W[1] == 0
            trials += plan.counts_W[1] > 0
    assert idle_steps > 1950
    assert 1 <= trials <= 20
    assert plan.counts_W.tolist() == [4, 4]


def test_a_worker_that_lost_all_samples_to_one_strange_timing_gets_them_back():
    controller, limits = make("balanced"), Limits.plain(2, 8)
    for step in range(60):
        plan = controller.plan(8, limits)
        times_W = plan.counts_W * np.array([1.0, 1000.0 if step == 40 else 1.0])
        controller.observe(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, 0, step))
    assert plan.counts_W.tolist() == [4, 4]


def test_a_worker_50x_slower_does_not_hold_up_the_others():
    trace = constant((1, 1, 1, 0.02), steps=200)
    run = simulate(Balanced(), trace, trace.draw(0), 1)
    assert np.all(run.mean_times_T[2:] <= 1.25 * best_times(trace)[1][2:])


@pytest.mark.parametrize("quantum", [1, 4])
def test_the_bound_that_screens_the_solver_never_hides_a_gain(quantum):
    for seed in range(40):
        rng = np.random.default_rng(seed)
        workers = int(rng.integers(1, 9))
        stair = np.concatenate([[0.0], np.cumsum(rng.choice([0.0, 1.0, 3.0], 200))])
        kind_W = np.zeros(workers, np.int64)
        limits = Limits(np.full(workers, 200), np.zeros(workers, np.int64), quantum, kind_W, (stair,))
        costs = rng.random(workers) * 20, rng.random(workers) + 0.01
        controller = Balanced()
        controller.state.usual = int(rng.integers(1, 200 * workers))
        best = solve(*costs, limits, controller.state.usual)
        assert controller._within_reach(costs, limits, best.time * (1 + 1e-12)), f"seed {seed}"
        if controller.state.usual % quantum == 0:
            assert not within_reach(*costs, limits, controller.state.usual, np.nextafter(best.time, 0)), f"seed {seed}"


def test_unknown_names_are_explained():
    with pytest.raises(ValueError, match=r"no controller 'best'; choose one of balanced, "):
        make("best")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_one_noisy_worker_among_quiet_ones_is_not_mistaken_for_a_changing_one(seed):
    trace = constant((3, 2, 1.5, 1), steps=1000)
    sd_W = np.array([0.03, 0.03, 0.03, 0.2])
    normal_TxW = np.random.default_rng(seed).standard_normal((trace.steps, 4))
    run = simulate(make("balanced"), trace, np.exp(sd_W * normal_TxW - 0.5 * sd_W * sd_W), 1)
    assert run.changed_T[200:].sum() <= 5


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_wrong_prices_do_not_cause_many_changes(seed):
    """True times deviate by up to 10% from the staircase, at random for every 16 samples and worker."""
    rng = np.random.default_rng(seed)
    limits, rates, controller = Limits.plain(4, 512), np.array([3.0, 2.0, 1.5, 1.0]), make("balanced")
    error_WxK = rng.uniform(-0.1, 0.1, (4, 33))
    pending: list[Observation] = []
    changes, slowest = 0, []
    for step in range(600):
        plan = controller.plan(512, limits)
        changes += plan.changed
        mean_W = plan.counts_W / rates * (1 + error_WxK[np.arange(4), plan.counts_W // 16])
        times_W = np.round(mean_W * np.exp(0.05 * rng.standard_normal(4)), 6)
        pending.append(Observation(plan.counts_W, limits.work(plan.counts_W), times_W, 0, step))
        if len(pending) > 1:
            controller.observe(pending.pop(0))
        slowest.append(mean_W.max())
    assert changes <= 20
    assert np.mean(slowest[300:]) <= 1.1 * 512 / rates.sum()
