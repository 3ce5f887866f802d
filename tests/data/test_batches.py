"""Which rows of a step a process reads and prefetches, by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from hetjax.data.batches import FeedBatch
from hetjax.pipeline import own_span
from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import Span

PLAN = Plan(np.array([40, 80, 0, 680]))
STEP, NEXT = Span(0, 1000, 1800), Span(0, 1800, 2600)


class RecordingFeed:
    """A feed that only records its calls."""

    def take(self, epoch, start, stop):
        self.taken = start, stop
        return {"x": np.arange(start, stop)}, start

    def prepare(self, epoch, start, stop):
        self.ahead = start, stop


@pytest.mark.parametrize(
    ("local", "own", "ahead"),
    [
        ((0,), (1000, 1040), (1800, 1845)),
        ((1,), (1040, 1120), (1830, 1930)),
        ((0, 1), (1000, 1120), (1800, 1935)),
        ((2,), (1120, 1121), (1919, 1922)),  # nothing to compute, but padding needs a row
        ((3,), (1120, 1800), (1835, 2600)),
    ],
)
def test_prefetch_margin_is_a_share_of_the_own_slice(local, own, ahead):
    several, feed = SimpleNamespace(several_processes=True, local=local), RecordingFeed()
    start, stop = own_span(several, PLAN, STEP)
    assert (start, stop) == own
    rows = FeedBatch(feed, STEP, NEXT).rows(start - STEP.start, stop - STEP.start)
    assert (rows.origin, feed.taken) == (own[0], own)
    assert feed.ahead == ahead


def test_one_process_reads_the_whole_step():
    alone, feed = SimpleNamespace(several_processes=False, local=(0, 1, 2, 3)), RecordingFeed()
    assert own_span(alone, PLAN, STEP) == (1000, 1800)
    FeedBatch(feed, STEP, Span(0, 1800, 1900)).rows(0, 800)
    assert feed.ahead == (1800, 1900)
