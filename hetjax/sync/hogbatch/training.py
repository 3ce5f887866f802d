"""One call of `fit`: runs the workers, and turns the coordinator's events into records, hooks and a history."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from hetjax import profiling
from hetjax.data.prefetch import BlockFeed
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.clocks import LocalResult
from hetjax.engines.session import Session
from hetjax.history import History, Record, Recorder
from hetjax.sampling.ranges import RangePool
from hetjax.state import State
from hetjax.sync.base import FitJob
from hetjax.sync.hogbatch.coordinator import (
    AppliedUpdate,
    Coordinator,
    Event,
    ResumePoint,
    UpdateEvent,
    WorkerLost,
    WorkerRejoined,
)
from hetjax.sync.hogbatch.method import Method, WorkItem
from hetjax.sync.hogbatch.metrics import UpdateMetrics
from hetjax.sync.hogbatch.rules import Rate
from hetjax.sync.hogbatch.threads import CancellableHold, Threads
from hetjax.sync.hogbatch.virtual import VirtualSchedule, VirtualTime

log = logging.getLogger("hetjax")


class Training:
    """One call of `fit`.

    Args:
        job: What to train on, and the trainer's services.
        session: Engine and layout.
        state: The state to start from.
        method: What becomes of a worker's sums.
        pool: The ranges left to train on.
        rate: The factors on gradients and updates.
        hold: Simulated speeds in real time.
        threads_W: Threads of each worker; None: 1 each.
        replay: The schedule of a virtual clock; None: threads in real time.
        keep_host_state: Called with a resume point and its metrics before a hook sees the point's state.
        saved_metrics: `UpdateMetrics.state_dict` of the run that this one resumes, else empty.
        on_update: Called with each update, in order.
    """

    def __init__(
        self,
        job: FitJob,
        session: Session,
        state: State,
        method: Method,
        pool: RangePool,
        rate: Rate,
        *,
        hold: CancellableHold,
        threads_W: np.ndarray | None,
        replay: VirtualSchedule | None,
        keep_host_state: Callable[[ResumePoint, dict[str, Any]], None],
        saved_metrics: dict[str, Any],
        on_update: Callable[[AppliedUpdate], None] | None,
    ):
        assert isinstance(session.engine, ChunkedEngine)
        self.job, self.session, self.engine, self.method = job, session, session.engine, method
        self.hold, self.threads_W, self.keep_host_state = hold, threads_W, keep_host_state
        self.saved_metrics, self.on_update = saved_metrics, on_update
        self.offset = state.step - job.order.whole_steps(state.cursor)  # not 0 if the batch size has changed
        self.start = state
        self.virtual = None if replay is None else VirtualTime(replay, len(job.workers), job.simulation)
        self.coordinator = Coordinator(
            pool,
            method,
            rate,
            len(job.workers),
            clock=time.perf_counter if self.virtual is None else self.virtual.clock,
            step_of=lambda samples: self.offset + job.order.whole_steps(samples),
            threads_W=None if threads_W is None else threads_W.tolist(),
        )
        block = max(int(np.max(self.engine.capacity_W)), job.batch)
        self.feed = BlockFeed(job.source, job.order, block=block, end=job.end, keep=2 * len(job.workers))

    def run(self, history: History) -> tuple[State, History]:
        """Trains to the end of the job, or until a stop is requested; returns the last state and the history."""
        job, simulation = self.job, self.job.simulation
        history.last_step = self.coordinator.step_of(job.end)
        if simulation is not None:
            simulation.step = self.start.step
        with closing(self.feed), job.record(history) as recorder:
            began = self.coordinator.clock()
            metrics = UpdateMetrics(self.session.layout, self.method.batch_W, began, self.saved_metrics, self.threads_W)
            with closing(self._events()) as events:  # an exception in here ends the workers at once
                for event in events:
                    if not isinstance(event, UpdateEvent):
                        self._log(event)
                        continue
                    metrics.add(event)
                    if self.on_update is not None:
                        self.on_update(event.update)
                    if event.resume_point is not None:
                        self._record(metrics, event.resume_point, recorder)
            metrics_state = metrics.state_dict()
            if metrics.unrecorded:  # stopped within a step: for the history only, a resumed run records the whole step
                recorder.append(self._make_record(metrics, 1 + self.coordinator.step))
            total = metrics.total
            rates_W = np.divide(total.counts_W, total.busy_W, out=np.zeros(metrics.workers), where=total.busy_W > 0)
            history.more = metrics.summary()
            recorder.finish(float(rates_W.sum()) or None, self.feed.waited / metrics.workers)
        if self.coordinator.error is not None:
            raise self.coordinator.error
        last = self.coordinator.resume_point()
        self.keep_host_state(last, metrics_state)
        return last.state, history

    def _record(self, metrics: UpdateMetrics, resume_point: ResumePoint, recorder: Recorder) -> None:
        """Records a step's worth of samples."""
        record = self._make_record(metrics, self.coordinator.step_of(metrics.seen))
        self.keep_host_state(resume_point, metrics.state_dict())
        self.job.check(record)
        recorder.add(record, resume_point.state)
        if self.job.simulation is not None:
            self.job.simulation.step = record.step

    def _make_record(self, metrics: UpdateMetrics, step: int) -> Record:
        return metrics.record(step, max(0, metrics.seen - 1) // self.job.order.size, self.job.saving())

    def _log(self, event: Event) -> None:
        if isinstance(event, WorkerRejoined):
            log.warning("Worker %d responded again and rejoins the training.", event.worker)
        elif isinstance(event, WorkerLost):
            samples, workers = sum(span.count for span in event.spans), self.job.workers
            active = int(self.coordinator.active_W().sum())
            left = f"Its {samples} samples go to the others; {active} of {len(workers)} workers go on."
            log.warning(
                "Worker %d (%s) failed: %s: %s %s",
                event.worker, workers.device(event.worker), type(event.error).__name__, _sentence(event.error),
                left if active else "No worker is left.",
            )  # fmt: skip

    def _events(self) -> Generator[Event]:
        if self.virtual is not None:
            rows_of = lambda item: self.engine.rows_of(item.worker, item.span.count)
            return self.virtual.run(self.coordinator, rows_of, self.method.read, self._local_phase, self.job.stopping)
        return Threads(
            self.coordinator,
            self._local_phase,
            len(self.job.workers),
            hold=self.hold,
            wait_limit=self.job.wait_limit,
            stopping=self.job.stopping,
        ).run()

    def _local_phase(self, item: WorkItem, leaves: list[jax.Array] | None = None) -> LocalResult:
        """The local phase of an item, on the calling thread.

        Parameters are read when the rows are ready, to keep staleness low, unless the driver has read them (`leaves`).
        """
        span = item.span
        rows = self.feed.rows(span)
        item.started = self.coordinator.clock()
        chunks = self.engine.chunks(rows, span.epoch, item.worker, span.start, span.count, self.job.order.seed)
        leaves = self.method.read(item) if leaves is None else leaves
        with profiling.phase("local", worker=item.worker):
            return self.engine.phase(item.worker, chunks, leaves, leaves[-1])


def _sentence(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
    return text if text.endswith((".", "!", "?")) else f"{text}."
