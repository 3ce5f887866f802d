"""A session: engine, clocks and layout compiled for rows of one shape, for training, evaluation or prediction."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.adapters.contract import Objective, Prediction
from hetjax.devices import memory
from hetjax.devices.workers import Workers
from hetjax.engines import Chunked, Engine, EngineContext, EngineSpec, Program
from hetjax.engines.clocks import Clocks, Hold, no_hold
from hetjax.engines.local import eval_sums, layout_of, outputs_of, row_outputs, train_sums
from hetjax.engines.precision import announce
from hetjax.reduce.layout import Layout
from hetjax.state import State

log = logging.getLogger("hetjax")
Tree = Any


@dataclass
class Session:
    """Everything compiled for one set of shapes."""

    key: str  # the shapes it was compiled for
    engine: Engine
    clocks: Clocks
    layout: Layout
    exact_sync: bool  # workers wait for each other inside the local phase, so their times are meaningless
    outputs: Tree = None  # of a prediction: the shapes of one sample's outputs

    def close(self) -> None:
        """Stop the threads."""
        self.engine.close()
        self.clocks.close()


def shapes(state: State, rows: Tree) -> tuple[Tree, Tree, Tree]:
    """Shapes of one replica's parameters, of its model state, and of one row."""
    inner = lambda x: jax.ShapeDtypeStruct(np.shape(x)[1:], jax.dtypes.canonicalize_dtype(x.dtype))
    whole = lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype))
    of_one = inner if state.replicas else whole
    return jax.tree.map(of_one, state.params), jax.tree.map(of_one, state.model_state), jax.tree.map(inner, rows)


def open_session(
    loss_fn: Callable[..., Any],
    shape: tuple[Tree, Tree, Tree],
    workers: Workers,
    *,
    train: bool,
    own_parameters: bool = False,
    engine: EngineSpec,
    quantum: int,
    hold: Hold,
    wait_limit: float,
    dtypes: Mapping[str, str],
    **options: Any,
) -> Session:
    """Compile for parameters, model state and rows of these shapes.

    `dtypes` holds compute dtypes by kind of device; `options` are those of `EngineContext`.
    """
    params, model_state, row = shape
    memory.check_batch(options["batch"], row)
    objective = Objective(loss_fn, model_state is not None)
    layout, exact_sync = layout_of(objective, params, model_state, row, max(quantum, 2), train=train)
    spec, reason = engine.resolve(workers, exact_sync)
    if train:
        log.info("Engine %s: %s.", spec.name, reason)
        announce(workers.kinds, dtypes)
    clocks = Clocks(workers, hold, wait_limit)
    sums = (train_sums if train else eval_sums)(objective, layout)
    program = Program(sums, layout.sizes, layout.dtype, params, model_state, row, dtypes=dtypes)
    if own_parameters:
        program = program.with_own_parameters()
    built = spec.build(EngineContext(program, workers, clocks, quantum=quantum, **options))
    return Session(str(shape), built, clocks, layout, exact_sync)


def open_prediction(
    predict_fn: Callable[..., Any],
    shape: tuple[Tree, Tree, Tree],
    workers: Workers,
    *,
    engine: EngineSpec,
    wait_limit: float,
    dtypes: Mapping[str, str],
    **options: Any,
) -> Session:
    """Compile for the outputs of rows. The engine is always chunked: it runs on any devices and keeps what it made."""
    params, model_state, row = shape
    memory.check_batch(options["batch"], row)
    prediction = Prediction(predict_fn, model_state is not None)
    outputs = outputs_of(prediction, params, model_state, row)
    program = Program(row_outputs(prediction), (), None, params, model_state, row, dtypes=dtypes, keeps_rows=True)
    clocks = Clocks(workers, no_hold, wait_limit)
    spec = engine if isinstance(engine, Chunked) else Chunked(engine.max_rows)
    built = spec.build(EngineContext(program, workers, clocks, **options))
    return Session(str(shape), built, clocks, Layout.of((), (), ()), exact_sync=False, outputs=outputs)
