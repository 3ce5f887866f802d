"""Rows ahead of whoever asks next: positions are fetched in blocks, in order, and any worker takes from them."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from hetjax.data.feed import Order, Rows, fetch_positions
from hetjax.data.source import Batch, Source
from hetjax.sampling.ranges import Range

log = logging.getLogger("hetjax")
_AHEAD = 2  # blocks
_Key = tuple[int, int]  # epoch, number of the block in it


class Prefetch:
    """Ranges are handed out in order, so the coming positions are known before it is known who gets them.

    Blocks that were not asked for lately are dropped; a range that comes back late is fetched again.
    """

    def __init__(self, source: Source, order: Order, *, block: int, end: int, keep: int):
        self.source, self.order, self.size = source, order, len(source)
        self.block, self.end, self.keep = block, end, keep + _AHEAD
        self.waited = 0.0  # seconds that workers stood still for data, added up
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hetjax-stock")
        self._blocks: OrderedDict[_Key, Future[Batch]] = OrderedDict()
        self._lock = threading.Lock()

    def rows(self, span: Range) -> Rows:
        """Rows that contain a range."""
        began = time.perf_counter()
        first, last = span.start // self.block, (span.stop - 1) // self.block
        with self._lock:
            wanted = [self._ask((span.epoch, number)) for number in range(first, last + 1)]
            key = (span.epoch, last)
            for _ in range(_AHEAD):
                key = self._after(key)
                if key[0] * self.size + key[1] * self.block < self.end:
                    self._ask(key)
            while len(self._blocks) > self.keep + len(wanted):
                self._blocks.popitem(last=False)
        trees = [future.result() for future in wanted]
        whole = trees[0] if len(trees) == 1 else jax.tree.map(lambda *parts: np.concatenate(parts), *trees)
        with self._lock:
            self.waited += time.perf_counter() - began
        return Rows(whole, first * self.block)

    def _ask(self, key: _Key) -> Future[Batch]:
        if key not in self._blocks:
            self._blocks[key] = self._pool.submit(self._fetch, key)
        self._blocks.move_to_end(key)
        return self._blocks[key]

    def _fetch(self, key: _Key) -> Batch:
        """What cannot be read is tried once more: all workers would fail for it."""
        start = key[1] * self.block
        where = key[0], start, min(start + self.block, self.size)
        try:
            return fetch_positions(self.source, self.order, *where)
        except Exception as error:
            log.warning("Samples could not be read, trying again: %s: %s", type(error).__name__, error)
            return fetch_positions(self.source, self.order, *where)

    def _after(self, key: _Key) -> _Key:
        epoch, number = key
        return (epoch, number + 1) if (number + 1) * self.block < self.size else (epoch + 1, 0)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
