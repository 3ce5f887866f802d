"""The global order: every sample exactly once per epoch, whatever the plans, and one integer to resume from."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.sampling.order import EndlessSampler, Sampler, permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_an_epochs_order_is_a_permutation(size, seed, epoch):
    order = permute(np.arange(size), size, seed, epoch)
    assert np.array_equal(np.sort(order), np.arange(size))


def test_a_slice_of_the_order_equals_that_of_the_whole():
    whole = permute(np.arange(10_007), 10_007, 3, 4)
    assert np.array_equal(permute(np.arange(5_000, 5_100), 10_007, 3, 4), whole[5_000:5_100])


def test_orders_differ_by_epoch_and_seed_and_look_random():
    size = 20_000
    orders = [permute(np.arange(size), size, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    for a in range(3):
        assert abs(np.corrcoef(orders[a], np.arange(size))[0, 1]) < 0.03
        assert abs(np.corrcoef(orders[a][1:], orders[a][:-1])[0, 1]) < 0.03
        for b in range(a):
            assert (orders[a] == orders[b]).mean() < 0.01
            assert abs(np.corrcoef(orders[a], orders[b])[0, 1]) < 0.03


def test_every_value_is_equally_likely_at_every_position():
    """Chi-square over 16 x 16 cells of (position, value)."""
    size, runs = 16, 4000
    table = np.zeros((size, size))
    for seed in range(runs):
        table[np.arange(size), permute(np.arange(size), size, seed, 0)] += 1
    chi2 = ((table - runs / size) ** 2 / (runs / size)).sum()
    assert 140 < chi2 < 330  # 225 degrees of freedom, standard deviation 21


@given(
    size=st.integers(1, 500),
    batch=st.integers(1, 120),
    seed=st.integers(0, 99),
    cuts=st.lists(st.floats(0, 1), max_size=7),
)
def test_every_sample_once_per_epoch_for_any_plan(size, batch, seed, cuts):
    sampler = Sampler(size, batch, seed)
    cursor, seen, steps = 0, [], 0
    while cursor < 2 * size:
        step = sampler.step(cursor)
        assert 1 <= step.batch <= batch
        bounds = np.unique([0, *(int(c * step.batch) for c in cuts), step.batch])
        for lo, hi in pairwise(bounds):  # any split of the step among workers
            seen.append(sampler.indices(step.epoch, step.start + lo, step.start + hi))
        cursor, steps = cursor + step.batch, steps + 1
    assert cursor == 2 * size
    assert steps == 2 * sampler.steps_per_epoch()
    assert np.array_equal(np.bincount(np.concatenate(seen), minlength=size), np.full(size, 2))


def test_without_shuffling_the_order_is_sequential():
    assert np.array_equal(Sampler(10, 4, shuffle=False).indices(0, 3, 7), [3, 4, 5, 6])


def test_invalid_sizes_are_rejected():
    with pytest.raises(ValueError, match="empty"):
        Sampler(0, 4)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        Sampler(4, 0)


def test_steps_and_samples_convert_into_each_other():
    sampler = Sampler(size=10, batch=4)  # steps end at 4, 8, 10, 14, 18, 20
    assert [sampler.whole_steps(n) for n in (0, 3, 4, 9, 10, 13, 18, 20)] == [0, 0, 1, 2, 3, 3, 5, 6]
    assert [sampler.samples_in(k) for k in range(7)] == [0, 4, 8, 10, 14, 18, 20]
    cursor = 0
    for step in range(1, 20):
        cursor += sampler.step(cursor).batch
        assert (sampler.samples_in(step), sampler.whole_steps(cursor)) == (cursor, step)


@pytest.mark.parametrize("batch", [1, 7, 512])
def test_an_endless_order_has_every_index_once_and_positions_of_32_bits(batch):
    sampler = EndlessSampler(batch)
    for cursor in (0, 3 * batch, sampler.size - batch, sampler.size, 5 * sampler.size + batch):
        span = sampler.step(cursor)
        assert span.batch == batch
        assert span.stop <= 2**31
        indices = sampler.indices(span.epoch, span.start, span.stop)
        assert indices.tolist() == list(range(cursor, cursor + batch))
        assert sampler.end_of(cursor, 3) == cursor + 3 * batch
