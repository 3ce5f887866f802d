"""`dp`: dynamic partition, the mean of worker means in its published form.

Vineeth S, "Distributed Optimization using Heterogeneous Compute Systems", arXiv 2110.08941.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.planning.controllers.cadence import Cadence, Cadenced
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Dp(Cadenced):
    """p_i <- (p_i / t_i) / sum_k (p_k / t_k), t_i the mean time of a step since the last update; b_i = max(p_i B, 1).

    The shares stay real numbers from update to update. By default whole samples come from the largest remainder and
    all samples weigh the same. `faithful`: b_i = max(floor(p_i B), 1), what misses from B then being filled up so that
    the step is whole, and the step is the mean of worker means, g = (1/N) sum_i g_i: weights_i = B / (N b_i), which
    gives the samples of a small worker more say.
    """

    name = "dp"
    learned = (*Cadenced.learned, "share_W")

    def __init__(self, every: Cadence = "epoch", faithful: bool = False) -> None:
        self.faithful = faithful
        super().__init__(every)

    def begin(self, workers: int) -> None:
        super().begin(workers)
        self.share_W = np.full(workers, 1.0 / max(workers, 1))

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return self.share_W

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        # Rates are those of the whole samples computed; the law carries the real-valued share on by the same factor.
        whole_W = np.maximum(counts_W, 1) / self.usual
        share_W = self.rates(whole_W) * self.share_W / whole_W
        self.share_W = share_W / share_W.sum()
        wanted_W = self.share_W
        if self.faithful:
            wanted_W = np.maximum(np.floor(self.usual * self.share_W), 1.0)
        new_W = largest_remainder(wanted_W, limits, self.usual, least=1)
        # Where a limit holds the count, the share must not run away from it.
        held_W = np.abs(new_W - self.usual * self.share_W) > limits.quantum
        self.share_W = np.where(held_W, new_W / self.usual, self.share_W)
        return new_W, "shares by throughput"

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        return self.weigh(plan, batch) if self.faithful else plan

    def weigh(self, plan: Plan, batch: int) -> Plan:
        used_W = plan.counts_W > 0
        weights_W = np.where(used_W, batch / (self.workers * np.where(used_W, plan.counts_W, 1)), 0.0)
        return Plan(plan.counts_W, plan.changed, plan.reason, weights_W)
