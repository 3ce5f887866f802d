"""The pipeline of steps: packing, local phases, sums and reports, with the host's work hidden behind the devices'.

    push(n):  wait for the local phases of step n - 1   ->  dispatch their sum
              start the local phases of step n
              read the report of step n - 1, learn from its timings

The caller plans and packs step n + 1 while the phases of step n run, so the plan of step n uses the timings up to step
n - 2.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hetjax import profiling
from hetjax.data.batches import FeedBatch, HostBatch, check_rows, matching, sample_of
from hetjax.data.prefetch import Rows
from hetjax.devices.workers import Workers
from hetjax.engines import Engine
from hetjax.engines.clocks import LocalResult
from hetjax.engines.session import Session
from hetjax.fleet.agree import Disagreement
from hetjax.planning.controllers.base import Observation, Plan
from hetjax.reduce.base import Reduce, own_slots
from hetjax.reduce.layout import MANY, StepReport
from hetjax.sampling.order import PlannedStep, Span
from hetjax.simulation.speeds import Simulation
from hetjax.state import Deferred, State

Finished = tuple[PlannedStep, StepReport]


@dataclass
class Requests:
    """What this process asks of all processes; the requests travel with the sums of a step."""

    stop: bool = False
    save: bool = False
    leave: bool = False  # this process alone leaves an elastic fleet
    left: int = MANY  # batches this process has left: 0, 1, or MANY for more

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        requested, self.save = self.save, False
        return requested


@dataclass(frozen=True)
class _Running:
    """A step whose local phases have been started."""

    step: PlannedStep
    futures: list[Future[LocalResult]]
    timed: bool  # as far as known when it started
    left: int  # Requests.left when it started: a later value belongs to a later step


class Pipeline:
    """Runs the steps of one session, starting from one state; or of several, for rows of several shapes.

    Args:
        sessions: engine, clocks and layout for each bucket of rows; all layouts are alike.
        reduce: sums and updates.
        core: what the devices hold at the start, in buffers owned by the pipeline.
        seed: source of the samples' random keys, with their positions.
        made: number of steps made before the first one.
        requests: requests of this process; None in an evaluation.
        simulation: simulated speeds, or None.
        learn: called with the timings of every step; None in an evaluation, where the ladder does not grow.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        reduce: Reduce,
        core: Any,
        *,
        seed: int,
        made: int = 0,
        requests: Requests | None = None,
        simulation: Simulation | None = None,
        learn: Callable[[Observation], None] | None = None,
    ):
        self.sessions, self.reduce, self.core, self.seed, self.made = sessions, reduce, core, seed, made
        self.requests, self.simulation, self.learn = requests or Requests(), simulation, learn
        self.replicas = reduce.replicas(core, None)
        self._prepare = getattr(reduce, "prepare", None)  # of a reduce in which processes may sit out
        # Caches and allocators of real devices warm up in the first step.
        self._cold = set(range(len(sessions))) if simulation is None else set()
        self._running: _Running | None = None
        self._summed: tuple[PlannedStep, Any] | None = None  # with its tail, or its report
        self.recovery: Any = None  # where members may be lost (`hetjax.recovery`)
        self.last: tuple[PlannedStep, Any] | None = None  # there: the last step made, and its tail
        self.handed_out = -1  # the last step whose report was returned
        self._asked: dict[int, tuple[bool, bool]] = {}  # requests of stop and save by step, for when it is done again
        self.ended: float | None = None  # when the sum of the last step was dispatched
        self._seconds: float | None = None  # between the last two of these; None: not timed

    def submit(self, batch: HostBatch, span: Span, plan: Plan) -> Finished | None:
        """Pack this process's rows of a batch and push their step. A failed push abandons the running step."""
        engine = self.sessions[span.bucket].engine
        with profiling.step(self.next):
            members = None if self.recovery is None else self.recovery.planned_for
            packed = self.pack(batch, span, plan)
            try:
                if self.recovery is not None:
                    self.complete()
                    if self.recovery.planned_for != members or self.recovery.outdated:
                        plan = self.recovery.step.plan(len(batch), span.epoch, span.bucket)
                        packed = self.pack(batch, span, plan)
                    self.recovery.keep(self.next, batch, span)
                return self.push(PlannedStep(self.next, span, plan, engine.limits().work(plan.counts_W)), packed)
            except BaseException:
                self.abandon()
                raise

    def pack(self, batch: HostBatch, span: Span, plan: Plan) -> Any:
        """Lay this process's rows of a batch out for the engine."""
        with profiling.phase("pack"):
            return packed_rows(self.sessions[span.bucket].engine, batch, span, plan, self.seed)

    def push(self, step: PlannedStep, packed: Any) -> Finished | None:
        """Start a step and return the previous one with its report; None where there is none."""
        self.complete()
        self._start(step, packed)
        return self._finished()

    def _start(self, step: PlannedStep, packed: Any) -> None:
        bucket = step.span.bucket
        engine = self.sessions[bucket].engine
        if self.learn is not None:
            for session in self.sessions:
                session.engine.grow(step.plan.counts_W if session.engine is engine else None)
        timed = not (self._compiling or bucket in self._cold or self.session.exact_sync)
        self._cold.discard(bucket)
        if self.simulation is not None:
            self.simulation.step = step.number
        if self._prepare is not None and (core := self._prepare(self.core, step)) is not self.core:
            self.core, self.replicas = core, self.reduce.replicas(core, None)
        self._running = _Running(step, engine.start(self.replicas, packed), timed, self.requests.left)

    def complete(self) -> None:
        """Wait for the running local phases and dispatch their sum, which donates the buffers of `core`."""
        if self._running is None:
            return
        if self.recovery is None:
            self.complete_once()
        else:
            self.recovery.complete(self.complete_once)

    def complete_once(self) -> None:
        """See `complete`; ends with `GenerationChanged` if a member of an elastic fleet is lost."""
        if self._running is None:
            return
        running = self._running
        if self.recovery is None:
            self._running = None  # whatever happens
        with profiling.phase("wait"):
            results = self.sessions[running.step.span.bucket].clocks.wait(running.futures)
        parts_w, slots_w = [result.parts for result in results], self._slots(running, results)
        with profiling.phase("reduce"):
            self.core, tail = self.reduce(self.core, parts_w, slots_w, running.step)
            self.replicas = self.reduce.replicas(self.core, tail)
        self._running = None
        self._summed, self.made = (running.step, tail), self.made + 1
        if self.recovery is not None:
            self.last = running.step, tail.copy()
        now, before = time.perf_counter(), self.ended
        self._seconds = None if before is None or not running.timed or self._compiling else now - before
        self.ended = now

    def flush(self) -> Finished | None:
        """Complete the running step and return it with its report; None if that was returned before."""
        self.complete()
        return self._finished()

    def close(self) -> None:
        """Complete the running step, and end the exchange of a delayed update."""
        try:
            self.complete()
        finally:
            getattr(self.reduce, "close", lambda: None)()

    def abandon(self) -> PlannedStep | None:
        """Wait until nothing runs, and drop the running step, which is returned: the state is the one before it."""
        with suppress(Exception):  # the error that led here counts
            getattr(self.reduce, "land", lambda: None)()
        if self._running is None:
            return None
        running, self._running = self._running, None
        wait(running.futures, timeout=self.session.clocks.wait_limit)
        return running.step

    # -- where members may be lost: see `hetjax.recovery` --

    def restart(self, batch: HostBatch, span: Span, plan: Plan) -> None:
        """Do a step again; its report was read before."""
        packed = self.pack(batch, span, plan)
        self.complete_once()
        limits = self.sessions[span.bucket].engine.limits()
        self._start(PlannedStep(self.next, span, plan, limits.work(plan.counts_W)), packed)
        self._finished()

    def read_already(self) -> None:
        """Read the last report now, without learning from timings of former members."""
        if self._summed is not None and not isinstance(self._summed[1], StepReport):
            step, tail = self._summed
            self._summed = step, self.report_of(step, tail)

    def summed_already(self, step: PlannedStep, tail: np.ndarray) -> None:
        """Take over a step that other members have made."""
        self._summed, self.last = (step, self.report_of(step, tail)), (step, tail)

    def report_of(self, step: PlannedStep, tail: np.ndarray) -> StepReport:
        """Read the tail of a step, without learning from it."""
        return StepReport.read(self.session.layout, tail, len(step.plan.counts_W))

    def forget(self) -> None:
        """Drop the last report: its step is done again."""
        self._summed = None

    def settled(self, core: Any, made: int) -> None:
        """Go on from a state that all members have."""
        self.core, self.made, self.ended, self._seconds = core, made, None, None
        self.replicas = self.reduce.replicas(core, None)

    def state(self, step: int, cursor: int, extent: str = "state") -> State:
        """Return the state after step number `step`, waiting for that step if it still runs.

        Args:
            step: number of the step.
            cursor: the cursor after it.
            extent: 'state' for all of it, 'evaluated' without the optimizer, 'view' for what this process holds. All
                processes have to call this, except for a view.
        """
        if self.recovery is None:
            return self._state(step, cursor, extent)
        self.reach(step)
        whole = lambda: self.recovery.run(lambda: self._state(step, cursor, "state"))
        if extent == "view":
            view = self._state(step, cursor, extent)
            later = lambda part: Deferred(whole, of_state=True) if isinstance(part, Deferred) else part
            return replace(view, opt_state=later(view.opt_state), ema=later(view.ema))
        return self.recovery.run(lambda: self._state(step, cursor, extent))

    def reach(self, step: int) -> None:
        """Wait for this step if it is the running one."""
        if step == self.made + 1:
            self.complete()

    def _state(self, step: int, cursor: int, extent: str) -> State:
        self.reach(step)
        if step != self.made:
            raise ValueError(
                f"The state after step {step} is gone: it was given to a step, which reuses its buffers. Use the state "
                "that the last call returned, and copy what you want to keep with jax.tree.map(np.asarray, state)."
            )
        return getattr(self.reduce, extent, self.reduce.state)(self.core, step, cursor)

    @property
    def session(self) -> Session:
        """The session of the longest rows."""
        return self.sessions[0]

    @property
    def _compiling(self) -> bool:
        return any(session.engine.compiling for session in self.sessions)

    def bucket_of(self, batch: HostBatch) -> int:
        """The bucket of a batch."""
        return bucket_of(batch, self.sessions)

    @property
    def next(self) -> int:
        """Number of the next step, counted from 0."""
        return self.made + (self._running is not None)

    def check_last(self, step: int) -> None:
        """Refuse a state that is not the one after the last step."""
        if step != self.next:
            raise ValueError(
                f"The state after step {step} was given to a step before, which reuses its buffers. Use the state that "
                f"the last call returned (after step {self.next})."
            )

    def phases(self, batch: HostBatch, plan: Plan) -> Callable[[], list[LocalResult]]:
        """Prepare local phases alone, without a sum, for measurements. Running them completes the running step."""
        session = self.sessions[bucket := self.bucket_of(batch)]
        span = Span(0, 0, int(plan.counts_W.sum()), bucket=bucket)
        session.engine.limits().check_counts(plan.counts_W, span.batch, "The caller")
        packed = self.pack(batch, span, plan)

        def run() -> list[LocalResult]:
            self.complete()
            return session.clocks.wait(session.engine.start(self.replicas, packed))

        return run

    def _finished(self) -> Finished | None:
        """Read the last report and learn from its timings."""
        if self._summed is None:
            return None
        (step, tail), self._summed = self._summed, None
        with profiling.phase("report"):
            report = tail if isinstance(tail, StepReport) else self.reduce.read(tail)
        if (report.checksums_W != step.plan.checksum).any():
            odd = np.flatnonzero(report.checksums_W != step.plan.checksum).tolist()
            raise Disagreement(
                f"Workers {odd} used another plan than this process in step {step.number}: the processes no longer "
                "agree. Check that all run the same code, data and configuration, and restart from the last checkpoint."
            )
        if self.learn is not None and report is not tail:
            times_W = np.where(step.plan.counts_W > 0, report.times_W, np.nan)
            counts_W, epoch = step.plan.counts_W, step.span.epoch
            before = float(report.before_W[np.argmax(counts_W > 0)])  # by one clock for all processes
            self.learn(Observation(counts_W, step.work_W, np.round(times_W, 6), epoch, step.number, before))
        if self.recovery is not None and step.number <= self.handed_out:
            return None  # it was done again
        self.handed_out, self._asked[step.number] = step.number, (report.stop, report.save)
        return step, report

    def _slots(self, running: _Running, results: Sequence[LocalResult]) -> list[list[float]]:
        plan, number = running.step.plan, running.step.number
        timed = running.timed and not self._compiling
        if number not in self._asked:
            save = number > self.handed_out and self.requests.take_save()  # otherwise its record is not read again
            self._asked = {k: asked for k, asked in self._asked.items() if k >= number - 1}
            self._asked[number] = self.requests.stop, save
        stop, save = self._asked[number]
        entry = 0 if self.recovery is None else self.recovery.link.entry
        return [
            own_slots(
                result.seconds if timed and result.as_planned and plan.counts_W[i] > 0 else None,
                result.rows,
                plan.checksum,
                stop,
                save,
                running.left,
                self._seconds,
                entry,
            )
            for i, result in zip(self.session.engine.workers.local, results, strict=True)
        ]


def bucket_of(batch: HostBatch, sessions: Sequence[Session]) -> int:
    """The bucket of a batch, by the shape of its rows; one that fits none is refused when it is packed."""
    if isinstance(batch, FeedBatch):
        return batch.span.bucket
    if len(sessions) == 1:
        return 0
    return matching(sample_of(batch), [session.engine.program.row for session in sessions])


def packed_rows(engine: Engine, batch: HostBatch, span: Span, plan: Plan, seed: int) -> Any:
    """Lay this process's rows of a batch out for an engine."""
    start, stop = own_span(engine.workers, plan, span)
    rows = batch.rows(start - span.start, stop - span.start)
    rows = rows if isinstance(rows, Rows) else Rows(rows, start)
    check_rows(rows.tree, engine.program.row)
    return engine.pack(rows, span, plan.counts_W, seed)


def own_span(workers: Workers, plan: Plan, span: Span) -> tuple[int, int]:
    """Positions that this process computes under a plan: at least one, as padding rows are copies of a real row."""
    if not workers.several_processes:
        return span.start, max(span.stop, span.start + 1)
    bounds_W1 = span.start + plan.bounds_W1
    first, last = int(bounds_W1[workers.local[0]]), int(bounds_W1[workers.local[-1] + 1])
    start = min(first, span.stop - 1)
    return start, max(start + 1, last)
