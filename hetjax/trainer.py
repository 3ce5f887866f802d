"""The trainer: what a user says, made into sessions and steps (`hetjax.loop`), and what came of them into a history."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from hetjax import sync as syncs
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, check_batch, check_hooks, number, whole
from hetjax.calibration import calibrate
from hetjax.data.feed import Feed
from hetjax.data.memory import as_source
from hetjax.data.source import Source, fetch
from hetjax.history import History, Record
from hetjax.loop import AnySampler, Flight, Loop, Wishes
from hetjax.plan import controllers
from hetjax.plan.allocation import solve
from hetjax.plan.blocks import Blocks
from hetjax.plan.controllers.protocol import Controller, Observation, Plan
from hetjax.plan.limits import Limits
from hetjax.plan.partition import BlockSampler, ProportionalSampler
from hetjax.plan.sampler import Sampler
from hetjax.run import memory
from hetjax.run.agree import digest, same
from hetjax.run.clocks import no_hold
from hetjax.run.compiles import compiles
from hetjax.run.engines.choose import per_worker
from hetjax.run.engines.protocol import Replicas
from hetjax.run.reduce import Reduce, make_reduce
from hetjax.run.session import Session, open_session, shapes
from hetjax.run.simulate import Simulation, constant
from hetjax.run.update import State, check_state, running_average, unchanged
from hetjax.run.workers import Workers
from hetjax.sync import AnySync, Asynchronous
from hetjax.sync.hogbatch import Job
from hetjax.sync.protocol import PlansByNode, Rule, Setting

log = logging.getLogger("hetjax")
Tree = Any
Hook = Callable[[Record, State], None]  # may also have begin(history) and end(history), called around the steps

_SAMPLERS: dict[str, Callable[..., AnySampler]] = {"global": Sampler, "proportional": ProportionalSampler}


class NonFiniteError(FloatingPointError):
    """A loss or gradient was NaN or infinite; the parameters are those before that step."""


class Trainer:
    """Trains a model data-parallel on workers of unequal and changing speed.

    loss_fn      one loss per example; see `hetjax.run.contract` (with model state: the signature with `state, mask_b`)
    optimizer    any optax optimiser; clipping inside it sees the gradient of the whole global batch
    batch_size   samples per step over all workers, constant
    controller   a name ('balanced', 'equal', 'static', ...) or an object of the `Controller` protocol
    partition    'global': any samples of the batch for any worker; 'proportional': shards, cut once an epoch; or
                 `Blocks`, of which each worker has one for good (`hetjax.make_blocks`): they set the counts too
    sync         when the workers agree: 'allreduce' in every step, or another of `hetjax.sync`
    engine       'auto', 'chunked', 'looped' or 'masked'; transport: 'auto', 'psum' or 'hub'
    devices      the workers; None for all that JAX sees
    speeds       None for real speeds; a list of relative speeds, or a `Simulation`, to simulate unlike workers
    capacity     most samples a worker may get in one step; max_rows: its largest chunk; one number or one per worker
    quantum      counts are multiples of it (the group size of BatchNorm; taken from loss_fn.quantum where it says)
    eval_fn      the loss for `evaluate`, if it differs from loss_fn (no dropout, running averages)
    advance      (model_state, state_sums) -> model_state; default: a running average with momentum 0.9
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        optimizer: optax.GradientTransformation,
        *,
        batch_size: int,
        controller: str | Controller = "balanced",
        partition: str | Blocks = "global",
        sync: str | AnySync = "allreduce",
        engine: str = "auto",
        transport: str = "auto",
        devices: Sequence[jax.Device] | None = None,
        speeds: Sequence[float] | Simulation | None = None,
        capacity: int | Sequence[int] | None = None,
        max_rows: int | Sequence[int] | None = None,
        quantum: int | None = None,
        eval_fn: Callable[..., Any] | None = None,
        advance: Callable[[Tree, Tree], Tree] | None = None,
        ema_decay: float | None = None,
        seed: int = 0,
        on_nonfinite: str = "stop",
        wait_limit: float = 600.0,
        complete_ladder: bool = False,
        rungs: Sequence[int] | None = None,
    ):
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (params, batch, keys), got {type(loss_fn).__name__}.")
        for name, function in (("eval_fn", eval_fn), ("advance", advance)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is {function!r}: expected a function, or None for the usual one.")
        self.batch_size = whole("batch_size", batch_size, 1, MOST_SAMPLES)
        self.seed = whole("seed", seed, 0, MOST_SEED)
        blocks = partition if isinstance(partition, Blocks) else None
        partition = BlockSampler.partition if isinstance(partition, Blocks) else partition
        if blocks is None and not (isinstance(partition, str) and partition in _SAMPLERS):
            raise ValueError(
                f"Unknown partition {partition!r}: use one of {', '.join(_SAMPLERS)}, or give the blocks themselves, "
                "as hetjax.make_blocks(source, rates) makes them."
            )
        if on_nonfinite not in ("stop", "skip"):
            raise ValueError(f"on_nonfinite must be 'stop' or 'skip', got {on_nonfinite!r}.")
        if ema_decay is not None and not 0 <= number("ema_decay", ema_decay) < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {ema_decay}.")
        self.loss_fn, self.eval_fn, self.optimizer = loss_fn, eval_fn or loss_fn, optimizer
        self.controller: Controller = controllers.make(controller) if isinstance(controller, str) else controller
        self.sync: AnySync = syncs.make(sync)
        self.workers = self.sync.workers(devices) if isinstance(self.sync, PlansByNode) else Workers.of(devices)
        self.engine, self.transport, self.partition, self.blocks = engine, transport, partition, blocks
        self._check_blocks()
        self.quantum = whole("quantum", getattr(loss_fn, "quantum", 1) if quantum is None else quantum, 1, MOST_SAMPLES)
        if isinstance(self.sync, Asynchronous) and partition != "global":
            raise ValueError(
                f"With the sync {self.sync.name!r} whoever is free takes the next samples, so there are no shards. Use "
                f"partition='global', not {partition!r}."
            )
        if partition != "global" and self.quantum > 1:
            raise ValueError(
                f"This model's BatchNorm takes its statistics over groups of {self.quantum} samples, and shards are "
                f"not cut into whole groups. Use partition='global', not {partition!r}."
            )
        self.advance, self.ema_decay = advance or running_average(), ema_decay
        self.on_nonfinite, self.wait_limit = on_nonfinite, number("wait_limit", wait_limit, above=0)
        self.simulation = self._simulation(speeds)
        self._engine_options: dict[str, Any] = {
            "capacity": capacity,
            "max_rows": max_rows,
            "rungs": rungs,
            "complete": complete_ladder,
        }
        self._batch = self.batch_size  # most samples of a step for these workers
        capacity_W = per_worker("capacity", capacity, self.batch_size, self.workers)
        per_worker("max_rows", max_rows, 1, self.workers)
        if self._own_node:
            self._batch = min(self._batch, int(capacity_W.sum()))
        self._sessions: dict[bool, Session] = {}
        self._shares_W = np.ones(len(self.workers))
        self._wishes = Wishes()
        self._sampler: AnySampler | None = None
        self._order: Mapping[str, Any] | None = None  # how an epoch was shared out that the next `fit` goes on with

    @property
    def _own_node(self) -> bool:
        """Whether this process plans for its own workers only, as one node of several."""
        return isinstance(self.sync, PlansByNode) and jax.process_count() > 1

    def _simulation(self, speeds: Sequence[float] | Simulation | None) -> Simulation | None:
        simulation = speeds if speeds is None or isinstance(speeds, Simulation) else Simulation(constant(speeds))
        if simulation is not None and (given := len(simulation.trace(0)[0])) != len(self.workers):
            raise ValueError(
                f"Speeds were given for {given} workers, but there are {len(self.workers)}: give one speed each."
            )
        return simulation

    # -- what a user calls --

    def init(self, params: Tree, model_state: Tree = None) -> State:
        """The state before the first step. `params` is any tree of arrays, the same on all hosts."""
        if not jax.tree.leaves(params):
            raise ValueError("params holds no arrays: there is nothing to train.")
        memory.check_parameters(params, self.workers)
        ema = None if self.ema_decay is None else jax.tree.map(lambda p: p, params)
        return State(params, model_state, jax.jit(self.optimizer.init)(params), ema)

    def fit(
        self,
        state: State,
        source: Source | Mapping[str, np.ndarray],
        *,
        epochs: int | None = None,
        steps: int | None = None,
        stop_at: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> tuple[State, History]:
        """Train for so many further epochs or steps, or until the cursor reaches `stop_at` samples.

        Hooks are called with every finished step's record and the state after it, while the next step runs; they must
        copy what they want to keep of the state, whose buffers are given back at the end of that step.
        """
        source = as_source(source)
        check_hooks(hooks)
        check_state(state)
        step, cursor = whole("state.step", state.step, 0), whole("state.cursor", state.cursor, 0)
        state = replace(state, step=step, cursor=cursor)  # a checkpoint may hold them as arrays
        order = sampler = self._sampler = self._make_sampler(len(source))
        if isinstance(self.sync, PlansByNode):
            sampler = self._sampler = self.sync.sampler(order, self.quantum)
        if self._order is not None and state.cursor:
            sampler.load_state_dict(self._order, state.cursor)
        end = self._end(state.cursor, sampler, epochs, steps, stop_at)
        if self.workers.several_processes or self._own_node:
            self._check_alike(state, source, end)
        session = self._session(state, source, train=True)
        advance = self.advance if state.model_state is not None else None
        rule = Rule(self.optimizer, advance, self.ema_decay)
        if isinstance(self.sync, Asynchronous):
            return self._without_steps(self.sync, session, rule, state, source, end, hooks)
        until = end if steps is None else _end_of_steps(order, state.cursor, steps)
        setting = Setting(
            self.workers,
            session.layout,
            rule,
            self.transport,
            len(source),
            self.batch_size,
            self.seed,
            until,
            int(session.engine.limits().capacity_W.sum()),
        )
        reduce = self.sync.open(setting, state)
        feed = Feed(source, sampler)
        history = History(
            engine=session.engine.name,
            transport=reduce.name,
            controller=self.controller.name,
            workers=len(self.workers),
        )
        try:
            if self.simulation is not None and self.simulation.row_time is None:
                self._calibrate(session, reduce, source)
            history.last_step = state.step + (steps or sampler.steps_between(state.cursor, end))
            if self.simulation is not None:
                history.ideal_samples_per_s = self.simulation.ideal()
            _tell(hooks, "begin", history)
            compiled = compiles()
            ideal_s, samples, done = 0.0, 0, state.step
            began = last = time.perf_counter()
            loop = self._loop(session, reduce, sampler, feed, self._decide, lambda seen: self.controller.observe(seen))
            for flight, report in loop.run(state, end, steps):
                now = time.perf_counter()
                if 2 * flight.step.batch > self._shares_W.sum():  # not those of a short last step
                    self._shares_W = np.maximum(flight.plan.counts_W, 1e-3)
                done, samples = done + 1, samples + flight.step.batch
                record = Record.of(done, flight, report, now - last, now - began, samples)
                last = now
                state = reduce.state(done, state.cursor + flight.step.advance)
                ideal_s += self._ideal_seconds(flight)
                history.add(record)
                self._check_finite(record)
                for hook in hooks:
                    hook(record, state)
            history.recompiles_after_warmup = compiles() - compiled
            history.ideal_samples_per_s = samples / ideal_s if ideal_s else history.own_rates()
            history.data_wait_s = feed.waited
        finally:
            feed.close()
            _tell(hooks, "end", history)
        self._judge_simulation(history)
        self._order = sampler.state_dict(state.cursor) if self.partition != "global" else None
        return state, history

    def answer(self, state: State) -> State:
        """The state with one set of parameters, where the sync keeps several (see `hetjax.sync`)."""
        return self.sync.answer(state)

    def evaluate(self, state: State, source: Source | Mapping[str, np.ndarray]) -> dict[str, float]:
        """Mean loss and metrics over every sample of a source, each exactly once, split like the training steps."""
        source = as_source(source)
        sampler = Sampler(len(source), self._batch, shuffle=False)
        check_state(state)
        state = self.answer(state)
        session = self._session(state, source, train=False)
        params = state.params if state.ema is None else state.ema
        reduce = make_reduce(self.transport, self.workers, session.layout, unchanged, (params, state.model_state))
        feed = Feed(source, sampler)
        loss = weight = 0.0
        metrics: dict[str, float] = {}
        try:
            here = State(params, state.model_state, None, None)
            loop = self._loop(session, reduce, sampler, feed, self._split_like_training, None)
            for _, report in loop.run(here, len(source)):
                loss, weight = loss + report.loss_sum, weight + report.weight
                metrics = {name: metrics.get(name, 0.0) + value for name, value in report.metric_sums.items()}
        finally:
            feed.close()
        return {"loss": loss / weight, **{name: value / weight for name, value in metrics.items()}}

    def stop(self) -> None:
        """Ask for the end: all processes stop after the same step."""
        self._wishes.stop = True

    def ask_to_save(self) -> None:
        """Ask for a checkpoint: all processes find it in the record of the same step (`Record.save`)."""
        self._wishes.save = True

    def remember(self, state: State) -> dict[str, Any]:
        """What a run is made of beside its state, as plain JSON values: a checkpoint holds both."""
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "controller": self.controller.state_dict(),
            "sync": {"name": self.sync.name, "state": self.sync.state_dict()},
            "order": self._order if self._sampler is None else self._sampler.state_dict(state.cursor),
        }

    def recall(self, saved: Mapping[str, Any], state: State) -> State:
        """Go on from what `remember` said: the state for the next `fit`. Workers, controller and sync may be others."""
        for name, mine in (("batch_size", self.batch_size), ("seed", self.seed)):
            if saved[name] != mine:
                raise ValueError(
                    f"The run was begun with {name}={saved[name]} and cannot go on with {mine}: its steps would be "
                    "other ones. Resume with the same, or start a new run."
                )
        others = isinstance(self.sync, PlansByNode) and jax.process_index() > 0  # it is about the first node's workers
        if saved["controller"].get("controller") == self.controller.name and not others:
            self.controller.load_state_dict(saved["controller"])  # another one starts with what it sees
        self._sampler, self._order = None, saved["order"]
        if saved["sync"]["name"] == self.sync.name:
            self.sync.load_state_dict(saved["sync"]["state"])
            return state
        return syncs.make(saved["sync"]["name"]).answer(state)

    def close(self) -> None:
        """End the threads of the engines; compiled programs are dropped."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _without_steps(
        self,
        sync: Asynchronous,
        session: Session,
        rule: Rule,
        state: State,
        source: Source,
        end: int,
        hooks: Sequence[Hook],
    ) -> tuple[State, History]:
        """Hand over to a sync that has no steps of all workers together; a wish to end that came before counts."""
        assert isinstance(self._sampler, Sampler)
        job = Job(
            session,
            rule,
            self.workers,
            self._sampler,
            source,
            end,
            self.simulation,
            self.wait_limit,
            hooks,
            tell=_tell,
            stopping=lambda: self._wishes.stop,
            saving=self._wishes.take_save,
            check=self._check_finite,
            calibrate=lambda session, replicas: self._calibrate(session, replicas, source),
        )
        try:
            state, history = sync.fit(job, state)
        finally:
            self._wishes.stop = False
        self._judge_simulation(history)
        return state, history

    # -- plans --

    def _loop(
        self,
        session: Session,
        reduce: Reduce,
        sampler: AnySampler,
        feed: Feed,
        decide: Callable[[Limits, int, int], Plan],
        learn: Callable[[Observation], None] | None,
    ) -> Loop:
        return Loop(
            session, reduce, sampler, feed, self.workers, self.simulation, self._wishes, self.seed, decide, learn
        )

    def _decide(self, limits: Limits, batch: int, epoch: int) -> Plan:
        if batch == 0:  # a node that sits a step out
            return Plan(np.zeros(limits.workers, np.int64))
        if limits.minimum_W.sum() > batch:  # a short last step may be too small for all
            limits = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
        plan = self.controller.plan(batch, limits, epoch)
        limits.check_counts(plan.counts_W, batch, f"The controller {self.controller.name!r}")
        return plan

    def _split_like_training(self, limits: Limits, batch: int, epoch: int) -> Plan:
        free = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
        return Plan(solve(np.zeros(limits.workers), 1 / self._shares_W, free, batch).counts_W)

    # -- setting up --

    def _end(self, cursor: int, sampler: AnySampler, epochs: int | None, steps: int | None, stop_at: int | None) -> int:
        given = {name: n for name, n in {"epochs": epochs, "steps": steps, "stop_at": stop_at}.items() if n is not None}
        if len(given) != 1:
            raise ValueError(
                f"Say how long to train with exactly one of epochs, steps or stop_at; got {', '.join(given) or 'none'}."
            )
        for name, value in given.items():
            whole(name, value, 1)
        if stop_at is not None:
            if stop_at <= cursor:
                raise ValueError(f"Nothing left to train: the cursor is at {cursor} samples and stop_at is {stop_at}.")
            return stop_at
        if isinstance(self.sync, Asynchronous) and isinstance(sampler, Sampler) and steps is not None:
            return _end_of_steps(sampler, cursor, steps)
        return cursor + sampler.size * (epochs if epochs is not None else steps or 0)

    def _check_blocks(self) -> None:
        """Refuse blocks that are not for these workers, and a controller that they would leave nothing to decide."""
        if self.blocks is None:
            return
        if self.blocks.workers != len(self.workers):
            raise ValueError(
                f"The partition has blocks for {self.blocks.workers} workers, but there are {len(self.workers)}: make "
                "or re-cut it for these."
            )
        if self.controller.name not in ("equal", "static"):
            raise ValueError(
                f"Blocks set how many samples each worker gets, and the controller {self.controller.name!r} would "
                "change that. Use controller='static', with blocks sized by the workers' rates."
            )

    def _make_sampler(self, samples: int) -> AnySampler:
        check_batch(self.batch_size, samples)
        if self.blocks is None:
            return _SAMPLERS[self.partition](samples, self.batch_size, self.seed)
        if self.blocks.size != samples:
            raise ValueError(
                f"The partition shares out {self.blocks.size:,} samples and the source has {samples:,}: make the "
                "blocks from the source that is trained on."
            )
        return BlockSampler(self.blocks.indices, self.batch_size, self.seed)

    def _check_alike(self, state: State, source: Source, end: int) -> None:
        """Processes that start unlike would go on unlike, each sure of its own."""
        one_set = state.replicas == 0
        same(
            batch_size=self.batch_size,
            seed=self.seed,
            controller=[self.controller.name, None if self._own_node else self.controller.state_dict()],
            partition=[self.partition, None if self.blocks is None else digest(self.blocks.owner_D)],
            sync=[self.sync.name, self.sync.state_dict()],
            engine=self.engine,
            number_of_samples=len(source),
            position=[state.step, state.cursor],
            end_of_training=end,
            parameters=digest(state.params) if one_set else state.replicas,
            model_state=digest(state.model_state) if one_set else None,
            state_of_the_optimiser=digest(state.opt_state) if one_set else None,
            moving_average=[self.ema_decay, digest(state.ema) if one_set else None],
            quantum=self.quantum,
            on_nonfinite=self.on_nonfinite,
        )

    def _session(self, state: State, source: Source, *, train: bool) -> Session:
        """Compile for the rows of this source, once; a second call with rows of the same shape compiles nothing."""
        shape = shapes(state, fetch(source, np.zeros(1, np.int64)))
        if (known := self._sessions.get(train)) is not None:
            if known.key == str(shape):
                return known
            self._sessions.pop(train).close()  # what follows may fail, and a later `fit` be right again
        options = {
            "engine": self.engine,
            "batch": self._batch,
            "hold": self.simulation.hold if self.simulation is not None and train else no_hold,
            "priced_by_rows": self.simulation is not None and train,
            **self._engine_options,
        }
        if isinstance(self.sync, Asynchronous):  # in an evaluation its capacities, of single batches, do not count
            alone = self.sync.engine_options(self.workers, self.quantum, self.simulation, **options)
            options |= alone if train else {"capacity": None}
        session = open_session(
            self.loss_fn if train else self.eval_fn,
            shape,
            self.workers,
            train=train,
            own_parameters=train and self.sync.own_parameters,
            quantum=self.quantum,
            wait_limit=self.wait_limit,
            **options,
        )
        if session.exact_sync and train and self.controller.name not in ("equal", "static"):
            session.close()
            raise ValueError(
                f"Exactly synchronised statistics make workers wait for each other inside the local phase, so their "
                f"times say nothing about their speeds: controller {self.controller.name!r} cannot work. "
                "Use 'equal' or 'static'."
            )
        self._sessions[train] = session
        return session

    def _calibrate(self, session: Session, replicas: Replicas, source: Source) -> None:
        assert self.simulation is not None
        calibrate(self.simulation, session, replicas, source, self._batch, self.seed)

    def _judge_simulation(self, history: History) -> None:
        if self.simulation is not None:
            history.overruns = self.simulation.overruns
            if warning := self.simulation.verdict():
                log.warning(warning)

    def _ideal_seconds(self, flight: Flight) -> float:
        return flight.step.batch / self.simulation.ideal() if self.simulation is not None else 0.0

    def _check_finite(self, record: Record) -> None:
        if not record.nonfinite:
            return
        who = ", ".join(map(str, record.nonfinite))
        who += f" of node {jax.process_index()}" if self._own_node else ""
        said = f"Step {record.step}: the loss or gradient of worker {who} was NaN or infinite; its update was left out"
        if self.on_nonfinite == "stop":
            raise NonFiniteError(
                f"{said}. Lower the learning rate, look at the data, or go on with on_nonfinite='skip'."
            )
        log.warning("%s.", said)


def _end_of_steps(sampler: AnySampler, cursor: int, steps: int) -> int:
    """The cursor after so many further steps, of which the last one of an epoch is short."""
    if not isinstance(sampler, Sampler):  # whose steps depend on its shards
        return cursor + steps * sampler.batch
    return sampler.samples_in(sampler.whole_steps(cursor) + steps)


def _tell(hooks: Sequence[Hook], what: str, history: History) -> None:
    for hook in hooks:
        if hasattr(hook, what):
            getattr(hook, what)(history)
