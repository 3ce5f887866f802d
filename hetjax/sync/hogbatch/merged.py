"""Adaptive SGD: each worker trains its own replica, and replicas are merged after every mega-batch."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax.devices.compile import compile_for, expected
from hetjax.engines.clocks import LocalResult
from hetjax.reduce.layout import Layout
from hetjax.reduce.trainable import trainable, trained_core, with_trained, with_trained_core
from hetjax.sampling.ranges import Range
from hetjax.state import Core
from hetjax.sync.base import UpdateRule
from hetjax.sync.hogbatch.method import CommitResult, ReplicaUnreachable, WorkItem
from hetjax.sync.hogbatch.rules import PUBLISHED_MOMENTUM, BatchBounds, merge_weights, moved_batches
from hetjax.sync.hogbatch.scaling import compile_updates, run_update

Tree = Any


def merge_replicas(before: Core, replicas: Sequence[Core], weight_W: jax.Array, velocity: Tree, momentum: float) -> Any:
    """Merges replicas, with momentum; returns the new core and the new velocity.

        v' = sum_i weight_i w_i - w + momentum v,    w' = w + v'

    Y. Ma, F. Rusu, K. Wu, A. Sim, arXiv 2110.07029, w' = merged + momentum (w - w_prev); weights of
    `rules.merge_weights`. Model state, optimizer state and parameter average take the weighted mean without momentum;
    integer leaves, such as step counts, take the maximum. Parameters that are not trained stay as they are.
    """

    def weigh(*leaves: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
            return functools.reduce(jnp.maximum, leaves)
        return functools.reduce(jnp.add, [weight_W[i].astype(leaf.dtype) * leaf for i, leaf in enumerate(leaves)])

    params, *rest = jax.tree.map(weigh, *map(trained_core, replicas))
    at = trainable(before[0])
    moved = jax.tree.map(lambda to, at, v: to - at + momentum * v, params, at, trainable(velocity))
    merged = with_trained_core(before, (jax.tree.map(jnp.add, at, moved), *rest))
    return merged, with_trained(velocity, moved)


class Merged:
    """The method of Adaptive SGD: replicas, batch sizes, and the samples until the next merge (`quota`).

    A range is done only when the replica that learned from it is merged. If a worker fails, its replica is lost, and
    all its ranges since the last merge return to the pool.
    """

    def __init__(
        self,
        layout: Layout,
        rule: UpdateRule,
        core: Core,
        velocity: Tree,
        devices: Sequence[jax.Device],
        home: jax.Device,
        batch_W: np.ndarray,
        updates_W: np.ndarray,
        *,
        bounds: BatchBounds,
        quota: int,
        beta_W: np.ndarray | None = None,
        momentum: float = PUBLISHED_MOMENTUM,
    ):
        self.devices, self.home = tuple(devices), home
        self.bounds, self.quota, self.beta_W = bounds, quota, beta_W
        self.exact_batch_W = np.array(batch_W, np.float64)
        self.updates_W = np.array(updates_W, np.int64)
        self.version = 0  # merges
        self._core: Core = jax.device_put(core, home)
        zeros = lambda: jax.tree.map(lambda p: np.zeros(np.shape(p), p.dtype), core[0])
        self._velocity = jax.device_put(zeros() if velocity is None else velocity, home)
        self._update = compile_updates(layout, rule, core, self.devices)
        sharding = SingleDeviceSharding(home)
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        cores = jax.tree.map(shape, self._core)
        weights = jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=sharding)
        arguments = cores, [cores] * len(devices), weights, jax.tree.map(shape, self._velocity)
        with expected():
            self._merge = compile_for(partial(merge_replicas, momentum=momentum), arguments, [home])[0]
        self._unmerged_W: list[list[Range]] = [[] for _ in devices]  # computed since the last merge
        self._replica_W = [self._core] * len(devices)  # moved to the worker's device when it reads
        self._read_W = list(self._replica_W)  # written by the worker's own thread

    @property
    def batch_W(self) -> np.ndarray:
        return np.array([self.bounds.clip(worker, b) for worker, b in enumerate(self.exact_batch_W)], np.int64)

    @property
    def pending(self) -> int:
        return sum(span.count for spans in self._unmerged_W for span in spans)

    def may_start(self, in_flight: Collection[WorkItem]) -> bool:
        return self.pending + sum(item.span.count for item in in_flight) < self.quota

    def next_batch(self, worker: int, active_W: np.ndarray) -> int:
        return int(self.batch_W[worker])

    def read(self, item: WorkItem) -> list[jax.Array]:
        item.version, device = self.version, self.devices[item.worker]
        replica = self._read_W[item.worker] = jax.block_until_ready(
            jax.device_put(self._replica_W[item.worker], device)
        )
        return jax.tree.leaves(replica[:2])

    def prepare(self, item: WorkItem, result: LocalResult) -> tuple[Core, jax.Array]:
        program, replica = self._update[self.devices[item.worker]], self._read_W[item.worker]
        return jax.block_until_ready(run_update(program, replica, result.parts, item.scale, item.rate))

    def commit(self, item: WorkItem, prepared: tuple[Core, jax.Array]) -> CommitResult:
        self._replica_W[item.worker], report = prepared
        self._unmerged_W[item.worker].append(item.span)
        self.updates_W[item.worker] += 1
        return CommitResult(self.version, 0, report)

    def drop_worker(self, worker: int) -> Sequence[Range]:
        spans, self._unmerged_W[worker] = self._unmerged_W[worker], []
        self.updates_W[worker] -= len(spans)
        self._replica_W[worker] = self._core
        return spans

    def rejoin(self, worker: int, active_W: np.ndarray) -> None:
        """Nothing to do: `drop_worker` reset its replica to the last merge."""

    def on_idle(self, active_W: np.ndarray, *, drained: bool) -> Sequence[Range]:
        """Merges once the quota is reached, or when nothing is left to hand out."""
        if self.pending == 0 or (self.pending < self.quota and not drained):
            return ()
        recent_W, merging_W = np.array([len(spans) for spans in self._unmerged_W]), np.array(active_W, bool)
        merging_W |= recent_W > 0
        weight_W = np.zeros(len(self.devices), np.float32)
        weight_W[merging_W] = merge_weights(recent_W[merging_W], self.exact_batch_W[merging_W])
        replicas = [self._replica_at_home(worker) for worker in range(len(self.devices))]
        self._core, self._velocity = self._merge(self._core, replicas, weight_W, self._velocity)
        self.exact_batch_W = moved_batches(self.exact_batch_W, recent_W, self.bounds, self.beta_W, merging_W)
        self.version += 1
        done = [span for spans in self._unmerged_W for span in spans]
        self._unmerged_W = [[] for _ in self.devices]
        self._replica_W = [self._core] * len(self.devices)
        return done

    def _replica_at_home(self, worker: int) -> Core:
        try:
            return jax.block_until_ready(jax.device_put(self._replica_W[worker], self.home))
        except Exception as error:
            raise ReplicaUnreachable(worker) from error

    def core(self) -> tuple[Core, Any]:
        return self._core, self._velocity

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.exact_batch_W.tolist(), "updates": self.updates_W.tolist()}
