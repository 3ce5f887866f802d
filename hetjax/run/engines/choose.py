"""Which engine: what the user asked for, or what suits the platform and the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetjax.arguments import MOST_SAMPLES, whole
from hetjax.run.clocks import Clocks
from hetjax.run.engines.chunked import Chunked
from hetjax.run.engines.protocol import Engine, Program
from hetjax.run.engines.spmd import Looped, Masked
from hetjax.run.workers import Workers

log = logging.getLogger("hetjax")
ENGINES = ("auto", "chunked", "looped", "masked")


def choose(engine: str, workers: Workers, wants_exact_sync: bool) -> tuple[str, str]:
    """The engine's name and the reason, for `auto`; otherwise the name as given."""
    if engine not in ENGINES:
        raise ValueError(f"Unknown engine {engine!r}: use one of {', '.join(ENGINES)}.")
    if engine != "auto":
        if engine != "chunked" and len(workers.kinds) > 1:
            raise ValueError(
                f"The {engine} engine is one program over all workers, which XLA refuses over unlike devices "
                f"({', '.join(workers.kinds)}). Use engine='chunked' (or 'auto')."
            )
        return engine, "as asked"
    if wants_exact_sync:
        return "masked", "the model synchronises its statistics over all workers in the forward pass"
    if len(workers.kinds) > 1:
        return "chunked", f"the workers are of {len(workers.kinds)} kinds"
    if workers.devices[0].platform == "cpu":
        return "chunked", "XLA's loops are slow for convolutions on CPU"
    return "looped", f"all workers are {workers.kinds[0]}: one program whose trip count follows the count"


def make_engine(
    name: str,
    program: Program,
    workers: Workers,
    clocks: Clocks,
    *,
    batch: int,
    capacity: int | Sequence[int] | None = None,
    max_rows: int | Sequence[int] | None = None,
    micro: int | None = None,
    quantum: int = 1,
    **ladder: Any,
) -> Engine:
    """Build an engine; capacities default to what suits it.

    chunked: the whole batch. looped: four times an equal share, as its buffer only costs memory. masked: twice an equal
    share, as it computes its whole buffer. No engine computes more than `max_rows` at once.
    """
    share = -(-batch // len(workers))
    whole = -(-batch // quantum) * quantum
    default = {"chunked": batch, "looped": 4 * share, "masked": 2 * share}[name]
    capacity_W = per_worker("capacity", capacity, min(default, batch), workers)
    capacity_W = np.minimum(-(-capacity_W // quantum) * quantum, whole)
    if capacity_W.sum() < batch:
        raise ValueError(
            f"The workers can take {capacity_W.sum()} samples a step in all (capacities {capacity_W.tolist()}), but "
            f"batch_size is {batch}. Raise the capacities or lower batch_size."
        )
    if name == "chunked":
        max_rows_W = per_worker("max_rows", max_rows, int(capacity_W.max()), workers)
        return Chunked(
            program, workers, clocks, capacity_W=capacity_W, max_rows_W=max_rows_W, quantum=quantum, **ladder
        )
    smallest = int(capacity_W.min())
    most = int(per_worker("max_rows", max_rows, smallest, workers).min()) // quantum * quantum
    if most == 0:
        raise ValueError(f"max_rows {max_rows} is less than the {quantum} samples that belong together. Raise it.")
    smallest = min(smallest, most) if name == "masked" else smallest  # it computes its whole buffer at once
    if smallest * len(workers) < batch:
        raise ValueError(
            f"The {name} engine has one buffer size for all workers, the smallest capacity"
            f"{' or max_rows' if name == 'masked' else ''}: {smallest} x {len(workers)} workers is less than "
            f"batch_size {batch}. Raise the smallest one, or use 'chunked'."
        )
    if name == "masked":
        return Masked(program, workers, clocks, capacity=smallest, quantum=quantum)
    micro = min(micro or max(16, smallest // 16), most)
    return Looped(program, workers, clocks, capacity=smallest, micro=micro, quantum=quantum)


def per_worker(what: str, given: int | Sequence[int] | None, default: int, workers: Workers) -> np.ndarray:
    """One whole number per worker from one number, a list, or the default."""
    several = list(given) if isinstance(given, list | tuple | np.ndarray) else [default if given is None else given]
    values = [whole(what, value, 1, MOST_SAMPLES) for value in several]
    if len(values) not in (1, len(workers)):
        raise ValueError(
            f"{what} lists {len(values)} numbers for {len(workers)} workers: give one number, or one for each."
        )
    return np.broadcast_to(np.array(values, np.int64), (len(workers),)).copy()
