"""One call of `fit`: the workers run, and what they do becomes records, hooks and a history."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from hetjax.data.prefetch import BlockFeed
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.clocks import LocalResult
from hetjax.engines.session import Session
from hetjax.history import History, Record, Recorder
from hetjax.reduce.update import State
from hetjax.sampling.ranges import RangePool
from hetjax.sync.base import Job
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.method import AppliedUpdate, Back, Finished, Lost, Method, Moment, News, WorkItem
from hetjax.sync.hogbatch.metrics import UpdateMetrics
from hetjax.sync.hogbatch.scaling import Rate
from hetjax.sync.hogbatch.threads import Pause, Threads
from hetjax.sync.hogbatch.virtual import VirtualSchedule, VirtualTime

log = logging.getLogger("hetjax")


class Training:
    """Everything of one call of `fit`. `remember` is told what goes with a state before a hook sees that state.

    `told`: what the tally of the training so far was, if this goes on with it.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        state: State,
        method: Method,
        pool: RangePool,
        rate: Rate,
        *,
        pause: Pause,
        replay: VirtualSchedule | None,
        remember: Callable[[Moment, dict[str, Any]], None],
        told: dict[str, Any],
        on_update: Callable[[AppliedUpdate], None] | None,
    ):
        assert isinstance(session.engine, ChunkedEngine)
        self.job, self.session, self.engine, self.method = job, session, session.engine, method
        self.pause, self.remember, self.told, self.on_update = pause, remember, told, on_update
        self.offset = state.step - job.order.whole_steps(state.cursor)  # 0 unless the batch size was another before
        self.start = state
        self.virtual = None if replay is None else VirtualTime(replay, len(job.workers), job.simulation)
        self.coordinator = Coordinator(
            pool,
            method,
            rate,
            len(job.workers),
            clock=time.perf_counter if self.virtual is None else self.virtual.clock,
            step_of=lambda samples: self.offset + job.order.whole_steps(samples),
        )
        most = int(np.max(self.engine.capacity_W))
        self.feed = BlockFeed(job.source, job.order, block=max(most, job.batch), end=job.end, keep=2 * len(job.workers))

    def run(self, history: History) -> tuple[State, History]:
        job, simulation = self.job, self.job.simulation
        history.last_step = self.coordinator.step_of(job.end)
        if simulation is not None:
            simulation.step = self.start.step
        with closing(self.feed), job.record(history) as recorder:
            tally = UpdateMetrics(self.session.layout, self.method.batch_W, self.coordinator.clock(), self.told)
            with closing(self._news()) as stream:  # whatever is raised in here ends the workers at once
                for news in stream:
                    if not isinstance(news, Finished):
                        self._say(news)
                        continue
                    tally.add(news)
                    if self.on_update is not None:
                        self.on_update(news.update)
                    if news.moment is not None:
                        self._record(tally, news, recorder)
            counted = tally.state_dict()
            if tally.unrecorded:  # stopped in between: for the history only, a resumed run will record the whole step
                recorder.append(self._made(tally, 1 + self.coordinator.step))
            whole = tally.whole
            rates_W = np.divide(whole.counts_W, whole.busy_W, out=np.zeros(tally.workers), where=whole.busy_W > 0)
            history.more = tally.summary()
            recorder.finish(float(rates_W.sum()) or None, self.feed.waited / tally.workers)
        if self.coordinator.error is not None:
            raise self.coordinator.error
        last = self.coordinator.moment()
        self.remember(last, counted)
        return last.state, history

    def _record(self, tally: UpdateMetrics, news: Finished, recorder: Recorder) -> None:
        """A step's worth of samples is done."""
        assert news.moment is not None
        record = self._made(tally, self.coordinator.step_of(tally.seen))
        self.remember(news.moment, tally.state_dict())
        self.job.check(record)
        recorder.add(record, news.moment.state)
        if self.job.simulation is not None:
            self.job.simulation.step = record.step

    def _made(self, tally: UpdateMetrics, step: int) -> Record:
        return tally.record(step, max(0, tally.seen - 1) // self.job.order.size, self.job.saving())

    def _say(self, news: News) -> None:
        if isinstance(news, Back):
            log.warning("Worker %d has come back and takes part again.", news.worker)
        elif isinstance(news, Lost):
            samples, workers = sum(span.count for span in news.spans), self.job.workers
            others = int(self.coordinator.taking_part_W().sum())
            left = f"Its {samples} samples go to the others; {others} of {len(workers)} workers go on."
            log.warning(
                "Worker %d (%s) failed: %s: %s %s",
                news.worker, workers.devices[news.worker], type(news.error).__name__, _sentence(news.error),
                left if others else "No worker is left.",
            )  # fmt: skip

    # -- how a worker computes --

    def _news(self) -> Generator[News]:
        if self.virtual is not None:
            rows_of = lambda task: self.engine.rows_of(task.worker, task.span.count)
            return self.virtual.run(self.coordinator, rows_of, self.method.read, self._phase, self.job.stopping)
        compute = lambda task: self._phase(task, None)
        return Threads(
            self.coordinator,
            compute,
            len(self.job.workers),
            pause=self.pause,
            wait_limit=self.job.wait_limit,
            stopping=self.job.stopping,
        ).run()

    def _phase(self, task: WorkItem, leaves: list[jax.Array] | None) -> LocalResult:
        """The local phase of a task, on the calling thread; the model is read as late as can be, unless it was."""
        span = task.span
        rows = self.feed.rows(span)
        task.started = self.coordinator.clock()
        chunks = self.engine.chunks(rows, span.epoch, task.worker, span.start, span.count, self.job.order.seed)
        leaves = self.method.read(task) if leaves is None else leaves
        return self.engine.phase(task.worker, chunks, leaves, leaves[-1])


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else "without a word"
    return text if text.endswith((".", "!", "?")) else f"{text}."
