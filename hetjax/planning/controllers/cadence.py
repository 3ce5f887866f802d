"""Laws that act now and then: every k steps, or once an epoch, on the timings gathered since the last time."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from hetjax.arguments import whole
from hetjax.planning.controllers.base import Observation
from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits

Cadence = int | Literal["epoch"]


class Cadenced(Frame):
    """Sums counts and times between two moments of decision and hands them to the `law`.

    The sums are those of the steps really timed, so a timing that arrives after a change still speaks for the counts
    it was taken with: sum n_i / sum t_i is worker i's rate whatever was in force.
    """

    learned: ClassVar[tuple[str, ...]] = ("sum_n_W", "sum_t_W", "timed_W", "gathered", "epoch")

    def __init__(self, every: Cadence = "epoch") -> None:
        if every != "epoch":
            every = whole("every, if not 'epoch',", every, 1)
        self.every = every
        super().__init__()

    def begin(self, workers: int) -> None:
        self.epoch = 0
        self.clear(workers)

    def clear(self, workers: int) -> None:
        """Gather from the beginning."""
        self.sum_n_W, self.sum_t_W = np.zeros(workers), np.zeros(workers)
        self.timed_W, self.gathered = np.zeros(workers, np.int64), 0

    def observe(self, seen: Observation) -> None:
        if len(seen.counts_W) != self.workers or (
            self.usual and abs(int(seen.counts_W.sum()) - self.usual) > self.workers
        ):
            return  # the short last step of an epoch is no fair measure of a full one; steps of shards vary by a sample
        valid_W = seen.valid_W
        self.sum_n_W = self.sum_n_W + np.where(valid_W, seen.counts_W, 0)
        self.sum_t_W = self.sum_t_W + np.where(valid_W, seen.times_W, 0.0)
        self.timed_W = self.timed_W + valid_W
        self.gathered += 1

    def due(self, epoch: int) -> bool:
        turned, self.epoch = epoch != self.epoch, epoch
        ready = turned if self.every == "epoch" else self.gathered >= self.every
        return ready and bool(self.timed_W.any())

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        if not self.due(epoch):
            return counts_W, ""
        counts_W, reason = self.law(counts_W, limits)
        self.clear(self.workers)
        return counts_W, reason

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        """New counts from what has been gathered, and the reason."""
        raise NotImplementedError

    def rates(self, share_W: np.ndarray) -> np.ndarray:
        """Shares by samples per second, p_i ~ sum n_i / sum t_i; a worker that was not timed keeps the share it has."""
        timed_W = self.timed_W > 0
        rate_W = np.where(timed_W, self.sum_n_W / np.where(timed_W, self.sum_t_W, 1.0), 0.0)
        kept = float(share_W[~timed_W].sum())
        return np.where(timed_W, (1.0 - kept) * rate_W / float(rate_W.sum()), share_W)
