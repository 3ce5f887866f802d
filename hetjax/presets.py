"""Strategies: presets along the four axes controller, partition, sync and engine, and the one check of combinations.

Everything that refuses a combination of options stands in this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hetjax import sync as syncs
from hetjax.arguments import current_name
from hetjax.devices.workers import Workers
from hetjax.engines import EngineSpec, as_spec
from hetjax.fleet.agree import same_start
from hetjax.planning import controllers
from hetjax.planning.controllers.base import Controller
from hetjax.reduce.optimizer import update_size
from hetjax.sampling.blocks import Blocks
from hetjax.state import State
from hetjax.sync import Sync

PARTITIONS = ("global", "proportional", "submodular")
SYNCS = tuple(syncs.REGISTRY)
CONTROLLERS = tuple(name for name in controllers.REGISTRY if name != "oracle")
UNTIMED = ("equal", "static", "fixed")  # controllers that do not need timings of every step

_BY_SHARES = ("dp", "edp", "dbs")  # controllers that set shares, which can hold for an epoch


@dataclass(frozen=True)
class Strategy:
    """A preset: a name on each of the four axes, and options of the sync."""

    controller: str
    partition: str = "global"
    sync: str = "allreduce"
    engine: str = "auto"
    sync_options: Mapping[str, Any] = field(default_factory=dict)
    idea: str = ""  # one line for tables


PRESETS: dict[str, Strategy] = {
    "equal": Strategy("equal", idea="the same count for every worker: plain data parallelism"),
    "static": Strategy("static", idea="shares from the first timings, then fixed"),
    "balanced": Strategy(
        "balanced", idea="cost model and exact solver at every step; the plan changes when that pays (ours)"
    ),
    "dp": Strategy("dp", "proportional", idea="shares by throughput, once per epoch (arXiv 2110.08941)"),
    "edp": Strategy("edp", "proportional", idea="dp with gradients weighted by share (arXiv 2110.08941)"),
    "dbs": Strategy("dbs", "proportional", idea="shares by throughput, once per epoch (DBS, arXiv 2007.11831)"),
    "proportional": Strategy(
        "proportional", idea="proportional controller toward equal step times, once per epoch (ACSOS 2020)"
    ),
    "lbbsp": Strategy("lbbsp", idea="moves a few samples from the slowest to the fastest worker (LB-BSP, SoCC 2020)"),
    "lbb": Strategy("lbb", idea="keeps, nudges or re-solves the plan, depending on the imbalance"),
    "rcd-sgd": Strategy(
        "static",
        "submodular",
        "decentralized",
        sync_options={"mix_every": 2},
        idea="representative blocks, parameters averaged with neighbors (arXiv 2211.00839)",
    ),
    "daso": Strategy(
        "balanced",
        sync="daso",
        idea="all-reduce inside nodes, infrequent delayed exchange between them (arXiv 2104.05588)",
    ),
    "hogbatch": Strategy(
        "equal", sync="hogbatch", idea="a free worker takes the next batch and updates at once (arXiv 2004.08771)"
    ),
    "adaptive-hogbatch": Strategy(
        "equal", sync="adaptive-hogbatch", idea="hogbatch with batch sizes that even out the updates (arXiv 2004.08771)"
    ),
    "adaptive-sgd": Strategy(
        "equal", sync="adaptive-sgd", idea="one replica per worker, merged after many batches (arXiv 2110.07029)"
    ),
}


@dataclass(frozen=True)
class Choice:
    """A checked combination: one object on each of the four axes."""

    name: str  # of the preset; without one, of the controller or the sync
    controller: Controller
    partition: str | Blocks
    sync: Sync
    engine: EngineSpec

    @property
    def partition_name(self) -> str:
        """Name of the partition, also where blocks were given."""
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
    """Build the objects that a preset and single axes name; an axis that is given overrides the preset.

    Args:
        strategy: a name in `PRESETS`. Default: 'balanced', or what suits the other axes.
        controller: a name, with options after a colon ('fixed:4,2,1,1'), or an object.
        partition: a name in `PARTITIONS`, or `Blocks`.
        sync: a name, or an object.
        engine: a name, or an object.
        every: when the named controller acts: a number of steps, or 'epoch'.
        faithful: use the named controller and sync exactly as published.
        sync_options: options of the named sync; None stands for the default.
        quantum: counts are multiples of it.

    Returns:
        The choice.

    Raises:
        ValueError: for an unknown name, or a combination that does not work.
    """
    if strategy is not None and strategy not in PRESETS:
        raise ValueError(f"There is no strategy {strategy!r}. Choose one of {', '.join(PRESETS)}.")
    sync = current_name("sync", sync, syncs.FORMER_NAMES)
    asynchronous = _is_asynchronous(sync)
    blocks = isinstance(partition, Blocks) or partition == "submodular"
    base = PRESETS[strategy or ("equal" if asynchronous else "static" if blocks else "balanced")]
    if controller is not None and (asynchronous or (sync is None and not syncs.REGISTRY[base.sync].stepped)):
        raise ValueError(
            f"With the sync {_name(sync or base.sync)!r} a free worker takes the next batch, so there is nothing to "
            f"plan for the controller {_name(controller)!r}. Leave it out."
        )
    made_sync = _sync(sync or base.sync, base, dict(sync_options or {}), faithful)
    made = Choice(
        strategy or "",
        _controller(controller or _default_controller(base, made_sync), every, faithful, made_sync),
        partition if partition is not None else base.partition,
        made_sync,
        as_spec(base.engine if engine is None else engine),
    )
    if not strategy:
        made = replace(made, name=made.controller.name if made.sync.stepped else made.sync.name)
    _check(made, quantum)
    return made


def for_workers(controller: Controller, workers: Workers) -> Controller:
    """Return the controller set up for these workers: shares by kind of device become shares by worker."""
    if hasattr(controller, "for_kinds"):
        controller.for_kinds([worker.kind for worker in workers.members])
    return controller


def acts_by_epoch(controller: Controller) -> bool:
    """Return whether a controller acts once per epoch, and so needs epochs."""
    return getattr(controller, "every", None) == "epoch"


def check_without_epochs(controller: Controller) -> None:
    """Refuse a controller that acts once per epoch in a run without epochs."""
    if acts_by_epoch(controller):
        name = controller.name
        raise ValueError(
            f"The controller {name!r} acts once per epoch, and this run has no epochs: give Step epoch_size, the "
            f"samples in an epoch, or use controller=hetjax.planning.controllers.make({name!r}, every=5)."
        )


def check_exact_sync(controller: Controller) -> None:
    """Refuse a controller that needs timings, for a model with collectives inside the local phase."""
    if controller.name not in UNTIMED:
        raise ValueError(
            "Exactly synchronized statistics make workers wait for each other inside the local phase, so their times "
            f"do not show their speeds: the controller {controller.name!r} cannot work. Use "
            f"{' or '.join(map(repr, UNTIMED))}."
        )


def check_stepped(sync: Sync) -> None:
    """Refuse a sync without global steps in a `Step`."""
    if not sync.stepped:
        raise ValueError(
            f"The sync {sync.name!r} has no global steps: a free worker takes the next batch. Use hetjax.Trainer with "
            "it."
        )


def check_global(chosen: Choice) -> None:
    """Refuse a strategy that divides the data set between workers in a `Step`, which only sees single batches."""
    if chosen.partition_name != "global":
        sync = "" if chosen.sync.name == "allreduce" else f" and sync={chosen.sync.name!r}"
        raise ValueError(
            f"The strategy {chosen.name!r} divides the data set by the partition {chosen.partition_name!r}, but a Step "
            f"only sees the batches that it is given. Use hetjax.Trainer with it, or give the Step "
            f"controller={chosen.controller.name!r}{sync} without the partition."
        )


def check_update(sync: Sync, update: str) -> None:
    """Refuse to shard the update of a sync whose replicas differ."""
    if update == "sharded" and sync.name != "allreduce":
        raise ValueError(
            f"update='sharded' needs the sync 'allreduce', whose workers share one set of parameters; with "
            f"{sync.name!r} they differ. Leave it out."
        )


def check_exchange(sync: Sync, wire: str, delay: int) -> None:
    """Refuse options of the exchange in every step with a sync that exchanges otherwise."""
    for name, value in (("wire", wire), ("delay", delay)):
        if sync.name != "allreduce" and value not in ("float32", "auto", 0):
            raise ValueError(
                f"{name}={value!r} is an option of the sync 'allreduce', and {sync.name!r} exchanges in its own way. "
                "Leave it out."
            )


def check_bucketed(sync: Sync, partition: str) -> None:
    """Refuse what divides samples by number alone, for samples of unequal length."""
    if not sync.stepped or sync.name == "daso" or partition != "global":
        raise ValueError(
            f"The sync {sync.name!r} with partition {partition!r} divides samples by their number, but those of a "
            "hetjax.Bucketed source are of unequal length. Use partition 'global' and the sync 'allreduce' or "
            "'decentralized', or pad all samples to one length."
        )


def check_not_by_node(sync: Sync) -> None:
    """Refuse a call of `Step` with a sync that divides every step between nodes."""
    if sync.by_node:
        raise ValueError(
            f"With several processes the sync {sync.name!r} divides every step between nodes: use hetjax.Trainer, "
            "which does."
        )


def options_of(kind: type) -> list[str]:
    """Return the names of the options of a controller or sync, from the signatures of its constructors."""
    found: dict[str, None] = {}
    for cls in kind.__mro__:
        if "__init__" in vars(cls) and cls is not object:
            parameters = inspect.signature(vars(cls)["__init__"]).parameters.values()
            found |= {p.name: None for p in parameters if p.name != "self" and p.kind is not p.VAR_KEYWORD}
    return list(found)


def _default_controller(base: Strategy, sync: Sync) -> str:
    """That of the strategy; for DASO as published, whose nodes are equal, equal counts."""
    return "equal" if isinstance(sync, syncs.Daso) and sync.config.faithful else base.controller


def _controller(given: str | Controller, every: int | str | None, faithful: bool, sync: Sync) -> Controller:
    if not isinstance(given, str):
        return controllers.resolve(given)
    name = given.partition(":")[0]
    if name == "oracle":
        raise ValueError(
            "The controller 'oracle' needs the true cost of every step, which a training run does not know. It serves "
            "experiments/bench_controllers.py; choose another one."
        )
    if name not in CONTROLLERS:
        raise ValueError(f"There is no controller {given!r}. Choose {_one_of(CONTROLLERS)}.")
    having = lambda option: [other for other in CONTROLLERS if option in options_of(controllers.REGISTRY[other])]
    options: dict[str, Any] = {}
    if every is not None:
        if name not in having("every"):
            raise ValueError(
                f"The controller {name!r} has no cadence of its own: 'every' is an option of "
                f"{', '.join(having('every'))}. Leave it out."
            )
        options["every"] = every
    if faithful and name in having("faithful"):
        options["faithful"] = True
    elif faithful and sync.name == "allreduce":
        raise ValueError(
            f"The controller {name!r} weighs all samples alike, also as published: 'faithful' is an option of "
            f"{', '.join(having('faithful'))}, and of other syncs than allreduce. Leave it out."
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
            owners = [other for other, kind in syncs.REGISTRY.items() if name in options_of(kind)]
            raise ValueError(f"{name!r} is an option of the sync {_one_of(owners)}, not of {given!r}. Leave it out.")
    if faithful and "faithful" in options_of(syncs.REGISTRY[given]):
        options["faithful"] = True
    return syncs.make(given, **{**(base.sync_options if given == base.sync else {}), **options})


def _check(chosen: Choice, quantum: int) -> None:
    """Refuse combinations that do not work."""
    controller, partition, sync = chosen.controller.name, chosen.partition_name, chosen.sync.name
    by_epoch = acts_by_epoch(chosen.controller)
    faithful = bool(getattr(chosen.controller, "faithful", False))
    if partition not in PARTITIONS:
        raise ValueError(
            f"There is no partition {partition!r}. Choose {_one_of(PARTITIONS)}, or give the blocks themselves, as "
            "made by hetjax.make_blocks(source, rates)."
        )
    keeps_shares = controller in ("equal", "fixed") or (controller in _BY_SHARES and by_epoch)
    if partition == "proportional" and controller in CONTROLLERS and not keeps_shares:
        raise ValueError(
            f"The partition 'proportional' cuts the data into shards once per epoch, but the controller {controller!r} "
            "changes the counts in between, or needs timings of exactly its own counts. Use partition 'global', or one "
            f"of the controllers equal, fixed, {', '.join(_BY_SHARES)} acting once per epoch."
        )
    if partition == "submodular" and controller not in UNTIMED:
        raise ValueError(
            "The partition 'submodular' gives every worker a fixed block, sized by its rate, and the controller "
            f"{controller!r} would change the counts. Use the controller static, with blocks sized by the workers' "
            "rates."
        )
    if partition != "global" and quantum > 1:
        raise ValueError(
            f"This model's BatchNorm takes its statistics over groups of {quantum} samples, and shards are not cut "
            f"into whole groups. Use partition 'global', not {partition!r}."
        )
    if sync == "daso" and partition != "global":
        raise ValueError(
            "Nodes of the sync 'daso' each take parts of the global order, but the partition "
            f"{partition!r} cuts shards for single workers. Use partition 'global'."
        )
    if sync == "daso" and faithful:
        raise ValueError(
            f"The controller {controller!r} weighs the workers' gradients in its published form, but the sync 'daso' "
            "counts all samples alike. Use the controller balanced or equal."
        )
    if (
        isinstance(chosen.sync, syncs.Daso)
        and chosen.sync.config.faithful
        and controller in CONTROLLERS
        and controller not in ("equal", "fixed")
    ):
        raise ValueError(
            f"The controller {controller!r} divides samples by speed, but DASO as published has equal workers in equal "
            "nodes: use the controller equal, or leave out faithful."
        )
    if not chosen.sync.stepped and partition != "global":
        raise ValueError(
            f"With the sync {sync!r} a free worker takes the next samples, but the partition {partition!r} gives every "
            "worker its own. Use partition 'global'."
        )
    if not chosen.sync.stepped and chosen.engine.name not in ("auto", "chunked"):
        raise ValueError(
            f"With the sync {sync!r} every worker runs alone, but the engine {chosen.engine.name!r} is one program "
            "over all workers. Use the engine chunked."
        )


def _is_asynchronous(sync: str | Sync | None) -> bool:
    """Return whether a sync, by name or as an object, has no global steps."""
    if isinstance(sync, str):
        return sync in syncs.REGISTRY and not syncs.REGISTRY[sync].stepped
    return isinstance(sync, Sync) and not sync.stepped


def check_alike(step: Any, state: State) -> None:
    """Refuse processes that start from unlike states or options: they would diverge unnoticed."""
    same_start(
        state,
        **alike(step),
        state_of_the_controller=None if step.sync.by_node else step.controller.state_dict(),
        state_of_the_sync=step.sync.state_dict(),
        updates_by_the_optimizer=update_size(step.optimizer, state.params),
        memory=[worker.memory for worker in step.workers.members] if step.workers.by_host else None,
    )


def alike(step: Any) -> dict[str, Any]:
    """The options in which all processes of a run must agree, as JSON values."""
    return {
        "batch_size": step.batch_size,
        "seed": step.seed,
        "controller": step.controller.name,
        "sync": step.sync.name,
        "engine": step.sessions.engine_spec.name,
        "decay_of_the_moving_average": step.ema_decay,
        "quantum": step.quantum,
        "compute_dtype": dict(step.sessions.dtypes),
        "update": [step.options.update, step.clip_norm],
        "wire": step.options.wire,
        "delay": step.options.delay,
        "on_nonfinite": [step.nonfinite.policy, step.nonfinite.max_skips],
    }


def check_rows(rows: Sequence[Mapping[str, Any]], me: int) -> None:
    """Refuse a member of an elastic fleet that differs in what all must have in common; the others go on without it.

    Args:
        rows: what each member says of itself; the first that trains already is right.
        me: the row of this process.
    """
    right, own = next((row for row in rows if not row["new"]), rows[0]), rows[me]
    for name, value in own["alike"].items():
        if value != right["alike"].get(name):
            raise ValueError(
                f"Member {own['number']} differs from member {right['number']} in its {name.replace('_', ' ')}: "
                f"{value} instead of {right['alike'].get(name)}. Start all with the same code and options."
            )


def check_elastic(step: Any) -> None:
    """Refuse what does not work yet in a fleet whose members come and go."""
    fixed = getattr(step.controller, "share_W", None) is not None and not getattr(step.controller, "by_kind", None)
    for given, instead in (
        (step.sync.name != "allreduce" and f"the sync {step.sync.name!r}", "the sync 'allreduce'"),
        (step.options.wire != "float32" and f"wire={step.options.wire!r}", "wire='float32'"),
        (step.options.delay and "delay=1", "delay=0"),
        (step.options.update == "replicated" and "update='replicated'", "update='sharded'"),
        (step.options.transport == "mesh" and "transport='mesh'", "transport='host'"),
        (step.simulation is not None and "simulated speeds", "real ones"),
        (fixed and "the controller 'fixed' with one share per worker", "shares by kind of device, or 'balanced'"),
        (step.sessions.engine_spec.name not in ("auto", "chunked")
         and f"the engine {step.sessions.engine_spec.name!r}", "the engine 'chunked'"),
    ):  # fmt: skip
        if given:
            raise ValueError(f"An elastic fleet does not work with {given}. Use {instead}, or a fleet that is fixed.")


def check_terms(own: Mapping[str, Any], agreed: Mapping[str, Any]) -> None:
    """Refuse a member of an elastic fleet that trains on another number of samples."""
    name = "number_of_samples"
    if own[name] != agreed.get(name):
        raise ValueError(f"This member has {own[name]:,} samples, the others {agreed.get(name):,}: give all the same.")


def check_elastic_source(partition: str) -> None:
    """Refuse partitions that belong to workers, in a fleet whose members come and go."""
    if partition != "global":
        raise ValueError(
            f"The partition {partition!r} divides the samples between workers, but those of an elastic fleet come and "
            "go. Use partition 'global', or a fleet that is fixed."
        )


def _name(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "name", str(given))


def _one_of(names: Iterable[str]) -> str:
    names = tuple(names)
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
