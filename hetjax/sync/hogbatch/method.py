"""Work items, commit results, and the interface of a method of the family to the coordinator."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.sampling.ranges import Range
from hetjax.state import Core


@dataclass(eq=False)
class WorkItem:
    """A range of samples in flight on one thread of a worker."""

    worker: int
    span: Range
    batch: int  # of the thread: its part of the worker's batch; the span may be shorter
    scale: float  # factor on the gradient, by batch size
    rate: float  # factor on the learning rate, by schedule
    taken: float  # on the coordinator's clock
    version: int  # of the model the gradient is taken at
    started: float | None = None  # when its rows were available
    thread: int = 0  # of the worker


@dataclass(frozen=True)
class CommitResult:
    """The result of committing one work item."""

    version: int  # of the model after the update
    staleness: int
    report: jax.Array  # loss and metrics, as `StepReport` reads them
    done: Sequence[Range] = field(default=())  # ranges that are now part of the model


class ReplicaUnreachable(Exception):
    """A worker's replica cannot be read from its device; `__cause__` is the device's error."""

    def __init__(self, worker: int):
        super().__init__(f"The replica of worker {worker} cannot be read.")
        self.worker = worker


class Method(Protocol):
    """What a worker reads, and how its sums change the model.

    Everything but `read` and `prepare` runs under the coordinator's lock and does not touch the worker's device. The
    exception is `on_idle`, which raises `ReplicaUnreachable` for a device that does not respond.
    """

    @property
    def batch_W(self) -> np.ndarray:
        """Current batch sizes."""
        ...

    @property
    def updates_W(self) -> np.ndarray:
        """Updates since the start of training."""
        ...

    @property
    def version(self) -> int:
        """Number of changes of the common model in this run."""
        ...

    @property
    def pending(self) -> int:
        """Samples computed that are not part of the common model yet."""
        ...

    def may_start(self, in_flight: Collection[WorkItem]) -> bool:
        """Whether another work item may start beside these."""
        ...

    def next_batch(self, worker: int, active_W: np.ndarray) -> int:
        """The batch size for a free thread of a worker."""
        ...

    def read(self, item: WorkItem) -> list[jax.Array]:
        """Copies the parameters to the worker's device and sets the item's version."""
        ...

    def prepare(self, item: WorkItem, result: LocalResult) -> Any:
        """The part of a commit that needs no lock."""
        ...

    def commit(self, item: WorkItem, prepared: Any) -> CommitResult:
        """Applies a work item's sums."""
        ...

    def drop_worker(self, worker: int) -> Sequence[Range]:
        """A worker failed: the ranges whose results are lost with it, besides the one in flight."""
        ...

    def rejoin(self, worker: int, active_W: np.ndarray) -> None:
        """A dropped worker is active again."""
        ...

    def on_idle(self, active_W: np.ndarray, *, drained: bool) -> Sequence[Range]:
        """Called when nothing is in flight (`drained`: nor left to hand out); returns ranges that are now done."""
        ...

    def core(self) -> tuple[Core, Any]:
        """The common model, and the method's own state to save with it (`State.more`)."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Host state, as JSON values."""
        ...
