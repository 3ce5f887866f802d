"""The global order: one permutation per epoch from (seed, epoch), and one integer to resume from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from hetjax.planning.controllers.base import Plan

PlanFn = Callable[..., Plan]  # (batch, epoch[, bucket]) -> the controller's plan

_ROUNDS = 6


def _mix(value: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014): 64 bits in, 64 well-mixed bits out."""
    z = value + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=16)
def _keys(seed: int, epoch: int) -> list[np.uint64]:
    """One key per round; cached, because every step of an epoch needs them."""
    base = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.uint64(0x9E3779B97F4A7C15))
    base = _mix(base ^ np.uint64(epoch), np.uint64(0xD1B54A32D192ED03))
    return [_mix(base, np.uint64(r + 1))[0] for r in range(_ROUNDS)]


def permute(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Entries `positions` of a pseudo-random permutation of range(size), without ever storing the permutation.

    A balanced Feistel network permutes range(2**(2h)), the smallest such range with at least `size` values. Those
    outside range(size) are permuted again until they fall inside ("cycle walking", Black & Rogaway 2002), which takes
    fewer than four rounds on average.
    """
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    keys = _keys(seed, epoch)

    def feistel(value: np.ndarray) -> np.ndarray:
        left, right = value >> shift, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << shift) | right

    out = feistel(np.asarray(positions).astype(np.uint64))
    while (outside := out >= np.uint64(size)).any():
        out[outside] = feistel(out[outside])
    return out.astype(np.int64)


@dataclass(frozen=True)
class Span:
    """One global step: the half-open range [start, stop) of positions in an epoch's order.

    Where a process plans only its part of a step, `start` and `stop` bound the part and `whole` the step. `bucket` is
    the one of its samples, where they are of unequal length.
    """

    epoch: int
    start: int
    stop: int
    whole: tuple[int, int] | None = None
    bucket: int = 0

    @property
    def batch(self) -> int:
        return self.stop - self.start

    @property
    def end(self) -> int:
        """The position after the whole step."""
        return self.stop if self.whole is None else self.whole[1]

    @property
    def advance(self) -> int:
        """Samples of the whole step, which is how far it moves the cursor."""
        return self.batch if self.whole is None else self.whole[1] - self.whole[0]


@dataclass(frozen=True)
class PlannedStep:
    """A step ready to run: its positions, each worker's count, and the work in it."""

    number: int  # steps completed before it since the start of training
    span: Span
    plan: Plan
    work_W: np.ndarray  # Limits.work of the counts at planning time


@dataclass(frozen=True)
class Sampler:
    """Divides every epoch's order into global batches; the last one of an epoch may be short, but is never dropped.

    The cursor is the number of samples consumed since the start of training. It alone determines the next step,
    whatever the plans and the number of workers were: `step(cursor)` is that step, `cursor + step.batch` the cursor
    after it.
    """

    partition: ClassVar[str] = "global"
    size: int
    batch: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self):
        if self.size < 1:
            raise ValueError(f"The dataset is empty ({self.size} samples): there is nothing to train or evaluate on.")
        if self.batch < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch}.")

    def step(self, cursor: int) -> Span:
        """The global step at the cursor."""
        epoch, start = divmod(cursor, self.size)
        return Span(epoch, start, min(start + self.batch, self.size))

    def next(self, cursor: int, plan_fn: PlanFn) -> tuple[Span, Plan]:
        """Return the step at the cursor and its plan; any sample of the step may go to any worker."""
        step = self.step(cursor)
        return step, plan_fn(step.batch, step.epoch)

    def ahead(self, cursor: int) -> Span | None:
        """Predict a step that is not planned yet, to prefetch it."""
        return self.step(cursor)

    def steps_per_epoch(self) -> int:
        return -(-self.size // self.batch)

    def steps_between(self, cursor: int, end: int) -> int:
        """Number of steps from one cursor to another."""
        before = lambda at: at // self.size * self.steps_per_epoch() + -(-(at % self.size) // self.batch)
        return before(end) - before(cursor)

    def whole_steps(self, samples: int) -> int:
        """Number of complete steps in the first `samples` samples of training."""
        epochs, rest = divmod(samples, self.size)
        return epochs * self.steps_per_epoch() + rest // self.batch

    def samples_in(self, steps: int) -> int:
        """Number of samples in the first `steps` steps of training."""
        epochs, rest = divmod(steps, self.steps_per_epoch())
        return epochs * self.size + rest * self.batch

    def end_of(self, cursor: int, steps: int) -> int:
        """The cursor after `steps` more steps; the last step of an epoch may be short."""
        return self.samples_in(self.whole_steps(cursor) + steps)

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Indices of the samples at positions [start, stop) of an epoch's order."""
        positions = np.arange(start, stop, dtype=np.int64)
        return permute(positions, self.size, self.seed, epoch) if self.shuffle else positions

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """What a resumed run needs besides the cursor, as plain JSON values."""
        return {"partition": self.partition, "samples": self.size}

    def load_state_dict(self, saved: Mapping[str, Any], cursor: int) -> None:
        """Raise ValueError if the cursor no longer means what it did when `saved` was written."""
        check_same_samples(saved, self.size)
        if saved["partition"] != self.partition and cursor % self.size:
            raise ValueError(
                f"The run stopped inside an epoch with partition {saved['partition']!r}; in the global order some of "
                f"its samples would be read twice. Resume with partition {saved['partition']!r}."
            )


class EndlessSampler(Sampler):
    """The samples of an endless source in its own order, each index once.

    Positions are 32-bit integers, so they start again from 0, as those of a next epoch, after about 2**31 samples.
    """

    def __init__(self, batch: int):
        super().__init__(2**31 // batch * batch, batch, shuffle=False)

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Indices of the samples at positions [start, stop) after those of earlier epochs."""
        return epoch * self.size + super().indices(epoch, start, stop)


def check_same_samples(saved: Mapping[str, Any], size: int) -> None:
    """Raise ValueError if the dataset has another size: the cursor would point to other samples."""
    if saved["samples"] != size:
        raise ValueError(
            f"The run was begun on {saved['samples']} samples and there are {size} now: its cursor "
            "would point to other samples. Resume with the same data."
        )
