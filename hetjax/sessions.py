"""The compiled sessions of a step, for training, evaluation and prediction, remade for rows of a new shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from hetjax import presets
from hetjax.adapters.probe import check_model_state, probe_indices, warn_of_idle_workers
from hetjax.devices.workers import Workers
from hetjax.engines import Engine, EngineSpec
from hetjax.engines.clocks import no_hold
from hetjax.engines.session import Session, open_prediction, open_session, shapes
from hetjax.engines.specs import PerWorker
from hetjax.planning.controllers.base import Controller
from hetjax.simulation.speeds import Simulation
from hetjax.state import State
from hetjax.sync import Sync

Tree = Any


@dataclass
class Sessions:
    """Opens sessions and keeps them: rows of the same shape compile nothing again.

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
    _open: dict[str, Session] = field(default_factory=dict, init=False)  # by purpose

    @property
    def engine(self) -> Engine | None:
        """The engine that trains; None before the first session."""
        return self._open["training"].engine if "training" in self._open else None

    def for_training(
        self, state: State, sample: Tree, sync: Sync, controller: Controller, capacity: PerWorker = None
    ) -> Session:
        """Compile for training on rows like the sample, after a trial of the model state.

        Raises:
            ValueError: if the model state would be trained wrong, or the controller needs timings the model spoils.
        """
        shape = shapes(state, sample)
        if (known := self._known("training", shape)) is not None:
            return known
        self._check_model(state, sample, sync)
        simulation = self.simulation
        options = {
            "engine": self.engine_spec,
            "batch": self.limit,
            "capacity": self.capacity if capacity is None else capacity,
            "hold": simulation.hold if simulation is not None else no_hold,
            "priced_by_rows": simulation is not None,
        }
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
        self._open["training"] = session
        return session

    def for_evaluation(self, state: State, sample: Tree) -> Session:
        """Compile for evaluating rows like the sample."""
        shape = shapes(state, sample)
        if (known := self._known("evaluation", shape)) is not None:
            return known
        self._open["evaluation"] = session = open_session(
            self.eval_fn,
            shape,
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
        return session

    def for_prediction(self, state: State, sample: Tree) -> Session:
        """Compile for the outputs of rows like the sample.

        Raises:
            ValueError: if there is no function for predictions.
        """
        if self.predict_fn is None:
            raise ValueError(
                "There is no function for predictions: give predict_fn(params, batch, keys) to Step or Trainer, or "
                "predict to hetjax.from_nnx or from_linen."
            )
        shape = shapes(state, sample)
        if (known := self._known("prediction", shape)) is not None:
            return known
        self._open["prediction"] = session = open_prediction(
            self.predict_fn,
            shape,
            self.workers,
            engine=self.engine_spec,
            wait_limit=self.wait_limit,
            dtypes=self.dtypes,
            batch=self.limit,
            capacity=self.capacity,
        )
        return session

    def close(self) -> None:
        """End the threads of all sessions and drop the compiled programs."""
        for session in self._open.values():
            session.close()
        self._open.clear()

    def _known(self, purpose: str, shape: tuple[Tree, Tree, Tree]) -> Session | None:
        """Return the open session if it fits; otherwise close it before anything that may fail."""
        known = self._open.get(purpose)
        if known is not None and known.key != str(shape):
            self._open.pop(purpose).close()
            return None
        return known

    def _check_model(self, state: State, sample: Tree, sync: Sync) -> None:
        """Refuse a model state that would be trained wrong, and warn of workers left idle, before compiling."""
        if sync.stepped:  # otherwise a batch belongs to one worker
            nodes = jax.process_count() if sync.by_node else 1
            warn_of_idle_workers(self.batch_size, self.quantum, len(self.workers) * nodes)
        if state.model_state is not None:
            chosen = probe_indices(len(jax.tree.leaves(sample)[0]), self.quantum)
            rows = jax.tree.map(lambda x: x[chosen], sample)
            check_model_state(self.loss_fn, self.advance, state, rows, self.workers.devices[self.workers.local[0]])
