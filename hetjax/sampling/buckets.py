"""The global order of samples of unequal length: every step holds samples of one bucket of lengths."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.sampling.order import PlanFn, Sampler, Span, check_same_samples


@dataclass(frozen=True)
class _Epoch:
    """One epoch's order, grouped into steps."""

    index_N: np.ndarray  # the sample at every position
    start_S: np.ndarray  # the first position of every step
    bucket_S: np.ndarray


class BucketSampler:
    """Divides every epoch into steps of one bucket each, from (seed, epoch) and the buckets alone.

    Samples are taken in the order of `Sampler` and wait in a queue per bucket. A queue that holds a batch becomes the
    next step; what is left at the end of the epoch becomes short steps, one per bucket. So every sample is seen exactly
    once per epoch, and the steps do not depend on plans or the number of workers. As in `Sampler`, the cursor alone
    determines the next step.

    Args:
        bucket_N: The bucket of every sample, from 0.
        batch_K: Samples of a step of each bucket.
        seed: The order derives from it.
        shuffle: Whether the order is random; otherwise samples are taken as they are numbered.
    """

    partition: ClassVar[str] = "buckets"

    def __init__(self, bucket_N: np.ndarray, batch_K: Sequence[int], seed: int = 0, shuffle: bool = True):
        self.bucket_N, self.batch_K = np.asarray(bucket_N, np.int64), list(map(int, batch_K))
        self.order = Sampler(len(self.bucket_N), max(self.batch_K), seed, shuffle)
        self.size, self.batch = self.order.size, self.order.batch
        if self.bucket_N.min() < 0 or self.bucket_N.max() >= len(self.batch_K) or min(self.batch_K) < 1:
            raise ValueError(
                f"Samples are in buckets {self.bucket_N.min()} to {self.bucket_N.max()}, with batches of "
                f"{self.batch_K} samples: expected one batch of at least 1 per bucket."
            )
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)  # this one, and the next for prefetching

    def _make_epoch(self, epoch: int) -> _Epoch:
        index_N = self.order.indices(epoch, 0, self.size)
        bucket_N = self.bucket_N[index_N]
        steps: list[tuple[int, int, np.ndarray]] = []  # when its last sample is taken, bucket, samples
        for bucket, batch in enumerate(self.batch_K):
            taken = np.flatnonzero(bucket_N == bucket)
            for at in range(0, len(taken), batch):
                part = taken[at : at + batch]
                steps.append((int(part[-1]) if len(part) == batch else self.size + bucket, bucket, index_N[part]))
        steps = sorted(steps, key=lambda step: step[0])
        stop_S = np.cumsum([len(samples) for _, _, samples in steps])
        return _Epoch(
            np.concatenate([samples for _, _, samples in steps]),
            np.concatenate([[0], stop_S[:-1]]).astype(np.int64),
            np.array([bucket for _, bucket, _ in steps], np.int64),
        )

    def step(self, cursor: int) -> Span:
        """The global step at the cursor."""
        epoch, start = divmod(cursor, self.size)
        made = self._epoch(epoch)
        number = int(np.searchsorted(made.start_S, start, "right"))
        stop = int(made.start_S[number]) if number < len(made.start_S) else self.size
        return Span(epoch, start, stop, bucket=int(made.bucket_S[number - 1]))

    def next(self, cursor: int, plan_fn: PlanFn) -> tuple[Span, Plan]:
        """Return the step at the cursor and its plan; any sample of the step may go to any worker."""
        step = self.step(cursor)
        return step, plan_fn(step.batch, step.epoch, step.bucket)

    def ahead(self, cursor: int) -> Span | None:
        """Predict a step that is not planned yet, to prefetch it."""
        return self.step(cursor)

    def steps_per_epoch(self) -> int:
        """Number of steps of every epoch: that of full and short batches in each bucket."""
        samples_K = np.bincount(self.bucket_N, minlength=len(self.batch_K))
        return int((-(-samples_K // np.array(self.batch_K))).sum())

    def steps_between(self, cursor: int, end: int) -> int:
        """Number of steps from one cursor to another."""
        return self._steps_before(end) - self._steps_before(cursor)

    def _steps_before(self, cursor: int) -> int:
        epoch, start = divmod(cursor, self.size)
        begun = int(np.searchsorted(self._epoch(epoch).start_S, start, "left")) if start else 0
        return epoch * self.steps_per_epoch() + begun

    def samples_in(self, steps: int) -> int:
        """Number of samples in the first `steps` steps of training."""
        return self.end_of(0, steps)

    def end_of(self, cursor: int, steps: int) -> int:
        """The cursor after `steps` more steps."""
        epoch, step = divmod(self._steps_before(cursor) + steps, self.steps_per_epoch())
        return epoch * self.size + (int(self._epoch(epoch).start_S[step]) if step else 0)

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Indices of the samples at positions [start, stop) of an epoch's order."""
        return self._epoch(epoch).index_N[start:stop]

    @property
    def checksum(self) -> int:
        """A checksum of the buckets and their batches, which determine the steps."""
        return zlib.crc32(self.bucket_N.astype("<i8").tobytes() + str(self.batch_K).encode())

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """What a resumed run needs besides the cursor, as plain JSON values."""
        return {"partition": self.partition, "samples": self.size, "buckets": self.checksum}

    def load_state_dict(self, saved: Mapping[str, Any], cursor: int) -> None:
        """Raise ValueError if the cursor no longer means what it did when `saved` was written."""
        check_same_samples(saved, self.size)
        if saved.get("buckets") != self.checksum and cursor % self.size:
            raise ValueError(
                "The run stopped inside an epoch with other buckets, or without: some of its samples would be read "
                "twice. Resume with the same lengths, sizes and batch_size."
            )
