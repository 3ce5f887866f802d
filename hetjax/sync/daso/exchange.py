"""An exchange between nodes: started by all of them, received when it is due. Here for the nodes of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hetjax.devices.compiles import expected
from hetjax.sync.daso import mean
from hetjax.sync.daso.mean import NODE, Leaves

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


class Flight(Protocol):
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

    def start(self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], notes_n: np.ndarray) -> Flight:
        """Leaves [1, ...] on the first worker of each node of this process; they must not change until they arrive."""
        ...

    def close(self) -> None:
        """Nothing more will be started."""
        ...


def on_node(kind: str, nodes: int, leaves: Leaves, weight: jax.Array, before: Leaves) -> Leaves:
    """What one node computes, on the axis of nodes."""
    if kind == "total":
        return mean.total(leaves)
    if kind == "mean":
        return mean.mean(leaves, weight)
    return mean.short_mean(leaves, weight, before, nodes)


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

    def start(self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], notes_n: np.ndarray) -> Flight:
        here = [jax.device_put(leaves, self.hub) for leaves in leaves_n]
        weight_N = jax.device_put(np.asarray(weight_n, weight_type()), self.hub)
        with expected():
            found = self._programs[kind](here, weight_N, self._before if kind == "short" else [])
        if kind == "short":
            self._before = found
        return _Here(Arrived(found, np.asarray(notes_n), sent=mean.bytes_sent(kind, leaves_n[0], self.nodes)))

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
