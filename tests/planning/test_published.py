"""The published laws and the baselines on hand-computed numbers, and the bias of the faithful forms."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hetjax.planning.controllers import Observation, make
from hetjax.planning.limits import Limits
from hetjax.sampling.shards import ProportionalSampler


def observe(controller, counts, times, step=0, epoch=0):
    counts_W = np.array(counts)
    controller.observe(Observation(counts_W, counts_W.astype(float), np.array(times, float), epoch, step))


def replay(controller, times_of_steps, batch, workers, epoch_of=lambda step: step):
    """Plan and observe the given times without delay; return the counts of every step."""
    limits, seen = Limits.plain(workers, batch), []
    for step, times in enumerate(times_of_steps):
        plan = controller.plan(batch, limits, epoch_of(step))
        seen.append(plan.counts_W.tolist())
        observe(controller, plan.counts_W, times, step, epoch_of(step))
    return [*seen, controller.plan(batch, limits, epoch_of(len(seen))).counts_W.tolist()]


def test_dbs_by_hand():
    """p = (1/4 ...), t = (1, 2, 4, 4): p/t = 1/4 1/8 1/16 1/16 -> 1/2 1/4 1/8 1/8; the same times again halve twice."""
    counts = replay(make("dbs"), [[1, 2, 4, 4], [1, 1, 1, 1], [2, 1, 1, 1]], 64, 4)
    # Third: p/t = 16, 16, 8, 8 of 48 -> 21.33, 21.33, 10.67, 10.67: floors 21 21 10 10, the two 0.67 get one more each.
    assert counts == [[16, 16, 16, 16], [32, 16, 8, 8], [32, 16, 8, 8], [21, 21, 11, 11]]


def test_dbs_never_starves_a_worker():
    counts = replay(make("dbs"), [[1, 1000], [1, 1000]], 16, 2)
    assert counts[-1] == [15, 1]


def test_dp_keeps_real_valued_shares():
    """B = 10: t = (1, 2) -> p = 2/3, 1/3, b = 7, 3; equal times leave p unchanged although b / B is 0.7."""
    controller = make("dp")
    assert replay(controller, [[1, 2], [1, 1]], 10, 2) == [[5, 5], [7, 3], [7, 3]]
    np.testing.assert_allclose(controller.state.share_W, [2 / 3, 1 / 3])


def test_with_a_startup_dp_converges_to_equal_times():
    """t = 0.1 n on worker 0 and t = 1 + 0.1 n on worker 1: equal times at 55 and 45 samples."""
    controller, limits = make("dp"), Limits.plain(2, 100)
    seen = []
    for step in range(12):
        counts_W = controller.plan(100, limits, step).counts_W
        observe(controller, counts_W, [0.1 * counts_W[0], 1.0 + 0.1 * counts_W[1]], step, step)
        seen.append(int(counts_W[1]))
    assert seen[:2] == [50, 45]
    assert seen[-1] == 45


def test_faithful_dp_floors_and_averages_the_means():
    controller, limits = make("dp", faithful=True), Limits.plain(2, 10)
    first = controller.plan(10, limits)
    np.testing.assert_allclose(first.weights_W, [1.0, 1.0])
    observe(controller, first.counts_W, [1.0, 4.0])  # p = 0.8, 0.2
    second = controller.plan(10, limits, epoch=1)
    assert second.counts_W.tolist() == [8, 2]
    np.testing.assert_allclose(second.weights_W, [10 / (2 * 8), 10 / (2 * 2)])


def test_the_faithful_weights_are_biased_and_the_default_is_not():
    """Worker 0 holds samples of gradient 0, worker 1 of gradient 1: the true mean is the second worker's share."""
    limits = Limits.plain(2, 10)
    step = {}
    for name in ("dp", "edp", "dbs"):
        for faithful in (False, True):
            controller = make(name, faithful=faithful)
            observe(controller, controller.plan(10, limits).counts_W, [1.0, 4.0])
            plan = controller.plan(10, limits, epoch=1)
            sums_W = np.array([0.0, float(plan.counts_W[1])])
            weights_W = np.ones(2) if plan.weights_W is None else plan.weights_W
            step[name, faithful] = float((weights_W * sums_W).sum() / plan.counts_W.sum())
    assert step["dp", False] == step["edp", False] == step["dbs", False] == pytest.approx(0.2)
    assert step["dp", True] == pytest.approx(0.5)  # the mean of worker means, whatever their size
    assert step["edp", True] == pytest.approx(0.1)  # divided by N = 2 once more
    assert step["dbs", True] == pytest.approx(0.2)


def test_faithful_dbs_weights_the_short_step_like_a_full_one():
    controller, limits = make("dbs", faithful=True), Limits.plain(2, 10)
    observe(controller, controller.plan(10, limits).counts_W, [1.0, 4.0])
    controller.plan(10, limits, epoch=1)
    short = controller.plan(3, limits, epoch=1)
    assert short.counts_W.tolist() == [2, 1]
    np.testing.assert_allclose(short.weights_W, [3 * 0.8 / 2, 3 * 0.2 / 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("dp", [0.5, 0.5]), ("edp", [0.4, 0.1]), ("dbs", [0.8, 0.2])],  # a_i of g = sum_i a_i g_i with p = 0.8, 0.2
)
def test_faithful_weights_follow_the_counts_of_each_step(name, expected):
    """Steps of a proportional partition differ from the plan by a sample; every one of them must weigh alike."""
    limits, controller = Limits.plain(2, 10), make(name, faithful=True)
    observe(controller, controller.plan(10, limits).counts_W, [1.0, 4.0])
    sampler = ProportionalSampler(47, 10, seed=1)
    cursor, seen = 47, set()
    while cursor < 2 * 47:
        span, plan = sampler.next(cursor, lambda batch, epoch: controller.plan(10, limits, epoch))
        cursor += span.stop - span.start
        saved, sampler = sampler.state_dict(cursor), ProportionalSampler(47, 10, seed=1)  # a resumed run weighs alike
        sampler.load_state_dict(json.loads(json.dumps(saved)), cursor)
        seen.add(tuple(plan.counts_W))
        np.testing.assert_allclose(plan.weights_W * plan.counts_W / plan.counts_W.sum(), expected, rtol=1e-12)
    assert len(seen) > 1


def test_proportional_by_hand():
    """b = 8, 8; t = 1, 3: mean 2, b mean / t = 16, 5.33, scaled to sum 16: 12, 4. Then equal times: no change."""
    controller = make("proportional", every=1)
    assert replay(controller, [[1, 3], [1.5, 1.5], [1.5, 1.45]], 16, 2) == [[8, 8], [12, 4], [12, 4], [12, 4]]
    assert replay(make("proportional", every=2), [[1, 3], [1, 3]], 16, 2) == [[8, 8], [8, 8], [12, 4]]


def test_lbbsp_moves_a_step_and_halves_it_on_oscillation():
    controller = make("lbbsp", every=1, delta=4)
    times = [[3, 1], [2, 1], [1, 2], [1, 2], [1, 2], [1, 2]]
    # 4 from the slow to the fast twice; then the roles swap: 2 back, and the window grows to 2 steps.
    assert replay(controller, times, 32, 2) == [
        [16, 16], [12, 20], [8, 24], [10, 22], [10, 22], [12, 20], [12, 20],
    ]  # fmt: skip
    assert (controller.state.delta, controller.state.window) == (2, 2)


def test_lbb_holds_nudges_and_solves_by_the_imbalance():
    controller, limits = make("lbb", warm_up=0, cool_down=3, memory=0.0), Limits.plain(2, 40)
    controller.plan(40, limits)
    observe(controller, [20, 20], [1.0, 3.0])
    assert controller.plan(40, limits).counts_W.tolist() == [30, 10]  # rates 20 and 6.7
    observe(controller, [30, 10], [1.5, 1.47])
    assert controller.plan(40, limits).counts_W.tolist() == [30, 10]  # 2%: hold
    observe(controller, [30, 10], [1.5, 1.35])
    assert controller.plan(40, limits).counts_W.tolist() == [29, 11]  # 10.5%: one sample
    observe(controller, [29, 11], [1.0, 3.0])
    assert controller.plan(40, limits).counts_W.tolist() == [36, 4]  # 100%, cooled down: 1.24 s and 1.09 s


def test_lbb_finds_the_startup_in_its_warm_up():
    controller, limits = make("lbb"), Limits.plain(2, 100)
    for step in range(30):
        counts_W = controller.plan(100, limits).counts_W
        observe(controller, counts_W, [0.01 * counts_W[0], 0.3 + 0.01 * counts_W[1]], step)
    assert counts_W.tolist() == [65, 35]


def test_static_probes_once():
    assert replay(make("static"), [[1, 3], [3, 1], [9, 1]], 16, 2) == [[8, 8], [12, 4], [12, 4], [12, 4]]
    assert make("fixed", shares=[3, 1]).plan(16, Limits.plain(2, 16)).counts_W.tolist() == [12, 4]
    with pytest.raises(ValueError, match="Got 2 shares for 3 workers"):
        make("fixed:3,1").plan(16, Limits.plain(3, 16))


def test_oracle_follows_the_true_costs_with_its_staleness():
    costs = lambda step: (np.zeros(2), np.array([1.0, 1.0 if step < 2 else 3.0]))
    limits = Limits.plain(2, 16)
    prompt, stale = make("oracle", costs=costs), make("oracle", costs=costs, staleness=1)
    assert [prompt.plan(16, limits).counts_W.tolist() for _ in range(4)] == [[8, 8], [8, 8], [12, 4], [12, 4]]
    assert [stale.plan(16, limits).counts_W.tolist() for _ in range(4)] == [[8, 8], [8, 8], [8, 8], [12, 4]]


@pytest.mark.parametrize("name", ["dp", "edp", "dbs", "proportional"])
def test_cadence(name):
    limits = Limits.plain(2, 16)
    for every, first_change in ((1, 1), (5, 5), ("epoch", 20)):
        controller, counts = make(name, every=every), []
        for step in range(30):
            counts_W = controller.plan(16, limits, step // 20).counts_W
            counts.append(counts_W.tolist())
            observe(controller, counts_W, [counts_W[0], 3.0 * counts_W[1]], step)
        assert counts.index([12, 4]) == first_change, (name, every)
    for every in (0, True, 2.5, "x"):
        with pytest.raises((ValueError, TypeError), match="every, if not 'epoch', is"):
            make(name, every=every)


@pytest.mark.parametrize("name", ["dp", "edp", "dbs", "proportional", "lbbsp", "lbb", "static"])
def test_lost_timings_short_steps_limits_and_resuming(name):
    """Counts satisfy the limits, and a run resumed from JSON in every step equals one that is not."""
    rng = np.random.default_rng(5)
    whole, part = make(name), make(name)
    for step in range(80):
        quantum = 1 if step < 40 else 4
        capacity = 64 if step < 60 else 40
        limits = Limits.plain(4, capacity, quantum=quantum)
        batch = 30 if step % 10 == 9 else 64
        plan = whole.plan(batch, limits, step // 10)
        again = part.plan(batch, limits, step // 10)
        assert plan.counts_W.tolist() == again.counts_W.tolist()
        assert plan.counts_W.sum() == batch
        assert np.all(plan.counts_W <= capacity)
        times_W = plan.counts_W / [4, 3, 2, 1] * np.exp(0.1 * rng.standard_normal(4))
        times_W[rng.random(4) < 0.2] = np.nan
        observe(whole, plan.counts_W, times_W, step, step // 10)
        observe(part, plan.counts_W, times_W, step, step // 10)
        saved = json.loads(json.dumps(part.state_dict(), allow_nan=False))
        part = make(name)
        part.load_state_dict(saved)


@pytest.mark.parametrize("name", ["equal", "static", "balanced", "proportional", "dp", "edp", "dbs", "lbb", "lbbsp"])
def test_an_observation_of_another_number_of_workers_teaches_nothing(name):
    """When a worker leaves, the last step's timings arrive after the first plan without it."""
    controller = make(name)
    before = controller.plan(60, Limits.plain(2, 60)).counts_W
    observe(controller, [20, 20, 20], [1.0, 2.0, 4.0])
    np.testing.assert_array_equal(controller.plan(60, Limits.plain(2, 60), epoch=1).counts_W, before)
