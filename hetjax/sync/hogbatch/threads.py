"""Real time: one thread per worker, and somebody who looks after them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator

from hetjax.engines.clocks import Hold, LocalResult, no_hold
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.method import Finished, News, WorkItem

TICK = 0.05  # seconds between two looks at the workers
GRACE = 0.4  # seconds that tasks on their way get when somebody asks for the end
_PATIENCE = 20.0  # a task may take so many times as long as the slowest of its worker before
_LEAST_PATIENCE = 10.0  # seconds

Compute = Callable[[WorkItem], LocalResult]


class Abandoned(Exception):
    """The run has ended; nobody waits for this phase."""


class Pause:
    """Holds a phase back like `hold`, but a run that ends does not wait for it."""

    def __init__(self, hold: Callable[..., None] = no_hold):
        self.hold = hold
        self.ended = threading.Event()

    def __call__(self, worker: int, rows: int, began: float) -> None:
        if self.hold is not no_hold:
            self.hold(worker, rows, began, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        if self.ended.wait(seconds):
            raise Abandoned


class Threads:
    """Runs the workers and yields the news. Daemon threads: a device that hangs cannot keep the program alive.

    A worker whose task takes longer than `wait_limit`, or twenty times as long per sample as it ever did (at least ten
    seconds), is taken for hanging; should it come back, it takes part again.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        compute: Compute,
        workers: int,
        *,
        pause: Pause,
        wait_limit: float,
        stopping: Callable[[], bool],
    ):
        self.coordinator, self.compute, self.pause = coordinator, compute, pause
        self.wait_limit, self.stopping = wait_limit, stopping
        self._slowest_W = [0.0] * workers  # seconds per sample
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"hetjax-hogbatch-{worker}", daemon=True)
            for worker in range(workers)
        ]

    def run(self) -> Generator[News]:
        self.pause.ended.clear()
        for thread in self._threads:
            thread.start()
        asked: float | None = None
        looked = time.monotonic()
        try:
            while True:
                over = self.coordinator.over()  # asked before the queue is found empty: no news can come after that
                try:
                    news = self.coordinator.news.get(timeout=0 if over else TICK)
                except queue.Empty:
                    if over:
                        return
                else:
                    self._learn(news)
                    yield news
                if (now := time.monotonic()) - looked < TICK:
                    continue
                looked = now
                self._look_after()
                if asked is None and self.stopping():
                    asked = now
                    self.coordinator.close()
                if asked is not None and now - asked > GRACE:
                    self.coordinator.abandon()
        finally:
            self.coordinator.abandon()
            self.pause.ended.set()
            deadline = time.monotonic() + GRACE
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _work(self, worker: int) -> None:
        try:
            while (task := self.coordinator.take(worker)) is not None:
                self.coordinator.finish(task, self.compute(task))
        except Abandoned:
            pass
        except BaseException as error:  # whatever ends this worker must not end the others
            self.coordinator.fail(worker, error)

    def _learn(self, news: News) -> None:
        if isinstance(news, Finished):
            done = news.update
            spent = (done.ended - done.began) / done.span.count
            self._slowest_W[done.worker] = max(self._slowest_W[done.worker], spent)

    def _look_after(self) -> None:
        now = self.coordinator.clock()
        for task in self.coordinator.flying():
            if not self._threads[task.worker].is_alive():
                self.coordinator.fail(task.worker, RuntimeError(f"The thread of worker {task.worker} died."), task)
            elif (late := self._too_long(task, now)) is not None:
                self.coordinator.fail(task.worker, TimeoutError(late), task)

    def _too_long(self, task: WorkItem, now: float) -> str | None:
        """What to say about a task that has taken too long. Rows that are slow to come are no fault of the worker."""
        if (started := task.started) is None:
            if now - task.taken <= self.wait_limit:
                return None
            return f"Worker {task.worker} got no rows within {self.wait_limit:.3g} s: the data source may hang."
        usual = _PATIENCE * self._slowest_W[task.worker] * task.span.count or self.wait_limit
        patience = min(self.wait_limit, max(_LEAST_PATIENCE, usual))
        if now - started <= patience:
            return None
        return (
            f"Worker {task.worker} did not finish {task.span.count} samples within {patience:.3g} s"
            + (f", {_PATIENCE:.0f} times what it needed before" if patience < self.wait_limit else "")
            + ". Its device may hang"
            + ("." if patience < self.wait_limit else "; give the Trainer a longer wait_limit if that is usual.")
        )


__all__ = ["Abandoned", "Hold", "Pause", "Threads"]
