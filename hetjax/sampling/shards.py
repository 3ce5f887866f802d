"""Samplers that give every worker its own shard: in proportion to its share and cut every epoch, or a fixed block.

The default is the global order (order.py), where any sample may go to any worker. The published methods shard instead:
DBS (arXiv 2007.11831) takes int(p_i D) samples of a fixed permutation, which drops some; dynamic partition (arXiv
2110.08941) takes prefixes, which overlap; RCD-SGD (arXiv 2211.00839) cuts blocks once. Here every sample is in exactly
one shard, and all workers finish the epoch in the same number of steps.
"""

from __future__ import annotations

import base64
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from hetjax.planning.controllers.base import Plan
from hetjax.planning.rounding import round_to_total
from hetjax.sampling.order import PlanFn, Sampler, Span, check_same_samples, permute

_GOLDEN = 0x9E3779B97F4A7C15  # odd, so that its multiples are distinct seeds
Unread = Callable[[np.ndarray], np.ndarray]  # selects the samples not yet read in this epoch


@dataclass(frozen=True)
class Shards:
    """One epoch's shards: worker i owns order_D[start_W1[i] : start_W1[i + 1]] and reads it in `steps` batches."""

    order_D: np.ndarray
    start_W1: np.ndarray
    steps: int

    @property
    def sizes_W(self) -> np.ndarray:
        return np.diff(self.start_W1)

    def counts(self, step: int) -> np.ndarray:
        """Each worker's count in this step; over all steps they sum to its shard."""
        return self._read(step + 1) - self._read(step)

    def batch(self, worker: int, step: int) -> np.ndarray:
        """The samples that a worker reads in this step."""
        first, last = self._read(step)[worker], self._read(step + 1)[worker]
        return self.order_D[self.start_W1[worker] + first : self.start_W1[worker] + last]

    def _read(self, steps: int) -> np.ndarray:
        """Samples read in the first `steps` steps, spread evenly: batches differ by at most one sample."""
        return (self.sizes_W * steps) // self.steps


def proportional_shards(order_D: np.ndarray, share_W: np.ndarray, batch: int) -> Shards:
    """Shard i has p_i D samples, consecutive in the given order; steps = ceil(D / batch).

    Each worker reads its share of the batch, p_i D / steps samples per step, rounded up or down.
    """
    order_D, share_W = np.asarray(order_D), np.asarray(share_W, np.float64)
    if not (np.all(share_W >= 0) and 0 < share_W.sum() < np.inf):
        raise ValueError(
            f"The shares are {share_W.tolist()}; expected one number per worker, zero or more, not all zero."
        )
    if batch < 1:
        raise ValueError(f"The batch is {batch}; expected at least one sample per step.")
    sizes_W = round_to_total(len(order_D) * (share_W / share_W.sum()), len(order_D))
    start_W1 = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes_W)])
    return Shards(order_D, start_W1, max(-(-len(order_D) // batch), 1))


class ShardedSampler(ABC):
    """Base of samplers whose workers read their own shards.

    Positions run through the steps of an epoch, and within a step through the workers, so that everything else works
    as with the global order. An epoch has as many steps as there, of even size instead of a short last one.

    A run resumed inside an epoch keeps its shards if they still fit. Otherwise, for instance with another number of
    workers, the samples not yet read are cut again. Either way every sample is read once per epoch.
    """

    partition: ClassVar[str]

    def __init__(self, size: int, batch: int, seed: int = 0):
        self.order = Sampler(size, batch, seed)
        self.size, self.batch, self.seed = size, batch, seed
        self._epoch, self._first = -1, 0  # the epoch cut last, and the position from which it was cut
        self._read_D: np.ndarray | None = None  # which samples were read before that position
        self._resumed: Mapping[str, Any] | None = None

    def even_step(self, samples: int) -> int:
        """Largest global batch when `samples` are divided evenly into steps; at most `batch`."""
        return -(-samples // self.steps_for(samples))

    def steps_for(self, samples: int) -> int:
        """Number of steps that `samples` take."""
        return max(-(-samples // self.batch), 1)

    @abstractmethod
    def shards(self, epoch: int, unread: Unread, plan: Plan) -> Shards:
        """Cut the unread samples of an epoch."""

    @abstractmethod
    def plan(self, epoch: int, samples: int, plan_fn: PlanFn) -> Plan:
        """The plan that a cut of `samples` samples follows; each step then replaces its counts."""

    @abstractmethod
    def cut_dict(self, plan: Plan) -> dict[str, Any]:
        """What identifies this cut, as plain JSON values."""

    @abstractmethod
    def same_cut(self, saved: Mapping[str, Any], plan: Plan) -> Plan | None:
        """The plan of a cut saved by `cut_dict`; None if it does not fit the present workers."""

    def next(self, cursor: int, plan_fn: PlanFn) -> tuple[Span, Plan]:
        """Return the step at the cursor, and its plan with counts from the epoch's shards."""
        epoch, start = divmod(cursor, self.size)
        if epoch != self._epoch:
            self._begin(epoch, start, plan_fn)
        k = int(np.searchsorted(self._starts_S, start))
        if k == len(self._starts_S) or self._starts_S[k] != start:
            raise ValueError(
                f"Position {start} of epoch {epoch} is inside a step of the present shards: the shares have changed "
                "since the run stopped. Resume from the end of an epoch, or use partition='global'."
            )
        counts_W = self._counts_SxW[k]
        step = Span(epoch, start, start + int(counts_W.sum()))
        return step, replace(self._plan, counts_W=counts_W, changed=self._plan.changed and k == 0)

    def _begin(self, epoch: int, start: int, plan_fn: PlanFn) -> None:
        """Cut an epoch that starts, or is resumed, at this position."""
        plan, saved = self.plan(epoch, self.size - start, plan_fn), self._resumed
        if start > 0 and saved is not None and saved.get("epoch") == epoch:
            if (same := self.same_cut(saved["cut"], plan)) is not None:
                self._cut(epoch, saved["first"], _decode_mask(saved["read_before"], self.size), same)
            else:
                self._cut(epoch, start, _decode_mask(saved["read"], self.size), plan)
        elif start > 0 and saved is not None and saved["partition"] == Sampler.partition:
            read_D = np.zeros(self.size, bool)
            read_D[self.order.indices(epoch, 0, start)] = True
            self._cut(epoch, start, read_D, plan)
        else:
            self._cut(epoch, 0, None, plan)

    def _cut(self, epoch: int, first: int, read_D: np.ndarray | None, plan: Plan) -> None:
        unread = (lambda samples: samples) if read_D is None else (lambda samples: samples[~read_D[samples]])
        shards = self.shards(epoch, unread, plan)
        batches = [shards.batch(i, k) for k in range(shards.steps) for i in range(len(shards.sizes_W))]
        counts_SxW = np.array([shards.counts(k) for k in range(shards.steps)])
        counts_SxW = counts_SxW[counts_SxW.any(axis=1)]  # shards of fewer samples than steps may leave a step empty
        self._epoch, self._first, self._read_D = epoch, first, read_D
        self._plan, self._counts_SxW = plan, counts_SxW
        self._arranged = np.concatenate(batches)
        self._starts_S = first + np.cumsum([0, *counts_SxW.sum(axis=1)])[:-1]

    def ahead(self, cursor: int) -> Span | None:
        """Predict a step that is not planned yet, to prefetch it; None beyond the epoch cut last."""
        epoch, start = divmod(cursor, self.size)
        following = self._starts_S[self._starts_S > start]
        return Span(epoch, start, int(min([*following, self.size]))) if epoch == self._epoch else None

    def steps_between(self, cursor: int, end: int) -> int:
        return self.order.steps_between(cursor, end)

    def samples_in(self, steps: int) -> int:
        """Number of samples in the whole epochs of the first `steps` steps of training: shards are cut per epoch."""
        return steps // self.steps_for(self.size) * self.size

    def end_of(self, cursor: int, steps: int) -> int:
        """Upper bound of the cursor after `steps` more steps, whose sizes depend on the shards."""
        return cursor + steps * self.batch

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Indices of the samples at positions [start, stop) of the epoch cut last."""
        return self._arranged[start - self._first : stop - self._first]

    def state_dict(self, cursor: int) -> dict[str, Any]:
        """How the cursor's epoch was cut and which samples were read, as plain JSON values."""
        base = {"partition": self.partition, "samples": self.size}
        epoch, start = divmod(cursor, self.size)
        if epoch != self._epoch or start == 0:
            return base
        read_D = np.zeros(self.size, bool) if self._read_D is None else self._read_D.copy()
        read_D[self.indices(epoch, self._first, start)] = True
        return base | {
            "epoch": epoch,
            "first": self._first,
            "read_before": _encode_mask(self._read_D),
            "read": _encode_mask(read_D),
            "cut": self.cut_dict(self._plan),
        }

    def load_state_dict(self, saved: Mapping[str, Any], cursor: int) -> None:
        """Resume, even inside an epoch that was started with another partition."""
        check_same_samples(saved, self.size)
        self._resumed = saved


class ProportionalSampler(ShardedSampler):
    """The partition "proportional": the plan at the start of an epoch sets the shares of the whole epoch."""

    partition = "proportional"

    def plan(self, epoch: int, samples: int, plan_fn: PlanFn) -> Plan:
        return plan_fn(self.even_step(samples), epoch)

    def shards(self, epoch: int, unread: Unread, plan: Plan) -> Shards:
        return proportional_shards(unread(self.order.indices(epoch, 0, self.size)), plan.counts_W, self.batch)

    def cut_dict(self, plan: Plan) -> dict[str, Any]:
        weights = None if plan.weights_W is None else plan.weights_W.tolist()  # at these counts: the saved format
        return {"counts": plan.counts_W.tolist(), "weights": weights}

    def same_cut(self, saved: Mapping[str, Any], plan: Plan) -> Plan | None:
        if len(saved.get("counts", ())) != len(plan.counts_W):
            return None
        counts_W, weights = np.array(saved["counts"], np.int64), saved["weights"]
        mean_weights_W = None if weights is None else np.array(weights) * counts_W / counts_W.sum()
        return Plan(counts_W, reason="shards as before", mean_weights_W=mean_weights_W)


class BlockSampler(ShardedSampler):
    """Fixed blocks: a worker reads the same samples every epoch, in an order drawn from (seed, epoch, worker).

    Blocks may be of any kind, as long as they hold every sample once. Their sizes alone set the counts; the controller
    is not used.
    """

    partition = "blocks"

    def __init__(self, blocks: Sequence[np.ndarray], batch: int, seed: int = 0):
        self.blocks = [np.asarray(block, np.int64) for block in blocks]
        every_D = np.concatenate(self.blocks) if self.blocks else np.zeros(0, np.int64)
        super().__init__(len(every_D), batch, seed)
        if not np.array_equal(np.sort(every_D, kind="stable"), np.arange(self.size)):
            raise ValueError(
                f"The blocks hold {self.size:,} indices, but not each of 0 to {self.size - 1:,} once: every sample "
                "has to be in exactly one block."
            )

    def plan(self, epoch: int, samples: int, plan_fn: PlanFn) -> Plan:
        return Plan(np.array([len(block) for block in self.blocks]), reason="blocks of the partition")

    def shards(self, epoch: int, unread: Unread, plan: Plan) -> Shards:
        unread_w = [unread(self._in_order(worker, epoch)) for worker in range(len(self.blocks))]
        start_W1 = np.cumsum([0, *map(len, unread_w)])
        return Shards(np.concatenate(unread_w), start_W1, self.steps_for(int(start_W1[-1])))

    def cut_dict(self, plan: Plan) -> dict[str, Any]:
        """A checksum of the blocks."""
        owner_D = np.empty(self.size, "<i8")
        for worker, block in enumerate(self.blocks):
            owner_D[block] = worker
        return {"blocks": zlib.crc32(owner_D.tobytes())}

    def same_cut(self, saved: Mapping[str, Any], plan: Plan) -> Plan | None:
        return plan if saved == self.cut_dict(plan) else None

    def _in_order(self, worker: int, epoch: int) -> np.ndarray:
        block = self.blocks[worker]
        own = permute(np.arange(len(block)), len(block), self.seed + (worker + 1) * _GOLDEN, epoch)
        return block[own]


def _encode_mask(mask_D: np.ndarray | None) -> str | None:
    """A mask of samples as a compact string."""
    return None if mask_D is None else base64.b64encode(np.packbits(mask_D).tobytes()).decode()


def _decode_mask(text: str | None, size: int) -> np.ndarray | None:
    if text is None:
        return None
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=size).astype(bool)
