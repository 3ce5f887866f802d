"""The controller protocol, and what controllers share: `ControllerBase` and `Timings`."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np

from hetjax.arguments import whole
from hetjax.plain_state import from_plain, to_plain
from hetjax.planning.controllers.members import followed
from hetjax.planning.limits import Limits
from hetjax.planning.rounding import allowed, largest_remainder


@dataclass(frozen=True)
class Plan:
    """The counts of one step, and the reason for them.

    Attributes:
        counts_W: Samples of each worker, int64; they sum to the batch of the step.
        changed: Whether the plan differs from that of the last full step.
        reason: For the log: "first plan", "worker 2 holds up the others: predicted gain 18%".
        mean_weights_W: a_i of the step's gradient sum_i a_i g_i, g_i the mean of worker i; None: a_i = b_i / B, which
            is unbiased.
        benched_W: Workers that leave the exchange, too (`hetjax.planning.bench`).
    """

    counts_W: np.ndarray
    changed: bool = False
    reason: str = ""
    mean_weights_W: np.ndarray | None = None
    benched_W: np.ndarray | None = None

    @cached_property
    def weights_W(self) -> np.ndarray | None:
        """The factor B a_i / b_i on worker i's gradient sum, from the counts of THIS step; None: 1 for all.

        A partition into shards replaces the counts of a plan step by step, so weights that were computed once would be
        those of another step.
        """
        if self.mean_weights_W is None:
            return None
        used_W = self.counts_W > 0
        factor_W = self.counts_W.sum() * self.mean_weights_W / np.where(used_W, self.counts_W, 1)
        return np.where(used_W, factor_W, 0.0)

    @cached_property
    def bounds_W1(self) -> np.ndarray:
        """Prefix sums: worker i computes the samples bounds[i] <= position < bounds[i + 1] of the global batch."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts_W)])

    @cached_property
    def checksum(self) -> int:
        """A checksum of the counts below 2**24, exact in a float32."""
        return zlib.crc32(np.ascontiguousarray(self.counts_W, dtype="<i8").tobytes()) & 0xFFFFFF


@dataclass(frozen=True)
class Observation:
    """The timings of one finished step. Every process receives the same numbers in the same order.

    Attributes:
        counts_W: Samples of each worker, int64.
        work_W: `Limits.work(counts_W)` at the time of the step, float64.
        times_W: Seconds, float64, rounded to 1 microsecond; NaN where there is no valid timing.
        epoch: Epoch of the step.
        step: Number of the step.
        seconds_before: Seconds of the whole step before this one, exchange included; NaN if not timed.
    """

    counts_W: np.ndarray
    work_W: np.ndarray
    times_W: np.ndarray
    epoch: int = 0
    step: int = 0
    seconds_before: float = float("nan")

    @property
    def valid_W(self) -> np.ndarray:
        """Workers that had samples and a valid timing."""
        return (self.counts_W > 0) & (self.times_W > 0) & (self.times_W < np.inf)


class Controller(Protocol):
    """Decides how many samples each worker gets.

    The trainer calls `plan` once per step and `observe` once per finished step. The plan of step n + 1 is made after
    the observation of step n - 1, so two plans are made before the first observation arrives.
    """

    name: str

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        """Return the counts of the next step, which has `batch` samples (fewer in the last step of an epoch)."""
        ...

    def observe(self, observation: Observation, /) -> None:
        """Learn from a finished step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Continue from a `state_dict`. The first plan for another number of workers resets the controller."""
        ...


@dataclass
class ControllerState:
    """What every controller saves; subclasses add what they learn. The names are those of the saved JSON."""

    workers: int
    usual: int = field(default=0, init=False)  # the batch of a full step
    short: int = field(default=0, init=False)  # the batch of the previous step if it was shorter than that, else 0
    counts_W: np.ndarray | None = field(default=None, init=False)  # the counts of a full step


StateT = TypeVar("StateT", bound=ControllerState)


class ControllerBase(ABC, Generic[StateT]):
    """Keeps the counts of a full step in force, and adapts them to short steps and to changed limits.

    A subclass provides `initial_state`, `observe` and `decide`. Everything it learns is in `state`, a dataclass.
    """

    name: ClassVar[str]
    benches: ClassVar[bool] = False  # workers that do not pay may be left out: see `hetjax.planning.bench`
    state: StateT

    def __init__(self) -> None:
        self._reset(0)

    def _reset(self, workers: int) -> None:
        self.state = self.initial_state(workers)
        self._checked: Limits | None = None  # limits that the counts in force are known to satisfy

    @abstractmethod
    def initial_state(self, workers: int) -> StateT:
        """The state before the first plan."""

    @property
    def counts_W(self) -> np.ndarray | None:
        """The counts of a full step; None before the first plan."""
        return self.state.counts_W

    def observe(self, observation: Observation, /) -> None:
        """Learn from a finished step."""

    def decide(self, counts_W: np.ndarray, limits: Limits, epoch: int) -> tuple[np.ndarray, str]:
        """Return counts for a full step and the reason; `counts_W`, those in force, to keep them."""
        return counts_W, ""

    def shares(self, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        """Shares for a batch of another size, or under changed limits."""
        return counts_W.astype(np.float64)

    def fit(self, batch: int, counts_W: np.ndarray, limits: Limits) -> np.ndarray:
        """Counts for a batch of another size, or under changed limits."""
        return largest_remainder(self.shares(counts_W, limits), limits, batch)

    def mean_weights(self) -> np.ndarray | None:
        """`Plan.mean_weights_W` of the plans from here on."""
        return None

    def plan(self, batch: int, limits: Limits, epoch: int = 0) -> Plan:
        """Return the counts of the next step, which has `batch` samples (fewer in the last step of an epoch)."""
        if limits.workers != self.state.workers:
            self._reset(limits.workers)
        counts_W, changed, reason = self._counts(batch, limits, epoch)
        return Plan(counts_W, changed, reason, self.mean_weights())

    def _counts(self, batch: int, limits: Limits, epoch: int) -> tuple[np.ndarray, bool, str]:
        state = self.state
        if state.counts_W is not None and batch < state.usual and batch != state.short:
            # The last step of an epoch. Only two short steps of the same size in a row mean a new batch size.
            state.short = batch
            return self.fit(batch, state.counts_W, limits), False, f"short step of {batch} samples"
        state.short = 0
        if state.counts_W is None:
            state.usual = batch
            state.counts_W = self.fit(batch, np.ones(state.workers), limits)
            return state.counts_W, False, "first plan"
        before_W, reason = state.counts_W, ""
        fits = limits is self._checked or allowed(before_W, limits, batch)
        if batch != state.usual or not fits:
            reason = f"batch is now {batch}" if batch != state.usual else "limits have changed"
            state.usual = batch
            state.counts_W = self.fit(batch, before_W, limits)
        state.counts_W, why = self.decide(state.counts_W, limits, epoch)
        self._checked = limits
        return state.counts_W, not np.array_equal(state.counts_W, before_W), why or reason

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as plain JSON values."""
        return {"controller": self.name} | to_plain(self.state)

    def follow(self, state: Mapping[str, Any], kept_W: Sequence[int | None]) -> None:
        """Continue from a `state_dict` with other workers; see `hetjax.planning.controllers.members`."""
        self._reset(len(kept_W))
        self.load_state_dict(followed(state, self.state_dict(), kept_W))

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a `state_dict`. The first plan for another number of workers resets the controller.

        Raises:
            ValueError: If the state is that of another controller.
        """
        if state.get("controller") != self.name:
            raise ValueError(
                f"The state belongs to controller {state.get('controller')!r}, this one is {self.name!r}; "
                "resume with the controller that was saved, or start this one without a state."
            )
        self._reset(int(state["workers"]))
        self.state = from_plain(self.state, state)


Every = int | Literal["epoch"]


def check_every(every: Every) -> Every:
    """Check when a law acts: after this number of steps, or once per epoch."""
    return "epoch" if every == "epoch" else whole("every, if not 'epoch',", every, 1)


@dataclass(init=False)
class Timings:
    """The cadence of a law that acts now and then: sums over the steps since it last acted, and when it acts next.

    The sums pair each time with the counts it was measured with, so a timing that arrives after a change still counts:
    sum n_i / sum t_i is worker i's rate whatever counts are in force.
    """

    sum_n_W: np.ndarray
    sum_t_W: np.ndarray
    timed_W: np.ndarray  # number of timings
    gathered: int  # steps
    epoch: int  # of the last plan

    def __init__(self, workers: int) -> None:
        self.epoch = 0
        self.sum_n_W, self.sum_t_W = np.zeros(workers), np.zeros(workers)
        self.timed_W, self.gathered = np.zeros(workers, np.int64), 0

    @property
    def mean_W(self) -> np.ndarray:
        """Mean time of a step; 0 where there is none."""
        return self.sum_t_W / np.maximum(self.timed_W, 1)

    def add(self, observation: Observation, full_batch: int) -> None:
        """Add a step, unless it is that of other workers or of a short batch, which is no measure of a full one."""
        workers = len(self.timed_W)
        # Full steps of a sharded partition differ by up to a sample per worker.
        if len(observation.counts_W) != workers or (
            full_batch and abs(int(observation.counts_W.sum()) - full_batch) > workers
        ):
            return
        valid_W = observation.valid_W
        self.sum_n_W = self.sum_n_W + np.where(valid_W, observation.counts_W, 0)
        self.sum_t_W = self.sum_t_W + np.where(valid_W, observation.times_W, 0.0)
        self.timed_W = self.timed_W + valid_W
        self.gathered += 1

    def due(self, every: Every, epoch: int) -> bool:
        """Whether the law acts in this step of `epoch`. To be called in every full step."""
        new_epoch, self.epoch = epoch != self.epoch, epoch
        ready = new_epoch if every == "epoch" else self.gathered >= every
        return ready and bool(self.timed_W.any())

    def clear(self) -> None:
        """Start over, after the law has acted."""
        workers = len(self.timed_W)
        self.sum_n_W, self.sum_t_W = np.zeros(workers), np.zeros(workers)
        self.timed_W, self.gathered = np.zeros(workers, np.int64), 0
