"""The layout of the vector that a step sums over all workers.

    large gradients | small gradients | model-state sums | loss, weight, count, metrics | one row of slots per worker

A worker writes only its own slots, so the sum also gathers the slots of all workers.

The vector is kept in PARTS: each large gradient in the buffer XLA wrote, and everything else in one last part. One
collective with several operands sums all parts. Copying large gradients into one buffer and out again took longer than
the sum itself (1.9 million parameters on 4 fake CPU devices: 37 ms instead of 15).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.reduce.finite import NONFINITE, nonfinite_level

Tree = Any

Parts = tuple[jax.Array, ...]
_LARGE = 2**14  # elements; copying a smaller array is cheaper than one more operand

SLOTS = ("time_us", "rows", "checksum", "stop", "save", "left", "nonfinite_level", "bad_update")
HOST_SLOTS = SLOTS.index("nonfinite_level")  # slots before this one are written by the host
MANY = 2  # "two or more" batches left in a process


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepSums:
    """Sums over the samples of a microbatch, a worker or a step."""

    grads: Tree
    state_sums: Tree
    loss: jax.Array
    weight: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array]


@dataclass(frozen=True)
class Layout:
    """Offsets into the vector for one model. Sums are kept in float32 or the widest parameter dtype."""

    grads: Tree  # of ShapeDtypeStruct; () in evaluation
    state_sums: Tree
    metrics: tuple[str, ...]
    dtype: Any

    @classmethod
    def of(cls, grads: Tree, state_sums: Tree, metrics: tuple[str, ...]) -> Layout:
        """The layout for gradients and state sums of these shapes."""
        dtypes = [leaf.dtype for leaf in jax.tree.leaves((grads, state_sums))]
        return cls(grads, state_sums, tuple(sorted(metrics)), jnp.result_type(jnp.float32, *dtypes))

    @cached_property
    def _large(self) -> list[bool]:
        return [math.prod(leaf.shape) >= _LARGE for leaf in jax.tree.leaves(self.grads)]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of a worker's parts, without slots."""
        large = [math.prod(x.shape) for x, big in zip(jax.tree.leaves(self.grads), self._large, strict=True) if big]
        state = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state_sums))
        return (*large, self._small_grads + state + 3 + len(self.metrics))

    @cached_property
    def _small_grads(self) -> int:
        return sum(
            math.prod(x.shape) for x, big in zip(jax.tree.leaves(self.grads), self._large, strict=True) if not big
        )

    def pack(self, sums: StepSums) -> Parts:
        """Sums as parts, without slots."""
        scalars = [sums.loss, sums.weight, sums.count, *(sums.metrics[name] for name in self.metrics)]
        grads = [jnp.ravel(leaf).astype(self.dtype) for leaf in jax.tree.leaves(sums.grads)]
        large = [leaf for leaf, big in zip(grads, self._large, strict=True) if big]
        small = [leaf for leaf, big in zip(grads, self._large, strict=True) if not big]
        rest = [jnp.ravel(leaf).astype(self.dtype) for leaf in jax.tree.leaves(sums.state_sums) + scalars]
        return (*large, jnp.concatenate(small + rest))

    def outgoing(self, parts: Parts, slots: jax.Array, worker: jax.Array | int, workers: int) -> Parts:
        """Append a worker's row of slots (the host's `slots` and its nonfinite level) in a table of zeros."""
        own = jnp.zeros(len(SLOTS), self.dtype).at[:HOST_SLOTS].set(slots.astype(self.dtype))
        own = own.at[SLOTS.index("nonfinite_level")].set(nonfinite_level(parts).astype(self.dtype))
        table = jnp.zeros((workers, len(SLOTS)), self.dtype).at[worker].set(own)
        return (*parts[:-1], jnp.concatenate([parts[-1], table.ravel()]))

    def weighted(self, parts: Parts, weight: jax.Array) -> Parts:
        """Multiply the gradients in a worker's parts by `weight`."""
        *large, rest = parts
        weight, cut = weight.astype(self.dtype), self._small_grads
        return (*(part * weight for part in large), jnp.concatenate([rest[:cut] * weight, rest[cut:]]))

    def unpack(self, parts: Parts) -> StepSums:
        """The inverse of `pack`, on summed parts."""
        *large, rest = parts
        at = 0

        def read(shape: tuple[int, ...]) -> jax.Array:
            nonlocal at
            at += math.prod(shape)
            return rest[at - math.prod(shape) : at].reshape(shape)

        grads, tree = jax.tree.flatten(self.grads)
        whole = iter(large)
        grads = [
            next(whole).reshape(x.shape) if big else read(x.shape) for x, big in zip(grads, self._large, strict=True)
        ]
        state_sums = jax.tree.map(lambda x: read(x.shape), self.state_sums)
        loss, weight, count = (read(()) for _ in range(3))
        return StepSums(jax.tree.unflatten(tree, grads), state_sums, loss, weight, count, self.metrics_at(rest[at:]))

    def metrics_at(self, values: Any) -> dict[str, Any]:
        """Metrics by name from a vector that starts with them."""
        return {name: values[i] for i, name in enumerate(self.metrics)}

    def tail(self, parts: Parts) -> jax.Array:
        """What the host reads of a step: everything after the gradients and model state."""
        return parts[-1][self.sizes[-1] - 3 - len(self.metrics) :]


def _table(tail: Any, workers: int) -> Any:
    """The slots [workers, slots] at the end of the summed vector."""
    return tail[-workers * len(SLOTS) :].reshape(workers, len(SLOTS))


def level_of_all(tail: jax.Array, workers: int) -> jax.Array:
    """The sum of all workers' nonfinite levels: NONFINITE or more if the sums of any worker were not finite."""
    return jnp.sum(_table(tail, workers)[:, SLOTS.index("nonfinite_level")])


def with_bad_update(tail: jax.Array, workers: int, bad: jax.Array) -> jax.Array:
    """Write the slot `bad_update`, which is known only after the sum; `bad`: one flag, or one per worker."""
    table = _table(tail, workers).at[:, SLOTS.index("bad_update")].set(bad.astype(tail.dtype))
    return jnp.concatenate([tail[: -table.size], table.ravel()])


@dataclass(frozen=True)
class StepReport:
    """The host's view of a finished step, read from the tail; identical on every process."""

    loss_sum: float
    weight: float
    count: int
    metric_sums: dict[str, float]
    times_W: np.ndarray  # seconds; 0 for a worker without samples, NaN if the step was not timed
    rows_W: np.ndarray
    checksums_W: np.ndarray
    stop: bool  # a process requested the end of training
    save: bool  # a process requested a checkpoint of the state after this step
    left_W: np.ndarray  # batches left in each worker's process: 0, 1, or MANY
    nonfinite_W: np.ndarray  # workers whose loss or gradient was NaN or infinite
    bad_update_W: np.ndarray  # workers whose sums were finite but whose update was not

    @property
    def loss(self) -> float:
        """Mean loss, NaN without weight."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        """Mean metrics, NaN without weight."""
        return {name: value / self.weight if self.weight else math.nan for name, value in self.metric_sums.items()}

    @property
    def left_out(self) -> bool:
        """Whether the step had no effect because a value was NaN or infinite."""
        return bool(self.nonfinite_W.any() or self.bad_update_W.any())

    @classmethod
    def read(cls, layout: Layout, tail: np.ndarray, workers: int) -> StepReport:
        """Parse the tail of a step."""
        scalars, slots = tail[: -workers * len(SLOTS)], _table(tail, workers)
        slot = {name: np.asarray(slots[:, i], np.float64) for i, name in enumerate(SLOTS)}
        return cls(
            loss_sum=float(scalars[0]),
            weight=float(scalars[1]),
            count=round(float(scalars[2])) if math.isfinite(scalars[2]) else 0,
            metric_sums={name: float(value) for name, value in layout.metrics_at(scalars[3:]).items()},
            times_W=np.where(slot["time_us"] < 0, np.nan, slot["time_us"] / 1e6),
            rows_W=slot["rows"].astype(np.int64),
            checksums_W=slot["checksum"].astype(np.int64),
            stop=bool(slot["stop"].any()),
            save=bool(slot["save"].any()),
            left_W=slot["left"].astype(np.int64),
            nonfinite_W=slot["nonfinite_level"] >= NONFINITE,
            bad_update_W=slot["bad_update"] > 0,
        )
