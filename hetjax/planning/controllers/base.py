"""The protocol of a controller: timings in, plans out. The next controller is one short file that follows it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from hetjax.planning.limits import Limits


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
