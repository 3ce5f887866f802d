"""The step: one balanced, data-parallel training step over workers of unequal speed, for any training loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from hetjax import presets, processes, profiling
from hetjax import sync as syncs
from hetjax.adapters import nnx_optimizer
from hetjax.adapters.contract import check_loss, is_flax
from hetjax.adapters.probe import sample_size
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, check_function, current_name, number, whole
from hetjax.data.batches import HostBatch, NumberedBatch, as_batch, sample_of, until_shortest
from hetjax.data.prefetch import Rows
from hetjax.devices import memory
from hetjax.devices.workers import DeviceChoice, Workers
from hetjax.engines import Engine, EngineSpec
from hetjax.engines.precision import ComputeDtype, dtypes_by_kind, warn_of_unused
from hetjax.engines.session import Session
from hetjax.engines.specs import PerWorker, per_worker
from hetjax.evaluation import mean_over, outputs_over
from hetjax.fleet.agree import problems_shared
from hetjax.history import Record, RunLog
from hetjax.nonfinite import NonFiniteError, NonFinitePolicy
from hetjax.pipeline import Finished, Pipeline, Requests
from hetjax.planning.bench import Bench
from hetjax.planning.controllers.base import Controller, Observation, Plan
from hetjax.recovery import Recovery
from hetjax.reduce.base import Reduce
from hetjax.reduce.layout import MANY, Value
from hetjax.reduce.optimizer import check_optimizer, check_params, init_optimizer
from hetjax.reduce.trainable import trainable
from hetjax.reduce.transports import ReduceOptions, check_options, make_reduce
from hetjax.reduce.update import UpdateRule, running_average
from hetjax.sampling.order import Sampler, Span
from hetjax.sessions import Sessions
from hetjax.simulation.calibration import calibrate
from hetjax.simulation.speeds import Simulation, as_simulation
from hetjax.state import LiveState, State, checked
from hetjax.sync import Sync
from hetjax.sync.base import SyncContext

log = logging.getLogger("hetjax")
Tree = Any
AnyState = State | LiveState

_FORMER_TRANSPORTS = {"psum": "mesh", "hub": "host"}
_MOST_MEMORY = 2**60  # bytes
_NO_EPOCH = 2**31  # the epoch's length without epochs: positions are 32-bit integers


class Step:
    """One data-parallel training step over workers of unequal and changing speed, for your own training loop.

    From call to call the split of the batch follows the speed of the workers; nothing compiles after the first call.
    The gradient does not depend on the split:

        g = (sum over all samples of the per-example gradients) / (sum of their weights)

    Examples:
        >>> step = hetjax.Step(loss_fn, optax.adamw(1e-3), batch_size=512)
        >>> state = step.init(params)
        >>> for batch in loader:                      # host batches: dicts, tuples, nested
        ...     state, record = step(state, batch)    # the record is that of the previous step
        >>> record = step.flush()                     # the last record

    Args:
        loss_fn: `loss_fn(params, batch, keys)` returns one loss per example, or a `hetjax.Example`. With model state:
            `loss_fn(params, model_state, batch, keys, mask_b)` returns that and the sums for the state's update. Or a
            `hetjax.FlaxModel`, as made by `from_nnx` and `from_linen`.
        optimizer: any optax optimizer; clipping inside it sees the gradient of the global batch. Or an `nnx.Optimizer`.
        batch_size: maximum samples of a step over all workers.
        strategy: a preset such as 'balanced' (default), 'lbb' or 'daso'; see `hetjax.presets.PRESETS`. Those that
            divide the data set, and those without global steps, need `hetjax.Trainer`.
        controller: how many samples each worker gets: a name such as 'equal' or 'fixed:4,2,1,1', or an object.
        sync: how and when workers synchronize: a name such as 'allreduce' (default), or an object.
        engine: how a worker computes its samples: 'auto' (default), 'chunked', 'looped', 'masked', or an object such
            as `hetjax.Chunked(max_rows=256)`.
        transport: how sums travel between workers: 'mesh' by one program over all devices, 'host' by way of one device
            or of the hosts, for devices of several kinds. Default: 'auto', by what the workers are.
        update: 'sharded': each process updates a slice of the parameters, keeps the optimizer state of that slice only,
            and sends the new parameters to the others. 'replicated': every worker updates its own copy. Default:
            'auto', sharded between processes with the transport 'host'.
        update_on: where a process updates its slice in the sharded update: 'device' or 'host'. Default: 'auto', the
            quicker one.
        wire: numbers between processes by transport 'host': 'float32' (default); 'bfloat16' or 'int8', with error
            feedback, for slow links; 'auto', the quickest by measurement. Fewer bits cost 4 bytes of the host's memory
            per parameter and process, and exact allocation invariance: counts then influence the rounding.
        delay: 1 applies the gradients of a step while the next one computes, for links where the exchange dominates.
            This is another algorithm: each gradient is that of the parameters one update ago. No worker is benched.
            Default: 0.
        clip_norm: largest global norm of the gradient; a larger one is scaled down. Works with slices, where clipping
            inside the optimizer would leave the whole update to one process. Default: none.
        devices: JAX devices, one worker for each, or a choice such as 2, 'gpu' or 'gpu+cpu' (see `hetjax.devices`).
            Default: the choice of the launcher, else all devices of JAX's default platform: its accelerators, if any.
        speeds: simulated relative speeds, one per worker (a row then takes at least 0.1 ms at speed 1), or a
            `hetjax.Simulation`. Default: real speeds.
        capacity: maximum samples of a worker in a step; one number, or one per worker. Default: chosen by the engine.
        memory: bytes of each worker for parameters, gradients and its slice of the optimizer state; one number, or
            one per worker. The number of a process's first worker bounds its slice of the sharded update, wherever
            that is updated. Default: the memory of the place of the update: of that worker's device, or of the host,
            which its processes share.
        quantum: counts are multiples of it. Default: the model's (the group of BatchNorm or `batch_loss`), or 1.
        compute_dtype: dtype of parameters and inputs in `loss_fn`, such as 'bfloat16', or one per kind of device or
            platform: `{"Tesla T4": "float32", "default": "bfloat16"}`. Parameters, model state and sums stay float32.
        eval_fn: loss for `evaluate`, if it differs from `loss_fn` (no dropout, running averages).
        predict_fn: `predict_fn(params, batch, keys)`, with model state `predict_fn(params, model_state, batch, keys)`,
            returns the outputs of a batch for `predict`: a tree of arrays, one entry per example. Default: the model's.
        advance: `(model_state, state_sums) -> model_state`. Default: `hetjax.running_average()`.
        ema_decay: decay of an exponential moving average of the parameters, which is then evaluated. Default: none.
        epoch_size: samples in an epoch, for methods that act once per epoch.
        epochs: number of epochs, for methods whose schedule depends on it (DASO).
        seed: random keys of the samples derive from it and from their positions.
        on_nonfinite: what to do about a NaN or infinite loss, gradient or update: 'stop' raises `NonFiniteError`;
            'skip' leaves the step out, which takes a second copy of parameters and optimizer state.
        max_skips: stop after this many skipped steps in a row.
        wait_limit: maximum seconds to wait for a worker's local phase.

    Raises:
        TypeError: if an option is of the wrong type.
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
        sync: str | Sync | None = None,
        engine: str | EngineSpec | None = None,
        transport: str = "auto",
        update: str = "auto",
        update_on: str = "auto",
        wire: str = "float32",
        delay: int = 0,
        clip_norm: float | None = None,
        devices: DeviceChoice = None,
        speeds: Sequence[float] | Simulation | None = None,
        capacity: PerWorker = None,
        memory: PerWorker = None,
        quantum: int | None = None,
        compute_dtype: ComputeDtype = None,
        eval_fn: Callable[..., Any] | None = None,
        predict_fn: Callable[..., Any] | None = None,
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
            predict_fn = predict_fn or getattr(model, "predict_fn", None)
        if is_flax(loss_fn):
            raise TypeError(
                "loss_fn is a Flax model: give hetjax.from_nnx(model, example_loss), or for Linen "
                "hetjax.from_linen(model, variables, example_loss)."
            )
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function of (params, batch, keys), got {type(loss_fn).__name__}.")
        check_optimizer(nnx_optimizer.transformation(optimizer))
        check_function("eval_fn", eval_fn)
        check_function("predict_fn", predict_fn)
        check_function("advance", advance)
        chosen = presets.choose(strategy, controller=controller, sync=sync, engine=engine)
        presets.check_stepped(chosen.sync)
        presets.check_global(chosen)
        self._model_state = getattr(model, "model_state", None)
        self._given, self.optimizer = optimizer, nnx_optimizer.transformation(optimizer)
        self.sync, self.advance = chosen.sync, advance or running_average()
        # Processes may be given different flags: what one got wrong is an error in all.
        shared = problems_shared if processes.count() > 1 and not self.sync.by_node else nullcontext
        with shared():
            self.batch_size = whole("batch_size", batch_size, 1, MOST_SAMPLES)
            self.seed = whole("seed", seed, 0, MOST_SEED)
            self.clip_norm = None if clip_norm is None else number("clip_norm", clip_norm, above=0)
            if ema_decay is not None and not 0 <= number("ema_decay", ema_decay) < 1:
                raise ValueError(f"ema_decay must be at least 0 and below 1, got {ema_decay}.")
            self.ema_decay = ema_decay
            quantum = getattr(model, "quantum", 1) if quantum is None else quantum
            self.quantum = whole("quantum", quantum, 1, MOST_SAMPLES)
            self.epoch_size = None if epoch_size is None else whole("epoch_size", epoch_size, 1, MOST_SAMPLES)
            self.epochs = None if epochs is None else whole("epochs", epochs, 1)
            self.nonfinite = NonFinitePolicy(on_nonfinite, max_skips, processes.index() if self.sync.by_node else None)
            self.wait_limit = number("wait_limit", wait_limit, above=0)
            transport = current_name("transport", transport, _FORMER_TRANSPORTS)
            self.options = ReduceOptions(transport, update, update_on, wire, delay)
            presets.check_exchange(self.sync, wire, delay)
            presets.check_update(self.sync, update)
        self.workers = self.sync.workers(devices)
        with shared():
            check_options(self.options, self.workers)
            self.controller: Controller = presets.for_workers(chosen.controller, self.workers)
            if memory is not None:
                self.workers = self.workers.with_memory(per_worker("memory", memory, 1, self.workers, _MOST_MEMORY))
            self.simulation = as_simulation(speeds, len(self.workers))
            capacity_W = per_worker("capacity", capacity, self.batch_size, self.workers)
            per_worker("max_rows", chosen.engine.max_rows, 1, self.workers)
        self.requests = Requests()
        self.limit = self.batch_size  # maximum samples of a step for these workers
        if self.sync.by_node:
            self.limit = min(self.limit, int(capacity_W.sum()))
        dtypes = dtypes_by_kind(compute_dtype)
        if not self.sync.by_node or processes.count() == 1:  # a node does not know the kinds of the others
            warn_of_unused(self.workers.kinds, dtypes)
        self.sessions = Sessions(
            loss_fn, eval_fn or loss_fn, self.advance, chosen.engine, self.workers, self.batch_size, self.limit,
            capacity, self.quantum, self.simulation, self.wait_limit, dtypes, predict_fn,
        )  # fmt: skip
        self._pipeline: Pipeline | None = None
        self._shares_W = np.ones(len(self.workers))
        self._first = 0  # number of steps made before `open`
        self._left: dict[int, np.ndarray] = {}  # by step since then: batches left in each worker's process
        self._log = RunLog()
        self.bench: Bench | None = None  # where workers can leave the exchange
        self.recovery: Recovery | None = None  # where members may be lost
        if self.workers.elastic:
            self.recovery = Recovery(self, processes.link())

    # -- in a training loop --

    def init(self, params: Tree, model_state: Tree = None) -> State:
        """Build the state before the first step.

        Args:
            params: any tree of arrays, the same in all processes; those marked by `hetjax.frozen` are not trained.
            model_state: what the model carries from step to step, such as BatchNorm statistics. Default: that of
                `from_nnx` or `from_linen`, or none.

        Returns:
            The state, with a fresh state of the optimizer. For an `nnx.Optimizer` that has made steps, with its state
            and number of steps; the cursor, from which random keys follow, is where as many full batches end.

        Raises:
            TypeError: if `loss_fn` cannot be called as agreed, or `params` holds something else than arrays.
            ValueError: if there is nothing to train, or an `nnx.Optimizer` is for other parameters than are trained.
        """
        if is_flax(params):
            raise TypeError(
                "params is a Flax model: give model.params, with model = hetjax.from_nnx(network, example_loss)."
            )
        model_state = self._model_state if model_state is None else model_state
        check_loss("loss_fn", self.sessions.loss_fn, stateful=model_state is not None)
        params = nnx_optimizer.selected(self._given, params)
        check_params(params)
        memory.check_parameters(params, trainable(params), self.workers)
        ema = None if self.ema_decay is None else jax.tree.map(lambda p: p, params)
        opt_state = nnx_optimizer.continued(self._given, init_optimizer(self.optimizer, params))
        made = nnx_optimizer.steps_made(self._given)
        of_epochs = None if self.epoch_size is None else Sampler(self.epoch_size, self.batch_size)
        cursor = made * self.batch_size if of_epochs is None else of_epochs.samples_in(made)
        return State(params, model_state, opt_state, ema, made, cursor)

    def __call__(self, state: AnyState, batch: Any) -> tuple[LiveState, Record | None]:
        """Start the step of a batch; it runs while the caller prepares the next one.

        Args:
            state: what `init` or the last call returned. A `LiveState` is consumed: its buffers are reused.
            batch: arrays in dicts, tuples or any tree, all with the same number of rows, at most `batch_size`. All
                processes pass the same batch, or an object with `__len__` and `rows(start, stop)`, of which each
                process reads only its own rows.

        Returns:
            The state after this step, and the record of the previous step; None in the first call.

        Raises:
            ValueError: if the batch does not fit, or the state was consumed before.
            NonFiniteError: if the previous step had a NaN or infinity, and on_nonfinite is 'stop'.
        """
        presets.check_not_by_node(self.sync)
        host_batch = as_batch(batch, self.batch_size)
        live = self._live(state, host_batch)
        if isinstance(host_batch, NumberedBatch):
            host_batch = host_batch.at(live.step)
        elif live.step != state.step:  # this process has joined others
            raise ValueError(
                f"This process has joined a run that is at step {live.step}, but a plain iterator starts at its "
                "first batch. Loop over step.batches(batch_of), where batch_of(step) returns the batch of a step, "
                "or train on a source with hetjax.Trainer."
            )
        span = self._span(live, host_batch)
        return self.run(live, host_batch, span, self.plan(len(host_batch), span.epoch, span.bucket))

    def flush(self) -> Record | None:
        """Wait for the last step and return its record; None if that was returned before."""
        finished = self._pipeline.flush() if self._pipeline is not None else None
        return None if finished is None else self._record(finished)

    def batches(self, loader: Iterable[Any] | Callable[[int], Any]) -> Iterator[Any]:
        """Iterate over a loader, ending after the same step in all processes.

        With several processes, loop over this instead of the loader: otherwise the process whose loader ends first
        leaves the others waiting. It reads two batches ahead. In an elastic fleet all give the same batches; a process
        can join only if the loader is a function.

        Args:
            loader: batches of this process; or a function that returns the batch of a step, counted from 0, and None
                after the last one.

        Yields:
            The batches, up to the end of the shortest loader of all processes.
        """
        if callable(loader):
            while True:
                number = 0 if self._pipeline is None else self._pipeline.next
                if loader(number) is None:
                    return
                yield NumberedBatch(loader, number, self.batch_size)
        if self.recovery is not None or not self.workers.several_processes:
            yield from loader
            return
        first = 0 if self._pipeline is None else self._pipeline.next - self._first
        yield from until_shortest(
            loader, self.requests, lambda step: self._left[step], self.workers.process_W.tolist(), first
        )

    def evaluate(self, state: AnyState, batches: Iterable[Any], *, samples: Sequence[Tree] = ()) -> dict[str, Value]:
        """Compute the mean loss and metrics over all samples of the batches, split like the training steps.

        Args:
            state: a state of this step; it stays valid.
            batches: as in a call, each with at most `batch_size` rows; the same number in all processes.
            samples: rows of every shape that batches may have. Default: those trained on, or that of the first batch.

        Returns:
            The mean of 'loss' and the mean (or sum) of every metric, by name: numbers, and arrays for metrics with a
            shape.

        Raises:
            ValueError: if there are no batches.
        """

        def run() -> dict[str, Value]:
            read = self._read(state)

            def open_pipeline(batch: HostBatch) -> Pipeline:
                shapes = samples or self.sessions.like(sample_of(batch))
                return Pipeline(*self.compile_evaluation(read, shapes), seed=self.seed)

            return mean_over(batches, open_pipeline, self.limit, self._shares_W)

        if self.recovery is None:
            return run()
        batches = self._ready(state, batches)
        return self.recovery.run(run)

    def predict(self, state: AnyState, batches: Iterable[Any], *, samples: Sequence[Tree] = ()) -> Tree:
        """Compute the output of every sample with `predict_fn`, split among all workers like the training steps.

        Args:
            state: a state of this step; it stays valid.
            batches: as in `evaluate`; they need only what `predict_fn` reads.
            samples: rows of every shape that batches may have. Default: those trained on, or that of the first batch.

        Returns:
            The outputs of all samples in order, in all processes: `predict_fn`'s tree, of NumPy arrays.

        Raises:
            ValueError: if there are no batches, or no `predict_fn`, or outputs of rows of several shapes differ.
        """

        def run() -> Tree:
            core = self.sync.answer(self._read(state)).evaluated
            open_sessions = lambda sample: self.sessions.for_prediction(
                State(*core, None, None), samples or self.sessions.like(sample)
            )
            return outputs_over(batches, open_sessions, jax.tree.leaves(core), self.limit, self._shares_W, self.seed)

        if self.recovery is None:
            return run()
        batches = self._ready(state, batches)
        return self.recovery.run(run)

    def export(self, state: AnyState) -> State:
        """Return the complete state as plain arrays, as a checkpoint holds it.

        Args:
            state: a state of this step; it stays valid.

        Returns:
            The state, including that of the optimizer.
        """
        return state.whole() if isinstance(state, LiveState) else checked(state)

    def ask_to_save(self) -> None:
        """Request a checkpoint: all processes find the request in the record of the same step (`Record.save`)."""
        self.requests.save = True

    def state_dict(self, state: AnyState) -> dict[str, Any]:
        """Return what `checkpoint.save` writes besides the state, which holds its own position in the data.

        Args:
            state: the state that is saved with it.

        Returns:
            Plain JSON values.
        """
        return saved_plans(self, self.sync)

    def load_state_dict(self, saved: Mapping[str, Any], state: State) -> State:
        """Restore what `state_dict` returned. The workers may differ.

        Args:
            saved: what `state_dict` returned.
            state: the state that was saved with it.

        Returns:
            The state for the next call.

        Raises:
            ValueError: if batch size or seed differ from the saved ones.
        """
        return load_plans(self, self.sync, saved, state)

    def _ready(self, state: AnyState, batches: Iterable[Any]) -> list[Any]:
        """The batches, which may be needed again; waits for the running step if the state is the one after it."""
        if isinstance(state, LiveState):
            state.pipeline.reach(state.step)
        return list(batches)

    def _read(self, state: AnyState) -> State:
        """The state with what is evaluated; collective where processes hold it in slices."""
        if isinstance(state, LiveState):
            return state.pipeline.state(state.step, state.cursor, "evaluated")
        return checked(state)

    def close(self) -> None:
        """Wait for the last step, whose state stays readable, end the threads and drop the compiled programs."""
        pipeline, self._pipeline = self._pipeline, None
        try:
            if pipeline is not None:
                pipeline.close()
        finally:
            self.sessions.close()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._pipeline is not None:
            self._pipeline.abandon()  # after any error, nothing keeps running
        self.close()

    # -- for loops with a sampler, and for measurements --

    def open(
        self, state: State, sample: Tree, *, further: Sequence[Tree] = (), batches: Sequence[int] | None = None,
        epoch_size: int | None = None, end: int | None = None, terms: Mapping[str, Any] | None = None,
    ) -> LiveState:  # fmt: skip
        """Compile for rows like the sample and place the state on the devices. The first call does this by itself.

        For sequences of several lengths, call it with a sample of each; a batch then has rows of one of these shapes.

        Args:
            state: it is copied and stays valid.
            sample: one row or more, with the leading axis of a batch; the longest, if there are several shapes.
            further: the same for rows of other shapes that are trained on.
            batches: maximum samples of a step of each shape. Default: `batch_size`.
            epoch_size: samples in an epoch, if known.
            end: cursor at which training will end, if known.
            terms: what else the members of an elastic fleet have to agree on, as JSON values; one that joins gets
                those of the others (`recovery.terms`).

        Returns:
            The state on the devices; for a process that joins others, theirs.
        """
        if self._pipeline is not None:
            self._pipeline.close()
        state = checked(state)
        if self.recovery is None and (self.workers.several_processes or self.sync.by_node):
            presets.check_alike(self, state)
        sessions, reduce, core = self.compile_training(
            state, [sample, *further], batches, epoch_size or self.epoch_size, end
        )
        self._open_bench(getattr(reduce, "may_sit_out", False))
        self._pipeline = pipeline = Pipeline(
            sessions, reduce, core, seed=self.seed, made=state.step, requests=self.requests, simulation=self.simulation,
            learn=self._learn,
        )  # fmt: skip
        if self.simulation is not None and self.simulation.row_time is None:
            calibrate(self.simulation, sessions[0], pipeline.replicas, Rows(sample, 0), self.limit, self.seed)
        cursor = state.cursor
        if self.recovery is not None:
            cursor = self.recovery.begin(pipeline, cursor, terms or {})
        self._log, self._first, self._left = RunLog(), pipeline.made, {}
        return LiveState(pipeline, pipeline.made, cursor)

    def follow(
        self, workers: Workers, rows: Sequence[Mapping[str, Any]], source: int, kept_W: list[int | None]
    ) -> None:
        """Go on with the workers of another membership; see `hetjax.recovery`.

        Args:
            workers: the workers.
            rows: what each member says of itself.
            source: the member whose prices and controller count.
            kept_W: which of that member's former workers each worker is; None: it has joined.

        Raises:
            ValueError: if these workers cannot take a whole batch.
        """
        self.workers, self._shares_W = workers, np.ones(len(workers))
        self.sessions.follow(workers, [row["engines"] for row in rows], source)
        capacity_W = self._capacity_W()
        if capacity_W.sum() < self.batch_size:
            raise ValueError(
                f"The members that are left can take {capacity_W.sum()} samples a step (capacities "
                f"{capacity_W.tolist()}), but batch_size is {self.batch_size}."
            )
        self.controller = presets.for_workers(self.controller, workers)
        state = rows[source]["controller"]
        if hasattr(self.controller, "follow") and state.get("workers") == len(rows[source]["members_W"]):
            self.controller.follow(state, kept_W)

    def _capacity_W(self) -> np.ndarray:
        engine = self.sessions.engine
        assert engine is not None
        return engine.limits().capacity_W

    def alike(self) -> dict[str, Any]:
        """What all members of an elastic fleet must have in common, as JSON values."""
        return presets.alike(self)

    def compile_training(
        self, state: State, samples: Sequence[Tree], batches: Sequence[int] | None = None,
        epoch_size: int | None = None, end: int | None = None,
    ) -> tuple[list[Session], Reduce, Any]:  # fmt: skip
        """Compile what training uses, without running it: the devices may be targets (`hetjax.devices.targets`).

        Args:
            state: the state to start from.
            samples: a sample of every shape of rows, the longest first.
            batches: maximum samples of a step of each shape. Default: `batch_size`.
            epoch_size: samples in an epoch, if known.
            end: cursor at which training will end, if known.

        Returns:
            A session for each shape, the reduce, and the state on the devices.
        """
        sessions = self.sessions.for_training(state, samples, self.sync, self.controller, batches=batches)
        if end is None and epoch_size is not None and self.epochs is not None:
            end = epoch_size * self.epochs
        capacity = int(sessions[0].engine.limits().capacity_W.sum())
        setting = SyncContext(
            self.workers, sessions[0].layout, self.rule(state), self._reduce_options(sessions[0]), self.batch_size,
            self.seed, capacity, epoch_size, end,
        )  # fmt: skip
        return sessions, *self.sync.open(setting, state)

    def compile_evaluation(self, state: State, samples: Sequence[Tree]) -> tuple[list[Session], Reduce, Any]:
        """Compile what `evaluate` uses, without running it; see `compile_training`.

        Args:
            state: the state to evaluate.
            samples: a sample of every shape of rows.

        Returns:
            A session for each shape, the reduce, and what is evaluated on the devices.
        """
        core = self.sync.answer(state).evaluated
        sessions = self.sessions.for_evaluation(State(*core, None, None), samples)
        options = replace(self.options, update="auto", wire="float32", delay=0)
        return sessions, *make_reduce(options, self.workers, sessions[0].layout, None, core)

    def plan(self, batch: int, epoch: int = 0, bucket: int = 0) -> Plan:
        """Ask the controller for the counts of the next step; once per step, in order.

        Args:
            batch: samples of the step.
            epoch: epoch of the step, from 0.
            bucket: which of the shapes its rows have, from 0.

        Returns:
            The plan.
        """
        assert self._pipeline is not None
        limits = self._pipeline.sessions[bucket].engine.limits()
        if batch == 0:  # a node that sits a step out
            return Plan(np.zeros(limits.workers, np.int64))
        if limits.minimum_W.sum() > batch:  # a short last step may be too small for all
            limits = replace(limits, minimum_W=np.zeros_like(limits.minimum_W))
        if self.bench is not None:
            limits = self.bench.limits(batch, limits)
        if self.recovery is not None:
            self.recovery.planned()
        with profiling.phase("plan"):
            plan = self.controller.plan(batch, limits, epoch)
        limits.check_counts(plan.counts_W, batch, f"The controller {self.controller.name!r}")
        return plan if self.bench is None else self.bench.planned(plan)

    def run(self, state: LiveState, batch: HostBatch, span: Span, plan: Plan) -> tuple[LiveState, Record | None]:
        """Start a step at given positions with a given plan; `__call__` takes both from the cursor and the controller.

        Args:
            state: what `open` or the last call returned; it is consumed.
            batch: the samples.
            span: their epoch and positions in its order.
            plan: the counts of the workers.

        Returns:
            The state after this step, and the record of the previous step; None in the first call.
        """
        assert self._pipeline is not None
        limits = self._pipeline.sessions[span.bucket].engine.limits()
        limits.check_counts(plan.counts_W, span.batch, "The partition")
        finished = self._pipeline.submit(batch, span, plan)
        record = None if finished is None else self._record(finished)
        return LiveState(self._pipeline, state.step + 1, state.cursor + span.advance), record

    @property
    def engine(self) -> Engine | None:
        """The engine that trains; None before the first step."""
        return self.sessions.engine

    def rule(self, state: State) -> UpdateRule:
        """Return how summed gradients become new parameters.

        Args:
            state: a state of this step.

        Returns:
            Optimizer, update of the model state, moving average, and whether bad updates are undone.
        """
        advance = self.advance if state.model_state is not None else None
        undo = self.nonfinite.policy == "skip"
        return UpdateRule(self.optimizer, advance, self.ema_decay, undo, self.clip_norm)

    def local_phases(self, state: AnyState, batch: Any, counts_W: Sequence[int]) -> Callable[[], np.ndarray]:
        """Prepare the local phases alone, for measurements: no sum follows, and nothing is learned.

        Args:
            state: a state of this step; it stays valid.
            batch: as in a call.
            counts_W: samples of each worker.

        Returns:
            A function that runs the phases of this process's workers once and returns their seconds.
        """
        host_batch = as_batch(batch, self.batch_size)
        phases = self._live(state, host_batch).pipeline.phases(host_batch, Plan(np.asarray(counts_W, np.int64)))
        return lambda: np.array([result.seconds for result in phases()])

    # -- internals --

    def _live(self, state: AnyState, batch: HostBatch) -> LiveState:
        """Return the last state of the pipeline, after placing it if it is a plain one."""
        if not isinstance(state, LiveState):
            state = checked(state)
            if self.epoch_size is None:
                presets.check_without_epochs(self.controller)
            sample, *further = self.sessions.like(sample_of(batch, sample_size(state, self.quantum)))
            return self.open(state, sample, further=further)
        if self._pipeline is None or state.pipeline is not self._pipeline:
            raise ValueError(
                "This state belongs to a run that another state has replaced, or to another Step. Use the state that "
                "the last call returned, or start again from step.export(state)."
            )
        self._pipeline.check_last(state.step)
        return state

    def _open_bench(self, may_sit_out: bool) -> None:
        """Bench workers that do not pay where they can leave the exchange, and where the controller balances."""
        by_host = self.workers.several_processes
        member_W = self.workers.process_W if by_host else np.arange(len(self.workers))
        if not (
            may_sit_out and not self.workers.elastic and getattr(self.controller, "benches", False) and np.ptp(member_W)
        ):
            self.bench = None
            return
        self.bench = self.bench or Bench(member_W, "process" if by_host else "worker")
        self.bench.begin()

    def _learn(self, observation: Observation) -> None:
        if 2 * observation.counts_W.sum() > self._shares_W.sum():  # a short last step says little about shares
            self._shares_W = np.maximum(observation.counts_W, 1e-3)
        self.controller.observe(observation)
        if self.bench is not None:
            self.bench.observe(observation)

    def _reduce_options(self, session: Session) -> ReduceOptions:
        """Transport and update, with the workers' speeds from the last plan, or else from their kinds."""
        rate_of = getattr(session.engine, "rate_of", lambda kind: 1.0)
        by_kind = [rate_of(worker.kind) for worker in self.workers.members]
        return replace(self.options, rate_W=self._shares_W if np.ptp(self._shares_W) else np.array(by_kind))

    def _span(self, live: LiveState, batch: HostBatch) -> Span:
        epoch, start = divmod(live.cursor, self.epoch_size or _NO_EPOCH)
        return Span(epoch, start, start + len(batch), bucket=live.pipeline.bucket_of(batch))

    def _record(self, finished: Finished) -> Record:
        step, report = finished
        self._left[step.number - self._first] = report.left_W
        self._left.pop(step.number - self._first - MANY, None)
        ideal = self.simulation.ideal() / self.sessions.share(step.span.bucket) if self.simulation is not None else None
        own = [i for i in self.workers.local if i < len(step.plan.counts_W)]  # members may have come since
        idle = not step.plan.counts_W[own].any()
        record = self._log.record(step, report, ideal, idle)
        if self.recovery is not None and (news := self.recovery.take_news()):
            reason = " ".join(f"{event['reason']} {event['seconds']:.2f} s." for event in news)
            record = replace(record, changed=True, reason=reason, more={**record.more, "members": news})
        try:
            self.nonfinite.check(record)
        except NonFiniteError:
            if self._pipeline is not None:
                self._pipeline.abandon()
            raise
        return record


def saved_plans(step: Step, sync: Sync) -> dict[str, Any]:
    """What a checkpoint holds of the controller and the sync, and what a resumed run must have in common."""
    return {
        "batch_size": step.batch_size,
        "seed": step.seed,
        "controller": step.controller.state_dict(),
        "sync": {"name": sync.name, "state": sync.state_dict()},
        "order": None,
    }


def load_plans(step: Step, sync: Sync, saved: Mapping[str, Any], state: State) -> State:
    """Restore what `saved_plans` returned; the state for this sync."""
    for name, mine in (("batch_size", step.batch_size), ("seed", step.seed)):
        if saved[name] != mine:
            raise ValueError(
                f"The run was started with {name}={saved[name]} and cannot go on with {mine}: its steps would "
                "differ. Resume with the same value, or start a new run."
            )
    others = sync.by_node and not processes.first()  # the saved one belongs to the first node's workers
    if saved["controller"].get("controller") == step.controller.name and not others:
        step.controller.load_state_dict(saved["controller"])  # another controller starts afresh
    if syncs.FORMER_NAMES.get(name := saved["sync"]["name"], name) == sync.name:
        sync.load_state_dict(saved["sync"]["state"])
        return state
    return syncs.make(saved["sync"]["name"]).answer(state)
