"""Ladder costs: the cheapest cover of every count against brute force, the shape of a ladder, and errors."""

import itertools

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hetjax.planning.ladder_costs import Staircase, geometric_rungs


def brute_force(rungs, prices, joint, count):
    """The cheapest of all multisets of rungs that cover the count."""
    best = np.inf
    most = -(-count // min(rungs))
    for size in range(1, most + 1):
        for chosen in itertools.combinations_with_replacement(range(len(rungs)), size):
            if sum(rungs[i] for i in chosen) >= count:
                best = min(best, sum(prices[i] for i in chosen) + (size - 1) * joint)
    return best


@given(
    ladder=st.dictionaries(st.integers(2, 9), st.floats(0.1, 10), min_size=1, max_size=3),
    joint=st.sampled_from([0.0, 0.3]),
    capacity=st.integers(1, 14),
)
def test_prices_are_the_cheapest_and_never_decrease(ladder, joint, capacity):
    stairs = Staircase.from_prices(list(ladder), list(ladder.values()), capacity, joint)
    for count in range(1, capacity + 1):
        assert stairs.price_N[count] == pytest.approx(brute_force(list(ladder), list(ladder.values()), joint, count))
        chunks = stairs.chunks(count)
        assert sum(chunks) >= count > sum(chunks[:-1])  # only the last chunk is padded
        assert sum(ladder[c] for c in chunks) + joint * (len(chunks) - 1) == pytest.approx(stairs.price_N[count])
        assert stairs.rows(count) == sum(chunks)
    assert (np.diff(stairs.price_N) >= -1e-12).all()
    assert stairs.chunks(0) == []


def test_small_chunks_are_used_where_they_are_faster_per_row():
    cache_friendly = Staircase.from_prices([16, 128], [16 / 6500, 128 / 4600], 128)
    assert cache_friendly.chunks(128) == [16] * 8
    wide_layers = Staircase.from_prices([16, 128], [0.005, 0.016], 128)
    assert wide_layers.chunks(128) == [128]


def test_the_price_of_a_joint_favors_fewer_chunks():
    assert Staircase.from_prices([16, 128], [1.0, 8.5], 128, joint=0.1).chunks(128) == [128]


@example(top=71, quantum=1)  # 71 / 1.1 rounded up to a multiple of 8 is above 71
@given(top=st.integers(1, 5000), quantum=st.sampled_from([1, 2, 16]))
def test_geometric_rungs_descend_from_the_top_in_small_steps(top, quantum):
    rungs = np.array(geometric_rungs(top, quantum))
    assert rungs[-1] == -(-top // quantum) * quantum
    assert (rungs % quantum == 0).all()
    assert (np.diff(rungs) <= (1 - 1 / 1.1) * rungs[1:] + np.lcm(quantum, 8)).all()  # the ratio, plus rounding


def test_invalid_rungs_and_prices_are_rejected():
    with pytest.raises(ValueError, match="distinct rungs"):
        Staircase.from_prices([4, 4], [1, 1], 8)
    with pytest.raises(ValueError, match="one positive price"):
        Staircase.from_prices([4, 8], [1, float("nan")], 8)
