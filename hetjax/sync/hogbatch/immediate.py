"""Hogbatch and Adaptive Hogbatch: every finished gradient is applied to the shared model at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.reduce.layout import Parts
from hetjax.reduce.update import Core
from hetjax.sampling.ranges import Range
from hetjax.sync.hogbatch.method import Outcome, WorkItem
from hetjax.sync.hogbatch.shared_model import SharedModel

Adapt = Callable[..., int]  # (worker, batch_W, updates_W, taking_part_W=...) -> its batch, see rules.py


class Immediate:
    """The shared model, the batches, and the bound on staleness.

    An update is as stale as the number of others applied between reading the model and its own turn. While the tasks
    on their way number n, and the oldest of them read a model v versions ago, no update can come to more than
    v + n - 1: each of the others adds one to v as it takes one off n. So a further task may start while this stays
    within the bound, and nothing is ever computed in vain.
    """

    def __init__(
        self,
        model: SharedModel,
        devices: Sequence[jax.Device],
        batch_W: np.ndarray,
        updates_W: np.ndarray,
        *,
        adapt: Adapt | None = None,
        bound: int | None = None,
    ):
        self.model, self.devices = model, tuple(devices)
        self.batch_W, self.updates_W = np.array(batch_W, np.int64), np.array(updates_W, np.int64)
        self.adapt, self.bound = adapt, bound

    @property
    def version(self) -> int:
        return self.model.snapshot.version

    pending = 0

    def may_start(self, flying: Collection[WorkItem]) -> bool:
        if self.bound is None or not flying:
            return True
        oldest = max(self.version - task.version for task in flying)
        return oldest + len(flying) <= self.bound

    def batch(self, worker: int, taking_part_W: np.ndarray) -> int:
        if self.adapt is not None:
            self.batch_W[worker] = self.adapt(worker, self.batch_W, self.updates_W, taking_part_W=taking_part_W)
        return int(self.batch_W[worker])

    def read(self, task: WorkItem) -> list[jax.Array]:
        snapshot = self.model.snapshot  # one load: no lock
        leaves = jax.block_until_ready(jax.device_put(snapshot.leaves, self.devices[task.worker]))
        task.version = snapshot.version
        return leaves

    def prepare(self, task: WorkItem, lap: LocalResult) -> Parts:
        return self.model.receive(lap.parts)

    def commit(self, task: WorkItem, prepared: Parts) -> Outcome:
        version, tail = self.model.apply(prepared, task.scale, task.rate)
        self.updates_W[task.worker] += 1
        return Outcome(version, version - 1 - task.version, tail, (task.span,))

    def lost(self, worker: int) -> Sequence[Range]:
        return ()

    def joined(self, worker: int, taking_part_W: np.ndarray) -> None:
        """Its count starts where the last of the others is: what it missed is not to be made up for."""
        others_W = np.array(taking_part_W, bool)
        others_W[worker] = False
        if others_W.any():
            self.updates_W[worker] = max(self.updates_W[worker], self.updates_W[others_W].min())

    def rest(self, taking_part_W: np.ndarray, *, dry: bool) -> Sequence[Range]:
        return ()

    def core(self) -> tuple[Core, Any]:
        return self.model.snapshot.core, None

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batch_W.tolist(), "updates": self.updates_W.tolist()}
