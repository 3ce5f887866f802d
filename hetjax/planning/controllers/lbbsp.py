"""`lbbsp`: move a step of samples from the slowest to the fastest worker.

Chen et al., "Semi-Dynamic Load Balancing" (LB-BSP), SoCC 2020.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.controllers.cadence import Cadenced
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed


class Lbbsp(Cadenced):
    """Every window: n_slowest -= delta, n_fastest += delta, by the mean times of the window.

    When a move undoes the one before (the roles have swapped), delta is halved and the window doubled, up to
    `longest` steps. Delta is in samples and never less than the quantum.
    """

    name = "lbbsp"
    learned = (*Cadenced.learned, "delta", "window", "last_slow", "last_fast")

    def __init__(self, every: int = 5, delta: int = 5, longest: int = 80) -> None:
        self.first_delta, self.longest = delta, longest
        super().__init__(every)

    def begin(self, workers: int) -> None:
        super().begin(workers)
        self.delta, self.window = self.first_delta, int(self.every)
        self.last_slow, self.last_fast = -1, -1

    def due(self, epoch: int) -> bool:
        return self.gathered >= self.window and bool(self.timed_W.any())

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        timed_W = self.timed_W > 0
        mean_W = self.sum_t_W / np.maximum(self.timed_W, 1)
        slow = int(np.argmax(np.where(timed_W, mean_W, -np.inf)))
        fast = int(np.argmin(np.where(timed_W, mean_W, np.inf)))
        if (slow, fast) == (self.last_fast, self.last_slow):
            self.delta, self.window = max(self.delta // 2, 1), min(2 * self.window, self.longest)
        self.last_slow, self.last_fast = slow, fast
        units = max(self.delta // limits.quantum, 1) * limits.quantum
        moved_W = counts_W.copy()
        moved_W[slow] -= units
        moved_W[fast] += units
        if slow == fast or moved_W[slow] < limits.quantum or not allowed(moved_W, limits, self.usual):
            return counts_W, ""
        return moved_W, f"{units} samples from worker {slow} to worker {fast}"
