"""What a run tells: one record a step, and a summary."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hetjax.plan.sampler import PlannedStep
    from hetjax.run.layout import Report


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
        report: Report,
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
            **self.more,
        }


@dataclass
class History:
    """All records of a call to `fit`, and what the run as a whole came to."""

    records: list[Record] = field(default_factory=list)
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

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def counts(self) -> np.ndarray:
        """Counts over time, [steps, workers]."""
        return np.array([record.counts_W for record in self.records])

    def own_rates(self) -> float | None:
        """The ideal with real speeds: each worker's samples over its own local seconds, added up."""
        counts, times = self.counts.astype(float), np.array([record.times_W for record in self.records])
        seconds_W = np.nansum(times, axis=0)
        samples_W = np.where(np.isnan(times), 0, counts).sum(axis=0)
        rate_W = np.divide(samples_W, seconds_W, out=np.zeros_like(seconds_W), where=seconds_W > 0)
        return float(rate_W.sum()) or None

    def samples_per_s(self, skip: int = 0) -> float:
        """Throughput over the run, the first `skip` steps aside."""
        part = self.records[skip:]
        seconds = sum(record.step_time for record in part)
        return sum(int(record.counts_W.sum()) for record in part) / seconds if seconds > 0 else float("nan")

    def summary(self) -> dict[str, Any]:
        wall = self.records[-1].seconds if self.records else 0.0
        rate = self.samples_per_s()
        return {
            "controller": self.controller,
            "engine": self.engine,
            "transport": self.transport,
            "workers": self.workers,
            "steps": len(self.records),
            "samples": sum(int(record.counts_W.sum()) for record in self.records),
            "wall_s": wall,
            "samples_per_s": rate,
            "ideal_samples_per_s": self.ideal_samples_per_s,
            "efficiency": rate / self.ideal_samples_per_s if self.ideal_samples_per_s else None,
            "final_loss": self.losses[-1] if self.records else None,
            "plan_changes": sum(record.changed for record in self.records),
            "recompiles_after_warmup": self.recompiles_after_warmup,
            "data_wait_share": self.data_wait_s / wall if wall else 0.0,
            "overruns": self.overruns,
            **self.more,
        }
