"""What a worker is given to do, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from hetjax.reduce.update import State
from hetjax.sampling.ranges import Range


@dataclass(eq=False)
class Task:
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
class Update:
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

    update: Update
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
