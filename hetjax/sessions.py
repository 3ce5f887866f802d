"""The compiled sessions of a step, for training, evaluation and prediction: one per shape of rows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from hetjax import presets, processes
from hetjax.adapters.probe import check_model_state, probe_indices, warn_of_idle_workers
from hetjax.data.batches import is_like
from hetjax.devices.targets import target_of
from hetjax.devices.workers import Workers
from hetjax.engines import Engine, EngineSpec
from hetjax.engines.clocks import Hold, no_hold
from hetjax.engines.session import Session, open_prediction, open_session, shapes
from hetjax.engines.specs import PerWorker
from hetjax.planning.controllers.base import Controller
from hetjax.simulation.speeds import Simulation
from hetjax.state import State
from hetjax.sync import Sync

log = logging.getLogger("hetjax")
Tree = Any


@dataclass
class Sessions:
    """Opens sessions and keeps them: rows of the same shapes compile nothing again.

    Args:
        loss_fn: the loss for training.
        eval_fn: the loss for evaluation.
        advance: how state sums become the new model state.
        engine_spec: the engine as the user chose it.
        workers: the workers of this process's plan.
        batch_size: samples of a step over all workers.
        limit: maximum samples of a step for these workers.
        capacity: maximum samples of a worker in a step.
        quantum: counts are multiples of it.
        simulation: simulated speeds of training, or None.
        wait_limit: maximum seconds to wait for a local phase.
        dtypes: compute dtypes by kind of device.
        predict_fn: the function for predictions, or None.
    """

    loss_fn: Callable[..., Any]
    eval_fn: Callable[..., Any]
    advance: Callable[[Tree, Tree], Tree]
    engine_spec: EngineSpec
    workers: Workers
    batch_size: int
    limit: int
    capacity: PerWorker
    quantum: int
    simulation: Simulation | None
    wait_limit: float
    dtypes: Mapping[str, str]
    predict_fn: Callable[..., Any] | None = None
    _training: dict[str, Session] = field(default_factory=dict, init=False)  # by shape and batch
    _evaluation: dict[str, Session] = field(default_factory=dict, init=False)
    _prediction: dict[str, Session] = field(default_factory=dict, init=False)
    _share: dict[str, float] = field(default_factory=dict, init=False)  # size of a training row, relative to the first

    @property
    def engine(self) -> Engine | None:
        """The engine that trains, on the longest rows if there are several; None before the first session."""
        return next((session.engine for session in self._training.values()), None)

    def share(self, bucket: int) -> float:
        """Size of a row of a bucket that is trained on, relative to the longest."""
        return list(self._share.values())[bucket] if self._share else 1.0

    def like(self, sample: Tree) -> list[Tree]:
        """Return the shapes trained on, if the sample has one of several; otherwise the sample."""
        programs = [session.engine.program for session in self._training.values()]
        known = len(programs) > 1 and any(is_like(sample, program.row) for program in programs)
        return [program.block(1) for program in programs] if known else [sample]

    def for_training(
        self,
        state: State,
        samples: Sequence[Tree],
        sync: Sync,
        controller: Controller,
        capacity: PerWorker = None,
        batches: Sequence[int] | None = None,
    ) -> list[Session]:
        """Compile for training on rows like the samples, after a trial of the model state.

        Args:
            state: parameters and model state.
            samples: rows of every shape that steps may have, the longest first: work is counted in its rows.
            sync: the sync.
            controller: the controller.
            capacity: maximum samples of a worker. Default: that of the step.
            batches: maximum samples of a step of each shape. Default: that of the step.

        Raises:
            ValueError: if the model state would be trained wrong, or the controller needs timings the model spoils.
        """
        if not self._training:  # said once
            log.info("%s.", self.workers.backend)
        shape_K = [shapes(state, sample) for sample in samples]
        batch_K = [min(self.limit, batch) for batch in batches or [self.limit] * len(samples)]
        keys = [f"{shape}, {batch} samples" for shape, batch in zip(shape_K, batch_K, strict=True)]
        share_K = [_elements(shape[2]) / _elements(shape_K[0][2]) for shape in shape_K]
        self._share = dict(zip(keys, share_K, strict=True))

        def open_one(k: int) -> Session:
            self._check_model(state, samples[k], sync)
            options = {
                "batch": batch_K[k],
                "capacity": self.capacity if capacity is None else capacity,
                "hold": no_hold if self.simulation is None else self._hold(keys[k]),
            }
            return self._open_training(shape_K[k], sync, controller, options)

        opened = _reopen(self._training, keys, open_one)
        for bucket, (session, share) in enumerate(zip(opened, share_K, strict=True)):
            session.engine.price_like(opened[0].engine, share, bucket)
        return opened

    def _hold(self, key: str) -> Hold:
        """Simulated speeds are those of the longest rows; shorter ones take their share of the time."""
        simulation = self.simulation
        assert simulation is not None
        return lambda worker, rows, began: simulation.hold(worker, rows * self._share[key], began)

    def _open_training(
        self, shape: tuple[Tree, Tree, Tree], sync: Sync, controller: Controller, options: dict[str, Any]
    ) -> Session:
        simulation = self.simulation
        options |= {"engine": self.engine_spec, "priced_by_rows": simulation is not None}
        session = open_session(
            self.loss_fn,
            shape,
            self.workers,
            train=True,
            own_parameters=sync.own_parameters,
            quantum=self.quantum,
            wait_limit=self.wait_limit,
            dtypes=self.dtypes,
            **sync.engine_options(self.workers, self.quantum, simulation, options),
        )
        if session.exact_sync:
            try:
                presets.check_exact_sync(controller)
            except ValueError:
                session.close()
                raise
        return session

    def offers(self) -> list[Any]:
        """What the other members of an elastic fleet have to know of each engine that trains, as JSON values."""
        engines: list[Any] = [session.engine for session in self._training.values()]
        return [engine.offer() for engine in engines]

    def follow(self, workers: Workers, offers_P: Sequence[Sequence[Any]], source: int) -> None:
        """Go on with the workers of another membership; nothing compiles.

        Args:
            workers: the workers.
            offers_P: what each process offers for each shape that is trained on.
            source: the process whose prices count.
        """
        self.workers = workers
        engines: list[Any] = [session.engine for session in self._training.values()]
        for bucket, engine in enumerate(engines):
            engine.follow(workers, [offers[bucket] for offers in offers_P], source)
            engine.price_like(engines[0], self.share(bucket), bucket)
        others: list[Any] = [each.engine for each in (*self._evaluation.values(), *self._prediction.values())]
        for engine in others:
            engine.follow(workers)

    def for_evaluation(self, state: State, samples: Sequence[Tree]) -> list[Session]:
        """Compile for evaluating rows like the samples."""
        shape_K = [shapes(state, sample) for sample in samples]

        def open_one(k: int) -> Session:
            return open_session(
                self.eval_fn,
                shape_K[k],
                self.workers,
                train=False,
                engine=self.engine_spec,
                quantum=self.quantum,
                hold=no_hold,
                wait_limit=self.wait_limit,
                dtypes=self.dtypes,
                batch=self.limit,
                capacity=self.capacity,
                priced_by_rows=False,
            )

        return _reopen(self._evaluation, list(map(str, shape_K)), open_one)

    def for_prediction(self, state: State, samples: Sequence[Tree]) -> list[Session]:
        """Compile for the outputs of rows like the samples.

        Raises:
            ValueError: if there is no function for predictions.
        """
        if self.predict_fn is None:
            raise ValueError(
                "There is no function for predictions: give predict_fn(params, batch, keys) to Step or Trainer, or "
                "predict to hetjax.from_nnx or from_linen."
            )
        shape_K, predict_fn = [shapes(state, sample) for sample in samples], self.predict_fn

        def open_one(k: int) -> Session:
            return open_prediction(
                predict_fn,
                shape_K[k],
                self.workers,
                engine=self.engine_spec,
                wait_limit=self.wait_limit,
                dtypes=self.dtypes,
                batch=self.limit,
                capacity=self.capacity,
            )

        return _reopen(self._prediction, list(map(str, shape_K)), open_one)

    def close(self) -> None:
        """End the threads of all sessions and drop the compiled programs."""
        for sessions in (self._training, self._evaluation, self._prediction):
            for session in sessions.values():
                session.close()
            sessions.clear()

    def _check_model(self, state: State, sample: Tree, sync: Sync) -> None:
        """Refuse a model state that would be trained wrong, and warn of workers left idle, before compiling."""
        if sync.stepped and not self._training:  # otherwise a batch belongs to one worker; one warning is enough
            nodes = processes.count() if sync.by_node else 1
            warn_of_idle_workers(self.batch_size, self.quantum, len(self.workers) * nodes)
        if state.model_state is not None:
            chosen = probe_indices(len(jax.tree.leaves(sample)[0]), self.quantum)
            rows = jax.tree.map(lambda x: x[chosen], sample)
            own = self.workers.own[0]
            device = own if target_of(own) is None else jax.local_devices()[0]
            check_model_state(self.loss_fn, self.advance, state, rows, device)


def _reopen(sessions: dict[str, Session], keys: Sequence[str], open_one: Callable[[int], Session]) -> list[Session]:
    """Return the sessions of these shapes in their order, opening those that are missing; others are closed first."""
    for key in [key for key in sessions if key not in keys]:
        sessions.pop(key).close()
    for k, key in enumerate(keys):
        session = sessions.pop(key, None) or open_one(k)
        sessions[key] = session  # now the last one: the order is that of the keys
    return [sessions[key] for key in keys]


def _elements(row: Tree) -> int:
    """Number of values in a sample, in which rows of unequal length are compared."""
    return sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(row)) or 1
