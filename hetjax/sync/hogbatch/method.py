"""What a method of the family is to the coordinator: tasks, their results, and what becomes of them.

What a worker is given to do, and what came of it.

What a method of the family is to the coordinator: what a worker reads, and what becomes of its sums.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.reduce.update import Core, State
from hetjax.sampling.ranges import Range


@dataclass(eq=False)
class WorkItem:
    """A range of samples on its way with one worker."""

    worker: int
    span: Range
    batch: int  # as the worker was to get; the span may be shorter
    scale: float  # of the gradient, by the batch
    rate: float  # of the learning rate, by the schedule
    taken: float  # on the coordinator's clock
    version: int  # of the model that its gradient is taken at
    started: float | None = None  # when its rows were there


@dataclass(frozen=True)
class AppliedUpdate:
    """A gradient that has been applied; kept for the whole run, so it holds no arrays."""

    worker: int
    span: Range
    batch: int
    scale: float
    rate: float
    version: int  # of the model after it
    staleness: int  # updates of others between reading the model and this one
    rows: int  # computed, padding included
    began: float  # of the local phase, on the coordinator's clock
    ended: float
    applied: float


@dataclass(frozen=True)
class Moment:
    """A state that a run can be resumed from, and what goes with it on the host."""

    state: State
    host: dict[str, Any]


@dataclass(frozen=True)
class Finished:
    """News: an update has been applied."""

    update: AppliedUpdate
    tail: jax.Array  # its loss and metrics, as the reduce's report reads them
    seen: int  # samples learned from since the start of training
    since_W: tuple[float | None, ...]  # when the tasks now out were started
    moment: Moment | None  # where it ends a step's worth of samples


@dataclass(frozen=True)
class Lost:
    """News: a worker failed; what it had was given back."""

    worker: int
    error: BaseException
    spans: tuple[Range, ...]


@dataclass(frozen=True)
class Back:
    """News: a worker that was taken for hanging has come back."""

    worker: int


News = Finished | Lost | Back


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

    def may_start(self, flying: Collection[WorkItem]) -> bool:
        """Whether a further task may start beside these."""
        ...

    def batch(self, worker: int, taking_part_W: np.ndarray) -> int:
        """The batch of a worker that asks for work."""
        ...

    def read(self, task: WorkItem) -> list[jax.Array]:
        """The parameters to compute with, on the worker's device; the task notes their version."""
        ...

    def prepare(self, task: WorkItem, lap: LocalResult) -> Any:
        """What can be done with a worker's sums without the others noticing."""
        ...

    def commit(self, task: WorkItem, prepared: Any) -> Outcome: ...

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
