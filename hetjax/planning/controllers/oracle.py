"""`oracle`: knows the true cost of every step. What all other controllers are measured against."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Plan
from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits

Costs = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Oracle(Frame):
    """n = argmin max_i (startup_i(k) + per_work_i(k) stairs_i(n_i)) in step k, with the true mean costs of the trace.

    `costs(k)` gives (startup_W, per_work_W) of step k, counted from 0 over the steps planned. `late` steps behind:
    changes are seen that many steps after they happen.
    """

    name = "oracle"
    learned = ("step",)

    def __init__(self, costs: Costs, late: int = 0) -> None:
        self.costs, self.late = costs, late
        super().__init__()

    def begin(self, workers: int) -> None:
        self.step = 0

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        self.step += 1
        return plan

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return solve(*self.costs(max(self.step - self.late, 0)), limits, batch, counts_W.astype(np.int64)).counts_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        return self.fit(self.usual, counts_W, limits), "true costs"
