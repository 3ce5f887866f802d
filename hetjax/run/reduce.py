"""The reduce phase: ONE sum of the flat vector over all workers per step, then the update.

Two transports behind one interface, chosen from the kinds of devices:

    psum  the workers form one mesh: a `shard_map` sums and every worker applies the same update to its own copy.
    hub   they cannot (unlike GPUs in one process, CPU + GPU): each worker's vector is copied to worker 0's device,
          added in worker order, the update is applied there and the parameters are copied back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from hetjax.plan.sampler import Step
from hetjax.run.clocks import Lap
from hetjax.run.compile_once import compile_for, compile_over
from hetjax.run.compiles import expected
from hetjax.run.layout import HOST_SLOTS, Layout, Parts, Report, level_of_all, with_bad_update
from hetjax.run.sum_parts import sum_parts
from hetjax.run.update import State, Update
from hetjax.run.workers import AXIS, Workers

Tree = Any


def own_slots(seconds: float | None, rows: int, checksum: int, stop: bool, save: bool = False) -> list[float]:
    """What the host says of one worker: it travels with the worker's sums."""
    return [-1.0 if seconds is None else round(seconds * 1e6), rows, checksum, stop, save]


class Reduce(Protocol):
    """Holds what the devices hold and moves it on by one step."""

    name: str

    def step(
        self, laps: Sequence[Lap], slots: Sequence[list[float]], at: Step, weights: Sequence[float] | None = None
    ) -> None:
        """Sum, and apply. `weights`: how often each local worker's gradients count; None: once, as is unbiased."""
        ...

    def state(self, step: int, cursor: int) -> State:
        """What the devices hold now, after so many steps and samples."""
        ...

    def report(self) -> Report: ...

    def per_worker(self) -> list[list[jax.Array]]: ...

    def on_mesh(self) -> Tree: ...

    def ready(self) -> list[jax.Array]: ...


def make_reduce(transport: str, workers: Workers, layout: Layout, update: Update, core: Any) -> Psum | Hub:
    """transport: 'psum', 'hub', or 'auto' (hub only where the workers are of several kinds)."""
    if transport == "auto":
        transport = "psum" if len(workers.kinds) == 1 else "hub"
    if transport == "psum":
        if len(workers.kinds) > 1:
            raise ValueError(
                f"The psum transport needs devices of one kind, but the workers are {', '.join(workers.kinds)}: XLA "
                "runs no single program over unlike devices. Use transport='hub' (or 'auto')."
            )
        return Psum(workers, layout, update, core)
    if transport == "hub":
        if workers.several_processes:
            raise ValueError("The hub transport works within one process. With several processes use transport='psum'.")
        return Hub(workers, layout, update, core)
    raise ValueError(f"Unknown transport {transport!r}: use 'auto', 'psum' or 'hub'.")


def apply_where_finite(layout: Layout, update: Update, core: Any, total: Parts, workers: int) -> tuple[Any, jax.Array]:
    """Apply the step if all sums are finite and there is any weight; decided on the device, alike on all workers."""
    tail, sums = layout.tail(total), layout.unpack(total)
    core, bad = update(core, sums, sums.weight, level_of_all(tail, workers))
    return core, with_bad_update(tail, workers, bad)


def _private_copy(placed: Tree) -> Tree:
    """Fresh buffers: they are donated from step to step, and the caller's must stay alive."""
    with expected():
        return jax.jit(partial(jax.tree.map, jnp.copy))(placed)


class Psum:
    name = "psum"

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Any):
        self.workers, self.layout, self.update = workers, layout, update
        self.core = _private_copy(workers.replicate(core))
        self._tail: jax.Array | None = None
        self._run = self._compile(HOST_SLOTS)
        self._run_weighted: Any = None  # only a few published laws need it: compiled when one does
        self._views = workers.copies(jax.tree.leaves(self.core[:2]))

    def _on_worker(self, core: Any, parts_1: Parts, slots_WxH: jax.Array) -> tuple[Any, jax.Array]:
        parts, count = tuple(part[0] for part in parts_1), len(self.workers)
        slots = slots_WxH[jax.lax.axis_index(AXIS)]
        if len(slots) > HOST_SLOTS:
            parts = self.layout.weighted(parts, slots[HOST_SLOTS])
        own = self.layout.outgoing(parts, slots[:HOST_SLOTS], jax.lax.axis_index(AXIS), count)
        return apply_where_finite(self.layout, self.update, core, sum_parts(own, self.workers), count)

    def _compile(self, slots: int) -> Any:
        program = jax.shard_map(
            self._on_worker,
            mesh=self.workers.mesh,
            in_specs=(P(), P(AXIS), P()),
            out_specs=(P(), P()),
            check_vma=False,
        )
        wide = lambda size, dtype, place: jax.ShapeDtypeStruct((len(self.workers), size), dtype, sharding=place)
        parts = tuple(wide(size, self.layout.dtype, self.workers.sharded) for size in self.layout.sizes)
        said = wide(slots, np.float32, self.workers.replicated)
        with expected():
            return compile_over(program, (self.core, parts, said), self.workers.devices, donate=self.update.donate)

    def step(
        self, laps: Sequence[Lap], slots: Sequence[list[float]], at: Step, weights: Sequence[float] | None = None
    ) -> None:
        parts = tuple(self.workers.stack(part) for part in zip(*(lap.parts for lap in laps), strict=True))
        run, own = self._run, np.asarray(slots, np.float32)
        if weights is not None:
            if self._run_weighted is None:
                self._run_weighted = self._compile(HOST_SLOTS + 1)
            run, own = self._run_weighted, np.column_stack([own, np.asarray(weights, np.float32)])
        # Every process fills in the rows of its own workers, which are the only ones they read: as a host array, for a
        # sharded one costs three calls while all others wait.
        said = np.zeros((len(self.workers), own.shape[1]), np.float32)
        said[list(self.workers.local)] = own
        self.core, self._tail = run(self.core, parts, said)
        self._views = self.workers.copies(jax.tree.leaves(self.core[:2]))  # while the devices are at it

    def state(self, step: int, cursor: int) -> State:
        return State.of(self.core, step, cursor)

    def report(self) -> Report:
        assert self._tail is not None
        return Report.read(self.layout, np.asarray(self._tail.addressable_data(0)), len(self.workers))

    def per_worker(self) -> list[list[jax.Array]]:
        return self._views

    def on_mesh(self) -> Tree:
        return self.core[:2]

    def ready(self) -> list[jax.Array]:
        return self.workers.pieces(jax.tree.leaves(self.core)[0] if self._tail is None else self._tail)


class Hub:
    name = "hub"

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Any):
        self.workers, self.layout, self.update = workers, layout, update
        self.lead = workers.devices[0]
        self.core = _private_copy(jax.device_put(core, SingleDeviceSharding(self.lead)))
        self._tail: jax.Array | None = None
        self._run = self._compile()
        self._spread()

    def _on_lead(self, core: Any, parts_W: list[Parts], slots_WxH: jax.Array, weight_W: jax.Array) -> Any:
        sent = []
        for i, parts in enumerate(parts_W):
            own = self.layout.weighted(tuple(part[0] for part in parts), weight_W[i])
            sent.append(self.layout.outgoing(own, slots_WxH[i], i, len(parts_W)))
        total = functools.reduce(partial(jax.tree.map, jnp.add), sent)  # in worker order
        return apply_where_finite(self.layout, self.update, core, total, len(parts_W))

    def _compile(self) -> Any:
        here, count = SingleDeviceSharding(self.lead), len(self.workers)
        shape = lambda *size: jax.ShapeDtypeStruct(size, np.float32, sharding=here)
        parts = tuple(jax.ShapeDtypeStruct((1, n), self.layout.dtype, sharding=here) for n in self.layout.sizes)
        arguments = self.core, [parts] * count, shape(count, HOST_SLOTS), shape(count)
        with expected():
            return compile_for(self._on_lead, arguments, [self.lead], donate=self.update.donate)[0]

    def step(
        self, laps: Sequence[Lap], slots: Sequence[list[float]], at: Step, weights: Sequence[float] | None = None
    ) -> None:
        parts_W = [jax.device_put(lap.parts, self.lead) for lap in laps]
        weight_W = np.ones(len(laps), np.float32) if weights is None else np.asarray(weights, np.float32)
        self.core, self._tail = self._run(self.core, parts_W, np.asarray(slots, np.float32), weight_W)
        self._spread()

    def _spread(self) -> None:
        leaves = jax.tree.leaves(self.core[:2])
        self._views = [jax.device_put(leaves, device) for device in self.workers.devices]

    def state(self, step: int, cursor: int) -> State:
        return State.of(self.core, step, cursor)

    def report(self) -> Report:
        assert self._tail is not None
        return Report.read(self.layout, np.asarray(self._tail), len(self.workers))

    def per_worker(self) -> list[list[jax.Array]]:
        return self._views

    def on_mesh(self) -> Tree:
        return jax.device_put(self.core[:2], self.workers.replicated)

    def ready(self) -> list[jax.Array]:
        return [view[-1] for view in self._views]
