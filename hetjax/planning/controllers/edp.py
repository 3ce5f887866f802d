"""`edp`: dynamic partition with gradients weighted by the shares.

Vineeth S, "Distributed Optimization using Heterogeneous Compute Systems", arXiv 2110.08941.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.planning.controllers.published import Dp


class Edp(Dp):
    """The shares of `dp` with g = sum_i p_i g_i; with p_i = b_i / B that is the mean over all samples, the default.

    `faithful`: the published step divides by N a second time, g = (1/N) sum_i p_i g_i with the real-valued p_i:
    weights_i = B p_i / (N b_i), in effect a learning rate N times smaller.
    """

    name = "edp"

    def weigh(self, plan: Plan, batch: int) -> Plan:
        used_W = plan.counts_W > 0
        per_sample_W = self.share_W / (self.workers * np.where(used_W, plan.counts_W, 1))
        return Plan(plan.counts_W, plan.changed, plan.reason, np.where(used_W, batch * per_sample_W, 0.0))
