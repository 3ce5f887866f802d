"""The pool of index ranges: every sample is done exactly once, whatever is given back, in any order."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.sampling.ranges import Range, RangePool


def span(pool, taken):
    start = taken.epoch * pool.size + taken.start
    return range(start, start + taken.count)


def test_ranges_follow_the_order_and_end_with_their_epoch():
    pool = RangePool(size=10, end=20)
    assert [pool.take(4) for _ in range(4)] == [
        Range(0, 0, 4), Range(0, 4, 8), Range(0, 8, 10, last=True), Range(1, 0, 4),
    ]  # fmt: skip
    assert pool.take(99) == Range(1, 4, 10, last=True)
    assert pool.take(1) is None
    assert not pool.empty  # all of it is still out


def test_ranges_given_back_are_merged_and_handed_out_first():
    pool = RangePool(size=12, end=12)
    a, b, c = (pool.take(3) for _ in range(3))
    pool.give_back(c)
    pool.give_back(a)
    pool.give_back(b)
    assert pool.take(5) == Range(0, 0, 5)
    assert pool.take(5) == Range(0, 5, 9)  # the rest of what was given back; 9 to 12 was never out
    assert pool.take(5) == Range(0, 9, 12, last=True)


def test_a_range_given_back_is_cut_at_the_end_of_its_epoch():
    pool = RangePool(size=4, end=12, begin=8, left=[(2, 6)])
    assert pool.cursor == 4
    assert [pool.take(9) for _ in range(3)] == [Range(0, 2, 4, last=True), Range(1, 0, 2), Range(2, 0, 4, last=True)]


def test_cursor_counts_samples_done():
    pool = RangePool(size=10, end=30, begin=10)
    a, b = pool.take(3), pool.take(3)
    assert (pool.cursor, pool.handed, pool.undone()) == (10, 16, [(10, 16)])
    pool.done(b)
    assert (pool.cursor, pool.undone()) == (13, [(10, 13)])
    pool.give_back(a)
    assert (pool.cursor, pool.undone()) == (13, [(10, 13)])
    with pytest.raises(ValueError, match="not out"):
        pool.done(a)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(0, 2**32))
def test_every_sample_is_done_once_despite_failures_and_restarts(size, epochs, seed):
    rng = random.Random(seed)
    end = size * epochs
    pool, out, seen = RangePool(size, end), [], []
    while not pool.empty:
        if rng.random() < 0.05:  # restart: ranges out are lost, and the run resumes from its checkpoint
            assert pool.cursor == len(seen)
            pool, out = RangePool(size, end, pool.handed, pool.undone()), []
        taken = pool.take(rng.randint(1, 9)) if rng.random() < 0.6 else None
        if taken is not None:
            assert taken.last == (taken.stop == size)
            out.append(taken)
        elif out:
            one = out.pop(rng.randrange(len(out)))
            if rng.random() < 0.3:
                pool.give_back(one)
            else:
                pool.done(one)
                seen.extend(span(pool, one))
    assert sorted(seen) == list(range(end))
    assert pool.cursor == end


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RangePool(0, 5), "empty"),
        (lambda: RangePool(5, 5).take(0), "at least 1"),
        (lambda: RangePool(5, 9, begin=3, left=[(2, 4)]), "only 3 samples were handed out"),
    ],
)
def test_invalid_arguments_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()
