"""The published rules of the Hogbatch family: batch bounds, batch adaptation, merging, scaling. Pure arithmetic.

Between which batches an asynchronous worker moves, and with which it starts.

The batch rule of Adaptive Hogbatch (Y. Ma, F. Rusu, arXiv 2004.08771).

How Adaptive SGD merges replicas and moves their batches (Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029).

How much a gradient counts, by the batch that it is the mean of.
"""

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


ALPHA = 2.0
DEAD_ZONE = 4


def adapted_batch(
    worker: int,
    batch_W: np.ndarray,
    updates_W: np.ndarray,
    bounds: BatchBounds,
    *,
    alpha: float = ALPHA,
    dead_zone: int = DEAD_ZONE,
    taking_part_W: np.ndarray | None = None,
) -> int:
    """The batch of a worker E that asks for work, from u, the updates each worker has made:

        u_E < min of the others - dead_zone:  b_E = max(b_E / alpha, bmin_E)     smaller batches, so more updates
        u_E > max of the others + dead_zone:  b_E = min(b_E alpha, bmax_E)

    Batches are multiples of the smallest one, so they move by that at least. A worker alone keeps its batch. As
    published the dead zone is 0, and then a batch that has to settle between two sizes flips on up to two of three
    requests. Only workers that take part are compared with.
    """
    others_W = np.ones(len(updates_W), bool) if taking_part_W is None else np.array(taking_part_W, bool)
    others_W[worker] = False
    now, mine, least = int(batch_W[worker]), int(updates_W[worker]), int(bounds.lower_W[worker])
    if not others_W.any():
        return now
    if mine < updates_W[others_W].min() - dead_zone:
        return bounds.clip(worker, min(now / alpha, now - least))
    if mine > updates_W[others_W].max() + dead_zone:
        return bounds.clip(worker, max(now * alpha, now + least))
    return now


MOMENTUM = 0.9  # w = merged + momentum (w - w_prev), as published
CALMER = 0.5  # with Adam 0.9 swings out: digits after 24 epochs .52-.82 right, with 0.5 .95-.96, as on one device


def merge_weights(updates_W: np.ndarray, batch_W: np.ndarray) -> np.ndarray:
    """The weight of each replica after a mega-batch: u_i / sum u, or b_i / sum b when all u are equal.

    A worker that made no update brings nothing, equal or not.
    """
    updates_W, batch_W = np.asarray(updates_W, np.float64), np.asarray(batch_W, np.float64)
    if not updates_W.any():
        raise ValueError("No worker has made an update since the last merge: there is nothing to merge.")
    weight_W = batch_W if np.ptp(updates_W) == 0 else updates_W
    return weight_W / weight_W.sum()


def moved_batches(
    batch_W: np.ndarray,
    updates_W: np.ndarray,
    bounds: BatchBounds,
    beta_W: np.ndarray | None = None,
    taking_part_W: np.ndarray | None = None,
) -> np.ndarray:
    """b_i += beta_i (u_i - mean u) within the bounds: who made more updates gets larger batches.

    beta is half of a worker's smallest batch unless given. Fractions are kept: rounding would lose small steps. Those
    who do not take part keep their batch and do not count in the mean.
    """
    updates_W = np.asarray(updates_W, np.float64)
    beta_W = bounds.lower_W / 2 if beta_W is None else np.asarray(beta_W, np.float64)
    here_W = np.ones(len(updates_W), bool) if taking_part_W is None else taking_part_W
    moved_W = batch_W + beta_W * (updates_W - updates_W[here_W].mean())
    return np.where(here_W, np.clip(moved_W, bounds.lower_W, bounds.upper_W), batch_W)


CAP = 4.0


def rate_scale(batch: float, reference: float, cap: float | None = CAP) -> float:
    """min(b_E / b_ref, cap): a gradient over few samples moves the model less than one over many.

    Without a cap, linear scaling diverges at large batches (16 times the reference at lr 0.2 within 31-95 updates).
    """
    if batch <= 0 or reference <= 0:
        raise ValueError(f"The rate is scaled by batch {batch} over reference {reference}: both must be above 0.")
    scale = batch / reference
    return scale if cap is None else min(scale, cap)
