"""`balanced`: learn every worker's cost, solve for the best counts, change only when the gain exceeds the noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hetjax.planning.allocation import solve, within_reach
from hetjax.planning.controllers.base import ControllerBase, ControllerState, Observation, Plan
from hetjax.planning.cost_model import CostModel, ln
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed

_LOOKS = (8, 24, 72)  # calm steps after which the counts are reviewed
_MOST_TRIAL_COST = 1000.0  # steps; a trial never counts as more expensive
_BOUND_TOLERANCE = 0.05  # of the solver's lower bound, which is not used here
_PER_BUCKET = ("usual", "short", "counts_W", "since", "looks", "looks_before", "planned", "before_W")


@dataclass
class BalancedState(ControllerState):
    """The state of `balanced`. A disturbance is a jump or a change point that the cost model has found."""

    since: int = field(default=0, init=False)  # steps since the counts changed
    calm: int = field(default=0, init=False)  # steps since the last disturbance
    calm_before: int = field(default=0, init=False)  # the same as if the present disturbance had not been
    looks: int = field(default=0, init=False)  # reviews of the counts in force
    looks_before: int = field(default=0, init=False)  # the same as if the present disturbance had not been
    unrest: float = field(default=0.0, init=False)  # number of recent disturbances, decaying
    planned: bool = field(default=False, init=False)  # counts have been solved for
    away: bool = field(default=False, init=False)  # some worker deviates from its saved cost model
    before_W: np.ndarray | None = field(default=None, init=False)  # counts before those that followed the disturbance
    idle_W: np.ndarray = field(init=False)  # steps without samples
    trials_W: np.ndarray = field(init=False)  # since the worker became idle
    tried: int = field(default=-1, init=False)  # the worker on trial, or -1
    tried_seen: int = field(default=0, init=False)  # its number of timings before the trial
    model: CostModel = field(init=False)

    def __post_init__(self) -> None:
        self.idle_W, self.trials_W = np.zeros(self.workers, np.int64), np.zeros(self.workers, np.int64)
        self.model = CostModel(self.workers)

    @property
    def undecided(self) -> bool:
        """Whether some worker deviates from its saved model and the counts have not followed."""
        return self.away and self.before_W is None


class Balanced(ControllerBase[BalancedState]):
    """Counts n minimize max_i (startup_i + per_work_i stairs_i(n_i)) under the costs learned by `CostModel`.

    With T(n) that maximum for the counts in force and T* its minimum, new counts are adopted when

        T(n) / T* - 1  >  min_gain + patience + (sqrt(2 ln N) + 1.5) u

    u is the relative posterior sd of the slowest worker's time: the largest of N such errors is about sqrt(2 ln N) u
    although nothing has changed. Patience grows from 0 to `max_patience` over `quiet` steps without a change. The
    factor of u is divided by 1 + the number of recent jumps and change points (decaying over `quiet` steps): where
    speeds do change, a change is rarely false. Exceptions:

    - First plan: by the expected speeds (`Limits.rate_W`), if they are known; the first timings are used at once.
    - Rest: for `rest` steps after a change (up to twice that in much noise) only a gain above `urgent` counts, so that
      counts are judged by several timings, unless the model has just found a jump or a change point.
    - Reviews: after the first plan, and after one that followed a jump or change point, the counts are reviewed after
      8, 24 and 72 calm steps, when the estimates have become better: a gain above (min_gain + u) / 2 is enough, in the
      last review any gain (a small worker with too little to do costs next to nothing, but shows). All but the last
      review are skipped while the worst of N mean timings is not good to `polish`: it would replace one bad plan by
      another. A change in between counts as a review. After a jump, (min_gain + u) / 2 is also enough at the `hasty`
      steps.
    - Disturbances: a jump or change point may pass; on real machines one or a few strange timings are the rule. New
      counts wait until it has cost, as predicted gain x timings so far, (`stake` + number of disturbances that passed)
      / (1 + number that lasted) steps; and for a second timing, unless most have lasted. When all workers are back at
      their saved models, the counts go back, too.

    A worker without samples is never timed, so it is retried with one quantum for one step. Such a trial costs
    c = t / T(n) - 1 steps, t being the time of the quantum if the worker is one sd better than estimated. With M
    workers busy and k trials in vain since the worker became idle, the next one comes after an idle time of

        max(min(2^k M, retry) c, retry / 10)  steps,     1 <= c <= 1000 (0.1 <= c for at most two timings)

    One more worker, as good as the busy ones, would save at most 1 / M of a step. So a pause forgoes no more than 2^k
    trials cost; a worker that was slow for d steps gets samples again after at most 2 d + 2 M c steps, or d + retry c
    if that is less; and trials of a worker that stays slow take 1 / retry of the time in the long run (c / 1000 times
    that for c > 1000). A worker that lost its samples to a single strange timing is retried at once. Any gain is taken
    after a trial.

    Args:
        min_gain: Predicted relative gain below which counts are kept.
        max_patience: The largest addition to `min_gain` for counts that have been in force for long.
        quiet: Steps over which patience grows and disturbances are forgotten.
        rest: Steps after a change in which only a gain above `urgent` counts.
        urgent: Predicted gain that overrides the rest.
        polish: Relative error of the worst mean timing above which reviews are skipped.
        hasty: Steps after a disturbance at which a smaller gain is enough.
        stake: Steps that a disturbance must have cost before the counts follow it.
        retry: Bound on the trials of idle workers: they take 1 / retry of the time.
    """

    name = "balanced"
    benches = True

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

    def initial_state(self, workers: int) -> BalancedState:
        return BalancedState(workers)

    @property
    def _largest_error(self) -> float:
        """The expected largest of N errors, in sd."""
        return float(np.sqrt(2.0 * ln(max(self.state.workers, 1))))

    def observe(self, observation: Observation, /) -> None:
        if len(observation.counts_W) == self.state.workers:
            self.state.model.observe(observation.work_W, observation.times_W, observation.valid_W)

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        if not self.state.model.known:
            return self._first(batch, counts_W, limits)
        return self._solve(batch, counts_W, limits)

    def _first(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        """Counts before the first timing: by the expected speeds, but all workers are to be timed."""
        least_W = np.maximum(limits.minimum_W, np.minimum(limits.quantum, limits.capacity_W))
        if limits.rate_W is None or least_W.sum() > batch:
            return super().fit(batch, counts_W, limits)
        costs = np.zeros(limits.workers), 1.0 / limits.rate_W
        return solve(*costs, replace(limits, minimum_W=least_W), batch, counts_W, _BOUND_TOLERANCE).counts_W

    def _solve(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        return solve(*self.state.model.costs(), limits, batch, counts_W, _BOUND_TOLERANCE).counts_W

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        state, model = self.state, self.state.model
        state.since += 1
        self._track_disturbances()
        if not model.known:
            return counts_W, ""
        if not state.away and state.before_W is not None:
            before_W, state.before_W = state.before_W, None
            if model.passed and allowed(before_W, limits, state.usual):
                return before_W, "the disturbance has passed: back to the counts before"
        costs = model.costs()
        work_W = limits.work(counts_W)
        time_W = _times(costs, counts_W, work_W)
        slowest = int(np.argmax(time_W))
        now = float(time_W[slowest])
        review = state.planned and not state.undecided and self._review_due()
        needed = self._needed_gain(float(model.relative_sd(work_W)[slowest]), review)
        if state.planned and not self._within_reach(costs, limits, now / (1.0 + needed)):
            return counts_W, ""
        best = solve(*costs, limits, state.usual, counts_W, _BOUND_TOLERANCE)
        gain = now / best.time - 1.0 if best.time > 0 else 0.0
        if gain <= needed or (state.undecided and self._may_pass(gain)):
            return counts_W, ""
        why = f"worker {slowest} holds up the others" if state.planned else "first timings"
        if state.undecided:
            state.before_W, state.looks = counts_W, 0
        state.planned, state.since = True, 0
        if not review and state.calm > _LOOKS[0]:
            state.looks += 1
        return best.counts_W, f"{why}: predicted gain {100 * gain:.0f}%"

    def _track_disturbances(self) -> None:
        state, model = self.state, self.state.model
        state.unrest *= 1.0 - 1.0 / self.quiet
        if not state.away:
            state.calm_before, state.looks_before = state.calm, state.looks
        state.calm_before += 1
        state.away = bool(model.away_W.any())
        if model.jumped or model.shifted:
            state.unrest += 1.0
            state.calm = 0
        elif model.passed and state.away:
            state.calm = 0
        elif model.passed:  # all workers are back: as if it had not been
            state.unrest = max(state.unrest - 1.0, 0.0)
            state.calm, state.looks = state.calm_before, state.looks_before
        else:
            state.calm += 1

    def _needed_gain(self, noise: float, review: bool) -> float:
        """The predicted gain above which counts are changed; `noise` is u."""
        state, model = self.state, self.state.model
        if not state.planned:
            return -1.0
        if state.tried >= 0 and model.seen_W[state.tried] > state.tried_seen:
            state.tried = -1
            return 0.0
        if review and state.looks == len(_LOOKS):
            return 0.0
        if review or (state.unrest > 0 and state.calm in self.hasty):
            return 0.5 * (self.min_gain + noise)
        patience = self.max_patience * min(state.since, self.quiet) / self.quiet
        needed = self.min_gain + patience + (self._largest_error + 1.5) / (1.0 + state.unrest) * noise
        # Rest until the mean of the timings is good to some 2%, within bounds.
        rest = self.rest * min(max(200.0 * model.noise * model.noise, 1.0), 2.0)
        return max(needed, self.urgent) if state.since < rest and state.calm > 0 and not state.undecided else needed

    def _review_due(self) -> bool:
        """Whether to review the counts in this step; counts the reviews, skipped ones included."""
        state = self.state
        if state.looks >= len(_LOOKS) or state.calm < _LOOKS[state.looks]:
            return False
        state.looks += 1
        error = self._largest_error * state.model.noise / float(np.sqrt(state.calm))  # of the worst mean timing
        return error <= self.polish or state.looks == len(_LOOKS)

    def _may_pass(self, gain: float) -> bool:
        """Whether a disturbance has cost too little so far to be followed."""
        model = self.state.model
        cost = gain * int(model.away_W.max())
        single = bool(model.doubt_W.any()) and model.passing >= model.lasting
        return single or cost * (1.0 + model.lasting) < self.stake + model.passing

    def _within_reach(self, costs: tuple[np.ndarray, np.ndarray], limits: Limits, time: float) -> bool:
        """Whether any counts could be as fast as `time`: a closed-form bound first, then the exact test."""
        pace_W = costs[1] * limits.least_W  # the smallest cost of a sample
        if np.all(pace_W > 0):
            bound = (self.state.usual + float((costs[0] / pace_W).sum())) / float((1.0 / pace_W).sum())
            if time < bound and np.all(costs[0] <= bound):  # the bound assumes that all workers have samples
                return False
        return within_reach(*costs, limits, self.state.usual, time)

    def _reset(self, workers: int) -> None:
        super()._reset(workers)
        self._bucket: int | None = None
        self._of_bucket: dict[int, dict[str, Any]] = {}  # what `_switch` has put aside

    def follow(self, state: Mapping[str, Any], kept_W: Sequence[int | None]) -> None:
        """See `ControllerBase`; a trial ends with the worker it was about."""
        tried = state["tried"]
        super().follow({**state, "tried": kept_W.index(tried) if tried in kept_W else -1}, kept_W)

    def _switch(self, bucket: int) -> None:
        """Put the counts of the last step's bucket aside, and go on with those of this one.

        Timings of all buckets teach the one cost model, but their best counts differ. What is put aside is not saved: a
        resumed run solves for it again.
        """
        if self._bucket is not None and bucket != self._bucket:
            self._of_bucket[self._bucket] = {name: getattr(self.state, name) for name in _PER_BUCKET}
            new = {"counts_W": None, "planned": False, "before_W": None, "looks": 0}
            for name, value in self._of_bucket.get(bucket, new).items():
                setattr(self.state, name, value)
            self._checked = None
        self._bucket = bucket

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        self._switch(limits.bucket)
        plan = super().plan(batch, limits, epoch)
        state = self.state
        state.idle_W = np.where(plan.counts_W > 0, 0, state.idle_W + 1)
        state.trials_W = np.where(plan.counts_W > 0, 0, state.trials_W)
        if batch != state.usual or not state.model.known or plan.counts_W.all():
            return plan
        return self._with_trial(plan, limits)

    def _with_trial(self, plan: Plan, limits: Limits) -> Plan:
        """The plan of one step, with one quantum for an idle worker if one is due for a trial."""
        state, model = self.state, self.state.model
        costs = model.costs()
        unit_W = np.minimum(limits.quantum, limits.capacity_W)
        unit_work_W = limits.work(unit_W)
        time_W = _times(costs, unit_W, unit_work_W) * (1.0 - model.relative_sd(unit_work_W))
        now = float(np.max(_times(costs, plan.counts_W, limits.work(plan.counts_W))))
        able_W = (plan.counts_W == 0) & (limits.capacity_W >= limits.quantum)
        rested_W = state.idle_W >= self._pause(time_W / now - 1.0, int((plan.counts_W > 0).sum()))
        due_W = able_W & (rested_W | (model.doubt_W & (state.trials_W == 0)))
        if state.usual < limits.quantum or not due_W.any():
            return plan
        worker = int(np.argmax(due_W))
        most = limits.quantum + state.usual % limits.quantum  # the last worker takes the remainder, too
        trial_W = np.arange(state.workers) == worker
        minimum_W = np.where(trial_W, limits.quantum, limits.minimum_W)
        if most > limits.capacity_W[worker] or int(minimum_W.sum()) > state.usual:
            return plan
        trial_limits = replace(limits, minimum_W=minimum_W, capacity_W=np.where(trial_W, most, limits.capacity_W))
        # At no cost for the worker on trial, its time does not affect how the others share the rest.
        other_costs = np.where(trial_W, 0.0, costs[0]), np.where(trial_W, 0.0, costs[1])
        trial = solve(*other_costs, trial_limits, state.usual, plan.counts_W, _BOUND_TOLERANCE)
        if rested_W[worker]:  # counts change anyway: refine those that are in force after the trial
            state.counts_W = self._solve(state.usual, plan.counts_W, limits)
        state.trials_W[worker] += 1
        state.idle_W[worker], state.tried, state.tried_seen = 0, worker, int(model.seen_W[worker])
        return Plan(trial.counts_W, plan.changed, f"worker {worker} had no samples: trying it for one step")

    def _pause(self, cost_W: np.ndarray, busy: int) -> np.ndarray:
        """Idle steps of each worker before a trial of this cost, with `busy` workers at work."""
        least_W = np.where(self.state.model.seen_W <= 2, 0.1, 1.0)
        cost_W = np.minimum(np.maximum(cost_W, least_W), _MOST_TRIAL_COST)
        factor_W = np.minimum(float(busy) * (1 << np.minimum(self.state.trials_W, 30)), self.retry)
        return np.maximum(factor_W * cost_W, 0.1 * self.retry)


def _times(costs: tuple[np.ndarray, np.ndarray], counts_W: np.ndarray, work_W: np.ndarray) -> np.ndarray:
    return np.where(counts_W > 0, costs[0] + costs[1] * work_W, 0.0)
