"""The coordinator by hand, one event after the other: who fails, who comes back, what is told."""

import numpy as np
import pytest
from async_problem import Versions

from hetjax.engines.clocks import LocalResult
from hetjax.sampling.ranges import RangePool
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.immediate import Immediate
from hetjax.sync.hogbatch.method import Back, Finished, Lost
from hetjax.sync.hogbatch.scaling import Rate

LAP = LocalResult((), 4, 0.0, 1.0)


@pytest.fixture
def made():
    method = Immediate(Versions(), [None, None], np.array([4, 4]), np.zeros(2))
    return Coordinator(RangePool(96, 96), method, Rate(4), 2, clock=lambda: 0.0, step_of=lambda samples: samples // 16)


def news(coordinator):
    return [coordinator.news.get() for _ in range(coordinator.news.qsize())]


def test_who_has_brought_its_task_meanwhile_has_not_failed(made):
    first = made.take(0)
    made.finish(first, LAP)
    second = made.take(0)
    made.fail(0, TimeoutError("seen with the first"), first)
    assert made.flying() == [second]
    assert [type(n) for n in news(made)] == [Finished]
    made.fail(0, TimeoutError("seen with the second"), second)
    assert made.flying() == []
    assert [n.spans for n in news(made)] == [(second.span,)]


def test_who_comes_back_takes_the_last_failure_back(made):
    hung, other = made.take(0), made.take(1)
    made.fail(0, TimeoutError("hangs"), hung)
    made.fail(1, OSError("gone"))
    assert isinstance(made.error, OSError)
    made.finish(hung, LAP)
    assert made.error is None
    assert [type(n) for n in news(made)] == [Lost, Lost, Back]
    assert made.take(0).span == hung.span  # given back, and first in turn again
    assert other not in made.flying()


def test_nobody_comes_back_once_it_is_over(made):
    hung = made.take(0)
    made.fail(1, OSError("gone"))
    made.fail(0, TimeoutError("hangs"), hung)
    assert made.over()
    made.finish(hung, LAP)
    assert isinstance(made.error, TimeoutError)
    assert made.take(0) is None


def test_a_failure_after_the_end_is_none(made):
    made.take(0)
    made.abandon()
    made.fail(0, RuntimeError("cancelled"))
    assert made.error is None
    assert news(made) == []


def test_steps_are_told_once_when_what_was_seen_is_lost_again(made):
    told = []
    for pending in (12, 0, 8, 24):  # samples seen: 16, 8, 20, 40
        made.method.pending = pending
        made.finish(made.take(0), LAP)
        (update,) = news(made)
        told.append(update.moment is not None)
    assert told == [True, False, False, True]
