"""One node: workers that share one set of parameters; which devices form it and which carry its exchanges.

Which devices form the nodes, and which ones carry the exchanges between them.

One node: workers that share one set of parameters and sum their gradients in every step.

All arrays of a node have a leading axis of one, so that those of all nodes make stacked arrays without a copy.
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
from hetjax.reduce.update import Update
from hetjax.sync.daso.averaging import BlendWeights, Leaves


@dataclass(frozen=True)
class NodeLayout:
    nodes: int  # in all
    mine: tuple[int, ...]  # those of this process
    workers: list[Workers]  # of each of them
    leads: list[jax.Device]  # the first worker of every node, of all processes
    carriers: list[jax.Device]  # what carries the exchanges, of every process; none within one process


def in_one_process(workers: Workers, asked: int | Sequence[int] | None) -> NodeLayout:
    """Nodes of consecutive workers: so many, as equal as can be, or of so many workers each; two, if there are two
    workers, unless told."""
    count = len(workers)
    asked = min(2, count) if asked is None else asked
    if isinstance(asked, int | np.integer):
        if not 1 <= asked <= count:
            raise ValueError(f"{asked} nodes cannot be made of {count} workers: give 1 to {count}.")
        sizes = [count // asked + (j < count % asked) for j in range(asked)]
    else:
        sizes = [int(size) for size in asked]
        if sum(sizes) != count or min(sizes) < 1:
            raise ValueError(f"Nodes of {sizes} workers were asked for, and there are {count} workers in all.")
    ends = np.cumsum(sizes)
    groups = [Workers(workers.devices[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    return NodeLayout(len(sizes), tuple(range(len(sizes))), groups, [group.devices[0] for group in groups], [])


def across_processes(workers: Workers) -> NodeLayout:
    """Every process is a node. All of them have to call this."""
    said = gather([workers.devices[0].platform, workers.devices[0].id, carrier().id, carrier() in workers.devices])
    if busy := [process for process, (*_, computes) in enumerate(said) if computes]:
        raise ValueError(
            f"The last CPU device of a process carries the exchanges between nodes, and in process "
            f"{', '.join(map(str, busy))} it is a worker too. Start every process with one CPU device more than "
            "workers: JAX_NUM_CPU_DEVICES=2 for one worker."
        )
    of = lambda platform, number: next(d for d in jax.devices(platform) if d.id == number)
    leads = [of(platform, number) for platform, number, *_ in said]
    carriers = [of("cpu", number) for _, _, number, _ in said]
    return NodeLayout(len(said), (jax.process_index(),), [workers], leads, carriers)


def carrier() -> jax.Device:
    """This process's device for exchanges: its last CPU device."""
    return jax.local_devices(backend="cpu")[-1]


def own_devices(devices: Sequence[jax.Device] | None) -> list[jax.Device]:
    """Those of these devices (None: all) that this process trains on: its own, without the carrier where others are."""
    mine = [d for d in (jax.devices() if devices is None else devices) if d.process_index == jax.process_index()]
    return [d for d in mine if d != carrier()] or mine


Tree = Any
Scalars = tuple[jax.Array, jax.Array, jax.Array]


class Node:
    """The programs of a node, compiled before the first step. What its workers hold, its core, goes in and out."""

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Tree):
        """core: as `place` made it; only its shapes matter here."""
        self.workers, self.layout, self.update = workers, layout, update
        with expected():
            self._compile(core)

    @staticmethod
    def place(core: Tree, workers: Workers) -> Tree:
        """On all workers of a node, in buffers of its own."""
        with expected():
            return jax.jit(partial(jax.tree.map, jnp.copy))(jax.device_put(core, workers.replicated))

    def _compile(self, core: Tree) -> None:
        count, layout, params = len(self.workers), self.layout, core[0]
        held = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=self.workers.replicated)
        wide = lambda size, dtype: jax.ShapeDtypeStruct((count, size), dtype, sharding=self.workers.sharded)
        compiled = lambda fn, *args, donate=(): compile_over(fn, args, self.workers.devices, donate)
        adding = jax.shard_map(
            self._add, mesh=self.workers.mesh, in_specs=(P(AXIS), P(AXIS)), out_specs=(P(), P()), check_vma=False
        )
        parts = tuple(wide(size, layout.dtype) for size in layout.sizes)
        self._run_add = compiled(adding, parts, wide(HOST_SLOTS, np.float32))
        self._totals = totals = [held((1, size), layout.dtype) for size in (*layout.sizes[:-1], layout.sizes[-1] + 1)]
        tail = held((3 + len(layout.metrics) + count * len(SLOTS),), layout.dtype)
        self._run_apply = compiled(self._apply, core, totals, tail, donate=self.update.donate)
        scalars = (held((), layout.dtype),) * 3
        self._run_blend = compiled(self._blend, params, jax.tree.leaves(params), params, scalars, donate=(0,))
        self._run_copy = compiled(lambda params: jax.tree.map(jnp.copy, params), params)

    # -- on the devices --

    def _add(self, parts_1: Parts, slots_1xH: jax.Array) -> tuple[Leaves, jax.Array]:
        """The node's sums, behind them their `nonfinite_level`; and the tail for the host."""
        count, size = len(self.workers), self.layout.sizes[-1]
        parts = tuple(part[0] for part in parts_1)
        own = self.layout.outgoing(parts, slots_1xH[0], jax.lax.axis_index(AXIS), count)
        *large, rest = summed = jax.lax.psum(own, AXIS)
        tail = self.layout.tail(summed)
        totals = [*large, jnp.concatenate([rest[:size], level_of_all(tail, count)[None]])]
        return [x[None] for x in totals], tail

    def _apply(self, core_1: Tree, totals_1: Leaves, tail: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
        """The update, where all sums are finite and there is any weight; the scalars that it came from; the tail."""
        core, totals = jax.tree.map(lambda x: x[0], (core_1, totals_1))
        sums, rest = self.layout.unpack(tuple(totals)), totals[-1]
        moved, bad = self.update(core, sums, sums.weight, rest[-1])
        tail = with_bad_update(tail, len(self.workers), bad)
        return jax.tree.map(lambda x: x[None], moved), rest[-4 - len(self.layout.metrics) : -1], tail

    def _blend(self, params: Tree, mean: Leaves, sent: Tree, terms: Scalars) -> Tree:
        leaves, tree = jax.tree.flatten(params)

        def one(x: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
            keep, take, back = (t.astype(x.dtype) for t in terms)
            return keep * x + take * m - back * s

        return jax.tree.unflatten(
            tree, [one(*parts) for parts in zip(leaves, mean, jax.tree.leaves(sent), strict=True)]
        )

    # -- on the host --

    def add(self, parts_w: Sequence[Parts], slots_w: Sequence[list[float]]) -> tuple[Leaves, jax.Array]:
        """The sums of this step over the node's workers, on all of them; and the tail: scalars and slots."""
        parts = tuple(self.workers.stack(part) for part in zip(*parts_w, strict=True))
        return self._run_add(parts, self.workers.from_host(list(np.asarray(slots_w, np.float32))))

    def apply(self, core: Tree, totals: Leaves, tail: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
        """Move on by these sums, of this node or of all; their scalars, and the tail with what came of it."""
        return self._run_apply(core, [self.put(x) for x in totals], tail)

    def snapshot(self, core: Tree) -> Tree:
        """The parameters as they are now, in buffers that stay."""
        return self._run_copy(core[0])

    def blend(self, core: Tree, mean: Leaves, sent: Tree, terms: BlendWeights) -> Tree:
        mean = [self.put(x) for x in mean]
        on_all = tuple(self.put(np.asarray(t, self.layout.dtype)) for t in terms)
        return (self._run_blend(core[0], mean, sent, on_all), *core[1:])

    def sent_shapes(self, core: Tree, short: bool) -> list[tuple[str, Leaves]]:
        """The kinds of exchange that this node will take part in, and what it sends in each."""
        params, leaves = jax.tree.leaves(core[0]), jax.tree.leaves(core)
        kinds = [("total", self._totals), ("mean", params), *([("short", params)] if short else [])]
        rest = [[leaves[k] for k in averaged(core, with_optimizer)] for with_optimizer in (False, True)]
        return kinds + [("mean", sent) for sent in rest if sent]

    def put_leaves(self, core: Tree, places: Sequence[int], values: Leaves) -> Tree:
        """The core with these arrays in the place of those leaves."""
        leaves, tree = jax.tree.flatten(core)
        for place, value in zip(places, values, strict=True):
            leaves[place] = self.put(value)
        return jax.tree.unflatten(tree, leaves)

    def put(self, x: Any) -> jax.Array:
        """On all workers of this node."""
        if isinstance(x, jax.Array) and x.sharding == self.workers.replicated:
            return x
        return jax.device_put(x, self.workers.replicated)

    def lead(self, tree: Tree) -> Tree:
        """The pieces on the node's first worker."""
        return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def averaged(core: Tree, with_optimizer: bool) -> list[int]:
    """Which leaves of the core go along with the parameters."""
    places, at = [], 0
    for part, tree in enumerate(core):
        for leaf in jax.tree.leaves(tree):
            number = jnp.issubdtype(leaf.dtype, jnp.signedinteger)
            real = jnp.issubdtype(leaf.dtype, jnp.floating)
            if part > 0 and (number or (real and (part != 2 or with_optimizer))):
                places.append(at)
            at += 1
    return places
