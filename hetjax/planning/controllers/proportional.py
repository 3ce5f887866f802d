"""`proportional`: a proportional controller on smoothed step times with a dead-band.

Tyagi & Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching", ACSOS 2020; OmniLearn.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.base import Observation
from hetjax.planning.controllers.cadence import Cadence, Cadenced
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Proportional(Cadenced):
    """b_i <- b_i mean(t) / t_i, scaled to sum to B; t_i an exponential average of the step times since the last change.

    Nothing changes while every b_i would move by no more than the dead-band. Bounds are those of the limits.
    """

    name = "proportional"
    learned = (*Cadenced.learned, "time_W")

    def __init__(self, every: Cadence = "epoch", dead_band: float = 0.05, smoothing: float = 0.3) -> None:
        self.dead_band, self.smoothing = dead_band, smoothing
        super().__init__(every)

    def begin(self, workers: int) -> None:
        super().begin(workers)
        self.time_W = np.zeros(workers)  # 0 where there is none since the last change

    def observe(self, seen: Observation) -> None:
        if self.counts_W is None or not np.array_equal(seen.counts_W, self.counts_W):
            return  # a timing of other counts than those in force
        super().observe(seen)
        fresh_W = seen.valid_W & (self.time_W == 0)
        step_W = np.where(seen.valid_W, self.smoothing * (seen.times_W - self.time_W), 0.0)
        self.time_W = np.where(fresh_W, seen.times_W, self.time_W + np.where(fresh_W, 0.0, step_W))

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        timed_W = self.time_W > 0
        mean = float(self.time_W[timed_W].sum()) / int(timed_W.sum())
        wanted_W = counts_W * np.where(timed_W, mean / np.where(timed_W, self.time_W, 1.0), 1.0)
        wanted_W = wanted_W * (self.usual / wanted_W.sum())
        if np.all(np.abs(wanted_W - counts_W) <= self.dead_band * counts_W):
            return counts_W, ""
        self.time_W = np.zeros(self.workers)
        return largest_remainder(wanted_W, limits, self.usual), "times apart by more than the dead-band"
