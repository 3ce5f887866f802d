"""Per-worker clocks: one thread per local worker runs its local phase and times it from readiness to readiness.

local time = ready(sums) - ready(previous update on that device), with no collective in between, so it is the worker's
own speed and never the wait for the slowest. Programs are compiled ahead, so compile time cannot enter. The sums are
safe to wait for because the reduce does not donate them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import jax

from hetjax.devices.workers import Workers
from hetjax.reduce.layout import Parts

Hold = Callable[[int, int, float], None]  # (worker, rows, began): returns when the phase may end


def no_hold(worker: int, rows: int, began: float) -> None:
    """A real worker takes the time it takes."""


@dataclass(frozen=True)
class LocalResult:
    """One worker's local phase: its sums, the rows it computed, and when it began and ended."""

    parts: Parts
    rows: int
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Clocks:
    """The threads of the local workers. `hold` lets simulated speeds stretch a phase."""

    def __init__(self, workers: Workers, hold: Hold = no_hold, wait_limit: float = 600.0):
        self.workers = workers
        self.hold = hold
        self.wait_limit = wait_limit
        self._pool = ThreadPoolExecutor(max(1, len(workers.local)), thread_name_prefix="hetjax-worker")

    def start(self, phases: Sequence[Callable[[], LocalResult]]) -> list[Future[LocalResult]]:
        """Start the local phases of this process's workers."""
        return [self._pool.submit(phase) for phase in phases]

    def lap(self, k: int, rows: int, began: float, parts: Parts) -> LocalResult:
        """The end of a phase of local worker k: wait for its sums, and hold it back if its speed is simulated."""
        jax.block_until_ready(parts)
        if rows:
            self.hold(self.workers.local[k], rows, began)
        return LocalResult(parts, rows, began, time.perf_counter())

    def wait(self, futures: Sequence[Future[LocalResult]]) -> list[LocalResult]:
        """All laps; whoever does not come within the limit is named."""
        deadline = time.monotonic() + self.wait_limit
        laps = []
        for future, worker in zip(futures, self.workers.local, strict=True):
            try:
                laps.append(future.result(timeout=max(0.0, deadline - time.monotonic())))
            except FutureTimeout:
                raise TimeoutError(
                    f"Worker {worker} ({self.workers.devices[worker]}) did not finish its local phase within "
                    f"{self.wait_limit:.0f} s. Its device may hang; raise wait_limit if its steps are really that long."
                ) from None
        return laps

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
