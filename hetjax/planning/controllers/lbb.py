"""`lbb`: load-balanced batching: hold, nudge or solve again, by the size of the imbalance."""

from __future__ import annotations

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Observation
from hetjax.planning.controllers.frame import Frame
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder


class Lbb(Frame):
    """SE = (max t - min t) / mean t of the last step.

    SE <= hold: keep; SE <= nudge: one sample (quantum) from the slowest to the fastest worker; above: fit t = a + b n
    to the timings of each worker by least squares and solve for the smallest largest time, then cool down.
    The fit starts with a warm-up: half of it with equal counts, half with counts a quarter up and down by turns. It
    remembers timings with weight memory^age.
    """

    name = "lbb"
    learned = ("steps", "cool", "sums_5xW", "last_W", "fresh")

    def __init__(
        self, hold: float = 0.06, nudge: float = 0.15, cool_down: int = 30, warm_up: int = 10, memory: float = 0.9
    ) -> None:
        self.memory = memory
        self.hold, self.nudge, self.cool_down, self.warm_up = hold, nudge, cool_down, warm_up
        super().__init__()

    def begin(self, workers: int) -> None:
        self.steps, self.cool, self.fresh = 0, 0, False
        self.sums_5xW = np.zeros((5, workers))  # of 1, n, t, n n, n t
        self.last_W = np.zeros(workers)  # times of the last step, 0 where there is none

    def observe(self, seen: Observation) -> None:
        if len(seen.counts_W) != self.workers or int(seen.counts_W.sum()) != self.usual:
            return
        n_W, t_W = seen.counts_W.astype(np.float64), np.where(seen.valid_W, seen.times_W, 0.0)
        terms_5xW = np.stack([np.ones(self.workers), n_W, t_W, n_W * n_W, n_W * t_W])
        self.sums_5xW = np.where(seen.valid_W, self.memory * self.sums_5xW + terms_5xW, self.sums_5xW)
        self.last_W, self.fresh = t_W, True

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        self.steps += 1
        if self.steps <= self.warm_up:
            sign_W = np.where((np.arange(self.workers) + self.steps) % 2 == 0, 1.25, 0.75)
            share_W = np.ones(self.workers) if self.steps < self.warm_up // 2 else sign_W
            return largest_remainder(share_W, limits, self.usual), "warm-up"
        self.cool = max(self.cool - 1, 0)
        timed_W = self.last_W > 0
        if not self.fresh or not timed_W.any():
            return counts_W, ""
        self.fresh = False
        mean = float(self.last_W[timed_W].sum()) / int(timed_W.sum())
        slow = int(np.argmax(np.where(timed_W, self.last_W, -np.inf)))
        fast = int(np.argmin(np.where(timed_W, self.last_W, np.inf)))
        imbalance = float(self.last_W[slow] - self.last_W[fast]) / mean
        if self.steps == self.warm_up + 1 or (imbalance > self.nudge and self.cool == 0):
            self.cool = self.cool_down
            startup_W, per_sample_W = self.line()
            best = solve(startup_W, per_sample_W, limits, self.usual, counts_W)
            return best.counts_W, f"imbalance {100 * imbalance:.0f}%: solved again"
        if self.hold < imbalance <= self.nudge:
            moved_W = counts_W.copy()
            moved_W[slow] -= limits.quantum
            moved_W[fast] += limits.quantum
            if moved_W[slow] >= limits.quantum and allowed(moved_W, limits, self.usual):
                return moved_W, f"imbalance {100 * imbalance:.0f}%: one step from worker {slow} to worker {fast}"
        return counts_W, ""

    def line(self) -> tuple[np.ndarray, np.ndarray]:
        """Least squares (a_W, b_W); through the origin where the counts say nothing else or the line makes no sense."""
        one_W, n_W, t_W, nn_W, nt_W = self.sums_5xW
        timed_W = one_W > 0
        spread_W = one_W * nn_W - n_W * n_W
        apart_W = timed_W & (spread_W > 1e-3 * one_W * nn_W)
        b_W = np.where(apart_W, (one_W * nt_W - n_W * t_W) / np.where(apart_W, spread_W, 1.0), 0.0)
        a_W = np.where(apart_W, (t_W - b_W * n_W) / np.where(timed_W, one_W, 1.0), 0.0)
        good_W = apart_W & (b_W > 0) & (a_W >= 0)
        rate_W = np.where(timed_W, t_W / np.where(timed_W, n_W, 1.0), 0.0)
        rate_W = np.where(timed_W, rate_W, rate_W.sum() / max(int(timed_W.sum()), 1))
        return np.where(good_W, a_W, 0.0), np.where(good_W, b_W, rate_W)
