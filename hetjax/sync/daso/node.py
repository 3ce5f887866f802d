"""One node: workers that share one set of parameters and sum their gradients in every step; and which devices form it.

All arrays of a node have a leading axis of one, so that those of all nodes form stacked arrays without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax.devices.compile import compile_over, expected
from hetjax.devices.workers import AXIS, Workers
from hetjax.fleet.agree import gather
from hetjax.reduce.layout import HOST_SLOTS, SLOTS, Layout, Parts, level_of_all, with_bad_update
from hetjax.reduce.trainable import trainable, trained_core, with_trained, with_trained_core
from hetjax.reduce.update import Update
from hetjax.sync.daso.averaging import BlendWeights, Leaves

Tree = Any
Scalars = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class NodeLayout:
    """Which devices form the nodes, and which ones carry the exchanges between them."""

    nodes: int  # of all processes
    local: tuple[int, ...]  # the nodes of this process
    workers: list[Workers]  # of each local node
    leads: list[jax.Device]  # the first worker of every node, of all processes
    carriers: list[jax.Device]  # the device of every process for exchanges; empty within one process


def in_one_process(workers: Workers, nodes: int | Sequence[int] | None) -> NodeLayout:
    """Group the workers of one process into nodes of consecutive workers.

    Args:
        workers: all workers.
        nodes: the number of nodes, of nearly equal size, or the number of workers of each (default: 2 nodes, or 1 for
            a single worker).

    Raises:
        ValueError: If the workers cannot be grouped this way.
    """
    count = len(workers)
    nodes = min(2, count) if nodes is None else nodes
    if isinstance(nodes, int | np.integer):
        if not 1 <= nodes <= count:
            raise ValueError(f"{nodes} nodes cannot be made of {count} workers: give 1 to {count}.")
        sizes = [count // nodes + (j < count % nodes) for j in range(nodes)]
    else:
        sizes = [int(size) for size in nodes]
        if sum(sizes) != count or min(sizes) < 1:
            raise ValueError(f"nodes is {sizes}: expected at least 1 worker per node, and {count} workers in total.")
    ends = np.cumsum(sizes)
    groups = [Workers(workers.devices[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return NodeLayout(len(sizes), tuple(range(len(sizes))), groups, [group.devices[0] for group in groups], [])


def across_processes(workers: Workers) -> NodeLayout:
    """Every process is a node. Collective: all processes have to call this.

    Raises:
        ValueError: If a process has no CPU device left for exchanges.
    """
    rows = gather([workers.devices[0].platform, workers.devices[0].id, carrier().id, carrier() in workers.devices])
    if busy := [process for process, (*_, computes) in enumerate(rows) if computes]:
        raise ValueError(
            f"The last CPU device of a process carries the exchanges between nodes, but in process "
            f"{', '.join(map(str, busy))} it is a worker too. Start every process with one CPU device more than "
            "workers: JAX_NUM_CPU_DEVICES=2 for one worker."
        )
    device = lambda platform, number: next(d for d in jax.devices(platform) if d.id == number)
    leads = [device(platform, number) for platform, number, *_ in rows]
    carriers = [device("cpu", number) for _, _, number, _ in rows]
    return NodeLayout(len(rows), (jax.process_index(),), [workers], leads, carriers)


def carrier() -> jax.Device:
    """The device of this process that carries exchanges: its last CPU device."""
    return jax.local_devices(backend="cpu")[-1]


def own_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """The devices that this process trains on, out of these (default: all): its own, the carrier only if alone."""
    own = [d for d in (jax.devices() if devices is None else devices) if d.process_index == jax.process_index()]
    return [d for d in own if d != carrier()] or own


class Node:
    """The compiled programs of a node. It holds no arrays: the core of its workers is passed in and returned."""

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Tree):
        """core: from `place`; only its shapes are used."""
        self.workers, self.layout, self.update = workers, layout, update
        with expected():
            self._compile(core)

    @staticmethod
    def place(core: Tree, workers: Workers) -> Tree:
        """Copy a core to all workers of a node, in fresh buffers."""
        with expected():
            return jax.jit(partial(jax.tree.map, jnp.copy))(jax.device_put(core, workers.replicated))

    def _compile(self, core: Tree) -> None:
        count, layout, params = len(self.workers), self.layout, trainable(core[0])
        replicated = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self.workers.replicated)
        sharded = lambda size, dtype: jax.ShapeDtypeStruct((count, size), dtype, sharding=self.workers.sharded)
        compiled = lambda fn, *args, donate=(): compile_over(fn, args, self.workers.devices, donate)
        adding = jax.shard_map(
            self._add, mesh=self.workers.mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=(P(), P()), check_vma=False
        )
        parts = tuple(sharded(size, layout.dtype) for size in layout.sizes)
        self._run_add = compiled(adding, parts, sharded(HOST_SLOTS, np.float32))
        sizes = *layout.sizes[:-1], layout.sizes[-1] + 1  # with the level, see `_add`
        self._totals = totals = [replicated((1, size), layout.dtype) for size in sizes]
        tail = replicated((layout.values + count * len(SLOTS),), layout.dtype)
        self._run_apply = compiled(self._apply, core, totals, tail, donate=self.update.donate)
        scalars = (replicated((), layout.dtype),) * 3
        self._run_blend = compiled(self._blend, params, jax.tree.leaves(params), params, scalars, donate=(0,))
        self._run_copy = compiled(lambda params: jax.tree.map(jnp.copy, params), params)

    # -- on the devices --

    def _add(self, parts_1: Parts, slots_1xH: jax.Array) -> tuple[Leaves, jax.Array]:
        """The node's sums, followed by their `nonfinite_level`; and the tail for the host."""
        count, size = len(self.workers), self.layout.sizes[-1]
        parts = tuple(part[0] for part in parts_1)
        own = self.layout.outgoing(parts, slots_1xH[0], jax.lax.axis_index(AXIS), count)
        *large, rest = summed = jax.lax.psum(own, AXIS)
        tail = self.layout.tail(summed)
        totals = [*large, jnp.concatenate([rest[:size], level_of_all(tail, count)[None]])]
        return [x[None] for x in totals], tail

    def _apply(self, core_1: Tree, totals_1: Leaves, tail: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
        """The core, updated if all sums are finite and the weight is positive; the scalars of the sums; the tail."""
        core, totals = jax.tree.map(lambda x: x[0], (core_1, totals_1))
        sums, rest = self.layout.unpack(tuple(totals)), totals[-1]
        moved, bad = self.update(core, sums, sums.weight, rest[-1])
        tail = with_bad_update(tail, len(self.workers), bad)
        return jax.tree.map(lambda x: x[None], moved), rest[-1 - self.layout.values : -1], tail

    def _blend(self, params: Tree, mean: Leaves, sent: Tree, weights: Scalars) -> Tree:
        """Compute x <- keep x + take mean - back sent (`BlendWeights`)."""
        leaves, tree = jax.tree.flatten(params)

        def one(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            keep, take, back = (weight.astype(x.dtype) for weight in weights)
            return keep * x + take * m - back * s

        return jax.tree.unflatten(
            tree, [one(*parts) for parts in zip(leaves, mean, jax.tree.leaves(sent), strict=True)]
        )

    # -- on the host --

    def add(self, parts_w: Sequence[Parts], slots_w: Sequence[list[float]]) -> tuple[Leaves, jax.Array]:
        """The sums of a step over the node's workers, on all of them; and the tail: scalars and slots."""
        parts = tuple(self.workers.stack(part) for part in zip(*parts_w, strict=True))
        return self._run_add(parts, self.workers.from_host(list(np.asarray(slots_w, np.float32))))

    def apply(self, core: Tree, totals: Leaves, tail: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
        """Update the core by the sums of this node or of all; also their scalars, and the tail with the outcome."""
        return self._run_apply(core, [self.put(x) for x in totals], tail)

    def snapshot(self, core: Tree) -> Tree:
        """A copy of the current trainable parameters, which later updates do not overwrite."""
        return self._run_copy(trainable(core[0]))

    def blend(self, core: Tree, mean: Leaves, sent: Tree, weights: BlendWeights) -> Tree:
        """Blend a mean over nodes into the parameters; `sent`: this node's part of that mean."""
        mean = [self.put(x) for x in mean]
        scalars = tuple(self.put(np.asarray(weight, self.layout.dtype)) for weight in weights)
        blended = self._run_blend(trainable(core[0]), mean, sent, scalars)
        return (with_trained(core[0], blended), *core[1:])

    def exchange_shapes(self, core: Tree, compressed: bool, gradient_kind: str) -> list[tuple[str, Leaves]]:
        """The kinds of exchange that this node will take part in, and the leaves of each."""
        params, leaves = jax.tree.leaves(trainable(core[0])), jax.tree.leaves(trained_core(core))
        kinds = [(gradient_kind, self._totals), ("mean", params), *([("compressed", params)] if compressed else [])]
        others = [[leaves[k] for k in averaged_leaves(core, with_optimizer)] for with_optimizer in (False, True)]
        return kinds + [("mean", sent) for sent in others if sent]

    def put_leaves(self, core: Tree, indices: Sequence[int], values: Leaves) -> Tree:
        """The core with the leaves of these indices (`averaged_leaves`) replaced."""
        leaves, tree = jax.tree.flatten(trained_core(core))
        for index, value in zip(indices, values, strict=True):
            leaves[index] = self.put(value)
        return with_trained_core(core, jax.tree.unflatten(tree, leaves))

    def put(self, x: Any) -> jax.Array:
        """Replicate an array on the workers of this node."""
        if isinstance(x, jax.Array) and x.sharding == self.workers.replicated:
            return x
        return jax.device_put(x, self.workers.replicated)

    def lead(self, tree: Tree) -> Tree:
        """The arrays on the node's first worker."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def averaged_leaves(core: Tree, with_optimizer: bool) -> list[int]:
    """The indices of the leaves of the `trained_core`, beside the parameters, that nodes average after an epoch.

    Model state, moving average and counters; the optimizer's floating state only on request.
    """
    indices, index = [], 0
    for part, tree in enumerate(trained_core(core)):
        for leaf in jax.tree.leaves(tree):
            counter = jnp.issubdtype(leaf.dtype, jnp.signedinteger)
            real = jnp.issubdtype(leaf.dtype, jnp.floating)
            if part > 0 and (counter or (real and (part != 2 or with_optimizer))):  # parts: see `Core`
                indices.append(index)
            index += 1
    return indices
