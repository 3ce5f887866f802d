"""Named strategies: presets over the four axes controller, partition, sync and engine, and what goes together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hetjax import sync as syncs
from hetjax.plan import controllers
from hetjax.plan.controllers.protocol import Controller
from hetjax.run.engines.choose import ENGINES

PARTITIONS = ("global", "proportional", "submodular")
SYNCS = tuple(syncs.REGISTRY)

_BY_EPOCH = ("dp", "edp", "dbs", "proportional")  # laws that act once an epoch unless told otherwise
_WEIGHING = ("dp", "edp", "dbs")  # laws whose published form weighs the workers' gradients
_SYNC_OPTIONS = {  # that a user can set by name
    "decentralised": ("mix_every", "topology", "matcha_budget"),
    "daso": ("nodes", "max_skip", "blend", "between"),
    "hogbatch": ("batches", "smallest", "staleness_bound", "scale_rate", "rate_cap", "replay"),
    "adaptive-hogbatch": ("batches", "smallest", "staleness_bound", "scale_rate", "rate_cap", "dead_zone", "replay"),
    "adaptive-sgd": ("batches", "smallest", "mega_batch", "scale_rate", "rate_cap", "replay"),
}
_ASYNCHRONOUS = ("hogbatch", "adaptive-hogbatch", "adaptive-sgd")  # no steps of all workers: nothing to plan


@dataclass(frozen=True)
class Strategy:
    """A choice along the four axes, and the own options of the controller (hetjax.plan.controllers) and the sync."""

    controller: str
    partition: str = "global"
    sync: str = "allreduce"
    engine: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    sync_options: Mapping[str, Any] = field(default_factory=dict)
    idea: str = ""  # one line for tables

    def make_controller(self) -> Controller:
        return controllers.make(self.controller, **self.options)

    @property
    def asynchronous(self) -> bool:
        """Whether whoever is free takes the next batch: then no controller plans."""
        return self.sync in _ASYNCHRONOUS

    def make_sync(self, **more: Any) -> syncs.AnySync:
        return syncs.make(self.sync, **self.sync_options, **more)


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
        "decentralised",
        sync_options={"mix_every": 2},
        idea="blocks that stand for the whole, parameters mixed with the neighbours' (arXiv 2211.00839)",
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
CONTROLLERS = tuple(name for name in controllers.REGISTRY if name != "oracle")


def resolve(
    preset: str | None = None,
    *,
    controller: str | None = None,
    partition: str | None = None,
    sync: str | None = None,
    engine: str | None = None,
    every: int | str | None = None,
    faithful: bool = False,
    sync_options: Mapping[str, Any] | None = None,
) -> tuple[str, Strategy]:
    """The strategy that a preset and single axes name together, and its name; an axis given wins over the preset's.

    `every`: when the controller acts, a number of steps or 'epoch'. `faithful`: controller and sync as published.
    `sync_options`: of the sync, by name; those that are None do not count.
    """
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"There is no strategy {preset!r}. Choose one of {', '.join(PRESETS)}.")
    if controller == "oracle":
        raise ValueError(
            "The controller 'oracle' has to be told the true cost of every step, which a training run does not know. "
            "It is there for experiments/bench_controllers.py; choose another one."
        )
    known = {"controller": CONTROLLERS, "partition": PARTITIONS, "sync": SYNCS, "engine": ENGINES}
    axes = {"controller": controller, "partition": partition, "sync": sync, "engine": engine}
    given: dict[str, Any] = {axis: name for axis, name in axes.items() if name is not None}
    for axis, name in given.items():
        if name not in known[axis]:
            raise ValueError(f"There is no {axis} {name!r}. Choose {_one_of(known[axis])}.")
    usual = "static" if partition == "submodular" else "balanced"
    base = PRESETS[preset] if preset is not None else Strategy(controller or usual)
    chosen = replace(base, **given)
    if chosen.controller != base.controller:
        chosen = replace(chosen, options={})
    if chosen.sync != base.sync:
        chosen = replace(chosen, sync_options={})
    chosen = replace(
        chosen,
        options={**chosen.options, **_options(chosen, every, faithful)},
        sync_options={**chosen.sync_options, **_sync_options(chosen.sync, sync_options or {}, faithful)},
    )
    _check(chosen)
    if chosen.asynchronous and controller is not None:
        raise ValueError(
            f"With the sync {chosen.sync!r} whoever is free takes the next batch, so there is nothing to plan for the "
            f"controller {controller!r}. Leave it out."
        )
    return preset or (chosen.sync if chosen.asynchronous else chosen.controller), chosen


def _options(chosen: Strategy, every: int | str | None, faithful: bool) -> dict[str, Any]:
    controller, options = chosen.controller, dict[str, Any]()
    if every is not None:
        if controller not in (*_BY_EPOCH, "lbbsp"):
            raise ValueError(
                f"The controller {controller!r} has no cadence of its own: 'every' goes with "
                f"{', '.join((*_BY_EPOCH, 'lbbsp'))}. Leave it out."
            )
        options["every"] = every
    if faithful:
        if controller in _WEIGHING:
            options["faithful"] = True
        elif chosen.sync == "allreduce":
            raise ValueError(
                f"The controller {controller!r} weighs all samples alike, in its published form too: 'faithful' goes "
                f"with {', '.join(_WEIGHING)}, or with another sync than allreduce. Leave it out."
            )
    return options


def _sync_options(sync: str, given: Mapping[str, Any], faithful: bool) -> dict[str, Any]:
    options = {name: value for name, value in given.items() if value is not None}
    for name in options:
        if name not in _SYNC_OPTIONS.get(sync, ()):
            theirs = [other for other, names in _SYNC_OPTIONS.items() if name in names]
            raise ValueError(
                f"{name!r} is an option of the sync {_one_of(tuple(theirs))}, not of {sync!r}. Leave it out."
            )
    return options | ({"faithful": True} if faithful and sync != "allreduce" else {})


def _check(chosen: Strategy) -> None:
    """Refuse what makes no sense together."""
    if chosen.partition == "proportional":
        once_an_epoch = chosen.controller in _WEIGHING and chosen.options.get("every", "epoch") == "epoch"
        if not (once_an_epoch or chosen.controller == "equal"):
            raise ValueError(
                f"The partition 'proportional' cuts the data into shards once an epoch, but the controller "
                f"{chosen.controller!r} changes the counts between, or waits for timings of exactly its own. Use "
                f"partition 'global', or one of the controllers equal, {', '.join(_WEIGHING)} acting once an epoch."
            )
    if chosen.sync == "daso" and chosen.partition != "global":
        raise ValueError(
            f"Nodes of the sync 'daso' take parts of the global order, each its own; the partition "
            f"{chosen.partition!r} cuts shards for single workers. Use partition 'global'."
        )
    if chosen.sync == "daso" and chosen.options.get("faithful") and chosen.controller in _WEIGHING:
        raise ValueError(
            f"The controller {chosen.controller!r} weighs the workers' gradients in its published form, and the sync "
            "'daso' counts all samples alike. Use the controller balanced or equal."
        )
    if chosen.partition == "submodular" and chosen.controller not in ("equal", "static"):
        raise ValueError(
            f"The partition 'submodular' gives every worker its samples for good, as many as its rate says, and the "
            f"controller {chosen.controller!r} would change their number. Use the controller static."
        )
    if chosen.asynchronous and chosen.partition != "global":
        raise ValueError(
            f"With the sync {chosen.sync!r} whoever is free takes the next samples, and the partition "
            f"{chosen.partition!r} gives every worker its own. Use partition 'global'."
        )
    if chosen.asynchronous and chosen.engine not in ("auto", "chunked"):
        raise ValueError(
            f"With the sync {chosen.sync!r} every worker runs alone, and the engine {chosen.engine!r} is one program "
            "over all of them. Use the engine chunked."
        )


def _one_of(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
