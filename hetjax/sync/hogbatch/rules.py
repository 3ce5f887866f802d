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
        """The allowed batch nearest to `batch`: a multiple of the worker's smallest, or its largest.

        Multiples of the smallest batch, which is a rung of the ladder, need no padding.
        """
        lower, upper = int(self.lower_W[worker]), int(self.upper_W[worker])
        near = int(np.floor(batch / lower + 0.5)) * lower
        return upper if batch >= upper or near > upper else max(near, lower)

    def rungs(self, most_rows_W: np.ndarray | None = None) -> list[int]:
        """Chunk sizes along which batches move: each worker's largest, halved down to its smallest, and that.

        `most_rows_W`: the largest chunk that fits a worker's memory.
        """
        top_W = self.upper_W if most_rows_W is None else np.minimum(self.upper_W, most_rows_W)
        found = set()
        for lower, top in zip(self.lower_W, top_W, strict=True):
            size = max(int(top) // self.quantum, 1)
            while size * self.quantum > lower:
                found.add(size * self.quantum)
                size = -(-size // 2)
            found.add(int(min(lower, max(int(top), self.quantum))) // self.quantum * self.quantum)
        return sorted(found - {0})

    def by_kind(self, accelerator_W: np.ndarray) -> np.ndarray:
        """As published: the CPU starts at its smallest batch, the GPU at its largest."""
        return np.where(accelerator_W, self.upper_W, self.lower_W)

    def by_speed(self, speed_W: np.ndarray, batch: int) -> np.ndarray:
        """Shares of one batch in proportion to speed: all workers then need about the same time for theirs."""
        share_W = np.asarray(speed_W, np.float64) / np.sum(speed_W) * batch
        return np.array([self.clip(worker, share) for worker, share in enumerate(share_W)], np.int64)
