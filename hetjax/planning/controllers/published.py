"""Controllers after published rules: `dp`, `edp`, `dbs`, `lbb` and `lbbsp`.

The laws themselves, from timings to shares or costs, are pure functions. B is the global batch, N the number of
workers, b_i a count, p_i a share, t_i the mean time of a step since the last update.

- `dp`, `edp`: Vineeth S, "Distributed Optimization using Heterogeneous Compute Systems", arXiv 2110.08941.
- `dbs`: Ye et al., "DBS: Dynamic Batch Size for Distributed Deep Neural Network Training", arXiv 2007.11831.
- `lbbsp`: Chen et al., "Semi-Dynamic Load Balancing", SoCC 2020.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from hetjax.arguments import whole
from hetjax.plain_state import INLINE
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import ControllerBase, ControllerState, Every, Observation, Timings, check_every
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder, round_half_up


def throughput_shares(share_W: np.ndarray, timings: Timings) -> np.ndarray:
    """p_i ~ sum n_i / sum t_i, samples per second; a worker without a timing keeps its `share_W`."""
    timed_W = timings.timed_W > 0
    rate_W = np.where(timed_W, timings.sum_n_W / np.where(timed_W, timings.sum_t_W, 1.0), 0.0)
    kept = float(share_W[~timed_W].sum())
    return np.where(timed_W, (1.0 - kept) * rate_W / float(rate_W.sum()), share_W)


def partition_shares(share_W: np.ndarray, counts_W: np.ndarray, timings: Timings, batch: int) -> np.ndarray:
    """The law of `dp` and `edp`: p_i <- (p_i / t_i) / sum_k (p_k / t_k), for real-valued p_i beside whole counts."""
    # Rates are those of the whole samples computed; the same factor moves the real-valued share.
    whole_W = np.maximum(counts_W, 1) / batch
    share_W = throughput_shares(whole_W, timings) * share_W / whole_W
    return share_W / share_W.sum()


def mean_of_means(share_W: np.ndarray) -> np.ndarray:
    """a_i = 1 / N, which gives g = (1/N) sum_i g_i, g_i the mean gradient of worker i."""
    return np.full(len(share_W), 1.0 / len(share_W))


def shares_over_workers(share_W: np.ndarray) -> np.ndarray:
    """a_i = p_i / N, which gives g = (1/N) sum_i p_i g_i, g_i the mean gradient of worker i."""
    return share_W / len(share_W)


def slowest_and_fastest(times_W: np.ndarray, timed_W: np.ndarray) -> tuple[int, int]:
    """The slowest and the fastest of the workers that were timed."""
    slow = int(np.argmax(np.where(timed_W, times_W, -np.inf)))
    fast = int(np.argmin(np.where(timed_W, times_W, np.inf)))
    return slow, fast


def move(counts_W: np.ndarray, samples: int, source: int, target: int, limits: Limits) -> np.ndarray | None:
    """Move samples from one worker to another; None if that leaves the source empty or breaks a limit."""
    moved_W = counts_W.copy()
    moved_W[source] -= samples
    moved_W[target] += samples
    return moved_W if moved_W[source] >= limits.quantum and allowed(moved_W, limits, int(counts_W.sum())) else None


def fit_lines(sums_5xW: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Least squares of t = a + b n per worker, from the sums of 1, n, t, n n and n t.

    Returns:
        (a_W, b_W); a = 0 and b = sum t / sum n where the counts hardly vary, or where a < 0 or b <= 0. Workers without
        a timing get the mean of those b.
    """
    one_W, n_W, t_W, nn_W, nt_W = sums_5xW
    timed_W = one_W > 0
    spread_W = one_W * nn_W - n_W * n_W
    varied_W = timed_W & (spread_W > 1e-3 * one_W * nn_W)
    b_W = np.where(varied_W, (one_W * nt_W - n_W * t_W) / np.where(varied_W, spread_W, 1.0), 0.0)
    a_W = np.where(varied_W, (t_W - b_W * n_W) / np.where(timed_W, one_W, 1.0), 0.0)
    good_W = varied_W & (b_W > 0) & (a_W >= 0)
    mean_W = np.where(timed_W, t_W / np.where(timed_W, n_W, 1.0), 0.0)
    mean_W = np.where(timed_W, mean_W, mean_W.sum() / max(int(timed_W.sum()), 1))
    return np.where(good_W, a_W, 0.0), np.where(good_W, b_W, mean_W)


@dataclass
class PartitionState(ControllerState):
    """The state of `dp` and `edp`."""

    timings: Timings = field(init=False, metadata=INLINE)
    share_W: np.ndarray = field(init=False)  # real-valued

    def __post_init__(self) -> None:
        self.timings = Timings(self.workers)
        self.share_W = np.full(self.workers, 1.0 / max(self.workers, 1))


class DynamicPartition(ControllerBase[PartitionState]):
    """What `dp` and `edp` share: all but the weights of the published forms."""

    def __init__(self, every: Every = "epoch", faithful: bool = False) -> None:
        self.every, self.faithful = check_every(every), faithful
        super().__init__()

    def initial_state(self, workers: int) -> PartitionState:
        return PartitionState(workers)

    def observe(self, observation: Observation, /) -> None:
        self.state.timings.add(observation, self.state.usual)

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return self.state.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state = self.state
        if not state.timings.due(self.every, epoch):
            return counts_W, ""
        share_W = partition_shares(state.share_W, counts_W, state.timings, state.usual)
        wanted_W = np.maximum(np.floor(state.usual * share_W), 1.0) if self.faithful else share_W
        new_W = largest_remainder(wanted_W, limits, state.usual, least=1)
        # Where a limit holds the count, the share must not run away from it.
        held_W = np.abs(new_W - state.usual * share_W) > limits.quantum
        state.share_W = np.where(held_W, new_W / state.usual, share_W)
        state.timings.clear()
        return new_W, "shares by throughput"

    def mean_weights(self) -> np.ndarray | None:
        return self.faithful_weights() if self.faithful else None

    @abstractmethod
    def faithful_weights(self) -> np.ndarray:
        """The weights a_W of the published form."""


class Dp(DynamicPartition):
    """p_i <- (p_i / t_i) / sum_k (p_k / t_k); b_i = max(p_i B, 1). Dynamic partition.

    The shares stay real-valued from update to update. By default counts are rounded by largest remainder and all
    samples weigh the same.

    Args:
        every: Number of steps between two updates, or "epoch".
        faithful: The published form: b_i = max(floor(p_i B), 1), topped up to sum to B, and the mean of worker means,
            g = (1/N) sum_i g_i, which overweights the samples of small workers.
    """

    name = "dp"

    def faithful_weights(self) -> np.ndarray:
        return mean_of_means(self.state.share_W)


class Edp(DynamicPartition):
    """The shares of `dp` with g = sum_i p_i g_i; with p_i = b_i / B, the default, that is the mean over all samples.

    Args:
        every: Number of steps between two updates, or "epoch".
        faithful: The published form divides by N once more, g = (1/N) sum_i p_i g_i with real-valued p_i: in effect a
            learning rate N times smaller.
    """

    name = "edp"

    def faithful_weights(self) -> np.ndarray:
        return shares_over_workers(self.state.share_W)


@dataclass
class DbsState(ControllerState):
    """The state of `dbs`."""

    timings: Timings = field(init=False, metadata=INLINE)

    def __post_init__(self) -> None:
        self.timings = Timings(self.workers)


class Dbs(ControllerBase[DbsState]):
    """p_i <- (p_i / t_i) / sum_k (p_k / t_k); b_i = p_i B by largest remainder, b_i >= 1; p_i = b_i / B.

    Args:
        every: Number of steps between two updates, or "epoch".
        faithful: The published form: `round_half_up`, topped up to sum to B, and workers weigh p_i in every step,
            also in one whose counts differ, such as the short last step of an epoch: g = sum_i p_i g_i, g_i the mean
            over its samples.
    """

    name = "dbs"

    def __init__(self, every: Every = "epoch", faithful: bool = False) -> None:
        self.every, self.faithful = check_every(every), faithful
        super().__init__()

    def initial_state(self, workers: int) -> DbsState:
        return DbsState(workers)

    def observe(self, observation: Observation, /) -> None:
        self.state.timings.add(observation, self.state.usual)

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state = self.state
        if not state.timings.due(self.every, epoch):
            return counts_W, ""
        share_W = throughput_shares(counts_W / state.usual, state.timings)
        if self.faithful:
            share_W = round_half_up(state.usual * share_W).astype(np.float64)
        state.timings.clear()
        return largest_remainder(share_W, limits, state.usual, least=1), "shares by throughput"

    def mean_weights(self) -> np.ndarray | None:
        state = self.state
        return state.counts_W / state.usual if self.faithful and state.counts_W is not None else None


@dataclass
class LbbState(ControllerState):
    """The state of `lbb`."""

    steps: int = field(default=0, init=False)  # planned
    cool: int = field(default=0, init=False)  # steps left before the next solve
    sums_5xW: np.ndarray = field(init=False)  # of 1, n, t, n n, n t
    last_W: np.ndarray = field(init=False)  # times of the last step, 0 where there is none
    fresh: bool = field(default=False, init=False)  # those times have not been used

    def __post_init__(self) -> None:
        self.sums_5xW, self.last_W = np.zeros((5, self.workers)), np.zeros(self.workers)


class Lbb(ControllerBase[LbbState]):
    """Load-balanced batching (doi 10.1007/s11227-023-05886-w), by the imbalance (max t - min t) / mean t of a step.

    - imbalance <= hold: keep the counts;
    - imbalance <= nudge: one sample (quantum) from the slowest to the fastest worker;
    - above: fit t = a + b n to each worker by least squares, minimize the largest time, then cool down.

    Args:
        hold: Imbalance up to which nothing changes.
        nudge: Imbalance up to which a single sample moves.
        cool_down: Steps after a solve without another one.
        warm_up: Steps before the first solve: half of them with equal counts, half with counts 25% up and down in turn,
            so that both coefficients can be fitted.
        memory: A timing has weight memory^age in the fit.
    """

    name = "lbb"

    def __init__(
        self, hold: float = 0.06, nudge: float = 0.15, cool_down: int = 30, warm_up: int = 10, memory: float = 0.9
    ) -> None:
        self.hold, self.nudge, self.cool_down, self.warm_up, self.memory = hold, nudge, cool_down, warm_up, memory
        super().__init__()

    def initial_state(self, workers: int) -> LbbState:
        return LbbState(workers)

    def observe(self, observation: Observation, /) -> None:
        state, counts_W, valid_W = self.state, observation.counts_W, observation.valid_W
        if len(counts_W) != state.workers or int(counts_W.sum()) != state.usual:
            return
        n_W, t_W = counts_W.astype(np.float64), np.where(valid_W, observation.times_W, 0.0)
        terms_5xW = np.stack([np.ones(state.workers), n_W, t_W, n_W * n_W, n_W * t_W])
        state.sums_5xW = np.where(valid_W, self.memory * state.sums_5xW + terms_5xW, state.sums_5xW)
        state.last_W, state.fresh = t_W, True

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state = self.state
        state.steps += 1
        if state.steps <= self.warm_up:
            alternating_W = np.where((np.arange(state.workers) + state.steps) % 2 == 0, 1.25, 0.75)
            share_W = np.ones(state.workers) if state.steps < self.warm_up // 2 else alternating_W
            return largest_remainder(share_W, limits, state.usual), "warm-up"
        state.cool = max(state.cool - 1, 0)
        timed_W = state.last_W > 0
        if not state.fresh or not timed_W.any():
            return counts_W, ""
        state.fresh = False
        mean = float(state.last_W[timed_W].sum()) / int(timed_W.sum())
        slow, fast = slowest_and_fastest(state.last_W, timed_W)
        imbalance = float(state.last_W[slow] - state.last_W[fast]) / mean
        if state.steps == self.warm_up + 1 or (imbalance > self.nudge and state.cool == 0):
            state.cool = self.cool_down
            best = solve(*fit_lines(state.sums_5xW), limits, state.usual, counts_W)
            return best.counts_W, f"imbalance {100 * imbalance:.0f}%: solved again"
        if self.hold < imbalance <= self.nudge:
            moved_W = move(counts_W, limits.quantum, slow, fast, limits)
            if moved_W is not None:
                return moved_W, f"imbalance {100 * imbalance:.0f}%: one step from worker {slow} to worker {fast}"
        return counts_W, ""


@dataclass
class LbbspState(ControllerState):
    """The state of `lbbsp`."""

    timings: Timings = field(init=False, metadata=INLINE)
    delta: int  # samples to move
    window: int  # steps
    last_slow: int = field(default=-1, init=False)
    last_fast: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        self.timings = Timings(self.workers)


class Lbbsp(ControllerBase[LbbspState]):
    """After every window: n_slowest -= delta, n_fastest += delta, by the mean times of the window.

    When a move undoes the one before (slowest and fastest have swapped), delta is halved and the window doubled.

    Args:
        every: The first window, in steps.
        delta: The first delta, in samples; at least one quantum is moved.
        longest: The longest window, in steps.
    """

    name = "lbbsp"

    def __init__(self, every: int = 5, delta: int = 5, longest: int = 80) -> None:
        self.every, self.delta, self.longest = whole("every", every, 1), delta, longest
        super().__init__()

    def initial_state(self, workers: int) -> LbbspState:
        return LbbspState(workers, self.delta, self.every)

    def observe(self, observation: Observation, /) -> None:
        self.state.timings.add(observation, self.state.usual)

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state, timings = self.state, self.state.timings
        timed_W = timings.timed_W > 0
        if timings.gathered < state.window or not timed_W.any():
            return counts_W, ""
        slow, fast = slowest_and_fastest(timings.mean_W, timed_W)
        timings.clear()
        if (slow, fast) == (state.last_fast, state.last_slow):
            state.delta, state.window = max(state.delta // 2, 1), min(2 * state.window, self.longest)
        state.last_slow, state.last_fast = slow, fast
        samples = max(state.delta // limits.quantum, 1) * limits.quantum
        moved_W = None if slow == fast else move(counts_W, samples, slow, fast, limits)
        if moved_W is None:
            return counts_W, ""
        return moved_W, f"{samples} samples from worker {slow} to worker {fast}"
