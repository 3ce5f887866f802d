"""Virtual time: the same run again, to the bit. No threads and no sleeping; the interleaving comes from a seed."""

from __future__ import annotations

import heapq
import queue
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.simulation.speeds import Simulation, constant
from hetjax.sync.hogbatch.coordinator import Coordinator
from hetjax.sync.hogbatch.method import News, WorkItem

_ROW_TIME = 1e-3  # virtual seconds of one row at speed 1


@dataclass(frozen=True)
class VirtualSchedule:
    """How long a task takes in virtual time: (startup + rows x row_time / speed) x exp(noise x a seeded normal)."""

    seed: int = 0
    noise: float = 0.1
    speeds: tuple[float, ...] | None = None  # relative; all alike unless given
    row_time: float = _ROW_TIME
    startup: float = 0.0


class VirtualTime:
    """Lets the workers take turns by a virtual clock; a driver like `Threads`.

    Simulated speeds, with all their changes, are those of the virtual clock unless the schedule has its own. What a
    worker reads is fixed when it starts and what it found is applied when its time is up, as in a real run. Ties
    go to who started first.
    """

    def __init__(self, schedule: VirtualSchedule, workers: int, simulation: Simulation | None = None):
        given = len(schedule.speeds) if schedule.speeds is not None else workers
        if given != workers:
            raise ValueError(f"The schedule has speeds for {given} workers, but there are {workers}: give one each.")
        self.schedule, self.workers, self.now = schedule, workers, 0.0
        own = Simulation(constant(schedule.speeds or [1.0] * workers, schedule.startup), schedule.row_time)
        self._pace = own if simulation is None or schedule.speeds is not None else simulation
        self._row_time = self._pace.row_time or schedule.row_time
        if simulation is not None:
            simulation.row_time = simulation.row_time or schedule.row_time  # which its ideal goes by
        self._rng = [np.random.default_rng([schedule.seed, worker]) for worker in range(workers)]

    def clock(self) -> float:
        return self.now

    def run(
        self,
        coordinator: Coordinator,
        rows_of: Callable[[WorkItem], int],
        read: Callable[[WorkItem], list[jax.Array]],
        compute: Callable[[WorkItem, list[jax.Array]], LocalResult],
        stopping: Callable[[], bool],
    ) -> Generator[News]:
        agenda: list[tuple[float, int, WorkItem, list[jax.Array]]] = []
        started = 0
        while True:
            if stopping():
                coordinator.abandon()
            for worker in range(self.workers):
                if (task := coordinator.try_take(worker)) is not None:
                    task.started = task.taken
                    try:
                        due = self.now + self._seconds(worker, rows_of(task))
                        heapq.heappush(agenda, (due, started, task, read(task)))
                    except Exception as error:
                        coordinator.fail(worker, error)
                    started += 1
            while True:
                try:
                    yield coordinator.news.get_nowait()
                except queue.Empty:
                    break
            if coordinator.over() or not agenda:
                return
            self.now, _, task, leaves = heapq.heappop(agenda)
            try:
                lap = compute(task, leaves)
                coordinator.finish(task, replace(lap, began=task.taken, ended=self.now))
            except Exception as error:
                coordinator.fail(task.worker, error)

    def _seconds(self, worker: int, rows: int) -> float:
        speed_W, startup_W = self._pace.trace(self._pace.step)
        mean = startup_W[worker] + rows * self._row_time / speed_W[worker]
        return float(mean * np.exp(self.schedule.noise * self._rng[worker].standard_normal()))
