"""The feed: rows by position, fetched ahead, and never another row than the one asked for."""

import threading

import numpy as np
import pytest

from hetjax.data.feed import Feed
from hetjax.sampling.order import Sampler


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
        return {"x": np.asarray(indices, np.float64)}


@pytest.fixture
def feed():
    feed = Feed(Numbered(100), Sampler(100, 20, seed=1))
    yield feed
    feed.close()


def check(feed, epoch, start, stop):
    rows, origin = feed.take(epoch, start, stop)
    expected = feed.order.indices(epoch, start, stop)
    assert origin <= start
    assert np.array_equal(rows["x"][start - origin : stop - origin], expected)
    return rows


def test_what_was_asked_for_in_advance_is_fetched_in_the_background_once(feed):
    feed.prepare(0, 20, 40)
    check(feed, 0, 20, 40)
    ((thread, _),) = feed.source.asked
    assert thread.startswith("hetjax-feed")


def test_a_new_plan_only_moves_borders(feed):
    feed.prepare(0, 20, 40)  # a slice with its margin
    check(feed, 0, 24, 37)
    assert len(feed.source.asked) == 1


@pytest.mark.parametrize(("start", "stop"), [(15, 30), (30, 50), (15, 50), (60, 70)])
def test_what_is_missing_is_fetched_then(feed, start, stop):
    feed.prepare(0, 20, 40)
    check(feed, 0, start, stop)
    for future in feed._ahead.values():  # what was asked for in advance may still be on its way
        future.result()
    fetched = sum(len(indices) for _, indices in feed.source.asked)
    overlap = max(0, min(stop, 40) - max(start, 20))
    assert fetched == 20 + (stop - start) - overlap


def test_the_next_epoch_is_another_order(feed):
    feed.prepare(1, 0, 20)
    check(feed, 0, 0, 20)
    check(feed, 1, 0, 20)


def test_double_precision_becomes_what_the_device_computes_in(feed):
    assert check(feed, 0, 0, 5)["x"].dtype == np.float32
