"""The steps that `hetjax compile` compiles: of small models, of named experiments, and of the user's own functions."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optax

from hetjax.adapters.probe import sample_size
from hetjax.cli.training import configs, setup
from hetjax.engines import EngineSpec
from hetjax.presets import choose
from hetjax.state import State
from hetjax.step import Step
from hetjax.zoo.tasks import Task, make_task

MODELS = {"mlp": "digits", "cnn": "digits", "resnet": "digits", "transformer": "text"}  # and their data

Made = tuple[Step, State, Any]  # a step, its first state, and a batch
Make = Callable[..., Made]  # (devices=, engine=)


def maker(config: str, batch: int, transport: str = "auto") -> Make:
    """The function of devices and engine that makes step, state and batch of a configuration.

    Args:
        config: name of a small model or of an experiment, FILE.py with an experiment, or FILE.py:FUNCTION with a
            function of (devices, engine).
        batch: samples of a step of a small model.
        transport: how sums travel between the workers of a small model or an experiment.

    Raises:
        ValueError: if there is no such configuration, or it decides the transport itself.
    """
    if config in MODELS:
        return partial(_small_model, config, batch, transport)
    path, _, name = config.rpartition(":")
    if not path and (config.endswith(".py") or config in configs.names()):
        return partial(_experiment, config, transport)
    if not path.endswith(".py"):
        raise ValueError(
            f"There is no configuration {config!r}: use {', '.join([*MODELS, *configs.names()])}, FILE.py as for "
            "`hetjax train --config`, or FILE.py:FUNCTION, where FUNCTION(devices, engine) returns a hetjax.Step, its "
            "first state and a batch."
        )
    if transport != "auto":
        raise ValueError(f"--transport has no effect on {config}: give Step(..., transport={transport!r}) there.")
    if not Path(path).is_file() or not callable(found := runpy.run_path(path).get(name)):
        raise ValueError(f"{path} has no function {name!r}: give FILE.py:FUNCTION.")
    return found


def small_task(model: str) -> Task:
    """The data and the model of a configuration, with random bits in the local phase: dropout, or shifted images."""
    options: dict[str, Any] = {"transformer": {"dropout": 0.1}, "cnn": {"dropout": 0.2}}.get(model, {})
    return make_task(MODELS[model], model, augment="shift" if model in ("cnn", "resnet") else "none", **options)


def _small_model(model: str, batch: int, transport: str, devices: Sequence[Any], engine: EngineSpec) -> Made:
    task = small_task(model)
    return _made(task, optax.adamw(1e-3), batch_size=batch, devices=devices, engine=engine, transport=transport)


def _experiment(name: str, transport: str, devices: Sequence[Any], engine: EngineSpec) -> Made:
    """What `hetjax train --config NAME` trains: its model, dtype, optimizer, schedule and sync."""
    config = configs.named(name)
    setup.check_flags(config)
    chosen, task = choose(**setup.method(config)), setup.make_task_of(config)
    if chosen.sync.name != "allreduce":
        raise ValueError(
            f"The experiment {name!r} has the sync {chosen.sync.name!r}: only 'allreduce' is compiled for devices that "
            "are not there. Choose another experiment, or compile its model alone."
        )
    return _made(
        task,
        setup.optimizer(config, setup.total_steps(config, len(task.train))),
        batch_size=config.data.batch_size,
        controller=chosen.controller,
        sync=chosen.sync,
        engine=engine,
        transport=transport,
        devices=devices,
        capacity=setup.whole_numbers("--capacity", config.workers.capacity),
        compute_dtype=setup.compute_dtype(config),
        ema_decay=config.optimizer.ema,
        epoch_size=len(task.train),
        seed=config.output.seed,
        on_nonfinite=config.optimizer.on_nonfinite,
    )


def _made(task: Task, optimizer: optax.GradientTransformation, **options: Any) -> Made:
    step = Step(task.model, optimizer, **options)
    state = step.init(task.model.params, task.model.model_state)
    return step, state, task.train.rows(np.arange(sample_size(state, step.quantum)))
