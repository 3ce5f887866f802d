"""The allocation solver: brute force on small cases, bounds on large ones, limits, ties and errors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.planning.allocation import solve
from hetjax.planning.limits import Limits
from hetjax.planning.search import Grid


def worker_times(startup_W, per_work_W, limits, counts_W):
    return np.where(counts_W > 0, startup_W + per_work_W * limits.work(counts_W), 0.0)


def solve_affine(startup_W, per_sample_W, batch, *, capacity_W=None, minimum_W=None, quantum=1):
    """`solve` for t_i(n) = startup_i + n per_sample_i; capacities default to the batch."""
    workers = len(startup_W)
    capacity_W = np.full(workers, batch) if capacity_W is None else capacity_W
    minimum_W = np.zeros(workers, np.int64) if minimum_W is None else minimum_W
    stair = np.arange(np.max(capacity_W) + 1.0)
    return solve(
        startup_W, per_sample_W, Limits(capacity_W, minimum_W, quantum, np.zeros(workers, int), (stair,)), batch
    )


def solve_tables(tables, batch):
    """`solve` for any non-decreasing costs: `tables[i][n]` is the time of n samples on worker i."""
    workers = len(tables)
    capacity_W = np.array([len(table) - 1 for table in tables])
    limits = Limits(capacity_W, np.zeros(workers, np.int64), 1, np.arange(workers), tuple(tables))
    return solve(np.zeros(workers), np.ones(workers), limits, batch)


def feasible(limits: Limits, batch: int):
    """Enumerate the allocations that the limits allow."""
    q = limits.quantum
    for counts in itertools.product(*(range(c + 1) for c in limits.capacity_W)):
        counts_W = np.array(counts)
        if counts_W.sum() != batch or np.any(counts_W < limits.minimum_W):
            continue
        used = np.flatnonzero(counts_W)
        rest = counts_W.copy()
        if len(used):
            if counts_W[used[-1]] % q != batch % q:
                continue
            rest[used[-1]] = 0
        if np.all(rest % q == 0):
            yield counts_W


def random_problem(seed: int):
    rng = np.random.default_rng(seed)
    workers, kinds = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    quantum = int(rng.choice([1, 1, 2, 3, 4]))
    capacity_W = rng.integers(1, 11 if workers < 4 else 7, workers)
    minimum_W = np.where(rng.random(workers) < 0.3, rng.integers(0, capacity_W + 1), 0)
    stairs = []
    for _ in range(kinds):
        rises = rng.choice([0.0, 1.0, 0.5, rng.random()], size=capacity_W.max())
        stairs.append(np.concatenate([[0.0], np.cumsum(rises)]))
    limits = Limits(capacity_W, minimum_W, quantum, rng.integers(0, kinds, workers), tuple(stairs))
    draw = rng.choice(["ties", "free", "real"])
    if draw == "ties":
        startup_W, per_work_W = rng.integers(0, 3, workers) * 1.0, rng.integers(1, 4, workers) * 1.0
    elif draw == "free":
        startup_W, per_work_W = rng.random(workers), rng.integers(0, 2, workers) * rng.random(workers)
    else:
        startup_W, per_work_W = rng.random(workers), rng.random(workers)
    batch = int(rng.integers(minimum_W.sum(), capacity_W.sum() + 1))
    return startup_W, per_work_W, limits, batch


@pytest.mark.parametrize("block", range(8))
def test_equals_brute_force_on_small_cases(block):
    for seed in range(block * 75, block * 75 + 75):
        startup_W, per_work_W, limits, batch = random_problem(seed)
        options = list(feasible(limits, batch))
        if not options:
            with pytest.raises(ValueError, match="multiples of"):
                solve(startup_W, per_work_W, limits, batch)
            continue
        best = min(worker_times(startup_W, per_work_W, limits, o).max() for o in options)
        found = solve(startup_W, per_work_W, limits, batch)
        assert any(np.array_equal(found.counts_W, o) for o in options), f"seed {seed}: {found} is not allowed"
        assert found.time == best, f"seed {seed}: {found} but brute force gives {best}"
        assert worker_times(startup_W, per_work_W, limits, found.counts_W).max() == found.time, f"seed {seed}"
        assert found.lower_bound <= found.time, f"seed {seed}"


@pytest.mark.parametrize("seed", range(60))
def test_convex_costs_have_the_smallest_total_then_stay_close_to_the_current_counts(seed):
    rng = np.random.default_rng(seed)
    workers = int(rng.integers(2, 5))
    limits = Limits.plain(workers, 6)
    zero_W, per_work_W = np.zeros(workers), rng.integers(1, 3, workers) * 1.0
    batch = int(rng.integers(1, 6 * workers))
    current_W = rng.integers(0, 7, workers)
    found = solve(zero_W, per_work_W, limits, batch, current_W)
    rank = lambda n_W: (
        worker_times(zero_W, per_work_W, limits, n_W).max(),
        worker_times(zero_W, per_work_W, limits, n_W).sum(),
        np.abs(n_W - current_W).sum(),
    )
    assert rank(found.counts_W) == min(rank(o) for o in feasible(limits, batch))


def test_equal_workers_give_the_odd_samples_to_the_lower_index():
    found = solve_affine(np.full(4, 0.1), np.full(4, 1.0), 10)
    assert found.counts_W.tolist() == [3, 3, 2, 2]
    assert found.time == pytest.approx(3.1)
    assert found.lower_bound == pytest.approx(2.6, rel=1e-6)


@given(
    st.lists(st.tuples(st.floats(0, 5), st.floats(1e-3, 5)), min_size=1, max_size=40),
    st.integers(0, 5000),
    st.integers(1, 17),
)
@settings(max_examples=150, deadline=None)
def test_affine_bound_is_true_and_close(costs, batch, quantum):
    startup_W, per_work_W = np.array(costs).T
    capacity_W = np.full(len(costs), batch + quantum)
    found = solve_affine(startup_W, per_work_W, batch, capacity_W=capacity_W, quantum=quantum)
    assert found.counts_W.sum() == batch
    assert np.all(found.counts_W >= 0)
    # Rounding each real-valued count up costs the slowest worker at most one quantum, and switching on its startup.
    gap = quantum * per_work_W.max() + startup_W.max()
    assert found.lower_bound <= found.time <= found.lower_bound + gap + 2e-3 * found.time


def test_the_work_of_a_solve_is_linear_in_the_number_of_workers(monkeypatch):
    """Counted as evaluated levels, of eight kinds of staircases; `bench_controllers.py` measures the time."""
    evaluated, busy = [], Grid.busy

    def counting(grid, level_A, workers_A=slice(None)):
        evaluated.append(len(level_A))
        return busy(grid, level_A, workers_A)

    monkeypatch.setattr(Grid, "busy", counting)
    stairs = tuple(np.ceil(np.arange(257) / rung) * rung for rung in (1, 2, 4, 8, 12, 16, 24, 32))
    per_worker = []
    for workers in (1_000, 10_000):
        rng = np.random.default_rng(5)
        limits = Limits(np.full(workers, 256), np.zeros(workers, np.int64), 1, np.arange(workers) % 8, stairs)
        evaluated.clear()
        for _ in range(5):
            startup_W, per_work_W = rng.uniform(0, 3, workers), np.exp(0.4 * rng.standard_normal(workers))
            assert solve(startup_W, per_work_W, limits, 64 * workers).counts_W.sum() == 64 * workers
        per_worker.append(sum(evaluated) / (5 * workers))
    assert per_worker[1] < 1.5 * per_worker[0]
    assert per_worker[1] < 257  # a table of all times would take one evaluation per count


def test_the_last_worker_with_samples_takes_the_remainder_of_the_quantum():
    limits = Limits.plain(3, 200, quantum=16)
    assert solve(np.zeros(3), np.array([1.0, 1.0, 1.0]), limits, 100).counts_W.tolist() == [32, 32, 36]
    # The slow last worker gets nothing, so worker 1 is the last one with samples.
    counts_W = solve(np.zeros(3), np.array([1.0, 1.0, 100.0]), limits, 100).counts_W
    assert counts_W.tolist() == [48, 52, 0]
    assert solve(np.zeros(3), np.ones(3), limits, 5).counts_W.sum() == 5


def test_counts_fill_the_steps_of_a_staircase():
    """Rungs of 16 rows: 20 samples cost as much as 32, so counts end at full rungs where the batch allows."""
    stair = np.ceil(np.arange(201) / 16) * 16
    limits = Limits(np.full(3, 200), np.zeros(3, np.int64), 1, np.zeros(3, np.int64), (stair,))
    found = solve(np.zeros(3), np.array([1.0, 1.0, 2.0]), limits, 160)
    assert found.counts_W.tolist() == [64, 64, 32]


def test_minimums_and_capacities_bind():
    found = solve_affine(
        np.zeros(3), np.array([1.0, 1.0, 50.0]), 30, minimum_W=np.array([0, 0, 2]), capacity_W=np.array([10, 30, 30])
    )
    assert found.counts_W[2] == 2
    assert found.counts_W.sum() == 30
    assert found.time == 100.0
    found = solve_affine(np.zeros(3), np.array([1.0, 1.0, 2.0]), 30, capacity_W=np.array([5, 30, 30]))
    assert found.counts_W.tolist() == [5, 17, 8]


def test_any_table_per_worker():
    tables = [np.array([0.0, 3, 3, 3, 9]), np.array([0.0, 2, 4, 6, 8]), np.array([0.0, 10, 10, 10, 10])]
    found = solve_tables(tables, 5)
    assert found.counts_W.tolist() == [3, 2, 0]
    assert found.time == 4.0


@pytest.mark.parametrize("seed", range(3))
def test_large_fleets_of_few_kinds_are_solved_exactly(seed):
    """The optimum has no slack: with anything less than its time, the counts within reach fall short of the batch."""
    rng = np.random.default_rng(seed)
    workers = 3000
    rungs = [1, 4, 16, 24, 32, 7, 12, 64]
    stairs = tuple(np.ceil(np.arange(513) / r) * r for r in rungs)
    limits = Limits(np.full(workers, 512), np.zeros(workers, np.int64), 1, rng.integers(0, 8, workers), stairs)
    startup_W, per_work_W = rng.random(workers), rng.random(workers) + 0.05
    found = solve(startup_W, per_work_W, limits, 64 * workers)
    assert found.counts_W.sum() == 64 * workers
    table_WxN = np.array(stairs)[limits.kind_W] * per_work_W[:, None] + startup_W[:, None]
    assert found.time == worker_times(startup_W, per_work_W, limits, found.counts_W).max()
    within_reach = (table_WxN[:, 1:] < found.time).sum()
    assert within_reach < 64 * workers
    assert 0.97 * found.time <= found.lower_bound <= found.time


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: solve_affine(np.zeros(2), np.ones(2), 9, capacity_W=np.array([4, 4])), "above the total capacity 8"),
        (lambda: solve_affine(np.zeros(2), np.ones(2), 3, minimum_W=np.array([2, 2])), "below the total minimum 4"),
        (lambda: solve_affine(np.array([0, np.nan]), np.ones(2), 3), "startup of worker 1 is nan"),
        (lambda: solve_affine(np.zeros(2), np.array([1, -1.0]), 3), "cost per work of worker 1 is -1"),
        (lambda: solve_affine(np.zeros(2), np.array([np.inf, 1]), 3), "cost per work of worker 0 is inf"),
        (lambda: solve(np.zeros(3), np.ones(3), Limits.plain(2, 9), 3), "2 workers; give one number"),
        (lambda: solve_tables([np.array([0.0, 2, 1])], 1), "never decrease"),
        (lambda: solve_tables([np.array([0.0, np.nan, 1])], 1), "never decrease"),
        (lambda: solve(np.zeros(2), np.ones(2), Limits.plain(2, 15, quantum=16), 16), "multiples of 16"),
        (lambda: Limits(np.array([5]), np.array([6]), 1, np.array([0]), (np.arange(6.0),)), "minimum 6 and capacity 5"),
        (lambda: Limits(np.array([9]), np.array([0]), 1, np.array([0]), (np.arange(6.0),)), "ends at 5 samples"),
        (lambda: Limits(np.array([5]), np.array([0]), 1, np.array([1]), (np.arange(6.0),)), "names kind 1"),
        (lambda: Limits(np.array([5]), np.array([0, 0]), 1, np.array([0]), (np.arange(6.0),)), "one of each"),
        (lambda: Limits.plain(2, 4, quantum=0), "quantum is 0"),
    ],
)
def test_bad_input_is_explained(call, message):
    with pytest.raises(ValueError, match=message):
        call()
