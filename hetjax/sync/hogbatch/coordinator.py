"""The coordinator: hands the next range to a free worker, and commits results in order of arrival.

It knows neither threads nor time: a driver (threads.py, virtual.py) runs the workers and supplies the clock. What
happens becomes events, which training.py turns into records and log lines.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.sampling.ranges import Range, RangePool
from hetjax.state import State
from hetjax.sync.hogbatch.method import Method, ReplicaUnreachable, WorkItem
from hetjax.sync.hogbatch.rules import Rate

Lane = tuple[int, int]  # a worker, and one of its threads


@dataclass(frozen=True)
class AppliedUpdate:
    """One applied gradient. Times are on the coordinator's clock; no arrays, so that a whole run can be kept."""

    worker: int
    span: Range
    batch: int
    scale: float
    rate: float
    version: int  # of the model after the update
    staleness: int  # other updates between reading the model and this one
    rows: int  # computed, padding included
    began: float  # of the local phase
    ended: float
    applied: float
    thread: int = 0  # of the worker


@dataclass(frozen=True)
class ResumePoint:
    """A state to resume from, and the host state that belongs to it."""

    state: State
    host: dict[str, Any]


@dataclass(frozen=True)
class UpdateEvent:
    """An update was applied."""

    update: AppliedUpdate
    report: jax.Array  # its loss and metrics, as `StepReport` reads them
    seen: int  # samples learned from since the start of training
    started_W: tuple[tuple[float, ...], ...]  # of each worker's items in flight, those waiting for rows left out
    resume_point: ResumePoint | None  # set when the update completes a step's worth of samples


@dataclass(frozen=True)
class WorkerLost:
    """A worker failed; its ranges returned to the pool."""

    worker: int
    error: BaseException
    spans: tuple[Range, ...]


@dataclass(frozen=True)
class WorkerRejoined:
    """A worker that was dropped for hanging delivered a result."""

    worker: int


Event = UpdateEvent | WorkerLost | WorkerRejoined


class Coordinator:
    """The state shared by all workers, behind one lock.

    Args:
        pool: The ranges left to train on.
        method: What becomes of a worker's sums.
        rate: The factors on gradients and updates.
        workers: Their number.
        threads_W: Threads of each worker, which take ranges independently of each other; default: 1 each.
        clock: Seconds, real or virtual.
        step_of: Converts samples to whole steps; an update that completes a step carries a resume point.
    """

    def __init__(
        self,
        pool: RangePool,
        method: Method,
        rate: Rate,
        workers: int,
        *,
        clock: Callable[[], float],
        step_of: Callable[[int], int],
        threads_W: Sequence[int] | None = None,
    ):
        self.pool, self.method, self.rate = pool, method, rate
        self.clock, self.step_of = clock, step_of
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.error: BaseException | None = None  # ends the run: a failed merge, or the failure of the last worker
        self.step = step_of(pool.cursor)  # of the last resume point
        self._workers = workers
        each_W = [1] * workers if threads_W is None else threads_W
        self.lanes: list[Lane] = [(worker, k) for worker, threads in enumerate(each_W) for k in range(threads)]
        self._active = set(range(workers))
        self._in_flight: dict[Lane, WorkItem] = {}
        self._closed = False
        self._changed = threading.Condition()

    # -- called by workers --

    def take(self, worker: int, thread: int = 0) -> WorkItem | None:
        """The next work item; blocks while one may become available. None: the worker is done."""
        with self._changed:
            while (item := self._try_take(worker, thread)) is None and not self._done_for(worker):
                self._changed.wait()
            return item

    def try_take(self, worker: int, thread: int = 0) -> WorkItem | None:
        """The next work item without blocking; None: there is none at present."""
        with self._changed:
            return self._try_take(worker, thread)

    def finish(self, item: WorkItem, result: LocalResult) -> None:
        """Commits a worker's sums, unless the item was taken away from it in the meantime."""
        prepared = self.method.prepare(item, result)
        with self._changed:
            if self._in_flight.get((item.worker, item.thread)) is not item:
                self._rejoin(item.worker)
                return
            committed = self.method.commit(item, prepared)
            del self._in_flight[item.worker, item.thread]
            for span in committed.done:
                self.pool.done(span)
            self._check_idle()
            update = AppliedUpdate(
                worker=item.worker,
                span=item.span,
                batch=item.batch,
                scale=item.scale,
                rate=item.rate,
                version=committed.version,
                staleness=committed.staleness,
                rows=result.rows,
                began=result.began,
                ended=result.ended,
                applied=self.clock(),
                thread=item.thread,
            )
            self.events.put(
                UpdateEvent(update, committed.report, self._seen(), self._in_flight_W(), self._resume_point_if_due())
            )
            self._changed.notify_all()

    def fail(self, worker: int, error: BaseException, item: WorkItem | None = None) -> None:
        """Drops a worker that raised, hangs or died; its ranges return to the pool.

        Ignored once the run has ended, or if the worker no longer holds `item`: then it did not hang after all.
        """
        with self._changed:
            current = [held for (of, _), held in self._in_flight.items() if of == worker]
            if worker not in self._active or (self._closed and not current) or item not in (None, *current):
                return
            self._drop(worker, error)
            self._check_idle()
            self._changed.notify_all()

    # -- called by drivers --

    def close(self) -> None:
        """Hand out nothing more; items in flight may still finish."""
        with self._changed:
            self._closed = True
            self._check_idle()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Close without waiting: items in flight return to the pool, and their results will be rejected."""
        with self._changed:
            self._closed = True
            for item in self._in_flight.values():
                self.pool.give_back(item.span)
            self._in_flight.clear()
            self._check_idle()
            self._changed.notify_all()

    def finished(self) -> bool:
        """Whether nothing is or will be in flight; from then on no worker can rejoin."""
        with self._changed:
            if not self._in_flight and (not self._active or self.pool.empty):
                self._closed = True
            return not self._in_flight and self._closed

    def in_flight(self) -> list[WorkItem]:
        """The items workers are computing."""
        with self._changed:
            return list(self._in_flight.values())

    def holds(self, item: WorkItem) -> bool:
        """Whether the item is still its worker's."""
        with self._changed:
            return self._in_flight.get((item.worker, item.thread)) is item

    def resume_point(self) -> ResumePoint:
        """The current state, without the items in flight."""
        with self._changed:
            return self._resume_point()

    def active_W(self) -> np.ndarray:
        """Which workers have not been dropped."""
        return np.isin(np.arange(self._workers), list(self._active))

    # -- under the lock --

    def _try_take(self, worker: int, thread: int) -> WorkItem | None:
        if self._closed or worker not in self._active or (worker, thread) in self._in_flight:
            return None
        if not self.pool.available or not self.method.may_start(self._in_flight.values()):
            return None
        batch = self.method.next_batch(worker, self.active_W())
        span = self.pool.take(batch)
        assert span is not None
        scale, rate = self.rate.scale(span, batch), self.rate.at(self._seen())
        item = WorkItem(worker, span, batch, scale, rate, self.clock(), self.method.version, thread=thread)
        self._in_flight[worker, thread] = item
        return item

    def _done_for(self, worker: int) -> bool:
        return self._closed or worker not in self._active or self.pool.empty

    def _drop(self, worker: int, error: BaseException) -> None:
        self._active.discard(worker)
        held = [self._in_flight.pop(lane).span for lane in self.lanes if lane[0] == worker and lane in self._in_flight]
        spans = (*held, *self.method.drop_worker(worker))
        for span in spans:
            self.pool.give_back(span)
        if not self._active:
            self.error = error
        self.events.put(WorkerLost(worker, error, spans))

    def _rejoin(self, worker: int) -> None:
        if not self._closed and worker not in self._active:
            self._active.add(worker)
            self.error = None
            self.method.rejoin(worker, self.active_W())
            self.events.put(WorkerRejoined(worker))
            self._changed.notify_all()

    def _check_idle(self) -> None:
        if self._in_flight:
            return
        drained = self._closed or not self.pool.available or not self._active
        try:
            for span in self.method.on_idle(self.active_W(), drained=drained):
                self.pool.done(span)
        except ReplicaUnreachable as error:
            self._drop(error.worker, error.__cause__ or error)
            self._check_idle()
        except Exception as error:  # not one worker's fault
            self.error, self._closed = error, True

    def _seen(self) -> int:
        return self.pool.cursor + self.method.pending

    def _in_flight_W(self) -> tuple[tuple[float, ...], ...]:
        started: list[list[float]] = [[] for _ in range(self._workers)]
        for item in self._in_flight.values():
            if item.started is not None:
                started[item.worker].append(item.started)
        return tuple(map(tuple, started))

    def _resume_point_if_due(self) -> ResumePoint | None:
        step = self.step_of(self._seen())
        if step <= self.step:  # the samples of a lost replica are learned a second time
            return None
        self.step = step
        return self._resume_point()

    def _resume_point(self) -> ResumePoint:
        core, more = self.method.core()
        cursor = self.pool.cursor
        state = State(*core, step=self.step_of(cursor), cursor=cursor, more=more)
        host = {"handed": self.pool.handed, "undone": [list(span) for span in self.pool.undone()]}
        return ResumePoint(state, host | self.method.state_dict())
