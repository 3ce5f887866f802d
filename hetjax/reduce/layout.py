"""The layout of the vector that a step sums over all workers.

    large gradients | small gradients | model-state sums | loss, weight, count, metrics | one row of slots per worker

A worker writes only its own slots, so the sum also gathers the slots of all workers.

The vector is kept in PARTS: each large gradient in the buffer XLA wrote, and everything else in one last part. One
collective with several operands sums all parts. Copying large gradients into one buffer and out again took longer than
the sum itself (1.9 million parameters on 4 fake CPU devices: 37 ms instead of 15).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.reduce.finite import NONFINITE, nonfinite_level

Tree = Any

Parts = tuple[jax.Array, ...]
_LARGE = 2**14  # elements; copying a smaller array is cheaper than one more operand

SLOTS = ("time_us", "rows", "checksum", "stop", "save", "left", "step_us", "entry", "nonfinite_level", "bad_update")
HOST_SLOTS = SLOTS.index("nonfinite_level")  # slots before this one are written by the host
MANY = 2  # "two or more" batches left in a process
LEAVING = -1  # instead: the process leaves an elastic fleet, and wants to own nothing any more


@dataclass(frozen=True)
class MetricLayout:
    """The place of one metric: its sum, followed by its own weight if it has one.

    Attributes:
        name: Its name.
        shape: Shape of its sum.
        divisor: What the sum is divided by: the weight of the examples, their count, its own weight, or nothing.
        weight_shape: Shape of its own weight, which broadcasts to `shape`.
    """

    name: str
    shape: tuple[int, ...] = ()
    divisor: Literal["weight", "count", "own", "nothing"] = "weight"
    weight_shape: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Entries in the vector."""
        return math.prod(self.shape) + (math.prod(self.weight_shape) if self.divisor == "own" else 0)


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
    metric_weights: dict[str, jax.Array] = field(default_factory=dict)  # of metrics with a weight of their own


@dataclass(frozen=True)
class Layout:
    """Offsets into the vector for one model. Sums are kept in float32 or the widest parameter dtype."""

    grads: Tree  # of ShapeDtypeStruct; () in evaluation
    state_sums: Tree
    metrics: tuple[MetricLayout, ...]  # by name
    dtype: Any

    @classmethod
    def of(cls, grads: Tree, state_sums: Tree, metrics: Iterable[MetricLayout]) -> Layout:
        """The layout for gradients and state sums of these shapes."""
        dtypes = [leaf.dtype for leaf in jax.tree.leaves((grads, state_sums))]
        by_name = tuple(sorted(metrics, key=lambda metric: metric.name))
        return cls(grads, state_sums, by_name, jnp.result_type(jnp.float32, *dtypes))

    @cached_property
    def _large(self) -> list[bool]:
        return [math.prod(leaf.shape) >= _LARGE for leaf in jax.tree.leaves(self.grads)]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of a worker's parts, without slots."""
        large = [math.prod(x.shape) for x, big in zip(jax.tree.leaves(self.grads), self._large, strict=True) if big]
        state = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state_sums))
        return (*large, self._small_grads + state + self.values)

    @cached_property
    def values(self) -> int:
        """Number of entries for loss, weight, count and metrics."""
        return 3 + sum(metric.size for metric in self.metrics)

    @cached_property
    def _small_grads(self) -> int:
        return sum(
            math.prod(x.shape) for x, big in zip(jax.tree.leaves(self.grads), self._large, strict=True) if not big
        )

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Part, offset in it, and size of each gradient, in the order of the tree's leaves."""
        found, part, at = [], 0, 0
        for leaf, big in zip(jax.tree.leaves(self.grads), self._large, strict=True):
            size = math.prod(leaf.shape)
            found.append((part, 0, size) if big else (len(self.sizes) - 1, at, size))
            part, at = (part + 1, at) if big else (part, at + size)
        return found

    @cached_property
    def grad_sizes(self) -> tuple[int, ...]:
        """Entries of each part that are gradients; they come first."""
        return (*self.sizes[:-1], self._small_grads)

    def pack(self, sums: StepSums) -> Parts:
        """Sums as parts, without slots."""
        values = [sums.loss, sums.weight, sums.count]
        for metric in self.metrics:
            values.append(sums.metrics[metric.name])
            if metric.divisor == "own":
                values.append(sums.metric_weights[metric.name])
        grads = [jnp.ravel(leaf).astype(self.dtype) for leaf in jax.tree.leaves(sums.grads)]
        large = [leaf for leaf, big in zip(grads, self._large, strict=True) if big]
        small = [leaf for leaf, big in zip(grads, self._large, strict=True) if not big]
        rest = [jnp.ravel(leaf).astype(self.dtype) for leaf in jax.tree.leaves(sums.state_sums) + values]
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
        return StepSums(jax.tree.unflatten(tree, grads), state_sums, loss, weight, count, *self.metrics_at(rest[at:]))

    def metrics_at(self, values: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Sums of metrics, and the weights of those that have their own, from a vector that starts with them."""
        sums, weights, at = {}, {}, 0
        for metric in self.metrics:
            cut = at + math.prod(metric.shape)
            sums[metric.name] = values[at:cut].reshape(metric.shape)
            at += metric.size
            if metric.divisor == "own":
                weights[metric.name] = values[cut:at].reshape(metric.weight_shape)
        return sums, weights

    def tail(self, parts: Parts) -> jax.Array:
        """What the host reads of a step: everything after the gradients and model state."""
        return parts[-1][self.sizes[-1] - self.values :]


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


Value = float | np.ndarray  # of a metric


@dataclass(frozen=True)
class Means:
    """Sums of loss and metrics on the host, of one step or several, and their means."""

    loss_sum: float = 0.0
    weight: float = 0.0
    metric_sums: Mapping[str, Value] = field(default_factory=dict)
    metric_weights: Mapping[str, Value | None] = field(default_factory=dict)  # None: not divided

    def plus(self, other: Means) -> Means:
        """The sums over both."""
        sums, weights = dict(self.metric_sums), dict(self.metric_weights)
        for name, value in other.metric_sums.items():
            weight = other.metric_weights[name]
            sums[name] = sums[name] + value if name in sums else value
            weights[name] = weight if weight is None else weights.get(name, 0.0) + weight  # type: ignore[operator]
        return Means(self.loss_sum + other.loss_sum, self.weight + other.weight, sums, weights)

    @property
    def loss(self) -> float:
        """Mean loss, NaN without weight."""
        return self.loss_sum / self.weight if self.weight else math.nan

    @property
    def metrics(self) -> dict[str, Value]:
        """Means of metrics, and the sums of those that are sums; NaN without weight."""
        return {name: _mean(value, self.metric_weights[name]) for name, value in self.metric_sums.items()}


def _mean(total: Value, weight: Value | None) -> Value:
    if weight is None:
        return total
    if isinstance(total, float):
        return total / weight if weight else math.nan
    return np.divide(total, weight, out=np.full(total.shape, np.nan), where=np.not_equal(weight, 0))


@dataclass(frozen=True, kw_only=True)
class StepReport(Means):
    """The host's view of a finished step, read from the tail; identical on every process."""

    count: int
    times_W: np.ndarray  # seconds; 0 for a worker without samples, NaN if the step was not timed
    rows_W: np.ndarray
    checksums_W: np.ndarray
    stop: bool  # a process requested the end of training
    save: bool  # a process requested a checkpoint of the state after this step
    left_W: np.ndarray  # batches left in each worker's process: 0, 1, or MANY
    before_W: np.ndarray  # seconds of the whole step before this one, by the clock of each worker's host; NaN: untimed
    entry_W: np.ndarray  # generation that lets others into an elastic fleet, as each process knows it; 0: none
    nonfinite_W: np.ndarray  # workers whose loss or gradient was NaN or infinite
    bad_update_W: np.ndarray  # workers whose sums were finite but whose update was not

    @property
    def left_out(self) -> bool:
        """Whether the step had no effect because a value was NaN or infinite."""
        return bool(self.nonfinite_W.any() or self.bad_update_W.any())

    @classmethod
    def read(cls, layout: Layout, tail: np.ndarray, workers: int) -> StepReport:
        """Parse the tail of a step."""
        values, slots = tail[: -workers * len(SLOTS)], _table(tail, workers)
        sums, own = (
            {name: float(x) if x.ndim == 0 else np.asarray(x, np.float64) for name, x in part.items()}
            for part in layout.metrics_at(values[3:])
        )
        weight, count = float(values[1]), float(values[2])
        divisors: dict[str, Value | None] = {"weight": weight, "count": count, "nothing": None}
        slot = {name: np.asarray(slots[:, i], np.float64) for i, name in enumerate(SLOTS)}
        return cls(
            loss_sum=float(values[0]),
            weight=weight,
            count=round(count) if math.isfinite(count) else 0,
            metric_sums=sums,
            metric_weights={x.name: own[x.name] if x.divisor == "own" else divisors[x.divisor] for x in layout.metrics},
            times_W=np.where(slot["time_us"] < 0, np.nan, slot["time_us"] / 1e6),
            rows_W=slot["rows"].astype(np.int64),
            checksums_W=slot["checksum"].astype(np.int64),
            stop=bool(slot["stop"].any()),
            save=bool(slot["save"].any()),
            left_W=slot["left"].astype(np.int64),
            before_W=np.where(slot["step_us"] <= 0, np.nan, slot["step_us"] / 1e6),
            entry_W=slot["entry"].astype(np.int64),
            nonfinite_W=slot["nonfinite_level"] >= NONFINITE,
            bad_update_W=slot["bad_update"] > 0,
        )
