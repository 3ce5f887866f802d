"""Prefetch: a background thread fetches host rows by their positions in the global order before they are needed.

`Feed` serves stepped training, which knows the next step's span. `BlockFeed` serves workers that take ranges on their
own: it knows which positions come next, not which worker will take them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.data.source import Batch, Source, fetch
from hetjax.sampling.ranges import Range

log = logging.getLogger("hetjax")
Tree = Any
_Positions = tuple[int, int, int]  # epoch, start, stop
_BLOCKS_AHEAD = 2


@dataclass(frozen=True)
class Rows:
    """Host rows of one step: `tree` holds the samples at positions origin, origin + 1, ... of the epoch's order."""

    tree: Tree
    origin: int

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.origin + len(jax.tree.leaves(self.tree)[0])

    def block(self, start: int, size: int) -> Tree:
        """`size` rows from position `start`; past the end the last row is repeated: padding is real rows, not zeros.

        A block may reach into the neighbor's samples: they are masked there, and a view costs no copy.
        """
        at, have = start - self.origin, self.stop - self.origin
        if at >= 0 and at + size <= have:
            return jax.tree.map(lambda x: x[at : at + size], self.tree)
        index = np.clip(np.arange(at, at + size), 0, have - 1)
        return jax.tree.map(lambda x: x[index], self.tree)


class Order(Protocol):
    """Maps positions of an epoch to samples (see sampling/order.py)."""

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """The samples at positions start .. stop-1."""
        ...


def fetch_positions(source: Source, order: Order, epoch: int, start: int, stop: int) -> Batch:
    """The samples at positions start .. stop-1 of an epoch's order, in the dtypes JAX uses by default."""
    rows = fetch(source, order.indices(epoch, start, stop))
    return jax.tree.map(lambda x: np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype)), rows)


class Prefetcher:
    """One background thread and the positions submitted to it, oldest first. Subclasses decide what to prefetch."""

    def __init__(self, source: Source, order: Order):
        self.source, self.order = source, order
        self.waited = 0.0  # seconds callers were blocked on data, summed
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetjax-prefetch")
        self._pending: OrderedDict[_Positions, Future[Batch]] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Cancel what has not started and wait for the running fetch."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _submit(self, positions: _Positions) -> Future[Batch]:
        if positions not in self._pending:
            self._pending[positions] = self._pool.submit(self._fetch, *positions)
        return self._pending[positions]

    def _fetch(self, epoch: int, start: int, stop: int) -> Batch:
        return fetch_positions(self.source, self.order, epoch, start, stop)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        with self._lock:
            self.waited += time.perf_counter() - began


class Feed(Prefetcher):
    """Prefetches the spans a training loop announces.

    Positions are fetched, not shares of workers, so a new plan only moves slice borders. A process that computes part
    of the batch announces its span with a margin, and `take` fetches what is missing.
    """

    def prepare(self, epoch: int, start: int, stop: int) -> None:
        """Start to fetch positions start .. stop-1 of an epoch in the background."""
        if start < stop:
            self._submit((epoch, start, stop))

    def take(self, epoch: int, start: int, stop: int) -> tuple[Batch, int]:
        """Rows that contain positions start .. stop-1, and the position of the first one."""
        with self._waiting():
            overlapping = [key for key in self._pending if key[0] == epoch and key[1] < stop and start < key[2]]
            if not overlapping:
                return self._fetch(epoch, start, stop), start
            key = overlapping[0]
            rows, origin = self._pending[key].result(), key[1]
            for earlier in [other for other in self._pending if other <= key]:
                del self._pending[earlier]
            if start < origin:
                rows, origin = _concatenate(self._fetch(epoch, start, origin), rows), start
            if stop > key[2]:
                rows = _concatenate(rows, self._fetch(epoch, key[2], stop))
            return rows, origin


class BlockFeed(Prefetcher):
    """Prefetches fixed blocks of positions in order, for any number of threads.

    Asking for a range starts the fetch of the next two blocks. Least recently used blocks are dropped, so memory is
    bounded; a range that is handed out again later is fetched again.

    Args:
        source: The samples.
        order: The global order.
        block: Samples per block.
        end: Samples of the whole training; nothing past it is prefetched.
        keep: Blocks to keep beyond the two ahead and those of the current request.
    """

    def __init__(self, source: Source, order: Order, *, block: int, end: int, keep: int):
        super().__init__(source, order)
        self.size, self.block, self.end, self.keep = len(source), block, end, keep + _BLOCKS_AHEAD

    def rows(self, span: Range) -> Rows:
        """Rows that contain a range."""
        with self._waiting():
            first, last = span.start // self.block, (span.stop - 1) // self.block
            with self._lock:
                requested = [self._request(span.epoch, number) for number in range(first, last + 1)]
                epoch, number = span.epoch, last
                for _ in range(_BLOCKS_AHEAD):
                    epoch, number = self._next_block(epoch, number)
                    if epoch * self.size + number * self.block < self.end:
                        self._request(epoch, number)
                while len(self._pending) > self.keep + len(requested):
                    self._pending.popitem(last=False)
            return Rows(_concatenate(*(future.result() for future in requested)), first * self.block)

    def close(self) -> None:
        """Cancel what has not started, without waiting: a source that hangs must not delay the end of the run."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _request(self, epoch: int, number: int) -> Future[Batch]:
        start = number * self.block
        positions = epoch, start, min(start + self.block, self.size)
        future = self._submit(positions)
        self._pending.move_to_end(positions)
        return future

    def _fetch(self, epoch: int, start: int, stop: int) -> Batch:
        """Retries once: a read error would otherwise fail every worker that needs the block."""
        try:
            return super()._fetch(epoch, start, stop)
        except Exception as error:
            log.warning("Samples could not be read, trying again: %s: %s", type(error).__name__, error)
            return super()._fetch(epoch, start, stop)

    def _next_block(self, epoch: int, number: int) -> tuple[int, int]:
        return (epoch, number + 1) if (number + 1) * self.block < self.size else (epoch + 1, 0)


def _concatenate(*trees: Batch) -> Batch:
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
