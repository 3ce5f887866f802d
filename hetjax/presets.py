"""Strategies by name, and the one check of what goes together along controller, partition, sync and engine."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetjax import sync as syncs
from hetjax.devices.workers import Workers, device_kind
from hetjax.engines import EngineSpec, as_spec
from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller
from hetjax.sampling.blocks import Blocks
from hetjax.sync import Sync

PARTITIONS = ("global", "proportional", "submodular")
SYNCS = tuple(syncs.REGISTRY)
CONTROLLERS = tuple(name for name in controllers.REGISTRY if name != "oracle")
UNTIMED = ("equal", "static", "fixed")  # controllers that need no timings of every step

_SHARING = ("dp", "edp", "dbs")  # laws that set shares, which can hold for an epoch


@dataclass(frozen=True)
class Strategy:
    """A preset: a choice along the four axes, and options of the controller and the sync."""

    controller: str
    partition: str = "global"
    sync: str = "allreduce"
    engine: str = "auto"
    sync_options: Mapping[str, Any] = field(default_factory=dict)
    idea: str = ""  # one line for tables


PRESETS: dict[str, Strategy] = {
    "equal": Strategy("equal", idea="every worker the same: what data parallelism does by itself"),
    "static": Strategy("static", idea="shares by the first timing, then fixed"),
    "balanced": Strategy("balanced", idea="cost model and exact solver, every step; changes when it pays (ours)"),
    "dp": Strategy("dp", "proportional", idea="shares by throughput, once an epoch (arXiv 2110.08941)"),
    "edp": Strategy("edp", "proportional", idea="the same, gradients weighted by share (arXiv 2110.08941)"),
    "dbs": Strategy("dbs", "proportional", idea="shares by throughput, once an epoch (DBS, arXiv 2007.11831)"),
    "proportional": Strategy("proportional", idea="step times held equal, once an epoch (ACSOS 2020)"),
    "lbbsp": Strategy("lbbsp", idea="a few samples from the slowest to the fastest (LB-BSP, SoCC 2020)"),
    "lbb": Strategy("lbb", idea="hold, nudge or solve again, by the size of the imbalance"),
    "rcd-sgd": Strategy(
        "static",
        "submodular",
        "decentralized",
        sync_options={"mix_every": 2},
        idea="blocks that stand for the whole, parameters mixed with the neighbors' (arXiv 2211.00839)",
    ),
    "daso": Strategy(
        "balanced", sync="daso", idea="every step inside a node, seldom and late between nodes (arXiv 2104.05588)"
    ),
    "hogbatch": Strategy(
        "equal", sync="hogbatch", idea="whoever is free takes the next batch and updates at once (arXiv 2004.08771)"
    ),
    "adaptive-hogbatch": Strategy(
        "equal", sync="adaptive-hogbatch", idea="the same, batches moved to even the updates out (arXiv 2004.08771)"
    ),
    "adaptive-sgd": Strategy(
        "equal", sync="adaptive-sgd", idea="replicas of one's own, merged after many batches (arXiv 2110.07029)"
    ),
}


@dataclass(frozen=True)
class Choice:
    """What a run is made of along the four axes; it has passed the check."""

    name: str  # of the preset, or of what makes it different
    controller: Controller
    partition: str | Blocks
    sync: Sync
    engine: EngineSpec

    @property
    def partition_name(self) -> str:
        return "submodular" if isinstance(self.partition, Blocks) else self.partition


def choose(
    strategy: str | None = None,
    *,
    controller: str | Controller | None = None,
    partition: str | Blocks | None = None,
    sync: str | Sync | None = None,
    engine: str | EngineSpec | None = None,
    every: int | str | None = None,
    faithful: bool = False,
    sync_options: Mapping[str, Any] | None = None,
    quantum: int = 1,
) -> Choice:
    """The objects that a preset and single axes name together; an axis that is given wins over the preset's.

    Args:
        strategy: a name in `PRESETS`. Default: 'balanced', or what the other axes ask for.
        controller: a name, with options behind a colon ('fixed:4,2,1,1'), or an object.
        partition: a name in `PARTITIONS`, or `Blocks`.
        sync: a name, or an object.
        engine: a name, or an object.
        every: when the controller named acts: a number of steps, or 'epoch'.
        faithful: controller and sync named are to do as published.
        sync_options: of the sync named; those that are None do not count.
        quantum: counts are multiples of it.

    Raises:
        ValueError: for names that do not exist, and for what does not go together.
    """
    if strategy is not None and strategy not in PRESETS:
        raise ValueError(f"There is no strategy {strategy!r}. Choose one of {', '.join(PRESETS)}.")
    if isinstance(sync, str):
        sync = syncs.current_name(sync)
    alone = _is(sync, lambda name: not syncs.REGISTRY[name].stepped if name in syncs.REGISTRY else False)
    blocks = isinstance(partition, Blocks) or partition == "submodular"
    base = PRESETS[strategy or ("equal" if alone else "static" if blocks else "balanced")]
    if controller is not None and (alone or (sync is None and not syncs.REGISTRY[base.sync].stepped)):
        raise ValueError(
            f"With the sync {_name(sync or base.sync)!r} whoever is free takes the next batch, so there is nothing to "
            f"plan for the controller {_name(controller)!r}. Leave it out."
        )
    made_sync = _sync(sync or base.sync, base, dict(sync_options or {}), faithful)
    made = Choice(
        strategy or "",
        _controller(controller or base.controller, every, faithful, made_sync),
        partition if partition is not None else base.partition,
        made_sync,
        as_spec(base.engine if engine is None else engine),
    )
    if not strategy:
        made = replace(made, name=made.controller.name if made.sync.stepped else made.sync.name)
    _check(made, quantum)
    return made


def for_workers(controller: Controller, workers: Workers) -> Controller:
    """The controller for these workers: shares by kind of device become shares by worker."""
    if hasattr(controller, "for_kinds"):
        controller.for_kinds([device_kind(device) for device in workers.devices])
    return controller


def acts_by_epoch(controller: Controller) -> bool:
    """Whether a controller acts once an epoch, so that it needs epochs."""
    return getattr(controller, "every", None) == "epoch"


def check_without_epochs(controller: Controller) -> None:
    """Refuse a controller that would never act, as there are no epochs."""
    if acts_by_epoch(controller):
        name = controller.name
        raise ValueError(
            f"The controller {name!r} acts once an epoch, and this run has no epochs: give Step epoch_size, the "
            f"samples in an epoch, or use controller=hetjax.planning.controllers.make({name!r}, every=5)."
        )


def options_of(kind: type) -> list[str]:
    """The options of a controller or sync, from the signatures of its constructors."""
    found: dict[str, None] = {}
    for cls in kind.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            found |= {p.name: None for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}
    return list(found)


def _controller(given: str | Controller, every: int | str | None, faithful: bool, sync: Sync) -> Controller:
    if not isinstance(given, str):
        return controllers.resolve(given)
    name = given.partition(":")[0]
    if name == "oracle":
        raise ValueError(
            "The controller 'oracle' has to know the true cost of every step, which a training run does not. It is "
            "there for experiments/bench_controllers.py; choose another one."
        )
    if name not in CONTROLLERS:
        raise ValueError(f"There is no controller {given!r}. Choose {_one_of(CONTROLLERS)}.")
    having = lambda option: [law for law in CONTROLLERS if option in options_of(controllers.REGISTRY[law])]
    options: dict[str, Any] = {}
    if every is not None:
        if name not in having("every"):
            raise ValueError(
                f"The controller {name!r} has no cadence of its own: 'every' goes with {', '.join(having('every'))}. "
                "Leave it out."
            )
        options["every"] = every
    if faithful and name in having("faithful"):
        options["faithful"] = True
    elif faithful and sync.name == "allreduce":
        raise ValueError(
            f"The controller {name!r} weighs all samples alike, in its published form too: 'faithful' goes with "
            f"{', '.join(having('faithful'))}, or with another sync than allreduce. Leave it out."
        )
    return controllers.make(given, **options)


def _sync(given: str | Sync, base: Strategy, options: dict[str, Any], faithful: bool) -> Sync:
    options = {name: value for name, value in options.items() if value is not None}
    if not isinstance(given, str):
        if not isinstance(given, Sync):
            raise ValueError(f"sync is {given!r}: expected {_one_of(SYNCS)}, or an object of one of them.")
        return given
    if given not in syncs.REGISTRY:
        raise ValueError(f"There is no sync {given!r}. Choose {_one_of(SYNCS)}.")
    for name in options:
        if name not in options_of(syncs.REGISTRY[given]):
            theirs = [other for other, kind in syncs.REGISTRY.items() if name in options_of(kind)]
            raise ValueError(f"{name!r} is an option of the sync {_one_of(theirs)}, not of {given!r}. Leave it out.")
    if faithful and "faithful" in options_of(syncs.REGISTRY[given]):
        options["faithful"] = True
    return syncs.make(given, **{**(base.sync_options if given == base.sync else {}), **options})


def _check(chosen: Choice, quantum: int) -> None:
    """Refuse what makes no sense together."""
    law, partition, sync = chosen.controller.name, chosen.partition_name, chosen.sync.name
    by_epoch = acts_by_epoch(chosen.controller)
    faithful = bool(getattr(chosen.controller, "faithful", False))
    if partition not in PARTITIONS:
        raise ValueError(
            f"There is no partition {partition!r}. Choose {_one_of(PARTITIONS)}, or give the blocks themselves, as "
            "hetjax.make_blocks(source, rates) makes them."
        )
    keeps = law in ("equal", "fixed") or (law in _SHARING and by_epoch)
    if partition == "proportional" and law in CONTROLLERS and not keeps:
        raise ValueError(
            f"The partition 'proportional' cuts the data into shards once an epoch, but the controller {law!r} changes "
            "the counts between, or waits for timings of exactly its own. Use partition 'global', or one of the "
            f"controllers equal, fixed, {', '.join(_SHARING)} acting once an epoch."
        )
    if partition == "submodular" and law not in UNTIMED:
        raise ValueError(
            "The partition 'submodular' gives every worker its samples for good, as many as its rate says, and the "
            f"controller {law!r} would change their number. Use the controller static, with blocks sized by the "
            "workers' rates."
        )
    if partition != "global" and quantum > 1:
        raise ValueError(
            f"This model's BatchNorm takes its statistics over groups of {quantum} samples, and shards are not cut "
            f"into whole groups. Use partition 'global', not {partition!r}."
        )
    if sync == "daso" and partition != "global":
        raise ValueError(
            "Nodes of the sync 'daso' take parts of the global order, each its own; the partition "
            f"{partition!r} cuts shards for single workers. Use partition 'global'."
        )
    if sync == "daso" and faithful:
        raise ValueError(
            f"The controller {law!r} weighs the workers' gradients in its published form, and the sync 'daso' counts "
            "all samples alike. Use the controller balanced or equal."
        )
    if not chosen.sync.stepped and partition != "global":
        raise ValueError(
            f"With the sync {sync!r} whoever is free takes the next samples, and the partition {partition!r} gives "
            "every worker its own. Use partition 'global'."
        )
    if not chosen.sync.stepped and chosen.engine.name not in ("auto", "chunked"):
        raise ValueError(
            f"With the sync {sync!r} every worker runs alone, and the engine {chosen.engine.name!r} is one program "
            "over all of them. Use the engine chunked."
        )


def _is(given: str | Sync | None, named: Any) -> bool:
    return named(given) if isinstance(given, str) else isinstance(given, Sync) and not given.stepped


def _name(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "name", str(given))


def _one_of(names: Iterable[str]) -> str:
    names = tuple(names)
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
