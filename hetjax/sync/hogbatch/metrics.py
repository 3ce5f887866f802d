"""Metrics of asynchronous updates: a record for each step's worth of samples, and a summary of the training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from hetjax.history import Record
from hetjax.reduce.layout import Layout, Means, StepReport
from hetjax.sync.hogbatch.coordinator import AppliedUpdate, UpdateEvent


class MetricSums:
    """Sums over updates, of the whole training or since the last record; continues `saved` sums."""

    def __init__(self, workers: int, now: float, saved: Mapping[str, Any]):
        counts = lambda name: np.array(saved.get(name, [0] * workers), np.int64)
        self.updates_W, self.counts_W, self.rows_W = counts("updates"), counts("counts"), counts("rows")
        self.busy_W = np.array(saved.get("busy", [0.0] * workers))
        self.began = now - saved.get("seconds", 0.0)
        self.staleness = Counter({int(k): n for k, n in saved.get("staleness", {}).items()})
        weight, sums = saved.get("weight", 0.0), saved.get("metrics", {})
        weights = saved.get("metric_weights", dict.fromkeys(sums, weight))  # older checkpoints had one for all
        self.means = Means(saved.get("loss", 0.0), weight, _arrays(sums), _arrays(weights))

    def add(self, update: AppliedUpdate, report: StepReport, threads: int) -> None:
        """Adds an update; a non-finite one, which was not applied, does not enter loss and metrics.

        A thread of several keeps its share of the worker busy.
        """
        amounts = (self.updates_W, 1), (self.counts_W, update.span.count), (self.rows_W, update.rows)
        for sum_W, amount in amounts:
            sum_W[update.worker] += amount
        self.busy_W[update.worker] += (update.ended - update.began) / threads
        self.staleness[update.staleness] += 1
        if not report.left_out:
            self.means = self.means.plus(report)

    def histogram(self) -> dict[str, int]:
        """Number of updates by staleness."""
        return {str(k): self.staleness[k] for k in sorted(self.staleness)}

    def state_dict(self, now: float, in_flight_W: np.ndarray) -> dict[str, Any]:
        """The sums as JSON values; `in_flight_W`: busy seconds of unfinished phases."""
        return {
            "updates": self.updates_W.tolist(),
            "counts": self.counts_W.tolist(),
            "rows": self.rows_W.tolist(),
            "busy": (self.busy_W + in_flight_W).tolist(),
            "seconds": now - self.began,
            "staleness": self.histogram(),
            "loss": self.means.loss_sum,
            "weight": self.means.weight,
            "metrics": _lists(self.means.metric_sums),
            "metric_weights": _lists(self.means.metric_weights),
        }


def _arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.array(value) if isinstance(value, list) else value for name, value in values.items()}


def _lists(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}


class UpdateMetrics:
    """Turns updates into records, whose times are each worker's busy seconds since the last record.

        utilization = seconds in local phases, including those in flight / seconds of training

    With the `saved` metrics of an earlier run with as many workers, the summary covers both runs, and the first record
    covers the whole step in which that run stopped.
    """

    def __init__(
        self,
        layout: Layout,
        batch_W: np.ndarray,
        began: float,
        saved: Mapping[str, Any],
        threads_W: np.ndarray | None = None,
    ):
        self.layout, self.workers, self.began = layout, len(batch_W), began
        self.threads_W = np.ones(self.workers, np.int64) if threads_W is None else threads_W
        saved = saved if len(saved.get("batches", ())) == self.workers else {}
        self.batch_W = np.array(batch_W, np.int64)
        self.samples, self.seen, self.now = 0, 0, began
        self.total = MetricSums(self.workers, began, saved.get("whole", {}))
        self._current = MetricSums(self.workers, began, saved.get("part", {}))  # since the last record
        self._started_W: tuple[tuple[float, ...], ...] = ((),) * self.workers  # of the items in flight
        self._nonfinite: set[int] = set()
        self._bad_update = False
        self._changes: list[str] = []

    def add(self, event: UpdateEvent) -> None:
        """Adds an update."""
        update, report = event.update, StepReport.read(self.layout, np.asarray(event.report), 1)
        self.now, self.seen, self._started_W = update.applied, event.seen, event.started_W
        self.samples += update.span.count
        threads = int(self.threads_W[update.worker])
        self.total.add(update, report, threads)
        self._current.add(update, report, threads)
        if report.left_out:
            self._nonfinite.add(update.worker)
            self._bad_update |= bool(report.bad_update_W.any())
        if (batch := update.batch * threads) != self.batch_W[update.worker]:
            self.batch_W[update.worker] = batch
            self._changes.append(f"worker {update.worker} takes {batch}")

    @property
    def unrecorded(self) -> bool:
        """Whether this run has updates that no record covers."""
        return bool(self.samples and self._current.updates_W.any())

    def _in_flight_W(self) -> np.ndarray:
        return np.array([sum(max(0.0, self.now - at) for at in own) for own in self._started_W]) / self.threads_W

    def record(self, step: int, epoch: int, save: bool) -> Record:
        """The record of all updates since the last one."""
        current, in_flight_W = self._current, self._in_flight_W()
        record = Record(
            step=step,
            epoch=epoch,
            loss=current.means.loss,
            metrics=current.means.metrics,
            counts_W=current.counts_W,
            rows_W=current.rows_W,
            times_W=np.maximum(current.busy_W + in_flight_W, 0.0),
            step_time=self.now - current.began,
            seconds=self.now - self.began,
            samples=self.samples,
            changed=bool(self._changes),
            reason=", ".join(self._changes[-3:]),
            nonfinite=tuple(sorted(self._nonfinite)),
            bad_update=self._bad_update,
            left_out=bool(self._nonfinite) and not current.means.weight,
            save=save,
            more={
                "updates": current.updates_W.tolist(),
                "batches": self.batch_W.tolist(),
                "staleness": sum(k * n for k, n in current.staleness.items()) / max(1, int(current.updates_W.sum())),
            },
        )
        # This record contains the elapsed part of phases in flight; the next must not count it again.
        self._current = MetricSums(self.workers, self.now, {"busy": -in_flight_W})
        self._nonfinite, self._bad_update, self._changes = set(), False, []
        return record

    def state_dict(self) -> dict[str, Any]:
        """The metrics as JSON values, to resume from."""
        in_flight_W = self._in_flight_W()
        return {
            "batches": self.batch_W.tolist(),
            "whole": self.total.state_dict(self.now, in_flight_W),
            "part": self._current.state_dict(self.now, in_flight_W),
        }

    def summary(self) -> dict[str, Any]:
        """Shares, utilization and staleness over the whole training (`History.more`)."""
        total, seconds = self.total, self.now - self.total.began
        busy_W = total.busy_W + self._in_flight_W()
        share = lambda sum_W: (sum_W / max(1, int(sum_W.sum()))).tolist()
        return {
            "updates": int(total.updates_W.sum()),
            "update_share": share(total.updates_W),
            "sample_share": share(total.counts_W),
            "utilization": (busy_W / seconds).tolist() if seconds > 0 else [0.0] * self.workers,
            "staleness": total.histogram(),
            "batches": self.batch_W.tolist(),
        }
