"""The configuration of `hetjax train`: dataclasses that tyro turns into flags, and their JSON form."""

from __future__ import annotations

import dataclasses
import json
import runpy
import traceback
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hetjax.arguments import current_name
from hetjax.launch.options import Switch, optional
from hetjax.presets import CONTROLLERS, PARTITIONS, PRESETS, SYNCS
from hetjax.sync import FORMER_NAMES

CONFIGS = Path(__file__).parents[1] / "configs"
DESCRIPTION = """Train one model data-parallel on devices of unequal speed.

Without flags: a CNN on digits, with equal and then with balanced counts.

The 4 devices are simulated then, with the relative speeds 1, 1, 0.5 and 0.25."""


def _choice(names: Sequence[str]) -> Any:
    """Show choices in --help that are validated later, with a better message than 'invalid choice'."""
    return optional("|".join(names))


_PRESET = tyro.conf.arg(
    metavar="NAME",
    help_behavior_hint="",
    help=f"{', '.join(PRESETS)}: preset of controller, partition, sync and engine "
    "(default: run equal, then balanced, and compare)",
)
Whole = Annotated[int | None, optional("INT")]
Number = Annotated[float | None, optional("FLOAT")]
File = Annotated[Path | None, optional("PATH")]
Text = Annotated[str | None, optional("NAME")]


@dataclass(frozen=True)
class DataFlags:
    """What to train on, and how long."""

    dataset: Annotated[str, tyro.conf.arg(metavar="SPEC")] = "digits"
    """digits, synthetic, idx:DIR, npz:FILE, text, text:FILE or tfds:NAME"""
    batch_size: int = 256
    """samples per step over all workers"""
    epochs: Whole = None
    """passes over the data (default: 24)"""
    steps: Whole = None
    """total number of steps, instead of --epochs; a resumed run counts its earlier steps"""


@dataclass(frozen=True)
class ModelFlags:
    """The model to train."""

    model: Literal["mlp", "cnn", "resnet", "transformer"] = "cnn"
    """transformer needs --dataset text; only resnet has normalization layers"""
    width: Whole = None
    """width of the (first) layers (default: depends on the model)"""
    dropout: Number = None
    """dropout rate (default: depends on the model)"""
    norm: Annotated[Literal["batch", "group"] | None, optional("{batch,group}")] = None
    """resnet only: GroupNorm, or BatchNorm over fixed groups of the global batch (default: group)"""
    augment: Annotated[Literal["none", "shift"] | None, optional("{none,shift}")] = None
    """shift moves training images by up to one pixel (default: shift for cnn and resnet)"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of the layers on every device; parameters are always float32"""
    compute_dtype: Annotated[str | None, optional("LIST")] = None
    """instead of --dtype: float32, bfloat16 or float16 by kind of device, such as T4=float16,default=bfloat16"""


@dataclass(frozen=True)
class OptimizerFlags:
    """How to optimize."""

    optimizer: Literal["adamw", "adam", "sgd", "lion"] = "adamw"
    """sgd uses momentum 0.9"""
    learning_rate: Number = None
    """peak learning rate (default: depends on the model)"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """cosine: linear warm-up over 10% of the steps, then cosine decay to zero"""
    weight_decay: float = 1e-2
    """for adamw and lion"""
    clip: Number = None
    """clip the gradient of the global batch to this norm (default: no clipping)"""
    ema: Number = None
    """evaluate an exponential moving average of the parameters with this decay, e.g. 0.99 (default: off)"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """on a NaN or infinity in loss, gradient or update: stop with an error, or skip the step"""
    max_skips: int = 10
    """stop after this many skipped steps in a row"""


@dataclass(frozen=True)
class WorkerFlags:
    """Devices and their simulated speeds."""

    devices: Annotated[int | str | None, optional("N|KINDS")] = None
    """devices of this process: a number, gpu, cpu, gpu+cpu, cuda:0,2+cpu or all (default: all accelerators, else
    simulated CPU devices: 4, with several processes 1 each)"""
    speeds: Annotated[str | None, optional("LIST|real")] = None
    """simulated relative speeds, or real for none (default: 1,1,0.5,0.25 on a CPU if no device flag is given)"""
    trace: File = None
    """JSON file of simulated speeds by step (format: hetjax/simulation/traces.py)"""
    row_time: Number = None
    """simulated milliseconds per row at speed 1 (default: 1.5 times the measured time, at least 0.4)"""
    capacity: Annotated[str | None, optional("N[,N...]")] = None
    """maximum samples per worker and step: one number, or one per worker"""


@dataclass(frozen=True)
class MethodFlags:
    """How the work is divided."""

    strategy: Annotated[str | None, _PRESET] = None
    """preset of controller, partition, sync and engine"""
    controller: Annotated[str | None, _choice(CONTROLLERS)] = None
    """decides how many samples each worker gets"""
    partition: Annotated[str | None, _choice(PARTITIONS)] = None
    """which samples: a slice of the global batch, a shard cut anew every epoch, or a fixed block"""
    sync: Annotated[str | None, _choice(SYNCS)] = None
    """how workers synchronize their parameters"""
    engine: Annotated[str | None, _choice(("auto", "chunked", "looped", "masked"))] = None
    """how a worker runs its samples (default: auto)"""
    every: Annotated[str | None, optional("STEPS|epoch")] = None
    """how often a published controller updates the counts (default: as in its paper)"""
    faithful: Switch = False
    """use the method as published, with its biases. dp, edp, dbs, decentralized: gradient weights;
    daso: node averages, but neither local skips nor bfloat16 parameters; hogbatch family: learning rates"""
    mix_every: Whole = None
    """decentralized: steps between two mixings of the parameters (default: 1; rcd-sgd: 2)"""
    topology: Annotated[str | None, optional("ring|complete|FILE")] = None
    """decentralized: who mixes with whom; FILE (.json, .npy) holds a doubly stochastic matrix (default: ring)"""
    matcha_budget: Number = None
    """decentralized: use MATCHA with this average fraction of the links, e.g. 0.5 (default: all links)"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sync", current_name("sync", self.sync, FORMER_NAMES))


@dataclass(frozen=True)
class HierarchyFlags:
    """For --sync daso; with several processes, each process is a node."""

    nodes: Annotated[str | None, optional("N|N,N...")] = None
    """one process only: number of nodes, or number of workers of each node (default: 2)"""
    max_skip: Whole = None
    """maximum steps between two exchanges between nodes (default: 8)"""
    blend: Annotated[str | None, optional("delta|paper")] = None
    """merge of a delayed average: keep all local progress, or as in the paper (default: delta; --faithful: paper)"""
    between: Annotated[str | None, optional("balanced|equal|steps")] = None
    """several processes: samples by speed, equal samples, or steps by speed (default: balanced; --faithful: equal)"""


@dataclass(frozen=True)
class AsynchronousFlags:
    """For the asynchronous syncs: hogbatch, adaptive-hogbatch, adaptive-sgd."""

    batches: Annotated[str | None, optional("N[,N...]")] = None
    """initial batch size per worker (default: small on CPUs and large on GPUs; by speed if all are of one kind)"""
    smallest_batch: Annotated[str | None, optional("N[,N...]")] = None
    """smallest batch size (default: 1/16 of --capacity)"""
    threads: Annotated[str | None, optional("N[,N...]")] = None
    """hogbatch, adaptive-hogbatch: Hogwild threads per worker, each with its part of the batch (default: 1)"""
    staleness_bound: Whole = None
    """hogbatch, adaptive-hogbatch: maximum staleness of an update, in updates by others (default: unbounded)"""
    scale_rate: Annotated[Literal["on", "off"] | None, optional("{on,off}")] = None
    """scale gradients by their batch size (default: on; off for hogbatch with --faithful)"""
    rate_cap: Number = None
    """maximum factor for the gradient of a large batch (default: 4; no limit with --faithful)"""
    dead_zone: Whole = None
    """adaptive-hogbatch: lead or lag in updates before a batch size changes (default: 4)"""
    mega_batch: Whole = None
    """adaptive-sgd: samples between two merges of the replicas (default: 8 times --batch-size)"""
    replay: Annotated[int | None, optional("SEED")] = None
    """reproducible run: a virtual clock instead of threads, with the interleaving of this seed (default: off)"""


@dataclass(frozen=True)
class SubmodularFlags:
    """For --partition submodular."""

    blocks: File = None
    """file written by 'hetjax partition' (default: cut blocks at the start)"""
    rates: Annotated[str | None, optional("LIST")] = None
    """relative worker speeds, e.g. 4,2,1,1 (default: simulated speeds, otherwise measured)"""
    objective: Annotated[
        Literal["facility-location", "graph-cut"] | None, optional("{facility-location,graph-cut}")
    ] = None
    """how to score a block (default: facility-location)"""
    features: Annotated[str | None, optional("raw|pca[:N]|MODULE:FUNCTION")] = None
    """features to compare samples by (default: pca)"""


@dataclass(frozen=True)
class ProcessFlags:
    """One run over several processes; set by the launcher, srun and mpirun."""

    coordinator: Annotated[str | None, optional("HOST:PORT")] = None
    """address of process 0"""
    processes: Whole = None
    """number of processes"""
    process: Whole = None
    """index of this process, from 0"""
    start_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """time within which all processes must have joined"""
    transport: Annotated[Literal["auto", "mesh", "host"] | None, optional("{auto,mesh,host}")] = None
    """how sums travel between workers: host for any mix of devices, mesh (XLA) for one kind (default: auto)"""
    update: Annotated[Literal["auto", "sharded", "replicated"] | None, optional("{auto,sharded,replicated}")] = None
    """sharded: each process updates a slice of the parameters and keeps the optimizer state of that slice only;
    replicated: every worker updates its own copy (default: sharded between processes with --transport host)"""
    update_on: Annotated[Literal["auto", "device", "host"] | None, optional("{auto,device,host}")] = None
    """where a process updates its slice (default: the quicker one)"""
    memory: Annotated[str | None, optional("GIB[,GIB...]")] = None
    """memory of each worker, which bounds its slice: one number, or one per worker (default: as reported)"""
    wire: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    """numbers between processes: 16 or 8 bits with error feedback for slow links, auto: the quickest"""
    delay: Literal[0, 1] = 0
    """1: apply gradients one step late, while the next step computes: another algorithm, for slow links"""
    key: File = None
    """file with the key of the fleet (hetjax key FILE), which authenticates and encrypts (default: none)"""


@dataclass(frozen=True)
class OutputFlags:
    """Run folder, checkpoints and logs."""

    out: File = None
    """run folder (default: runs/DATASET-MODEL-STRATEGY, without the strategy for a comparison)"""
    resume: Switch = False
    """continue the run in --out from its last checkpoint; the devices may differ"""
    save_every: Number = 30.0
    """seconds between checkpoints (default: 30); Ctrl-C, SIGTERM and the end save one too"""
    save_steps: Whole = None
    """steps between additional checkpoints (default: none)"""
    keep: int = 2
    """number of checkpoints to keep; the last intact one is resumed"""
    tensorboard: Switch = False
    """also write TensorBoard events (pip install 'hetjax[track]')"""
    wandb: Text = None
    """also log to this Weights & Biases project"""
    profile: Whole = None
    """write a profiler trace of this many steps, after a warm-up, to the run folder (default: none)"""
    seed: int = 0
    """seed of parameters, sample order and dropout"""
    debug: Switch = False
    """show the log, and tracebacks of errors"""


@dataclass(frozen=True)
class Config:
    """The configuration of one run, or of a comparison of two."""

    config: Text = None
    """named experiment, such as digits_slowdown, or a Python file; flags override it"""
    data: DataFlags = field(default_factory=DataFlags)
    model: ModelFlags = field(default_factory=ModelFlags)
    optimizer: OptimizerFlags = field(default_factory=OptimizerFlags)
    workers: WorkerFlags = field(default_factory=WorkerFlags)
    method: MethodFlags = field(default_factory=MethodFlags)
    hierarchy: HierarchyFlags = field(default_factory=HierarchyFlags)
    asynchronous: AsynchronousFlags = field(default_factory=AsynchronousFlags)
    submodular: SubmodularFlags = field(default_factory=SubmodularFlags)
    processes: ProcessFlags = field(default_factory=ProcessFlags)
    output: OutputFlags = field(default_factory=OutputFlags)

    @property
    def compares(self) -> bool:
        """Whether to run equal, then balanced, and compare them."""
        method = self.method
        any_counts = method.sync in (None, "allreduce") and method.partition != "submodular"
        return method.strategy is None and method.controller is None and any_counts

    @property
    def folder(self) -> Path:
        """The run folder; that of other experiments and methods has another name, so that runs can be compared."""
        if self.output.out is not None:
            return self.output.out
        name = Path(self.config).stem if self.config else f"{_kind(self.data.dataset)}-{self.model.model}"
        method = (self.method.strategy, self.method.controller, self.method.partition, self.method.sync)
        return Path("runs") / "-".join([name, *map(_kind, filter(None, () if self.compares else method))])

    def flat(self) -> dict[str, Any]:
        """Return the fields that describe the run (not its invocation) by name, as JSON values."""
        groups = (getattr(self, group.name) for group in _groups())
        values = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
        values["config"] = self.config
        for name in (
            "resume",
            "debug",
            "profile",
            "coordinator",
            "processes",
            "process",
            "start_limit",
            "transport",
            "update",
            "update_on",
            "memory",
            "key",
        ):
            del values[name]
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _groups() -> list[dataclasses.Field[Any]]:
    return [group for group in dataclasses.fields(Config) if group.name != "config"]


def with_values(base: Config, values: dict[str, Any]) -> Config:
    """Return the configuration with these fields, named as in `flat`, replaced."""
    for group in _groups():
        part = getattr(base, group.name)
        mine = {f.name: values[f.name] for f in dataclasses.fields(part) if f.name in values}
        mine = {
            name: Path(v) if name in ("out", "trace", "blocks") and v is not None else v for name, v in mine.items()
        }
        base = dataclasses.replace(base, **{group.name: dataclasses.replace(part, **mine)})
    return base


def saved(path: Path, base: Config) -> Config:
    """Read the configuration written by an earlier run; `base` supplies missing fields."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        found = with_values(base, values)
        check_types(found)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not a run configuration ({error}): start a new run without --resume.") from error
    return found


def check_types(config: Config) -> None:
    """Check the types of values from a file, which tyro does not."""
    for group in _groups():
        part = getattr(config, group.name)
        for name, kind in typing.get_type_hints(type(part)).items():
            if not _is_a(value := getattr(part, name), kind):
                raise ValueError(f"{name} is {value!r}, expected {' or '.join(_kinds(kind))}")


def _is_a(value: Any, kind: Any) -> bool:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return any(_is_a(value, part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return isinstance(value, kind)


def _kinds(kind: Any) -> list[str]:
    """Return the names of the types or values that a field accepts."""
    parts = typing.get_args(kind)
    if not parts:
        return ["None" if kind is type(None) else getattr(kind, "__name__", repr(kind))]
    return [name for part in parts for name in _kinds(part)]


def check_same_run(saved: Config, now: Config, folder: Path) -> None:
    """Check that a resumed run is the same training; devices, length and strategy may change."""
    fixed = [f.name for part in (DataFlags, ModelFlags, OptimizerFlags) for f in dataclasses.fields(part)] + ["seed"]
    before, after = saved.flat(), now.flat()
    for name in fixed:
        if name not in ("epochs", "steps", "on_nonfinite", "max_skips") and before[name] != after[name]:
            raise ValueError(
                f"The run in {folder} was started with {name}={before[name]!r} and cannot continue "
                f"with {after[name]!r}. Omit the flag, or start a new run in another --out."
            )


def _kind(given: str) -> str:
    """What stands before the options: 'fixed' of 'fixed:4,2,1,1'."""
    return given.partition(":")[0]


def named(name: str) -> Config:
    """Load the CONFIG of a named experiment or of a Python file."""
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        known = ", ".join(names()) or "none"
        raise ValueError(f"There is no experiment {name!r} ({path}). Known: {known}; or give the path of a .py file.")
    try:
        found = runpy.run_path(str(path)).get("CONFIG")
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
        message = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {message}. Correct this file.") from error
    if not isinstance(found, Config):
        raise ValueError(f"{path} defines no CONFIG = Config(...): see hetjax/cli/configs for examples.")
    try:
        check_types(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    return dataclasses.replace(found, config=name)


def names() -> list[str]:
    """Return the names of the experiments in hetjax/cli/configs."""
    return sorted(path.stem for path in CONFIGS.glob("[!_]*.py"))


def parse(arguments: Sequence[str], default: Config) -> Config:
    """Parse flags over a default configuration; exits on --help and on a syntax error."""
    plain = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(
        Config, prog="hetjax train", description=DESCRIPTION, args=list(arguments), default=default, config=plain
    )


def one_length(arguments: Sequence[str], default: Config) -> Config:
    """Drop the default's epochs if --steps is given, and vice versa."""
    if flag_value(arguments, "--steps") is not None:
        default = with_values(default, {"epochs": None})
    if flag_value(arguments, "--epochs") is not None:
        default = with_values(default, {"steps": None})
    return default


def flag_value(arguments: Sequence[str], flag: str) -> str | None:
    """Return the value of a flag without parsing the others; given twice, the last one counts."""
    value = None
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            value = arguments[index + 1]
        elif argument.startswith(f"{flag}="):
            value = argument.partition("=")[2]
    return value
