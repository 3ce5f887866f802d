"""Rounding shares to counts: exact sums within any limits, and the published rounding of DBS."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder, round_half_up, round_to_total


def test_the_example_of_the_dbs_paper():
    ideal_W = np.array([13.7, 16.5, 19.6, 14.2])
    assert largest_remainder(ideal_W / 64.0, Limits.plain(4, 64), 64).tolist() == [14, 16, 20, 14]
    assert round_to_total(ideal_W, 64).tolist() == [14, 16, 20, 14]
    assert round_half_up(ideal_W).tolist() == [14, 16, 20, 14]


def test_round_half_up_falls_short_where_no_fraction_reaches_one_half():
    ideal_W = np.array([10.4, 10.4, 10.2])
    assert round_half_up(ideal_W).sum() == 30
    assert largest_remainder(ideal_W / 31, Limits.plain(3, 31), 31).tolist() == [11, 10, 10]


@pytest.mark.parametrize("seed", range(2))
def test_round_half_up_misses_the_batch_in_a_sixth_of_the_cases(seed):
    rng = np.random.default_rng(seed)
    short = 0
    for _ in range(1000):
        share_W = rng.dirichlet(np.ones(4))
        short += int(round_half_up(512 * share_W).sum()) < 512
        counts_W = largest_remainder(share_W, Limits.plain(4, 512), 512)
        assert counts_W.sum() == 512
        np.testing.assert_array_equal(round_to_total(512 * share_W, 512), counts_W)
    assert 0.1 < short / 1000 < 0.25


def test_equal_shares_give_odd_samples_to_the_lower_index():
    assert largest_remainder(np.ones(4), Limits.plain(4, 64), 10).tolist() == [3, 3, 2, 2]


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 7))
@settings(max_examples=200, deadline=None)
def test_any_shares_become_allowed_counts(seed, workers, quantum):
    rng = np.random.default_rng(seed)
    capacity_W = quantum * rng.integers(1, 12, workers)
    minimum_W = quantum * rng.integers(0, capacity_W // quantum + 1) * (rng.random(workers) < 0.3)
    ruler = np.arange(capacity_W.max() + 1.0)
    limits = Limits(capacity_W, minimum_W, quantum, np.zeros(workers, np.int64), (ruler,))
    batch = int(rng.integers(minimum_W.sum() // quantum, capacity_W.sum() // quantum + 1)) * quantum
    # Wherever a quantum of capacity is left, the remainder fits on the last worker.
    if batch + quantum <= capacity_W.sum() and not minimum_W.any():
        batch += int(rng.integers(0, quantum))
    share_W = rng.random(workers) * (rng.random(workers) < 0.8)
    assert allowed(largest_remainder(share_W, limits, batch), limits, batch)


def test_what_a_capacity_cuts_off_goes_to_the_others_in_proportion():
    limits = Limits(np.array([10, 100, 100]), np.zeros(3, np.int64), 1, np.zeros(3, np.int64), (np.arange(101.0),))
    assert largest_remainder(np.array([0.5, 0.25, 0.25]), limits, 90).tolist() == [10, 40, 40]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([16, 16, 4], True), ([16, 4, 0], False), ([20, 16, 0], False), ([32, 4, 0], True), ([17, 19, 0], False)],
)
def test_allowed_checks_the_quantum(counts, expected):
    assert allowed(np.array(counts), Limits.plain(3, 64, quantum=16), 36) is expected
