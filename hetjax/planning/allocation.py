"""Exact allocation: the integer counts that minimize the largest worker time.

Worker i needs t_i(n) = startup_i + per_work_i * stairs_i[n] for n > 0 samples and t_i(0) = 0. Every t_i is
non-decreasing, so with h_i(T) = max {n : t_i(n) <= T} the optimum is T* = min {T : sum_i h_i(T) >= batch}, and T* is
one of the values t_i(n). `Grid` finds it in multiples of the quantum; one worker takes the remainder of the batch.

Only float64 + - * /, comparisons and stable sorts are used, so that unlike hosts agree to the bit.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hetjax.planning.limits import Levels, Limits
from hetjax.planning.search import Allocation, Grid, before


def solve(
    startup_W: np.ndarray,
    per_work_W: np.ndarray,
    limits: Limits,
    batch: int,
    current_W: np.ndarray | None = None,
    bound_tolerance: float = 1e-3,
) -> Allocation:
    """Minimize max_i t_i(n_i) subject to sum_i n_i = batch, minimum_i <= n_i <= capacity_i and the quantum.

    t_i(n) = startup_i + per_work_i * work_i(n) for n > 0, with the work of `limits`, and t_i(0) = 0. Counts are
    multiples of the quantum, except that the last worker with samples takes the remainder of the batch.

    The time is exactly optimal. Among allocations of that time, the total time is reduced greedily: surplus samples are
    removed where they save most per sample (exact when every t_i is convex). Ties go to a worker that has more samples
    than in `current_W`, then to the higher index.

    Args:
        startup_W: Seconds per step of each worker that has samples, zero or more.
        per_work_W: Seconds per unit of work of each worker, zero or more.
        limits: Capacities, minimums, the quantum and the work of a count.
        batch: The sum of the counts.
        current_W: Counts to stay close to among equals (default: zeros).
        bound_tolerance: Relative accuracy of `Allocation.lower_bound`; a larger value saves time, nothing else changes.

    Returns:
        The counts, the largest worker time they give, and a lower bound on it.

    Raises:
        ValueError: If a cost is negative or not finite, or if no counts satisfy the limits.
    """
    startup_W, per_work_W = np.asarray(startup_W, np.float64), np.asarray(per_work_W, np.float64)
    _check_costs(startup_W, per_work_W, limits)
    batch = int(batch)
    _check_batch(batch, limits)
    current_W = np.zeros(limits.workers, np.int64) if current_W is None else np.asarray(current_W, np.int64)
    units, remainder = divmod(batch, limits.quantum)
    grid = Grid.of(startup_W, per_work_W, limits)
    if remainder == 0:
        if np.any(grid.low_W > grid.cap_W) or not grid.low_W.sum() <= units <= grid.cap_W.sum():
            raise _unreachable(batch, limits)
        return grid.allocate(units, limits.quantum, 0, 0, current_W, bound_tolerance)
    return _with_remainder(grid, limits, batch, current_W, bound_tolerance)


def within_reach(startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits, batch: int, time: float) -> bool:
    """Whether the batch can be computed in `time`: sum_i h_i(time) >= batch.

    Much cheaper than `solve`. False is exact; True is exact unless the batch has a remainder. Costs must be finite.
    """
    grid = Grid.of(startup_W, per_work_W, limits)
    units_W = np.minimum(grid.top_L[grid.base_W + grid.reach(time, grid.guess(time))], grid.cap_W)
    return int(units_W.sum()) >= batch // limits.quantum and grid.floor() <= time


def _with_remainder(grid: Grid, limits: Limits, batch: int, current_W: np.ndarray, tolerance: float) -> Allocation:
    """Try workers as takers of the remainder, each faster than the one before, until none is left.

    When worker L takes it, those after L have no samples and L's counts are remainder + m quantum. Whether some L beats
    a time T follows from a prefix sum over all workers, so few of them are solved for.
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
    able_W &= before(grid.low_W) + taker.low_W <= units

    def surplus_of(time: float) -> np.ndarray:
        """Units to spare within `time` if worker L takes the remainder; negative where that is impossible."""
        level_W = grid.reach(time, grid.guess(time)) if time < np.inf else grid.size_W - 1
        taker_level_W = taker.reach(time, taker.guess(time)) if time < np.inf else taker.size_W - 1
        over_W = (grid.low_W > grid.cap_W) | (grid.time(grid.level(np.minimum(grid.low_W, grid.cap_W))) > time)
        within_W = taker.time(taker.level(np.minimum(taker.low_W, np.maximum(taker.cap_W, 0)))) <= time
        possible_W = able_W & (taker.cap_W >= taker.low_W) & within_W & (before(over_W) == 0)
        spare_W = before(grid.top(level_W)) + taker.top(taker_level_W) - units
        return np.where(possible_W, spare_W, -1)

    best: Allocation | None = None
    spare_W = surplus_of(np.inf)
    while np.max(spare_W) >= 0:
        # First the last possible worker, then the one with most to spare below the best time so far.
        last = int(np.flatnonzero(spare_W >= 0)[-1]) if best is None else int(np.argmax(spare_W))
        best = _taking(grid, taker, last).allocate(units, limits.quantum, remainder, last, current_W, tolerance)
        if best.time == 0:
            break
        spare_W = surplus_of(float(np.nextafter(best.time, 0.0)))
    if best is None:
        raise _unreachable(batch, limits)
    # The bound of one taker does not hold for another: drop the remainder, which makes every choice cheaper.
    free = replace(grid, low_W=limits.minimum_W // limits.quantum)
    bound = free.relax(units, free.floor(), tolerance)[0] if units else 0.0
    return replace(best, lower_bound=min(bound, best.time))


def _taking(grid: Grid, taker: Grid, last: int) -> Grid:
    """The grid when worker `last` takes the remainder and those after it have no samples."""
    last_W = np.arange(len(grid.low_W)) == last
    after_W = np.arange(len(grid.low_W)) > last
    return replace(
        grid,
        value_L=np.concatenate([grid.value_L, taker.value_L]),
        top_L=np.concatenate([grid.top_L, taker.top_L]),
        base_W=np.where(last_W, len(grid.value_L) + taker.base_W, grid.base_W),
        size_W=np.where(last_W, taker.size_W, grid.size_W),
        idle_W=np.where(last_W, taker.idle_W, 0.0),
        low_W=np.where(last_W, taker.low_W, np.where(after_W, 0, grid.low_W)),
        cap_W=np.where(last_W, taker.cap_W, np.where(after_W, 0, grid.cap_W)),
    )


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
                "Leave out workers without a valid timing, or give them the cost of their peers."
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
