"""Claim 004 (Hogbatch): one model, a CPU of 48 Hogwild threads and a GPU, against one worker alone and balanced steps.

The order of updates is that of the package's coordinator, rules and virtual clock (`hetjax.sync.hogbatch`); the replay
below computes each gradient at the parameters that its thread had read. A batch takes

    (startup + rows x row_time / speed) x noise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from studies.balancing import Costs, clocks, run_controller, trace_of
from studies.claims import Arm, Comparison
from studies.curves import Curves, Problem, Scale, evaluate, losses, sparse, spread_rates, target_of, tuned

from hetjax.engines.clocks import LocalResult
from hetjax.sampling.order import Sampler
from hetjax.sampling.ranges import Range, RangePool
from hetjax.sync.hogbatch.coordinator import AppliedUpdate, Coordinator, UpdateEvent
from hetjax.sync.hogbatch.immediate import Immediate
from hetjax.sync.hogbatch.rules import PUBLISHED_THREADS, BatchBounds, Rate, adapted_batch
from hetjax.sync.hogbatch.virtual import VirtualSchedule, VirtualTime

GPU_ROW, GPU_STARTUP = 1e-5, 1e-3  # seconds
CPU_ROW = 44 * GPU_ROW  # by all threads together: the CPU makes 98% of the updates of Hogbatch, as in the paper
LARGE, SMALL = 2048, 32  # batches of the GPU
NOISE = 0.1


@dataclass(frozen=True)
class Workers:
    """Who takes part in an asynchronous run, and how batches are chosen."""

    threads_W: tuple[int, ...]
    speed_W: tuple[float, ...]  # of all threads of a worker, in rows per GPU_ROW
    startup_W: tuple[float, ...]
    batch_W: tuple[int, ...]
    adaptive: bool = False
    scaled: bool = False  # gradients by batch / LARGE, without a cap; otherwise all updates move the model alike
    rate: float = 3.0  # middle of the learning rates to try
    longer: int = 1  # times the epochs of the GPU alone, for arms that need more


CPU = {"threads": PUBLISHED_THREADS, "speed": GPU_ROW / CPU_ROW, "startup": 0.0, "batch": PUBLISHED_THREADS}
GPU = {"threads": 1, "speed": 1.0, "startup": GPU_STARTUP, "batch": LARGE}


def workers_of(*kinds: dict[str, Any], **options: Any) -> Workers:
    """Workers of these kinds."""
    return Workers(
        *(tuple(kind[name] for kind in kinds) for name in ("threads", "speed", "startup", "batch")), **options
    )


class _Version:
    """Stands in for the shared model in the schedule: only its version matters there."""

    core = (None,) * 4
    version = 0

    @property
    def snapshot(self) -> _Version:
        return self

    def receive(self, parts: Any) -> Any:
        return parts

    def apply(self, parts: Any, scale: float, rate: float) -> tuple[int, Any]:
        self.version += 1
        return self.version, None


class _Clock(VirtualTime):
    """The package's virtual clock, with a startup for each worker."""

    def __init__(self, workers: Workers, seed: int):
        super().__init__(VirtualSchedule(seed, NOISE, workers.speed_W, GPU_ROW), len(workers.speed_W))
        self.startup_W = workers.startup_W

    def _seconds(self, worker: int, rows: int) -> float:
        factor = super()._seconds(worker, rows)
        mean = rows * GPU_ROW / self.schedule.speeds[worker]
        return factor * (mean + self.startup_W[worker]) / mean


def updates_of(workers: Workers, samples: int, epochs: int, seed: int) -> list[AppliedUpdate]:
    """The updates of a run, in order, by the coordinator on a virtual clock."""
    threads_W, batch_W = np.array(workers.threads_W), np.array(workers.batch_W)
    lower_W = np.where(threads_W > 1, threads_W, np.minimum(batch_W, SMALL))
    bounds = BatchBounds.of(np.where(threads_W > 1, 16 * threads_W, batch_W), 1, lower_W, threads_W)
    adapt = partial(adapted_batch, bounds=bounds, dead_zone=0) if workers.adaptive else None
    devices = [None] * len(batch_W)
    method = Immediate(_Version(), devices, batch_W, np.zeros(len(batch_W)), adapt=adapt, threads_W=threads_W)
    method.reset_by_epoch = True
    method.read = lambda item: setattr(item, "version", method.version) or []  # nothing to copy
    clock, pool = _Clock(workers, seed), RangePool(samples, samples * epochs)
    coordinator = Coordinator(
        pool,
        method,
        Rate(LARGE, cap=None, by_batch=workers.scaled),
        len(batch_W),
        clock=clock.clock,
        step_of=lambda samples: 0,
        threads_W=threads_W.tolist(),
    )
    compute = lambda item, leaves: LocalResult((), item.span.count, 0.0, 0.0)
    events = clock.run(coordinator, lambda item: item.span.count, method.read, compute, lambda: False)
    return [event.update for event in events if isinstance(event, UpdateEvent)]


def utilization(updates: Sequence[AppliedUpdate], workers: Workers) -> list[float]:
    """Share of the run in which each worker's threads computed."""
    busy_W = np.zeros(len(workers.threads_W))
    for update in updates:
        busy_W[update.worker] += (update.ended - update.began) / workers.threads_W[update.worker]
    return (busy_W / updates[-1].applied).tolist()


def _replay(sizes: tuple[int, ...], carry: Any, x: jax.Array, y: jax.Array, given: Any, rate: jax.Array) -> Any:
    """Some updates of one seed: each takes the gradient at its lane's copy, updates the model and reads it again.

    A branch for every batch size, chosen by an index that all seeds share: no row is computed in vain.
    """

    def gradient(size: int, params: Any, index_B: jax.Array, count: jax.Array) -> Any:
        index, used = index_B[:size], jnp.arange(size) < count
        mean = lambda p: jnp.where(used, losses(p, x[index], y[index]), 0.0).sum() / count
        return jax.grad(mean)(params)

    def step(carry: Any, given: Any) -> Any:
        (params, copies_L), (index_B, lane, which, count, scale) = carry, given
        read = jax.tree.map(lambda c: c[lane], copies_L)
        grads = jax.lax.switch(which, [partial(gradient, size) for size in sizes], read, index_B, count)
        params = jax.tree.map(lambda p, g: p - rate * scale * g, params, grads)
        copies_L = jax.tree.map(lambda c, p: c.at[lane].set(p), copies_L, params)
        return (params, copies_L), None

    return jax.lax.scan(step, carry, given)[0]


_replay_chunk = jax.jit(
    jax.vmap(_replay, in_axes=(None, 0, None, None, (0, None, None, None, None), 0)),
    static_argnums=0,
    donate_argnums=1,
)


class _Order:
    """The package's order of samples of one seed, epoch by epoch."""

    def __init__(self, size: int, seed: int):
        self.size, self.sampler = size, Sampler(size, 1, seed)
        self.epoch = cache(lambda epoch: self.sampler.indices(epoch, 0, self.size))

    def samples(self, span: Range) -> np.ndarray:
        """The samples of a range."""
        return self.epoch(span.epoch)[span.start : span.stop]


def train_updates(
    problem: Problem, updates: Sequence[AppliedUpdate], threads_W: Sequence[int], evaluations: int
) -> Any:
    """A `Train` that replays these updates with every seed's own order of samples."""
    sizes = tuple(sorted({2 ** int(np.ceil(np.log2(update.span.count))) for update in updates}))
    first_W = np.cumsum([0, *threads_W])[:-1]
    lane_U = np.array([first_W[update.worker] + update.thread for update in updates])
    count_U = np.array([update.span.count for update in updates])
    which_U = np.searchsorted(sizes, count_U)
    scale_U = np.array([update.scale for update in updates], np.float32)
    chunk = max(len(updates) // evaluations, 1)

    def train(seeds: Sequence[int], rates: np.ndarray) -> Curves:
        orders = [_Order(problem.size, seed) for seed in seeds]
        params = problem.init_all(list(seeds))
        lanes = int(np.sum(threads_W))
        carry = params, jax.tree.map(lambda p: jnp.repeat(p[:, None], lanes, axis=1), params)
        found = [np.asarray(evaluate(carry[0], problem.x, problem.y))]
        steps = len(updates) // chunk * chunk
        for start in range(0, steps, chunk):
            cut = slice(start, start + chunk)
            index = np.zeros((len(seeds), chunk, max(sizes)), np.int32)
            for own, order in zip(index, orders, strict=True):
                for row, update in zip(own, updates[cut], strict=True):
                    row[: update.span.count] = order.samples(update.span)
            given = (index, lane_U[cut], which_U[cut], count_U[cut].astype(np.float32), scale_U[cut])
            given = tuple(map(jnp.asarray, given))
            carry = _replay_chunk(sizes, carry, problem.x, problem.y, given, jnp.asarray(rates, jnp.float32))
            found.append(np.asarray(evaluate(carry[0], problem.x, problem.y)))
        return Curves(np.arange(0, steps + 1, chunk), np.stack(found, axis=1), float(rates[0]))

    return train


@dataclass(frozen=True)
class AsyncRun:
    """An asynchronous arm: its curves, when each update is applied (alike for all seeds), and further columns."""

    curves: Curves
    applied_U: np.ndarray
    more: dict[str, str]
    target: float

    @property
    def tuning_seconds(self) -> float:
        """To the target on the tuning seed; infinite if it was not reached."""
        steps = self.curves.tuning_steps
        return float(np.interp(steps, np.arange(1, len(self.applied_U) + 1), self.applied_U)) if steps > 0 else np.inf

    def arm(self) -> Arm:
        """The arm of all seeds."""
        seeds = len(self.curves.loss_SxE)
        return self.curves.arm(np.tile(self.applied_U, (seeds, 1)), self.target, **self.more)


def asynchronous(problem: Problem, workers: Workers, epochs: int, scale: Scale, target: float | None) -> AsyncRun:
    """Run an arm; without a target it is the paper's control, which sets one."""
    updates = updates_of(workers, problem.size, epochs * workers.longer, seed=0)
    train = train_updates(problem, updates, workers.threads_W, evaluations=80)
    rates = spread_rates(workers.rate, scale.seeds, 3.0)
    target = target_of(train, rates) if target is None else target
    curves = tuned(train, rates, scale.seeds, target)
    share = np.mean([workers.threads_W[update.worker] > 1 for update in updates])
    busy = " / ".join(f"{100 * part:.0f}%" for part in utilization(updates, workers))
    more = {"updates by the CPU": f"{100 * share:.0f}%", "busy": busy}
    return AsyncRun(curves, np.array([update.applied for update in updates]), more, target)


ALONE = (32, 64, 128, 256, 512)  # batches to choose from
LARGE_ALONE = f"GPU alone, batch {LARGE}"
ARMS = {
    LARGE_ALONE: workers_of(GPU),
    "CPU alone, Hogwild": workers_of(CPU, rate=0.0167),
    "Hogbatch": workers_of(CPU, GPU, rate=0.0167, longer=3),
    "Adaptive Hogbatch": workers_of(CPU, GPU, adaptive=True, scaled=True, longer=2),
    "Hogbatch, scaled by batch": workers_of(CPU, GPU, scaled=True),
    **{
        f"GPU alone, batch {batch}": workers_of(GPU | {"batch": batch}, rate=1.0 if batch < 128 else 3.0)
        for batch in ALONE
    },
}


def balanced_arm(problem: Problem, epochs: int, scale: Scale, curves: Curves, target: float, batch: int) -> Arm:
    """Synchronous steps of CPU and GPU, with counts by `balanced`, charged from the first step.

    The training is that of the GPU alone with the same batch: counts do not change it.
    """
    costs = Costs("balanced", (0.0, GPU_STARTUP), (CPU_ROW, GPU_ROW), 0.0, "")
    steps = -(-problem.size // batch) * epochs
    trace = replace(trace_of(costs, batch, steps, steps // epochs), noise=NOISE)
    runs = [run_controller("balanced", trace, seed) for seed in range(scale.seeds)]
    busy_W = np.mean([busy_in_steps(run, trace) for run in runs], axis=0)
    busy = " / ".join(f"{100 * part:.0f}%" for part in busy_W)
    return curves.arm(clocks(runs, 0.0), target, **{"updates by the CPU": "all", "busy": busy})


def busy_in_steps(run: Any, trace: Any) -> np.ndarray:
    """Share of the steps' time in which each worker computed."""
    mean_TxW = np.stack([trace.mean_times(k, counts_W) for k, counts_W in enumerate(run.counts_TxW)])
    return mean_TxW.sum(axis=0) / run.mean_times_T.sum()


def hogbatch(scale: Scale, log: Callable[[str], None], files: dict[str, Path] | None = None) -> list[Comparison]:
    """004: Hogbatch and Adaptive Hogbatch against single workers and balanced steps, on two kinds of sparse data."""
    found = []
    for kind in ("w8a", "covtype"):
        problem = sparse(kind, 4_096 if scale.quick else 16_384, 32, (files or {}).get(kind))
        epochs, runs, target = scale.epochs(16), dict[str, AsyncRun](), None
        for name, workers in ARMS.items():
            run = runs[name] = asynchronous(problem, workers, epochs, scale, target)
            target = run.target
            log(f"004 {problem.name}, {name}: rate {run.curves.rate:g}, loss {run.curves.end:.4f}")
        assert target is not None
        arms = {name: run.arm() for name, run in runs.items()}
        # The batch is chosen on the tuning seed, as learning rates are.
        tuning = {batch: runs[f"GPU alone, batch {batch}"].tuning_seconds for batch in ALONE}
        batch = min(tuning, key=tuning.__getitem__)
        best = f"GPU alone, batch {batch}"
        arms[f"balanced, batch {batch}"] = balanced_arm(problem, epochs, scale, runs[best].curves, target, batch)
        omitted = (best, f"balanced, batch {batch}")
        for method, reported in (("Hogbatch", "faster, busier"), ("Adaptive Hogbatch", "2.6x faster (real-sim)")):
            found.append(Comparison("004", problem.name, reported, method, LARGE_ALONE, omitted, arms))
    return found
