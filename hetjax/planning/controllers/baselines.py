"""Controllers to compare with: `equal`, `fixed`, `static`, `proportional` and `oracle`.

`equal`: every worker the same, n_i = batch / N. What data-parallel training does without a controller.

`fixed`: shares that the user gives, by worker or by kind of device.

`static`: shares from one probe, then fixed for good. In quiet conditions nearly as good as anything.

`proportional`: a proportional controller on smoothed step times with a dead-band.

Tyagi & Sharma, "Taming Resource Heterogeneity In Distributed ML Training With Dynamic Batching", ACSOS 2020; OmniLearn.

`oracle`: knows the true cost of every step. What all other controllers are measured against.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Cadence, Cadenced, ControllerBase, Observation, Plan
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import largest_remainder


class Equal(ControllerBase):
    """n_i = batch / N within the limits, odd samples to the lower index."""

    name = "equal"

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return np.ones(self.workers)


class Fixed(ControllerBase):
    """n_i = B p_i / sum_k p_k in every step, in whole samples by largest remainder, within the limits.

    Args:
        shares: one number per worker ([4, 2, 1, 1]), or one per kind of device ({'gpu': 4, 'cpu': 1}), where a kind is
            a part of its name in `python -m hetjax check`. As text: '4,2,1,1', 'gpu=4,cpu=1'.
    """

    name = "fixed"

    def __init__(self, shares: str | Sequence[float] | Mapping[str, float]) -> None:
        given = _read(shares) if isinstance(shares, str) else shares
        self.by_kind = dict(given) if isinstance(given, Mapping) else None
        values = list(given.values()) if isinstance(given, Mapping) else list(given)
        if not values or not all(_is_share(value) for value in values) or not any(values):
            raise ValueError(f"The shares are {shares!r}; expected numbers, zero or more and not all zero: '4,2,1,1'.")
        self.share_W: np.ndarray | None = None if self.by_kind else np.asarray(values, np.float64)
        super().__init__()

    def for_kinds(self, kinds_W: Sequence[str]) -> None:
        """Turn shares by kind into shares by worker."""
        if self.by_kind is None:
            self._check(len(kinds_W))
            return
        found = [[name for name in self.by_kind if name.lower() in kind.lower()] for kind in kinds_W]
        for kind, names in zip(kinds_W, found, strict=True):
            if len(names) != 1:
                fit = "several" if names else "none"
                raise ValueError(
                    f"The workers are {', '.join(dict.fromkeys(kinds_W))}, and of the shares for "
                    f"{', '.join(self.by_kind)} {fit} fit {kind}: give one for each kind."
                )
        self.share_W = np.array([self.by_kind[names[0]] for names in found], np.float64)
        if not self.share_W.any():
            raise ValueError(f"The shares {self.by_kind} leave no worker with samples.")

    def begin(self, workers: int) -> None:
        if workers:
            self._check(workers)

    def _check(self, workers: int) -> None:
        if self.share_W is None:
            raise ValueError("Shares by kind need to know the workers: call for_kinds first.")
        if len(self.share_W) != workers:
            raise ValueError(f"Got {len(self.share_W)} shares for {workers} workers; give one share per worker.")

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        assert self.share_W is not None
        return self.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        assert self.share_W is not None
        return largest_remainder(self.share_W, limits, self.usual), "shares as given"


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _read(text: str) -> list[float] | dict[str, float]:
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


class Static(ControllerBase):
    """p_i = (n_i / t_i) / sum_k (n_k / t_k) from the first step observed; a worker without a timing gets the mean rate.

    Shares that are known beforehand: the controller `fixed`.
    """

    name = "static"
    learned = ("share_W",)

    def begin(self, workers: int) -> None:
        self.share_W: np.ndarray | None = None

    def observe(self, seen: Observation) -> None:
        valid_W = seen.valid_W
        if self.share_W is None and valid_W.any():
            rate_W = np.where(valid_W, seen.counts_W / np.where(valid_W, seen.times_W, 1.0), 0.0)
            rate_W = np.where(valid_W, rate_W, rate_W[valid_W].sum() / valid_W.sum())
            self.share_W = rate_W / rate_W.sum()

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return counts_W.astype(np.float64) if self.share_W is None else self.share_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        if self.share_W is None:
            return counts_W, ""
        return largest_remainder(self.share_W, limits, self.usual), "shares of the first timing"


class Proportional(Cadenced):
    """b_i <- b_i mean(t) / t_i, scaled to sum to B; t_i an exponential average of the step times since the last change.

    Nothing changes while every b_i would move by no more than the dead-band. Bounds are those of the limits.
    """

    name = "proportional"
    learned = (*Cadenced.learned, "time_W")

    def __init__(self, every: Cadence = "epoch", dead_band: float = 0.05, smoothing: float = 0.3) -> None:
        self.dead_band, self.smoothing = dead_band, smoothing
        super().__init__(every)

    def begin(self, workers: int) -> None:
        super().begin(workers)
        self.time_W = np.zeros(workers)  # 0 where there is none since the last change

    def observe(self, seen: Observation) -> None:
        if self.counts_W is None or not np.array_equal(seen.counts_W, self.counts_W):
            return  # a timing of other counts than those in force
        super().observe(seen)
        fresh_W = seen.valid_W & (self.time_W == 0)
        step_W = np.where(seen.valid_W, self.smoothing * (seen.times_W - self.time_W), 0.0)
        self.time_W = np.where(fresh_W, seen.times_W, self.time_W + np.where(fresh_W, 0.0, step_W))

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        timed_W = self.time_W > 0
        mean = float(self.time_W[timed_W].sum()) / int(timed_W.sum())
        wanted_W = counts_W * np.where(timed_W, mean / np.where(timed_W, self.time_W, 1.0), 1.0)
        wanted_W = wanted_W * (self.usual / wanted_W.sum())
        if np.all(np.abs(wanted_W - counts_W) <= self.dead_band * counts_W):
            return counts_W, ""
        self.time_W = np.zeros(self.workers)
        return largest_remainder(wanted_W, limits, self.usual), "times apart by more than the dead-band"


Costs = Callable[[int], tuple[np.ndarray, np.ndarray]]


class Oracle(ControllerBase):
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
