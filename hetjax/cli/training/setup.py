"""Build from the flags of `hetjax train`: devices and their speeds, task, optimizer, strategy."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from hetjax import processes
from hetjax.arguments import MOST_SAMPLES, MOST_SEED, number, whole
from hetjax.cli.training.configs import Config
from hetjax.devices.chosen import chosen_devices
from hetjax.devices.fake import devices_from_environment
from hetjax.engines.precision import DEFAULT, dtypes_by_kind
from hetjax.environment import DEVICES, PROCESSES
from hetjax.presets import Choice
from hetjax.simulation.speeds import Simulation, Trace, constant, of_survivors
from hetjax.simulation.traces import read_trace
from hetjax.sync import Sync
from hetjax.sync.hogbatch.family import Asynchronous
from hetjax.zoo.tasks import Task, make_task

DEFAULT_EPOCHS = 24
MOST_STEPS = 2**31 - 1
LEARNING_RATES = {"mlp": 3e-3, "cnn": 1e-2, "resnet": 1e-2, "transformer": 2e-3}
DROPOUTS = {"mlp": 0.2, "cnn": 0.2, "transformer": 0.1}
LEAST_ROW_TIME_MS = 0.4
DEFAULT_SPEEDS = "1,1,0.5,0.25"


def are_several() -> bool:
    """Whether the run has several processes, or had: the launcher may restart it with a single one."""
    return processes.count() > 1 or PROCESSES in os.environ


def workers_by_process(devices: list[jax.Device]) -> list[int]:
    """Return the number of workers of each process; collective."""
    mine = jax.local_devices(backend=devices[0].platform)
    return processes.gather(len(devices) if processes.by_host() else sum(device in mine for device in devices))


def find_devices(config: Config) -> tuple[Simulation | None, list[jax.Device]]:
    """Return the simulation, if any, and the devices; without any device flag speeds 1, 1, 0.5, 0.25 are simulated."""
    flags = config.workers
    if flags.trace is not None and flags.speeds is not None:
        raise ValueError("--trace and --speeds both set the speeds of the workers: give one of them.")
    trace = None
    if flags.trace is not None:
        trace = read_trace(flags.trace)
    elif flags.speeds is not None and flags.speeds != "real":
        trace = constant(numbers("--speeds", flags.speeds))
    several = are_several()
    choice = flags.devices if flags.devices is not None else os.environ.get(DEVICES) or None
    by_node = "daso" in (config.method.sync, config.method.strategy)
    number = choice if several or trace is None or choice is not None else len(trace(0)[0])
    devices = chosen_devices(number)
    if several and trace is not None:
        workers_P = workers_by_process(devices)
        trace = of_survivors(trace, sum(workers_P))
        trace = _own_speeds(trace, workers_P) if by_node else trace
    unspecified = not several and choice is None and flags.speeds is None and devices_from_environment() is None
    if trace is None and unspecified and devices[0].platform == "cpu":
        trace = constant(numbers("--speeds", DEFAULT_SPEEDS))
    if trace is None:
        return None, devices
    least, fixed = LEAST_ROW_TIME_MS / 1e3, flags.row_time
    if fixed is not None and not 0 < fixed < np.inf:
        raise ValueError(f"--row-time is {fixed}: expected a number of milliseconds above 0.")
    return Simulation(trace, row_time=None if fixed is None else fixed / 1e3, least=least), devices


def _own_speeds(trace: Trace, workers_P: list[int]) -> Trace:
    """Restrict the trace to the workers of this process, for a sync that plans per node."""
    given, first = len(trace(0)[0]), sum(workers_P[: processes.index()])
    if given != sum(workers_P):
        raise ValueError(
            f"Speeds were given for {given} workers, but there are {sum(workers_P)}: give one speed per worker."
        )
    own = slice(first, first + workers_P[processes.index()])
    return lambda step: (trace(step)[0][own], trace(step)[1][own])


def make_task_of(config: Config) -> Task:
    """Return the task: data, model and loss."""
    flags, options = config.model, model_options(config)
    augment = flags.augment or ("none" if flags.model in ("mlp", "transformer") else "shift")
    return make_task(
        config.data.dataset,
        flags.model,
        seed=config.output.seed,
        norm=flags.norm,
        augment=augment,
        dtype=flags.dtype if flags.compute_dtype is None else None,
        **options,
    )


def compute_dtype(config: Config) -> dict[str, str] | None:
    """Return the dtype of each kind of device by --compute-dtype, as `hetjax.Step` takes it."""
    flags = config.model
    if flags.compute_dtype is None:
        return None
    if flags.dtype != "float32":
        raise ValueError(
            f"--dtype {flags.dtype} sets the precision of the layers on every device: with --compute-dtype omit it, or "
            "give --dtype float32."
        )
    given: dict[str, str] = {}
    for part in flags.compute_dtype.split(","):
        kind, _, dtype = part.rpartition("=")
        given[kind.strip() or DEFAULT] = dtype.strip()
    if len(given) != flags.compute_dtype.count(",") + 1:
        raise ValueError(f"--compute-dtype is {flags.compute_dtype!r}: expected each kind of device once.")
    return dtypes_by_kind(given)


def check_flags(config: Config) -> None:
    """Check numbers and the run folder before anything is built."""
    data, optimizer = config.data, config.optimizer
    for flag, value, least, most in (
        ("--batch-size", data.batch_size, 1, MOST_SAMPLES),
        ("--steps", data.steps, 1, MOST_STEPS),
        ("--epochs", data.epochs, 1, MOST_STEPS),
        ("--width", config.model.width, 1, None),
        ("--seed", config.output.seed, 0, MOST_SEED),
        ("--save-steps", config.output.save_steps, 1, None),
        ("--keep", config.output.keep, 1, None),
        ("--max-skips", optimizer.max_skips, 1, None),
    ):
        if value is not None:
            whole(flag, value, least, most)
    compute_dtype(config)
    for flag, amount, limit in (
        ("--learning-rate", optimizer.learning_rate, {"least": 0}),
        ("--weight-decay", optimizer.weight_decay, {"least": 0}),
        ("--clip", optimizer.clip, {"above": 0}),
        ("--ema", optimizer.ema, {"least": 0}),
        ("--dropout", config.model.dropout, {"least": 0}),
    ):
        if amount is not None:
            number(flag, amount, **limit)
    if config.folder.exists() and not config.folder.is_dir():
        raise ValueError(f"--out is {config.folder}, which is a file: expected a folder, or the name of a new one.")


def duration(config: Config) -> tuple[int | None, int]:
    """Return the steps, or None where the epochs count, and the epochs."""
    steps, epochs = config.data.steps, config.data.epochs
    if steps is not None and epochs is not None:
        raise ValueError(f"--steps {steps} and --epochs {epochs} both set the length of the run: give one of them.")
    return steps, epochs or DEFAULT_EPOCHS


def length(config: Config) -> str:
    """Return the length of the run as a flag."""
    steps, epochs = duration(config)
    return f"--epochs {epochs}" if steps is None else f"--steps {steps}"


def total_steps(config: Config, samples: int) -> int:
    """Return the total number of steps; optimizers count them in 32 bits."""
    steps, epochs = duration(config)
    return whole("The number of steps", steps or -(-samples // config.data.batch_size) * epochs, 1, MOST_STEPS)


def optimizer(config: Config, steps: int, *, scheduled: bool = True) -> optax.GradientTransformation:
    """Return the optimizer; not `scheduled` for a sync that applies the schedule itself (see `rate_factor`)."""
    flags, rate = config.optimizer, learning_rate(config)
    schedule: Any = rate
    if flags.schedule == "cosine" and scheduled:
        schedule = optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), max(2, steps))
    make = {
        "adamw": lambda: optax.adamw(schedule, weight_decay=flags.weight_decay),
        "adam": lambda: optax.adam(schedule),
        "sgd": lambda: optax.sgd(schedule, momentum=0.9),
        "lion": lambda: optax.lion(schedule, weight_decay=flags.weight_decay),
    }[flags.optimizer]
    return make() if flags.clip is None else optax.chain(optax.clip_by_global_norm(flags.clip), make())


def rate_factor(config: Config, steps: int) -> Callable[[float], float] | None:
    """Return the schedule as a factor on the learning rate by step, for syncs that count updates, not steps."""
    if config.optimizer.schedule == "constant":
        return None
    warmup, end = max(1, steps // 10), max(2, steps)

    def factor(step: float) -> float:
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, end - warmup))))

    return factor


def scheduled_sync(config: Config, chosen: Choice, steps: int) -> Sync:
    """Return the sync, with the schedule set if it counts updates, not steps."""
    if isinstance(chosen.sync, Asynchronous):
        chosen.sync.schedule = rate_factor(config, steps)
    return chosen.sync


def method(config: Config) -> dict[str, Any]:
    """Return the arguments of `hetjax.presets.choose`."""
    flags, several = config.method, are_several()
    every = flags.every if flags.every in (None, "epoch") else whole_numbers("--every", flags.every)[0]
    axes = {axis: getattr(flags, axis) for axis in ("controller", "partition", "sync", "engine", "faithful")}
    options = {name: getattr(flags, name) for name in ("mix_every", "topology", "matcha_budget")}
    options |= {name: getattr(config.hierarchy, name) for name in ("max_skip", "blend")}
    name, reason = ("nodes", "each process is a node") if several else ("between", "there is only one process")
    if (given := getattr(config.hierarchy, name)) is not None and not config.output.resume:
        raise ValueError(f"--{name} {given} has no effect because {reason}: omit it.")
    if several:
        options["between"] = config.hierarchy.between
    else:
        sizes = whole_numbers("--nodes", config.hierarchy.nodes)
        options["nodes"] = sizes[0] if sizes is not None and len(sizes) == 1 else sizes
    asynchronous = config.asynchronous
    names = ("staleness_bound", "rate_cap", "dead_zone", "mega_batch", "replay")
    options |= {name: getattr(asynchronous, name) for name in names}
    options["scale_rate"] = None if asynchronous.scale_rate is None else asynchronous.scale_rate == "on"
    options["batches"] = whole_numbers("--batches", asynchronous.batches)
    options["threads"] = whole_numbers("--threads", asynchronous.threads)
    options["smallest"] = whole_numbers("--smallest-batch", asynchronous.smallest_batch)
    return {"strategy": flags.strategy, "every": every, "sync_options": options, **axes}


def exchange_options(config: Config, sync: Any) -> dict[str, Any]:
    """How sums travel and where updates run, as options of `hetjax.Trainer`; only those given."""
    flags = config.processes
    given = {name: getattr(flags, name) for name in ("update", "update_on")}
    if sync.name == "allreduce" and processes.count() == 1:  # several were joined by it
        given["transport"] = flags.transport
    if flags.memory is not None:
        sizes = [round(gib * 2**30) for gib in numbers("--memory", flags.memory)]
        given["memory"] = sizes[0] if len(sizes) == 1 else sizes
    return {name: value for name, value in given.items() if value is not None}


def numbers(flag: str, text: str) -> list[float]:
    """Parse comma-separated numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected comma-separated numbers such as 1,1,0.5.") from None


def whole_numbers(flag: str, text: str | None) -> Any:
    """Parse comma-separated integers; None stays None."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{flag} is {text!r}: expected comma-separated integers such as 128,64.") from None


def learning_rate(config: Config) -> float:
    """Return the given learning rate, or the model's default for Adam."""
    given = config.optimizer.learning_rate
    return given if given is not None else LEARNING_RATES[config.model.model]


def model_options(config: Config) -> dict[str, Any]:
    """Return the options of the model's constructor given by the flags."""
    flags, options = config.model, dict[str, Any]()
    if (width := flags.width) is not None:
        options |= {"mlp": {"hidden": (width, width)}, "cnn": {"widths": (width, 2 * width)}}.get(
            flags.model, {"width": width}
        )
    dropout = flags.dropout if flags.dropout is not None else DROPOUTS.get(flags.model)
    return options if dropout is None else {**options, "dropout": dropout}
