"""An exchange between nodes: started by all of them, received when it is due. Here for the nodes of one process.

What nodes tell each other with every exchange: a row of numbers each, the same table on all nodes.

An exchange between nodes: started by all of them, received when it is due. Here for the nodes of one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.devices.compile import expected
from hetjax.sync.daso.averaging import NODE, Leaves, bytes_sent, mean, short_mean, total


@dataclass
class NodeMessage:
    """What one node has to say; float64, so that sums and counters travel exactly."""

    batch: float = 0.0  # samples it has in one step, a mean since it sent last
    made: float = 0.0  # since it sent last: steps with samples,
    taken: float = 0.0  # and the samples in them
    steps: float = 0.0  # those of them with a valid timing,
    samples: float = 0.0  # the samples in these,
    seconds: float = 0.0  # and how long they took
    carried: float = 0.0  # seconds that the last exchange it did not wait for was under way
    loss: float = 0.0  # sum over the epoch so far
    weight: float = 0.0
    stop: float = 0.0  # somebody asked for the end
    save: float = 0.0  # somebody asked for a checkpoint
    checksum: float = 0.0  # of what all nodes have to agree on

    def step(self, samples: int, seconds: float | None) -> None:
        """Count one step; `seconds` is None where it was not timed."""
        if samples == 0:
            return
        self.made, self.taken = self.made + 1, self.taken + samples
        self.batch = self.taken / self.made
        if seconds is not None:
            self.steps, self.samples, self.seconds = self.steps + 1, self.samples + samples, self.seconds + seconds

    def sent(self) -> None:
        """Begin anew what is counted from one exchange to the next."""
        self.made = self.taken = self.steps = self.samples = self.seconds = self.stop = self.save = 0.0

    def array(self) -> np.ndarray:
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, row: np.ndarray) -> NodeMessage:
        return cls(*(float(value) for value in row))


def steps_under_way(said_N: Sequence[NodeMessage]) -> int:
    """How many steps of the fastest node an exchange takes; 0 if that is not known."""
    times = [notes.seconds / notes.steps for notes in said_N if notes.steps]
    carried = sum(notes.carried for notes in said_N) / len(said_N)
    return math.ceil(carried / min(times)) if times and min(times) > 0 else 0


def as_words(row: np.ndarray) -> np.ndarray:
    """Float64 as 32-bit words, which JAX moves without x64."""
    return np.ascontiguousarray(row, np.float64).view(np.uint32)


def from_words(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words, np.uint32).view(np.float64)


KINDS = ("total", "mean", "short")  # a sum, a weighted mean, and one with 16 bits a number on the wire


def weight_type() -> Any:
    """As exact as JAX allows at the moment."""
    return jax.dtypes.canonicalize_dtype(np.float64)


@dataclass(frozen=True)
class Arrived:
    """The result for every node of this process, which is the same, and what all nodes had to say."""

    leaves: Leaves  # with a leading axis of one
    table: np.ndarray  # [nodes, notes]
    seconds: float = 0.0  # how long it was under way
    sent: int = 0  # bytes that one node sends for it


class PendingExchange(Protocol):
    @property
    def done(self) -> bool:
        """Whether it has arrived."""
        ...

    def result(self) -> Arrived:
        """Waits until it has arrived, and no longer than the limit."""
        ...


class Exchange(Protocol):
    """`start` returns at once. Exchanges arrive in the order in which they were started."""

    nodes: int  # in all

    def prepare(self, kind: str, shapes: Leaves) -> None:
        """Compile for leaves of these shapes, before the first step. All processes have to call this."""
        ...

    def rebase(self, leaves: Leaves) -> None:
        """The mean that all nodes have before the first exchange of kind 'short'. Nothing is under way then."""
        ...

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], notes_n: np.ndarray
    ) -> PendingExchange:
        """Leaves [1, ...] on the first worker of each node of this process; they must not change until they arrive."""
        ...

    def close(self) -> None:
        """Nothing more will be started."""
        ...


def on_node(kind: str, nodes: int, leaves: Leaves, weight: jax.Array, before: Leaves) -> Leaves:
    """What one node computes, on the axis of nodes."""
    if kind == "total":
        return total(leaves)
    if kind == "mean":
        return mean(leaves, weight)
    return short_mean(leaves, weight, before, nodes)


class Stacked:
    """All nodes are in this process: the same sums as across processes, over an axis of one device's array."""

    def __init__(self, leads: Sequence[jax.Device]):
        """leads: the first worker of each node."""
        self.nodes, self.hub = len(leads), leads[0]
        self._before: Leaves = []
        self._programs = {kind: jax.jit(partial(_over_stack, kind, self.nodes)) for kind in KINDS}

    def prepare(self, kind: str, shapes: Leaves) -> None:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        self.rebase(zeros)
        self.start(kind, [zeros] * self.nodes, [1.0] * self.nodes, np.zeros((self.nodes, 1)))

    def rebase(self, leaves: Leaves) -> None:
        self._before = jax.device_put(leaves, self.hub)

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], notes_n: np.ndarray
    ) -> PendingExchange:
        here = [jax.device_put(leaves, self.hub) for leaves in leaves_n]
        weight_N = jax.device_put(np.asarray(weight_n, weight_type()), self.hub)
        with expected():
            found = self._programs[kind](here, weight_N, self._before if kind == "short" else [])
        if kind == "short":
            self._before = found
        return _Here(Arrived(found, np.asarray(notes_n), sent=bytes_sent(kind, leaves_n[0], self.nodes)))

    def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True)
class _Here:
    arrived: Arrived
    done: bool = True

    def result(self) -> Arrived:
        return self.arrived


def _over_stack(kind: str, nodes: int, leaves_n: list[Leaves], weight_N: jax.Array, before: Leaves) -> Leaves:
    stacked = [jnp.stack(parts) for parts in zip(*leaves_n, strict=True)]
    over_nodes = jax.vmap(partial(on_node, kind, nodes), in_axes=(0, 0, None), axis_name=NODE)
    return [x[0] for x in over_nodes(stacked, weight_N, before)]
