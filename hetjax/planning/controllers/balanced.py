"""`balanced`: learn every worker's cost, solve for the best counts, change only when the gain beats the noise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hetjax.planning.allocation import solve, within_reach
from hetjax.planning.controllers.base import ControllerBase, Observation, Plan
from hetjax.planning.cost_model import CostModel, ln
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed

_LOOKS = (8, 24, 72)  # steps after which counts are looked at again
_DEAREST = 1000.0  # the most that a trial counts, in steps


class Balanced(ControllerBase):
    """Counts n minimize max_i (startup_i + per_work_i stairs_i(n_i)) under the cost model of `CostModel`.

    With T(n) that maximum for the counts in force and T* its minimum, new counts are taken when

        T(n) / T* - 1  >  min_gain + patience + (sqrt(2 ln N) + 1.5) u

    u being the relative posterior sd of the slowest worker's time: of N estimates that wrong, the largest is about
    sqrt(2 ln N) u too high without any change in the world. Patience grows from 0 to `max_patience` over `quiet` steps
    without a change: a plan that has served for long is good. The factor of u is divided by 1 + the number of jumps
    and change points of late (forgotten over `quiet` steps): where things do change, changes are not false. Exceptions:

    - The first timings are used at once.
    - For `rest` steps after a change (twice as many in much noise) only a gain above `urgent` counts, so that a plan
      is judged by several timings; unless the model has just found a jump or a change point.
    - After the first plan, and after one that followed a jump or change point, the counts are looked at again after
      8, 24 and 72 steps, as the estimates are better by then than those that they were made from: a gain above
      (min_gain + u) / 2 is enough, the last time any (a small worker with too little to do costs next to nothing, but
      shows). A look but the last is left out while the worst of N mean timings is not good to `polish`: it would only
      replace a bad plan by another. A change in between stands for a look. Where there was a jump, (min_gain + u) / 2
      is enough at the `hasty` steps, too.
    - A jump or change point may be a passing one: on real machines strange timings, one or a few, are the rule. New
      counts wait until it has cost, predicted gain times timings so far, (`stake` + disturbances that just passed) /
      (1 + those that lasted) steps; and for a second timing, unless most have lasted. When all workers are back at the
      models that they had, so are the counts.

    A worker left without samples is never timed, so it is retried: one quantum, for one step. Such a trial costs
    c = t / T(n) - 1 steps, t being the time of the quantum if the worker is one sd better than believed. With M
    workers at work and k trials in vain since the worker became idle, it takes place after an idle time of

        max(min(2^k M, retry) c, retry / 10)  steps,     1 <= c <= 1000 (0.1 <= c for at most two timings)

    One more worker, as good as those at work, would save at most 1 / M of a step. So a pause forgoes no more than 2^k
    trials cost; a worker that was slow for d steps gets samples again after at most 2 d + 2 M c steps, or d + retry c
    if that is less; and trials of a worker that stays slow take 1 / retry of the time in the long run (c / 1000 times
    that for c > 1000). A worker that lost its samples to a single strange timing is tried at once. Any gain is taken
    after a trial.
    """

    name = "balanced"
    learned = (
        "since", "calm", "calm_before", "looks", "looks_before", "unrest", "planned", "away", "before_W", "idle_W",
        "trials_W", "tried", "tried_seen",
    )  # fmt: skip

    def __init__(
        self,
        min_gain: float = 0.01,
        max_patience: float = 0.01,
        quiet: int = 256,
        rest: int = 16,
        urgent: float = 0.4,
        polish: float = 0.06,
        hasty: tuple[int, ...] = (2, 4, 8),
        stake: float = 1.6,
        retry: float = 200.0,
    ) -> None:
        self.min_gain, self.max_patience, self.quiet = min_gain, max_patience, quiet
        self.rest, self.urgent, self.polish, self.hasty = rest, urgent, polish, hasty
        self.stake, self.retry = stake, retry
        super().__init__()

    def begin(self, workers: int) -> None:
        self.model = CostModel(workers)
        self.since = 0  # steps since the last change
        self.calm = self.calm_before = 0  # steps since the last jump or change point, and as if there had been none
        self.looks = self.looks_before = 0  # at the counts in force, and at those before
        self.unrest = 0.0  # jumps and change points of late
        self.away = False  # whether somebody is away from the model that he had
        self.before_W: np.ndarray | None = None  # counts before those that followed him
        self.planned = False  # whether counts have been solved for
        self.idle_W = np.zeros(workers, np.int64)  # steps without samples
        self.trials_W = np.zeros(workers, np.int64)  # since it became idle
        self.tried, self.tried_seen = -1, 0  # the worker on trial, and its timings before
        self.worst = float(np.sqrt(2.0 * ln(max(workers, 1))))  # the largest of N errors, in sd

    def observe(self, seen: Observation) -> None:
        if len(seen.counts_W) == self.workers:
            self.model.observe(seen.work_W, seen.times_W, seen.valid_W)

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        if not self.model.known:
            return super().fit(batch, counts_W, limits)
        return solve(*self.model.costs(), limits, batch, counts_W, 0.05).counts_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        self.since += 1
        self._feel()
        if not self.model.known:
            return counts_W, ""
        if not self.away and self.before_W is not None:
            before_W, self.before_W = self.before_W, None
            if self.model.passed and allowed(before_W, limits, self.usual):
                return before_W, "the disturbance has passed: back to the counts before"
        costs = self.model.costs()
        work_W = limits.work(counts_W)
        time_W = _times(costs, counts_W, work_W)
        slowest = int(np.argmax(time_W))
        now = float(time_W[slowest])
        look = self.planned and not self._in_doubt and self._look()
        needed = self._needed(float(self.model.relative_sd(work_W)[slowest]), look)
        if self.planned and not self._within_reach(costs, limits, now / (1.0 + needed)):
            return counts_W, ""
        best = solve(*costs, limits, self.usual, counts_W, 0.05)
        gain = now / best.time - 1.0 if best.time > 0 else 0.0
        if gain <= needed or (self._in_doubt and self._better_wait(gain)):
            return counts_W, ""
        why = f"worker {slowest} holds up the others" if self.planned else "first timings"
        if self._in_doubt:
            self.before_W, self.looks = counts_W, 0
        self.planned, self.since = True, 0
        if not look and self.calm > _LOOKS[0]:
            self.looks += 1
        return best.counts_W, f"{why}: predicted gain {100 * gain:.0f}%"

    def _feel(self) -> None:
        """How restless the workers are."""
        model = self.model
        self.unrest *= 1.0 - 1.0 / self.quiet
        if not self.away:
            self.calm_before, self.looks_before = self.calm, self.looks
        self.calm_before += 1
        self.away = bool(model.away_W.any())
        if model.jumped or model.shifted:
            self.unrest += 1.0
            self.calm = 0
        elif model.passed and self.away:
            self.calm = 0
        elif model.passed:  # it was nothing
            self.unrest = max(self.unrest - 1.0, 0.0)
            self.calm, self.looks = self.calm_before, self.looks_before
        else:
            self.calm += 1

    @property
    def _in_doubt(self) -> bool:
        """Whether somebody is away and the counts have not followed him."""
        return self.away and self.before_W is None

    def _needed(self, noise: float, look: bool) -> float:
        """The predicted gain from which counts are changed."""
        if not self.planned:
            return -1.0
        if self.tried >= 0 and self.model.seen_W[self.tried] > self.tried_seen:
            self.tried = -1
            return 0.0
        if look and self.looks == len(_LOOKS):
            return 0.0
        if look or (self.unrest > 0 and self.calm in self.hasty):
            return 0.5 * (self.min_gain + noise)
        patience = self.max_patience * min(self.since, self.quiet) / self.quiet
        needed = self.min_gain + patience + (self.worst + 1.5) / (1.0 + self.unrest) * noise
        # Rest until the mean of the timings is good to some 2%, but not for ever.
        rest = self.rest * min(max(200.0 * self.model.noise * self.model.noise, 1.0), 2.0)
        return max(needed, self.urgent) if self.since < rest and self.calm > 0 and not self._in_doubt else needed

    def _look(self) -> bool:
        """Whether it is time to look at the counts again."""
        if self.looks >= len(_LOOKS) or self.calm < _LOOKS[self.looks]:
            return False
        self.looks += 1
        error = self.worst * self.model.noise / float(np.sqrt(self.calm))  # of the worst worker's mean timing
        return error <= self.polish or self.looks == len(_LOOKS)

    def _better_wait(self, gain: float) -> bool:
        """Whether a disturbance is too young, for what it costs, to be followed."""
        model, cost = self.model, gain * int(self.model.away_W.max())
        single = bool(model.doubt_W.any()) and model.passing >= model.lasting
        return single or cost * (1.0 + model.lasting) < self.stake + model.passing

    def _within_reach(self, costs: tuple[np.ndarray, np.ndarray], limits: Limits, time: float) -> bool:
        """Whether any counts could be as fast as `time`: a bound from a formula first, then the exact count."""
        pace_W = costs[1] * limits.least_W  # the cheapest a sample can be
        if np.all(pace_W > 0):
            bound = (self.usual + float((costs[0] / pace_W).sum())) / float((1.0 / pace_W).sum())
            if time < bound and np.all(costs[0] <= bound):  # holds if all workers are active
                return False
        return within_reach(*costs, limits, self.usual, time)

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        plan = super().plan(batch, limits, epoch)
        self.idle_W = np.where(plan.counts_W > 0, 0, self.idle_W + 1)
        self.trials_W = np.where(plan.counts_W > 0, 0, self.trials_W)
        if batch != self.usual or not self.model.known or plan.counts_W.all():
            return plan
        return self._trial(plan, limits)

    def _trial(self, plan: Plan, limits: Limits) -> Plan:
        """The plan with one quantum for the idle worker that has earned a trial, if any. It holds for one step only."""
        costs = self.model.costs()
        unit_W = np.minimum(limits.quantum, limits.capacity_W)
        unit_work_W = limits.work(unit_W)
        time_W = _times(costs, unit_W, unit_work_W) * (1.0 - self.model.relative_sd(unit_work_W))
        now = float(np.max(_times(costs, plan.counts_W, limits.work(plan.counts_W))))
        able_W = (plan.counts_W == 0) & (limits.capacity_W >= limits.quantum)
        earned_W = self.idle_W >= self._pause(time_W / now - 1.0, int((plan.counts_W > 0).sum()))
        due_W = able_W & (earned_W | (self.model.doubt_W & (self.trials_W == 0)))
        if self.usual < limits.quantum or not due_W.any():
            return plan
        worker = int(np.argmax(due_W))
        one = limits.quantum + self.usual % limits.quantum  # should it be the last one, it takes the remainder too
        mine_W = np.arange(self.workers) == worker
        minimum_W = np.where(mine_W, limits.quantum, limits.minimum_W)
        if one > limits.capacity_W[worker] or int(minimum_W.sum()) > self.usual:
            return plan
        frame = replace(limits, minimum_W=minimum_W, capacity_W=np.where(mine_W, one, limits.capacity_W))
        others = (
            np.where(mine_W, 0.0, costs[0]),
            np.where(mine_W, 0.0, costs[1]),
        )  # the trial is not to upset the others
        tried = solve(*others, frame, self.usual, plan.counts_W, 0.05)
        if earned_W[worker]:  # counts change anyway: polish those that will be in force after the trial
            self.counts_W = solve(*costs, limits, self.usual, plan.counts_W, 0.05).counts_W
        self.trials_W[worker] += 1
        self.idle_W[worker], self.tried, self.tried_seen = 0, worker, int(self.model.seen_W[worker])
        return Plan(tried.counts_W, plan.changed, f"worker {worker} had no samples: trying it for one step")

    def _pause(self, cost_W: np.ndarray, busy: int) -> np.ndarray:
        """Steps that each worker is to be idle before a trial of this cost, with `busy` workers at work."""
        least_W = np.where(self.model.seen_W <= 2, 0.1, 1.0)
        cost_W = np.minimum(np.maximum(cost_W, least_W), _DEAREST)
        factor_W = np.minimum(float(busy) * (1 << np.minimum(self.trials_W, 30)), self.retry)
        return np.maximum(factor_W * cost_W, 0.1 * self.retry)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.model.load_state_dict(state["model"])


def _times(costs: tuple[np.ndarray, np.ndarray], counts_W: np.ndarray, work_W: np.ndarray) -> np.ndarray:
    return np.where(counts_W > 0, costs[0] + costs[1] * work_W, 0.0)
