"""The engines as a user chooses them: by name, or as an object with options that builds the engine for a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from hetjax.arguments import MOST_SAMPLES, whole
from hetjax.devices.workers import Workers
from hetjax.engines.base import Engine, Program
from hetjax.engines.chunked import ChunkedEngine
from hetjax.engines.clocks import Clocks
from hetjax.engines.spmd import LoopedEngine, MaskedEngine
from hetjax.fleet.membership import kept_entries
from hetjax.planning.ladder_costs import check_rungs

Whole = int | Sequence[int] | None  # one number for all workers, or one each


@dataclass(frozen=True)
class Site:
    """What an engine is built for.

    Args:
        program: what it computes.
        workers: on which devices.
        clocks: the threads of the local workers.
        batch: most samples of a step over all workers.
        capacity: most samples of each worker in a step; what suits the engine unless given.
        quantum: counts are multiples of it.
        priced_by_rows: whether rows, not seconds, are what a microbatch costs (simulated speeds).
    """

    program: Program
    workers: Workers
    clocks: Clocks
    batch: int
    capacity: Whole = None
    quantum: int = 1
    priced_by_rows: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """What all engines have in common.

    Args:
        max_rows: most rows that a worker computes at once; one number, or one per worker. Default: no limit.
    """

    max_rows: Whole = None
    name: ClassVar[str]

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        """The engine to build for these workers, and why."""
        if len(workers.kinds) > 1:
            raise ValueError(
                f"The {self.name} engine is one program over all workers, which XLA refuses over unlike devices "
                f"({', '.join(workers.kinds)}). Use engine='chunked' (or 'auto')."
            )
        return self, "as asked"

    def build(self, site: Site) -> Engine:
        """Compile the engine for a site."""
        raise NotImplementedError

    def _capacities(self, site: Site, default: int) -> np.ndarray:
        batch, quantum = site.batch, site.quantum
        capacity_W = per_worker("capacity", site.capacity, min(default, batch), site.workers)
        capacity_W = np.minimum(-(-capacity_W // quantum) * quantum, -(-batch // quantum) * quantum)
        if capacity_W.sum() < batch:
            raise ValueError(
                f"The workers can take {capacity_W.sum()} samples a step in all (capacities {capacity_W.tolist()}), "
                f"but batch_size is {batch}. Raise the capacities or lower batch_size."
            )
        return capacity_W

    def _one_buffer(self, site: Site, factor: int) -> tuple[int, int]:
        """The capacity of an engine with one buffer size for all workers, and its most rows at once.

        The capacity defaults to `factor` equal shares.
        """
        smallest = int(self._capacities(site, factor * -(-site.batch // len(site.workers))).min())
        most = int(per_worker("max_rows", self.max_rows, smallest, site.workers).min())
        if most < site.quantum:
            raise ValueError(
                f"max_rows {self.max_rows} is less than the {site.quantum} samples that belong together. Raise it."
            )
        return smallest, most // site.quantum * site.quantum

    def _check_buffer(self, site: Site, buffer: int, what: str) -> None:
        if buffer * len(site.workers) < site.batch:
            raise ValueError(
                f"The {self.name} engine has one buffer size for all workers, the smallest {what}: {buffer} x "
                f"{len(site.workers)} workers is less than batch_size {site.batch}. Raise the smallest one, or use "
                "'chunked'."
            )


@dataclass(frozen=True)
class Auto(EngineSpec):
    """The engine that suits the devices and the model: `chunked` on CPU and for mixed kinds, else `looped`."""

    name: ClassVar[str] = "auto"

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        if exact_sync:
            return Masked(self.max_rows), "the model synchronizes its statistics over all workers in the forward pass"
        if len(workers.kinds) > 1:
            return Chunked(self.max_rows), f"the workers are of {len(workers.kinds)} kinds"
        if workers.devices[0].platform == "cpu":
            return Chunked(self.max_rows), "XLA's loops are slow for convolutions on CPU"
        return Looped(
            self.max_rows
        ), f"all workers are {workers.kinds[0]}: one program whose trip count follows the count"


@dataclass(frozen=True)
class Chunked(EngineSpec):
    """The host drives each worker through a few compiled microbatch sizes, the rungs of a ladder.

    Args:
        max_rows: most rows that a worker computes at once; one number, or one per worker. Default: no limit.
        rungs: the microbatch sizes. Default: chosen, compiled and added while training where they pay.
        complete: compile the whole ladder before the first step instead of a part of it.
    """

    rungs: Sequence[int] | None = None
    complete: bool = False
    name: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        check_rungs(self.rungs)

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        return self, "as asked"

    def build(self, site: Site) -> Engine:
        """A worker may get the whole batch unless `capacity` says less."""
        capacity_W = self._capacities(site, site.batch)
        return ChunkedEngine(
            site.program,
            site.workers,
            site.clocks,
            capacity_W=capacity_W,
            max_rows_W=per_worker("max_rows", self.max_rows, int(capacity_W.max()), site.workers),
            quantum=site.quantum,
            rungs=self.rungs,
            complete=self.complete,
            priced_by_rows=site.priced_by_rows,
        )


@dataclass(frozen=True)
class Looped(EngineSpec):
    """One program over all workers whose trip count follows the count.

    Args:
        max_rows: most rows of a microbatch. Default: no limit.
        micro: rows of a microbatch. Default: a sixteenth of the capacity, at least 16.
    """

    micro: int | None = None
    name: ClassVar[str] = "looped"

    def build(self, site: Site) -> Engine:
        """The capacity defaults to four times an equal share, as its buffer only costs memory."""
        smallest, most = self._one_buffer(site, 4)
        self._check_buffer(site, smallest, "capacity")
        micro = min(self.micro or max(16, smallest // 16), most)
        return LoopedEngine(
            site.program, site.workers, site.clocks, capacity=smallest, micro=micro, quantum=site.quantum
        )


@dataclass(frozen=True)
class Masked(EngineSpec):
    """One program over all workers on a fixed buffer with a mask: its time does not fall with the count.

    The baseline, and the engine for models that talk across workers inside the forward pass.
    """

    name: ClassVar[str] = "masked"

    def build(self, site: Site) -> Engine:
        """The capacity defaults to twice an equal share, as it computes its whole buffer at once."""
        smallest = min(self._one_buffer(site, 2))
        self._check_buffer(site, smallest, "capacity or max_rows")
        return MaskedEngine(site.program, site.workers, site.clocks, capacity=smallest, quantum=site.quantum)


ENGINES: dict[str, type[EngineSpec]] = {spec.name: spec for spec in (Auto, Chunked, Looped, Masked)}


def as_spec(engine: str | EngineSpec) -> EngineSpec:
    """The engine of this name, or the object as it is."""
    if isinstance(engine, EngineSpec):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ValueError(
            f"Unknown engine {engine!r}: use one of {', '.join(ENGINES)}, or an object such as "
            "hetjax.Chunked(max_rows=256)."
        )
    return ENGINES[engine]()


def per_worker(what: str, given: Whole, default: int, workers: Workers) -> np.ndarray:
    """One whole number per worker from one number, a list, or the default."""
    several = list(given) if isinstance(given, list | tuple | np.ndarray) else [default if given is None else given]
    values = [whole(what, value, 1, MOST_SAMPLES) for value in several]
    values = [values[entry] for entry in kept_entries(len(values), len(workers))]
    if len(values) not in (1, len(workers)):
        raise ValueError(
            f"{what} lists {len(values)} numbers for {len(workers)} workers: give one number, or one for each."
        )
    return np.broadcast_to(np.array(values, np.int64), (len(workers),)).copy()
