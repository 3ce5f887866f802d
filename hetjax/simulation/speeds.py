"""Simulated speeds: workers of unequal speed on equal devices.

The local phase of worker i lasts

    max(real time, startup_i + rows x row_time / speed_i)

for the rows it computed, padding included, so an engine that saves no work shows no gain. `row_time` is measured once,
with all workers computing, plus 50%, and stays fixed for the run. The ideal is sum_i speed_i / row_time samples per
second. A phase that takes longer than its simulated time is an overrun; above 2% of the phases the run logs a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hetjax.fleet.membership import kept_entries

log = logging.getLogger("hetjax")

MARGIN = 1.5
OVERRUN_WARNING = 0.02
LEAST = 1e-4  # seconds of a row at speed 1, where speeds are given as numbers
LONGEST = 3600.0  # maximum seconds of one row, or of a startup

Trace = Callable[[int], tuple[np.ndarray, np.ndarray]]  # step -> (speed_W, startup_W)


def constant(speeds: Sequence[float], startup: Sequence[float] | float = 0.0) -> Trace:
    """Return a trace of constant relative speeds (1, 0.5, ...) and startups (seconds per step)."""
    try:
        speed_W = np.asarray(speeds, np.float64)
        startup_W = np.asarray(startup, np.float64)
        startup_W = np.broadcast_to(startup_W, speed_W.shape) if startup_W.ndim == 0 else startup_W
    except (ValueError, TypeError):
        raise ValueError(
            f"Simulated speeds are one number per worker; got speeds {speeds!r} and startups {startup!r}."
        ) from None
    check_speeds(speed_W, startup_W)
    return lambda step: (speed_W, startup_W)


def of_survivors(trace: Trace, workers: int) -> Trace:
    """Return the trace of the surviving workers of an elastic run; see `hetjax.fleet.membership`."""
    given = len(trace(0)[0])
    if len(kept := kept_entries(given, workers)) == given:
        return trace

    def of_kept(step: int) -> tuple[np.ndarray, np.ndarray]:
        speed_W, startup_W = trace(step)
        return speed_W[kept], startup_W[kept]

    return of_kept


def as_simulation(speeds: Sequence[float] | Simulation | None, workers: int) -> Simulation | None:
    """Return the simulation of these workers from relative speeds or an object; None without."""
    simulation = speeds if isinstance(speeds, Simulation | None) else Simulation(constant(speeds), least=LEAST)
    if simulation is None:
        return None
    simulation.trace = of_survivors(simulation.trace, workers)
    if (given := len(simulation.trace(0)[0])) != workers:
        raise ValueError(
            f"Speeds were given for {given} workers, but there are {workers}: give one speed each. To simulate {given} "
            f"devices, pass devices=hetjax.devices({given}), called before any other use of JAX."
        )
    return simulation


def check_speeds(speed_W: np.ndarray, startup_W: np.ndarray) -> None:
    """Refuse speeds that are not positive, startups out of range, and shapes that differ."""
    if speed_W.ndim != 1 or speed_W.shape != startup_W.shape:
        raise ValueError(f"Simulated speeds are one number per worker; got speeds {speed_W} and startups {startup_W}.")
    if not (np.isfinite(speed_W).all() and (speed_W > 0).all()):
        raise ValueError(f"Simulated speeds must be positive numbers such as 1, 1, 0.5; got {speed_W.tolist()}.")
    if not ((startup_W >= 0) & (startup_W <= LONGEST)).all():  # also true for NaN
        raise ValueError(
            f"Simulated startups are seconds, zero or more and at most {LONGEST:.0f}; got {startup_W.tolist()}."
        )


@dataclass
class Simulation:
    """Simulated speeds of one run: speeds by step, the calibrated row time, and a count of overruns.

    The local phase of worker i lasts max(real time, startup_i + rows x row_time / speed_i).

    Examples:
        >>> hetjax.Trainer(loss_fn, optimizer, batch_size=64, speeds=hetjax.Simulation(constant([1, 0.5])))

    Attributes:
        trace: step -> (relative speeds, startup seconds), one entry per worker; see `hetjax.simulation.speeds.constant`
            and `hetjax.simulation.traces.read_trace`.
        row_time: seconds of one row at speed 1. Default: measured at the start of the run.
        least: minimum of a measured row_time, so that the phases of a tiny model stand out from noise.
        step: the current step.
        phases: number of local phases so far.
        overruns: number of phases that took longer than simulated.

    Raises:
        ValueError: if row_time is not positive, or a row would take longer than an hour.
    """

    trace: Trace
    row_time: float | None = None
    least: float = 0.0
    step: int = 0
    phases: int = 0
    overruns: int = 0

    def __post_init__(self) -> None:
        if self.row_time is not None:
            if not 0 < self.row_time < np.inf:
                raise ValueError(f"row_time is {self.row_time}: expected seconds above 0, or None to measure it.")
            self._check_row()

    def _check_row(self) -> None:
        """Refuse speeds at which one row would take longer than `LONGEST`."""
        assert self.row_time is not None
        speed_W = self.trace(self.step)[0]
        slow_W = self.row_time > LONGEST * speed_W
        if slow_W.any():
            i = int(np.argmax(slow_W))
            raise ValueError(
                f"Worker {i} has the simulated speed {speed_W[i]:g}. One row takes {self.row_time:g} s at speed 1, so "
                f"here it would take more than {LONGEST:.0f} s. Raise the speed or lower the row time."
            )

    def calibrate(self, rows_W: np.ndarray, seconds_W: np.ndarray) -> None:
        """Set row_time from local phases that all workers ran at once.

        Args:
            rows_W: rows that each worker computed.
            seconds_W: seconds that they took.
        """
        ran = rows_W > 0
        self.row_time = max(self.least, MARGIN * float(np.max(seconds_W[ran] / rows_W[ran])))
        self._check_row()
        speed_W, startup_W = self.trace(self.step)
        log.info(
            "Simulated speeds %s, startups %s s: one row takes %.3g ms at speed 1.",
            speed_W.tolist(), startup_W.tolist(), 1e3 * self.row_time,
        )  # fmt: skip

    def ideal(self) -> float:
        """Return the samples per second of all workers at the current step if none ever waited."""
        assert self.row_time is not None
        return float(np.sum(self.trace(self.step)[0]) / self.row_time)

    def hold(self, worker: int, rows: float, began: float, sleep: Callable[[float], object] | None = None) -> None:
        """Block until the simulated local phase is over.

        Args:
            worker: index of the worker.
            rows: rows that it computed; shorter rows count as fractions of the longest.
            began: `time.perf_counter()` at the start of the phase.
            sleep: how to wait. Default: `time.sleep`.
        """
        if self.row_time is None:
            return
        self._check_row()
        speed_W, startup_W = self.trace(self.step)
        left = startup_W[worker] + rows * self.row_time / speed_W[worker] - (time.perf_counter() - began)
        self.phases += 1
        if left > 0:
            (sleep or time.sleep)(left)
        else:
            self.overruns += 1

    def verdict(self) -> str | None:
        """Return a warning if the devices did not keep up with their simulated speeds; None if they did."""
        if self.overruns <= OVERRUN_WARNING * self.phases:
            return None
        return (
            f"{self.overruns} of {self.phases} local phases took longer than simulated: the machine was too slow or "
            "too busy, and the speeds of this run are not the simulated ones. Use fewer workers, lower speeds, or a "
            "longer row_time (--row-time)."
        )
