"""What nodes tell each other with every exchange: a row of numbers each, the same table on all nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np


@dataclass
class Notes:
    """What one node has to say; float64, so that sums and counters travel exactly."""

    batch: float = 0.0  # samples it has in one step, a mean since it sent last
    made: float = 0.0  # since it sent last: steps with samples,
    taken: float = 0.0  # and the samples in them
    steps: float = 0.0  # those of them with a valid timing,
    samples: float = 0.0  # the samples in these,
    seconds: float = 0.0  # and how long they took
    carried: float = 0.0  # seconds that the last exchange it did not wait for was under way
    loss: float = 0.0  # sum over the epoch so far
    weight: float = 0.0
    stop: float = 0.0  # somebody asked for the end
    save: float = 0.0  # somebody asked for a checkpoint
    checksum: float = 0.0  # of what all nodes have to agree on

    def step(self, samples: int, seconds: float | None) -> None:
        """Count one step; `seconds` is None where it was not timed."""
        if samples == 0:
            return
        self.made, self.taken = self.made + 1, self.taken + samples
        self.batch = self.taken / self.made
        if seconds is not None:
            self.steps, self.samples, self.seconds = self.steps + 1, self.samples + samples, self.seconds + seconds

    def sent(self) -> None:
        """Begin anew what is counted from one exchange to the next."""
        self.made = self.taken = self.steps = self.samples = self.seconds = self.stop = self.save = 0.0

    def array(self) -> np.ndarray:
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, row: np.ndarray) -> Notes:
        return cls(*(float(value) for value in row))


def steps_under_way(said_N: Sequence[Notes]) -> int:
    """How many steps of the fastest node an exchange takes; 0 if that is not known."""
    times = [notes.seconds / notes.steps for notes in said_N if notes.steps]
    carried = sum(notes.carried for notes in said_N) / len(said_N)
    return math.ceil(carried / min(times)) if times and min(times) > 0 else 0


def as_words(row: np.ndarray) -> np.ndarray:
    """Float64 as 32-bit words, which JAX moves without x64."""
    return np.ascontiguousarray(row, np.float64).view(np.uint32)


def from_words(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words, np.uint32).view(np.float64)
