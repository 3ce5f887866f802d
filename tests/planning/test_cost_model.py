"""The cost model: learns startup and cost per work, ignores outliers, detects changes, and resumes exactly."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from hetjax.plain_state import from_plain, to_plain
from hetjax.planning.cost_model import AWAY, CostModel, _surprise, ln


def feed(model, rng, startup_W, pace_W, work_SxW, noise=0.05):
    for work_W in work_SxW:
        times_W = (startup_W + pace_W * work_W) * np.exp(noise * rng.standard_normal(len(work_W)))
        model.observe(work_W, times_W, np.ones(len(work_W), bool))


def test_usable_after_one_observation():
    model = CostModel(2)
    model.observe(np.array([100.0, 50.0]), np.array([1.0, 2.0]), np.ones(2, bool))
    startup_W, per_work_W = model.costs()
    np.testing.assert_allclose(startup_W + per_work_W * [100.0, 50.0], [1.0, 2.0])
    assert np.all(startup_W > 0)
    assert np.all(per_work_W > 0)


def test_a_worker_without_a_timing_gets_the_mean_of_the_others():
    model = CostModel(3)
    model.observe(np.array([10.0, 10.0, 0.0]), np.array([1.0, 3.0, np.nan]), np.array([True, True, False]))
    startup_W, per_work_W = model.costs()
    assert startup_W[2] == pytest.approx((startup_W[0] + startup_W[1]) / 2)
    assert per_work_W[2] == pytest.approx((per_work_W[0] + per_work_W[1]) / 2)
    assert model.relative_sd(np.full(3, 10.0))[2] == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_learns_startup_and_cost_per_work_when_the_work_varies(seed):
    rng = np.random.default_rng(seed)
    startup_W, pace_W = np.array([0.0, 0.5, 2.0, 0.1]), np.array([0.01, 0.02, 0.01, 0.05])
    model = CostModel(4)
    feed(model, rng, startup_W, pace_W, rng.uniform(50, 200, (400, 4)))
    np.testing.assert_allclose(model.costs()[1], pace_W, rtol=0.15)  # worker 2's startup is 4 sd from its prior
    np.testing.assert_allclose(model.costs()[0], startup_W, atol=0.15)
    assert model.noise == pytest.approx(0.05, rel=0.25)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_constant_work_does_not_wind_up_the_split(seed):
    """Forgetting acts along the scale: the split stays as uncertain as it was, the predicted time becomes sharp."""
    rng = np.random.default_rng(seed)
    model = CostModel(1)
    feed(model, rng, np.array([0.1]), np.array([0.01]), np.full((3000, 1), 100.0))
    assert np.sqrt(model.var_ss_W[0]) < 0.4 * 1.1
    assert model.relative_sd(np.array([100.0]))[0] < 0.01
    assert 0.0 <= model.costs()[0][0] < 0.5


def test_a_single_spike_is_taken_back():
    model, rng = CostModel(2), np.random.default_rng(0)
    work = np.full((50, 2), 100.0)
    feed(model, rng, np.zeros(2), np.full(2, 0.01), work)
    before_W = model.costs()[1] * 100 + model.costs()[0]
    model.observe(work[0], np.array([9.0, 1.0]), np.ones(2, bool))
    assert model.costs()[1][0] * 100 > 5.0  # followed at once
    assert model.doubt_W.tolist() == [True, False]
    model.observe(work[0], np.array([1.0, 1.0]), np.ones(2, bool))
    np.testing.assert_allclose(model.costs()[1] * 100 + model.costs()[0], before_W, rtol=0.02)


def test_a_lasting_jump_stays():
    model, rng = CostModel(2), np.random.default_rng(0)
    feed(model, rng, np.zeros(2), np.full(2, 0.01), np.full((50, 2), 100.0))
    feed(model, rng, np.zeros(2), np.array([0.02, 0.01]), np.full((3, 2), 100.0))
    np.testing.assert_allclose(model.costs()[1] * 100 + model.costs()[0], [2.0, 1.0], rtol=0.08)


@pytest.mark.parametrize("length", [1, 3, 10, 40])
@pytest.mark.parametrize("factor", [0.5, 1.6, 3.0])
def test_a_disturbance_leaves_no_trace_whatever_its_length(factor, length):
    model, rng = CostModel(2), np.random.default_rng(0)
    feed(model, rng, np.zeros(2), np.full(2, 0.01), np.full((100, 2), 100.0))
    before_W, sd_W = model.costs()[1] * 100 + model.costs()[0], model.relative_sd(np.full(2, 100.0))
    feed(model, rng, np.zeros(2), np.array([0.01 * factor, 0.01]), np.full((length, 2), 100.0))
    np.testing.assert_allclose((model.costs()[1] * 100 + model.costs()[0])[0], factor, rtol=0.15)
    assert (model.away_W > 0).tolist() == [True, False]
    feed(model, rng, np.zeros(2), np.full(2, 0.01), np.full((3, 2), 100.0))
    np.testing.assert_allclose(model.costs()[1] * 100 + model.costs()[0], before_W, rtol=0.02)
    assert model.relative_sd(np.full(2, 100.0))[0] == pytest.approx(sd_W[0], rel=0.1)
    assert not model.away_W.any()


def test_after_two_jumps_in_a_row_the_model_before_both_is_restored():
    model, rng = CostModel(2), np.random.default_rng(0)
    for pace, timings in ((0.01, 100), (0.02, 5), (0.05, 5), (0.01, 3)):
        feed(model, rng, np.zeros(2), np.array([pace, 0.01]), np.full((timings, 2), 100.0))
    np.testing.assert_allclose(model.costs()[1] * 100 + model.costs()[0], 1.0, rtol=0.02)


def test_a_saved_model_is_dropped_after_a_long_disturbance():
    model, rng = CostModel(2), np.random.default_rng(0)
    feed(model, rng, np.zeros(2), np.full(2, 0.01), np.full((100, 2), 100.0))
    for timings, away in ((AWAY, [True, False]), (1, [False, False])):
        feed(model, rng, np.zeros(2), np.array([0.02, 0.01]), np.full((timings, 2), 100.0))
        assert (model.away_W > 0).tolist() == away
    assert (model.passing, model.lasting) == (0, 1)


def test_surprise_by_hand():
    """t = 1.21 where 1 was expected, noise 10%: (r - 1)^2 / r = 0.0441 / 1.21, over 0.01, or over 0.01 + 4 (0.05)^2."""
    sure, unsure = np.array([[0.0], [0.5], [0], [0], [0]]), np.array([[0.0], [0.5], [0], [0], [0.0025]])
    one, noise = np.ones(1), np.array([0.01])
    surprise = lambda model, t: float(_surprise(model, 2 * one, t * one, noise, one > 0)[0])
    assert surprise(sure, 1.21) == pytest.approx(0.0441 / 1.21 / 0.01)
    assert surprise(sure, 1 / 1.21) == pytest.approx(0.0441 / 1.21 / 0.01)  # as far below as above
    assert surprise(unsure, 1.21) == pytest.approx(0.0441 / 1.21 / 0.02)
    assert surprise(sure, 9.0) == 16.0


@pytest.mark.parametrize("seed", range(5))
def test_a_small_lasting_change_is_found_by_the_change_point(seed):
    model, rng = CostModel(4), np.random.default_rng(seed)
    feed(model, rng, np.zeros(4), np.full(4, 0.01), np.full((300, 4), 100.0))
    feed(model, rng, np.zeros(4), np.array([0.0112, 0.01, 0.01, 0.01]), np.full((30, 4), 100.0))
    np.testing.assert_allclose(model.costs()[1] * 100 + model.costs()[0], [1.12, 1.0, 1.0, 1.0], rtol=0.04)


@pytest.mark.parametrize("seed", range(3))
def test_resuming_from_json_is_bit_identical(seed):
    rng = np.random.default_rng(seed)
    whole, part = CostModel(3), CostModel(3)
    work_SxW = rng.uniform(10, 100, (80, 3))
    times_SxW = work_SxW * 0.01 * np.exp(0.3 * rng.standard_normal((80, 3)))
    for k in range(80):
        whole.observe(work_SxW[k], times_SxW[k], np.ones(3, bool))
        part.observe(work_SxW[k], times_SxW[k], np.ones(3, bool))
        if k % 7 == 0:
            saved = json.loads(json.dumps(to_plain(part), allow_nan=False))
            part = from_plain(CostModel(3), saved)
    assert json.dumps(to_plain(whole)) == json.dumps(to_plain(part))


@pytest.mark.parametrize("x", [1e-9, 0.5, 1.0, 2.0, 4.0, 7.3, 1024.0, 1e5, 3e200])
def test_logarithm(x):
    assert ln(x) == pytest.approx(math.log(x), abs=1e-14, rel=1e-14)


def test_common_noise_is_separated_from_own_noise():
    """Times are (2, 4, 8, 8) ms x exp(c + own), c of sd 0.1 and own of sd 0.05."""
    rng, truth_W = np.random.default_rng(11), np.array([2.0, 4.0, 8.0, 8.0]) * 1e-3
    model, x_W = CostModel(4), np.array([400.0, 200.0, 100.0, 100.0])
    for _ in range(400):
        model.observe(x_W, truth_W * x_W * np.exp(rng.normal(0, 0.1) + rng.normal(0, 0.05, 4)), np.ones(4, bool))
    assert model.noise == pytest.approx(0.05, rel=0.2)
    assert model.common == pytest.approx(0.01, rel=0.3)
    time_W = model.startup_W + model.per_work_W * x_W
    np.testing.assert_allclose(time_W / time_W.sum(), truth_W * x_W / (truth_W * x_W).sum(), rtol=0.02)


def test_without_common_noise_hardly_any_is_found():
    rng = np.random.default_rng(12)
    model, x_W = CostModel(4), np.full(4, 100.0)
    for _ in range(400):
        model.observe(x_W, x_W * np.exp(rng.normal(0, 0.1, 4)), np.ones(4, bool))
    assert model.common < 0.1 * 0.01
    assert model.noise == pytest.approx(0.1, rel=0.15)


@pytest.mark.parametrize("slow", [[0, 1, 2, 3], [1, 2, 3]])
def test_a_step_in_which_most_workers_are_slow_is_no_jump_of_theirs(slow):
    model, x_W, on_W = CostModel(4), np.full(4, 100.0), np.ones(4, bool)
    for k in range(60):
        model.observe(x_W, x_W * (1.02 if k % 2 else 0.98), on_W)
    before_W = model.startup_W + model.per_work_W * x_W
    slow_W = x_W.copy()
    slow_W[slow] *= 1.6
    model.observe(x_W, slow_W, on_W)
    assert model.jumped == (len(slow) < 4)  # relative to three slow workers the fourth has become fast
    after_W = model.startup_W + model.per_work_W * x_W
    np.testing.assert_allclose(after_W[slow] / before_W[slow], after_W[slow[0]] / before_W[slow[0]], rtol=0.01)
    if len(slow) < 4:
        assert after_W[0] / after_W[1] == pytest.approx(1 / 1.6, rel=0.05)


def test_a_lasting_change_of_all_workers_is_learned():
    model, x_W, on_W = CostModel(3), np.full(3, 100.0), np.ones(3, bool)
    for k in range(100):
        model.observe(x_W, x_W * (1.0 if k < 40 else 2.0) * (1.02 if k % 2 else 0.98), on_W)
    np.testing.assert_allclose(model.startup_W + model.per_work_W * x_W, 200.0, rtol=0.03)


@pytest.mark.parametrize("factor", [40.0, 1 / 40])
def test_common_noise_does_not_change_a_worker_without_a_timing(factor):
    rng, x_W, on_W = np.random.default_rng(13), np.full(3, 100.0), np.ones(3, bool)
    model = CostModel(3)
    feed(model, rng, np.zeros(3), np.ones(3), np.tile(x_W, (40, 1)))
    untimed = lambda: (model.costs()[0][2], model.costs()[1][2], model._now_5xW()[:, 2].tolist(), model.ratio_W[2])
    before, on_W[2] = untimed(), False
    for k in range(100):
        model.observe(x_W, x_W * rng.normal(1, 0.05, 3) * (factor if k % 10 == 0 else 1.0), on_W)
    assert untimed() == before


def test_a_common_hiccup_of_40x_is_no_jump_and_hardly_moves_the_models():
    model, x_W, on_W = CostModel(3), np.full(3, 100.0), np.ones(3, bool)
    for k in range(40):
        model.observe(x_W, x_W * (1.02 if k % 2 else 0.98), on_W)
    model.observe(x_W, 40.0 * x_W, on_W)
    assert not model.jumped
    assert not model.away_W.any()
    np.testing.assert_allclose(model.startup_W + model.per_work_W * x_W, 1.2 * x_W, rtol=0.05)


def test_extreme_timings_cause_no_overflow():
    """Timings from 1e-300 to 1e300 s, and idle steps in between."""
    rng = np.random.default_rng(14)
    model, x_W = CostModel(3), np.full(3, 100.0)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        for _ in range(1000):
            model.observe(x_W, rng.choice([1e-300, 1e-6, 1.0, 1e300], 3), rng.random(3) < 0.7)
    assert np.isfinite(model._now_5xW()).all()
    assert np.isfinite(model.noise)
    assert np.all(model.startup_W + model.per_work_W * x_W <= 2e6)
