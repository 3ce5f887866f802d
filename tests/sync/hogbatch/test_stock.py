"""Rows ahead: the right ones, fetched once, in the background."""

import threading

import numpy as np
import pytest

from hetjax.sampling.order import Sampler
from hetjax.sampling.ranges import RangePool
from hetjax.sync.hogbatch.stock import Prefetch


class Numbered:
    """Sample i is the number i; remembers what was fetched, and in which thread."""

    def __init__(self, size):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        raise AssertionError("the fast path should be used")

    def rows(self, indices):
        self.asked.append((threading.current_thread().name, indices.tolist()))
        return {"x": np.asarray(indices, np.float32)}


@pytest.fixture
def stock():
    made = Prefetch(Numbered(50), Sampler(50, 8, seed=1), block=16, end=100, keep=4)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(3))
def test_ranges_of_any_size_get_their_rows_and_each_is_fetched_once(stock, seed):
    pool, rng = RangePool(50, 100), np.random.default_rng(seed)
    while (span := pool.take(int(rng.integers(1, 40)))) is not None:
        rows = stock.rows(span)
        expected = stock.order.indices(span.epoch, span.start, span.stop)
        np.testing.assert_array_equal(rows.block(span.start, span.count)["x"], expected)
    fetched = [index for _, indices in stock.source.asked for index in indices]
    assert np.bincount(fetched).tolist() == [2] * 50  # two epochs
    assert all(name.startswith("hetjax-stock") for name, _ in stock.source.asked)


@pytest.mark.parametrize("fails", [1, 2])
def test_what_could_not_be_read_is_tried_once_more(stock, fails, caplog):
    read, errors = stock.source.rows, [OSError("disk away")] * fails

    def rows(indices):
        if errors:
            raise errors.pop()
        return read(indices)

    stock.source.rows, span = rows, RangePool(50, 100).take(5)
    if fails == 1:
        np.testing.assert_array_equal(stock.rows(span).block(0, 5)["x"], stock.order.indices(0, 0, 5))
    else:
        with pytest.raises(OSError, match="disk away"):
            stock.rows(span)
    assert "trying again: OSError: disk away" in caplog.text


def test_an_old_range_that_comes_back_is_fetched_again(stock):
    pool = RangePool(50, 100)
    first = pool.take(5)
    while (span := pool.take(5)) is not None:
        stock.rows(span)
    rows = stock.rows(first)
    np.testing.assert_array_equal(rows.block(0, 5)["x"], stock.order.indices(0, 0, 5))
    assert len(stock._blocks) <= 4 + 2 + 1
