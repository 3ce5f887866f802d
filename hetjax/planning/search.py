"""The search for the exact allocation, over the times at which counts can end: a table of levels per worker.

The continuous relaxation brackets the smallest time in which all units can be computed; a selection among the few
values left makes it exact; surplus units are removed where they save most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetjax.planning.limits import Limits


@dataclass(frozen=True)
class Allocation:
    """Counts that sum to the batch, the largest worker time they give, and a lower bound on it."""

    counts_W: np.ndarray  # int64
    time: float  # max_i t_i(counts_i), the minimum
    lower_bound: float  # from the relaxation to real-valued counts: no allocation is faster


@dataclass(frozen=True)
class Grid:
    """The problem in units of the quantum, where every worker's cost is a table of levels (see `Levels`)."""

    startup_W: np.ndarray
    per_work_W: np.ndarray
    value_L: np.ndarray
    top_L: np.ndarray
    base_W: np.ndarray
    size_W: np.ndarray
    idle_W: np.ndarray  # time without a unit: 0, or that of the remainder for the worker that takes it
    low_W: np.ndarray
    cap_W: np.ndarray

    @classmethod
    def of(cls, startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits) -> Grid:
        """The grid of a problem whose batch is a multiple of the quantum."""
        levels = limits.levels
        return cls(
            startup_W=startup_W,
            per_work_W=per_work_W,
            value_L=levels.value_L,
            top_L=levels.top_L,
            base_W=levels.base_K[limits.kind_W],
            size_W=levels.size_K[limits.kind_W],
            idle_W=np.zeros(limits.workers),
            low_W=-(-limits.minimum_W // limits.quantum),
            cap_W=limits.capacity_W // limits.quantum,
        )

    def time(self, level_W: np.ndarray) -> np.ndarray:
        """Time of each worker at its level."""
        return np.where(level_W > 0, self.busy(level_W), self.idle_W)

    def busy(self, level_A: np.ndarray, workers_A: np.ndarray | slice = slice(None)) -> np.ndarray:
        """`time` for levels above 0, of some workers (default: all)."""
        value_A = self.value_L[self.base_W[workers_A] + level_A]
        return self.startup_W[workers_A] + self.per_work_W[workers_A] * value_A

    def top(self, level_W: np.ndarray) -> np.ndarray:
        """The most units at a level, within the limits."""
        return np.maximum(np.minimum(self.top_L[self.base_W + level_W], self.cap_W), self.low_W)

    def level(self, units_W: np.ndarray) -> np.ndarray:
        """The lowest level that covers these units."""
        low_W, high_W = np.zeros_like(units_W), self.size_W - 1
        while np.any(low_W < high_W):
            mid_W = (low_W + high_W) >> 1
            enough_W = self.top_L[self.base_W + mid_W] >= units_W
            low_W, high_W = np.where(enough_W, low_W, mid_W + 1), np.where(enough_W, mid_W, high_W)
        return low_W

    def floor(self) -> float:
        """The time of the minimums alone."""
        return float(np.max(self.time(self.level(self.low_W)) if np.any(self.low_W) else self.idle_W))

    def reach(self, time: float, guess_W: np.ndarray) -> np.ndarray:
        """The highest level with t_i <= time, by galloping from a guess, then bisection. Level 0 is always reached."""
        low_W, high_W = guess_W.copy(), guess_W + 1  # high: the first level known, or assumed, to be out of reach
        last_W = self.size_W - 1
        open_A = np.flatnonzero((low_W > 0) & (self.busy(low_W) > time))  # A: workers whose bracket is still wrong
        stride = 1
        while len(open_A):
            low_A = low_W[open_A]
            high_W[open_A], low_W[open_A] = low_A, np.maximum(low_A - stride, 0)
            low_A = low_W[open_A]
            open_A = open_A[(low_A > 0) & (self.busy(low_A, open_A) > time)]
            stride *= 2
        open_A = np.flatnonzero((high_W <= last_W) & (self.busy(np.minimum(high_W, last_W)) <= time))
        stride = 1
        while len(open_A):
            high_A, last_A = high_W[open_A], last_W[open_A]
            low_W[open_A], high_W[open_A] = high_A, np.minimum(high_A + stride, last_A + 1)
            high_A = high_W[open_A]
            open_A = open_A[(high_A <= last_A) & (self.busy(np.minimum(high_A, last_A), open_A) <= time)]
            stride *= 2
        open_A = np.flatnonzero(high_W - low_W > 1)
        while len(open_A):
            low_A, high_A = low_W[open_A], high_W[open_A]
            mid_A = (low_A + high_A) >> 1
            within_A = self.busy(mid_A, open_A) <= time
            low_A, high_A = np.where(within_A, mid_A, low_A), np.where(within_A, high_A, mid_A)
            low_W[open_A], high_W[open_A] = low_A, high_A
            open_A = open_A[high_A - low_A > 1]
        return low_W

    def guess(self, time: float) -> np.ndarray:
        """The level reached at `time` if levels were evenly spaced."""
        last_W = self.size_W - 1
        span_W = self.per_work_W * self.value_L[self.base_W + last_W]
        share_W = np.clip((time - self.startup_W) / np.where(span_W > 0, span_W, 1.0), 0.0, 1.0)
        return (share_W * last_W).astype(np.int64)

    def relaxed(self, time: float, level_W: np.ndarray) -> tuple[float, float]:
        """Real-valued units reached at `time`, with linear interpolation between levels; and their rate per second."""
        here_W, next_W = self.time(level_W), np.minimum(level_W + 1, self.size_W - 1)
        here_W = np.where(level_W > 0, here_W, np.maximum(self.startup_W, self.idle_W))
        step_W = self.time(next_W) - here_W
        open_W = (step_W > 0) & (next_W > level_W) & (self.top_L[self.base_W + level_W] < self.cap_W)
        step_W = np.where(open_W, step_W, 1.0)
        part_W = np.where(open_W, np.maximum(time - here_W, 0.0) / step_W, 0.0)
        units_W = np.maximum(np.minimum(self.top_L[self.base_W + level_W] + part_W, self.cap_W), self.low_W)
        width_W = self.top_L[self.base_W + next_W] - self.top_L[self.base_W + level_W]
        active_W = open_W & (time >= here_W)
        return float(units_W.sum()), float((np.where(active_W, width_W, 0) / step_W).sum())

    def relax(self, units: int, floor: float, tolerance: float) -> tuple[float, np.ndarray]:
        """The largest time found, at least `floor`, at which real-valued counts reach no more than `units`."""
        last_W = self.size_W - 1
        top_W = self.top_L[self.base_W + last_W]
        span_W = self.per_work_W * self.value_L[self.base_W + last_W]
        rate_W = np.where(span_W > 0, top_W / np.where(span_W > 0, span_W, 1.0), 0.0)
        total = float(rate_W.sum())
        time = max(floor, (units + float((rate_W * self.startup_W).sum())) / total) if total > 0 else floor
        level_W = self.guess(time)
        below, below_W, above = floor, None, np.inf
        if floor > 0:
            below_W = level_W = self.reach(floor, self.guess(floor))
            if self.relaxed(floor, level_W)[0] > units:
                return floor, level_W
        for turn in range(40):
            level_W = self.reach(time, level_W)
            reached, rate = self.relaxed(time, level_W)
            if reached <= units:
                below, below_W = time, level_W
                if units - reached <= 1e-6 * units:
                    break
            else:
                above = time
            newton = time + (units - reached) / rate if rate > 0 else np.inf
            if reached > units:  # aim slightly low, so that the bound closes from below
                newton -= 1e-9 * time
            if above < np.inf and (turn % 3 == 2 or not below < newton < above):
                newton = 0.5 * (below + above)  # a staircase may stall Newton: bisect every third time
            elif not below < newton < above:
                newton = 2.0 * max(time, float(self.startup_W.max()), 1e-9)
            if not below < newton < above or above - below <= tolerance * below:
                break
            time = newton
        return below, self.reach(below, np.zeros_like(level_W)) if below_W is None else below_W

    def select(self, units: int, low: float, level_W: np.ndarray) -> np.ndarray:
        """The levels reached at the smallest time T >= low with sum_i h_i(T) >= units, given those reached at `low`."""
        have = int(self.top(level_W).sum())
        if have >= units:
            return level_W
        rate = self.relaxed(low, level_W)[1]
        while True:
            next_W = np.minimum(level_W + 1, self.size_W - 1)
            first = float(np.min(self.time(next_W)[(next_W > level_W) & (self.top(level_W) < self.cap_W)]))
            high = max(first, low + 1.05 * (units - have) / rate) if rate > 0 else first
            high_W = self.reach(high, next_W)
            reached = int(self.top(high_W).sum())
            if reached >= units:
                return self._among(units, low, level_W, high, high_W)
            low, level_W, have = high, high_W, reached

    def _among(self, units: int, low: float, level_W: np.ndarray, high: float, high_W: np.ndarray) -> np.ndarray:
        """`select` when `low` is too short, `high` is not, and T is one of the times of the levels in between."""
        turn = 0
        while True:
            have_W = self.top(level_W)
            have, reached = int(have_W.sum()), int(self.top(high_W).sum())
            between_W = high_W - level_W
            between = int(between_W.sum())
            next_W = np.minimum(level_W + 1, self.size_W - 1)
            first = float(np.min(self.time(next_W)[between_W > 0]))
            if first == high:
                return high_W
            if between <= 256 + len(have_W) // 2:
                break
            turn += 1
            share = 0.5 if turn % 3 == 0 else (units - have) / (reached - have)
            mid = max(low + share * (high - low), first)
            mid = mid if mid < high else first
            mid_W = self.reach(mid, next_W)
            if int(self.top(mid_W).sum()) >= units:
                high, high_W = mid, mid_W
            else:
                low, level_W = mid, mid_W
        owner_C = np.repeat(np.arange(len(have_W)), between_W)
        start_C = np.repeat(np.cumsum(between_W) - between_W, between_W)
        level_C = level_W[owner_C] + 1 + (np.arange(between) - start_C)
        at_C = self.base_W[owner_C] + level_C
        value_C = self.startup_W[owner_C] + self.per_work_W[owner_C] * self.value_L[at_C]
        top_C = np.minimum(self.top_L[at_C], self.cap_W[owner_C])
        before_C = np.minimum(self.top_L[at_C - 1], self.cap_W[owner_C])
        weight_C = np.maximum(top_C, self.low_W[owner_C]) - np.maximum(before_C, self.low_W[owner_C])
        order_C = np.argsort(value_C, kind="stable")
        gained_C = np.cumsum(weight_C[order_C])
        time = float(value_C[order_C[np.searchsorted(gained_C, units - int(have_W.sum()))]])
        return self.reach(time, level_W)

    def trim(
        self, units_W: np.ndarray, level_W: np.ndarray, surplus: int, current_W: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Remove `surplus` units, most time saved per unit first; units that share a level go together."""
        units_W, level_W = units_W.copy(), level_W.copy()
        while surplus > 0:
            under_W = np.maximum(level_W - 1, 0)
            lower_W = self.top_L[self.base_W + under_W]
            size_W = units_W - lower_W
            fits_W = (level_W > 0) & (lower_W >= self.low_W) & (size_W <= surplus)
            if not fits_W.any():
                break
            saved_W = self.time(level_W) - self.time(under_W)
            gain_W = np.where(fits_W, saved_W / np.where(fits_W, size_W, 1), -1.0)
            best_W = gain_W == gain_W.max()
            above_W = best_W & (units_W > current_W)
            best_B = np.flatnonzero(above_W if above_W.any() else best_W)[::-1]
            taken_B = best_B[np.cumsum(size_W[best_B]) <= surplus]
            surplus -= int(size_W[taken_B].sum())
            units_W[taken_B] = lower_W[taken_B]
            level_W[taken_B] -= 1
        # What is left is less than any level, so it saves no time. Toward the current counts first.
        for keep_W in (np.maximum(current_W, self.low_W), self.low_W):
            room_W = np.maximum(units_W - keep_W, 0)[::-1]
            taken_W = np.clip(surplus - before(room_W), 0, room_W)[::-1]
            units_W = units_W - taken_W
            surplus -= int(taken_W.sum())
        return units_W, level_W

    def allocate(
        self, units: int, quantum: int, remainder: int, taker: int, current_W: np.ndarray, tolerance: float
    ) -> Allocation:
        """Optimal counts for `units` units, plus the remainder on worker `taker`; the problem must be feasible."""
        bound, level_W = self.relax(units, self.floor(), tolerance)
        level_W = self.select(units, bound, level_W)
        units_W = self.top(level_W)
        if np.any(units_W < self.top_L[self.base_W + level_W]):
            level_W = self.level(units_W)
        surplus = int(units_W.sum()) - units
        if surplus > 0:
            units_W, level_W = self.trim(units_W, level_W, surplus, current_W // quantum)
        time = float(np.max(self.time(level_W)))
        counts_W = units_W * quantum
        counts_W[taker] += remainder
        return Allocation(counts_W, time, min(bound, time))


def before(x_W: np.ndarray) -> np.ndarray:
    """Exclusive prefix sum."""
    return np.cumsum(x_W) - x_W
