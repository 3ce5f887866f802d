"""Exchanges between nodes: the interface, the message that travels with each, and the form for nodes of one process.

An exchange is started by all nodes and received when it is due.
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
from hetjax.sync.daso.averaging import NODE, Leaves, bytes_sent, compressed_mean, compressed_total, mean, total

# A sum and a weighted mean, each also with 16 bits per number on the wire.
KINDS = ("total", "compressed-total", "mean", "compressed")


@dataclass
class NodeMessage:
    """What one node reports with an exchange: a row of float64, so that sums and counters travel exactly.

    All nodes receive the same table of rows. Checkpoints hold these rows: keep the order of the fields.
    """

    batch: float = 0.0  # samples per step, averaged since the last exchange
    steps: float = 0.0  # since the last exchange: steps with samples,
    samples: float = 0.0  # and the samples in them
    timed_steps: float = 0.0  # those of these steps with a valid timing,
    timed_samples: float = 0.0  # the samples in them,
    timed_seconds: float = 0.0  # and their duration
    exchange_seconds: float = 0.0  # duration of the last exchange that the node did not block on
    loss: float = 0.0  # sum over the epoch so far
    weight: float = 0.0  # of that sum
    stop: float = 0.0  # the end of training was requested
    save: float = 0.0  # a checkpoint was requested
    checksum: float = 0.0  # of what all nodes have to agree on

    def count_step(self, samples: int, seconds: float | None) -> None:
        """Count one step; `seconds` is None if it was not timed."""
        if samples == 0:
            return
        self.steps, self.samples = self.steps + 1, self.samples + samples
        self.batch = self.samples / self.steps
        if seconds is not None:
            self.timed_steps, self.timed_samples = self.timed_steps + 1, self.timed_samples + samples
            self.timed_seconds += seconds

    def reset(self) -> None:
        """Clear what is counted from one exchange to the next."""
        self.steps = self.samples = self.timed_steps = self.timed_samples = self.timed_seconds = 0.0
        self.stop = self.save = 0.0

    def array(self) -> np.ndarray:
        """The message as a row of float64."""
        return np.array(astuple(self), np.float64)

    @classmethod
    def of(cls, row: np.ndarray) -> NodeMessage:
        """The message of an `array`."""
        return cls(*(float(value) for value in row))


def exchange_steps(message_N: Sequence[NodeMessage]) -> int:
    """The duration of an exchange in steps of the fastest node, rounded up; 0 if unknown."""
    times = [message.timed_seconds / message.timed_steps for message in message_N if message.timed_steps]
    seconds = sum(message.exchange_seconds for message in message_N) / len(message_N)
    return math.ceil(seconds / min(times)) if times and min(times) > 0 else 0


def as_words(row: np.ndarray) -> np.ndarray:
    """Float64 as 32-bit words, which JAX moves exactly without x64."""
    return np.ascontiguousarray(row, np.float64).view(np.uint32)


def from_words(words: np.ndarray) -> np.ndarray:
    """The inverse of `as_words`."""
    return np.ascontiguousarray(words, np.uint32).view(np.float64)


def weight_type() -> Any:
    """The widest float that JAX currently allows."""
    return jax.dtypes.canonicalize_dtype(np.float64)


@dataclass(frozen=True)
class ExchangeResult:
    """The result of an exchange, identical for all nodes, and the messages of all nodes."""

    leaves: Leaves  # with a leading axis of one
    message_NxK: np.ndarray
    seconds: float = 0.0  # from start to arrival
    bytes: int = 0  # sent by one node


class PendingExchange(Protocol):
    """An exchange that was started."""

    @property
    def done(self) -> bool:
        """Whether the result has arrived."""
        ...

    def result(self) -> ExchangeResult:
        """Wait for the result, up to the time limit."""
        ...


class Exchange(Protocol):
    """Starts exchanges without blocking. They complete in the order in which they were started."""

    nodes: int  # of all processes

    def prepare(self, kind: str, shapes: Leaves) -> None:
        """Compile for leaves of these shapes, before the first step. Collective: all processes have to call this."""
        ...

    def rebase(self, leaves: Leaves) -> None:
        """Set the mean to which 'compressed' exchanges send differences. No exchange may be pending."""
        ...

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], message_nxK: np.ndarray
    ) -> PendingExchange:
        """Start an exchange of leaves [1, ...] on the first worker of each node of this process.

        The leaves must not change until the exchange is done.
        """
        ...

    def close(self) -> None:
        """Release resources; no exchange is started after this."""
        ...


def reduce_over_nodes(kind: str, nodes: int, leaves: Leaves, weight: jax.Array, base: Leaves) -> Leaves:
    """The reduction of this kind, as one node computes it on the axis of nodes."""
    if kind == "total":
        return total(leaves)
    if kind == "compressed-total":
        return compressed_total(leaves, nodes)
    if kind == "mean":
        return mean(leaves, weight)
    return compressed_mean(leaves, weight, base, nodes)


class InProcessExchange:
    """Exchanges between nodes of one process: the reductions of several processes, over an axis of a stacked array."""

    def __init__(self, leads: Sequence[jax.Device]):
        """leads: the first worker of each node."""
        self.nodes, self.hub = len(leads), leads[0]
        self._base: Leaves = []
        self._programs = {kind: jax.jit(partial(_over_stack, kind, self.nodes)) for kind in KINDS}

    def prepare(self, kind: str, shapes: Leaves) -> None:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in shapes]
        self.rebase(zeros)
        self.start(kind, [zeros] * self.nodes, [1.0] * self.nodes, np.zeros((self.nodes, 1)))

    def rebase(self, leaves: Leaves) -> None:
        self._base = jax.device_put(leaves, self.hub)

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], message_nxK: np.ndarray
    ) -> PendingExchange:
        on_hub_n = [jax.device_put(leaves, self.hub) for leaves in leaves_n]
        weight_N = jax.device_put(np.asarray(weight_n, weight_type()), self.hub)
        with expected():
            reduced = self._programs[kind](on_hub_n, weight_N, self._base if kind == "compressed" else [])
        if kind == "compressed":
            self._base = reduced
        size = bytes_sent(kind, leaves_n[0], self.nodes)
        return _CompletedExchange(ExchangeResult(reduced, np.asarray(message_nxK), bytes=size))

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class _CompletedExchange:
    completed: ExchangeResult
    done: bool = True

    def result(self) -> ExchangeResult:
        return self.completed


def _over_stack(kind: str, nodes: int, leaves_n: list[Leaves], weight_N: jax.Array, base: Leaves) -> Leaves:
    stacked = [jnp.stack(parts) for parts in zip(*leaves_n, strict=True)]
    over_nodes = jax.vmap(partial(reduce_over_nodes, kind, nodes), in_axes=(0, 0, None), axis_name=NODE)
    return [x[0] for x in over_nodes(stacked, weight_N, base)]
