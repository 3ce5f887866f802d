"""What all controllers share: the counts in force, the short last step of an epoch, changing limits, the state."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from hetjax.planning.controllers.base import Observation, Plan
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder


class Frame:
    """A controller that keeps counts in force; a law only says when and how to move them.

    A subclass fills in `begin` (everything it learns, for a number of workers), `observe` and `decide`, and names in
    `learned` the attributes that make up its state.
    """

    name: ClassVar[str]
    learned: ClassVar[tuple[str, ...]] = ()

    def __init__(self) -> None:
        self._start(0)

    def _start(self, workers: int) -> None:
        self.workers = workers
        self.usual = 0  # the batch of a full step
        self.short = 0  # the batch of the step before, if it was less than usual
        self.counts_W: np.ndarray | None = None
        self._checked: Limits | None = None  # the limits that the counts are known to keep
        self.begin(workers)

    def begin(self, workers: int) -> None:
        """Forget everything."""

    def observe(self, seen: Observation) -> None:
        """Learn from a finished step."""

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        """New counts for a full step and the reason, given those in force; the same counts if they should stay."""
        return counts_W, ""

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        """How to share out another batch than the usual one, or the usual one when limits have changed."""
        return counts_W.astype(np.float64)

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        """Counts for another batch, or under other limits, in the spirit of those in force."""
        return largest_remainder(self.shares(counts_W, limits), limits, batch)

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        if limits.workers != self.workers:
            self._start(limits.workers)
        if self.counts_W is not None and batch < self.usual and batch != self.short:
            # The last step of an epoch. Only a batch that is small twice running is a new usual batch.
            self.short = batch
            return Plan(self.fit(batch, self.counts_W, limits), False, f"short step of {batch} samples")
        self.short = 0
        if self.counts_W is None:
            self.usual = batch
            self.counts_W = self.fit(batch, np.ones(self.workers), limits)
            return Plan(self.counts_W, False, "first plan")
        before_W, reason = self.counts_W, ""
        fits = limits is self._checked or allowed(before_W, limits, batch)
        if batch != self.usual or not fits:
            reason = f"batch is now {batch}" if batch != self.usual else "limits have changed"
            self.usual = batch
            self.counts_W = self.fit(batch, before_W, limits)
        self.counts_W, why = self.decide(self.counts_W, limits, epoch)
        self._checked = limits
        return Plan(self.counts_W, not np.array_equal(self.counts_W, before_W), why or reason)

    def state_dict(self) -> dict[str, Any]:
        names = ("workers", "usual", "short", "counts_W", *self.learned)
        return {"controller": self.name} | {name: _plain(getattr(self, name)) for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("controller") != self.name:
            raise ValueError(
                f"The state belongs to controller {state.get('controller')!r}, this one is {self.name!r}; "
                "resume with the controller that was saved, or start this one without a state."
            )
        self._start(int(state["workers"]))
        for name in ("usual", "short", "counts_W", *self.learned):
            value = state.get(name, getattr(self, name))  # what an older version did not save starts afresh
            setattr(self, name, np.array(value) if isinstance(value, list) else value)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
