"""The sharded update: the owner of a slice applies the optimizer to it and sends new parameters to all others.

An owner keeps the optimizer state of its slice only. Replicas have the same bits, although unlike devices round unlike,
and a slow process updates less. Nothing is applied before the results of all owners are there: one value that is not
finite leaves all of the old core intact.

A process without samples that owns nothing takes no part in a step. It hears the tail of the step, so it plans like the
others, and gets parameters when it is to compute again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import processes, profiling
from hetjax.devices import memory
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import Workers, device_kind
from hetjax.reduce.base import OnDemand, Replicas
from hetjax.reduce.exchange import FRAME, Runs, as_bytes, chunks, level_of, sum_of_squares
from hetjax.reduce.finite import NONFINITE
from hetjax.reduce.host import BAD, LEVEL, HostSums
from hetjax.reduce.layout import LEAVING, SLOTS, Layout, Parts, StepReport
from hetjax.reduce.sliced_update import OwnedPiece, PieceProgram, StateSlices, data_of, value_like
from hetjax.reduce.slices import MEMBERS, Granularity, Piece, assign, busy, cut, shares
from hetjax.reduce.trainable import trainable, with_trained
from hetjax.sampling.order import PlannedStep
from hetjax.state import Deferred, State, gathered

log = logging.getLogger("hetjax")
Tree = Any


@dataclass(frozen=True)
class HostCore:
    """What a process holds between steps under the sharded update."""

    vector: list[np.ndarray]  # all trainable parameters, in the order of the sums
    model_state: Tree
    owned: dict[int, OwnedPiece]  # of own pieces
    fresh: frozenset[int]  # processes that have these parameters


@dataclass(frozen=True)
class ShardedRule:
    """How slices are updated: see `hetjax.sync.base.UpdateRule`."""

    optimizer: Any
    advance: Callable[[Tree, Tree], Tree] | None
    ema_decay: float | None
    clip_norm: float | None = None
    granularity: Granularity = "elements"


class HostSharded(HostSums):
    """The owner of a piece updates it and sends the new parameters to all.

    A process on the bench (`Plan.benched_W`) owns nothing.

    Args:
        workers: all workers.
        layout: the layout of their sums.
        rule: optimizer and its granularity.
        core: the whole initial core, the same in all processes; it is copied.
        rate_P: relative speed of each process, which its share in the update follows.
        limit_P: the share of the optimizer state that each process has memory for.
        device: where this process updates its pieces.
    """

    may_sit_out = True
    limit_P: np.ndarray
    has_masters = False  # owners keep parameters of their own

    def __init__(
        self,
        workers: Workers,
        layout: Layout,
        rule: ShardedRule,
        core: Any,
        rate_P: np.ndarray,
        limit_P: np.ndarray,
        device: jax.Device,
    ):
        self.rule, self.device, self.limit_P, self.room = rule, device, limit_P, float(limit_P[workers.process])
        self.rate_P, self.share_P, self._since = rate_P, shares(rate_P, limit_P), 0
        self._used_P = np.ones(len(rate_P), bool)  # processes that are not on the bench, and do not leave
        self._leaving_P = np.zeros(len(rate_P), bool)
        params, model_state, *_ = core
        self.trained = jax.eval_shape(lambda: trainable(params))
        self.constants = with_trained(params, jax.tree.map(lambda x: np.zeros(0, x.dtype), self.trained))
        self.slices = StateSlices(rule.optimizer, self.trained, rule.granularity)
        link = processes.link()
        assert link is not None
        # All members of an elastic fleet have the same pieces, whenever they come.
        given = (np.ones(MEMBERS),) if workers.elastic else (self.share_P, limit_P)
        pieces = cut(layout.places, rule.granularity, *given)
        super().__init__(workers, layout, pieces, self.share_P, holders=getattr(link, "holders", 1))
        self.may_sit_out = not workers.elastic
        # Where members may be lost: what the step before started from, until all have made it; the pieces that were
        # updated in a step that has not ended; and those that this process may still have to give to another holder.
        self.before: HostCore | None = None
        self.updated: dict[int, OwnedPiece] = {}
        self.spare: dict[int, OwnedPiece] = {}
        self._given: Any = None  # the whole state that this process started from
        self._plain = range(len(self.pieces))  # pieces whose results have their runs
        self._buffers = [[_aligned(n, layout.dtype) for n in layout.grad_sizes] for _ in range(2)]
        self._programs: dict[Any, PieceProgram] = {}  # by the shape of a piece
        self._small = self._compile_small()
        for k in range(len(self.pieces)):  # of others' pieces, too: owners change without compiling
            self._program(k)
        self._placed_constants: dict[jax.Device, Any] = {}
        self.advance = None if rule.advance is None or model_state is None else self._compile_advance(model_state)

    def place(self, core: Any) -> HostCore:
        """The core of this process: parameters, and the state of its own pieces."""
        params, model_state, *_ = self._given = core
        vector = self._buffers[0]
        self._flatten(trainable(params), vector)
        model_state = jax.tree.map(np.asarray, model_state)
        placed = HostCore(vector, model_state, {}, frozenset(self.everyone))
        if self.workers.elastic:  # owners are known when the members have met
            self.before, self.updated, self.spare = None, {}, {}
            return placed
        owned = {k: self._cut_out(k) for k in self._own_pieces()}
        for k, mine in owned.items() if self.has_masters else ():
            mine.masters = [run.copy() for run in _runs(vector, self.pieces[k])]
        self._given = None
        return replace(placed, owned=owned)

    def _cut_out(self, k: int) -> OwnedPiece:
        """A piece of the state that this process started from."""
        *_, opt_state, ema = self._given
        piece, average = self.pieces[k], None
        if ema is not None:
            vector = [np.empty(size, self.layout.dtype) for size in self.layout.grad_sizes]
            self._flatten(trainable(ema), vector)
            average = _runs(vector, piece)
        with expected():
            return self._program(k).place(OwnedPiece(self.slices.cut(opt_state, piece.ranges), average))

    def like(self, core: HostCore, leaves: Sequence[np.ndarray]) -> HostCore:
        """A core with other parameters and model state, in the other buffer."""
        vector = self._buffers[core.vector is self._buffers[0]]
        count = len(jax.tree.leaves(self.trained))
        self._flatten(list(leaves[:count]), vector)
        state = jax.tree.unflatten(jax.tree.structure(core.model_state), [np.asarray(leaf) for leaf in leaves[count:]])
        return replace(core, vector=vector, model_state=state)

    def _program(self, k: int) -> PieceProgram:
        piece = self.pieces[k]
        lengths = lambda ranges: tuple(stop - start for _, start, stop in ranges)
        shape = tuple(leaf for leaf, *_ in piece.ranges), lengths(piece.ranges), lengths(piece.runs)
        if shape not in self._programs:
            self._programs[shape] = PieceProgram(piece, self.slices, self.layout, self.rule.ema_decay, self.device)
        return self._programs[shape]

    def _own_pieces(self) -> list[int]:
        return [k for k in self.exchange.own if k < len(self.pieces)]

    def _flatten(self, tree: Tree, vector: list[np.ndarray]) -> None:
        for leaf, (part, offset, size) in zip(jax.tree.leaves(tree), self.layout.places, strict=True):
            vector[part][offset : offset + size] = np.asarray(leaf, self.layout.dtype).reshape(-1)

    def _tree(self, vector: list[np.ndarray], copy: bool) -> Tree:
        """The trainable parameters in a vector, as host arrays."""
        leaves = []
        for like, (part, offset, size) in zip(jax.tree.leaves(self.trained), self.layout.places, strict=True):
            leaf = vector[part][offset : offset + size].reshape(like.shape).astype(like.dtype, copy=copy)
            leaves.append(leaf)
        return jax.tree.unflatten(jax.tree.structure(self.trained), leaves)

    # -- a step --

    def __call__(
        self, core: HostCore, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[HostCore, np.ndarray]:
        core = self._rebalanced(core, step)
        exchange, senders, involved = self.exchange, self.contributors(step), self.involved(step)
        if self.me not in involved:
            exchange.send_slots(np.asarray(slots_w, np.float64), involved[0])
            tail = exchange.receive_vector(involved[0])
            exchange.end()
            left_out = self._left_out(tail)
            self._end(step, applied=not left_out)
            return (core if left_out else replace(core, fresh=frozenset(involved))), tail
        parts = self.local_sums(parts_w, step) if self.me in senders else None
        tail = self.own_tail(parts, slots_w)
        self.fill_in_absent(tail, involved, step)
        if parts is None and self.me in senders:  # its last sum: see `HostCut`
            parts = [np.zeros(size, self.layout.dtype) for size in self.layout.sizes]
        frames_of = None if parts is None else partial(self._frames, parts, step)
        exchange.send(parts, tail, [process for process in involved if process != self.me], frames_of)
        add = partial(self._total, parts, step, senders, total=exchange.add_arrived)
        tail = exchange.tail(tail, involved, lambda: [message for k in exchange.own for message in add(k)])
        self.before, self.spare, self._given = None, {}, None  # all have what this step starts from
        values = tail[: self.layout.values]
        loss, weight = float(values[0]), float(values[1])
        level = level_of([values], sum_of_squares([values]))
        if level >= NONFINITE or not weight > 0:  # known to all before anything else is sent
            for k in exchange.own:
                exchange.drop(k, senders)
            self._end(step, applied=False)
            tail = self.report_bad(tail, level, False, parts_w, involved)
            return self._made(core, core), tail
        total = partial(self._total, parts, step, senders)
        totals = {k: total(k) for k in self._own_pieces()} if self.rule.clip_norm else {}
        scale = self._scale(totals, weight) if self.rule.clip_norm else 1.0
        new = self._buffers[core.vector is self._buffers[0]]
        owned, bad, model_state = dict(core.owned), False, core.model_state
        sent: Sequence[Any]
        for k in sorted(exchange.own, key=lambda k: exchange.owners[k] != self.me):  # others wait for the own ones
            runs = totals[k] if k in totals else total(k)
            with profiling.phase("check"):
                own_level = level_of(runs, sum_of_squares(runs))
            if k == self.state_piece:
                model_state, sent = self._advanced(core.model_state, runs)
                header = np.array([own_level, 0.0])
            else:
                with profiling.phase("update"):
                    params, owned[k], wrong = self._program(k)(
                        self._before_update(core, k), core.owned[k], runs, weight, loss, scale, own_level
                    )
                self.updated[k] = owned[k]
                if exchange.owners[k] != self.me:
                    continue
                header = np.array([own_level, wrong])
                sent = self._store_own(new, core, owned, k, params)
            exchange.publish(k, header, sent, involved, like_sums=k in self._plain)
            level, bad = max(level, header[0]), bad or bool(header[1])
        for k in range(len(exchange.owners)):
            if exchange.owners[k] == self.me:
                continue
            header, result = exchange.result(k, like_sums=k in self._plain)
            if k == self.state_piece:
                model_state = self._read_state(core.model_state, result)
            else:
                self._store_result(new, core, k, result)
            level, bad = max(level, header[0]), bad or bool(header[1])
        bad = bad and level < NONFINITE
        tail = self.report_bad(tail, level, bad, parts_w, involved)
        self._end(step, applied=level < NONFINITE and not bad)
        if level >= NONFINITE or bad:  # the old core is intact
            return self._made(core, core), tail
        return self._made(core, HostCore(new, model_state, owned, frozenset(involved))), tail

    def _made(self, before: HostCore, core: HostCore) -> HostCore:
        """The core after a step; where members may be lost, the one before it is kept until all have made the step."""
        self.updated = {}
        self.before = before if self.workers.elastic else None
        return core

    # -- the form in which pieces travel: as they are (`HostCut` overrides these) --

    def _frames(self, parts: Sequence[np.ndarray], step: PlannedStep, k: int) -> Sequence[Any]:
        """What this process sends to the owner of a piece."""
        return self.exchange.runs_of(parts, k)

    def _total(
        self, parts: Sequence[np.ndarray] | None, step: PlannedStep, senders: Sequence[int], k: int, total: Any = None
    ) -> Any:
        """The sums of an own piece; `total`: another method of the exchange, for the part of them that has arrived."""
        return (total or self.exchange.total)(k, parts, senders)

    def _before_update(self, core: HostCore, k: int) -> Runs:
        """The parameters that the update of an own piece starts from."""
        return _runs(core.vector, self.pieces[k])

    def _store_own(
        self, new: list[np.ndarray], core: HostCore, owned: dict[int, OwnedPiece], k: int, params: Runs
    ) -> Sequence[Any]:
        """Store the new parameters of an own piece; what the others receive."""
        _store(new, self.pieces[k], params)
        return params

    def _store_result(self, new: list[np.ndarray], core: HostCore, k: int, result: Sequence[Any]) -> None:
        """Store what the owner of a piece has sent."""
        _store(new, self.pieces[k], result)

    def _end(self, step: PlannedStep, applied: bool) -> None:
        """A step has ended, with or without an effect."""

    def _scale(self, totals: dict[int, Runs], weight: float) -> float:
        """The factor of clipping by the global norm, from the sums of squares of all owners."""
        own = sum(sum_of_squares(runs) for k, runs in totals.items() if self.exchange.owners[k] == self.me)
        norm = (
            float(self.exchange.vector_sum(np.array([own]), self.owners)[0]) ** 0.5 / weight
            if self.me in self.owners
            else 0.0
        )
        limit = self.rule.clip_norm
        assert limit is not None
        return limit / norm if norm > limit else 1.0  # NaN: not finite, found later

    def _left_out(self, tail: np.ndarray) -> bool:
        """Whether a step changed nothing, by its final tail."""
        table = tail[self.layout.values :].reshape(-1, len(SLOTS))
        return bool((table[:, LEVEL] >= NONFINITE).any() or table[:, BAD].any() or not tail[1] > 0)

    def prepare(self, core: HostCore, step: PlannedStep) -> HostCore:
        """Give the current parameters to processes that sat out and compute again in this step."""
        stale = [process for process in self.contributors(step) if process not in core.fresh]
        return self._refreshed(core, stale)

    def _refreshed(self, core: HostCore, stale: Sequence[int]) -> HostCore:
        if not stale:
            return core
        source = min(core.fresh)
        flat, tree = jax.tree.flatten(core.model_state)
        if self.me == source:
            for process in stale:
                self.exchange.send_arrays([process], *chunks(core.vector), *flat)
        elif self.me in stale:
            vector = self._buffers[core.vector is self._buffers[0]]
            frames = self.exchange.receive_frames(source)
            at = 0
            for part in vector:
                for start in range(0, len(part), FRAME):
                    part[start : start + FRAME] = np.frombuffer(frames[at], self.layout.dtype)
                    at += 1
            state = [np.frombuffer(f, x.dtype).reshape(x.shape) for f, x in zip(frames[at:], flat, strict=True)]
            core = replace(core, vector=vector, model_state=jax.tree.unflatten(tree, state))
        self.exchange.end()
        return replace(core, fresh=core.fresh | frozenset(stale))

    # -- model state --

    def _compile_advance(self, model_state: Tree) -> Any:
        sizes, advance = self.layout.sizes[-1], self.rule.advance
        assert advance is not None
        zeros = lambda n: jnp.zeros(n, self.layout.dtype)

        def run(model_state: Tree, sums: jax.Array) -> Tree:
            small = self.layout.grad_sizes[-1]
            rest = jnp.concatenate([zeros(small), sums, zeros(sizes - small - len(sums))])
            parts = (*(zeros(n) for n in self.layout.sizes[:-1]), rest)
            return advance(model_state, self.layout.unpack(parts).state_sums)

        return jax.jit(run)

    def _advanced(self, model_state: Tree, runs: Runs) -> tuple[Tree, list[np.ndarray]]:
        assert self.advance is not None
        with jax.default_device(self.device), expected():
            new = jax.tree.map(np.asarray, self.advance(model_state, runs[0]))
        return new, [np.ascontiguousarray(leaf) for leaf in jax.tree.leaves(new)]

    def _read_state(self, like: Tree, frames: Sequence[Any]) -> Tree:
        flat, tree = jax.tree.flatten(like)
        read = [np.frombuffer(run, x.dtype).reshape(x.shape) for run, x in zip(frames, flat, strict=True)]
        return jax.tree.unflatten(tree, read)

    # -- what workers and users read --

    def _compile_small(self) -> Any:
        """The leaves that share the last part: one program instead of a copy for each of them."""
        last = len(self.layout.sizes) - 1
        leaves = jax.tree.leaves(self.trained)
        small = [(k, offset, size) for k, (part, offset, size) in enumerate(self.layout.places) if part == last]
        self._small_leaves = [k for k, *_ in small]
        if not small:
            return {}

        def unpack(rest: jax.Array) -> list[jax.Array]:
            return [rest[at : at + n].reshape(leaves[k].shape).astype(leaves[k].dtype) for k, at, n in small]

        shape = (jax.ShapeDtypeStruct((self.layout.grad_sizes[-1],), self.layout.dtype),)
        programs: dict[jax.Device, Any] = {}
        with expected():
            for kind in self.workers.own_kinds:
                devices = [d for d in self.workers.own if device_kind(d) == kind]
                programs |= dict(zip(devices, compile_for(unpack, shape, devices), strict=True))
        return programs

    def replicas(self, core: HostCore, tail: Any) -> Replicas:
        """Parameters and model state on each worker's device, placed when the worker has something to compute."""

        def place(k: int) -> list[jax.Array]:
            with profiling.phase("place"):
                return self._on_device(core, self.workers.own[k])

        placed = OnDemand(len(self.workers.own), place)
        return Replicas(
            placed,
            OnDemand(len(self.workers.own), lambda k: placed[k][-1]),
            lambda: jax.device_put((self._params(core, copy=True), core.model_state), self.workers.replicated),
        )

    def _on_device(self, core: HostCore, device: jax.Device) -> list[jax.Array]:
        large = {
            k: core.vector[part].reshape(like.shape).astype(like.dtype, copy=False)
            for k, (like, (part, *_)) in enumerate(zip(jax.tree.leaves(self.trained), self.layout.places, strict=True))
            if k not in self._small_leaves
        }
        leaves: dict[int, Any] = dict(zip(large, jax.device_put(list(large.values()), device), strict=True))
        if self._small_leaves:
            leaves |= dict(zip(self._small_leaves, self._small[device](core.vector[-1]), strict=True))
        trained = jax.tree.unflatten(jax.tree.structure(self.trained), [leaves[k] for k in sorted(leaves)])
        if device not in self._placed_constants:
            self._placed_constants[device] = jax.device_put(self.constants, device)
        params = with_trained(self._placed_constants[device], trained)
        return jax.tree.leaves((params, jax.device_put(core.model_state, device)))

    def _params(self, core: HostCore, copy: bool) -> Tree:
        return with_trained(self.constants, self._tree(core.vector, copy))

    def view(self, core: HostCore, step: int, cursor: int) -> State:
        """The state without an exchange: what other processes hold is gathered where it is read, by all of them.

        Parameters are shown, not copied: they stay as they are until the next step has ended.
        """
        latest = [core]

        def refresh() -> HostCore:
            latest[0] = self._refreshed(latest[0], self._stale(latest[0]))
            return latest[0]

        whole = Deferred(lambda: self._gathered(refresh()))
        ema = None if self.rule.ema_decay is None else Deferred(lambda: self._average(refresh()))
        if self.me in core.fresh:
            return State(self._shown(core), core.model_state, whole, ema, step, cursor)
        params, model_state = (Deferred(partial(lambda i: self._current(latest[0])[i], i)) for i in range(2))
        return State(params, model_state, whole, ema, step, cursor)

    def _shown(self, core: HostCore) -> Tree:
        """The parameters as read-only views of the vector."""
        vector = [part.view() for part in core.vector]
        for part in vector:
            part.flags.writeable = False
        return with_trained(self.constants, self._tree(vector, copy=False))

    def _current(self, core: HostCore) -> tuple[Tree, Tree]:
        if self.me not in core.fresh:
            raise ValueError(
                f"Process {self.me} sits out, so it does not have the current parameters. Read them in all processes, "
                "with step.export(state)."
            )
        return self._params(core, copy=True), core.model_state

    def _stale(self, core: HostCore) -> list[int]:
        return [process for process in self.everyone if process not in core.fresh]

    def state(self, core: HostCore, step: int, cursor: int) -> State:
        """The whole state, in all processes; collective."""
        state = gathered(self.view(core, step, cursor))
        return replace(state, params=jax.tree.map(np.copy, state.params))

    def evaluated(self, core: HostCore, step: int, cursor: int) -> State:
        """The state without that of the optimizer, in all processes; collective."""
        core = self._refreshed(core, self._stale(core))
        ema = None if self.rule.ema_decay is None else self._average(core)
        return State(*self._current(core), None, ema, step, cursor)

    def _gathered(self, core: HostCore) -> Tree:
        """The whole state of the optimizer; collective."""
        ranges_K = [piece.ranges for piece in self.pieces]
        arrays_K = []
        for k, piece in enumerate(self.pieces):
            like = self.slices.state_like(piece.ranges)
            own = self.slices.own_arrays(core.owned[k].opt_state, piece.ranges) if k in core.owned else None
            arrays_K.append(self._shared(self.exchange.owners[k], own, self.slices.own_arrays_like(like, piece.ranges)))
        return self.slices.joined(arrays_K, ranges_K)

    def _average(self, core: HostCore) -> Tree:
        """The whole moving average; collective."""
        vector = [np.empty_like(part) for part in core.vector]
        for k, piece in enumerate(self.pieces):
            like = [jax.ShapeDtypeStruct((stop - start,), self.layout.dtype) for _, start, stop in piece.runs]
            own = [np.asarray(run) for run in core.owned[k].ema or []] if k in core.owned else None
            _store(vector, piece, self._shared(self.exchange.owners[k], own, like))
        return with_trained(self.constants, self._tree(vector, copy=True))

    def _shared(self, owner: int, own: list[np.ndarray] | None, like: Sequence[Any]) -> list[np.ndarray]:
        """Arrays of one process in all processes."""
        if own is not None:
            self.exchange.send_arrays(
                [process for process in self.everyone if process != self.me], *chunks(as_bytes(own))
            )
        found = own if own is not None else self.exchange.receive_arrays(owner, like)
        self.exchange.end()
        return found

    # -- other members --

    def held(self, core: HostCore, made: int) -> dict[int, Mapping[int, OwnedPiece]]:
        """The pieces of the optimizer state that this process has, by the number of steps they have been through."""
        if self._given is not None:
            return {made: _Lazy(range(len(self.pieces)), self._cut_out)}
        found: dict[int, Mapping[int, OwnedPiece]] = {made: {**self.spare, **core.owned}, made + 1: self.updated}
        if self.before is not None:
            found[made - 1] = dict(self.before.owned)
        return found

    def settle(
        self, core: HostCore, workers: Workers, room_P: np.ndarray, pieces: Mapping[int, OwnedPiece],
        fresh: Sequence[int], have_K: Sequence[Collection[int]],
    ) -> HostCore:  # fmt: skip
        """Go on with the processes of another membership; collective.

        Args:
            core: what this process has; of another step unless it is among the fresh ones.
            workers: the workers.
            room_P: see `limit_P`.
            pieces: the pieces that this process has, of the step that all go on from.
            fresh: processes that have the parameters of that step.
            have_K: processes that have each piece.
        """
        number = len(room_P)
        self.limit_P, self.rate_P, self._since = room_P, np.ones(number), 0
        self._used_P, self.share_P = np.ones(number, bool), shares(self.rate_P, room_P)
        self._leaving_P = np.zeros(number, bool)
        self.follow(workers, self.share_P)
        self.exchange.share_memory()
        if self.me not in fresh:
            self.before = None  # its buffer is taken
        core = self._refreshed(core := replace(core, fresh=frozenset(fresh)), self._stale(core))
        core = self.moved(core, pieces, have_K)
        if self.me not in fresh:
            self._given = None
        self.before, self.updated, self.spare = None, {}, {} if self._given is not None else dict(pieces)
        state = lambda ks: sum(memory.size((core.owned[k].opt_state, core.owned[k].ema)) for k in ks) / 2**20
        log.info(
            "This process is the second holder of %.1f MiB of optimizer state. The state before a step, kept until all "
            "have made it, takes %.1f MiB more.",
            state(k for k in core.owned if self.exchange.owners[k] != self.me),
            state(core.owned),
        )
        return core

    # -- other owners --

    def read(self, tail: np.ndarray) -> StepReport:
        """The report of a step. Its timings decide, in all processes alike, whether other owners are due."""
        report = super().read(tail)
        leaving_W = report.left_W == LEAVING
        self._leaving_P = np.bincount(self.workers.process_W, leaving_W, minlength=len(self.rate_P)) > 0
        timed_W = np.nan_to_num(report.times_W) > 0
        if timed_W.any():
            rate_W = np.where(timed_W, report.rows_W / np.where(timed_W, report.times_W, 1.0), 0.0)
            seen_P = np.bincount(self.workers.process_W, rate_W, minlength=len(self.rate_P))
            timed_P = seen_P > 0
            if not self._since:  # until now only relative speeds were known
                self.rate_P = self.rate_P * (seen_P[timed_P].sum() / self.rate_P[timed_P].sum())
            self.rate_P = np.where(timed_P, self.rate_P + _LEARNED * (seen_P - self.rate_P), self.rate_P)
        self._since += 1
        return report

    def _rebalanced(self, core: HostCore, step: PlannedStep) -> HostCore:
        """Give pieces to other owners where speeds have changed enough to pay for moving the optimizer state."""
        benched_W = step.plan.benched_W
        idle_W = np.zeros(len(self.workers), bool) if benched_W is None else benched_W
        used_P = np.bincount(self.workers.process_W, ~idle_W, minlength=len(self.rate_P)) > 0
        if (used_P & ~self._leaving_P).any():
            used_P &= ~self._leaving_P
        changed = not np.array_equal(used_P, self._used_P)
        self._used_P = used_P
        if not changed and (self._since < _SETTLED or self._since % _SETTLED or len(self.pieces) == 0):
            return core
        sizes, all_P = [piece.size for piece in self.pieces], np.round(self.rate_P, 3)
        for rate_P in (np.where(used_P, all_P, 0.0), all_P):  # of all, if the memory of the others is needed
            if self.limit_P[rate_P > 0].sum() >= 1:
                share_P = shares(rate_P, self.limit_P)
                if (owners := assign(sizes, share_P, self.limit_P)) is not None:
                    break
        else:
            return core
        if changed:
            self.share_P = share_P
            return self.hand_over(core, share_P)
        part_K = np.array(sizes, float) / sum(sizes)
        owned = lambda owners: np.bincount(owners, part_K, minlength=len(share_P))
        now = busy(owned(self.exchange.owners[: len(self.pieces)]), self.rate_P)
        if now < _WORTH * busy(owned(owners), self.rate_P):
            return core
        self.share_P = share_P
        return self.hand_over(core, share_P)

    def hand_over(self, core: HostCore, share_P: np.ndarray) -> HostCore:
        """Give pieces to other owners, with the state of their optimizer; collective."""
        have_K = [set(self.exchange.holders(k)) for k in range(len(self.pieces))]
        self.own(share_P)
        core = self._refreshed(core, [process for process in self.owners if process not in core.fresh])
        return self.moved(core, core.owned, have_K)

    def moved(self, core: HostCore, pieces: Mapping[int, OwnedPiece], have_K: Sequence[Collection[int]]) -> HostCore:
        """Give every holder of a piece the state of its optimizer; collective.

        Args:
            core: parameters and model state.
            pieces: those that this process has.
            have_K: the processes that have each piece; the first of them gives it to holders that do not.
        """
        owned = {k: pieces[k] for k in self._own_pieces() if k in pieces}
        for k, piece in enumerate(self.pieces):
            old, new = min(have_K[k]), [holder for holder in self.exchange.holders(k) if holder not in have_K[k]]
            if not new:
                continue
            if self.me == old:
                mine = pieces[k]
                leaves = map(data_of, jax.tree.leaves(mine.opt_state))
                arrays = [np.asarray(x) for x in (*leaves, *(mine.ema or []), *(mine.masters or []))]
                self.exchange.send_arrays(new, *chunks(as_bytes(arrays)))
            elif self.me in new:
                program = self._program(k)
                like, tree = jax.tree.flatten(program.state_like)
                runs = [jax.ShapeDtypeStruct((stop - start,), self.layout.dtype) for _, start, stop in piece.runs]
                kinds = [
                    *(jax.eval_shape(data_of, x) for x in like),
                    *(runs if self.rule.ema_decay is not None else []),
                    *(runs if self.has_masters else []),
                ]
                values = self.exchange.receive_arrays(old, kinds)
                state = [value_like(value, x) for value, x in zip(values, like, strict=False)]
                rest = values[len(like) :]
                masters = [rest.pop() for _ in runs][::-1] if self.has_masters else None
                owned[k] = program.place(OwnedPiece(jax.tree.unflatten(tree, state), rest or None))
                owned[k].masters = masters
            self.exchange.end()
        return replace(core, owned=owned)


class _Lazy(Mapping[int, OwnedPiece]):
    """Pieces that are made when they are read."""

    def __init__(self, keys: Sequence[int], make: Callable[[int], OwnedPiece]):
        self._keys, self._make = keys, make

    def __getitem__(self, k: int) -> OwnedPiece:
        return self._make(k)

    def __iter__(self) -> Iterator[int]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


_LEARNED = 0.2  # weight of a step in the average of speeds
_SETTLED = 16  # steps between looks at the owners
_WORTH = 1.2  # how much longer the exchange has to take than with other owners


def _runs(vector: Sequence[np.ndarray], piece: Piece) -> Runs:
    return [vector[part][start:stop] for part, start, stop in piece.runs]


def _store(vector: Sequence[np.ndarray], piece: Piece, runs: Sequence[Any]) -> None:
    """Write the runs of a piece into a vector."""
    with profiling.phase("store"):
        for (part, start, stop), run in zip(piece.runs, runs, strict=True):
            vector[part][start:stop] = run


def _aligned(size: int, dtype: Any) -> np.ndarray:
    """A vector aligned to a cache line, which a CPU device reads without a copy."""
    dtype = np.dtype(dtype)
    raw = np.zeros(size * dtype.itemsize + 64, np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + size * dtype.itemsize].view(dtype)
