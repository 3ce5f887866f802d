"""The published rules of the Hogbatch family, as pure arithmetic: batch sizes, merge weights, gradient scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hetjax.sampling.ranges import Range

BOUNDS_RATIO = 16  # default largest / smallest batch: four halvings
ALPHA = 2.0
DEAD_ZONE = 4
PUBLISHED_MOMENTUM = 0.9
# With Adam 0.9 overshoots: digits accuracy after 24 epochs .52-.82, with 0.5 .95-.96, as on one device.
DEFAULT_MOMENTUM = 0.5
SCALE_CAP = 4.0
PUBLISHED_THREADS = 48  # of the CPU worker, which is Hogwild


@dataclass(frozen=True)
class BatchBounds:
    """The smallest and largest batch of each worker, multiples of the quantum."""

    lower_W: np.ndarray
    upper_W: np.ndarray
    quantum: int = 1
    threads_W: np.ndarray | None = None  # that divide a worker's batch between them; None: 1 each

    def __post_init__(self) -> None:
        wrong_W = (self.lower_W < 1) | (self.lower_W > self.upper_W)
        if np.any(wrong_W):
            i = int(np.argmax(wrong_W))
            raise ValueError(
                f"Worker {i} has a smallest batch of {self.lower_W[i]} and a largest of {self.upper_W[i]}; expected "
                "1 <= smallest <= largest."
            )

    @classmethod
    def of(
        cls,
        capacity_W: np.ndarray,
        quantum: int = 1,
        lower_W: np.ndarray | None = None,
        threads_W: np.ndarray | None = None,
    ) -> BatchBounds:
        """The largest batch is the worker's capacity; the default smallest is a sixteenth of it.

        A batch divides evenly between the worker's threads.
        """
        unit_W = quantum * (np.ones(len(capacity_W), np.int64) if threads_W is None else threads_W)
        if np.any(wrong_W := np.asarray(capacity_W) < unit_W):
            i = int(np.argmax(wrong_W))
            raise ValueError(
                f"Worker {i} takes at most {capacity_W[i]} samples, fewer than one quantum of {quantum} for each of "
                f"its {unit_W[i] // quantum} threads: raise capacity or batch_size, or lower threads."
            )
        down = lambda n_W: np.maximum(np.asarray(n_W, np.int64) // unit_W * unit_W, unit_W)
        upper_W = down(capacity_W)
        return cls(down(upper_W // BOUNDS_RATIO if lower_W is None else lower_W), upper_W, quantum, threads_W)

    def threads(self, worker: int) -> int:
        """Threads of a worker."""
        return 1 if self.threads_W is None else int(self.threads_W[worker])

    def clip(self, worker: int, batch: float) -> int:
        """The allowed batch nearest to `batch`: a multiple of the worker's smallest, or its largest.

        The smallest batch is a rung of the ladder, so its multiples need no padding.
        """
        lower, upper = int(self.lower_W[worker]), int(self.upper_W[worker])
        near = int(np.floor(batch / lower + 0.5)) * lower
        return upper if batch >= upper or near > upper else max(near, lower)

    def rungs(self, max_rows_W: np.ndarray | None = None) -> list[int]:
        """Ladder of microbatch sizes: the largest batch of each worker's thread, halved down to its smallest.

        `max_rows_W`: the largest microbatch that fits a worker's memory.
        """
        threads_W = np.ones(len(self.lower_W), np.int64) if self.threads_W is None else self.threads_W
        lower_W, top_W = self.lower_W // threads_W, self.upper_W // threads_W
        top_W = top_W if max_rows_W is None else np.minimum(top_W, max_rows_W)
        found = set()
        for lower, top in zip(lower_W, top_W, strict=True):
            size = max(int(top) // self.quantum, 1)
            while size * self.quantum > lower:
                found.add(size * self.quantum)
                size = -(-size // 2)
            found.add(int(min(lower, max(int(top), self.quantum))) // self.quantum * self.quantum)
        return sorted(found - {0})

    def by_kind(self, accelerator_W: np.ndarray) -> np.ndarray:
        """Initial batches as published (arXiv 2004.08771): CPUs start at their smallest, GPUs at their largest."""
        return np.where(accelerator_W, self.upper_W, self.lower_W)

    def by_speed(self, speed_W: np.ndarray, batch: int) -> np.ndarray:
        """Initial batches as shares of one batch in proportion to speed, so that all take about the same time."""
        share_W = np.asarray(speed_W, np.float64) / np.sum(speed_W) * batch
        return np.array([self.clip(worker, share) for worker, share in enumerate(share_W)], np.int64)


def adapted_batch(
    worker: int,
    batch_W: np.ndarray,
    updates_W: np.ndarray,
    bounds: BatchBounds,
    *,
    alpha: float = ALPHA,
    dead_zone: int = DEAD_ZONE,
    active_W: np.ndarray | None = None,
) -> int:
    """Adaptive Hogbatch: the next batch b_E of a free worker E, from the updates u made so far.

        u_E < min of the others - dead_zone:  b_E = max(b_E / alpha, bmin_E)     smaller batches, so more updates
        u_E > max of the others + dead_zone:  b_E = min(b_E alpha, bmax_E)

    Y. Ma, F. Rusu, arXiv 2004.08771, with alpha = 2. There the dead zone is 0, and a batch that settles between two
    sizes flips on up to two of three requests. Batches are multiples of the smallest, so they move by at least that.
    Only active workers are compared; a single worker keeps its batch. A CPU worker of T Hogwild threads makes T updates
    with a batch, one per thread, and all of them count.
    """
    others_W = np.ones(len(updates_W), bool) if active_W is None else np.array(active_W, bool)
    others_W[worker] = False
    now, mine, least = int(batch_W[worker]), float(updates_W[worker]), int(bounds.lower_W[worker])
    if not others_W.any():
        return now
    if mine < updates_W[others_W].min() - dead_zone:
        return bounds.clip(worker, min(now / alpha, now - least))
    if mine > updates_W[others_W].max() + dead_zone:
        return bounds.clip(worker, max(now * alpha, now + least))
    return now


def merge_weights(updates_W: np.ndarray, batch_W: np.ndarray) -> np.ndarray:
    """Adaptive SGD: the weight of replica i in the merge that ends a mega-batch.

        weight_i = u_i / sum u,  or  b_i / sum b  when all u are equal

    Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029. u_i counts the updates since the last merge.
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
    active_W: np.ndarray | None = None,
) -> np.ndarray:
    """Adaptive SGD: batches after a merge; workers with more updates get larger ones.

        b_i = clip(b_i + beta_i (u_i - mean u), bmin_i, bmax_i)

    Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029. The default beta_i is bmin_i / 2. Fractions are kept, because
    rounding would lose small steps. Inactive workers keep their batch and do not enter the mean.
    """
    updates_W = np.asarray(updates_W, np.float64)
    beta_W = bounds.lower_W / 2 if beta_W is None else np.asarray(beta_W, np.float64)
    here_W = np.ones(len(updates_W), bool) if active_W is None else active_W
    moved_W = batch_W + beta_W * (updates_W - updates_W[here_W].mean())
    return np.where(here_W, np.clip(moved_W, bounds.lower_W, bounds.upper_W), batch_W)


def gradient_scale(batch: float, reference: float, cap: float | None = SCALE_CAP) -> float:
    """The factor s_E = min(b_E / b_ref, cap) on a worker's gradient: few samples move the model less than many.

    Published (arXiv 2004.08771, 2110.07029) as a learning rate lr_E = lr b_E / b_ref. Without a cap, linear scaling
    diverges at large batches (16 times the reference at lr 0.2: within 31-95 updates).
    """
    if batch <= 0 or reference <= 0:
        raise ValueError(f"The rate is scaled by batch {batch} over reference {reference}: both must be above 0.")
    scale = batch / reference
    return scale if cap is None else min(scale, cap)


@dataclass(frozen=True)
class Rate:
    """The factors of an update: `gradient_scale` on the gradient, schedule(samples / step_size) on the update.

    A schedule inside the optimizer counts updates, whose number is not known in advance; this one counts steps of
    `step_size` samples.
    """

    reference: float
    cap: float | None = SCALE_CAP
    by_batch: bool = True
    schedule: Callable[[float], float] | None = None
    step_size: int = 1
    single_worker: bool = False  # reproduce sequential SGD

    def scale(self, span: Range, batch: int) -> float:
        """The factor on the gradient of a range taken for a batch.

        The short range that ends an epoch is scaled by its own size, so that a few samples do not move the model like a
        full batch. Sequential SGD does not scale it, nor does a single worker.
        """
        samples = batch if self.single_worker else span.count
        return gradient_scale(samples, self.reference, self.cap) if self.by_batch else 1.0

    def at(self, samples: int) -> float:
        """The factor on an update after `samples` samples."""
        return 1.0 if self.schedule is None else float(self.schedule(samples / self.step_size))
