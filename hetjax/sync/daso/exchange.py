"""Exchanges between nodes: the interface, the message that travels with each, and the form for nodes of one process.

An exchange is started by all nodes and received when it is due.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import numpy as np

from hetjax.sync.daso.averaging import Leaves, bytes_sent, combine, incoming, outgoing


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


@dataclass(frozen=True)
class ExchangeResult:
    """The result of an exchange, identical for all nodes, and the messages of all nodes."""

    leaves: list[np.ndarray]  # with a leading axis of one; never written to again
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


class InProcessExchange:
    """Exchanges between nodes of one process: the reductions of several processes, over what each node would send."""

    def __init__(self, nodes: int):
        self.nodes = nodes
        self._base: list[np.ndarray] = []

    def rebase(self, leaves: Leaves) -> None:
        self._base = [np.asarray(leaf) for leaf in leaves]

    def start(
        self, kind: str, leaves_n: Sequence[Leaves], weight_n: Sequence[float], message_nxK: np.ndarray
    ) -> PendingExchange:
        return _DeferredExchange(self, kind, leaves_n, np.asarray(weight_n, np.float64), np.asarray(message_nxK))

    def run(
        self, kind: str, leaves_n: Sequence[Leaves], weight_N: np.ndarray, message_NxK: np.ndarray
    ) -> ExchangeResult:
        """Reduce now; waits for the leaves."""
        sent_n = [outgoing(kind, leaves, self._base) for leaves in leaves_n]
        reduced = [combine(kind, part_N, weight_N) for part_N in zip(*sent_n, strict=True)]
        result = incoming(kind, reduced, leaves_n[0], self._base)
        if kind == "compressed":
            self._base = result
        return ExchangeResult(result, message_NxK, bytes=bytes_sent(kind, leaves_n[0], self.nodes))

    def close(self) -> None:
        """Nothing to release."""


class _DeferredExchange:
    """Runs when it is received, so that starting it does not wait for the devices."""

    done = True

    def __init__(self, exchange: InProcessExchange, *arguments: Any):
        self._exchange, self._arguments = exchange, arguments

    def result(self) -> ExchangeResult:
        return self._exchange.run(*self._arguments)
