"""Which samples a worker gets: disjoint shards that follow the shares, cut anew every epoch.

The default of training is the global order, where the split does not decide who sees what. The published methods give
every worker a shard of its own; these are their rules with the errors taken out: DBS (arXiv 2007.11831) cuts int(p_i D)
of a fixed permutation, dynamic partition (arXiv 2110.08941) overlapping prefixes. Here every sample is in exactly one
shard, and all workers finish the epoch in the same number of steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shards:
    """One epoch's cut of `order_D`: worker i owns order_D[start_W1[i] : start_W1[i + 1]], read in `steps` batches."""

    order_D: np.ndarray
    start_W1: np.ndarray
    steps: int

    @property
    def sizes_W(self) -> np.ndarray:
        return np.diff(self.start_W1)

    def counts(self, step: int) -> np.ndarray:
        """How many samples each worker reads in this step; over all steps they sum to its shard."""
        return self._read(step + 1) - self._read(step)

    def batch(self, worker: int, step: int) -> np.ndarray:
        """The samples of a worker in this step."""
        first, last = self._read(step)[worker], self._read(step + 1)[worker]
        return self.order_D[self.start_W1[worker] + first : self.start_W1[worker] + last]

    def _read(self, steps: int) -> np.ndarray:
        """Samples read before a step: the shard spread evenly, so that batches differ by one sample at most."""
        return (self.sizes_W * steps) // self.steps


def proportional_shards(order_D: np.ndarray, share_W: np.ndarray, batch: int) -> Shards:
    """Shard i has p_i D samples by largest remainder, consecutive in the given order; steps = ceil(D / batch).

    Each worker then reads p_i D / steps samples a step, one more or less: its share of the batch. Cut again every
    epoch with that epoch's order and shares.
    """
    order_D, share_W = np.asarray(order_D), np.asarray(share_W, np.float64)
    if not (np.all(share_W >= 0) and 0 < share_W.sum() < np.inf):
        raise ValueError(
            f"The shares are {share_W.tolist()}; expected one number per worker, zero or more, not all zero."
        )
    if batch < 1:
        raise ValueError(f"The batch is {batch}; expected at least one sample a step.")
    ideal_W = len(order_D) * (share_W / share_W.sum())
    sizes_W = np.floor(ideal_W).astype(np.int64)
    missing = len(order_D) - int(sizes_W.sum())
    sizes_W[np.argsort(-(ideal_W - sizes_W), kind="stable")[:missing]] += 1
    start_W1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes_W)])
    return Shards(order_D, start_W1, max(-(-len(order_D) // batch), 1))
