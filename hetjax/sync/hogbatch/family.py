"""The public syncs of the family, `hogbatch`, `adaptive-hogbatch` and `adaptive-sgd`: options, set-up, resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any

import jax
import numpy as np

from hetjax import processes
from hetjax.arguments import whole
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import no_hold
from hetjax.engines.specs import Chunked, EngineSpec, per_worker
from hetjax.history import History
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Layout
from hetjax.sampling.ranges import RangePool
from hetjax.simulation.speeds import Simulation
from hetjax.state import State
from hetjax.sync.base import FitJob, Sync
from hetjax.sync.hogbatch.coordinator import AppliedUpdate, ResumePoint
from hetjax.sync.hogbatch.immediate import AdaptBatch, Immediate, SharedModel
from hetjax.sync.hogbatch.merged import Merged
from hetjax.sync.hogbatch.method import Method
from hetjax.sync.hogbatch.rules import (
    ALPHA,
    DEAD_ZONE,
    DEFAULT_MOMENTUM,
    PUBLISHED_MOMENTUM,
    PUBLISHED_THREADS,
    SCALE_CAP,
    BatchBounds,
    Rate,
    adapted_batch,
)
from hetjax.sync.hogbatch.threads import CancellableHold
from hetjax.sync.hogbatch.training import Training
from hetjax.sync.hogbatch.virtual import VirtualSchedule
from hetjax.sync.replicas import average

PerWorker = int | Sequence[int] | None  # one number for all workers, or one each
_METRICS = "tally"  # key of the metrics in checkpoints, unchanged so that old ones load


@dataclass(frozen=True)
class MethodStart:
    """What a method starts from: the job, and what a run that is resumed has left."""

    job: FitJob
    layout: Layout
    state: State
    batch_W: np.ndarray
    updates_W: np.ndarray
    epoch: int  # in which the updates were counted


class Asynchronous(Sync):
    """Base class of the syncs without a barrier: a free worker takes the next batch.

    Args:
        batches: Initial batch of each worker. Default: with mixed kinds of devices as published, CPUs at their smallest
            batch and accelerators at their largest; otherwise shares of batch_size by (simulated) speed.
        smallest: Smallest batch of each worker (default: a sixteenth of the largest, which is the capacity).
        scale_rate: Whether to scale gradients by batch size, min(b_E / reference, rate_cap). With SGD, with or without
            momentum, every sample then has the same weight; with Adam, which normalizes gradients, updates are scaled
            as well.
        rate_cap: Upper bound of that factor (default: 4; math.inf: no bound).
        reference: Batch size that the learning rate was chosen for (default: the trainer's batch_size).
        schedule: Factor on the learning rate by progress, counted in steps of batch_size samples; a schedule in the
            optimizer counts updates.
        replay: A seed or a `VirtualSchedule`: run on a virtual clock, with a reproducible interleaving.
        on_update: Called with every `AppliedUpdate`, in order.
        faithful: Use the published rules where the defaults correct them; explicit options take precedence.

    Raises:
        ValueError: If rate_cap is not above 0, or replay is negative.
        TypeError: If replay is not a whole number.
    """

    stepped = False

    def __init__(
        self,
        *,
        batches: PerWorker = None,
        smallest: PerWorker = None,
        scale_rate: bool = True,
        rate_cap: float | None = None,
        reference: float | None = None,
        schedule: Callable[[float], float] | None = None,
        replay: int | VirtualSchedule | None = None,
        on_update: Callable[[AppliedUpdate], None] | None = None,
        faithful: bool = False,
    ):
        if rate_cap is not None and not rate_cap > 0:
            raise ValueError(f"rate_cap is {rate_cap}: expected a number above 0, or inf for no limit.")
        self.batches, self.smallest = batches, smallest
        self.scale_rate, self.reference = scale_rate, reference
        self.rate_cap = rate_cap if rate_cap is not None else inf if faithful else SCALE_CAP
        self.schedule, self.on_update, self.faithful = schedule, on_update, faithful
        self.replay = (
            replay
            if replay is None or isinstance(replay, VirtualSchedule)
            else VirtualSchedule(whole("replay", replay, 0))
        )
        self.bounds: BatchBounds | None = None
        self.hold = CancellableHold()
        self._host: dict[str, Any] = {}

    # -- the Sync interface --

    def engine_options(
        self, workers: Workers, quantum: int, simulation: Simulation | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """A ladder with the sizes batches can take, so that a change of batch compiles nothing."""
        if workers.several_processes:
            raise ValueError(
                f"The sync {self.name!r} runs in one process, on any devices, but there are several processes. "
                "Start one process, or choose another sync."
            )
        requested: EngineSpec = options["engine"]
        rungs, batch = getattr(requested, "rungs", None), options["batch"]
        capacity_W = per_worker("capacity", options["capacity"], batch, workers)
        lower_W = None if self.smallest is None else per_worker("smallest", self.smallest, 1, workers)
        self.bounds = BatchBounds.of(capacity_W, quantum, lower_W, self._threads_W(workers))
        max_rows_W = None if requested.max_rows is None else per_worker("max_rows", requested.max_rows, batch, workers)
        self.hold.threads_of = self.bounds.threads
        self.hold.hold = no_hold if simulation is None or self.replay is not None else simulation.hold
        return {
            "engine": Chunked(
                None if max_rows_W is None else max_rows_W.tolist(),
                list(rungs) if rungs else self.bounds.rungs(max_rows_W),
                complete=True,
            ),
            "batch": int(self.bounds.upper_W.max()),
            "capacity": self.bounds.upper_W.tolist(),
            "priced_by_rows": options["priced_by_rows"] or self.replay is not None,  # timings do not replay
            "hold": self.hold,
        }

    def end_of(self, sampler: Any, cursor: int, steps: int) -> int:
        return sampler.end_of(cursor, steps)

    def fit(self, job: FitJob, state: State) -> tuple[State, History]:
        state = average(state)  # another sync may have left one set of parameters per worker
        session = job.open_session(state)
        assert self.bounds is not None
        workers, resumed = job.workers, self._resumed(state)
        pool = RangePool(
            job.sampler.size, job.end, resumed.get("handed", state.cursor), map(tuple, resumed.get("undone", ()))
        )
        batch_W, updates_W = self._initial_batches(job), np.zeros(len(workers), np.int64)
        if len(resumed.get("batches", ())) == len(workers):
            batch_W = np.clip(resumed["batches"], self.bounds.lower_W, self.bounds.upper_W)
            updates_W = np.array(resumed["updates"], np.int64)
        epoch = resumed.get("epoch", state.cursor // job.sampler.size)
        method = self._method(MethodStart(job, session.layout, state, batch_W, updates_W, epoch))
        if self.replay is None and job.simulation is not None and job.simulation.row_time is None:
            leaves = jax.tree.leaves((state.params, state.model_state))
            leaves_w = [jax.device_put(leaves, device) for device in workers.own]
            job.calibrate(session, Replicas(leaves_w, [own[-1] for own in leaves_w], lambda: None))
        rate = Rate(
            reference=self.reference or self._reference(job),
            cap=self.rate_cap,
            by_batch=self.scale_rate,
            schedule=self.schedule,
            step_size=job.batch,
            single_worker=len(workers) == 1,
        )
        training = Training(
            job,
            session,
            state,
            method,
            pool,
            rate,
            hold=self.hold,
            threads_W=self.bounds.threads_W,
            replay=self.replay,
            keep_host_state=self._keep_host_state,
            saved_metrics=resumed.get(_METRICS, {}),
            on_update=self.on_update,
        )
        history = History(engine=session.engine.name, transport="shared", controller=self.name, workers=len(workers))
        return training.run(history)

    def answer(self, state: State) -> State:
        return replace(state, more=None)

    def state_dict(self) -> dict[str, Any]:
        return self._host

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._host = dict(saved)

    # -- set-up --

    def _method(self, start: MethodStart) -> Method:
        raise NotImplementedError

    def _threads_W(self, workers: Workers) -> np.ndarray | None:
        """Threads of each worker; None: 1 each."""
        return None

    def _reference(self, job: FitJob) -> float:
        return float(job.batch)

    def _keep_host_state(self, resume_point: ResumePoint, metrics: dict[str, Any]) -> None:
        self._host = resume_point.host | {_METRICS: metrics}

    def _resumed(self, state: State) -> dict[str, Any]:
        """The host state saved with this state; empty if it belongs to another one."""
        host = self._host
        if not host or host["handed"] - sum(stop - start for start, stop in host["undone"]) != state.cursor:
            return {}
        return host

    def _initial_batches(self, job: FitJob) -> np.ndarray:
        bounds, workers = self.bounds, job.workers
        assert bounds is not None
        if self.batches is not None:
            given_W = per_worker("batches", self.batches, 1, workers)
            return np.array([bounds.clip(worker, batch) for worker, batch in enumerate(given_W)], np.int64)
        accelerator_W = np.array([device.platform != "cpu" for device in workers.own])
        if accelerator_W.any() and not accelerator_W.all():
            return bounds.by_kind(accelerator_W)
        speed_W = np.ones(len(workers)) if job.simulation is None else job.simulation.trace(0)[0]
        return bounds.by_speed(speed_W, job.batch)


class Hogbatch(Asynchronous):
    """Fixed batches; each finished gradient is applied to one shared model on arrival.

    Y. Ma, F. Rusu, arXiv 2004.08771. As published (`faithful`), gradients are not scaled by batch size: all move the
    model equally, however few their samples.

    Args:
        staleness_bound: Most updates by others between reading the model and one's own update (default: no bound).
        threads: Hogwild threads of each worker. Each takes its part of the worker's batch, and reads, computes and
            updates without waiting for the others (default: 1; if faithful, CPUs beside accelerators get one per
            core that the process may use, with `replay` the published 48).
        **options: See `Asynchronous`.

    Raises:
        ValueError: If staleness_bound is negative, or threads below 1.
        TypeError: If staleness_bound is not a whole number.
    """

    name = "hogbatch"

    def __init__(self, *, staleness_bound: int | None = None, threads: PerWorker = None, **options: Any):
        if self.name == "hogbatch" and options.get("faithful"):
            options.setdefault("scale_rate", False)
        super().__init__(**options)
        self.threads, self.beta = threads, 1.0
        self.staleness_bound = None if staleness_bound is None else whole("staleness_bound", staleness_bound, 0)

    def _method(self, start: MethodStart) -> Method:
        job, state, devices = start.job, start.state, start.job.workers.own
        assert self.bounds is not None
        return Immediate(
            SharedModel(start.layout, job.rule(state), state.core, home_device(devices)),
            devices,
            start.batch_W,
            start.updates_W,
            adapt=self._adapt(),
            bound=self.staleness_bound,
            threads_W=self.bounds.threads_W,
            beta=self.beta,
            reset_by_epoch=self.faithful,
            epoch=start.epoch,
        )

    def _threads_W(self, workers: Workers) -> np.ndarray | None:
        if self.threads is not None:
            return per_worker("threads", self.threads, 1, workers)
        cpu_W = np.array([device.platform == "cpu" for device in workers.own])
        if not self.faithful or cpu_W.all():
            return None
        return np.where(cpu_W, processes.usable_cores() if self.replay is None else PUBLISHED_THREADS, 1)

    def _adapt(self) -> AdaptBatch | None:
        return None


class AdaptiveHogbatch(Hogbatch):
    """Hogbatch whose batches adapt until all workers make equally many updates (see `rules.adapted_batch`).

    Y. Ma, F. Rusu, arXiv 2004.08771. As published (`faithful`), there is no dead zone and no cap on the scale, and
    updates are counted anew in every epoch. Without momentum, as in the paper, scaling gradients equals its
    lr_E = lr b_E / reference.

    Args:
        alpha: Factor of a change of batch.
        beta: Weight of the updates of a worker with several threads, where workers are compared (default: 1).
        dead_zone: Batches move only when a worker is off the others by more updates than this (default: 4).
        **options: See `Hogbatch`.

    Raises:
        ValueError: If alpha is not above 1, beta not above 0, or dead_zone negative.
        TypeError: If dead_zone is not a whole number.
    """

    name = "adaptive-hogbatch"

    def __init__(self, *, alpha: float = ALPHA, beta: float = 1.0, dead_zone: int | None = None, **options: Any):
        super().__init__(**options)
        if not 1 < alpha < inf:
            raise ValueError(f"alpha is {alpha}: batches are multiplied and divided by it, so it must be above 1.")
        if not 0 < beta < inf:
            raise ValueError(f"beta is {beta}: expected the weight of a thread's update, above 0.")
        self.alpha, self.beta = alpha, beta
        default = 0 if self.faithful else DEAD_ZONE
        self.dead_zone = default if dead_zone is None else whole("dead_zone", dead_zone, 0)

    def _adapt(self) -> AdaptBatch:
        assert self.bounds is not None
        return partial(adapted_batch, bounds=self.bounds, alpha=self.alpha, dead_zone=self.dead_zone)


class AdaptiveSgd(Asynchronous):
    """Each worker trains its own replica; replicas are merged, with momentum, after every mega-batch.

    Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029. The mean of N replicas divides what they learned by N, and momentum
    multiplies it by 1 / (1 - momentum) in the long run. The default reference is therefore
    batch_size / N / (1 - momentum): a sample moves the model as far as in sequential SGD. As published (`faithful`),
    momentum is 0.9 and not compensated for, and the scale has no cap.

    Args:
        mega_batch: Samples between two merges (default: 8 batch_size).
        beta: Change of a batch per update off the mean (default: half of the worker's smallest batch).
        momentum: Of the merges, at least 0 and below 1 (default: 0.5; published: 0.9).
        **options: See `Asynchronous`.

    Raises:
        ValueError: If mega_batch is below 1, or momentum out of range.
        TypeError: If mega_batch is not a whole number.
    """

    name = "adaptive-sgd"

    def __init__(
        self,
        *,
        mega_batch: int | None = None,
        beta: float | None = None,
        momentum: float | None = None,
        **options: Any,
    ):
        super().__init__(**options)
        momentum = momentum if momentum is not None else PUBLISHED_MOMENTUM if self.faithful else DEFAULT_MOMENTUM
        mega_batch = None if mega_batch is None else whole("mega_batch", mega_batch, 1)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: expected at least 0 and below 1.")
        self.mega_batch, self.beta, self.momentum = mega_batch, beta, momentum

    def _reference(self, job: FitJob) -> float:
        share = job.batch / len(job.workers)
        return share if self.faithful else share / (1 - self.momentum)

    def _method(self, start: MethodStart) -> Method:
        job, state, devices = start.job, start.state, start.job.workers.own
        assert self.bounds is not None
        return Merged(
            start.layout,
            job.rule(state),
            state.core,
            state.more,
            devices,
            home_device(devices),
            start.batch_W,
            start.updates_W,
            bounds=self.bounds,
            quota=self.mega_batch or 8 * job.batch,
            beta_W=None if self.beta is None else np.full(len(devices), self.beta),
            momentum=self.momentum,
        )


def home_device(devices: tuple[jax.Device, ...]) -> jax.Device:
    """Where the shared model lives: on a CPU device, if there is one.

    On an accelerator, an update would queue behind the batch being computed there.
    """
    for device in devices:
        if device.platform == "cpu":
            return device
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return devices[0]
