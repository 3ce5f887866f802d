"""Controllers to compare with: `equal`, `fixed`, `static`, `proportional` and `oracle`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hetjax.plain_state import INLINE
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import (
    ControllerBase,
    ControllerState,
    Every,
    Observation,
    Plan,
    Timings,
    check_every,
)
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Equal(ControllerBase[ControllerState]):
    """n_i = B / N within the limits, odd samples to the lower index: data-parallel training without a controller."""

    name = "equal"

    def initial_state(self, workers: int) -> ControllerState:
        return ControllerState(workers)

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return np.ones(self.state.workers)


class Fixed(ControllerBase[ControllerState]):
    """n_i = B p_i / sum_k p_k in every step, rounded by largest remainder, within the limits.

    Args:
        shares: One number per worker ([4, 2, 1, 1]), or one per kind of device ({'gpu': 4, 'cpu': 1}), where a kind is
            part of the name that `python -m hetjax check` prints. As text: '4,2,1,1', 'gpu=4,cpu=1'.
    """

    name = "fixed"

    def __init__(self, shares: str | Sequence[float] | Mapping[str, float]) -> None:
        given = _parse_shares(shares) if isinstance(shares, str) else shares
        self.by_kind = dict(given) if isinstance(given, Mapping) else None
        values = list(given.values()) if isinstance(given, Mapping) else list(given)
        if not values or not all(_is_share(value) for value in values) or not any(values):
            raise ValueError(f"The shares are {shares!r}; expected numbers, zero or more and not all zero: '4,2,1,1'.")
        self.share_W: np.ndarray | None = None if self.by_kind else np.asarray(values, np.float64)
        super().__init__()

    def initial_state(self, workers: int) -> ControllerState:
        if workers:
            self._check(workers)
        return ControllerState(workers)

    def for_kinds(self, kinds_W: Sequence[str]) -> None:
        """Turn shares by kind of device into shares by worker.

        Args:
            kinds_W: The kind of every worker.

        Raises:
            ValueError: If a worker matches no kind or several, or if all workers get nothing.
        """
        if self.by_kind is None:
            self._check(len(kinds_W))
            return
        found = [[name for name in self.by_kind if name.lower() in kind.lower()] for kind in kinds_W]
        for kind, names in zip(kinds_W, found, strict=True):
            if len(names) != 1:
                number = "several" if names else "none"
                raise ValueError(
                    f"The workers are {', '.join(dict.fromkeys(kinds_W))}, and of the shares for "
                    f"{', '.join(self.by_kind)} {number} fit {kind}: give one for each kind."
                )
        self.share_W = np.array([self.by_kind[names[0]] for names in found], np.float64)
        if not self.share_W.any():
            raise ValueError(f"The shares {self.by_kind} leave no worker with samples.")

    def _check(self, workers: int) -> None:
        if self.share_W is None:
            raise ValueError("Shares by kind need the kinds of the workers: call for_kinds first.")
        if len(self.share_W) != workers:
            raise ValueError(f"Got {len(self.share_W)} shares for {workers} workers; give one share per worker.")

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        assert self.share_W is not None
        return self.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        assert self.share_W is not None
        return largest_remainder(self.share_W, limits, self.state.usual), "shares as given"


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _parse_shares(text: str) -> list[float] | dict[str, float]:
    """'4,2,1,1' or 'gpu=4,cpu=1'."""
    parts = [part.strip() for part in text.split(",")]
    try:
        if "=" in text:
            pairs = [part.split("=") for part in parts]
            if len({name.strip() for name, _ in pairs}) == len(pairs):
                return {name.strip(): float(value) for name, value in pairs}
        else:
            return [float(part) for part in parts]
    except ValueError:
        pass
    raise ValueError(f"The shares are {text!r}; expected numbers such as '4,2,1,1', or kinds such as 'gpu=4,cpu=1'.")


@dataclass
class StaticState(ControllerState):
    """The state of `static`."""

    share_W: np.ndarray | None = field(default=None, init=False)


class Static(ControllerBase[StaticState]):
    """p_i = (n_i / t_i) / sum_k (n_k / t_k) from the first step observed, then fixed.

    A worker without a timing in that step gets the mean rate. For shares known in advance use `fixed`.
    """

    name = "static"

    def initial_state(self, workers: int) -> StaticState:
        return StaticState(workers)

    def observe(self, observation: Observation, /) -> None:
        valid_W = observation.valid_W
        if self.state.share_W is None and valid_W.any() and len(valid_W) == self.state.workers:
            rate_W = np.where(valid_W, observation.counts_W / np.where(valid_W, observation.times_W, 1.0), 0.0)
            rate_W = np.where(valid_W, rate_W, rate_W[valid_W].sum() / valid_W.sum())
            self.state.share_W = rate_W / rate_W.sum()

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return counts_W.astype(np.float64) if self.state.share_W is None else self.state.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        if self.state.share_W is None:
            return counts_W, ""
        return largest_remainder(self.state.share_W, limits, self.state.usual), "shares of the first timing"


@dataclass
class ProportionalState(ControllerState):
    """The state of `proportional`."""

    timings: Timings = field(init=False, metadata=INLINE)
    time_W: np.ndarray = field(init=False)  # smoothed; 0 where there is no timing since the last change

    def __post_init__(self) -> None:
        self.timings, self.time_W = Timings(self.workers), np.zeros(self.workers)


class Proportional(ControllerBase[ProportionalState]):
    """b_i <- b_i mean(t) / t_i, scaled to sum to B; t_i an exponential average of the step times since the last change.

    Tyagi & Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching", ACSOS 2020
    (OmniLearn). Bounds on b_i are those of the limits.

    Args:
        every: Number of steps between two updates, or "epoch".
        dead_band: Relative change of a count up to which, if it holds for all workers, nothing changes.
        smoothing: Weight of a new timing in the exponential average.
    """

    name = "proportional"

    def __init__(self, every: Every = "epoch", dead_band: float = 0.05, smoothing: float = 0.3) -> None:
        self.every, self.dead_band, self.smoothing = check_every(every), dead_band, smoothing
        super().__init__()

    def initial_state(self, workers: int) -> ProportionalState:
        return ProportionalState(workers)

    def observe(self, observation: Observation, /) -> None:
        state, times_W, valid_W = self.state, observation.times_W, observation.valid_W
        if state.counts_W is None or not np.array_equal(observation.counts_W, state.counts_W):
            return  # measured with other counts than those in force
        state.timings.add(observation, state.usual)
        first_W = valid_W & (state.time_W == 0)
        step_W = np.where(valid_W, self.smoothing * (times_W - state.time_W), 0.0)
        state.time_W = np.where(first_W, times_W, state.time_W + np.where(first_W, 0.0, step_W))

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state = self.state
        if not state.timings.due(self.every, epoch):
            return counts_W, ""
        state.timings.clear()
        timed_W = state.time_W > 0
        mean = float(state.time_W[timed_W].sum()) / int(timed_W.sum())
        wanted_W = counts_W * np.where(timed_W, mean / np.where(timed_W, state.time_W, 1.0), 1.0)
        wanted_W = wanted_W * (state.usual / wanted_W.sum())
        if np.all(np.abs(wanted_W - counts_W) <= self.dead_band * counts_W):
            return counts_W, ""
        state.time_W = np.zeros(state.workers)
        return largest_remainder(wanted_W, limits, state.usual), "times apart by more than the dead-band"


Costs = Callable[[int], tuple[np.ndarray, np.ndarray]]


@dataclass
class OracleState(ControllerState):
    """The state of `oracle`."""

    step: int = field(default=0, init=False)  # the next one to plan


class Oracle(ControllerBase[OracleState]):
    """n = argmin max_i (startup_i(k) + per_work_i(k) stairs_i(n_i)) in step k, with the true mean costs.

    The reference for all other controllers.

    Args:
        costs: Function from step k, counted from 0 over the steps planned, to (startup_W, per_work_W).
        staleness: Steps after which a change of the costs is seen.
    """

    name = "oracle"

    def __init__(self, costs: Costs, staleness: int = 0) -> None:
        self.costs, self.staleness = costs, staleness
        super().__init__()

    def initial_state(self, workers: int) -> OracleState:
        return OracleState(workers)

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        self.state.step += 1
        return plan

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        costs = self.costs(max(self.state.step - self.staleness, 0))
        return solve(*costs, limits, batch, counts_W.astype(np.int64)).counts_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        return self.fit(self.state.usual, counts_W, limits), "true costs"
