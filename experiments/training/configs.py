"""The configuration of experiments/train.py: frozen dataclasses that tyro turns into flags, and their JSON form."""

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

from hetjax.presets import CONTROLLERS, PARTITIONS, PRESETS, SYNCS
from hetjax.sync import current_name

CONFIGS = Path(__file__).parents[1] / "configs"
DESCRIPTION = """Train a model on devices of unequal speed, all of them kept busy.

Without flags: a CNN on digits, 4 fake devices of speeds 1, 1, 0.5 and 0.25,

equal and then balanced counts, and a table that compares the two."""


def _shown(metavar: str) -> Any:
    """How a flag that may be left out looks in --help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def _choice(names: Sequence[str]) -> Any:
    """A choice that is checked later, where more can be said than 'invalid choice'."""
    return _shown("|".join(names))


Whole = Annotated[int | None, _shown("INT")]
Number = Annotated[float | None, _shown("FLOAT")]
File = Annotated[Path | None, _shown("PATH")]
Text = Annotated[str | None, _shown("NAME")]


@dataclass(frozen=True)
class Data:
    """what to train on, and for how long"""

    dataset: Annotated[str, tyro.conf.arg(metavar="SPEC")] = "digits"
    """digits, synthetic, idx:DIR, npz:FILE, text, text:FILE or tfds:NAME"""
    batch_size: int = 256
    """samples per step over all workers"""
    epochs: Whole = None
    """how often every sample is seen; 24 unless --steps is given"""
    steps: Whole = None
    """instead of --epochs: how many steps in all, those before a --resume included"""


@dataclass(frozen=True)
class Model:
    """what is trained"""

    model: Literal["mlp", "cnn", "resnet", "transformer"] = "cnn"
    """resnet normalizes; transformer wants --dataset text"""
    width: Whole = None
    """width of the layers (of the first ones, where it doubles); each model has its own default"""
    dropout: Number = None
    """each model has its own default"""
    norm: Annotated[Literal["batch", "group"] | None, _shown("{batch,group}")] = None
    """for the resnet: BatchNorm over fixed groups of the global batch, or GroupNorm (default)"""
    augment: Annotated[Literal["none", "shift"] | None, _shown("{none,shift}")] = None
    """shift: move training images by up to a pixel, drawn from each sample's own key; done unless it makes no sense"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """precision of the compute; parameters are float32 either way"""


@dataclass(frozen=True)
class Optimizer:
    """how it learns"""

    optimizer: Literal["adamw", "adam", "sgd", "lion"] = "adamw"
    """sgd has momentum 0.9"""
    learning_rate: Number = None
    """the highest of the schedule; each model has its own default"""
    schedule: Literal["cosine", "constant"] = "cosine"
    """cosine rises over the first tenth of the steps and falls to zero"""
    weight_decay: float = 1e-2
    """for adamw and lion"""
    clip: Number = None
    """limit on the norm of the whole batch's gradient"""
    ema: Number = None
    """decay of an exponential moving average of the parameters, which is then what is tested, e.g. 0.99"""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """a NaN in loss, gradient or update ends the run and is named, or its step is skipped"""
    max_skips: int = 10
    """steps in a row that may be skipped before the run ends after all"""


@dataclass(frozen=True)
class Workers:
    """on what it runs"""

    devices: Whole = None
    """how many devices (of each process); on a CPU so many fake ones, 4 unless told (1 in each of several processes)"""
    speeds: Annotated[str | None, _shown("LIST|real")] = None
    """simulated relative speeds such as 1,1,0.5,0.25, or real; simulated while nothing about devices is given"""
    trace: File = None
    """JSON file of simulated speeds that change by step (format: hetjax/simulation/traces.py)"""
    row_time: Number = None
    """simulated milliseconds of one row at speed 1; unless told, as measured plus 50%, but at least 0.4"""
    capacity: Annotated[str | None, _shown("N[,N...]")] = None
    """most samples a worker may get in one step: one number, or one each"""


@dataclass(frozen=True)
class Method:
    """how the work is shared out"""

    strategy: Annotated[str | None, _choice(tuple(PRESETS))] = None
    """preset of the four axes below; without it, --controller and --sync, equal and balanced run in turn"""
    controller: Annotated[str | None, _choice(CONTROLLERS)] = None
    """how many samples each worker gets"""
    partition: Annotated[str | None, _choice(PARTITIONS)] = None
    """which samples: any of the global batch, shards of the workers' own cut every epoch, or blocks for good"""
    sync: Annotated[str | None, _choice(SYNCS)] = None
    """when the workers agree"""
    engine: Annotated[str | None, _choice(("auto", "chunked", "looped", "masked"))] = None
    """how a worker computes its samples"""
    every: Annotated[str | None, _shown("STEPS|epoch")] = None
    """when the published laws act; each preset has its paper's cadence"""
    faithful: bool = False
    """as published, biases included: gradients weighed (dp, edp, dbs, decentralized), nodes averaged (daso;
    not its local skip, which throws steps away, nor bfloat16 in place of the parameters), rates (hogbatch family)"""
    mix_every: Whole = None
    """decentralized: steps from one mixing of the parameters to the next (1; rcd-sgd: 2)"""
    topology: Annotated[str | None, _shown("ring|complete|FILE")] = None
    """decentralized: who mixes with whom; FILE (.json or .npy) holds the doubly stochastic matrix, row by row"""
    matcha_budget: Number = None
    """decentralized: MATCHA, with this share of the topology's links used on average, e.g. 0.5"""

    def __post_init__(self) -> None:
        if isinstance(self.sync, str):
            object.__setattr__(self, "sync", current_name(self.sync))


@dataclass(frozen=True)
class Hierarchy:
    """the sync daso; over several processes each one is a node"""

    nodes: Annotated[str | None, _shown("N|N,N...")] = None
    """in one process: how many nodes its workers form (2), or how many workers each has"""
    max_skip: Whole = None
    """most steps from one exchange between nodes to the next (8)"""
    blend: Annotated[str | None, _shown("delta|paper")] = None
    """what is done with an average that comes late: keep all local progress (delta), or the paper's mixture"""
    between: Annotated[str | None, _shown("balanced|equal|steps")] = None
    """unequal processes: samples by speed in the same steps, equal ones, or steps by speed"""


@dataclass(frozen=True)
class Asynchronous:
    """the syncs without a barrier: hogbatch, adaptive-hogbatch, adaptive-sgd"""

    batches: Annotated[str | None, _shown("N[,N...]")] = None
    """first batch of each worker; unless told CPUs start small and GPUs large, like devices by their speed"""
    smallest_batch: Annotated[str | None, _shown("N[,N...]")] = None
    """least that a batch may become; a sixteenth of the largest, which is --capacity"""
    staleness_bound: Whole = None
    """hogbatch, adaptive-hogbatch: most updates of others between reading the model and one's own"""
    scale_rate: Annotated[Literal["on", "off"] | None, _shown("{on,off}")] = None
    """whether gradients are scaled by their batch; on, but off for hogbatch as published"""
    rate_cap: Number = None
    """largest factor that the gradient of a large batch gets (default: 4)"""
    dead_zone: Whole = None
    """adaptive-hogbatch: how many updates a worker may be off the others before its batch moves; 4"""
    mega_batch: Whole = None
    """adaptive-sgd: samples from one merge of the replicas to the next; 8 times --batch-size"""
    replay: Annotated[int | None, _shown("SEED")] = None
    """no threads, but a virtual clock with the interleaving of this seed: the same run every time"""


@dataclass(frozen=True)
class Submodular:
    """the blocks of --partition submodular"""

    blocks: File = None
    """file that 'python -m hetjax partition' wrote; without it the blocks are made at the start of the run"""
    rates: Annotated[str | None, _shown("LIST")] = None
    """of the workers, such as 4,2,1,1; the simulated speeds unless told, or measured in a few steps"""
    objective: Annotated[Literal["facility-location", "graph-cut"] | None, _shown("{facility-location,graph-cut}")] = (
        None
    )
    """how well a block stands for the whole; facility-location unless told"""
    features: Annotated[str | None, _shown("raw|pca[:N]|MODULE:FUNCTION")] = None
    """what similarity is measured on; pca unless told"""


@dataclass(frozen=True)
class Processes:
    """several processes as one run; the launcher, srun and mpirun say this themselves"""

    coordinator: Annotated[str | None, _shown("HOST:PORT")] = None
    """where process 0 is met"""
    processes: Whole = None
    """how many there are"""
    process: Whole = None
    """which one this is, from 0"""
    start_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 60.0
    """until all have to be there"""


@dataclass(frozen=True)
class Output:
    """what is left behind"""

    out: File = None
    """folder of the run; runs/DATASET-MODEL unless told"""
    resume: bool = False
    """continue the run in --out from its last checkpoint, on whatever devices there are now"""
    save_every: Number = 30.0
    """seconds between checkpoints; there is one on Ctrl-C or SIGTERM and at the end in any case"""
    save_steps: Whole = None
    """a checkpoint after every so many steps too"""
    keep: int = 2
    """how many checkpoints stay; the last one that is whole is resumed from"""
    tensorboard: bool = False
    """write TensorBoard events too (pip install 'hetjax[track]')"""
    wandb: Text = None
    """send to this Weights & Biases project too"""
    seed: int = 0
    """of the parameters, the order of the samples and dropout"""
    debug: bool = False
    """show the log, and where an error came from"""


@dataclass(frozen=True)
class Config:
    """One run, or the comparison of two."""

    config: Text = None
    """start from a named experiment of experiments/configs (or a file like them); flags win over it"""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    workers: Workers = field(default_factory=Workers)
    method: Method = field(default_factory=Method)
    hierarchy: Hierarchy = field(default_factory=Hierarchy)
    asynchronous: Asynchronous = field(default_factory=Asynchronous)
    submodular: Submodular = field(default_factory=Submodular)
    processes: Processes = field(default_factory=Processes)
    output: Output = field(default_factory=Output)

    @property
    def compares(self) -> bool:
        """Whether equal and balanced are to run in turn."""
        asked = self.method
        free = asked.sync in (None, "allreduce") and asked.partition != "submodular"  # neither fixes the counts
        return asked.strategy is None and asked.controller is None and free

    @property
    def folder(self) -> Path:
        name = f"{self.data.dataset.partition(':')[0]}-{self.model.model}"
        return self.output.out or Path("runs") / name

    def flat(self) -> dict[str, Any]:
        """All fields that describe the run (not how it was called) by their own name, as plain JSON values."""
        groups = (getattr(self, group.name) for group in _groups())
        values = {name: value for group in groups for name, value in dataclasses.asdict(group).items()}
        values["config"] = self.config
        for how in ("resume", "debug", "coordinator", "processes", "process", "start_limit"):
            del values[how]
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _groups() -> list[dataclasses.Field[Any]]:
    return [group for group in dataclasses.fields(Config) if group.name != "config"]


def with_values(base: Config, values: dict[str, Any]) -> Config:
    """The configuration with these fields, named as in `flat`, set."""
    for group in _groups():
        part = getattr(base, group.name)
        mine = {f.name: values[f.name] for f in dataclasses.fields(part) if f.name in values}
        mine = {
            name: Path(v) if name in ("out", "trace", "blocks") and v is not None else v for name, v in mine.items()
        }
        base = dataclasses.replace(base, **{group.name: dataclasses.replace(part, **mine)})
    return base


def saved(path: Path, base: Config) -> Config:
    """The configuration that an earlier run wrote, over a base for what it does not name."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("it holds no object")
        found = with_values(base, values)
        check_types(found)
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is no configuration of a run ({error}): start a new run without --resume.") from error
    return found


def check_types(config: Config) -> None:
    """Refuse values that flags could not have given: tyro leaves those of a file as they are."""
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
    """The names of the types, or the values, that a field may have."""
    parts = typing.get_args(kind)
    if not parts:
        return ["None" if kind is type(None) else getattr(kind, "__name__", repr(kind))]
    return [name for part in parts for name in _kinds(part)]


def check_same_run(saved: Config, now: Config, folder: Path) -> None:
    """A resumed run may move to other devices, be longer or shared out otherwise, but stays the same training."""
    kept = [f.name for part in (Data, Model, Optimizer) for f in dataclasses.fields(part)] + ["seed"]
    before, after = saved.flat(), now.flat()
    for name in kept:
        if name not in ("epochs", "steps", "on_nonfinite", "max_skips") and before[name] != after[name]:
            raise ValueError(
                f"The run in {folder} was started with {name}={before[name]!r} and cannot go on with {after[name]!r}. "
                "Leave the flag out, or start a new run in another --out."
            )


def named(name: str) -> Config:
    """The CONFIG of a named experiment, or of a Python file."""
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        known = ", ".join(names()) or "none"
        raise ValueError(f"There is no experiment {name!r} ({path}). Known: {known}; or give the path of a .py file.")
    try:
        found = runpy.run_path(str(path)).get("CONFIG")
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else "?")
        said = error.msg if isinstance(error, SyntaxError) else error
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {said}. Correct that file.") from error
    if not isinstance(found, Config):
        raise ValueError(f"{path} defines no CONFIG = Config(...): see experiments/configs for examples.")
    try:
        check_types(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}.") from None
    return dataclasses.replace(found, config=name)


def names() -> list[str]:
    return sorted(path.stem for path in CONFIGS.glob("*.py"))


def parse(arguments: Sequence[str], default: Config) -> Config:
    """The configuration that flags make of a default one; prints help and leaves the program on --help or an error."""
    plain = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(
        Config, prog="train.py", description=DESCRIPTION, args=list(arguments), default=default, config=plain
    )


def one_length(arguments: Sequence[str], default: Config) -> Config:
    """Where --steps is a flag, the default's epochs do not count, and the other way round."""
    if before_flags(arguments, "--steps") is not None:
        default = with_values(default, {"epochs": None})
    if before_flags(arguments, "--epochs") is not None:
        default = with_values(default, {"steps": None})
    return default


def before_flags(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag that decides what the others start from; where it is given twice the last one counts."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == flag and place + 1 < len(arguments):
            found = arguments[place + 1]
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found
