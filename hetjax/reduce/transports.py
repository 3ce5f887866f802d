"""The transports of the reduce phase: one sum over all workers per step, then the update.

mesh   The workers form one mesh: a `shard_map` program sums, and every worker applies the same update to its copy.
host   They do not. Workers of several kinds in one process meet on one of their devices: each worker's parts are
copied there, added in worker order and applied; parameters are copied back. Between processes, each with a
JAX backend of its own, sums travel by way of the hosts (`hetjax.reduce.host`, `hetjax.reduce.sharded`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.sharding import SingleDeviceSharding

from hetjax.devices.compile import compile_for, compile_over, expected
from hetjax.devices.targets import target_of
from hetjax.devices.workers import AXIS, Workers, shapes_on
from hetjax.reduce.base import OnDemand, Replicas
from hetjax.reduce.cut import HostCut, with_masters
from hetjax.reduce.delayed import Delayed
from hetjax.reduce.host import HostReplicated
from hetjax.reduce.layout import HOST_SLOTS, SLOTS, Layout, Parts, StepReport, level_of_all, with_bad_update
from hetjax.reduce.placing import agreed_granularity, meeting_place, room_for_state, update_device
from hetjax.reduce.sharded import HostSharded, ShardedRule
from hetjax.reduce.slices import shares
from hetjax.reduce.update import Update, UpdateRule, unchanged
from hetjax.reduce.wire import WIRES
from hetjax.sampling.order import PlannedStep
from hetjax.state import State

Tree = Any

# Bytes that a worker may send in one all-to-all. Their transfer time, 4 ms over 1 Gbit/s Ethernet, must stay below the
# rounds saved: four workers under CPU quotas still gained at four times this size and lost at ten times.
_AT_ONCE = 2**19


def sum_parts(parts: Parts, workers: Workers) -> Parts:
    """Sum parts of one dtype over all workers; called inside a `shard_map` program.

    Within a process and on accelerators this is `psum`. Between CPU processes, `psum` is gloo's ring: 2 (W - 1)
    sequential messages, each of which waits until every process is scheduled. Small vectors are therefore exchanged in
    a single `all_to_all`, and every worker adds them in worker order: one round instead of six for four processes.
    Under quotas of 0.8, 0.4, 0.2 and 0.2 cores, with 20 thousand values, the sum was ready 7 ms after the last arrival
    instead of 17, for 0.9 ms of CPU time instead of 2.3.
    """
    sizes = [part.size for part in parts]
    if not at_once(sum(part.nbytes for part in parts), workers):
        return jax.lax.psum(parts, AXIS)
    own = jnp.concatenate(parts)
    sent_WxN = jnp.broadcast_to(own, (len(workers), len(own)))
    came_WxN = jax.lax.all_to_all(sent_WxN, AXIS, split_axis=0, concat_axis=0, tiled=True)
    summed = functools.reduce(jnp.add, [came_WxN[i] for i in range(len(workers))])  # in worker order
    return tuple(jnp.split(summed, np.cumsum(sizes)[:-1]))


def at_once(nbytes: int, workers: Workers) -> bool:
    """Whether a vector of `nbytes` is summed by one all-to-all instead of `psum`."""
    on_cpu = all(worker.platform == "cpu" for worker in workers.members)
    return workers.spanning is not None and on_cpu and nbytes * (len(workers) - 1) <= _AT_ONCE


@dataclass(frozen=True)
class ReduceOptions:
    """How sums travel, and where updates are computed.

    Attributes:
        transport: 'auto', 'mesh' or 'host'.
        update: 'auto', 'sharded' or 'replicated'.
        update_on: where a process updates its slice: 'auto', 'device' or 'host'.
        wire: numbers between processes: 'float32', 'bfloat16', 'int8' or 'auto'.
        delay: steps by which updates are late, 0 or 1.
        rate_W: expected relative speed of each worker. Default: all alike.
    """

    transport: str = "auto"
    update: str = "auto"
    update_on: str = "auto"
    wire: str = "float32"
    delay: int = 0
    rate_W: np.ndarray | None = None


def make_reduce(
    options: ReduceOptions, workers: Workers, layout: Layout, rule: UpdateRule | None, core: Any, more: Any = None
) -> tuple[Any, Any]:
    """Build a reduce and copy `core` onto its devices.

    Args:
        options: transport and place of the update.
        workers: All workers.
        layout: The layout of their sums.
        rule: How gradients become new parameters; None in evaluation, where the sums are the result.
        core: The initial arrays; the caller's buffers are not donated.
        more: `State.more` of the state to start from.

    Returns:
        The reduce and its core.

    Raises:
        ValueError: The options do not go together, or not with these workers.
    """
    check_options(options, workers)
    cuts = workers.by_host and rule is not None and options.update != "replicated" and options.wire != "float32"
    if not cuts and isinstance(more, dict):
        core = with_masters(core, more.get("left_over"))
    update = unchanged if rule is None else rule.update()
    if workers.by_host:
        return _between_hosts(options, workers, layout, rule, update, core, more)
    if options.transport == "host" or len(workers.kinds) > 1:
        place = meeting_place(workers, layout) if len(workers.own_kinds) > 1 else workers.own[0]
        there, here = target_of(place) is None, SingleDeviceSharding(place)
        placed = _private_copy(jax.device_put(core, here) if there else shapes_on(here, core))
        return HubReduce(workers, layout, update, placed, place), placed
    placed = _private_copy(workers.replicate(core))
    return MeshReduce(workers, layout, update, placed), placed


def check_options(options: ReduceOptions, workers: Workers) -> None:
    """Refuse options that do not go together, or not with these workers."""
    for name, value, known in (
        ("transport", options.transport, ("auto", "mesh", "host")),
        ("update", options.update, ("auto", "sharded", "replicated")),
        ("update_on", options.update_on, ("auto", "device", "host")),
        ("wire", options.wire, ("auto", *WIRES)),
    ):
        if value not in known:
            raise ValueError(f"Unknown {name} {value!r}: use {', '.join(map(repr, known[:-1]))} or {known[-1]!r}.")
    if options.delay not in (0, 1):
        raise ValueError(
            f"delay must be 0 (default) or 1, got {options.delay!r}: updates are late by one step at most."
        )
    given: dict[str, str | int] = {"wire": options.wire, "delay": options.delay}
    for name, value in given.items():  # type: ignore[assignment]
        if value in ("float32", "auto", 0):
            continue
        if not workers.by_host:
            raise ValueError(
                f"{name}={value!r} is about the exchange between processes by transport 'host', of which there is "
                "none here. Leave it out, or start several processes with hetjax.fleet.initialize(transport='host') or "
                "`python -m hetjax launch --transport host`."
            )
        if options.update == "replicated":
            raise ValueError(
                f"{name}={value!r} needs the sharded update, in which one owner decides the bits of a parameter for "
                "all. Leave out update='replicated'."
            )
    mesh_is_possible = len(workers.kinds) == 1 and not workers.by_host
    if options.transport == "mesh" and not mesh_is_possible:
        if len(workers.kinds) > 1:
            raise ValueError(
                f"The transport 'mesh' needs devices of one kind, but the workers are {', '.join(workers.kinds)}: XLA "
                "cannot compile one program for several kinds. Use transport 'host' (or 'auto')."
            )
        raise ValueError(
            "The processes were joined by transport 'host', each with a JAX backend of its own. For 'mesh' start them "
            "with it: hetjax.fleet.initialize(transport='mesh'), or `python -m hetjax launch --transport mesh`."
        )
    if options.transport == "host" and workers.spanning is not None:
        raise ValueError(
            "The processes were joined by transport 'mesh': one JAX backend spans them. For 'host' start them with it: "
            "hetjax.fleet.initialize(transport='host'), or `python -m hetjax launch --transport host`."
        )
    if options.update == "sharded" and not workers.by_host:
        raise ValueError(
            "update='sharded' divides the update between processes joined by transport 'host', of which there are none "
            "here. Leave it out, or start several processes with hetjax.fleet.initialize(transport='host') or "
            "`python -m hetjax launch --transport host`."
        )
    if options.update_on != "auto" and (not workers.by_host or options.update == "replicated"):
        raise ValueError(
            f"update_on={options.update_on!r} is about the slices of the sharded update, between processes joined by "
            "transport 'host', and there are none here. Leave it out."
        )


def _between_hosts(
    options: ReduceOptions, workers: Workers, layout: Layout, rule: UpdateRule | None, update: Update, core: Any,
    more: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """The reduce of processes with backends of their own.

    'auto' is the sharded update for workers of one kind, too: CPUs of one name differ in their instruction sets, so
    replicated updates round unlike and replicas drift apart; and the update costs slow hosts less in slices.
    """
    rate_W = np.ones(len(workers)) if options.rate_W is None else options.rate_W
    rate_P = np.bincount(workers.process_W, rate_W)
    if rule is None or options.update == "replicated":  # wire 'auto' is float32 then
        placed = _private_copy(jax.device_put(core, SingleDeviceSharding(workers.own[0])))
        replicated = HostReplicated(workers, layout, update, placed, shares(rate_P))
        if rule is None or not workers.elastic:  # otherwise when the members have met
            replicated.exchange.share_memory()
        return replicated, placed
    rule_of_slices = ShardedRule(
        rule.optimizer, rule.advance, rule.ema_decay, rule.clip_norm, agreed_granularity(rule.optimizer, core[0])
    )
    device = update_device(options, workers)
    given = workers, layout, rule_of_slices, core, rate_P, room_for_state(workers, core, device), device
    if options.wire == "float32":
        reduce = HostSharded(*given)
        if not workers.elastic:
            reduce.exchange.share_memory()
    else:
        reduce = HostCut(options.wire, *given, left_over=more.get("left_over") if isinstance(more, dict) else None)
    if options.delay:
        delayed = Delayed(reduce)
        return delayed, delayed.place(core, more)
    return reduce, reduce.place(core)


def apply_where_finite(layout: Layout, update: Update, core: Any, total: Parts, workers: int) -> tuple[Any, jax.Array]:
    """Apply the update if all sums are finite and have weight; decided on the device, identically on all workers."""
    tail, sums = layout.tail(total), layout.unpack(total)
    core, bad = update(core, sums, sums.weight, level_of_all(tail, workers))
    return core, with_bad_update(tail, workers, bad)


def _private_copy(placed: Tree) -> Tree:
    """Copy into new buffers: every step donates them, and the caller's must stay alive. Targets hold only shapes."""
    first = jax.tree.leaves(placed)[0]
    devices = sorted(first.sharding.device_set, key=lambda device: device.id)
    with expected():
        copy = compile_over(partial(jax.tree.map, jnp.copy), (_shapes(placed),), devices, name="copy of the state")
    return placed if isinstance(first, jax.ShapeDtypeStruct) else copy(placed)


class MeshReduce:
    """All-reduce over one mesh; every worker updates its own copy."""

    name = "mesh"

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Any):
        self.workers, self.layout, self.update = workers, layout, update
        self._core = _shapes(core)
        self._run = self._compile(HOST_SLOTS)
        self._run_weighted: Any = None  # compiled when a plan has weights, as few published controllers do
        # Made when a worker has no samples for the first time.
        self._zeros_w = OnDemand(len(workers.own), lambda k: zero_parts(layout, [workers.own[k]])[0])

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
        host = wide(slots, np.float32, self.workers.replicated)
        with expected():
            return compile_over(
                program, (self._core, parts, host), self.workers.meshed, self.update.donate, "reduce and update"
            )

    def __call__(
        self, core: Any, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[Any, jax.Array]:
        filled_w = [parts or self._zeros_w[k] for k, parts in enumerate(parts_w)]
        parts = tuple(self.workers.stack(part) for part in zip(*filled_w, strict=True))
        run, own = self._run, np.asarray(slots_w, np.float32)
        if step.plan.weights_W is not None:
            if self._run_weighted is None:
                self._run_weighted = self._compile(HOST_SLOTS + 1)
            weight_w = step.plan.weights_W[list(self.workers.local)]
            run, own = self._run_weighted, np.column_stack([own, weight_w.astype(np.float32)])
        # Each process fills in only the rows that its own workers read. A host array, because building a sharded one
        # takes three calls while all other workers wait.
        slots_WxH = np.zeros((len(self.workers), own.shape[1]), np.float32)
        slots_WxH[list(self.workers.local)] = own
        return run(core, parts, slots_WxH)

    def read(self, tail: jax.Array) -> StepReport:
        return StepReport.read(self.layout, np.asarray(tail.addressable_data(0)), len(self.workers))

    def replicas(self, core: Any, tail: jax.Array | None) -> Replicas:
        leaves_w = self.workers.copies(jax.tree.leaves(core[:2]))
        return Replicas(leaves_w, self.workers.pieces(_marker(core, tail)), lambda: core[:2])

    def state(self, core: Any, step: int, cursor: int) -> State:
        return State.of(core, step, cursor)


class HubReduce:
    """Sum and update on one device, for workers of several kinds in one process."""

    name = "host"
    may_sit_out = True

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Any, lead: jax.Device):
        self.workers, self.layout, self.update, self.lead = workers, layout, update, lead
        self._start, self._add, self._finish = self._compiled(_shapes(core))
        self._zeros = OnDemand(1, lambda _: zero_parts(layout, [lead])[0])  # targets hold no arrays

    def _one(self, parts: Parts, slots: jax.Array, weight: jax.Array, worker: jax.Array) -> Parts:
        own = self.layout.weighted(tuple(part[0] for part in parts), weight)
        return self.layout.outgoing(own, slots, worker, len(self.workers))

    def _added(self, total: Parts, *one: Any) -> Parts:
        return jax.tree.map(jnp.add, total, self._one(*one))

    def _applied(self, core: Any, total: Parts, slots_WxH: jax.Array) -> Any:
        """Apply the sums; `slots_WxH`: those of the workers that are not in them."""
        *large, rest = total
        table = jnp.zeros((len(self.workers), len(SLOTS)), rest.dtype).at[:, :HOST_SLOTS].set(slots_WxH)
        total = *large, rest.at[len(rest) - table.size :].add(table.ravel())
        return apply_where_finite(self.layout, self.update, core, total, len(self.workers))

    def _compiled(self, core: Any) -> tuple[Any, Any, Any]:
        """One program adds a worker, whoever it is: idle ones cost nothing, and no set of workers is compiled."""
        here, count = SingleDeviceSharding(self.lead), len(self.workers)
        spec = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype, sharding=here)
        parts = tuple(spec(self.layout.dtype, 1, n) for n in self.layout.sizes)
        one = parts, spec(np.float32, HOST_SLOTS), spec(np.float32), spec(np.int32)
        *large, rest = self.layout.sizes
        total = tuple(spec(self.layout.dtype, n) for n in (*large, rest + count * len(SLOTS)))
        make = lambda run, given, donate, name: compile_for(run, given, [self.lead], donate, name)[0]
        with expected():
            return (
                make(self._one, one, (), "sums of a worker"),
                make(self._added, (total, *one), (0,), "sum"),
                make(self._applied, (core, total, spec(np.float32, count, HOST_SLOTS)), self.update.donate, "update"),
            )

    def __call__(
        self, core: Any, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[Any, jax.Array]:
        weight_W = np.ones(len(parts_w)) if step.plan.weights_W is None else step.plan.weights_W
        slots_WxH = np.asarray(slots_w, np.float32)
        active = [i for i, parts in enumerate(parts_w) if parts] or [0]  # in worker order
        here = [jax.device_put(parts_w[i] or self._zeros[0], self.lead) for i in active]
        total: Parts | None = None
        for i, parts in zip(active, here, strict=True):
            one = parts, slots_WxH[i], np.float32(weight_W[i]), np.int32(i)
            total = self._start(*one) if total is None else self._add(total, *one)
        idle_W = ~np.isin(np.arange(len(parts_w)), active)  # slots of the others are in the sums
        return self._finish(core, total, np.where(idle_W[:, None], slots_WxH, np.float32(0)))

    def read(self, tail: jax.Array) -> StepReport:
        return StepReport.read(self.layout, np.asarray(tail), len(self.workers))

    def replicas(self, core: Any, tail: jax.Array | None) -> Replicas:
        leaves, own = jax.tree.leaves(core[:2]), self.workers.own
        placed = OnDemand(len(own), lambda k: jax.device_put(leaves, own[k]))
        on_mesh = lambda: jax.device_put(core[:2], self.workers.replicated)
        return Replicas(placed, OnDemand(len(own), lambda k: placed[k][-1]), on_mesh)

    def state(self, core: Any, step: int, cursor: int) -> State:
        return State.of(core, step, cursor)


def _shapes(core: Any) -> Any:
    """Shapes, dtypes and shardings."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), core)


def _marker(core: Any, tail: jax.Array | None) -> jax.Array:
    """A small array that is ready when the core is."""
    return jax.tree.leaves(core)[0] if tail is None else tail


def zero_parts(layout: Layout, devices: Sequence[jax.Device]) -> list[Parts]:
    """The sums of a worker without samples, on each device; they are never donated."""
    zeros = tuple(np.zeros((1, size), layout.dtype) for size in layout.sizes)
    return [jax.device_put(zeros, device) for device in devices]
