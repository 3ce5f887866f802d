"""The traces of the controller bench, reproducible from a seed.

Rates are in thousands of samples per second. A worker's mean time for n samples is startup + n / rate, the startup
being `share` of the ideal step time batch / sum(rates). Noise is log-normal with mean 1 for every worker and step;
`noise` is the sd of ln t. Defaults: N = 4, B = 512, share = 0.05, noise = 0.05, epochs of 20 steps.

| trace | kind | content |
|---|---|---|
| hetero2, hetero6, hetero10 | quiet | rates 2 1.6 1.3 1; 6 4 2 1; 10 6 3 1 |
| noise2 ... noise20 | quiet | rates 3 2 1.5 1, noise 0.02, 0.05, 0.10, 0.15, 0.20 |
| lag | quiet | equal rates; worker 3 has an additional startup of 0.6 of the ideal step time |
| caps | quiet | rates 6 4 2 1; capacities 150 150 512 512, of which the first two bind |
| slow50 | quiet | rates 1 1 1 0.02 |
| fleet1024 | quiet | N = 1,024, B = 32,768; 50% at 1, 30% at 0.75, 20% at 0.5, each +- 8%; shuffled |
| step | disturbed | rates 3 2 1.5 1; worker 0 becomes 2x slower at 1/4, worker 2 at 1/2; both recover at 3/4 |
| drift | disturbed | rates 3 2 1.5 1; cost of worker 0 times 1 .. 2, of worker 3 times 1 .. 0.6 in 1,200 steps |
| dbs | disturbed | equal rates, epochs of 30 s; with probability 0.1 a worker loses 5-10 s per epoch for 4-20 epochs |
| bursts | disturbed | rates 3 2 1.5 1; with probability 1/250 per step a worker is 1.5-3x slower for 10-60 steps |
| spikes | disturbed | rates 3 2 1.5 1; with probability 1/200 a single step of a worker takes 3-10x as long |
| recovery | disturbed | rates 3 2 1.5 1; worker 1 becomes 2x slower at 1/2; to count the steps to recover |
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hetjax.planning.limits import Limits
from hetjax.planning.simulator import Trace

MIXED = (3.0, 2.0, 1.5, 1.0)


def constant(
    name: str,
    rates: tuple[float, ...] | np.ndarray = MIXED,
    *,
    steps: int,
    noise: float = 0.05,
    batch: int = 512,
    share: float = 0.05,
    capacity: list[int] | None = None,
) -> Trace:
    """A trace of constant costs, from which the others are made."""
    rate_W = 1000.0 * np.asarray(rates)
    workers, ideal = len(rate_W), batch / rate_W.sum()
    limits = Limits(
        capacity_W=np.full(workers, batch) if capacity is None else np.array(capacity),
        minimum_W=np.zeros(workers, np.int64),
        quantum=1,
        kind_W=np.zeros(workers, np.int64),
        stairs=(np.arange(batch + 1, dtype=np.float64),),
    )
    return Trace(name, batch, np.full((1, workers), share * ideal), 1.0 / rate_W[None], steps, noise, limits)


def varying(base: Trace, factor_TxW: np.ndarray, extra_TxW: np.ndarray | None = None) -> Trace:
    """`base` with its costs times a factor per step and worker, plus extra seconds of startup."""
    startup_TxW = base.startup_TxW * factor_TxW + (0.0 if extra_TxW is None else extra_TxW)
    per_work_TxW = np.broadcast_to(base.per_work_TxW * factor_TxW, startup_TxW.shape)
    return Trace(base.name, base.batch, startup_TxW, per_work_TxW, base.steps, base.noise, base.limits)


def lag(steps: int, seed: int) -> Trace:
    """Equal rates; worker 3 has an additional startup."""
    base = constant("lag", (1.0, 1.0, 1.0, 1.0), steps=steps)
    extra_TxW = np.array([[0.0, 0.0, 0.0, 0.6 * base.batch / 4000.0]])
    return varying(base, np.ones((1, 4)), extra_TxW)


def fleet(steps: int, seed: int) -> Trace:
    """1,024 workers of three speeds."""
    rng = np.random.default_rng([seed, 1024])
    rate_W = np.repeat([1.0, 0.75, 0.5], [512, 307, 205]) * (1.0 + 0.08 * rng.uniform(-1.0, 1.0, 1024))
    return constant("fleet1024", rng.permutation(rate_W), steps=steps, batch=32 * 1024)


def step_change(steps: int, seed: int) -> Trace:
    """Two workers become slower one after the other, and recover."""
    factor_TxW = np.ones((steps, 4))
    factor_TxW[steps // 4 : 3 * steps // 4, 0] = 2.0
    factor_TxW[steps // 2 : 3 * steps // 4, 2] = 2.0
    return varying(constant("step", steps=steps), factor_TxW)


def drift(steps: int, seed: int) -> Trace:
    """One worker slows down and another speeds up, steadily."""
    factor_TxW = np.ones((steps, 4))
    factor_TxW[:, 0] = 1.0 + np.arange(steps) / 1200
    factor_TxW[:, 3] = 1.0 - 0.4 * np.arange(steps) / 1200
    return varying(constant("drift", steps=steps), factor_TxW)


def dbs_disturbance(steps: int, seed: int) -> Trace:
    """The disturbances of the DBS paper: workers that lose some seconds per epoch for several epochs."""
    rng = np.random.default_rng([seed, 7])
    base = constant("dbs", (1.0, 1.0, 1.0, 1.0), steps=steps)
    step_seconds = base.batch / 4000.0
    second = step_seconds * base.epoch_steps / 30.0  # of a 30 s epoch, in virtual seconds
    extra_TxW = np.zeros((steps, 4))
    for start in range(0, steps, base.epoch_steps):
        for worker in range(4):
            if rng.random() < 0.1 and not extra_TxW[start, worker]:
                stop = start + int(rng.integers(4, 21)) * base.epoch_steps
                extra_TxW[start:stop, worker] = rng.uniform(5.0, 10.0) * second / base.epoch_steps
    return varying(base, np.ones((1, 4)), extra_TxW)


def bursts(steps: int, seed: int) -> Trace:
    """Workers that are slower for 10 to 60 steps."""
    rng = np.random.default_rng([seed, 11])
    factor_TxW = np.ones((steps, 4))
    for step in range(steps):
        for worker in range(4):
            if rng.random() < 1 / 250 and factor_TxW[step, worker] == 1.0:
                factor_TxW[step : step + int(rng.integers(10, 61)), worker] = rng.uniform(1.5, 3.0)
    return varying(constant("bursts", steps=steps), factor_TxW)


def spikes(steps: int, seed: int) -> Trace:
    """Single steps of a worker that take 3-10x as long."""
    rng = np.random.default_rng([seed, 13])
    base = constant("spikes", steps=steps)
    hit_TxW = rng.random((steps, 4)) < 1 / 200
    spike_TxW = np.where(hit_TxW, rng.uniform(3.0, 10.0, (steps, 4)), 1.0)
    return Trace(base.name, base.batch, base.startup_TxW, base.per_work_TxW, steps, base.noise, base.limits, spike_TxW)


def recovery(steps: int, seed: int, noise: float = 0.05) -> Trace:
    """One worker becomes 2x slower halfway."""
    factor_TxW = np.ones((steps, 4))
    factor_TxW[steps // 2 :, 1] = 2.0
    return varying(constant("recovery", steps=steps, noise=noise), factor_TxW)


def _noise(percent: int) -> Callable[[int, int], Trace]:
    return lambda steps, seed: constant(f"noise{percent}", steps=steps, noise=percent / 100.0)


QUIET: dict[str, Callable[[int, int], Trace]] = {
    "hetero2": lambda steps, seed: constant("hetero2", (2.0, 1.6, 1.3, 1.0), steps=steps),
    "hetero6": lambda steps, seed: constant("hetero6", (6.0, 4.0, 2.0, 1.0), steps=steps),
    "hetero10": lambda steps, seed: constant("hetero10", (10.0, 6.0, 3.0, 1.0), steps=steps),
    **{f"noise{percent}": _noise(percent) for percent in (2, 5, 10, 15, 20)},
    "lag": lag,
    "caps": lambda steps, seed: constant("caps", (6.0, 4.0, 2.0, 1.0), steps=steps, capacity=[150, 150, 512, 512]),
    "slow50": lambda steps, seed: constant("slow50", (1.0, 1.0, 1.0, 0.02), steps=steps),
    "fleet1024": fleet,
}
DISTURBED: dict[str, Callable[[int, int], Trace]] = {
    "step": step_change,
    "drift": drift,
    "dbs": dbs_disturbance,
    "bursts": bursts,
    "spikes": spikes,
    "recovery": recovery,
}
