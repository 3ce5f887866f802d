"""The trainer: a training loop around `hetjax.Step` with sampler, hooks, evaluation and the content of checkpoints."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hetjax import loops, presets
from hetjax.adapters.probe import probe_indices
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, check_batch_size, check_hooks, whole
from hetjax.data.batches import is_stream
from hetjax.data.bucketed import Bucketed
from hetjax.data.memory import as_source
from hetjax.data.prefetch import Rows
from hetjax.data.source import Source, fetch, is_endless
from hetjax.data.trees import is_array
from hetjax.engines import EngineSpec
from hetjax.fleet.agree import digest, same
from hetjax.history import History, Hook, Recorder
from hetjax.planning.controllers.base import Controller
from hetjax.reduce.layout import Value
from hetjax.sampling.blocks import Blocks
from hetjax.sampling.buckets import BucketSampler
from hetjax.sampling.order import EndlessSampler, Sampler
from hetjax.sampling.shards import BlockSampler, ProportionalSampler
from hetjax.simulation.calibration import calibrate
from hetjax.state import State, checked
from hetjax.step import Step, load_plans, saved_plans
from hetjax.sync import Sync
from hetjax.sync.base import FitJob

__all__ = ["Hook", "Trainer"]

Tree = Any


class Trainer:
    """Trains a model, data-parallel, on workers of unequal and changing speed.

    Examples:
        >>> trainer = hetjax.Trainer(loss_fn, optax.adamw(1e-3), batch_size=512)
        >>> state, history = trainer.fit(trainer.init(params), {"x": x, "y": y}, epochs=10)
        >>> trainer.evaluate(state, {"x": x_test, "y": y_test})
        {'loss': 0.31}

    Args:
        loss_fn: one loss per example, or a `hetjax.FlaxModel`; see `hetjax.Step`.
        optimizer: any optax optimizer, or an `nnx.Optimizer`.
        batch_size: samples of a step over all workers; at most those of the source.
        strategy: a preset of the four axes below: 'balanced' (default), 'dbs', 'daso', 'hogbatch', ...; see
            `hetjax.presets.PRESETS`.
        controller: how many samples each worker gets: a name such as 'equal' or 'fixed:4,2,1,1', or an object.
        partition: which samples each worker gets: 'global' (any of the batch), 'proportional' (shards, cut once per
            epoch), or fixed `Blocks`, one per worker (`hetjax.make_blocks`).
        sync: how and when workers synchronize: a name such as 'allreduce' or 'daso', or an object.
        engine: how a worker computes its samples: a name, or an object such as `hetjax.Chunked(max_rows=256)`.
        capacity: maximum samples of a worker in a step; one number, or one per worker.
        quantum: counts are multiples of it. Default: the model's (the group of BatchNorm or `batch_loss`), or 1.
        seed: the order of the samples derives from it, and with their positions their random keys.
        **options: further options of `hetjax.Step`: transport, devices, speeds, compute_dtype, eval_fn, predict_fn,
            advance, ema_decay, on_nonfinite, max_skips, wait_limit.

    Raises:
        TypeError: if an option is unknown or of the wrong type.
        ValueError: if an option is out of range, or options do not go together.
    """

    def __init__(
        self,
        loss_fn: Any,
        optimizer: Any,
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
                "rates) and pass them as partition."
            )
        self.sync, self.seed = chosen.sync, whole("seed", seed, 0, MOST_SEED)
        self.partition = chosen.partition if isinstance(chosen.partition, str) else BlockSampler.partition
        self.blocks = chosen.partition if isinstance(chosen.partition, Blocks) else None
        self._capacity = capacity  # without global steps it limits single batches, and no evaluation
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
        self._order: Mapping[str, Any] | None = None  # partition of an unfinished epoch, for the next `fit`
        self._continued: tuple[int, int] | None = None  # step and cursor of an optimizer that has made steps

    @property
    def workers(self) -> Any:
        """The workers that this process plans for."""
        return self.step.workers

    @property
    def batch_size(self) -> int:
        """Samples of a step over all workers."""
        return self.step.batch_size

    @property
    def controller(self) -> Controller:
        """The controller, which decides how many samples each worker gets; can be set between two calls of `fit`."""
        return self.step.controller

    @controller.setter
    def controller(self, controller: Controller) -> None:
        self.step.controller = presets.for_workers(controller, self.workers)

    @property
    def simulation(self) -> Any:
        """The simulated speeds, or None."""
        return self.step.simulation

    def init(self, params: Tree, model_state: Tree = None) -> State:
        """Build the state before the first step.

        Args:
            params: any tree of arrays, the same in all processes; those marked by `hetjax.frozen` are not trained.
            model_state: what the model carries from step to step, such as BatchNorm statistics. Default: that of
                `from_nnx` or `from_linen`, or none.

        Returns:
            The state, with a fresh state of the optimizer, or with state and number of steps of an `nnx.Optimizer` that
            has made some: `fit` goes on in the order of the samples (with shards, at the start of an epoch).
        """
        state = self.step.init(params, model_state)
        self._continued = (state.step, state.cursor) if state.step else None
        return state

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
        """Train for a number of further epochs or steps, or until the cursor reaches `stop_at` samples.

        Args:
            state: from `init`, an earlier `fit` or a checkpoint; it stays valid.
            source: arrays with one row per sample, as a dict, a tuple such as `(x, y)` or a named tuple, possibly
                nested; or anything with `__len__` and `__getitem__`, such as a list of samples or a dataset of Grain,
                Hugging Face or PyTorch. Every sample is seen exactly once per epoch, also across a resume. For
                sequences of unequal length, a `hetjax.Bucketed` of one of these. An endless source (`.repeat()`) is
                read in its own order, with `steps`. Or an iterable of batches, with `steps`: its order, and where a
                resumed run continues, are up to it.
            epochs: number of epochs; give exactly one of epochs, steps and stop_at.
            steps: number of steps; for a stream the maximum, None for all of it.
            stop_at: cursor at which to end.
            hooks: called with every finished step's record and the state after it, while the next step runs. They must
                copy what they keep of the state: its buffers are reused at the end of that step.

        Returns:
            The state at the end, and the history of this call.

        Raises:
            NonFiniteError: if a step had a NaN or infinity, and on_nonfinite is 'stop'.
            TypeError: if an argument is of the wrong type.
            ValueError: if an argument is out of range, or does not fit the partition or the source.
        """
        check_hooks(hooks)
        state = checked(state)
        for hook in hooks:
            getattr(hook, "compiling", lambda workers: None)(self.workers)
        given = {"epochs": epochs, "steps": steps, "stop_at": stop_at}
        length = {unit: whole(unit, count, 1) for unit, count in given.items() if count is not None}
        if is_stream(source):
            return self._fit_stream(state, source, length, hooks)
        source = as_source(source)
        endless = is_endless(source)
        if endless:
            self._check_endless(len(source), length)
        order = EndlessSampler(self.batch_size) if endless else self._make_sampler(source)
        if (state.step, state.cursor) == self._continued:
            state = replace(state, cursor=order.samples_in(state.step))
        elif self._order is not None:
            order.load_state_dict(self._order, state.cursor)
        self._sampler = sampler = self.sync.sampler(order, self.step.quantum)
        end = self._end(state.cursor, order, length)
        if self.step.recovery is not None:
            presets.check_elastic_source(self.partition)
        elif self.workers.several_processes or self.sync.by_node:
            blocks = None if self.blocks is None else digest(self.blocks.owner_D)
            lengths = order.checksum if isinstance(order, BucketSampler) else None
            same(partition=[self.partition, blocks, lengths], number_of_samples=len(source), end_of_training=end)
        steps = length.get("steps")
        until = end if steps is None else order.end_of(state.cursor, steps)
        probed = state.model_state is not None
        choose = lambda size: probe_indices(size, self.step.quantum) if probed else np.zeros(1, np.int64)
        samples = source.samples(choose) if isinstance(source, Bucketed) else [fetch(source, choose(order.size))]

        def by_steps(state: State) -> tuple[State, History]:
            state, history = loops.over_source(
                self.step, state, source, samples, sampler, end=end, until=until, steps=steps, hooks=hooks,
                epoch_size=None if endless else len(source),
            )  # fmt: skip
            self._order = sampler.state_dict(state.cursor) if self.partition != "global" else None
            return state, history

        job = FitJob(
            self.workers,
            sampler,
            source,
            end,
            self.simulation,
            self.step.wait_limit,
            by_steps=by_steps,
            open_session=lambda state: self.step.sessions.for_training(
                state, samples, self.sync, self.controller, self._capacity
            )[0],
            rule=self.step.rule,
            record=lambda history: Recorder(history, hooks, self.simulation),
            stopping=lambda: self.step.requests.stop,
            saving=self.step.requests.take_save,
            check=self.step.nonfinite.check,
            calibrate=lambda session, replicas: calibrate(
                self.simulation, session, replicas, Rows(samples[0], 0), self.batch_size, self.seed
            ),
        )
        try:
            return self.sync.fit(job, state)
        finally:
            self.step.requests.stop = False

    def _fit_stream(
        self, state: State, stream: Iterable[Any], length: Mapping[str, int], hooks: Sequence[Hook]
    ) -> tuple[State, History]:
        if length.keys() - {"steps"}:
            raise ValueError(
                "A stream of batches has no known length: give the number of steps, at least 1, or leave it out to "
                "train until the stream ends. For epochs give a source with __len__ and __getitem__."
            )
        self._check_without_epochs("a source with __len__ and __getitem__ instead of a stream of batches")
        return loops.over_stream(self.step, state, stream, length.get("steps"), hooks)

    def _check_endless(self, samples: int, length: Mapping[str, int]) -> None:
        if "epochs" in length:
            raise ValueError(
                f"The source has no end (its length is {samples:,}), so it has no epochs: give the number of steps "
                "instead, or leave out .repeat()."
            )
        self._check_without_epochs("a source that ends, without .repeat()")

    def _check_without_epochs(self, remedy: str) -> None:
        """Refuse options that need the samples of an epoch."""
        if not self.sync.stepped or self.partition != "global":
            raise ValueError(
                f"The sync {self.sync.name!r} with partition {self.partition!r} chooses samples by itself: give "
                f"{remedy}."
            )
        presets.check_without_epochs(self.controller)

    def answer(self, state: State) -> State:
        """Return the state with one set of parameters, where the sync keeps several; see `hetjax.sync`.

        Args:
            state: as returned by `fit`.

        Returns:
            The state that is evaluated and used.
        """
        return self.sync.answer(state)

    def evaluate(self, state: State, source: Any) -> dict[str, Value]:
        """Compute the mean loss and metrics over every sample, each exactly once, split like the training steps.

        Args:
            state: as returned by `fit`.
            source: as in `fit`, but not endless, or batches.

        Returns:
            The mean of 'loss' and the mean (or sum) of every metric, by name: numbers, and arrays for metrics with a
            shape.
        """
        state = checked(state)
        with loops.in_order(source, self.step.limit, "evaluate") as batches:
            return self.step.evaluate(self.answer(state), batches, samples=_first_rows(source))

    def predict(self, state: State, source: Any) -> Tree:
        """Compute the output of every sample with `predict_fn`, split among all workers; see `hetjax.Step.predict`.

        Args:
            state: as returned by `fit`.
            source: as in `fit`, but not endless, or batches; samples need only what `predict_fn` reads. Of a
                `hetjax.Bucketed` the outputs must have one shape for all lengths.

        Returns:
            The outputs of all samples in the order of the source, in all processes: the tree that `predict_fn` returns,
            of NumPy arrays whose first axis counts the samples.

        Raises:
            ValueError: if there is no `predict_fn`, or outputs of samples in buckets have no common shape.
        """
        state = checked(state)
        with loops.in_order(source, self.step.limit, "predict") as batches:
            outputs = self.step.predict(self.answer(state), batches, samples=_first_rows(source))
        if not isinstance(source, Bucketed):
            return outputs
        order = source.sampler(self.step.limit, shuffle=False).indices(0, 0, len(source))  # of the batches, by bucket
        place = np.argsort(order, kind="stable")
        return jax.tree.map(lambda x: x[place], outputs)

    def stop(self) -> None:
        """Request the end of `fit`: all processes stop after the same step."""
        self.step.requests.stop = True

    def leave(self) -> None:
        """Request that this process leaves an elastic fleet: `fit` finishes its step and raises `hetjax.recovery.Left`.

        Without an elastic fleet it is a request to stop.
        """
        if self.step.recovery is None:
            self.stop()
        else:
            self.step.requests.leave = True

    def ask_to_save(self) -> None:
        """Request a checkpoint: all processes find the request in the record of the same step (`Record.save`)."""
        self.step.ask_to_save()

    def state_dict(self, state: State) -> dict[str, Any]:
        """Return what a checkpoint holds besides the state.

        Args:
            state: the state that is saved with it.

        Returns:
            Plain JSON values.
        """
        order = self._order if self._sampler is None else self._sampler.state_dict(state.cursor)
        return saved_plans(self.step, self.sync) | {"order": order}

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State:
        """Restore what `state_dict` returned. The workers may differ.

        Args:
            saved: what `state_dict` returned.
            state: the state that was saved with it.

        Returns:
            The state for the next `fit`.

        Raises:
            ValueError: if batch size or seed differ from the saved ones.
        """
        state = load_plans(self.step, self.sync, saved, state)
        self._sampler, self._order = None, saved["order"]
        return state

    def close(self) -> None:
        """End the threads of the engines and drop the compiled programs."""
        self.step.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.step.__exit__(*exception)

    def _end(self, cursor: int, sampler: Any, length: Mapping[str, int]) -> int:
        """Return the cursor at which training ends."""
        if len(length) != 1:
            raise ValueError(
                "Give the length of training as exactly one of epochs, steps or stop_at; got "
                f"{', '.join(length) or 'none'}."
            )
        ((unit, count),) = length.items()
        if unit == "stop_at":
            if count <= cursor:
                raise ValueError(f"Nothing left to train: the cursor is at {cursor} samples and stop_at is {count}.")
            return count
        by_samples = self.sync.end_of(sampler, cursor, count) if unit == "steps" else None
        return cursor + sampler.size * count if by_samples is None else by_samples

    def _make_sampler(self, source: Source) -> Any:
        samples = len(source)
        listed = isinstance(source, list) and samples > 0 and is_array(source[0])
        check_batch_size(self.batch_size, samples, " or a tuple of arrays instead of a list of samples" * listed)
        if isinstance(source, Bucketed):
            presets.check_bucketed(self.sync, self.partition)
            return source.sampler(self.batch_size, self.seed)
        if self.blocks is None:
            kind = {"global": Sampler, "proportional": ProportionalSampler}[self.partition]
            return kind(samples, self.batch_size, self.seed)
        if self.blocks.size != samples:
            raise ValueError(
                f"The partition divides {self.blocks.size:,} samples, but the source has {samples:,}: make the "
                "blocks from the source that is trained on."
            )
        return BlockSampler(self.blocks.indices, self.batch_size, self.seed)


def _first_rows(source: Any) -> Sequence[Tree]:
    """A row of each shape that a source has; none of a stream, which would be used up."""
    if isinstance(source, Bucketed):
        return source.samples(lambda size: np.zeros(1, np.int64))
    return () if is_stream(source) else [fetch(as_source(source), np.zeros(1, np.int64))]


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuse unknown options; for an option of an engine, show where it goes."""
    of_engine = {"rungs": "rungs=[16, 64]", "max_rows": "max_rows=256", "complete_ladder": "complete=True"}
    known = inspect.signature(Step).parameters
    for name in sorted(options.keys() - known.keys()):
        hint = f"Options of a step are {', '.join(known)}."
        if name in of_engine:
            hint = f"Give it to the engine: engine=hetjax.Chunked({of_engine[name]})."
        raise TypeError(f"Trainer has no option {name!r}. {hint}")
