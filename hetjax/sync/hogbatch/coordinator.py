"""The coordinator: whoever is free takes the next range; what is finished is applied in order of arrival.

It knows nothing of threads or time: a driver (threads.py, virtual.py) lets the workers ask, and says what time it is.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.reduce.update import State
from hetjax.sampling.ranges import RangePool
from hetjax.sync.hogbatch.method import AppliedUpdate, Back, Finished, Lost, Method, Moment, News, Unreachable, WorkItem
from hetjax.sync.hogbatch.scaling import Rate


class Coordinator:
    """All state that workers share, behind one lock. News of what happened goes to a queue, in order.

    `step_of` says how many steps so many samples make: whenever that grows, the news carry a state to resume from.
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
    ):
        self.pool, self.method, self.rate = pool, method, rate
        self.clock, self.step_of = clock, step_of
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.error: BaseException | None = None  # that ends the run: of the last worker, when none is left
        self._workers = workers
        self._taking_part = set(range(workers))
        self._flying: dict[int, WorkItem] = {}
        self._closed = False
        self._changed = threading.Condition()
        self.step = step_of(pool.cursor)  # the last that was told of

    # -- what a worker does --

    def take(self, worker: int) -> WorkItem | None:
        """The next task of a worker; waits for one while there may come one. None: there is nothing left to do."""
        with self._changed:
            while (task := self._try(worker)) is None and not self._nothing_for(worker):
                self._changed.wait()
            return task

    def try_take(self, worker: int) -> WorkItem | None:
        """The same without waiting: None also means that there is nothing just now."""
        with self._changed:
            return self._try(worker)

    def finish(self, task: WorkItem, lap: LocalResult) -> None:
        """A worker's sums: applied, unless the task has been taken from it meanwhile."""
        prepared = self.method.prepare(task, lap)
        with self._changed:
            if self._flying.get(task.worker) is not task:
                self._late(task.worker)
                return
            outcome = self.method.commit(task, prepared)
            del self._flying[task.worker]
            for span in outcome.done:
                self.pool.done(span)
            self._settle()
            update = AppliedUpdate(
                worker=task.worker,
                span=task.span,
                batch=task.batch,
                scale=task.scale,
                rate=task.rate,
                version=outcome.version,
                staleness=outcome.staleness,
                rows=lap.rows,
                began=lap.began,
                ended=lap.ended,
                applied=self.clock(),
            )
            self.news.put(Finished(update, outcome.tail, self._seen(), self._since(), self._moment_if_due()))
            self._changed.notify_all()

    def fail(self, worker: int, error: BaseException, task: WorkItem | None = None) -> None:
        """A worker raised, hangs or died: what it had goes back to the pool and the others go on.

        `task`: that it was seen with; if it has brought that one meanwhile, it has not failed after all. Nor does it
        matter once the run has ended.
        """
        with self._changed:
            flying = self._flying.get(worker)
            if worker not in self._taking_part or (self._closed and flying is None) or task not in (None, flying):
                return
            self._leave_out(worker, error)
            self._settle()
            self._changed.notify_all()

    # -- what a driver does --

    def close(self) -> None:
        """Nothing further is handed out; tasks on their way may still finish."""
        with self._changed:
            self._closed = True
            self._settle()
            self._changed.notify_all()

    def abandon(self) -> None:
        """Close, and wait for nobody: tasks on their way go back to the pool, and their sums will be refused."""
        with self._changed:
            self._closed = True
            for task in self._flying.values():
                self.pool.give_back(task.span)
            self._flying.clear()
            self._settle()
            self._changed.notify_all()

    def over(self) -> bool:
        """Whether nothing is on its way and nothing will be; from then on nobody can come back."""
        with self._changed:
            if not self._flying and (not self._taking_part or self.pool.empty):
                self._closed = True
            return not self._flying and self._closed

    def flying(self) -> list[WorkItem]:
        with self._changed:
            return list(self._flying.values())

    def moment(self) -> Moment:
        """The state as it is now, tasks on their way aside."""
        with self._changed:
            return self._moment()

    def taking_part_W(self) -> np.ndarray:
        return np.isin(np.arange(self._workers), list(self._taking_part))

    # -- under the lock --

    def _try(self, worker: int) -> WorkItem | None:
        if self._closed or worker not in self._taking_part or worker in self._flying:
            return None
        if not self.pool.available or not self.method.may_start(self._flying.values()):
            return None
        batch = self.method.batch(worker, self.taking_part_W())
        span = self.pool.take(batch)
        assert span is not None
        scale, rate = self.rate.scale(span, batch), self.rate.at(self._seen())
        task = WorkItem(worker, span, batch, scale, rate, self.clock(), self.method.version)
        self._flying[worker] = task
        return task

    def _nothing_for(self, worker: int) -> bool:
        return self._closed or worker not in self._taking_part or self.pool.empty

    def _leave_out(self, worker: int, error: BaseException) -> None:
        self._taking_part.discard(worker)
        task = self._flying.pop(worker, None)
        spans = (*([] if task is None else [task.span]), *self.method.lost(worker))
        for span in spans:
            self.pool.give_back(span)
        if not self._taking_part:
            self.error = error
        self.news.put(Lost(worker, error, spans))

    def _settle(self) -> None:
        if self._flying:
            return
        dry = self._closed or not self.pool.available or not self._taking_part
        try:
            for span in self.method.rest(self.taking_part_W(), dry=dry):
                self.pool.done(span)
        except Unreachable as error:
            self._leave_out(error.worker, error.__cause__ or error)
            self._settle()
        except Exception as error:  # concerns all of them
            self.error, self._closed = error, True

    def _seen(self) -> int:
        return self.pool.cursor + self.method.pending

    def _since(self) -> tuple[float | None, ...]:
        return tuple(self._flying[i].started if i in self._flying else None for i in range(self._workers))

    def _late(self, worker: int) -> None:
        if not self._closed and worker not in self._taking_part:
            self._taking_part.add(worker)
            self.error = None
            self.method.joined(worker, self.taking_part_W())
            self.news.put(Back(worker))
            self._changed.notify_all()

    def _moment_if_due(self) -> Moment | None:
        step = self.step_of(self._seen())
        if step <= self.step:  # what a lost replica had learned is learned once more
            return None
        self.step = step
        return self._moment()

    def _moment(self) -> Moment:
        core, more = self.method.core()
        cursor = self.pool.cursor
        state = State(*core, step=self.step_of(cursor), cursor=cursor, more=more)
        host = {"handed": self.pool.handed, "undone": [list(span) for span in self.pool.undone()]}
        return Moment(state, host | self.method.state_dict())
