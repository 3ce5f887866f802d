"""Proportional shards: disjoint, complete, as large as the shares say, and finished together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.plan.partition import proportional_shards


@given(
    st.lists(st.floats(0.0, 10.0), min_size=1, max_size=9), st.integers(0, 500), st.integers(1, 64), st.integers(0, 99)
)
@settings(max_examples=150, deadline=None)
def test_every_sample_exactly_once_in_equal_numbers_of_steps(shares, size, batch, seed):
    share_W = np.array(shares)
    if share_W.sum() == 0:
        share_W += 1.0
    order_D = np.random.default_rng(seed).permutation(size)
    shards = proportional_shards(order_D, share_W, batch)
    workers = len(share_W)
    read = [shards.batch(worker, step) for step in range(shards.steps) for worker in range(workers)]
    assert sorted(np.concatenate(read).tolist()) == list(range(size))
    assert shards.steps == max(-(-size // batch), 1)
    np.testing.assert_array_less(np.abs(shards.sizes_W - size * share_W / share_W.sum()), 1.0 + 1e-9)
    counts_SxW = np.array([shards.counts(step) for step in range(shards.steps)])
    assert [len(x) for x in read] == counts_SxW.ravel().tolist()
    assert np.all(counts_SxW.max(0) - counts_SxW.min(0) <= 1)


def test_shards_follow_new_shares_in_the_next_epoch():
    order_D = np.arange(100)
    assert proportional_shards(order_D, np.ones(4), 10).sizes_W.tolist() == [25, 25, 25, 25]
    later = proportional_shards(order_D[::-1], np.array([4, 3, 2, 1]), 10)
    assert later.sizes_W.tolist() == [40, 30, 20, 10]
    assert later.batch(0, 0).tolist() == [99, 98, 97, 96]
    assert later.counts(3).tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("shares", [[0.0, 0.0], [1.0, -1.0], [np.nan, 1.0]])
def test_bad_shares_are_explained(shares):
    with pytest.raises(ValueError, match="zero or more, not all zero"):
        proportional_shards(np.arange(4), np.array(shares), 2)
