"""Claims 000 (dynamic partition) and 001 (DBS): the time of controllers on virtual workers, and what weights cost.

The law of every arm is the package's controller. A step takes as long as its slowest worker, plus the exchange:

    max over workers of (startup + rows x row_time / speed) x noise + exchange
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from studies.claims import Arm, Comparison
from studies.curves import (
    TUNING_SEED,
    Problem,
    Scale,
    images,
    sample_weights,
    spread_rates,
    target_of,
    train_sgd,
    tuned,
)

from hetjax.planning.controllers import make
from hetjax.planning.limits import Limits
from hetjax.planning.simulator import SimulatedRun, Trace, best_times, simulate
from hetjax.sampling.order import Sampler

NOISE = 0.03  # sd of the logarithm of a worker's time


@dataclass(frozen=True)
class Costs:
    """True costs of a setting."""

    name: str
    startup_W: tuple[float, ...]  # seconds per step
    row_W: tuple[float, ...]  # seconds per row
    exchange: float  # seconds per step
    reported: str
    gain_reported: bool = True


# Times of the authors' own logs (github.com/vineeths96/Heterogeneous-Systems): `batch.process` at 128 rows of the
# synchronous runs, the constant delay of one of the two workers, and `batch` less the slower `batch.process`. Reported:
# `batch` of worker 0 with dynamic partition against without.
PARTITION = (
    Costs("ResNet-50, 0.1 s", (0.0, 0.1), (0.221 / 128,) * 2, 0.0474, "-24% (like for like -14%)"),
    Costs("ResNet-50, 0.2 s", (0.0, 0.2), (0.221 / 128,) * 2, 0.0474, "-21%"),
    Costs("VGG-16, 0.01 s", (0.0, 0.01), (0.0358 / 128,) * 2, 0.0196, "+2%", False),
    Costs("VGG-16, 0.02 s", (0.0, 0.02), (0.0358 / 128,) * 2, 0.0192, "-2%", False),
)
# Three workers share a GPU. The paper gives no times: an epoch of equal counts lasts about a minute.
DBS = Costs("rates 1/3, 1/3, 1/3, 1", (0.0,) * 4, (4.5e-3, 4.5e-3, 4.5e-3, 1.5e-3), 0.045, "less time")
DISTURBED = (
    replace(DBS, name="equal workers, disturbed", row_W=(1.5e-3,) * 4, reported="robust"),
    replace(DBS, name="the same, in epochs of a minute", row_W=(4.5e-3,) * 4, reported="robust"),
)


def trace_of(costs: Costs, batch: int, steps: int, epoch_steps: int, delay_TxW: np.ndarray | None = None) -> Trace:
    """The costs as a trace, with further seconds of each step if given."""
    startup_TxW = np.asarray(costs.startup_W)[None] + (0.0 if delay_TxW is None else delay_TxW)
    limits = Limits.plain(len(costs.row_W), batch)
    row_TxW = np.broadcast_to(np.array(costs.row_W), startup_TxW.shape)
    return Trace(costs.name, batch, startup_TxW, row_TxW, steps, NOISE, limits, epoch_steps=epoch_steps)


def run_controller(name: str, trace: Trace, seed: int, **options: object) -> SimulatedRun:
    """One controller on a trace; the oracle knows its mean costs, the others learn of a step after the next is planned.

    The faithful form of a law is named `NAME, faithful`.
    """
    eps_TxW = trace.draw(seed)
    if name == "oracle":
        counts_TxW, mean_T = best_times(trace)
        times_TxW = np.stack([trace.mean_times(k, counts_W) for k, counts_W in enumerate(counts_TxW)]) * eps_TxW
        return SimulatedRun(times_TxW.max(axis=1), mean_T, np.zeros(trace.steps, bool), counts_TxW)
    law, _, form = name.partition(", ")
    law, _, every = law.partition("@")
    options |= {"faithful": True} if form == "faithful" else {}
    options |= {"every": int(every)} if every else {}
    return simulate(make(law, **options), trace, eps_TxW, delay=1)


def clocks(runs: Sequence[SimulatedRun], exchange: float) -> np.ndarray:
    """When each step of each seed ends."""
    return np.stack([np.cumsum(run.times_T + exchange) for run in runs])


def index_for(problem: Problem, batch: int, epochs: int) -> Callable[[int], np.ndarray]:
    """Seed -> the samples of every full step, in the package's order."""
    steps = problem.size // batch

    def index_of(seed: int) -> np.ndarray:
        sampler = Sampler(problem.size, batch, seed)
        return np.concatenate(
            [sampler.indices(epoch, 0, steps * batch).reshape(steps, batch) for epoch in range(epochs)]
        )

    return index_of


def dynamic_partition(scale: Scale, log: Callable[[str], None]) -> list[Comparison]:
    """000: equal counts against dp and edp, as published and corrected; static, balanced and oracle."""
    batch, problem, epochs = 256, images(12_800 if scale.quick else 50_000), scale.epochs(16)
    epoch_steps = problem.size // batch
    steps, index_of = epochs * epoch_steps, index_for(problem, batch, epochs)
    chunk, rates = max(epoch_steps // 8, 1), spread_rates(0.2, scale.seeds)
    training = lambda weight_of: train_sgd(problem, index_of, weight_of, chunk)
    alike = training(lambda seed: np.full((steps, batch), 1 / batch))
    target, found = target_of(alike, rates), list[Comparison]()
    unbiased = tuned(alike, rates, scale.seeds, target)
    log(f"000: unbiased training, rate {unbiased.rate:g}, target {target:.3f}")
    for costs in PARTITION[1:3] if scale.quick else PARTITION:
        trace, arms = trace_of(costs, batch, steps, epoch_steps), dict[str, Arm]()
        for name in ("equal", "dp, faithful", "edp, faithful", "dp", "edp", "static", "balanced", "oracle"):
            runs, curves = [run_controller(name, trace, seed) for seed in range(scale.seeds)], unbiased
            if name.endswith("faithful"):
                by_seed = {**dict(enumerate(runs)), TUNING_SEED: run_controller(name, trace, TUNING_SEED)}
                weights = {seed: sample_weights(run.counts_TxW, run.weights_TxW) for seed, run in by_seed.items()}
                curves = tuned(training(weights.__getitem__), rates, scale.seeds, target)
            split = "/".join(f"{count:.0f}" for count in np.mean([run.counts_TxW[-1] for run in runs], axis=0))
            arms[name] = curves.arm(clocks(runs, costs.exchange), target, **{"last split": split})
            log(f"000 {costs.name}, {name}: {np.mean(arms[name].run_S):.0f} s")
        row = Comparison(
            "000", costs.name, costs.reported, "dp, faithful", "equal", ("static", "balanced"), arms,
            gain_reported=costs.gain_reported,
        )  # fmt: skip
        found += [row, replace(row, setting=f"{costs.name}, corrected weights", method="dp")]
    return found


def disturbance(seed: int, epochs: int, epoch_steps: int, workers: int) -> np.ndarray:
    """Seconds that each step of each worker loses.

    With probability 0.1 per epoch, one worker loses 5 to 10 s per epoch for the next 4 to 20 epochs (DBS, arXiv
    2007.11831).
    """
    rng, delay_ExW = np.random.default_rng([11, seed]), np.zeros((epochs, workers))
    for epoch in range(epochs):
        if rng.random() < 0.1:
            worker, length = rng.integers(workers), rng.integers(4, 21)
            delay_ExW[epoch : epoch + length, worker] += rng.uniform(5, 10) / epoch_steps
    return np.repeat(delay_ExW, epoch_steps, axis=0)


def dynamic_batch_size(scale: Scale, log: Callable[[str], None]) -> list[Comparison]:
    """001: equal counts against DBS once an epoch, static, DBS every 5 steps, balanced and oracle; then disturbed.

    All arms weigh samples alike, so that a given number of steps is the same training: one curve serves all.
    """
    batch, problem, epochs = 512, images(12_800 if scale.quick else 50_000), scale.epochs(8)
    epoch_steps, timed = problem.size // batch, scale.epochs(60)
    steps, chunk = epochs * epoch_steps, max(epoch_steps // 8, 1)
    alike = lambda seed: np.full((steps, batch), 1 / batch)
    train = train_sgd(problem, index_for(problem, batch, epochs), alike, chunk)
    rates = spread_rates(0.2, scale.seeds)
    target, found = target_of(train, rates), list[Comparison]()
    curves = tuned(train, rates, scale.seeds, target)
    log(f"001: training, rate {curves.rate:g}, target {target:.3f}")
    for costs in (DBS, *DISTURBED):
        arms = {}
        for name in ("equal", "dbs", "static", "dbs@5", "balanced", "oracle"):
            runs = []
            for seed in range(scale.seeds):
                delay_TxW = None if costs is DBS else disturbance(seed, timed, epoch_steps, len(costs.row_W))
                trace = trace_of(costs, batch, timed * epoch_steps, epoch_steps, delay_TxW)
                runs.append(run_controller(name, trace, seed))
            clock_SxT = clocks(runs, costs.exchange)
            changes = np.mean([run.changed_T.sum() for run in runs])
            arm = curves.arm(clock_SxT, target, **{"changes of the split": f"{changes:.0f}"})
            arms[name] = replace(arm, run_S=clock_SxT[:, -1])  # of all epochs: disturbances are rare
            log(f"001 {costs.name}, {name}: {np.mean(arms[name].run_S):.0f} s")
        omitted = ("static", "dbs@5", "balanced")
        found.append(Comparison("001", costs.name, costs.reported, "dbs", "equal", omitted, arms, "run_S"))
    return found
