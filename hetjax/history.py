"""What a run leaves behind: one record a step, hooks that see them, and a summary."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.devices.compile import compiles
from hetjax.simulation.speeds import Simulation
from hetjax.thinning import Thinning

if TYPE_CHECKING:
    from hetjax.reduce.layout import StepReport
    from hetjax.sampling.order import PlannedStep


@dataclass(frozen=True)
class Record:
    """One finished step."""

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float]
    counts_W: np.ndarray
    rows_W: np.ndarray  # computed, padding included
    times_W: np.ndarray  # local seconds; NaN where a worker had no samples or the step was not timed
    step_time: float  # seconds from the end of the step before to the end of this one
    seconds: float  # since the start of the run
    samples: int  # since the start of the run
    changed: bool  # whether the plan changed with this step
    reason: str
    nonfinite: tuple[int, ...] = ()  # workers whose loss, gradient or update held NaN or infinity
    bad_update: bool = False  # whether it was the update: loss and gradients were finite
    left_out: bool = False  # whether nothing was learned in this step because of that
    save: bool = False  # whether a checkpoint was asked for after this step
    stop: bool = False  # whether the end was asked for
    ideal: float | None = None  # samples a second of all workers at best, where speeds are simulated
    more: dict[str, Any] = field(default_factory=dict)  # what else a sync has to tell, as plain JSON values

    @classmethod
    def of(
        cls,
        step: PlannedStep,
        report: StepReport,
        step_time: float,
        seconds: float,
        samples: int,
        ideal: float | None = None,
    ) -> Record:
        """What was planned, and what came of it."""
        return cls(
            step=step.number + 1,
            epoch=step.span.epoch,
            loss=report.loss,
            metrics=report.metrics,
            counts_W=step.plan.counts_W,
            rows_W=report.rows_W,
            times_W=report.times_W,
            step_time=step_time,
            seconds=seconds,
            samples=samples,
            changed=step.plan.changed,
            reason=step.plan.reason,
            nonfinite=tuple(int(i) for i in np.flatnonzero(report.nonfinite_W | report.bad_update_W)),
            bad_update=bool(report.bad_update_W.any()),
            left_out=report.left_out,
            save=report.save,
            stop=report.stop,
            ideal=ideal,
        )

    @property
    def event(self) -> bool:
        """Whether something happened at this step that a thinned history should still show."""
        return self.changed or bool(self.nonfinite)

    @property
    def samples_per_s(self) -> float:
        return float(self.counts_W.sum()) / self.step_time if self.step_time > 0 else float("nan")

    @property
    def efficiency(self) -> float:
        """Samples a second over the ideal: what all workers would do if none of them ever waited.

        With real speeds that is the sum of their own rates, count_i / time_i. NaN where the step was not timed.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = float(np.nansum(np.where(self.counts_W > 0, self.counts_W / self.times_W, 0.0)))
        ideal = rates if self.ideal is None else self.ideal
        return self.samples_per_s / ideal if ideal > 0 else float("nan")

    def row(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return {
            "step": self.step,
            "epoch": self.epoch,
            "loss": self.loss,
            "counts": self.counts_W.tolist(),
            "rows": self.rows_W.tolist(),
            "times": [None if np.isnan(t) else float(t) for t in self.times_W],
            "step_time": self.step_time,
            "samples_per_s": self.samples_per_s,
            "seconds": self.seconds,
            "samples": self.samples,
            "changed": self.changed,
            "reason": self.reason,
            "metrics": self.metrics,
            **({"nonfinite": list(self.nonfinite)} if self.nonfinite else {}),
            **self.more,
        }


@dataclass
class Totals:
    """Sums over all steps of a run, whether their records are kept or not."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    plan_changes: int = 0
    timed_samples_W: np.ndarray | float = 0.0
    timed_seconds_W: np.ndarray | float = 0.0

    def add(self, record: Record) -> None:
        """Count one more step."""
        timed_W = ~np.isnan(record.times_W)
        self.steps += 1
        self.samples += int(record.counts_W.sum())
        self.seconds += record.step_time
        self.plan_changes += record.changed
        self.timed_samples_W = self.timed_samples_W + np.where(timed_W, record.counts_W, 0)
        self.timed_seconds_W = self.timed_seconds_W + np.where(timed_W, record.times_W, 0.0)


@dataclass
class History:
    """The records of a call to `fit`, and what the run as a whole came to.

    All records are kept up to 20,000 steps. Beyond that `records`, and with them `losses` and `counts`, are thinned out
    to an evenly spread half of the steps, then a quarter, and so on; the first and the last record stay, and so do
    steps at which the plan changed or a value was not finite, as long as these are few. `totals` and `summary()` count
    every step.
    """

    records: list[Record] = field(default_factory=list, init=False)
    ideal_samples_per_s: float | None = None
    engine: str = ""
    transport: str = ""
    controller: str = ""
    workers: int = 0
    last_step: int = 0  # the number that the last step will have if nobody stops the run
    recompiles_after_warmup: int = 0
    data_wait_s: float = 0.0
    overruns: int = 0
    more: dict[str, Any] = field(default_factory=dict)  # what else a sync has to tell, as plain JSON values
    totals: Totals = field(default_factory=Totals, init=False)
    thinning: Thinning = field(default_factory=Thinning, repr=False)

    def add(self, record: Record) -> None:
        """Append the record of a finished step, in place of the last one if that is not to be kept."""
        self.totals.add(record)
        if len(self.records) > 1 and not self.thinning.keeps(self.records[-1].step, self.records[-1].event):
            self.records.pop()
        self.records.append(record)
        if len(self.records) > self.thinning.limit:
            self.records[:] = self.thinning.thin(self.records, lambda record: (record.step, record.event))

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def counts(self) -> np.ndarray:
        """Counts over time, [steps, workers]."""
        return np.array([record.counts_W for record in self.records])

    def own_rates(self) -> float | None:
        """The ideal with real speeds: each worker's samples over its own local seconds, added up."""
        samples_W, seconds_W = np.atleast_1d(self.totals.timed_samples_W), np.atleast_1d(self.totals.timed_seconds_W)
        rate_W = np.divide(samples_W, seconds_W, out=np.zeros_like(seconds_W), where=seconds_W > 0)
        return float(rate_W.sum()) or None

    def samples_per_s(self, skip: int = 0) -> float:
        """Throughput over the run, the first `skip` records aside."""
        samples, seconds = self.totals.samples, self.totals.seconds
        if skip and self.records:
            before, last = self.records[:skip][-1], self.records[-1]
            samples, seconds = last.samples - before.samples, last.seconds - before.seconds
        return samples / seconds if seconds > 0 else float("nan")

    def summary(self) -> dict[str, Any]:
        wall = self.records[-1].seconds if self.records else 0.0
        rate = self.samples_per_s()
        return {
            "controller": self.controller,
            "engine": self.engine,
            "transport": self.transport,
            "workers": self.workers,
            "steps": self.totals.steps,
            "samples": self.totals.samples,
            "wall_s": wall,
            "samples_per_s": rate,
            "ideal_samples_per_s": self.ideal_samples_per_s,
            "efficiency": rate / self.ideal_samples_per_s if self.ideal_samples_per_s else None,
            "final_loss": self.losses[-1] if self.records else None,
            "plan_changes": self.totals.plan_changes,
            "recompiles_after_warmup": self.recompiles_after_warmup,
            "data_wait_share": self.data_wait_s / wall if wall else 0.0,
            "overruns": self.overruns,
            **self.more,
        }


log = logging.getLogger("hetjax")
Hook = Callable[[Record, Any], None]  # may also have begin(history) and end(history), called around the steps


class Recorder:
    """A context around the steps of a run.

    Args:
        history: where records go.
        hooks: called with every record and the state after its step.
        simulation: simulated speeds, or None.
    """

    def __init__(self, history: History, hooks: Sequence[Hook] = (), simulation: Simulation | None = None):
        self.history, self.hooks, self.simulation = history, hooks, simulation
        self._compiled = 0
        self._ideal_s, self._samples = 0.0, 0

    def __enter__(self) -> Recorder:
        if self.simulation is not None:
            self.history.ideal_samples_per_s = self.simulation.ideal()
        self._tell("begin")
        self._compiled = compiles()
        return self

    def add(self, record: Record, state: Any) -> None:
        """A finished step; hooks must copy what they want to keep of the state, whose buffers will be reused."""
        self.append(record)
        for hook in self.hooks:
            hook(record, state)

    def append(self, record: Record) -> None:
        """The same for the history alone."""
        self.history.add(record)
        samples = int(record.counts_W.sum())
        if self.simulation is not None:
            self._samples, self._ideal_s = self._samples + samples, self._ideal_s + samples / self.simulation.ideal()

    def finish(self, rate: float | None, waited: float) -> None:
        """The run has ended well.

        Args:
            rate: samples a second of all workers together at best, where speeds are real.
            waited: seconds that it stood still for data.
        """
        history = self.history
        history.recompiles_after_warmup = compiles() - self._compiled
        history.ideal_samples_per_s = self._samples / self._ideal_s if self._ideal_s else rate
        history.data_wait_s = waited
        if self.simulation is not None:
            history.overruns = self.simulation.overruns
            if warning := self.simulation.verdict():
                log.warning(warning)

    def __exit__(self, *_: object) -> None:
        self._tell("end")

    def _tell(self, what: str) -> None:
        for hook in self.hooks:
            if hasattr(hook, what):
                getattr(hook, what)(self.history)
