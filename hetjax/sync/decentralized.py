"""Decentralized SGD: every worker has its own parameters and mixes them with its neighbors'.

D-PSGD (Lian et al., arXiv 1705.09056), mixing every F steps as RCD-SGD does (arXiv 2211.00839); with a budget, MATCHA
(Wang et al., arXiv 1905.09435) draws the links of each mixing step.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hetjax import processes
from hetjax.arguments import whole
from hetjax.devices.compile import compile_for, expected
from hetjax.devices.workers import device_kind
from hetjax.fleet.membership import kept_entries
from hetjax.reduce.base import Reduce, Replicas
from hetjax.reduce.finite import LARGE, NONFINITE, nonfinite_level
from hetjax.reduce.layout import HOST_SLOTS, SLOTS, Parts, StepReport, StepSums
from hetjax.reduce.trainable import trainable
from hetjax.reduce.transports import zero_parts
from hetjax.reduce.update import Update
from hetjax.sampling.order import PlannedStep
from hetjax.state import State
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.neighbors import FLAGS, ROWS, Arrays, Bundles, NeighborMessages, Sources
from hetjax.sync.replicas import average, spread, stacked
from hetjax.sync.topology import Mixing, Pairs, matcha, topology

log = logging.getLogger("hetjax")
Tree = Any
_LEVEL, _BAD = SLOTS.index("nonfinite_level"), SLOTS.index("bad_update")


class Decentralized(Sync):
    """The sync `decentralized`.

    With worker i at x_i in step k, the gradient g_i of its mean loss, and weights pi that sum to 1,

        y_i = sum_j W'_ij x_j  if k % F == 0 else x_i
        x_i <- y_i + update(b_i / (B pi_i)  g_i(x_i))
        answer: sum_i pi_i x_i

    W' is W with stationary weights pi (`Mixing.weighted`): the answer follows the updates weighted by pi, which is the
    gradient of all samples for any pi. With pi = b / B (`Mixing.shares`) workers take plain means. If W is not
    symmetric, pi is 1 / N: then the largest worker's steps are N b_i / B times as long, and the learning rate has to
    suit them (a ring with batches 4:2:1:1 and curvature 1 is stable up to 0.5 instead of 0.9). The published method
    uses plain means and pi = 1 / N, which is biased for unequal batches.

    Parameters move between neighbors only. Every step still sums two small vectors over all workers: loss, metrics and
    timings, which planning needs, and whether all updates were finite.

    Args:
        topology: 'ring', 'complete', a .json or .npy file with W, or W itself.
        mix_every: F, the number of steps from one mixing step to the next.
        matcha_budget: average share of the links that MATCHA uses; None mixes with W itself.
        faithful: use plain mean gradients and equal weights, as published.

    Raises:
        ValueError: If `matcha_budget` is not a share, or `mix_every` not a whole number of at least 1.
    """

    name = "decentralized"
    own_parameters = True

    def __init__(
        self,
        topology: str | Path | np.ndarray = "ring",
        mix_every: int = 1,
        matcha_budget: float | None = None,
        faithful: bool = False,
    ):
        if matcha_budget is not None and not 0 < matcha_budget <= 1:
            raise ValueError(
                f"matcha_budget is {matcha_budget}: expected the average share of links to use, above 0 and at most 1."
            )
        self.topology, self.mix_every = topology, whole("mix_every", mix_every, 1)
        self.matcha_budget, self.faithful = matcha_budget, faithful

    def mixing(self, workers: int) -> Mixing:
        """The mixing step for this number of workers: process 0's, as eigenvalues differ in the last bits of CPUs."""
        matrix, name = topology(self.topology, workers, kept_entries)
        if self.matcha_budget is None:
            return Mixing.of(matrix, name)
        mixing = matcha(matrix, self.matcha_budget, name)
        assert mixing.probability_R is not None
        weight_RxW, probability_R = processes.gather([mixing.weight_RxW.tolist(), mixing.probability_R.tolist()])[0]
        return replace(
            mixing, weight_RxW=np.array(weight_RxW).reshape(-1, workers), probability_R=np.array(probability_R)
        )

    def open(self, context: SyncContext, state: State) -> tuple[Reduce, list[Tree]]:
        mixing = self.mixing(len(context.workers))
        log.info(
            "Decentralized: %s over %d workers, mixing every %d steps in %s.",
            mixing.name, mixing.workers, self.mix_every,
            "one all-reduce" if mixing.uniform else f"{len(mixing.rounds)} exchanges between neighbors",
        )  # fmt: skip
        core_w = spread(state, context.workers)
        return NeighborReduce(context, core_w, mixing, self.mix_every, self.faithful), core_w

    def answer(self, state: State) -> State:
        return average(state)


@dataclass
class NeighborTail:
    """What a step leaves for its report."""

    values: np.ndarray  # sums over all workers: loss, weight, count, metrics
    slots_WxS: np.ndarray
    round: int  # of the messages between processes
    bad_w: list[jax.Array] = field(default_factory=list)  # own updates that were not finite; empty if there were none
    bad_W: np.ndarray | None = None  # those of all workers; None: not asked for yet


class NeighborReduce:
    """The reduce of decentralized SGD: every worker runs its own programs on its own device, of whatever kind.

    Its core is a list with one core per worker of this process, each with a leading axis of one. In a step, sums go to
    the host, where those of all workers are added in their order; parameters come from neighbors; then the update runs.
    It is compiled with and without mixing for each kind of device, before the first step.
    """

    name = "neighbors"

    def __init__(self, context: SyncContext, core_w: list[Tree], mixing: Mixing, every: int, faithful: bool):
        self.workers, self.layout, self.seed = context.workers, context.layout, context.seed
        self.mixing, self.every, self.faithful, self.undo = mixing, every, faithful, context.rule.undo
        self.finish, self.update = context.rule.finish(), Update(self._moved)
        self.bundles = Bundles(jax.tree.leaves(trainable(core_w[0][0])))
        self.messages = NeighborMessages(context.workers, self.bundles.sent)
        received_W = np.bincount([to for pairs in mixing.rounds for _, to in pairs], minlength=len(self.workers))
        self.most = int(received_W.max())  # the most neighbors that a worker hears from in a step
        self._begin_w: dict[bool, list[Any]] = {}
        self._update_w: dict[bool, list[Any]] = {}
        self._zeros_w = zero_parts(self.layout, self.workers.own)
        self.share_W = self.equal_W = np.full(mixing.workers, 1 / mixing.workers)  # the former: of the last step
        always = every == 1 and mixing.probability_R is None
        with expected():
            for mixes in (True,) if always else (True, False):
                self._compile(mixes, core_w[0])

    def _compile(self, mixes: bool, core: Tree) -> None:
        layout, sent, shape = self.layout, self.bundles.sent, jax.ShapeDtypeStruct
        parts = tuple(shape((1, size), layout.dtype) for size in layout.sizes)
        mixing: tuple[Any, ...] = ()
        if mixes:
            weights = shape((self.most,), jax.dtypes.canonicalize_dtype(np.float64))
            mixing = (sent,) if self.mixing.uniform else ([sent] * self.most, weights)
        own = jax.tree.leaves(trainable(core[0])) if mixes else []
        self._begin_w[mixes] = self._on_each(self._begin, (own, parts))
        arguments = core, parts, shape((4,), layout.dtype), mixing
        self._update_w[mixes] = self._on_each(self._on_worker, arguments, donate=() if self.undo else (0,))

    def _on_each(self, fn: Callable, arguments: tuple, donate: tuple[int, ...] = ()) -> list[Any]:
        """The program for every own worker: compiled once per kind of device."""
        programs: dict[jax.Device, Any] = {}
        for kind in self.workers.own_kinds:
            devices = [device for device in self.workers.own if device_kind(device) == kind]
            programs.update(zip(devices, compile_for(fn, arguments, devices, donate), strict=True))
        return [programs[device] for device in self.workers.own]

    # -- on a worker --

    def _begin(self, leaves: list[jax.Array], parts_1: Parts) -> tuple[jax.Array, list[jax.Array]]:
        """What the host reads of a worker's sums, with their `nonfinite_level`; and its small parameters to send."""
        parts = tuple(part[0] for part in parts_1)
        row = jnp.concatenate([self.layout.tail(parts), nonfinite_level(parts).astype(self.layout.dtype)[None]])
        return row, self.bundles.concatenated(leaves) if leaves else []

    def _on_worker(self, core_1: Tree, parts_1: Parts, scalars: jax.Array, mixing: tuple) -> tuple[Tree, jax.Array]:
        params_1 = self._mixed(trainable(core_1[0]), *mixing)
        core, params, parts = jax.tree.map(lambda x: x[0], (core_1, params_1, parts_1))
        weight, total, loss, level = scalars
        moved, bad = self.update(core, (params, self.layout.unpack(parts), weight, total, loss), total, level)
        return jax.tree.map(lambda x: x[None], moved), bad[None]

    def _moved(self, core: Tree, given: tuple[Tree, StepSums, jax.Array, jax.Array, jax.Array]) -> Tree:
        """One worker's update from its own sums. Without samples its gradient is zero; momentum and schedule continue.

        An optimizer that takes the loss gets `loss`, the mean over all workers.
        """
        params, own, factor, total, loss = given
        has_samples = own.weight > 0
        factor = factor / len(self.workers) if self.faithful else factor  # shares are 1 / N
        divisor = jnp.where(has_samples, own.weight, 1) if self.faithful else total
        sums = replace(own, grads=jax.tree.map(lambda g: g * factor, own.grads), weight=divisor, loss=loss * divisor)
        params, model_state, opt_state, ema = self.finish((params, *core[1:]), sums)
        return params, jax.tree.map(partial(jnp.where, has_samples), model_state, core[1]), opt_state, ema

    def _mixed(self, params: Tree, came: Any = None, weight_D: jax.Array | None = None) -> Tree:
        """Compute y = W' x from what came: nothing, the mean if all W_ij = 1/N, otherwise the neighbors' parameters.

        y_i = x_i + sum over rounds r of weight_R[r] (x_sender(r, i) - x_i)         (see `Mixing`)
        """
        if came is None:
            return params
        leaves, tree = jax.tree.flatten(params)
        if weight_D is None:
            return jax.tree.unflatten(tree, self.bundles.leaves(came))
        own = self.bundles.of(leaves)
        mixed = wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in own]
        for received, weight in zip(came, weight_D, strict=True):
            mixed = [y + weight.astype(y.dtype) * (c - x) for y, c, x in zip(mixed, received, wide, strict=True)]
        mixed = [y.astype(x.dtype) for y, x in zip(mixed, own, strict=True)]
        return jax.tree.unflatten(tree, self.bundles.leaves(mixed))

    # -- on the host --

    def __call__(
        self, core_w: list[Tree], parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[list[Tree], NeighborTail]:
        parts_w = [parts or zeros for parts, zeros in zip(parts_w, self._zeros_w, strict=True)]
        due = step.number % self.every == 0  # k % F == 0
        active_R = self.mixing.active(self.seed, step.number) & due
        self.share_W = self.equal_W if self.faithful else self.mixing.shares(step.plan.counts_W)
        mixes = due and (self.mixing.uniform or bool(active_R.any()))
        leaves_w = [jax.tree.leaves(trainable(core[0])) if mixes else [] for core in core_w]
        begun = [run(leaves, parts) for run, leaves, parts in zip(self._begin_w[mixes], leaves_w, parts_w, strict=True)]
        sent_w = [
            [*(leaves[k] for k in self.bundles.large), *small]
            for leaves, (_, small) in zip(leaves_w, begun, strict=True)
            if mixes
        ]
        tail, given_w = self._exchange([row for row, _ in begun], slots_w, sent_w, active_R)
        level = float(tail.slots_WxS[:, _LEVEL].sum())
        if level >= NONFINITE or not tail.values[1] > 0:
            return core_w, tail
        scalars_w = self._scalars(tail.values, level, step)
        moved_w = [
            self._update_w[bool(given)][w](core, parts, scalars, given)
            for w, (core, parts, scalars, given) in enumerate(zip(core_w, parts_w, scalars_w, given_w, strict=True))
        ]
        tail.bad_w = [bad for _, bad in moved_w]
        if self.undo and self._bad(tail).any():  # if one is, none is applied
            return core_w, tail
        return [core for core, _ in moved_w], tail

    def _exchange(
        self, row_w: list[jax.Array], slots_w: Sequence[list[float]], sent_w: list[Arrays], active_R: np.ndarray
    ) -> tuple[NeighborTail, list[tuple]]:
        """Add up the rows of all workers, and fetch what each own worker mixes with: the last argument of its program.

        Everything is started before anything is waited for. `sent_w` is empty in steps without mixing.
        """
        messages, round_ = self.messages, self.messages.begin()
        own = dict(zip(self.workers.local, sent_w, strict=True)) if sent_w else {}
        pairs_R = [pairs if active else () for pairs, active in zip(self.mixing.rounds, active_R, strict=True)]
        weight_RxW = self.mixing.weighted(self.share_W)
        sources_w = [self._sources(worker, pairs_R, weight_RxW) for worker in self.workers.local] if own else []
        copied_w = messages.copy(own, sources_w) if own else []
        own_wxK = np.column_stack([np.stack(row_w), np.asarray(slots_w, row_w[0].dtype)])
        messages.send_vectors(own_wxK, ROWS, round_)
        messages.send(own, itertools.chain(*pairs_R), round_)
        row_WxK = messages.receive_vectors(own_wxK, ROWS, round_)
        values = functools.reduce(np.add, row_WxK[:, : self.layout.values])  # in the order of workers
        slots_WxS = np.zeros((len(row_WxK), len(SLOTS)), row_WxK.dtype)
        slots_WxS[:, _LEVEL] = row_WxK[:, self.layout.values]
        slots_WxS[:, :HOST_SLOTS] = row_WxK[:, self.layout.values + 1 :]
        tail = NeighborTail(values, slots_WxS, round_)
        if not sent_w:
            return tail, [()] * len(row_w)
        if self.mixing.uniform:
            return tail, [(messages.mean(sent_w, self.share_W),)] * len(row_w)
        remote = {sender for sources in sources_w for sender, _ in sources if sender not in own}
        came = messages.receive(sorted(remote), round_)
        given_w: list[tuple] = []
        for sources, copied in zip(sources_w, copied_w, strict=True):
            received = [came[sender] if sender in came else copied[sender] for sender, _ in sources]
            padding = self.most - len(sources)  # the program takes as many arrays on every worker
            weights = np.array([weight for _, weight in sources] + [0.0] * padding)
            given_w.append(([*received, *received[:1] * padding], weights) if sources else ())
        return tail, given_w

    def _sources(self, worker: int, pairs_R: Sequence[Pairs], weight_RxW: np.ndarray) -> Sources:
        """The neighbors that a worker hears from, in the order of the rounds, and their weights."""
        return [
            (sender, float(weight_RxW[r, worker]))
            for r, pairs in enumerate(pairs_R)
            for sender, receiver in pairs
            if receiver == worker
        ]

    def _scalars(self, values: np.ndarray, level: float, step: PlannedStep) -> list[np.ndarray]:
        """Of each own worker: weight of its gradient, total weight, mean loss, and the level of all sums."""
        weights_W = np.ones(len(self.workers)) if step.plan.weights_W is None else step.plan.weights_W
        total, loss = values[1], values[0] / values[1]
        level = max(level, LARGE) if self.undo else level  # an update that may be undone is checked in full
        factor_W = weights_W / self.share_W
        return [np.array([factor_W[i], total, loss, level], self.layout.dtype) for i in self.workers.local]

    def _bad(self, tail: NeighborTail) -> np.ndarray:
        """Whether each worker's update was not finite. Collective: all processes know which workers were updated."""
        if not tail.bad_w:
            return np.zeros(len(self.workers), bool)
        if tail.bad_W is None:
            own_wx1 = np.array([np.asarray(bad) for bad in tail.bad_w])
            self.messages.send_vectors(own_wx1, FLAGS, tail.round)
            tail.bad_W = self.messages.receive_vectors(own_wx1, FLAGS, tail.round)[:, 0]
        return tail.bad_W

    def read(self, tail: NeighborTail) -> StepReport:
        tail.slots_WxS[:, _BAD] = self._bad(tail)
        vector = np.concatenate([tail.values, tail.slots_WxS.ravel()])
        return StepReport.read(self.layout, vector, len(self.workers))

    def replicas(self, core_w: list[Tree], tail: NeighborTail | None) -> Replicas:
        leaves_w = [jax.tree.leaves(core[:2]) for core in core_w]
        ready_w = [leaves[0] for leaves in leaves_w] if tail is None or not tail.bad_w else tail.bad_w
        stack = lambda *pieces: self.workers.stack(pieces)
        return Replicas(leaves_w, ready_w, lambda: jax.tree.map(stack, *(core[:2] for core in core_w)))

    def state(self, core_w: list[Tree], step: int, cursor: int) -> State:
        first, count = self.workers.local[0], len(self.workers)
        core = jax.tree.map(lambda *pieces: stacked(pieces, first, count), *core_w)
        more = {"shares": self.share_W}  # see `average`
        return replace(State.of(core, step, cursor), replicas=count, more=more)
