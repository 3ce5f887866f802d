"""Constraints of a plan: capacities, minimums, the quantum, and the work of every count per kind of worker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hetjax.arguments import whole


@dataclass(frozen=True)
class Levels:
    """The distinct values of staircases on a grid of counts, all tables concatenated.

    Table k occupies `size_K[k]` entries from `base_K[k]` on. Its entry 0 stands for no grid unit; entry j >= 1 is a
    level of work `value_L`, which covers up to `top_L` grid units.
    """

    value_L: np.ndarray
    top_L: np.ndarray
    base_K: np.ndarray
    size_K: np.ndarray

    @classmethod
    def of(cls, stairs: tuple[np.ndarray, ...], offset: int, quantum: int) -> Levels:
        """Levels of the counts offset + m quantum, m = 0, 1, 2, ... grid units."""
        values, tops, sizes = [], [], []
        for stair in stairs:
            work_U = np.asarray(stair, np.float64)[offset::quantum]
            first_U = work_U[1:] > np.concatenate([[-1.0], work_U[1:-1]])[: len(work_U[1:])]
            starts = np.flatnonzero(first_U) + 1
            values.append(np.concatenate([[0.0], work_U[starts]]))
            tops.append(np.concatenate([[0], np.append(starts[1:] - 1, len(work_U) - 1)[: len(starts)]]))
            sizes.append(len(starts) + 1)
        size_K = np.array(sizes, np.int64)
        return cls(np.concatenate(values), np.concatenate(tops), np.cumsum(size_K) - size_K, size_K)


@dataclass(frozen=True)
class Limits:
    """The constraints of one step's plan: minimum_i <= n_i <= capacity_i, in multiples of the quantum.

    The last worker with samples takes the remainder of the batch. A worker's time is modeled as `startup_i +
    per_work_i * stairs[kind_W[i]][n]`; a worker without samples takes no time.

    Attributes:
        capacity_W: The most samples of each worker in one step.
        minimum_W: The fewest samples of each worker in one step.
        quantum: Counts are multiples of it.
        kind_W: Index into `stairs` for each worker.
        stairs: Per kind of worker, the work of n samples in units of one sample at full batch: a non-decreasing table
            from n = 0 (work 0) to the largest capacity of the kind. With buckets of lengths, the unit is one sample of
            the longest.
        bucket: The bucket of the step's samples.
        rate_W: Expected relative speed of each worker, for plans before the first timing. None: all alike.

    Raises:
        ValueError: If the arrays do not fit each other, or if a value is out of its range.
    """

    capacity_W: np.ndarray
    minimum_W: np.ndarray
    quantum: int
    kind_W: np.ndarray
    stairs: tuple[np.ndarray, ...]
    bucket: int = 0
    rate_W: np.ndarray | None = None

    def __post_init__(self) -> None:
        workers, kinds = len(self.capacity_W), len(self.stairs)
        if workers == 0:
            raise ValueError("Limits got no workers; give one capacity, minimum and kind per worker.")
        if len(self.minimum_W) != workers or len(self.kind_W) != workers:
            raise ValueError(
                f"Limits got {workers} capacities, {len(self.minimum_W)} minimums and {len(self.kind_W)} kinds; "
                "give one of each per worker."
            )
        whole("quantum", self.quantum, 1)
        if np.min(self.kind_W) < 0 or np.max(self.kind_W) >= kinds:
            raise ValueError(
                f"kind_W names kind {np.max(self.kind_W)} but there are {kinds} staircases; add the missing one."
            )
        wrong_W = (self.minimum_W < 0) | (self.minimum_W > self.capacity_W)
        if np.any(wrong_W):
            i = int(np.argmax(wrong_W))
            raise ValueError(
                f"Worker {i} has minimum {self.minimum_W[i]} and capacity {self.capacity_W[i]}; "
                "expected 0 <= minimum <= capacity."
            )
        length_K = np.array([len(stair) for stair in self.stairs])
        short_W = self.capacity_W >= length_K[self.kind_W]
        if np.any(short_W):
            i = int(np.argmax(short_W))
            raise ValueError(
                f"Worker {i} has capacity {self.capacity_W[i]} but the staircase of its kind {self.kind_W[i]} ends at "
                f"{length_K[self.kind_W[i]] - 1} samples; extend the staircase or lower the capacity."
            )
        for kind, stair in enumerate(self.stairs):
            # A NaN fails every comparison, so it is rejected, too.
            if not (stair[0] == 0 and np.all(stair[1:] >= stair[:-1]) and np.isfinite(stair[-1])):
                raise ValueError(
                    f"The staircase of kind {kind} is not a table of work; "
                    "expected finite numbers that start at 0 for no samples and never decrease."
                )

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.capacity_W)

    @cached_property
    def levels(self) -> Levels:
        """Levels of the staircases at multiples of the quantum."""
        return Levels.of(self.stairs, 0, self.quantum)

    @cached_property
    def least_W(self) -> np.ndarray:
        """The least work per sample of each worker: min over n of stairs[n] / n."""
        least_K = [
            float(np.min(stair[1:] / np.arange(1, len(stair)))) if len(stair) > 1 else 0.0 for stair in self.stairs
        ]
        return np.array(least_K)[self.kind_W]

    def check_counts(self, counts_W: np.ndarray, batch: int, source: str) -> None:
        """Check that counts are whole, within the capacities, and sum to the batch.

        Args:
            counts_W: The counts.
            batch: Their expected sum.
            source: What returned them, for the error: "The controller 'dbs'".

        Raises:
            ValueError: If they are not.
        """
        counts_W = np.asarray(counts_W)
        if counts_W.shape != (self.workers,) or not np.issubdtype(counts_W.dtype, np.integer):
            raise ValueError(
                f"{source} returned counts {counts_W.tolist()}: expected {self.workers} whole numbers, one per worker."
            )
        if counts_W.sum() != batch or (counts_W < 0).any() or (counts_W > self.capacity_W).any():
            raise ValueError(
                f"{source} returned counts {counts_W.tolist()}: expected numbers from 0 to the capacities "
                f"{self.capacity_W.tolist()} that sum to the batch, {batch}."
            )

    def work(self, counts_W: np.ndarray) -> np.ndarray:
        """The work of each worker at these counts: stairs[kind][count]."""
        if len(self.stairs) == 1:
            return self.stairs[0][counts_W]
        work_W = np.empty(self.workers, np.float64)
        for kind, stair in enumerate(self.stairs):
            of_kind_W = self.kind_W == kind
            work_W[of_kind_W] = stair[counts_W[of_kind_W]]
        return work_W

    @classmethod
    def plain(cls, workers: int, capacity: int, *, minimum: int = 0, quantum: int = 1) -> Limits:
        """The same limits for all workers, with the number of samples as the work."""
        return cls(
            capacity_W=np.full(workers, capacity, np.int64),
            minimum_W=np.full(workers, minimum, np.int64),
            quantum=quantum,
            kind_W=np.zeros(workers, np.int64),
            stairs=(np.arange(capacity + 1, dtype=np.float64),),
        )
