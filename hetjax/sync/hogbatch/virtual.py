"""The virtual-time driver: a seeded interleaving, reproducible to the bit, without threads or sleeping."""

from __future__ import annotations

import heapq
import queue
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.simulation.speeds import Simulation, constant
from hetjax.sync.hogbatch.coordinator import Coordinator, Event
from hetjax.sync.hogbatch.method import WorkItem


@dataclass(frozen=True)
class VirtualSchedule:
    """Virtual seconds of a work item: (startup + rows x row_time / speed) x exp(noise x z), z standard normal.

    A thread of a worker with T threads has 1 / T of its speed.

    Attributes:
        seed: Of z.
        noise: Standard deviation of the logarithm of a duration.
        speeds: Relative speed of each worker; default: those of the trainer's simulation, or all equal.
        row_time: Virtual seconds per row at speed 1.
        startup: Virtual seconds before the first row.
    """

    seed: int = 0
    noise: float = 0.1
    speeds: tuple[float, ...] | None = None
    row_time: float = 1e-3
    startup: float = 0.0


class VirtualTime:
    """Runs the workers in the order of a virtual clock; the counterpart of `Threads`.

    As in a real run, a worker reads the model when it starts and its result is applied when its time is up. Ties go
    to the worker that started first. Simulated speeds, with all their changes, drive the virtual clock unless the
    schedule has its own.
    """

    def __init__(self, schedule: VirtualSchedule, workers: int, simulation: Simulation | None = None):
        given = len(schedule.speeds) if schedule.speeds is not None else workers
        if given != workers:
            raise ValueError(f"The schedule has speeds for {given} workers, but there are {workers}: give one each.")
        self.schedule, self.workers, self.now = schedule, workers, 0.0
        own = Simulation(constant(schedule.speeds or [1.0] * workers, schedule.startup), schedule.row_time)
        self._simulation = own if simulation is None or schedule.speeds is not None else simulation
        self._row_time = self._simulation.row_time or schedule.row_time
        if simulation is not None:
            simulation.row_time = simulation.row_time or schedule.row_time  # Simulation.ideal needs one
        self._rng = [np.random.default_rng([schedule.seed, worker]) for worker in range(workers)]

    def clock(self) -> float:
        """Virtual seconds since the start of the run."""
        return self.now

    def run(
        self,
        coordinator: Coordinator,
        rows_of: Callable[[WorkItem], int],
        read: Callable[[WorkItem], list[jax.Array]],
        compute: Callable[[WorkItem, list[jax.Array]], LocalResult],
        stopping: Callable[[], bool],
    ) -> Generator[Event]:
        """Yields events until nothing is left to do."""
        agenda: list[tuple[float, int, WorkItem, list[jax.Array]]] = []
        started = 0
        while True:
            if stopping():
                coordinator.abandon()
            for worker, thread in coordinator.lanes:
                if (item := coordinator.try_take(worker, thread)) is not None:
                    item.started = item.taken
                    try:
                        threads = sum(of == worker for of, _ in coordinator.lanes)
                        due = self.now + self._seconds(worker, threads * rows_of(item))
                        heapq.heappush(agenda, (due, started, item, read(item)))
                    except Exception as error:
                        coordinator.fail(worker, error)
                    started += 1
            while True:
                try:
                    yield coordinator.events.get_nowait()
                except queue.Empty:
                    break
            if coordinator.finished() or not agenda:
                return
            self.now, _, item, leaves = heapq.heappop(agenda)
            if not coordinator.holds(item):  # another thread of its worker failed
                continue
            try:
                result = compute(item, leaves)
                coordinator.finish(item, replace(result, began=item.taken, ended=self.now))
            except Exception as error:
                coordinator.fail(item.worker, error)

    def _seconds(self, worker: int, rows: int) -> float:
        speed_W, startup_W = self._simulation.trace(self._simulation.step)
        mean = startup_W[worker] + rows * self._row_time / speed_W[worker]
        return float(mean * np.exp(self.schedule.noise * self._rng[worker].standard_normal()))
