"""The step: one balanced, data-parallel training step over workers of unequal speed, for any training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from hetjax import presets
from hetjax.adapters.probe import check_model_state, probe_indices, probe_size, warn_of_idle_workers
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, number, whole
from hetjax.data.batches import HostBatch, as_batch, check_rows, sample_of, until_shortest
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.workers import Workers
from hetjax.engines import Engine, EngineSpec
from hetjax.engines.clocks import no_hold
from hetjax.engines.session import Session, open_session, shapes
from hetjax.engines.specs import PerWorker, per_worker
from hetjax.fleet.agree import digest, same
from hetjax.history import Record
from hetjax.nonfinite import NonFiniteError, NonFinitePolicy
from hetjax.pipeline import Finished, LiveState, Pipeline, Requests
from hetjax.planning.allocation import solve
from hetjax.planning.controllers.base import Controller, Plan
from hetjax.reduce.layout import MANY
from hetjax.reduce.optimizer import check_optimizer, check_params, init_optimizer
from hetjax.reduce.transports import make_reduce
from hetjax.reduce.update import State, checked, running_average, unchanged
from hetjax.sampling.order import PlannedStep, Span
from hetjax.simulation.calibration import calibrate
from hetjax.simulation.speeds import Simulation, constant, of_survivors
from hetjax.sync import Sync
from hetjax.sync.base import SyncContext, UpdateRule

log = logging.getLogger("hetjax")
Tree = Any
AnyState = State | LiveState

_NO_EPOCH = 2**31  # positions are counted in 32 bits: what stands for an epoch where there are none


class Step:
    """One training step over all workers, in your own loop.

    Counts follow the speed of the workers from call to call, and nothing compiles after the first one. The gradient is
    the sum over all samples divided by the sum of their weights, however the batch was split.

        step = hetjax.Step(loss_fn, optax.adamw(1e-3), batch_size=512)
        state = step.init(params)
        for batch in loader:                      # host batches: dicts, tuples, nested
            state, report = step(state, batch)    # the report is that of the step before
        report = step.flush()                     # the last one

    Args:
        loss_fn: `loss_fn(params, batch, keys)` returns one loss per example, or an `hetjax.Example`. With model state:
            `loss_fn(params, model_state, batch, keys, mask_b)` returns that and the sums for the state's update. Or a
            `hetjax.FlaxModel`, as `from_nnx` and `from_linen` make it.
        optimizer: any optax optimizer. Clipping inside it sees the gradient of the whole global batch.
        batch_size: most samples of a step over all workers.
        strategy: a preset such as 'balanced' (default), 'dbs' or 'daso'; see `hetjax.presets.PRESETS`.
        controller: how many samples each worker gets: a name such as 'equal' or 'fixed:4,2,1,1', or an object.
        sync: when the workers agree: a name such as 'allreduce', or an object.
        engine: how a worker computes: 'auto', 'chunked', 'looped', 'masked', or an object such as
            `hetjax.Chunked(max_rows=256)`.
        transport: how sums travel: 'auto', 'psum' or 'hub'.
        devices: the workers. Default: all devices that JAX sees.
        speeds: simulated relative speeds, one per worker, or a `Simulation`. Default: real speeds.
        capacity: most samples of a worker in a step; one number, or one per worker.
        quantum: counts are multiples of it. Default: that of the model (the group size of BatchNorm), or 1.
        eval_fn: the loss for `evaluate`, where it differs from `loss_fn` (no dropout, running averages).
        advance: `(model_state, state_sums) -> model_state`. Default: a running average with momentum 0.9.
        ema_decay: decay of a moving average of the parameters, which is then what is evaluated. Default: none.
        epoch_size: samples in an epoch, for methods that act once an epoch.
        epochs: how many epochs there will be, for methods whose schedule depends on it (DASO).
        seed: with the position of a sample, the source of its random key.
        on_nonfinite: when a loss, gradient or update is NaN or infinite: 'stop' raises `NonFiniteError`, 'skip' leaves
            that step out, which keeps a second copy of the parameters and the optimizer's state.
        max_skips: stop after so many skips in a row.
        wait_limit: most seconds to wait for a worker's local phase.

    Raises:
        ValueError: if an option is out of range, or options do not go together.
    """

    def __init__(
        self,
        loss_fn: Any,
        optimizer: optax.GradientTransformation,
        *,
        batch_size: int,
        strategy: str | None = None,
        controller: str | Controller | None = None,
        sync: str | Sync | None = None,
        engine: str | EngineSpec | None = None,
        transport: str = "auto",
        devices: Sequence[jax.Device] | None = None,
        speeds: Sequence[float] | Simulation | None = None,
        capacity: PerWorker = None,
        quantum: int | None = None,
        eval_fn: Callable[..., Any] | None = None,
        advance: Callable[[Tree, Tree], Tree] | None = None,
        ema_decay: float | None = None,
        epoch_size: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        on_nonfinite: str = "stop",
        max_skips: int = 10,
        wait_limit: float = 600.0,
    ):
        model = loss_fn if hasattr(loss_fn, "loss_fn") else None
        if model is not None:
            loss_fn, eval_fn = model.loss_fn, eval_fn or model.eval_fn
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (params, batch, keys), got {type(loss_fn).__name__}.")
        check_optimizer(optimizer)
        for name, function in (("eval_fn", eval_fn), ("advance", advance)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r}: expected a function, or None for the usual one.")
        if transport not in ("auto", "psum", "hub"):
            raise ValueError(f"Unknown transport {transport!r}: use 'auto', 'psum' or 'hub'.")
        if ema_decay is not None and not 0 <= number("ema_decay", ema_decay) < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {ema_decay}.")
        chosen = presets.choose(strategy, controller=controller, sync=sync, engine=engine)
        if not chosen.sync.stepped:
            raise ValueError(
                f"The sync {chosen.sync.name!r} has no steps of all workers together: whoever is free takes the next "
                "batch. Use hetjax.Trainer with it."
            )
        self.loss_fn, self.eval_fn, self.optimizer = loss_fn, eval_fn or loss_fn, optimizer
        self.batch_size = whole("batch_size", batch_size, 1, MOST_SAMPLES)
        self.seed = whole("seed", seed, 0, MOST_SEED)
        self.sync, self.engine_spec, self.transport = chosen.sync, chosen.engine, transport
        self.workers = self.sync.workers(devices)
        self.controller: Controller = presets.for_workers(chosen.controller, self.workers)
        self.capacity = capacity
        self.quantum = whole("quantum", getattr(model, "quantum", 1) if quantum is None else quantum, 1, MOST_SAMPLES)
        self.advance, self.ema_decay = advance or running_average(), ema_decay
        self.epoch_size = None if epoch_size is None else whole("epoch_size", epoch_size, 1, MOST_SAMPLES)
        self.epochs = None if epochs is None else whole("epochs", epochs, 1)
        self.nonfinite = NonFinitePolicy(on_nonfinite, max_skips)
        self.wait_limit = number("wait_limit", wait_limit, above=0)
        self.simulation = _simulation(speeds, len(self.workers))
        self.requests = Requests()
        self.limit = self.batch_size  # most samples of a step for these workers
        capacity_W = per_worker("capacity", capacity, self.batch_size, self.workers)
        per_worker("max_rows", self.engine_spec.max_rows, 1, self.workers)
        if self.sync.by_node:
            self.limit = min(self.limit, int(capacity_W.sum()))
        self._sessions: dict[bool, Session] = {}
        self._pipeline: Pipeline | None = None
        self._shares_W = np.ones(len(self.workers))
        self._first = 0  # steps made before this Step took over
        self._left: dict[int, np.ndarray] = {}  # by step since then: the batches that each worker's process had left
        self._began = self._last = 0.0
        self._samples = 0

    # -- in a loop --

    def init(self, params: Tree, model_state: Tree = None) -> State:
        """The state before the first step.

        Args:
            params: any tree of arrays, the same in all processes.
            model_state: what the model carries from step to step, such as the statistics of BatchNorm.
        """
        check_params(params, self.sync.name)
        memory.check_parameters(params, self.workers)
        ema = None if self.ema_decay is None else jax.tree.map(lambda p: p, params)
        return State(params, model_state, init_optimizer(self.optimizer, params), ema)

    def __call__(self, state: AnyState, batch: Any) -> tuple[LiveState, Record | None]:
        """Start the step of this batch.

        Args:
            state: what `init` or the last call returned. It is given up: its buffers are reused.
            batch: arrays in dicts, tuples or any tree, all with as many rows, at most `batch_size`. Over several
                processes all give the same batch, or an object with `__len__` and `rows(start, stop)`, of which each
                fetches only its own rows.

        Returns:
            The state after this step, and the record of the step before; None in the first call.

        Raises:
            NonFiniteError: if the step before had a NaN or infinity, and on_nonfinite is 'stop'.
        """
        if self.sync.by_node:
            raise ValueError(
                f"Over several processes the sync {self.sync.name!r} divides every step between nodes: use "
                "hetjax.Trainer, which does."
            )
        given = as_batch(batch, self.batch_size)
        live = self._live(state, given)
        span = self._span(live.cursor, len(given))
        return self.run(live, given, span, self.plan(len(given), span.epoch))

    def flush(self) -> Record | None:
        """Wait for the last step; its record, None if that was returned before."""
        finished = self._pipeline.flush() if self._pipeline is not None else None
        return None if finished is None else self._record(finished)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, ending after the same step in all processes.

        Over several processes a loop has to go over this instead of the loader itself: the process whose loader ends
        first would leave the others waiting. Two batches are read ahead.
        """
        if not self.workers.several_processes:
            yield from loader
            return
        process_W = [device.process_index for device in self.workers.devices]
        first = 0 if self._pipeline is None else self._pipeline.next - self._first
        yield from until_shortest(loader, self.requests, lambda step: self._left[step], process_W, first)

    def evaluate(self, state: AnyState, batches: Iterable[Any]) -> dict[str, float]:
        """Mean loss and metrics over all samples of these batches, split like the training steps.

        Args:
            state: of this step; it is not given up.
            batches: as in a call, each with at most `batch_size` rows; the same number in all processes.
        """
        whole = self.sync.answer(self.export(state))
        core = (whole.params if whole.ema is None else whole.ema), whole.model_state
        pipeline: Pipeline | None = None
        position, sums = 0, {"loss": 0.0}
        weight = 0.0
        for batch in batches:
            given = as_batch(batch, self.limit)
            if pipeline is None:
                session = self.session(State(*core, None, None), sample_of(given), train=False)
                reduce, placed = make_reduce(self.transport, self.workers, session.layout, unchanged, core)
                pipeline = Pipeline(session, reduce, placed)
            span = Span(0, position, position + len(given))
            position = span.stop
            finished = self._push(pipeline, given, span, self._split_like_training(pipeline.session, len(given)))
            weight = _add(sums, weight, finished)
        if pipeline is None:
            raise ValueError("There is nothing to evaluate: the batches are empty.")
        weight = _add(sums, weight, pipeline.flush())
        return {name: value / weight for name, value in sums.items()}

    def export(self, state: AnyState) -> State:
        """The whole state as plain arrays, the optimizer's included: what a checkpoint holds."""
        return state.whole() if isinstance(state, LiveState) else checked(state)

    # -- for loops with a sampler --

    def open(self, state: State, sample: Tree, *, epoch_size: int | None = None, end: int | None = None) -> LiveState:
        """Compile for rows like these and place the state. A call does this by itself.

        Args:
            state: a copy of it is made; it is not given up.
            sample: one row or more, with the leading axis of a batch.
            epoch_size: samples in an epoch, where that is known.
            end: the cursor at which training will end, where that is known.
        """
        if self._pipeline is not None:
            self._pipeline.complete()
        state = checked(state)
        if self.workers.several_processes or self.sync.by_node:
            self._check_alike(state)
        session = self.session(state, sample, train=True)
        epoch_size = epoch_size or self.epoch_size
        if end is None and epoch_size is not None and self.epochs is not None:
            end = epoch_size * self.epochs
        capacity = int(session.engine.limits().capacity_W.sum())
        setting = SyncContext(
            self.workers, session.layout, self.rule(state), self.transport, self.batch_size, self.seed, capacity,
            epoch_size, end,
        )  # fmt: skip
        reduce, core = self.sync.open(setting, state)
        self._pipeline = pipeline = Pipeline(
            session,
            reduce,
            core,
            made=state.step,
            requests=self.requests,
            simulation=self.simulation,
            learn=lambda seen: self.controller.observe(seen),
        )
        if self.simulation is not None and self.simulation.row_time is None:
            calibrate(self.simulation, session, pipeline.replicas, Rows(sample, 0), self.limit, self.seed)
        self._began = self._last = time.perf_counter()
        self._samples, self._first, self._left = 0, state.step, {}
        return LiveState(pipeline, state.step, state.cursor)

    def sample_size(self, state: State) -> int:
        """How many rows `open` wants to see: one for the shapes, more for a trial of the model state."""
        return 1 if state.model_state is None else probe_size(self.quantum)

    def plan(self, batch: int, epoch: int = 0) -> Plan:
        """The controller's counts for a step of so many samples. Asked for once a step, in order."""
        assert self._pipeline is not None
        limits = self._pipeline.session.engine.limits()
        if batch == 0:  # a node that sits a step out
            return Plan(np.zeros(limits.workers, np.int64))
        if limits.minimum_W.sum() > batch:  # a short last step may be too small for all
            limits = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
        plan = self.controller.plan(batch, limits, epoch)
        limits.check_counts(plan.counts_W, batch, f"The controller {self.controller.name!r}")
        return plan

    def run(self, state: LiveState, batch: HostBatch, span: Span, plan: Plan) -> tuple[LiveState, Record | None]:
        """A call with positions and counts of your own: `__call__` is this with those of the controller."""
        assert self._pipeline is not None
        self._pipeline.session.engine.limits().check_counts(plan.counts_W, span.batch, "The partition")
        finished = self._push(self._pipeline, batch, span, plan)
        record = None if finished is None else self._record(finished)
        return LiveState(self._pipeline, state.step + 1, state.cursor + span.advance), record

    @property
    def engine(self) -> Engine | None:
        """The engine that trains; None before the first step."""
        return self._sessions[True].engine if True in self._sessions else None

    def rule(self, state: State) -> UpdateRule:
        """How summed gradients become new parameters."""
        advance = self.advance if state.model_state is not None else None
        return UpdateRule(self.optimizer, advance, self.ema_decay, undo=self.nonfinite.policy == "skip")

    def local_phases(self, state: AnyState, batch: Any, counts_W: Sequence[int]) -> Callable[[], np.ndarray]:
        """For measurements: the local phases alone, with no sum after them and nothing learned.

        Args:
            state: of this step; it is not given up.
            batch: as in a call.
            counts_W: samples of each worker.

        Returns:
            A function that runs the phases of this process's workers once, and returns the seconds of each.
        """
        given = as_batch(batch, self.batch_size)
        pipeline, plan = self._live(state, given).pipeline, Plan(np.asarray(counts_W, np.int64))
        span = Span(0, 0, int(plan.counts_W.sum()))
        engine = pipeline.session.engine
        engine.limits().check_counts(plan.counts_W, span.batch, "The caller")
        packed = engine.pack(self._rows(given, span, plan), span, plan.counts_W, self.seed)
        return lambda: np.array([lap.seconds for lap in pipeline.phases(packed)])

    def session(
        self, state: State, sample: Tree, *, train: bool, sync: Sync | None = None, capacity: PerWorker = None
    ) -> Session:
        """Compile for these rows, once; a second call with rows of the same shape compiles nothing."""
        sync, shape = sync or self.sync, shapes(state, sample)
        if (known := self._sessions.get(train)) is not None:
            if known.key == str(shape):
                return known
            self._sessions.pop(train).close()  # what follows may fail, and a later call be right again
        if train:
            self._check_model(state, sample, sync)
        options: dict[str, Any] = {
            "engine": self.engine_spec,
            "batch": self.limit,
            "capacity": self.capacity if capacity is None else capacity,
            "hold": self.simulation.hold if self.simulation is not None and train else no_hold,
            "priced_by_rows": self.simulation is not None and train,
        }
        if train:
            options = sync.engine_options(self.workers, self.quantum, self.simulation, options)
        session = open_session(
            self.loss_fn if train else self.eval_fn,
            shape,
            self.workers,
            train=train,
            own_parameters=train and sync.own_parameters,
            quantum=self.quantum,
            wait_limit=self.wait_limit,
            **options,
        )
        if session.exact_sync and train and self.controller.name not in presets.UNTIMED:
            session.close()
            raise ValueError(
                "Exactly synchronized statistics make workers wait for each other inside the local phase, so their "
                f"times say nothing about their speeds: controller {self.controller.name!r} cannot work. Use "
                f"{' or '.join(map(repr, presets.UNTIMED))}."
            )
        self._sessions[train] = session
        return session

    def _check_model(self, state: State, sample: Tree, sync: Sync) -> None:
        """Before anything is compiled for training: a model state that would go wrong, and workers left idle."""
        if sync.stepped:  # otherwise a batch is one worker's
            nodes = jax.process_count() if sync.by_node else 1
            warn_of_idle_workers(self.batch_size, self.quantum, len(self.workers) * nodes)
        if state.model_state is not None:
            chosen = probe_indices(len(jax.tree.leaves(sample)[0]), self.quantum)
            rows = jax.tree.map(lambda x: x[chosen], sample)
            check_model_state(self.loss_fn, self.advance, state, rows, self.workers.devices[self.workers.local[0]])

    def close(self) -> None:
        """Wait for the last step, whose state can still be read, and end the threads; compiled programs are dropped."""
        pipeline, self._pipeline = self._pipeline, None
        try:
            if pipeline is not None:
                pipeline.complete()
        finally:
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._pipeline is not None:
            self._pipeline.abandon()  # whatever went wrong, nothing runs on
        self.close()

    # -- inside --

    def _live(self, state: AnyState, batch: HostBatch) -> LiveState:
        """The state, if it is the last one of the pipeline; a plain one is placed first."""
        if not isinstance(state, LiveState):
            state = checked(state)
            if self.epoch_size is None:
                presets.check_without_epochs(self.controller)
            return self.open(state, sample_of(batch, self.sample_size(state)))
        if state.pipeline is not self._pipeline:
            raise ValueError(
                "This state belongs to a run that another state has replaced, or to another Step. Go on with the state "
                "that the last call returned, or begin anew with step.export(state)."
            )
        state.pipeline.check_last(state.step)
        return state

    def _span(self, cursor: int, size: int) -> Span:
        epoch, start = divmod(cursor, self.epoch_size or _NO_EPOCH)
        return Span(epoch, start, start + size)

    def _push(self, pipeline: Pipeline, batch: HostBatch, span: Span, plan: Plan) -> Finished | None:
        engine = pipeline.session.engine
        work_W, rows = engine.limits().work(plan.counts_W), self._rows(batch, span, plan)
        check_rows(rows.tree, engine.program.row)
        packed = engine.pack(rows, span, plan.counts_W, self.seed)
        try:
            return pipeline.push(PlannedStep(pipeline.next, span, plan, work_W), packed)
        except BaseException:
            pipeline.abandon()
            raise

    def _rows(self, batch: HostBatch, span: Span, plan: Plan) -> Rows:
        start, stop = own_span(self.workers, plan, span)
        rows = batch.rows(start - span.start, stop - span.start)
        return rows if isinstance(rows, Rows) else Rows(rows, start)

    def _split_like_training(self, session: Session, batch: int) -> Plan:
        limits = session.engine.limits()
        free = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
        return Plan(solve(np.zeros(limits.workers), 1 / self._shares_W, free, batch).counts_W)

    def _record(self, finished: Finished) -> Record:
        step, report = finished
        now = time.perf_counter()
        if 2 * step.span.batch > self._shares_W.sum():  # not those of a short last step
            self._shares_W = np.maximum(step.plan.counts_W, 1e-3)
        self._samples += step.span.batch
        self._left[step.number - self._first] = report.left_W
        self._left.pop(step.number - self._first - MANY, None)
        ideal = self.simulation.ideal() if self.simulation is not None else None
        record = Record.of(step, report, now - self._last, now - self._began, self._samples, ideal)
        self._last = now
        try:
            self.check_finite(record)
        except NonFiniteError:
            if self._pipeline is not None:
                self._pipeline.abandon()
            raise
        return record

    def check_finite(self, record: Record) -> None:
        """Raise `NonFiniteError`, or warn, for a step whose update was left out."""
        self.nonfinite.check(record, f" of node {jax.process_index()}" if self.sync.by_node else "")

    def _check_alike(self, state: State) -> None:
        """Processes that start unlike would go on unlike, each sure of its own."""
        one_set = state.replicas == 0
        same(
            batch_size=self.batch_size,
            seed=self.seed,
            controller=[self.controller.name, None if self.sync.by_node else self.controller.state_dict()],
            sync=[self.sync.name, self.sync.state_dict()],
            engine=self.engine_spec.name,
            position=[state.step, state.cursor],
            parameters=digest(state.params) if one_set else state.replicas,
            model_state=digest(state.model_state) if one_set else None,
            state_of_the_optimizer=digest(state.opt_state) if one_set else None,
            moving_average=[self.ema_decay, digest(state.ema) if one_set else None],
            quantum=self.quantum,
            on_nonfinite=[self.nonfinite.policy, self.nonfinite.max_skips],
        )


def own_span(workers: Workers, plan: Plan, span: Span) -> tuple[int, int]:
    """Positions that this process computes under a plan. At least one, for padding is made of real rows."""
    if not workers.several_processes:
        return span.start, max(span.stop, span.start + 1)
    bounds_W1 = span.start + plan.bounds_W1
    first, last = int(bounds_W1[workers.local[0]]), int(bounds_W1[workers.local[-1] + 1])
    start = min(first, span.stop - 1)
    return start, max(start + 1, last)


def _simulation(speeds: Sequence[float] | Simulation | None, workers: int) -> Simulation | None:
    simulation = speeds if speeds is None or isinstance(speeds, Simulation) else Simulation(constant(speeds))
    if simulation is None:
        return None
    simulation.trace = of_survivors(simulation.trace, workers)
    if (given := len(simulation.trace(0)[0])) != workers:
        raise ValueError(f"Speeds were given for {given} workers, but there are {workers}: give one speed each.")
    return simulation


def _add(sums: dict[str, float], weight: float, finished: Finished | None) -> float:
    """Add a step of an evaluation to the sums; the weight so far."""
    if finished is None:
        return weight
    _, report = finished
    sums["loss"] += report.loss_sum
    for name, value in report.metric_sums.items():
        sums[name] = sums.get(name, 0.0) + value
    return weight + report.weight
