"""The Hogbatch family as syncs: `hogbatch`, `adaptive-hogbatch` and `adaptive-sgd`.

One machine, devices of any kind, no barrier: whoever is free takes the next batch (Y. Ma, F. Rusu, arXiv 2004.08771;
Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import jax
import numpy as np

from hetjax.arguments import whole
from hetjax.devices.workers import Workers
from hetjax.engines.clocks import no_hold
from hetjax.engines.specs import Chunked, EngineSpec, per_worker
from hetjax.history import History
from hetjax.reduce.base import Replicas
from hetjax.reduce.layout import Layout
from hetjax.reduce.update import State
from hetjax.sampling.ranges import RangePool
from hetjax.simulation.speeds import Simulation
from hetjax.sync.base import Job, Sync
from hetjax.sync.hogbatch.immediate import Adapt, Immediate
from hetjax.sync.hogbatch.merged import Merged
from hetjax.sync.hogbatch.method import AppliedUpdate, Method, Moment
from hetjax.sync.hogbatch.rules import ALPHA, CALMER, CAP, DEAD_ZONE, MOMENTUM, BatchBounds, adapted_batch
from hetjax.sync.hogbatch.scaling import Rate
from hetjax.sync.hogbatch.shared_model import SharedModel, home_device
from hetjax.sync.hogbatch.threads import Pause
from hetjax.sync.hogbatch.training import Training
from hetjax.sync.hogbatch.virtual import VirtualSchedule
from hetjax.sync.replicas import average

Whole = int | Sequence[int] | None


class Asynchronous(Sync):
    """What the three have in common. Batches, bounds: one number for all workers, or one each.

    batches      the first batch of each worker. Unless given: unlike kinds of device start as published, CPUs at their
                 smallest batch and the others at their largest; otherwise shares of batch_size by (simulated) speed
    smallest     the least a batch may become: a sixteenth of the largest unless given. The largest is the capacity
    scale_rate   whether gradients are scaled by their batch, min(b_E / reference, rate_cap): with SGD, momentum or not,
                 every sample then counts alike; with Adam, which normalizes gradients, updates are scaled as well
    rate_cap     4 unless given; math.inf: no limit
    reference    the batch that the learning rate was chosen for: the trainer's batch_size unless given
    schedule     factor on the rate by progress, in steps of batch_size samples (a schedule in the optimizer counts
                 updates)
    replay       a seed, or a `VirtualSchedule`: a virtual clock that repeats the same interleaving
    on_update    called with every `AppliedUpdate`, in order
    faithful     as published, where our default corrects it; what is given goes before
    """

    stepped = False

    def __init__(
        self,
        *,
        batches: Whole = None,
        smallest: Whole = None,
        scale_rate: bool = True,
        rate_cap: float | None = None,
        reference: float | None = None,
        schedule: Callable[[float], float] | None = None,
        replay: int | VirtualSchedule | None = None,
        on_update: Callable[[AppliedUpdate], None] | None = None,
        faithful: bool = False,
    ):
        if rate_cap is not None and not rate_cap > 0:
            raise ValueError(f"rate_cap is {rate_cap}: expected a number above 0; inf is no limit.")
        self.batches, self.smallest = batches, smallest
        self.scale_rate, self.reference = scale_rate, reference
        self.rate_cap = rate_cap if rate_cap is not None else inf if faithful else CAP
        self.schedule, self.on_update, self.faithful = schedule, on_update, faithful
        self.replay = (
            replay
            if replay is None or isinstance(replay, VirtualSchedule)
            else VirtualSchedule(whole("replay", replay, 0))
        )
        self.bounds: BatchBounds | None = None
        self.pause = Pause()
        self._host: dict[str, Any] = {}

    # -- what the trainer asks --

    def engine_options(
        self, workers: Workers, quantum: int, simulation: Simulation | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Microbatches of the sizes that batches move along, so that a change compiles nothing."""
        if workers.several_processes:
            raise ValueError(
                f"The sync {self.name!r} works in one process with any devices, but there are several processes. "
                "Start one, or choose another sync."
            )
        asked: EngineSpec = options["engine"]
        rungs, batch = getattr(asked, "rungs", None), options["batch"]
        capacity_W = per_worker("capacity", options["capacity"], batch, workers)
        lower_W = None if self.smallest is None else per_worker("smallest", self.smallest, 1, workers)
        self.bounds = BatchBounds.of(capacity_W, quantum, lower_W)
        most_W = None if asked.max_rows is None else per_worker("max_rows", asked.max_rows, batch, workers)
        self.pause.hold = no_hold if simulation is None or self.replay is not None else simulation.hold
        return {
            "engine": Chunked(
                None if most_W is None else most_W.tolist(),
                list(rungs) if rungs else self.bounds.rungs(most_W),
                complete=True,
            ),
            "batch": int(self.bounds.upper_W.max()),
            "capacity": self.bounds.upper_W.tolist(),
            "priced_by_rows": options["priced_by_rows"] or self.replay is not None,  # a clock never repeats itself
            "hold": self.pause,
        }

    def end_of(self, sampler: Any, cursor: int, steps: int) -> int:
        return sampler.end_of(cursor, steps)

    def fit(self, job: Job, state: State) -> tuple[State, History]:
        state = average(state)  # of the workers', where a sync before kept one set for each
        session = job.open_session(state)
        assert self.bounds is not None
        workers, resumed = job.workers, self._resumed(state)
        pool = RangePool(
            job.sampler.size, job.end, resumed.get("handed", state.cursor), map(tuple, resumed.get("undone", ()))
        )
        batch_W, updates_W = self._first_batches(job), np.zeros(len(workers), np.int64)
        if len(resumed.get("batches", ())) == len(workers):
            batch_W = np.clip(resumed["batches"], self.bounds.lower_W, self.bounds.upper_W)
            updates_W = np.array(resumed["updates"], np.int64)
        method = self._method(job, session.layout, state, batch_W, updates_W)
        if self.replay is None and job.simulation is not None and job.simulation.row_time is None:
            leaves = jax.tree.leaves((state.params, state.model_state))
            leaves_w = [jax.device_put(leaves, device) for device in workers.devices]
            job.calibrate(session, Replicas(leaves_w, [own[-1] for own in leaves_w], lambda: None))
        rate = Rate(
            reference=self.reference or self._reference(job),
            cap=self.rate_cap,
            by_batch=self.scale_rate,
            schedule=self.schedule,
            step=job.batch,
            alone=len(workers) == 1,
        )
        training = Training(
            job,
            session,
            state,
            method,
            pool,
            rate,
            pause=self.pause,
            replay=self.replay,
            remember=self._remember,
            told=resumed.get("tally", {}),
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

    def _method(self, job: Job, layout: Layout, state: State, batch_W: np.ndarray, updates_W: np.ndarray) -> Method:
        raise NotImplementedError

    def _reference(self, job: Job) -> float:
        return float(job.batch)

    def _remember(self, moment: Moment, tally: dict[str, Any]) -> None:
        self._host = moment.host | {"tally": tally}

    def _resumed(self, state: State) -> dict[str, Any]:
        """What the host remembers of this state; nothing, if it belongs to another one."""
        host = self._host
        if not host or host["handed"] - sum(stop - start for start, stop in host["undone"]) != state.cursor:
            return {}
        return host

    def _first_batches(self, job: Job) -> np.ndarray:
        bounds, workers = self.bounds, job.workers
        assert bounds is not None
        if self.batches is not None:
            given_W = per_worker("batches", self.batches, 1, workers)
            return np.array([bounds.clip(worker, batch) for worker, batch in enumerate(given_W)], np.int64)
        accelerator_W = np.array([device.platform != "cpu" for device in workers.devices])
        if accelerator_W.any() and not accelerator_W.all():
            return bounds.by_kind(accelerator_W)
        speed_W = np.ones(len(workers)) if job.simulation is None else job.simulation.trace(0)[0]
        return bounds.by_speed(speed_W, job.batch)


class Hogbatch(Asynchronous):
    """Fixed batches, each finished gradient applied at once to one shared model.

    staleness_bound   most updates of others between reading the model and one's own; None: as many as there are
    As published (`faithful`) all gradients move the model equally, however few samples they are from.
    """

    name = "hogbatch"

    def __init__(self, *, staleness_bound: int | None = None, **options: Any):
        if self.name == "hogbatch" and options.get("faithful"):
            options.setdefault("scale_rate", False)
        super().__init__(**options)
        self.staleness_bound = None if staleness_bound is None else whole("staleness_bound", staleness_bound, 0)

    def _method(self, job: Job, layout: Layout, state: State, batch_W: np.ndarray, updates_W: np.ndarray) -> Method:
        devices = job.workers.devices
        model = SharedModel(layout, job.rule(state), state.core, home_device(devices))
        return Immediate(model, devices, batch_W, updates_W, adapt=self._adapt(), bound=self.staleness_bound)

    def _adapt(self) -> Adapt | None:
        return None


class AdaptiveHogbatch(Hogbatch):
    """Batches that move so that all workers make equally many updates: by `alpha`, beyond a `dead_zone` of updates.

    As published (`faithful`) there is no dead zone and no cap on the scale; without momentum, as in the paper, scaled
    gradients are its lr_E = lr b_E / reference.
    """

    name = "adaptive-hogbatch"

    def __init__(self, *, alpha: float = ALPHA, dead_zone: int | None = None, **options: Any):
        super().__init__(**options)
        if not 1 < alpha < inf:
            raise ValueError(f"alpha is {alpha}: batches are multiplied and divided by it, so it must be above 1.")
        self.alpha = alpha
        usual = 0 if self.faithful else DEAD_ZONE
        self.dead_zone = usual if dead_zone is None else whole("dead_zone", dead_zone, 0)

    def _adapt(self) -> Adapt:
        assert self.bounds is not None
        return partial(adapted_batch, bounds=self.bounds, alpha=self.alpha, dead_zone=self.dead_zone)


class AdaptiveSgd(Asynchronous):
    """Replicas of the workers' own, merged after every mega-batch, with momentum.

    mega_batch   samples between two merges: eight times batch_size unless given
    beta         how far a batch moves per update off the mean: half of the worker's smallest batch unless given
    momentum     how much of the last move is made again: 0.5 unless given; published was 0.9
    To average N replicas divides what they learned by N, and the momentum multiplies it by 1 / (1 - momentum) in the
    long run. So the rate's reference is batch_size / N / (1 - momentum): a sample then moves the model as far as in
    sequential SGD. As published (`faithful`) the momentum is 0.9 and not made up for, and there is no cap.
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
        momentum = momentum if momentum is not None else MOMENTUM if self.faithful else CALMER
        mega_batch = None if mega_batch is None else whole("mega_batch", mega_batch, 1)
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum}: expected at least 0 and below 1.")
        self.mega_batch, self.beta, self.momentum = mega_batch, beta, momentum

    def _reference(self, job: Job) -> float:
        one = job.batch / len(job.workers)
        return one if self.faithful else one / (1 - self.momentum)

    def _method(self, job: Job, layout: Layout, state: State, batch_W: np.ndarray, updates_W: np.ndarray) -> Method:
        devices = job.workers.devices
        assert self.bounds is not None
        return Merged(
            layout,
            job.rule(state),
            state.core,
            state.more,
            devices,
            home_device(devices),
            batch_W,
            updates_W,
            bounds=self.bounds,
            quota=self.mega_batch or 8 * job.batch,
            beta_W=None if self.beta is None else np.full(len(devices), self.beta),
            momentum=self.momentum,
        )
