"""A controller in virtual time, against workers whose true costs follow a trace. No devices, no sleeping.

In step k worker i takes (startup_k,i + per_work_k,i x_i) eps_k,i for work x_i > 0, with eps log-normal noise of mean 1
times the spikes of the trace; the step takes as long as its slowest worker. The controller sees only these times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Controller, Observation
from hetjax.planning.limits import Limits


@dataclass(frozen=True)
class Trace:
    """The true mean costs of every step, and the noise on them."""

    name: str
    batch: int
    startup_TxW: np.ndarray  # seconds; a trace of one row is constant
    per_work_TxW: np.ndarray
    steps: int
    noise: float  # sd of ln eps
    limits: Limits
    spike_TxW: np.ndarray | None = None  # unpredictable factors
    epoch_steps: int = 20

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.limits.workers

    def costs(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """(startup_W, per_work_W) of a step."""
        row = min(step, len(self.startup_TxW) - 1)
        return self.startup_TxW[row], self.per_work_TxW[row]

    def mean_times(self, step: int, counts_W: np.ndarray) -> np.ndarray:
        """Noise-free time of each worker."""
        startup_W, per_work_W = self.costs(step)
        return np.where(counts_W > 0, startup_W + per_work_W * self.limits.work(counts_W), 0.0)

    def draw(self, seed: int) -> np.ndarray:
        """Draw eps for every step and worker, the same for all controllers."""
        normal_TxW = np.random.default_rng(seed).standard_normal((self.steps, self.workers))
        eps_TxW = np.exp(self.noise * normal_TxW - 0.5 * self.noise * self.noise)
        return eps_TxW if self.spike_TxW is None else eps_TxW * self.spike_TxW


@dataclass(frozen=True)
class SimulatedRun:
    """Per step: its time, its noise-free time, whether the plan changed, the counts, and the weights."""

    times_T: np.ndarray
    mean_times_T: np.ndarray
    changed_T: np.ndarray
    counts_TxW: np.ndarray
    weights_TxW: np.ndarray | None = None  # of a sample of each worker; None: not recorded


def simulate(controller: Controller, trace: Trace, eps_TxW: np.ndarray, delay: int) -> SimulatedRun:
    """Run a controller on a trace. A timing reaches the plans `delay` steps later; the trainer's delay is 1."""
    steps, limits = trace.steps, trace.limits
    times_T, mean_times_T, changed_T = np.zeros(steps), np.zeros(steps), np.zeros(steps, bool)
    counts_TxW = np.zeros((steps, trace.workers), np.int64)
    weights_TxW = np.ones((steps, trace.workers))
    pending: list[Observation] = []
    for step in range(steps):
        epoch = step // trace.epoch_steps
        plan = controller.plan(trace.batch, limits, epoch)
        counts_W, weights_TxW[step] = plan.counts_W, 1.0 if plan.weights_W is None else plan.weights_W
        mean_W = trace.mean_times(step, counts_W)
        times_W = np.round(mean_W * eps_TxW[step], 6)
        times_T[step], mean_times_T[step] = times_W.max(), mean_W.max()
        counts_TxW[step] = counts_W
        changed_T[step] = step > 0 and bool(np.any(counts_W != counts_TxW[step - 1]))
        pending.append(Observation(counts_W, limits.work(counts_W), times_W, epoch, step))
        if len(pending) > delay:
            controller.observe(pending.pop(0))
    return SimulatedRun(times_T, mean_times_T, changed_T, counts_TxW, weights_TxW)


def best_times(trace: Trace, staleness: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's counts for every step, from costs `staleness` steps old, and their noise-free time."""
    counts_TxW = np.zeros((trace.steps, trace.workers), np.int64)
    time_T = np.zeros(trace.steps)
    known: tuple[np.ndarray, np.ndarray] | None = None
    counts_W: np.ndarray | None = None
    for step in range(trace.steps):
        costs = trace.costs(max(step - staleness, 0))
        if known is None or any(not np.array_equal(a, b) for a, b in zip(known, costs, strict=True)):
            known, counts_W = costs, solve(*costs, trace.limits, trace.batch, counts_W).counts_W
        assert counts_W is not None
        counts_TxW[step], time_T[step] = counts_W, trace.mean_times(step, counts_W).max()
    return counts_TxW, time_T
