"""What a method of the family is to the coordinator: what a worker reads, and what becomes of its sums."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.engines.clocks import Lap
from hetjax.reduce.update import Core
from hetjax.sampling.ranges import Range
from hetjax.sync.hogbatch.task import Task


class Unreachable(Exception):
    """What a worker has cannot be had from its device any more; the cause says why."""

    def __init__(self, worker: int):
        super().__init__(f"The replica of worker {worker} cannot be read.")
        self.worker = worker


@dataclass(frozen=True)
class Outcome:
    """What a commit did."""

    version: int
    staleness: int
    tail: jax.Array
    done: Sequence[Range] = field(default=())  # ranges that the model has now learned from, for good


class Method(Protocol):
    """All but `read` and `prepare` are called under the coordinator's lock, so they leave the worker's device alone.

    The one exception is `rest`, which raises `Unreachable` for a worker whose device does not answer.
    """

    @property
    def batch_W(self) -> np.ndarray: ...

    @property
    def updates_W(self) -> np.ndarray:
        """Since the start of training."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def pending(self) -> int:
        """Samples computed that are not in the model yet."""
        ...

    def may_start(self, flying: Collection[Task]) -> bool:
        """Whether a further task may start beside these."""
        ...

    def batch(self, worker: int, taking_part_W: np.ndarray) -> int:
        """The batch of a worker that asks for work."""
        ...

    def read(self, task: Task) -> list[jax.Array]:
        """The parameters to compute with, on the worker's device; the task notes their version."""
        ...

    def prepare(self, task: Task, lap: Lap) -> Any:
        """What can be done with a worker's sums without the others noticing."""
        ...

    def commit(self, task: Task, prepared: Any) -> Outcome: ...

    def lost(self, worker: int) -> Sequence[Range]:
        """A worker failed: the ranges whose results are lost with it, beside the one on its way."""
        ...

    def joined(self, worker: int, taking_part_W: np.ndarray) -> None:
        """A worker has come back."""
        ...

    def rest(self, taking_part_W: np.ndarray, *, dry: bool) -> Sequence[Range]:
        """Nobody computes. `dry`: and there is nothing to hand out. Ranges that are done by what is done now."""
        ...

    def core(self) -> tuple[Core, Any]:
        """The model that all agree on, and what else a state has to hold (`State.more`)."""
        ...

    def state_dict(self) -> dict[str, Any]: ...
