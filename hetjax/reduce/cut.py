"""The sharded update over slow links: sums and parameters travel in 16 or 8 bits, with error feedback.

`hetjax.reduce.wire` has the formats and the arithmetic. Here stands when an error counts and who still owes one: a
process that has no samples any more, or is benched, adds what is left over to one last sum, uncut. All processes know
from the plans who that is. Fleets whose members come and go are refused (`hetjax.presets.check_elastic`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hetjax import profiling
from hetjax.reduce.exchange import Frames, Runs
from hetjax.reduce.sharded import HostCore, HostSharded, _store
from hetjax.reduce.sliced_update import OwnedPiece
from hetjax.reduce.trainable import trainable, with_trained
from hetjax.reduce.wire import FORMATS, Cut, quickest, slowest_seconds
from hetjax.sampling.order import PlannedStep
from hetjax.state import Deferred, State

log = logging.getLogger("hetjax")
Tree = Any


class HostCut(HostSharded):
    """Sums are cut on the way to the owners, and parameters come back as cut differences to those of the last step.

    Args:
        wire: 'bfloat16', 'int8', or 'auto' for the quickest, float32 included.
        *given: as `HostSharded`.
        left_over: what the cuts of an earlier run have left over (`State.more`), or None.
    """

    def __init__(self, wire: str, *given: Any, left_over: Tree = None):
        super().__init__(*given)
        cuttable = self.layout.dtype == np.float32
        if wire != "auto" and not cuttable:
            raise ValueError(
                f"wire={wire!r} cuts sums in float32, but those of this model are {np.dtype(self.layout.dtype)}. Leave "
                "it out."
            )
        self._owing: frozenset[int] = frozenset()  # processes that may have something left over
        self._lengths = [[stop - start for _, start, stop in piece.runs] for piece in self.pieces]
        self._use("float32" if wire == "auto" else wire)
        if wire == "auto":
            self.exchange.share_memory()
            if cuttable:
                self._use(quickest(lambda name: slowest_seconds(partial(self._exchange_once, name))))
        self._given_left = left_over

    def _use(self, wire: str) -> None:
        self.wire = wire
        self.cut = Cut(FORMATS[wire], self._lengths) if wire in FORMATS else None
        self.exchange.cut = frozenset(range(len(self.pieces)) if self.cut is not None else ())
        self.has_masters = self.cut is not None
        self._plain = range(0 if self.cut is not None else len(self.pieces))

    def place(self, core: Any) -> HostCore:
        """See `HostSharded`; what was left over goes to the owners, who add it to the first sum."""
        given, self._given_left = self._given_left, None
        if given is None or self.cut is None:
            return super().place(with_masters(core, given))
        placed = super().place(core)
        sums, differences = ([np.zeros(n, np.float32) for n in self.layout.grad_sizes] for _ in range(2))
        self._flatten(given["sums"], sums)
        self._flatten(given["differences"], differences)
        for k, owned in placed.owned.items():
            self.cut.left[k] = np.concatenate(self._piece_of(sums, k))
            owned.masters = [a + b for a, b in zip(owned.masters or [], self._piece_of(differences, k), strict=True)]
        self._owing = frozenset(self.owners)
        return placed

    def _piece_of(self, vector: Sequence[np.ndarray], k: int) -> Runs:
        return [vector[part][start:stop] for part, start, stop in self.pieces[k].runs]

    # -- a step --

    def contributors(self, step: PlannedStep) -> list[int]:
        """Processes with samples in a step, and those that send what they have left over for the last time."""
        return sorted({*super().contributors(step), *self._owing})

    def _computing(self, step: PlannedStep) -> set[int]:
        return set(self.workers.process_W[step.plan.counts_W > 0].tolist())

    def _frames(self, parts: Sequence[np.ndarray], step: PlannedStep, k: int) -> Sequence[Any]:
        runs, samples = self.exchange.runs_of(parts, k), int(step.plan.counts_W.sum())
        if self.cut is None or k not in self.exchange.cut:
            return runs
        with profiling.phase("cut"):
            if self.me in self._computing(step):
                return self.cut.encoded(k, runs, samples)
            return [self.cut.whole(k, runs, samples)]

    def _total(
        self, parts: Sequence[np.ndarray] | None, step: PlannedStep, senders: Sequence[int], k: int, total: Any = None
    ) -> Any:
        cut, samples, computing = self.cut, int(step.plan.counts_W.sum()), self._computing(step)
        if cut is None or k not in self.exchange.cut:
            return super()._total(parts, step, senders, k, total)

        def own() -> Runs:
            runs = self.exchange.runs_of(parts or [], k)
            with profiling.phase("cut"):
                return cut.split(k, cut.whole(k, runs, samples)) if k in cut.left else runs

        def read(frames: Frames, sender: int) -> Runs:
            with profiling.phase("cut"):
                return cut.decoded(k, frames, sender not in computing)

        return (total or self.exchange.total)(k, parts, senders, read, own)

    def _before_update(self, core: HostCore, k: int) -> Runs:
        masters = core.owned[k].masters
        return super()._before_update(core, k) if masters is None else masters

    def _store_own(
        self, new: list[np.ndarray], core: HostCore, owned: dict[int, OwnedPiece], k: int, params: Runs
    ) -> Sequence[Any]:
        if self.cut is None:
            return super()._store_own(new, core, owned, k, params)
        owned[k].masters = params
        with profiling.phase("cut"):
            frames = self.cut.differences(k, params, self._piece_of(core.vector, k))
        self._store_result(new, core, k, frames)
        return frames

    def _store_result(self, new: list[np.ndarray], core: HostCore, k: int, result: Sequence[Any]) -> None:
        if self.cut is None:
            super()._store_result(new, core, k, result)
            return
        with profiling.phase("cut"):
            moved = self.cut.moved(k, self._piece_of(core.vector, k), result)
        _store(new, self.pieces[k], moved)

    def _end(self, step: PlannedStep, applied: bool) -> None:
        if self.cut is None:
            return
        if not applied:
            self.cut.drop()
            return
        with profiling.phase("cut"):
            self.cut.commit()
        self._owing = frozenset(self._computing(step))

    def _exchange_once(self, wire: str) -> None:
        """One exchange of the model's size, without an effect."""
        self._use(wire)
        exchange, everyone = self.exchange, self.everyone
        others = [process for process in everyone if process != self.me]
        parts = [np.ones(size, np.float32) for size in self.layout.sizes]
        form, cut = FORMATS.get(wire), self.cut

        def frames_of(k: int) -> Sequence[Any]:
            runs = exchange.runs_of(parts, k)
            return form.encode(np.concatenate(runs)) if form is not None and k in exchange.cut else runs

        exchange.send(parts, np.zeros(1, np.float32), others, frames_of)
        exchange.tail(np.zeros(1, np.float32), everyone)
        read = None if cut is None else lambda k, frames, sender: cut.decoded(k, frames, False)
        for k in self._own_pieces():
            runs = exchange.total(k, parts, everyone, None if read is None else partial(read, k))
            sent = runs if form is None else form.encode(np.concatenate(runs))
            exchange.publish(k, np.zeros(1), sent, others, like_sums=k in self._plain)
        if self.state_piece is not None and exchange.owners[self.state_piece] == self.me:
            exchange.total(self.state_piece, parts, everyone)
        for k in range(len(self.pieces)):
            if exchange.owners[k] != self.me:
                _, came = exchange.result(k, like_sums=k in self._plain)
                if cut is not None:
                    cut.decoded(k, came, False)
        exchange.end()

    # -- what is saved --

    def view(self, core: HostCore, step: int, cursor: int) -> State:
        """See `HostSharded`; `State.more` holds what was left over."""
        state = super().view(core, step, cursor)
        left_over = Deferred(lambda: {"left_over": self._left_over(core)})
        return state if self.cut is None else replace(state, more=left_over)

    def _left_over(self, core: HostCore) -> Tree:
        """The sum of what all processes have left over of sums, and that of the owners' parameters; collective."""
        assert self.cut is not None
        exchange, cut = self.exchange, self.cut
        others = [process for process in self.everyone if process != self.me]
        sums, differences = ([np.zeros(n, np.float32) for n in self.layout.grad_sizes] for _ in range(2))
        zeros = [np.zeros(size, np.float32) for size in self.layout.sizes]
        runs_of = lambda k: cut.split(k, cut.left[k]) if k in cut.left else exchange.runs_of(zeros, k)
        travels_cut, exchange.cut = exchange.cut, frozenset()
        exchange.send(zeros, np.zeros(1, np.float32), others, runs_of)
        exchange.tail(np.zeros(1, np.float32), self.everyone)
        for k in range(len(exchange.owners)):
            if exchange.owners[k] != self.me:
                continue
            runs = exchange.total(k, zeros, self.everyone, own=partial(runs_of, k))
            if k < len(self.pieces):
                _store(sums, self.pieces[k], runs)
                exchange.publish(k, np.zeros(1), runs, others)
        for k in range(len(self.pieces)):
            if exchange.owners[k] != self.me:
                _store(sums, self.pieces[k], exchange.result(k)[1])
        exchange.cut = travels_cut
        exchange.end()
        for k, piece in enumerate(self.pieces):
            like = [jax.ShapeDtypeStruct((n,), np.float32) for n in self._lengths[k]]
            own = None
            if k in core.owned:
                masters = core.owned[k].masters
                assert masters is not None
                own = [np.asarray(a) - b for a, b in zip(masters, self._piece_of(core.vector, k), strict=True)]
            _store(differences, piece, self._shared(exchange.owners[k], own, like))
        return {"sums": self._float_tree(sums), "differences": self._float_tree(differences)}

    def _float_tree(self, vector: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The leaves of the trainable parameters in a vector."""
        leaves = zip(jax.tree.leaves(self.trained), self.layout.places, strict=True)
        return [vector[part][at : at + size].reshape(like.shape).copy() for like, (part, at, size) in leaves]


def with_masters(core: Any, left_over: Tree) -> Any:
    """The core for a run that cuts nothing, after one that did: with its masters, without its errors of sums.

    Args:
        core: parameters, model state, and more.
        left_over: `State.more["left_over"]`, or None.
    """
    if left_over is None:
        return core
    log.info("This run goes on with the masters of the earlier one. What its cuts left over of sums is dropped.")
    params, *rest = core
    leaves, tree = jax.tree.flatten(trainable(params))
    given = zip(leaves, left_over["differences"], strict=True)
    masters = [(np.asarray(leaf) + more).astype(leaf.dtype) for leaf, more in given]
    return with_trained(params, jax.tree.unflatten(tree, masters)), *rest
