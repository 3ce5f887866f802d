"""What a controller is: timings in, plans out; and what the controllers share.

The protocol of a controller: timings in, plans out. The next controller is one short file that follows it.

What all controllers share: the counts in force, the short last step of an epoch, changing limits, the state.

Laws that act now and then: every k steps, or once an epoch, on the timings gathered since the last time.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from hetjax.arguments import whole
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder


@dataclass(frozen=True)
class Plan:
    """The counts of one step, and why they are what they are."""

    counts_W: np.ndarray  # int64, sums to the batch of the step
    changed: bool = False  # whether this differs from the plan before, the short last step of an epoch aside
    reason: str = ""  # a few words for the log: "first plan", "worker 2 slower: predicted gain 18%"
    weights_W: np.ndarray | None = None  # worker i's gradient sum counts this many times; None: once, which is unbiased

    @cached_property
    def bounds_W1(self) -> np.ndarray:
        """Prefix sums: worker i computes the samples bounds[i] <= position < bounds[i + 1] of the global batch."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts_W)])

    @cached_property
    def checksum(self) -> int:
        """A fingerprint below 2**24, so that it travels exactly in a float32."""
        return zlib.crc32(np.ascontiguousarray(self.counts_W, dtype="<i8").tobytes()) & 0xFFFFFF


@dataclass(frozen=True)
class Observation:
    """What one finished step told about the workers. The same numbers in the same order reach every process."""

    counts_W: np.ndarray  # int64, samples
    work_W: np.ndarray  # float64, Limits.work(counts_W) when the step ran
    times_W: np.ndarray  # float64 seconds, rounded to 1 microsecond; NaN where there is no valid timing
    epoch: int = 0
    step: int = 0

    @property
    def valid_W(self) -> np.ndarray:
        """Which workers have something to learn from: samples, and a valid timing of them."""
        return (self.counts_W > 0) & (self.times_W > 0) & (self.times_W < np.inf)


class Controller(Protocol):
    """Decides how many samples each worker gets.

    The trainer calls `plan` once a step and `observe` once a finished step. The plan of step n + 1 is made after the
    observation of step n - 1, so two plans are made before the first observation arrives.
    """

    name: str

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        """Counts for the next step, which has `batch` samples (less than usual in the last step of an epoch)."""
        ...

    def observe(self, seen: Observation) -> None:
        """Learn from a finished step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The whole state as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`, possibly with another number of workers (then start afresh)."""
        ...


class ControllerBase:
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


Cadence = int | Literal["epoch"]


class Cadenced(ControllerBase):
    """Sums counts and times between two moments of decision and hands them to the `law`.

    The sums are those of the steps really timed, so a timing that arrives after a change still speaks for the counts
    it was taken with: sum n_i / sum t_i is worker i's rate whatever was in force.
    """

    learned: ClassVar[tuple[str, ...]] = ("sum_n_W", "sum_t_W", "timed_W", "gathered", "epoch")

    def __init__(self, every: Cadence = "epoch") -> None:
        if every != "epoch":
            every = whole("every, if not 'epoch',", every, 1)
        self.every = every
        super().__init__()

    def begin(self, workers: int) -> None:
        self.epoch = 0
        self.clear(workers)

    def clear(self, workers: int) -> None:
        """Gather from the beginning."""
        self.sum_n_W, self.sum_t_W = np.zeros(workers), np.zeros(workers)
        self.timed_W, self.gathered = np.zeros(workers, np.int64), 0

    def observe(self, seen: Observation) -> None:
        if len(seen.counts_W) != self.workers or (
            self.usual and abs(int(seen.counts_W.sum()) - self.usual) > self.workers
        ):
            return  # the short last step of an epoch is no fair measure of a full one; steps of shards vary by a sample
        valid_W = seen.valid_W
        self.sum_n_W = self.sum_n_W + np.where(valid_W, seen.counts_W, 0)
        self.sum_t_W = self.sum_t_W + np.where(valid_W, seen.times_W, 0.0)
        self.timed_W = self.timed_W + valid_W
        self.gathered += 1

    def due(self, epoch: int) -> bool:
        turned, self.epoch = epoch != self.epoch, epoch
        ready = turned if self.every == "epoch" else self.gathered >= self.every
        return ready and bool(self.timed_W.any())

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        if not self.due(epoch):
            return counts_W, ""
        counts_W, reason = self.law(counts_W, limits)
        self.clear(self.workers)
        return counts_W, reason

    def law(self, counts_W: np.ndarray, limits: Limits) -> tuple[np.ndarray, str]:
        """New counts from what has been gathered, and the reason."""
        raise NotImplementedError

    def rates(self, share_W: np.ndarray) -> np.ndarray:
        """Shares by samples per second, p_i ~ sum n_i / sum t_i; a worker that was not timed keeps the share it has."""
        timed_W = self.timed_W > 0
        rate_W = np.where(timed_W, self.sum_n_W / np.where(timed_W, self.sum_t_W, 1.0), 0.0)
        kept = float(share_W[~timed_W].sum())
        return np.where(timed_W, (1.0 - kept) * rate_W / float(rate_W.sum()), share_W)
