"""The trainer: a loop around `hetjax.Step` with a sampler, hooks, evaluation and what a checkpoint needs."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any

import jax
import numpy as np
import optax

from hetjax import presets
from hetjax import sync as syncs
from hetjax.adapters.probe import probe_indices
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, check_batch_size, check_hooks, whole
from hetjax.data.batches import FeedBatch, as_batch, is_stream, sample_of
from hetjax.data.memory import as_source
from hetjax.data.prefetch import Feed, Rows
from hetjax.data.source import Source, fetch
from hetjax.engines import EngineSpec
from hetjax.fleet.agree import digest, same
from hetjax.history import History, Hook, Record, Recorder
from hetjax.pipeline import LiveState
from hetjax.planning.controllers.base import Controller
from hetjax.reduce.optimizer import check_params
from hetjax.reduce.update import State, checked
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.order import Sampler
from hetjax.sampling.shards import BlockSampler, ProportionalSampler
from hetjax.simulation.calibration import calibrate
from hetjax.step import Step
from hetjax.sync import Sync
from hetjax.sync.base import FitJob

__all__ = ["Hook", "Trainer"]

Tree = Any


class Trainer:
    """Trains a model data-parallel on workers of unequal and changing speed.

    Args:
        loss_fn: one loss per example, or a `hetjax.FlaxModel`; see `hetjax.Step`.
        optimizer: any optax optimizer.
        batch_size: samples per step over all workers, constant; at most as many as the source has.
        strategy: a preset of the four axes below: 'balanced' (default), 'dbs', 'daso', 'hogbatch', ...
        controller: how many samples each worker gets: a name such as 'equal' or 'fixed:4,2,1,1', or an object.
        partition: which ones: 'global' (any samples of the batch for any worker), 'proportional' (shards, cut once an
            epoch), or `Blocks` of which each worker has one for good (`hetjax.make_blocks`).
        sync: when the workers agree: a name such as 'allreduce' or 'daso', or an object.
        engine: how a worker computes: a name, or an object such as `hetjax.Chunked(max_rows=256)`.
        capacity: most samples of a worker in a step; one number, or one per worker.
        quantum: counts are multiples of it. Default: that of the model (the group size of BatchNorm), or 1.
        seed: which order the samples come in, and with a sample's position its random key.
        **options: of `hetjax.Step`: transport, devices, speeds, eval_fn, advance, ema_decay, on_nonfinite,
            max_skips, wait_limit.

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
        partition: str | Blocks | None = None,
        sync: str | Sync | None = None,
        engine: str | EngineSpec | None = None,
        capacity: int | Sequence[int] | None = None,
        quantum: int | None = None,
        seed: int = 0,
        **options: Any,
    ):
        _check_options(options)
        quantum = whole("quantum", getattr(loss_fn, "quantum", 1) if quantum is None else quantum, 1, MOST_SAMPLES)
        chosen = presets.choose(
            strategy, controller=controller, partition=partition, sync=sync, engine=engine, quantum=quantum
        )
        if chosen.partition == "submodular":
            raise ValueError(
                "The partition 'submodular' needs its blocks: make them from the data with hetjax.make_blocks(source, "
                "rates) and give them as partition."
            )
        self.sync, self.seed = chosen.sync, whole("seed", seed, 0, MOST_SEED)
        self.partition = chosen.partition if isinstance(chosen.partition, str) else BlockSampler.partition
        self.blocks = chosen.partition if isinstance(chosen.partition, Blocks) else None
        self._capacity = capacity  # without a barrier, of single batches: it does not count in an evaluation
        self.step = Step(
            loss_fn,
            optimizer,
            batch_size=batch_size,
            controller=chosen.controller,
            sync=self.sync if self.sync.stepped else "allreduce",
            engine=chosen.engine,
            capacity=capacity if self.sync.stepped else None,
            quantum=quantum,
            seed=seed,
            **options,
        )
        if self.blocks is not None and self.blocks.workers != len(self.workers):
            raise ValueError(
                f"The partition has blocks for {self.blocks.workers} workers, but there are {len(self.workers)}: make "
                "or re-cut it for these."
            )
        self._sampler: Any = None
        self._order: Mapping[str, Any] | None = None  # how an epoch was shared out that the next `fit` goes on with

    @property
    def workers(self) -> Any:
        """The workers that this process plans for."""
        return self.step.workers

    @property
    def batch_size(self) -> int:
        """Samples per step over all workers."""
        return self.step.batch_size

    @property
    def controller(self) -> Controller:
        """How many samples each worker gets. Another one may be set between two calls of `fit`."""
        return self.step.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self.step.controller = presets.for_workers(controller, self.workers)

    @property
    def simulation(self) -> Any:
        """The simulated speeds, or None."""
        return self.step.simulation

    def init(self, params: Tree, model_state: Tree = None) -> State:
        """The state before the first step; see `Step.init`."""
        check_params(params, self.sync.name)
        return self.step.init(params, model_state)

    def fit(
        self,
        state: State,
        source: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        stop_at: int | None = None,
        hooks: Sequence[Hook] = (),
    ) -> tuple[State, History]:
        """Train for so many further epochs or steps, or until the cursor reaches `stop_at` samples.

        Args:
            state: from `init`, an earlier `fit` or a checkpoint; it stays as it is.
            source: anything with `__len__` and `__getitem__`, or a dict of arrays: every sample is then seen exactly
                once an epoch, over a resume too. Or a stream of batches, with `steps`: then how samples are ordered,
                and where a resumed run goes on, is up to the stream.
            epochs: how many epochs; give exactly one of epochs, steps and stop_at.
            steps: how many steps; for a stream at most, None for all of it.
            stop_at: the cursor at which to end.
            hooks: called with every finished step's record and the state after it, while the next step runs. They must
                copy what they want to keep of the state, whose buffers are reused at the end of that step.

        Returns:
            The state at the end, and the history of this call.
        """
        check_hooks(hooks)
        state = checked(state)
        given = {"epochs": epochs, "steps": steps, "stop_at": stop_at}
        length = {unit: whole(unit, count, 1) for unit, count in given.items() if count is not None}
        if is_stream(source):
            return self._fit_stream(state, source, length, hooks)
        source = as_source(source)
        order = self._make_sampler(len(source))
        if self._order is not None:
            order.load_state_dict(self._order, state.cursor)
        self._sampler = sampler = self.sync.sampler(order, self.step.quantum)
        end = self._end(state.cursor, order, length)
        if self.workers.several_processes or self.sync.by_node:
            blocks = None if self.blocks is None else digest(self.blocks.owner_D)
            same(partition=[self.partition, blocks], number_of_samples=len(source), end_of_training=end)
        steps = length.get("steps")
        until = end if steps is None else order.end_of(state.cursor, steps)
        probed = state.model_state is not None
        sample = fetch(source, probe_indices(len(source), self.step.quantum) if probed else np.zeros(1, np.int64))
        job = FitJob(
            self.workers,
            sampler,
            source,
            end,
            self.simulation,
            self.step.wait_limit,
            by_steps=lambda state: self._by_steps(state, source, sample, sampler, end, until, steps, hooks),
            open_session=lambda state: self.step.session(
                state, sample, train=True, sync=self.sync, capacity=self._capacity
            ),
            rule=self.step.rule,
            record=lambda history: Recorder(history, hooks, self.simulation),
            stopping=lambda: self.step.requests.stop,
            saving=self.step.requests.take_save,
            check=self.step.check_finite,
            calibrate=lambda session, replicas: calibrate(
                self.simulation, session, replicas, Rows(sample, 0), self.batch_size, self.seed
            ),
        )
        try:
            return self.sync.fit(job, state)
        finally:
            self.step.requests.stop = False

    def _by_steps(
        self,
        state: State,
        source: Source,
        sample: Tree,
        sampler: Any,
        end: int,
        until: int,
        steps: int | None,
        hooks: Sequence[Hook],
    ) -> tuple[State, History]:
        """Plan, fetch and run one step after the other."""
        step, first = self.step, state.step
        live = step.open(state, sample, epoch_size=len(source), end=until)
        last = first + (steps or sampler.steps_between(state.cursor, end))
        feed = Feed(source, sampler)

        def advance(live: LiveState) -> tuple[LiveState, Record | None] | None:
            if live.cursor >= end or live.step - first == steps:
                return None
            span, plan = sampler.next(live.cursor, step.plan)
            cursor = live.cursor + span.advance
            following = sampler.ahead(cursor) if cursor < end else None
            return step.run(live, FeedBatch(feed, span, following), span, plan)

        try:
            state, history = self._run(live, advance, last, hooks, lambda: feed.waited)
        finally:
            feed.close()
        self._order = sampler.state_dict(state.cursor) if self.partition != "global" else None
        return state, history

    def _fit_stream(
        self, state: State, stream: Iterable[Any], length: Mapping[str, int], hooks: Sequence[Hook]
    ) -> tuple[State, History]:
        """Train on batches as they come."""
        steps = length.get("steps")
        if length.keys() - {"steps"}:
            raise ValueError(
                "A stream of batches has no known length: say how long to train with steps, at least 1, or leave it "
                "out to train until the stream ends. For epochs give a source with __len__ and __getitem__."
            )
        if not self.sync.stepped or self.partition != "global":
            raise ValueError(
                f"The sync {self.sync.name!r} with partition {self.partition!r} chooses samples by itself: give a "
                "source with __len__ and __getitem__ instead of a stream of batches."
            )
        presets.check_without_epochs(self.controller)
        step, batches = self.step, self.step.batches(islice(stream, steps))
        given = next(batches, None)
        if given is None:
            raise ValueError("The stream of batches is empty: there is nothing to train on.")
        live, waited = step.open(state, sample_of(as_batch(given, self.batch_size), step.sample_size(state))), 0.0

        def advance(live: LiveState) -> tuple[LiveState, Record | None] | None:
            nonlocal given, waited
            if given is None:
                began = time.perf_counter()
                given = next(batches, None)
                waited += time.perf_counter() - began
            if given is None:
                return None
            batch, given = given, None
            return step(live, batch)

        return self._run(live, advance, live.step + (steps or 0), hooks, lambda: waited)

    def _run(
        self,
        live: LiveState,
        advance: Callable[[LiveState], tuple[LiveState, Record | None] | None],
        last: int,
        hooks: Sequence[Hook],
        waited: Callable[[], float],
    ) -> tuple[State, History]:
        """Steps until `advance` has none left or the end was asked for, with their bookkeeping."""
        step, made, record = self.step, None, None
        step.requests.stop = False
        engine = live.pipeline.session.engine.name
        history = History(
            engine=engine,
            transport=live.pipeline.reduce.name,
            controller=self.controller.name,
            workers=len(self.workers),
            last_step=last,
        )
        with Recorder(history, hooks, self.simulation) as recorder:
            while not (record is not None and record.stop) and (made := advance(live)) is not None:
                before, (live, record) = live, made
                if record is not None:
                    recorder.add(record, before.whole())
            if (record := step.flush()) is not None:
                recorder.add(record, live.whole())
            recorder.finish(history.own_rates(), waited())
        return live.whole(), history

    def answer(self, state: State) -> State:
        """The state with one set of parameters, where the sync keeps several (see `hetjax.sync`)."""
        return self.sync.answer(state)

    def evaluate(self, state: State, source: Any) -> dict[str, float]:
        """Mean loss and metrics over every sample, each exactly once, split like the training steps.

        Args:
            state: as `fit` returned it.
            source: as in `fit`, or the batches themselves.
        """
        state = checked(state)
        if is_stream(source):
            return self.step.evaluate(self.answer(state), source)
        source = as_source(source)
        order = Sampler(len(source), self.step.limit, shuffle=False)
        feed = Feed(source, order)
        spans = [order.step(cursor) for cursor in range(0, len(source), order.batch)]
        batches = (FeedBatch(feed, span, following) for span, following in zip_longest(spans, spans[1:]))
        try:
            return self.step.evaluate(self.answer(state), batches)
        finally:
            feed.close()

    def stop(self) -> None:
        """Ask for the end: all processes stop after the same step."""
        self.step.requests.stop = True

    def ask_to_save(self) -> None:
        """Ask for a checkpoint: all processes find it in the record of the same step (`Record.save`)."""
        self.step.requests.save = True

    def state_dict(self, state: State) -> dict[str, Any]:
        """What a run is made of beside its state, as plain JSON values: a checkpoint holds both."""
        return {
            "batch_size": self.batch_size,
            "seed": self.seed,
            "controller": self.controller.state_dict(),
            "sync": {"name": self.sync.name, "state": self.sync.state_dict()},
            "order": self._order if self._sampler is None else self._sampler.state_dict(state.cursor),
        }

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State:
        """Restore what `state_dict` returned and return the state for the next `fit`. Workers may differ."""
        for name, mine in (("batch_size", self.batch_size), ("seed", self.seed)):
            if saved[name] != mine:
                raise ValueError(
                    f"The run was begun with {name}={saved[name]} and cannot go on with {mine}: its steps would be "
                    "other ones. Resume with the same, or start a new run."
                )
        others = self.sync.by_node and jax.process_index() > 0  # it is about the first node's workers
        if saved["controller"].get("controller") == self.controller.name and not others:
            self.controller.load_state_dict(saved["controller"])  # another one starts with what it sees
        self._sampler, self._order = None, saved["order"]
        if syncs.current_name(saved["sync"]["name"]) == self.sync.name:
            self.sync.load_state_dict(saved["sync"]["state"])
            return state
        return syncs.make(saved["sync"]["name"]).answer(state)

    def close(self) -> None:
        """End the threads of the engines; compiled programs are dropped."""
        self.step.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.step.__exit__(*exception)

    def _end(self, cursor: int, sampler: Any, length: Mapping[str, int]) -> int:
        if len(length) != 1:
            raise ValueError(
                "Say how long to train with exactly one of epochs, steps or stop_at; got "
                f"{', '.join(length) or 'none'}."
            )
        ((unit, count),) = length.items()
        if unit == "stop_at":
            if count <= cursor:
                raise ValueError(f"Nothing left to train: the cursor is at {cursor} samples and stop_at is {count}.")
            return count
        by_samples = self.sync.end_of(sampler, cursor, count) if unit == "steps" else None
        return cursor + sampler.size * count if by_samples is None else by_samples

    def _make_sampler(self, samples: int) -> Any:
        check_batch_size(self.batch_size, samples)
        if self.blocks is None:
            kind = {"global": Sampler, "proportional": ProportionalSampler}[self.partition]
            return kind(samples, self.batch_size, self.seed)
        if self.blocks.size != samples:
            raise ValueError(
                f"The partition shares out {self.blocks.size:,} samples and the source has {samples:,}: make the "
                "blocks from the source that is trained on."
            )
        return BlockSampler(self.blocks.indices, self.batch_size, self.seed)


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse options that a step does not have; what belongs to an engine is named."""
    of_engine = {"rungs": "rungs=[16, 64]", "max_rows": "max_rows=256", "complete_ladder": "complete=True"}
    known = inspect.signature(Step).parameters
    for name in sorted(options.keys() - known.keys()):
        hint = f"Options of a step are {', '.join(known)}."
        if name in of_engine:
            hint = f"Give it to the engine: engine=hetjax.Chunked({of_engine[name]})."
        raise TypeError(f"Trainer has no option {name!r}. {hint}")
