"""The reduce between processes that each have their own JAX backend: sums travel by way of the hosts.

Every process receives the totals and applies the same update; `hetjax.reduce.sharded` updates each parameter once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from hetjax import processes, profiling
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import Workers
from hetjax.reduce.base import OnDemand, Replicas
from hetjax.reduce.exchange import SumExchange, as_bytes, chunks, level_of, sum_of_squares
from hetjax.reduce.finite import NONFINITE
from hetjax.reduce.layout import HOST_SLOTS, MANY, SLOTS, Layout, Parts, StepReport
from hetjax.reduce.sliced_update import data_of, value_like
from hetjax.reduce.slices import MEMBERS, Piece, assign, cut, seconds, shares
from hetjax.reduce.update import Update
from hetjax.sampling.order import PlannedStep
from hetjax.state import State

Tree = Any

LEVEL, BAD = SLOTS.index("nonfinite_level"), SLOTS.index("bad_update")
_CHECKSUM, _LEFT = SLOTS.index("checksum"), SLOTS.index("left")


class HostSums:
    """What both reduces share: sums of the local workers, tails, and who takes part in a step.

    Args:
        workers: all workers.
        layout: the layout of their sums.
        pieces: how the vector of gradients is divided.
        share_P: share of each process in the pieces.
        holders: processes that update each piece, 1 or 2.
    """

    name = "host"
    wire = "float32"  # how numbers travel: see `hetjax.reduce.wire`
    all_take_part = False  # also processes without samples that own nothing
    limit_P: np.ndarray | None = None  # the most that each process may own

    def __init__(
        self, workers: Workers, layout: Layout, pieces: Sequence[Piece], share_P: np.ndarray, holders: int = 1
    ):
        self.workers, self.layout, self.me, self.pieces = workers, layout, workers.process, pieces
        self.everyone = sorted(set(workers.process_W.tolist()))
        small, last = layout.grad_sizes[-1], len(layout.sizes) - 1
        state = layout.sizes[-1] - small - layout.values
        self.state_piece = len(pieces) if state else None  # sums of the model state: a last piece
        runs = [piece.runs for piece in pieces] + ([((last, small, small + state),)] if state else [])
        link = processes.link()
        assert link is not None
        self.all_take_part = workers.elastic > 0
        self.holders = holders
        self.exchange = SumExchange(link.channel(), self.me, runs, layout.dtype)
        self.own(share_P)

    def own(self, share_P: np.ndarray) -> None:
        """Set the owners of the pieces; the sums of the model state go to the first of them."""
        owners = assign([piece.size for piece in self.pieces], share_P, self.limit_P)
        if owners is None:
            room = ", ".join(f"{limit:.0%}" for limit in (self.limit_P if self.limit_P is not None else ()))
            raise ValueError(
                f"The optimizer state does not fit: it can be divided into {len(self.pieces)} pieces only, and the "
                f"processes have room for {room} of it. Give them more memory, or use an optimizer with a smaller "
                "state or one that updates every parameter by itself, such as Adam."
            )
        owners = owners or [int(np.argmax(share_P))]
        self.exchange.seconds = seconds(owners[: len(self.pieces)], share_P) if self.holders > 1 else {}
        self.owners = sorted({*owners, *self.exchange.seconds.values()})
        self.exchange.owners = [
            *owners[: len(self.pieces)],
            *([owners[0]] if self.state_piece is not None else []),
        ]

    def follow(self, workers: Workers, share_P: np.ndarray) -> None:
        """Go on with the processes of another membership; all open a new channel, as they have settled."""
        self.workers, self.me = workers, workers.process
        self.everyone = sorted(set(workers.process_W.tolist()))
        link = processes.link()
        assert link is not None
        self.exchange.follow(self.me, link.channel())
        self.own(share_P)

    # -- who takes part --

    def contributors(self, step: PlannedStep) -> list[int]:
        """Processes with samples in a step."""
        return sorted(set(self.workers.process_W[step.plan.counts_W > 0].tolist())) or [self.owners[0]]

    def involved(self, step: PlannedStep) -> list[int]:
        """Processes that exchange something in a step: those with samples, and owners."""
        return self.everyone if self.all_take_part else sorted({*self.contributors(step), *self.owners})

    # -- sums --

    def local_sums(self, parts_w: Sequence[Parts], step: PlannedStep) -> Sequence[np.ndarray] | None:
        """The sums over this process's workers, in their order, as host arrays; None without samples.

        Each part comes to the host when it is first read, so that the first ones travel on while the next ones come.
        """
        given = [(i, parts) for i, parts in zip(self.workers.local, parts_w, strict=True) if parts]
        for _, parts in given:
            for part in (parts[-1], *parts[:-1]):  # the tail is in the last part, and is sent first
                part.copy_to_host_async()

        def weighted(i: int, p: int, part: np.ndarray) -> np.ndarray:
            if step.plan.weights_W is None:
                return part
            weight, grads = np.asarray(step.plan.weights_W[i], self.layout.dtype), self.layout.grad_sizes[p]
            return np.concatenate([part[:grads] * weight, part[grads:]])

        def read(p: int) -> np.ndarray:
            with profiling.phase("copy"):
                part_w = [weighted(i, p, np.asarray(parts[p]).reshape(-1)) for i, parts in given]
                return functools.reduce(np.add, part_w)

        return OnDemand(len(self.layout.sizes), read) if given else None

    def own_tail(self, parts: Sequence[np.ndarray] | None, slots_w: Sequence[list[float]]) -> np.ndarray:
        """This process's tail: loss, weight, count and metrics, and the slots of its workers in a table of zeros."""
        values = self.layout.values
        tail = np.zeros(values + len(self.workers) * len(SLOTS), self.layout.dtype)
        if parts is not None:
            last = parts[len(parts) - 1]
            tail[:values] = last[len(last) - values :]
        table = tail[values:].reshape(-1, len(SLOTS))
        for i, slots in zip(self.workers.local, slots_w, strict=True):
            table[i, : len(slots)] = slots
        return tail

    def fill_in_absent(self, tail: np.ndarray, involved: Sequence[int], step: PlannedStep) -> None:
        """Fill in the slots of processes that sit the step out; the first of the others does so."""
        absent = [process for process in self.everyone if process not in involved]
        if self.me != involved[0] or not absent:
            return
        table, slots = tail[self.layout.values :].reshape(-1, len(SLOTS)), self.exchange.latest_slots(absent)
        for process in absent:
            rows = self.workers.process_W == process
            table[rows, _LEFT] = MANY
            if process in slots:
                table[rows, :HOST_SLOTS] = slots[process].reshape(-1, HOST_SLOTS)
            table[rows, _CHECKSUM] = step.plan.checksum

    def report_bad(
        self, tail: np.ndarray, level: float, bad: bool, parts_w: Sequence[Parts], involved: Sequence[int]
    ) -> np.ndarray:
        """Write into the tail whose sums were not finite, and whether the update was; and pass it on to the absent."""
        table = tail[self.layout.values :].reshape(-1, len(SLOTS))
        if level >= NONFINITE:
            sums_w = [[np.asarray(part).reshape(-1) for part in parts] for parts in parts_w]
            own_W = np.zeros(len(self.workers))
            own_W[list(self.workers.local)] = [level_of(sums, sum_of_squares(sums)) >= NONFINITE for sums in sums_w]
            found_W = self.exchange.vector_sum(own_W, involved, second=True)
            table[:, LEVEL] = found_W if found_W.any() else NONFINITE  # finite sums with an infinite total
        table[:, BAD] = bad
        if self.me == involved[0]:
            self.exchange.send_arrays([process for process in self.everyone if process not in involved], tail)
        self.exchange.end()
        return tail

    def read(self, tail: np.ndarray) -> StepReport:
        """The report of a step."""
        return StepReport.read(self.layout, tail, len(self.workers))


class HostReplicated(HostSums):
    """Every process receives the totals and updates its own copy, on one of its devices."""

    def __init__(self, workers: Workers, layout: Layout, update: Update, core: Any, share_P: np.ndarray):
        cut_P = np.ones(MEMBERS) if workers.elastic else share_P
        super().__init__(workers, layout, cut(layout.places, "elements", cut_P), share_P)
        self.update, self.lead = update, workers.own[0]
        self.before: Any = None  # where members may be lost: the core before the last step, until all have made it
        self.room = 1.0
        self._totals = [np.zeros(size, layout.dtype) for size in layout.sizes]
        self._apply = None if update.finish is None else self._compiled(core)

    def _compiled(self, core: Any) -> Any:
        here = SingleDeviceSharding(self.lead)
        spec = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)
        parts = tuple(jax.ShapeDtypeStruct((n,), self.layout.dtype, sharding=here) for n in self.layout.sizes)
        level = jax.ShapeDtypeStruct((), self.layout.dtype, sharding=here)

        def apply(core: Any, parts: Parts, level: jax.Array) -> tuple[Any, jax.Array]:
            sums = self.layout.unpack(parts)
            return self.update(core, sums, sums.weight, level)

        with expected():
            arguments = jax.tree.map(spec, core), parts, level
            donate = () if self.workers.elastic else self.update.donate
            return compile_for(apply, arguments, [self.lead], donate=donate)[0]

    def __call__(
        self, core: Any, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[Any, np.ndarray]:
        exchange, senders = self.exchange, self.contributors(step)
        parts = self.local_sums(parts_w, step) if self.me in senders else None
        tail = self.own_tail(parts, slots_w)
        others = [process for process in self.everyone if process != self.me]
        exchange.send(parts, tail, others)
        tail = exchange.tail(tail, self.everyone)
        self.before = None  # all have what this step starts from
        before = core
        level, mine = 0.0, exchange.own
        for k in mine:
            runs = exchange.total(k, parts, senders)
            with profiling.phase("check"):
                header = np.array([level_of(runs, sum_of_squares(runs))])
            exchange.publish(k, header, runs, others)
            self._store(k, runs)
            level = max(level, header[0])
        for k in range(len(exchange.owners)):
            if k not in mine:
                header, result = exchange.result(k)
                self._store(k, result)
                level = max(level, header[0])
        values = tail[: self.layout.values]
        self._totals[-1][len(self._totals[-1]) - len(values) :] = values
        level = max(level, level_of([values], sum_of_squares([values])))
        bad = False
        if self._apply is not None:
            with profiling.phase("update"):
                core, flag = self._apply(core, tuple(self._totals), np.asarray(level, self.layout.dtype))
                bad = bool(flag)
        tail = self.report_bad(tail, level, bad, parts_w, self.everyone)
        self.before = before if self.workers.elastic else None
        return core, tail

    def held(self, core: Any, made: int) -> None:
        """There are no pieces: every process has the whole state."""

    def settle(
        self, core: Any, workers: Workers, room_P: np.ndarray, pieces: Any, fresh: Sequence[int], have_K: Any
    ) -> Any:
        """Go on with the processes of another membership; see `HostSharded.settle`."""
        if workers.process not in fresh:
            self.before = None
        self.follow(workers, shares(np.ones(len(room_P))))
        self.exchange.share_memory()
        stale = [process for process in self.everyone if process not in fresh]
        leaves, tree = jax.tree.flatten(core)
        source = min(fresh)
        if stale and self.me == source:
            for process in stale:
                self.exchange.send_arrays([process], *chunks(as_bytes([np.asarray(data_of(x)) for x in leaves])))
        elif self.me in stale:
            like = [jax.eval_shape(data_of, x) for x in leaves]
            values = self.exchange.receive_arrays(source, like)
            made = [value_like(value, x) for value, x in zip(values, jax.eval_shape(lambda: leaves), strict=True)]
            core = jax.device_put(jax.tree.unflatten(tree, made), SingleDeviceSharding(self.lead))
        self.exchange.end()
        self.before = None
        return core

    def _store(self, k: int, runs: Sequence[Any]) -> None:
        with profiling.phase("store"):
            for (part, start, stop), run in zip(self.exchange.runs[k], runs, strict=True):
                self._totals[part][start:stop] = run

    def replicas(self, core: Any, tail: Any) -> Replicas:
        leaves = jax.tree.leaves(core[:2])
        place = lambda k: leaves if self.workers.own[k] == self.lead else jax.device_put(leaves, self.workers.own[k])
        return Replicas(
            placed := OnDemand(len(self.workers.own), place),
            OnDemand(len(self.workers.own), lambda k: placed[k][-1]),
            lambda: jax.device_put(core[:2], self.workers.replicated),
        )

    def state(self, core: Any, step: int, cursor: int) -> State:
        return State.of(core, step, cursor)
