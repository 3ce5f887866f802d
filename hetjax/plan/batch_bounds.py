"""Between which batches an asynchronous worker moves, and with which it starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SPAN = 16  # the smallest batch is a sixteenth of the largest unless told: four halvings


@dataclass(frozen=True)
class BatchBounds:
    """The smallest and largest batch of each worker, multiples of the quantum."""

    lower_W: np.ndarray
    upper_W: np.ndarray
    quantum: int = 1

    def __post_init__(self) -> None:
        wrong_W = (self.lower_W < 1) | (self.lower_W > self.upper_W)
        if np.any(wrong_W):
            i = int(np.argmax(wrong_W))
            raise ValueError(
                f"Worker {i} has a smallest batch of {self.lower_W[i]} and a largest of {self.upper_W[i]}; expected "
                "1 <= smallest <= largest."
            )

    @classmethod
    def of(cls, capacity_W: np.ndarray, quantum: int = 1, lower_W: np.ndarray | None = None) -> BatchBounds:
        """The largest batch is the worker's capacity; the smallest a sixteenth of it unless given."""
        down = lambda n_W: np.maximum(np.asarray(n_W, np.int64) // quantum * quantum, quantum)
        upper_W = down(capacity_W)
        return cls(down(upper_W // SPAN if lower_W is None else lower_W), upper_W, quantum)

    def clip(self, worker: int, batch: float) -> int:
        """The allowed batch nearest to `batch`."""
        near = int(np.floor(batch / self.quantum + 0.5)) * self.quantum
        return int(np.clip(near, self.lower_W[worker], self.upper_W[worker]))

    def by_kind(self, accelerator_W: np.ndarray) -> np.ndarray:
        """As published: the CPU starts at its smallest batch, the GPU at its largest."""
        return np.where(accelerator_W, self.upper_W, self.lower_W)

    def by_speed(self, speed_W: np.ndarray, batch: int) -> np.ndarray:
        """Shares of one batch in proportion to speed: all workers then need about the same time for theirs."""
        share_W = np.asarray(speed_W, np.float64) / np.sum(speed_W) * batch
        return np.array([self.clip(worker, share) for worker, share in enumerate(share_W)], np.int64)
