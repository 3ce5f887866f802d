"""The pipeline of steps: local phases, sums and reports one after the other, the host's work hidden behind them.

    push(n):  wait for the local phases of step n - 1   ->  dispatch their sum
              start the local phases of step n
              read the report of step n - 1, learn from its timings

The caller plans and packs step n + 1 while the phases of step n run, so the plan of step n uses the timings up to step
n - 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.engines.session import Session
from hetjax.fleet.agree import Disagreement
from hetjax.planning.controllers.base import Observation
from hetjax.reduce.base import Reduce, own_slots
from hetjax.reduce.layout import MANY, StepReport
from hetjax.reduce.update import State
from hetjax.sampling.order import PlannedStep
from hetjax.simulation.speeds import Simulation

Tree = Any
Finished = tuple[PlannedStep, StepReport]


@dataclass
class Requests:
    """What this process asks all others for; they learn of it with the sums of a step."""

    stop: bool = False
    save: bool = False
    left: int = MANY  # further batches that this process has: 0, 1, or MANY for more

    def take_save(self) -> bool:
        asked, self.save = self.save, False
        return asked


@dataclass(frozen=True)
class _Running:
    """A step whose local phases have been started."""

    step: PlannedStep
    futures: list[Future[LocalResult]]
    timed: bool  # as far as that was known when it started
    left: int  # Requests.left when it started: what is asked for later is about a later step


class Pipeline:
    """Steps of one session from one state on.

    Args:
        session: engine, clocks and layout.
        reduce: what sums and updates.
        core: what the devices hold at the start, in buffers of its own.
        made: steps made before the first one.
        requests: what this process asks for; None in an evaluation.
        simulation: simulated speeds, or None.
        learn: called with the timings of every step; None in an evaluation, where the ladder does not grow.
    """

    def __init__(
        self,
        session: Session,
        reduce: Reduce,
        core: Any,
        *,
        made: int = 0,
        requests: Requests | None = None,
        simulation: Simulation | None = None,
        learn: Callable[[Observation], None] | None = None,
    ):
        self.session, self.reduce, self.core, self.made = session, reduce, core, made
        self.requests, self.simulation, self.learn = requests or Requests(), simulation, learn
        self.replicas = reduce.replicas(core, None)
        self._cold = simulation is None  # caches and allocators of real devices warm up in the first step
        self._running: _Running | None = None
        self._summed: tuple[PlannedStep, Any] | None = None

    def push(self, step: PlannedStep, packed: Any) -> Finished | None:
        """Start a step; returns the one before it with its report, None where there is none."""
        self.complete()
        engine = self.session.engine
        if self.learn is not None:
            engine.grow(step.plan.counts_W)
        timed = not (engine.compiling or self._cold or self.session.exact_sync)
        self._cold = False
        if self.simulation is not None:
            self.simulation.step = step.number
        self._running = _Running(step, engine.start(self.replicas, packed), timed, self.requests.left)
        return self._finished()

    def complete(self) -> None:
        """Wait for the local phases that run and dispatch their sum, which gives up the buffers of `core`."""
        if self._running is None:
            return
        running, self._running = self._running, None
        laps = self.session.clocks.wait(running.futures)
        parts_w, slots_w = [lap.parts for lap in laps], self._slots(running, laps)
        self.core, tail = self.reduce(self.core, parts_w, slots_w, running.step)
        self.replicas = self.reduce.replicas(self.core, tail)
        self._summed, self.made = (running.step, tail), self.made + 1

    def flush(self) -> Finished | None:
        """End what runs; the last step and its report, if it has not been returned yet."""
        self.complete()
        return self._finished()

    def abandon(self) -> None:
        """Wait until nothing runs any more, and leave the last step out: the state is the one before it."""
        if self._running is not None:
            running, self._running = self._running, None
            wait(running.futures, timeout=self.session.clocks.wait_limit)

    def state(self, step: int, cursor: int) -> State:
        """The state after step number `step`; waits for that step if it is still running."""
        if step == self.made + 1:
            self.complete()
        if step != self.made:
            raise ValueError(
                f"The state after step {step} is gone: it was given to a step, which reuses its buffers. Use the state "
                "that the last call returned, and copy what you want to keep with jax.tree.map(np.asarray, state)."
            )
        return self.reduce.state(self.core, step, cursor)

    @property
    def next(self) -> int:
        """The number of the next step: how many there are before it."""
        return self.made + (self._running is not None)

    def check_last(self, step: int) -> None:
        """Refuse a state that is not the one after the last step."""
        if step != self.next:
            raise ValueError(
                f"The state after step {step} was given to a step before, which reuses its buffers. Use the state that "
                f"the last call returned (after step {self.next})."
            )

    def phases(self, packed: Any) -> list[LocalResult]:
        """Run the local phases alone, without a sum: for measurements. The step that runs is ended first."""
        self.complete()
        return self.session.clocks.wait(self.session.engine.start(self.replicas, packed))

    def _finished(self) -> Finished | None:
        """Read the last report and pass its timings on."""
        if self._summed is None:
            return None
        (step, tail), self._summed = self._summed, None
        report = self.reduce.read(tail)
        if (report.checksums_W != step.plan.checksum).any():
            odd = np.flatnonzero(report.checksums_W != step.plan.checksum).tolist()
            raise Disagreement(
                f"Workers {odd} used another plan than this process in step {step.number}: the processes no longer "
                "agree. Check that all run the same code, data and configuration, and start again from the last "
                "checkpoint."
            )
        if self.learn is not None:
            times_W = np.where(step.plan.counts_W > 0, report.times_W, np.nan)
            counts_W, epoch = step.plan.counts_W, step.span.epoch
            self.learn(Observation(counts_W, step.work_W, np.round(times_W, 6), epoch, step.number))
        return step, report

    def _slots(self, running: _Running, laps: Sequence[LocalResult]) -> list[list[float]]:
        plan, timed = running.step.plan, running.timed and not self.session.engine.compiling
        stop, save = self.requests.stop, self.requests.take_save()
        return [
            own_slots(
                lap.seconds if timed and plan.counts_W[i] > 0 else None,
                lap.rows,
                plan.checksum,
                stop,
                save,
                running.left,
            )
            for i, lap in zip(self.session.engine.workers.local, laps, strict=True)
        ]


class LiveState:
    """The state after a step that may still be running.

    It has what a `State` has; reading any of its arrays first waits for the step. The next call of `Step` takes it
    over: then only the state which that call returned can be used.
    """

    def __init__(self, pipeline: Pipeline, step: int, cursor: int):
        self.pipeline, self.step, self.cursor = pipeline, step, cursor

    def whole(self) -> State:
        """The plain state, with all of its arrays."""
        return self.pipeline.state(self.step, self.cursor)

    @property
    def params(self) -> Tree:
        """The parameters after this step."""
        return self.whole().params

    @property
    def model_state(self) -> Tree:
        """The model state, such as the statistics of BatchNorm; None without."""
        return self.whole().model_state

    @property
    def ema(self) -> Tree:
        """The moving average of the parameters; None without."""
        return self.whole().ema

    def __repr__(self) -> str:
        return f"LiveState(step={self.step}, cursor={self.cursor})"


jax.tree_util.register_pytree_node(LiveState, lambda state: ((state.whole(),), None), lambda _, whole: whole[0])
