"""`dbs`: shares by throughput, once an epoch, whole samples by largest remainder.

Ye et al., "DBS: Dynamic Batch Size for Distributed Deep Neural Network Training", arXiv 2007.11831.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.planning.controllers.cadence import Cadence, Cadenced
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Dbs(Cadenced):
    """p_i <- (p_i / t_i) / sum_k (p_k / t_k), t_i the mean time of a step since the last update; q_i = B p_i;
    b_i = floor(q_i), the missing samples to the largest fractional parts, b_i >= 1; p_i = b_i / B.

    `faithful`: only fractions of one half or more are rounded up (see `round_half_up`; what then misses from B is
    filled up so that the step is whole) and the short last step of an epoch weighs workers by p_i as a full one does,
    g = sum_i p_i g_i with g_i the mean over its b_i samples.
    """

    name = "dbs"

    def __init__(self, every: Cadence = "epoch", faithful: bool = False) -> None:
        self.faithful = faithful
        super().__init__(every)

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        share_W = self.rates(counts_W / self.usual)
        if self.faithful:
            share_W = round_half_up(self.usual * share_W).astype(np.float64)
        return largest_remainder(share_W, limits, self.usual, least=1), "shares by throughput"

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        if not self.faithful or batch == self.usual or self.counts_W is None:
            return plan
        share_W = self.counts_W / self.usual
        used_W = plan.counts_W > 0
        weights_W = np.where(used_W, batch * share_W / np.where(used_W, plan.counts_W, 1), 0.0)
        return Plan(plan.counts_W, plan.changed, plan.reason, weights_W)


def round_half_up(ideal_W: np.ndarray) -> np.ndarray:
    """DBS's published rounding: floor, then the missing samples to the largest fractions that are one half or more.

    Falls short of the batch when fewer fractions than missing samples reach one half.
    """
    counts_W = np.floor(ideal_W).astype(np.int64)
    fraction_W = ideal_W - counts_W
    missing = int(np.floor(ideal_W.sum() + 0.5)) - int(counts_W.sum())
    order_W = np.argsort(-fraction_W, kind="stable")[: max(missing, 0)]
    counts_W[order_W[fraction_W[order_W] >= 0.5]] += 1
    return counts_W
