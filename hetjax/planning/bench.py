"""The bench: members of a fleet that do not pay for their part in the exchange sit out, by measured step times.

A controller knows local times only. A member with few samples may still hold up the exchange of every step: a host
behind a slow link, or one that is short of CPU time. So steps are timed with and without it, and it is left out where
that is faster:

    gain = median step time with the member / median step time without it - 1

Trials without a member are made only where its part in the exchange could explain the difference. With step time S,
slowest local phase L, and n of B samples at the member, leaving it out takes at least L B / (B - n), so a trial is of
interest where S exceeds that. A member on the bench is tried again, and lasting trials are rare: pauses make the steps
lost to them at most 1 / 200 of all steps, and double after each trial in vain.

Over 500 steps a fleet loses less than 1 / 100 to its worst member, unless steps take more than twice as long with it:
step 0 warms up, the time of step 1 is known when step 4 is planned, and no rule wins back what four steps have lost.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from hetjax.planning.controllers.base import Observation, Plan
from hetjax.planning.limits import Limits

log = logging.getLogger("hetjax")

_LEAST_GAIN = 0.02  # below, a member stays
_CLEAR_GAIN, _LARGE_GAIN = 0.1, 0.5  # possible gains for which a trial does not wait for more timings
_TIMINGS, _FEW, _ONE = 8, 2, 1  # of steps before a trial; where the possible gain is clear; where it is large
_TRIAL, _LONGEST = 3, 8  # timed steps of a trial, after one in which slices and parameters move; in much noise
_QUIET = 0.03  # relative sd of steps up to which the shortest trial is enough
_PATIENCE = 8  # further steps within which the timings of a trial have to arrive
_PAUSE, _COST, _DOUBLINGS = 50, 200, 5  # least steps between trials of a member; steps per step lost; most doublings
_NEW_COUNTS = 0.05  # share of the batch whose move makes earlier timings void


@dataclass
class _BenchTrial:
    """A member that is left out, or let in, for some steps."""

    member: int
    without: bool
    steps: int  # that are timed
    planned: int = 1
    times: list[tuple[float, float]] = field(default_factory=list)  # of its steps: slowest local phase, and the rest


class Bench:
    """Decides which members of a fleet sit out. All processes make the same decisions from the same observations.

    Args:
        member_W: the member that each worker belongs to: its process, or itself in a single process.
        noun: what a member is called, such as 'process'.
    """

    def __init__(self, member_W: np.ndarray, noun: str):
        self.member_W, self.noun = np.asarray(member_W), noun
        self.benched: dict[int, str] = {}  # member -> why
        self.events: list[str] = []
        self._members = int(self.member_W.max()) + 1
        self._pause_M = np.zeros(self._members, np.int64)
        self._tries_M = np.zeros(self._members, np.int64)
        self._paid_M = np.full(self._members, _LONGEST)  # most steps of the next trial, for which the pause pays
        # Of steps with all that are not benched; the local phases only of those with the counts in force.
        self._locals: deque[float] = deque(maxlen=2 * _TIMINGS)
        self._rests: deque[float] = deque(maxlen=2 * _TIMINGS)
        self._voided: list[float] = []  # the last local phase with the counts before; a trial may start from it
        self._trial: _BenchTrial | None = None
        self._last: Observation | None = None
        self._settled = 0  # steps for which the same members have had samples
        self._usual = self._steps = 0
        self._cut: tuple[Limits, frozenset[int], Limits] | None = None

    @property
    def benched_W(self) -> dict[int, str]:
        """Why each worker on the bench is there."""
        return {int(w): why for member, why in self.benched.items() for w in np.flatnonzero(self.member_W == member)}

    def begin(self) -> None:
        """Start or resume a run: timings before it say nothing about those that follow."""
        self._trial, self._last, self._settled = None, None, 0
        self._voided = []
        self._locals.clear()
        self._rests.clear()

    # -- plans --

    def limits(self, batch: int, limits: Limits) -> Limits:
        """The limits of the next step, without those who sit it out; once per step."""
        self._usual, self._steps = max(self._usual, batch), self._steps + 1
        if batch == self._usual:
            self._pause_M = np.maximum(self._pause_M - 1, 0)
            self._begin_or_end(batch, limits)
        out = self._out()
        out_W = np.isin(self.member_W, list(out))
        if not out or int(limits.capacity_W[~out_W].sum()) < batch:
            return limits
        if self._cut is None or self._cut[0] is not limits or self._cut[1] != out:
            kept = lambda x_W: np.where(out_W, 0, x_W)
            cut = replace(limits, capacity_W=kept(limits.capacity_W), minimum_W=kept(limits.minimum_W))
            self._cut = limits, out, cut
        return self._cut[2]

    def planned(self, plan: Plan) -> Plan:
        """The plan with those who leave the exchange in this step."""
        out_W = np.isin(self.member_W, list(self._out())) & (plan.counts_W == 0)
        return replace(plan, benched_W=out_W) if out_W.any() else plan

    def _out(self) -> frozenset[int]:
        """Members without samples in the next step."""
        out, trial = set(self.benched), self._trial
        if trial is not None and trial.without:  # also until its timings are there
            out.add(trial.member)
        elif trial is not None and trial.planned <= trial.steps + 1:
            out.discard(trial.member)
        return frozenset(out)

    def _begin_or_end(self, batch: int, limits: Limits) -> None:
        trial = self._trial
        if trial is not None:
            trial.planned += 1
            if len(trial.times) >= trial.steps or trial.planned > trial.steps + 1 + _PATIENCE:
                self._trial = None
                self._judge(trial)
        elif self._rests and (self._locals or self._voided):
            ready = [member for member in self.benched if self._pause_M[member] == 0]
            member = min(ready) if ready else self._suspect(batch, limits)
            if member is not None:
                steps = min(self._trial_steps(), int(self._paid_M[member]))
                self._trial = _BenchTrial(member, member not in self.benched, steps)

    def _trial_steps(self) -> int:
        """Steps to time in a trial, by the noise of recent steps."""
        seconds = float(np.std(self._locals or self._voided)) + float(np.std(self._rests))
        noise = seconds / self._usual_seconds() / _QUIET
        return int(np.clip(np.ceil(_TRIAL * noise * noise), _TRIAL, _LONGEST))

    def _usual_seconds(self) -> float:
        """Seconds of a step with all that are not benched."""
        return float(np.median(self._locals or self._voided) + np.median(self._rests))

    def _suspect(self, batch: int, limits: Limits) -> int | None:
        """The member that costs most, if leaving it out could be a gain."""
        last = self._last
        assert last is not None
        valid_W = last.valid_W
        if not valid_W.any() or int(last.counts_W.sum()) != batch:
            return None
        samples_M = np.bincount(self.member_W, last.counts_W, minlength=self._members)
        capacity_W = np.where(np.isin(self.member_W, list(self.benched)), 0, limits.capacity_W)
        room_M = capacity_W.sum() - np.bincount(self.member_W, capacity_W, minlength=self._members)
        able_M = (samples_M > 0) & (samples_M < batch) & (room_M >= batch) & (self._pause_M == 0)
        able_M[list(self.benched)] = False
        left_M = np.where(able_M, batch - samples_M, 1.0)
        local = float(np.median(self._locals or self._voided))  # that of one step alone may be short by chance
        fastest_M = local * batch / left_M
        gain_M = np.where(able_M, self._usual_seconds() / fastest_M - 1.0, -1.0)
        member = int(np.argmax(gain_M))
        gain = float(gain_M[member])
        needed = _ONE if gain > _LARGE_GAIN else _FEW if gain > _CLEAR_GAIN else _TIMINGS
        return member if gain > _LEAST_GAIN and len(self._rests) >= needed else None

    def _judge(self, trial: _BenchTrial) -> None:
        """End a trial: bench the member, let it in, or leave things as they are."""
        member = trial.member
        self._tries_M[member] += 1
        if len(trial.times) < _TRIAL or not self._locals:  # nothing was learned
            self._pause(trial, 0.0)
            return
        tried, before = float(np.median(np.sum(trial.times, axis=1))), self._usual_seconds()
        gain = before / tried - 1.0 if trial.without else tried / before - 1.0  # of going without it
        if trial.without and gain > _LEAST_GAIN:
            self.benched[member] = f"steps took {gain:.0%} longer with it"
            self._event(f"{self.noun} {member} benched: {self.benched[member]}")
        elif not trial.without and gain < -_LEAST_GAIN:
            del self.benched[member]
            self._tries_M[member] = 0
            self._event(f"{self.noun} {member} back in use: steps take {-gain:.0%} less with it")
        else:
            self._pause(trial, abs(gain))
            return
        self._pause(trial, abs(gain))
        self._locals.clear()
        self._rests.clear()
        self._locals.extend(local for local, _ in trial.times)
        self._rests.extend(rest for _, rest in trial.times)

    def _pause(self, trial: _BenchTrial, lost: float) -> None:
        """Set the steps before the member's next trial, if each step of this one has lost that share of a step."""
        doubled = 1 << min(max(int(self._tries_M[trial.member]) - 1, 0), _DOUBLINGS)
        self._paid_M[trial.member] = next_one = max(trial.steps, self._trial_steps()) if self._locals else trial.steps
        steps = max(_PAUSE, _COST * (next_one + 1) * lost) * doubled
        self._pause_M[trial.member] = int(min(steps, 2**40))

    def _event(self, text: str) -> None:
        self.events.append(f"step {self._steps}: {text}")
        log.info("Step %d: %s.", self._steps, text)

    # -- timings --

    def observe(self, observation: Observation) -> None:
        """Learn from a finished step, which carries the seconds of the one before it."""
        last, self._last = self._last, observation
        if last is None:
            return
        batch = int(last.counts_W.sum())
        timed = observation.seconds_before > 0 and last.valid_W.any()
        if batch == self._usual and timed and self._settled > 0:
            local = float(np.max(last.times_W[last.valid_W]))
            self._add(last, local, float(observation.seconds_before) - local)
        same = np.array_equal(self._active(last), self._active(observation))
        self._settled = self._settled + 1 if same else 0
        moved = np.abs(observation.counts_W - last.counts_W).max()
        if same and self._trial is None and batch == observation.counts_W.sum() and moved > _NEW_COUNTS * batch:
            self._voided = list(self._locals)[-1:]
            self._locals.clear()

    def _active(self, observation: Observation) -> np.ndarray:
        return np.bincount(self.member_W, observation.counts_W, minlength=self._members) > 0

    def _add(self, observation: Observation, local: float, rest: float) -> None:
        """Add the slowest local phase of a step, and the rest of its time."""
        active_M, trial = self._active(observation), self._trial
        if trial is not None and active_M[trial.member] != trial.without:
            trial.times.append((local, rest))
        elif not active_M[list(self.benched)].any():  # otherwise left over from before
            self._locals.append(local)
            self._rests.append(rest)
