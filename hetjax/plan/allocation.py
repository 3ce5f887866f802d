"""Exact allocation: the integer counts that minimise the largest worker time.

Worker i needs t_i(n) = startup_i + per_work_i * stairs_i[n] for n > 0 samples and t_i(0) = 0. Every t_i is
non-decreasing, so with h_i(T) = max {n : t_i(n) <= T} the optimum is T* = min {T : sum_i h_i(T) >= batch}, and T* is
one of the values t_i(n). The continuous relaxation brackets T*; selecting among the few values left makes it exact.

Only float64 + - * /, comparisons and stable sorts are used, so that unlike hosts agree to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hetjax.plan.limits import Levels, Limits


@dataclass(frozen=True)
class Allocation:
    """Counts that sum to the batch, the largest worker time they give, and a proof of how good that is."""

    counts_W: np.ndarray  # int64
    time: float  # max_i t_i(counts_i), the smallest possible
    lower_bound: float  # of the relaxation to real-valued counts: no allocation is faster than this


def solve(
    startup_W: np.ndarray,
    per_work_W: np.ndarray,
    limits: Limits,
    batch: int,
    current_W: np.ndarray | None = None,
    bound_tolerance: float = 1e-3,
) -> Allocation:
    """Minimise max_i t_i(n_i) subject to sum_i n_i = batch, minimum_i <= n_i <= capacity_i and the quantum.

    Counts are multiples of the quantum, except that the last worker with samples takes the remainder of the batch.
    The time is exactly optimal. Among allocations of that time the total time is made small greedily: surplus samples
    are taken where they save most per sample (this is exact when every t_i is convex); equal savings are taken from
    a worker that has more than in `current_W`, then from the higher index. `bound_tolerance` is how closely, relative,
    the lower bound is worked out; a large one saves time and changes nothing else.
    """
    startup_W, per_work_W = np.asarray(startup_W, np.float64), np.asarray(per_work_W, np.float64)
    _check_costs(startup_W, per_work_W, limits)
    batch = int(batch)
    _check_batch(batch, limits)
    current_W = np.zeros(limits.workers, np.int64) if current_W is None else np.asarray(current_W, np.int64)
    units, remainder = divmod(batch, limits.quantum)
    grid = _Grid.of(startup_W, per_work_W, limits)
    if remainder == 0:
        if np.any(grid.low_W > grid.cap_W) or not grid.low_W.sum() <= units <= grid.cap_W.sum():
            raise _unreachable(batch, limits)
        return grid.allocate(units, limits.quantum, 0, 0, current_W, bound_tolerance)
    return _with_remainder(grid, limits, batch, current_W, bound_tolerance)


def within_reach(startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits, batch: int, time: float) -> bool:
    """Whether the batch could be done in `time`: sum_i h_i(time) >= batch. False is a proof that it cannot.

    Much cheaper than `solve`. True is certain too unless the batch has a remainder. Costs must be finite.
    """
    grid = _Grid.of(startup_W, per_work_W, limits)
    units_W = np.minimum(grid.top_L[grid.base_W + grid.reach(time, grid.guess(time))], grid.cap_W)
    return int(units_W.sum()) >= batch // limits.quantum and grid.floor() <= time


def solve_affine(
    startup_W: np.ndarray,
    per_sample_W: np.ndarray,
    batch: int,
    *,
    capacity_W: np.ndarray | None = None,
    minimum_W: np.ndarray | None = None,
    quantum: int = 1,
    current_W: np.ndarray | None = None,
) -> Allocation:
    """`solve` for plain affine costs t_i(n) = startup_i + n per_sample_i; a capacity not given is the batch."""
    workers = len(startup_W)
    capacity_W = np.full(workers, batch, np.int64) if capacity_W is None else np.asarray(capacity_W, np.int64)
    limits = Limits(
        capacity_W=capacity_W,
        minimum_W=np.zeros(workers, np.int64) if minimum_W is None else np.asarray(minimum_W, np.int64),
        quantum=quantum,
        kind_W=np.zeros(workers, np.int64),
        stairs=(np.arange(int(np.max(capacity_W)) + 1, dtype=np.float64),),
    )
    return solve(startup_W, per_sample_W, limits, batch, current_W)


def solve_tables(
    times: Sequence[np.ndarray],
    batch: int,
    *,
    minimum_W: np.ndarray | None = None,
    quantum: int = 1,
    current_W: np.ndarray | None = None,
) -> Allocation:
    """`solve` for any non-decreasing cost: `times[i][n]` is the time of n samples on worker i, its end the capacity."""
    workers = len(times)
    tables = tuple(np.concatenate([[0.0], np.asarray(table, np.float64)[1:]]) for table in times)
    limits = Limits(
        capacity_W=np.array([len(table) - 1 for table in tables], np.int64),
        minimum_W=np.zeros(workers, np.int64) if minimum_W is None else np.asarray(minimum_W, np.int64),
        quantum=quantum,
        kind_W=np.arange(workers),
        stairs=tables,
    )
    return solve(np.zeros(workers), np.ones(workers), limits, batch, current_W)


@dataclass(frozen=True)
class _Grid:
    """The problem in units of the quantum, where every worker's cost is a table of levels (see `Levels`)."""

    startup_W: np.ndarray
    per_work_W: np.ndarray
    value_L: np.ndarray
    top_L: np.ndarray
    base_W: np.ndarray
    size_W: np.ndarray
    idle_W: np.ndarray  # time at no unit: 0, or that of the remainder for the worker that takes it
    low_W: np.ndarray
    cap_W: np.ndarray

    @classmethod
    def of(cls, startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits) -> _Grid:
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
        return np.where(level_W > 0, self.busy(level_W), self.idle_W)

    def busy(self, level_A: np.ndarray, workers_A: np.ndarray | slice = slice(None)) -> np.ndarray:
        """`time` for levels above 0, of some workers or all."""
        value_A = self.value_L[self.base_W[workers_A] + level_A]
        return self.startup_W[workers_A] + self.per_work_W[workers_A] * value_A

    def top(self, level_W: np.ndarray) -> np.ndarray:
        """Units that a level pays for, within the limits."""
        return np.maximum(np.minimum(self.top_L[self.base_W + level_W], self.cap_W), self.low_W)

    def level(self, units_W: np.ndarray) -> np.ndarray:
        """The level that pays for these units."""
        low_W, high_W = np.zeros_like(units_W), self.size_W - 1
        while np.any(low_W < high_W):
            mid_W = (low_W + high_W) >> 1
            enough_W = self.top_L[self.base_W + mid_W] >= units_W
            low_W, high_W = np.where(enough_W, low_W, mid_W + 1), np.where(enough_W, mid_W, high_W)
        return low_W

    def floor(self) -> float:
        """The time that the minimums alone take."""
        return float(np.max(self.time(self.level(self.low_W)) if np.any(self.low_W) else self.idle_W))

    def reach(self, time: float, guess_W: np.ndarray) -> np.ndarray:
        """The highest level with t_i <= time, by galloping from a guess and then halving. Level 0 is always reached."""
        low_W, high_W = guess_W.copy(), guess_W + 1  # high: the first level known, or claimed, to be out of reach
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
        """The level reached if levels were evenly spaced."""
        last_W = self.size_W - 1
        span_W = self.per_work_W * self.value_L[self.base_W + last_W]
        share_W = np.clip((time - self.startup_W) / np.where(span_W > 0, span_W, 1.0), 0.0, 1.0)
        return (share_W * last_W).astype(np.int64)

    def relaxed(self, time: float, level_W: np.ndarray) -> tuple[float, float]:
        """Real-valued units within reach of `time`, unit costs interpolated linearly; and their rate per second."""
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
        """A time, no less than `floor`, at which even real-valued counts just reach no more than `units`."""
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
            if reached > units:  # aim a little low, so that the bound closes from below
                newton -= 1e-9 * time
            if above < np.inf and (turn % 3 == 2 or not below < newton < above):
                newton = 0.5 * (below + above)  # a staircase may hold Newton up: halve every third time
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
        """`select` when low is not enough, high is, and T is one of the times of the levels in between."""
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
        """Take `surplus` units away, most time saved per unit first; units that share a level are taken together."""
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
        # What is left is less than any level: nothing more to save. Towards the current counts first.
        for keep_W in (np.maximum(current_W, self.low_W), self.low_W):
            room_W = np.maximum(units_W - keep_W, 0)[::-1]
            taken_W = np.clip(surplus - _before(room_W), 0, room_W)[::-1]
            units_W = units_W - taken_W
            surplus -= int(taken_W.sum())
        return units_W, level_W

    def allocate(
        self, units: int, quantum: int, remainder: int, taker: int, current_W: np.ndarray, tolerance: float
    ) -> Allocation:
        """Optimal counts for `units` units, worker `taker` having the remainder on top; feasibility is known."""
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


def _with_remainder(grid: _Grid, limits: Limits, batch: int, current_W: np.ndarray, tolerance: float) -> Allocation:
    """Try takers of the remainder, each faster than the one before, until none is left.

    When worker L takes it, those after L have nothing and L's counts are remainder + m quantum. Whether some L does
    better than a time T is a prefix sum over all workers, so few of them are ever solved for.
    """
    units, remainder = divmod(batch, limits.quantum)
    shifted = Levels.of(limits.stairs, remainder, limits.quantum)
    base_W, size_W = shifted.base_K[limits.kind_W], shifted.size_K[limits.kind_W]
    able_W = limits.capacity_W >= remainder
    first_work_K = np.array([stair[min(remainder, len(stair) - 1)] for stair in limits.stairs])
    taker = replace(
        grid,
        value_L=shifted.value_L,
        top_L=shifted.top_L,
        base_W=base_W,
        size_W=size_W,
        idle_W=grid.startup_W + grid.per_work_W * first_work_K[limits.kind_W],
        low_W=np.maximum(-(-(limits.minimum_W - remainder) // limits.quantum), 0),
        cap_W=np.where(able_W, (limits.capacity_W - remainder) // limits.quantum, -1),
    )
    needed_W = np.flatnonzero(limits.minimum_W > 0)
    able_W = able_W & (np.arange(limits.workers) >= (needed_W[-1] if len(needed_W) else 0))
    able_W &= _before(grid.low_W) + taker.low_W <= units

    def surplus_of(time: float) -> np.ndarray:
        """Units to spare at `time` if worker L takes the remainder; negative where that is impossible."""
        whole_W = grid.reach(time, grid.guess(time)) if time < np.inf else grid.size_W - 1
        apart_W = taker.reach(time, taker.guess(time)) if time < np.inf else taker.size_W - 1
        late_W = (grid.low_W > grid.cap_W) | (grid.time(grid.level(np.minimum(grid.low_W, grid.cap_W))) > time)
        on_time_W = taker.time(taker.level(np.minimum(taker.low_W, np.maximum(taker.cap_W, 0)))) <= time
        possible_W = able_W & (taker.cap_W >= taker.low_W) & on_time_W & (_before(late_W) == 0)
        spare_W = _before(grid.top(whole_W)) + taker.top(apart_W) - units
        return np.where(possible_W, spare_W, -1)

    best: Allocation | None = None
    spare_W = surplus_of(np.inf)
    while np.max(spare_W) >= 0:
        # First the last worker possible, then whoever has most to spare below the time reached so far.
        last = int(np.flatnonzero(spare_W >= 0)[-1]) if best is None else int(np.argmax(spare_W))
        best = _taking(grid, taker, last).allocate(units, limits.quantum, remainder, last, current_W, tolerance)
        if best.time == 0:
            break
        spare_W = surplus_of(float(np.nextafter(best.time, 0.0)))
    if best is None:
        raise _unreachable(batch, limits)
    # The bound of one taker says nothing about another: drop the remainder, which makes every choice cheaper.
    free = replace(grid, low_W=limits.minimum_W // limits.quantum)
    bound = free.relax(units, free.floor(), tolerance)[0] if units else 0.0
    return replace(best, lower_bound=min(bound, best.time))


def _taking(grid: _Grid, taker: _Grid, last: int) -> _Grid:
    """The grid when worker `last` takes the remainder and those after it have nothing."""
    mine_W = np.arange(len(grid.low_W)) == last
    after_W = np.arange(len(grid.low_W)) > last
    return replace(
        grid,
        value_L=np.concatenate([grid.value_L, taker.value_L]),
        top_L=np.concatenate([grid.top_L, taker.top_L]),
        base_W=np.where(mine_W, len(grid.value_L) + taker.base_W, grid.base_W),
        size_W=np.where(mine_W, taker.size_W, grid.size_W),
        idle_W=np.where(mine_W, taker.idle_W, 0.0),
        low_W=np.where(mine_W, taker.low_W, np.where(after_W, 0, grid.low_W)),
        cap_W=np.where(mine_W, taker.cap_W, np.where(after_W, 0, grid.cap_W)),
    )


def _before(x_W: np.ndarray) -> np.ndarray:
    """Sum over the workers before each."""
    return np.cumsum(x_W) - x_W


def _check_costs(startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits) -> None:
    if startup_W.shape != (limits.workers,) or per_work_W.shape != (limits.workers,):
        raise ValueError(
            f"Got startups of shape {startup_W.shape} and costs per work of shape {per_work_W.shape} for "
            f"{limits.workers} workers; give one number of each per worker."
        )
    for name, cost_W in (("startup", startup_W), ("cost per work", per_work_W)):
        wrong_W = ~(np.isfinite(cost_W) & (cost_W >= 0))
        if wrong_W.any():
            i = int(np.argmax(wrong_W))
            raise ValueError(
                f"The {name} of worker {i} is {cost_W[i]}; expected a finite number of seconds, zero or more. "
                "Leave workers without a valid timing out, or give them the cost of their peers."
            )


def _check_batch(batch: int, limits: Limits) -> None:
    most, least = int(limits.capacity_W.sum()), int(limits.minimum_W.sum())
    if batch > most:
        raise ValueError(
            f"A batch of {batch} samples is above the total capacity {most} of {limits.workers} workers; "
            "lower the batch or raise the capacities."
        )
    if batch < least:
        raise ValueError(
            f"A batch of {batch} samples is below the total minimum {least} of {limits.workers} workers; "
            "raise the batch or lower the minimums."
        )


def _unreachable(batch: int, limits: Limits) -> ValueError:
    q = limits.quantum
    return ValueError(
        f"No counts in multiples of {q} (the last worker with samples taking the remainder {batch % q}) sum to {batch} "
        f"within minimums of {int(limits.minimum_W.sum())} and capacities of {int(limits.capacity_W.sum())} in total; "
        "make capacities and minimums multiples of the quantum, or lower the quantum."
    )
