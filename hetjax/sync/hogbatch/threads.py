"""The real-time driver: one thread per worker, or several, and a watchdog for workers that hang or die."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator

from hetjax.engines.clocks import LocalResult, no_hold
from hetjax.sync.hogbatch.coordinator import Coordinator, Event, Lane, UpdateEvent
from hetjax.sync.hogbatch.method import WorkItem

POLL_SECONDS = 0.05  # between two checks of the workers
GRACE_SECONDS = 0.4  # for items in flight after a request to stop
_HANG_FACTOR = 20.0  # a worker hangs after this multiple of its slowest time per sample,
_MIN_HANG_SECONDS = 10.0  # but not before this


class PhaseCancelled(Exception):
    """The run ended while a simulated phase was held."""


class CancellableHold:
    """Holds a local phase as `hold` does, but the end of the run interrupts it.

    A thread of a worker with T threads has 1 / T of its speed.
    """

    def __init__(self, hold: Callable[..., None] = no_hold):
        self.hold = hold
        self.threads_of: Callable[[int], int] = lambda worker: 1
        self.cancelled = threading.Event()

    def __call__(self, worker: int, rows: int, began: float) -> None:
        if self.hold is not no_hold:
            self.hold(worker, rows * self.threads_of(worker), began, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        if self.cancelled.wait(seconds):
            raise PhaseCancelled


class Threads:
    """Runs the workers and yields the coordinator's events.

    Threads are daemons, so a hanging device cannot keep the program alive. A worker hangs when its item takes longer
    than `wait_limit`, or 20 times its slowest time per sample (at least 10 s). If it responds later, it rejoins.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        compute: Callable[[WorkItem], LocalResult],
        workers: int,
        *,
        hold: CancellableHold,
        wait_limit: float,
        stopping: Callable[[], bool],
    ):
        self.coordinator, self.compute, self.hold = coordinator, compute, hold
        self.wait_limit, self.stopping = wait_limit, stopping
        self._slowest_W = [0.0] * workers  # seconds per sample
        self._threads: dict[Lane, threading.Thread] = {}

    def run(self) -> Generator[Event]:
        """Yields events until nothing is left to do; closing the generator ends the run at once."""
        self.hold.cancelled.clear()
        for lane in self.coordinator.lanes:
            name = "hetjax-hogbatch-{}-{}".format(*lane)
            self._threads[lane] = threading.Thread(target=self._work, args=lane, name=name, daemon=True)
        for thread in self._threads.values():
            thread.start()
        stop_requested: float | None = None
        last_check = time.monotonic()
        try:
            while True:
                finished = self.coordinator.finished()  # before the queue is read: no event can follow then
                try:
                    event = self.coordinator.events.get(timeout=0 if finished else POLL_SECONDS)
                except queue.Empty:
                    if finished:
                        return
                else:
                    self._note_speed(event)
                    yield event
                if (now := time.monotonic()) - last_check < POLL_SECONDS:
                    continue
                last_check = now
                self._check_workers()
                if stop_requested is None and self.stopping():
                    stop_requested = now
                    self.coordinator.close()
                if stop_requested is not None and now - stop_requested > GRACE_SECONDS:
                    self.coordinator.abandon()
        finally:
            self.coordinator.abandon()
            self.hold.cancelled.set()
            deadline = time.monotonic() + GRACE_SECONDS
            for thread in self._threads.values():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, worker: int, number: int) -> None:
        try:
            while (item := self.coordinator.take(worker, number)) is not None:
                self.coordinator.finish(item, self.compute(item))
        except PhaseCancelled:
            pass
        except BaseException as error:  # even SystemExit of one worker must not end the others
            self.coordinator.fail(worker, error)

    def _note_speed(self, event: Event) -> None:
        if isinstance(event, UpdateEvent):
            update = event.update
            per_sample = (update.ended - update.began) / update.span.count
            self._slowest_W[update.worker] = max(self._slowest_W[update.worker], per_sample)

    def _check_workers(self) -> None:
        now = self.coordinator.clock()
        for item in self.coordinator.in_flight():
            if not self._threads[item.worker, item.thread].is_alive():
                self.coordinator.fail(item.worker, RuntimeError(f"The thread of worker {item.worker} died."), item)
            elif (message := self._overdue(item, now)) is not None:
                self.coordinator.fail(item.worker, TimeoutError(message), item)

    def _overdue(self, item: WorkItem, now: float) -> str | None:
        """The error message for an item that takes too long, else None. Waiting for rows does not count."""
        if (started := item.started) is None:
            if now - item.taken <= self.wait_limit:
                return None
            return f"Worker {item.worker} got no rows within {self.wait_limit:.3g} s: the data source may hang."
        expected = _HANG_FACTOR * self._slowest_W[item.worker] * item.span.count or self.wait_limit
        limit = min(self.wait_limit, max(_MIN_HANG_SECONDS, expected))
        if now - started <= limit:
            return None
        return (
            f"Worker {item.worker} did not finish {item.span.count} samples within {limit:.3g} s"
            + (f", {_HANG_FACTOR:.0f} times what it needed before" if limit < self.wait_limit else "")
            + ". Its device may hang"
            + ("." if limit < self.wait_limit else "; give the Trainer a longer wait_limit if that is usual.")
        )
