"""`balanced`: learn every worker's cost, solve for the best counts, change only when the gain beats the noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.plan.allocation import solve
from hetjax.plan.controllers.frame import Frame
from hetjax.plan.controllers.protocol import Observation, Plan
from hetjax.plan.cost_model import CostModel
from hetjax.plan.limits import Limits
from hetjax.plan.logarithm import ln


class Balanced(Frame):
    """Counts n minimise max_i (startup_i + per_work_i stairs_i(n_i)) under the cost model of `CostModel`.

    With T(n) that maximum for the counts in force and T* its minimum, new counts are taken when

        T(n) / T* - 1  >  min_gain + patience + (sqrt(2 ln N) + 1.5) u

    u being the relative posterior sd of the slowest worker's time: of N estimates that wrong, the largest is about
    sqrt(2 ln N) u too high without any change in the world. Patience grows from 0 to `max_patience` over `quiet` steps
    without a change: a plan that has served for long is good. A change is followed by `rest` steps in which only a
    gain above `urgent` counts, so that a plan is judged by several timings. The first timings are used at once.

    A worker left without samples is never timed. It gets one quantum again as soon as the steps it has been idle,
    times the step time, are `retry` times what the trial is expected to cost: trials then cost at most 1 / retry. One
    that lost its samples to a single strange timing is tried at once.
    """

    name = "balanced"
    learned = ("since", "planned", "idle_W")

    def __init__(
        self,
        min_gain: float = 0.01,
        max_patience: float = 0.015,
        quiet: int = 256,
        rest: int = 16,
        urgent: float = 0.4,
        retry: float = 200.0,
    ) -> None:
        self.min_gain, self.max_patience, self.quiet = min_gain, max_patience, quiet
        self.rest, self.urgent, self.retry = rest, urgent, retry
        super().__init__()

    def begin(self, workers: int) -> None:
        self.model = CostModel(workers)
        self.since = 0  # steps since the last change
        self.planned = False  # whether counts have been solved for
        self.idle_W = np.zeros(workers, np.int64)  # steps without samples
        self.caution = float(np.sqrt(2.0 * ln(max(workers, 1)))) + 1.5

    def observe(self, seen: Observation) -> None:
        if len(seen.counts_W) == self.workers:
            self.model.observe(seen.work_W, seen.times_W, seen.valid_W)

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        if not self.model.known:
            return super().fit(batch, counts_W, limits)
        return solve(*self.model.costs(), limits, batch, counts_W, 0.05).counts_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        self.since += 1
        if not self.model.known:
            return counts_W, ""
        startup_W, per_work_W = self.model.costs()
        work_W = limits.work(counts_W)
        time_W = np.where(counts_W > 0, startup_W + per_work_W * work_W, 0.0)
        slowest = int(np.argmax(time_W))
        now = float(time_W[slowest])
        needed = self._needed(float(self.model.relative_sd(work_W)[slowest]))
        if self.planned and now <= (1.0 + needed) * self._bound(startup_W, per_work_W, limits):
            return counts_W, ""
        best = solve(startup_W, per_work_W, limits, self.usual, counts_W, 0.05)
        gain = now / best.time - 1.0 if best.time > 0 else 0.0
        if self.planned and gain <= needed:
            return counts_W, ""
        why = f"worker {slowest} holds up the others" if self.planned else "first timings"
        self.planned, self.since = True, 0
        return best.counts_W, f"{why}: predicted gain {100 * gain:.0f}%"

    def _needed(self, noise: float) -> float:
        """The predicted gain from which counts are changed."""
        patience = self.max_patience * min(self.since, self.quiet) / self.quiet
        needed = self.min_gain + patience + self.caution * noise
        return max(needed, self.urgent) if self.since < self.rest else needed

    def _bound(self, startup_W: np.ndarray, per_work_W: np.ndarray, limits: Limits) -> float:
        """A quick lower bound of T*: all workers active, no limits, the cheapest work per sample; 0 if that fails."""
        pace_W = per_work_W * limits.least_W
        if not np.all(pace_W > 0):
            return 0.0
        time = (self.usual + float((startup_W / pace_W).sum())) / float((1.0 / pace_W).sum())
        return time if np.all(startup_W <= time) else 0.0

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        self.idle_W = np.where(plan.counts_W > 0, 0, self.idle_W + 1)
        if batch != self.usual or not self.model.known or plan.counts_W.all():
            return plan
        return self._trial(plan, limits)

    def _trial(self, plan: Plan, limits: Limits) -> Plan:
        """The plan with one quantum for the idle worker that has earned a trial, if any. It holds for one step only."""
        startup_W, per_work_W = self.model.costs()
        unit_W = np.minimum(limits.quantum, limits.capacity_W)
        time_W = startup_W + per_work_W * limits.work(unit_W)
        now = float(np.max(np.where(plan.counts_W > 0, startup_W + per_work_W * limits.work(plan.counts_W), 0.0)))
        able_W = (plan.counts_W == 0) & (limits.capacity_W >= limits.quantum)
        earned_W = self.idle_W * now >= self.retry * np.maximum(time_W - now, 0.1 * now)
        due_W = able_W & (earned_W | self.model.doubt_W)
        if self.usual < limits.quantum or not due_W.any():
            return plan
        worker = int(np.argmax(due_W))
        minimum_W = limits.minimum_W.copy()
        minimum_W[worker] = limits.quantum
        if int(minimum_W.sum()) > self.usual:
            return plan
        tried = solve(startup_W, per_work_W, replace(limits, minimum_W=minimum_W), self.usual, plan.counts_W, 0.05)
        self.idle_W[worker] = 0
        return Plan(tried.counts_W, plan.changed, f"worker {worker} had no samples: trying it for one step")

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])
