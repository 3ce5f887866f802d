"""Adaptive SGD: every worker trains a replica of its own, and after each mega-batch the replicas are merged."""

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
from hetjax.reduce.update import Core
from hetjax.sampling.ranges import Range
from hetjax.sync.base import Rule
from hetjax.sync.hogbatch.method import Outcome, Unreachable, WorkItem
from hetjax.sync.hogbatch.rules import MOMENTUM, BatchBounds, merge_weights, moved_batches
from hetjax.sync.hogbatch.shared_model import compile_updates, run_update

Tree = Any


def merged(before: Core, replicas: Sequence[Core], weight_W: jax.Array, velocity: Tree, momentum: float) -> Any:
    """w = sum_i weight_i w_i + momentum (w - w_prev), and the new w - w_prev.

    Model state, optimizer state and running average are weighed alike; counts within them take the highest value.
    """

    def weigh(*leaves: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaves[0].dtype, jnp.inexact):
            return functools.reduce(jnp.maximum, leaves)
        return functools.reduce(jnp.add, [weight_W[i].astype(leaf.dtype) * leaf for i, leaf in enumerate(leaves)])

    params, *rest = jax.tree.map(weigh, *replicas)
    velocity = jax.tree.map(lambda to, at, v: to - at + momentum * v, params, before[0], velocity)
    return (jax.tree.map(jnp.add, before[0], velocity), *rest), velocity


class Merged:
    """The replicas, the quota of samples until the next merge, and the batches.

    Ranges count as done only when what was learned from them is merged: with a worker that fails its replica is lost,
    and all it had since the last merge goes back to the pool.
    """

    def __init__(
        self,
        layout: Layout,
        rule: Rule,
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
        momentum: float = MOMENTUM,
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
        place = SingleDeviceSharding(home)
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        cores = jax.tree.map(shape, self._core)
        weights = jax.ShapeDtypeStruct((len(devices),), np.float32, sharding=place)
        arguments = cores, [cores] * len(devices), weights, jax.tree.map(shape, self._velocity)
        with expected():
            self._merge = compile_for(partial(merged, momentum=momentum), arguments, [home])[0]
        self._since_W: list[list[Range]] = [[] for _ in devices]  # computed since the last merge
        self._replica_W = [self._core] * len(devices)  # each moves to its device when the worker reads it
        self._read_W = list(self._replica_W)  # on the worker's own thread

    @property
    def batch_W(self) -> np.ndarray:
        return np.array([self.bounds.clip(worker, b) for worker, b in enumerate(self.exact_batch_W)], np.int64)

    @property
    def pending(self) -> int:
        return sum(span.count for spans in self._since_W for span in spans)

    def may_start(self, flying: Collection[WorkItem]) -> bool:
        return self.pending + sum(task.span.count for task in flying) < self.quota

    def batch(self, worker: int, taking_part_W: np.ndarray) -> int:
        return int(self.batch_W[worker])

    def read(self, task: WorkItem) -> list[jax.Array]:
        task.version, device = self.version, self.devices[task.worker]
        replica = self._read_W[task.worker] = jax.block_until_ready(
            jax.device_put(self._replica_W[task.worker], device)
        )
        return jax.tree.leaves(replica[:2])

    def prepare(self, task: WorkItem, lap: LocalResult) -> tuple[Core, jax.Array]:
        program, replica = self._update[self.devices[task.worker]], self._read_W[task.worker]
        return jax.block_until_ready(run_update(program, replica, lap.parts, task.scale, task.rate))

    def commit(self, task: WorkItem, prepared: tuple[Core, jax.Array]) -> Outcome:
        self._replica_W[task.worker], tail = prepared
        self._since_W[task.worker].append(task.span)
        self.updates_W[task.worker] += 1
        return Outcome(self.version, 0, tail)

    def lost(self, worker: int) -> Sequence[Range]:
        spans, self._since_W[worker] = self._since_W[worker], []
        self.updates_W[worker] -= len(spans)
        self._replica_W[worker] = self._core
        return spans

    def joined(self, worker: int, taking_part_W: np.ndarray) -> None:
        """Its replica is that of the last merge already."""

    def rest(self, taking_part_W: np.ndarray, *, dry: bool) -> Sequence[Range]:
        if self.pending == 0 or (self.pending < self.quota and not dry):
            return ()
        recent_W, here_W = np.array([len(spans) for spans in self._since_W]), np.array(taking_part_W, bool)
        here_W |= recent_W > 0
        weight_W = np.zeros(len(self.devices), np.float32)
        weight_W[here_W] = merge_weights(recent_W[here_W], self.exact_batch_W[here_W])
        replicas = [self._at_home(worker) for worker in range(len(self.devices))]
        self._core, self._velocity = self._merge(self._core, replicas, weight_W, self._velocity)
        self.exact_batch_W = moved_batches(self.exact_batch_W, recent_W, self.bounds, self.beta_W, here_W)
        self.version += 1
        done = [span for spans in self._since_W for span in spans]
        self._since_W = [[] for _ in self.devices]
        self._replica_W = [self._core] * len(self.devices)
        return done

    def _at_home(self, worker: int) -> Core:
        try:
            return jax.block_until_ready(jax.device_put(self._replica_W[worker], self.home))
        except Exception as error:
            raise Unreachable(worker) from error

    def core(self) -> tuple[Core, Any]:
        return self._core, self._velocity

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.exact_batch_W.tolist(), "updates": self.updates_W.tolist()}
