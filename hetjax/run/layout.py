"""The one flat vector that a step sums over all workers: what lies where.

    gradient sums | model-state sums | loss, weight, count, metrics | slots of worker 0 | slots of worker 1 | ...

A worker writes only its own slots, so the sum over workers is also a gather of the slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = Any

SLOTS = ("time_us", "rows", "checksum", "stop", "nonfinite")  # all but the last are written by the host
HOST_SLOTS = len(SLOTS) - 1


@dataclass(frozen=True)
class Sums:
    """Sums over samples: of one block of rows, of a worker, or of the whole step."""

    grads: Tree
    state_sums: Tree
    loss: jax.Array
    weight: jax.Array
    count: jax.Array
    metrics: dict[str, jax.Array]


@dataclass(frozen=True)
class Layout:
    """Offsets into the flat vector for one model. Sums are kept in float32 or the widest parameter type."""

    grads: Tree  # of ShapeDtypeStruct; () in evaluation
    state_sums: Tree
    metrics: tuple[str, ...]
    dtype: Any

    @classmethod
    def of(cls, grads: Tree, state_sums: Tree, metrics: tuple[str, ...]) -> Layout:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves((grads, state_sums))]
        return cls(grads, state_sums, tuple(sorted(metrics)), jnp.result_type(jnp.float32, *dtypes))

    @property
    def size(self) -> int:
        """Length of a worker's own part, without the slots."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves((self.grads, self.state_sums))) + 3 + len(self.metrics)

    @property
    def grad_size(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.grads))

    def pack(self, sums: Sums) -> jax.Array:
        scalars = [sums.loss, sums.weight, sums.count, *(sums.metrics[name] for name in self.metrics)]
        parts = jax.tree.leaves((sums.grads, sums.state_sums)) + scalars
        return jnp.concatenate([jnp.ravel(part).astype(self.dtype) for part in parts])

    def unpack(self, flat: jax.Array) -> Sums:
        leaves, tree = jax.tree.flatten((self.grads, self.state_sums))
        at, parts = 0, []
        for leaf in leaves:
            size = math.prod(leaf.shape)
            parts.append(flat[at : at + size].reshape(leaf.shape))
            at += size
        grads, state_sums = jax.tree.unflatten(tree, parts)
        return Sums(grads, state_sums, flat[at], flat[at + 1], flat[at + 2], self.metrics_at(flat[at + 3 :]))

    def metrics_at(self, values: Any) -> dict[str, Any]:
        return {name: values[i] for i, name in enumerate(self.metrics)}

    def tail(self, total: jax.Array) -> jax.Array:
        """What the host wants to see of a summed vector: everything behind the gradients and the model state."""
        return total[self.size - 3 - len(self.metrics) :]

    def with_slots(self, flat: jax.Array, host: jax.Array, worker: jax.Array | int, workers: int) -> jax.Array:
        """A worker's vector as it enters the sum: its part, and its own slots among zeros."""
        nonfinite = jnp.logical_not(jnp.isfinite(flat).all()).astype(self.dtype)
        own = jnp.concatenate([host.astype(self.dtype), nonfinite[None]])
        slots = jnp.zeros((workers, len(SLOTS)), self.dtype).at[worker].set(own)
        return jnp.concatenate([flat, slots.ravel()])


@dataclass(frozen=True)
class Report:
    """The host's view of a finished step, read from the tail of the summed vector. The same on every process."""

    loss_sum: float
    weight: float
    count: int
    metric_sums: dict[str, float]
    times_W: np.ndarray  # seconds; zero where a worker had no samples, NaN where a step was not timed
    rows_W: np.ndarray
    checksums_W: np.ndarray
    stop: bool
    nonfinite_W: np.ndarray

    @property
    def loss(self) -> float:
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value / self.weight if self.weight else math.nan for name, value in self.metric_sums.items()}

    @classmethod
    def read(cls, layout: Layout, tail: np.ndarray, workers: int) -> Report:
        scalars, slots = tail[: -workers * len(SLOTS)], tail[-workers * len(SLOTS) :].reshape(workers, len(SLOTS))
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
            nonfinite_W=slot["nonfinite"] > 0,
        )
