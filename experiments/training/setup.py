"""What the flags of train.py mean: the devices and their speeds, the task, the optimizer, the strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from training.configs import Config

from hetjax.arguments import MOST_SAMPLES, MOST_SEED, number, whole
from hetjax.devices.fake import devices_from_environment, devices_of_all, fake_devices
from hetjax.environment import PROCESSES
from hetjax.presets import Choice
from hetjax.simulation.speeds import Simulation, Trace, constant, of_survivors
from hetjax.simulation.traces import read_trace
from hetjax.sync import Sync
from hetjax.zoo.tasks import Task, make_task

DEFAULT_EPOCHS = 24
MOST_STEPS = 2**31 - 1
LEARNING_RATES = {"mlp": 3e-3, "cnn": 1e-2, "resnet": 1e-2, "transformer": 2e-3}
DROPOUTS = {"mlp": 0.2, "cnn": 0.2, "transformer": 0.1}
LEAST_ROW_TIME_MS = 0.4
DEFAULT_SPEEDS = "1,1,0.5,0.25"


def are_several(processes: int) -> bool:
    """Whether this is one of several processes, or what is left of them: the launcher may start again with one."""
    return processes > 1 or PROCESSES in os.environ


def find_devices(config: Config, processes: int = 1) -> tuple[Simulation | None, list[jax.Device]]:
    """The devices, and their simulated speeds if any: 1, 1, 0.5, 0.25 while nothing about devices is given."""
    asked = config.workers
    if asked.trace is not None and asked.speeds is not None:
        raise ValueError("--trace and --speeds both say how fast the workers are: give one of them.")
    trace = None
    if asked.trace is not None:
        trace = read_trace(asked.trace)
    elif asked.speeds is not None and asked.speeds != "real":
        trace = constant(numbers("--speeds", asked.speeds))
    several = are_several(processes)
    count = asked.devices if several or trace is None or asked.devices is not None else len(trace(0)[0])
    by_node = "daso" in (config.method.sync, config.method.strategy)
    devices = devices_of_all(count, spare=int(by_node)) if several else fake_devices(count)
    if several and trace is not None:
        trace = of_survivors(trace, len(devices))
        trace = _own_part(trace, devices) if by_node else trace
    silent = not several and asked.devices is None and asked.speeds is None and devices_from_environment() is None
    if trace is None and silent and devices[0].platform == "cpu":
        trace = constant(numbers("--speeds", DEFAULT_SPEEDS))
    if trace is None:
        return None, devices
    least, fixed = LEAST_ROW_TIME_MS / 1e3, asked.row_time
    if fixed is not None and not 0 < fixed < np.inf:
        raise ValueError(f"--row-time is {fixed}: expected milliseconds above 0.")
    return Simulation(trace, row_time=None if fixed is None else fixed / 1e3, least=least), devices


def _own_part(trace: Trace, devices: list[jax.Device]) -> Trace:
    """The speeds of this process's workers, for a sync that plans by node."""
    own = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    if len(trace(0)[0]) != len(devices):
        raise ValueError(
            f"Speeds were given for {len(trace(0)[0])} workers, but there are {len(devices)}: give one speed each."
        )
    return lambda step: (trace(step)[0][own], trace(step)[1][own])


def make_task_of(config: Config) -> Task:
    asked, options = config.model, model_options(config)
    augment = asked.augment or ("none" if asked.model in ("mlp", "transformer") else "shift")
    return make_task(
        config.data.dataset,
        asked.model,
        seed=config.output.seed,
        norm=asked.norm,
        augment=augment,
        dtype=asked.dtype,
        **options,
    )


def check_flags(config: Config) -> None:
    """Refuse numbers that make no sense, and a folder that is none, before anything is made of them."""
    data, learns = config.data, config.optimizer
    for flag, value, least, most in (
        ("--batch-size", data.batch_size, 1, MOST_SAMPLES),
        ("--steps", data.steps, 1, MOST_STEPS),
        ("--epochs", data.epochs, 1, MOST_STEPS),
        ("--width", config.model.width, 1, None),
        ("--seed", config.output.seed, 0, MOST_SEED),
        ("--save-steps", config.output.save_steps, 1, None),
        ("--keep", config.output.keep, 1, None),
        ("--max-skips", learns.max_skips, 1, None),
    ):
        if value is not None:
            whole(flag, value, least, most)
    for flag, value, limit in (
        ("--learning-rate", learns.learning_rate, {"least": 0}),
        ("--weight-decay", learns.weight_decay, {"least": 0}),
        ("--clip", learns.clip, {"above": 0}),
        ("--ema", learns.ema, {"least": 0}),
        ("--dropout", config.model.dropout, {"least": 0}),
    ):
        if value is not None:
            number(flag, value, **limit)
    if config.folder.exists() and not config.folder.is_dir():
        raise ValueError(f"--out is {config.folder}, which is a file: expected a folder, or a name for a new one.")


def duration(config: Config) -> tuple[int | None, int]:
    """Steps if they were given, and epochs."""
    steps, epochs = config.data.steps, config.data.epochs
    if steps is not None and epochs is not None:
        raise ValueError(f"--steps {steps} and --epochs {epochs} both say how long to train: give one of them.")
    return steps, epochs or DEFAULT_EPOCHS


def length(config: Config) -> str:
    """How long to train, as the flag that says it."""
    steps, epochs = duration(config)
    return f"--epochs {epochs}" if steps is None else f"--steps {steps}"


def total_steps(config: Config, samples: int) -> int:
    """The steps of the whole training; the optimizer counts them in 32 bits."""
    steps, epochs = duration(config)
    return whole("The number of steps", steps or -(-samples // config.data.batch_size) * epochs, 1, MOST_STEPS)


def optimizer(config: Config, steps: int, *, scheduled: bool = True) -> optax.GradientTransformation:
    """`scheduled`: not for a sync that follows the schedule by itself (see `schedule`)."""
    asked, rate = config.optimizer, learning_rate(config)
    schedule: Any = rate
    if asked.schedule == "cosine" and scheduled:
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps))
    make = {
        "adamw": lambda: optax.adamw(schedule, weight_decay=asked.weight_decay),
        "adam": lambda: optax.adam(schedule),
        "sgd": lambda: optax.sgd(schedule, momentum=0.9),
        "lion": lambda: optax.lion(schedule, weight_decay=asked.weight_decay),
    }[asked.optimizer]
    return make() if asked.clip is None else optax.chain(optax.clip_by_global_norm(asked.clip), make())


def schedule(config: Config, steps: int) -> Callable[[float], float] | None:
    """The optimizer's schedule as a factor on the rate by step, for syncs whose updates are no steps."""
    if config.optimizer.schedule == "constant":
        return None
    rise, end = max(1, steps // 10), max(2, steps)

    def factor(step: float) -> float:
        if step < rise:
            return step / rise
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - rise) / max(1, end - rise))))

    return factor


def scheduled_sync(config: Config, chosen: Choice, steps: int) -> Sync:
    """The sync, which follows the schedule by itself where its updates are no steps."""
    if not chosen.sync.stepped:
        chosen.sync.schedule = schedule(config, steps)
    return chosen.sync


def method(config: Config, processes: int = 1) -> dict[str, Any]:
    asked, several = config.method, are_several(processes)
    every = asked.every if asked.every in (None, "epoch") else whole_numbers("--every", asked.every)[0]
    axes = {axis: getattr(asked, axis) for axis in ("controller", "partition", "sync", "engine", "faithful")}
    options = {name: getattr(asked, name) for name in ("mix_every", "topology", "matcha_budget")}
    options |= {name: getattr(config.hierarchy, name) for name in ("max_skip", "blend")}
    name, without = ("nodes", "a process is a node") if several else ("between", "there is one process")
    if (given := getattr(config.hierarchy, name)) is not None and not config.output.resume:
        raise ValueError(f"--{name} {given} says nothing where {without}: leave it out.")
    if several:
        options["between"] = config.hierarchy.between
    else:
        sizes = whole_numbers("--nodes", config.hierarchy.nodes)
        options["nodes"] = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
    alone = config.asynchronous
    names = ("staleness_bound", "rate_cap", "dead_zone", "mega_batch", "replay")
    options |= {name: getattr(alone, name) for name in names}
    options["scale_rate"] = None if alone.scale_rate is None else alone.scale_rate == "on"
    options["batches"] = whole_numbers("--batches", alone.batches)
    options["smallest"] = whole_numbers("--smallest-batch", alone.smallest_batch)
    return {"strategy": asked.strategy, "every": every, "sync_options": options, **axes}


def numbers(flag: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected numbers with commas between, such as 1,1,0.5.") from None


def whole_numbers(flag: str, text: str | None) -> Any:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected whole numbers with commas between, such as 128,64.") from None


def learning_rate(config: Config) -> float:
    """As given, or what suits the model with Adam."""
    given = config.optimizer.learning_rate
    return given if given is not None else LEARNING_RATES[config.model.model]


def model_options(config: Config) -> dict[str, Any]:
    """The options of the model's constructor that flags stand for."""
    asked, options = config.model, dict[str, Any]()
    if asked.width is not None:
        wide = asked.width
        options |= {"mlp": {"hidden": (wide, wide)}, "cnn": {"widths": (wide, 2 * wide)}}.get(
            asked.model, {"width": wide}
        )
    dropout = asked.dropout if asked.dropout is not None else DROPOUTS.get(asked.model)
    return options if dropout is None else {**options, "dropout": dropout}
