"""Engine specifications: an engine chosen by name or with options, which builds it for a model."""

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

PerWorker = int | Sequence[int] | None  # one number for all workers, or one per worker


@dataclass(frozen=True)
class EngineContext:
    """What an engine is built for.

    Args:
        program: The computation.
        workers: The workers that run it.
        clocks: The threads of the local workers.
        batch: Largest number of samples of a step, over all workers.
        capacity: Largest number of samples of each worker in a step. Default: chosen by the engine.
        quantum: Counts are multiples of it.
        priced_by_rows: Whether a microbatch costs rows instead of seconds (simulated speeds).
    """

    program: Program
    workers: Workers
    clocks: Clocks
    batch: int
    capacity: PerWorker = None
    quantum: int = 1
    priced_by_rows: bool = False


@dataclass(frozen=True)
class EngineSpec:
    """Base class of the engine specifications.

    Args:
        max_rows: Most rows that a worker computes at once; one number, or one per worker. Default: no limit.
    """

    max_rows: PerWorker = None
    name: ClassVar[str]

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        """Return the specification to build for these workers, and the reason for it.

        Args:
            workers: the workers.
            exact_sync: whether the model has collectives in its forward pass.

        Returns:
            The specification and the reason.

        Raises:
            ValueError: if the engine cannot run on these workers.
        """
        if len(workers.own_kinds) > 1:
            raise ValueError(
                f"The {self.name} engine is one program over all workers, which XLA cannot compile for devices of "
                f"several kinds ({', '.join(workers.own_kinds)}). Use engine='chunked' (or 'auto')."
            )
        return self, "as requested"

    def build(self, context: EngineContext) -> Engine:
        """Build the engine: compile its programs.

        Args:
            context: what the engine is built for.

        Returns:
            The engine.

        Raises:
            NotImplementedError: in the base class.
        """
        raise NotImplementedError

    def _capacities(self, context: EngineContext, default: int) -> np.ndarray:
        batch, quantum = context.batch, context.quantum
        capacity_W = per_worker("capacity", context.capacity, min(default, batch), context.workers)
        capacity_W = np.minimum(-(-capacity_W // quantum) * quantum, -(-batch // quantum) * quantum)
        if capacity_W.sum() < batch and not context.workers.elastic:  # there will be more of them
            raise ValueError(
                f"The workers can take {capacity_W.sum()} samples a step in all (capacities {capacity_W.tolist()}), "
                f"but batch_size is {batch}. Raise the capacities or lower batch_size."
            )
        return capacity_W

    def _one_buffer(self, context: EngineContext, factor: int) -> tuple[int, int]:
        """Capacity (default: `factor` equal shares) and largest microbatch of an engine with one buffer size."""
        smallest = int(self._capacities(context, factor * -(-context.batch // len(context.workers))).min())
        most = int(per_worker("max_rows", self.max_rows, smallest, context.workers).min())
        if most < context.quantum:
            raise ValueError(
                f"max_rows {self.max_rows} is less than the quantum, {context.quantum} samples. Raise max_rows."
            )
        return smallest, most // context.quantum * context.quantum

    def _check_buffer(self, context: EngineContext, buffer: int, what: str) -> None:
        if buffer * len(context.workers) < context.batch:
            raise ValueError(
                f"The {self.name} engine has one buffer size for all workers, the smallest {what}: {buffer} x "
                f"{len(context.workers)} workers is less than batch_size {context.batch}. Raise it, or use "
                "engine='chunked'."
            )


@dataclass(frozen=True)
class Auto(EngineSpec):
    """Chooses the engine by devices and model.

    `masked` for models with collectives in the forward pass, `chunked` on CPU and for mixed kinds of device, otherwise
    `looped`.

    Args:
        max_rows: maximum rows that a worker computes at once; one number, or one per worker. Default: no limit.
    """

    name: ClassVar[str] = "auto"

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        if workers.elastic:
            return Chunked(self.max_rows), "the fleet is elastic"
        if exact_sync:
            return Masked(self.max_rows), "the model synchronizes its statistics over all workers in the forward pass"
        if len(workers.kinds) > 1:
            return Chunked(self.max_rows), f"the workers are of {len(workers.kinds)} kinds"
        if workers.own[0].platform == "cpu":
            return Chunked(self.max_rows), "XLA's loops are slow for convolutions on CPU"
        reason = f"all workers are {workers.kinds[0]}: one program whose trip count follows the count"
        return Looped(self.max_rows), reason


@dataclass(frozen=True)
class Chunked(EngineSpec):
    """Runs each worker from the host in microbatches of a few compiled sizes, the rungs of a ladder.

    The work follows the count on any kind of device, at the cost of one compiled program per rung and kind.

    Args:
        max_rows: maximum rows of a microbatch; one number, or one per worker. Default: no limit.
        rungs: the microbatch sizes. Default: chosen automatically, with more compiled during training where they pay.
        complete: compile the whole ladder before the first step instead of a part of it.

    Raises:
        ValueError: if the rungs are not integers of at least 1.
    """

    rungs: Sequence[int] | None = None
    complete: bool = False
    name: ClassVar[str] = "chunked"

    def __post_init__(self) -> None:
        check_rungs(self.rungs)

    def resolve(self, workers: Workers, exact_sync: bool) -> tuple[EngineSpec, str]:
        return self, "as requested"

    def build(self, context: EngineContext) -> Engine:
        """Build the engine; the capacity defaults to the whole batch.

        Args:
            context: what the engine is built for.

        Returns:
            The engine.
        """
        capacity_W = self._capacities(context, context.batch)
        return ChunkedEngine(
            context.program,
            context.workers,
            context.clocks,
            capacity_W=capacity_W,
            max_rows_W=per_worker("max_rows", self.max_rows, int(capacity_W.max()), context.workers),
            quantum=context.quantum,
            rungs=self.rungs,
            complete=self.complete,
            priced_by_rows=context.priced_by_rows,
        )


@dataclass(frozen=True)
class Looped(EngineSpec):
    """Runs one program over all workers, a loop over microbatches whose trip count follows the count.

    Args:
        max_rows: maximum rows of a microbatch; one number, or one per worker. Default: no limit.
        micro: rows of a microbatch. Default: a sixteenth of the capacity, at least 16.
    """

    micro: int | None = None
    name: ClassVar[str] = "looped"

    def build(self, context: EngineContext) -> Engine:
        """Build the engine; the capacity defaults to four equal shares: an unused buffer only costs memory.

        Args:
            context: what the engine is built for.

        Returns:
            The engine.
        """
        smallest, most = self._one_buffer(context, 4)
        self._check_buffer(context, smallest, "capacity")
        micro = min(self.micro or max(16, smallest // 16), most)
        return LoopedEngine(
            context.program, context.workers, context.clocks, capacity=smallest, micro=micro, quantum=context.quantum
        )


@dataclass(frozen=True)
class Masked(EngineSpec):
    """Runs one program over all workers on a fixed buffer with a mask: its time does not depend on the count.

    The baseline, and the engine for models with collectives in the forward pass (exact BatchNorm).

    Args:
        max_rows: maximum rows of the buffer; one number, or one per worker. Default: no limit.
    """

    name: ClassVar[str] = "masked"

    def build(self, context: EngineContext) -> Engine:
        """Build the engine; the capacity defaults to two equal shares: the whole buffer is always computed.

        Args:
            context: what the engine is built for.

        Returns:
            The engine.
        """
        smallest = min(self._one_buffer(context, 2))
        self._check_buffer(context, smallest, "capacity or max_rows")
        return MaskedEngine(
            context.program, context.workers, context.clocks, capacity=smallest, quantum=context.quantum
        )


ENGINES: dict[str, type[EngineSpec]] = {spec.name: spec for spec in (Auto, Chunked, Looped, Masked)}


def as_spec(engine: str | EngineSpec) -> EngineSpec:
    """The specification of this name; a specification is returned unchanged.

    Args:
        engine: A name, or a specification.

    Returns:
        The specification.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(engine, EngineSpec):
        return engine
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ValueError(
            f"Unknown engine {engine!r}: use one of {', '.join(ENGINES)}, or an object such as "
            "hetjax.Chunked(max_rows=256)."
        )
    return ENGINES[engine]()


def per_worker(what: str, given: PerWorker, default: int, workers: Workers, most: int = MOST_SAMPLES) -> np.ndarray:
    """One integer per worker from one number, a list, or the default. Entries of lost processes are dropped."""
    several = list(given) if isinstance(given, list | tuple | np.ndarray) else [default if given is None else given]
    values = [whole(what, value, 1, most) for value in several]
    values = [values[entry] for entry in kept_entries(len(values), len(workers))]
    if len(values) not in (1, len(workers)):
        raise ValueError(
            f"{what} lists {len(values)} numbers for {len(workers)} workers: give one number, or one per worker."
        )
    return np.broadcast_to(np.array(values, np.int64), (len(workers),)).copy()
