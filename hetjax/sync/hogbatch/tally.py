"""From single updates to what a run tells: a record for every step's worth of samples, and a summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from hetjax.history import Record
from hetjax.run.layout import Layout, Report
from hetjax.sync.hogbatch.task import Finished


class Tally:
    """Counts what every worker does. A record's times are the seconds a worker was busy between two records.

    utilisation = seconds of local phases, those under way included / seconds of the run
    """

    def __init__(self, layout: Layout, batch_W: np.ndarray, began: float):
        self.layout, self.workers, self.began = layout, len(batch_W), began
        self.batch_W = np.array(batch_W, np.int64)
        self.busy_W, self.updates_W = np.zeros(self.workers), np.zeros(self.workers, np.int64)
        self.counts_W, self.staleness = np.zeros(self.workers, np.int64), Counter[int]()
        self.samples, self.seen, self.now = 0, 0, began
        self._since_W: tuple[float | None, ...] = (None,) * self.workers  # when the tasks now out were taken
        self._busy_before_W = np.zeros(self.workers)
        self._open()

    def _open(self) -> None:
        self._counts_W, self._rows_W = np.zeros(self.workers, np.int64), np.zeros(self.workers, np.int64)
        self._updates_W, self._staleness = np.zeros(self.workers, np.int64), 0
        self._loss, self._weight, self._metrics = 0.0, 0.0, defaultdict[str, float](float)
        self._nonfinite: set[int] = set()
        self._changes: list[str] = []
        self._began = self.now

    def add(self, news: Finished) -> None:
        done, report = news.update, Report.read(self.layout, np.asarray(news.tail), 1)
        w, count = done.worker, done.span.count
        self.now, self.seen, self._since_W = done.applied, news.seen, news.since_W
        self.samples += count
        self.busy_W[w] += done.ended - done.began
        self.staleness[done.staleness] += 1
        for counted_W, more in (
            (self.updates_W, 1), (self._updates_W, 1), (self.counts_W, count), (self._counts_W, count),
            (self._rows_W, done.rows),
        ):  # fmt: skip
            counted_W[w] += more
        self._staleness += done.staleness
        if report.nonfinite_W.any():
            self._nonfinite.add(w)
        else:
            self._loss, self._weight = self._loss + report.loss_sum, self._weight + report.weight
            for name, value in report.metric_sums.items():
                self._metrics[name] += value
        if done.batch != self.batch_W[w]:
            self.batch_W[w] = done.batch
            self._changes.append(f"worker {w} takes {done.batch}")

    @property
    def unrecorded(self) -> bool:
        """Whether there were updates since the last record."""
        return bool(self._updates_W.any())

    def _busy_now_W(self) -> np.ndarray:
        return self.busy_W + [0.0 if at is None else max(0.0, self.now - at) for at in self._since_W]

    def record(self, step: int, epoch: int, save: bool) -> Record:
        """Everything since the last record."""
        busy_W = self._busy_now_W()
        updates = int(self._updates_W.sum())
        share = lambda total: total / self._weight if self._weight else float("nan")
        made = Record(
            step=step,
            epoch=epoch,
            loss=share(self._loss),
            metrics={name: share(value) for name, value in self._metrics.items()},
            counts_W=self._counts_W,
            rows_W=self._rows_W,
            times_W=np.maximum(busy_W - self._busy_before_W, 0.0),
            step_time=self.now - self._began,
            seconds=self.now - self.began,
            samples=self.samples,
            changed=bool(self._changes),
            reason=", ".join(self._changes[-3:]),
            nonfinite=tuple(sorted(self._nonfinite)),
            save=save,
            more={
                "updates": self._updates_W.tolist(),
                "batches": self.batch_W.tolist(),
                "staleness": self._staleness / max(1, updates),
            },
        )
        self._busy_before_W = busy_W
        self._open()
        return made

    def summary(self) -> dict[str, Any]:
        total, seconds = max(1, int(self.updates_W.sum())), self.now - self.began
        return {
            "updates": int(self.updates_W.sum()),
            "update_share": (self.updates_W / total).tolist(),
            "sample_share": (self.counts_W / max(1, self.samples)).tolist(),
            "utilisation": (self._busy_now_W() / seconds).tolist() if seconds > 0 else [0.0] * self.workers,
            "staleness": {str(k): self.staleness[k] for k in sorted(self.staleness)},
            "batches": self.batch_W.tolist(),
        }
