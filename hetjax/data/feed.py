"""Rows ahead of time: a background thread fetches the coming step's samples by global position.

Host rows of one step, by their positions in the global order.

Rows ahead of time: a background thread fetches the coming step's samples by global position.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.data.source import Batch, Source, fetch

Tree = Any


@dataclass(frozen=True)
class Rows:
    """Host rows of one step: `tree` holds the samples at positions origin, origin + 1, ... of the epoch's order."""

    tree: Tree
    origin: int

    @property
    def stop(self) -> int:
        return self.origin + len(jax.tree.leaves(self.tree)[0])

    def block(self, start: int, size: int) -> Tree:
        """`size` rows from position `start`. Beyond the end the last row is repeated: real rows, never zeros.

        A block may reach into the neighbor's samples; they are masked there, and a view costs no copy.
        """
        at, have = start - self.origin, self.stop - self.origin
        if at >= 0 and at + size <= have:
            return jax.tree.map(lambda x: x[at : at + size], self.tree)
        index = np.clip(np.arange(at, at + size), 0, have - 1)
        return jax.tree.map(lambda x: x[index], self.tree)


class Order(Protocol):
    """Says which sample stands at which position of an epoch (see sampling/order.py)."""

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray: ...


def fetch_positions(source: Source, order: Order, epoch: int, start: int, stop: int) -> Batch:
    """The samples at positions start .. stop-1 of an epoch's order, in types that JAX takes as they are."""
    rows = fetch(source, order.indices(epoch, start, stop))
    return jax.tree.map(lambda x: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)), rows)


class Feed:
    """Fetches spans of positions; a span asked for in advance is there when it is taken.

    Positions, not workers, are fetched, so a new plan only moves the borders of slices. Where this process computes
    only a part of the batch, the loop asks in advance for its span with a margin, and `take` adds what is missing.
    """

    def __init__(self, source: Source, order: Order):
        self.source, self.order = source, order
        self.waited = 0.0  # seconds a step stood still for data
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetjax-feed")
        self._ahead: dict[tuple[int, int, int], Future[Batch]] = {}

    def prepare(self, epoch: int, start: int, stop: int) -> None:
        """Begin to fetch positions start .. stop-1 of an epoch in the background."""
        key = (epoch, start, stop)
        if start < stop and key not in self._ahead:
            self._ahead[key] = self._pool.submit(self._fetch, *key)

    def take(self, epoch: int, start: int, stop: int) -> tuple[Batch, int]:
        """Rows that contain positions start .. stop-1, and the position of the first of them."""
        began = time.perf_counter()
        fitting = [key for key in self._ahead if key[0] == epoch and key[1] < stop and start < key[2]]
        if not fitting:
            rows, origin = self._fetch(epoch, start, stop), start
        else:
            key = fitting[0]
            rows, origin = self._ahead[key].result(), key[1]
            self._ahead = {k: f for k, f in self._ahead.items() if k > key}
            if start < origin:
                rows, origin = _join(self._fetch(epoch, start, origin), rows), start
            if stop > key[2]:
                rows = _join(rows, self._fetch(epoch, key[2], stop))
        self.waited += time.perf_counter() - began
        return rows, origin

    def _fetch(self, epoch: int, start: int, stop: int) -> Batch:
        return fetch_positions(self.source, self.order, epoch, start, stop)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def _join(head: Batch, tail: Batch) -> Batch:
    return jax.tree.map(lambda a, b: np.concatenate([a, b]), head, tail)
