"""The loop: plan, local, reduce, step after step, with what the host does hidden behind the devices' work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hetjax.data.feed import Feed
from hetjax.plan.controllers.protocol import Observation, Plan
from hetjax.plan.limits import Limits
from hetjax.plan.node_sampler import NodeSampler
from hetjax.plan.partition import BlockSampler, ProportionalSampler
from hetjax.plan.sampler import Sampler, Span
from hetjax.run.agree import Disagreement
from hetjax.run.clocks import Lap
from hetjax.run.engines import Rows
from hetjax.run.layout import Report
from hetjax.run.reduce import Reduce, own_slots
from hetjax.run.session import Session
from hetjax.run.simulate import Simulation
from hetjax.run.update import State
from hetjax.run.workers import Workers

AnySampler = Sampler | ProportionalSampler | BlockSampler | NodeSampler
_MARGIN_SHARE = 8  # rows are fetched ahead with a margin of an eighth of a process's slice on both sides of it


@dataclass
class Wishes:
    """What somebody has asked for since the last step; all processes hear of it with the sums of the same one."""

    stop: bool = False
    save: bool = False

    def take_save(self) -> bool:
        asked, self.save = self.save, False
        return asked


@dataclass(frozen=True)
class Flight:
    """A step on its way: what was planned, and how much work that is."""

    step: Span
    plan: Plan
    work_W: np.ndarray


@dataclass(frozen=True)
class Loop:
    """Steps of one session over one order of samples.

    decide   (limits, batch, epoch) -> plan
    learn    is told the timings of every step; None in an evaluation, where the ladder does not grow and nobody stops
    """

    session: Session
    reduce: Reduce
    sampler: AnySampler
    feed: Feed
    workers: Workers
    simulation: Simulation | None
    wishes: Wishes
    seed: int
    decide: Callable[[Limits, int, int], Plan]
    learn: Callable[[Observation], None] | None

    def run(self, state: State, end: int, max_steps: int | None = None) -> Iterator[tuple[Flight, Report]]:
        """One step after the other; yields each finished step while the next one computes.

        While step n computes, the host reads the report of step n-1, lets the controller learn from it, plans step n+1
        and lays out its rows.
        """
        engine, step, cursor, left = self.session.engine, state.step, state.cursor, max_steps
        if self.learn is not None:
            self.wishes.stop = False
        flying: Flight | None = None
        flight, packed = self._plan(cursor, end)
        while True:
            if self.learn is not None:
                engine.grow(flight.plan.counts_W)
            disturbed = engine.compiling
            if self.simulation is not None:
                self.simulation.step = step
            futures = engine.start(self.reduce, packed)
            more = False
            try:
                if flying is not None:
                    yield flying, (report := self._report(flying, step - 1))
                    if report.stop and self.learn is not None:
                        left = 1
                cursor += flight.step.advance
                left = None if left is None else left - 1
                more = cursor < end and left != 0
                if more:
                    following, packed = self._plan(cursor, end)
            finally:
                laps = self.session.clocks.wait(futures)
            cold = flying is None and self.simulation is None  # caches and allocators of real devices warm up
            timed = not (disturbed or engine.compiling or cold or self.session.exact_sync)
            plan = flight.plan
            weights = None if plan.weights_W is None else [float(plan.weights_W[i]) for i in self.workers.local]
            self.reduce.step(laps, self._slots(plan, laps, timed), flight.step, weights)
            flying, step = flight, step + 1
            if not more:
                break
            flight = following
        yield flying, self._report(flying, step - 1)

    def _plan(self, cursor: int, end: int) -> tuple[Flight, Any]:
        """Counts for the step at the cursor, and its rows laid out; the rows of the step after it are sent for."""
        limits = self.session.engine.limits()
        step, plan = self.sampler.next(cursor, partial(self.decide, limits))
        if isinstance(self.sampler, BlockSampler):  # which asks nobody
            limits.check_counts(plan.counts_W, step.batch, "The partition")
        rows = Rows(*self.feed.take(step.epoch, *own_span(self.workers, plan, step)))
        packed = self.session.engine.pack(rows, step, plan.counts_W, self.seed)
        following = self.sampler.ahead(cursor + step.advance) if cursor + step.advance < end else None
        if following is not None:
            self.feed.prepare(following.epoch, *own_span(self.workers, plan, following, _MARGIN_SHARE))
        return Flight(step, plan, limits.work(plan.counts_W)), packed

    def _report(self, flight: Flight, step: int) -> Report:
        """Read a step's report and pass its timings on."""
        report = self.reduce.report()
        if (report.checksums_W != flight.plan.checksum).any():
            odd = np.flatnonzero(report.checksums_W != flight.plan.checksum).tolist()
            raise Disagreement(
                f"Workers {odd} used another plan than this process in step {step}: the processes no longer agree. "
                "Check that all run the same code, data and configuration, and start again from the last checkpoint."
            )
        if self.learn is not None:
            times_W = np.where(flight.plan.counts_W > 0, report.times_W, np.nan)
            seen = Observation(flight.plan.counts_W, flight.work_W, np.round(times_W, 6), flight.step.epoch, step)
            self.learn(seen)
        return report

    def _slots(self, plan: Plan, laps: Sequence[Lap], timed: bool) -> list[list[float]]:
        save = self.learn is not None and self.wishes.take_save()  # an evaluation keeps the wish for the next step
        return [
            own_slots(
                lap.seconds if timed and plan.counts_W[i] > 0 else None,
                lap.rows,
                plan.checksum,
                self.wishes.stop,
                save,
            )
            for i, lap in zip(self.workers.local, laps, strict=True)
        ]


def own_span(workers: Workers, plan: Plan, step: Span, margin_share: int | None = None) -> tuple[int, int]:
    """Positions of an epoch that this process computes under a plan, with a margin of that share, within the step.

    At least one, for padding is made of real rows.
    """
    if not workers.several_processes:
        return step.start, max(step.stop, step.start + 1)
    bounds_W1 = step.start + plan.bounds_W1
    first, last = int(bounds_W1[workers.local[0]]), int(bounds_W1[workers.local[-1] + 1])
    margin = 0 if margin_share is None else max(1, (last - first) // margin_share)
    start = min(max(step.start, first - margin), step.stop - 1)
    return start, max(start + 1, min(step.stop, last + margin))
