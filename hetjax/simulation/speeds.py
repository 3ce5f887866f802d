"""Simulated speeds: unlike workers on like devices, charged honestly.

A worker's local phase lasts max(real time, startup_i + rows x row_time / speed_i), for the ROWS IT COMPUTED, padding
included, so an engine that saves nothing shows no gain. `row_time` is measured once with all workers computing, plus
50%, and stays fixed for the run; the ideal is sum_i speed_i / row_time samples a second. A phase that takes longer than
its simulated time is an overrun; above 2% of the phases the run warns that its speeds were not the simulated ones.
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
LONGEST = 3600.0  # seconds of one row, or of a startup

Trace = Callable[[int], tuple[np.ndarray, np.ndarray]]  # step -> (speed_W, startup_W)


def constant(speeds: Sequence[float], startup: Sequence[float] | float = 0.0) -> Trace:
    """The same speeds (relative: 1, 0.5, ...) and startups (seconds a step) for ever."""
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
    """The trace of the workers that an elastic run goes on with; see `hetjax.fleet.membership`."""
    given = len(trace(0)[0])
    if len(kept := kept_entries(given, workers)) == given:
        return trace

    def of_kept(step: int) -> tuple[np.ndarray, np.ndarray]:
        speed_W, startup_W = trace(step)
        return speed_W[kept], startup_W[kept]

    return of_kept


def check_speeds(speed_W: np.ndarray, startup_W: np.ndarray) -> None:
    if speed_W.ndim != 1 or speed_W.shape != startup_W.shape:
        raise ValueError(f"Simulated speeds are one number per worker; got speeds {speed_W} and startups {startup_W}.")
    if not (np.isfinite(speed_W).all() and (speed_W > 0).all()):
        raise ValueError(f"Simulated speeds must be positive numbers such as 1, 1, 0.5; got {speed_W.tolist()}.")
    if not ((startup_W >= 0) & (startup_W <= LONGEST)).all():  # a NaN is neither
        raise ValueError(
            f"Simulated startups are seconds, zero or more and at most {LONGEST:.0f}; got {startup_W.tolist()}."
        )


@dataclass
class Simulation:
    """Speeds for a run, its calibration, and the count of overruns. One object per run."""

    trace: Trace
    row_time: float | None = None
    least: float = 0.0  # seconds that row_time is raised to, so that the phases of a tiny model stand above the noise
    step: int = 0
    phases: int = 0
    overruns: int = 0

    def __post_init__(self) -> None:
        if self.row_time is not None:
            if not 0 < self.row_time < np.inf:
                raise ValueError(f"row_time is {self.row_time}: expected seconds above 0, or None to measure it.")
            self._check_row()

    def _check_row(self) -> None:
        """Refuse speeds at which one row would take for ever."""
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
        """Fix row_time from phases that all workers ran at once."""
        ran = rows_W > 0
        self.row_time = max(self.least, MARGIN * float(np.max(seconds_W[ran] / rows_W[ran])))
        self._check_row()
        speed_W, startup_W = self.trace(self.step)
        log.info(
            "Simulated speeds %s, startups %s s: one row takes %.3g ms at speed 1.",
            speed_W.tolist(), startup_W.tolist(), 1e3 * self.row_time,
        )  # fmt: skip

    def ideal(self) -> float:
        """Samples per second of all workers together at the present step, each always busy and never waiting."""
        assert self.row_time is not None
        return float(np.sum(self.trace(self.step)[0]) / self.row_time)

    def hold(self, worker: int, rows: int, began: float, sleep: Callable[[float], object] | None = None) -> None:
        """Return when the simulated phase is over. `sleep`: another way to wait than time.sleep."""
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
        """A warning when the devices could not keep up with their simulated speeds."""
        if self.overruns <= OVERRUN_WARNING * self.phases:
            return None
        return (
            f"{self.overruns} of {self.phases} local phases took longer than simulated: the machine was too slow or "
            "too busy, and the speeds of this run are not the ones asked for. Use fewer workers or lower speeds."
        )
