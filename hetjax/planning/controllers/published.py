"""Controllers by the published rules: `dp`, `edp`, `dbs`, `lbb` and `lbbsp`.

`dp`: dynamic partition, the mean of worker means in its published form.

Vineeth S, "Distributed Optimization using Heterogeneous Compute Systems", arXiv 2110.08941.

`edp`: dynamic partition with gradients weighted by the shares.

Vineeth S, "Distributed Optimization using Heterogeneous Compute Systems", arXiv 2110.08941.

`dbs`: shares by throughput, once an epoch, whole samples by largest remainder.

Ye et al., "DBS: Dynamic Batch Size for Distributed Deep Neural Network Training", arXiv 2007.11831.

`lbb`: load-balanced batching: hold, nudge or solve again, by the size of the imbalance.

`lbbsp`: move a step of samples from the slowest to the fastest worker.

Chen et al., "Semi-Dynamic Load Balancing" (LB-BSP), SoCC 2020.
"""

from __future__ import annotations

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Cadence, Cadenced, ControllerBase, Observation, Plan
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder


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


class Lbb(ControllerBase):
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
