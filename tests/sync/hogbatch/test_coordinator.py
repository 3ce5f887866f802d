"""The coordinator, one call at a time: workers that fail and rejoin, and the events they cause."""

import numpy as np
import pytest
from async_problem import FakeModel

from hetjax.engines.clocks import LocalResult
from hetjax.sampling.ranges import RangePool
from hetjax.sync.hogbatch.coordinator import Coordinator, UpdateEvent, WorkerLost, WorkerRejoined
from hetjax.sync.hogbatch.immediate import Immediate
from hetjax.sync.hogbatch.rules import Rate

RESULT = LocalResult((), 4, 0.0, 1.0)


@pytest.fixture
def coordinator():
    method = Immediate(FakeModel(), [None, None], np.array([4, 4]), np.zeros(2))
    return Coordinator(RangePool(96, 96), method, Rate(4), 2, clock=lambda: 0.0, step_of=lambda samples: samples // 16)


def events(coordinator):
    return [coordinator.events.get() for _ in range(coordinator.events.qsize())]


def test_a_worker_that_finished_the_item_in_the_meantime_has_not_failed(coordinator):
    first = coordinator.take(0)
    coordinator.finish(first, RESULT)
    second = coordinator.take(0)
    coordinator.fail(0, TimeoutError("on the first"), first)
    assert coordinator.in_flight() == [second]
    assert [type(event) for event in events(coordinator)] == [UpdateEvent]
    coordinator.fail(0, TimeoutError("on the second"), second)
    assert coordinator.in_flight() == []
    assert [event.spans for event in events(coordinator)] == [(second.span,)]


def test_a_worker_that_rejoins_clears_the_error_of_the_last_failure(coordinator):
    hung, other = coordinator.take(0), coordinator.take(1)
    coordinator.fail(0, TimeoutError("hangs"), hung)
    coordinator.fail(1, OSError("gone"))
    assert isinstance(coordinator.error, OSError)
    coordinator.finish(hung, RESULT)
    assert coordinator.error is None
    assert [type(event) for event in events(coordinator)] == [WorkerLost, WorkerLost, WorkerRejoined]
    assert coordinator.take(0).span == hung.span  # given back, and first in line again
    assert other not in coordinator.in_flight()


def test_no_worker_rejoins_a_finished_run(coordinator):
    hung = coordinator.take(0)
    coordinator.fail(1, OSError("gone"))
    coordinator.fail(0, TimeoutError("hangs"), hung)
    assert coordinator.finished()
    coordinator.finish(hung, RESULT)
    assert isinstance(coordinator.error, TimeoutError)
    assert coordinator.take(0) is None


def test_a_failure_after_the_end_is_ignored(coordinator):
    coordinator.take(0)
    coordinator.abandon()
    coordinator.fail(0, RuntimeError("cancelled"))
    assert coordinator.error is None
    assert events(coordinator) == []


def test_a_step_has_one_resume_point_even_if_its_samples_are_lost_again(coordinator):
    has_resume_point = []
    for pending in (12, 0, 8, 24):  # samples seen: 16, 8, 20, 40
        coordinator.method.pending = pending
        coordinator.finish(coordinator.take(0), RESULT)
        (event,) = events(coordinator)
        has_resume_point.append(event.resume_point is not None)
    assert has_resume_point == [True, False, False, True]
