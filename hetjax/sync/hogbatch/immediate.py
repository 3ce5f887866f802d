"""Hogbatch and Adaptive Hogbatch: each finished gradient is applied to one shared model on arrival."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from hetjax.engines.clocks import LocalResult
from hetjax.reduce.layout import Layout, Parts
from hetjax.sampling.ranges import Range
from hetjax.state import Core
from hetjax.sync.base import UpdateRule
from hetjax.sync.hogbatch.method import CommitResult, WorkItem
from hetjax.sync.hogbatch.scaling import compile_updates, run_update

AdaptBatch = Callable[..., int]  # (worker, batch_W, updates_W, active_W=...) -> batch, see rules.adapted_batch


@dataclass(frozen=True)
class ModelSnapshot:
    """The model after `version` updates."""

    version: int
    core: Core

    @property
    def leaves(self) -> list[jax.Array]:
        """Leaves of the parameters and the model state: what a worker computes with."""
        return jax.tree.leaves(self.core[:2])


class SharedModel:
    """The current model on its home device: lock-free reads, serialized updates.

    JAX arrays are immutable and nothing is donated, so a snapshot stays valid while it is referenced, and reading is
    one attribute load. An update is applied to the newest model, whatever version its gradient was taken at, so no
    worker's progress is lost.
    """

    def __init__(self, layout: Layout, rule: UpdateRule, core: Core, home: jax.Device):
        self.home = home
        self.snapshot = ModelSnapshot(0, jax.device_put(core, home))
        self._update = compile_updates(layout, rule, core, [home])[home]
        self._lock = threading.Lock()

    def receive(self, parts: Parts) -> Parts:
        """Copies a worker's sums to the home device; a copy that fails raises here, before the lock is taken."""
        return jax.block_until_ready(jax.device_put(parts, self.home))

    def apply(self, parts: Parts, scale: float, rate: float = 1.0) -> tuple[int, jax.Array]:
        """Applies these sums to the newest model; returns the new version and the report of the update."""
        with self._lock:
            core, report = run_update(self._update, self.snapshot.core, parts, scale, rate)
            self.snapshot = ModelSnapshot(self.snapshot.version + 1, core)
            return self.snapshot.version, report


class Immediate:
    """The method of Hogbatch: shared model, batch sizes, staleness bound.

    A worker with T threads is Hogwild: each thread takes 1 / T of the worker's batch, and reads, computes and updates
    without waiting for the others. So the worker makes T updates with a batch; its batch is adapted once for all.

    The staleness of an update is the number of other updates between reading the model and applying it. With n items
    in flight, the oldest of which read the model v versions ago, no staleness can exceed v + n - 1: each commit of
    another item adds one to v and takes one from n. A further item starts only while this stays within the bound, so
    no result is ever discarded.
    """

    pending = 0

    def __init__(
        self,
        model: SharedModel,
        devices: Sequence[jax.Device],
        batch_W: np.ndarray,
        updates_W: np.ndarray,
        *,
        adapt: AdaptBatch | None = None,
        bound: int | None = None,
        threads_W: np.ndarray | None = None,
        beta: float = 1.0,
        reset_by_epoch: bool = False,
        epoch: int = 0,
    ):
        self.model, self.devices = model, tuple(devices)
        self.batch_W, self.updates_W = np.array(batch_W, np.int64), np.array(updates_W, np.int64)
        self.adapt, self.bound = adapt, bound
        self.threads_W = np.ones(len(self.batch_W), np.int64) if threads_W is None else threads_W
        self.beta_W = np.where(self.threads_W > 1, beta, 1.0)  # weight of an update in comparisons
        self.reset_by_epoch, self.epoch = reset_by_epoch, epoch
        self._requests_W = np.zeros(len(self.batch_W), np.int64)

    @property
    def version(self) -> int:
        return self.model.snapshot.version

    def may_start(self, in_flight: Collection[WorkItem]) -> bool:
        if self.bound is None or not in_flight:
            return True
        oldest = max(self.version - item.version for item in in_flight)
        return oldest + len(in_flight) <= self.bound

    def next_batch(self, worker: int, active_W: np.ndarray) -> int:
        threads = int(self.threads_W[worker])
        if self.adapt is not None and self._requests_W[worker] % threads == 0:
            updates_W = self.updates_W * self.beta_W
            self.batch_W[worker] = self.adapt(worker, self.batch_W, updates_W, active_W=active_W)
        self._requests_W[worker] += 1
        return max(int(self.batch_W[worker]) // threads, 1)

    def read(self, item: WorkItem) -> list[jax.Array]:
        snapshot = self.model.snapshot  # one load: no lock
        leaves = jax.block_until_ready(jax.device_put(snapshot.leaves, self.devices[item.worker]))
        item.version = snapshot.version
        return leaves

    def prepare(self, item: WorkItem, result: LocalResult) -> Parts:
        return self.model.receive(result.parts)

    def commit(self, item: WorkItem, prepared: Parts) -> CommitResult:
        version, report = self.model.apply(prepared, item.scale, item.rate)
        if self.reset_by_epoch and item.span.epoch > self.epoch:
            self.updates_W[:], self.epoch = 0, item.span.epoch
        self.updates_W[item.worker] += 1
        return CommitResult(version, version - 1 - item.version, report, (item.span,))

    def drop_worker(self, worker: int) -> Sequence[Range]:
        return ()

    def rejoin(self, worker: int, active_W: np.ndarray) -> None:
        """Raises the worker's count to the lowest of the others: it is not to make up for missed updates."""
        others_W = np.array(active_W, bool)
        others_W[worker] = False
        if others_W.any():
            self.updates_W[worker] = max(self.updates_W[worker], self.updates_W[others_W].min())

    def on_idle(self, active_W: np.ndarray, *, drained: bool) -> Sequence[Range]:
        return ()

    def core(self) -> tuple[Core, Any]:
        return self.model.snapshot.core, None

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batch_W.tolist(), "updates": self.updates_W.tolist(), "epoch": self.epoch}
