"""From single updates to what a run tells: a record for every step's worth of samples, and a summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from hetjax.history import Record
from hetjax.reduce.layout import Layout, StepReport
from hetjax.sync.hogbatch.method import AppliedUpdate, Finished


class MetricSums:
    """What is added up from updates, over the whole training or since the last record; goes on with `saved` sums."""

    def __init__(self, workers: int, now: float, saved: Mapping[str, Any]):
        whole = lambda name: np.array(saved.get(name, [0] * workers), np.int64)
        self.updates_W, self.counts_W, self.rows_W = whole("updates"), whole("counts"), whole("rows")
        self.busy_W = np.array(saved.get("busy", [0.0] * workers))
        self.began = now - saved.get("seconds", 0.0)
        self.staleness = Counter({int(k): n for k, n in saved.get("staleness", {}).items()})
        self.loss, self.weight = saved.get("loss", 0.0), saved.get("weight", 0.0)
        self.metrics = defaultdict[str, float](float, saved.get("metrics", {}))

    def add(self, done: AppliedUpdate, report: StepReport) -> None:
        for sum_W, more in ((self.updates_W, 1), (self.counts_W, done.span.count), (self.rows_W, done.rows)):
            sum_W[done.worker] += more
        self.busy_W[done.worker] += done.ended - done.began
        self.staleness[done.staleness] += 1
        if not report.left_out:
            self.loss, self.weight = self.loss + report.loss_sum, self.weight + report.weight
            for name, value in report.metric_sums.items():
                self.metrics[name] += value

    def histogram(self) -> dict[str, int]:
        return {str(k): self.staleness[k] for k in sorted(self.staleness)}

    def state_dict(self, now: float, under_way_W: np.ndarray) -> dict[str, Any]:
        return {
            "updates": self.updates_W.tolist(),
            "counts": self.counts_W.tolist(),
            "rows": self.rows_W.tolist(),
            "busy": (self.busy_W + under_way_W).tolist(),
            "seconds": now - self.began,
            "staleness": self.histogram(),
            "loss": self.loss,
            "weight": self.weight,
            "metrics": dict(self.metrics),
        }


class UpdateMetrics:
    """Counts what every worker does. A record's times are the seconds a worker was busy between two records.

    utilization = seconds of local phases, those under way included / seconds of the training
    With `saved` a training goes on that was counted before, if by as many workers: the summary is of all of it, and the
    first record is of the whole step that it was stopped in.
    """

    def __init__(self, layout: Layout, batch_W: np.ndarray, began: float, saved: Mapping[str, Any]):
        self.layout, self.workers, self.began = layout, len(batch_W), began
        saved = saved if len(saved.get("batches", ())) == self.workers else {}
        self.batch_W = np.array(batch_W, np.int64)
        self.samples, self.seen, self.now = 0, 0, began
        self.whole = MetricSums(self.workers, began, saved.get("whole", {}))
        self._part = MetricSums(self.workers, began, saved.get("part", {}))
        self._since_W: tuple[float | None, ...] = (None,) * self.workers  # when the tasks now out were started
        self._nonfinite: set[int] = set()
        self._bad_update = False
        self._changes: list[str] = []

    def add(self, news: Finished) -> None:
        done, report = news.update, StepReport.read(self.layout, np.asarray(news.tail), 1)
        self.now, self.seen, self._since_W = done.applied, news.seen, news.since_W
        self.samples += done.span.count
        self.whole.add(done, report)
        self._part.add(done, report)
        if report.left_out:
            self._nonfinite.add(done.worker)
            self._bad_update |= bool(report.bad_update_W.any())
        if done.batch != self.batch_W[done.worker]:
            self.batch_W[done.worker] = done.batch
            self._changes.append(f"worker {done.worker} takes {done.batch}")

    @property
    def unrecorded(self) -> bool:
        """Whether there were updates since the last record, and some of them now."""
        return bool(self.samples and self._part.updates_W.any())

    def _under_way_W(self) -> np.ndarray:
        return np.array([0.0 if at is None else max(0.0, self.now - at) for at in self._since_W])

    def record(self, step: int, epoch: int, save: bool) -> Record:
        """Everything since the last record."""
        part, under_way_W = self._part, self._under_way_W()
        share = lambda total: total / part.weight if part.weight else float("nan")
        made = Record(
            step=step,
            epoch=epoch,
            loss=share(part.loss),
            metrics={name: share(value) for name, value in part.metrics.items()},
            counts_W=part.counts_W,
            rows_W=part.rows_W,
            times_W=np.maximum(part.busy_W + under_way_W, 0.0),
            step_time=self.now - part.began,
            seconds=self.now - self.began,
            samples=self.samples,
            changed=bool(self._changes),
            reason=", ".join(self._changes[-3:]),
            nonfinite=tuple(sorted(self._nonfinite)),
            bad_update=self._bad_update,
            left_out=bool(self._nonfinite) and not part.weight,
            save=save,
            more={
                "updates": part.updates_W.tolist(),
                "batches": self.batch_W.tolist(),
                "staleness": sum(k * n for k, n in part.staleness.items()) / max(1, int(part.updates_W.sum())),
            },
        )
        self._part = MetricSums(self.workers, self.now, {"busy": -under_way_W})  # which are in this record
        self._nonfinite, self._bad_update, self._changes = set(), False, []
        return made

    def state_dict(self) -> dict[str, Any]:
        under_way_W = self._under_way_W()
        return {
            "batches": self.batch_W.tolist(),
            "whole": self.whole.state_dict(self.now, under_way_W),
            "part": self._part.state_dict(self.now, under_way_W),
        }

    def summary(self) -> dict[str, Any]:
        whole, seconds = self.whole, self.now - self.whole.began
        busy_W = whole.busy_W + self._under_way_W()
        share = lambda sum_W: (sum_W / max(1, int(sum_W.sum()))).tolist()
        return {
            "updates": int(whole.updates_W.sum()),
            "update_share": share(whole.updates_W),
            "sample_share": share(whole.counts_W),
            "utilization": (busy_W / seconds).tolist() if seconds > 0 else [0.0] * self.workers,
            "staleness": whole.histogram(),
            "batches": self.batch_W.tolist(),
        }
