"""Decentralized SGD: every worker has its own parameters and mixes them with its neighbors'.

D-PSGD (Lian et al., arXiv 1705.09056), mixing every F steps as RCD-SGD does (arXiv 2211.00839); with a budget, MATCHA
(Wang et al., arXiv 1905.09435) draws the links of each mixing step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from hetjax.arguments import whole
from hetjax.devices.compile import compile_over, expected
from hetjax.devices.workers import AXIS
from hetjax.fleet.agree import gather
from hetjax.fleet.membership import kept_entries
from hetjax.reduce.base import Reduce, Replicas
from hetjax.reduce.layout import HOST_SLOTS, Parts, StepReport, StepSums, level_of_all, with_bad_update
from hetjax.reduce.trainable import trainable
from hetjax.reduce.transports import sum_parts
from hetjax.reduce.update import Update
from hetjax.sampling.order import PlannedStep
from hetjax.state import State
from hetjax.sync.base import Sync, SyncContext
from hetjax.sync.replicas import average, replica_mean, spread
from hetjax.sync.topology import Mixing, matcha, topology

log = logging.getLogger("hetjax")
Tree = Any
_LARGE = 2**14  # elements: smaller arrays are sent together


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
        weight_RxW, probability_R = gather([mixing.weight_RxW.tolist(), mixing.probability_R.tolist()])[0]
        return replace(
            mixing, weight_RxW=np.array(weight_RxW).reshape(-1, workers), probability_R=np.array(probability_R)
        )

    def open(self, context: SyncContext, state: State) -> tuple[Reduce, Any]:
        kinds = context.workers.kinds
        if len(kinds) > 1 or context.transport == "hub":
            raise ValueError(
                "Decentralized workers exchange parameters in one program over all devices, which needs devices of one "
                f"kind and transport 'psum' or 'auto'; the devices are {', '.join(kinds)} with transport "
                f"{context.transport!r}. Use sync='allreduce'."
            )
        mixing = self.mixing(len(context.workers))
        log.info(
            "Decentralized: %s over %d workers, mixing every %d steps in %s.",
            mixing.name, mixing.workers, self.mix_every,
            "one all-reduce" if mixing.uniform else f"{len(mixing.rounds)} exchanges between neighbors",
        )  # fmt: skip
        core = spread(state, context.workers)
        return NeighborReduce(context, core, mixing, self.mix_every, self.faithful), core

    def answer(self, state: State) -> State:
        return average(state)


class NeighborReduce:
    """The reduce of decentralized SGD: two programs, with and without mixing, compiled before the first step."""

    name = "neighbors"

    def __init__(self, context: SyncContext, core: Tree, mixing: Mixing, every: int, faithful: bool):
        self.workers, self.layout, self.seed = context.workers, context.layout, context.seed
        self.mixing, self.every, self.faithful = mixing, every, faithful
        self.share_W = self.equal_W = np.full(mixing.workers, 1 / mixing.workers)  # the former: of the last step
        self.scalar_type = jax.dtypes.canonicalize_dtype(np.float64)
        self.finish, self.update = context.rule.finish(), Update(self._moved, context.rule.undo)
        always = every == 1 and mixing.probability_R is None
        self.mixing_step = self._compile(core, mixes=True)
        self.local_step = self.mixing_step if always else self._compile(core, mixes=False)

    def _compile(self, core: Tree, mixes: bool) -> Any:
        program = jax.shard_map(
            partial(self._on_worker, mixes),
            mesh=self.workers.mesh,
            in_specs=(P(AXIS), P(AXIS), P(AXIS)),
            out_specs=(P(AXIS), P()),
            check_vma=False,
        )
        wide = lambda size, dtype: jax.ShapeDtypeStruct((len(self.workers), size), dtype, sharding=self.workers.sharded)
        parts = tuple(wide(size, self.layout.dtype) for size in self.layout.sizes)
        scalars = wide(HOST_SLOTS + 2 + 2 * len(self.mixing.rounds), self.scalar_type)  # see `__call__`
        with expected():
            return compile_over(program, (core, parts, scalars), self.workers.devices, donate=self.update.donate)

    # -- on a worker --

    def _on_worker(self, mixes: bool, core_1: Tree, parts_1: Parts, scalars_1xS: jax.Array) -> tuple[Tree, jax.Array]:
        core, parts, scalars = jax.tree.map(lambda x: x[0], (core_1, parts_1, scalars_1xS))
        slots, (weight, share), rest = scalars[:HOST_SLOTS], scalars[HOST_SLOTS : HOST_SLOTS + 2], HOST_SLOTS + 2
        active_R, weight_R = jnp.split(scalars[rest:], 2)
        layout, count = self.layout, len(self.workers)
        sent = layout.outgoing(parts, slots, jax.lax.axis_index(AXIS), count)
        (tail,) = sum_parts((layout.tail(sent),), self.workers)
        trained = trainable(core[0])
        params = self._mixed(trained, share, active_R, weight_R) if mixes else trained
        total = tail[1]  # global weight; tail[0] is the loss
        moved, bad_W = self.update(
            core,
            (params, layout.unpack(parts), (weight / share).astype(layout.dtype), total, tail[0] / total),
            total,
            level_of_all(tail, count),
            share=self._bad_of_all,
        )
        return jax.tree.map(lambda x: x[None], moved), with_bad_update(tail, count, bad_W)

    def _bad_of_all(self, bad: jax.Array) -> jax.Array:
        """Whether each worker's update was not finite, known to all: if one is, none is applied."""
        own_W = jnp.zeros(len(self.workers), self.layout.dtype).at[jax.lax.axis_index(AXIS)].set(bad)
        return sum_parts((own_W,), self.workers)[0] > 0

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

    def _mixed(self, params: Tree, share: jax.Array, active_R: jax.Array, weight_R: jax.Array) -> Tree:
        """Compute y = W' x: by one weighted all-reduce if all W_ij = 1/N, otherwise by one exchange per round.

        y_i = x_i + sum over rounds r of weight_R[r] (x_sender(r, i) - x_i)         (see `Mixing`)
        """
        widened = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.mixing.uniform:
            total = partial(jax.lax.psum, axis_name=AXIS)
            return jax.tree.map(lambda x: replica_mean(x, total, share=share), params)
        bundles, undo = _bundled(params)
        mixed = wide = [widened(x) for x in bundles]
        for r, pairs in enumerate(self.mixing.rounds):

            def exchanged(mixed: list[jax.Array], r: int = r, pairs: Any = pairs) -> list[jax.Array]:
                received = [jax.lax.ppermute(x, AXIS, pairs) for x in bundles]
                weight = weight_R[r]
                return [y + weight.astype(y.dtype) * (c - x) for y, c, x in zip(mixed, received, wide, strict=True)]

            if self.mixing.probability_R is None:
                mixed = exchanged(mixed)
            else:  # the same draw on all workers: a ppermute must be entered by all or none
                mixed = jax.lax.cond(active_R[r] > 0, exchanged, lambda mixed: mixed, mixed)
        return undo([y.astype(x.dtype) for y, x in zip(mixed, bundles, strict=True)])

    # -- on the host --

    def __call__(
        self, core: Tree, parts_w: Sequence[Parts], slots_w: Sequence[list[float]], step: PlannedStep
    ) -> tuple[Tree, jax.Array]:
        parts = tuple(self.workers.stack(part) for part in zip(*parts_w, strict=True))
        due = step.number % self.every == 0  # k % F == 0
        active_R = self.mixing.active(self.seed, step.number) & due
        counts_W, weights_W = step.plan.counts_W, step.plan.weights_W
        share_W = self.share_W = self.equal_W if self.faithful else self.mixing.shares(counts_W)
        weight_RxW = self.mixing.weighted(share_W)
        weight_w = [1.0 if weights_W is None else float(weights_W[i]) for i in self.workers.local]
        scalars_w = [
            np.array([*own, weight, share_W[i], *active_R, *weight_RxW[:, i]], self.scalar_type)
            for i, own, weight in zip(self.workers.local, slots_w, weight_w, strict=True)
        ]
        run = self.mixing_step if due and (self.mixing.uniform or active_R.any()) else self.local_step
        return run(core, parts, self.workers.from_host(scalars_w))

    def read(self, tail: jax.Array) -> StepReport:
        return StepReport.read(self.layout, np.asarray(tail.addressable_data(0)), len(self.workers))

    def replicas(self, core: Tree, tail: jax.Array | None) -> Replicas:
        ready = jax.tree.leaves(core)[0] if tail is None else tail
        return Replicas(self.workers.copies(jax.tree.leaves(core[:2])), self.workers.pieces(ready), lambda: core[:2])

    def state(self, core: Tree, step: int, cursor: int) -> State:
        more = {"shares": self.share_W}  # see `average`
        return replace(State.of(core, step, cursor), replicas=len(self.workers), more=more)


def _bundled(tree: Tree) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Tree]]:
    """A few flat arrays to send instead of many leaves, and the inverse; small leaves of a dtype are concatenated."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        groups.setdefault(index if leaf.size >= _LARGE else leaf.dtype, []).append(index)
    bundles = [jnp.concatenate([jnp.ravel(leaves[k]) for k in group]) for group in groups.values()]

    def undo(bundles: list[jax.Array]) -> Tree:
        found: list[Any] = [None] * len(leaves)
        for bundle, group in zip(bundles, groups.values(), strict=True):
            cuts = np.cumsum([leaves[k].size for k in group])[:-1]
            for k, part in zip(group, jnp.split(bundle, cuts), strict=True):
                found[k] = part.reshape(leaves[k].shape)
        return jax.tree.unflatten(structure, found)

    return bundles, undo
