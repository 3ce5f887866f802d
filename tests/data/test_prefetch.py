"""Prefetching: rows by position, in the background, each fetched once, and always the rows requested."""

import threading

import numpy as np
import pytest

from hetjax.data.prefetch import BlockFeed, Feed
from hetjax.sampling.order import Sampler
from hetjax.sampling.ranges import RangePool


class Numbered:
    """Sample i is the number i; records what was fetched, and in which thread."""

    def __init__(self, size):
        self.size, self.fetched = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("the fast path should be used")

    def rows(self, indices):
        self.fetched.append((threading.current_thread().name, indices.tolist()))
        return {"x": np.asarray(indices, np.float64)}


@pytest.fixture
def feed():
    feed = Feed(Numbered(100), Sampler(100, 20, seed=1))
    yield feed
    feed.close()


@pytest.fixture
def blocks():
    blocks = BlockFeed(Numbered(50), Sampler(50, 8, seed=1), block=16, end=100, keep=4)
    yield blocks
    blocks.close()


def check(feed, epoch, start, stop):
    rows, origin = feed.take(epoch, start, stop)
    expected = feed.order.indices(epoch, start, stop)
    assert origin <= start
    np.testing.assert_array_equal(rows["x"][start - origin : stop - origin], expected)
    return rows


def check_range(blocks, span):
    expected = blocks.order.indices(span.epoch, span.start, span.stop)
    np.testing.assert_array_equal(blocks.rows(span).block(span.start, span.count)["x"], expected)


def test_a_prepared_span_is_fetched_once_in_the_background(feed):
    feed.prepare(0, 20, 40)
    check(feed, 0, 20, 40)
    ((thread, _),) = feed.source.fetched
    assert thread.startswith("hetjax-prefetch")


def test_a_slice_within_a_prepared_span_fetches_nothing_more(feed):
    feed.prepare(0, 20, 40)  # a slice with its margin
    check(feed, 0, 24, 37)
    assert len(feed.source.fetched) == 1


@pytest.mark.parametrize(("start", "stop"), [(15, 30), (30, 50), (15, 50), (60, 70)])
def test_only_missing_positions_are_fetched_on_demand(feed, start, stop):
    feed.prepare(0, 20, 40)
    check(feed, 0, start, stop)
    for future in feed._pending.values():  # the prepared span may still be in flight
        future.result()
    fetched = sum(len(indices) for _, indices in feed.source.fetched)
    overlap = max(0, min(stop, 40) - max(start, 20))
    assert fetched == 20 + (stop - start) - overlap


def test_each_epoch_has_its_own_order(feed):
    feed.prepare(1, 0, 20)
    check(feed, 0, 0, 20)
    check(feed, 1, 0, 20)


def test_float64_rows_become_the_default_jax_dtype(feed):
    assert check(feed, 0, 0, 5)["x"].dtype == np.float32


def test_a_feed_raises_the_error_of_a_prepared_span_without_a_retry(feed):
    def rows(indices):
        feed.source.fetched.append(indices)
        raise OSError("disk lost")

    feed.source.rows = rows
    feed.prepare(0, 20, 40)
    with pytest.raises(OSError, match="disk lost"):
        feed.take(0, 20, 40)
    assert len(feed.source.fetched) == 1


@pytest.mark.parametrize("seed", range(3))
def test_ranges_of_any_size_get_their_rows_and_each_sample_is_fetched_once(blocks, seed):
    pool, rng = RangePool(50, 100), np.random.default_rng(seed)
    while (span := pool.take(int(rng.integers(1, 40)))) is not None:
        check_range(blocks, span)
    fetched = [index for _, indices in blocks.source.fetched for index in indices]
    assert np.bincount(fetched).tolist() == [2] * 50  # two epochs
    assert all(name.startswith("hetjax-prefetch") for name, _ in blocks.source.fetched)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_block_that_cannot_be_read_is_retried_once(blocks, failures, caplog):
    read, errors = blocks.source.rows, [OSError("disk lost")] * failures

    def rows(indices):
        if errors:
            raise errors.pop()
        return read(indices)

    blocks.source.rows, span = rows, RangePool(50, 100).take(5)
    if failures == 1:
        check_range(blocks, span)
    else:
        with pytest.raises(OSError, match="disk lost"):
            blocks.rows(span)
    assert "trying again: OSError: disk lost" in caplog.text


def test_dropped_blocks_are_fetched_again_and_memory_is_bounded(blocks):
    pool = RangePool(50, 100)
    first = pool.take(5)
    while (span := pool.take(5)) is not None:
        blocks.rows(span)
    check_range(blocks, first)
    assert len(blocks._pending) <= 4 + 2 + 1
