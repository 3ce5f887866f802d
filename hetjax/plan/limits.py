"""What a plan has to respect: capacities, minimums, the quantum, and the price staircase of each kind of worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Limits:
    """The frame of one step's plan.

    `stairs[kind_W[i]][n]` is the work of n samples on worker i, in units of one sample at full batch: a non-decreasing
    table from n = 0 (work 0) to the kind's largest capacity, shared by all workers of a kind. A worker's time is
    modelled as `startup_i + scale_i * stairs[kind_W[i]][n]`; a worker with no samples takes no time.

    Counts are multiples of `quantum`, except that the last worker with samples takes the remainder of the batch.
    """

    capacity_W: np.ndarray
    minimum_W: np.ndarray
    quantum: int
    kind_W: np.ndarray
    stairs: tuple[np.ndarray, ...]

    @property
    def workers(self) -> int:
        return len(self.capacity_W)

    def work(self, counts_W: np.ndarray) -> np.ndarray:
        """The work of each worker at these counts: stairs[kind][count]."""
        work_W = np.empty(self.workers, np.float64)
        for kind, stair in enumerate(self.stairs):
            mine = self.kind_W == kind
            work_W[mine] = stair[counts_W[mine]]
        return work_W

    @classmethod
    def plain(cls, workers: int, capacity: int, *, minimum: int = 0, quantum: int = 1) -> Limits:
        """Limits where work is simply the number of samples, the same for all workers."""
        return cls(
            capacity_W=np.full(workers, capacity, np.int64),
            minimum_W=np.full(workers, minimum, np.int64),
            quantum=quantum,
            kind_W=np.zeros(workers, np.int64),
            stairs=(np.arange(capacity + 1, dtype=np.float64),),
        )
