"""Time local phases: one thread per local worker runs its phase and waits for its result.

    local time = ready(sums) - ready(previous update on that device)

An accelerator's programs are queued behind its update without waiting for it, so between the sums of a step and the
local phases of the next the device does not wait for the host a second time. CPU programs wait first: a call on a busy
CPU device would block unnoticed.

There is no collective in between, so it measures the worker's own speed, never the wait for a straggler. Programs are
compiled ahead of time, so compile time cannot enter. Waiting for the sums is safe because the reduce does not donate
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import jax

from hetjax import profiling
from hetjax.devices.workers import Workers
from hetjax.reduce.layout import Parts

Hold = Callable[[int, float, float], None]  # (worker, rows, start time): returns when the phase may end


def queues(device: jax.Device) -> bool:
    """Whether programs for a device are queued ahead, with their inputs sent to it before."""
    return device.platform != "cpu"


class Began:
    """When a local phase begins: at its first dispatch, or when its parameters are ready if that is later.

    Args:
        ready: Is ready when the worker's parameters are.
        queued: Whether programs are queued behind it; otherwise this waits for it now.
    """

    def __init__(self, ready: Any, queued: bool):
        self._ready = ready
        if not queued:
            ready.block_until_ready()
        self._pending = queued and not ready.is_ready()
        self._began = time.perf_counter()

    def dispatched(self) -> None:
        """Look, after a dispatch, whether the parameters have become ready."""
        if self._pending and self._ready.is_ready():
            self._pending, self._began = False, time.perf_counter()

    def time(self) -> float:
        """Wait until the phase has begun, and return when that was."""
        if self._pending:
            self._ready.block_until_ready()
            self._pending, self._began = False, time.perf_counter()
        return self._began


def no_hold(worker: int, rows: float, began: float) -> None:
    """End the phase at once: the speed is not simulated."""


@dataclass(frozen=True)
class LocalResult:
    """Result of one worker's local phase: sums, rows computed (with padding), start and end time."""

    parts: Parts  # (): the worker had no samples
    rows: int
    began: float
    ended: float
    as_planned: bool = True  # False: in other microbatches than planned, so its time says nothing about the plan's

    @property
    def seconds(self) -> float:
        """Local time."""
        return self.ended - self.began


class Clocks:
    """The threads of the local workers.

    Args:
        workers: All workers.
        hold: Delays the end of a phase to simulate a slower worker.
        wait_limit: Seconds after which a phase counts as hung.
    """

    def __init__(self, workers: Workers, hold: Hold = no_hold, wait_limit: float = 600.0):
        self.workers = workers
        self.hold = hold
        self.wait_limit = wait_limit
        self._pool = ThreadPoolExecutor(max(1, len(workers.local)), thread_name_prefix="hetjax-worker")

    def start(self, phases: Sequence[Callable[[], LocalResult]]) -> list[Future[LocalResult]]:
        """Start the local phases of this process's workers."""
        return [
            self._pool.submit(_annotated, worker, phase)
            for worker, phase in zip(self.workers.local, phases, strict=True)
        ]

    def finish(self, k: int, rows: int, began: float, parts: Parts) -> LocalResult:
        """Finish a phase of local worker k: wait for its sums, then for its simulated duration if any."""
        jax.block_until_ready(parts)
        if rows:
            self.hold(self.workers.local[k], rows, began)
        return LocalResult(parts, rows, began, time.perf_counter())

    def wait(self, futures: Sequence[Future[LocalResult]]) -> list[LocalResult]:
        """Wait for all results; raises TimeoutError with the name of a worker that exceeds the limit."""
        deadline = time.monotonic() + self.wait_limit
        results = []
        for future, worker in zip(futures, self.workers.local, strict=True):
            try:
                results.append(future.result(timeout=max(0.0, deadline - time.monotonic())))
            except FutureTimeout:
                raise TimeoutError(
                    f"Worker {worker} ({self.workers.device(worker)}) did not finish its local phase within "
                    f"{self.wait_limit:.0f} s. Its device may hang; raise wait_limit if steps can take that long."
                ) from None
        return results

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _annotated(worker: int, phase: Callable[[], LocalResult]) -> LocalResult:
    with profiling.phase("local", worker=worker):
        return phase()
