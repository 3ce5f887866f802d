"""The history of a run: one record per step, hooks that receive them, and a summary."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hetjax.devices.compile import compiles
from hetjax.headline import headline
from hetjax.simulation.speeds import Simulation
from hetjax.thinning import Thinning

if TYPE_CHECKING:
    from hetjax.reduce.layout import StepReport
    from hetjax.sampling.order import PlannedStep

log = logging.getLogger("hetjax")


@dataclass(frozen=True)
class Record:
    """One finished step. Arrays ending in `_W` have one entry per worker.

    Attributes:
        step: number of the step, from 1.
        epoch: its epoch, from 0.
        loss: mean loss over the global batch.
        metrics: mean (or sum) of each metric over the global batch: a number, or an array for one with a shape.
        counts_W: samples of each worker.
        rows_W: rows that each worker computed, padding included.
        times_W: seconds of each worker's local phase; NaN without samples, or where the step was not timed.
        step_time: seconds from the end of the previous step to the end of this one.
        seconds: seconds since the start of the run.
        samples: samples since the start of the run.
        changed: whether the plan changed with this step.
        reason: why it changed.
        nonfinite: workers whose loss, gradient or update was NaN or infinite.
        bad_update: whether only the update was: loss and gradients were finite.
        left_out: whether the update was left out because of that.
        save: whether a checkpoint was requested after this step.
        stop: whether the end of the run was requested.
        ideal: samples per second if no worker ever waited, where speeds are simulated; otherwise None.
        more: further values of a sync, as plain JSON values; in an elastic fleet `members`, the changes of the
            membership since the step before.
    """

    step: int
    epoch: int
    loss: float
    metrics: dict[str, float | np.ndarray]
    counts_W: np.ndarray
    rows_W: np.ndarray
    times_W: np.ndarray
    step_time: float
    seconds: float
    samples: int
    changed: bool
    reason: str
    nonfinite: tuple[int, ...] = ()
    bad_update: bool = False
    left_out: bool = False
    save: bool = False
    stop: bool = False
    ideal: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

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
        """Combine a planned step with its report.

        Args:
            step: the step as planned.
            report: its results.
            step_time: see `Record`.
            seconds: see `Record`.
            samples: see `Record`.
            ideal: see `Record`.

        Returns:
            The record.
        """
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
        """Whether the plan changed or a value was not finite: a thinned history keeps such steps."""
        return self.changed or bool(self.nonfinite)

    @property
    def samples_per_s(self) -> float:
        """Samples per second of this step."""
        return float(self.counts_W.sum()) / self.step_time if self.step_time > 0 else float("nan")

    @property
    def efficiency(self) -> float:
        """Samples per second divided by the ideal, the samples per second if no worker ever waited.

        With real speeds the ideal is sum_i count_i / time_i. NaN where the step was not timed.
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            rates = float(np.nansum(np.where(self.counts_W > 0, self.counts_W / self.times_W, 0.0)))
        ideal = rates if self.ideal is None else self.ideal
        return self.samples_per_s / ideal if ideal > 0 else float("nan")

    def row(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
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
            "metrics": {
                name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in self.metrics.items()
            },
            **({"nonfinite": list(self.nonfinite)} if self.nonfinite else {}),
            **self.more,
        }


@dataclass
class Totals:
    """Sums over all steps of a run, including those whose records were thinned out."""

    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    plan_changes: int = 0
    timed_samples_W: np.ndarray | float = 0.0
    timed_seconds_W: np.ndarray | float = 0.0

    def add(self, record: Record) -> None:
        """Add a step."""
        timed_W = ~np.isnan(record.times_W)
        if np.shape(self.timed_seconds_W) not in ((), timed_W.shape):  # the workers are others now
            self.timed_samples_W = self.timed_seconds_W = 0.0
        self.steps += 1
        self.samples += int(record.counts_W.sum())
        self.seconds += record.step_time
        self.plan_changes += record.changed
        self.timed_samples_W = self.timed_samples_W + np.where(timed_W, record.counts_W, 0)
        self.timed_seconds_W = self.timed_seconds_W + np.where(timed_W, record.times_W, 0.0)


@dataclass
class History:
    """The records of one call of `Trainer.fit`, and totals of the run.

    All records are kept up to 20,000 steps. Beyond that `records`, and with them `losses` and `counts`, are thinned to
    an evenly spread half of the steps, then a quarter, and so on. The first and the last record are kept, and so are
    steps at which the plan changed or a value was not finite, as long as these are few. `totals` and `summary()` count
    every step.

    Attributes:
        records: the records, oldest first.
        ideal_samples_per_s: samples per second if no worker ever waited; None if unknown.
        engine: name of the engine.
        transport: name of the transport.
        controller: name of the controller.
        workers: number of workers.
        last_step: number of the last step, unless the run is stopped early.
        recompiles_after_warmup: number of programs compiled after the first step.
        data_wait_s: seconds spent waiting for data.
        overruns: local phases that took longer than their simulated time.
        more: further values of a sync, as plain JSON values; in an elastic fleet `members`, all changes of the
            membership: step, generation, members, who left, who came, reason, and seconds since the step before.
        totals: sums over all steps.
        thinning: which records are kept.
    """

    records: list[Record] = field(default_factory=list, init=False)
    ideal_samples_per_s: float | None = None
    engine: str = ""
    transport: str = ""
    controller: str = ""
    workers: int = 0
    last_step: int = 0
    recompiles_after_warmup: int = 0
    data_wait_s: float = 0.0
    overruns: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals, init=False)
    thinning: Thinning = field(default_factory=Thinning, repr=False)

    def add(self, record: Record) -> None:
        """Append the record of a finished step, replacing the last one if thinning drops that.

        Args:
            record: the next record.
        """
        self.totals.add(record)
        if len(self.records) > 1 and not self.thinning.keeps(self.records[-1].step, self.records[-1].event):
            self.records.pop()
        self.records.append(record)
        if len(self.records) > self.thinning.limit:
            self.records[:] = self.thinning.thin(self.records, lambda record: (record.step, record.event))

    @property
    def losses(self) -> list[float]:
        """Losses of the records."""
        return [record.loss for record in self.records]

    @property
    def counts(self) -> np.ndarray:
        """Counts of the records, [steps, workers]; 0 beyond the workers of a step, where members have come or gone."""
        most = max((len(record.counts_W) for record in self.records), default=0)
        return np.array([np.pad(record.counts_W, (0, most - len(record.counts_W))) for record in self.records])

    def own_rates(self) -> float | None:
        """Return the ideal with real speeds: sum over workers of samples / local seconds; None if nothing was timed."""
        samples_W, seconds_W = np.atleast_1d(self.totals.timed_samples_W), np.atleast_1d(self.totals.timed_seconds_W)
        rate_W = np.divide(samples_W, seconds_W, out=np.zeros_like(seconds_W), where=seconds_W > 0)
        return float(rate_W.sum()) or None

    def samples_per_s(self, skip: int = 0) -> float:
        """Return the samples per second over the run.

        Args:
            skip: number of records to leave out at the start.

        Returns:
            The throughput; NaN before the first step.
        """
        samples, seconds = self.totals.samples, self.totals.seconds
        if skip and self.records:
            before, last = self.records[:skip][-1], self.records[-1]
            samples, seconds = last.samples - before.samples, last.seconds - before.seconds
        return samples / seconds if seconds > 0 else float("nan")

    def __str__(self) -> str:
        return headline(self.summary())

    def summary(self) -> dict[str, Any]:
        """Return the totals of the run as plain JSON values."""
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


Hook = Callable[[Record, Any], None]  # may also have begin(history) and end(history), called around the steps


class RunLog:
    """Makes the records of a run that starts now."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._samples = 0

    def record(self, step: PlannedStep, report: StepReport, ideal: float | None, idle: bool = False) -> Record:
        """Return the record of the step that has just finished.

        Args:
            step: the step as planned.
            report: its results.
            ideal: see `Record`.
            idle: whether this process had no samples. It may then receive several reports at once, so the duration is
                that of the step before, by the clock of a process that had some.
        """
        now = time.perf_counter()
        seconds = now - self._last
        if idle and np.isfinite(before := report.before_W[np.argmax(step.plan.counts_W > 0)]):
            seconds = float(before)
        self._samples += step.span.batch
        record = Record.of(step, report, seconds, now - self._began, self._samples, ideal)
        self._last = now
        return record


class Recorder:
    """A context around the steps of a run that fills its history and calls the hooks.

    Args:
        history: receives the records.
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
        self._call_hooks("begin")
        self._compiled = compiles()
        return self

    def add(self, record: Record, state: Any) -> None:
        """Add a finished step and call the hooks, which must copy what they keep: the state's buffers are reused."""
        self.append(record)
        for hook in self.hooks:
            hook(record, state)

    def append(self, record: Record) -> None:
        """Add a finished step to the history without calling the hooks."""
        self.history.add(record)
        samples = int(record.counts_W.sum())
        if self.simulation is not None:
            self._samples, self._ideal_s = self._samples + samples, self._ideal_s + samples / self.simulation.ideal()

    def finish(self, rate: float | None, waited: float) -> None:
        """Complete the history of a run that ended without an error.

        Args:
            rate: ideal samples per second of all workers, where speeds are real.
            waited: seconds spent waiting for data.
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
        self._call_hooks("end")

    def _call_hooks(self, method: str) -> None:
        for hook in self.hooks:
            if hasattr(hook, method):
                getattr(hook, method)(self.history)
